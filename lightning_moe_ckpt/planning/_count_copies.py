"""Token counts on their way from the device to the host while the optimizer steps.

The ledger is as of a boundary, so counts cannot come a window late: the journal of that boundary has them. But nothing
is counted between the end of backward and the boundary, so the copy begins there, on a stream of its own. Whoever needs
the numbers at the boundary then waits for backward at most, and never for the optimizer or for copies of snapshots.
"""

from __future__ import annotations

import torch

from lightning_moe_ckpt.journal import Arrival, Arrivals
from lightning_moe_ckpt.operators import LoadCounter


class CountCopies:
    """Reads a counter early.

    Args:
        counter: read and reset by nobody else.
    """

    def __init__(self, counter: LoadCounter) -> None:
        self._counter = counter
        self._arrivals = Arrivals()
        self._under_way: list[Arrival] = []
        self._is_new = False
        """Whether nothing was counted since the newest copy began."""

    def forward_begins(self) -> None:
        """More is about to be counted."""
        self._is_new = False

    def start(self) -> None:
        """Nothing more is counted until the next batch: copy what was. Does not wait for the device."""
        self._under_way.append(self._arrivals.start([self._counter.read_and_reset()]))
        self._is_new = True

    def take(self) -> list[int]:
        """All that was counted since the last call, by expert; waits for copies, and begins one if none is new."""
        if not (self._is_new and self._under_way):
            self.start()
        under_way, self._under_way = self._under_way, []
        total: list[int] = torch.cat([torch.stack(each.wait()) for each in under_way]).sum(0).tolist()
        return total
