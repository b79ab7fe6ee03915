"""torchtitan's `MoE`: stacked experts, a router beside them, and the balance state on the block itself.

Its experts are handed counts, not indices, so what the router emits is counted. Both the running load and the bias are
buffers of the block, the first not persistent; they are captured like every buffer.

Source: torchtitan 0.3.0, `models/common/moe.py`; before 0.3 `models/moe.py`, where experts were `experts.w1`.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from lightning_moe_ckpt.errors import UnknownLayout
from lightning_moe_ckpt.operators._bias import BiasView
from lightning_moe_ckpt.operators._demand import ChoiceTap
from lightning_moe_ckpt.operators._layers import MoELayerSpec, stacked_slices
from lightning_moe_ckpt.operators._parameters import ParameterIndex
from lightning_moe_ckpt.operators._popularity_taps import CapacityTap, ProbabilityTap
from lightning_moe_ckpt.operators.adapters._pieces import first_present, under
from lightning_moe_ckpt.operators.adapters._registry import AdapterFactory
from lightning_moe_ckpt.operators.adapters._routers import find_top_k

_EXPERTS = ("routed_experts", "experts")
_BIASES, _LOADS = ("expert_bias_E", "expert_bias"), ("tokens_per_expert_E", "tokens_per_expert")


def describe_torchtitan(fqn: str, block: nn.Module, index: ParameterIndex) -> MoELayerSpec:
    """The spec of a `MoE`, by the names of before and after the experts moved into `routed_experts`."""
    name, router = first_present(block, _EXPERTS), under(fqn, "router")
    params = index.under(under(fqn, name)) if name is not None else {}
    if not params:
        raise UnknownLayout(f"`{fqn}` is a torchtitan MoE without parameters in any of {_EXPERTS}.")
    num_experts = next(iter(params.values())).shape[0]
    ids = tuple(range(num_experts))
    bias = first_present(block, _BIASES)
    kept = [each for each in (bias, first_present(block, _LOADS)) if each is not None]
    return MoELayerSpec(
        fqn=fqn,
        num_experts=num_experts,
        local_expert_ids=ids,
        experts=stacked_slices(params, ids, num_experts),
        router=tuple(index.under(router)),
        router_buffers=tuple(under(fqn, each) for each in kept if isinstance(getattr(block, each), Tensor)),
        top_k=find_top_k(block.get_submodule("router")),
        count=ChoiceTap(router),
        probabilities=ProbabilityTap(under(router, "gate")),
        capacity=CapacityTap(fqn),
        bias=BiasView(layer=fqn, owner=fqn, attribute=bias) if bias is not None else None,
    )


TORCHTITAN: Mapping[str, AdapterFactory] = {"MoE": describe_torchtitan}
"""By class of the block."""
