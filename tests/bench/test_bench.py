"""`moe-ckpt bench` measures what it says, tiny; and the command line does what command lines do.

An ordinary run measures what checkpoints add and what compiled code takes; a soak runs every benchmark.
"""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from launcher import run_world
from rich.console import Console, RenderableType

import lightning_moe_ckpt
from benchmarks import (
    breakdown,
    in_place,
    native,
    native_goals,
    recovery,
    replicas,
    scale,
    selection,
    strategy_breakdown,
)
from benchmarks.__main__ import PROGRAM
from benchmarks.bubbles import BubbleFigure
from benchmarks.failure import MeasuredFailure
from benchmarks.in_place import FailureFigure
from benchmarks.peers_saving import OTHERS
from benchmarks.persist import CPU, LOCAL, OBJECT, STEP, PersistFigure
from benchmarks.recovery import CASES, HostRestoreFigure, Recovery, RecoveryFigure
from benchmarks.scale import MEASURED as MEASURED_BY_SCALE
from benchmarks.scale import Growth, ScaleFigure, sizes_of
from benchmarks.selection import SelectionFigure
from lightning_moe_ckpt.benchmarks import _overhead
from lightning_moe_ckpt.benchmarks._benchmark import (
    Machine,
    accelerator_for,
    rounds_of,
    show_table,
    table_of,
)
from lightning_moe_ckpt.benchmarks._overhead import OverheadFigure, chosen_variants
from lightning_moe_ckpt.benchmarks._strategy import StrategyFigure
from lightning_moe_ckpt.cli import main, run
from lightning_moe_ckpt.errors import ConfigurationError

STEPS = 8
PAGES = "glibc.malloc.hugetlb"
TINY_FITS = [
    *("--rounds", "2", "--steps", str(STEPS), "--settle", "4", "--warm-up", "8"),
    *("--blocks", "1", "--dim", "32", "--experts", "4", "--batch-size", "2"),
]
MEASURED = ["sparse4-memory", "sparse4", "dense1", "dense4"]
TINY = {
    "recovery": (
        *(
            "--kills",
            "1",
            "--host-kills",
            "1",
            "--host-megabytes",
            "1",
            "--nodes",
            "2",
            "--every",
            "2",
            "--recovery-blocks",
            "1",
            "--recovery-dim",
            "32",
        ),
        *("--systems", "dense", "--systems", "dcp"),
    ),
    "in-place": (
        "--in-place-ranks",
        "2",
        "--in-place-kills",
        "1",
        "--launchers",
        "replaced",
        "--launchers",
        "torchrun",
    ),
    "pipeline": (
        *("--stages", "2", "--micro-batches", "2", "--stage-ms", "2", "--pipeline-kills", "1"),
        *("--pipeline-systems", "in_place", "--pipeline-systems", "alone"),
    ),
    "bubbles": (
        *("--bubble-settings", "devices", "--bubble-megabytes", "1", "--bubble-layers", "1", "--bubble-samples", "2"),
        *("--bubble-steps", "40"),
    ),
    "quality": (
        *("--quality-quick", "--quality-seeds", "1"),
        *("--quality-out", str(Path(tempfile.gettempdir()) / "moe-ckpt-test-quality")),
    ),
    "papers": ("--only", "pec-5a"),
    "replicas": ("--replica-ranks", "2", "--replica-kills", "1"),
    "persist": (
        *("--generation-megabytes", "1", "--segments", "2", "--persist-rounds", "2", "--persist-steps", "12"),
        *("--persist-dim", "32"),
    ),
    "overhead": (*TINY_FITS, "--variants", ",".join(MEASURED)),
    "strategy": (*TINY_FITS, "--strategy-ranks", "1"),
    "strategy-breakdown": (*TINY_FITS, "--strategy-ranks", "2"),
    "breakdown": (*TINY_FITS, "--variants", "dense1"),
    "differential": (
        *("--differential-steps", "10", "--differential-every", "4", "--differential-dim", "32"),
        *("--differential-elements", "1000", "--differential-repeats", "1"),
    ),
    "selection": ("--routers", "steep", "--shares", "0.5", "--selection-steps", "16"),
    "native-goals": ("--goal-megabytes", "1", "--goal-repeats", "1", "--elements", "200000"),
    "scale": ("--sizes", "16,32", "--scale-rounds", "1", "--scale-steps", "8"),
    "native": ("--slices", "50", "--repeats", "1", "--megabytes", "1"),
}
MEASURED_BY_USERS = TINY.keys() - PROGRAM.commands.keys()


def _run(argv: list[str]) -> tuple[int, str, str]:
    """Exit status, output and errors of the command in a process of its own: fits leave threads behind."""

    def work(_: int) -> tuple[int, str, str]:
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
            status = main(argv) if argv[:1] != ["benchmarks"] else run(PROGRAM, "benchmarks", argv[1:])
        return status, out.getvalue(), err.getvalue()

    return run_world(1, work, process_group=False, timeout=timedelta(minutes=4))[0]


WITHOUT_LIGHTNING = f"""
import sys, types
sys.modules["lightning_moe_ckpt"] = package = types.ModuleType("lightning_moe_ckpt")
package.__path__ = [{str(Path(lightning_moe_ckpt.__file__).parent)!r}]
"""
"""Put before the program that is timed while it loads the native part: what the package itself imports takes seconds."""


@cache
def _document(name: str) -> dict[str, Any]:
    """What `moe-ckpt bench NAME --json` writes, or `python -m benchmarks NAME --json`; each benchmark is run once."""
    chosen = MEASURED_BY_USERS if name == "all" else [name]
    options = [option for each in chosen for option in TINY[each]]
    with patch.object(native_goals, "_LOADS", WITHOUT_LIGHTNING + native_goals._LOADS):
        status, out, err = _run(
            ["benchmarks" if name in PROGRAM.commands and name != "all" else "bench", name, "--json", *options]
        )
    assert status == 0, err
    parsed: dict[str, Any] = json.loads(out)
    return parsed


@pytest.mark.soak
def test_all_of_them_can_be_asked_for_at_once() -> None:
    """One document has the machine and every benchmark."""
    document = _document("all")
    assert sorted(document) == sorted(["machine", "accelerator", *MEASURED_BY_USERS])
    assert all(document[name] for name in MEASURED_BY_USERS)


@pytest.fixture
def overhead() -> dict[str, OverheadFigure]:
    """Figures of training by variant."""
    return {row["variant"]: OverheadFigure(**row) for row in _document("overhead")["overhead"]}


def _shown(table: RenderableType) -> str:
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(table)
    return console.export_text()


def test_figures_come_with_the_machine_they_hold_for() -> None:
    """Hardware, date and versions are part of the document."""
    machine = _document("native")["machine"]
    assert Machine(**machine).num_cores == Machine.read().num_cores
    assert machine["cpu"]
    assert machine["date"].endswith("+00:00")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the C library has no such setting")
@pytest.mark.parametrize(("given", "large"), [("", True), ("glibc.malloc.check=0", True), (f"{PAGES}=0", False)])
def test_a_benchmark_takes_large_pages_unless_told_otherwise(given: str, large: bool) -> None:
    """The process that measures has them from its start, and what the environment asked for besides."""
    code = f"{WITHOUT_LIGHTNING}import os; from lightning_moe_ckpt.cli import take_large_pages as take; take(); print(os.environ['GLIBC_TUNABLES'])"
    environment = {**os.environ, "GLIBC_TUNABLES": given}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert (f"{PAGES}=1" in done.stdout) == large
    assert done.stdout.startswith(given)


def test_what_checkpoints_add_is_relative_to_training_without(overhead: dict[str, OverheadFigure]) -> None:
    """Without checkpoints nothing is added and nothing waits; each variant has a figure of every round."""
    assert [*overhead] == ["none", *MEASURED]
    none = overhead["none"]
    assert (none.added_seconds, none.throughput, none.stall_seconds) == (0.0, 1.0, {})
    for figure in overhead.values():
        low, high = figure.added_range
        assert low <= figure.added_seconds <= high
        assert none.mean_seconds > 0
        assert len(figure.rounds) == (2 * len(MEASURED) if figure is none else 2), "one before each of the others"
        assert 0 < 0.99 * figure.thread_seconds <= figure.process_seconds, "the clocks have different grains"
        assert (figure.overhead_seconds > 0) == (figure is not none)
        assert figure.metered == {}


@pytest.mark.soak
def test_a_strategy_is_measured_beside_ddp() -> None:
    """Both reductions and a second DDP have a ratio from each round; parts are those of the reducer."""
    figures = [StrategyFigure(**row) for row in _document("strategy-breakdown")["strategy-breakdown"]]
    assert [figure.strategy for figure in figures] == ["ordered", "allreduce", "ddp again"]
    for figure in figures:
        low, high = figure.ratio_range
        assert 0 < low <= figure.ratio <= high
        assert figure.cpu_ratio > 0
        parts = strategy_breakdown.parts_of(figure.metered)
        assert (parts != {}) == (figure.strategy != "ddp again")
        assert all(seconds >= 0 for seconds in parts.values())
    shown = _shown(strategy_breakdown.table(figures))
    assert "at most 1.02 times" in shown
    assert sum(line.rstrip().endswith("met") for line in shown.splitlines()) == 2, "each reduction has an outcome"


def test_only_steps_after_the_warm_up_are_measured(overhead: dict[str, OverheadFigure]) -> None:
    """A dense generation per step or four steps, a sparse one per window, of the steps measured in two rounds.

    With storage there is a target, which may put them further apart from the 20th step on.
    """
    taken = {name: overhead[name].generations_complete for name in MEASURED}
    most = {**dict.fromkeys(MEASURED, 0), "sparse4-memory": 4, "sparse4": 4, "dense1": 16, "dense4": 4}
    assert most["sparse4-memory"] - 1 <= taken["sparse4-memory"], "the last may be complete a moment behind its step"
    assert all(min(most[name], 1) <= taken[name] <= most[name] for name in MEASURED)
    assert taken["dense1"] >= STEPS, "all steps of the first round come before that"
    assert "dense" not in overhead["sparse4"].stall_seconds, "generation 0 was written before the steps measured"


def test_storage_rests_in_memory_only(overhead: dict[str, OverheadFigure]) -> None:
    """Generations are complete in memory as before, and none of them is committed; with storage the newest ones are."""
    assert overhead["sparse4-memory"].generations_committed == 0
    assert 0 < overhead["dense4"].generations_committed <= overhead["dense4"].generations_complete


def test_steps_without_a_capture_stand_apart(overhead: dict[str, OverheadFigure]) -> None:
    """There are some where everything is taken every four steps."""
    with_idle = {name for name, figure in overhead.items() if figure.added_idle_seconds is not None}
    assert with_idle == {"dense4"}
    assert all((overhead[name].idle_seconds or 0) > 0 for name in with_idle)


def test_sparse_segments_are_smaller_than_dense_ones(overhead: dict[str, OverheadFigure]) -> None:
    """A quarter of the state in full, and the weights of some of the rest."""
    sparse, dense = overhead["sparse4"], overhead["dense1"]
    assert (sparse.window, dense.window) == (4, 1)
    assert 0.25 * dense.nbytes_per_step < sparse.nbytes_per_step < 0.6 * dense.nbytes_per_step
    assert 12 * dense.num_params <= dense.dense_nbytes < dense.nbytes_per_step, "the journal comes on top"


def test_overhead_table_names_every_cause_of_waits(overhead: dict[str, OverheadFigure]) -> None:
    """A row per variant, below them goals, and where training waited."""
    shown = _shown(_overhead.table(list(overhead.values())))
    assert all(name in shown for name in overhead)
    assert all(f"waits in ms, {variant}: " in shown for variant in ("sparse4", "dense1"))
    assert any(line.startswith("sparse4, with storage: ") for line in breakdown.judged(list(overhead.values())))


@pytest.mark.soak
def test_a_breakdown_adds_up(tmp_path: Path) -> None:
    """Hooks of policies and peers, and threads beside; what is in hooks is what the report says."""
    variants = ["dense1", "selective1", "lightning4", "dcp4", "torch.save4"]
    options = [*TINY_FITS, "--variants", ",".join(variants), "--rounds", "1", "--url", tmp_path.as_uri()]
    status, out, err = _run(["benchmarks", "breakdown", "--json", *options])
    assert status == 0, err
    figures = {row["variant"]: row for row in json.loads(out)["breakdown"]}
    assert [*figures] == ["none", *variants]
    for name in variants[:2]:
        figure = figures[name]
        for each in figure[
            "rounds"
        ]:  # the clock of hooks is around that of the report: between them a machine may be busy
            wall, cpu = (sum(each["metered"][kind].values()) for kind in ("wall", "cpu"))
            assert 0.8 * each["overhead_seconds"] <= wall
            assert cpu <= 4 * each["overhead_seconds"]
        assert figure["metered"]["threads"]["moe-ckpt-storage"] > 0
    assert figures["torch.save4"]["metered"]["wall"].keys() == {"on_train_batch_end"}
    for each in (each["metered"] for figure in [*figures.values()][1:] for each in figure["rounds"]):
        assert all(0 <= each["cpu"][name] <= 1.1 * wall + 1e-4 for name, wall in each["wall"].items())
    shown = _shown(breakdown.table([OverheadFigure(**figure) for figure in figures.values()]))
    assert all(text in shown for text in ("after_batch", "microseconds per save", "beside: moe-ckpt-storage"))
    assert max(map(len, shown.splitlines())) <= 100


def test_what_is_measured_can_be_chosen() -> None:
    """A wrong name lists all; other systems are measured where they are given."""
    options = SimpleNamespace(variants=None, ranks=1)
    usual = [variant.name for variant in chosen_variants(options)]
    assert usual[:9] == ["none", *(f"{kind}{suffix}" for kind, suffix in _ours())]
    assert not {*usual} & {*OTHERS}
    options.others, options.variants = OTHERS, "dense1,dcp4"
    assert [variant.name for variant in chosen_variants(options)] == ["none", "dense1", "dcp4"]
    options.others, options.variants = {}, "dense1,dens"
    with pytest.raises(ConfigurationError, match=r"--variants dens`: there are none, sparse4-memory"):
        chosen_variants(options)


def _ours() -> list[tuple[str, str]]:
    kinds = (("sparse4", "sparse8"), ("dense1", "dense4"))
    return [(kind, suffix) for each in kinds for suffix in ("-memory", "") for kind in each]


@pytest.mark.soak
def test_several_ranks_are_measured_together() -> None:
    """They train and save as one."""
    options = [*TINY_FITS, "--rounds", "1", "--ranks", "3", "--variants", "sparse4,dense4-memory,dcp4,torch.save4"]
    status, out, err = _run(["benchmarks", "breakdown", "--json", *options])
    assert status == 0, err
    figures = json.loads(out)["breakdown"]
    assert [figure["num_ranks"] for figure in figures] == [3] * 5
    assert [figure["generations_complete"] for figure in figures] == [0, 2, 2, 0, 0]


@pytest.mark.soak
def test_costs_are_fitted_over_the_number_of_experts() -> None:
    """Each number has its times, a restart from memory among them; below the table a line per goal."""
    figures = [ScaleFigure(**row) for row in _document("scale")["scale"]]
    assert [(figure.num_experts, figure.num_operators) for figure in figures] == [(16, 21), (32, 37)]
    for figure in figures:
        assert figure.slot_operators == figure.num_operators / 8
        assert figure.hook_seconds > 0
        assert min(figure.bare_first_batch_seconds, figure.first_batch_seconds) > 0, (
            "of two runs: either may meet a busy machine"
        )
        assert 0 < figure.restore_seconds <= figure.resumed_first_batch_seconds
    shown = _shown(scale.table(figures))
    assert all(measured.what in shown for measured in MEASURED_BY_SCALE)
    assert shown.count(" met ") == len(MEASURED_BY_SCALE) + 5, "each goal has its outcome, and each place"
    assert max(map(len, shown.splitlines())) <= 100


@pytest.mark.soak
def test_experts_that_are_chosen_by_load_come_again_and_are_sent_as_gradients() -> None:
    """In turns none does, and a fault would lose more; all take the same number."""
    figures = [SelectionFigure(**row) for row in _document("selection")["selection"]]
    turns, by_load, by_budget = figures
    assert turns.repeats == 0
    assert min(by_load.repeats, by_budget.repeats) > 0.1
    assert max(by_load.at_risk["memory"], by_budget.at_risk["memory"]) < turns.at_risk["memory"]
    assert turns.wire_share == by_load.wire_share == 1 > by_budget.wire_share
    assert "in turns" in _shown(selection.table(figures))


def test_growth_is_a_line_and_an_exponent() -> None:
    """Of exact ones both are found again; what is not positive has no exponent."""
    operators = [256.0, 1024.0, 4096.0]
    line = Growth.of(operators, [1e-4 + 2e-7 * operator for operator in operators])
    assert (line.fixed, line.slope) == pytest.approx((1e-4, 2e-7))
    assert Growth.of(operators, [3 * operator**1.5 for operator in operators]).exponent == pytest.approx(1.5)
    assert math.isnan(Growth.of(operators, [-1e-4, 1e-4, 2e-4]).exponent)


@pytest.mark.parametrize("sizes", ["256", "256,x", "256,1022", "0,256"])
def test_sizes_are_multiples_of_the_layers(sizes: str) -> None:
    """Two at least, for a line."""
    with pytest.raises(ConfigurationError, match="must be two or more numbers of experts"):
        sizes_of(sizes)


def test_cases_take_turns() -> None:
    """Every round has each case once, and each begins a round equally often."""
    turns = list(rounds_of(2 * len(CASES), CASES))
    assert Counter(turns) == {(turn, case): 1 for turn in range(2 * len(CASES)) for case in CASES}
    assert Counter(case for _, case in turns[:: len(CASES)]) == dict.fromkeys(CASES, 2)


@pytest.mark.soak
def test_every_failure_is_recovered_from() -> None:
    """Each resumed at a step that was stored, took the lost steps again, and then one that was new."""
    *rows, host = _document("recovery")["recovery"]
    figures = [RecoveryFigure(**row | {"rounds": [Recovery(**each) for each in row["rounds"]]}) for row in rows]
    assert [(figure.system, figure.loss) for figure in figures] == [
        case for case in CASES if case[0] in ("dense", "dcp")
    ]
    for figure in figures:
        (only,) = figure.rounds
        assert only.killed_at == 3 * 2 + 1
        assert 0 < only.rollback_steps <= only.killed_at, "no checkpoint can be of the step that died"
        assert 0 < only.rerun_seconds < only.total_seconds
        assert only.begin_seconds < only.ready_seconds
        assert only.ready_seconds + only.rerun_seconds < only.total_seconds == figure.total_seconds
        assert len(only.restored_from) == 2
        assert all(rank.keys() <= {"host", "peer", "storage"} for rank in only.restored_from)
        assert (figure.restore_seconds is not None) == (figure.system == "dense")
    lost_everything = [figure for figure in figures if (figure.system, figure.loss) == ("dense", "cluster")]
    assert all([*rank] == ["storage"] for figure in lost_everything for rank in figure.restored_from)
    shown = _shown(recovery.table([*figures, HostRestoreFigure(**host)]))
    assert "out of host memory, without imports: median" in shown
    assert all(text in shown for text in ("DenseCheckpoint", "torch DCP, async", "all nodes", "any", "steps lost"))


def test_a_rank_is_lost_under_each_launcher() -> None:
    """Who is alone restarted, who is noticed by the others, and goals of a spare; a step taken again is no new one."""
    lost: Any = {"begin_seconds": 0.5, "rerun_seconds": 0.4, "rerun_steps": 4, "step_seconds": 0.1}
    failures = [MeasuredFailure(noticed_seconds=0.02 * index, total_seconds=index + 0.1, **lost) for index in (1, 3, 2)]
    figures = [
        FailureFigure(launcher="spare", num_ranks=3, failures=failures),
        FailureFigure(
            launcher="torchrun", num_ranks=3, failures=[replace(failure, noticed_seconds=None) for failure in failures]
        ),
    ]
    assert figures[0].time_ratio == pytest.approx(1 - 2.0 / 600)
    shown = _shown(in_place.table(figures))
    assert "3 ranks, until the others have noticed: 0.040, goal at most 0.1 s: met" in shown
    assert (
        "3 ranks, to the first new step with a spare, without steps taken again: 1.700, goal at most 1 s: NOT met"
        in shown
    )


@pytest.mark.soak
def test_a_rank_is_lost_and_its_training_goes_on() -> None:
    """New steps come after all ranks have begun again; where processes stay, they say that they have noticed."""
    for row in _document("in-place")["in-place"]:
        (failure,) = row["failures"]
        assert (
            0
            < failure["begin_seconds"]
            < failure["begin_seconds"] + failure["rerun_seconds"]
            < failure["total_seconds"]
        )
        assert (failure["noticed_seconds"] is not None) == (row["launcher"] == "replaced")


def test_ranks_of_other_launchers_stand_in_the_same_table() -> None:
    """By their own names; without torchft the table says how to get it."""
    lost = MeasuredFailure(
        noticed_seconds=None, begin_seconds=2, rerun_seconds=0, rerun_steps=0, total_seconds=34.0, step_seconds=0.1
    )
    ours = FailureFigure(launcher="spare", num_ranks=3, failures=[lost])
    shown = _shown(replicas.table([ours, replace(ours, launcher=replicas.TORCHFT)]))
    assert all(text in shown for text in ("moe-ckpt run --spares 1", replicas.TORCHFT, "34.00 to 34.00"))
    assert "pip install torchft" in _shown(replicas.table([ours]))


@pytest.mark.soak
def test_a_replica_is_lost_where_torchft_is_installed() -> None:
    """A spare of ours stands beside."""
    spare, *others = _document("replicas")["replicas"]
    assert spare["launcher"] == "spare"
    assert [row["launcher"] for row in others] in ([], [replicas.TORCHFT])
    assert all(failure["total_seconds"] > 0 for row in [spare, *others] for failure in row["failures"])


@pytest.mark.soak
def test_a_pipeline_stage_is_killed_and_repeats_steps() -> None:
    """All stages go back in place, or only that one; gradients of frozen weights are left out."""
    for row, stay in zip(_document("pipeline")["pipeline"], [0, 1], strict=True):
        (failure,), (skipped,) = row["failures"], row["skipped"]
        assert failure["rerun_steps"] > 0
        assert failure["total_seconds"] > failure["begin_seconds"] > 0
        assert 0 < skipped < 1 / 3
        assert row["stayed"] == [stay]


@pytest.mark.soak
def test_copies_of_pipeline_stages_wait_for_bubbles_where_it_pays() -> None:
    """A figure of every stage; copies of a megabyte end before the first operation, if the machine lets them."""
    figures = [BubbleFigure(**row) for row in _document("bubbles")["bubbles"]]
    assert [figure.stage for figure in figures] == [0, 1, 2, 3]
    assert any(figure.verdict == "copies do not wait: they end before the first operation" for figure in figures)
    assert all(figure.then_seconds > 7 * 0.009 and figure.bubble_seconds > 3 * 0.003 for figure in figures)


@pytest.mark.soak
def test_persisting_is_compared_with_bare_writes() -> None:
    """Every goal has a row; object storage is left out without a bucket, and says so."""
    figures = [PersistFigure(**row) for row in _document("persist")["persist"]]
    assert [figure.what for figure in figures] == [goal.what for goal in (LOCAL, OBJECT, CPU, STEP)]
    local, stored, cpu, _ = figures
    assert local.value is not None
    assert local.value > 0
    assert local.baseline.endswith("MiB/s")
    assert stored.outcome == cpu.outcome == "not run: name a bucket with --object-url"


@pytest.mark.soak
def test_tables_are_printed_without_json() -> None:
    """The machine, then one table per benchmark; a pipe gets whole lines."""
    status, out, err = _run(["benchmarks", "native", *TINY["native"]])
    assert status == 0, err
    assert Machine.read().torch in out
    assert "Compiled code, medians of wall time" in out


@pytest.mark.parametrize("width", [40, 200])
def test_tables_keep_names_whole(width: int) -> None:
    """Only headings break, at blanks: no name, figure or word of a heading is cut, however narrow a screen is."""
    table = table_of("title", ("checkpoints", "saved per step"), [("SelectiveExpertCheckpoint of all", "9.54 MiB")])
    console = Console(width=width, file=io.StringIO(), record=True)
    show_table(console, table)
    shown = console.export_text()
    assert "SelectiveExpertCheckpoint of all" in shown
    assert "9.54 MiB" in shown
    assert "checkpoints" in shown
    assert "saved" in shown


def test_trainings_take_a_gpu_where_each_rank_has_one() -> None:
    """By default they take none, which figures and their goals were stated for; too few are an error that counts them."""

    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    with pytest.raises(ConfigurationError, match=f"each of {num_devices + 1} ranks, torch sees {num_devices}"):
        accelerator_for("gpu", num_devices + 1)
    assert [accelerator_for(wanted, num_devices + 1) for wanted in (None, "cpu", "auto")] == ["cpu"] * 3
    assert accelerator_for("auto") == ("gpu" if num_devices else "cpu")


@pytest.mark.parametrize(
    "argv",
    [[], ["bench"], ["bench", "sorting"], ["bench", "overhead", "--rounds", "0"], ["bench", "strategy", "--url"]],
)
def test_wrong_arguments_exit_with_two(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """They are explained on standard error."""
    with pytest.raises(SystemExit) as raised:
        main(argv)
    assert raised.value.code == 2
    assert "Usage: moe-ckpt" in capsys.readouterr().err


def test_a_failed_command_says_why_and_exits_with_two(tmp_path: Path) -> None:
    """An error of this package is a line on standard error, not a traceback."""
    (tmp_path / "file").touch()
    status, out, err = _run(["bench", "overhead", *TINY_FITS, "--url", f"file://{tmp_path}/file"])
    assert (status, out) == (2, "")
    assert err.splitlines()[-1].startswith("moe-ckpt: ")


def test_native_figures_stand_beside_those_of_torch() -> None:
    """Small slices three ways; what cannot be run here has no value and says why."""
    figures = [native.NativeFigure(**row) for row in _document("native")["native"]]
    small = [figure for figure in figures if "50 slices of 256 bytes" in figure.what]
    assert [figure.how for figure in small] == ["torch, loop of copy_", "torch, _foreach_copy_", "compiled engine"]
    assert all(figure.value is None or figure.value > 0 for figure in figures)
    assert "slices/s" in _shown(native.table(figures))


@pytest.mark.soak
def test_goals_of_compiled_parts_are_judged_where_they_can_be() -> None:
    """Those of the host have values; those of a GPU have them too, or say why not."""
    figures = [native.NativeFigure(**row) for row in _document("native-goals")["native-goals"]]
    goals = [figure for figure in figures if figure.what[0] == "G"]
    assert len(goals) == 13
    assert all(figure.value is not None or "not run on a GPU: " in figure.note for figure in goals)
    assert all(goals[number - 1].value is not None for number in (11, 13))
    kernels = [figure for figure in figures if figure.what.startswith(("1% of", "INT8 of", "AdamW"))]
    assert len([figure for figure in kernels if figure.how == "compiled"]) == 3 + 6, "compressions and replays"
