"""Token counts on their way from the device to the host while the optimizer steps.

Accounting is as of a boundary, so counts cannot come a window late: the journal of that boundary has them. But nothing
is counted between the end of backward and the boundary, so the copy begins there, on a stream of its own. Whoever needs
the numbers at the boundary then waits for backward at most, and never for the optimizer or for copies of snapshots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_moe_ckpt.operators import LoadCounter


@dataclass(frozen=True, slots=True)
class _Copy:
    """Counts on the host, once what is waited for has happened."""

    counts: Tensor
    """int64 `[E]`."""
    arrived: torch.cuda.Event | None = None

    def wait(self) -> Tensor:
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.counts


class CountCopies:
    """Reads a counter early.

    Args:
        counter: read and reset by nobody else.
    """

    def __init__(self, counter: LoadCounter) -> None:
        self._counter = counter
        self._under_way: list[_Copy] = []
        self._is_new = False
        """Whether nothing was counted since the newest copy began."""
        self._stream: torch.cuda.Stream | None = None

    def forward_begins(self) -> None:
        """More is about to be counted."""
        self._is_new = False

    def start(self) -> None:
        """Nothing more is counted until the next batch: copy what was. Does not wait for the device."""
        self._under_way.append(self._copy(self._counter.read_and_reset()))
        self._is_new = True

    def take(self) -> list[int]:
        """All that was counted since the last call, by expert; waits for copies, and begins one if none is new."""
        if not (self._is_new and self._under_way):
            self.start()
        under_way, self._under_way = self._under_way, []
        total: list[int] = torch.stack([each.wait() for each in under_way]).sum(0).tolist()
        return total

    def _copy(self, counts_E: Tensor) -> _Copy:
        if counts_E.device.type != "cuda":
            return _Copy(counts_E.cpu())
        if self._stream is None:
            self._stream = torch.cuda.Stream(counts_E.device)  # type: ignore[no-untyped-call]
        host_E = torch.empty(counts_E.shape, dtype=counts_E.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(counts_E.device))
        with torch.cuda.stream(self._stream):
            host_E.copy_(counts_E, non_blocking=True)
        counts_E.record_stream(self._stream)
        return _Copy(host_E, self._stream.record_event())
