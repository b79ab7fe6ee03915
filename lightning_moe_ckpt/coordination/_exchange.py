"""Exchange small values between ranks, outside the training collectives.

They carry a few integers or a journal-codec value, over a control group (gloo, CPU tensors), in an order that is
the same on every rank. No pickle: `torch.distributed`'s object collectives would execute what a peer sends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
import torch.distributed as dist

from lightning_moe_ckpt import errors
from lightning_moe_ckpt.errors import CheckpointError, ConfigurationError
from lightning_moe_ckpt.journal import decode, encode
from lightning_moe_ckpt.parallel import ParallelGroups

_MAX_VALUE_NBYTES = 2**30
"""Most bytes of one value between ranks, such as a manifest, an inventory of memory or a message."""


class Exchange:
    """Collectives on control values; every method must be called by all ranks. More than one need a control group.

    Args:
        groups: this rank's place.
        among: the control group, of all ranks, those of this rank's stage or those of its pipeline.
    """

    def __init__(
        self, groups: ParallelGroups, among: Literal["control", "stage_control", "pipeline_control"] = "control"
    ) -> None:
        self._rank, self._ranks = groups.rank, groups.ranks(among)
        self._group = groups.group(among) if len(self._ranks) > 1 else None

    @property
    def rank(self) -> int:
        """This rank's place among those that take part, which is its number where all do."""
        return self._ranks.index(self._rank)

    @property
    def world_size(self) -> int:
        """Number of ranks that take part."""
        return len(self._ranks)

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank decides for all; always the first."""
        return self._rank == self._ranks[0]

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """Return every rank's integers, by rank; all ranks must pass equally many."""
        if self._group is None:
            return [list(values)]
        own = torch.tensor(list(values), dtype=torch.int64)
        out = [torch.empty_like(own) for _ in self._ranks]
        dist.all_gather(out, own, group=self._group)
        return [tensor.tolist() for tensor in out]

    def gather_tensor(self, own: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's CPU tensor, by rank; shapes and dtypes must agree."""
        if self._group is None:
            return [own]
        out = [torch.empty_like(own) for _ in self._ranks]
        dist.all_gather(out, own.contiguous(), group=self._group)
        return out

    def all_agree(self, flag: bool) -> bool:
        """Return whether every rank passes true."""
        return [0] not in self.gather([int(flag)])

    @contextmanager
    def raise_together(self, error: type[CheckpointError] = ConfigurationError) -> Iterator[None]:
        """If the body raises a `CheckpointError` on any rank, raise `error` on all ranks. Other exceptions are not caught: they leave
        the other ranks waiting in the exchange. Collective.

        Args:
            error: class of what is raised, with the reasons of all ranks that failed.
        """
        failed: CheckpointError | None = None
        try:
            yield
        except CheckpointError as reason:
            failed = reason
        reasons = self.gather_values(None if failed is None else str(failed))
        told = [
            f"rank {rank}: {reason}" for rank, reason in zip(self._ranks, reasons, strict=True) if reason is not None
        ]
        if told:
            raise error(str(failed) if len(reasons) == 1 else " ".join(told)) from failed

    def broadcast(self, value: object) -> object:
        """Return the coordinator's value on every rank."""
        if self._group is None:
            return value
        payload = encode(value) if self.is_coordinator else b""
        nbytes = expected_nbytes(self.gather([len(payload)])[0][0])
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        if self.is_coordinator:
            buffer = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        dist.broadcast(buffer, src=self._ranks[0], group=self._group)
        return decode(buffer.numpy().tobytes())

    def gather_values(self, value: object) -> list[object]:
        """Return every rank's value, by rank."""
        if self._group is None:
            return [value]
        payload = encode(value)
        sizes = [expected_nbytes(row[0]) for row in self.gather([len(payload)])]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        rows = self.gather_tensor(padded)
        return [decode(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def transfer(
        self, sends: Sequence[tuple[int, memoryview]], receives: Sequence[tuple[int, memoryview]]
    ) -> Callable[[], None]:
        """Begin to send bytes to ranks and to receive bytes from them; not collective, see `recovery.Transport`."""
        incoming = [(torch.frombuffer(view, dtype=torch.uint8), source) for source, view in receives]
        outgoing = [(torch.frombuffer(_writable(view), dtype=torch.uint8), to) for to, view in sends]
        under_way = [dist.irecv(tensor, src=source, group=self._group) for tensor, source in incoming]
        under_way += [dist.isend(tensor, dst=to, group=self._group) for tensor, to in outgoing]

        def wait() -> None:
            for work in under_way:
                if work is not None:
                    work.wait()
            incoming.clear()
            outgoing.clear()  # the memory had to stay until here

        return wait

    def run_on_coordinator(self, action: Callable[[], object]) -> object:
        """Run an action on the coordinator, and return its result or raise its error on every rank. Collective."""
        value: object = None
        if self.is_coordinator:
            try:
                value = [action()]
            except CheckpointError as error:
                value = (type(error).__name__, str(error))
        value = self.broadcast(value)
        if isinstance(value, tuple):
            raise getattr(errors, value[0], CheckpointError)(value[1])
        assert isinstance(value, list)
        return value[0]


def expected_nbytes(nbytes: int) -> int:
    """Check the size that a rank announces, before memory is made for it. Raises `CheckpointError` if out of range."""
    if not 0 <= nbytes <= _MAX_VALUE_NBYTES:
        raise CheckpointError(f"a rank announces a value of {nbytes} bytes. Start all ranks with one release.")
    return nbytes


def _writable(view: memoryview) -> memoryview | bytearray:
    """Return bytes that torch wraps without a warning: a copy if `view` is read-only."""
    return bytearray(view) if view.readonly else view
