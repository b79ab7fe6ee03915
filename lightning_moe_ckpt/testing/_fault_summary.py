"""What a campaign of faults came to, from the records of its ranks.

ETTR, the effective training time ratio, is productive time over wall time. Productive is the time of steps that were
kept: a step that was trained again after a failure counts once, by its last run; restarts, restores and waiting for the
launcher do not count. Wall time runs from the first start to the last line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.testing._fault import FATAL
from lightning_moe_ckpt.testing._fault_record import Line, read_ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultTally:
    """Faults of one kind."""

    kind: str
    injected: int
    deaths: int
    """Starts of the job that they ended."""
    survived: int
    """Of these, after how many training went on."""
    steps_lost: int
    """Steps that had to be trained again."""
    seconds_lost: float
    """From the last step before to the first step after."""


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
        """For a terminal."""
        table = Table(title="Faults", caption=self._caption())
        table.add_column("kind")
        for heading in ("injected", "deaths", "survived", "steps lost", "seconds lost"):
            table.add_column(heading, justify="right")
        for tally in self.kinds:
            counts = (tally.injected, tally.deaths, tally.survived, tally.steps_lost)
            table.add_row(tally.kind, *map(str, counts), f"{tally.seconds_lost:.1f}")
        return table

    def _caption(self) -> str:
        return (
            f"{self.lives} starts, the last {'finished' if self.finished else 'did not finish'}; {self.steps} steps, "
            f"{self.steps_lost} lost; {self.productive_seconds:.1f} of {self.wall_seconds:.1f} s productive: "
            f"ETTR {self.ettr:.3f}"
        )


def summarize_faults(folder: str | Path) -> FaultSummary:
    """Read the records that a `FaultInjector` left.

    Args:
        folder: its folder. Steps are taken from the lowest rank there.

    Raises:
        ConfigurationError: there is no record.
    """
    ranks = dict(read_ranks(Path(folder)))
    if not ranks:
        raise ConfigurationError(f"`{folder}` holds no record of faults. Give the folder of the FaultInjector.")
    lives = _lives(ranks[min(ranks)])
    faults = sorted((line for lines in ranks.values() for line in lines if line["event"] == "fault"), key=_time)
    runs = Counter(step for life in lives for step in life.steps)
    everything = [line for lines in ranks.values() for line in lines]
    return FaultSummary(
        lives=len(lives),
        finished=lives[-1].finished,
        steps=len(runs),
        steps_lost=runs.total() - len(runs),
        wall_seconds=max(map(_time, everything)) - min(map(_time, everything)),
        productive_seconds=sum({step: seconds for life in lives for step, seconds in life.steps.items()}.values()),
        kinds=tuple(_tallies(faults, lives)),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Life:
    start: float
    steps: dict[int, float]
    """Seconds of each step."""
    last_time: float
    first_step_time: float | None
    finished: bool


def _lives(lines: Sequence[Line]) -> list[_Life]:
    starts = [index for index, line in enumerate(lines) if line["event"] == "start"]
    return [_life(lines[begin:end]) for begin, end in zip(starts, [*starts[1:], len(lines)], strict=True)]


def _life(lines: Sequence[Line]) -> _Life:
    steps, before = {}, None
    step_lines = [line for line in lines if line["event"] in {"train", "step"}]
    for line in step_lines:
        if line["event"] == "step" and before is not None:
            steps[int(line["step"])] = line["time"] - before
        before = line["time"]
    ended = [line["time"] for line in step_lines if line["event"] == "step"]
    return _Life(
        start=lines[0]["time"],
        steps=steps,
        last_time=max([lines[0]["time"], *ended]),
        first_step_time=ended[0] if ended else None,
        finished=any(line["event"] == "end" for line in lines),
    )


def _tallies(faults: Sequence[Line], lives: Sequence[_Life]) -> list[FaultTally]:
    losses: dict[str, list[tuple[bool, int, float]]] = {}
    for index, life in enumerate(lives):
        until = lives[index + 1].start if index + 1 < len(lives) else float("inf")
        fatal = [line for line in faults if line["kind"] in FATAL and life.start <= line["time"] < until]
        if fatal and not life.finished:
            losses.setdefault(fatal[0]["kind"], []).append(_loss(life, lives[index + 1 :]))
    injected = Counter(line["kind"] for line in faults)
    return [
        FaultTally(
            kind=kind,
            injected=injected[kind],
            deaths=len(losses.get(kind, [])),
            survived=sum(went_on for went_on, _, _ in losses.get(kind, [])),
            steps_lost=sum(steps for _, steps, _ in losses.get(kind, [])),
            seconds_lost=sum(seconds for _, _, seconds in losses.get(kind, [])),
        )
        for kind in sorted(injected)
    ]


def _loss(life: _Life, later: Sequence[_Life]) -> tuple[bool, int, float]:
    """Whether training went on after a life; steps of it that were trained again; seconds until it went on."""
    for following in later:
        if following.first_step_time is not None:
            again = len(life.steps.keys() & following.steps.keys())
            return True, again, following.first_step_time - life.last_time
        if following.finished:
            return True, 0, following.start - life.last_time
    return False, 0, 0.0


def _time(line: Line) -> float:
    return float(line["time"])
