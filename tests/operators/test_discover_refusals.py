"""`discover` guesses nothing: what it cannot place is refused by name, and an adapter can describe it."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from lightning_moe_ckpt.errors import UnknownLayout
from lightning_moe_ckpt.operators import MoELayerSpec, ParameterIndex, discover, register_adapter, stacked_slices
from lightning_moe_ckpt.operators.adapters import unregister_adapter


class ListMoE(nn.Module):
    """Three experts in a ModuleList."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3, bias=False)
        self.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])


class Gpt(nn.Module):
    """Blocks of one MLP each between embedding and head."""

    def __init__(self, *mlps: nn.Module | None) -> None:
        super().__init__()
        self.emb = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList([nn.ModuleDict({"mlp": mlp or nn.Linear(4, 4)}) for mlp in mlps])
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 8, bias=False)


def test_experts_without_a_router_are_refused_by_name() -> None:
    """An unknown layout is an error that names the parameters and the remedy."""
    moe = ListMoE()
    del moe.gate
    with pytest.raises(UnknownLayout, match=r"blocks.0.mlp.experts.0.bias.*register_adapter"):
        discover(Gpt(moe))


def test_merged_experts_are_refused() -> None:
    """Experts merged into the rows of a matrix (DBRX) are never guessed."""
    moe = nn.Module()
    moe.experts = nn.Linear(4, 12)
    moe.router = nn.Linear(4, 3)
    with pytest.raises(UnknownLayout, match=r"blocks.0.mlp.experts.bias, blocks.0.mlp.experts.weight"):
        discover(Gpt(moe))


def test_a_module_that_says_it_has_experts_is_refused() -> None:
    """An attribute is a hint where names are none; the innermost module with it is named."""
    moe = nn.Module()
    moe.w = nn.Parameter(torch.zeros(3, 4, 4))
    moe.num_experts = 3  # type: ignore[assignment]
    model = Gpt(None, moe)
    model.num_experts = 3  # type: ignore[assignment]
    with pytest.raises(UnknownLayout, match=r"layout: blocks.1.mlp.w\. Describe"):
        discover(model)


def test_two_groups_of_experts_in_one_block_are_refused() -> None:
    """Their operators would have the same names."""
    moe = ListMoE()
    moe.more_experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
    with pytest.raises(UnknownLayout, match="two groups"):
        discover(Gpt(moe))


def test_what_cannot_be_placed_is_taken_whole_where_experts_are_not_needed(caplog: pytest.LogCaptureFixture) -> None:
    """By block, and said once; layers that are known stay layers, and blocks with two groups are one operator."""
    double, unknown = ListMoE(), nn.Module()
    double.more_experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
    unknown.w = nn.Parameter(torch.zeros(3, 4, 4))
    unknown.num_experts = 3  # type: ignore[assignment]
    with caplog.at_level(logging.INFO, logger="lightning_moe_ckpt"):
        found = discover(Gpt(unknown, ListMoE(), double), unknown="dense")
    assert [name for name in found.names if "expert" not in name] == [
        *("emb", "blocks.0", "blocks.1.mlp/router", "blocks.2", "norm", "head")
    ]
    said = [record.message for record in caplog.records if "taken whole" in record.message]
    assert len(said) == 1
    assert "blocks.0.mlp.w" in said[0]
    assert "blocks.2.mlp.experts.0.bias" in said[0]


def test_experts_on_other_ranks_are_never_taken_whole() -> None:
    """Every rank would have to hold all of them."""
    moe = ListMoE()
    del moe.gate
    with pytest.raises(UnknownLayout, match=r"blocks.0.mlp.experts.0.bias"):
        discover(Gpt(moe), ep_size=2, unknown="dense")


class Quantised(Tensor):
    """A tensor subclass."""


def test_parameters_that_are_no_flat_interval_are_refused_with_the_reason() -> None:
    """Each is named with its own reason."""
    model = nn.Module()
    model.a = nn.Parameter(torch.zeros(2, 3, 4, 4).contiguous(memory_format=torch.channels_last))
    model.c = nn.Parameter(torch.zeros(4).to(torch.float8_e8m0fnu), requires_grad=False)
    model.d = nn.Parameter(torch.zeros(4).as_subclass(Quantised))
    model.e = nn.LazyLinear(3)
    model.f = nn.Parameter(torch.zeros(4, 4).to_sparse())
    model.g = nn.Parameter(torch.zeros(4, dtype=torch.complex64))
    with pytest.raises(UnknownLayout) as error:
        discover(model)
    message = str(error.value)
    for reason in (
        "`a` is not contiguous",
        "`c` has dtype torch.float8",
        "`d` is a tensor subclass (Quantised)",
        "`e.weight` has no shape yet",
        "`f` has layout torch.sparse",
        "`g` has dtype torch.complex64",
    ):
        assert reason in message


def test_fsdp1_is_refused() -> None:
    """Its flat parameter cuts through operators."""
    model = nn.Linear(2, 2)
    model.weight._is_flat_param = True  # type: ignore[attr-defined]
    with pytest.raises(UnknownLayout, match="FSDP"):
        discover(model)


def test_meta_parameters_do_not_share() -> None:
    """A plan can be made for a model that does not fit this machine."""
    with torch.device("meta"):
        assert discover(Gpt(None)).names == ("emb", "blocks.0", "norm", "head")


# -- adapters


class MergedMoE(nn.Module):
    """Experts that no rule finds: stacked tensors beside the router's weight in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 3
        self.w1, self.w2 = nn.Parameter(torch.randn(3, 4, 6)), nn.Parameter(torch.randn(3, 6, 4))
        self.wg = nn.Parameter(torch.randn(4, 3))


def describe_merged(fqn: str, module: nn.Module, index: ParameterIndex) -> MoELayerSpec:
    stacked = {n: p for n, p in index.under(fqn).items() if p.ndim == 3}
    ids = (0, 1, 2)
    return MoELayerSpec(
        fqn=fqn,
        num_experts=3,
        local_expert_ids=ids,
        experts=stacked_slices(stacked, ids, 3),
        router=(f"{fqn}.wg",),
    )


@pytest.fixture
def merged() -> Iterator[type[nn.Module]]:
    yield MergedMoE
    unregister_adapter(MergedMoE)


def test_an_adapter_describes_an_unknown_layout(merged: type[nn.Module]) -> None:
    """The error says what to do; doing it helps, for subclasses too."""
    model = Gpt(type("Sub", (merged,), {})())
    with pytest.raises(UnknownLayout):
        discover(model)
    register_adapter(merged, describe_merged)
    operators = discover(model)
    assert "blocks.0.mlp/expert.2" in operators
    assert operators["blocks.0.mlp/router"].numel == 12
    assert sum(op.numel for op in operators) == sum(p.numel() for p in model.parameters())


def test_an_adapter_can_declare_a_block_dense(merged: type[nn.Module]) -> None:
    """Experts that every token uses are no routed experts."""
    register_adapter(merged, lambda *_: None)
    assert discover(Gpt(merged())).names == ("emb", "blocks.0", "norm", "head")


@pytest.mark.parametrize("router", ["blocks.0.mlp.nothing", "blocks.0.mlp.w1"])
def test_an_adapter_that_errs_is_refused(merged: type[nn.Module], router: str) -> None:
    """Names that do not exist or are claimed twice would lose or double state."""

    def describe(fqn: str, module: nn.Module, index: ParameterIndex) -> MoELayerSpec:
        spec = copy.copy(describe_merged(fqn, module, index))
        object.__setattr__(spec, "router", (router,))
        return spec

    register_adapter(merged, describe)
    with pytest.raises(UnknownLayout, match=router):
        discover(Gpt(merged()))


def test_an_adapter_that_leaves_a_gap_is_refused(merged: type[nn.Module]) -> None:
    """A stacked tensor must be covered by its experts."""

    def describe(fqn: str, module: nn.Module, index: ParameterIndex) -> MoELayerSpec:
        spec = describe_merged(fqn, module, index)
        experts = {0: spec.experts[0], 2: spec.experts[2]}
        return MoELayerSpec(
            fqn=fqn, num_experts=3, local_expert_ids=(0, 2), experts=experts, router=spec.router, holders="stage"
        )

    register_adapter(merged, describe)
    with pytest.raises(UnknownLayout, match="Element 24"):
        discover(Gpt(merged()))
