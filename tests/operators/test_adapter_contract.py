"""The shipped contract of adapters, passed by our own layers, Hugging Face's and LitGPT's; and failed by wrong adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_moe_ckpt.moe import MoELayer
from lightning_moe_ckpt.operators import (
    AttributeCapacity,
    CountTap,
    MoELayerSpec,
    OperatorSet,
    discover,
    register_adapter,
    stacked_slices,
)
from lightning_moe_ckpt.operators.adapters import unregister_adapter
from lightning_moe_ckpt.testing import AdapterContract
from operators._families import FAMILIES

D, E, T = 8, 4, 24


class Stack(nn.Module):
    """Two layers around each other, and a head."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.stem, self.layers, self.head = nn.Linear(D, D), nn.ModuleList([build(), build()]), nn.Linear(D, D)

    def forward(self, x_TD: Tensor) -> Tensor:
        x_TD = self.stem(x_TD)
        for layer in self.layers:
            x_TD = x_TD + layer(x_TD)
        out_TD: Tensor = self.head(x_TD)
        return out_TD


class Tokens(AdapterContract):
    """Layers that take `[T, D]`."""

    build: Callable[[], nn.Module]

    def make_model(self) -> nn.Module:
        return Stack(self.build)

    def loss(self, model: nn.Module, seed: int) -> Tensor:
        out_TD: Tensor = model(torch.randn(T, D, generator=torch.Generator().manual_seed(seed)))
        return out_TD.square().mean()


class TestOurLayer(Tokens):
    """`MoELayer`, dropless, with noise, and with less capacity than tokens."""

    @pytest.fixture(autouse=True, params=[{}, {"top_k": 1, "noisy_gate": True}, {"capacity_factor": 0.75}])
    def choose(self, request: pytest.FixtureRequest) -> None:
        self.build = partial(MoELayer, D, 6, E, **request.param)


class Listed(nn.Module):
    """Experts in a list, top-1, of which those without tokens do not run."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(D, E), nn.ModuleList([nn.Linear(D, D) for _ in range(E)])

    def forward(self, x_TD: Tensor) -> Tensor:
        weight_T, idx_T = self.gate(x_TD).softmax(-1).max(-1)
        out_TD = torch.zeros_like(x_TD)
        for j, expert in enumerate(self.experts):
            rows = (idx_T == j).nonzero()[:, 0]
            if len(rows):
                out_TD = out_TD.index_add(0, rows, expert(x_TD[rows]) * weight_T[rows, None])
        return out_TD


class TestAListOfExperts(Tokens):
    """Written by hand."""

    build = Listed


FAST = ("deepseek_v3", "dbrx", "gpt_oss", "llama4", "switch")
"""Of each way to store and to route, one; the others differ in names."""


class TestHuggingFace(AdapterContract):
    """Every family, as it is."""

    @pytest.fixture(
        autouse=True, params=[n if n in FAST else pytest.param(n, marks=pytest.mark.soak) for n in FAMILIES]
    )
    def choose(self, request: pytest.FixtureRequest) -> None:
        self.family = FAMILIES[request.param][0]

    def make_model(self) -> nn.Module:
        model = self.family()
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.1)
        return model

    def loss(self, model: nn.Module, seed: int) -> Tensor:
        tokens = torch.randint(1, 64, (2, 8), generator=torch.Generator().manual_seed(seed))
        loss: Tensor = model(input_ids=tokens, labels=tokens).loss
        return loss


class TestLitGPT(AdapterContract):
    """Its Mixtral, and its DeepSeek with groups and a correction bias."""

    @pytest.fixture(autouse=True, params=[False, True])
    def choose(self, request: pytest.FixtureRequest) -> None:
        pytest.importorskip("litgpt.model", reason="LitGPT is not installed: pip install --no-deps litgpt")
        self.grouped = request.param

    def make_model(self) -> nn.Module:
        from litgpt.config import Config
        from litgpt.model import GPT

        shape = {"n_layer": 2, "n_embd": 16, "n_head": 2, "block_size": 16, "intermediate_size": 32}
        experts: dict[str, Any] = {"mlp_class_name": "LLaMAMoE", "n_expert": 4, "n_expert_per_token": 2}
        if self.grouped:
            experts |= {"n_expert_groups": 2, "n_topk_groups": 1, "n_topk_scores_per_group": 1, "norm_topk_prob": True}
            experts |= {"n_shared_expert": 1, "moe_intermediate_size": 16}
        options = {"vocab_size": 64, "padded_vocab_size": 64, "norm_class_name": "RMSNorm", "bias": False}
        model: nn.Module = GPT(Config(**shape, **options, **experts))
        for parameter in model.parameters():  # its grouped router leaves its weight as memory is
            nn.init.normal_(parameter, std=0.1)
        return model

    def test_its_grouped_router_has_a_bias_view(self, operators: OperatorSet) -> None:
        """By the name that LitGPT took from DeepSeek; a plain gate has none."""
        views = [layer.bias for layer in operators.layers]
        assert [view is not None for view in views] == [self.grouped] * 2
        assert {view.attribute for view in views if view is not None} <= {"e_score_correction_bias"}

    def loss(self, model: nn.Module, seed: int) -> Tensor:
        tokens = torch.randint(1, 64, (2, 8), generator=torch.Generator().manual_seed(seed))
        logits: Tensor = model(tokens)
        loss: Tensor = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        return loss


class NanochatRouter(nn.Module):
    """Chooses by sigmoid scores plus a bias that it trains by its own count, and says how many rows go to each expert."""

    expert_bias: Tensor
    tokens_per_expert_counter: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.register_buffer("expert_bias", 0.01 * torch.arange(float(E)))
        self.register_buffer("tokens_per_expert_counter", torch.zeros(E))

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        score_TE = self.gate(x_TD).sigmoid()
        idx_TK = (score_TE + self.expert_bias).topk(2, sorted=False).indices
        rows_E = torch.histc(idx_TK.float(), bins=E, min=0, max=E)
        if self.training:
            self.tokens_per_expert_counter += rows_E
        return score_TE.gather(1, idx_TK), idx_TK, rows_E


class NanochatExperts(nn.Module):
    """Stacked, and handed rows in their order instead of indices."""

    def __init__(self) -> None:
        super().__init__()
        self.w_up, self.w_down = nn.Parameter(torch.randn(E, 6, D)), nn.Parameter(torch.randn(E, D, 6))

    def forward(self, x_SD: Tensor, rows_E: Tensor) -> Tensor:
        rows = torch.split(x_SD, [int(rows) for rows in rows_E])
        return torch.cat(
            [(x @ up.t()).relu() @ down.t() for x, up, down in zip(rows, self.w_up, self.w_down, strict=True)]
        )


class NanochatBlock(nn.Module):
    """Written after the attributes of nanochat's stacked `MoE`."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts, self.shared_expert = NanochatRouter(), NanochatExperts(), nn.Linear(D, D)

    def forward(self, x_TD: Tensor) -> Tensor:
        weight_TK, idx_TK, rows_E = self.router(x_TD)
        order_S = idx_TK.flatten().argsort(stable=True)
        y_SD = self.experts(x_TD[order_S // 2], rows_E) * weight_TK.flatten()[order_S, None]
        out_TD: Tensor = self.shared_expert(x_TD).index_add(0, order_S // 2, y_SD)
        return out_TD


class TestNanochat(Tokens):
    """A bias and a running count in the router; experts that are not told which of them they are."""

    build = NanochatBlock


class ScatteredExperts(nn.Module):
    """ScatterMoE's `ParallelExperts`, by loops instead of kernels."""

    def __init__(self, num_in: int, num_out: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(E, num_out, num_in))
        self.bias = nn.Parameter(torch.randn(E, num_out)) if bias else None

    def forward(self, x_SD: Tensor, idx_S: Tensor) -> Tensor:
        out_SF = torch.einsum("sd,sfd->sf", x_SD, self.weight[idx_S])
        return out_SF if self.bias is None else out_SF + self.bias[idx_S]


class ScatterMLP(nn.Module):
    """Written after the attributes of ScatterMoE's `GLUMLP`, and of its `MLP`."""

    def __init__(self, *, gated: bool) -> None:
        super().__init__()
        self.num_experts, self.top_k, self.gated = E, 2, gated
        self.experts = ScatteredExperts(D, 12 if gated else 6, bias=not gated)
        self.output_experts = ScatteredExperts(6, D, bias=not gated)

    def forward(self, x_TD: Tensor, weight_TK: Tensor, idx_TK: Tensor) -> Tensor:
        idx_S = idx_TK.flatten()
        h_SF = self.experts(x_TD.repeat_interleave(self.top_k, 0), idx_S)
        if self.gated:
            h_SF, gate_SF = h_SF.chunk(2, -1)
            h_SF = h_SF * nn.functional.silu(gate_SF)
        y_SD = self.output_experts(h_SF.relu(), idx_S) * weight_TK.flatten()[:, None]
        out_TD: Tensor = y_SD.view(len(x_TD), self.top_k, D).sum(1)
        return out_TD


GLUMLP = type("GLUMLP", (ScatterMLP,), {"__module__": "scattermoe.mlp"})
MLP = type("MLP", (ScatterMLP,), {"__module__": "scattermoe.mlp"})


class ScatterBlock(nn.Module):
    """A model's block around them, with the router that they lack."""

    def __init__(self, *, gated: bool) -> None:
        super().__init__()
        self.gate, self.moe_mlp = nn.Linear(D, E, bias=False), (GLUMLP if gated else MLP)(gated=gated)

    def forward(self, x_TD: Tensor) -> Tensor:
        weight_TK, idx_TK = self.gate(x_TD).softmax(-1).topk(2)
        out_TD: Tensor = self.moe_mlp(x_TD, weight_TK, idx_TK)
        return out_TD


class TestScatterMoE(Tokens):
    """Both of its modules, with biases and without."""

    @pytest.fixture(autouse=True, params=[True, False], ids=["GLUMLP", "MLP"])
    def choose(self, request: pytest.FixtureRequest) -> None:
        self.build = partial(ScatterBlock, gated=request.param)


def test_a_router_beside_scattered_experts_is_theirs() -> None:
    """What is called like a router and emits a value per expert; what only looks like one stays dense."""
    model = Stack(partial(ScatterBlock, gated=True))
    model.layers[0].router_norm = nn.Linear(D, D)
    router = discover(model)["layers.0.moe_mlp/router"]
    assert [piece.fqn for piece in router.slices] == ["layers.0.gate.weight"]


class DeepSpeedBlock(nn.Module):
    """DeepSpeed's layer, of whose outputs a model takes the first and adds the second to its loss."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        layer = pytest.importorskip("deepspeed.moe.layer", reason="DeepSpeed is not installed: see the Makefile")
        expert = nn.Sequential(nn.Linear(D, 6), nn.GELU(), nn.Linear(6, D))
        self.moe = layer.MoE(D, expert, num_experts=E, min_capacity=1, **options)

    def forward(self, x_TD: Tensor) -> Tensor:
        out_TD, aux, _ = self.moe(x_TD)
        summed_TD: Tensor = out_TD + 0.01 * aux
        return summed_TD


class TestDeepSpeed(Tokens):
    """Top-1 and top-2, with less capacity than tokens and with a residual expert."""

    @pytest.fixture(
        autouse=True, params=[{"k": 1, "capacity_factor": 0.75}, {"k": 2, "use_residual": True, "capacity_factor": 0.5}]
    )
    def choose(self, request: pytest.FixtureRequest) -> None:
        self.build = partial(DeepSpeedBlock, **request.param)


# -- what a wrong adapter meets


class Bare(nn.Module):
    """Experts as bare parameters beside the router: an adapter has to say where they lie and who runs."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.pick = nn.Linear(D, E), Pick()
        self.up, self.down = nn.Parameter(torch.randn(E, D, D)), nn.Parameter(torch.randn(E, D, D))

    def forward(self, x_TD: Tensor) -> Tensor:
        weight_T1, idx_T1 = self.pick(self.gate(x_TD))
        idx_T = idx_T1[:, 0]
        out_TD: Tensor = torch.einsum("td,tdf,tfe->te", x_TD, self.up[idx_T], self.down[idx_T]) * weight_T1
        return out_TD


class Pick(nn.Module):
    def forward(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        weight_T1, idx_T1 = logits_TE.softmax(-1).max(-1, keepdim=True)
        return weight_T1, idx_T1


@dataclass(frozen=True)
class PickTap:
    """Counts what `pick` returns, with the mistakes that are asked for."""

    pick: str
    in_evaluation: bool = False
    again: bool = False

    def install(self, module: nn.Module, counts: Any) -> list[RemovableHandle]:
        def after(pick: nn.Module, _args: object, out: tuple[Tensor, Tensor]) -> None:
            if (pick.training or self.in_evaluation) and (self.again or torch._C._current_graph_task_id() == -1):
                counts.add_indices(out[1])

        return [module.get_submodule(self.pick).register_forward_hook(after)]

    def drain(self, module: nn.Module, counts: Any) -> None:
        pass


class Wrong(Tokens):
    build = Bare


def describe(tap: Callable[[str], CountTap], shift: int, fqn: str, module: nn.Module, index: Any) -> MoELayerSpec:
    ids = tuple(range(E))
    experts = stacked_slices({n: p for n, p in index.under(fqn).items() if n.endswith(("up", "down"))}, ids, E)
    return MoELayerSpec(
        fqn=fqn,
        num_experts=E,
        local_expert_ids=ids,
        experts={expert: experts[(expert + shift) % E] for expert in ids},
        router=tuple(index.under(f"{fqn}.gate")),
        count=tap(f"{fqn}.pick"),
    )


@contextmanager
def wrong(tap: Callable[[str], CountTap] = PickTap, shift: int = 0) -> Iterator[tuple[Wrong, nn.Module, OperatorSet]]:
    register_adapter(Bare, partial(describe, tap, shift))
    torch.manual_seed(0)
    model = Wrong().make_model().train()
    try:
        yield Wrong(), model, discover(model)
    finally:
        unregister_adapter(Bare)


def test_a_right_adapter_passes() -> None:
    """What the others below do wrong is all that is wrong with them."""
    with wrong() as (contract, model, operators):
        contract.test_every_parameter_is_in_exactly_one_operator(model, operators)
        contract.test_counts_are_the_tokens_that_experts_process(model, operators)
        contract.test_recomputation_is_not_counted_again(model, operators, use_reentrant=False)
        contract.test_one_step_proves_the_counts(model, operators)
        contract.test_evaluation_is_not_counted(model, operators)


def test_slices_of_another_expert_are_found() -> None:
    """All parameters are placed once and all tokens are counted, but not of whom it is said."""
    with wrong(shift=1) as (contract, model, operators):
        contract.test_every_parameter_is_in_exactly_one_operator(model, operators)
        with pytest.raises(AssertionError, match=r"`layers\.0` processed .* were counted"):
            contract.test_counts_are_the_tokens_that_experts_process(model, operators)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_tap_that_counts_recomputation_is_found(use_reentrant: bool) -> None:
    """It counts right until activations are recomputed."""
    with wrong(partial(PickTap, again=True)) as (contract, model, operators):
        contract.test_counts_are_the_tokens_that_experts_process(model, operators)
        with pytest.raises(AssertionError):
            contract.test_recomputation_is_not_counted_again(model, operators, use_reentrant=use_reentrant)


def test_a_tap_that_counts_evaluation_is_found() -> None:
    """Validation would make experts popular that no step trains."""
    validated = wrong(partial(PickTap, in_evaluation=True))
    with validated as (contract, model, operators), pytest.raises(AssertionError, match="in evaluation"):
        contract.test_evaluation_is_not_counted(model, operators)


def test_a_bias_view_of_another_attribute_is_found() -> None:
    """A running count beside the bias: a term there changes no choice."""
    torch.manual_seed(0)
    model = Stack(NanochatBlock).train()
    operators = discover(model)
    deaf = [
        replace(layer, bias=replace(layer.bias, attribute="tokens_per_expert_counter"))
        for layer in operators.layers
        if layer.bias is not None
    ]
    assert len(deaf) == 2
    with pytest.raises(AssertionError, match=r"`layers\.0` takes no notice of its bias"):
        TestNanochat().test_a_bias_view_moves_choices_and_leaves_the_trained_bias_alone(
            model, replace(operators, layers=tuple(deaf))
        )


def test_a_capacity_view_of_another_attribute_is_found() -> None:
    """Whoever sets it changes nothing."""

    class Deaf(Tokens):
        build = partial(MoELayer, D, 6, E, capacity_factor=0.75)

    torch.manual_seed(0)
    model = Deaf().make_model().train()
    operators = discover(model)
    deaf = [replace(each, live_capacity=AttributeCapacity(each.fqn, ("hidden_capacity",))) for each in operators.layers]
    for layer in deaf:
        model.get_submodule(layer.fqn).hidden_capacity = 1.0  # type: ignore[assignment]
    with pytest.raises(AssertionError, match=r"`layers\.0` takes no notice of its capacity"):
        Deaf().test_a_capacity_view_changes_the_live_capacity(model, replace(operators, layers=tuple(deaf)))
