"""The bytes of a segment: a safetensors file whose header sits in a reserved, page-aligned prefix.

A snapshot is copied into a buffer that equals the file byte for byte; a restore reads the file into such a buffer.
safetensors forbids holes and guarantees no alignment, so `U8` tensors named `__pad__.N` fill the gaps, and spaces pad
the header until the first tensor starts on a page. The header depends on the layout alone, so it is written once per
plan. Digests depend on the bytes, so they are in the markers.

Invariant: one layout has one header; `parse` rebuilds the layout from a header and refuses any that differs.
Source: the rules of the safetensors parser, measured.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from lightning_moe_ckpt.errors import Corrupt

_PAGE_NBYTES = 4096
_MAX_HEADER_NBYTES = 100_000_000  # the limit of the safetensors parser
_PAD_PREFIX = "__pad__."
_METADATA = "__metadata__"
_FORMAT_KEY = "segment_format"
_ALIGN_KEY = "segment_align"
_FORMAT = "1"

_TORCH_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "C64": "complex64",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
_DTYPES: dict[str, torch.dtype] = {code: getattr(torch, name) for code, name in _TORCH_NAMES.items()}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


def dtype_code(dtype: torch.dtype) -> str:
    """Return the name of a dtype in safetensors files and in markers, e.g. `BF16`.

    Raises:
        ValueError: the format has no such type.
    """
    if dtype not in _CODES:
        raise ValueError(_not_stored(dtype))
    return _CODES[dtype]


def _not_stored(dtype: torch.dtype) -> str:
    return f"`{dtype}` cannot be stored; supported are {', '.join(_TORCH_NAMES.values())}."


def itemsize_of(code: str) -> int | None:
    """Return the bytes per element of the dtype that `code` names; `None` for an unknown code."""
    return _DTYPES[code].itemsize if code in _DTYPES else None


def dtype_of(code: str) -> torch.dtype:
    """Return the dtype that `code` names.

    Raises:
        Corrupt: the code is unknown.
    """
    if code not in _DTYPES:
        raise Corrupt(f"unknown dtype {code!r}.")
    return _DTYPES[code]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype and shape of a tensor to place in a segment."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Span:
    """Place of a tensor in the file."""

    offset: int
    """From the start of the file, in bytes."""
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class SegmentLayout:
    """Places of all tensors of a segment, in the order given, and the header that describes them."""

    def __init__(self, tensors: Sequence[TensorSpec], *, metadata: Mapping[str, str], align: int = 64) -> None:
        """Lay tensors out.

        Args:
            tensors: names must differ; shapes may hold zeros; order is kept.
            metadata: strings for the header; they must not change from step to step.
            align: every tensor starts at a multiple of so many bytes, a power of two up to a page.

        Raises:
            ValueError: a repeated or reserved name, a dtype the format lacks, or a bad alignment.
        """
        _check(tensors, metadata, align)
        self.metadata = dict(metadata)
        self.align = align
        placed = _place(tensors, align)
        self.header = _header(placed, {_FORMAT_KEY: _FORMAT, _ALIGN_KEY: str(align), **metadata})
        """The file's first bytes, up to the first tensor; a multiple of 4096."""
        start = len(self.header)
        self.pads: dict[str, Span] = {}
        """Padding tensors, by name."""
        self.spans: dict[str, Span] = {}
        """Tensors by name, in file order."""
        for spec, offset, nbytes in placed:
            spans = self.pads if spec.name.startswith(_PAD_PREFIX) else self.spans
            spans[spec.name] = Span(start + offset, nbytes, spec.dtype, spec.shape)
        self.nbytes = start + (placed[-1][1] + placed[-1][2] if placed else 0)
        """Size of the file, a multiple of `align`."""

    def write_header(self, buffer: torch.Tensor) -> None:
        """Write the header into `buffer` (uint8, 1-D, at least `nbytes`) and zeros into the gaps."""
        buffer[: len(self.header)].copy_(torch.frombuffer(bytearray(self.header), dtype=torch.uint8))
        for pad in self.pads.values():
            buffer[pad.offset : pad.offset + pad.nbytes].zero_()

    def view(self, buffer: torch.Tensor, name: str) -> torch.Tensor:
        """Return tensor `name` as a view of `buffer` (uint8, 1-D, starting at the file's first byte), not a copy."""
        span = self.spans[name]
        return buffer[span.offset : span.offset + span.nbytes].view(span.dtype).view(span.shape)

    @staticmethod
    def places(tensors: Iterable[TensorSpec], align: int = 64) -> list[tuple[int, int]]:
        """Return (offset, nbytes) of each tensor as a layout would place them; offsets count from the header's end."""
        return [(offset, nbytes) for spec, offset, nbytes in _place(tensors, align) if not _is_filler(spec.name)]

    @classmethod
    def parse(cls, data: memoryview) -> SegmentLayout:
        """Read the layout of a whole segment file.

        Args:
            data: all bytes of the file.

        Raises:
            Corrupt: the header is not the one this layout writes, or the file has another size.
        """
        layout = cls.of_header(cls.header_in(data))
        if layout.nbytes != data.nbytes:
            raise Corrupt(f"segment: {data.nbytes} bytes, its header says {layout.nbytes}. Another copy may be good.")
        return layout

    @classmethod
    def of_header(cls, header: bytes) -> SegmentLayout:
        """Read the layout that a header describes.

        Args:
            header: the file's first bytes, as `header_in` returns them.

        Raises:
            Corrupt: no layout writes this header.
        """
        layout = _rebuild(_split_header(memoryview(header)))
        if layout.header != header:
            raise Corrupt("segment: the header is not spelled as this format writes it. Another copy may be good.")
        return layout

    @staticmethod
    def header_in(data: memoryview) -> bytes:
        """Return the bytes of a segment before its first tensor. Raises `Corrupt` if they are no header."""
        return bytes(data[: 8 + _header_nbytes(data)])


def _check(tensors: Sequence[TensorSpec], metadata: Mapping[str, str], align: int) -> None:
    names = [spec.name for spec in tensors]
    if len(set(names)) != len(names):
        raise ValueError(f"`SegmentLayout`: repeated names {sorted({n for n in names if names.count(n) > 1})}.")
    if reserved := [n for n in names if n == _METADATA or _is_filler(n)]:
        raise ValueError(f"`SegmentLayout`: reserved names {reserved}.")
    if reserved := sorted({_FORMAT_KEY, _ALIGN_KEY} & metadata.keys()):
        raise ValueError(f"`SegmentLayout`: reserved metadata {reserved}.")
    for dtype, name in {spec.dtype: spec.name for spec in tensors}.items():
        if dtype not in _CODES:
            raise ValueError(f"{name!r}: {_not_stored(dtype)}")
    if align < 8 or _PAGE_NBYTES % align:
        raise ValueError(f"`SegmentLayout(align={align})` must be a power of two from 8 to {_PAGE_NBYTES}.")


def _is_filler(name: str) -> bool:
    return name.startswith(_PAD_PREFIX)


_Placed = tuple[TensorSpec, int, int]
"""A tensor or a padding tensor, its offset from the end of the header, and its bytes."""


def _place(tensors: Iterable[TensorSpec], align: int) -> list[_Placed]:
    """Place tensors in order, each at a multiple of `align` bytes, with padding tensors in the gaps."""
    placed: list[_Placed] = []
    position = num_pads = 0
    for spec in tensors:
        nbytes = spec.nbytes
        placed.append((spec, position, nbytes))
        position += nbytes
        if gap := -position % align:
            placed.append((TensorSpec(f"{_PAD_PREFIX}{num_pads}", torch.uint8, (gap,)), position, gap))
            position, num_pads = position + gap, num_pads + 1
    return placed


def _header(placed: Sequence[_Placed], metadata: Mapping[str, str]) -> bytes:
    table: dict[str, object] = {_METADATA: dict(sorted(metadata.items()))}
    for spec, offset, nbytes in placed:
        table[spec.name] = {
            "dtype": _CODES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + nbytes],
        }
    text = json.dumps(table, separators=(",", ":")).encode("ascii")
    text += b" " * (-(8 + len(text)) % _PAGE_NBYTES)
    if len(text) > _MAX_HEADER_NBYTES:
        raise ValueError(
            f"`SegmentLayout`: {len(placed)} tensors need a header of {len(text)} bytes; 100 MB is the limit."
        )
    return struct.pack("<Q", len(text)) + text


def header_nbytes(start: bytes, file_nbytes: int) -> int:
    """Return the length of a header, without the eight bytes before it that state the length. Raises `Corrupt`.

    Args:
        start: the first eight bytes of a file.
        file_nbytes: size of the whole file.
    """
    nbytes: int = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
    if not 0 < nbytes <= min(_MAX_HEADER_NBYTES, file_nbytes - 8):
        raise Corrupt(f"segment: header of {nbytes} bytes in a file of {file_nbytes}. Another copy may be good.")
    return nbytes


def _header_nbytes(data: memoryview) -> int:
    return header_nbytes(bytes(data[:8]), data.nbytes)


def _split_header(data: memoryview) -> dict[str, object]:
    nbytes = _header_nbytes(data)
    try:
        table = json.loads(bytes(data[8 : 8 + nbytes]).decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"segment: the header is not JSON ({error}). Another copy may be good.") from error
    if not isinstance(table, dict):
        raise Corrupt("segment: the header is not a JSON object. Another copy may be good.")
    return table


def _rebuild(table: dict[str, object]) -> SegmentLayout:
    """Lay out the tensors that a header names. The caller compares the new header with the original."""
    try:
        metadata = _string_map(table.pop(_METADATA))
        if metadata.pop(_FORMAT_KEY) != _FORMAT:
            raise Corrupt("segment: written in another version of the format. Read it with the release that wrote it.")
        align = int(metadata.pop(_ALIGN_KEY))
        specs = [_read_spec(name, place) for name, place in table.items() if not _is_filler(name)]
        return SegmentLayout(specs, metadata=metadata, align=align)
    except (KeyError, ValueError, TypeError, ZeroDivisionError) as error:
        if isinstance(error, Corrupt):
            raise
        raise Corrupt(
            f"segment: the header does not describe a segment ({error!r}). Another copy may be good."
        ) from error


def _string_map(value: object) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise TypeError("metadata must map strings to strings")
    return dict(value)


def _read_spec(name: str, place: object) -> TensorSpec:
    if not isinstance(place, dict) or not isinstance(place["shape"], list):
        raise TypeError(f"{name!r} is not a tensor")
    shape = place["shape"]
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"{name!r} has shape {shape}")
    return TensorSpec(name, dtype_of(place["dtype"]), tuple(shape))
