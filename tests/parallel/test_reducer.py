"""Reduced gradients have the bits of a sum in rank order, whatever the buckets, the frozen set and the history."""

from __future__ import annotations

import copy
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from launcher import WorldFailed, run_world
from torch import Tensor, nn
from torch.futures import Future

from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.parallel import GradientReducer, ParallelGroups, _collectives, _reducer, build_groups
from lightning_moe_ckpt.parallel._collectives import CollectiveQueue, Work
from lightning_moe_ckpt.parallel._reducer import ReductionMode

Gradients = dict[str, Tensor | None]
LIMIT = timedelta(seconds=30)


class Net(nn.Module):
    """Four layers used in the order of registration, and one that is not used."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(width, width) for name in ("a", "b", "c", "d")})
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor, skip: Iterable[str] = ()) -> Tensor:
        for name, layer in self.layers.items():
            if name not in skip:
                x = torch.tanh(layer(x))
        return x.pow(2).sum()


def build(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def tokens(rank: int, step: int = 0) -> Tensor:
    return torch.randn(5, 24, generator=torch.Generator().manual_seed(100 * step + rank))


def local_gradients(rank: int, skip: Iterable[str] = (), step: int = 0) -> Gradients:
    """What one rank alone computes."""
    model = build()
    model(tokens(rank, step), skip).backward()
    return gradients(model)


def gradients(model: nn.Module) -> Gradients:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def mean_in_rank_order(per_rank: list[Gradients], name: str) -> Tensor | None:
    present = [own[name] for own in per_rank]
    shape = next((grad for grad in present if grad is not None), None)
    if shape is None:
        return None
    filled = [torch.zeros_like(shape) if grad is None else grad for grad in present]
    total = filled[0].clone()
    for grad in filled[1:]:
        total += grad
    return total / len(per_rank)


def step_with(reducer: GradientReducer, model: nn.Module, rank: int, skip: Iterable[str] = (), step: int = 0) -> None:
    model.zero_grad()
    reducer.prepare(sync=True)
    model(tokens(rank, step), skip).backward()
    reducer.finish()


def reducer_of(model: nn.Module, nbytes: int = 4_000, mode: ReductionMode = "ordered") -> GradientReducer:
    return GradientReducer(model.named_parameters(), groups=build_groups(1, LIMIT), bucket_nbytes=nbytes, mode=mode)


def same(left: Gradients, right: Gradients) -> bool:
    def equal(a: Tensor | None, b: Tensor | None) -> bool:
        return a is b if a is None or b is None else torch.equal(a, b)

    return left.keys() == right.keys() and all(equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("world_size", [3, 4])
def test_gradients_are_the_mean_in_rank_order(world_size: int) -> None:
    """Equal in bits to a loop over ranks; what no rank computed stays `None`."""

    def work(rank: int) -> Gradients:
        model = build()
        step_with(reducer_of(model), model, rank)
        return gradients(model)

    per_rank = [local_gradients(rank) for rank in range(world_size)]
    want = {name: mean_in_rank_order(per_rank, name) for name in per_rank[0]}
    assert want["unused.weight"] is None
    for got in run_world(world_size, work):
        assert same(got, want)


@pytest.mark.parametrize("world_size", [3, pytest.param(4, marks=pytest.mark.soak)])
def test_ordered_bits_do_not_depend_on_the_bucket_size_and_plain_bits_do(world_size: int) -> None:
    """Buckets smaller than a parameter, of a few parameters, and one for all. The plain mode shows the test can see."""

    def work(rank: int) -> dict[ReductionMode, int]:
        def flat(nbytes: int, mode: ReductionMode) -> Tensor:
            model = build()
            step_with(reducer_of(model, nbytes, mode), model, rank)
            return torch.cat([grad.flatten() for grad in gradients(model).values() if grad is not None])

        modes: tuple[ReductionMode, ...] = ("ordered", "allreduce")
        one_for_all = {mode: flat(10**9, mode) for mode in modes}
        return {
            mode: sum(int((flat(nbytes, mode) != whole).sum()) for nbytes in (1, 700, 5_000))
            for mode, whole in one_for_all.items()
        }

    for changed in run_world(world_size, work):
        assert changed["ordered"] == 0
        assert changed["allreduce"] > 0


def test_bits_do_not_depend_on_what_is_frozen() -> None:
    """Freezing layers leaves the gradients of the others as they were; a frozen one has none."""
    names = ("a", "c")

    def work(rank: int) -> tuple[Gradients, Gradients]:
        model = build()
        reducer = reducer_of(model)
        step_with(reducer, model, rank)
        everything = gradients(model)
        for name in names:
            model.layers[name].requires_grad_(False)
        step_with(reducer, model, rank)
        return everything, gradients(model)

    for everything, partly in run_world(3, work):
        for fqn, grad in partly.items():
            if any(f"layers.{name}." in fqn for name in names):
                assert grad is None
            else:
                assert same({fqn: grad}, {fqn: everything[fqn]})


def test_a_fresh_process_gives_the_bits_of_one_that_has_run() -> None:
    """History leaves no trace: not its steps, not what it froze in between."""

    def work(rank: int) -> bool:
        model = build()
        old = reducer_of(model)
        for step in range(3):
            model.layers["b"].requires_grad_(step != 1)
            step_with(old, model, rank, step=step)
        step_with(old, model, rank, step=7)
        before = gradients(model)
        old.close()
        fresh_model = copy.deepcopy(model)
        step_with(reducer_of(fresh_model), fresh_model, rank, step=7)
        return same(before, gradients(fresh_model))

    assert all(run_world(3, work))


def test_a_gradient_is_none_only_if_no_rank_has_one() -> None:
    """Ranks that did not use a layer count as zero and receive the others' mean."""

    def skipped(rank: int) -> list[str]:
        return ["c"] if rank == 2 else ["a", "c"]

    def work(rank: int) -> Gradients:
        model = build()
        step_with(reducer_of(model), model, rank, skipped(rank))
        return gradients(model)

    per_rank = [local_gradients(rank, skipped(rank)) for rank in range(3)]
    want = {name: mean_in_rank_order(per_rank, name) for name in per_rank[0]}
    assert want["layers.c.weight"] is None
    assert want["layers.a.weight"] is not None
    for got in run_world(3, work):
        assert same(got, want)


def test_freezing_on_some_ranks_only_neither_hangs_nor_diverges() -> None:
    """Steps in which ranks disagree about what is frozen, also already when the reducer is built."""

    def work(rank: int) -> list[Gradients]:
        model = build()
        model.layers["d"].requires_grad_(rank != 0)
        reducer = reducer_of(model)
        results = []
        for step in range(6):
            model.layers["a"].requires_grad_((rank + step) % 3 != 0)
            model.layers["b"].requires_grad_(step % 2 == 0)
            model.layers["d"].requires_grad_(rank != step % 3)
            step_with(reducer, model, rank, step=step)
            results.append(gradients(model))
        return results

    first, *others = run_world(3, work)
    for other in others:
        assert all(same(got, want) for got, want in zip(other, first, strict=True))
    assert all(grads["layers.a.weight"] is not None for grads in first)
    assert [grads["layers.b.weight"] is None for grads in first] == [False, True] * 3


def test_a_parameter_that_is_thawed_later_joins() -> None:
    """Gradual unfreezing: frozen on all ranks when the reducer is built, trained from step two on."""

    def work(rank: int) -> tuple[Gradients, Gradients]:
        model = build()
        model.layers["a"].requires_grad_(False)
        reducer = reducer_of(model)
        step_with(reducer, model, rank)
        frozen = gradients(model)
        model.layers["a"].requires_grad_(True)
        step_with(reducer, model, rank)
        return frozen, gradients(model)

    per_rank = [local_gradients(rank) for rank in range(3)]
    want = {name: mean_in_rank_order(per_rank, name) for name in per_rank[0]}
    for frozen, thawed in run_world(3, work):
        assert frozen["layers.a.weight"] is None
        assert same(thawed, want)


def test_accumulated_gradients_are_reduced_once_at_the_end() -> None:
    """Three micro-batches, the middle one uses fewer layers; nothing is exchanged before the last."""

    def work(rank: int) -> Gradients:
        model = build()
        reducer = reducer_of(model)
        for step in range(3):
            reducer.prepare(sync=step == 2)
            model(tokens(rank, step), ["a"] if step > 0 else []).backward()
            reducer.finish()
        return gradients(model)

    def accumulated(rank: int) -> Gradients:
        model = build()
        for step in range(3):
            model(tokens(rank, step), ["a"] if step > 0 else []).backward()
        return gradients(model)

    per_rank = [accumulated(rank) for rank in range(3)]
    want = {name: mean_in_rank_order(per_rank, name) for name in per_rank[0]}
    for got in run_world(3, work):
        assert same(got, want)


def test_the_result_is_not_a_view_of_the_bucket() -> None:
    """A gradient somebody keeps is not overwritten by the next step, also where this rank had none."""

    def work(rank: int) -> bool:
        model = build()
        reducer = reducer_of(model)
        step_with(reducer, model, rank, ["a"] if rank == 1 else [])
        kept = {name: p.grad for name, p in model.named_parameters()}
        copies = gradients(model)
        for parameter in model.parameters():
            parameter.grad = None
        step_with(reducer, model, rank, step=3)
        return same(kept, copies)

    assert all(run_world(3, work))


WORLDS = pytest.mark.parametrize("num_ranks", [2, 3])
"""Two ranks reduce by an all-reduce for each bucket, three in the order of ranks."""


@WORLDS
def test_gradients_lie_in_the_buckets_and_leave_them_to_who_keeps_one(num_ranks: int) -> None:
    """Memory is the same in each step, unless a gradient, or a view of one, is kept."""

    def work(rank: int) -> list[bool]:
        model = build()
        reducer = reducer_of(model)

        def places() -> list[int]:
            return [p.grad.data_ptr() for p in model.parameters() if p.grad is not None]

        def again(step: int) -> list[int]:
            model.zero_grad()
            step_with(reducer, model, rank, ["a"] if rank == step % 2 else [], step=step)
            return places()

        first = again(0)
        lies = max(first) - min(first) < sum(p.nbytes for p in model.parameters())
        stays = again(1) == first
        grad = dict(model.named_parameters())["layers.b.weight"].grad
        assert grad is not None
        kept, copy_of_it = grad, grad.clone()
        del grad
        moved = set(again(2)).isdisjoint(first)
        return [lies, stays, moved, torch.equal(kept, copy_of_it), again(3) == again(4)]

    assert run_world(num_ranks, work) == [[True] * 5] * num_ranks


@WORLDS
def test_who_keeps_gradients_in_each_step_gets_copies(num_ranks: int) -> None:
    """One small gradient per step would else keep the memory of all; said once."""

    def work(rank: int) -> tuple[list[str], list[bool]]:
        said: list[str] = []
        vars(_reducer)["log"] = SimpleNamespace(info=lambda text, *args: said.append(text % args), debug=Mock())
        model = build()
        reducer = reducer_of(model)
        bias = model.layers["a"].bias
        kept, copies, alone = [], [], []
        for step in range(6):
            step_with(reducer, model, rank, ["a"] if rank == step % 2 else [], step=step)
            assert isinstance(bias.grad, Tensor)
            kept.append(bias.grad)
            copies.append(bias.grad.clone())
            alone.append(bias.grad.untyped_storage().nbytes() == bias.grad.nbytes)
        assert all(map(torch.equal, kept, copies))
        return said, alone

    for said, alone in run_world(num_ranks, work):
        assert [text.split(":")[0] for text in said] == ["something keeps gradients from step to step"]
        assert alone == [False] * 2 + [True] * 4


@pytest.mark.parametrize("mode", ["ordered", "allreduce"])
@WORLDS
def test_gradients_that_are_zeroed_in_place_have_the_bits_of_fresh_ones(num_ranks: int, mode: ReductionMode) -> None:
    """Layers that some ranks leave out at some steps, and accumulation in front of every second reduction."""

    def work(rank: int) -> bool:
        models = build(), build()
        reducers = [reducer_of(model, mode=mode) for model in models]
        found = []
        for step in range(6):
            for model, reducer, to_none in zip(models, reducers, (True, False), strict=True):
                model.zero_grad(set_to_none=to_none)
                for part in range(1 + step % 2):
                    reducer.prepare(sync=part == step % 2)
                    model(tokens(rank, 7 * step + part), ["b"] if (rank + step) % 3 == 0 else []).backward()
                    reducer.finish()
            none, zero = (gradients(model) for model in models)
            # A gradient that was there stays, as zero, in place of `None`.
            filled = {name: zero[name] if grad is None else grad for name, grad in none.items()}
            found.append(same(filled, zero) and any(grad is not None for grad in none.values()))
        return all(found)

    assert all(run_world(num_ranks, work))


@WORLDS
def test_edits_after_a_gradient_was_sent_are_discarded_or_refused(num_ranks: int) -> None:
    """By hooks registered later: a fresh gradient ends as the mean; one in its place of the vector may have been half sent."""

    def edit(param: Tensor) -> None:
        assert param.grad is not None
        param.grad.mul_(3)

    def work(rank: int) -> tuple[Gradients, str]:
        model = build()
        reducer = reducer_of(model, nbytes=10**6)
        reducer.prepare(sync=True)
        weight: Any = model.layers["d"].weight
        hook = weight.register_post_accumulate_grad_hook(edit)
        model(tokens(rank)).backward()
        reducer.finish()
        found = gradients(model)
        model.zero_grad(set_to_none=False)
        reducer.prepare(sync=True)
        model(tokens(rank)).backward()
        with pytest.raises(ConfigurationError) as error:
            reducer.finish()
        hook.remove()
        model.zero_grad(set_to_none=False)
        reducer.prepare(sync=True)
        model(tokens(rank)).backward()
        reducer.finish()
        assert same(found, gradients(model))
        return found, str(error.value)

    per_rank = [local_gradients(rank) for rank in range(num_ranks)]
    want = {name: mean_in_rank_order(per_rank, name) for name in per_rank[0]}
    for got, message in run_world(num_ranks, work):
        assert same(got, want)
        assert "`layers.d.weight`" in message
        assert "on_before_optimizer_step" in message


@pytest.mark.parametrize("graph", [False, True])
@WORLDS
def test_a_gradient_that_was_there_keeps_its_tensor(num_ranks: int, graph: bool) -> None:
    """A tensor of the user's gets the mean in place, and a gradient with a graph keeps the graph."""

    def work(rank: int) -> tuple[bool, Gradients]:
        warnings.simplefilter("ignore")  # torch advises against graphs of gradients
        model = build()
        reducer = reducer_of(model)
        weight = dict(model.named_parameters())["layers.a.weight"]
        own = weight.grad = torch.zeros_like(weight)
        reducer.prepare(sync=True)
        torch.autograd.backward(model(tokens(rank)), create_graph=graph)
        reducer.finish()
        bias = dict(model.named_parameters())["layers.b.bias"].grad
        assert bias is not None
        kept = bias.grad_fn is not None if graph else weight.grad is own
        return kept, {name: None if grad is None else grad.detach() for name, grad in gradients(model).items()}

    per_rank = [local_gradients(rank) for rank in range(num_ranks)]
    want = {name: mean_in_rank_order(per_rank, name) for name in per_rank[0]}
    for kept, got in run_world(num_ranks, work):
        assert kept
        assert same(got, want)


def test_elements_have_the_order_of_the_parameter_as_fused_optimizers_want() -> None:
    """Convolutions in `channels_last`."""

    def work(rank: int) -> bool:
        torch.manual_seed(0)
        conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer = torch.optim.AdamW(conv.parameters(), fused=True)
        reducer = reducer_of(conv)
        image = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(rank))
        for _ in range(2):
            optimizer.zero_grad()
            reducer.prepare(sync=True)
            conv(image).square().sum().backward()
            reducer.finish()
            optimizer.step()
        grad = conv.weight.grad
        return grad is not None and grad.stride() == conv.weight.stride()

    assert all(run_world(2, work))


def test_elements_meet_whatever_order_they_have_on_some_rank() -> None:
    """From the start, or where one changes later and its vector is renewed."""

    def build_conv() -> nn.Conv2d:
        torch.manual_seed(0)
        return nn.Conv2d(3, 4, 3)

    def image(rank: int) -> Tensor:
        return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(rank))

    def local(rank: int) -> Gradients:
        conv = build_conv()
        conv(image(rank)).square().sum().backward()
        return gradients(conv)

    def close(grad: Tensor | None, mean: Tensor | None, param: Tensor) -> bool:
        assert grad is not None
        assert mean is not None
        return torch.allclose(grad, mean, rtol=1e-4) and grad.stride() == param.stride()

    def work(rank: int) -> list[bool]:
        differs, changes = build_conv(), build_conv()
        if rank == 1:
            differs.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        found = []
        for conv in (differs, changes):
            reducer, kept = reducer_of(conv, nbytes=64), []
            for step in range(2):
                if step and rank == 0:
                    conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
                    kept.append(conv.weight.grad)
                conv.zero_grad()
                reducer.prepare(sync=True)
                conv(image(rank)).square().sum().backward()
                reducer.finish()
                found += [close(p.grad, want[name], p) for name, p in conv.named_parameters()]
        return found

    per_rank = [local(rank) for rank in range(2)]
    want = {name: mean_in_rank_order(per_rank, name) for name in per_rank[0]}
    assert run_world(2, work) == [[True] * 8] * 2


@pytest.mark.parametrize("nbytes", [64, 4_000, 10**6])
def test_two_ranks_have_the_bits_of_the_sum_in_rank_order(nbytes: int) -> None:
    """Whatever the backend's algorithm: several all-reduces are under way at once."""

    def work(rank: int) -> Gradients:
        model = build()
        step_with(reducer_of(model, nbytes), model, rank)
        return gradients(model)

    per_rank = [local_gradients(rank) for rank in range(2)]
    want = {name: mean_in_rank_order(per_rank, name) for name in per_rank[0]}
    assert all(same(got, want) for got in run_world(2, work))


def test_sixteen_bit_gradients_are_added_in_fp32_and_rounded_once() -> None:
    """A model of bf16 parameters beside fp32 ones."""

    def build_mixed() -> Net:
        model = build()
        model.layers["b"].to(torch.bfloat16)
        return model

    def run(model: Net, rank: int) -> Tensor:
        x = torch.tanh(model.layers["a"](tokens(rank)))
        loss: Tensor = model.layers["b"](x.bfloat16()).float().pow(2).sum()
        return loss

    def own(rank: int) -> Gradients:
        model = build_mixed()
        torch.autograd.backward(run(model, rank))
        return gradients(model)

    def work(rank: int) -> Gradients:
        model = build_mixed()
        reducer = reducer_of(model)
        reducer.prepare(sync=True)
        torch.autograd.backward(run(model, rank))
        reducer.finish()
        return gradients(model)

    grads = [own(rank)["layers.b.weight"] for rank in range(3)]
    wide = [grad.float() for grad in grads if grad is not None]
    want = ((wide[0] + wide[1] + wide[2]) / 3).bfloat16()
    for got in run_world(3, work):
        grad = got["layers.b.weight"]
        assert grad is not None
        assert torch.equal(grad, want)


@pytest.mark.parametrize(("world_size", "ep_size"), [(3, 3), (4, 2)])
def test_expert_gradients_are_summed_over_replicas_and_divided_by_the_world(world_size: int, ep_size: int) -> None:
    """The tokens of all ranks have reached the expert already; a replica without one counts as zero."""

    def gradient(rank: int) -> Tensor | None:
        return None if rank == 2 else torch.randn(40, generator=torch.Generator().manual_seed(rank))

    def work(rank: int) -> Tensor | None:
        expert = nn.Parameter(torch.zeros(40))
        dense = nn.Parameter(torch.zeros(3))
        groups = build_groups(ep_size, LIMIT)
        reducer = GradientReducer(
            [("dense", dense), ("expert", expert)], groups=groups, is_expert_parallel={"expert"}, bucket_nbytes=16
        )
        own = gradient(rank)
        reducer.prepare(sync=True)
        torch.autograd.backward((dense.sum() if own is None else (expert * own).sum()) + dense.sum())
        reducer.finish()
        return expert.grad

    results = run_world(world_size, work)
    for rank, got in enumerate(results):
        replicas = [gradient(peer) for peer in range(rank % ep_size, world_size, ep_size)]
        present = [grad for grad in replicas if grad is not None]
        if not present:
            assert got is None
            continue
        total = torch.zeros(40) if replicas[0] is None else replicas[0].clone()
        for grad in replicas[1:]:
            total += torch.zeros(40) if grad is None else grad
        assert got is not None
        assert torch.equal(got, total / world_size)


def test_flags_are_the_maximum_over_ranks_and_stay_with_their_owner() -> None:
    """A flag raised on one rank is seen by all after the next reduction, not before, until it is lowered."""

    def work(rank: int) -> list[int]:
        model = build()
        groups = build_groups(1, LIMIT)
        reducer = GradientReducer(model.named_parameters(), groups=groups, flags=("stop", "other"))
        seen = []
        for step in range(4):
            reducer.flags["stop"] = int(rank == 1 and step in {1, 2})
            seen.append(reducer.agreed["stop"])
            step_with(reducer, model, rank)
            seen.append(reducer.agreed["stop"])
        return [*seen, reducer.agreed["other"]]

    assert run_world(3, work) == [[0, 0, 0, 1, 1, 1, 1, 0, 0]] * 3


def test_in_a_world_of_one_nothing_happens_but_the_flags() -> None:
    """No hooks, no copies, no division."""
    model, plain = build(), build()
    reducer = GradientReducer(model.named_parameters(), groups=ParallelGroups())
    reducer.flags["stop"] = 1
    step_with(reducer, model, 0)
    plain(tokens(0)).backward()
    assert same(gradients(model), gradients(plain))
    assert reducer.agreed == {"stop": 1}


def test_a_closed_reducer_leaves_the_parameters_alone() -> None:
    """Hooks are gone: a later backward does nothing but compute gradients."""

    def work(rank: int) -> bool:
        model = build()
        reducer = reducer_of(model)
        step_with(reducer, model, rank)
        reducer.close()
        model.zero_grad()
        model(tokens(rank)).backward()
        return same(gradients(model), local_gradients(rank))

    assert all(run_world(3, work))


@pytest.mark.parametrize(
    ("fails", "message"),
    [
        (lambda: reducer_of(build(), mode="fast"), "gradient_reduction='fast'"),  # type: ignore[arg-type]
        (lambda: reducer_of(build(), nbytes=0), "bucket_nbytes=0"),
    ],
    ids=["mode", "size"],
)
def test_wrong_arguments_are_refused(fails: Callable[[], object], message: str) -> None:
    """The error quotes the argument."""
    with pytest.raises(WorldFailed, match=message):
        run_world(1, lambda _: fails())


def test_a_gradient_that_comes_twice_is_an_error() -> None:
    """The first may have been sent already; the remedy is named."""

    def work(rank: int) -> str:
        model = build()
        reducer = reducer_of(model)
        reducer.prepare(sync=True)
        loss = model(tokens(rank))
        loss.backward(retain_graph=True)
        with pytest.raises(ConfigurationError) as error:
            loss.backward()
        reducer.finish()
        return str(error.value)

    for message in run_world(2, work):
        assert "layers.d" in message
        assert "use_reentrant=False" in message


def test_a_sparse_gradient_is_an_error() -> None:
    """It has no place in a static bucket; the parameter and the remedy are named."""

    def work(_: int) -> str:
        model = nn.Embedding(4, 2, sparse=True)
        reducer = reducer_of(model)
        reducer.prepare(sync=True)
        with pytest.raises(ConfigurationError) as error:
            model(torch.tensor([1])).sum().backward()
        return str(error.value)

    for message in run_world(2, work):
        assert "`weight`" in message
        assert "sparse=False" in message


def test_a_sparse_gradient_of_an_earlier_micro_batch_is_an_error() -> None:
    """It is refused with the same words."""

    def work(_: int) -> str:
        model = nn.Embedding(4, 2, sparse=True)
        reducer = reducer_of(model)
        for sync in (False, True):
            reducer.prepare(sync=sync)
            with pytest.raises(ConfigurationError) if sync else nullcontext() as error:
                model(torch.tensor([1])).sum().backward()
        return str(error)

    for message in run_world(2, work):
        assert "`weight`" in message


def test_a_parameter_without_elements_keeps_no_memory_and_hides_none() -> None:
    """Its gradient's address says nothing: the others' memory stays, and moves where a gradient is kept."""

    def work(rank: int) -> list[bool]:
        model = nn.ParameterList([torch.ones(5), torch.ones(0), torch.ones(0, 3)])
        reducer = reducer_of(model)
        places, kept = [], []
        for step in range(4):
            model[0].grad = None  # the others' stay
            reducer.prepare(sync=True)
            sum(each.sum() for each in list(model)[: 3 - rank]).backward()
            reducer.finish()
            grad = model[0].grad
            assert grad is not None
            places.append(grad.data_ptr())
            if step == 2:
                kept.append(grad)
            del grad
        return [places[0] == places[1] == places[2], places[3] != places[2]]

    assert run_world(2, work) == [[True] * 2] * 2


def test_a_bucket_waits_for_every_stream_that_has_filled_it() -> None:
    """Hooks of backward run on the streams of their forwards; the last hook's is not that of all."""

    def work(_: int) -> tuple[list[str], list[set[str]]]:
        streams: list[str] = []
        launched: list[set[str]] = []

        class Watched(CollectiveQueue):
            def submit(self, work: Work, device: torch.device, after: Iterable[Any] = ()) -> Future[Tensor]:
                launched.append(set(after))
                return super().submit(work, device)

        def next_stream(_: Tensor) -> Any:
            streams.append(f"stream {len(streams)}")
            return streams[-1]

        vars(_reducer)["stream_writing"] = next_stream
        model = build()
        reducer = reducer_of(model)
        reducer._lane = Watched()
        for _step in range(2):
            streams.clear()
            launched.clear()
            step_with(reducer, model, 0)
        return streams, launched

    for streams, launched in run_world(2, work):
        assert set().union(*launched) == set(streams)
        assert 1 < len(launched) < len(streams) == 10


def test_on_a_device_the_lane_waits_for_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """And for the stream of who submits."""
    waited: list[str] = []
    side: Any = SimpleNamespace(wait_stream=waited.append)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "current")
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(_collectives, "Future", lambda **_: Future())
    after: Any = ["first", "current", "second"]
    result = CollectiveQueue().submit(lambda: torch.ones(2), torch.device("cuda", 0), after)
    assert sorted(waited) == ["current", "first", "second"]
    assert result.wait().tolist() == [1.0, 1.0]


def test_an_idle_lane_keeps_nothing_of_its_last_job() -> None:
    """It would else hold the memory of a reducer."""
    lane, gone = CollectiveQueue(), threading.Event()

    def work() -> Tensor:
        return torch.ones(2)

    weakref.finalize(work, gone.set)
    lane.submit(work, torch.device("cpu")).wait()
    del work
    assert gone.wait(10)
    lane.close()


def test_a_failed_collective_is_raised_where_its_result_is_needed() -> None:
    """The lane hands an exception of its thread to whoever waits, and goes on with the next job."""
    lane = CollectiveQueue()

    def fail() -> Tensor:
        raise RuntimeError("connection closed by peer")

    failed = lane.submit(fail, torch.device("cpu"))
    next_one = lane.submit(lambda: torch.ones(2), torch.device("cpu"))
    with pytest.raises(RuntimeError, match="connection closed"):
        failed.wait()
    assert next_one.wait().tolist() == [1.0, 1.0]
    lane.close()
