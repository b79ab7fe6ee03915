"""Pieces of gradients have the bits of the same elements of whole ones, and gathered weights those of their owners."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pytest
import torch
from launcher import run_world
from torch import Tensor, nn

from lightning_moe_ckpt.parallel import GradientReducer, OptimizerShard, ParallelGroups, build_groups, shard_of
from lightning_moe_ckpt.parallel._reducer import ReductionMode

LIMIT = timedelta(seconds=30)
EXPERTS = ("expert", "expert_bias")
NEVER = ("unused",)
SHAPES: dict[str, tuple[int, ...]] = {
    "scalar": (),
    "one": (1,),
    "odd": (5, 7, 3),
    "matrix": (64, 33),
    "expert": (2, 30, 5),
    "expert_bias": (2, 31),
    "unused": (9,),
    "low": (41, 3),
    "low_bias": (3,),
    "late": (70,),
}
"""On three ranks some pieces are empty, some short, and none of the rest is as long as the first."""


class Net(nn.Module):
    """Parameters whose gradients are drawn."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name, shape in SHAPES.items():
            dtype = torch.bfloat16 if name.startswith("low") else torch.float32
            self.register_parameter(name, nn.Parameter(torch.randn(shape).to(dtype)))

    def forward(self, rank: int, step: int, skip: Iterable[str] = ()) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + rank)
        drawn = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
        used = [(p, drawn[name]) for name, p in self.named_parameters() if name not in {*NEVER, *skip}]
        return torch.stack([(p * grad.to(p.dtype)).sum().float() for p, grad in used]).sum()


Gradients = dict[str, Tensor | None]


@dataclass(frozen=True)
class Way:
    """How gradients are reduced."""

    world_size: int = 3
    ep_size: int = 1
    nbytes: int = 700
    mode: ReductionMode = "ordered"
    whole: bool = False
    skipped: tuple[tuple[int, str], ...] = ()
    """Ranks with the parameters that they do not use."""
    frozen: tuple[str, ...] = ()
    """Parameters that do not train in the first step."""
    zeroed: bool = True
    """Whether gradients are cleared between steps."""
    accumulate: int = 1


def sharded(model: nn.Module, groups: ParallelGroups, reducers: list[GradientReducer]) -> dict[str, OptimizerShard]:
    """Shards of all parameters, which the first of `reducers` will gather."""

    def gather(shards: Any) -> None:
        reducers[0].pieces.gather_weights(shards)

    def ranks(name: str) -> list[int]:
        return groups.ranks("expert_data" if name in EXPERTS and groups.ep_size > 1 else "reduce")

    return {
        name: OptimizerShard(param, ranks(name), groups.rank, gather)
        for name, param in model.named_parameters()
        if len(ranks(name)) > 1
    }


def reducer_of(
    model: nn.Module, groups: ParallelGroups, way: Way, shards: dict[str, OptimizerShard] | None = None
) -> GradientReducer:
    return GradientReducer(
        model.named_parameters(),
        groups=groups,
        is_expert_parallel=EXPERTS if groups.ep_size > 1 else (),
        shards=shards or {},
        whole_gradients=way.whole,
        bucket_nbytes=way.nbytes,
        mode=way.mode,
    )


def with_shards(
    model: nn.Module, groups: ParallelGroups, way: Way
) -> tuple[dict[str, OptimizerShard], GradientReducer]:
    reducers: list[GradientReducer] = []
    shards = sharded(model, groups, reducers)
    reducers.append(reducer_of(model, groups, way, shards))
    return shards, reducers[0]


def train(
    model: Net, reducer: GradientReducer, rank: int, way: Way, *, see: Callable[[], None], clear: Callable[[], None]
) -> None:
    """Reduce gradients in three steps, without an optimizer."""
    skip = [name for each, name in way.skipped if each == rank]
    for step in range(3):
        for name in way.frozen:
            model.get_parameter(name).requires_grad_(step > 0)
        for micro in range(way.accumulate):
            reducer.prepare(sync=micro == way.accumulate - 1)
            model(rank, 10 * step + micro, [*skip, *(way.frozen if step == 0 else ())]).backward()
            reducer.finish()
        see()
        if way.zeroed:
            clear()


def wanted(rank: int, way: Way) -> list[Gradients]:
    """Whole gradients of each step, without shards."""
    model, groups = Net(), build_groups(way.ep_size, LIMIT)
    seen: list[Gradients] = []

    def see() -> None:
        seen.append({name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()})

    reducer = reducer_of(model, groups, way)
    train(model, reducer, rank, way, see=see, clear=model.zero_grad)
    reducer.close()
    return seen


def found(rank: int, way: Way) -> list[tuple[Gradients, Gradients, dict[str, tuple[int, int]]]]:
    """Pieces and whole gradients of each step, with the pieces' bounds."""
    model, groups = Net(), build_groups(way.ep_size, LIMIT)
    shards, reducer = with_shards(model, groups, way)
    seen = []

    def see() -> None:
        grads = {name: shards[name].stepped.grad if name in shards else p.grad for name, p in model.named_parameters()}
        pieces = {name: None if grad is None else grad.clone() for name, grad in grads.items()}
        whole = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        seen.append((pieces, whole, {name: (shard.start, shard.stop) for name, shard in shards.items()}))

    def clear() -> None:
        for name, param in model.named_parameters():  # as an optimizer, which has pieces only
            (shards[name].stepped if name in shards else param).grad = None

    train(model, reducer, rank, way, see=see, clear=clear)
    reducer.close()
    return seen


PLAIN = Way()
WAYS = {
    "three": [PLAIN, replace(PLAIN, nbytes=1), replace(PLAIN, nbytes=10**6), replace(PLAIN, whole=True)],
    "missing": [
        replace(PLAIN, skipped=((0, "matrix"), (1, "odd"), (2, "one"), (1, "low"))),
        replace(PLAIN, skipped=((0, "late"), (1, "late"), (2, "late")), whole=True),
        replace(PLAIN, frozen=("late", "low_bias")),
    ],
    "kept": [
        replace(PLAIN, zeroed=False),
        replace(PLAIN, zeroed=False, whole=True),
        replace(PLAIN, zeroed=False, accumulate=2, frozen=("late",), skipped=((1, "odd"),)),
        replace(PLAIN, accumulate=2, whole=True),
    ],
    "experts": [
        replace(PLAIN, world_size=4, ep_size=2),
        replace(PLAIN, world_size=4, ep_size=2, nbytes=64, whole=True, zeroed=False),
        replace(PLAIN, world_size=4, ep_size=4, skipped=((3, "expert"),)),
        replace(PLAIN, world_size=4),
    ],
}


@pytest.mark.parametrize("ways", WAYS.values(), ids=list(WAYS))
def test_pieces_have_the_bits_of_whole_gradients(ways: list[Way]) -> None:
    """Every owner's piece in every step; whole ones too where they are asked for, and else none is left."""

    def work(rank: int) -> list[tuple[Way, Any, Any]]:
        return [(way, wanted(rank, way), found(rank, way)) for way in ways]

    for results in run_world(ways[0].world_size, work):
        for way, want, got in results:
            for step, (all_, (pieces, whole, bounds)) in enumerate(zip(want, got, strict=True)):
                for name, grad in all_.items():
                    where = way, step, name
                    if name not in bounds:
                        assert way.ep_size == way.world_size, where
                        assert name in EXPERTS, where
                        assert_same(whole[name], grad, where)
                        continue
                    start, stop = bounds[name]
                    assert_same(pieces[name], None if grad is None else grad.view(-1)[start:stop], where)
                    assert_same(whole[name], grad if way.whole else None, where)
                assert all_["unused"] is None
                assert sum(grad is not None for grad in all_.values()) > 6


def assert_same(got: Tensor | None, want: Tensor | None, where: Any) -> None:
    assert (got is None) == (want is None), where
    if got is not None and want is not None:
        assert got.dtype == want.dtype, where
        assert torch.equal(got, want), where


def test_a_plain_reduction_gives_every_owner_the_mean_to_rounding() -> None:
    """The backend adds in an order of its own, with shards in another."""
    way = replace(PLAIN, mode="allreduce")

    def work(rank: int) -> Any:
        return wanted(rank, way), found(rank, way)

    for want, got in run_world(3, work):
        for all_, (pieces, _, bounds) in zip(want, got, strict=True):
            for name, (start, stop) in bounds.items():
                grad, piece = all_[name], pieces[name]
                if grad is None or piece is None:
                    assert grad is piece
                    continue
                atol = 0.02 if piece.dtype == torch.bfloat16 else 1e-5
                torch.testing.assert_close(piece, grad.view(-1)[start:stop], rtol=0.02, atol=atol)


def test_owners_have_equally_many_elements_as_far_as_they_go() -> None:
    """All elements have one owner; of three ranks two own nothing of a scalar, and one a short rest."""

    def work(_: int) -> dict[str, tuple[int, int, int]]:
        model, groups = Net(), build_groups(1, LIMIT)
        return {name: (s.start, s.stop, s.width) for name, s in sharded(model, groups, []).items()}

    ranks = run_world(3, work)
    model = Net()
    for name, param in model.named_parameters():
        cuts = [rank[name] for rank in ranks]
        assert [start for start, *_ in cuts[1:]] == [stop for _, stop, _ in cuts[:-1]]
        assert (cuts[0][0], cuts[-1][1]) == (0, param.numel())
        assert cuts[0][2] == max(stop - start for start, stop, _ in cuts)
    assert [rank["scalar"][:2] for rank in ranks] == [(0, 1), (1, 1), (1, 1)]
    lengths = [stop - start for start, stop, _ in (rank["odd"] for rank in ranks)]
    assert len(set(lengths)) > 1


def gathered(rank: int, ep_size: int, names: Iterable[str] | None) -> list[tuple[dict[str, Tensor], bool]]:
    """Weights of all steps, in each of which every owner writes numbers of its own, and whether nobody else's version moved."""
    model, groups = Net(), build_groups(ep_size, LIMIT)
    way = replace(PLAIN, ep_size=ep_size, nbytes=300)
    shards, reducer = with_shards(model, groups, way)
    seen = []
    for step in range(2):
        with torch.no_grad():
            for shard in shards.values():
                shard.stepped.copy_((torch.arange(shard.start, shard.stop) + 1000 * step + 7 * groups.ep_rank) % 256)
        versions = {name: param._version for name, param in model.named_parameters()}
        reducer.pieces.gather_weights({name: shard for name, shard in shards.items() if names is None or name in names})
        still = all(param._version == versions[name] for name, param in model.named_parameters())
        seen.append(({name: param.detach().clone() for name, param in model.named_parameters()}, still))
    reducer.close()
    return seen


def own_numbers(name: str, step: int, ep_rank: int) -> Tensor:
    dtype = torch.bfloat16 if name.startswith("low") else torch.float32
    numel = nn.Parameter(torch.empty(SHAPES[name])).numel()
    return ((torch.arange(numel) + 1000 * step + 7 * ep_rank) % 256).to(dtype).view(SHAPES[name])


@pytest.mark.parametrize(("world_size", "ep_size"), [(3, 1), (4, 2)])
def test_all_ranks_get_the_owners_weights(world_size: int, ep_size: int) -> None:
    """Of experts those of the ranks that share them. To the whole parameter that is no change: owners' pieces have versions."""

    def work(rank: int) -> Any:
        return gathered(rank, ep_size, None)

    for rank, steps in enumerate(run_world(world_size, work)):
        for step, (weights, still) in enumerate(steps):
            assert still
            for name, weight in weights.items():
                experts = name in EXPERTS and ep_size > 1
                want = own_numbers(name, step, rank % ep_size if experts else 0)
                if not experts and ep_size > 1:  # each owner wrote its own numbers
                    continue
                assert torch.equal(weight, want), (name, step)


def test_an_optimizer_of_some_parameters_gathers_these_alone() -> None:
    """The others' memory keeps what each rank has in it: of three ranks at least one has others' old elements."""
    names = ("odd", "low")

    def work(rank: int) -> Any:
        return gathered(rank, 1, names)

    stale = 0
    for steps in run_world(3, work):
        for step, (weights, _) in enumerate(steps):
            for name in names:
                assert torch.equal(weights[name], own_numbers(name, step, 0))
            stale += not torch.equal(weights["matrix"], own_numbers("matrix", step, 0))
    assert stale == 6


def test_a_gather_of_what_does_not_train_has_memory_of_its_own() -> None:
    """Weights that were frozen when the reducer was built, or that are copies of parameters, as averages are."""

    def work(_: int) -> bool:
        model, groups = Net(), build_groups(1, LIMIT)
        model.get_parameter("odd").requires_grad_(False)
        shards, reducer = with_shards(model, groups, PLAIN)
        average = copy.deepcopy(model)
        of_average = {name: shard.like(average.get_parameter(name)) for name, shard in shards.items()}
        for each in (*shards.values(), *of_average.values()):
            each.stepped.data.add_(1)
        frozen = {"odd": shards["odd"]}
        reducer.pieces.gather_weights(frozen)
        reducer.pieces.gather_weights(of_average)
        fresh = Net()
        want = {name: param.detach() + 1 for name, param in fresh.named_parameters()}
        return torch.equal(model.get_parameter("odd"), want["odd"]) and all(
            torch.equal(param, want[name]) for name, param in average.named_parameters()
        )

    assert all(run_world(3, work))


def test_pieces_follow_a_parameter_to_other_memory() -> None:
    """`param.data = ...` before a gather; the piece that an optimizer steps is the same object, in the new memory."""

    def work(_: int) -> bool:
        model, groups = Net(), build_groups(1, LIMIT)
        shards, reducer = with_shards(model, groups, PLAIN)
        shard = shards["matrix"]
        stepped = shard.stepped
        matrix = model.get_parameter("matrix")
        matrix.data = torch.full((64, 33), 5.0)
        shard.refresh()
        with torch.no_grad():
            shard.stepped.add_(1)
        written = matrix.detach().view(-1)[shard.start : shard.stop]
        follows = stepped is shard.stepped and bool((written == 6).all()) and bool((matrix == 5).any())
        reducer.pieces.gather_weights(shards)
        return follows and bool((matrix == 6).all())

    assert all(run_world(3, work))


def of_two() -> tuple[nn.Linear, OptimizerShard]:
    """A parameter of two ranks, in the place of the first."""
    torch.manual_seed(0)
    module = nn.Linear(30, 7)
    return module, OptimizerShard(module.get_parameter("weight"), (0, 1), 0, lambda _: None)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])  # noqa: S301
def test_copies_of_a_module_have_no_shard(copied: Callable[[nn.Linear], nn.Linear]) -> None:
    """A copy's weights are its own, with no owner among ranks."""
    module, shard = of_two()
    twin = copied(module)
    assert shard_of(module.weight) is shard
    assert shard_of(shard.stepped) is shard
    assert shard_of(twin.weight) is None
    assert torch.equal(twin.weight, module.weight)
    with torch.no_grad():
        twin.weight.add_(1)
    assert not torch.equal(twin.weight, module.weight)


def test_a_step_of_a_piece_is_in_the_whole_parameter() -> None:
    """In its elements and no other; a copy's shard has the same place, and is made once."""
    module, shard = of_two()
    before = module.weight.detach().clone().view(-1)
    with torch.no_grad():
        shard.stepped.sub_(1)
    after = module.weight.detach().view(-1)
    assert 0 < shard.stop < before.numel()
    assert torch.equal(after[: shard.stop], before[: shard.stop] - 1)
    assert torch.equal(after[shard.stop :], before[shard.stop :])
    twin = copy.deepcopy(module)
    like = shard.like(twin.get_parameter("weight"))
    assert (like.start, like.stop, like.width, like.ranks) == (shard.start, shard.stop, shard.width, shard.ranks)
    assert shard.like(twin.get_parameter("weight")) is like
    assert like.stepped.data_ptr() == twin.weight.data_ptr()


@pytest.mark.parametrize("whole", [False, True])
def test_pieces_that_were_restored_are_taken_up(whole: bool) -> None:
    """By a new reducer, which adds to them as the one before did; of what the user has taken away nothing is left."""
    way = replace(PLAIN, whole=whole)

    def work(rank: int) -> bool:
        ends = []
        for restores in (False, True):
            model, groups = Net(), build_groups(1, LIMIT)
            shards, reducer = with_shards(model, groups, way)
            for step in range(2):
                reducer.prepare(sync=True)
                model(rank, step).backward()
                reducer.finish()
                if whole and step == 0:
                    model.get_parameter("odd").grad = None
                    reducer.pieces.drop_cleared()
                    assert shards["odd"].stepped.grad is None
                if restores and step == 0:
                    kept = {
                        name: None if s.stepped.grad is None else s.stepped.grad.clone() for name, s in shards.items()
                    }
                    reducer.close()
                    model = Net()
                    shards, reducer = with_shards(model, groups, way)
                    for name, grad in kept.items():
                        shards[name].stepped.grad = grad
                    reducer.pieces.take_up_gradients()
                    assert all(
                        (p.grad is not None) == (whole and kept[n] is not None) for n, p in model.named_parameters()
                    )
            ends.append({name: shard.stepped.grad for name, shard in shards.items()})
            reducer.close()
        went_on, restored = ends
        for name, grad in went_on.items():
            assert_same(restored[name], grad, name)
        return True

    assert all(run_world(3, work))
