"""ScatterMoE's `MLP` and `GLUMLP`: two modules with one stacked matrix each, which are handed what a router has chosen.

The library has no router; the model's own is looked for beside the module. It is called like one, or it stays dense.

Source: ScatterMoE (commit 2d15f31), `scattermoe/mlp.py`, `scattermoe/parallel_experts.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_moe_ckpt.operators._layers import MoELayerSpec, stacked_slices
from lightning_moe_ckpt.operators._parameters import ParameterIndex
from lightning_moe_ckpt.operators._popularity_taps import CapacityTap
from lightning_moe_ckpt.operators._taps import IndexTap
from lightning_moe_ckpt.operators.adapters._pieces import under
from lightning_moe_ckpt.operators.adapters._registry import AdapterFactory
from lightning_moe_ckpt.operators.adapters._routers import find_router_beside

_MATRICES = ("experts", "output_experts")


def describe_scattermoe(fqn: str, mlp: nn.Module, index: ParameterIndex) -> MoELayerSpec:
    """The spec of an `MLP` or `GLUMLP`; it drops nothing."""
    layer: Any = mlp
    num_experts = int(layer.num_experts)
    ids = tuple(range(num_experts))
    params = {name: param for matrix in _MATRICES for name, param in index.under(under(fqn, matrix)).items()}
    return MoELayerSpec(
        fqn=fqn,
        num_experts=num_experts,
        local_expert_ids=ids,
        experts=stacked_slices(params, ids, num_experts),
        router=find_router_beside(fqn, num_experts, index),
        top_k=int(layer.top_k),
        count=IndexTap(fqn),
        capacity=CapacityTap(fqn),
    )


SCATTERMOE: Mapping[str, AdapterFactory] = {"MLP": describe_scattermoe, "GLUMLP": describe_scattermoe}
"""By class of the block."""
