"""Describe layers by their shape and attributes: experts stacked or in a list, with a router beside them.

Our `MoELayer`, any layer that offers the same attributes, and what `spread_experts` has cut may be sharded over ranks.

A *list* is a `ModuleList` or `ModuleDict` with a module per expert: Switch Transformers and LitGPT as they are, Hugging
Face before version 5, DeepSeek's reference code (a list over all experts with `None` for those of other ranks).

*Stacked* experts are one module whose parameters all have the experts as dimension 0: the convention of Hugging Face
transformers 5 (`use_experts_implementation`), also nanochat, torchtitan and torchtune. By shape alone the rule would
also find stacked shared experts, hence it requires a sibling router.

A *router* is a sibling by name that emits one value per expert. Order of registration differs between model families, so only
name and shape count. The gate of a shared expert is no router: it emits one value.

State beside the weights is found by the attribute names of the libraries that have it: transformers 5 (Switch's
`expert_capacity`, `e_score_correction_bias`), LitGPT, torchtitan, Megatron and nanochat (`expert_bias`), NeMo Automodel (a
running load and a master copy of the bias in plain attributes).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from lightning_moe_ckpt.moe import MoELayer
from lightning_moe_ckpt.moe._spread import SpreadExperts
from lightning_moe_ckpt.operators._count_taps import AttributeTap, CapacityTap, IndexTap, ProbabilityTap, RowsTap
from lightning_moe_ckpt.operators._operator import MoELayerSpec, ParamSlice, stacked_slices, whole_slices
from lightning_moe_ckpt.operators._parameters import ParameterIndex, child_slots, join, own_parameters
from lightning_moe_ckpt.operators._views import (
    AttributeCapacity,
    AttributeState,
    BiasView,
    CapacityView,
    ExpertCapacity,
)

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
    modules = {expert: join(fqn, key) for expert, key in experts.items()}
    slices = whole_slices({expert: index.under(path) for expert, path in modules.items()})
    if (spec := _describe_around(root, fqn, slices, len(slots), index)) is None:
        return None
    return replace(spec, count=RowsTap(modules), live_capacity=_find_expert_capacity(root, spec.fqn, len(slots)))


def describe_stacked(root: nn.Module, fqn: str, experts: nn.Module, index: ParameterIndex) -> MoELayerSpec | None:
    """Return the spec of the layer around `experts`, or `None` if its parameters are not stacked experts."""
    if not (ids := _stacked_ids(experts)) or not fqn or is_shared(fqn):
        return None
    num_experts = len(ids) * (experts.ep_size if isinstance(experts, SpreadExperts) else 1)
    slices = stacked_slices({index.name(p): p for p in own_parameters(experts).values()}, ids, num_experts)
    if (spec := _describe_around(root, fqn, slices, num_experts, index)) is None:
        return None
    # Indices are handed over before tokens are exchanged: global ones of this rank's tokens. Rows of stacked experts
    # are not copied into buffers of a fixed size: nothing is dropped.
    count = IndexTap(fqn, find_router_module(root, spec.fqn, num_experts))
    return replace(spec, count=count, capacity=CapacityTap(fqn))


def _describe_around(
    root: nn.Module,
    experts_fqn: str,
    slices: Mapping[int, tuple[ParamSlice, ...]],
    num_experts: int,
    index: ParameterIndex,
) -> MoELayerSpec | None:
    """Return the spec of the block around a module of experts, but for its counts and capacity; `None` if there is no router."""
    if (found := find_block(root, experts_fqn, num_experts, index)) is None:
        return None
    fqn, router, buffers = found
    block, gate = root.get_submodule(fqn), find_router_module(root, fqn, num_experts)
    return MoELayerSpec(
        fqn=fqn,
        num_experts=num_experts,
        local_expert_ids=tuple(slices),
        experts=slices,
        router=router,
        router_buffers=buffers,
        top_k=find_top_k(root.get_submodule(experts_fqn), block, *block.children()),
        holders="expert_data" if len(slices) < num_experts else "stage",
        probabilities=ProbabilityTap(gate) if gate is not None else None,
        bias=_find_bias(root, fqn, num_experts),
        extra=_find_extra(root, fqn),
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


def _stacked_ids(module: nn.Module) -> tuple[int, ...]:
    """Return the experts held here if the module's own parameters share their number as dimension 0, else nothing.

    Two matrices or more, one of them stacked, over two experts or more.
    """
    if isinstance(module, SpreadExperts):
        return tuple(module.local_expert_ids)
    params = list(own_parameters(module).values())
    ndims = [p.ndim for p in params]
    if sum(n >= 2 for n in ndims) < 2 or max(ndims) < 3 or min(ndims) < 1:
        return ()
    sizes = {p.shape[0] for p in params}
    return tuple(range(sizes.pop())) if len(sizes) == 1 and max(sizes) >= 2 else ()


def _find_bias(root: nn.Module, block_fqn: str, num_experts: int) -> BiasView | None:
    """Return the selection-only bias of a block or its router; under another name it may be part of the logits."""
    for fqn, module in _near(root, block_fqn):
        for name in _BIASES:
            bias = getattr(module, name, None)
            if isinstance(bias, Tensor) and bias.numel() == num_experts:
                return BiasView(layer=block_fqn, owner=fqn, attribute=name)
    return None


def _find_extra(root: nn.Module, block_fqn: str) -> AttributeState | None:
    """Return the plain attributes of a block and its router on which training depends."""
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


_ROUTER = re.compile(r"(^|_)(router|gate|gates|gating|wg|classifier|switch)(_|$|\d)")
_NOT_ROUTER = re.compile(r"shared|proj")
_BIAS = re.compile(r"bias")
_MAX_CLIMB = 2


def find_block(
    root: nn.Module, experts_fqn: str, num_experts: int, index: ParameterIndex
) -> tuple[str, tuple[str, ...], tuple[str, ...]] | None:
    """Return the MoE block around a module of experts, its router's parameters and buffers; `None` if there is no router.

    Experts often sit in a wrapper (`experts.local_experts`), so two levels are searched, but only through modules that
    are called after experts.
    """
    child_fqn = experts_fqn
    for _ in range(_MAX_CLIMB):
        if not child_fqn:
            return None
        block_fqn, _, child = child_fqn.rpartition(".")
        block = root.get_submodule(block_fqn)
        if router := tuple(_router_params(block, block_fqn, child, num_experts, index)):
            return block_fqn, router, find_router_buffers(block, block_fqn, num_experts, child)
        if "expert" not in block_fqn.rpartition(".")[2]:
            return None
        child_fqn = block_fqn
    return None


def find_router_module(root: nn.Module, block_fqn: str, num_experts: int) -> str | None:
    """Return the name of the block's only module that emits one value per expert; `None` if there is none, or several."""
    found = [name for name, _ in _router_modules(root.get_submodule(block_fqn), num_experts, experts="")]
    return join(block_fqn, found[0]) if len(found) == 1 else None


def find_router_buffers(block: nn.Module, block_fqn: str, num_experts: int, experts: str = "") -> tuple[str, ...]:
    """Return buffers of the block's router, and the block's own with a value per expert: biases, counters; none of the child `experts`."""
    names = [name for name, buffer in block.named_buffers(recurse=False) if buffer.numel() == num_experts]
    for child, module in _router_modules(block, num_experts, experts):
        names += [f"{child}.{name}" for name, _ in module.named_buffers()]
    return tuple(join(block_fqn, name) for name in names)


def find_router_beside(fqn: str, num_experts: int, index: ParameterIndex) -> tuple[str, ...]:
    """Return the parameters of routers that are siblings of the module `fqn`, where the block is not known."""
    parent = fqn.rpartition(".")[0]
    children = defaultdict[str, dict[str, nn.Parameter]](dict)
    for name, param in index.under(parent).items():
        child = name.removeprefix(f"{parent}.").partition(".")[0]
        if _is_router_name(child):
            children[child][name] = param
    emitting = [params for params in children.values() if _emitting(params.values(), num_experts)]
    return tuple(name for params in emitting for name in params)


def is_shared(fqn: str) -> bool:
    """Whether a module is an expert for every token; its wrapper may carry the name."""
    return any("shared" in part.lower() for part in fqn.split(".")[-2:])


def find_top_k(*modules: nn.Module) -> int | None:
    """Return the experts per token, from the first of `modules` with one of the usual attributes."""
    for module in modules:
        for attribute in ("top_k", "num_experts_per_tok", "moe_top_k"):
            value = getattr(module, attribute, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None


def _router_params(
    block: nn.Module, block_fqn: str, experts: str, num_experts: int, index: ParameterIndex
) -> Iterator[str]:
    own = list(own_parameters(block).items())
    named = [(n, p) for n, p in own if _is_router_name(n) and num_experts in p.shape]
    modules = [child for _, child in _router_modules(block, num_experts, experts)]
    if not named and not modules:
        return
    # A correction bias beside the router steers the choice of experts: it belongs to it.
    biases = [(n, p) for n, p in own if _BIAS.search(n) and p.numel() == num_experts]
    named += [(n, p) for n, p in biases if join(block_fqn, n) in index.params]
    yield from dict.fromkeys(index.name(p) for _, p in named)
    for child in modules:
        yield from dict.fromkeys(index.name(p) for p in child.parameters())


def _router_modules(block: nn.Module, num_experts: int, experts: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in child_slots(block).items():
        if child is None or name == experts or not _is_router_name(name):
            continue
        if _emitting(child.parameters(), num_experts):
            yield name, child


def _is_router_name(name: str) -> bool:
    return bool(_ROUTER.search(name.lower())) and not _NOT_ROUTER.search(name.lower())


def _emitting(params: Iterable[nn.Parameter], num_experts: int) -> bool:
    return any(p.ndim == 2 and num_experts in p.shape for p in params)


_COUNTER, _DROPS = "tokens_per_expert", "drops_per_expert"
_PROBS, _FACTOR = "probabilities", "capacity_factor"
_Params = Mapping[str, nn.Parameter] | Iterable[nn.Parameter | tuple[str, nn.Parameter]]


_ATTRIBUTES = (
    *("num_experts", "local_expert_ids"),
    *("expert_parameters", "router_parameters", "expert_parallel_parameters"),
)


def describe_own(fqn: str, module: nn.Module, index: ParameterIndex) -> MoELayerSpec | None:
    """Return the layer's spec, or `None` if it lacks one of the attributes.

    * `num_experts` counts over all ranks.
    * `local_expert_ids` has the global index of each row of the stacked expert parameters.
    * `expert_parameters()`, `router_parameters()` and `expert_parallel_parameters()` return parameters, with names or without.
    * `tokens_per_expert` and `drops_per_expert` (optional) count tokens over all experts.
    * `probabilities` (optional) is a submodule that emits the gate's probabilities `[T, E]`.
    * `capacity(num_tokens)` (optional) returns the tokens that an expert can take.
    * `capacity_factor` (optional) is a number read at every forward, zero for a layer that drops nothing.
    """
    if not all(hasattr(module, name) for name in _ATTRIBUTES):
        return None
    layer: Any = module
    local = tuple(int(i) for i in layer.local_expert_ids)
    experts = _by_name(layer.expert_parameters(), index)
    return MoELayerSpec(
        fqn=fqn,
        num_experts=layer.num_experts,
        local_expert_ids=local,
        experts=stacked_slices(experts, local, layer.num_experts),
        router=tuple(_by_name(layer.router_parameters(), index)),
        router_buffers=find_router_buffers(module, fqn, layer.num_experts),
        top_k=find_top_k(module, *module.children()),
        holders="expert_data" if len(local) < layer.num_experts else "stage",
        count=_follow(fqn, module, _COUNTER),
        probabilities=ProbabilityTap(join(fqn, _PROBS), "none") if _PROBS in dict(module.named_children()) else None,
        capacity=CapacityTap(fqn),
        live_capacity=_find_capacity(fqn, module, layer.num_experts),
        dropped=_follow(fqn, module, _DROPS),
    )


def _find_capacity(fqn: str, module: nn.Module, num_experts: int) -> CapacityView | None:
    if isinstance(module, MoELayer):
        return ExpertCapacity(fqn, _FACTOR, num_experts)
    # Whether another class accepts a factor per expert is not known.
    return AttributeCapacity(fqn, (_FACTOR,)) if isinstance(getattr(module, _FACTOR, None), int | float) else None


def _follow(fqn: str, module: nn.Module, attribute: str) -> AttributeTap | None:
    return AttributeTap(fqn, attribute) if isinstance(getattr(module, attribute, None), Tensor) else None


def _by_name(params: _Params, index: ParameterIndex) -> dict[str, nn.Parameter]:
    """Return parameters by live name, whether the layer returns a mapping, pairs or the parameters alone."""
    values = params.values() if isinstance(params, Mapping) else params
    found = (value[1] if isinstance(value, tuple) else value for value in values)
    return {index.name(param): param for param in found}
