"""A list of copies arranged by the compiled library: thousands of slices in one call.

A pair of tensors becomes one slice: rows of contiguous elements, a fixed distance apart on either side. What has no
such form (three strides, conversions other than those of `_CASTS`, tensors that are no plain memory) stays with torch.
The plan holds addresses, and keeps the memory behind them alive; a tensor that is given other memory afterwards
(`tensor.data = ...`) needs a new plan.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from lightning_moe_ckpt.native._copies import Copy, CopyList
from lightning_moe_ckpt.native._library import Library, Part
from lightning_moe_ckpt.native._prototypes import Pieces, PlanOptions, Slice

_SLICE = np.dtype(Slice)
_Row = tuple[int, int, int, int, int, int, int, int, int, int]


class Cast(IntEnum):
    """Conversion of elements; mirrors `Cast` of slice.hpp."""

    BYTES = 0
    FLOAT_TO_BFLOAT16 = 1
    FLOAT_TO_HALF = 2
    BFLOAT16_TO_FLOAT = 3
    HALF_TO_FLOAT = 4


class Space(IntEnum):
    """Where memory is; mirrors `Space` of slice.hpp."""

    PAGEABLE = 0
    PINNED = 1
    DEVICE = 2


_CASTS = {
    (torch.float32, torch.bfloat16): Cast.FLOAT_TO_BFLOAT16,
    (torch.float32, torch.float16): Cast.FLOAT_TO_HALF,
    (torch.bfloat16, torch.float32): Cast.BFLOAT16_TO_FLOAT,
    (torch.float16, torch.float32): Cast.HALF_TO_FLOAT,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrangement:
    """How a plan is cut."""

    chunk_nbytes: int = 16 * 2**20
    """Bytes of one chunk; a few chunks are queued with the device at a time, and its other copies wait behind them."""
    chunk_copies: int = 1024
    """Copies of one chunk, at most."""
    pack_below: int = 64 * 2**10
    """Bytes; smaller slices are packed by a kernel and travel together. Used with a device only."""
    has_device: bool = False
    pieces: Sequence[tuple[int, int, int]] = ()
    """(base, end, bytes of a piece) of every registered buffer: no copy may cross from piece to piece."""


class Plan:
    """Slices that the library has arranged.

    Args:
        library: the loaded part.
        part: which one it is.
        slices: see `slices_of`.
        arrangement: how they are cut.
    """

    def __init__(
        self, library: Library, part: Part, slices: np.ndarray[tuple[int], np.dtype[np.void]], arrangement: Arrangement
    ) -> None:
        self._library, self._part = library, part
        options = PlanOptions(
            chunk_nbytes=arrangement.chunk_nbytes,
            chunk_copies=arrangement.chunk_copies,
            pack_below=arrangement.pack_below,
            has_device=arrangement.has_device,
            bfloat16_nan=bfloat16_nan(),
        )
        pieces = (Pieces * len(arrangement.pieces))(*(Pieces(*each) for each in arrangement.pieces))
        handle = ctypes.c_void_p()
        self._call("create", slices.ctypes.data, len(slices), options, pieces, len(pieces), handle)
        self.handle = handle
        # The library counts users: a job under way keeps what it needs of a plan that is freed here.
        weakref.finalize(self, getattr(library, f"moe_{part}_plan_free"), handle).atexit = False

    @property
    def nbytes(self) -> int:
        """Bytes that arrive."""
        return self._call("nbytes", self.handle)

    @property
    def bounce_nbytes(self) -> int:
        """Bytes of staging memory, on the device and again on the host, to give to `attach`."""
        return self._call("bounce_nbytes", self.handle)

    @property
    def num_chunks(self) -> int:
        """Units of pacing."""
        return self._call("num_chunks", self.handle)

    def attach(self, staging: int, bounce: int) -> None:
        """Addresses of the staging memory, on the device and on the host."""
        self._call("attach", self.handle, staging, bounce)

    def copies(self) -> list[Slice]:
        """What copy engines or the worker do, in order."""
        found = getattr(self._library, f"moe_{self._part}_plan_copies")(self.handle)
        return [found[index] for index in range(self._call("num_copies", self.handle))]

    def run(self, threads: int) -> None:
        """Copy now, on this thread and `threads - 1` others; the interpreter lock is free. CPU only."""
        self._call("run", self.handle, threads)

    def _call(self, name: str, *arguments: object) -> int:
        return int(getattr(self._library, f"moe_{self._part}_plan_{name}")(*arguments) or 0)


class PlannedCopies(CopyList):
    """Copies that have been checked and, if they all have a form for it, arranged in a plan."""

    def __init__(self, copies: Sequence[Copy] | CopyList) -> None:
        super().__init__(list(copies.pairs()) if isinstance(copies, CopyList) else copies)
        self.plan: Plan | None = None
        # Views of their own: whatever becomes of the caller's tensors, the addresses in the plan stay allocated.
        self._kept = [tensor.detach() for pair in self.pairs() for tensor in pair]
        self.attached: list[Tensor] = []
        """Memory of the plan's own."""


def slices_of(
    copies: CopyList, space_of: Callable[[Tensor], Space] | None = None
) -> np.ndarray[tuple[int], np.dtype[np.void]] | None:
    """The pairs as slices; `None` if one of them has no such form.

    Args:
        copies: what to copy.
        space_of: where the memory of a tensor is; unset if all of it is on the host.
    """
    rows: list[_Row] = []
    for src, dst in copies.pairs():
        spaces = (space_of(dst), space_of(src)) if space_of is not None else (Space.PAGEABLE, Space.PAGEABLE)
        found = _slice(src, dst, spaces)
        if found is None:
            return None
        if found[2] and found[0] != found[1]:
            rows.append(found)
    return np.array(rows, dtype=_SLICE)


@functools.cache
def bfloat16_nan() -> int:
    """What torch makes of a float32 NaN on this processor: 0x7fc0 without vector instructions, 0xffff with AVX2."""
    return int(torch.full((64,), torch.nan).bfloat16().view(torch.int16)[0].item()) & 0xFFFF


def _slice(src: Tensor, dst: Tensor, spaces: tuple[Space, Space]) -> _Row | None:
    cast = Cast.BYTES if src.dtype is dst.dtype else _CASTS.get((src.dtype, dst.dtype))
    if cast is None or not (_is_plain(src) and _is_plain(dst)):
        return None
    src_size, dst_size = src.element_size(), dst.element_size()
    unit = src_size if cast is Cast.BYTES else 1
    if src.is_contiguous() and dst.is_contiguous():
        return dst.data_ptr(), src.data_ptr(), src.numel() * unit, 1, 0, 0, cast, *spaces, 0
    form = _two_dimensions(src, dst)
    if form is None:
        return None
    rows, count, src_stride, dst_stride = form
    strides = (dst_stride * dst_size, src_stride * src_size)
    return dst.data_ptr(), src.data_ptr(), count * unit, rows, *strides, cast, *spaces, 0


def _is_plain(tensor: Tensor) -> bool:
    """Whether elements lie in memory as they are meant; a conjugated or negated view stores something else."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
    )


def _two_dimensions(src: Tensor, dst: Tensor) -> tuple[int, int, int, int] | None:
    """(rows, elements of a row, distance of rows in `src`, in `dst`), if both have that form together."""
    dims: list[tuple[int, int, int]] = []
    for size, src_stride, dst_stride in zip(src.shape, src.stride(), dst.stride(), strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1:] == (src_stride * size, dst_stride * size):
            dims[-1] = (dims[-1][0] * size, src_stride, dst_stride)
        else:
            dims.append((size, src_stride, dst_stride))
    if any(stride <= 0 for _, _, stride in dims):
        return None  # a destination that overlaps itself: torch says what is wrong with it
    if dims and dims[-1][1:] == (1, 1):
        (count, _, _), dims = dims[-1], dims[:-1]
    else:
        count = 1
    if len(dims) > 1 or _overlap(dims, count):
        return None
    rows, src_stride, dst_stride = dims[0] if dims else (1, 0, 0)
    return (0, 0, 0, 0) if src.numel() == 0 else (rows, count, src_stride, dst_stride)


def _overlap(dims: Sequence[tuple[int, int, int]], count: int) -> bool:
    return any(stride < count for _, _, stride in dims)
