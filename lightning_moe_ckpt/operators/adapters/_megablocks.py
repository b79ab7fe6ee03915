"""MegaBlocks' `MoE` and `dMoE`: matrices with an expert dimension, or with the rows of one expert after another's.

Source: MegaBlocks (commit 78eea65), `layers/moe.py`, `layers/mlp.py`, `layers/glu.py`, `layers/router.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_moe_ckpt.errors import UnknownLayout
from lightning_moe_ckpt.operators._capacity import AttributeCapacity
from lightning_moe_ckpt.operators._demand import ChoiceTap
from lightning_moe_ckpt.operators._layers import MoELayerSpec, merged_slices
from lightning_moe_ckpt.operators._parameters import ParameterIndex
from lightning_moe_ckpt.operators._popularity_taps import CapacityTap, ProbabilityTap
from lightning_moe_ckpt.operators.adapters._pieces import refuse_spread, under
from lightning_moe_ckpt.operators.adapters._registry import AdapterFactory

_MATRICES = ("w1", "w2", "v1")


def describe_megablocks(fqn: str, block: nn.Module, index: ParameterIndex) -> MoELayerSpec:
    """The spec of a `MoE`, which drops over its capacity, or of a `dMoE`, which drops nothing.

    Raises:
        UnknownLayout: its experts are spread over ranks, or are matrices of other names.
    """
    layer: Any = block
    args, experts, router = layer.experts.args, under(fqn, "experts"), under(fqn, "router")
    num_experts = int(args.moe_num_experts)
    mlp = index.under(f"{experts}.mlp")
    if {name.rpartition(".")[2] for name in mlp} - set(_MATRICES):
        raise UnknownLayout(f"`{experts}.mlp` of MegaBlocks has {sorted(mlp)}, known are {_MATRICES}.")
    if args.moe_expert_model_parallelism:
        switch = "moe_expert_model_parallelism"
        refuse_spread(fqn, "MegaBlocks", found=f"`{switch}=True`", wanted=f"`{switch}=False`")
    dropless = any(base.__name__ == "dMoE" for base in type(block).__mro__)
    ids, limit = tuple(range(num_experts)), None if dropless else experts
    return MoELayerSpec(
        fqn=fqn,
        num_experts=num_experts,
        local_expert_ids=ids,
        experts=merged_slices(mlp, ids, num_experts),
        # The bias that all experts share has no expert to go with.
        router=(*index.under(router), *(name for name in index.under(experts) if name not in mlp)),
        top_k=int(args.moe_top_k),
        count=ChoiceTap(router, limit),
        probabilities=ProbabilityTap(under(router, "layer")),
        capacity=CapacityTap(fqn) if dropless else ChoiceTap(router, limit, "capacity"),
        dropped=None if dropless else ChoiceTap(router, limit, "dropped"),
        live_capacity=None if dropless else AttributeCapacity(experts, ("args.moe_capacity_factor",), "model"),
    )


MEGABLOCKS: Mapping[str, AdapterFactory] = {"MoE": describe_megablocks, "dMoE": describe_megablocks}
"""By class of the block."""
