"""Boxes say where elements of sharded parameters are: every element in one box, or in equal boxes of several ranks."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import product

import pytest
import torch
from launcher import run_world
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_moe_ckpt.operators import boxes_of, marks_of, memory_of, regions_of, sharding_of, with_memory
from lightning_moe_ckpt.operators._boxes import Box


@pytest.mark.parametrize("seed", range(300))
def test_a_flat_interval_is_one_of_the_box_too(seed: int) -> None:
    """By brute force, also with empty boxes and sizes of one."""
    draw = random.Random(seed)
    shape = tuple(draw.randint(1, 5) for _ in range(draw.randint(0, 4)))
    offset = tuple(draw.randint(0, size) for size in shape)
    box = Box(shape, offset, tuple(draw.randint(0, size - at) for size, at in zip(shape, offset, strict=True)), "")
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    places = product(*(range(at, at + size) for at, size in zip(offset, box.size, strict=True)))
    held = [sum(at * stride for at, stride in zip(place, strides, strict=True)) for place in places]
    start = draw.randint(0, math.prod(shape))
    stop = draw.randint(start, math.prod(shape))
    part = box.part(start, stop)
    wanted = [i for i, element in enumerate(held) if start <= element < stop]
    assert list(range(*(part or (0, 0))[:2])) == wanted
    if part is None:
        assert not wanted
        assert held or start
    elif box.bounds is None and held:
        assert part[2] == held[part[0]] if wanted else start == 0
    elif held:
        assert part[2] == part[0]


class Block(nn.Module):
    """Rows that no number of ranks divides, and fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)
        self.few = nn.Parameter(torch.randn(2, 5))
        self.experts = nn.ParameterDict({"w": torch.randn(6, 4, 5)})


def fsdp(block: Block) -> None:
    fully_shard(block, mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)))


def hsdp(block: Block) -> None:
    fully_shard(block, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def fsdp_over_tensor_parallel(block: Block) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(block, mesh=mesh["dp"])


def experts_apart(block: Block) -> None:
    """As torchtitan does: experts over `ep`, then over `efsdp`; all else over all ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    block.experts["w"] = nn.Parameter(distribute_tensor(block.experts["w"].detach(), mesh["ep"], [Shard(0)]))
    fully_shard(block.experts, mesh=mesh["efsdp"])
    fsdp(block)


def over_joined_dimensions(block: Block) -> None:
    """As torchtitan does: two dimensions are joined for FSDP2, so that nothing tells how they lie to the third."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "cp", "tp"))
    parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(block, mesh=mesh["dp", "cp"]._flatten("dp_cp"))


def experts_by_columns(block: Block) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    block.experts["w"] = nn.Parameter(distribute_tensor(block.experts["w"].detach(), mesh["ep"], [Shard(0)]))
    fully_shard(block.experts, mesh=mesh["efsdp"], shard_placement_fn=lambda _: Shard(1))
    fsdp(block)


@pytest.mark.parametrize(
    "shard", [fsdp, hsdp, fsdp_over_tensor_parallel, over_joined_dimensions, experts_apart, experts_by_columns]
)
def test_boxes_of_real_meshes_tile_every_parameter(shard: Callable[[Block], None]) -> None:
    """Their memory has the elements that they say; holders say the same of each other."""
    whole = dict(Block().named_parameters())

    def held(_: int) -> dict[str, tuple[Box, Tensor]]:
        block = Block()
        shard(block)
        params = dict(block.named_parameters())
        boxes = boxes_of(params)
        kinds = {(each.placements, each.device_mesh.shape) for each in params.values() if isinstance(each, DTensor)}
        assert sharding_of(params.values()).count(" on ") == len(kinds)
        assert len(with_memory(list(params.values()))) == len(params) + len(boxes)
        return {fqn: (box, memory_of(params[fqn]).detach().clone()) for fqn, box in boxes.items()}

    said = run_world(4, held)
    regions = regions_of([marks_of({fqn: box for fqn, (box, _) in each.items()}) for each in said])
    for fqn, parameter in whole.items():
        counts = torch.zeros(parameter.shape)
        for rank, (box, memory) in enumerate(each[fqn] for each in said):
            at = tuple(slice(start, start + size) for start, size in zip(box.offset, box.size, strict=True))
            assert torch.equal(parameter.detach()[at], memory), fqn
            holders = regions[rank][box.placement]
            assert rank in holders
            assert all(said[other][fqn][0] == box for other in holders), fqn
            if rank == holders[0]:
                counts[at] += 1
        assert torch.equal(counts, torch.ones_like(counts)), fqn


def test_plain_tensors_are_their_own_memory() -> None:
    def work(_: int) -> None:
        plain = nn.Parameter(torch.ones(3))
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        sharded = nn.Parameter(distribute_tensor(torch.ones(3), mesh, [Replicate()]))
        assert memory_of(plain) is plain
        assert isinstance(sharded, DTensor)
        assert with_memory([plain, sharded])[2] is memory_of(sharded)
        assert sharding_of([plain]) == ""
        assert sharding_of([plain, sharded]) == "1 plain, 1 R on 1"
        assert boxes_of({"plain": plain, "sharded": sharded}) == {"sharded": Box((3,), (0,), (3,), "R on dp 1")}

    run_world(1, work)
