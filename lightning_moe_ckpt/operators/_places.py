"""Which box of a parameter this rank holds, in which memory, and which ranks hold the same.

Most parameters are plain: a rank has them whole, or (stacks of `MoEStrategy`) whole rows of them. A DTensor is in shards: each
rank holds one *box*, an offset and a size per dimension of the whole, in plain memory of its own. Shapes, sizes and names
of a DTensor are those of the whole, so that all ranks find the same operators in a sharded module; only where bytes are
copied does it matter which of them are here.

Elements of a box lie in memory in the order of the whole. So a flat interval of the whole is a flat interval of each box.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

Region = tuple[int, ...]
"""Ranks that hold the same bytes, ascending."""


@dataclass(frozen=True, slots=True)
class Place:
    """Box of one sharded parameter on this rank, and its holders."""

    shape: tuple[int, ...]
    """Of the whole parameter."""
    offset: tuple[int, ...]
    size: tuple[int, ...]
    holders: Region
    """Ranks with the same box; this one is among them."""

    @property
    def numel(self) -> int:
        """Elements in the box; a rank may hold none."""
        return math.prod(self.size)

    @property
    def box(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Offset and size; `None` if the box is a flat interval of the whole."""
        return None if self.size[1:] == self.shape[1:] else (self.offset, self.size)

    @property
    def first(self) -> int:
        """Index of the first element in the whole, flattened; for a box that is a flat interval."""
        return sum(at * math.prod(self.shape[dim + 1 :]) for dim, at in enumerate(self.offset))

    def part(self, start: int, stop: int) -> tuple[int, int, int] | None:
        """Return what is here of elements `[start, stop)` of the whole; `None` if that is nothing.

        A rank with no elements at all has an empty part where the whole begins: scalars of the optimizer need a record.

        Returns:
            First element and the element after the last, in memory, and the first in the whole, or in the box if there is one.
        """
        first, last = self._before(start), self._before(stop)
        if first == last and not (start == 0 and self.numel == 0):
            return None
        return first, last, first if self.box is not None else self.first + first

    def _before(self, index: int) -> int:
        """Return the number of elements here that come before an element of the whole."""
        if index >= math.prod(self.shape):
            return self.numel
        count = 0
        for dim, (offset, size) in enumerate(zip(self.offset, self.size, strict=True)):
            at, index = divmod(index, math.prod(self.shape[dim + 1 :]))
            count += min(max(at - offset, 0), size) * math.prod(self.size[dim + 1 :])
            if not offset <= at < offset + size:
                break
        return count


def place_of(param: Tensor) -> Place | None:
    """Return the place of a sharded parameter; `None` for a plain one."""
    if not isinstance(param, DTensor):
        return None
    mesh = param.device_mesh
    size, offset = compute_local_shape_and_global_offset(param.shape, mesh, param.placements)
    here = mesh.get_coordinate()
    assert here is not None, "a parameter on a mesh without this rank"
    along = tuple(slice(None) if p.is_replicate() else at for p, at in zip(param.placements, here, strict=True))
    holders = sorted(mesh.mesh[along].flatten().tolist())
    return Place(tuple(param.shape), tuple(offset), tuple(size), tuple(holders))


def places_of(params: Mapping[str, Tensor]) -> dict[str, Place]:
    """Return the places of the sharded ones among parameters, by name."""
    return {fqn: place for fqn, param in params.items() if (place := place_of(param)) is not None}


def memory_of(tensor: Tensor) -> Tensor:
    """Return the plain memory on this rank: the tensor itself, or the shard of a DTensor; no copy, no graph, no exchange."""
    local: Any = tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # noqa: SLF001  # `to_local` has a graph
    found: Tensor = local
    return found


def is_sharded(module: nn.Module) -> bool:
    """Return whether a module has parameters in shards."""
    return any(isinstance(param, DTensor) for param in module.parameters())


def show_shards(module: nn.Module) -> None:
    """Let FSDP's modules have their shards as parameters; after a validation the root has whole ones instead."""
    for each in module.modules():
        if isinstance(each, FSDPModule):
            each.reshard()
