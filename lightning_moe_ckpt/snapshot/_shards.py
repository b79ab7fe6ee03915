"""Shards of records, and their tensors by column: a snapshot of thousands of experts has some twenty tensors of each.

Per tensor there is a string or a shared value, never an object of its own: making a million objects takes seconds, most
of it in the garbage collector.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from json.encoder import encode_basestring_ascii as _quoted
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_moe_ckpt.native import Column, Spelled, packed_nbytes
from lightning_moe_ckpt.policies import Shard, box_text
from lightning_moe_ckpt.storage import KindColumns, NameColumns

PACKED = "packed"
"""Key of a compressed gradient: at most `packed_nbytes` bytes per shard."""


FieldForm = tuple[str, torch.dtype, tuple[int, ...] | None]
"""Tensor in a shard of a parameter: its key (`param`, `present` or a key of the optimizer's state), its dtype, and its shape;
`None` if it has one element per element of the parameter. Scalars are in every shard, other whole tensors in the first."""


def numel_of(form: FieldForm, numel: int) -> int:
    """Return the elements of a shard's tensor; the shard has `numel` elements."""
    key, _, shape = form
    return packed_nbytes(numel) if key == PACKED and not shape else numel if shape is None else math.prod(shape)


def sized(
    shards: list[tuple[Shard, list[FieldForm]]], packed: Mapping[str, int]
) -> list[tuple[Shard, list[FieldForm]]]:
    """Return shards whose compressed gradients have these bytes, by shard; a shard without any has room for one."""
    return [
        (shard, [(PACKED, torch.uint8, (packed.get(shard.prefix, 1),)), *forms[1:]] if forms[0][0] == PACKED else forms)
        for shard, forms in shards
    ]


class Field(NamedTuple):
    """Tensor of a shard."""

    shard: Shard
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...] | None
    """Shape of a tensor for the whole parameter."""
    name: str
    """Name of the tensor in the segment's header."""


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
    """Tensors of shards, in stored order; shards of one parameter share the list."""

    def __init__(self, shards: list[tuple[Shard, list[FieldForm]]]) -> None:
        self.shards = shards
        ids, pieces = [id(forms) for _, forms in shards], [shard.slice for shard, _ in shards]
        shared = dict(zip(ids, shards, strict=True))
        numbers = dict(zip(shared, range(len(shared)), strict=True))
        self._kinds = list(shared.values())
        """A shard of each parameter, with its shards' tensors; a parameter with two kinds of record comes twice."""
        self._kind = np.array([*map(numbers.__getitem__, ids)], np.int64)
        """Index in `_kinds`, by shard."""
        start, stop = (np.fromiter(map(attrgetter(name), pieces), np.int64, len(pieces)) for name in ("start", "stop"))
        self.start, self.numel = start, stop - start
        """First element of each shard in the parameter, and elements."""
        count = np.array([len(forms) for _, forms in self._kinds], np.int64)[self._kind]
        self._first = np.cumsum(count) - count
        """Index of each shard's first tensor."""
        step = int(self.numel.max(initial=0)) + 1
        alike, number = np.unique(self._kind * step + self.numel, return_inverse=True)
        self.rows: list[tuple[Shard, int, FieldForm]] = []
        """Different rows of the table: a shard as example, its elements, and a tensor."""
        first: list[int] = []
        for kind, numel in (divmod(each, step) for each in alike.tolist()):
            first.append(len(self.rows))
            like, forms = self._kinds[kind]
            self.rows += [(like, numel, form) for form in forms]
        within = np.arange(count.sum()) - np.repeat(self._first, count)
        self.row: Column = np.repeat(np.array(first, np.int64)[number], count) + within
        """Index in `rows`, by tensor."""
        self.shard: Column = np.repeat(np.arange(len(shards)), count)
        """Index in `shards`, by tensor."""
        self.starts = np.array([piece.global_start for piece in pieces], np.int64)[self.shard]
        """First element of the shard in the parameter over all ranks, by tensor."""
        self.kinds = KindColumns([(form[1], (numel_of(form, numel),)) for _, numel, form in self.rows], self.row)
        """Dtypes and shapes of the tensors."""
        boxes = [piece.box for piece in pieces]
        self.boxes = boxes if any(boxes) else []
        """Boxes by shard; empty without any."""

    @property
    def names(self) -> NameColumns:
        """Names in the segment's header."""
        heads = [f'"{_quoted(f"{shard.kind.value}/{shard.slice.fqn}/")[1:-1]}' for shard, *_ in self.rows]
        lengths = [f"+{numel}" for _, numel, _ in self.rows]
        keys = [f"/{_quoted(key)[1:]}" for *_, (key, *_) in self.rows]
        box: list[Spelled] = [(list(map(box_text, self.boxes)), self.shard)] * bool(self.boxes)
        parts: list[Spelled] = [(heads, self.row), self.starts, (lengths, self.row), *box, (keys, self.row)]
        return NameColumns(len(self.row), lambda: [field.name for field in self.fields], parts)

    @cached_property
    def fields(self) -> list[Field]:
        """Fields, an object per tensor."""
        prefixes = ((shard, shard.prefix, forms) for shard, forms in self.shards)
        return [Field(shard, *form, f"{prefix}/{form[0]}") for shard, prefix, forms in prefixes for form in forms]

    def by_parameter(self) -> list[ParameterShards]:
        """Return each parameter's shards, in order."""
        order = np.argsort(self._kind, kind="stable")
        bounds = np.cumsum(np.bincount(self._kind, minlength=len(self._kinds)))[:-1]
        return [
            ParameterShards(shard.slice.fqn, forms, self._first[own], self.start[own], self.numel[own])
            for (shard, forms), own in zip(self._kinds, np.split(order, bounds), strict=True)
        ]


def owners_of(rows: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, tuple[int, ...]]:
    """Return each expert's position by layer, from each rank's own experts: positions count the first owners, of its stage."""
    found: dict[str, tuple[int, ...]] = {}
    for layer in dict.fromkeys(layer for row in rows for layer in row):
        first = {expert: rank for rank in reversed(range(len(rows))) for expert in rows[rank].get(layer, ())}
        ranks = sorted(set(first.values()))
        found[layer] = tuple(ranks.index(first[expert]) for expert in sorted(first))
    return found


def as_memoryview(buffer_U8: Tensor) -> memoryview:
    """Return the bytes of a CPU tensor, without a copy."""
    return memoryview(buffer_U8.numpy())  # type: ignore[arg-type]  # numpy's stubs do not say that arrays are buffers
