"""Measure the cost of a lost process under each launcher: seconds from its SIGKILL to the first new step.

Nothing is forked and nothing is warm: ranks are started by the launchers themselves, and the imports of a new process are
counted. All trainings with the same number of ranks exist at once, and take steps in turns; in each turn a rank dies.

    spare       `moe-ckpt run --spares 1`, once the spare waits for its place
    replaced    `moe-ckpt run`: a new process for the dead rank
    torchrun    new processes for all ranks
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from rich.table import Table

from benchmarks.costs import Goal
from benchmarks.failure import MeasuredFailure, failure_of
from benchmarks.killed_fit import SIZE, WINDOW
from lightning_moe_ckpt.benchmarks._benchmark import Progress, rounds_of, table_of
from lightning_moe_ckpt.benchmarks._fits import bench_folders
from lightning_moe_ckpt.errors import CheckpointError
from lightning_moe_ckpt.testing._records import Record, read_lines

LAUNCHERS = {
    "spare": "moe-ckpt run --spares 1",
    "replaced": "moe-ckpt run",
    "torchrun": "torchrun",
}
_OF_LAUNCHERS = {
    "spare": ["lightning_moe_ckpt.cli", "run", "--spares", "1"],
    "replaced": ["lightning_moe_ckpt.cli", "run"],
    "torchrun": ["torch.distributed.run", "--standalone", "--max-restarts", "1000"],
}
_OWN = ["--max-failures", "1000", "--hang-timeout", "3600"]
_SCRIPT = "benchmarks.killed_fit"
_MTBF_SECONDS = 600.0
_GOALS = (
    Goal("noticed", "until the others have noticed", 0.1, "s", at_least=False),
    Goal("spare", "to the first new step with a spare, without steps taken again", 1.0, "s", at_least=False),
    Goal("ratio", "effective training time at an MTBF of 10 minutes with a spare", 0.98, "of time", at_least=True),
)
_LIMIT_SECONDS = 600.0
_LOOK_SECONDS = 0.02
_COLUMNS = ("launcher", "ranks", "noticed", "trains again", "re-run", "first new step", "range", "time ratio")
_NOTE = """\
seconds from the SIGKILL, medians: until all other ranks knew of it; until all ranks trained again; until
the first step that was never taken before, of which re-run are steps taken again. time ratio: effective training
time at an MTBF of 10 minutes, as far as failures cost it; what checkpoints cost, `bench overhead` measures"""


def time_ratio(failures: Sequence[MeasuredFailure]) -> float:
    """Return the time share in which training goes forward at an MTBF of 10 minutes, after the cost of such failures."""
    return 1 - statistics.median(failure.total_seconds - failure.step_seconds for failure in failures) / _MTBF_SECONDS


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureFigure:
    """Failures under a launcher, with a number of ranks."""

    launcher: str
    num_ranks: int
    failures: list[MeasuredFailure]

    def median(self, of: Callable[[MeasuredFailure], float | None]) -> float | None:
        """Return the median of something over the kills; None where it is unknown."""
        known = [value for failure in self.failures if (value := of(failure)) is not None]
        return statistics.median(known) if known else None

    @property
    def time_ratio(self) -> float:
        """Share of time that training goes forward, if a rank dies every 10 minutes."""
        return time_ratio(self.failures)


def measure(
    options: SimpleNamespace, progress: Progress, others: Mapping[str, type[FailingJob]] | None = None
) -> list[FailureFigure]:
    """Run the benchmark; `others` are jobs of further launchers, by name."""
    kinds: dict[str, type[FailingJob]] = dict.fromkeys(options.launchers, FailingJob)
    kinds.update(others or {})
    launchers = [*kinds]
    worlds = [int(text) for text in options.in_place_ranks.split(",")]
    found: dict[tuple[int, str], list[MeasuredFailure]] = {(world, name): [] for world in worlds for name in launchers}
    done = 0
    for world in worlds:
        with ExitStack() as stack:
            progress(f"{world} ranks are started", done, len(found) * options.in_place_kills)
            jobs = {
                name: stack.enter_context(job(name, world, options.in_place_folder, kind=kind))
                for name, kind in kinds.items()
            }
            for turn, name in rounds_of(options.in_place_kills, launchers):
                progress(f"one of {world} ranks killed, {title_of(name)}", done, len(found) * options.in_place_kills)
                found[world, name].append(jobs[name].lose(turn % world, 2 * WINDOW + 2 + turn % WINDOW))
                done += 1
    return [FailureFigure(launcher=name, num_ranks=world, failures=each) for (world, name), each in found.items()]


def title_of(launcher: str) -> str:
    """Return a launcher as people read it; launchers that are not ours to start have their name."""
    return LAUNCHERS.get(launcher, launcher)


def table(figures: Sequence[FailureFigure]) -> Table:
    """Return the figures for people."""
    title = (
        f"From the SIGKILL of one rank to the first new step: {SIZE.num_params() / 1e6:.1f}M parameters, sparse "
        f"checkpoints over {WINDOW} steps, medians of {len(figures[0].failures)} kills"
    )
    return table_of(title, _COLUMNS, [_row(figure) for figure in figures], "\n".join([_NOTE, *_outcomes(figures)]))


def _row(figure: FailureFigure) -> list[str]:
    totals = [failure.total_seconds for failure in figure.failures]
    columns = [
        figure.median(of)
        for of in (
            lambda each: each.noticed_seconds,
            lambda each: each.begin_seconds,
            lambda each: each.rerun_seconds,
            lambda each: each.total_seconds,
        )
    ]
    return [
        *(title_of(figure.launcher), str(figure.num_ranks)),
        *("" if value is None else f"{value:.3f}" for value in columns),
        *(f"{min(totals):.2f} to {max(totals):.2f}", f"{figure.time_ratio:.4f}"),
    ]


def _outcomes(figures: Sequence[FailureFigure]) -> Iterator[str]:
    """Yield a line per goal and number of ranks."""
    noticed, spare, ratio = _GOALS
    for figure in figures:
        if figure.launcher == "spare":
            measured = (
                (noticed, figure.median(lambda each: each.noticed_seconds)),
                (spare, figure.median(lambda each: each.total_seconds - each.rerun_seconds)),
                (ratio, figure.time_ratio),
            )
            for goal, value in measured:
                if value is not None:
                    yield f"{figure.num_ranks} ranks, {goal.what}: {value:.3f}, goal {goal}: {goal.outcome(value)}"


# -- trainings


@contextmanager
def job(
    launcher: str, num_ranks: int, parent: Path | None, *script: str, kind: type[FailingJob] | None = None
) -> Iterator[FailingJob]:
    """Start a training under a launcher, in a folder in `parent` or the temporary directory, and end the training.

    `script` is the module to run, and its arguments behind the two folders; the default is the training of `in-place`.
    """
    with bench_folders(parent) as (folder, memory), (folder / "console").open("wb") as console:
        job = (kind or FailingJob)(launcher, num_ranks, folder, folder / "console")
        try:
            for command, environment in job.commands(memory, script or (_SCRIPT,)):
                job.processes.append(
                    subprocess.Popen(  # noqa: S603  # our own command
                        command,
                        stdout=console,
                        stderr=console,
                        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
                    )
                )
            yield job
        finally:
            job.end()


class FailingJob:
    """A training under a launcher; its ranks write events to `folder`, and their output to `console`."""

    def __init__(self, launcher: str, num_ranks: int, folder: Path, console: Path) -> None:
        self._launcher, self._console, self.num_ranks, self.folder = launcher, console, num_ranks, folder
        self.processes: list[subprocess.Popen[bytes]] = []
        self._spares_used = 0

    def commands(self, memory: Path, script: Sequence[str]) -> list[tuple[list[str], dict[str, str]]]:
        """Return the commands to start, each with additions to its environment."""
        options = [*_OF_LAUNCHERS[self._launcher], *(_OWN if self._launcher != "torchrun" else [])]
        module, *arguments = script
        what = ["--nproc-per-node", str(self.num_ranks), "-m", module, str(self.folder), str(memory), *arguments]
        return [([sys.executable, "-m", *options, *what], {})]

    def is_complete(self) -> bool:
        """Return whether all ranks take part in steps, once they have begun."""
        return True

    def failure(self, at: float, killed: int, *, alone: bool) -> MeasuredFailure | None:
        """Return a kill's cost, see `failure_of`."""
        return failure_of(self.lines(), at, killed, alone=alone)

    def lose(self, rank: int, after_steps: int, *, alone: bool = False) -> MeasuredFailure:
        """Train for `after_steps` steps, kill a rank, and return its cost; `alone`: see `failure_of`."""
        self._await("a spare", self._has_spare)
        (self.folder / "turn").touch()
        first = self._newest() if self._begun(0.0) else 0
        self._await("steps", lambda: self._begun(0.0) and self._newest() >= first + after_steps)
        self._await("all ranks", self.is_complete)
        pid = [line["pid"] for line in self.lines()[rank] if line["what"] == "begin"][-1]
        at = time.monotonic()
        os.kill(pid, signal.SIGKILL)

        self._await("the first new step", lambda: self.failure(at, rank, alone=alone) is not None)
        failure = self.failure(at, rank, alone=alone)
        assert failure is not None
        (self.folder / "turn").unlink()
        self._spares_used += 1
        self._await("a spare", self._has_spare)  # it imports for seconds, which another training's turn must not pay
        return failure

    def end(self) -> None:
        """End all processes; their shared memory goes with the folder."""
        (self.folder / "turn").touch()
        groups = [line["pid"] for lines in self.lines() for line in lines if line["what"] == "begin"]
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        for pid in groups:  # torchrun's ranks outlive it
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def lines(self) -> list[list[Record]]:
        """Return each rank's lines."""
        paths = [self.folder / f"rank{rank}" for rank in range(self.num_ranks)]
        return [list(read_lines(path)) if path.exists() else [] for path in paths]

    def _has_spare(self) -> bool:
        path = self.folder / "spares"
        if self._launcher != "spare":
            return True
        return path.exists() and len(list(read_lines(path))) > self._spares_used

    def _newest(self) -> int:
        return min(max((line["step"] for line in lines if "step" in line), default=0) for lines in self.lines())

    def _begun(self, since: float) -> bool:
        return all(any(line["what"] == "begin" and line["at"] > since for line in lines) for lines in self.lines())

    def _await(self, what: str, condition: Callable[[], bool]) -> None:
        give_up = time.monotonic() + _LIMIT_SECONDS
        while not condition():
            if time.monotonic() > give_up or any(process.poll() is not None for process in self.processes):
                shown = self._console.read_text(errors="replace")[-4000:]
                raise CheckpointError(
                    f"{title_of(self._launcher)}, {self.num_ranks} ranks: {what} did not come.\n{shown}"
                )
            time.sleep(_LOOK_SECONDS)
