"""State of a layer that is in no `state_dict`: plain attributes, such as a running load or a gate's noise.

It is taken with the step journal, at the moment between two batches, and put back before the first one of a resumed run.
Buffers need none of this: all of them are captured, non-persistent ones too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class ExtraState(Protocol):
    """Gets and sets what a layer keeps in plain attributes. Holds names only; the model is given at each call."""

    def get(self, module: nn.Module) -> Mapping[str, Any]:
        """The state at a step boundary, as numbers, strings, tensors, `None`, and lists or dicts of them.

        The caller copies it. It is per rank: what differs between ranks comes back to the rank it is from.
        """

    def set(self, module: nn.Module, state: Mapping[str, Any]) -> None:
        """Continue from what `get` returned, maybe in another process; tensors come on the CPU."""


@dataclass(frozen=True)
class AttributeState:
    """Plain attributes of modules; one that a module does not have (yet) is left out, and removed again by `set`."""

    places: tuple[tuple[str, str], ...]
    """(name of a module, attribute)."""

    def get(self, module: nn.Module) -> dict[str, Any]:
        """Values by `module.attribute`."""
        found = {f"{fqn}.{name}": (module.get_submodule(fqn), name) for fqn, name in self.places}
        return {key: getattr(owner, name) for key, (owner, name) in found.items() if hasattr(owner, name)}

    def set(self, module: nn.Module, state: Mapping[str, Any]) -> None:
        """Write into tensors that fit, so that whoever else refers to them sees it; else assign."""
        for fqn, name in self.places:
            owner, key = module.get_submodule(fqn), f"{fqn}.{name}"
            live = getattr(owner, name, None)
            if key not in state:
                if hasattr(owner, name):
                    delattr(owner, name)
            elif isinstance(live, Tensor) and isinstance(state[key], Tensor) and _fits(live, state[key]):
                with torch.no_grad():
                    live.copy_(state[key])
            else:
                setattr(owner, name, _placed(state[key], owner))


def _fits(live: Tensor, stored: Tensor) -> bool:
    return live.shape == stored.shape and live.dtype == stored.dtype


def _placed(value: Any, owner: nn.Module) -> Any:
    """A tensor goes to the device of the module's own."""
    if not isinstance(value, Tensor):
        return value
    near = next(iter([*owner.parameters(), *owner.buffers()]), None)
    return value.clone() if near is None else value.to(near.device, copy=True)
