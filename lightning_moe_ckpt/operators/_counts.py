"""Tokens per expert since the last reading, over all layers, for the order of capture."""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_moe_ckpt.operators._set import OperatorSet
from lightning_moe_ckpt.operators._taps import TokenCounts

log = logging.getLogger(__name__)


class LoadCounter:
    """Counts the tokens this rank sends to each expert. Experts elsewhere in the world are counted there.

    The vector of counts has one entry per expert of each layer, in the order of `OperatorSet.layers`
    (`OperatorSet.count_offsets` says where each begins), also for experts on other ranks: summed over the ranks that
    see different tokens, it is the same everywhere.

    Args:
        operators: found in `module`.
        module: the model; hooks are registered on its modules while installed.
    """

    def __init__(self, operators: OperatorSet, module: nn.Module) -> None:
        self._layers, self._module = operators.layers, module
        self._counts = {layer.fqn: TokenCounts(layer.num_experts) for layer in operators.layers}
        self._handles: list[RemovableHandle] = []
        self._installed = False

    @property
    def uncounted(self) -> tuple[str, ...]:
        """Layers whose tokens cannot be counted; their experts keep a fixed order."""
        return tuple(layer.fqn for layer in self._layers if layer.count is None)

    def install(self) -> None:
        """Start counting; a second call changes nothing."""
        if self._installed:
            return
        self._installed = True
        for layer in self._layers:
            if layer.count is not None:
                self._handles += layer.count.install(self._module, self._counts[layer.fqn])
        if self.uncounted:
            log.warning("tokens cannot be counted in %s; these experts are captured in a fixed order", self.uncounted)

    def read_and_reset(self) -> Tensor:
        """Counts since the last call, int64 `[sum of num_experts]`; nothing waits for the device here.

        On the device of the layers, or on the CPU if they are spread over several.
        """
        if self._installed:
            for layer in self._layers:
                if layer.count is not None:
                    layer.count.drain(self._module, self._counts[layer.fqn])
        counts = [self._counts[layer.fqn].take() for layer in self._layers]
        if len({c.device for c in counts}) > 1:
            counts = [c.cpu() for c in counts]
        return torch.cat(counts) if counts else torch.zeros(0, dtype=torch.int64)

    def remove(self) -> None:
        """Stop counting and take all hooks off; what was counted can still be read."""
        if self._installed:
            for layer in self._layers:
                if layer.count is not None:
                    layer.count.drain(self._module, self._counts[layer.fqn])
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._installed = False
