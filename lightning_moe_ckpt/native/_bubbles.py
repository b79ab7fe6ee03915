"""Copy in the bubbles of a pipeline: while a stage waits for others, nobody needs the memory and the links that copies take.

Bubbles are measured as training goes on, as the paper has it for schedules other than 1F1B. What the copies of a step take in
time is their bytes over a measured rate. Of a list, as much as fits into the bubbles of a pass waits for them, and the rest is
copied beside operations. Copies that are not made when the optimizer is about to step wait for nothing any more.

Source: MOETION (2024), Sec. 5.3, Algorithm 4.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

import torch

from lightning_moe_ckpt.native._choice import measure_bandwidth
from lightning_moe_ckpt.native._engine import CopyEngine, PipelinePhase

_PASSES = 16
"""Of which the median counts."""
_SHARE = 0.8
"""Part of what bubbles have room for at the measured rate; the rest absorbs noise."""
_PROBE_NBYTES = 16 * 2**20


@dataclass(frozen=True, kw_only=True)
class BubbleFigures:
    """Copies beside a pipeline's schedule, on this rank."""

    seconds: float
    """Of bubbles in a pass through the schedule, the median of the newest ones."""
    nbytes: int
    """Bytes of a list that wait for them."""
    chunks: dict[str, int]
    """Chunks of up to 16 MiB copied `in_bubbles`, `beside` operations, and `outside` of the schedule."""

    @property
    def share(self) -> float:
        """Part of the chunks that was not copied beside operations."""
        return 1 - self.chunks["beside"] / max(1, sum(self.chunks.values()))


class Bubbles:
    """Tells a copy engine of bubbles, and how much to leave for them.

    Args:
        engine: copies what training is.
        device: of training.
    """

    def __init__(self, engine: CopyEngine, device: torch.device) -> None:
        self._engine, self._device = engine, device
        self._seconds: deque[float] = deque(maxlen=_PASSES)
        self._passes = self._nbytes = 0
        self._rate: float | None = None

    def enter(self, phase: PipelinePhase) -> None:
        """Say where in the schedule the training thread is from here on."""
        self._engine.enter(phase)
        if phase is not PipelinePhase.OUTSIDE:
            return
        counts = self._engine.gate_counts()
        if counts is None or counts.passes == self._passes:  # a device is not there yet
            return
        if self._rate is None:
            self._rate = measure_bandwidth(_PROBE_NBYTES, self._device)
        self._passes = counts.passes
        self._seconds.append(counts.gap_ns / 1e9)
        self._nbytes = int(self._rate * statistics.median(self._seconds) * _SHARE)
        self._engine.fit_gaps(self._nbytes)

    def figures(self) -> BubbleFigures | None:
        """Return figures so far; `None` without a schedule."""
        counts = self._engine.gate_counts() if self._passes else None
        if counts is None:
            return None
        chunks = {"in_bubbles": counts.in_gaps, "beside": counts.beside, "outside": counts.outside}
        return BubbleFigures(seconds=statistics.median(self._seconds), nbytes=self._nbytes, chunks=chunks)
