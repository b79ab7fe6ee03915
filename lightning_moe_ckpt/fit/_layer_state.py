"""Record the state of MoE layers outside of parameters and buffers: live capacity and plain attributes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_moe_ckpt.fit._extras import copied, require_storable
from lightning_moe_ckpt.operators import MoELayerSpec

LayerAttributes = dict[str, Any]


class LayerState:
    """Take and restore the state of all layers, through the views in their specs.

    Args:
        module: the model.
        layers: its MoE layers.

    Raises:
        ConfigurationError: a layer has state that cannot be stored exactly.
    """

    def __init__(self, module: nn.Module, layers: Sequence[MoELayerSpec]) -> None:
        self._module = module
        self._capacity = {layer.fqn: layer.live_capacity for layer in layers if layer.live_capacity is not None}
        self._extra = {layer.fqn: layer.extra for layer in layers if layer.extra is not None}
        self._graphs = [place for layer in layers for place in layer.graphs]
        taken = self.take()
        require_storable({f"MoE layer `{fqn}`, {what}": v for what, s in taken.items() for fqn, v in s.items()})

    def take(self) -> LayerAttributes:
        """Return the values, by kind and layer."""
        return {
            "capacity": {fqn: view.get(self._module) for fqn, view in self._capacity.items()},
            "extra": {fqn: copied(dict(extra.get(self._module))) for fqn, extra in self._extra.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Write `state` into the layers."""
        for fqn, view in self._capacity.items():
            if fqn in state["capacity"]:
                view.set(self._module, state["capacity"][fqn])
        for fqn, extra in self._extra.items():
            if fqn in state["extra"]:
                extra.set(self._module, state["extra"][fqn])

    def follow(self, state: Mapping[str, Any]) -> None:
        """Write `state` into the layers in replay, where frozen routers may have led it astray."""
        self.restore(state)

    def drop_graphs(self) -> None:
        """Detach tensors that layers hold with an autograd graph."""
        for fqn, name in self._graphs:
            owner = self._module.get_submodule(fqn)
            value = getattr(owner, name, None)
            if isinstance(value, Tensor) and value.grad_fn is not None:
                setattr(owner, name, value.detach())
