"""Copy in a pipeline's bubbles: while a stage waits for others, nobody needs the memory and the links that copies take.

Bubbles are measured as training goes on, like in the paper for schedules other than 1F1B. The part of a list that fits
into a pass's bubbles at a measured rate waits for bubbles, and the rest is copied beside operations. Once the optimizer is
about to step, the remaining copies wait for nothing any more.

Copies wait only where steps get shorter by it. A trial finds out: where copies end before the first operation, there is
nothing to gain; elsewhere steps with and without waiting take turns. Unless copies wait, the engine hears of no phase
until the next trial.

Source: MOETION (2024), Sec. 5.3, Algorithm 4. We differ in the trial.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.native._choice import measure_bandwidth
from lightning_moe_ckpt.native._engine import CopyEngine, PipelinePhase

log = rank_logger(__name__)

_SHARE, _PROBE_NBYTES = 0.8, 16 * 2**20
"""Share of the bubbles' room that is used at the measured rate, as the rest absorbs noise; bytes of that measurement."""
_FEW, _TURN, _SAMPLES, _REST = 0.1, 4, 24, 1000
"""Share of chunks beside operations that is worth a trial, passes of a turn, passes with copies to measure in each way, and
passes from one trial to the next."""


@dataclass(kw_only=True)
class BubbleFigures:
    """Copies beside a pipeline's schedule, on this rank."""

    seconds: float = 0.0
    """Seconds of bubbles in a pass through the schedule: the median of the newest that were measured."""
    verdict: str = "no trial has ended yet"
    """Whether copies wait for bubbles, and why."""
    steps: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    """Seconds of steps with copies in the newest trial: copies wait for nothing (false), or for bubbles."""
    chunks: dict[str, int] = field(default_factory=dict)
    """Chunks of up to 16 MiB copied `in_bubbles`, `beside` operations, and `outside` of the schedule, as of the last look."""


class Bubbles:
    """Tells the copy engine of the training state when bubbles are, and how many bytes to leave for them."""

    def __init__(self, engine: CopyEngine, device: torch.device) -> None:
        self._engine, self._device, self._figures = engine, device, BubbleFigures()
        self._gaps: deque[float] = deque(maxlen=16)
        self._phase, self._rate, self._rest = PipelinePhase.OUTSIDE, 0.0, 0
        self._begin_trial()

    def enter(self, phase: PipelinePhase) -> None:
        """Set the training thread's place in the schedule from here on."""
        if self._phase is PipelinePhase.OUTSIDE is not phase:
            self._begin_pass()
        self._phase = phase
        if self._waits or not self._rest:
            self._engine.enter(phase)

    def figures(self) -> BubbleFigures | None:
        """Return the figures so far; `None` without a schedule, and where torch copies."""
        return self._figures if self._figures.chunks else None

    def _begin_trial(self) -> None:
        self._waits = self._waited = self._in_turns = False
        self._passes, self._began = 0, 0.0
        self._figures.steps = {False: [], True: []}

    def _begin_pass(self) -> None:
        if self._rest:
            self._rest -= 1
            if not self._rest:
                self._begin_trial()
        counts = self._engine.gate_counts() if self._waits or not self._rest else None
        if counts is None:
            return
        figures, before, now = self._figures, self._figures.chunks, time.perf_counter()
        figures.chunks = {"in_bubbles": counts.in_gaps, "beside": counts.beside, "outside": counts.outside}
        if counts.passes:
            self._gaps.append(counts.gap_ns / 1e9)
            figures.seconds = statistics.median(self._gaps)
        if not self._rest:
            if not self._began:
                self._before = figures.chunks
            elif figures.chunks != before:
                figures.steps[self._waited].append(now - self._began)
            # The list of the step that begins was begun before: a change is for the list after it.
            self._began, self._waited = now, self._waits
            self._try()
        if self._waits:
            self._rate = self._rate or measure_bandwidth(_PROBE_NBYTES, self._device)
        self._engine.fit_gaps(int(self._rate * figures.seconds * _SHARE) if self._waits else 0)

    def _try(self) -> None:
        steps, chunks = self._figures.steps, self._figures.chunks
        if self._in_turns:
            self._passes += 1
            self._waits = self._passes // _TURN % 2 == 1
            if min(map(len, steps.values())) >= _SAMPLES:
                waiting, without = (statistics.median(steps[way]) * 1e3 for way in (True, False))
                gains = _shorter(steps[True], steps[False])
                way = "copies wait for them" if gains else "copies do not wait"
                self._settle(f"{way}: steps of {waiting:.1f} ms with waiting, {without:.1f} ms without", waits=gains)
        elif len(steps[False]) >= _SAMPLES:
            new = {name: number - self._before[name] for name, number in chunks.items()}
            self._in_turns, steps[False] = new["beside"] > _FEW * sum(new.values()), []
            if not self._in_turns:
                self._settle("copies do not wait: they end before the first operation", waits=False)

    def _settle(self, verdict: str, *, waits: bool) -> None:
        self._waits, self._rest, self._figures.verdict = waits, _REST, verdict
        log.info("bubbles of %.1f ms per step: %s", self._figures.seconds * 1e3, verdict)


def _shorter(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    """Return whether our values are smaller in a Mann-Whitney test: by chance in one case of twenty."""
    pairs, wins = len(ours) * len(theirs), sum(mine < other for mine in ours for other in theirs)
    return wins > pairs / 2 + 1.645 * math.sqrt(pairs * (len(ours) + len(theirs) + 1) / 12)
