"""Shards of records, and their tensors by column: a snapshot of thousands of experts has some twenty tensors of each.

Per tensor there is a string or a shared value, never an object of its own: making a million objects takes seconds, most
of it in the garbage collector.
"""

from __future__ import annotations

import math
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

    kinds: list[tuple[str, list[FieldForm]]]
    """Parameters, each with its shards' tensors; a parameter with two kinds of record comes twice."""
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
        kinds = [(shard.slice.fqn, forms) for shard, forms in shared.values()]
        return cls(kinds, np.fromiter(map(numbers.__getitem__, ids), np.int64, len(ids)), start, stop - start)

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


ShardText = tuple[Shard, list[str], list[TensorKind]]
"""Shard, with names, dtypes and shapes of its tensors."""


class ShardTable:
    """Tensors of shards, in stored order.

    Args:
        shards: shards with their tensors; shards of one parameter share the list.
        texts: texts of shards shared by tables of the same window, by the shard's identity.
    """

    def __init__(self, shards: list[tuple[Shard, list[FieldForm]]], texts: dict[int, ShardText] | None = None) -> None:
        self.shards = shards
        self.names: list[str] = []
        """Names in the segment's header, by tensor."""
        self.kinds: list[TensorKind] = []
        """Dtype and shape, by tensor."""
        texts = {} if texts is None else texts
        for shard, forms in shards:
            text = texts.get(id(shard))
            if text is None:
                prefix, numel = shard.prefix, shard.slice.stop - shard.slice.start
                names = [f"{prefix}/{key}" for key, _, _ in forms]
                # No call for each of many tensors by element and scalars: only gradients are compressed.
                packed = shard.kind is RecordKind.DELTA
                text = (
                    shard,
                    names,
                    [
                        (
                            dtype,
                            (numel_of((key, dtype, each), numel) if packed or each else numel if each is None else 1,),
                        )
                        for key, dtype, each in forms
                    ],
                )
                if shard.kind is RecordKind.COMPUTE:
                    texts[id(shard)] = text
            self.names += text[1]
            self.kinds += text[2]

    @classmethod
    def joined(cls, tables: Sequence[ShardTable]) -> ShardTable:
        """Return a single table with the tensors of all tables, in their order."""
        if len(tables) == 1:
            return tables[0]
        joined = cls([])
        for table in tables:
            joined.shards += table.shards
            joined.names += table.names
            joined.kinds += table.kinds
        return joined

    @cached_property
    def fields(self) -> list[Field]:
        """Fields, an object per tensor."""
        names = iter(self.names)
        return [Field(shard, *form, next(names)) for shard, forms in self.shards for form in forms]

    def by_parameter(self) -> list[ParameterShards]:
        """Return each parameter's shards, in order."""
        columns = ShardColumns.of(self.shards)
        first = np.cumsum(columns.tensors) - columns.tensors
        order = np.argsort(columns.kind, kind="stable")
        bounds = np.cumsum(np.bincount(columns.kind, minlength=len(columns.kinds)))[:-1]
        return [
            ParameterShards(fqn, forms, first[own], columns.start[own], columns.numel[own])
            for (fqn, forms), own in zip(columns.kinds, np.split(order, bounds), strict=True)
        ]
