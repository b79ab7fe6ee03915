"""Stacked experts: one module whose parameters all have the experts as dimension 0, with a router beside it.

Source: the convention of Hugging Face transformers 5 (`use_experts_implementation`), also nanochat, torchtitan and torchtune.
A rule by shape alone would misfire on stacked shared experts, hence the sibling router is required.
"""

from __future__ import annotations

from torch import nn

from lightning_moe_ckpt.operators._children import own_parameters
from lightning_moe_ckpt.operators._layers import MoELayerSpec, stacked_slices
from lightning_moe_ckpt.operators._parameters import ParameterIndex
from lightning_moe_ckpt.operators._popularity_taps import CapacityTap, ProbabilityTap
from lightning_moe_ckpt.operators._taps import IndexTap
from lightning_moe_ckpt.operators.adapters._attributes import find_bias, find_extra
from lightning_moe_ckpt.operators.adapters._routers import find_block, find_router_module, find_top_k, is_shared


def describe_stacked(root: nn.Module, fqn: str, experts: nn.Module, index: ParameterIndex) -> MoELayerSpec | None:
    """The spec of the layer around `experts`, or `None` if its parameters are not stacked experts."""
    num_experts = _num_stacked(experts)
    if num_experts is None or not fqn or is_shared(fqn):
        return None
    found = find_block(root, fqn, num_experts, index)
    if found is None:
        return None
    block_fqn = found.fqn
    params = {index.name(p): p for p in own_parameters(experts).values()}
    block = root.get_submodule(block_fqn)
    ids = tuple(range(num_experts))
    gate = find_router_module(root, block_fqn, num_experts)
    return MoELayerSpec(
        fqn=block_fqn,
        num_experts=num_experts,
        local_expert_ids=ids,
        experts=stacked_slices(params, ids, num_experts),
        router=found.router,
        router_buffers=found.buffers,
        top_k=find_top_k(experts, block, *block.children()),
        count=IndexTap(fqn, gate),
        probabilities=ProbabilityTap(gate) if gate is not None else None,
        # Rows of stacked experts are not copied into buffers of a fixed size: nothing is dropped.
        capacity=CapacityTap(fqn),
        bias=find_bias(root, block_fqn, num_experts),
        extra=find_extra(root, block_fqn),
    )


def _num_stacked(module: nn.Module) -> int | None:
    """E, if the module's own parameters share it as dimension 0: two matrices or more, one of them stacked."""
    params = list(own_parameters(module).values())
    ndims = [p.ndim for p in params]
    if sum(n >= 2 for n in ndims) < 2 or max(ndims) < 3 or min(ndims) < 1:
        return None
    sizes = {p.shape[0] for p in params}
    return sizes.pop() if len(sizes) == 1 and max(sizes) >= 2 else None
