"""Boxes: the parts that this rank has in its memory, if parameters are in shards, and the ranks with the same parts.

Most parameters are plain: a rank has them whole, or (stacks under `MoEStrategy`) whole rows. A DTensor is in shards: each rank
has one *box*, an offset and a size per dimension, in plain memory. A DTensor's shape, size and name are global, so that all
ranks find the same operators in a sharded module; only where bytes are copied does it matter where they lie.

A box's elements lie in memory in their global order. So a flat global interval is a flat interval in each box.

An optimizer with sharded state steps a rank's piece of a plain parameter: a box of one dimension, which this rank alone holds. Its
weights are stored with its state, and completed from all owners once they are loaded.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from xxhash import xxh3_64_hexdigest

from lightning_moe_ckpt.parallel import shard_of, stepped_of

Region = tuple[int, ...]
"""Ranks that hold the same bytes, ascending."""


@dataclass(frozen=True, slots=True)
class Box:
    """A sharded parameter's part on this rank, and the ranks with the same part."""

    shape: tuple[int, ...]
    """The parameter's global shape."""
    offset: tuple[int, ...]
    size: tuple[int, ...]
    placement: str
    """The placement in words; parameters alike in it have the same holders."""
    holders: Region = ()
    """Ranks with the same box, this one among them; empty until ranks have told each other, see `regions_of`."""

    @property
    def numel(self) -> int:
        """Elements in the box; a rank may hold none."""
        return math.prod(self.size)

    @property
    def bounds(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Offset and size; `None` if the box is a flat global interval."""
        return None if self.size[1:] == self.shape[1:] else (self.offset, self.size)

    @property
    def first(self) -> int:
        """Global flat index where a box begins that is a flat interval."""
        return sum(at * math.prod(self.shape[dim + 1 :]) for dim, at in enumerate(self.offset))

    def part(self, start: int, stop: int) -> tuple[int, int, int] | None:
        """Return the part in memory from global elements `[start, stop)`; `None` if there is none.

        A rank without any elements has an empty part at the parameter's begin: the optimizer's scalars need a record.

        Returns first element, and the element after the last, in memory; the first one's global index, or, with
        `bounds`, its index in the box.
        """
        first, last = self._before(start), self._before(stop)
        if first == last and not (start == 0 and self.numel == 0):
            return None
        return first, last, first if self.bounds is not None else self.first + first

    def _before(self, index: int) -> int:
        """Return how many elements in memory come before a global element."""
        if index >= math.prod(self.shape):
            return self.numel
        count = 0
        for dim, (offset, size) in enumerate(zip(self.offset, self.size, strict=True)):
            at, index = divmod(index, math.prod(self.shape[dim + 1 :]))
            count += min(max(at - offset, 0), size) * math.prod(self.size[dim + 1 :])
            if not offset <= at < offset + size:
                break
        return count


def box_of(param: Tensor) -> Box | None:
    """Return a sharded parameter's box; `None` for a plain one."""
    if (shard := shard_of(param)) is not None and param is shard.stepped:
        cut = f"optimizer state in {len(shard.ranks)} parts"
        return Box((shard.whole.numel(),), (shard.start,), (param.numel(),), cut, holders=(shard.rank,))
    if type(param) is not DTensor:
        return None
    size, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    return Box(tuple(param.shape), tuple(offset), tuple(size), _placement(param))


def boxes_of(params: Mapping[str, Tensor]) -> dict[str, Box]:
    """Return the sharded parameters' boxes, by name."""
    return {fqn: box for fqn, param in params.items() if (box := box_of(param)) is not None}


def marks_of(boxes: Mapping[str, Box]) -> dict[str, str]:
    """Return a digest by placement: with equal digests, ranks have the same boxes."""
    found: dict[str, set[tuple[tuple[int, ...], ...]]] = {}
    for box in boxes.values():
        found.setdefault(box.placement, set()).add((box.shape, box.offset, box.size, box.holders))
    return {placement: xxh3_64_hexdigest(repr(sorted(own)).encode()) for placement, own in found.items()}


def regions_of(marks: Sequence[Mapping[str, str]]) -> list[dict[str, Region]]:
    """Return each rank's regions by placement, from the marks of all ranks. How meshes were cut from others does not matter."""
    alike: dict[tuple[str, str], list[int]] = {}
    for rank, own in enumerate(marks):
        for mark in own.items():
            alike.setdefault(mark, []).append(rank)
    return [{placement: tuple(alike[placement, mark]) for placement, mark in own.items()} for own in marks]


def memory_of(tensor: Any) -> Tensor:
    """Return the plain memory on this rank: the tensor itself, or a DTensor's shard; no copy, no graph, no exchange."""
    found: Tensor = tensor._local_tensor if type(tensor) is DTensor else tensor  # noqa: SLF001  # `to_local` has a graph
    return found


def with_memory(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors, and those over the same memory with versions of their own: in DTensors, and around optimizers' shards."""
    around = [shard.whole for tensor in tensors if (shard := shard_of(tensor)) is not None]
    return [*tensors, *[memory_of(tensor) for tensor in tensors if type(tensor) is DTensor], *around]


def stepped_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return a module's parameters as an optimizer has them, by first name: with sharded state this rank's pieces."""
    return {fqn: stepped_of(param) for fqn, param in module.named_parameters()}


def whole_of(tensor: Tensor) -> Tensor:
    """Return the parameter around an optimizer's piece; other tensors as they are."""
    shard = shard_of(tensor)
    return tensor if shard is None else shard.whole


def follow(params: Iterable[Tensor]) -> None:
    """Let optimizers' shards follow whole parameters to other memory (`param.data = ...`)."""
    for param in params:
        if (shard := shard_of(param)) is not None:
            shard.refresh()


def complete(params: Mapping[str, Tensor]) -> None:
    """Give all ranks the owners' loaded pieces, or such parts in copies. Collective if there are any."""
    if shards := {fqn: shard for fqn, param in params.items() if (shard := shard_of(param)) is not None}:
        next(iter(shards.values())).gather(shards)


def sharding_of(params: Iterable[Any]) -> str:
    """Return in words how parameters are in shards, whatever meshes are called, the same on all ranks; empty if all are plain."""
    kinds = Counter(map(_in_words, params))
    if set(kinds) <= {""}:
        return ""
    return ", ".join(f"{count} {kind or 'plain'}" for kind, count in sorted(kinds.items()))


def _in_words(param: Any) -> str:
    if isinstance(param, DTensor):
        return _placement(param, named=False)
    box = box_of(param)
    return "" if box is None else box.placement


def _placement(param: DTensor, *, named: bool = True) -> str:
    mesh = param.device_mesh
    names = (mesh.mesh_dim_names if named else None) or [""] * mesh.ndim
    dims = " x ".join(f"{name} {size}".strip() for name, size in zip(names, mesh.shape, strict=True))
    return f"{'/'.join(map(str, param.placements))} on {dims}"


def is_sharded(module: nn.Module) -> bool:
    """Return whether a module has parameters in shards."""
    return any(isinstance(param, DTensor) for param in module.parameters())


def show_shards(module: nn.Module) -> None:
    """Make FSDP's modules show their shards as parameters: after a validation the root shows whole ones instead."""
    for each in module.modules():
        if isinstance(each, FSDPModule):
            each.reshard()
