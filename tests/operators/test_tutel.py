"""Layers stored and behaving as Tutel's: experts placed, tokens counted, traps refused. See `test_tutel_real`."""

from __future__ import annotations

import copy
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_moe_ckpt.errors import ConfigurationError, UnknownLayout
from lightning_moe_ckpt.operators import LoadCounter, OperatorSet, discover
from lightning_moe_ckpt.parallel import expert_parallel_fqns, expert_parallel_modules
from lightning_moe_ckpt.strategy import MoEStrategy
from lightning_moe_ckpt.testing import AdapterContract


def _standin() -> Any:
    """Tests are imported by path; so is what they share."""
    spec = importlib.util.spec_from_file_location("_tutel_standin", Path(__file__).with_name("_tutel_standin.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)
    spec.loader.exec_module(module)
    return module


standin = _standin()
E, D, T = 4, 8, 30


def build(**options: Any) -> Any:
    torch.manual_seed(0)
    return nn.ModuleDict({"inp": nn.Linear(D, D), "moe": standin.MOELayer(D, **options)})


def tokens() -> Tensor:
    return torch.randn(T, D, generator=torch.Generator().manual_seed(3)) + 0.7


def elements(operators: OperatorSet, model: nn.Module, name: str) -> dict[str, Tensor]:
    """What an operator holds, by parameter."""
    params = dict(model.named_parameters())
    return {s.fqn: params[s.fqn].detach().view(-1)[s.start : s.stop] for s in operators[name].slices}


def test_stacked_experts_and_all_gates_are_operators() -> None:
    """Each expert is its rows of every stacked tensor; gates together are the router, whichever is in use."""
    model = build(num_gates=2)
    operators = discover(model)
    third = elements(operators, model, "moe/expert.2")
    assert set(third) == {f"moe.experts.batched_fc{n}" for n in ("1_w", "2_w", "1_bias")}
    assert torch.equal(third["moe.experts.batched_fc1_w"], model["moe"].experts.batched_fc1_w[2].detach().flatten())
    assert set(elements(operators, model, "moe/router")) == {f"moe.gates.{i}.wg.weight" for i in range(2)}
    assert sum(op.numel for op in operators) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("num_local", [1, 4])
def test_flat_experts_are_cut_into_equal_intervals(num_local: int) -> None:
    """`llama_ffn` keeps `[e, D, F]` in one dimension."""
    model = build(experts=standin.Flat, num_local=num_local)
    flat = model["moe"].experts.W_fc1.detach().view(model["moe"].experts.W_fc1_full_shape)
    for expert in range(num_local):
        (piece,) = elements(discover(model), model, f"moe/expert.{expert}").values()
        assert torch.equal(piece, flat[expert].flatten())


def test_experts_in_a_list_are_whole_parameters() -> None:
    """Custom experts may be modules."""
    model = build(experts=standin.Listed)
    assert set(elements(discover(model), model, "moe/expert.3")) == {
        f"moe.experts.each.3.{n}" for n in ("weight", "bias")
    }


def test_experts_that_nothing_tells_apart_are_refused() -> None:
    """Instead of being guessed."""
    with pytest.raises(UnknownLayout, match=r"experts\.weight.*does not show"):
        discover(build(experts=standin.Mixed))


@pytest.mark.parametrize("gate", [0, 1])
@pytest.mark.parametrize("capacity_factor", [0.6, 0.0])
def test_processed_and_dropped_tokens_are_counted(capacity_factor: float, gate: int) -> None:
    """By demand and capacity, with any of several gates."""
    model = build(capacity_factor=capacity_factor, num_gates=2)
    operators = discover(model)
    processed, capacity = LoadCounter(operators, model), LoadCounter(operators, model, "capacity")
    processed.install()
    capacity.install()
    layer = model["moe"]
    layer(tokens(), gate)
    demand_E = torch.bincount(layer.gates[gate](tokens()).topk(2).indices.view(-1), minlength=E)
    limit = 2 * int(0.6 * -(-T // E)) if capacity_factor else int(demand_E.max())
    assert torch.equal(processed.read_and_reset(), demand_E.clamp(max=limit))
    assert capacity.read_and_reset().tolist() == [limit] * E
    assert bool((demand_E > limit).any()) == bool(capacity_factor)


def test_prioritised_routing_is_not_counted_by_the_number_that_is_wrong_then() -> None:
    """The choices are, where they are there; else experts keep their order, and the log says so."""
    model = build()
    counter = LoadCounter(discover(model), model)
    counter.install()
    layer = model["moe"]
    layer.batch_prioritized_routing = True
    layer(tokens())
    assert counter.read_and_reset().sum() == 0
    layer.register_forward_hook(_as_newer, prepend=True)
    layer(tokens())
    demand_E = torch.bincount(layer.gates[0](tokens()).topk(2).indices.view(-1), minlength=E)
    assert torch.equal(counter.read_and_reset(), demand_E.clamp(max=2 * -(-T // E)))


def _as_newer(layer: Any, args: tuple[Tensor], _out: object) -> None:
    """Tutel 0.4 leaves the choices beside its count, which is wrong here on purpose."""
    layer.dispatch_count = torch.ones_like(layer.dispatch_count)
    layer.dispatch_count.topk_ids = layer.gates[0](args[0]).topk(2).indices


def test_live_capacity_is_one_value_per_gate_and_not_zero_with_prioritised_routing() -> None:
    """Zero means dropless, for which prioritised routing has the wrong count."""
    model = build(num_gates=2, capacity_factor=0.5)
    view: Any = discover(model).layers[0].live_capacity
    before = view.get(model)
    assert before == (0.5, 0.5)
    view.set(model, view.scaled(before, [1.0, 1.5, 1.0, 0.5]))
    assert [gate.capacity_factor for gate in model["moe"].gates] == [0.75, 0.75]
    view.set(model, (0.0, 0.5))
    assert view.limited(model)
    model["moe"].batch_prioritized_routing = True
    with pytest.raises(ConfigurationError, match="batch_prioritized_routing"):
        view.set(model, (0.0, 0.5))


def test_gate_noise_is_extra_state_and_the_loss_a_graph_to_drop() -> None:
    """Neither is in a state dict; the graph is in the way of a copy."""
    model = build()
    (layer,) = discover(model).layers
    assert layer.extra is not None
    model["moe"].gates[0].gate_noise = 0.5
    state = dict(layer.extra.get(model))
    model["moe"].gates[0].gate_noise = 0.0
    layer.extra.set(model, state)
    assert model["moe"].gates[0].gate_noise == 0.5
    model["moe"](tokens())
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(model)
    assert layer.graphs == (("moe", "l_aux"),)


class TestLayer(AdapterContract):
    """What is promised of every layer, with tokens over capacity."""

    def make_model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(D, D), standin.MOELayer(D, capacity_factor=0.6))

    def loss(self, model: nn.Module, seed: int) -> Tensor:
        x_TD = torch.randn(T, D, generator=torch.Generator().manual_seed(seed))
        loss: Tensor = model(x_TD).square().mean()
        return loss


# -- traps


def test_a_layer_built_before_the_process_group_is_refused() -> None:
    """It believes in another number of ranks, and computes wrong results without an error."""
    model = build()
    model["moe"].world_size = 2
    with pytest.raises(UnknownLayout, match=r"built for 2 ranks and runs on 1.*configure_model"):
        discover(model)


def test_experts_cut_over_ranks_are_refused() -> None:
    """Fewer experts than ranks."""
    model = build()
    model["moe"].sharded_count = 2
    with pytest.raises(UnknownLayout, match="cuts each expert over 2 ranks"):
        discover(model)


def test_prioritised_routing_without_drops_is_refused() -> None:
    """It drops almost all tokens."""
    model = build(capacity_factor=0.0)
    model["moe"].batch_prioritized_routing = True
    with pytest.raises(UnknownLayout, match="batch_prioritized_routing"):
        discover(model)


def test_a_gate_that_replaces_its_parameter_is_refused() -> None:
    """`fp32_gate` turns a 16-bit gate into another one at the first forward."""
    model = build(fp32_gate=True)
    discover(model)
    model["moe"].gates.bfloat16()
    with pytest.raises(UnknownLayout, match="fp32_gate"):
        discover(model)


def test_the_strategy_knows_which_parameters_are_one_ranks_own() -> None:
    """Those of the experts, of a layer that is spread over ranks."""
    model = build(world_size=2)
    assert expert_parallel_fqns(model) == {n for n, _ in model.named_parameters() if ".experts." in n}
    assert expert_parallel_fqns(build()) == set()
    ((fqn, layer),) = expert_parallel_modules(model)
    assert (fqn, layer.ep_size) == ("moe", 2)


@pytest.mark.parametrize("missing", ["moe.experts.batched_fc1_w", None])
def test_a_checkpoint_without_some_experts_is_refused_instead_of_loaded_as_zeros(missing: str | None) -> None:
    """The layer itself would report that all keys matched, and have destroyed its weights."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.moe = standin.MOELayer(D)

    module, strategy = Module(), MoEStrategy()
    state = {name: value for name, value in copy.deepcopy(module.state_dict()).items() if name != missing}
    before = module.moe.experts.batched_fc1_w.detach().clone()
    strategy._lightning_module = strategy.model = module
    if missing is None:
        strategy.load_model_state_dict({"state_dict": state})
    else:
        with pytest.raises(ConfigurationError, match="lacks 1 parameters of Tutel's experts"):
            strategy.load_model_state_dict({"state_dict": state})
    assert torch.equal(module.moe.experts.batched_fc1_w, before)
    if missing is not None:
        assert str(module.load_state_dict(dict(state))) == "<All keys matched successfully>"
        assert module.moe.experts.batched_fc1_w.abs().sum() == 0, "so the layer behaves"
