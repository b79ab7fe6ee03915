"""Take the state that users attach to a run: callbacks, the module's `on_save_checkpoint`, the data module.

All of it is optional and of any type. State that the journal cannot store exactly is left out, and a warning names it
once: it starts anew after a restart, while the rest of the run is restored.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks.spike import SpikeDetection
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.journal import refusals

log = logging.getLogger(__name__)

_GIVEN = ("state_dict", "epoch", "global_step")
"""Keys of Lightning's checkpoint that a module's hook may expect to find; they are not stored as its state."""


class Extras:
    """Take users' state, and remember which of it cannot be stored."""

    def __init__(self) -> None:
        self._refused: set[str] = set()
        self._accepted: set[str] = set()

    def take_callbacks(self, callbacks: Sequence[Callback]) -> dict[str, Any]:
        """Return the states of callbacks, by state key."""
        for callback in callbacks:
            if isinstance(callback, SpikeDetection) and not is_overridden("load_state_dict", callback, SpikeDetection):
                self._refuse(
                    callback.state_key, "Lightning's class cannot load what it saves; its running mean begins anew"
                )
        states = {c.state_key: c.state_dict() for c in callbacks if c.state_key not in self._refused}
        return {key: copied(state) for key, state in states.items() if state and self._storable(key, state)}

    def take_module(self, module: LightningModule) -> dict[str, Any]:
        """Return the entries that the module's `on_save_checkpoint` adds to a checkpoint."""
        name = f"`{type(module).__qualname__}.on_save_checkpoint`"
        if name in self._refused or not is_overridden("on_save_checkpoint", module):
            return {}
        checkpoint: dict[str, Any] = {
            "state_dict": {},
            "epoch": module.current_epoch,
            "global_step": module.global_step,
        }
        try:
            module.on_save_checkpoint(checkpoint)
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            self._refuse(name, f"it raised {error!r}; it is called without the model's state")
            return {}
        added = {key: value for key, value in checkpoint.items() if key not in _GIVEN}
        return copied(added) if self._storable(name, added) else {}

    def take_datamodule(self, datamodule: LightningDataModule | None) -> dict[str, Any]:
        """Return the data module's `state_dict`."""
        if datamodule is None or not is_overridden("state_dict", datamodule):
            return {}
        name, state = f"`{type(datamodule).__qualname__}.state_dict`", datamodule.state_dict()
        return copied(state) if name not in self._refused and self._storable(name, state) else {}

    def _storable(self, name: str, state: object) -> bool:
        if name not in self._accepted and name not in self._refused:
            reasons = refusals(state)
            if reasons:
                self._refuse(name, "; ".join(reasons[:3]))
            else:
                self._accepted.add(name)  # checked once: a later change of type fails a window and is reported then
        return name not in self._refused

    def _refuse(self, name: str, reason: str) -> None:
        if name in self._refused:
            return
        self._refused.add(name)
        log.warning("the state of %s is not restored after a restart: %s", name, reason)


def require_storable(states: Mapping[str, object]) -> None:
    """Raise if some of `states`, on which training depends, cannot be stored exactly.

    Raises:
        ConfigurationError: some values cannot be stored; the message names them.
    """
    for name, state in states.items():
        reasons = refusals(state)
        if reasons:
            raise ConfigurationError(
                f"The state of {name} cannot be stored exactly: {'; '.join(reasons[:3])}. "
                "Give it a `state_dict` of plain values and tensors."
            )


def copied(value: Any) -> Any:
    """Return a deep copy with tensors detached, so that no journal shares memory that training changes later."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) is dict:
        return {key: copied(each) for key, each in value.items()}
    if type(value) is list:
        return [copied(each) for each in value]
    return copy.deepcopy(value)
