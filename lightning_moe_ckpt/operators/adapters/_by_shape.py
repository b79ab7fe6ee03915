"""Detection by shape: experts in a list or stacked, with a router beside them.

A *list* is a `ModuleList` or `ModuleDict` with a module per expert: Switch Transformers and LitGPT as they are, Hugging
Face before version 5, DeepSeek's reference code (a list over all experts with `None` for those of other ranks).

*Stacked* experts are one module whose parameters all have the experts as dimension 0: the convention of Hugging Face
transformers 5 (`use_experts_implementation`), also nanochat, torchtitan and torchtune. By shape alone the rule would
also find stacked shared experts, hence it requires a sibling router.

What layers keep beside their weights is found by the attribute names of the libraries that have it: transformers 5
(Switch's `expert_capacity`, `e_score_correction_bias`), LitGPT, torchtitan, Megatron and nanochat (`expert_bias`), NeMo
Automodel (a running load and a master copy of the bias in plain attributes).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import Tensor, nn

from lightning_moe_ckpt.operators._layers import MoELayerSpec, stacked_slices, whole_slices
from lightning_moe_ckpt.operators._parameters import ParameterIndex, child_slots, join, own_parameters
from lightning_moe_ckpt.operators._taps import CapacityTap, IndexTap, ProbabilityTap, RowsTap
from lightning_moe_ckpt.operators._views import AttributeState, BiasView, CapacityView, ExpertCapacity
from lightning_moe_ckpt.operators.adapters._routers import find_block, find_router_module, find_top_k, is_shared

_EXPERTS = re.compile(r"expert", re.IGNORECASE)
_BIASES = ("e_score_correction_bias", "expert_bias", "expert_bias_E", "moe_bias")
_EXTRA = ("_cumulative_expert_load", "e_score_correction_bias_master")


def describe_module_list(root: nn.Module, fqn: str, container: nn.Module, index: ParameterIndex) -> MoELayerSpec | None:
    """Return the spec of the layer around `container`, or `None` if it holds no list of routed experts."""
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
    block = root.get_submodule(found.fqn)
    gate = find_router_module(root, found.fqn, len(slots))
    modules = {expert: join(fqn, key) for expert, key in experts.items()}
    return MoELayerSpec(
        fqn=found.fqn,
        num_experts=len(slots),
        local_expert_ids=tuple(modules),
        experts=whole_slices({expert: index.under(path) for expert, path in modules.items()}),
        router=found.router,
        router_buffers=found.buffers,
        top_k=find_top_k(container, block, *block.children()),
        holders="expert_data" if len(modules) < len(slots) else "stage",
        count=RowsTap(modules),
        probabilities=ProbabilityTap(gate) if gate is not None else None,
        live_capacity=_find_expert_capacity(root, found.fqn, len(slots)),
        bias=_find_bias(root, found.fqn, len(slots)),
        extra=_find_extra(root, found.fqn),
    )


def describe_stacked(root: nn.Module, fqn: str, experts: nn.Module, index: ParameterIndex) -> MoELayerSpec | None:
    """Return the spec of the layer around `experts`, or `None` if its parameters are not stacked experts."""
    num_experts = _num_stacked(experts)
    if num_experts is None or not fqn or is_shared(fqn):
        return None
    found = find_block(root, fqn, num_experts, index)
    if found is None:
        return None
    block = root.get_submodule(found.fqn)
    ids = tuple(range(num_experts))
    gate = find_router_module(root, found.fqn, num_experts)
    return MoELayerSpec(
        fqn=found.fqn,
        num_experts=num_experts,
        local_expert_ids=ids,
        experts=stacked_slices({index.name(p): p for p in own_parameters(experts).values()}, ids, num_experts),
        router=found.router,
        router_buffers=found.buffers,
        top_k=find_top_k(experts, block, *block.children()),
        count=IndexTap(fqn, gate),
        probabilities=ProbabilityTap(gate) if gate is not None else None,
        # Rows of stacked experts are not copied into buffers of a fixed size: nothing is dropped.
        capacity=CapacityTap(fqn),
        bias=_find_bias(root, found.fqn, num_experts),
        extra=_find_extra(root, found.fqn),
    )


def _by_index(container: nn.Module) -> dict[int, str]:
    """Return keys by expert index: the number at a key's end where that numbers all of them, else their order."""
    keys = list(child_slots(container))
    numbers = [int(match.group()) if (match := re.search(r"\d+$", key)) else -1 for key in keys]
    if sorted(numbers) != list(range(len(keys))):
        numbers = list(range(len(keys)))
    return dict(sorted(zip(numbers, keys, strict=True)))


def _alike(experts: list[nn.Module | None]) -> bool:
    shapes = [[(n, p.shape, p.dtype) for n, p in e.named_parameters()] for e in experts if e is not None]
    return bool(shapes) and bool(shapes[0]) and all(shape == shapes[0] for shape in shapes)


def _num_stacked(module: nn.Module) -> int | None:
    """Return E if the module's own parameters share it as dimension 0: two matrices or more, one of them stacked."""
    params = list(own_parameters(module).values())
    ndims = [p.ndim for p in params]
    if sum(n >= 2 for n in ndims) < 2 or max(ndims) < 3 or min(ndims) < 1:
        return None
    sizes = {p.shape[0] for p in params}
    return sizes.pop() if len(sizes) == 1 and max(sizes) >= 2 else None


def _find_bias(root: nn.Module, block_fqn: str, num_experts: int) -> BiasView | None:
    """Return the selection-only bias of a block or its router; under another name it may be part of the logits."""
    for fqn, module in _near(root, block_fqn):
        for name in _BIASES:
            bias = getattr(module, name, None)
            if isinstance(bias, Tensor) and bias.numel() == num_experts:
                return BiasView(layer=block_fqn, owner=fqn, attribute=name)
    return None


def _find_extra(root: nn.Module, block_fqn: str) -> AttributeState | None:
    """Return the plain attributes of a block and its router that training depends on."""
    places = [(fqn, name) for fqn, module in _near(root, block_fqn) for name in _EXTRA if _is_plain(module, name)]
    return AttributeState(tuple(places)) if places else None


def _find_expert_capacity(root: nn.Module, block_fqn: str, num_experts: int) -> CapacityView | None:
    """Return the capacity of a Switch router, which compares places in line with it: a tensor `[E]` does as well."""
    for fqn, module in _near(root, block_fqn):
        if any(base.__name__ == "SwitchTransformersTop1Router" for base in type(module).__mro__):
            return ExpertCapacity(fqn, "expert_capacity", num_experts, "tensor")
    return None


def _near(root: nn.Module, block_fqn: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the block and its children, but not the experts themselves."""
    block = root.get_submodule(block_fqn)
    yield block_fqn, block
    for name, child in child_slots(block).items():
        if child is not None and not isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield join(block_fqn, name), child


def _is_plain(module: nn.Module, name: str) -> bool:
    registered = name in module._parameters or name in module._buffers  # noqa: SLF001  # those are captured anyway
    return hasattr(module, name) and not registered
