"""Adapters by class: a user's, and those for layers of known libraries, of which none is imported for it.

A user adds an adapter for a layout that is not detected, or to overrule detection. An adapter answers for its class and for
subclasses of it, wherever those are defined.

Example:
    def describe(fqn: str, module: nn.Module, index: ParameterIndex) -> MoELayerSpec:
        experts = {f"{fqn}.{n}": p for n, p in module.named_parameters() if n.startswith("w")}
        ids = tuple(range(module.num_experts))
        return MoELayerSpec(
            fqn=fqn, num_experts=len(ids), local_expert_ids=ids,
            experts=stacked_slices(experts, ids, len(ids)), router=(f"{fqn}.gate.weight",),
            count=IndexTap(f"{fqn}.experts"),
        )

    register_adapter(MyMoE, describe)

Each function for a library describes a block in which every rank has all experts. Expert parallelism of a library's own
engine is refused, by `UnknownLayout`: it reduces the experts' gradients over groups that nothing here knows.

Sources: DeepSpeed 0.19.8 (`moe/layer.py`, `moe/experts.py`, `moe/sharded_moe.py`), FastMoE (commit ee3c561,
`fmoe/layers.py`, `fmoe/transformer.py`, `fmoe/gates/`), MegaBlocks (commit 78eea65, `layers/moe.py`, `layers/mlp.py`,
`layers/glu.py`, `layers/router.py`), megatron-core 0.16.1 (`core/transformer/moe/moe_layer.py`, `experts.py`,
`router.py`), ScatterMoE (commit 2d15f31, `scattermoe/mlp.py`, `scattermoe/parallel_experts.py`), torchtitan 0.3.0
(`models/common/moe.py`; before 0.3 `models/moe.py`), Hugging Face transformers 5.23 (`models/*/modeling_*.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

from torch import Tensor, nn

from lightning_moe_ckpt.errors import UnknownLayout
from lightning_moe_ckpt.operators._count_taps import (
    CapacityTap,
    ChoiceTap,
    Demand,
    DemandTap,
    IndexTap,
    MaskTap,
    ProbabilityTap,
)
from lightning_moe_ckpt.operators._operator import MoELayerSpec, ParamSlice, merged_slices, stacked_slices, whole_slices
from lightning_moe_ckpt.operators._parameters import ParameterIndex, join
from lightning_moe_ckpt.operators._views import AttributeCapacity, BiasView
from lightning_moe_ckpt.operators.adapters._by_shape import find_router_beside, find_top_k
from lightning_moe_ckpt.operators.adapters._tutel import describe_tutel


def _all_here(fqn: str, experts: Mapping[int, tuple[ParamSlice, ...]], router: Iterable[str]) -> MoELayerSpec:
    """Return the spec of a layer of which this rank has all experts, with its parameters alone."""
    ids = tuple(experts)
    return MoELayerSpec(fqn=fqn, num_experts=len(ids), local_expert_ids=ids, experts=experts, router=tuple(router))


def describe_deepspeed(fqn: str, block: nn.Module, index: ParameterIndex) -> MoELayerSpec:
    """Describe DeepSpeed's `MoE`: a list of experts behind a gate that pads or drops to one capacity.

    The module that `use_residual` adds beside the list is dense. With `ep_size=1` the marks for DeepSpeed's engine
    (`allreduce=False`, `group_name`) mean nothing to `MoEStrategy`, which averages all parameters alike.
    """
    layer: Any = block
    if layer.ep_size > 1:
        _refuse_spread(fqn, "DeepSpeed", found=f"`ep_size={layer.ep_size}`", wanted="`ep_size=1`")
    inner = join(fqn, "deepspeed_moe")
    gate, listed = f"{inner}.gate", f"{inner}.experts.deepspeed_experts"
    experts = whole_slices({expert: index.under(f"{listed}.{expert}") for expert in range(layer.num_experts)})
    return replace(
        _all_here(fqn, experts, index.under(gate)),
        top_k=layer.deepspeed_moe.gate.k,
        # Not the rows that experts are given: those are padded to the capacity.
        count=DemandTap(gate, _read_gate),
        capacity=DemandTap(gate, _read_gate, "capacity"),
        dropped=DemandTap(gate, _read_gate, "dropped"),
        live_capacity=AttributeCapacity(gate, ("capacity_factor",), enabled="drop_tokens"),
        graphs=((inner, "l_aux"),),
    )


def _read_gate(out: tuple[Any, ...]) -> Demand:
    """Return the demand before dropping, the last output of a `TopKGate`, and the capacity.

    The second output is the capacity if routes are sparse, else combine weights `[S, E, C]`.
    """
    second = out[1]
    return out[-1], second.shape[-1] if isinstance(second, Tensor) and second.ndim > 1 else second


def describe_fastmoe(fqn: str, block: nn.Module, index: ParameterIndex) -> MoELayerSpec:
    """Describe FastMoE's `FMoE` and `FMoETransformerMLP`: a list of experts, or one module with all of them stacked. A
    list may hold modules that are written for stacks, with one expert each.
    """
    layer: Any = block
    num_experts, experts, gate = int(layer.num_expert), join(fqn, "experts"), join(fqn, "gate")
    if layer.world_size > 1:
        _refuse_spread(fqn, "FastMoE", found=f"`world_size={layer.world_size}`", wanted="`world_size=1`")
    if isinstance(layer.experts, nn.ModuleList):
        slices = whole_slices({expert: index.under(f"{experts}.{expert}") for expert in range(num_experts)})
    else:
        slices = stacked_slices(index.under(experts), range(num_experts), num_experts)
    return replace(
        _all_here(fqn, slices, index.under(gate)),
        top_k=int(layer.top_k),
        # A gate with a capacity writes -1 in the place of what it drops.
        count=ChoiceTap(gate),
        live_capacity=AttributeCapacity(gate, ("capacity",)) if hasattr(layer.gate, "capacity") else None,
        graphs=((gate, "loss"),),
    )


_MEGABLOCKS_MATRICES = ("w1", "w2", "v1")


def describe_megablocks(fqn: str, block: nn.Module, index: ParameterIndex) -> MoELayerSpec:
    """Describe MegaBlocks' `MoE`, which drops over its capacity, or `dMoE`, which drops nothing. The matrices have an
    expert dimension, or the rows of one expert after another's. Raises `UnknownLayout` too for matrices of other names.
    """
    layer: Any = block
    args, experts, router = layer.experts.args, join(fqn, "experts"), join(fqn, "router")
    num_experts = int(args.moe_num_experts)
    mlp = index.under(f"{experts}.mlp")
    if {name.rpartition(".")[2] for name in mlp} - set(_MEGABLOCKS_MATRICES):
        raise UnknownLayout(f"`{experts}.mlp` of MegaBlocks has {sorted(mlp)}, known are {_MEGABLOCKS_MATRICES}.")
    if args.moe_expert_model_parallelism:
        switch = "moe_expert_model_parallelism"
        _refuse_spread(fqn, "MegaBlocks", found=f"`{switch}=True`", wanted=f"`{switch}=False`")
    dropless = any(base.__name__ == "dMoE" for base in type(block).__mro__)
    limit = None if dropless else experts
    # The bias that all experts share has no expert to go with.
    routers = (*index.under(router), *(name for name in index.under(experts) if name not in mlp))
    return replace(
        _all_here(fqn, merged_slices(mlp, range(num_experts), num_experts), routers),
        top_k=int(args.moe_top_k),
        count=ChoiceTap(router, limit),
        probabilities=ProbabilityTap(f"{router}.layer"),
        capacity=CapacityTap(fqn) if dropless else ChoiceTap(router, limit, "capacity"),
        dropped=None if dropless else ChoiceTap(router, limit, "dropped"),
        live_capacity=None if dropless else AttributeCapacity(experts, ("args.moe_capacity_factor",), "model"),
    )


def describe_megatron(fqn: str, block: nn.Module, index: ParameterIndex) -> MoELayerSpec:
    """Describe Megatron-core's `MoELayer` with each way in which it has kept experts; shared experts are dense. Raises
    `UnknownLayout` too for experts stored in none of the known ways.
    """
    layer: Any = block
    num_experts, router = int(layer.config.num_moe_experts), join(fqn, "router")
    if (num_local := len(layer.local_expert_indices)) != num_experts:
        found = f"{num_local} of {num_experts} experts on this rank"
        _refuse_spread(fqn, "Megatron", found=found, wanted="`expert_model_parallel_size=1`")
    # Padded to the capacity, the map says what was computed, and the dispatcher keeps a copy of the factor.
    padded = bool(getattr(layer.config, "moe_pad_expert_input_to_capacity", False))
    biased = getattr(layer.router, "expert_bias", None) is not None
    factor = "config.moe_expert_capacity_factor"
    return replace(
        _all_here(fqn, _cut_megatron(join(fqn, "experts"), layer.experts, index, num_experts), index.under(router)),
        router_buffers=tuple(f"{router}.{name}" for name, _ in layer.router.named_buffers()),
        top_k=int(layer.config.moe_router_topk),
        count=None if padded else MaskTap(router, output=1),
        live_capacity=None if padded else AttributeCapacity(router, (factor,), "model"),
        bias=BiasView(layer=fqn, owner=router, attribute="expert_bias") if biased else None,
    )


def _cut_megatron(
    fqn: str, experts: nn.Module, index: ParameterIndex, num_experts: int
) -> dict[int, tuple[ParamSlice, ...]]:
    """Return each expert's slices.

    `SequentialMLP` has a list of modules, `TEGroupedMLP` parameters `weight0`, `weight1`, ... in one module, and the
    older `GroupedMLP` two matrices that it reads as `weight1.view(e, D, -1)`: flat intervals, not columns.
    """
    params, ids = index.under(fqn), range(num_experts)
    if isinstance(getattr(experts, "local_experts", None), nn.ModuleList):
        return whole_slices({expert: index.under(f"{fqn}.local_experts.{expert}") for expert in ids})
    if any(base.__name__ == "GroupedMLP" for base in type(experts).__mro__):
        return _intervals(params, num_experts)
    numbers = {name: int(match.group(1)) for name in params if (match := re.search(r"(?:weight|bias)(\d+)$", name))}
    if set(numbers) == set(params) and set(numbers.values()) == set(ids):
        return whole_slices({expert: {n: p for n, p in params.items() if numbers[n] == expert} for expert in ids})
    raise UnknownLayout(
        f"`{fqn}` is {type(experts).__name__} of Megatron, whose parameters {sorted(params)[:4]} are stored in none of "
        "the known ways (a list, numbered parameters, two matrices). Describe the layer with `register_adapter`."
    )


def _intervals(params: Mapping[str, nn.Parameter], num_experts: int) -> dict[int, tuple[ParamSlice, ...]]:
    """Return each expert's flat interval of parameters that are viewed as `[E, ...]` whatever their shape; all are equal. Raises
    `UnknownLayout` if a parameter's elements cannot be divided by `num_experts`.
    """
    slices: dict[int, list[ParamSlice]] = {expert: [] for expert in range(num_experts)}
    for fqn, param in params.items():
        if param.numel() % num_experts:
            raise UnknownLayout(f"`{fqn}` {tuple(param.shape)} cannot be shared by {num_experts} experts evenly.")
        numel = param.numel() // num_experts
        for expert, own in slices.items():
            start, shape = expert * numel, (num_experts, numel)
            own.append(ParamSlice(fqn=fqn, start=start, stop=start + numel, global_shape=shape, global_start=start))
    return {expert: tuple(own) for expert, own in slices.items()}


def describe_scattermoe(fqn: str, mlp: nn.Module, index: ParameterIndex) -> MoELayerSpec:
    """Describe ScatterMoE's `MLP` and `GLUMLP`: two modules with one stacked matrix each; nothing is dropped.

    The library has no router; a sibling of the module with a router's name is the router, and any other stays dense.
    """
    layer: Any = mlp
    num_experts = int(layer.num_experts)
    params = {**index.under(join(fqn, "experts")), **index.under(join(fqn, "output_experts"))}
    slices = stacked_slices(params, range(num_experts), num_experts)
    return replace(
        _all_here(fqn, slices, find_router_beside(fqn, num_experts, index)),
        top_k=int(layer.top_k),
        count=IndexTap(fqn),
        capacity=CapacityTap(fqn),
    )


_TITAN_EXPERTS = ("routed_experts", "experts")


def describe_torchtitan(fqn: str, block: nn.Module, index: ParameterIndex) -> MoELayerSpec:
    """Describe torchtitan's `MoE`: stacked experts, a router beside them, and the balance state on the block itself.

    Names are those of before and after the experts moved from `experts.w1` into `routed_experts`. Experts are handed counts, not indices,
    so the router's output is counted. Both the running load and the bias are buffers of the block, the first not persistent; they are
    captured like every buffer. Raises `UnknownLayout` if the block has no experts under these names.
    """
    name, router = _first_present(block, _TITAN_EXPERTS), join(fqn, "router")
    params = index.under(join(fqn, name)) if name is not None else {}
    if not params:
        raise UnknownLayout(f"`{fqn}` is a torchtitan MoE without parameters in any of {_TITAN_EXPERTS}.")
    num_experts = next(iter(params.values())).shape[0]
    bias = _first_present(block, ("expert_bias_E", "expert_bias"))
    load = _first_present(block, ("tokens_per_expert_E", "tokens_per_expert"))
    return replace(
        _all_here(fqn, stacked_slices(params, range(num_experts), num_experts), index.under(router)),
        router_buffers=tuple(
            join(fqn, each) for each in (bias, load) if each is not None and isinstance(getattr(block, each), Tensor)
        ),
        top_k=find_top_k(block.get_submodule("router")),
        count=ChoiceTap(router),
        probabilities=ProbabilityTap(f"{router}.gate"),
        capacity=CapacityTap(fqn),
        bias=BiasView(layer=fqn, owner=fqn, attribute=bias) if bias is not None else None,
    )


def _first_present(module: nn.Module, names: Iterable[str]) -> str | None:
    """Return the first of these attributes with a value in the module; `None` without any."""
    return next((name for name in names if getattr(module, name, None) is not None), None)


# -- Hugging Face transformers: blocks that detection by shape gets wrong; it finds the others -------------------------


def describe_llama4(fqn: str, block: nn.Module, index: ParameterIndex) -> MoELayerSpec:
    """Describe Llama 4: every expert runs on every token, scaled by a score, which is zero unless the token chose the expert."""
    experts, router = index.under(join(fqn, "experts")), join(fqn, "router")
    num_experts = next(iter(experts.values())).shape[0]
    return replace(
        _all_here(fqn, stacked_slices(experts, range(num_experts), num_experts), index.under(router)),
        top_k=find_top_k(block),
        count=MaskTap(router, output=0),
        probabilities=ProbabilityTap(router, "sigmoid", output=1),
        capacity=CapacityTap(fqn),
    )


def describe_dbrx(fqn: str, block: nn.Module, index: ParameterIndex) -> MoELayerSpec:
    """Describe DBRX: matrices `[E * F, D]` with the rows of one expert after those of another."""
    experts, gate = join(fqn, "experts"), join(fqn, "router.layer")
    num_experts = int(block.get_submodule("router.layer").out_features)  # type: ignore[arg-type]  # nn.Linear
    return replace(
        _all_here(fqn, merged_slices(index.under(experts), range(num_experts), num_experts), index.under(gate)),
        top_k=find_top_k(block),
        count=IndexTap(experts),
        probabilities=ProbabilityTap(gate),
        capacity=CapacityTap(experts),
    )


def refuse_nllb(fqn: str, block: nn.Module, index: ParameterIndex) -> NoReturn:
    """Raise `UnknownLayout` for NLLB-MoE: only two of its routed experts ever run."""
    raise UnknownLayout(
        f"`{fqn}` is {type(block).__name__} of transformers 5, which hands its experts a mask of zeros and ones where "
        "they want indices: only experts 0 and 1 ever run, whatever the router says. Train another model; or, if your "
        "version of it has been corrected, describe the block with `register_adapter(NllbMoeSparseMLP, factory)`."
    )


def _refuse_spread(fqn: str, library: str, *, found: str, wanted: str) -> NoReturn:
    """Raise `UnknownLayout` for experts that a library's own engine spreads over ranks."""
    raise UnknownLayout(
        f"`{fqn}` is a layer of {library} with {found}; only its own trainer can reduce the gradients of experts that "
        f"are spread over ranks. Build it with {wanted}, so that every rank has all experts, or take a `MoELayer`, "
        "which `MoEStrategy` spreads over ranks."
    )


AdapterFactory = Callable[[str, nn.Module, ParameterIndex], MoELayerSpec | None]
"""`(name of the module, the module, all parameters) -> its spec`, or `None` for "there is no routing in here"."""

_factories: dict[type[nn.Module], AdapterFactory] = {}

_LIBRARIES: Mapping[tuple[str, str], AdapterFactory] = {
    ("deepspeed", "MoE"): describe_deepspeed,
    ("fmoe", "FMoE"): describe_fastmoe,
    ("megablocks", "MoE"): describe_megablocks,
    ("megablocks", "dMoE"): describe_megablocks,
    ("megatron", "MoELayer"): describe_megatron,
    ("scattermoe", "GLUMLP"): describe_scattermoe,
    ("scattermoe", "MLP"): describe_scattermoe,
    ("torchtitan", "MoE"): describe_torchtitan,
    ("transformers", "DbrxFFN"): describe_dbrx,
    ("transformers", "Llama4TextMoe"): describe_llama4,
    ("transformers", "NllbMoeSparseMLP"): refuse_nllb,
    ("tutel", "MOELayer"): describe_tutel,
}
"""Adapters by the library's top package and the class name of the MoE block, so that no library has to be imported."""


def register_adapter(cls: type[nn.Module], factory: AdapterFactory) -> None:
    """Describe modules of `cls` and its subclasses by `factory`; the most derived class wins.

    Args:
        cls: class of the MoE block, the module that holds router and experts.
        factory: describes one instance. A factory that returns `None` makes the block part of the dense rest.
    """
    _factories[cls] = factory


def unregister_adapter(cls: type[nn.Module]) -> None:
    """Forget the adapter of exactly this class, if there is one."""
    _factories.pop(cls, None)


def find_adapter(module: nn.Module) -> AdapterFactory | None:
    """Return the factory registered for the module's class or its nearest base, otherwise the factory for its library."""
    bases = type(module).__mro__
    registered = (_factories[base] for base in bases if base in _factories)
    names = ((base.__module__.partition(".")[0], base.__name__) for base in bases)
    known = (_LIBRARIES[name] for name in names if name in _LIBRARIES)
    return next(registered, None) or next(known, None)
