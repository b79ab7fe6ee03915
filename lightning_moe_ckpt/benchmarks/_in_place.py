"""Measure the cost of a lost process under each launcher: seconds from its SIGKILL to the first new step.

Nothing is forked and nothing is warm: ranks are started by the launchers themselves, and the imports of a new process are
counted. All trainings with the same number of ranks exist at once, and take steps in turns; in each turn a rank dies.

    spare       `moe-ckpt run --spares 1`, once the spare waits for its place
    replaced    `moe-ckpt run`: a new process for the dead rank
    torchrun    new processes for all ranks
    torchft     a replica per rank, each started by torchrun, with its lighthouse, where it is installed. The others go on
                without the dead replica, so their result differs; a replica that comes back is sent their state.

Source of torchft's options: its README at version 0.2.0.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

from rich.table import Table

from lightning_moe_ckpt.benchmarks._benchmark import Goal, Progress, rounds_of, table_of
from lightning_moe_ckpt.benchmarks._fits import bench_folders
from lightning_moe_ckpt.benchmarks._killed_fit import REPLICA, SIZE, WINDOW
from lightning_moe_ckpt.errors import CheckpointError
from lightning_moe_ckpt.testing._attempts import free_port
from lightning_moe_ckpt.testing._records import Record, read_lines

LAUNCHERS = {
    "spare": "moe-ckpt run --spares 1",
    "replaced": "moe-ckpt run",
    "torchrun": "torchrun",
    "torchft": "torchft, a replica per rank",
}
_OF_LAUNCHERS = {
    "spare": ["lightning_moe_ckpt.cli", "run", "--spares", "1"],
    "replaced": ["lightning_moe_ckpt.cli", "run"],
    "torchrun": ["torch.distributed.run", "--standalone", "--max-restarts", "1000"],
}
_OWN = ["--max-failures", "1000", "--hang-timeout", "3600"]
_SCRIPT = "lightning_moe_ckpt.benchmarks._killed_fit"
_LIGHTHOUSE = """\
import signal, sys
from torchft.coordination import LighthouseServer
server = LighthouseServer(bind=sys.argv[1], min_replicas=1, join_timeout_ms=10000, quorum_tick_ms=100)
signal.pause()
"""
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
seconds from the SIGKILL, medians: until all other ranks knew of it; until all ranks trained again (of
torchft: until the replica is back); until the first step that was never taken before, of which re-run
are steps taken again. time ratio: effective training time at an MTBF of 10 minutes, as far as failures
cost it; what checkpoints cost, `bench overhead` measures"""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredFailure:
    """A kill and its consequences, in seconds from the SIGKILL."""

    noticed_seconds: float | None
    """Until the last of the other ranks knew; unknown where these were ended."""
    begin_seconds: float
    """Until all ranks trained again."""
    rerun_seconds: float
    """Part of `total_seconds` for steps that were taken again."""
    rerun_steps: int
    total_seconds: float
    """Until the slowest rank had finished the first new step."""
    step_seconds: float
    """Seconds of an ordinary step."""


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


def measure(options: SimpleNamespace, progress: Progress) -> list[FailureFigure]:
    """Run the benchmark."""
    launchers = [name for name in options.launchers if name != "torchft" or find_spec("torchft") is not None]
    worlds = [int(text) for text in options.in_place_ranks.split(",")]
    found: dict[tuple[int, str], list[MeasuredFailure]] = {(world, name): [] for world in worlds for name in launchers}
    done = 0
    for world in worlds:
        with ExitStack() as stack:
            progress(f"{world} ranks are started", done, len(found) * options.in_place_kills)
            jobs = {name: stack.enter_context(job(name, world, options.in_place_folder)) for name in launchers}
            for turn, name in rounds_of(options.in_place_kills, launchers):
                progress(f"one of {world} ranks killed, {LAUNCHERS[name]}", done, len(found) * options.in_place_kills)
                found[world, name].append(jobs[name].lose(turn % world, 2 * WINDOW + 2 + turn % WINDOW))
                done += 1
    return [FailureFigure(launcher=name, num_ranks=world, failures=each) for (world, name), each in found.items()]


def table(figures: Sequence[FailureFigure]) -> Table:
    """Return the figures for people."""
    title = (
        f"From the SIGKILL of one rank to the first new step: {SIZE.num_params() / 1e6:.1f}M parameters, sparse "
        f"checkpoints over {WINDOW} steps, medians of {len(figures[0].failures)} kills"
    )
    lines = [_NOTE, *_outcomes(figures)]
    if "torchft" not in {figure.launcher for figure in figures}:
        lines.append("torchft is not there: `pip install torchft` puts it into the table")
    return table_of(title, _COLUMNS, [_row(figure) for figure in figures], "\n".join(lines))


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
        *(LAUNCHERS[figure.launcher], str(figure.num_ranks)),
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
def job(launcher: str, num_ranks: int, parent: Path | None, *script: str) -> Iterator[FailingJob]:
    """Start a training under a launcher from `LAUNCHERS`, in a folder in `parent` or the temporary directory, and end the training.

    `script` is the module to run, and its arguments behind the two folders; the default is the training of `bench in-place`.
    """
    with bench_folders(parent) as (folder, memory), (folder / "console").open("wb") as console:
        job = FailingJob(launcher, num_ranks, folder, folder / "console")
        try:
            for command, environment in _commands(
                launcher, num_ranks, folder, memory, script or (_SCRIPT, "lightning")
            ):
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


def _commands(
    launcher: str, num_ranks: int, folder: Path, memory: Path, script: Sequence[str]
) -> list[tuple[list[str], dict[str, str]]]:
    """Return the commands to start, each with additions to its environment."""
    python = [sys.executable, "-m"]
    if launcher != "torchft":
        options = [*_OF_LAUNCHERS[launcher], *(_OWN if launcher != "torchrun" else [])]
        module, *arguments = script
        what = ["--nproc-per-node", str(num_ranks), "-m", module, str(folder), str(memory), *arguments]
        return [([*python, *options, *what], {})]
    port = free_port()
    lighthouse = [sys.executable, "-c", _LIGHTHOUSE, f"[::]:{port}"]
    replica = [
        *(*python, "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "1", "--max-restarts", "1000"),
        *("--master-port", "{port}", "-m", _SCRIPT, str(folder), str(memory), "torchft"),
    ]
    return [
        (lighthouse, {}),
        *(
            (
                [each.format(port=free_port()) for each in replica],
                {REPLICA: str(rank), "TORCHFT_LIGHTHOUSE": f"http://localhost:{port}"},
            )
            for rank in range(num_ranks)
        ),
    ]


class FailingJob:
    """A training under a launcher; its ranks write events to `folder`, and their output to `console`."""

    def __init__(self, launcher: str, num_ranks: int, folder: Path, console: Path) -> None:
        self._launcher, self._num_ranks, self._folder, self._console = launcher, num_ranks, folder, console
        self.processes: list[subprocess.Popen[bytes]] = []
        self._spares_used = 0

    def lose(self, rank: int, after_steps: int, *, alone: bool = False) -> MeasuredFailure:
        """Train for `after_steps` steps, kill a rank, and return its cost; `alone`: see `failure_of`."""
        torchft = self._launcher == "torchft"
        self._await("a spare", self._has_spare)
        (self._folder / "turn").touch()
        first = self._newest() if self._begun(0.0) else 0
        self._await("steps", lambda: self._begun(0.0) and self._newest() >= first + after_steps)
        if torchft:  # a replica that was late to join is there again
            self._await(
                "all replicas", lambda: all(lines[-1].get("ranks") == self._num_ranks for lines in self.lines())
            )
        pid = [line["pid"] for line in self.lines()[rank] if line["what"] == "begin"][-1]
        at = time.monotonic()
        os.kill(pid, signal.SIGKILL)

        read = self._read_torchft if torchft else partial(failure_of, alone=alone)
        self._await("the first new step", lambda: read(self.lines(), at, rank) is not None)
        failure = read(self.lines(), at, rank)
        assert failure is not None
        (self._folder / "turn").unlink()
        self._spares_used += 1
        self._await("a spare", self._has_spare)  # it imports for seconds, which another training's turn must not pay
        return failure

    def end(self) -> None:
        """End all processes; their shared memory goes with the folder."""
        (self._folder / "turn").touch()
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
        paths = [self._folder / f"rank{rank}" for rank in range(self._num_ranks)]
        return [list(read_lines(path)) if path.exists() else [] for path in paths]

    def _has_spare(self) -> bool:
        path = self._folder / "spares"
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
                    f"{LAUNCHERS[self._launcher]}, {self._num_ranks} ranks: {what} did not come.\n{shown}"
                )
            time.sleep(_LOOK_SECONDS)

    def _read_torchft(self, ranks: list[list[Record]], at: float, killed: int) -> MeasuredFailure | None:
        lines = [[line for line in each if line["what"] == "step"] for each in ranks]
        lost = max(line["step"] for each in lines for line in each if line["at"] < at)
        # A step that had been added up when the other died is still finished.
        new = [[line["at"] for line in each if line["at"] > at and line["step"] > lost + 1] for each in lines]
        others = [each for rank, each in enumerate(new) if rank != killed]
        if not all(new) or not any(
            line["at"] > new[killed][0] and line["ranks"] == self._num_ranks for line in lines[0]
        ):
            return None
        return MeasuredFailure(
            noticed_seconds=None,
            begin_seconds=new[killed][0] - at,
            rerun_seconds=0.0,
            rerun_steps=0,
            total_seconds=max(each[0] for each in others) - at,
            step_seconds=_step_seconds([line for line in lines[killed] if line["at"] < at]),
        )


def failure_of(
    ranks: Sequence[Sequence[Record]], at: float, killed: int, *, alone: bool = False
) -> MeasuredFailure | None:
    """Return a kill's cost; `None` until the cost is known.

    Args:
        ranks: lines of each rank's `StepLines`.
        at: time of the kill, by the lines' clock.
        killed: rank that died.
        alone: whether the others stay in the step that they are in.
    """
    begun, before, after, noticed = 0.0, [], [], []
    for rank, lines in enumerate(ranks):
        begins = [line["at"] for line in lines if line["what"] == "begin" and line["at"] > at]
        if not begins and (rank == killed or not alone):
            return None
        start = begins[0] if begins else at
        begun = max(begun, start)
        steps = [line for line in lines if line["what"] == "step"]
        before.append([line for line in steps if line["at"] < start])
        after.append([line for line in steps if line["at"] > start])
        if rank != killed:
            noticed += [line["at"] for line in lines if line["what"] == "noticed" and line["at"] > at][:1]
    lost = max(line["step"] for lines in before for line in lines)
    if not all(any(line["step"] > lost for line in lines) for lines in after):
        return None
    new = max(next(line["at"] for line in lines if line["step"] > lost) for lines in after)
    again = [line for lines in after for line in lines if line["step"] <= lost]
    return MeasuredFailure(
        noticed_seconds=max(noticed) - at if noticed and len(noticed) == len(ranks) - 1 else None,
        begin_seconds=begun - at,
        rerun_seconds=max(line["at"] for line in again) - begun if again else 0.0,
        rerun_steps=len({line["step"] for line in again}),
        total_seconds=new - at,
        step_seconds=_step_seconds(before[killed]),
    )


def _step_seconds(steps: Sequence[Record]) -> float:
    """Return the median step of the last ones."""
    times: list[float] = [line["at"] for line in steps[-2 * WINDOW :]]
    return statistics.median(later - earlier for earlier, later in pairwise(times))
