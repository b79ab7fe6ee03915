"""Shards of records, and their tensors by column: a snapshot of thousands of experts has some twenty tensors of each.

Per tensor there is a string or a shared value, never an object of its own: making a million objects takes seconds, most
of it in the garbage collector.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from json.encoder import encode_basestring_ascii as _quoted
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch

from lightning_moe_ckpt.native import Column, Spelled, packed_nbytes
from lightning_moe_ckpt.policies import Shard, box_text
from lightning_moe_ckpt.storage import Bounds, KindColumns, NameColumns

PACKED = "packed"
"""Key of a compressed gradient: `packed_nbytes` bytes per shard."""


FieldForm = tuple[str, torch.dtype, tuple[int, ...] | None]
"""Tensor in a shard of a parameter: its key (`param`, `present` or a key of the optimizer's state), its dtype, and its shape;
`None` if it has one element per element of the parameter. Scalars are in every shard, other whole tensors in the first."""


def numel_of(form: FieldForm, numel: int) -> int:
    """Return the elements of a shard's tensor; the shard has `numel` elements."""
    key, _, shape = form
    return packed_nbytes(numel) if key == PACKED else numel if shape is None else math.prod(shape)


class Field(NamedTuple):
    """Tensor of a shard."""

    shard: Shard
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...] | None
    """Shape of a tensor for the whole parameter."""
    name: str
    """Name of the tensor in the segment's header."""


class ShardColumns(NamedTuple):
    """Shards by column, a value for each shard."""

    kinds: list[tuple[Shard, list[FieldForm]]]
    """A shard of each parameter, with its shards' tensors; a parameter with two kinds of record comes twice."""
    kind: Column
    """Index in `kinds`."""
    start: Column
    """First element of the shard in the parameter."""
    numel: Column

    @classmethod
    def of(cls, shards: Sequence[tuple[Shard, list[FieldForm]]]) -> ShardColumns:
        """Return the columns of shards; shards of one kind share the list of their tensors."""
        ids = [id(forms) for _, forms in shards]
        shared = dict(zip(ids, shards, strict=True))
        numbers = dict(zip(shared, range(len(shared)), strict=True))
        pieces = [shard.slice for shard, _ in shards]
        start, stop = (np.fromiter(map(attrgetter(name), pieces), np.int64, len(pieces)) for name in ("start", "stop"))
        return cls(
            [*shared.values()], np.fromiter(map(numbers.__getitem__, ids), np.int64, len(ids)), start, stop - start
        )

    @property
    def tensors(self) -> Column:
        """Number of tensors in each shard."""
        return np.array([len(forms) for _, forms in self.kinds], np.int64)[self.kind]


class ParameterShards(NamedTuple):
    """Shards of a parameter in a table, by column."""

    fqn: str
    forms: list[FieldForm]
    """Tensors in each shard."""
    first: Column
    """Index of each shard's first tensor in the table."""
    start: Column
    """First element of the shard in the parameter."""
    numel: Column


class ShardTable:
    """Tensors of shards, in stored order.

    Args:
        shards: shards with their tensors; shards of one parameter share the list.
    """

    def __init__(self, shards: list[tuple[Shard, list[FieldForm]]]) -> None:
        self.shards, self.columns = shards, ShardColumns.of(shards)
        columns, count = self.columns, self.columns.tensors
        step = int(columns.numel.max(initial=0)) + 1
        alike, number = np.unique(columns.kind * step + columns.numel, return_inverse=True)
        self.rows: list[tuple[Shard, int, FieldForm]] = []
        """Different rows of the table: a shard like this, its elements, and a tensor in it."""
        first: list[int] = []
        for kind, numel in (divmod(each, step) for each in alike.tolist()):
            first.append(len(self.rows))
            like, forms = columns.kinds[kind]
            self.rows += [(like, numel, form) for form in forms]
        within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        self.row: Column = np.repeat(np.array(first, np.int64)[number], count) + within
        """Index in `rows`, by tensor."""
        self.shard: Column = np.repeat(np.arange(len(shards)), count)
        """Index in `shards`, by tensor."""
        self.starts = np.array([shard.slice.global_start for shard, _ in shards], np.int64)[self.shard]
        """First element of the shard in the parameter over all ranks, by tensor."""

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self.row)

    @cached_property
    def kinds(self) -> KindColumns:
        """Dtypes and shapes of the tensors."""
        return KindColumns([(form[1], (numel_of(form, numel),)) for _, numel, form in self.rows], self.row)

    @cached_property
    def boxes(self) -> list[Bounds | None]:
        """Boxes of the shards; empty if none has one."""
        boxes = [shard.slice.box for shard, _ in self.shards]
        return boxes if any(boxes) else []

    @property
    def names(self) -> NameColumns:
        """Names in the segment's header."""
        heads = [f'"{_quoted(f"{shard.kind.value}/{shard.slice.fqn}/")[1:-1]}' for shard, *_ in self.rows]
        lengths, keys = (
            [f"+{numel}" for _, numel, _ in self.rows],
            [f"/{_quoted(key)[1:]}" for *_, (key, *_) in self.rows],
        )
        box: list[Spelled] = [(list(map(box_text, self.boxes)), self.shard)] * bool(self.boxes)
        parts: list[Spelled] = [(heads, self.row), self.starts, (lengths, self.row), *box, (keys, self.row)]
        return NameColumns(len(self), lambda: [field.name for field in self.fields], parts)

    @classmethod
    def joined(cls, tables: Sequence[ShardTable]) -> ShardTable:
        """Return a single table with the tensors of all tables, in their order."""
        if len(tables) == 1:
            return tables[0]
        return cls([shard for table in tables for shard in table.shards])

    @cached_property
    def fields(self) -> list[Field]:
        """Fields, an object per tensor."""
        prefixes = ((shard, shard.prefix, forms) for shard, forms in self.shards)
        return [Field(shard, *form, f"{prefix}/{form[0]}") for shard, prefix, forms in prefixes for form in forms]

    def by_parameter(self) -> list[ParameterShards]:
        """Return each parameter's shards, in order."""
        columns = self.columns
        first = np.cumsum(columns.tensors) - columns.tensors
        order = np.argsort(columns.kind, kind="stable")
        bounds = np.cumsum(np.bincount(columns.kind, minlength=len(columns.kinds)))[:-1]
        return [
            ParameterShards(shard.slice.fqn, forms, first[own], columns.start[own], columns.numel[own])
            for (shard, forms), own in zip(columns.kinds, np.split(order, bounds), strict=True)
        ]
