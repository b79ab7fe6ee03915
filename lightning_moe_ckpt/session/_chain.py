"""Decide which generations are bases and which are differences to the one before, alike on all ranks.

A difference is taken where everything before it is there: the boundary before was taken on all ranks, on all of them the
newest step of the optimizer leads from it to this one, and the last base is not too long ago. Otherwise a base is taken,
which needs nothing else. So nothing that goes wrong is ever built on.

What memory has of a chain is dropped from its old end when storage has it on all ranks and room is needed; some slots
stay free for bases, also for those of the next incarnation, which finds the memory as this one leaves it.

Source: TierCheck (2026), Sec. 3.2 and 3.4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_moe_ckpt.policies import Chains
from lightning_moe_ckpt.session._tiers import ChainPlace, Tiers
from lightning_moe_ckpt.snapshot import DifferentialRecorder, WindowLayout
from lightning_moe_ckpt.tiers import STORAGE, SegmentRing

_BASE_SLOTS = 2
"""Free slots that differences leave to bases."""


class Chain:
    """The chain that grows in one incarnation. Votes are of this rank; all else is the same on all ranks.

    Args:
        chains: how long it gets.
        recorder: of the optimizer's steps.
        tiers: that hold it.
    """

    def __init__(self, chains: Chains, recorder: DifferentialRecorder, tiers: Tiers) -> None:
        self._chains, self.recorder, self._tiers = chains, recorder, tiers
        self.layout: WindowLayout | None = None
        """Of differences."""
        self._base = self._last = -1
        self.is_open = False
        """Whether tiers know of the window under way."""

    def vote(self, step: int) -> bool:
        """Return whether boundary `step` may be a difference, as far as this rank knows; call once for each boundary."""
        leads_here = self.recorder.boundary()
        return leads_here and self._last == step - 1 and step - self._base < self._chains.every_n_steps

    def make_room(self, ring: SegmentRing, *, link: bool) -> bool:
        """Return whether a window can begin, having dropped what storage has."""
        wanted = 1 + (_BASE_SLOTS if link else 0)
        ring.make_room(1 + _BASE_SLOTS, self._tiers.everywhere.get(STORAGE))
        return ring.can_begin(wanted)

    def place(self, step: int, *, link: bool) -> ChainPlace:
        """Begin a window at boundary `step` and return its place."""
        self.is_open = False
        self._last = step
        if not link:
            self._base = step
        return ChainPlace(is_link=link, ends_batch=self._chains.ends_batch(step - self._base))

    def follows(self, step: int, *, agreed: bool) -> bool:
        """Return whether boundary `step` is taken as a difference, `agreed` being whether all ranks voted for it."""
        lost = self._tiers.lost_chain and step - self._base >= self._chains.batch
        return agreed and self._last == step - 1 and not lost

    def broken(self) -> None:
        """Begin the next chain at the next boundary that is taken."""
        self._last = -1

    def rebased(self, place: ChainPlace, step: int) -> ChainPlace:
        """Take boundary `step` whole, which was to be a difference."""
        self._base = step
        return replace(place, is_link=False, ends_batch=True)

    def outcome(self, outcome: Mapping[str, Any], place: ChainPlace) -> dict[str, Any]:
        """Return the journal of a boundary, with the settings of the step that led there."""
        return {**outcome, "consumed": self.recorder.settings()} if place.is_link else dict(outcome)
