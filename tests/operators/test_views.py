"""Live capacity, selection-only bias and plain attributes are read and set, and put back exactly as they were."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.moe import MoELayer
from lightning_moe_ckpt.operators import (
    AttributeCapacity,
    AttributeState,
    BiasView,
    CapacityView,
    ExpertCapacity,
    discover,
)

E, D = 4, 8


def tokens(num_tokens: int = 64) -> Tensor:
    return torch.randn(num_tokens, D, generator=torch.Generator().manual_seed(1))


def own_layer(capacity_factor: float = 0.5) -> tuple[MoELayer, CapacityView]:
    torch.manual_seed(0)
    layer = MoELayer(D, 16, E, top_k=2, capacity_factor=capacity_factor)
    view = discover(layer).layers[0].live_capacity
    assert view is not None
    return layer, view


# -- capacity


def test_our_layer_takes_more_tokens_for_one_expert_only_and_goes_back() -> None:
    """Ten tenths more for expert 2, a half less for expert 0, the others as before; then the same bits as before."""
    layer, view = own_layer()
    assert (view.scope, view.limited(layer), view.owner(layer)) == ("expert", True, layer)
    before, out_TD = view.get(layer), layer(tokens())
    layer.read_and_reset_drops()
    plain_E = layer.read_and_reset_counts()
    view.set(layer, view.scaled(before, [0.5, 1.0, 2.0, 1.0]))
    layer(tokens())
    routed_E = layer.tokens_per_expert + layer.drops_per_expert
    capacity_E = torch.tensor([8, 16, 32, 16])
    assert torch.equal(layer.read_and_reset_counts(), torch.minimum(routed_E, capacity_E))
    assert not torch.equal(plain_E, torch.minimum(routed_E, capacity_E)), "the change shows"
    view.set(layer, before)
    assert view.get(layer) == before == 0.5
    assert torch.equal(layer(tokens()), out_TD)


def test_a_layer_that_drops_nothing_has_nothing_to_scale() -> None:
    """Zero stays zero: no capacity appears where there was none."""
    layer, view = own_layer(0.0)
    assert not view.limited(layer)
    assert view.scaled(view.get(layer), [2.0] * E) == 0.0


def test_factors_of_one_change_nothing() -> None:
    """Not even the form of the value."""
    layer, view = own_layer()
    assert view.scaled(view.get(layer), [1.0] * E) == 0.5


@pytest.mark.parametrize("value", [(0.5,) * (E - 1), (0.5, 0.5, 0.5, 0.0)], ids=["too few", "zero"])
def test_a_capacity_per_expert_that_cannot_be_is_refused(value: tuple[float, ...]) -> None:
    """By the layer that would have to work with it, at once."""
    layer, view = own_layer()
    with pytest.raises(ConfigurationError, match="one capacity above zero for each of 4"):
        view.set(layer, value)
    assert view.get(layer) == 0.5
    with pytest.raises(ConfigurationError, match="one factor above zero"):
        MoELayer(D, 16, E, capacity_factor=value)


def test_whole_numbers_of_tokens_are_rounded_up_and_reach_the_library_as_a_tensor() -> None:
    """Ten percent of ten is one, whatever floats make of it; what was set is read back without asking the device."""
    model = nn.Linear(D, E)
    router: Any = model
    router.expert_capacity = 10
    view = ExpertCapacity("", "expert_capacity", E, "tensor")
    boosted: Any = view.scaled(view.get(model), [1.1, 1.0, 1.11, 0.91])
    assert boosted == (11, 10, 12, 10)
    view.set(model, boosted)
    assert torch.equal(router.expert_capacity, torch.tensor([11, 10, 12, 10]))
    assert view.get(model) == boosted
    router.expert_capacity = torch.tensor([1, 2, 3, 4])
    assert view.get(model) == (1, 2, 3, 4), "a tensor that somebody else has set"
    view.set(model, 10)
    assert router.expert_capacity == 10
    with pytest.raises(ValueError, match="3 factors for 4"):
        view.scaled(10, [1.0] * 3)


def sharing_a_config() -> nn.Module:
    """Two layers whose capacity is one number in a config."""
    config = SimpleNamespace(capacity_factor=1.0)
    model = nn.ModuleList([nn.Identity(), nn.Identity()])
    for layer in model:
        layer.config = config  # type: ignore[assignment]
    return model


def test_layers_that_share_a_config_have_one_owner() -> None:
    """Set through one, seen through the other."""
    model = sharing_a_config()
    first, second = (AttributeCapacity(str(i), ("config.capacity_factor",), "model") for i in range(2))
    assert first.owner(model) is second.owner(model)
    first.set(model, first.scaled(first.get(model), [1.0, 1.5, 1.25, 0.5]))
    assert second.get(model) == (1.5,)


def test_a_pair_is_scaled_for_training_only_and_none_is_left_alone() -> None:
    """Evaluation keeps its capacity; a gate without one stays dropless."""
    layer: Any = nn.Identity()
    layer.capacity, layer.other, layer.drops = (1.2, 2.4), None, True
    view = AttributeCapacity("", ("capacity", "other"), enabled="drops")
    before = view.get(layer)
    view.set(layer, view.scaled(before, [1.0, 2.0]))
    assert (layer.capacity, layer.other) == ((2.4, 2.4), None)
    assert view.limited(layer)
    layer.drops = False
    assert not view.limited(layer)
    with pytest.raises(ConfigurationError, match="tuple of 2"):
        view.set(layer, 1.0)


def test_what_a_view_returns_is_plain_numbers() -> None:
    """A journal stores it, and it equals what comes back."""
    layer, view = own_layer()
    view.set(layer, view.scaled(view.get(layer), [1.0, 1.0, 1.1, 1.0]))
    assert tuple(json.loads(json.dumps(view.get(layer)))) == view.get(layer)


# -- bias


class BiasedRouter(nn.Module):
    """Chooses by scores plus bias, weighs by scores; the bias is a buffer or a frozen parameter."""

    def __init__(self, *, parameter: bool) -> None:
        super().__init__()
        self.chosen: list[Tensor] = []
        self.weight = nn.Parameter(torch.randn(E, D, generator=torch.Generator().manual_seed(2)))
        bias = 0.01 * torch.arange(E, dtype=torch.float32)[None]
        if parameter:
            self.expert_bias = nn.Parameter(bias, requires_grad=False)
        else:
            self.register_buffer("expert_bias", bias)

    @override
    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        score_TE = torch.sigmoid(x_TD @ self.weight.t())
        idx_TK = (score_TE + self.expert_bias).topk(2).indices
        self.chosen.append(torch.bincount(idx_TK.view(-1), minlength=E))
        return score_TE.gather(1, idx_TK), idx_TK


class Block(nn.Module):
    def __init__(self, *, parameter: bool) -> None:
        super().__init__()
        self.router = BiasedRouter(parameter=parameter)

    @override
    def forward(self, x_TD: Tensor) -> Tensor:
        weight_TK: Tensor = self.router(x_TD)[0]
        return weight_TK


@pytest.mark.parametrize("parameter", [False, True], ids=["buffer", "parameter"])
def test_a_term_beside_the_trained_bias_moves_the_choice_and_leaves_no_trace(parameter: bool) -> None:
    """The trained bias is the same object, bits and version; the term is read at every forward until it is removed."""
    model = nn.ModuleDict({"moe": Block(parameter=parameter)})
    block: Any = model["moe"]
    view = BiasView(layer="moe", owner="moe.router", attribute="expert_bias")
    trained = view.trained(model)
    bits, version = trained.clone(), trained._version
    term_E = torch.zeros(E)
    remove = view.add(model, term_E)
    block(tokens())
    term_E[1] = 0.3
    block(tokens())
    assert view.trained(model) is trained
    assert dict(model.named_parameters() if parameter else model.named_buffers())["moe.router.expert_bias"] is trained
    remove()
    block(tokens())
    before_E, with_E, after_E = block.router.chosen
    assert torch.equal(before_E, after_E)
    assert with_E[1] > before_E[1]
    assert torch.equal(trained, bits)
    assert trained._version == version


def test_a_forward_that_is_repeated_or_fails_finds_the_same_bias() -> None:
    """Activation checkpointing chooses the same experts again; an exception leaves the trained bias in its place."""
    model = nn.ModuleDict({"moe": Block(parameter=False)})
    block: Any = model["moe"]
    view = BiasView(layer="moe", owner="moe.router", attribute="expert_bias")
    trained = view.trained(model)
    view.add(model, torch.tensor([0.0, 0.3, 0.0, 0.0]))
    x_TD = tokens().requires_grad_()
    torch.autograd.backward(checkpoint(block, x_TD, use_reentrant=False).sum())
    first_E, again_E = block.router.chosen
    assert torch.equal(first_E, again_E)
    with pytest.raises(RuntimeError):
        block(tokens()[:, :3])
    assert view.trained(model) is trained


# -- plain attributes


def test_plain_attributes_come_back_into_the_tensors_that_are_there() -> None:
    """In place, since others may hold the tensor; what was not there goes; what is new comes."""
    source: Any = nn.Linear(2, 2)
    target: Any = nn.Linear(2, 2)
    source.load, source.noise = torch.arange(3), 0.25
    state = AttributeState((("", "load"), ("", "noise"), ("", "absent")))
    target.load, target.absent = torch.zeros(3, dtype=torch.int64), 1.0
    live = target.load
    taken = copy.deepcopy(state.get(source))
    assert set(taken) == {".load", ".noise"}
    state.set(target, taken)
    assert target.load is live
    assert torch.equal(live, torch.arange(3))
    assert target.noise == 0.25
    assert not hasattr(target, "absent")
    del target.load
    state.set(target, taken)
    assert torch.equal(target.load, torch.arange(3))
    assert target.load is not taken[".load"], "what is stored is not what trains"
