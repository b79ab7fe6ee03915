"""Files that a marker names, and their records: one entry per tensor, in a line behind the marker's document.

A marker is one line of JSON about its segments, then one line of records per segment. The first line has the length and
digest of each other line. So a commit over many ranks parses only first lines and digests the rest. From one generation
to the next only the digests in a line of records change; its other text is encoded once per plan, and parsed on demand.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial
from itertools import chain, compress, repeat
from math import prod
from operator import add, attrgetter, le
from typing import Any, NamedTuple, TypeVar

import numpy as np
from typing_extensions import override

from lightning_moe_ckpt.errors import Corrupt
from lightning_moe_ckpt.native import Column, Ranges, read_records
from lightning_moe_ckpt.storage._json import INTEGER, MAX_INTEGER, TEXT, Form, digest_of, keys
from lightning_moe_ckpt.storage._names import GenerationId
from lightning_moe_ckpt.storage._segment import Numbered, itemsize_of

T = TypeVar("T")

_NONCE = re.compile(r"[0-9a-f]{12}")


def _read_nonce(value: object, where: str) -> str:
    if not isinstance(value, str) or not _NONCE.fullmatch(value):
        raise Corrupt(f"{where}: the name of an incarnation has 12 hexadecimal digits, found {value!r:.40}.")
    return value


NONCE: Form[str] = Form(_read_nonce, str)
GENERATION = keys(GenerationId, step=INTEGER, incarnation=INTEGER, nonce=NONCE)


Bounds = tuple[tuple[int, ...], tuple[int, ...]]
"""A box in a tensor: offset and size per dimension."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordEntry:
    """A tensor in a segment: a flat interval of a global tensor, or of a box in it."""

    name: str
    """Tensor name in the safetensors file."""
    operator: str
    """Operator of the record; empty for the journal."""
    kind: str
    """`RecordKind` value, or `journal`."""
    fqn: str
    """Parameter or buffer name; empty for the journal."""
    state_key: str
    """Tensor of the parameter's state, e.g. `param`, `exp_avg`; empty for the journal."""
    dtype: str
    """safetensors code, e.g. `BF16`."""
    global_shape: tuple[int, ...]
    """Shape of the tensor over all ranks."""
    global_start: int
    """First element of the interval in the flattened global tensor, or in the flattened box."""
    numel: int
    """Elements in the interval."""
    offset: int
    """Bytes from the file's start."""
    nbytes: int
    digest: str
    """Digest of the file's bytes `[offset, offset + nbytes)`."""
    present: bool = True
    """False if only the space is reserved: the optimizer has no such state yet."""
    box: Bounds | None = None
    """The writer's part of the global tensor, if that is no flat interval of it."""

    def boxes(self) -> Iterator[Bounds]:
        """Yield the boxes, parts of rows and whole rows, that make up the interval, in its order; none for a scalar."""
        offset, size = self.box or ((0,) * len(self.global_shape), self.global_shape)
        rows = [prod(size[dim + 1 :]) for dim in range(len(size))]  # elements of a row, by dimension
        at, stop = self.global_start, self.global_start + self.numel
        while at < stop and rows:
            # The outermost dimension of which a whole row begins here.
            dim = next(dim for dim, row in enumerate(rows) if at % row == 0 and stop - at >= row)
            index = [at // row % length for row, length in zip(rows[: dim + 1], size, strict=False)]
            number = min((stop - at) // rows[dim], size[dim] - index[dim])
            first = map(add, offset, chain(index, repeat(0)))
            yield tuple(first), (*([1] * dim), number, *size[dim + 1 :])
            at += number * rows[dim]


RECORD_COLUMNS = [column.name for column in fields(RecordEntry) if column.name not in {"digest", "box"}]
"""Columns of a row in a line of records; a separate list has the digests. A row with a box has it behind them."""

_ROW = attrgetter(*RECORD_COLUMNS)


class Texts(Sequence[str]):
    """Column of texts in JSON, without escapes and with commas between them, of which `bounds` has each one's first byte."""

    def __init__(self, spelled: bytes | memoryview, bounds: Column) -> None:
        self._spelled, self._bounds = spelled, bounds

    def between(self, start: int, stop: int) -> bytes:
        """Return some neighbours in JSON, with commas between them."""
        return bytes(self._spelled[self._bounds[start] : self._bounds[stop] - 1])

    @override
    def __getitem__(self, index: Any) -> Any:
        places = range(len(self))[index]
        if isinstance(places, int):
            return self.between(places, places + 1)[1:-1].decode("ascii")
        return self.between(places.start, places.stop)[1:-1].decode("ascii").split('","') if places else []

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self[:])

    @override
    def __len__(self) -> int:
        return len(self._bounds) - 1


def spelled(column: Sequence[str], start: int, stop: int) -> bytes:
    """Return some neighbours in a column of texts in JSON, with commas between them."""
    if isinstance(column, Texts):
        return column.between(start, stop)
    return json.dumps(column[start:stop], separators=(",", ":"))[1:-1].encode("ascii")


class RecordColumns(NamedTuple):
    """Records of a file by column, a value per record: objects for a million records take seconds."""

    name: Sequence[str]
    operator: Sequence[str]
    kind: Sequence[str]
    fqn: Sequence[str]
    state_key: Sequence[str]
    dtype: Sequence[str]
    global_shape: Sequence[tuple[int, ...]]
    global_start: Sequence[int]
    numel: Sequence[int]
    offset: Sequence[int]
    nbytes: Sequence[int]
    present: Sequence[bool]
    digest: Sequence[str]
    box: Sequence[Bounds | None]

    @classmethod
    def of(cls, records: Sequence[RecordEntry]) -> RecordColumns:
        """Return records by column; a marker's records are parsed as columns."""
        if isinstance(records, RecordTable):
            return records.columns
        columns: dict[str, Any] = {name: [getattr(record, name) for record in records] for name in cls._fields}
        return cls(**columns)

    def by_offset(self) -> RecordColumns:
        """Return the records in their order in the file."""
        if (np.diff(np.asarray(self.offset, np.int64)) >= 0).all():
            return self
        order = sorted(range(len(self.offset)), key=self.offset.__getitem__)
        columns: list[Any] = [[column[index] for index in order] for column in self]
        return RecordColumns(*columns)

    def of_operators(self, operators: Collection[str]) -> RecordColumns:
        """Return the records of some operators."""
        wanted = [operator in operators for operator in self.operator]
        columns: list[Any] = [list(compress(column, wanted)) for column in self]
        return RecordColumns(*columns)

    def entries(self) -> Iterator[RecordEntry]:
        """Yield an object for each record."""
        return (RecordEntry(**dict(zip(self._fields, row, strict=True))) for row in zip(*self, strict=True))


class RecordTable(Sequence[RecordEntry]):
    """A segment's records, backed by a marker's line, with its newline; parsed on first access. Most of the stored
    `parts` are the same in every generation; `rows` is their source if they were made here. `where` is the marker's
    key, for messages.
    """

    def __init__(self, *parts: bytes | memoryview, where: str = "records", rows: RecordRows | None = None) -> None:
        self.parts = parts
        self._where, self._rows = where, rows
        self.file_nbytes = MAX_INTEGER
        """Bytes of the segment file; a record that ends beyond is refused."""

    @classmethod
    def of(cls, records: Sequence[RecordEntry]) -> RecordTable:
        if isinstance(records, RecordTable):
            return records
        return cls(*_line(_SEPARATOR.join([record.digest.encode() for record in records]), _array(map(_row, records))))

    @property
    def line(self) -> bytes:
        """Stored bytes, with the newline."""
        return b"".join(self.parts)

    @override
    def __getitem__(self, index: Any) -> Any:
        """Return one record or a slice of them. Raises `Corrupt` if the line does not hold records."""
        return self._records[index]

    @override
    def __len__(self) -> int:
        return len(self._records)

    @override
    def __iter__(self) -> Iterator[RecordEntry]:
        return iter(self._records)

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._records == tuple(other)

    @override
    def __hash__(self) -> int:
        return hash(self._records)

    @cached_property
    def columns(self) -> RecordColumns:
        """Records by column, checked. Raises `Corrupt` if the line does not hold records."""
        if self._rows is not None:
            said = bytes(self.parts[1]).decode("ascii")
            return self._rows.columns._replace(digest=said.split(_SEPARATOR.decode()) if said else [])
        columns = self._read() or self._parsed()
        if not _are_consistent(columns, self.file_nbytes):
            for record in columns.entries():
                if (reason := _contradiction(record, self.file_nbytes)) is not None:
                    raise Corrupt(f"{self._where}: {record.name} {reason}. Another copy may be good.")
        return columns

    def _read(self) -> RecordColumns | None:
        """Return the columns of a line that is spelled as this package does; `None` for any other line."""
        line = self.parts[0] if len(self.parts) == 1 else self.line
        between = np.frombuffer(line, np.uint8)[len(_HEAD) + _DIGEST - 1 :: _DIGEST] == ord(",")
        count = int(between.argmin()) + 1 if between.size else 0
        found = read_records(line, _LETTERS, count)
        if found is None or (np.diff(found[0][_OFFSETS]) < 0).any():
            return None
        values, names, bounds, distinct = found
        distinct[_SHAPES] = list(map(tuple, distinct[_SHAPES]))
        boxes = [*((tuple(offset), tuple(size)) for offset, size in distinct[-1]), None]  # -1 is the last one
        columns: list[Any] = [Numbered(*each) for each in zip(distinct[:-1], values[:-1], strict=True)]
        columns[0] = Texts(names, bounds)
        for place in (place for place, letter in enumerate(_LETTERS) if letter == "i"):
            columns[place] = array("q", values[place].tobytes())
        digests = Texts(line[len(_HEAD) : len(_HEAD) + count * _DIGEST], np.arange(count + 1) * _DIGEST)
        return RecordColumns(*[*columns, digests, Numbered(boxes, values[-1])])

    def _parsed(self) -> RecordColumns:
        try:
            line = json.loads(self.line)
        except (ValueError, RecursionError) as error:
            raise Corrupt(f"{self._where}: a line of records is not JSON ({error}).") from error
        digests, rows = _LINE.read(line, self._where)
        if len(digests) != len(rows):
            raise Corrupt(f"{self._where}: {len(digests)} digests for {len(rows)} records.")
        return _read_columns(rows, digests, f"{self._where}: rows")

    @cached_property
    def _records(self) -> tuple[RecordEntry, ...]:
        return tuple(self.columns.entries())


SpelledRows = tuple[bytes, Column]
"""JSON of rows with the columns `RECORD_COLUMNS`, and each record's first byte in the file, and the byte behind its last."""


class RecordRows:
    """Records of a segment, one per tensor, without digests: everything known before the bytes are final. A function
    that spells the records is called on first need, on the thread in need.
    """

    def __init__(self, records: Sequence[RecordEntry] | Callable[[], SpelledRows]) -> None:
        self._records = records

    @cached_property
    def _spelled(self) -> tuple[Ranges, bytes]:
        """Places of the records in the file, and their rows."""
        records = self._records
        if callable(records):
            rows, places = records()
            return Ranges(places), rows
        return Ranges((each.offset, each.offset + each.nbytes) for each in records), _array(map(_row, records))

    @cached_property
    def columns(self) -> RecordColumns:
        """Records by column, with empty digests: parsed once for all generations of a plan."""
        rows = json.loads(self._spelled[1])
        return _read_columns(rows, [""] * len(rows), "records")

    def digested_with_file(self, segment: memoryview) -> tuple[RecordTable, str]:
        """Return the records with digests, and the file's, from one pass over a finished segment, all bytes of the file."""
        ranges, rows = self._spelled
        digests, whole = ranges.digest(segment, _SEPARATOR)
        return RecordTable(*_line(digests, rows), rows=self), whole


def _row(record: RecordEntry) -> str:
    row = _ROW(record) if record.box is None else (*_ROW(record), record.box)
    return json.dumps(row, separators=(",", ":"))


def _array(rows: Iterable[str]) -> bytes:
    return f"[{','.join(rows)}]".encode("ascii")


_SEPARATOR = b'","'
"""Text between two digests in a line of records."""


def _line(digests: bytes | memoryview, rows: bytes) -> tuple[bytes | memoryview, ...]:
    """Return a line's parts, unjoined: copying many MB would hold the interpreter lock."""
    quote = b'"' if digests else b""
    return b'{"digests":[' + quote, digests, quote + b'],"rows":', rows, b"}\n"


def _read_rows(value: object, where: str) -> list[list[Any]]:
    rows = _read_list(list, value, where)
    if set(map(len, rows)) - {_COLUMNS, _COLUMNS + 1}:
        raise Corrupt(f"{where}: a row of {_COLUMNS} columns, or one more with a box, was expected.")
    return rows


def _read_list(kind: type[T], value: object, where: str) -> list[T]:
    _expect_kind(list, [value], where)
    assert isinstance(value, list)
    _expect_kind(kind, value, where)
    return value


_LINE: Form[tuple[list[str], list[list[Any]]]] = keys(
    lambda digests, rows: (digests, rows), digests=Form(partial(_read_list, str), list), rows=Form(_read_rows, list)
)


def _read_columns(rows: Sequence[list[Any]], digests: Sequence[str], where: str) -> RecordColumns:
    """Return rows by column. A restore reads every row, so no Python function is called per row."""
    boxes: Sequence[Bounds | None] = (None,) * len(rows)
    if max(map(len, rows), default=0) > _COLUMNS:
        boxes = _read_boxes(rows, f"{where}: box")
        rows = [row[:_COLUMNS] for row in rows]
    columns: list[Any] = list(zip(*rows, strict=True)) if rows else [()] * _COLUMNS
    for name, column in zip(RECORD_COLUMNS, columns, strict=True):
        _CHECKS[name](column, f"{where}: {name}")
    columns[_SHAPES] = tuple(map(tuple, columns[_SHAPES]))
    columns += [digests, boxes]
    return RecordColumns(*columns)


_COLUMNS, _SHAPES, _OFFSETS = len(RECORD_COLUMNS), *map(RECORD_COLUMNS.index, ("global_shape", "offset"))
_HEAD, _DIGEST = '{"digests":[', len(f'"{digest_of()}",')
_LETTERS = "ntttttsiciib"
"""Kinds of the columns for `read_records`."""


def _read_boxes(rows: Sequence[list[Any]], where: str) -> list[Bounds | None]:
    """Return each row's box; `None` where there is none."""
    pairs = _read_list(list, [pair for row in rows for pair in row[_COLUMNS:]], where)
    if set(map(len, pairs)) != {2}:
        raise Corrupt(f"{where} must be an offset and a size.")
    _expect_shapes([*chain.from_iterable(pairs)], where)
    boxes = ((tuple(offset), tuple(size)) for offset, size in pairs)
    return [next(boxes) if len(row) > _COLUMNS else None for row in rows]


def _fits(box: Bounds, shape: tuple[int, ...]) -> bool:
    """Return whether a box lies within a tensor, no scalar."""
    offset, size = box
    return 0 < len(shape) == len(offset) == len(size) and all(map(le, map(add, offset, size), shape))


def _are_consistent(columns: RecordColumns, file_nbytes: int) -> bool:
    """Return whether no record has a `_contradiction`; false also for numbers that are too large to tell."""
    dtypes, shapes = Numbered.of(columns.dtype), Numbered.of(columns.global_shape)
    if any(Numbered.of(columns.box).distinct):
        places = Numbered.of([*zip(columns.box, columns.global_shape, strict=True)])
        if not all(box is None or _fits(box, shape) for box, shape in places.distinct):
            return False
        shapes = Numbered([shape if box is None else box[1] for box, shape in places.distinct], places.number)
    itemsizes = [itemsize_of(code) for code in dtypes.distinct]
    if None in itemsizes:
        return False
    # Sums of two numbers of 63 bits stay below 2**64.
    itemsize = np.array(itemsizes, np.uint64)[dtypes.number]
    size = np.array([min(prod(shape), MAX_INTEGER) for shape in shapes.distinct], np.uint64)[shapes.number]
    start, numel = (np.asarray(column, np.uint64) for column in (columns.global_start, columns.numel))
    offset, nbytes = (np.asarray(column, np.uint64) for column in (columns.offset, columns.nbytes))
    good = (nbytes % itemsize == 0) & (nbytes // itemsize == numel) & (start + numel <= size)
    return bool(good.all()) and int((offset + nbytes).max(initial=0)) <= file_nbytes


def _contradiction(record: RecordEntry, file_nbytes: int) -> str | None:
    """Return a record's contradiction in itself or with the file; `None` without one. Readers allocate by its sizes."""
    if record.box is not None and not _fits(record.box, record.global_shape):
        offset, size = map(list, record.box)
        return f"is of {size} elements from {offset} on in a tensor of shape {list(record.global_shape)}"
    numel = prod(record.global_shape if record.box is None else record.box[1])
    if (itemsize := itemsize_of(record.dtype)) is None:
        return f"has the unknown type {record.dtype!r:.40}"
    if record.numel * itemsize != record.nbytes:
        return f"has {record.nbytes} bytes for {record.numel} elements of {record.dtype}"
    if record.global_start + record.numel > numel:
        return f"ends at element {record.global_start + record.numel} of {numel}"
    if record.offset + record.nbytes > file_nbytes:
        return f"ends at byte {record.offset + record.nbytes} of {file_nbytes}"
    return None


def _expect_kind(kind: type, column: Iterable[object], where: str) -> None:
    # Exact types, because `True` is an `int` in Python.
    if strange := set(map(type, column)) - {kind}:
        found = sorted(each.__name__ for each in strange)
        raise Corrupt(f"{where} must be {kind.__name__}, found {', '.join(found)}.")


def _expect_integers(column: Sequence[Any], where: str) -> None:
    _expect_kind(int, column, where)
    if column and not 0 <= min(column) <= max(column) <= MAX_INTEGER:
        raise Corrupt(
            f"{where} must be whole numbers of zero or more, in 64 bits, found {min(column)} to {max(column)}."
        )


def _expect_shapes(column: Sequence[Any], where: str) -> None:
    _expect_kind(list, column, where)
    sizes = list(chain.from_iterable(column))
    _expect_kind(int, sizes, where)
    _expect_integers([*set(sizes)], where)


_CHECKS: dict[str, Callable[[Sequence[Any], str], None]] = {
    **dict.fromkeys(("name", "operator", "kind", "fqn", "state_key", "dtype"), partial(_expect_kind, str)),
    **dict.fromkeys(("global_start", "numel", "offset", "nbytes"), _expect_integers),
    "global_shape": _expect_shapes,
    "present": partial(_expect_kind, bool),
}


# -- files


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentEntry:
    """Segment file as written by its rank."""

    step: int
    """Step boundary at which the file was captured."""
    key: str
    nbytes: int
    digest: str
    """Digest of the whole file."""
    records: Sequence[RecordEntry] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferencedEntry:
    """Records in an older generation's file of the same rank, referenced by a generation."""

    generation: GenerationId
    """Generation of the file, committed before the referencing generation."""
    segment: SegmentEntry
    """The file as its own marker describes it, reduced to the referenced records."""


class MarkerLines:
    """Lines behind a marker's document, from byte `start` on: taken one after another on reading, collected on writing."""

    def __init__(self, data: bytes = b"", start: int = 0) -> None:
        self._data, self._next = memoryview(data), start
        self.written: list[bytes | memoryview] = []

    def form(
        self, read: Callable[[memoryview, str], T], parts_of: Callable[[T], Sequence[bytes | memoryview]]
    ) -> Form[T]:
        """Return the form of the next line's contents; the document has the line's length and digest."""
        return Form(
            lambda value, where: read(self._take(value, where), where), lambda value: self._put(parts_of(value))
        )

    def segment(self) -> Form[SegmentEntry]:
        """Return the form of a file with its records in the next line."""
        records = self.form(
            lambda line, where: RecordTable(line, where=where), lambda records: RecordTable.of(records).parts
        )
        return keys(_segment, step=INTEGER, key=TEXT, nbytes=INTEGER, digest=TEXT, records=records)

    def end(self, where: str) -> None:
        """Raise `Corrupt` if bytes are left over."""
        if self._next != len(self._data):
            raise Corrupt(f"{where}: {len(self._data) - self._next} bytes too many. Another copy may be good.")

    def _take(self, value: object, where: str) -> memoryview:
        nbytes, digest = _DESCRIBED.read(value, where)
        line = self._data[self._next : self._next + nbytes]
        self._next += nbytes
        if len(line) != nbytes or digest_of(line) != digest:
            raise Corrupt(f"{where}: a line of it is not the one that was written. Another copy may be good.")
        return line

    def _put(self, parts: Sequence[bytes | memoryview]) -> dict[str, object]:
        self.written += parts
        return {"nbytes": sum(map(len, parts)), "digest": digest_of(*parts)}


_DESCRIBED: Form[tuple[int, str]] = keys(lambda nbytes, digest: (nbytes, digest), nbytes=INTEGER, digest=TEXT)


def _segment(*, nbytes: int, records: RecordTable, **others: Any) -> SegmentEntry:
    records.file_nbytes = nbytes
    return SegmentEntry(nbytes=nbytes, records=records, **others)
