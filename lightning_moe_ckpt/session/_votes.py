"""What ranks tell each other before a window: records with named fields, which one exchange carries as integers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from lightning_moe_ckpt.coordination import Exchange


class WindowVote(NamedTuple):
    """What one rank tells the others before a window, ahead of its tiers and of plans."""

    has_room: int
    """Whether it could begin one."""
    journal_nbytes: int
    """Bytes that a journal lacked; 0 if all had room."""
    spoiled: int
    """Whether it has not taken all of the window before."""
    fits: int
    """Whether the plan that follows fits into the memory that it has."""
    unnamed: int
    """Whether that memory has lost its name."""
    follows: int = 0
    """Whether the boundary at hand is a difference to the one before."""


class LaneVote(NamedTuple):
    """What one rank tells the others of a tier, before a window."""

    idle: int
    """Whether it can take a generation."""
    holds: int
    """Of the outstanding generations, a bit for each that it has."""
    gave_up: int
    """The same of those that it will never have."""
    lost_base: int
    """Whether nothing can be built on what it has."""


class PacingVote(NamedTuple):
    """What one rank tells the others of its `Costs`, before a window; microseconds."""

    is_due: int
    """Whether it has measured for long enough."""
    is_known: int
    step: int
    base: int
    window: int
    owed: int
    tiers: tuple[int, ...]
    """Two for each tier."""


class TiersVote(NamedTuple):
    """What one rank tells the others of all tiers, before a window."""

    lanes: tuple[LaneVote, ...]
    pacing: PacingVote | None
    """Missing where there is no target."""

    def row(self) -> list[int]:
        """Return it as integers."""
        pacing = () if self.pacing is None else (*self.pacing[:-1], *self.pacing.tiers)
        return [*chain.from_iterable(self.lanes), *pacing]

    def read(self, row: Sequence[int]) -> TiersVote:
        """Return what the row of another rank says, whose vote has as many integers as this one."""
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
    """Return the votes of all ranks, those of their tiers, and what they give for plans. Collective."""
    told = tiers.row()
    size, behind = len(own), len(own) + len(told)
    votes, of_tiers, of_plans = [], [], []
    for row in exchange.gather([*own, *told, *inputs]):
        votes.append(WindowVote(*row[:size]))
        of_tiers.append(tiers.read(row[size:behind]))
        of_plans.append(row[behind:])
    return votes, of_tiers, of_plans
