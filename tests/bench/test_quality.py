"""The quality benchmark kills, resumes, counts and judges; and its verdicts can be bad."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args

import pytest
from launcher import run_world
from rich.console import Console

from benchmarks import quality
from benchmarks.__main__ import PROGRAM
from benchmarks.quality_fit import CASES, QUICK, Case, Loss, Scale, System
from benchmarks.quality_runs import TOLERANCE, QualityRun, QualityVerdict, judge, run_all
from lightning_moe_ckpt.cli import run

PARTIAL = Case(system="partial", loss="node")


def _alone(work: Any) -> Any:
    """What `work` returns in a process of its own, which may fork."""
    return run_world(1, lambda _: work(), process_group=False, timeout=timedelta(minutes=4))[0]


def _quiet(what: str, done: int, total: int) -> None:
    """No progress is shown."""


@pytest.mark.soak
def test_runs_are_killed_resumed_and_written_down(tmp_path: Path) -> None:
    """Exact checkpoints end in equal bits; partial ones lose tokens; document and picture say so."""
    argv = ["quality", "--json", "--quality-quick", "--quality-seeds", "1", "--quality-out", str(tmp_path)]

    def work() -> tuple[int, str]:
        with redirect_stdout(io.StringIO()) as out:
            status = run(
                PROGRAM, "benchmarks", [*argv, *(f"--quality-policies={each}" for each in ("sparse", "ablation"))]
            )
        return status, out.getvalue()

    status, out = _alone(work)
    assert status == 0
    rows = json.loads(out)["quality"]
    assert [row["system"] for row in rows] == ["none", "control", "sparse", "ablation"]
    clean, control, sparse, lossy = (row["runs"][0] for row in rows)
    assert (sparse["identical"], sparse["curve"], rows[2]["verdict"]) == (True, clean["curve"], "pass")
    assert control["curve"] != clean["curve"], "a rounding is seen"
    assert 0 < clean["dropped"] < 1, "the capacity binds"
    assert len(lossy["resumed"]) == len(lossy["killed_at"]) == QUICK.faults
    assert 0 < lossy["lost"] < lossy["processed"]
    assert json.loads((tmp_path / "quality.json").read_text())["quality"] == rows
    assert (tmp_path / "quality.png").stat().st_size > 10_000


def test_lost_tokens_do_not_depend_on_how_many_generations_storage_keeps() -> None:
    """Experts come from generations that are kept for them alone, whose tokens are known all the same."""

    def lost(keep: int) -> tuple[int, int]:
        scale = replace(QUICK, keep=keep)
        (run,) = run_all([PARTIAL], [1], scale, jobs=1, folder=None, accelerator="cpu", progress=_quiet)
        return run.lost, run.lossy_faults

    few, many = _alone(lambda: (lost(1), lost(100)))
    assert few == many
    assert few[0] > 0


def _run(
    system: System, final: float, *, seed: int = 1, loss: Loss = "node", identical: bool | None = None
) -> QualityRun:
    return QualityRun(
        system=system, loss=loss, boosted=False, seed=seed, curve=[(10, 4.0), (20, final)], resumed=[], killed_at=[5],
        identical=identical, skew=0.1, dropped=0.1, plt=0.01, mlt=0.02, k=None, lossy_faults=1, after_faults=[], lost=1, processed=100,
        captured=0.2, persisted=0.1, boosted_steps=0, repaid=0, seconds=1.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("system", "final", "identical", "wanted"),
    [
        ("sparse", 3.0, True, "pass"),
        ("sparse", 3.0, False, "FAIL"),
        ("differential", 3.0, False, "FAIL"),
        ("bf16", 3.0 * (1 + 1.1 * TOLERANCE), None, "FAIL"),
        ("partial", 3.0 * (1 + 0.9 * TOLERANCE), None, "pass"),
        ("partial", 3.0 * (1 + 1.1 * TOLERANCE), None, "FAIL"),
        ("ablation", 3.0 * (1 + 1.1 * TOLERANCE), None, "fails, as it should"),
        ("ablation", 3.0, None, "PASSES, but should not"),
    ],
)
def test_verdicts_can_be_bad(system: System, final: float, identical: bool | None, wanted: QualityVerdict) -> None:
    """An exact policy has to have equal bits, a partial one the tolerance, and the ablation more than that."""
    runs = [_run("none", 3.0, loss="nothing"), _run("control", 3.001, loss="nothing")]
    figures = judge([*runs, _run(system, final, identical=identical)])
    assert [figure.verdict for figure in figures] == ["reference", "reference", wanted]


def test_the_median_seed_decides_and_chaos_widens_the_margin() -> None:
    """One bad seed of three is no failure; and no policy can be closer than two fault-free runs are."""
    clean = [_run("none", 3.0, seed=seed, loss="nothing") for seed in (1, 2, 3)]
    lossy = [_run("partial", final, seed=seed) for seed, final in ((1, 3.3), (2, 3.0), (3, 3.01))]
    calm = [_run("control", 3.0, seed=seed, loss="nothing") for seed in (1, 2, 3)]
    wild = [*calm[:2], _run("control", 2.97, seed=3, loss="nothing")]
    assert [each.verdict for each in judge([*clean, *calm, *lossy])][2:] == ["pass"]
    assert judge([*clean, *calm, *lossy])[2].margin == TOLERANCE
    assert judge([*clean, *wild, *lossy])[2].margin == pytest.approx(0.01)
    shown = Console(width=220, file=io.StringIO(), record=True)
    shown.print(quality.table(judge([*clean, *wild, *lossy])))
    assert "pass (1.00%)" in shown.export_text()


def test_faults_are_the_same_for_all_policies_of_a_seed() -> None:
    """In order, apart, and others for another seed; every policy of the issue has a row."""
    scale = Scale()
    assert scale.kill_steps(1) == scale.kill_steps(1) != scale.kill_steps(2)
    for seed in range(20):
        steps = scale.kill_steps(seed)
        assert steps == sorted(set(steps))
        assert len(steps) == scale.faults
        assert 0 < steps[0] < steps[-1] < scale.steps
    assert {case.system for case in CASES} == set(get_args(System))
    assert {case.boosted for case in CASES if case.system == "selective"} == {False, True}
