"""Experts that are modules of their own in a `ModuleList` or `ModuleDict`, with a router beside them.

Sources: Switch Transformers and LitGPT as they are, Hugging Face before version 5, DeepSpeed's and Megatron's lists,
DeepSeek's reference code (a list over all experts with `None` for those of other ranks).
"""

from __future__ import annotations

import re

from torch import nn

from lightning_moe_ckpt.operators._children import child_slots
from lightning_moe_ckpt.operators._layers import MoELayerSpec, whole_slice
from lightning_moe_ckpt.operators._parameters import ParameterIndex
from lightning_moe_ckpt.operators._popularity_taps import ProbabilityTap
from lightning_moe_ckpt.operators._taps import RowsTap
from lightning_moe_ckpt.operators.adapters._attributes import find_bias, find_expert_capacity, find_extra
from lightning_moe_ckpt.operators.adapters._routers import find_block, find_router_module, find_top_k, is_shared

_EXPERTS = re.compile(r"expert", re.IGNORECASE)


def describe_module_list(root: nn.Module, fqn: str, container: nn.Module, index: ParameterIndex) -> MoELayerSpec | None:
    """The spec of the layer around `container`, or `None` if it holds no routed experts."""
    name = fqn.rpartition(".")[2]
    if not isinstance(container, nn.ModuleList | nn.ModuleDict) or not _EXPERTS.search(name) or is_shared(fqn):
        return None
    slots = _by_index(container)
    children = child_slots(container)
    experts = {expert: key for expert, key in slots.items() if children[key] is not None}
    if len(slots) < 2 or not _alike([children[key] for key in experts.values()]):
        return None
    found = find_block(root, fqn, len(slots), index)
    if found is None:
        return None
    block_fqn = found.fqn
    gate = find_router_module(root, block_fqn, len(slots))
    modules = {expert: f"{fqn}.{key}" if fqn else key for expert, key in experts.items()}
    return MoELayerSpec(
        fqn=block_fqn,
        num_experts=len(slots),
        local_expert_ids=tuple(modules),
        experts={e: tuple(whole_slice(n, p) for n, p in index.under(path).items()) for e, path in modules.items()},
        router=found.router,
        router_buffers=found.buffers,
        top_k=find_top_k(container, root.get_submodule(block_fqn), *_children(root, block_fqn)),
        holders="expert_data" if len(modules) < len(slots) else "world",
        count=RowsTap(modules),
        probabilities=ProbabilityTap(gate) if gate is not None else None,
        live_capacity=find_expert_capacity(root, block_fqn, len(slots)),
        bias=find_bias(root, block_fqn, len(slots)),
        extra=find_extra(root, block_fqn),
    )


def _by_index(container: nn.Module) -> dict[int, str]:
    """Keys by expert index: the number at a key's end where that numbers all of them, else their order."""
    keys = list(child_slots(container))
    numbers = [int(match.group()) if (match := re.search(r"\d+$", key)) else -1 for key in keys]
    if sorted(numbers) != list(range(len(keys))):
        numbers = list(range(len(keys)))
    return dict(sorted(zip(numbers, keys, strict=True)))


def _alike(experts: list[nn.Module | None]) -> bool:
    shapes = [[(n, p.shape, p.dtype) for n, p in e.named_parameters()] for e in experts if e is not None]
    return bool(shapes) and bool(shapes[0]) and all(shape == shapes[0] for shape in shapes)


def _children(root: nn.Module, fqn: str) -> list[nn.Module]:
    return list(root.get_submodule(fqn).children())
