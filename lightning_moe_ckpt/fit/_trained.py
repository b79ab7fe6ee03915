"""Record what the user lets train: `requires_grad` of every parameter, and groups added to the optimizer.

If the module zeroes gradients in its own way, it is also recorded which parameters have a gradient: the optimizer skips
parameters without one, but moves parameters whose gradient is zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer

TrainedState = dict[str, Any]


class Trained:
    """Take and restore which parameters and optimizer groups train.

    Args:
        module: the module that is trained.
        optimizer: the optimizer as the user configured it, with the groups that every process of the run begins with.
    """

    def __init__(self, module: LightningModule, optimizer: Optimizer) -> None:
        self._params, self._optimizer = dict(module.named_parameters()), optimizer
        self._names = {id(param): name for name, param in self._params.items()}
        self._keeps_gradients = is_overridden("optimizer_zero_grad", module)
        self._num_configured = len(optimizer.param_groups)

    @property
    def num_groups(self) -> int:
        """Number of groups that the optimizer has now."""
        return len(self._optimizer.param_groups)

    def take(self) -> TrainedState:
        """Return the state, in types that the journal stores."""
        added = self._optimizer.param_groups[self._num_configured :]
        graded = (param.grad is not None for param in self._params.values()) if self._keeps_gradients else ()
        return {
            "gradients": bytes(graded),
            "requires_grad": bytes(param.requires_grad for param in self._params.values()),
            "added": [[self._names[id(param)] for param in group["params"]] for group in added],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state. New groups get the optimizer's defaults; restoring learning rates sets their fields later."""
        for param, trains in zip(self._params.values(), state["requires_grad"], strict=True):
            if param.requires_grad != bool(trains):  # most have not changed
                param.requires_grad_(bool(trains))
        for param, graded in zip(self._params.values(), state.get("gradients", b""), strict=False):
            if graded and param.grad is None:
                param.grad = torch.zeros_like(param)
        for names in state["added"][self.num_groups - self._num_configured :]:
            self._optimizer.add_param_group({"params": [self._params[name] for name in names]})
