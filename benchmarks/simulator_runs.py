"""Run cells of the grid for `simulator`, and divide their wall time by what the processes wrote: the run's own account is not asked."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

from benchmarks.simulator_fit import Cell
from benchmarks.steps import train_in_ranks
from lightning_moe_ckpt.benchmarks._fits import bench_folders
from lightning_moe_ckpt.goodput import Goodput
from lightning_moe_ckpt.testing._records import Record, read_lines

_LIMIT_SECONDS = 600.0
_FIRST_STEPS = 3
"""Steps after a start that are no ordinary ones."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A cell's run, as its lines show it; times in seconds."""

    cell: Cell
    wall: float
    steps: int
    """Steps that count."""
    executed: int
    step_seconds: float
    """Mean ordinary step without hooks."""
    gaps: list[float]
    """Training until each failure, and after the last one."""
    detection: list[float] = field(default_factory=list)
    startup: list[float] = field(default_factory=list)
    restore: list[float] = field(default_factory=list)
    """From the start of `fit` to the end of the first step, without an ordinary step; one less than starts."""
    hooks: float = 0.0
    again: float = 0.0
    """Steps taken again, and those that a failure cut off."""

    def goodput_of(self, step_seconds: float) -> Goodput:
        """Return the parts, for a step without checkpoints of so many seconds; what steps took beyond it and hooks is `slowed`."""
        productive = self.steps * step_seconds
        known = {
            "detection": sum(self.detection),
            "startup": sum(self.startup),
            "restore": sum(self.restore),
            "hooks": self.hooks,
            "lost": self.again,
        }
        return Goodput(productive=productive, slowed=max(0.0, self.wall - productive - sum(known.values())), **known)


def run_cell(cell: Cell, parent: Path | None, keep: Path) -> Run:
    """Run a cell by `moe-ckpt run`, and keep its lines in `keep`; its checkpoints are removed, but for the log."""
    shutil.rmtree(keep, ignore_errors=True)  # of a run that was interrupted
    keep.mkdir(parents=True)
    with bench_folders(parent) as (folder, memory):
        what = [str(folder), str(memory), json.dumps(asdict(cell))]
        began = time.monotonic()
        train_in_ranks("benchmarks.simulator_fit", what, ranks=1, seconds=_LIMIT_SECONDS, failures=1000)
        meta = {"cell": asdict(cell), "began": began, "unix": time.time() - time.monotonic()}
        (keep / "cell.json").write_text(json.dumps(meta))
        for name in ("lines", "faults", "run"):
            if (path := folder / name).exists():
                shutil.move(path, keep / name)
        for path in keep.rglob("*"):
            if path.is_file() and path.stat().st_size > 2**20:
                path.unlink()
    return read_run(keep)


def read_run(keep: Path) -> Run:
    """Return a run from the lines that it left."""
    meta = json.loads((keep / "cell.json").read_text())
    faults = read_lines(keep / "faults" / "rank00000.jsonl")
    kills = [line["time"] - meta["unix"] for line in faults if line["event"] == "fault"]
    return _divided(Cell(**meta["cell"]), meta["began"], read_lines(keep / "lines"), kills)


def _divided(cell: Cell, began: float, lines: Sequence[Record], kills: Sequence[float]) -> Run:
    starts = list[list[Record]]()
    for line in lines:
        if line["what"] == "process":
            starts.append([])
        starts[-1].append(line)
    trained = [[line for line in start if line["what"] in ("begin", "step")] for start in starts]
    ordinary = [
        later["at"] - earlier["at"] - _hooks(earlier, later)
        for steps in trained
        for earlier, later in pairwise(steps[_FIRST_STEPS + 1 :])
    ]
    step = _trimmed(ordinary)
    newest = trained[-1][-1]
    last_of = {line["step"]: id(line) for steps in trained for line in steps if line["what"] == "step"}
    hooks = again = 0.0
    detection, startup, restore, gaps = [], [], [], []
    for index, (start, steps) in enumerate(zip(starts, trained, strict=True)):
        end = kills[index] if index < len(kills) else newest["at"]
        at = {"fit": end, "begin": end} | {line["what"]: line["at"] for line in reversed(start)}
        before = kills[index - 1] if index else began
        detection += [at["process"] - before] if index else []
        startup.append(at["fit"] - (at["process"] if index else began))
        first = steps[1]["at"] - at["begin"] - step if len(steps) > 1 else 0.0
        restore.append(max(0.0, first))
        (restore if index else startup)[-1] += at["begin"] - at["fit"]
        for earlier, later in pairwise(steps):
            counts = last_of[later["step"]] == id(later)
            taken = later["at"] - earlier["at"] if earlier["what"] == "step" else step
            hooks += _hooks(earlier, later) if counts else 0.0
            again += 0.0 if counts else taken
        gaps.append(end - at["begin"])
        again += end - max(steps[-1]["at"], at["begin"] + first) if steps else 0.0
    return Run(
        cell=cell,
        wall=newest["at"] - began,
        steps=newest["step"],
        executed=sum(line["what"] == "step" for steps in trained for line in steps),
        step_seconds=step,
        gaps=gaps,
        detection=detection,
        startup=startup,
        restore=restore,
        hooks=hooks,
        again=again,
    )


def _hooks(earlier: Record, later: Record) -> float:
    return float(later.get("hooks", 0.0) - earlier.get("hooks", 0.0)) if "hooks" in earlier else 0.0


def _trimmed(values: Sequence[float]) -> float:
    """Return the mean without the extreme twentieth on each side."""
    cut = len(values) // 20
    kept = sorted(values)[cut : len(values) - cut]
    return sum(kept) / len(kept)
