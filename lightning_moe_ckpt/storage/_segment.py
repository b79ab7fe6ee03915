"""Bytes of a segment: a safetensors file whose header sits in a reserved, page-aligned prefix.

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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from json.encoder import encode_basestring_ascii
from operator import mul
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from typing_extensions import override

from lightning_moe_ckpt.errors import Corrupt
from lightning_moe_ckpt.native import Column, Spelled, spell_rows

T = TypeVar("T")

_PAGE_NBYTES = 4096
MAX_HEADER_NBYTES = 100_000_000
"""Most bytes in a header: the safetensors parser's limit."""

_MAX_NBYTES = 2**62
_PAD_PREFIX = "__pad__."
_METADATA = "__metadata__"
_FORMAT_KEY = "segment_format"
_ALIGN_KEY = "segment_align"
_ALIGN = 64
"""Bytes at a multiple of which each tensor starts."""
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
    """Return a dtype's name in safetensors files and in markers, e.g. `BF16`. Raises `ValueError` if the format has no such type."""
    if dtype not in _CODES:
        raise ValueError(_not_stored(dtype))
    return _CODES[dtype]


def _not_stored(dtype: torch.dtype) -> str:
    return f"`{dtype}` cannot be stored; supported are {', '.join(_TORCH_NAMES.values())}."


def itemsize_of(code: str) -> int | None:
    """Return the bytes per element of the dtype that `code` names; `None` for an unknown code."""
    return _DTYPES[code].itemsize if code in _DTYPES else None


def dtype_of(code: str) -> torch.dtype:
    """Return the dtype that `code` names. Raises `Corrupt` if the code is unknown."""
    if code not in _DTYPES:
        raise Corrupt(f"unknown dtype {code!r}.")
    return _DTYPES[code]


TensorKind = tuple[torch.dtype, tuple[int, ...]]
"""Type and shape of a tensor."""


class TensorSpec(NamedTuple):
    """Name, dtype and shape of a tensor to place in a segment."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Span(NamedTuple):
    """Place of a tensor in the file."""

    offset: int
    """Bytes from the file's start."""
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class SegmentLayout:
    """Places of all tensors in a segment, in the order given, and the header that describes them."""

    def __init__(self, tensors: Sequence[TensorSpec], *, metadata: Mapping[str, str], align: int = _ALIGN) -> None:
        """Lay tensors out in the given order; shapes may hold zeros. Each starts at a multiple of `align` bytes, a
        power of two up to a page. Metadata for the header must not change from step to step. Raises `ValueError` if a
        repeated or reserved name, a dtype the format lacks, or a bad alignment.
        """
        names, kinds = [spec.name for spec in tensors], KindColumns.of([(spec.dtype, spec.shape) for spec in tensors])
        self._lay_out([NameColumns.of(names)], kinds, metadata, align, None)

    @classmethod
    def of_columns(
        cls,
        names: Sequence[NameColumns],
        kinds: KindColumns,
        *,
        metadata: Mapping[str, str],
        header_nbytes: int | None = None,
    ) -> SegmentLayout:
        """Lay out tensors given by column, as `SegmentLayout` does: `names` of some tensors, then of others.

        With `header_nbytes`, the header's bytes, the header is spelled only on demand.
        """
        layout = cls.__new__(cls)
        layout._lay_out(names, kinds, metadata, _ALIGN, header_nbytes)  # noqa: SLF001  # its own
        return layout

    def _lay_out(
        self,
        names: Sequence[NameColumns],
        kinds: KindColumns,
        metadata: Mapping[str, str],
        align: int,
        header_nbytes: int | None,
    ) -> None:
        self._names, self.kinds = names, kinds
        _check([name for each in names if not (each.parts or each.known) for name in each.texts()], metadata, align)
        for number, (dtype, _) in enumerate(kinds.distinct):
            if dtype not in _CODES:
                raise ValueError(f"{self.names[int(np.argmax(kinds.number == number))]!r}: {_not_stored(dtype)}")
        self.metadata = dict(metadata)
        self.align = align
        self._places = _place(kinds, align)
        nbytes = len(self.header) if header_nbytes is None else header_nbytes
        self.offsets, self.sizes = self._places.starts + nbytes, self._places.sizes
        """First byte in the file, and bytes, of each tensor in order."""
        self.nbytes = nbytes + int(self._places.stops[-1:].sum())
        """Size of the file, a multiple of `align`."""

    @cached_property
    def header(self) -> bytes:
        """Bytes before the first tensor; their number is a multiple of 4096."""
        metadata = {_FORMAT_KEY: _FORMAT, _ALIGN_KEY: str(self.align), **self.metadata}
        return _header(self._names, self.kinds, self._places, metadata)

    @cached_property
    def names(self) -> list[str]:
        """Names of the tensors in order."""
        return [name for each in self._names for name in each.texts()]

    @cached_property
    def _last(self) -> dict[str, int]:
        """Indices of the last names, looked up in every step."""
        last = self._names[-1].texts()
        return dict(zip(last, range(len(self.sizes) - len(last), len(self.sizes)), strict=True))

    @cached_property
    def _index(self) -> dict[str, int]:
        return dict(zip(self.names, range(len(self.names)), strict=True))

    @cached_property
    def spans(self) -> dict[str, Span]:
        """Tensors by name, in file order."""
        tensors = zip(self.names, self.places, self.kinds, strict=True)
        return {name: Span(*place, *kind) for name, place, kind in tensors}

    @property
    def places(self) -> list[tuple[int, int]]:
        """`offsets` and `sizes` in pairs."""
        return list(zip(self.offsets.tolist(), self.sizes.tolist(), strict=True))

    @property
    def spelled_names(self) -> bytes:
        """Names in JSON with commas between them."""
        return b",".join([each.spelled for each in self._names if each.length])

    def is_like(self, other: SegmentLayout) -> bool:
        """Return whether another layout has the same header; it is not spelled for that."""
        numbers: dict[TensorKind, int] = {}
        kinds = [
            np.array([numbers.setdefault(kind, len(numbers)) for kind in each.kinds.distinct])[each.kinds.number]
            for each in (self, other)
        ]
        facts = [(each.metadata, each.align, each.nbytes, each.offsets[:1].tolist()) for each in (self, other)]
        return facts[0] == facts[1] and np.array_equal(kinds[0], kinds[1]) and self.spelled_names == other.spelled_names

    def write_header(self, buffer: torch.Tensor) -> None:
        """Write the header into `buffer` (uint8, 1-D, at least `nbytes`) and zeros into the gaps."""
        buffer[: len(self.header)].copy_(torch.frombuffer(bytearray(self.header), dtype=torch.uint8))
        # A gap is the end of a line of `align` bytes, in which the tensor before it ends.
        lines = buffer[len(self.header) : self.nbytes].view((self.nbytes - len(self.header)) // self.align, self.align)
        starts, sizes, stops = self._places
        last, gaps = stops // self.align - 1, stops - starts - sizes
        for gap in np.unique(gaps[gaps > 0]).tolist():
            lines[torch.from_numpy(last[gaps == gap]), self.align - gap :] = 0

    def span(self, name: str) -> Span:
        """Return a tensor's place. Raises `KeyError`."""
        index = self._last[name] if name in self._last else self._index[name]
        kind = self.kinds.distinct[int(self.kinds.number[index])]
        return Span(int(self.offsets[index]), int(self.sizes[index]), *kind)

    def view(self, buffer: torch.Tensor, name: str) -> torch.Tensor:
        """Return tensor `name` as a view of `buffer` (uint8, 1-D, starting at the file's first byte), not a copy."""
        start, nbytes, dtype, shape = self.span(name)
        return buffer[start : start + nbytes].view(dtype).view(shape)

    @staticmethod
    def placed(kinds: KindColumns) -> tuple[Column, Column]:
        """Return offset and bytes of each tensor as a layout would place it; offsets count from the header's end."""
        places = _place(kinds, _ALIGN)
        return places.starts, places.sizes

    @classmethod
    def parse(cls, data: memoryview) -> SegmentLayout:
        """Read the layout of a whole segment file. Raises `Corrupt` if this layout writes another header, or the file has another size."""
        layout = cls.of_header(cls.header_in(data))
        if layout.nbytes != data.nbytes:
            raise Corrupt(f"segment: {data.nbytes} bytes, its header says {layout.nbytes}. Another copy may be good.")
        return layout

    @classmethod
    def of_header(cls, header: bytes) -> SegmentLayout:
        """Read the layout that a header describes: the file's first bytes, as `header_in` returns them. Raises `Corrupt` if no layout
        writes this header.
        """
        layout = _rebuild(_split_header(header))
        if layout.header != header:
            raise Corrupt("segment: the header is not spelled as this format writes it. Another copy may be good.")
        return layout

    @staticmethod
    def header_in(data: memoryview) -> bytes:
        """Return a segment's bytes before its first tensor. Raises `Corrupt` if they are no header."""
        return bytes(data[: 8 + header_nbytes(bytes(data[:8]), data.nbytes)])


class Numbered(Sequence[T]):
    """Column of values in order, few of them different: looking a kind of tensor up takes longer than anything else here."""

    def __init__(self, distinct: Sequence[T], number: Column) -> None:
        self.distinct, self.number = distinct, number

    @classmethod
    def of(cls, values: Sequence[T]) -> Numbered[T]:
        """Return the column for a list; the column itself for a column."""
        if isinstance(values, Numbered):
            return values
        distinct = list(dict.fromkeys(values))
        numbers = dict(zip(distinct, range(len(distinct)), strict=True))
        return cls(distinct, np.fromiter(map(numbers.__getitem__, values), np.int64, len(values)))

    @override
    def __getitem__(self, index: Any) -> Any:
        numbers = self.number[index]
        return [self.distinct[each] for each in numbers] if isinstance(index, slice) else self.distinct[numbers]

    @override
    def __iter__(self) -> Iterator[T]:
        return map(self.distinct.__getitem__, self.number.tolist())

    @override
    def __len__(self) -> int:
        return len(self.number)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Return numbers as an array."""
        return np.array(self.distinct, dtype)[self.number]


KindColumns = Numbered[TensorKind]
"""Kinds of tensors in order."""


class NameColumns(NamedTuple):
    """Names of some tensors in order."""

    length: int
    texts: Callable[[], Sequence[str]]
    parts: Sequence[Spelled] | None = None
    """Parts of the names in JSON, all different and none reserved; `None` to spell `texts`."""
    known: bytes | None = None
    """Names in JSON with commas between them, likewise, if that is where `texts` come from."""

    @classmethod
    def of(cls, names: Sequence[str]) -> NameColumns:
        """Return the columns for a list."""
        return cls(len(names), lambda: names)

    @property
    def spelled(self) -> bytes:
        """Names in JSON with commas between them."""
        if self.known is not None:
            return self.known
        if self.parts is not None:
            return spell_rows(self.parts, self.length)
        return ",".join(map(encode_basestring_ascii, self.texts())).encode()


def _check(names: Sequence[str], metadata: Mapping[str, str], align: int) -> None:
    if len(set(names)) != len(names):
        repeated = sorted(name for name, count in Counter(names).items() if count > 1)
        raise ValueError(f"`SegmentLayout`: repeated names {repeated}.")
    # A name with a line break in it may only look reserved.
    maybe = f"\n{_PAD_PREFIX}" in "\n" + "\n".join(names) or _METADATA in names
    if maybe and (reserved := [n for n in names if n == _METADATA or n.startswith(_PAD_PREFIX)]):
        raise ValueError(f"`SegmentLayout`: reserved names {reserved}.")
    if reserved := sorted({_FORMAT_KEY, _ALIGN_KEY} & metadata.keys()):
        raise ValueError(f"`SegmentLayout`: reserved metadata {reserved}.")
    if align < 8 or _PAGE_NBYTES % align:
        raise ValueError(f"`SegmentLayout(align={align})` must be a power of two from 8 to {_PAGE_NBYTES}.")


class _Places(NamedTuple):
    """Places of tensors in order; offsets count from the header's end, in bytes."""

    starts: Column
    sizes: Column
    stops: Column
    """End of the padding behind each tensor."""


def _place(kinds: KindColumns, align: int) -> _Places:
    """Place tensors, each at a multiple of `align` bytes. Raises `ValueError` if no file could hold them."""
    nbytes = [math.prod(shape) * dtype.itemsize for dtype, shape in kinds.distinct]
    count = np.bincount(kinds.number, minlength=len(nbytes)).tolist()
    if sum(map(mul, nbytes, count)) > _MAX_NBYTES:  # exactly: Python's whole numbers have no limit
        raise ValueError(f"`SegmentLayout`: {len(kinds.number)} tensors have more bytes than a file.")
    sizes = np.array(nbytes, np.int64)[kinds.number]
    padded = sizes + -sizes % align
    stops = np.cumsum(padded)
    return _Places(stops - padded, sizes, stops)


def _header(names: Sequence[NameColumns], kinds: KindColumns, places: _Places, metadata: Mapping[str, str]) -> bytes:
    """Spell the header like `json.dumps`, column by column: a large model's header has half a million entries."""
    starts, stops, ends = places.starts, places.stops, places.starts + places.sizes
    heads = [
        f':{{"dtype":"{_CODES[dtype]}","shape":{json.dumps(shape, separators=(",", ":"))},"data_offsets":['
        for dtype, shape in kinds.distinct
    ]
    gap = ends < stops
    # Behind each tensor with a gap, its padding: texts and numbers by turns.
    pads = [f']}},"{_PAD_PREFIX}', '":{"dtype":"U8","shape":[', '],"data_offsets":[', ","]
    numbers = [np.where(gap, each, -1) for each in (np.cumsum(gap) - 1, stops - ends, ends, stops)]
    entries, at = list[bytes](), 0
    for each in names:
        own = slice(at, at := at + each.length)
        parts = each.parts or [(list(map(encode_basestring_ascii, each.texts())), np.arange(each.length))]
        parts = [*parts, (heads, kinds.number[own]), starts[own], ",", ends[own]]
        for pad, number in zip(pads, numbers, strict=True):
            parts += [([pad], gap[own] - 1), number[own]]
        entries += [spell_rows([*parts, "]}"], each.length)] * bool(each.length)
    first = json.dumps({_METADATA: dict(sorted(metadata.items()))}, separators=(",", ":"))[:-1]
    text = b",".join([first.encode("ascii"), *entries]) + b"}"
    text += b" " * (-(8 + len(text)) % _PAGE_NBYTES)
    if len(text) > MAX_HEADER_NBYTES:
        raise ValueError(
            f"`SegmentLayout`: {at} tensors need a header of {len(text)} bytes; 100 MB is the limit. Spread the "
            "model over more ranks, of which each describes what it writes itself."
        )
    return struct.pack("<Q", len(text)) + text


def header_nbytes(start: bytes, file_nbytes: int) -> int:
    """Return the header's length as a file's first eight bytes, `start`, state it; those eight are not counted. Raises `Corrupt`."""
    nbytes: int = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
    if not 0 < nbytes <= min(MAX_HEADER_NBYTES, file_nbytes - 8):
        raise Corrupt(f"segment: header of {nbytes} bytes in a file of {file_nbytes}. Another copy may be good.")
    return nbytes


def _split_header(header: bytes) -> dict[str, object]:
    nbytes = header_nbytes(header[:8], len(header))
    try:
        table = json.loads(header[8 : 8 + nbytes].decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"segment: the header is not JSON ({error}). Another copy may be good.") from error
    if not isinstance(table, dict):
        raise Corrupt("segment: the header is not a JSON object. Another copy may be good.")
    return table


def _rebuild(table: dict[str, object]) -> SegmentLayout:
    """Lay out the tensors named by a header. The caller compares the new header with the original. Raises `Corrupt`."""
    try:
        metadata = _string_map(table.pop(_METADATA))
        if metadata.pop(_FORMAT_KEY) != _FORMAT:
            raise Corrupt("segment: written in another version of the format. Read it with the release that wrote it.")
        align = int(metadata.pop(_ALIGN_KEY))
        specs = [_read_spec(name, place) for name, place in table.items() if not name.startswith(_PAD_PREFIX)]
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
