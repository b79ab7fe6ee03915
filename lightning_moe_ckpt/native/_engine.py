"""Contract of copy engines, which copy training memory into pre-allocated host memory while training goes on.

`submit` returns at once. The caller may change the sources after `fence`, and read the destinations after `wait`. The
engine keeps the sources alive until it has read them. Both `fence` and `wait` report a failed copy, `submit` never
does, so the training thread meets a failed snapshot in one place.

Every compiled engine has a twin in Python. The compiled engine adds pacing and handles many small slices well; the
bandwidth is the same. In torch one `_foreach_copy_` call drops the GIL once for a whole list. A Python loop of `copy_`
takes the GIL back for every slice: at 5,000 slices of 4 KiB per step such a loop halves the rate of a busy training
thread. Cutting the list into calls of some MiB changes nothing measurable, since the GIL is free while torch copies.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import IntEnum
from itertools import pairwise
from operator import attrgetter, eq, is_
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lightning_moe_ckpt.errors import CheckpointError
from lightning_moe_ckpt.native._prototypes import GateCounts

Copy = tuple[Tensor, Tensor]
"""(source, destination) with equal numbers of elements; floating types may differ, which rounds or widens."""

Column: TypeAlias = "np.ndarray[tuple[int], np.dtype[Any]]"
"""One number per copy."""

_DTYPE, _SHAPE, _DEVICE = map(attrgetter, ("dtype", "shape", "device"))


class PipelinePhase(IntEnum):
    """Place of training in a pipeline's schedule; mirrors `Phase` of gate.hpp."""

    OUTSIDE = 0
    OPERATION = 1
    """Forward or backward of a micro-batch."""
    GAP = 2
    """Wait for another stage: a bubble."""


class CopyList:
    """Checked list of copies. Make it for a list that is submitted repeatedly: checking costs 1 us a pair. Raises
    `ValueError` if a pair differs in size, or its types have no exact or rounding conversion.
    """

    def __init__(self, copies: Sequence[Copy]) -> None:
        self._sources = [src for src, _ in copies]
        self._destinations = [dst for _, dst in copies]
        if not self._all(_DTYPE, is_) or not self._all(_SHAPE, eq):
            pairs = [_checked(index, src, dst) for index, (src, dst) in enumerate(copies)]
            self._destinations = [dst for _, dst in pairs]

    def __len__(self) -> int:
        return len(self._sources)

    def run(self, *, non_blocking: bool = False) -> None:
        """Copy everything; on CUDA the copies are only queued on the current stream if `non_blocking`."""
        if self._sources:
            with torch.no_grad():
                torch._foreach_copy_(self._destinations, self._sources, non_blocking=non_blocking)

    def pairs(self) -> Iterator[Copy]:
        """Iterate over the pairs; source and destination have the same shape."""
        return zip(self._sources, self._destinations, strict=True)

    def sides(self) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Sources and destinations, in the order of `pairs`."""
        return self._sources, self._destinations

    def devices(self) -> set[torch.device]:
        """CUDA devices that take part."""
        found = {*map(_DEVICE, self._sources), *map(_DEVICE, self._destinations)}
        return {device for device in found if device.type == "cuda"}

    def _all(self, read: Callable[[Tensor], object], same: Callable[[object, object], bool]) -> bool:
        # Built-in functions loop in C: no bytecode, and no object per pair for the garbage collector.
        return all(map(same, map(read, self._sources), map(read, self._destinations)))


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class CopyTable:
    """Copies of elements in order into a block of memory that is named at submission; one row per copy.

    The same table fills any block: copies depend on the block only by its address.

    Raises `ValueError` if a row takes elements that its source does not have.
    """

    sources: Sequence[Tensor]
    """Contiguous tensors."""
    source: Column
    """Index in `sources`, per row."""
    start: Column
    """First element to copy, per row."""
    numel: Column
    """Elements to copy, per row."""
    dtypes: Sequence[torch.dtype]
    dtype: Column
    """Index in `dtypes` of the stored type, per row."""
    offset: Column
    """First byte in the block, per row."""

    def __post_init__(self) -> None:
        room = np.fromiter(map(Tensor.numel, self.sources), np.int64, len(self.sources))
        short = np.flatnonzero(self.start + self.numel > room[self.source])
        if short.size:
            row = int(short[0])
            raise ValueError(
                f"copy {row}: elements {self.start[row]} to {self.start[row] + self.numel[row]} of a tensor that has "
                f"{room[self.source[row]]}."
            )

    def __len__(self) -> int:
        return len(self.source)

    def pairs(self, block_U8: Tensor) -> list[Copy]:
        """Return the copies into a block."""
        flat = [source.detach().view(-1) for source in self.sources]
        columns = (self.source, self.start, self.start + self.numel, self.offset, self.dtype)
        pairs: list[Copy] = []
        for source, start, stop, offset, dtype in zip(*(column.tolist() for column in columns), strict=True):
            end = offset + (stop - start) * self.dtypes[dtype].itemsize
            pairs.append((flat[source][start:stop], block_U8[offset:end].view(self.dtypes[dtype])))
        return pairs

    def of_sources(self, wanted: Column) -> CopyTable:
        """Return the rows of some sources; `wanted` has a truth value for each source."""
        rows = wanted[self.source]
        names = ("source", "start", "numel", "dtype", "offset")
        return replace(self, **{name: getattr(self, name)[rows] for name in names})


class PreparedTable:
    """Table that an engine has arranged."""

    def __init__(self, table: CopyTable) -> None:
        self.table = table
        self._lists: dict[int, CopyList] = {}
        """Copies by address of the block, if torch copies tensors."""

    def list_for(self, block_U8: Tensor, prepare: Callable[[Sequence[Copy]], CopyList]) -> CopyList:
        """Return the copies into one block as pairs of tensors, made once."""
        if (found := self._lists.get(block_U8.data_ptr())) is None:
            found = self._lists[block_U8.data_ptr()] = prepare(self.table.pairs(block_U8))
        return found


def split_at_pieces(copies: Sequence[Copy], *, base: int, end: int, piece_nbytes: int) -> Iterator[Copy]:
    """Cut the pairs so that no destination in the buffer `[base, end)` crosses an address `base + k * piece_nbytes`.

    CUDA refuses a copy that touches two separately registered pieces of host memory. Pairs to cut must be contiguous.
    """
    for src, dst in copies:
        start = dst.data_ptr()
        last = start + dst.numel() * dst.element_size() - 1
        if not base <= start < end or (start - base) // piece_nbytes == (last - base) // piece_nbytes:
            yield src, dst
            continue
        first_cut = base + ((start - base) // piece_nbytes + 1) * piece_nbytes
        cuts = [(address - start) // dst.element_size() for address in range(first_cut, last + 1, piece_nbytes)]
        for begin, stop in pairwise([0, *cuts, dst.numel()]):
            yield src.view(-1)[begin:stop], dst.view(-1)[begin:stop]


def _checked(index: int, src: Tensor, dst: Tensor) -> Copy:
    if src.dtype is not dst.dtype and not (src.is_floating_point() and dst.is_floating_point()):
        raise ValueError(f"copy {index}: {src.dtype} cannot be stored as {dst.dtype}.")
    if src.shape == dst.shape:
        return src, dst
    # Without this check `copy_` would broadcast one element over the whole destination.
    if src.numel() != dst.numel():
        raise ValueError(f"copy {index}: the source has {src.numel()} elements, the destination {dst.numel()}.")
    # The destination takes the source's shape, never the reverse: flattening a strided source would copy it now.
    return src, dst.view(src.shape)


class Ticket(ABC):
    """Submitted list of copies."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether all bytes have arrived, or the copy has failed."""

    def fence(self) -> float:
        """Wait until the calling thread, or its current stream, may overwrite the sources. Returns seconds the calling
        thread was blocked. On CUDA the wait happens on the device and this is near zero. Raises like `wait`.
        """
        start = None if self.done else time.perf_counter()
        self.wait()
        return 0.0 if start is None else time.perf_counter() - start

    @abstractmethod
    def wait(self, timeout: timedelta | None = None) -> None:
        """Block until all bytes have arrived at the destinations. The engine writes nothing there afterwards. Raises
        `CheckpointError` if the copy failed (the destinations hold garbage); `TimeoutError` if the copy is still
        running after `timeout`.
        """


class CopyEngine(Protocol):
    """Background copies of tensors in lists. The training thread calls it; any thread may call `Ticket.wait`."""

    def register(self, buffer: Tensor, *, written: bool = False) -> None:
        """Make a host buffer ready (page-lock it for CUDA). Slow; call it once per buffer, at start.

        Compiled engines do so in the background. With CUDA the buffer stays in memory until `unregister` or `close`. Memory that was
        `written` by an earlier process has its pages, and is only locked.
        """

    def unregister(self, buffer: Tensor) -> None:
        """Undo `register`. With CUDA the call waits for copies, because fenced copies may still be running."""

    def prepare(self, copies: Sequence[Copy]) -> CopyList:
        """Check and arrange a list that will be submitted many times. Call `register` before. Raises like `CopyList`."""

    def submit(self, copies: Sequence[Copy] | CopyList) -> Ticket:
        """Start copying every (source, destination) pair and return at once."""

    def prepare_table(self, table: CopyTable, block_U8: Tensor) -> PreparedTable:
        """Arrange a table that will be submitted many times, into this block and others registered like it."""
        return PreparedTable(table)

    def submit_table(self, prepared: PreparedTable, block_U8: Tensor) -> Ticket:
        """Start copying into a block and return at once. With a compiled engine the time is independent of the rows."""
        return self.submit(prepared.list_for(block_U8, self.prepare))

    def fence(self, ticket: Ticket) -> float:
        """Call `ticket.fence()`, after which the sources may be overwritten; return the seconds waited."""
        return ticket.fence()

    def wait(self, ticket: Ticket) -> None:
        """Call `ticket.wait()`, after which the destinations may be read."""
        ticket.wait()

    def enter(self, phase: PipelinePhase) -> None:
        """Set the phase of a pipeline's schedule for all later work of the calling thread, or of its current stream.

        torch's engines copy at any time.
        """
        del phase

    def fit_gaps(self, nbytes: int) -> None:
        """Let so many bytes of a list wait for gaps in a pass through a schedule; copy the rest at any time."""
        del nbytes

    def gate_counts(self) -> GateCounts | None:
        """Return the counts of copied chunks by phase; `None` from engines that copy at any time."""
        return None

    def close(self) -> None:
        """Finish all submitted lists and release threads and streams. Closing twice is allowed."""


def copy_through(engine: CopyEngine, copies: Sequence[Copy]) -> None:
    """Copy into live tensors, such as host memory into parameters, and return when all bytes have arrived. Raises
    `CheckpointError` if the copy failed; the destinations hold garbage. Work queued earlier on the current stream runs
    before the copies, later work sees the new values. Version counters rise as with `copy_`.
    """
    ticket = engine.submit(copies)
    engine.fence(ticket)
    engine.wait(ticket)
    for _, dst in copies:
        torch.autograd.graph.increment_version(dst)


def copy_failed(num_copies: int, cause: BaseException) -> CheckpointError:
    """Return the error for copies that did not arrive; the caller raises it `from cause`."""
    return CheckpointError(
        f"A snapshot of {num_copies} slices failed: {cause}. The slot it was meant for must not be used; "
        "training itself is not affected."
    )
