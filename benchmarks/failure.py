"""Cost of a killed rank, from the lines that all ranks wrote: `recovery`, `in-place`, `pipeline` and `replicas` share it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from lightning_moe_ckpt.testing._records import Record


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
        step_seconds=step_seconds_of(before[killed]),
    )


def step_seconds_of(steps: Sequence[Record]) -> float:
    """Return the median step of the last ones."""
    times: list[float] = [line["at"] for line in steps[-8:]]
    return statistics.median(later - earlier for earlier, later in pairwise(times))
