"""Votes before a window: records with named fields, which one exchange carries as integers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from lightning_moe_ckpt.coordination import Exchange


class WindowVote(NamedTuple):
    """One rank's vote before a window, ahead of its tiers and of plans."""

    has_room: int
    """Whether the rank's ring has room for a window."""
    journal_nbytes: int
    """Bytes that a journal record needs; 0 if all records had room."""
    spoiled: int
    """Whether the rank could not take the whole last window."""
    fits: int
    """Whether the next plan fits into the rank's ring."""
    unnamed: int
    """Whether the ring has lost its name."""
    follows: int = 0
    """Whether this boundary can be a difference to the boundary before."""


class LaneVote(NamedTuple):
    """One rank's vote on a tier, before a window."""

    idle: int
    """Whether the tier can take a generation."""
    holds: int
    """Bits of the outstanding generations that the tier holds."""
    gave_up: int
    """Bits of the outstanding generations that the tier will never hold."""
    lost_base: int
    """Whether the tier lost the generation that later ones build on."""


class PacingVote(NamedTuple):
    """One rank's `Costs` before a window, in microseconds."""

    is_due: int
    """Whether the rank has measured for long enough."""
    is_known: int
    step: int
    base: int
    window: int
    owed: int
    tiers: tuple[int, ...]
    """Two integers for each tier."""


class TiersVote(NamedTuple):
    """One rank's vote on all tiers, before a window."""

    lanes: tuple[LaneVote, ...]
    pacing: PacingVote | None
    """`None` without a target."""

    def row(self) -> list[int]:
        """Return the vote as integers."""
        pacing = () if self.pacing is None else (*self.pacing[:-1], *self.pacing.tiers)
        return [*chain.from_iterable(self.lanes), *pacing]

    def read(self, row: Sequence[int]) -> TiersVote:
        """Return the vote in another rank's row, which has as many integers as this vote."""
        lanes, at, size = [], 0, len(LaneVote._fields)
        for _ in self.lanes:
            lanes.append(LaneVote(*row[at : at + size]))
            at += size
        if self.pacing is None:
            return TiersVote(tuple(lanes), None)
        due, known, step, base, window, owed, *tiers = row[at:]
        return TiersVote(tuple(lanes), PacingVote(due, known, step, base, window, owed, tuple(tiers)))


def gather_votes(
    exchange: Exchange, own: WindowVote, tiers: TiersVote, inputs: Sequence[int]
) -> tuple[list[WindowVote], list[TiersVote], list[list[int]]]:
    """Return all ranks' votes, votes on tiers, and inputs of plans. Collective."""
    told = tiers.row()
    size, behind = len(own), len(own) + len(told)
    votes, of_tiers, of_plans = [], [], []
    for row in exchange.gather([*own, *told, *inputs]):
        votes.append(WindowVote(*row[:size]))
        of_tiers.append(tiers.read(row[size:behind]))
        of_plans.append(row[behind:])
    return votes, of_tiers, of_plans
