"""Layouts of libraries that need a GPU to run: layers with their classes, attributes and storage are placed and counted.

Each stand-in is written from the library's attributes, and computes what its forward computes from the router on.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_moe_ckpt.errors import UnknownLayout
from lightning_moe_ckpt.operators import LoadCounter, MoELayerSpec, OperatorSet, discover

E, D, F, K, T = 4, 6, 10, 2, 20


def _named(cls: type, module: str, name: str) -> type[nn.Module]:
    """A class that looks as if it came from a library."""
    return type(name, (cls,), {"__module__": module})


class _Router(nn.Module):
    """Emits what the library's router emits, in its order."""

    def __init__(self, child: str, emit: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        if child:
            setattr(self, child, nn.Linear(D, E, bias=False))
        else:
            self.weight = nn.Parameter(torch.randn(E, D))
        self._child, self._emit = child, emit

    @override
    def forward(self, x_TD: Tensor, bias_E: Tensor | None = None) -> tuple[Tensor, ...]:
        linear = getattr(self, self._child) if self._child else lambda x: x @ self.weight.t()
        score_TE = torch.sigmoid(linear(x_TD))
        if bias_E is None:
            bias_E = getattr(self, "expert_bias", None)
        idx_TK = (score_TE if bias_E is None else score_TE + bias_E).topk(K).indices
        return self._emit(score_TE, score_TE.gather(1, idx_TK), idx_TK)


class _Holder(nn.Module):
    """A module with these children, parameters and plain attributes."""

    def __init__(self, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, Tensor) else part)


class _Block(_Holder):
    bias_name = ""

    @override
    def forward(self, x_TD: Tensor) -> tuple[Tensor, ...]:
        router: Any = getattr(self, "router", None) or self.gate
        out: tuple[Tensor, ...] = router(x_TD, getattr(self, self.bias_name)) if self.bias_name else router(x_TD)
        return out


def _mask(idx_TK: Tensor) -> Tensor:
    return torch.zeros(len(idx_TK), E, dtype=torch.bool).scatter_(1, idx_TK, value=True)


def torchtitan(*, old: bool) -> nn.Module:
    load = "tokens_per_expert" if old else "tokens_per_expert_E"
    bias = "expert_bias" if old else "expert_bias_E"
    names = ("w1", "w2", "w3") if old else ("w1_EFD", "w2_EDF", "w3_EFD")
    stacked = _Holder(**{n: torch.randn(E, *((D, F) if "w2" in n else (F, D))) for n in names})
    where = {"experts": stacked} if old else {"routed_experts": _Holder(inner_experts=stacked)}
    cls: Any = _named(_Block, "torchtitan.models.moe" if old else "torchtitan.models.common.moe", "MoE")
    cls.bias_name = bias
    shared = _Holder(w1=torch.randn(F, D))
    block = cls(router=_Router("gate", lambda s, w, i: (w, i, s)), shared_experts=shared, **where)
    block.register_buffer(bias, torch.zeros(E))
    block.register_buffer(load, torch.zeros(E), persistent=False)
    return nn.ModuleDict({"moe": block})


def megatron(kind: str, *, biased: bool = True, **config: Any) -> nn.Module:
    if kind == "SequentialMLP":
        local = nn.ModuleList(_Holder(linear_fc1=nn.Linear(D, F), linear_fc2=nn.Linear(F, D)) for _ in range(E))
        experts: nn.Module = _Holder(local_experts=local)
    elif kind == "TEGroupedMLP":

        def linear(*shape: int) -> nn.Module:
            return _Holder(
                **{f"weight{j}": torch.randn(shape) for j in range(E)},
                **{f"bias{j}": torch.randn(shape[0]) for j in range(E)},
            )

        experts = _Holder(linear_fc1=linear(F, D), linear_fc2=linear(D, F))
    else:
        grouped = _named(_Holder, "megatron.core.transformer.moe.experts", kind)
        experts = grouped(weight1=torch.randn(D, E * F), weight2=torch.randn(E * F, D))
    router = _Router("", lambda s, _, i: (s, _mask(i)))
    shared = SimpleNamespace(
        num_moe_experts=E, moe_router_topk=K, moe_expert_capacity_factor=1.0, **{"moe_pad_expert_input_to_capacity": False, **config}
    )  # fmt: skip
    router.config = shared  # type: ignore[assignment]
    if biased:
        router.register_buffer("expert_bias", torch.zeros(E))
        router.register_buffer("local_tokens_per_expert", torch.zeros(E), persistent=False)
    cls: Any = _named(_Block, "megatron.core.transformer.moe.moe_layer", "MoELayer")
    block = cls(
        router=router,
        experts=experts,
        config=shared,
        local_expert_indices=list(range(E)),
        shared_experts=nn.Linear(D, D),
    )
    return nn.ModuleDict({"moe": block})


def megablocks(name: str, *, stacked: bool) -> nn.Module:
    args = SimpleNamespace(moe_num_experts=E, moe_top_k=K, moe_capacity_factor=0.5, moe_expert_model_parallelism=False)
    shapes = {"w1": (E, D, F), "w2": (E, F, D)} if stacked else {"w1": (E * F, D), "w2": (E * F, D), "v1": (E * F, D)}
    mlp = _Holder(**{n: torch.randn(shape) for n, shape in shapes.items()})

    class Experts(_Holder):
        def expert_capacity(self, tokens: int) -> int:
            return int(args.moe_capacity_factor * K * tokens / E)

    cls: Any = _named(_Block, "megablocks.layers.moe" if name == "MoE" else "megablocks.layers.dmoe", name)
    router = _Router("layer", lambda s, w, i: (s, w, i))
    return nn.ModuleDict(
        {"moe": cls(router=router, experts=Experts(mlp=mlp, args=args, num_experts=E, bias=torch.zeros(D)))}
    )


def fastmoe(*, fused: bool) -> nn.Module:
    def expert(num: int) -> nn.Module:
        both = {
            n: _Holder(weight=torch.randn(num, *s), bias=torch.randn(num, s[0]))
            for n, s in (("htoh4", (F, D)), ("h4toh", (D, F)))
        }
        return _Holder(**both)

    def drop_every_third(_score: Tensor, weight_TK: Tensor, idx_TK: Tensor) -> tuple[Tensor, ...]:
        idx_S = idx_TK.reshape(-1).clone()
        idx_S[::3] = -1
        return idx_S, weight_TK

    base = _named(_Block, "fmoe.layers", "FMoE")
    cls: Any = type("FMoETransformerMLP", (base,), {"__module__": "fmoe.transformer"})
    gate = _Router("gate", drop_every_third)
    gate.capacity = (1.2, 2.4)  # type: ignore[assignment]
    experts = expert(E) if fused else nn.ModuleList(expert(1) for _ in range(E))
    return nn.ModuleDict({"moe": cls(gate=gate, experts=experts, num_expert=E, world_size=1, top_k=K)})


MODELS: dict[str, Callable[[], nn.Module]] = {
    "torchtitan": lambda: torchtitan(old=False),
    "torchtitan, old names": lambda: torchtitan(old=True),
    "SequentialMLP": lambda: megatron("SequentialMLP"),
    "TEGroupedMLP": lambda: megatron("TEGroupedMLP"),
    "GroupedMLP": lambda: megatron("GroupedMLP"),
    "MegaBlocks MoE": lambda: megablocks("MoE", stacked=True),
    "MegaBlocks dMoE": lambda: megablocks("dMoE", stacked=False),
    "FastMoE": lambda: fastmoe(fused=False),
    "FastMoE, fused": lambda: fastmoe(fused=True),
}


@pytest.fixture(params=list(MODELS))
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    return MODELS[request.param]()


def tokens() -> Tensor:
    return torch.randn(T, D, generator=torch.Generator().manual_seed(5)) + 0.5


def layer_of(operators: OperatorSet) -> MoELayerSpec:
    (layer,) = operators.layers
    return layer


def values(model: nn.Module, operators: OperatorSet, expert: int) -> dict[str, Tensor]:
    """What an expert's operator holds, by parameter."""
    params = dict(model.named_parameters())
    pieces = operators[f"moe/expert.{expert}"].slices
    return {s.fqn.removeprefix("moe."): params[s.fqn].detach().view(-1)[s.start : s.stop] for s in pieces}


def test_every_expert_and_the_router_are_operators(model: Any) -> None:
    """All parameters once; nothing but the router's in the router, nothing shared in an expert."""
    operators = discover(model)
    assert sum(op.numel for op in operators) == sum(p.numel() for p in model.parameters())
    assert [op.expert_idx for op in operators if op.kind == "expert"] == list(range(E))
    assert len({op.numel for op in operators if op.kind == "expert"}) == 1
    (router,) = [op for op in operators if op.kind == "router"]
    common = D if "moe.experts.bias" in dict(model.named_parameters()) else 0
    assert all(".gate." in s.fqn or ".router." in s.fqn or s.fqn == "moe.experts.bias" for s in router.slices)
    assert router.numel == E * D + common
    assert not any("shared" in s.fqn for op in operators if op.kind == "expert" for s in op.slices)


def test_tokens_are_counted_from_what_the_router_emits(model: Any) -> None:
    """Equal to a loop over its choices, after dropping where the library drops."""
    counter = LoadCounter(discover(model), model)
    counter.install()
    out = model["moe"](tokens())
    chosen = next((t for t in out if t.dtype == torch.int64), None)
    demand_E = out[1].sum(0) if chosen is None else torch.bincount(chosen[chosen >= 0].view(-1), minlength=E)
    drops = type(model["moe"]).__module__.startswith("megablocks") and type(model["moe"]).__name__ == "MoE"
    limit = model["moe"].experts.expert_capacity(T) if drops else T
    assert torch.equal(counter.read_and_reset(), demand_E.clamp(max=limit))
    model.eval()
    model["moe"](tokens())
    assert counter.read_and_reset().sum() == 0


def test_megatrons_grouped_matrices_are_cut_as_they_are_read() -> None:
    """`weight1.view(e, D, -1)[j]`, which are not its columns."""
    model: Any = megatron("GroupedMLP")
    weight1, weight2 = (p.detach() for p in (model["moe"].experts.weight1, model["moe"].experts.weight2))
    operators = discover(model)
    for j in range(E):
        held = values(model, operators, j)
        assert torch.equal(held["experts.weight1"], weight1.view(E, D, -1)[j].flatten())
        assert torch.equal(held["experts.weight2"], weight2.view(E, -1, D)[j].flatten())
    assert not torch.equal(values(model, operators, 1)["experts.weight1"], weight1[:, F : 2 * F].flatten())


def test_numbered_parameters_and_merged_rows_go_to_their_experts() -> None:
    """By the number in the name; by blocks of rows."""
    te: Any = megatron("TEGroupedMLP")
    assert set(values(te, discover(te), 3)) == {
        f"experts.linear_fc{i}.{n}3" for i in (1, 2) for n in ("weight", "bias")
    }
    blocks: Any = megablocks("dMoE", stacked=False)
    held = values(blocks, discover(blocks), 2)
    assert torch.equal(held["experts.mlp.v1"], blocks["moe"].experts.mlp.v1.detach()[2 * F : 3 * F].flatten())
    listed: Any = fastmoe(fused=False)
    assert set(values(listed, discover(listed), 1)) == {
        f"experts.1.{m}.{n}" for m in ("htoh4", "h4toh") for n in ("weight", "bias")
    }


@pytest.mark.parametrize("name", ["torchtitan", "torchtitan, old names", "SequentialMLP"])
def test_a_term_beside_the_bias_moves_choices_and_leaves_the_balance_state_alone(name: str) -> None:
    """Where the bias is a buffer of the router, and where the block hands it over."""
    torch.manual_seed(0)
    model: Any = MODELS[name]()
    operators = discover(model)
    view = layer_of(operators).bias
    assert view is not None
    counter = LoadCounter(operators, model)
    counter.install()
    model["moe"](tokens())
    before_E, trained = counter.read_and_reset(), view.trained(model)
    remove = view.add(model, torch.tensor([0.0, 0.0, 0.0, 2.0]))
    model["moe"](tokens())
    assert counter.read_and_reset()[3] == T > before_E[3]
    remove()
    model["moe"](tokens())
    assert torch.equal(counter.read_and_reset(), before_E)
    assert view.trained(model) is trained
    assert trained.abs().sum() == 0


@pytest.mark.parametrize("name", ["torchtitan", "SequentialMLP"])
def test_bias_and_running_load_belong_to_the_router(name: str) -> None:
    """The load is no part of a state dict: half-way to the next update of the bias it would be lost."""
    model: Any = MODELS[name]()
    (router,) = [op for op in discover(model) if op.kind == "router"]
    assert len(router.buffers) == 2
    assert set(router.buffers) - set(model.state_dict()), "one of them is not persistent"


def test_capacity_of_a_shared_config_is_one_value_for_the_model() -> None:
    """Megatron's and MegaBlocks' layers read it from there; FastMoE's gate has its own pair."""
    for make, scope in (
        (MODELS["GroupedMLP"], "model"),
        (MODELS["MegaBlocks MoE"], "model"),
        (MODELS["FastMoE"], "layer"),
    ):
        model: Any = make()
        view = layer_of(discover(model)).live_capacity
        assert view is not None
        before = view.get(model)
        view.set(model, view.scaled(before, [1.0, 1.5, 1.0, 1.0]))
        assert (view.scope, view.get(model) != before) == (scope, True)
        view.set(model, before)
        assert view.get(model) == before
    assert fastmoe(fused=True)["moe"].gate.capacity == (1.2, 2.4)  # type: ignore[index]


def test_dropped_tokens_of_megablocks_are_counted() -> None:
    """What an expert cannot take."""
    model: Any = megablocks("MoE", stacked=True)
    operators = discover(model)
    counter, capacity = LoadCounter(operators, model), LoadCounter(operators, model, "capacity")
    counter.install()
    capacity.install()
    model["moe"](tokens())
    assert capacity.read_and_reset().tolist() == [int(0.5 * K * T / E)] * E
    assert int(counter.read_and_reset().sum()) < K * T


def test_a_padded_megatron_layer_is_not_counted_and_its_capacity_not_touched() -> None:
    """Its map says what was computed, and its dispatcher holds copies of the factor."""
    layer = layer_of(discover(megatron("SequentialMLP", moe_pad_expert_input_to_capacity=True)))
    assert layer.count is None
    assert layer.live_capacity is None


def test_experts_spread_by_another_engine_are_refused() -> None:
    """Nothing here reduces their gradients: what was found, what was wanted, and what to do."""
    spread: Any = megatron("SequentialMLP")
    spread["moe"].local_expert_indices = [0, 1]
    parallel: Any = megablocks("dMoE", stacked=False)
    parallel["moe"].experts.args.moe_expert_model_parallelism = True
    fast: Any = fastmoe(fused=True)
    fast["moe"].world_size = 2
    for model, found, wanted in (
        (spread, "Megatron with 2 of 4 experts on this rank", "expert_model_parallel_size=1"),
        (parallel, "MegaBlocks with `moe_expert_model_parallelism=True`", "moe_expert_model_parallelism=False"),
        (fast, "FastMoE with `world_size=2`", "world_size=1"),
    ):
        with pytest.raises(UnknownLayout) as refused:
            discover(model)
        assert f"`moe` is a layer of {found}; only its own trainer" in str(refused.value)
        assert f"Build it with `{wanted}`, so that every rank has all experts, or take a `MoELayer`" in str(
            refused.value
        )


def test_matrices_of_an_unknown_class_are_not_guessed() -> None:
    """Merged rows look like any matrix: without the library's class they are refused by name."""
    model: Any = megablocks("dMoE", stacked=False)
    model["moe"].__class__ = _Block
    with pytest.raises(UnknownLayout, match=r"moe\.experts\.mlp"):
        discover(model)
    other: Any = megatron("Another")
    with pytest.raises(UnknownLayout, match="stored in none of the known ways"):
        discover(other)
