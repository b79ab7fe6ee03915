"""Megatron-core's `MoELayer` with each way in which it has kept experts.

`SequentialMLP` has a list of modules, `TEGroupedMLP` parameters `weight0`, `weight1`, ... in one module, and the older
`GroupedMLP` two matrices that it reads as `weight1.view(e, D, -1)`: flat intervals, not columns.

Source: megatron-core 0.16.1, `core/transformer/moe/moe_layer.py`, `experts.py`, `router.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_moe_ckpt.errors import UnknownLayout
from lightning_moe_ckpt.operators._bias import BiasView
from lightning_moe_ckpt.operators._capacity import AttributeCapacity
from lightning_moe_ckpt.operators._layers import MoELayerSpec
from lightning_moe_ckpt.operators._parameters import ParameterIndex
from lightning_moe_ckpt.operators._taps import MaskTap
from lightning_moe_ckpt.operators._types import ParamSlice
from lightning_moe_ckpt.operators.adapters._pieces import intervals, refuse_spread, under, wholes
from lightning_moe_ckpt.operators.adapters._registry import AdapterFactory

_NUMBERED = re.compile(r"(?:weight|bias)(\d+)$")
_FACTOR = "config.moe_expert_capacity_factor"


def describe_megatron(fqn: str, block: nn.Module, index: ParameterIndex) -> MoELayerSpec:
    """The spec of a `MoELayer`; shared experts are dense.

    Raises:
        UnknownLayout: its experts are spread over ranks, or stored in none of the known ways.
    """
    layer: Any = block
    num_experts, router = int(layer.config.num_moe_experts), under(fqn, "router")
    num_local = len(layer.local_expert_indices)
    if num_local != num_experts:
        found = f"{num_local} of {num_experts} experts on this rank"
        refuse_spread(fqn, "Megatron", found=found, wanted="`expert_model_parallel_size=1`")
    # Padded to the capacity, the map says what was computed, and the dispatcher keeps a copy of the factor.
    padded = bool(getattr(layer.config, "moe_pad_expert_input_to_capacity", False))
    biased = getattr(layer.router, "expert_bias", None) is not None
    return MoELayerSpec(
        fqn=fqn,
        num_experts=num_experts,
        local_expert_ids=tuple(range(num_experts)),
        experts=_cut(under(fqn, "experts"), layer.experts, index, num_experts),
        router=tuple(index.under(router)),
        router_buffers=tuple(under(router, name) for name, _ in layer.router.named_buffers()),
        top_k=int(layer.config.moe_router_topk),
        count=None if padded else MaskTap(router, output=1),
        live_capacity=None if padded else AttributeCapacity(router, (_FACTOR,), "model"),
        bias=BiasView(layer=fqn, owner=router, attribute="expert_bias") if biased else None,
    )


def _cut(fqn: str, experts: nn.Module, index: ParameterIndex, num_experts: int) -> dict[int, tuple[ParamSlice, ...]]:
    params = index.under(fqn)
    if isinstance(getattr(experts, "local_experts", None), nn.ModuleList):
        return wholes([index.under(f"{fqn}.local_experts.{expert}") for expert in range(num_experts)])
    if any(base.__name__ == "GroupedMLP" for base in type(experts).__mro__):
        return intervals(params, num_experts)
    numbers = {name: int(match.group(1)) for name in params if (match := _NUMBERED.search(name))}
    if set(numbers) == set(params) and set(numbers.values()) == set(range(num_experts)):
        return wholes([{n: p for n, p in params.items() if numbers[n] == expert} for expert in range(num_experts)])
    raise UnknownLayout(
        f"`{fqn}` is {type(experts).__name__} of Megatron, whose parameters {sorted(params)[:4]} are stored in none of the "
        "known ways (a list, numbered parameters, two matrices). Describe the layer with `register_adapter`."
    )


MEGATRON: Mapping[str, AdapterFactory] = {"MoELayer": describe_megatron}
"""By class of the block."""
