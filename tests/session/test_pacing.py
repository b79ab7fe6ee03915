"""Decisions of the governor, for runs whose costs are made up: what they come to, and that ranks decide alike."""

from __future__ import annotations

import itertools
import random
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest

from lightning_moe_ckpt.session._pacing import Governor, StepKind

STEP = 0.04


@dataclass
class Worker:
    """A tier that is busy for so many steps with each generation."""

    name: str
    busy_steps: int = 0
    slowdown: float = 0.0
    takes_every: bool = False
    num_complete: int = 0
    rate: float | None = None
    left: int = 0

    @property
    def idle(self) -> bool:
        return self.left == 0


@dataclass
class Rank:
    """One rank: its clocks, its tiers, and what its steps cost."""

    target: float | None = 0.03
    hooks: float = 0.0005
    """Seconds in hooks of every step."""
    capture: float = 0.0
    """Seconds that a captured step takes longer in hooks."""
    copies: float = 0.0
    """Seconds that a captured step takes longer outside of hooks."""
    noise: float = 0.02
    bound: str = ""
    at_least: timedelta = timedelta(minutes=10)
    seed: int = 0
    tiers: Sequence[Worker] = field(default_factory=lambda: [Worker("host", takes_every=True), Worker("storage")])
    begun: list[float] = field(default_factory=list)
    """When generations of the first tier that does not take every one began."""
    now: float = 0.0
    in_hooks: float = 0.0
    cost: float = 0.0
    """Seconds that checkpoints have cost."""
    costs: list[float] = field(default_factory=list)
    """The same by step."""
    seconds: list[float] = field(default_factory=list)
    """Duration of each step."""

    def __post_init__(self) -> None:
        self.governor = Governor(
            self.tiers,
            target=self.target,
            at_least=self.at_least,
            bound=self.bound,
            speaks=True,
            clock=lambda: self.now,
        )
        self.rng = random.Random(self.seed)

    def step(self, *, captured: bool) -> float:
        """Take a step and return by how many seconds checkpoints made it longer."""
        hooks = self.hooks + self.capture * captured
        slow = self.copies * captured + sum(STEP * tier.slowdown for tier in self.tiers if tier.left)
        body = STEP * (1 + self.noise * abs(self.rng.gauss(0.0, 1.0)))
        self.now += body + slow + hooks
        self.in_hooks += hooks
        self.cost += hooks + slow
        self.costs.append(hooks + slow)
        self.seconds.append(body + slow + hooks)
        if captured:
            self.governor.measured.note(StepKind.CAPTURED)
        for tier in self.tiers:
            tier.num_complete += tier.left == 1
            tier.left = max(0, tier.left - 1)
        return hooks + slow


def train(ranks: Sequence[Rank], steps: int, *, window: int = 4, taken: int | None = None) -> list[float]:
    """Let ranks train together, with captures in the first `taken` steps of each window; return what checkpoints have cost each in the second half, as a share of its time."""
    last, costs, times = -(10**9), [0.0] * len(ranks), [0.0] * len(ranks)
    for step in range(steps):
        for rank in ranks:
            rank.governor.measured.stepped(rank.in_hooks)
        if step - last >= max(window, ranks[0].governor.gap_steps):
            last = step
            idle = [[rank.governor.idle_for(tier) for tier in rank.tiers] for rank in ranks]
            votes = [rank.governor.vote(window) for rank in ranks]
            for rank in ranks:
                rank.governor.agreed(votes)
                rank.governor.measured.captures.opened()
            for tiers, idle_for in zip(
                zip(*(rank.tiers for rank in ranks), strict=True), zip(*idle, strict=True), strict=True
            ):
                if not tiers[0].takes_every and ranks[0].governor.may_work(tiers[0].name, min(idle_for)):
                    for rank, tier in zip(ranks, tiers, strict=True):
                        tier.left = tier.busy_steps
                        rank.begun.append(rank.now)
        began = [rank.now for rank in ranks]
        extra = [rank.step(captured=step - last < (taken or window)) for rank in ranks]
        if step >= steps // 2:
            costs = [a + b for a, b in zip(costs, extra, strict=True)]
            times = [a + rank.now - b for a, rank, b in zip(times, ranks, began, strict=True)]
    return [cost / time for cost, time in zip(costs, times, strict=True)]


def test_captures_that_cost_too_much_are_further_apart() -> None:
    """Back to back they would take a fifth of the time, in hooks and by steps that are longer."""
    free = Rank(target=None, capture=0.006, copies=0.003)
    rank = Rank(capture=0.006, copies=0.003)
    assert train([free], 3000)[0] > 0.18
    assert free.governor.gap_steps == 0
    assert train([rank], 3000)[0] < 0.035
    assert 20 <= rank.governor.gap_steps <= 60


@pytest.mark.parametrize("bound", ["", "window=4"])
def test_a_run_without_gaps_has_quiet_steps_once(bound: str) -> None:
    """Behind its first window. They say by how much captured steps are longer, also of those that come long after, and when all are longer."""
    late = Rank(target=None, bound=bound, copies=0.01)
    begins, later = Rank(target=None, bound=bound, copies=0.01), Rank(target=None, bound=bound, copies=0.01)
    begins.governor.calm = True
    for rank in (begins, late, later):
        rank.governor.measured.window_nbytes = 2**30
    train([begins], 60)
    assert 24 <= sum(cost < 0.005 for cost in begins.costs) <= 32
    assert begins.governor.gap_steps == 0
    assert train([begins], 2500)[0] > 0.15, "no more of them"
    train([late], 2500)
    assert late.governor.measured.share is None
    assert late.governor.measured.slowed < 0.1, "nothing to compare with"
    later.governor.measured.share = begins.governor.measured.share
    train([later], 2500)
    for rank in (begins, later):
        slowed = rank.cost - rank.in_hooks
        assert rank.governor.measured.slowed == pytest.approx(slowed, rel=0.15)


@pytest.mark.parametrize(("busy", "slowdown"), [(20, 0.4), (3, 0.8), (200, 0.15)])
def test_a_tier_that_slows_steps_down_rests(busy: int, slowdown: float) -> None:
    """Until what it costs is within the target, of which hooks take most; without one it works all the time."""
    free = Rank(target=None, tiers=[Worker("storage", busy, slowdown)])
    rank = Rank(hooks=0.0009, tiers=[Worker("storage", busy, slowdown)])
    steps = max(4000, 100 * busy)
    assert train([free], steps)[0] > 2 * 0.03
    assert train([rank], steps)[0] < 0.036
    assert rank.governor.rest_seconds["storage"] > 0
    assert rank.tiers[0].num_complete >= 5
    found = rank.governor.overhead(start_seconds=1.0, end_seconds=2.0)
    assert found.tiers["storage"] > 0.005
    assert found.share == pytest.approx(rank.cost / rank.now, abs=0.005)
    assert "by storage at work; besides, the start took 1.00 s and the end 2.00 s" in str(found)


def test_no_tier_rests_for_longer_than_it_may() -> None:
    """Whatever it costs."""
    rank = Rank(at_least=timedelta(seconds=20), tiers=[Worker("storage", 50, 2.0)])
    train([rank], 6000)
    assert 10 <= rank.governor.rest_seconds["storage"] <= 20 - 50 * STEP


@pytest.mark.parametrize("capture", [0.0, 0.1])
def test_storage_gets_a_generation_in_time(capture: float) -> None:
    """Whatever captures and storage cost: it takes the last window that begins before it has waited for too long."""
    rank = Rank(capture=capture, at_least=timedelta(seconds=20), tiers=[Worker("storage", 25, 2.0)])
    train([rank], 8000)
    waits = [after - before for before, after in itertools.pairwise(rank.begun[len(rank.begun) // 2 :])]
    assert 8.0 < max(waits) <= 21.0


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.5])
def test_what_costs_little_is_left_alone(noise: float) -> None:
    """Whatever else makes steps long: windows are as close as the policy has them nearly all the time, and storage works a
    third of it at least.
    """
    rank, gaps, rests = Rank(capture=0.0002, noise=noise, seed=4, tiers=[Worker("storage", 10)]), [], []
    train([rank], 200)
    for _ in range(40):
        train([rank], 100)
        gaps.append(rank.governor.gap_steps)
        rests.append(rank.governor.rest_seconds["storage"])
    assert statistics.quantiles(gaps, n=10)[7] == 0
    assert statistics.quantiles(rests, n=10)[7] < 2 * 10 * STEP


def test_nothing_is_decided_before_there_is_enough_to_go_by() -> None:
    """By steps and by seconds."""
    rank = Rank(capture=0.01, tiers=[Worker("storage", 10, 0.5)])
    train([rank], 17)
    assert (rank.governor.gap_steps, rank.governor.rest_seconds) == (0, {"storage": 0.0})
    train([rank], 3)  # counted from the end of the first
    train([rank], 2)
    assert rank.governor.gap_steps > 0


def test_windows_come_closer_again_when_they_cost_less() -> None:
    """Once what is remembered is of that time."""
    rank = Rank(capture=0.01)
    train([rank], 2000)
    assert rank.governor.gap_steps > 32
    rank.capture = 0.001
    train([rank], 3000)
    assert rank.governor.gap_steps <= 8


def test_all_ranks_decide_alike() -> None:
    """By the largest costs of all: of captures on one rank, of storage on another."""
    ranks = [
        Rank(seed=seed, capture=capture, tiers=[Worker("storage", busy, slow), Worker("peer", 4, 0.1)])
        for seed, (capture, busy, slow) in enumerate([(0.001, 10, 0.0), (0.008, 5, 0.0), (0.001, 20, 0.4)])
    ]
    for _ in range(30):
        train(ranks, 100)
        assert len({rank.governor.gap_steps for rank in ranks}) == 1
        assert len({tuple(rank.governor.rest_seconds.items()) for rank in ranks}) == 1
    assert ranks[0].governor.gap_steps > 8
    assert ranks[0].governor.rest_seconds["storage"] > 1.0


@pytest.mark.parametrize("seconds", [12.0, 40.0])
def test_what_the_first_seconds_have_cost_is_paid_back(seconds: float) -> None:
    """So that the share of the whole run comes to the target too, and the second half is below it or at it."""
    rank = Rank(hooks=0.0002, capture=0.004, copies=0.004, tiers=[Worker("storage", 8, 0.2)])
    rank.in_hooks += 0.02
    train([rank], int(seconds / STEP))
    assert rank.cost / rank.now < (0.05 if seconds < 20 else 0.036)
    found = rank.governor.overhead(start_seconds=0.0, end_seconds=0.0)
    assert found.recent < 0.034
    assert found.share == pytest.approx(rank.cost / rank.now, abs=0.006)


def test_validation_is_no_cost_of_checkpoints() -> None:
    """Although every capture meets it, and takes five times as long for it."""
    rank = Rank(capture=0.0002, hooks=0.0)
    for step in range(400):
        rank.governor.measured.stepped(rank.in_hooks, validated=(step + 3) // 4 * 5 * STEP)
        if step % 4 == 0:
            rank.governor.measured.captures.opened()
        rank.step(captured=step % 4 == 0)
        if step % 4 == 0:
            rank.now += 5 * STEP
    costs = rank.governor.measured.costs(0.03)
    assert costs.window < 0.1 * STEP
    assert costs.step == pytest.approx(STEP, rel=0.1)
    assert rank.governor.overhead(start_seconds=0.0, end_seconds=0.0).tiers["host"] < 0.01


def test_steps_of_a_replay_are_not_measured() -> None:
    """They take longer, and nothing of that is the checkpoints' cost."""
    rank = Rank(capture=0.01)
    for _ in range(300):
        rank.step(captured=True)
        rank.governor.measured.stepped(None)
    assert rank.governor.measured.costs(0.03).window == 0.0
    assert rank.governor.overhead(start_seconds=0.0, end_seconds=0.0).share == 0.0


def large_rank(**options: Any) -> Rank:
    """A rank whose state is so large that it begins slowly, with storage busy with generation 0."""
    rank = Rank(**options)
    rank.governor.measured.window_nbytes = 50 * 2**20
    rank.tiers[1].left = rank.tiers[1].busy_steps
    return rank


@pytest.mark.parametrize("busy", [2, 12, 30])
def test_a_large_state_costs_little_from_the_second_window_on(busy: int) -> None:
    """Storage that is measured while it writes generation 0 rests before it takes another; one that had it before a step could
    be compared rests as well. Back to back they would cost a third of the time.
    """
    tiers = [Worker("host", takes_every=True), Worker("storage", busy, 0.25, rate=50 * 2**20 / 0.5)]
    rank = large_rank(hooks=0.0002, capture=0.001, copies=0.001, tiers=tiers)
    train([rank], 4000, window=8)
    first = max(20, busy)
    for last in (first + 50, 1000, 4000):
        assert sum(rank.costs[first:last]) < 0.032 * sum(rank.seconds[first:last]), last
    assert len(rank.begun) >= 2


def test_one_large_rank_begins_slowly_for_all() -> None:
    """As pipeline stages have it: all have windows at the same steps, and storage has each generation from all or none."""
    ranks = [
        large_rank(capture=0.004, tiers=[Worker("host", takes_every=True), Worker("storage", 6, 0.2)]),
        Rank(seed=1),
    ]
    for _ in range(40):
        train(ranks, 10, window=8)
        assert len({(rank.governor.gap_steps, rank.governor.rest_seconds["storage"]) for rank in ranks}) == 1
    assert len({len(rank.begun) for rank in ranks}) == 1


def test_long_steps_are_no_reason_to_wait_for_longer_than_allowed() -> None:
    """A slow start of 20 steps would be longer than `storage_at_least`."""
    rank = large_rank(at_least=timedelta(seconds=30))
    rank.now = 1000.0  # until the first step, which is no step's time
    train([rank], 1, window=8)
    assert (rank.governor.gap_steps, rank.governor.rest_seconds["storage"]) == (20, 30.0)
    rank.now += 3.0 - STEP
    train([rank], 1, window=8)
    assert rank.governor.gap_steps in {9, 10}


def advice(rank: Rank) -> str:
    return rank.governor.overhead(start_seconds=0.0, end_seconds=0.0).advice


@pytest.mark.parametrize("period", [1, 2, 3])
def test_a_number_of_steps_is_kept_and_one_that_would_cost_less_is_said_once(
    period: int, caplog: pytest.LogCaptureFixture
) -> None:
    """With the number that was said instead, the target is met."""
    bound = f"every_n_steps={period}"
    rank = Rank(bound=bound, hooks=0.0001, capture=0.1 * STEP)
    for _ in range(30):
        train([rank], 100, window=period, taken=1)
        assert rank.governor.gap_steps == 0
    said = [record.message for record in caplog.records]
    assert len(said) == 1, said
    assert said[0].startswith(f"{bound} costs ")
    found = re.fullmatch(
        rf"{bound} costs (.*)% of training's time; the target is 3.0%; every_n_steps=(\d+) would meet it", advice(rank)
    )
    assert found is not None, advice(rank)
    overhead = rank.governor.overhead(start_seconds=0.0, end_seconds=0.0)
    assert f"; {found[0]}" in str(overhead)
    assert float(found[1]) == pytest.approx(100 * (overhead.hooks + overhead.tiers["host"]), abs=0.06), "one figure"
    steps = int(found[2])
    assert 3 < steps <= 5
    other = Rank(bound=f"every_n_steps={steps}", hooks=0.0001, capture=0.1 * STEP)
    assert train([other], 3000, window=steps, taken=1)[0] < 0.03
    assert advice(other) == ""


@pytest.mark.parametrize("hooks", [0.0, 0.1 * STEP])
def test_tiers_rest_by_what_they_cost_although_every_step_takes_something(hooks: float) -> None:
    """Steps with captures alone show what they cost; a quarter of the target is theirs, and no debt of captures."""
    rank = Rank(bound="window=4", capture=hooks, tiers=[Worker("host", takes_every=True), Worker("storage", 20, 0.4)])
    train([rank], 12000)
    found = rank.governor.overhead(start_seconds=0.0, end_seconds=0.0)
    assert rank.governor.gap_steps == 0
    assert 0.25 * 0.03 / 2 < found.tiers["storage"] < 0.036
    assert bool(hooks) == bool(advice(rank))
    assert len(rank.begun) > 5


def test_a_large_state_does_not_begin_slowly_where_steps_are_the_users() -> None:
    """Storage rests until its cost is known all the same."""
    tiers = [Worker("host", takes_every=True), Worker("storage", 6, 0.2)]
    rank = large_rank(bound="window=8", capture=0.02, tiers=tiers)
    for _ in range(50):
        train([rank], 10, window=8)
        assert rank.governor.gap_steps == 0
    assert rank.governor.rest_seconds["storage"] > 0


def test_the_rest_of_a_new_decision_holds_for_the_window_at_hand() -> None:
    """Votes say for how long a tier has been idle, and not whether it rests by the decision of before."""
    rank = Rank(tiers=[Worker("host", takes_every=True), Worker("storage", 4, 0.5)])
    train([rank], 4000, window=8)
    apart = [after - before for before, after in itertools.pairwise(rank.begun[4:])]
    assert min(apart) > 0.7 * 4 * STEP * 0.5 / 0.03


@pytest.mark.parametrize("window", [0.002, 0.02, 0.2])
@pytest.mark.parametrize("base", [0.0, 0.004, 0.0095, 0.0098, 0.03])
def test_the_number_that_is_said_meets_the_target_with_hooks_of_quiet_steps(base: float, window: float) -> None:
    """Where these alone cost as much as the target, the line says that no number would."""
    period = 2
    options: dict[str, Any] = {
        "target": 0.01,
        "noise": 0.0,
        "hooks": base * STEP / (1 - base),
        "capture": window * STEP,
    }
    rank = Rank(bound=f"every_n_steps={period}", **options)
    train([rank], 400, window=period, taken=1)
    said = advice(rank)
    if base > 0.01:
        assert said.endswith(f"no number would meet it: hooks of steps without copies cost {base:.1%}"), said
    elif base + window / period < 0.0095:
        assert said == ""
    elif found := re.search(r"every_n_steps=(\d+) would meet it", said):
        steps = int(found[1])
        other, short = Rank(bound="every_n_steps", **options), Rank(bound="every_n_steps", **options)
        assert train([other], 8 * steps, window=steps, taken=1)[0] <= 0.01 + 1e-6, said
        shorter = max(period, int(steps * 0.9) - 1)
        assert train([short], 8 * shorter, window=shorter, taken=1)[0] > 0.01, "no larger than need be"
    else:
        assert sum(rank.costs) / sum(rank.seconds) < 0.0101, said


def test_a_tier_that_training_waited_for_rests_at_once_on_all_ranks_and_bears_the_cost() -> None:
    """Also before the first decision, and without a target; not for longer than `storage_at_least`."""
    for target, seconds, rest in ((0.03, 0.3, 40.0), (0.03, 30.0, 600.0), (None, 0.5, 8.0)):
        rank = Rank(target=target, bound="every_n_steps=1")
        host, storage = rank.tiers
        train([rank], 10)
        before = rank.governor.overhead(start_seconds=0.0, end_seconds=0.0)
        rank.in_hooks, rank.now = rank.in_hooks + seconds, rank.now + seconds
        rank.governor.waited(storage, seconds)
        rank.governor.waited(host, 0.0)
        rank.governor.measured.stepped(rank.in_hooks)
        after = rank.governor.overhead(start_seconds=0.0, end_seconds=0.0)
        assert after.tiers["storage"] == pytest.approx(seconds / rank.governor.measured.seconds)
        assert after.hooks <= before.hooks + 0.01
        assert rank.governor.idle_for(storage) == 0
        assert rank.governor.idle_for(host) > 0
        rank.now += rest - 0.1
        assert rank.governor.idle_for(storage) == 0
        rank.now += 0.2
        assert rank.governor.may_work("storage", rank.governor.idle_for(storage))
