"""`python -m benchmarks simulator`: how a killed training's time is divided, and what is compared with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import simulator
from benchmarks.simulator import CellFigure, cell_of, seed_of, simulated
from benchmarks.simulator_fit import Cell, trained_seconds
from benchmarks.simulator_runs import read_run
from lightning_moe_ckpt.goodput import Goodput
from lightning_moe_ckpt.simulation import Ours, Profile
from lightning_moe_ckpt.testing import RandomFaults
from lightning_moe_ckpt.testing._records import Record

STEP, START, DETECT, RESTORE = 0.1, 5.0, 0.2, 0.3
EVERY = 10


def written(folder: Path, gaps: list[float]) -> Path:
    """A training of dense generations every ten steps that dies after these seconds, but for the last; as it would write it down."""
    lines, faults, now, done = list[Record](), list[Record](), 100.0, 0
    for index, gap in enumerate(gaps):
        now += DETECT if index else 0.0
        lines.append({"what": "process", "at": now})
        lines.append({"what": "fit", "at": now + START})
        now += START + (RESTORE if index else 0.0)
        if gap:
            lines.append({"what": "begin", "at": now, "step": done})
        lines += [
            {"what": "step", "at": now + STEP * (i + 1), "step": done + i + 1, "hooks": 0.01 * i}
            for i in range(int(gap / STEP + 1e-6))
        ]
        now += gap
        done = (done + int(gap / STEP + 1e-6)) // EVERY * EVERY
        faults += [{"event": "fault", "time": now + 1000.0}] if index < len(gaps) - 1 else []
    folder.mkdir()
    (folder / "faults").mkdir()
    (folder / "lines").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "faults" / "rank00000.jsonl").write_text("".join(json.dumps(line) + "\n" for line in faults))
    cell = {"policy": "dense", "mtbf": 2.0, "faults": len(gaps) - 1, "seed": 0, "seconds": sum(gaps)}
    (folder / "cell.json").write_text(json.dumps({"cell": cell, "began": 100.0, "unix": 1000.0}))
    return folder


def test_the_time_of_a_killed_training_is_divided(tmp_path: Path) -> None:
    """Every second is in one part, also where a process dies before its first step."""
    run = read_run(written(tmp_path / "cell", [2.55, 0.0, 1.45, 3.0]))
    assert (run.steps, run.executed) == (60, 25 + 14 + 30)
    assert run.gaps == pytest.approx([2.55, 0.0, 1.45, 3.0])
    assert run.wall == pytest.approx(4 * START + 3 * (DETECT + RESTORE) + 7.0)
    assert run.detection == pytest.approx([DETECT] * 3)
    assert run.startup == pytest.approx([START] * 4)
    assert sum(run.restore) == pytest.approx(3 * RESTORE, abs=0.05)
    found = run.goodput_of(run.step_seconds)
    assert run.step_seconds == pytest.approx(STEP - 0.01)
    assert found.lost == pytest.approx(9 * STEP + 0.05 + 0.05, abs=0.02)
    assert found.wall == pytest.approx(run.wall, abs=0.1)


def test_a_training_that_does_as_its_profile_says_is_simulated_right(tmp_path: Path) -> None:
    """The failures are those of the run, in its own steps, so that a machine of half the speed makes no difference."""
    run = read_run(written(tmp_path / "cell", [2.55, 1.45, 6.21, 3.0]))
    for speed in (1.0, 0.5):
        step = (STEP - 0.01) / speed
        costs = {"detection": DETECT / speed, "startup": START / speed, "restore_fixed": RESTORE / speed}
        costs |= {"hooks_per_step": 0.01 / speed, "hooks_per_capture": 0.01 / speed}
        profile = Profile.of(
            {
                "training": {"step_seconds": step},
                "model": {"layers": 1, "experts": 4, "params": 1000},
                "cluster": {},
                "speeds": {"device_host": 1e12},
                "costs": costs,
            }
        )
        found = simulated(profile, Ours(policy="dense", every_n_steps=EVERY), run, 1 / speed)
        assert found.failures == 3
        assert found.goodput.share == pytest.approx(run.goodput_of(run.step_seconds).share, abs=0.01)


def test_failures_come_as_often_as_they_are_said_to() -> None:
    """Within a tenth, and training goes on for as long behind the last one."""
    for faults in (3, 8):
        cell = cell_of("sparse", 60, faults, 0.05, seed_of(faults))
        *_, last = RandomFaults(mtbf=cell.mtbf, seed=cell.seed, most=faults).draw(1)
        assert last.seconds is not None
        assert last.seconds / faults == pytest.approx(3.0, rel=0.1)
        assert cell.seconds == pytest.approx(last.seconds + 3.0)


def test_seconds_of_earlier_starts_count() -> None:
    """What a process trained until its last step, and nothing between two processes."""
    said = [
        ("process", 0.0),
        ("begin", 5.0),
        ("step", 6.0),
        ("step", 8.0),
        ("process", 9.0),
        ("begin", 20.0),
        ("step", 21.0),
    ]
    assert trained_seconds([{"what": what, "at": at} for what, at in said]) == 4.0


def test_the_table_says_whether_goals_are_met() -> None:
    """Measured and simulated shares side by side, and the worst cell."""
    measured, found = Goodput(productive=50, startup=50), Goodput(productive=52, startup=48)
    shared: dict[str, Any] = {
        "failures": 8,
        "steps": 100,
        "step_seconds": 0.1,
        "measured": measured,
        "accounted": measured,
    }
    cell = CellFigure(policy="dense", mtbf_steps=20, simulated=found, simulated_steps=104.0, chosen="dense", **shared)
    caption = str(simulator.table([cell]).caption)
    assert "largest difference of a cell: 2.00, goal at most 1.5 points: NOT met" in caption


@pytest.mark.soak
def test_a_grid_of_one_cell_is_run(tmp_path: Path) -> None:
    """Real processes and a real SIGKILL, and an account of the run that agrees with the clock outside."""
    from types import SimpleNamespace

    options = SimpleNamespace(
        simulator_out=tmp_path / "out", simulator_folder=tmp_path, simulator_mtbf="40", simulator_policies=["dense"],
        simulator_faults=2, simulator_step=0.1,
    )  # fmt: skip
    (cell,) = simulator.measure(options, lambda *_: None)
    assert isinstance(cell, CellFigure)
    assert cell.failures == 2
    assert cell.accounted is not None
    assert cell.accounted.wall == pytest.approx(cell.measured.wall, rel=0.05)
    assert 0 < cell.simulated.share < 1
    assert Cell(**json.loads((tmp_path / "out" / "dense-40-cell" / "cell.json").read_text())["cell"]).faults == 2
