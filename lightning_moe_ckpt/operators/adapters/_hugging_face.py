"""Blocks of Hugging Face transformers that detection by shape gets wrong. The others are found by their convention.

Source: transformers 5.23, `models/*/modeling_*.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from torch import nn

from lightning_moe_ckpt.errors import UnknownLayout
from lightning_moe_ckpt.operators._layers import MoELayerSpec, merged_slices, stacked_slices
from lightning_moe_ckpt.operators._parameters import ParameterIndex
from lightning_moe_ckpt.operators._popularity_taps import CapacityTap, ProbabilityTap
from lightning_moe_ckpt.operators._taps import IndexTap, MaskTap
from lightning_moe_ckpt.operators.adapters._registry import AdapterFactory
from lightning_moe_ckpt.operators.adapters._routers import find_top_k


def describe_llama4(fqn: str, block: nn.Module, index: ParameterIndex) -> MoELayerSpec:
    """Llama 4: every expert runs on every token, scaled by a score that is zero where the router did not choose it."""
    experts = index.under(f"{fqn}.experts")
    num_experts = next(iter(experts.values())).shape[0]
    ids, router = tuple(range(num_experts)), f"{fqn}.router"
    return MoELayerSpec(
        fqn=fqn,
        num_experts=num_experts,
        local_expert_ids=ids,
        experts=stacked_slices(experts, ids, num_experts),
        router=tuple(index.under(router)),
        top_k=find_top_k(block),
        count=MaskTap(router, output=0),
        probabilities=ProbabilityTap(router, "sigmoid", output=1),
        capacity=CapacityTap(fqn),
    )


def describe_dbrx(fqn: str, block: nn.Module, index: ParameterIndex) -> MoELayerSpec:
    """DBRX: matrices `[E * F, D]` with the rows of one expert after those of another."""
    experts, gate = f"{fqn}.experts", f"{fqn}.router.layer"
    params = index.under(experts)
    num_experts = int(block.get_submodule("router.layer").out_features)  # type: ignore[arg-type]  # nn.Linear
    ids = tuple(range(num_experts))
    return MoELayerSpec(
        fqn=fqn,
        num_experts=num_experts,
        local_expert_ids=ids,
        experts=merged_slices(params, ids, num_experts),
        router=tuple(index.under(gate)),
        top_k=find_top_k(block),
        count=IndexTap(experts),
        probabilities=ProbabilityTap(gate),
        capacity=CapacityTap(experts),
    )


def refuse_nllb(fqn: str, block: nn.Module, index: ParameterIndex) -> NoReturn:
    """NLLB-MoE: routed experts of which two ever run."""
    raise UnknownLayout(
        f"`{fqn}` is {type(block).__name__} of transformers 5, which hands its experts a mask of zeros and ones where they "
        "want indices: only experts 0 and 1 ever run, whatever the router says. Train another model; or, if your version "
        "of it has been corrected, describe the block with `register_adapter(NllbMoeSparseMLP, factory)`."
    )


HUGGING_FACE: Mapping[str, AdapterFactory] = {
    "Llama4TextMoe": describe_llama4,
    "DbrxFFN": describe_dbrx,
    "NllbMoeSparseMLP": refuse_nllb,
}
"""By class of the block."""
