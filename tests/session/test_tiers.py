"""Generations go to tiers alike on all ranks, and what is complete everywhere is what every rank holds."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from door import WriteJob
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import override

from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.policies import Plan
from lightning_moe_ckpt.session._capture import CaptureSession
from lightning_moe_ckpt.session._pacing import Governor, StepKind
from lightning_moe_ckpt.session._tiers import Tiers
from lightning_moe_ckpt.session._window import Window
from lightning_moe_ckpt.snapshot import PlanRecord, WindowLayout
from lightning_moe_ckpt.storage import GenerationId, RankMarker, RingHeader, SegmentEntry
from lightning_moe_ckpt.tiers import Markers, MissedWindows, SealedSegment, SegmentRing, TierWorker, WriteRequest


@dataclass
class Layout:
    """As much of a plan as tiers look at."""

    record: PlanRecord = field(default_factory=lambda: PlanRecord(plan=Plan.of_slots([["a"]]), config={}))
    steps: list[int] = field(default_factory=lambda: [0])
    copied: list[int] = field(default_factory=lambda: [0])
    is_incomplete: bool = False
    missing: frozenset[str] = frozenset()


class ByHand(TierWorker):
    """A tier whose generations complete or fail when the test says so."""

    def __init__(self, name: str, *, takes_every: bool = False) -> None:
        super().__init__(name, Markers(run_id="run", rank=0, world_size=1))
        self.takes_every = takes_every
        self.begun: list[int] = []
        self.times: dict[int, int] = {}
        self.recycled: list[int] = []
        self.whole: list[int] = []
        self.abandoned: list[int] = []
        self.given_up: list[int] = []

    @override
    def begin(self, request: WriteRequest) -> None:
        self.begun.append(request.generation.step)
        self.times[request.generation.step] = request.unix_time
        self.lost_base = False
        self._jobs[request.generation] = WriteJob(request=request)

    @override
    def complete_everywhere(self, generation: GenerationId) -> None:
        self.recycled.append(generation.step)

    @override
    def abandon(self, generation: GenerationId) -> None:
        self.abandoned.append(generation.step)

    @override
    def give_up(self, generation: GenerationId) -> None:
        self.given_up.append(generation.step)

    def end(self, step: int, *, complete: bool = True) -> None:
        """The generation is in the tier, or it failed."""
        job = self._jobs[generation(step)]
        if complete:
            self._completed(job)
        self._end(job)

    @override
    def _put(self, job: WriteJob, segment: SealedSegment) -> list[SegmentEntry]:
        raise NotImplementedError

    @override
    def _finish(self, job: WriteJob, marker: RankMarker) -> None:
        raise NotImplementedError


FULL, PARTIAL = Layout(), Layout(is_incomplete=True)


def generation(step: int) -> GenerationId:
    return GenerationId(step=step, incarnation=1, nonce="0123456789ab")


class Rank:
    """One rank's tiers over a ring of its own: a host tier that takes all, and a slow one that takes what it can."""

    def __init__(self) -> None:
        self.host, self.slow = ByHand("host", takes_every=True), ByHand("slow")
        self.tiers = Tiers([self.host, self.slow])
        header = RingHeader(nonce="", slot_nbytes=4096, num_slots=40, origin="")
        self.ring = SegmentRing(Path("unused"), torch.zeros(40 * 4096, dtype=torch.uint8), header)
        self.complete: Window | None = None

    def open(self, step: int, layout: Layout = FULL) -> None:
        window = Window(generation=generation(step), first=step, layout=cast(WindowLayout, layout), ring=self.ring)
        self.ring.begin_window(window.generation)
        self.tiers.offer(self.complete)
        self.tiers.open(window)
        self.ring.seal(self.ring.acquire(window.generation, step))
        self.ring.finish_window(window.generation)
        self.complete = window


def vote(ranks: list[Rank]) -> None:
    rows = [rank.tiers.vote().row() for rank in ranks]
    for rank in ranks:
        rank.tiers.agreed([rank.tiers.vote().read(row) for row in rows])


def window(ranks: list[Rank], step: int) -> None:
    """All ranks agree on the start of a window, and fill it."""
    vote(ranks)
    for rank in ranks:
        rank.open(step)


def test_a_tier_that_is_late_states_the_time_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """So its marker has the same bytes, whatever the others have forgotten by then."""
    clock = itertools.count(1_800_000_000, 60)
    monkeypatch.setattr(time, "time", lambda: next(clock))
    ranks = [Rank()]
    window(ranks, 1)
    ranks[0].host.end(1)
    ranks[0].slow.end(1)
    ranks[0].slow.begin(WriteRequest(generation=generation(0), plan_hash="h", plan_json="{}", num_segments=1))
    window(ranks, 2)
    ranks[0].host.end(2)
    ranks[0].slow.end(0)
    window(ranks, 3)
    assert (ranks[0].host.begun, ranks[0].slow.begun) == ([1, 2, 3], [1, 0, 2])
    assert ranks[0].slow.times[2] == ranks[0].host.times[2]
    assert len(set(ranks[0].host.times.values())) == 3


def test_a_busy_tier_skips_generations_and_goes_on_with_the_newest() -> None:
    """While the slow tier has generation 1, the host has all; then the slow one takes the newest complete, 4."""
    ranks = [Rank(), Rank()]
    for step in (1, 2, 3, 4):
        window(ranks, step)
    for rank in ranks:
        rank.slow.end(1)
    window(ranks, 5)
    assert [rank.host.begun for rank in ranks] == [[1, 2, 3, 4, 5]] * 2
    assert [rank.slow.begun for rank in ranks] == [[1, 4]] * 2


def test_a_tier_that_is_busy_on_one_rank_takes_nothing_on_any() -> None:
    """Ranks never give a tier different generations."""
    ranks = [Rank(), Rank(), Rank()]
    window(ranks, 1)
    for rank in ranks[1:]:
        rank.slow.end(1)
    window(ranks, 2)
    assert [rank.slow.begun for rank in ranks] == [[1]] * 3
    ranks[0].slow.end(1)
    window(ranks, 3)
    assert [rank.slow.begun for rank in ranks] == [[1, 2]] * 3


def test_a_tier_that_has_had_the_newest_takes_the_window_that_begins() -> None:
    """Its segments then travel as they are sealed."""
    rank = Rank()
    window([rank], 1)
    rank.slow.end(1)
    window([rank], 2)
    assert rank.slow.begun == [1, 2]


def test_complete_everywhere_is_what_all_ranks_hold_and_not_the_smallest_of_their_newest() -> None:
    """Rank 0 failed to keep 1, rank 1 failed to keep 2: the smallest of the newest would be 1, which rank 0 lacks."""
    ranks = [Rank(), Rank()]
    for step in (1, 2):
        window(ranks, step)
    ranks[0].host.end(1, complete=False)
    ranks[0].host.end(2)
    ranks[1].host.end(1)
    ranks[1].host.end(2, complete=False)
    window(ranks, 3)
    assert [rank.host.recycled for rank in ranks] == [[], []]
    assert [rank.host.given_up for rank in ranks] == [[1, 2], [1, 2]], "nobody waits for either any more"
    assert [rank.tiers.failed() for rank in ranks] == [{"host": 2, "slow": 0}] * 2
    for rank in ranks:
        rank.host.end(3)
    vote(ranks)
    assert [rank.host.recycled for rank in ranks] == [[3], [3]]
    assert ranks[0].tiers.everywhere["host"] == generation(3)


def test_a_generation_that_goes_wrong_while_its_window_is_filled_is_given_up_behind_it() -> None:
    """The window runs to its end on all ranks, and its memory is in use until then; an older one goes at once."""
    ranks = [Rank(), Rank()]
    for step in (1, 2):
        window(ranks, step)
    for step in (1, 2):
        ranks[1].host.end(step, complete=False)
    votes = [rank.tiers.vote() for rank in ranks]
    assert [rank.tiers.agreed(votes, filling=generation(2)) for rank in ranks] == [{generation(1)}] * 2
    votes = [rank.tiers.vote() for rank in ranks]
    assert [rank.tiers.agreed(votes) for rank in ranks] == [{generation(2)}] * 2
    assert [rank.host.given_up for rank in ranks] == [[1, 2]] * 2


def test_each_tier_recycles_by_itself() -> None:
    """What is complete in one tier says nothing of another: the scenario of TierCheck's Figure 5."""
    rank = Rank()
    for step in (1, 2):
        window([rank], step)
        rank.host.end(step)
    vote([rank])
    assert (rank.host.recycled, rank.slow.recycled) == ([1, 2], [])
    rank.slow.end(1)
    vote([rank])
    assert rank.slow.recycled == [1]


@settings(max_examples=150, deadline=None)
@given(data=st.data(), num_ranks=st.integers(1, 3))
def test_ranks_stay_in_step_whatever_fails_where(data: st.DataObject, num_ranks: int) -> None:
    """Random ends of generations: begun and recycled are equal on all ranks, and all hold what is recycled for."""
    ranks = [Rank() for _ in range(num_ranks)]
    for step in range(1, 12):
        window(ranks, step)
        for rank in ranks:
            for worker in (rank.host, rank.slow):
                for job in list(worker._jobs):
                    if data.draw(st.booleans(), label="ends"):
                        worker.end(job.step, complete=data.draw(st.booleans(), label="complete"))
    for name in ("host", "slow"):
        workers = [cast(ByHand, getattr(rank, name)) for rank in ranks]
        assert len({tuple(worker.begun) for worker in workers}) == 1
        assert len({tuple(worker.recycled) for worker in workers}) == 1
        assert len({tuple(worker.given_up) for worker in workers}) == 1
        assert not {*workers[0].given_up} & {*workers[0].recycled}
        assert workers[0].recycled == sorted(set(workers[0].recycled))
        for step in workers[0].recycled:
            assert all(worker.holds(generation(step)) for worker in workers)


def test_a_window_given_up_is_given_up_in_every_tier_that_took_it() -> None:
    """A tier that was busy, and did not take it, hears nothing."""
    rank = Rank()
    window([rank], 1)
    window([rank], 2)
    assert rank.complete is not None
    rank.tiers.abandon(rank.complete)
    assert (rank.host.abandoned, rank.slow.abandoned) == ([2], [])


def test_a_window_that_all_ranks_end_before_its_time_is_no_failure() -> None:
    """Tiers let go of it, nobody speaks of it any more, and what comes next is told apart from it."""
    ranks = [Rank(), Rank()]
    window(ranks, 1)
    for rank in ranks:
        rank.host.end(1)
    window(ranks, 2)
    for rank in ranks:
        assert rank.complete is not None
        rank.tiers.withdraw(rank.complete)
    ranks[0].host.end(2, complete=False)
    window(ranks, 3)
    for rank in ranks:
        rank.host.end(3)
    vote(ranks)
    assert [rank.host.given_up for rank in ranks] == [[2], [2]]
    assert [rank.host.recycled for rank in ranks] == [[1, 3], [1, 3]]
    assert [rank.tiers.failed() for rank in ranks] == [{"host": 0, "slow": 0}] * 2


def test_after_a_window_that_some_ranks_could_not_take_none_offers_what_was_before() -> None:
    """The others have dropped that for the window, and then the window."""
    rank, session = Rank(), CaptureSession.__new__(CaptureSession)
    window([rank], 1)
    session._complete, session._tiers, session.missed_windows = rank.complete, rank.tiers, MissedWindows()
    session._exchange = cast(Exchange, SimpleNamespace(world_size=2))
    window([rank], 2)
    session._ended = rank.complete
    assert session._ended is not None
    session._ended.spoiled = True
    session._close_last_window([0])
    assert session._complete is None


def test_windows_are_paced_alike_by_the_costs_of_one_rank() -> None:
    """Votes on tiers carry them."""
    ranks = [Rank(), Rank()]
    for rank, capture in zip(ranks, (0.0, 0.02), strict=True):
        clock = itertools.count(0.0, 0.05).__next__
        rank.tiers.governor = Governor(rank.tiers.workers, target=0.03, at_least=timedelta.max, clock=clock)
        measured = rank.tiers.governor.measured
        for step in range(60):
            measured.captures.opened()
            measured.note(StepKind(step % 2))
            measured.stepped(hooks=capture * (step // 2))
    vote(ranks)
    assert ranks[0].tiers.governor.gap_steps == ranks[1].tiers.governor.gap_steps > 0


def partial_window(ranks: list[Rank], step: int) -> bool:
    """As a capture session has it, of some operators; whether a whole generation was taken instead."""
    vote(ranks)
    wanted = {rank.tiers.wants_whole(generation(step), cast(WindowLayout, PARTIAL)) for rank in ranks}
    assert len(wanted) == 1
    for rank in ranks:
        if wanted == {True}:
            rank.slow.begin(WriteRequest(generation=generation(step), plan_hash="h", plan_json="{}", num_segments=1))
            rank.slow.whole.append(step)
        else:
            rank.open(step, PARTIAL)
    return wanted == {True}


def borrowing_ranks(number: int) -> list[Rank]:
    ranks = [Rank() for _ in range(number)]
    for rank in ranks:
        rank.slow.uses_references = True
    return ranks


def test_a_tier_with_nothing_to_build_on_is_given_a_whole_generation_in_every_second_window() -> None:
    """While that fails the others go to the tiers that need no base, and none to it; then it takes them again at once."""
    (rank,) = ranks = borrowing_ranks(1)
    for step in range(1, 15):
        if partial_window(ranks, step):
            rank.slow.end(step, complete=step == 11)
        elif step in rank.slow.begun:
            rank.slow.end(step)
        rank.complete = None
    assert rank.slow.whole == [1, 3, 5, 7, 9, 11]
    assert rank.slow.begun == [*rank.slow.whole, 12, 13, 14]
    assert rank.host.begun == [step for step in range(1, 15) if step not in rank.slow.whole]


def test_a_base_that_one_rank_finds_gone_is_gone_for_all() -> None:
    """All give a whole generation next, and are told alike when there is one."""
    ranks = borrowing_ranks(3)
    for rank in ranks:
        rank.tiers.build_on("slow", generation(0))
    assert not partial_window(ranks, 1)
    ranks[0].slow.lost_base = True
    for rank in ranks:
        rank.slow.end(1, complete=rank is not ranks[0])
    assert partial_window(ranks, 2)
    for rank in ranks:
        rank.slow.end(2)
    assert not partial_window(ranks, 3)
    assert [rank.slow.begun for rank in ranks] == [[1, 2, 3]] * 3
