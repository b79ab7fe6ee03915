"""State of a layer outside its `state_dict`: plain attributes, such as a running load or a gate's noise.

It is captured with the step journal between two batches, and restored before the first batch of a resumed run.
Buffers do not need this: all of them are captured, including non-persistent ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class ExtraState(Protocol):
    """Gets and sets the plain attributes of a layer. Holds names only; each call gets the model."""

    def get(self, module: nn.Module) -> Mapping[str, Any]:
        """Return the state at a step boundary: numbers, strings, tensors, `None`, and lists or dicts of them.

        The caller copies it. Each rank gets its own state back.
        """

    def set(self, module: nn.Module, state: Mapping[str, Any]) -> None:
        """Restore what `get` returned, possibly in another process; tensors are on the CPU."""


@dataclass(frozen=True)
class AttributeState:
    """State in plain attributes of modules. `get` leaves out an absent attribute, and `set` removes it again."""

    places: tuple[tuple[str, str], ...]
    """(name of a module, attribute)."""

    def get(self, module: nn.Module) -> dict[str, Any]:
        """Return values by `module.attribute`."""
        found = {f"{fqn}.{name}": (module.get_submodule(fqn), name) for fqn, name in self.places}
        return {key: getattr(owner, name) for key, (owner, name) in found.items() if hasattr(owner, name)}

    def set(self, module: nn.Module, state: Mapping[str, Any]) -> None:
        """Write in place into tensors that fit, so that other references see the values; else assign."""
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
    """Copy a tensor to the device of the module's tensors; return other values as they are."""
    if not isinstance(value, Tensor):
        return value
    near = next(iter([*owner.parameters(), *owner.buffers()]), None)
    return value.clone() if near is None else value.to(near.device, copy=True)
