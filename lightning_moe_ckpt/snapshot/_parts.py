"""Parts of records, and their tensors by column: a snapshot of thousands of experts has some twenty tensors of each.

What is there for each tensor is a string or a shared value, never an object of its own: making a million objects takes
seconds, most of it in the garbage collector.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch

from lightning_moe_ckpt.native import Column, packed_nbytes
from lightning_moe_ckpt.operators import ParamSlice, RecordKind
from lightning_moe_ckpt.storage import TensorKind

PACKED = "packed"
"""Key of a compressed gradient: bytes, of which a part has `packed_nbytes` of its elements."""


class Shard(NamedTuple):
    """A piece of one record, written by one rank."""

    operator: str
    kind: RecordKind
    piece: ParamSlice
    writer: int

    @property
    def prefix(self) -> str:
        """Start of the names of this part's tensors, in global coordinates."""
        piece = self.piece
        return f"{_WORDS[self.kind]}/{piece.fqn}/{piece.global_start}+{piece.stop - piece.start}"


Form = tuple[str, torch.dtype, bool]
"""A tensor that every part of a parameter has: `param`, `present` or a key of the optimizer's state; its type; and whether
it has an element for each of the parameter's."""


def numel_of(form: Form, numel: int) -> int:
    """Return the elements of a tensor of a part that has `numel`."""
    key, _, per_element = form
    return packed_nbytes(numel) if key == PACKED else numel if per_element else 1


class Field(NamedTuple):
    """One tensor of a part."""

    part: Shard
    key: str
    dtype: torch.dtype
    per_element: bool
    name: str
    """In the segment's header."""


class PartColumns(NamedTuple):
    """Parts by column, a value for each."""

    kinds: list[tuple[str, list[Form]]]
    """Parameters, each with the tensors of its parts; a parameter of which there are two kinds of record comes twice."""
    kind: Column
    """Index in `kinds`."""
    start: Column
    """First element in the parameter."""
    numel: Column

    @classmethod
    def of(cls, parts: Sequence[tuple[Shard, list[Form]]]) -> PartColumns:
        """Return the columns of parts; parts of one kind share the list of their tensors."""
        ids = [id(forms) for _, forms in parts]
        shared = dict(zip(ids, parts, strict=True))
        numbers = dict(zip(shared, range(len(shared)), strict=True))
        pieces = [part.piece for part, _ in parts]
        start, stop = (np.fromiter(map(attrgetter(name), pieces), np.int64, len(pieces)) for name in ("start", "stop"))
        kinds = [(part.piece.fqn, forms) for part, forms in shared.values()]
        return cls(kinds, np.fromiter(map(numbers.__getitem__, ids), np.int64, len(ids)), start, stop - start)

    @property
    def tensors(self) -> Column:
        """Tensors of each part."""
        return np.array([len(forms) for _, forms in self.kinds], np.int64)[self.kind]


class ParameterParts(NamedTuple):
    """The parts of one parameter in a table, by column."""

    fqn: str
    forms: list[Form]
    """Tensors of each part."""
    first: Column
    """Number of the first tensor of each part in the table."""
    start: Column
    """First element in the parameter."""
    numel: Column


PartText = tuple[Shard, list[str], list[TensorKind]]
"""A part; names, types and shapes of its tensors."""

_WORDS = {kind: kind.value for kind in RecordKind}


class PartTable:
    """The tensors of parts, in the order in which they are stored.

    Args:
        parts: each with its tensors; parts of one parameter share the list of them.
        texts: of parts that other tables of the same window have too, by identity.
    """

    def __init__(self, parts: list[tuple[Shard, list[Form]]], texts: dict[int, PartText] | None = None) -> None:
        self.parts = parts
        self.names: list[str] = []
        """In the segment's header, by tensor."""
        self.kinds: list[TensorKind] = []
        """Type and shape, by tensor."""
        texts = {} if texts is None else texts
        for part, forms in parts:
            text = texts.get(id(part))
            if text is None:
                prefix, numel = part.prefix, part.piece.stop - part.piece.start
                names = [f"{prefix}/{key}" for key, _, _ in forms]
                # Without a call for each of many parts: only gradients are compressed.
                packed = part.kind is RecordKind.DELTA
                text = (
                    part,
                    names,
                    [
                        (dtype, (numel_of((key, dtype, each), numel) if packed else numel if each else 1,))
                        for key, dtype, each in forms
                    ],
                )
                if part.kind is RecordKind.COMPUTE:
                    texts[id(part)] = text
            self.names += text[1]
            self.kinds += text[2]

    @classmethod
    def joined(cls, tables: Sequence[PartTable]) -> PartTable:
        """Return the tensors of tables, one behind the other."""
        if len(tables) == 1:
            return tables[0]
        joined = cls([])
        for each in tables:
            joined.parts += each.parts
            joined.names += each.names
            joined.kinds += each.kinds
        return joined

    @cached_property
    def fields(self) -> list[Field]:
        """An object for each tensor."""
        names = iter(self.names)
        return [Field(part, *form, next(names)) for part, forms in self.parts for form in forms]

    def by_parameter(self) -> list[ParameterParts]:
        """Return the parts of each parameter, in order."""
        columns = PartColumns.of(self.parts)
        first = np.cumsum(columns.tensors) - columns.tensors
        order = np.argsort(columns.kind, kind="stable")
        bounds = np.cumsum(np.bincount(columns.kind, minlength=len(columns.kinds)))[:-1]
        return [
            ParameterParts(fqn, forms, first[own], columns.start[own], columns.numel[own])
            for (fqn, forms), own in zip(columns.kinds, np.split(order, bounds), strict=True)
        ]
