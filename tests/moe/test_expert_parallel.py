"""Sharded over ranks, the layer computes what one process computes, and every rank reaches every collective."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
from launcher import run_world
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_moe_ckpt.moe import MoELayer
from lightning_moe_ckpt.parallel import GradientReducer, build_groups, expert_parallel_fqns, set_current_groups

D, F_, E = 6, 10, 12
LIMIT = timedelta(seconds=30)
WORLDS = [(3, 1), (3, 3), (4, 2), (4, 4)]


class Model(nn.Module):
    """Two layers of experts between dense ones, so that gradients cross every exchange."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.inp = nn.Linear(D, D)
        self.first = MoELayer(D, F_, E, **options)
        self.second = MoELayer(D, F_, E, **options)

    def forward(self, x: Tensor, *, recompute: bool = False) -> Tensor:
        h = torch.tanh(self.inp(x))
        h = h + (checkpoint(self.first, h, use_reentrant=False) if recompute else self.first(h))
        h = h + self.second(h)
        assert self.first.l_aux is not None
        loss: Tensor = h.pow(2).mean() + 0.1 * self.first.l_aux
        return loss


class Result(NamedTuple):
    grads: dict[str, Tensor | None]
    loss: Tensor
    counts: Tensor


def build(**options: Any) -> Model:
    torch.manual_seed(3)
    return Model(**options)


def batch(rank: int) -> Tensor:
    """Ranks have different numbers of tokens."""
    return torch.randn(5 + 2 * rank, D, generator=torch.Generator().manual_seed(rank))


def train_step(rank: int, ep_size: int, *, autocast: bool = False, recompute: bool = False, **options: Any) -> Result:
    groups = build_groups(ep_size, LIMIT)
    set_current_groups(groups)
    model = build(**options)
    reducer = GradientReducer(
        model.named_parameters(), groups=groups, is_expert_parallel=expert_parallel_fqns(model), bucket_nbytes=500
    )
    reducer.prepare(sync=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = model(batch(rank), recompute=recompute)
    loss.backward()
    reducer.finish()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return Result(grads, loss.detach(), model.first.read_and_reset_counts())


def is_expert(name: str) -> bool:
    return name.rsplit(".", maxsplit=1)[-1] in {"w1", "b1", "w2", "b2"}


def whole(results: list[Result], ep_size: int, name: str) -> Tensor:
    """A gradient of all experts from the first expert-parallel group, or a dense one."""
    parts = [part for result in results[:ep_size] if (part := result.grads[name]) is not None]
    assert len(parts) == ep_size
    return torch.cat(parts) if is_expert(name) else parts[0]


def assert_same_bits(got: dict[str, Tensor | None], want: dict[str, Tensor | None], names: Iterable[str]) -> None:
    for name in names:
        left, right = got[name], want[name]
        assert left is not None
        assert right is not None
        assert torch.equal(left, right), name


def reference(world_size: int, **options: Any) -> tuple[dict[str, Tensor], list[Tensor]]:
    """All ranks' batches in one process; the mean over ranks of their losses."""
    model = build(**options)
    losses = [model(batch(rank)) for rank in range(world_size)]
    torch.autograd.backward(torch.stack(losses).sum() / world_size)
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, losses


@pytest.mark.parametrize(
    ("world_size", "ep_size", "capacity_factor"),
    [
        pytest.param(*world, drops, marks=[] if (index + bool(drops)) % 2 else [pytest.mark.soak])
        for index, world in enumerate(WORLDS)
        for drops in (0.0, 0.6)
    ],
)
def test_losses_and_gradients_equal_those_of_one_process(world_size: int, ep_size: int, capacity_factor: float) -> None:
    """To rounding, for uneven batches, dropless and with drops; replicas of any parameter agree in bits."""
    results = run_world(world_size, lambda rank: train_step(rank, ep_size, capacity_factor=capacity_factor))
    want, losses = reference(world_size, capacity_factor=capacity_factor)
    for result, loss in zip(results, losses, strict=True):
        torch.testing.assert_close(result.loss, loss)
    for name, grad in want.items():
        torch.testing.assert_close(whole(results, ep_size, name), grad)
    for rank, result in enumerate(results):
        assert_same_bits(result.grads, results[0].grads, [name for name in want if not is_expert(name)])
        assert_same_bits(result.grads, results[rank % ep_size].grads, want)


@pytest.mark.parametrize("ep_size", [1, 2, 4])
def test_sharding_does_not_change_the_loss(ep_size: int) -> None:
    """Each token meets the same experts wherever they live; counts are of this rank's tokens over all experts."""
    results = run_world(4, lambda rank: train_step(rank, ep_size))
    for rank, result in enumerate(results):
        model = build()
        torch.testing.assert_close(result.loss, model(batch(rank)))
        assert torch.equal(result.counts, model.first.read_and_reset_counts())


def test_bf16_autocast_and_recomputation_run_sharded() -> None:
    """The exchanges are repeated in backward on every rank alike, and count once."""
    plain = run_world(3, lambda rank: train_step(rank, 3, autocast=True, top_k=12))
    again = run_world(3, lambda rank: train_step(rank, 3, autocast=True, recompute=True, top_k=12))
    for got, want in zip(again, plain, strict=True):
        assert torch.equal(got.loss, want.loss)
        assert torch.equal(got.counts, want.counts)
        assert_same_bits(got.grads, want.grads, want.grads)


def test_two_runs_give_the_same_bits() -> None:
    """Everything a rank receives has an order."""
    first, second = (run_world(4, lambda rank: train_step(rank, 2, noisy_gate=True)) for _ in range(2))
    for got, want in zip(first, second, strict=True):
        assert torch.equal(got.loss, want.loss)
        assert_same_bits(got.grads, want.grads, want.grads)


def test_a_rank_whose_experts_get_no_tokens_takes_part() -> None:
    """All tokens go to expert 0; the other ranks' experts get zero gradients, and nobody waits."""

    def work(rank: int) -> list[bool]:
        set_current_groups(build_groups(3, LIMIT))
        torch.manual_seed(0)
        layer = MoELayer(D, F_, 3, top_k=1)
        with torch.no_grad():
            layer.gate.weight.zero_()
            layer.gate.weight[0] = 1.0
        layer(torch.ones(4 + rank, D)).sum().backward()
        return [p.grad is not None and bool(p.grad.any()) for _, p in layer.expert_parameters()]

    assert run_world(3, work) == [[True] * 4, [False] * 4, [False] * 4]


def test_freezing_anything_anywhere_never_makes_ranks_diverge() -> None:
    """Each step freezes another mix of experts, router and dense layers on each rank; the input has no gradient."""

    def work(rank: int) -> int:
        groups = build_groups(3, LIMIT)
        set_current_groups(groups)
        model = build()
        reducer = GradientReducer(
            model.named_parameters(), groups=groups, is_expert_parallel=expert_parallel_fqns(model), bucket_nbytes=500
        )
        done = 0
        for step in range(8):
            for position, parameter in enumerate(model.parameters()):
                parameter.requires_grad_((position + rank * step) % 3 != 0 and step != 5)
            model.zero_grad()
            reducer.prepare(sync=True)
            model(batch(rank)).backward()
            reducer.finish()
            done += 1
        return done

    assert run_world(3, work) == [8, 8, 8]
