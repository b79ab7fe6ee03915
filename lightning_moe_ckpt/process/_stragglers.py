"""Find ranks slower than others in their own work, although every rank's steps last equally long.

Ranks wait for the slowest one in every collective, so their steps say nothing. Only *own work* differs: the time from
the fetch of a batch until the rank first waits for others. Without expert parallelism this is fetch and forward, since
gradients are exchanged in backward; with it, the part in front of the first layer whose tokens travel, whatever the
spread of tokens; in a pipeline, all of the stage's operations, each up to its first exchange. Hooks of this
package do not count. On a CUDA device events measure own work, since the host runs ahead.

So a rank with slow cores, clocks, memory or input is seen. A rank slow in backward or on the network alone is not,
nor a rank under a strategy whose forward waits for others unseen (shards, synchronised batch normalisation): there all ranks
seem equally slow. Stages have different work, so a rank is compared with the ranks of its stage.

A *look* compares the ranks' mean own work of the newest steps, at least `_LOOK_STEPS` and `_LOOK_SECONDS`; its values travel
with other votes. A rank is slow from the `_LOOKS`-th look in a row on with `_FACTOR` times the
median, until as many looks in a row are below `_FACTOR_BACK`. Means, since a process stopped again and again is
slow in few steps, by much; a single such step is in one look only.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt._units import time_text

log = rank_logger(__name__)

_cuda: Any = torch.cuda
"""Events are partly untyped in torch."""

_WARM_UP_STEPS = 5
"""First, slower steps of an incarnation."""
_LOOK_STEPS, _LOOK_SECONDS = 64, 10.0
"""Least steps, and least seconds, in a look."""
_LOOKS = 3
"""Looks in a row before a rank counts as slow, or no longer does."""
_FACTOR, _FACTOR_BACK = 1.3, 1.2
"""Least multiples of the median: to become slow, and to stay slow."""
_LEAST_SECONDS = 5e-4
"""Least seconds per step beyond the median for a warning."""
_MOST_STEPS = 1000
_PPM = 1_000_000


class OwnWork:
    """Measure this rank's time in each step until the first wait for others, by the clock `outside` of hooks, or by events of a CUDA `device`."""

    _under_way: ClassVar[OwnWork | None] = None

    def __init__(self, outside: Callable[[], float], device: torch.device) -> None:
        self._outside, self._device = outside, device if device.type == "cuda" else None
        self._began: Any = None
        self._spans: list[tuple[Any, Any]] = []
        """Begins and ends of the step under way."""
        self._passing: deque[list[tuple[Any, Any]]] = deque()
        """Steps perhaps still ahead of the device."""
        self._left_out, self._since = _WARM_UP_STEPS, time.perf_counter()
        self.steps: deque[float] = deque(maxlen=_MOST_STEPS)
        """Seconds of each step since the last look."""

    def begin(self) -> None:
        """Begin to work alone."""
        self._began, OwnWork._under_way = self._mark(), self

    def end(self) -> None:
        """Note the begin of a wait for other ranks; without a begin nothing happens."""
        if self._began is not None:
            self._spans.append((self._began, self._mark()))
            self._began = OwnWork._under_way = None

    @classmethod
    def ends(cls) -> None:
        """End the measurement under way, if any: for whoever is about to wait for other ranks."""
        if cls._under_way is not None:
            cls._under_way.end()

    def stepped(self, *, counts: bool) -> None:
        """Note a step's end; steps of a replay do not count."""
        spans, self._spans = self._spans, []
        if self._left_out or not counts:
            self._left_out = max(0, self._left_out - counts)
        elif spans:
            self._passing.append(spans)
        while self._passing and (self._device is None or self._passing[0][-1][1].query()):
            self.steps.append(sum(self._seconds(*span) for span in self._passing.popleft()))

    def mean(self) -> float | None:
        """Return the mean seconds since the last look; `None` as long as these are too few."""
        enough = len(self.steps) >= _LOOK_STEPS and time.perf_counter() - self._since >= _LOOK_SECONDS
        return statistics.fmean(self.steps) if enough else None

    def looked(self) -> None:
        """Begin the next look."""
        self.steps.clear()
        self._since = time.perf_counter()

    def _mark(self) -> Any:
        if self._device is None:
            return self._outside()
        event = _cuda.Event(enable_timing=True)
        event.record(_cuda.current_stream(self._device))
        return event

    def _seconds(self, begin: Any, end: Any) -> float:
        return float(end - begin if self._device is None else begin.elapsed_time(end) / 1e3)


@dataclass(frozen=True, kw_only=True)
class StragglerFigures:
    """Ranks' own work at the newest look, the same on all ranks."""

    seconds: tuple[float, ...] = ()
    """Seconds per step of own work until a wait for others, by rank; empty before the first look."""
    factors: tuple[float, ...] = ()
    """The same as multiples of the median of the ranks of the same stage."""
    slow: dict[int, float] = field(default_factory=dict)
    """Factors of slow ranks, by rank."""
    hosts: tuple[str, ...] = ()
    """Host name of each rank."""

    def name(self, rank: int) -> str:
        """Return a rank with its host."""
        return f"rank {rank} on {self.hosts[rank]}" if self.hosts else f"rank {rank}"

    def __str__(self) -> str:
        return ", ".join(f"{self.name(rank)} ({factor:.1f} times the median)" for rank, factor in self.slow.items())


class Stragglers:
    """Decide which ranks are slow, alike on all ranks, by comparing each `stage_size` consecutive ranks, which have equal work."""

    def __init__(self, work: OwnWork, stage_size: int) -> None:
        self.work, self._stage_size = work, stage_size
        self.hosts: tuple[str, ...] = ()
        """Host name of each rank."""
        self.figures = StragglerFigures()
        """Figures of the newest look."""
        self._looks: dict[int, int] = {}
        """Newest looks in a row in favour of a change, by rank."""
        self._since: dict[int, float] = {}

    def vote(self) -> int:
        """Return this rank's own work in microseconds per step, at least 1; 0 if there is too little for a look."""
        mean = self.work.mean()
        return 0 if mean is None else max(1, round(mean * _PPM))

    def agreed(self, votes: Sequence[int]) -> None:
        """Take all ranks' votes: a look, if all ranks have enough."""
        if not all(votes):
            return
        self.work.looked()
        seconds, size, slow = [vote / _PPM for vote in votes], self._stage_size, dict[int, float]()
        medians = [statistics.median_low(seconds[at : at + size]) for at in range(0, len(seconds), size)]
        factors = [each / medians[rank // size] for rank, each in enumerate(seconds)]
        for rank, factor in enumerate(factors):
            was, beyond = rank in self.figures.slow, seconds[rank] - medians[rank // size]
            is_slow = factor >= (_FACTOR_BACK if was else _FACTOR) and beyond >= _LEAST_SECONDS
            self._looks[rank] = 0 if is_slow is was else self._looks.get(rank, 0) + 1
            changes = self._looks[rank] >= _LOOKS
            if was is not changes:
                slow[rank] = factor
        was_slow = self.figures.slow
        self.figures = StragglerFigures(seconds=tuple(seconds), factors=tuple(factors), slow=slow, hosts=self.hosts)
        for rank in sorted(slow.keys() ^ was_slow.keys()):
            self._say(rank, medians[rank // size])

    def _say(self, rank: int, median: float) -> None:
        figures, now = self.figures, time.perf_counter()
        self._looks[rank] = 0
        if rank not in figures.slow:
            lasted = time_text(now - self._since.pop(rank))
            log.warning("%s is no longer slow, after %s", figures.name(rank), lasted, alike=True)
            return
        self._since[rank] = now
        log.warning(
            "%s is slow, and the others wait for it: it takes %.1f ms per step by itself, %.1f times the median of its %d peers "
            "(%.1f ms). Look at its device and cores, at what else runs there, and at its input",
            *(figures.name(rank), figures.seconds[rank] * 1e3, figures.slow[rank], self._stage_size, median * 1e3),
            alike=True,
        )
