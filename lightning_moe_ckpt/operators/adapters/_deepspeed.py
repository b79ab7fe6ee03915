"""DeepSpeed's `MoE`: a list of experts behind a gate that pads or drops to one capacity.

Expert parallelism is DeepSpeed's own affair: its engine reduces the experts' gradients over groups that nothing here
knows, so `ep_size > 1` is refused. With `ep_size=1` every rank has all experts, and the marks that its engine looks at
(`allreduce=False`, `group_name`) mean nothing to `MoEStrategy`, which averages them like everything else.

Source: deepspeed 0.19.8, `moe/layer.py`, `moe/experts.py`, `moe/sharded_moe.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lightning_moe_ckpt.operators._capacity import AttributeCapacity
from lightning_moe_ckpt.operators._demand import Demand, DemandTap
from lightning_moe_ckpt.operators._layers import MoELayerSpec, whole_slice
from lightning_moe_ckpt.operators._parameters import ParameterIndex
from lightning_moe_ckpt.operators.adapters._pieces import refuse_spread
from lightning_moe_ckpt.operators.adapters._registry import AdapterFactory

_INNER = "deepspeed_moe"
_EXPERTS = f"{_INNER}.experts.deepspeed_experts"


def describe_deepspeed(fqn: str, block: nn.Module, index: ParameterIndex) -> MoELayerSpec:
    """The spec of a `deepspeed.moe.layer.MoE`; what `use_residual` adds beside it is dense.

    Raises:
        UnknownLayout: its experts are spread over ranks.
    """
    layer: Any = block
    if layer.ep_size > 1:
        refuse_spread(fqn, "DeepSpeed", found=f"`ep_size={layer.ep_size}`", wanted="`ep_size=1`")
    prefix = f"{fqn}." if fqn else ""
    inner, gate = f"{prefix}{_INNER}", f"{prefix}{_INNER}.gate"
    ids = tuple(range(layer.num_experts))
    params = {e: index.under(f"{prefix}{_EXPERTS}.{e}") for e in ids}
    return MoELayerSpec(
        fqn=fqn,
        num_experts=len(ids),
        local_expert_ids=ids,
        experts={e: tuple(whole_slice(n, p) for n, p in params[e].items()) for e in ids},
        router=tuple(index.under(gate)),
        top_k=layer.deepspeed_moe.gate.k,
        # Not the rows that experts are given: those are padded to the capacity.
        count=DemandTap(gate, read_gate),
        capacity=DemandTap(gate, read_gate, "capacity"),
        dropped=DemandTap(gate, read_gate, "dropped"),
        live_capacity=AttributeCapacity(gate, ("capacity_factor",), enabled="drop_tokens"),
        graphs=((inner, "l_aux"),),
    )


def read_gate(out: tuple[Any, ...]) -> Demand:
    """Demand before dropping is the last output of a `TopKGate`, capacity the second, or a dimension of it.

    The second output is a number of tokens where routes are sparse, and combine weights `[S, E, C]` where they are not.
    """
    second = out[1]
    return out[-1], second.shape[-1] if isinstance(second, Tensor) and second.ndim > 1 else second


DEEPSPEED: Mapping[str, AdapterFactory] = {"MoE": describe_deepspeed}
"""By class of the block."""
