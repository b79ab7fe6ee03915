"""What recovery asks of the network: everybody hears everybody's small values, and bytes go from rank to rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

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
