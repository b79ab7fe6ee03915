"""Parts of records, and their tensors by column: a snapshot of thousands of experts has some twenty tensors of each.

Per tensor there is a string or a shared value, never an object of its own: making a million objects takes seconds, most
of it in the garbage collector.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch

from lightning_moe_ckpt.native import Column, packed_nbytes
from lightning_moe_ckpt.operators import RecordKind
from lightning_moe_ckpt.policies import Shard
from lightning_moe_ckpt.storage import TensorKind

PACKED = "packed"
"""Key of a compressed gradient: `packed_nbytes` bytes per part."""


FieldForm = tuple[str, torch.dtype, bool]
"""Tensor in every part of a parameter: its key (`param`, `present` or a key of the optimizer's state), its dtype, and
whether it has one element per element of the parameter."""


def numel_of(form: FieldForm, numel: int) -> int:
    """Return the elements of a part's tensor; the part has `numel` elements."""
    key, _, per_element = form
    return packed_nbytes(numel) if key == PACKED else numel if per_element else 1


class Field(NamedTuple):
    """Tensor of a part."""

    part: Shard
    key: str
    dtype: torch.dtype
    per_element: bool
    name: str
    """Name of the tensor in the segment's header."""


class PartColumns(NamedTuple):
    """Parts by column, a value for each part."""

    kinds: list[tuple[str, list[FieldForm]]]
    """Parameters, each with its parts' tensors; a parameter with two kinds of record comes twice."""
    kind: Column
    """Index in `kinds`."""
    start: Column
    """First element of the part in the parameter."""
    numel: Column

    @classmethod
    def of(cls, parts: Sequence[tuple[Shard, list[FieldForm]]]) -> PartColumns:
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
        """Number of tensors in each part."""
        return np.array([len(forms) for _, forms in self.kinds], np.int64)[self.kind]


class ParameterParts(NamedTuple):
    """Parts of a parameter in a table, by column."""

    fqn: str
    forms: list[FieldForm]
    """Tensors in each part."""
    first: Column
    """Index of each part's first tensor in the table."""
    start: Column
    """First element of the part in the parameter."""
    numel: Column


PartText = tuple[Shard, list[str], list[TensorKind]]
"""Part, with names, dtypes and shapes of its tensors."""


class PartTable:
    """Tensors of parts, in stored order.

    Args:
        parts: parts with their tensors; parts of one parameter share the list.
        texts: texts of parts shared by tables of the same window, by the part's identity.
    """

    def __init__(self, parts: list[tuple[Shard, list[FieldForm]]], texts: dict[int, PartText] | None = None) -> None:
        self.parts = parts
        self.names: list[str] = []
        """Names in the segment's header, by tensor."""
        self.kinds: list[TensorKind] = []
        """Dtype and shape, by tensor."""
        texts = {} if texts is None else texts
        for part, forms in parts:
            text = texts.get(id(part))
            if text is None:
                prefix, numel = part.prefix, part.piece.stop - part.piece.start
                names = [f"{prefix}/{key}" for key, _, _ in forms]
                # No call of `numel_of` for each of many parts: only gradients are compressed.
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
        """Return one table with the tensors of all tables, one behind the other."""
        if len(tables) == 1:
            return tables[0]
        joined = cls([])
        for table in tables:
            joined.parts += table.parts
            joined.names += table.names
            joined.kinds += table.kinds
        return joined

    @cached_property
    def fields(self) -> list[Field]:
        """Fields, an object per tensor."""
        names = iter(self.names)
        return [Field(part, *form, next(names)) for part, forms in self.parts for form in forms]

    def by_parameter(self) -> list[ParameterParts]:
        """Return each parameter's parts, in order."""
        columns = PartColumns.of(self.parts)
        first = np.cumsum(columns.tensors) - columns.tensors
        order = np.argsort(columns.kind, kind="stable")
        bounds = np.cumsum(np.bincount(columns.kind, minlength=len(columns.kinds)))[:-1]
        return [
            ParameterParts(fqn, forms, first[own], columns.start[own], columns.numel[own])
            for (fqn, forms), own in zip(columns.kinds, np.split(order, bounds), strict=True)
        ]
