"""Find the operators of a model: experts, routers, and the dense rest by block.

Layers are found in this order: an adapter registered for the class, a rule for a class of a library, our own `MoELayer`
(by its attributes), lists of experts with a sibling router, stacked experts with a sibling router. Whatever looks like experts and was placed by
none of them is an error that names the parameters; nothing is guessed.

Invariant: every parameter is in exactly one operator, completely.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator

from torch import nn

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
    find_class_rule,
)

log = logging.getLogger(__name__)

_EXPERT = re.compile(r"expert", re.IGNORECASE)
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_experts", "num_routed_experts", "n_routed_experts")
_MAX_NAMED = 8


def discover(module: nn.Module, *, ep_size: int = 1) -> OperatorSet:
    """Find all operators of `module`.

    Args:
        module: the model as it will train, with its parameters in place.
        ep_size: ranks that together hold all experts of an expert-parallel layer once.

    Returns:
        The operators of this rank, in a stable order.

    Raises:
        UnknownLayout: parameters could not be placed or cannot be captured slice by slice; the message names them.
    """
    index = ParameterIndex(module)
    found = list(_find_layers(module, index))
    layers = [spec for _, spec in found if spec is not None]
    _check_layers(layers, ep_size)
    placement = Placement(index, layers)
    dense_blocks = [fqn for fqn, spec in found if spec is None]
    _refuse_unknown(module, placement.unplaced, [layer.fqn for layer in layers], dense_blocks)
    placement.place_rest(module)
    operators = placement.operators()
    dtypes = {fqn: param.dtype for fqn, param in index.params.items()}
    log.info("%d operators: %d MoE layers and the dense rest", len(operators), len(layers))
    return OperatorSet(
        operators=operators,
        layers=tuple(layers),
        dtypes=dtypes,
        ep_size=ep_size,
        identity=identify(operators, layers, dtypes),
    )


def _find_layers(module: nn.Module, index: ParameterIndex) -> Iterator[tuple[str, MoELayerSpec | None]]:
    """Specs of all layers in the order of the model, and `(fqn, None)` for blocks that an adapter declares dense."""
    closed: set[str] = set()
    for fqn, child in module.named_modules():
        if any(outer in closed for outer in _ancestors(fqn)):
            continue
        factory = find_adapter(child) or find_class_rule(child)
        if factory is not None:
            spec = factory(fqn, child, index)
        else:
            spec = (
                describe_own(fqn, child, index)
                or describe_module_list(module, fqn, child, index)
                or describe_stacked(module, fqn, child, index)
            )
        if factory is not None or spec is not None:
            closed.add(fqn)
            yield fqn, spec


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


def _refuse_unknown(module: nn.Module, rest: set[str], layers: Iterable[str], dense_blocks: list[str]) -> None:
    """Refuse parameters that look routed but were not placed: by name, or by an attribute of a module around them."""
    rest = {fqn for fqn in rest if not _within_any(fqn, dense_blocks)}
    suspects = {fqn for fqn in rest if _named_expert(fqn)}
    for fqn in _undescribed(module, {*layers, *dense_blocks}):
        suspects |= {name for name in rest if _within_any(name, [fqn])}
    if suspects:
        more = f" and {len(suspects) - _MAX_NAMED} more" if len(suspects) > _MAX_NAMED else ""
        raise UnknownLayout(
            f"These parameters look like experts, but nothing knows their layout: "
            f"{', '.join(sorted(suspects)[:_MAX_NAMED])}{more}. Describe their block with "
            "`register_adapter(cls, factory)`; a factory that returns `None` declares the block dense."
        )


def _undescribed(module: nn.Module, described: set[str]) -> list[str]:
    """Innermost modules that say they have experts and have no described block around or inside them."""
    around = {outer for fqn in described for outer in _ancestors(fqn)}
    say = [fqn for fqn, child in module.named_modules() if _num_experts(child) > 1]
    outer = {path for fqn in say for path in _ancestors(fqn) if path != fqn}
    return [fqn for fqn in say if fqn not in outer | around and not _within_any(fqn, described)]


def _named_expert(fqn: str) -> bool:
    """Whether a part of the name speaks of experts that are not shared by all tokens."""
    parts = fqn.split(".")
    hits = [i for i, part in enumerate(parts) if _EXPERT.search(part)]
    return bool(hits) and not any("shared" in part.lower() for part in parts[max(hits[0] - 1, 0) : hits[0] + 1])


def _num_experts(module: nn.Module) -> int:
    values = (getattr(module, name, None) for name in _NUM_EXPERTS)
    return max((v for v in values if isinstance(v, int) and not isinstance(v, bool)), default=0)


def _ancestors(path: str) -> Iterator[str]:
    """The path itself and every module around it, up to the root `""`."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def _within_any(path: str, outers: Iterable[str]) -> bool:
    known = set(outers)
    return any(outer in known for outer in _ancestors(path))
