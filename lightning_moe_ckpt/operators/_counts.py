"""Count tokens, router probabilities or capacity per expert between two readings, over all layers."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.operators._layers import MoELayerSpec
from lightning_moe_ckpt.operators._set import OperatorSet
from lightning_moe_ckpt.operators._taps import CountTap, TokenCounts

log = rank_logger(__name__)

Measure = Literal["tokens", "probabilities", "capacity"]
"""What to add up: tokens an expert processed, the router's probabilities for it, tokens it could have taken."""


class LoadCounter:
    """Counts the tokens that this rank sends to each expert.

    The vector of counts has one entry per expert of each layer, also for experts on other ranks, in the order of
    `OperatorSet.layers`; `OperatorSet.count_offsets` says where each layer begins. Summed over the ranks that see
    different tokens, it is the same everywhere.

    Args:
        operators: operators of `module`.
        module: the model; hooks are registered on its modules while installed.
        measure: what to add up.
    """

    def __init__(self, operators: OperatorSet, module: nn.Module, measure: Measure = "tokens") -> None:
        self._module, self._measure = module, measure
        dtype = torch.float64 if measure == "probabilities" else torch.int64
        self._taps: list[tuple[MoELayerSpec, CountTap | None, TokenCounts]] = [
            (layer, _tap(layer, measure), TokenCounts(layer.num_experts, dtype)) for layer in operators.layers
        ]
        self._dtype = dtype
        self._handles: list[RemovableHandle] = []
        self._installed = False

    @property
    def uncounted(self) -> tuple[str, ...]:
        """Layers that cannot be measured; without token counts their experts keep a fixed order."""
        return tuple(layer.fqn for layer, tap, _ in self._taps if tap is None)

    def install(self) -> None:
        """Start counting; a second call changes nothing."""
        if self._installed:
            return
        self._installed = True
        for _, tap, counts in self._taps:
            if tap is not None:
                self._handles += tap.install(self._module, counts)
        if self.uncounted:
            log.warning(
                "%s cannot be counted in %s; these experts are captured in a fixed order", self._measure, self.uncounted
            )

    def distrust(self, layers: Collection[str]) -> None:
        """Ignore these layers, whose counts are wrong, from the last reading on."""
        for layer, _, counts in self._taps:
            if layer.fqn in layers:
                counts.mute()

    def read_and_reset(self) -> Tensor:
        """Return the sums since the last call, `[sum of num_experts]`, without waiting for the device.

        Returns:
            int64, or float64 for probabilities; on the device of the layers, or on the CPU if they are on several.
        """
        self._drain()
        taken = [counts.take() for _, _, counts in self._taps]
        if len({c.device for c in taken}) > 1:
            taken = [c.cpu() for c in taken]
        return torch.cat(taken) if taken else torch.zeros(0, dtype=self._dtype)

    def remove(self) -> None:
        """Stop counting and remove all hooks; the counts so far can still be read."""
        self._drain()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._installed = False

    def _drain(self) -> None:
        if self._installed:
            for _, tap, counts in self._taps:
                if tap is not None:
                    tap.drain(self._module, counts)


def _tap(layer: MoELayerSpec, measure: Measure) -> CountTap | None:
    return {"tokens": layer.count, "probabilities": layer.probabilities, "capacity": layer.capacity}[measure]
