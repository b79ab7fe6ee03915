"""Keep the cost of checkpoints within a share of training's time: how far windows are apart, and how long tiers rest.

*Captures* cost time of the training thread in hooks, and longer steps until memory has the segments. *Tiers*, storage
and copies on other nodes, cost longer steps while at work. A step's extra time is measured against the quiet steps
shortly before, during which nothing of ours worked: the same machine, the same minute. Without quiet steps, some are
made: the next window starts later, and tiers rest for some steps. A run with a large state begins like this: its first
window and each tier's first generation are measured before there is a second. Where no step beside such a generation
could be compared, a part of its time counts as its cost.

Every rank keeps an account: seconds that checkpoints have cost since the first step, and may have cost. A window has a
mean cost in seconds, so the next begins when training has earned that cost, and up to three times as much while the
account is overdrawn, as after the first steps. So the whole run's share comes to the target.

Captures come first, since most restarts need the newest generation in memory: windows are as close to each other as the
target allows. The rest of the target is for tiers, which rest between generations accordingly, but never longer than a
given time. A quarter of the target belongs to tiers whatever captures cost.

Steps between windows that a user has given are a *bound*, kept whatever it costs: only tiers rest, and the number that
would meet the target is said. A tier for which training waited rests at once. Where windows leave no quiet steps, tiers
are compared with steps of captures alone, and captures cost what hooks take. For goodput, `slowed`, a run with a large state
has quiet steps behind its first window, once; what could not be compared is presumed to be as much longer as what could.
The exchange that opens a window carries each rank's measurements, and the largest decide.

Source: CheckFreq (2021), Sec. 4.3; we differ in measuring tiers apart from captures, and in paying back earlier cost.
"""

from __future__ import annotations

import math
import statistics
import time
from bisect import bisect
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from enum import IntEnum
from typing import Any, Protocol

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.process import Overhead
from lightning_moe_ckpt.session._window import PPM, Costs, PacingVote

log = rank_logger(__name__)

_WARM_UP_STEPS = 5
"""First steps of an incarnation, slower than later steps."""
_SOME_STEPS = 8
"""Least quiet steps for a comparison."""
_QUIET_STEPS = 32
"""Most quiet steps in a comparison."""
_REMEMBERED_STEPS = 128
"""Remembered steps per cause."""
_WAITING_STEPS = 1000
"""Most steps that wait for quiet ones to be compared with; quiet steps older than this many steps are stale."""
_PROBE_STEPS = 12
"""Steps of rest for captures and tiers when quiet steps are missing."""
_CALM_STEPS = 32
"""Steps from a run's first window to the next: the first generation goes to storage meanwhile, and quiet steps follow."""
_DECISION_STEPS = 10
"""Least steps between two decisions."""
_LEAST_PART = 0.25
"""Part of the target that is left for tiers, and for captures, whatever else costs."""
_FACTOR_OVERDRAWN = 3.0
"""Most to be earned before the next window or generation while the account is overdrawn, in mean costs of one."""
_FACTOR_AT_ONCE = 4.0
"""Largest factor for the gap between windows in one decision."""
_FACTOR_LONG = 6.0
"""Multiple of a median quiet step beyond which a longer step has another cause, and counts as this long."""
_MARKS = 64
"""A quarter of the past states of the account that are remembered at most; older ones are thinned out."""
_LARGE_NBYTES = 2**23
"""Bytes of a window from which on a run begins slowly; less makes no difference to steps."""
_PRESUMED_SHARE = 0.25
"""Part of a tier's work by which steps are taken to be longer as long as no step beside it was compared."""
_FOREVER = 2**62
"""Microseconds for which a tier has been idle that was never at work."""


class Paced(Protocol):
    """A tier's worker, as pacing sees it."""

    name: str
    takes_every: bool
    """Whether the tier gets every generation."""
    num_complete: int
    """Generations completed."""
    rate: float | None
    """Bytes per second; `None` before the first generation."""

    @property
    def idle(self) -> bool:
        """Whether no generation is under way."""


def next_gap(gap: int, costs: Costs, *, period: int, share: float, most: float) -> int:
    """Return the least steps between starts of windows from now on, `gap` so far; 0 for no limit.

    Windows may cost a `share` of training's time, and start every `period` steps without a limit, `most` seconds apart at most.
    """
    steps = min(_earned(costs.window, costs.owed, share) / costs.step, _FACTOR_AT_ONCE * max(gap, period))
    if not costs.known:
        steps = max(steps, period + _PROBE_STEPS)
    longest = most - costs.window - sum(cost for cost, _ in costs.tiers)
    found = int(min(math.ceil(steps), longest / costs.step))
    return found if found > period else 0


def next_rest(costs: Costs, tier: int, *, share: float, most: float) -> float:
    """Return the seconds that a tier rests after each generation from now on.

    The tier may cost a `share` of training's time, and generations start at most `most` seconds apart.
    """
    cost, busy = costs.tiers[tier]
    rest = _earned(cost, costs.owed, share) - busy
    if not costs.known:
        rest = max(rest, _PROBE_STEPS * costs.step)
    rest = min(rest, most - busy)  # negative if the tier takes every generation it can
    return rest if rest >= costs.step else 0.0


def _earned(cost: float, owed: float, share: float) -> float:
    """Return the seconds of training that earn `cost`, and some of the debt."""
    return min(cost + owed, _FACTOR_OVERDRAWN * cost) / share


class _Samples(deque[float]):
    """The newest seconds of one cause."""

    def __init__(self) -> None:
        super().__init__(maxlen=_REMEMBERED_STEPS)

    def mean(self) -> float:
        """Return the mean; 0 without samples."""
        return sum(self) / len(self) if self else 0.0

    def surely(self) -> float:
        """Return the mean less its standard error, at least 0."""
        if len(self) < _SOME_STEPS:
            return max(0.0, self.mean())
        mean = self.mean()
        return max(0.0, mean - math.sqrt(sum((each - mean) ** 2 for each in self)) / len(self))


class _Quiet(deque[float]):
    """Seconds outside of hooks in the newest quiet steps, during which nothing of ours worked."""

    def __init__(self) -> None:
        super().__init__(maxlen=_QUIET_STEPS)
        self.newest = -_WAITING_STEPS
        """Number of the newest step."""
        self.mean = self.longest = 0.0
        """Mean seconds with long steps cut to `longest`, and the cut, in seconds."""
        self.compared = self.longer = 0.0
        """Seconds of steps compared with these, and by which they were longer."""

    def add(self, seconds: float, step: int) -> None:
        """Note a step."""
        self.append(seconds)
        self.newest, number, ordered = step, len(self), sorted(self)
        self.longest = _FACTOR_LONG * ordered[number // 2]
        usual = bisect(ordered, self.longest)
        self.mean = (sum(ordered[:usual]) + self.longest * (number - usual)) / number

    def more(self, seconds: float) -> float:
        """Return the seconds by which a step was longer; negative if shorter."""
        return min(seconds, self.longest) - self.mean


class StepKind(IntEnum):
    """Use of a step for comparisons; of several kinds noted during one step the largest holds."""

    QUIET = 0
    """Nothing was captured."""
    CAPTURED = 1
    """A segment of a window was taken."""
    UNUSUAL = 2
    """A whole generation was taken on the training thread: the step is compared with no other."""


class _TierCost:
    """One tier's work on this rank: when, for how many steps, and the longer steps beside that work."""

    def __init__(self, worker: Paced) -> None:
        self.worker = worker
        self.busy, self._complete = False, 0
        self.idle_since = -math.inf
        self.rested = -math.inf
        """Time of the newest end of work, and of the rest after training waited, in seconds of the clock."""
        self._steps, self._lasted = 0, deque[int](maxlen=16)
        """Steps with work since the newest completed generation, and in each of the newest generations."""
        self.longer, self.seconds = _Samples(), 0.0
        """Seconds by which steps with work were longer: samples, and the sum so far."""

    def worked(self, now: float) -> bool:
        """Return whether the tier has worked since the last call."""
        was_busy, had = self.busy, self._complete
        self.busy, self._complete = not self.worker.idle, self.worker.num_complete
        if not self.busy and not was_busy and self._complete == had:
            return False
        self._steps += 1
        if not self.busy:
            self.idle_since = now
            self._lasted.append(self._steps)
            self._steps = 0
        return True

    def per_generation(self, step: float, nbytes: int) -> tuple[float, float]:
        """Return the seconds by which a generation makes steps longer, and the seconds of its work.

        `step` is the duration of a quiet step, in seconds, and `nbytes` the size of a generation.
        """
        if not self.longer and self.worker.rate and nbytes >= _LARGE_NBYTES:
            return _PRESUMED_SHARE * nbytes / self.worker.rate, nbytes / self.worker.rate
        steps = max(self._steps, sum(self._lasted) / len(self._lasted) if self._lasted else 0)
        return steps * self.longer.surely(), steps * (step + self.longer.mean())


class _CaptureCost:
    """Captures' cost to this rank's steps."""

    def __init__(self) -> None:
        self.steps, self._windows = 0, deque[int](maxlen=16)
        """Steps with captures since the newest window began, and in each of the newest windows before it that had any."""
        self.hooks, self.longer, self.seconds = _Samples(), _Samples(), 0.0
        """Seconds per step with captures, in hooks and beyond quiet steps where no tier worked; the sum of the latter."""

    def opened(self) -> None:
        """Note that a window has begun."""
        if self.steps:
            self._windows.append(self.steps)
        self.steps = 0

    def per_window(self, base: float) -> float:
        """Return the seconds that a window costs; `base` is the time in hooks of a quiet step, in seconds."""
        steps = sum(self._windows) / len(self._windows) if self._windows else self.steps
        return steps * (max(0.0, self.hooks.mean() - base) + self.longer.surely())


class MeasuredSteps:
    """Cost of checkpoints to this rank's steps, measured at the end of each step on the training thread.

    Args:
        workers: workers of all tiers; those that take every generation belong to captures.
        clock: returns seconds.
        bounded: whether windows may leave no quiet steps for good.
    """

    def __init__(self, workers: Sequence[Paced], clock: Callable[[], float], *, bounded: bool = False) -> None:
        self._memory = [worker for worker in workers if worker.takes_every]
        self.tiers = [_TierCost(worker) for worker in workers if not worker.takes_every]
        self.captures, self._clock, self._bounded = _CaptureCost(), clock, bounded
        self._kind = StepKind.QUIET
        self._last: tuple[float, float, float] | None = None
        """Time, seconds in hooks and seconds of validation at the last step's end; `None` before, and in a replay."""
        self._quiet, self._alone, self._base = _Quiet(), _Quiet(), _Samples()
        """Seconds outside of hooks in quiet steps, and in steps with captures alone; seconds in hooks of quiet steps."""
        self._waiting: deque[tuple[bool, int, float]] = deque(maxlen=_WAITING_STEPS)
        """Steps to be compared: whether captures worked, bits of the tiers at work, and seconds outside of hooks."""
        self.steps, self.seconds, self.hooks, self.window_nbytes = 0, 0.0, 0.0, 0
        self.slowed = 0.0
        """Seconds by which steps were longer while captures and tiers worked; presumed by `share` where steps were not compared."""
        self.share: float | None = None
        """Part of these steps by which they were longer, here or, until known, in earlier starts; `None` for unknown."""
        self._charged = self._beside = 0.0
        """Seconds charged to captures and tiers, and seconds of steps beside their work."""
        self._marks: list[tuple[float, float]] = [(0.0, 0.0)]
        """Past states of the account: seconds of training, and seconds that checkpoints had cost."""

    def note(self, kind: StepKind) -> None:
        """Note the kind of the step under way."""
        self._kind = max(kind, self._kind)

    def stepped(self, hooks: float | None, validated: float = 0.0) -> None:
        """Note that a step has ended, with the seconds in `hooks` and of validation so far; `None` in a replay."""
        now, touched = self._clock(), 0
        last, self._last = self._last, None if hooks is None else (now, hooks, validated)
        for index, tier in enumerate(self.tiers):
            if tier.worked(now):
                touched |= 1 << index
        kind, self._kind = self._kind, StepKind.QUIET
        captured = kind is StepKind.CAPTURED
        for worker in self._memory:
            captured = captured or not worker.idle
        self.captures.steps += captured
        if last is None or hooks is None:
            return
        total, in_hooks = now - last[0], hooks - last[1]
        self.steps, self.seconds, self.hooks = self.steps + 1, self.seconds + total, self.hooks + in_hooks
        if self.steps <= _WARM_UP_STEPS or kind is StepKind.UNUSUAL:
            return
        (self.captures.hooks if captured else self._base).append(in_hooks)
        body = total - in_hooks - (validated - last[2])
        if captured or touched:
            self._waiting.append((captured, touched, body))
            self._beside += body
        else:
            self._quiet.add(body, self.steps)
        if self._bounded and captured and not touched:
            self._alone.add(body, self.steps)
        if self._waiting and len(basis := self._basis) >= _SOME_STEPS:
            while self._waiting:
                self._compare(basis, *self._waiting.popleft())
        quiet, share = self._quiet, self.share
        unknown = self._beside - quiet.compared
        self.slowed = self._charged if share is None else max(0.0, quiet.longer) + share * unknown

    @property
    def _basis(self) -> _Quiet:
        """Steps for comparison with others."""
        none = len(self._quiet) < _SOME_STEPS or self.steps - self._quiet.newest >= _WAITING_STEPS
        return self._alone if self._bounded and none else self._quiet

    def _compare(self, basis: _Quiet, captured: bool, touched: int, body: float) -> None:  # of a queue
        """Charge captures, or tiers, with a step's time beyond the mean of quiet steps.

        If both worked, captures are charged with their mean cost without tiers, and tiers with the rest.
        """
        more, captures = basis.more(body), self.captures
        if basis is self._quiet:
            basis.compared, basis.longer = basis.compared + body, basis.longer + more
            self.share = max(0.0, basis.longer) / basis.compared
        if captured and not touched:
            captures.longer.append(more)
        through_captures = (more if not touched else captures.longer.mean()) if captured else 0.0
        captures.seconds += through_captures
        share, self._charged = (more - through_captures) / max(1, touched.bit_count()), max(0.0, captures.seconds)
        for index, tier in enumerate(self.tiers):
            if touched >> index & 1:
                tier.longer.append(share)
                tier.seconds += share
            self._charged += max(0.0, tier.seconds)

    def costs(self, target: float) -> Costs:
        """Return this rank's costs; `owed` is in view of the `target`."""
        base, basis = self._base.mean(), self._basis
        known = len(basis) >= _SOME_STEPS
        step = basis.mean + base if known else self.seconds / max(1, self.steps)
        return Costs(
            known=known and self.steps - basis.newest < _WAITING_STEPS,
            step=max(step, 1e-6),
            base=base,
            window=self.captures.per_window(base),
            owed=max(0.0, self._cost - target * self.seconds),
            tiers=tuple(tier.per_generation(step, self.window_nbytes) for tier in self.tiers),
        )

    @property
    def _cost(self) -> float:
        return self.hooks + self._charged

    def figures(self) -> dict[str, Any]:
        """Return the measured figures of steps for the run's log: means in seconds, noise as a part, `slowed` in all, by tier."""
        captures, mean, quiet = self.captures, self._basis.mean, list(self._basis)  # a copy: training goes on
        return {
            "step_seconds": mean if len(quiet) >= _SOME_STEPS else None,
            "step_noise": statistics.pstdev(quiet) / mean if len(quiet) > 1 and mean else 0.0,
            "hooks_quiet_seconds": self._base.mean() or None,
            "hooks_captured_seconds": captures.hooks.mean() or None,
            "slowed_seconds": {"host": captures.seconds, **{tier.worker.name: tier.seconds for tier in self.tiers}},
        }

    def shares(self) -> tuple[float, dict[str, float], float]:
        """Return the shares of hooks, of tiers, and of all in the second half of training, as in `Overhead`."""
        seconds, cost = self.seconds or 1.0, self._cost
        past = next(mark for mark in reversed(self._marks) if mark[0] <= self.seconds / 2)
        tiers = {"host": self.captures.seconds, **{tier.worker.name: tier.seconds for tier in self.tiers}}
        recent = max(0.0, cost - past[1]) / ((self.seconds - past[0]) or 1.0)
        return self.hooks / seconds, {name: max(0.0, each) / seconds for name, each in tiers.items()}, recent

    def advice(self, bound: str, period: int, target: float) -> str:
        """Return the cost of a `bound` of `period` steps beyond the target, and a bound without, in words; else an empty text."""
        cost = self.hooks + max(0.0, self.captures.seconds)
        if not bound or cost <= target * self.seconds:
            return ""
        told = f"{bound} costs {cost / self.seconds:.1%} of training's time; the target is {target:.1%}"
        base, rest = self._base.mean() * self.steps, self.seconds - self._cost
        room = target / (1 - target) * rest - base  # seconds for windows within the target, less a part for tiers
        room *= 1 - _LEAST_PART * any(tier.seconds > 0 for tier in self.tiers)
        if room <= 0:
            return f"{told}; no number would meet it: hooks of steps without copies cost {base / (base + rest):.1%}"
        return f"{told}; every_n_steps={max(period + 1, math.ceil(period * (cost - base) / room))} would meet it"

    def mark(self) -> None:
        """Remember the account's state; drop every second past state when there are too many."""
        if self.seconds - self._marks[-1][0] >= self._marks[-1][0] / _MARKS:
            self._marks.append((self.seconds, self._cost))
        if len(self._marks) > 4 * _MARKS:
            del self._marks[1::2]


class Governor:
    """Decide with all ranks when windows may begin and how long tiers rest, by the costs that each rank measures.

    Args:
        workers: workers of all tiers; tiers that take every generation never rest.
        target: share of training's time that checkpoints may cost; `None` only measures.
        at_least: most time from one generation of a tier to the next.
        bound: see `Policy.bound`.
        speaks: whether to log decisions here.
        least_seconds, least_steps: seconds and steps of training before the first decision.
        clock: returns seconds.
    """

    def __init__(
        self,
        workers: Sequence[Paced],
        *,
        target: float | None,
        at_least: timedelta,
        bound: str = "",
        speaks: bool = False,
        least_seconds: float = 1.0,
        least_steps: int = 20,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.measured, self._clock = MeasuredSteps(workers, clock, bounded=bool(bound)), clock
        self._target, self._at_least, self._speaks = target, at_least.total_seconds(), speaks
        self._least_seconds, self._least_steps = least_seconds, least_steps
        self.gap_steps = 0
        """Least steps from one window's start to the next; the same on all ranks."""
        self.rest_seconds = {tier.worker.name: 0.0 for tier in self.measured.tiers}
        """Seconds that each tier rests after a generation; the same on all ranks."""
        self.calm = False
        """Whether a run begins that needs quiet steps behind its first window; the same on all ranks."""
        self._period = 1
        self._decided = 0
        """Step of the newest decision."""
        self._asked = False
        """Whether the votes under way carry costs."""
        self._said: dict[str, float] = {}
        self._bound = bound

    def idle_for(self, worker: Paced) -> int:
        """Return the microseconds for which a tier has been idle here, at least 1; 0 while at work, or in a rest after a wait."""
        if not worker.idle:
            return 0
        now, since = self._clock(), -math.inf
        for tier in self.measured.tiers:
            if tier.worker is worker:
                since = max(tier.rested, now if tier.busy else tier.idle_since)
        return max(0, 1 + int(min((now - since) * PPM, _FOREVER)))

    def waited(self, worker: Paced, seconds: float) -> None:
        """Note that training waited here for a tier, which rests on all ranks until the part for tiers has earned the wait."""
        for tier in self.measured.tiers:
            if tier.worker is worker:
                self.measured.hooks -= seconds
                tier.seconds += seconds
                rest = seconds / (_LEAST_PART * (self._target or _PRESUMED_SHARE))
                tier.rested = self._clock() + min(rest, self._at_least - self.rest_seconds[worker.name])

    def may_work(self, name: str, idle_for: int) -> bool:
        """Return whether a tier may take a generation that has been `idle_for` microseconds on every rank."""
        return idle_for > min(self.rest_seconds.get(name, 0.0) * PPM, _FOREVER)

    def overhead(self, *, start_seconds: float, end_seconds: float) -> Overhead:
        """Return the checkpoints' cost on this rank."""
        hooks, tiers, recent = self.measured.shares()
        return Overhead(
            target=self._target,
            hooks=hooks,
            tiers=tiers,
            recent=recent,
            gap_steps=self.gap_steps,
            rest_seconds=dict(self.rest_seconds),
            start_seconds=start_seconds,
            end_seconds=end_seconds,
            advice=self.measured.advice(self._bound, self._period, self._target or 1.0) if self._decided else "",
        )

    def vote(self, period_steps: int) -> PacingVote:
        """Return this rank's vote, without costs unless a decision is due. Without a limit windows start every `period_steps` steps."""
        self._period = period_steps
        steps, first, target = self.measured.steps, self._least_steps, self._target
        # Due by steps, which all ranks count alike; ranks tell each other whether their seconds are enough.
        due = steps >= first and steps - self._decided >= min(_DECISION_STEPS, first)
        self._asked = due and target is not None
        if self._asked:
            self.measured.mark()
        is_large = int(self.measured.window_nbytes >= _LARGE_NBYTES)
        if target is None or not self._asked or self.measured.seconds < self._least_seconds:
            step = round(self.measured.seconds / max(1, steps) * PPM)  # 0 before the first: not known
            return PacingVote(0, 0, is_large, (step, 0, 0, 0) + (0, 0) * len(self.rest_seconds))
        costs = self.measured.costs(target)
        return PacingVote(1, int(costs.known), is_large, costs.row())

    def agreed(self, votes: Sequence[PacingVote]) -> None:
        """Take all ranks' votes, and decide if all of them are due."""
        is_large, target = any(vote.is_large for vote in votes), self._target
        if target is None or self._bound:
            self.gap_steps = _CALM_STEPS if is_large and self.calm and self.measured.steps < _CALM_STEPS else 0
        if target is None:
            return
        if not self._decided and is_large:  # until there is something to decide by
            if not self._bound:
                most = self._at_least / Costs.largest(votes).step
                self.gap_steps = int(min(max(self._period + _PROBE_STEPS, self._least_steps), most))
            self.rest_seconds = dict.fromkeys(self.rest_seconds, self._at_least)
        if not self._asked or not all(vote.is_due for vote in votes):
            return
        self._decided = self.measured.steps
        self._decide(Costs.largest(votes), target)

    def _decide(self, costs: Costs, target: float) -> None:
        allowed = max(target - costs.base / costs.step, target * _LEAST_PART)
        costly = sum(1 for cost, _ in costs.tiers if cost > 0)
        for_captures = allowed * (1 - _LEAST_PART) if costly else allowed
        before = max(self.gap_steps, self._period)
        if self._bound:
            if (
                self._speaks
                and (advice := self.measured.advice(self._bound, self._period, target))
                and "bound" not in self._said
            ):
                self._said["bound"] = 1.0
                log.warning("%s. It is kept to, and tiers rest longer", advice)
            if costs.base + costs.window / before > for_captures * costs.step:
                costs = costs._replace(owed=0.0)  # never paid back: tiers would rest for it for good
        else:
            most = self._at_least
            self.gap_steps = next_gap(self.gap_steps, costs, period=self._period, share=for_captures, most=most)
        apart = max(self.gap_steps, self._period)
        if self._is_news("windows", apart, self._period):
            log.info(
                "captures cost %.1f %% of training's time where windows start every %d steps (overhead_target=%g): they now "
                "start every %d steps",
                *((costs.base + costs.window / before) / costs.step * 1e2, before, target, apart),
            )
        left = max(allowed - costs.window / (apart * costs.step), allowed * _LEAST_PART) / max(1, costly)
        for index, name in enumerate(self.rest_seconds):
            cost, busy = costs.tiers[index]
            # When the rest ends the next window may just have begun, and the tier takes the window after that.
            most = self._at_least - apart * costs.step - costs.window
            rest = self.rest_seconds[name] = next_rest(costs, index, share=left, most=most)
            if cost and self._is_news(name, busy + rest, busy):
                log.info(
                    "a generation in %s costs %.2f s of training (overhead_target=%g): it now rests for %.1f s after each",
                    *(name, cost, target, rest),
                )

    def _is_news(self, what: str, now: float, first: float) -> bool:
        """Return whether a value has changed by more than a factor of two since it was logged."""
        said = self._said.get(what, first)
        if not self._speaks or said / 2 <= now <= 2 * said or now <= 0:
            return False
        self._said[what] = now
        return True
