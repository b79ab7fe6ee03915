"""Find the operators of a model: experts, routers, and the dense rest by block.

Rules are tried in this order: an adapter registered for the class, a rule for a library's class, our own `MoELayer` (by
its attributes), lists of experts with a sibling router, stacked experts with a sibling router. A block that looks like
experts and fits no rule is an error that names the parameters; nothing is guessed. With `unknown="dense"` such a block
becomes a dense operator.

Invariant: every parameter is in exactly one operator, completely.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Literal

from torch import nn

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.errors import UnknownLayout
from lightning_moe_ckpt.operators._layers import MoELayerSpec
from lightning_moe_ckpt.operators._parameters import ParameterIndex
from lightning_moe_ckpt.operators._placement import Placement
from lightning_moe_ckpt.operators._set import OperatorSet, identify
from lightning_moe_ckpt.operators.adapters import (
    describe_module_list,
    describe_own,
    describe_stacked,
    find_adapter,
)

log = rank_logger(__name__)

_EXPERT = re.compile(r"expert", re.IGNORECASE)
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_experts", "num_routed_experts", "n_routed_experts")
_MAX_NAMED = 8


def discover(module: nn.Module, *, ep_size: int = 1, unknown: Literal["refuse", "dense"] = "refuse") -> OperatorSet:
    """Find all operators of `module`.

    Args:
        module: the model as it will train, with its parameters in place.
        ep_size: ranks that together hold all experts of an expert-parallel layer once.
        unknown: what to do with a block that looks like experts and fits no rule. `dense` takes it whole, so every rank
            must hold all of it: with `ep_size` above 1 the block is refused in any case.

    Returns:
        The operators of this rank, in a stable order.

    Raises:
        UnknownLayout: parameters could not be placed or cannot be captured slice by slice; the message names them.
    """
    index = ParameterIndex(module)
    refuse = unknown == "refuse" or ep_size > 1
    found = list(_find_layers(module, index, refuse=refuse))
    layers = [spec for _, spec in found if spec is not None]
    if not refuse:
        layers = _without_double(layers)
    _check_layers(layers, ep_size)
    placement = Placement(index, layers)
    suspects = _suspects(module, placement.unplaced, found, layers)
    if suspects:
        more = f" and {len(suspects) - _MAX_NAMED} more" if len(suspects) > _MAX_NAMED else ""
        named = f"{', '.join(sorted(suspects)[:_MAX_NAMED])}{more}"
        if refuse:
            raise UnknownLayout(
                f"These parameters look like experts, but nothing knows their layout: {named}. Describe their block "
                "with `register_adapter(cls, factory)`; a factory that returns `None` declares the block dense."
            )
        _say_whole(named)
    placement.place_rest(module)
    operators = placement.operators()
    dtypes = {fqn: param.dtype for fqn, param in index.params.items()}
    log.info("%d operators: %d MoE layers and the dense rest", len(operators), len(layers), alike=True)
    return OperatorSet(
        operators=operators,
        layers=tuple(layers),
        dtypes=dtypes,
        ep_size=ep_size,
        identity=identify(operators, layers, dtypes),
    )


def _find_layers(
    module: nn.Module, index: ParameterIndex, *, refuse: bool
) -> Iterator[tuple[str, MoELayerSpec | None]]:
    """Yield (fqn, spec) of all layers in the order of the model, and `(fqn, None)` for dense blocks."""
    closed: set[str] = set()
    for fqn, child in module.named_modules():
        if any(outer in closed for outer in _ancestors(fqn)):
            continue
        try:
            known, spec = _describe(module, fqn, child, index)
        except UnknownLayout as error:
            if refuse or _may_shard(child):
                raise
            _say_whole(f"{fqn} ({error})")
            known, spec = True, None
        if known:
            closed.add(fqn)
            yield fqn, spec


def _describe(module: nn.Module, fqn: str, child: nn.Module, index: ParameterIndex) -> tuple[bool, MoELayerSpec | None]:
    """Return whether a rule knows the block, and its spec; the spec of a dense block is `None`."""
    factory = find_adapter(child)
    if factory is not None:
        return True, factory(fqn, child, index)
    spec = (
        describe_own(fqn, child, index)
        or describe_module_list(module, fqn, child, index)
        or describe_stacked(module, fqn, child, index)
    )
    return spec is not None, spec


def _may_shard(block: nn.Module) -> bool:
    """Whether a block's library, or the user's adapter, may place experts on other ranks."""
    known = find_adapter(block)
    return known is not None and not type(block).__module__.startswith("transformers.")


def _say_whole(what: str) -> None:
    log.info("taken whole, as dense parameters, since nothing knows where their experts are: %s", what)


def _without_double(layers: list[MoELayerSpec]) -> list[MoELayerSpec]:
    """Drop layers that share a name; their parameters are placed one by one."""
    names = [layer.fqn for layer in layers]
    return [layer for layer in layers if names.count(layer.fqn) == 1]


def _check_layers(layers: list[MoELayerSpec], ep_size: int) -> None:
    names = [layer.fqn for layer in layers]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UnknownLayout(f"Blocks {twice} hold two groups of experts each; describe them with `register_adapter`.")
    for layer in layers:
        num_local = len(layer.local_expert_ids)
        if layer.holders == "expert_data" and num_local * ep_size != layer.num_experts:
            raise UnknownLayout(
                f"MoE layer `{layer.fqn}` has {num_local} of {layer.num_experts} experts on this rank, which does not "
                f"fit `expert_parallel={ep_size}`: every rank must hold equally many."
            )


def _suspects(
    module: nn.Module, rest: set[str], found: list[tuple[str, MoELayerSpec | None]], layers: list[MoELayerSpec]
) -> set[str]:
    """Return unplaced parameters that look like experts, by their name or by an attribute of an outer module."""
    dense_blocks = [fqn for fqn, spec in found if spec is None]
    rest = {fqn for fqn in rest if not _within_any(fqn, dense_blocks)}
    suspects = {fqn for fqn in rest if _named_expert(fqn)}
    for fqn in _undescribed(module, {*(layer.fqn for layer in layers), *dense_blocks}):
        suspects |= {name for name in rest if _within_any(name, [fqn])}
    return suspects


def _undescribed(module: nn.Module, described: set[str]) -> list[str]:
    """Return innermost modules with a number of experts that have no described block around or inside them."""
    around = {outer for fqn in described for outer in _ancestors(fqn)}
    say = [fqn for fqn, child in module.named_modules() if _num_experts(child) > 1]
    outer = {path for fqn in say for path in _ancestors(fqn) if path != fqn}
    return [fqn for fqn in say if fqn not in outer | around and not _within_any(fqn, described)]


def _named_expert(fqn: str) -> bool:
    """Whether a part of the name says expert, except for shared experts."""
    parts = fqn.split(".")
    hits = [i for i, part in enumerate(parts) if _EXPERT.search(part)]
    return bool(hits) and not any("shared" in part.lower() for part in parts[max(hits[0] - 1, 0) : hits[0] + 1])


def _num_experts(module: nn.Module) -> int:
    values = (getattr(module, name, None) for name in _NUM_EXPERTS)
    return max((v for v in values if isinstance(v, int) and not isinstance(v, bool)), default=0)


def _ancestors(path: str) -> Iterator[str]:
    """Yield the path itself and every module around it, up to the root `""`."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def _within_any(path: str, outers: Iterable[str]) -> bool:
    known = set(outers)
    return any(outer in known for outer in _ancestors(path))
