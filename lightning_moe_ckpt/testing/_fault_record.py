"""Write down a campaign of faults, and sum it up: one file of JSON lines per rank, outliving every process.

The line of a fault is synced before the fault happens, so that the next start of the job knows of it.

ETTR, the effective training time ratio, is productive time over wall time. Productive is the time of steps that were
kept: a step that was trained again after a failure counts once, by its last run; restarts, restores and waiting for the
launcher do not count. Wall time runs from the first start to the last line.
"""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.testing._fault import FATAL
from lightning_moe_ckpt.testing._records import JsonLines, Record, read_lines

if TYPE_CHECKING:
    from rich.table import Table

FOLDER_VARIABLE = "MOE_CKPT_FAULTS"
Event = Literal["start", "join", "train", "step", "fault", "struck", "over", "removed", "end"]
"""`start`: a fit begins. `join`: the process's id and node, once the run is open. `train`: training begins. `step`: an optimizer
step ended. `fault`: one is about to strike. `struck`: its outcome. `over`: it has ended. `removed`: files of a lost node.
`end`: the fit ended by itself."""


def record_folder(given: str | Path | None, default_root: str | Path) -> Path:
    """Return `given`, else `MOE_CKPT_FAULTS`, else `moe-ckpt-faults` in the Trainer's `default_root_dir`."""
    return Path(given or os.environ.get(FOLDER_VARIABLE) or Path(default_root) / "moe-ckpt-faults").absolute()


class FaultRecord:
    """Writer of this rank's record, to a folder that is the same in every attempt, and on all nodes if racks are to be lost. Raises
    `ConfigurationError` if nothing can be written there.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self.path = folder / f"rank{rank:05d}.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lines = JsonLines(self.path)
            directory = os.open(folder, os.O_RDONLY)
            os.fsync(directory)  # the name of the file, too, has to outlive the machine
            os.close(directory)
        except OSError as error:
            raise ConfigurationError(
                f"`FaultInjector(folder='{folder}')` cannot be written: {error.strerror}. Give a folder that every start "
                "of the job can write to."
            ) from error

    def write(self, event: Event, *, sync: bool = False, **values: Any) -> None:
        """Append a line; with `sync` the line is on the medium on return."""
        self._lines.write({"event": event, "time": time.time(), "rank": self.rank, **values}, sync=sync)

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def read_ranks(folder: Path) -> Iterator[tuple[int, list[Record]]]:
    """Yield rank and lines from every file in `folder`, by rank."""
    for path in sorted(folder.glob("rank*.jsonl")):
        yield int(path.stem.removeprefix("rank")), read_lines(path)


def fired(folder: Path) -> set[str]:
    """Return the names of faults that have struck, on any rank."""
    return {line["name"] for _, lines in read_ranks(folder) for line in lines if line["event"] == "fault"}


def uptime(lines: list[Record]) -> float:
    """Return the seconds that a rank has spent in training loops, over all attempts."""
    total, last = 0.0, None
    for line in lines:
        if line["event"] == "start":
            last = None
        elif last is not None:
            total += line["time"] - last
            last = line["time"]
        elif line["event"] == "train":
            last = line["time"]
    return total


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultTally:
    """Faults of one kind."""

    kind: str
    injected: int
    deaths: int
    """Starts of the job that they ended."""
    survived: int
    """Deaths that training went on after."""
    steps_lost: int
    """Steps that had to be trained again."""
    seconds_lost: float
    """Time from the last step before to the first step after."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultSummary:
    """A campaign in figures."""

    lives: int
    """Starts of the job."""
    finished: bool
    """Whether the last start ended by itself."""
    steps: int
    """Different steps that were trained."""
    steps_lost: int
    """Steps that were trained more than once, counted each time but the last."""
    wall_seconds: float
    productive_seconds: float
    kinds: tuple[FaultTally, ...]

    @property
    def ettr(self) -> float:
        """Productive time over wall time."""
        return self.productive_seconds / self.wall_seconds if self.wall_seconds else 0.0

    @property
    def injected(self) -> int:
        """Faults of all kinds."""
        return sum(tally.injected for tally in self.kinds)

    def table(self) -> Table:
        """Return the figures for a terminal, a table of rich (extra `tools`)."""
        from rich.table import Table

        caption = (
            f"{self.lives} starts, the last {'finished' if self.finished else 'did not finish'}; {self.steps} steps, "
            f"{self.steps_lost} lost; {self.productive_seconds:.1f} of {self.wall_seconds:.1f} s productive: "
            f"ETTR {self.ettr:.3f}"
        )
        table = Table("kind", title="Faults", caption=caption)
        for heading in ("injected", "deaths", "survived", "steps lost", "seconds lost"):
            table.add_column(heading, justify="right")
        for tally in self.kinds:
            counts = (tally.injected, tally.deaths, tally.survived, tally.steps_lost)
            table.add_row(tally.kind, *map(str, counts), f"{tally.seconds_lost:.1f}")
        return table


def summarize_faults(folder: str | Path) -> FaultSummary:
    """Read the records of a `FaultInjector` in its folder; steps are those of the lowest rank there.

    Raises:
        ConfigurationError: there is no record.
    """
    ranks = dict(read_ranks(Path(folder)))
    if not ranks:
        raise ConfigurationError(f"`{folder}` holds no record of faults. Give the folder of the FaultInjector.")
    own, everything = ranks[min(ranks)], [line for lines in ranks.values() for line in lines]
    starts = [index for index, line in enumerate(own) if line["event"] == "start"]
    attempts = [_Attempt(own[begin:end]) for begin, end in pairwise([*starts, len(own)])]
    runs = Counter(step for attempt in attempts for step in attempt.steps)
    times = [line["time"] for line in everything]
    return FaultSummary(
        lives=len(attempts),
        finished=attempts[-1].finished,
        steps=len(runs),
        steps_lost=runs.total() - len(runs),
        wall_seconds=max(times) - min(times),
        productive_seconds=sum({step: seconds for each in attempts for step, seconds in each.steps.items()}.values()),
        kinds=tuple(_tallies([line for line in everything if line["event"] == "fault"], attempts)),
    )


class _Attempt:
    """A start of the job, from its lines."""

    def __init__(self, lines: Sequence[Record]) -> None:
        self.start: float = lines[0]["time"]
        step_lines = [line for line in lines if line["event"] in {"train", "step"}]
        self.steps = {
            int(line["step"]): line["time"] - before["time"]
            for before, line in pairwise(step_lines)
            if line["event"] == "step"
        }
        """Seconds in each step."""
        ended = [line["time"] for line in step_lines if line["event"] == "step"]
        self.first_step_time: float | None = ended[0] if ended else None
        self.last_time: float = max([self.start, *ended])
        self.finished = any(line["event"] == "end" for line in lines)


def _tallies(faults: Sequence[Record], attempts: Sequence[_Attempt]) -> Iterator[FaultTally]:
    losses = defaultdict[str, list[tuple[bool, int, float]]](list)
    for index, attempt in enumerate(attempts):
        until = attempts[index + 1].start if index + 1 < len(attempts) else float("inf")
        fatal = [line for line in faults if line["kind"] in FATAL and attempt.start <= line["time"] < until]
        if fatal and not attempt.finished:
            first = min(fatal, key=itemgetter("time"))
            losses[first["kind"]].append(_loss(attempt, attempts[index + 1 :]))
    for kind, injected in sorted(Counter(line["kind"] for line in faults).items()):
        own = losses[kind]
        survived, steps, seconds = (sum(column) for column in zip(*own, strict=True)) if own else (0, 0, 0.0)
        yield FaultTally(
            kind=kind, injected=injected, deaths=len(own),
            survived=int(survived), steps_lost=int(steps), seconds_lost=seconds,
        )  # fmt: skip


def _loss(attempt: _Attempt, later: Sequence[_Attempt]) -> tuple[bool, int, float]:
    """Return whether training went on after an attempt, how many of its steps were trained again, and seconds until then."""
    for following in later:
        if following.first_step_time is not None:
            again = len(attempt.steps.keys() & following.steps.keys())
            return True, again, following.first_step_time - attempt.last_time
        if following.finished:
            return True, 0, following.start - attempt.last_time
    return False, 0, 0.0
