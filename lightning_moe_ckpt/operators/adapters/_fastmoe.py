"""FastMoE's `FMoE` and `FMoETransformerMLP`: a list of experts, or one module with all of them stacked.

A list may hold modules that are written for stacks, with one expert each.

Source: FastMoE (commit ee3c561), `fmoe/layers.py`, `fmoe/transformer.py`, `fmoe/gates/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_moe_ckpt.operators._capacity import AttributeCapacity
from lightning_moe_ckpt.operators._demand import ChoiceTap
from lightning_moe_ckpt.operators._layers import MoELayerSpec, stacked_slices
from lightning_moe_ckpt.operators._parameters import ParameterIndex
from lightning_moe_ckpt.operators.adapters._pieces import refuse_spread, under, wholes
from lightning_moe_ckpt.operators.adapters._registry import AdapterFactory


def describe_fastmoe(fqn: str, block: nn.Module, index: ParameterIndex) -> MoELayerSpec:
    """The spec of a layer whose experts are all on this rank.

    Raises:
        UnknownLayout: they are not.
    """
    layer: Any = block
    num_experts, experts, gate = int(layer.num_expert), under(fqn, "experts"), under(fqn, "gate")
    if layer.world_size > 1:
        refuse_spread(fqn, "FastMoE", found=f"`world_size={layer.world_size}`", wanted="`world_size=1`")
    ids = tuple(range(num_experts))
    if isinstance(layer.experts, nn.ModuleList):
        slices = wholes([index.under(f"{experts}.{expert}") for expert in ids])
    else:
        slices = stacked_slices(index.under(experts), ids, num_experts)
    return MoELayerSpec(
        fqn=fqn,
        num_experts=num_experts,
        local_expert_ids=ids,
        experts=slices,
        router=tuple(index.under(gate)),
        top_k=int(layer.top_k),
        # A gate with a capacity writes -1 in the place of what it drops.
        count=ChoiceTap(gate),
        live_capacity=AttributeCapacity(gate, ("capacity",)) if hasattr(layer.gate, "capacity") else None,
        graphs=((gate, "loss"),),
    )


FASTMOE: Mapping[str, AdapterFactory] = {"FMoE": describe_fastmoe}
"""By class of the block; transformers' layers derive from it."""
