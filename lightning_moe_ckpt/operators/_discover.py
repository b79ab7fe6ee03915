"""Find a model's operators, experts, routers, and the dense rest by block: each parameter belongs to exactly one.

Rules for MoE layers are tried in this order: an adapter registered for the class, a rule for a library's class, our own
`MoELayer` (by its attributes), lists of experts with a sibling router, stacked experts with a sibling router. A block that
looks like experts and fits no rule is an error that names the parameters; nothing is guessed. With `unknown="dense"` such a
block becomes a dense operator.

Parameters outside MoE layers are grouped: one dense operator per transformer block, the rest by child module. Blocks are the
children of the outermost `ModuleList` on a parameter's path (or of a `ModuleDict` by numbers, or of a `Sequential` or
`ModuleDict` that repeats a class). A module that contains blocks is opened: embeddings, final norm and head beside the blocks
become operators of their own, never one giant operator.

Invariant: the slices of all operators tile every parameter. Parameters that share bytes are in one operator.

Source: MoEvement (2026), Appendix E (each layer of a dense model is an operator).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Literal

from torch import nn

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.errors import UnknownLayout
from lightning_moe_ckpt.operators._operator import (
    MoELayerSpec,
    Operator,
    OperatorSet,
    ParamSlice,
    identify,
    whole_slice,
)
from lightning_moe_ckpt.operators._parameters import ParameterIndex, child_slots, join
from lightning_moe_ckpt.operators.adapters import describe_module_list, describe_own, describe_stacked, find_adapter

log = rank_logger(__name__)

_EXPERT = re.compile(r"expert", re.IGNORECASE)
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_experts", "num_routed_experts", "n_routed_experts")
_MAX_NAMED = 8


def discover(module: nn.Module, *, ep_size: int = 1, unknown: Literal["refuse", "dense"] = "refuse") -> OperatorSet:
    """Find all operators of a model as it will train, with its parameters in place. Return those of this rank, in a
    stable order. Raises `UnknownLayout` if parameters could not be placed or cannot be captured slice by slice; the
    message names them.

    `ep_size` ranks together hold all experts of an expert-parallel layer once. A block that looks like experts and fits
    no rule is refused, or with `"dense"` taken whole, so every rank must hold all of it: with `ep_size` above 1 it is
    refused in any case.
    """
    index = ParameterIndex(module)
    refuse = unknown == "refuse" or ep_size > 1
    found = list(_find_layers(module, index, refuse=refuse))
    layers = [spec for _, spec in found if spec is not None]
    if not refuse:  # parameters of layers that share a name are placed one by one
        names = [layer.fqn for layer in layers]
        layers = [layer for layer in layers if names.count(layer.fqn) == 1]
    _check_layers(layers, ep_size)
    placement = Placement(index, layers)
    if suspects := _suspects(module, placement.unplaced, found, layers):
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
        fingerprint=identify(operators, layers, dtypes),
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
            # A block's library, or the user's adapter, may place experts on other ranks.
            may_shard = find_adapter(child) is not None and not type(child).__module__.startswith("transformers.")
            if refuse or may_shard:
                raise
            _say_whole(f"{fqn} ({error})")
            known, spec = True, None
        if known:
            closed.add(fqn)
            yield fqn, spec


def _describe(module: nn.Module, fqn: str, child: nn.Module, index: ParameterIndex) -> tuple[bool, MoELayerSpec | None]:
    """Return whether a rule knows the block, and its spec; the spec of a dense block is `None`."""
    if (factory := find_adapter(child)) is not None:
        return True, factory(fqn, child, index)
    spec = (
        describe_own(fqn, child, index)
        or describe_module_list(module, fqn, child, index)
        or describe_stacked(module, fqn, child, index)
    )
    return spec is not None, spec


def _say_whole(what: str) -> None:
    log.info("taken whole, as dense parameters, since nothing knows where their experts are: %s", what)


def _check_layers(layers: list[MoELayerSpec], ep_size: int) -> None:
    names = [layer.fqn for layer in layers]
    if twice := sorted({name for name in names if names.count(name) > 1}):
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
    """Return innermost modules with a number of experts, but without a described block around or inside them."""
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


_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class Placement:
    """Assigns slices to operators: the constructor places layers, `place_rest` the rest, `operators` returns all.
    Raises `UnknownLayout` if two adapters claim one parameter, or an adapter names an absent parameter.
    """

    def __init__(self, index: ParameterIndex, layers: Iterable[MoELayerSpec]) -> None:
        self._index = index
        self._empty: dict[str, Operator] = {}  # operators without slices, by name
        self._whole: dict[str, tuple[str, ParamSlice]] = {}  # parameters that one operator has completely
        self._torn: dict[str, list[tuple[str, ParamSlice]]] = defaultdict(list)  # stacked experts
        self._claims: dict[str, str] = {}
        for layer in layers:
            self._add_layer(layer)

    @property
    def unplaced(self) -> set[str]:
        """Return the parameters that no layer has."""
        return set(self._index.params) - set(self._claims)

    def place_rest(self, module: nn.Module) -> None:
        """Group the parameters outside layers, then join groups that share bytes."""
        groups = _DenseGroups(module, self.unplaced)
        for fqn in sorted(self.unplaced):
            name = groups.group(fqn)
            self._empty.setdefault(name, Operator(name=name, kind="dense", slices=()))
            self._put_whole(fqn, name)
        for group in self._index.sharing():
            self._join(group)

    def operators(self) -> tuple[Operator, ...]:
        """Return all operators with slices, in the order of the parameters."""
        slices: dict[str, list[ParamSlice]] = defaultdict(list)
        for fqn in self._index.params:
            placed = [self._whole[fqn]] if fqn in self._whole else sorted(self._torn[fqn], key=lambda p: p[1].start)
            self._check_tiles(fqn, [piece for _, piece in placed])
            for name, piece in placed:
                slices[name].append(piece)
        rank = {fqn: i for i, fqn in enumerate(self._index.params)}
        found = [replace(self._empty[name], slices=tuple(pieces)) for name, pieces in slices.items()]
        return tuple(sorted(found, key=lambda op: (rank[op.slices[0].fqn], op.slices[0].start)))

    def _add_layer(self, layer: MoELayerSpec) -> None:
        name = f"{layer.prefix}/router"
        self._empty[name] = Operator(name=name, kind="router", slices=(), layer=layer.fqn, buffers=layer.router_buffers)
        self._claim([*dict.fromkeys(s.fqn for slices in layer.experts.values() for s in slices), *layer.router], layer)
        for fqn in layer.router:
            self._put_whole(fqn, name)
        for expert, slices in layer.experts.items():
            empty = Operator(
                name=f"{layer.prefix}/expert.{expert}",
                kind="expert",
                slices=(),
                layer=layer.fqn,
                expert_idx=expert,
                holders=layer.holders,
            )
            self._empty[empty.name] = empty
            for piece in slices:
                if piece.numel == self._index.params[piece.fqn].numel():
                    self._whole[piece.fqn] = (empty.name, piece)
                else:
                    self._torn[piece.fqn].append((empty.name, piece))

    def _claim(self, fqns: Iterable[str], layer: MoELayerSpec) -> None:
        for fqn in fqns:
            if fqn not in self._index.params:
                raise UnknownLayout(f"The adapter of `{layer.fqn}` names `{fqn}`, which is no parameter of the model.")
            if fqn in self._claims:
                raise UnknownLayout(f"`{fqn}` is claimed by `{self._claims[fqn]}` and `{layer.fqn}`; fix the adapter.")
            self._claims[fqn] = layer.fqn

    def _put_whole(self, fqn: str, name: str) -> None:
        self._whole[fqn] = (name, whole_slice(fqn, self._index.params[fqn]))

    def _join(self, group: tuple[str, ...]) -> None:
        """Move parameters that share bytes to their first owner that replay never skips."""
        ordered = [fqn for fqn in self._index.params if fqn in group]
        if torn := [fqn for fqn in ordered if fqn not in self._whole]:
            raise UnknownLayout(f"Stacked experts {torn} share memory with others of {ordered}; untie them.")
        owners = [self._whole[fqn][0] for fqn in ordered]
        owner = next((name for name in owners if self._empty[name].kind != "expert"), owners[0])
        for fqn in ordered:
            self._whole[fqn] = (owner, self._whole[fqn][1])

    def _check_tiles(self, fqn: str, pieces: list[ParamSlice]) -> None:
        end = 0
        for piece in pieces:
            if piece.start != end:
                raise UnknownLayout(f"Element {end} of `{fqn}` is not in exactly one operator; fix its adapter.")
            end = piece.stop
        if end != self._index.params[fqn].numel():
            raise UnknownLayout(f"`{fqn}` is placed only up to element {end}; fix its adapter.")


class _DenseGroups:
    """Assigns each dense parameter, `fqns`, to a group."""

    def __init__(self, module: nn.Module, fqns: Iterable[str]) -> None:
        self._modules = dict(module.named_modules(remove_duplicate=False))
        owners = {fqn: fqn.rpartition(".")[0] for fqn in fqns}
        self._live = {prefix for owner in set(owners.values()) for prefix in _ancestors(owner)} | {""}
        self._containers = {prefix for prefix in self._live if self._repeats_blocks(prefix)}
        self._open = {outer for inner in self._containers for outer in _ancestors(inner)} | {""}
        self._open_only_children(set(owners.values()))

    def group(self, fqn: str) -> str:
        """Return the group of parameter `fqn`: a block, a child module, or the opened module that owns it."""
        owner = fqn.rpartition(".")[0]
        path = [*_ancestors(owner)][::-1]
        for outer, inner in pairwise(path):
            if outer in self._containers:
                return inner
        return next((prefix for prefix in path if prefix not in self._open), owner) or "root"

    def _repeats_blocks(self, prefix: str) -> bool:
        module = self._modules[prefix]
        slots = child_slots(module)
        kinds = Counter(type(child) for name, child in slots.items() if child is not None and self._has(prefix, name))
        if isinstance(module, nn.ModuleList):
            return bool(kinds)
        if isinstance(module, nn.ModuleDict) and all(name.isdecimal() for name in slots):
            return bool(kinds)  # blocks by their number in a model of which this is a part
        if isinstance(module, nn.ModuleDict):
            # Named stages are no blocks, even if each of them is a Sequential.
            return any(n > 1 and not issubclass(kind, _CONTAINERS) for kind, n in kinds.items())
        return isinstance(module, nn.Sequential) and any(n > 1 for n in kinds.values())

    def _has(self, prefix: str, child: str) -> bool:
        return join(prefix, child) in self._live

    def _open_only_children(self, owners: set[str]) -> None:
        """Open a wrapper's only child: otherwise a LightningModule's `self.model` would be one giant operator."""
        prefix = ""
        while prefix not in self._containers and prefix not in owners:
            children = [name for name in child_slots(self._modules[prefix]) if self._has(prefix, name)]
            if len(children) != 1:
                return
            prefix = join(prefix, children[0])
            if not any(self._has(prefix, name) for name in child_slots(self._modules[prefix])):
                return
            self._open.add(prefix)
