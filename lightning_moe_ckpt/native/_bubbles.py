"""Copy in a pipeline's bubbles: while a stage waits for others, nobody needs the memory and the links that copies take.

Bubbles are measured as training goes on, like in the paper for schedules other than 1F1B. The time of a step's copies
is their bytes over a measured rate. The part of a list that fits into a pass's bubbles waits for bubbles, and the rest
is copied beside operations. Once the optimizer is about to step, the remaining copies wait for nothing any more.

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
"""Newest passes through the schedule whose median counts."""
_SHARE = 0.8
"""Share of the bubbles' room that is used at the measured rate; the rest absorbs noise."""
_PROBE_NBYTES = 16 * 2**20


@dataclass(frozen=True, kw_only=True)
class BubbleFigures:
    """Copies beside a pipeline's schedule, on this rank."""

    seconds: float
    """Seconds of bubbles in a pass through the schedule: the median of the newest passes."""
    nbytes: int
    """Bytes of a list that wait for bubbles."""
    chunks: dict[str, int]
    """Chunks of up to 16 MiB copied `in_bubbles`, `beside` operations, and `outside` of the schedule."""

    @property
    def share(self) -> float:
        """Share of the chunks that was not copied beside operations."""
        return 1 - self.chunks["beside"] / max(1, sum(self.chunks.values()))


class Bubbles:
    """Tells a copy engine when bubbles are, and how many bytes to leave for them.

    Args:
        engine: copies the training state.
        device: device of training.
    """

    def __init__(self, engine: CopyEngine, device: torch.device) -> None:
        self._engine, self._device = engine, device
        self._seconds: deque[float] = deque(maxlen=_PASSES)
        self._passes = self._nbytes = 0
        self._rate: float | None = None

    def enter(self, phase: PipelinePhase) -> None:
        """Set the training thread's place in the schedule from here on."""
        self._engine.enter(phase)
        if phase is not PipelinePhase.OUTSIDE:
            return
        counts = self._engine.gate_counts()
        if counts is None or counts.passes == self._passes:  # a device lags behind
            return
        if self._rate is None:
            self._rate = measure_bandwidth(_PROBE_NBYTES, self._device)
        self._passes = counts.passes
        self._seconds.append(counts.gap_ns / 1e9)
        self._nbytes = int(self._rate * statistics.median(self._seconds) * _SHARE)
        self._engine.fit_gaps(self._nbytes)

    def figures(self) -> BubbleFigures | None:
        """Return the figures so far; `None` without a schedule."""
        counts = self._engine.gate_counts() if self._passes else None
        if counts is None:
            return None
        chunks = {"in_bubbles": counts.in_gaps, "beside": counts.beside, "outside": counts.outside}
        return BubbleFigures(seconds=statistics.median(self._seconds), nbytes=self._nbytes, chunks=chunks)
