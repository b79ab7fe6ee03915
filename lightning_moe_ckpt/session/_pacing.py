"""Keep what checkpoints cost within a share of training's time: how far windows are apart, and how long tiers rest.

Two things cost: *captures*, by time of the training thread in hooks and by steps that are longer while copies and digests
run; and *tiers*, storage and copies on other nodes, by steps that are longer while they work. Each is the difference
between steps with it and without it that are alike otherwise: medians, which a validation or a stall does not move, and
no difference where it may be noise. Where there are no steps to compare with, there soon are: windows are further apart
for once, or a tier rests for some steps.

Captures come first, since the newest generation in memory is what most restarts need: windows are as close to each other
as the target allows. What it leaves is for tiers, which rest between generations for as long as that takes, but never
longer than a given time. Of a target that captures alone exceed, they leave a quarter.

Every rank measures; the exchange that opens a window carries what it found, and the largest of all ranks decides. So all
ranks have windows at the same steps. Nothing is changed before there is enough to go by, nor by more than a factor of
two at once, nor for little.

Source: CheckFreq (2021), Sec. 4.3, which also adapts a period to a target; we differ in measuring tiers apart from captures.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

log = logging.getLogger(__name__)

_WARM_UP_STEPS = 10
"""First steps of an incarnation, which are not like those that follow."""
_REMEMBERED_STEPS = 64
"""Of each kind."""
_SOME_STEPS = 8
"""Of each kind that a comparison takes at least."""
_STALE_STEPS = 2000
"""Steps after which a kind that does not come any more is not compared with."""
_PROBE_STEPS = 12
"""For which a tier rests where it never did, so that there is something to compare with."""
_DECISION_STEPS = 25
"""Least steps between two decisions."""
_LEAST_PART = 0.25
"""Part of the target that is left for tiers, and for captures, whatever else costs."""
_CALM = (0.6, 1.1)
"""Factors between which a change is not worth making."""
_SURE = 3.0
"""Standard errors of a difference below which it may be noise."""
_PPM = 1_000_000
_VOTES = 5
"""Integers in the exchange, ahead of two for each tier."""


class Paced(Protocol):
    """What is asked of the worker of a tier."""

    @property
    def name(self) -> str:
        """Name of the tier."""

    @property
    def takes_every(self) -> bool:
        """Whether every generation comes to it."""

    @property
    def idle(self) -> bool:
        """Whether no generation is under way."""

    @property
    def num_complete(self) -> int:
        """Generations completed."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What one rank has measured, or the largest of all ranks. Shares are of the time of a step."""

    base: float
    """Share of hooks in a step at which nothing is captured; 0 where there is none."""
    capture: float
    """Share by which a step is longer at which something is captured."""
    compared: bool
    """Whether there were steps of both kinds."""
    step: float
    """Seconds of a step."""
    slowdowns: tuple[float | None, ...] = ()
    """By tier: share by which a step is longer while it works; `None` where there is nothing to compare with."""
    busy_steps: tuple[float, ...] = ()
    """By tier: steps for which a generation keeps it at work."""

    def of_captures(self, window: int, apart: int) -> float:
        """Return the share that captures cost if windows of so many steps begin so many steps apart."""
        return self.base + self.capture * min(1.0, window / apart)


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """What checkpoints have cost this rank's training, as shares of its time; steps of a replay do not count."""

    target: float | None
    """`overhead_target`."""
    hooks: float
    """Of the training thread in hooks, from the first step on."""
    tiers: dict[str, float]
    """By which steps were longer while tiers worked, as far as that was measured; `host` is for copies to memory."""
    gap_steps: int
    """Least steps from the start of a window to that of the next now; 0 for no limit."""
    rests: dict[str, float]
    """Seconds that each tier rests between generations now."""
    start_seconds: float
    """From the start of the fit to the first batch, in hooks."""
    end_seconds: float
    """For which the end waited until everything was durable."""

    @property
    def share(self) -> float:
        """Part of training's time, from the first step on."""
        return self.hooks + sum(self.tiers.values())

    def __str__(self) -> str:
        tiers = "".join(f" and {share:.1%} by {tier} at work" for tier, share in self.tiers.items() if share)
        target = "" if self.target is None else f" (overhead_target={self.target:g})"
        return (
            f"checkpoints cost {self.share:.1%} of training's time{target}: {self.hooks:.1%} in hooks{tiers}; the start "
            f"took {self.start_seconds:.2f} s, the end {self.end_seconds:.2f} s"
        )


def next_gap(gap: int, costs: Costs, *, window: int, period: int, target: float, most: int) -> int:
    """Return the least steps between starts of windows from now on; 0 for no limit.

    Args:
        gap: the limit so far.
        costs: agreed on by all ranks.
        window: steps of a window, which all are captured.
        period: steps between starts of windows without a limit.
        target: share of time that captures may cost.
        most: steps that the limit may reach.
    """
    now = max(gap, period)
    allowed = max(target - costs.base, target * _LEAST_PART)
    wanted = min(math.ceil(window * costs.capture / allowed), most)
    if not costs.compared:
        wanted = max(wanted, 2 * period)
    wanted = max(wanted, period)
    if costs.compared and wanted > period and _CALM[0] * now <= wanted <= _CALM[1] * now:
        return gap
    found = min(max(wanted, now // 2), 2 * now)
    return found if found > period else 0


def next_rest(rest: float, slowdown: float | None, busy: float, *, left: float, most: float, step: float) -> float:
    """Return the seconds that a tier rests after each generation from now on.

    Args:
        rest: seconds so far.
        slowdown: share by which steps are longer while it works; `None` if that is not known.
        busy: seconds for which a generation keeps it at work.
        left: share of time that it may cost.
        most: most seconds from the start of one generation to that of the next.
        step: seconds of a step.
    """
    wanted = max(rest, _PROBE_STEPS * step) if slowdown is None else busy * (slowdown / left - 1.0)
    wanted = min(max(0.0, wanted), max(0.0, most - busy))
    if _CALM[0] * rest <= wanted <= _CALM[1] * rest or abs(wanted - rest) < step:
        return rest
    found = min(max(wanted, rest / 2), 2 * max(rest, busy, _PROBE_STEPS * step))
    return found if found >= step else 0.0


@dataclass
class _Kind:
    """Steps at which the same was captured and the same tiers worked."""

    bodies: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_STEPS))
    """Seconds outside of hooks."""
    hooks: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_STEPS))
    """Seconds in hooks."""
    newest: int = 0
    """Number of the newest of them."""


def _difference(pairs: Sequence[tuple[_Kind, _Kind]]) -> float | None:
    """Return by how many seconds steps of the first kinds are longer than those of the second; `None` without pairs."""
    weighted = [(max(len(a.bodies), 1), _sure_difference(a.bodies, b.bodies)) for a, b in pairs]
    total = sum(weight for weight, _ in weighted)
    return sum(weight * seconds for weight, seconds in weighted) / total if weighted else None


def _sure_difference(longer: Sequence[float], shorter: Sequence[float]) -> float:
    """Return the difference of the medians; 0 where it is negative or may be noise."""
    medians = [statistics.median(each) for each in (longer, shorter)]
    spreads = [
        statistics.median([abs(x - m) for x in each]) for each, m in zip((longer, shorter), medians, strict=True)
    ]
    # Of a normal distribution: 1.48 deviations from the median to the standard deviation, 1.25 to the median's error.
    error = 1.48 * 1.25 * math.hypot(*(s / math.sqrt(len(e)) for s, e in zip(spreads, (longer, shorter), strict=True)))
    difference = medians[0] - medians[1]
    return difference if difference > _SURE * error else 0.0


class Governor:
    """Measure one rank's steps, and decide with all ranks when windows may begin and which tiers rest.

    Args:
        workers: of all tiers; those that take every generation never rest.
        target: share of training's time that checkpoints may cost; `None` only measures.
        at_least: most time from one generation of a tier to the next.
        speaks: whether to log decisions here.
        least_seconds: of training, before anything is decided.
        least_steps: of training, before anything is decided.
        clock: seconds.
    """

    def __init__(
        self,
        workers: Sequence[Paced],
        *,
        target: float | None,
        at_least: timedelta,
        speaks: bool = False,
        least_seconds: float = 5.0,
        least_steps: int = 50,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._workers = [worker for worker in workers if not worker.takes_every]
        self._target, self._at_least, self._speaks = target, at_least.total_seconds(), speaks
        self._least_seconds, self._least_steps, self._clock = least_seconds, least_steps, clock
        self.gap_steps = 0
        """Least steps from the start of a window to that of the next; the same on all ranks."""
        self.rests = {worker.name: 0.0 for worker in self._workers}
        """Seconds that each tier rests after a generation; the same on all ranks."""
        self.resting: frozenset[str] = frozenset()
        """Tiers that rest here now."""
        self.window = 1
        """Steps of the newest window."""
        self.captured = False
        """Set where the step under way has captured something."""
        self.unusual = False
        """Set where the step under way is like no other."""
        self._period = 1
        self._kinds: dict[tuple[bool, int], _Kind] = {}
        self._last: tuple[float, float] | None = None
        self._states = [(False, 0)] * len(self._workers)
        self._ended = [-math.inf] * len(self._workers)
        self._touched = [0] * len(self._workers)
        """Steps in which each tier has worked since it last completed a generation."""
        self._lasted: list[deque[int]] = [deque(maxlen=16) for _ in self._workers]
        self._worked = [0] * len(self._workers)
        self._num_captured = 0
        self._steps = self._measured = self._decided = 0
        self._seconds = self._hooks = 0.0
        self._asked = False
        """Whether the votes under way carry costs."""
        self._said: dict[str, float] = {}

    # -- measuring

    def stepped(self, hooks: float | None, period_steps: int) -> None:
        """Note that a step has ended.

        Args:
            hooks: seconds in hooks so far; `None` in a replay, whose steps are not like others.
            period_steps: steps between starts of windows without a limit.
        """
        now, self._period = self._clock(), period_steps
        last, self._last = self._last, None if hooks is None else (now, hooks)
        touched = self._look_at_workers(now)
        captured, self.captured = self.captured, False
        unusual, self.unusual = self.unusual, False
        if last is None or hooks is None:
            return
        self._steps += 1
        if self._steps <= _WARM_UP_STEPS or unusual:
            return
        total, in_hooks = now - last[0], hooks - last[1]
        self._measured, self._seconds, self._hooks = self._measured + 1, self._seconds + total, self._hooks + in_hooks
        self._num_captured += captured
        kind = self._kinds.setdefault((captured, touched), _Kind())
        kind.bodies.append(total - in_hooks)
        kind.hooks.append(in_hooks)
        kind.newest = self._steps

    def _look_at_workers(self, now: float) -> int:
        """Return as bits which tiers have worked since the last call."""
        touched, resting = 0, []
        for index, worker in enumerate(self._workers):
            (was_busy, had), busy, has = self._states[index], not worker.idle, worker.num_complete
            self._states[index] = busy, has
            if busy or was_busy or has != had:
                touched |= 1 << index
                self._touched[index] += 1
                self._worked[index] += self._steps >= _WARM_UP_STEPS
                if not busy:
                    self._ended[index] = now
                    self._lasted[index].append(self._touched[index])
                    self._touched[index] = 0
            if not busy and now < self._ended[index] + self.rests[worker.name]:
                resting.append(worker.name)
        self.resting = frozenset(resting)
        return touched

    def costs(self) -> Costs:
        """Return what was measured here."""
        kinds = {
            key: kind
            for key, kind in self._kinds.items()
            if len(kind.bodies) >= _SOME_STEPS and kind.newest > self._steps - _STALE_STEPS
        }
        everything = [body + hooks for k in self._kinds.values() for body, hooks in zip(k.bodies, k.hooks, strict=True)]
        step = statistics.median(everything) if everything else 1.0
        base, capture, compared = self._of_captures(kinds)
        slowdowns: list[float | None] = []
        for index in range(len(self._workers)):
            pairs = [
                (kind, kinds[captured, mask & ~(1 << index)])
                for (captured, mask), kind in kinds.items()
                if mask >> index & 1 and (captured, mask & ~(1 << index)) in kinds
            ]
            found = _difference(pairs)
            slowdowns.append(None if found is None else found / step)
        lasted = [
            max(float(touched), statistics.mean(steps) if steps else 0.0)
            for touched, steps in zip(self._touched, self._lasted, strict=True)
        ]
        return Costs(
            base=base / step,
            capture=capture / step,
            compared=compared,
            step=step,
            slowdowns=tuple(slowdowns),
            busy_steps=tuple(lasted),
        )

    def _of_captures(self, kinds: dict[tuple[bool, int], _Kind]) -> tuple[float, float, bool]:
        """Return the seconds of hooks without a capture, the seconds that one adds, and whether both were measured."""
        hooks = {
            which: [seconds for (captured, _), kind in kinds.items() if captured == which for seconds in kind.hooks]
            for which in (False, True)
        }
        base, with_capture = (statistics.mean(each) if each else 0.0 for each in hooks.values())
        pairs = [
            (kind, kinds[False, mask])
            for (captured, mask), kind in kinds.items()
            if captured and (False, mask) in kinds
        ]
        return base, max(0.0, with_capture - base) + (_difference(pairs) or 0.0), bool(pairs) or not hooks[True]

    def overhead(self, *, start_seconds: float, end_seconds: float) -> Overhead:
        """Return what checkpoints have cost here."""
        costs, measured = self.costs(), max(1, self._measured)
        shares = {
            worker.name: (slowdown or 0.0) * worked / measured
            for worker, slowdown, worked in zip(self._workers, costs.slowdowns, self._worked, strict=True)
        }
        hooks = self._hooks / self._seconds if self._seconds else 0.0
        copies = costs.of_captures(self._num_captured, measured) - hooks if costs.compared else 0.0
        return Overhead(
            target=self._target,
            hooks=hooks,
            tiers={"host": max(0.0, copies), **shares},
            gap_steps=self.gap_steps,
            rests=dict(self.rests),
            start_seconds=start_seconds,
            end_seconds=end_seconds,
        )

    # -- deciding

    @property
    def num_votes(self) -> int:
        """Number of integers in `votes`."""
        return 0 if self._target is None else _VOTES + 2 * len(self._workers)

    def votes(self) -> list[int]:
        """Return this rank's integers for the exchange; zeros unless it is time for a decision."""
        # By steps, which all ranks have taken alike; whether that was long enough they tell each other.
        self._asked = self._steps >= self._least_steps and self._steps - self._decided >= min(
            _DECISION_STEPS, self._least_steps
        )
        if not self._asked or self._seconds < self._least_seconds:
            return [0] * self.num_votes
        costs = self.costs()
        shares = [-1 if each is None else round(each * _PPM) for each in costs.slowdowns]
        own = [1, int(costs.compared), *(round(each * _PPM) for each in (costs.base, costs.capture, costs.step))]
        return [*own, *shares, *(round(each * _PPM) for each in costs.busy_steps)][: self.num_votes]

    def agreed(self, rows: Sequence[Sequence[int]]) -> None:
        """Take the votes of all ranks, and decide."""
        if self._target is None or not self._asked or not all(row[0] for row in rows):
            return
        self._decided, number = self._steps, len(self._workers)
        columns = list(zip(*rows, strict=True))
        base, capture, step = map(max, columns[2:_VOTES])
        by_tier = columns[_VOTES:]
        costs = Costs(
            base=base / _PPM,
            capture=capture / _PPM,
            compared=all(row[1] for row in rows),
            step=step / _PPM,
            slowdowns=tuple(None if min(each) < 0 else max(each) / _PPM for each in by_tier[:number]),
            busy_steps=tuple(max(each) / _PPM for each in by_tier[number:]),
        )
        self._decide(costs, self._target)

    def _decide(self, costs: Costs, target: float) -> None:
        slow = sum(1 for each in costs.slowdowns if each)
        for_captures = target * (1 - _LEAST_PART) if slow else target
        before = costs.of_captures(self.window, max(self.gap_steps, self._period))
        most = max(self._period, int(self._at_least / costs.step))
        self.gap_steps = next_gap(
            self.gap_steps, costs, window=self.window, period=self._period, target=for_captures, most=most
        )
        apart = max(self.gap_steps, self._period)
        if self._is_news("windows", apart, self._period):
            log.info(
                "checkpoints cost %.1f %% of training's time%s: windows now start every %d steps",
                before * 1e2,
                f", more than overhead_target={target:g}" if before > target else f" (overhead_target={target:g})",
                apart,
            )
        left = max(target - costs.of_captures(self.window, apart), target * _LEAST_PART) / max(1, slow)
        for worker, slowdown, busy in zip(self._workers, costs.slowdowns, costs.busy_steps, strict=True):
            seconds = busy * costs.step
            rest = next_rest(
                self.rests[worker.name], slowdown, seconds, left=left, most=self._at_least, step=costs.step
            )
            self.rests[worker.name] = rest
            if slowdown is not None and self._is_news(worker.name, seconds + rest, seconds):
                log.info(
                    "steps take %.0f %% longer while %s works (overhead_target=%g): it now rests for %.1f s after each "
                    "generation",
                    *(slowdown * 1e2, worker.name, target, rest),
                )

    def _is_news(self, what: str, now: float, first: float) -> bool:
        """Return whether it has changed by more than a factor of two since that was said."""
        said = self._said.get(what, first)
        if not self._speaks or said / 2 <= now <= 2 * said or now <= 0:
            return False
        self._said[what] = now
        return True
