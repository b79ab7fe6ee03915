"""Find ranks that are slower than others at what they do alone, although every rank's steps last equally long.

Ranks wait for the slowest one in every collective, so their steps say nothing. What differs is *own work*: the time from
the fetch of a batch until the rank first waits for others. Without expert parallelism that is fetch and forward, since
gradients are exchanged in backward; with it, the part in front of the first layer whose tokens travel, which does not
depend on how tokens are spread; in a pipeline, all of the stage's operations, each up to its first exchange. Hooks of this
package do not count. On a CUDA device events measure it, so that the host, which runs ahead, does not.

So a rank with slow cores, clocks, memory or input is seen. A rank that is slow in backward or on the network alone is not,
nor one under a strategy whose forward waits for others unseen (shards, synchronised batch normalisation): there all ranks
seem equally slow. Stages have different work, so that a rank is compared with the ranks of its stage.

A *look* compares the ranks' mean own work of the newest steps, at least `_LOOK_STEPS` and `_LOOK_SECONDS`; its values come with
votes that are exchanged anyway. A rank is slow from the `_LOOKS`-th look in a row on in which it takes `_FACTOR` times the
median, until as many looks in a row find it below `_FACTOR_BACK`. Means, since a process that is stopped again and again is
slow in few steps, by much; one such step in a while is in one look only.
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
"""First steps of an incarnation, which are slower than later steps."""
_LOOK_STEPS, _LOOK_SECONDS = 64, 10.0
"""Least steps, and least seconds, in a look."""
_LOOKS = 3
"""Looks in a row that make a rank slow, and that end it."""
_FACTOR, _FACTOR_BACK = 1.3, 1.2
"""Multiples of the median from which a rank is slow, and below which it is no longer."""
_LEAST_SECONDS = 5e-4
"""Least seconds per step beyond the median that are worth a word."""
_MOST_STEPS = 1000
_PPM = 1_000_000


class OwnWork:
    """Measures for how long this rank works in each step until it waits for others.

    Args:
        outside: returns seconds that run on outside of hooks only, see `HookClock.outside`.
        device: device of training.
    """

    _under_way: ClassVar[OwnWork | None] = None

    def __init__(self, outside: Callable[[], float], device: torch.device) -> None:
        self._outside, self._device = outside, device if device.type == "cuda" else None
        self._began: Any = None
        self._spans: list[tuple[Any, Any]] = []
        """Begins and ends of the step under way."""
        self._passing: deque[list[tuple[Any, Any]]] = deque()
        """Steps that a device may not have reached yet."""
        self._left_out, self._since = _WARM_UP_STEPS, time.perf_counter()
        self.steps: deque[float] = deque(maxlen=_MOST_STEPS)
        """Seconds of each step since the last look."""

    def begin(self) -> None:
        """Begin to work alone."""
        self._began, OwnWork._under_way = self._mark(), self

    def end(self) -> None:
        """Note that other ranks are waited for from here on; without a begin nothing happens."""
        if self._began is not None:
            self._spans.append((self._began, self._mark()))
            self._began = OwnWork._under_way = None

    @classmethod
    def ends(cls) -> None:
        """End the measurement under way, if any: for whoever is about to wait for other ranks."""
        if cls._under_way is not None:
            cls._under_way.end()

    def stepped(self, *, counts: bool) -> None:
        """Note that a step has ended; one of a replay does not count."""
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
    """Seconds per step that each rank works until it waits for others, by rank; empty before the first look."""
    factors: tuple[float, ...] = ()
    """The same as multiples of the median of the ranks of the same stage."""
    slow: dict[int, float] = field(default_factory=dict)
    """Factors of the ranks that are slow for long enough, by rank."""
    hosts: tuple[str, ...] = ()
    """Host name of each rank."""

    def name(self, rank: int) -> str:
        """Return a rank with its host."""
        return f"rank {rank} on {self.hosts[rank]}" if self.hosts else f"rank {rank}"

    def __str__(self) -> str:
        return ", ".join(f"{self.name(rank)} ({factor:.1f} times the median)" for rank, factor in self.slow.items())


class Stragglers:
    """Decides which ranks are slow, alike on all ranks.

    Args:
        work: own work of this rank.
        stage_size: number of ranks that have equal work: consecutive ones.
    """

    def __init__(self, work: OwnWork, stage_size: int) -> None:
        self.work, self._stage_size = work, stage_size
        self.hosts: tuple[str, ...] = ()
        """Host name of each rank."""
        self.figures = StragglerFigures()
        """Figures of the newest look."""
        self._looks: dict[int, int] = {}
        """Newest looks in a row that speak for a change, by rank."""
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
        before, self.figures = (
            self.figures,
            StragglerFigures(seconds=tuple(seconds), factors=tuple(factors), slow=slow, hosts=self.hosts),
        )
        for rank in sorted(slow.keys() ^ before.slow.keys()):
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
