"""Real DeepSpeed-MoE layers: experts and gate are placed, and counts equal what a loop over tokens finds."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_moe_ckpt.errors import UnknownLayout
from lightning_moe_ckpt.operators import LoadCounter, OperatorSet, discover

deepspeed = pytest.importorskip("deepspeed.moe.layer", reason="DeepSpeed is not installed: see the Makefile")

E, D, T = 4, 8, 24


def build(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    expert = nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))
    return nn.ModuleDict({"moe": deepspeed.MoE(D, expert, num_experts=E, **{"min_capacity": 1, **options})})


def tokens(seed: int = 3) -> Tensor:
    # Tokens alike: some experts get more than they can take.
    noise = torch.randn(T, D, generator=torch.Generator().manual_seed(seed))
    return noise + 0.7 * torch.ones(D)


def demand(model: Any, x_TD: Tensor, k: int) -> Tensor:
    """How many tokens have each expert among their k most probable; only without sampling of second experts."""
    gate = model["moe"].deepspeed_moe.gate
    return torch.bincount((x_TD @ gate.wg.weight.t()).topk(k).indices.view(-1), minlength=E)


def found(model: nn.Module) -> OperatorSet:
    operators = discover(model)
    assert len(operators.layers) == 1
    return operators


@pytest.mark.parametrize("use_residual", [False, True])
def test_experts_and_gate_are_operators(use_residual: bool) -> None:
    """Every parameter once; the shared expert of a residual layer and its coefficient are dense."""
    model = build(use_residual=use_residual)
    operators = found(model)
    assert [op.name for op in operators if op.kind == "expert"] == [f"moe/expert.{e}" for e in range(E)]
    (router,) = [op for op in operators if op.kind == "router"]
    assert [s.fqn for s in router.slices] == ["moe.deepspeed_moe.gate.wg.weight"]
    dense = {s.fqn for op in operators if op.kind == "dense" for s in op.slices}
    assert all(fqn.startswith(("moe.mlp.", "moe.coefficient.")) for fqn in dense)
    assert bool(dense) == use_residual
    assert sum(op.numel for op in operators) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("drop_tokens", [True, False])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_counts_equal_a_loop_over_tokens(k: int, drop_tokens: bool) -> None:
    """What passes the capacity, what is dropped, and the capacity; experts are handed padded rows, which say nothing."""
    model: Any = build(
        k=k, capacity_factor=0.5 if k == 3 else 0.75, drop_tokens=drop_tokens, top2_2nd_expert_sampling=False
    )
    operators = found(model)
    processed, capacity = LoadCounter(operators, model), LoadCounter(operators, model, "capacity")
    processed.install()
    capacity.install()
    x_TD = tokens()
    out = model["moe"](x_TD)
    want_E = demand(model, x_TD, k)
    assert torch.equal(out[2], want_E)
    limit = math.ceil(T * k * (0.5 if k == 3 else 0.75) / E) if drop_tokens else int(want_E.max())
    got_E = processed.read_and_reset()
    assert torch.equal(got_E, want_E.clamp(max=limit))
    assert bool((want_E > got_E).any()) == drop_tokens, "tokens are dropped, or none is"
    assert capacity.read_and_reset().tolist() == [limit] * E


def test_what_is_processed_is_what_comes_out() -> None:
    """Tokens that no expert took leave the layer as zeros: as many as were counted as dropped."""
    model: Any = build(k=1, capacity_factor=0.5)
    counter = LoadCounter(found(model), model)
    counter.install()
    out_TD = model["moe"](tokens())[0]
    assert int((out_TD.abs().sum(-1) == 0).sum()) == T - int(counter.read_and_reset().sum())


def test_evaluation_and_recomputation_count_nothing() -> None:
    """A step counts its tokens once."""
    model: Any = build(k=2, drop_tokens=False, top2_2nd_expert_sampling=False)
    counter = LoadCounter(found(model), model)
    counter.install()
    x_TD = tokens().requires_grad_()
    torch.autograd.backward(checkpoint(lambda x: model["moe"](x)[0], x_TD, use_reentrant=False).sum())
    assert int(counter.read_and_reset().sum()) == 2 * T
    model.eval()
    model["moe"](tokens())
    assert int(counter.read_and_reset().sum()) == 0


def test_live_capacity_lets_more_tokens_through_and_goes_back() -> None:
    """One value per layer: the largest factor counts."""
    model: Any = build(k=1, capacity_factor=0.5, use_rts=False)
    operators = found(model)
    view = operators.layers[0].live_capacity
    assert view is not None
    assert (view.scope, view.limited(model)) == ("layer", True)
    counter = LoadCounter(operators, model)
    counter.install()
    before, plain_TD = view.get(model), model["moe"](tokens())[0]
    plain = counter.read_and_reset()
    view.set(model, view.scaled(before, [1.0, 2.0, 1.0, 1.0]))
    model["moe"](tokens())
    assert torch.equal(counter.read_and_reset(), demand(model, tokens(), 1).clamp(max=6))
    assert plain.max() == 3
    view.set(model, before)
    assert torch.equal(model["moe"](tokens())[0], plain_TD)
    model["moe"].deepspeed_moe.gate.drop_tokens = False
    assert not view.limited(model)


def test_the_loss_it_keeps_is_named_since_it_is_in_the_way_of_copies() -> None:
    """After a training forward the layer holds a graph, which cannot be copied."""
    model: Any = build()
    model["moe"](tokens())
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(model)
    (place,) = found(model).layers[0].graphs
    owner = model.get_submodule(place[0])
    setattr(owner, place[1], getattr(owner, place[1]).detach())
    copy.deepcopy(model)


def test_expert_parallelism_of_its_engine_is_refused() -> None:
    """Its experts' gradients are reduced by an engine that is not there."""
    with pytest.raises(
        UnknownLayout, match=r"DeepSpeed with `ep_size=2`; only its own trainer .* Build it with `ep_size=1`"
    ):
        discover(build(ep_size=2))
