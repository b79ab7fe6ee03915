"""Lists of copies arranged by the compiled library, which copies thousands of slices in one call.

A pair of tensors becomes one slice: rows of contiguous elements, a fixed distance apart on either side. Torch copies
pairs without such a form (three strides, conversions not in `_CASTS`, tensors that are no plain memory). The plan holds
addresses and keeps the memory behind them alive. A tensor that gets other memory later (`tensor.data = ...`) needs a
new plan. A table's plan has offsets in the place of destinations: one plan fills all blocks.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
from operator import attrgetter
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lightning_moe_ckpt.native._engine import Copy, CopyList, CopyTable, PreparedTable
from lightning_moe_ckpt.native._library import Library
from lightning_moe_ckpt.native._prototypes import Pieces, PlanOptions, Slice

_SLICE = np.dtype(Slice)
Slices: TypeAlias = np.ndarray[tuple[int], np.dtype[Any]]
"""Structured array with the fields of `Slice`."""
_DTYPE, _LAYOUT, _DEVICE, _QUANTIZED = map(attrgetter, ("dtype", "layout", "device", "is_quantized"))


class Cast(IntEnum):
    """Conversion of elements; mirrors `Cast` of slice.hpp."""

    BYTES = 0
    FLOAT_TO_BFLOAT16 = 1
    FLOAT_TO_HALF = 2
    BFLOAT16_TO_FLOAT = 3
    HALF_TO_FLOAT = 4


class Space(IntEnum):
    """Kind of memory; mirrors `Space` of slice.hpp."""

    PAGEABLE = 0
    PINNED = 1
    DEVICE = 2
    FOREIGN = -1
    """Memory that the engine cannot reach, such as another device's: torch copies from and to it."""


_CASTS = {
    (torch.float32, torch.bfloat16): Cast.FLOAT_TO_BFLOAT16,
    (torch.float32, torch.float16): Cast.FLOAT_TO_HALF,
    (torch.bfloat16, torch.float32): Cast.BFLOAT16_TO_FLOAT,
    (torch.float16, torch.float32): Cast.HALF_TO_FLOAT,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrangement:
    """Settings for cutting a plan into chunks."""

    chunk_nbytes: int = 16 * 2**20
    """Bytes per chunk; the device's other copies wait for the chunk that is queued, 0.3 ms on an H100."""
    chunk_copies: int = 1024
    """Most copies per chunk."""
    pack_below: int = 16 * 2**10
    """Bytes below which a kernel packs slices for a device; the host spreads them again, at 5 to 6 GB/s."""
    has_device: bool = False
    pieces: Sequence[tuple[int, int, int]] = ()
    """(base, end, bytes per piece) of every registered buffer: no copy may cross from piece to piece."""


class CopyPlan:
    """Slices, from `slices_of`, that the library has arranged."""

    def __init__(self, library: Library, slices: Slices, arrangement: Arrangement) -> None:
        self._library, self._part = library, library.part
        options = PlanOptions(
            chunk_nbytes=arrangement.chunk_nbytes,
            chunk_copies=arrangement.chunk_copies,
            pack_below=arrangement.pack_below,
            has_device=arrangement.has_device,
            bfloat16_nan=bfloat16_nan(),
        )
        pieces = (Pieces * len(arrangement.pieces))(*(Pieces(*piece) for piece in arrangement.pieces))
        handle = ctypes.c_void_p()
        self._call("create", slices.ctypes.data, len(slices), options, pieces, len(pieces), handle)
        self.handle = handle
        # The library counts references: a running job keeps its share of a plan that is freed here.
        weakref.finalize(self, getattr(library, f"moe_{self._part}_plan_free"), handle).atexit = False

    @property
    def nbytes(self) -> int:
        return self._call("nbytes", self.handle)

    @property
    def bounce_nbytes(self) -> int:
        """Bytes of memory on the host to give to `attach`."""
        return self._call("bounce_nbytes", self.handle)

    @property
    def staging_nbytes(self) -> int:
        """Bytes of memory on the device to give to `attach`."""
        return self._call("staging_nbytes", self.handle)

    def attach(self, staging: int, bounce: int) -> None:
        """Set the addresses of the staging memory, on the device and on the host."""
        self._call("attach", self.handle, staging, bounce)

    def copies(self, base: int = 0) -> list[Slice]:
        """Return the copies for copy engines or the worker, in order; destinations count from `base`."""
        found = (Slice * self._call("copies", self.handle, base, None, 0))()
        self._call("copies", self.handle, base, found, len(found))
        return list(found)

    def run(self, threads: int) -> None:
        """Copy now, on this thread and `threads - 1` others, without the GIL. CPU only."""
        self._call("run", self.handle, threads)

    def _call(self, name: str, *arguments: object) -> int:
        return int(getattr(self._library, f"moe_{self._part}_plan_{name}")(*arguments) or 0)


class Job(Protocol):
    """Work that an engine does in one go: copies, and their plan."""

    @property
    def plan(self) -> CopyPlan | None:
        """Plan of the copies; `None` if torch has to copy."""

    @property
    def base(self) -> int:
        """Address that the plan's destinations count from."""

    @property
    def reads_host(self) -> bool:
        """Whether a device reads from memory on the host."""

    def __len__(self) -> int: ...

    def pairs(self) -> Iterable[Copy]:
        """Return the copies as pairs of tensors."""

    def written(self) -> list[Tensor]:
        """Return the memory that the copies write to, which must stay until they have arrived."""


class PlannedCopies(CopyList):
    """Checked list of copies, arranged in a plan if all have the form of a slice."""

    base = 0

    def __init__(self, copies: Sequence[Copy] | CopyList) -> None:
        super().__init__(list(copies.pairs()) if isinstance(copies, CopyList) else copies)
        self.plan: CopyPlan | None = None
        self.reads_host = False
        """Whether a device reads from memory on the host."""
        # The addresses in the plan stay allocated, whatever happens to the caller's tensors.
        self._kept: list[torch.UntypedStorage] = []
        self.attached: list[Tensor] = []
        """Memory belonging to the plan."""

    def keep(self) -> None:
        """Keep the memory behind all tensors alive, even if the tensors get other memory."""
        self._kept = _storages(chain.from_iterable(self.sides()))

    def written(self) -> list[Tensor]:
        """Return the memory that the copies write to."""
        return [*self.sides()[1], *self.attached]


class PlannedTable(PreparedTable):
    """Table, arranged in a plan if its sources are plain memory and torch has no other conversions to make."""

    reads_host = False
    """False: blocks are on the host, so a device only writes there."""

    def __init__(self, table: CopyTable) -> None:
        super().__init__(table)
        self.plan: CopyPlan | None = None
        self._kept = _storages(table.sources)
        self.attached: list[Tensor] = []
        """Memory belonging to the plan."""


class BlockCopies:
    """Copies of a table into a block."""

    reads_host = False

    def __init__(self, table: PlannedTable, block_U8: Tensor) -> None:
        self._table, self._block_U8 = table, block_U8
        self.plan, self.base = table.plan, block_U8.data_ptr()

    def __len__(self) -> int:
        return len(self._table.table)

    def pairs(self) -> list[Copy]:
        """Return the copies as pairs of tensors."""
        return self._table.table.pairs(self._block_U8)

    def written(self) -> list[Tensor]:
        """Return the memory that the copies write to."""
        return [self._block_U8, *self._table.attached]


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    storages = map(Tensor.untyped_storage, tensors)
    return list({storage._cdata: storage for storage in storages}.values())  # noqa: SLF001  # no public identity


def slices_of(copies: CopyList, space_of: Callable[[Tensor], Space] | None = None) -> Slices | None:
    """Return the pairs as slices; `None` if some pair has no such form. `space_of` returns the kind of a tensor's
    memory; unset if all memory is on the host.

    Built-in functions read addresses and sizes without an object per pair: such objects would trigger the garbage
    collector, and its pass over all of torch's objects takes longer than all of this.
    """
    sources, destinations = copies.sides()
    casts = _column(map(_cast, map(_DTYPE, sources), map(_DTYPE, destinations)), np.int32)
    reachable = {"cpu"} if space_of is None else {"cpu", "cuda"}
    if (casts < 0).any() or not (_are_plain(sources, reachable) and _are_plain(destinations, reachable)):
        return None
    slices = np.zeros(len(copies), dtype=_SLICE)
    slices["dst"], slices["src"] = _addresses(destinations), _addresses(sources)
    units = np.where(casts == Cast.BYTES, _column(map(Tensor.element_size, sources), np.uint64), np.uint64(1))
    slices["count"], slices["rows"] = _column(map(Tensor.numel, sources), np.uint64) * units, 1
    slices["cast"] = casts
    if space_of is not None:
        slices["dst_space"] = _column(map(space_of, destinations), np.int32)
        slices["src_space"] = _column(map(space_of, sources), np.int32)
        if (slices["dst_space"] == Space.FOREIGN).any() or (slices["src_space"] == Space.FOREIGN).any():
            return None
    if not _add_rows(slices, units, sources, destinations):
        return None
    kept: Slices = slices[(slices["count"] > 0) & (slices["dst"] != slices["src"])]
    return kept


def slices_of_table(
    table: CopyTable, block_U8: Tensor, space_of: Callable[[Tensor], Space] | None = None
) -> Slices | None:
    """Return the rows as slices whose destinations are offsets in `block_U8`, or in other blocks of the same kind of
    memory; `None` if torch has to make a copy. For `space_of` see `slices_of`.
    """
    sources, source = table.sources, table.source
    codes = {dtype: code for code, dtype in enumerate(dict.fromkeys(map(_DTYPE, sources)))}
    casts_SD = np.array([[_cast(src, dst) for dst in table.dtypes] for src in codes], np.int32)
    code = _column(map(codes.__getitem__, map(_DTYPE, sources)), np.int64)
    casts = casts_SD[code[source], table.dtype] if len(table) else np.zeros(0, np.int32)
    reachable = {"cpu"} if space_of is None else {"cpu", "cuda"}
    if (casts < 0).any() or not _are_plain(sources, reachable) or not all(map(Tensor.is_contiguous, sources)):
        return None
    slices = np.zeros(len(table), dtype=_SLICE)
    itemsize = _column(map(Tensor.element_size, sources), np.int64)[source]
    slices["dst"], slices["src"] = table.offset, _addresses(sources)[source] + table.start * itemsize
    slices["count"], slices["rows"] = table.numel * np.where(casts == Cast.BYTES, itemsize, 1), 1
    slices["cast"] = casts
    if space_of is not None:
        slices["dst_space"], slices["src_space"] = space_of(block_U8), _column(map(space_of, sources), np.int32)[source]
        if space_of(block_U8) not in (Space.PAGEABLE, Space.PINNED) or (slices["src_space"] == Space.FOREIGN).any():
            return None  # kernels write to addresses: only slices written on the host have offsets
    kept: Slices = slices[slices["count"] > 0]
    return kept


@functools.cache
def bfloat16_nan() -> int:
    """Return torch's bfloat16 NaN on this processor: 0x7fc0 without vector instructions, 0xffff with AVX2."""
    return int(torch.full((64,), torch.nan).bfloat16().view(torch.int16)[0].item()) & 0xFFFF


@functools.cache
def _cast(src: torch.dtype, dst: torch.dtype) -> int:
    return Cast.BYTES if src is dst else _CASTS.get((src, dst), -1)


def _column(values: Iterable[object], dtype: type[np.generic]) -> np.ndarray[tuple[int], np.dtype[Any]]:
    return np.fromiter(values, dtype)


def _addresses(tensors: Sequence[Tensor]) -> np.ndarray[tuple[int], np.dtype[Any]]:
    return _column(map(Tensor.data_ptr, tensors), np.uint64)


def _add_rows(slices: Slices, units: Slices, sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> bool:
    """Fill in rows and strides of non-contiguous pairs; return whether all pairs have that form."""
    plain = _column(map(Tensor.is_contiguous, sources), np.bool_)
    plain &= _column(map(Tensor.is_contiguous, destinations), np.bool_)
    for index in np.flatnonzero(~plain).tolist():
        src, dst = sources[index], destinations[index]
        if (form := _two_dimensions(src, dst)) is None:
            return False
        rows, count, src_stride, dst_stride = form
        slices["count"][index], slices["rows"][index] = count * int(units[index]), rows
        slices["src_stride"][index] = src_stride * src.element_size()
        slices["dst_stride"][index] = dst_stride * dst.element_size()
    return True


def _are_plain(tensors: Sequence[Tensor], device_types: set[str]) -> bool:
    """Return whether tensors are plain: strided, on these kinds of device, and with their elements' values in memory.

    Not so a subclass, a quantized tensor, and a conjugated or negated view.
    """
    return (
        set(map(type, tensors)) <= {Tensor, torch.nn.Parameter}
        and set(map(_LAYOUT, tensors)) <= {torch.strided}
        and {device.type for device in set(map(_DEVICE, tensors))} <= device_types
        and not any(map(Tensor.is_neg, tensors))
        and not any(map(Tensor.is_conj, tensors))
        and not any(map(_QUANTIZED, tensors))
    )


def _two_dimensions(src: Tensor, dst: Tensor) -> tuple[int, int, int, int] | None:
    """Return (rows, elements per row, row stride in `src`, in `dst`); `None` if a pair has no such form."""
    dims: list[tuple[int, int, int]] = []
    for size, src_stride, dst_stride in zip(src.shape, src.stride(), dst.stride(), strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1:] == (src_stride * size, dst_stride * size):
            dims[-1] = (dims[-1][0] * size, src_stride, dst_stride)
        else:
            dims.append((size, src_stride, dst_stride))
    if any(stride <= 0 for _, _, stride in dims):
        return None  # a destination that overlaps itself: torch raises the error
    if dims and dims[-1][1:] == (1, 1):
        (count, _, _), dims = dims[-1], dims[:-1]
    else:
        count = 1
    if len(dims) > 1 or any(stride < count for _, _, stride in dims):  # rows of the destination would overlap
        return None
    rows, src_stride, dst_stride = dims[0] if dims else (1, 0, 0)
    return (0, 0, 0, 0) if src.numel() == 0 else (rows, count, src_stride, dst_stride)
