"""Give every parameter to exactly one operator.

Invariant: the slices of all operators tile every parameter. Parameters that share bytes are in one operator.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from torch import nn

from lightning_moe_ckpt.errors import UnknownLayout
from lightning_moe_ckpt.operators._dense import DenseGroups
from lightning_moe_ckpt.operators._layers import MoELayerSpec, whole_slice
from lightning_moe_ckpt.operators._parameters import ParameterIndex
from lightning_moe_ckpt.operators._types import Operator, ParamSlice


class Placement:
    """Assigns slices to operators: the constructor places layers, `place_rest` the rest, `operators` returns all.

    Args:
        index: all parameters.
        layers: MoE layers found in the model.

    Raises:
        UnknownLayout: two adapters claim one parameter, or an adapter names one that does not exist.
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
        """Group the parameters that no layer has, then join those that share bytes."""
        groups = DenseGroups(module, self.unplaced)
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
        router = Operator(name=name, kind="router", slices=(), layer=layer.fqn, buffers=layer.router_buffers)
        self._empty[router.name] = router
        self._claim([*dict.fromkeys(s.fqn for slices in layer.experts.values() for s in slices), *layer.router], layer)
        for fqn in layer.router:
            self._put_whole(fqn, router.name)
        for expert, slices in layer.experts.items():
            empty = _empty_expert(layer, expert)
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
        torn = [fqn for fqn in ordered if fqn not in self._whole]
        if torn:
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


def _empty_expert(layer: MoELayerSpec, expert: int) -> Operator:
    return Operator(
        name=f"{layer.prefix}/expert.{expert}",
        kind="expert",
        slices=(),
        layer=layer.fqn,
        expert_idx=expert,
        holders=layer.holders,
        freeze="skip",
    )
