"""Agree after a failure which pipeline stages recover alone, from where all ranks are."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from lightning_moe_ckpt.parallel import ParallelGroups


class StepPosition(IntEnum):
    """Where a rank is when another rank fails."""

    NEW = 0
    """The rank has no state, or not yet the state of a repeated step."""
    WITHIN_STEP = 1
    AT_COMMIT = 2
    ELSEWHERE = 3


TOO_OFTEN, LOST = 2, 3
"""Values of `Where.possible` that send all ranks back once: stages do not come to a step; a rank cannot undo its attempt."""


class Where(NamedTuple):
    """One rank's position, as gathered when all ranks have joined again."""

    possible: int
    """Whether a stage of its run may recover alone; `TOO_OFTEN` and `LOST` if not this time."""
    place: int
    taken: int
    """Steps known to be taken by this rank."""
    has_generation: int
    target: int = -1
    """Step up to which the rank repeats steps; -1 if it does not repeat, or is new."""
    first: int = 0
    """First stage of its segment."""
    stop: int = 0
    """Stage behind its segment's last stage."""


@dataclass(frozen=True)
class Decision:
    """Stages that repeat steps after a failure, and up to which step; the same on all ranks."""

    failed: tuple[int, ...]
    """Stages that begin to repeat steps."""
    step: int
    """Number of taken steps: stages repeat up to there."""
    going: Mapping[int, int] = field(default_factory=dict)
    """Steps taken, by stage, of stages that were repeating already and go on."""

    @classmethod
    def of(cls, rows: Sequence[Where], groups: ParallelGroups) -> Decision | str:
        """Return the decision that follows from all ranks' positions, by rank, or why all ranks go on in place."""
        size, count = groups.stage_size, groups.num_stages
        stages = [rows[stage * size : (stage + 1) * size] for stage in range(count)]
        segments = {range(row.first, row.stop) for row in rows if row.target >= 0}
        failed = {stage for stage in range(count) if any(row.place == StepPosition.NEW for row in stages[stage])}
        while True:
            healthy = [row for stage in range(count) if stage not in failed for row in stages[stage] if row.target < 0]
            # Only ranks that stay count. Such a rank knows that a step is taken once it has come to the next
            # step, so it needs nothing in between from ranks that still have to take the step.
            step = max((row.taken for row in healthy), default=-1)
            going = {stage: taken for each in segments for stage, taken in _going(each, stages, failed, step).items()}
            if not (lost := {stage for segment in segments for stage in segment} - going.keys() - failed):
                break
            failed |= lost
        reasons = {
            "this run does not let a stage recover alone": not all(row.possible for row in rows),
            "stages failed again and again on the way to one step": any(row.possible == TOO_OFTEN for row in rows),
            "a step had changed what a rank has no copy of": any(row.possible == LOST for row in rows),
            "no rank is new": not failed,
            "all stages failed together": not healthy,
            "other stages were not inside a step": any(row.place == StepPosition.ELSEWHERE for row in healthy),
            "there is no generation yet": not all(row.has_generation for row in healthy),
            "stages were not in the same step": not _are_at(healthy, step),
        }
        return next((why for why, holds in reasons.items() if holds), cls(tuple(sorted(failed)), step, going))

    @property
    def repeating(self) -> list[int]:
        """Repeating stages, failed or going on."""
        return sorted({*self.failed, *self.going})

    def taken(self, stage: int) -> int:
        """Return the number of steps that a surviving stage has taken."""
        return self.going.get(stage, self.step)

    def segment(self, stage: int) -> range:
        """Return the adjacent repeating stages around `stage`."""
        first = last = stage
        while first - 1 in self.repeating:
            first -= 1
        while last + 1 in self.repeating:
            last += 1
        return range(first, last + 1)


def _going(segment: range, stages: Sequence[Sequence[Where]], failed: Collection[int], step: int) -> dict[int, int]:
    """Return the steps taken by each stage of a segment; empty if the segment cannot go on towards `step`."""
    rows = [row for stage in segment for row in stages[stage]]
    taken = max(row.taken for row in rows)
    touched = any(stage in failed for stage in range(segment.start - 1, segment.stop + 1))
    if touched or taken > step or any(row.target not in (-1, step) for row in rows) or not _are_at(rows, taken):
        return {}
    return dict.fromkeys(segment, taken)


def _are_at(rows: Iterable[Where], taken: int) -> bool:
    """Whether all ranks are in the same step, or at the commit before it that other ranks know to have succeeded."""
    return all(row.taken == taken or (row.taken, row.place) == (taken - 1, StepPosition.AT_COMMIT) for row in rows)
