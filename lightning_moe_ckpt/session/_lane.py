"""One tier among others: what it was given and holds, as all ranks know it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_moe_ckpt.session._votes import LaneVote
from lightning_moe_ckpt.snapshot import WindowLayout
from lightning_moe_ckpt.storage import GenerationId
from lightning_moe_ckpt.tiers import SealedSegment, SegmentRing, SkipCounter, TierWorker

_OUTSTANDING = 32
"""Generations per tier that ranks still speak of; as many fit into one integer of the exchange with ease."""


@dataclass(kw_only=True, eq=False)
class Window:
    """A generation from the start of its window until the ring recycles it."""

    generation: GenerationId
    first: int
    """Boundary of its first step."""
    layout: WindowLayout
    ring: SegmentRing
    spoiled: bool = False
    """A segment could not be taken: the window runs to its end, so that ranks stay in step, but gives no generation."""
    segments: list[SealedSegment] = field(default_factory=list)
    workers: list[TierWorker] = field(default_factory=list)
    """Workers of the tiers that it was given to."""
    is_chained: bool = False
    """Whether generations may be differences to the one before, on all ranks alike."""
    is_link: bool = False
    """Whether it is one; else it is a base, of everything."""
    ends_batch: bool = True
    """Whether storage gets a difference with what was gathered before it, or waits for more."""
    unix_time: int = field(default_factory=lambda: int(time.time()))
    """When it began, as its markers in all tiers state."""


@dataclass(kw_only=True, eq=False)
class Lane:
    """One worker, and the facts that all ranks know of it."""

    worker: TierWorker
    skips: SkipCounter
    given: list[GenerationId] = field(default_factory=list)
    """Generations that it was given and that are not known to be superseded, oldest first; the same on all ranks."""
    idle: bool = False
    """Whether it was idle on all ranks at the latest vote."""
    base: GenerationId | None = None
    """Newest generation that is complete on all ranks: one with only some operators may be built on it."""
    num_failed: int = 0
    """Generations that it was given and that some rank gave up."""
    attempted: bool = False
    """Whether the window before was an attempt to get a whole generation, and the tier still has no base."""
    chain: list[GenerationId] | None = None
    """Generations given to it that differences follow on, oldest first; `None` where nothing can be followed on."""
    supersedes: GenerationId | None = None
    """Newest generation that it has on all ranks and has not let go of older ones for."""
    gathered: list[Window] = field(default_factory=list)
    """Differences that it gets together, pinned, oldest first."""

    def vote(self, *, rests: bool) -> LaneVote:
        # First: what went wrong with a generation is known when the worker is idle again.
        idle = self.worker.idle and not rests
        holds = gave_up = 0
        for index, each in enumerate(self.given):
            holds |= self.worker.holds(each) << index
            gave_up |= self.worker.gave_up(each) << index
        return LaneVote(int(idle), holds, gave_up, int(self.worker.lost_base))

    def agreed(
        self, votes: Sequence[LaneVote], filling: GenerationId | None
    ) -> tuple[list[GenerationId], list[GenerationId]]:
        """Take all votes; return the generations that became complete everywhere, and those given up, oldest first."""
        self.idle, common, lacking = True, -1, 0
        for vote in votes:
            self.idle, common, lacking = self.idle and bool(vote.idle), common & vote.holds, lacking | vote.gave_up
            if vote.lost_base:
                self.base = None
        complete = [each for index, each in enumerate(self.given) if common >> index & 1]
        given_up = [each for index, each in enumerate(self.given) if each != filling and lacking >> index & 1]
        self.given = [each for each in self.given[common.bit_length() :] if each not in given_up]
        if self.chain is not None and not set(given_up).isdisjoint(self.chain):
            self.chain = None
        self.num_failed += len(given_up)
        return complete, given_up

    def complete(self, generation: GenerationId) -> None:
        self.base, self.attempted = generation, False

    def cannot_take(self, layout: WindowLayout) -> bool:
        """Return whether it would need a base, and has none."""
        return self.worker.uses_references and layout.is_incomplete and self.base is None

    def attempt(self) -> bool:
        """Return whether to try to get a whole generation now: in every second window while that fails."""
        self.attempted = not self.attempted
        return self.attempted

    def let_go(self, generation: GenerationId) -> None:
        """Drop a gathered difference, which some rank could not take, and what was gathered after it."""
        for index, window in enumerate(self.gathered):
            if window.generation == generation:
                for each in self.gathered[index:]:
                    each.ring.unpin(each.generation)
                del self.gathered[index:]
                return

    def take(self, generation: GenerationId) -> None:
        self.idle = False
        self.given.append(generation)
        del self.given[:-_OUTSTANDING]
        self.skips.taken()
