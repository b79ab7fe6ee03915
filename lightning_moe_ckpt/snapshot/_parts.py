"""Parts of records, and their tensors by column: a snapshot of thousands of experts has some twenty tensors of each.

What is there for each tensor is a string or a shared value, never an object of its own: making a million objects takes
seconds, most of it in the garbage collector.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch

from lightning_moe_ckpt.operators import ParamSlice, RecordKind
from lightning_moe_ckpt.storage import TensorKind


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
        return f"{self.kind.value}/{piece.fqn}/{piece.global_start}+{piece.stop - piece.start}"


Form = tuple[str, torch.dtype, bool]
"""A tensor that every part of a parameter has: `param`, `present` or a key of the optimizer's state; its type; and whether
it has an element for each of the parameter's."""


class Field(NamedTuple):
    """One tensor of a part."""

    part: Shard
    key: str
    dtype: torch.dtype
    per_element: bool
    name: str
    """In the segment's header."""


Place = tuple[int, int, int]
"""Of a part: number of its first tensor, its first element in the parameter, and its elements."""


class ParameterParts(NamedTuple):
    """The parts of one parameter."""

    fqn: str
    forms: list[Form]
    """Tensors of each part."""
    places: list[Place]


class PartTable:
    """The tensors of parts, in the order in which they are stored.

    Args:
        parts: each with its tensors; parts of one parameter share the list of them.
    """

    def __init__(self, parts: list[tuple[Shard, list[Form]]]) -> None:
        self.parts = parts
        self.names: list[str] = []
        """In the segment's header, by tensor."""
        self.kinds: list[TensorKind] = []
        """Type and shape, by tensor."""
        known: dict[tuple[int, int], list[TensorKind]] = {}
        for part, forms in parts:
            prefix, numel = part.prefix, part.piece.stop - part.piece.start
            kinds = known.get((id(forms), numel))
            if kinds is None:
                kinds = [(dtype, (numel if per_element else 1,)) for _, dtype, per_element in forms]
                known[id(forms), numel] = kinds
            self.names += [f"{prefix}/{key}" for key, _, _ in forms]
            self.kinds += kinds

    @cached_property
    def fields(self) -> list[Field]:
        """An object for each tensor."""
        names = iter(self.names)
        return [Field(part, *form, next(names)) for part, forms in self.parts for form in forms]

    def by_parameter(self) -> list[ParameterParts]:
        """Return the parts of each parameter, in order."""
        found: dict[tuple[str, int], ParameterParts] = {}
        first = 0
        for part, forms in self.parts:
            piece = part.piece
            group = found.setdefault((piece.fqn, id(forms)), ParameterParts(piece.fqn, forms, []))
            group.places.append((first, piece.start, piece.stop - piece.start))
            first += len(forms)
        return list(found.values())
