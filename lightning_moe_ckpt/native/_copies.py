"""Lists of tensor pairs to copy: checked once, then copied with the GIL released as much as torch allows.

One `torch._foreach_copy_` call drops the lock once for the whole list. A Python loop of `copy_` takes it back for every
slice: at 5,000 slices of 4 KiB per step such a loop halves the rate of a busy training thread. Cutting the list into
calls of some MiB changes nothing measurable, since the lock is free while torch copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter, eq, is_

import torch
from torch import Tensor

Copy = tuple[Tensor, Tensor]
"""(source, destination) with equal numbers of elements; floating types may differ, which rounds or widens."""

_DTYPE, _SHAPE, _DEVICE = map(attrgetter, ("dtype", "shape", "device"))


class CopyList:
    """A checked list of copies. Make one for a list that is submitted repeatedly: checking costs 1 us a pair.

    Raises:
        ValueError: a pair differs in size, or its types have no exact or rounding conversion.
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


def copy_now(copies: Sequence[Copy] | CopyList) -> None:
    """Copy every pair and return when all bytes have arrived.

    Raises:
        ValueError: a pair differs in size, or its types have no exact or rounding conversion.
    """
    copy_list = copies if isinstance(copies, CopyList) else CopyList(copies)
    copy_list.run(non_blocking=True)
    for device in copy_list.devices():
        torch.cuda.current_stream(device).synchronize()


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
        yield from _cut(src.view(-1), dst.view(-1), cuts)


def _cut(src: Tensor, dst: Tensor, at: list[int]) -> Iterator[Copy]:
    for start, stop in zip([0, *at], [*at, dst.numel()], strict=True):
        yield src[start:stop], dst[start:stop]


def _checked(index: int, src: Tensor, dst: Tensor) -> Copy:
    if src.dtype is not dst.dtype and not (src.is_floating_point() and dst.is_floating_point()):
        raise ValueError(f"copy {index}: {src.dtype} cannot be stored as {dst.dtype}.")
    if src.shape == dst.shape:
        return src, dst
    # Without this check `copy_` would broadcast one element over the whole destination.
    if src.numel() != dst.numel():
        raise ValueError(f"copy {index}: the source has {src.numel()} elements, the destination {dst.numel()}.")
    # The destination takes the source's shape, never the other way: flattening a strided source would copy it now.
    return src, dst.view(src.shape)
