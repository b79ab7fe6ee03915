"""What ranks tell each other while they bring a version: what each still lacks, or that it must be given up.

Of the network this asks that everybody hears everybody's small values, and that bytes go from rank to rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from lightning_moe_ckpt.recovery._schedule import FetchRequest

Parcel = tuple[int, memoryview]
"""Another rank, and bytes for or from it; never empty."""


class Transport(Protocol):
    """A world of ranks that call the same methods in the same order; a lost rank is an error, not a wait for ever."""

    @property
    def rank(self) -> int:
        """This one."""

    @property
    def world_size(self) -> int:
        """How many there are."""

    def gather_values(self, value: object) -> list[object]:
        """Every rank's plain value, by rank. Collective."""

    def transfer(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> Callable[[], None]:
        """Begin to send and to receive; between two ranks parcels arrive in the order in which they were sent.

        Not collective: a rank with nothing to send or receive need not call it. What is sent must have exactly the
        size of what is received.

        Returns:
            Waits for all of it; until then the views stay untouched.
        """


@dataclass(slots=True)
class Rounds:
    """Rounds of one attempt at one version. Every method is collective."""

    transport: Transport
    reasons: list[str] = field(default_factory=list)
    """Why the version is given up, the same on all ranks; empty while it is not."""

    def begin(self, asks: Sequence[FetchRequest], *, busy: bool, lost: str) -> list[FetchRequest] | None:
        """Tell the others what this rank wants of them in the next round.

        Args:
            asks: of this rank.
            busy: whether this rank lacks anything, from others or from copies that it reads itself.
            lost: why this rank cannot be given what it lacks; empty while it may.

        Returns:
            The asks of all ranks, in one order; `None` if there is no round any more, because nobody lacks anything or
            somebody lost something.
        """
        rows = self.transport.gather_values([busy, lost, [ask.plain() for ask in asks]])
        told = [row for row in rows if isinstance(row, list)]
        assert len(told) == self.transport.world_size
        self._lose([row[1] for row in told])
        if self.reasons or not any(row[0] for row in told):
            return None
        return [FetchRequest.from_plain(rank, plain) for rank, row in enumerate(told) for plain in row[2]]

    def all_equal(self, value: str, reason: str) -> bool:
        """Whether all ranks have the same value; if not, the version is lost for this reason."""
        values = self.transport.gather_values(value)
        self._lose([reason if each != values[0] else "" for each in values])
        return not self.reasons

    def _lose(self, reasons: Sequence[str]) -> None:
        self.reasons += [f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason]
