"""Count the tokens that experts process only because their capacity was raised, in the same forward.

Without boost an expert would have processed the same tokens, up to its normal capacity. This is exact for layers that
tell how many tokens a factor stands for, and needs no second forward. Nothing here waits for the device.

Shape suffixes: B sequences, S tokens of one, E all experts of the layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_moe_ckpt.moe._layer import in_backward
from lightning_moe_ckpt.operators import Capacity, CapacityView, ExpertCapacity, LoadCounter, MoELayerSpec, OperatorSet


class Measured(NamedTuple):
    """Counts of this rank since the last reading; int64 `[E]`."""

    extra: Tensor
    """Tokens that would have been dropped without boost."""
    kept: Tensor
    """Tokens processed."""
    room: Tensor
    """Tokens that could have been processed without boost; 0 where that is not known."""


class Meter(Protocol):
    """Count the tokens of one layer in training forwards, from construction to `remove`."""

    exact: bool
    """Whether `extra` is counted; else it is estimated."""

    def take(self, factor: float) -> Measured:
        """Return the counts since the last call, during which the layer's largest factor was `factor`."""

    def remove(self) -> None:
        """Stop counting."""


def meter_of(found: OperatorSet, layer: MoELayerSpec, module: nn.Module, base: Capacity) -> Meter:
    """Return the most exact meter for a layer whose capacity without boost is `base`."""
    view = layer.live_capacity
    assert view is not None
    block = module.get_submodule(layer.fqn)
    if callable(getattr(block, "capacity", None)) and isinstance(getattr(block, "tokens_per_expert", None), Tensor):
        return _SlotMeter(layer, view, module, base)
    if isinstance(view, ExpertCapacity) and view.attribute == "expert_capacity":
        return _MaskMeter(layer, view, module, base)
    return _LoadMeter(found, layer, module)


class HookedMeter:
    """Base of meters that add up counts in hooks."""

    exact = True

    def __init__(self, num_experts: int) -> None:
        self._sums = torch.zeros(3, num_experts, dtype=torch.int64)
        self._handles: list[RemovableHandle] = []

    def take(self, factor: float) -> Measured:
        """Return the counts since the last call."""
        taken, self._sums = self._sums, torch.zeros_like(self._sums)
        return Measured(*taken)

    def remove(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()

    def _add(self, extra_E: Tensor, kept_E: Tensor, room_E: Tensor) -> None:
        if self._sums.device != kept_E.device:
            self._sums = self._sums.to(kept_E.device)
        self._sums += torch.stack([extra_E, kept_E, room_E])

    def _add_kept(self, kept_BE: Tensor, base_E: Tensor) -> None:
        """Add the tokens that each sequence kept, of which `base_E` would have been kept without boost."""
        kept_BE, base_E = kept_BE.detach().to(torch.int64), base_E.to(torch.int64)
        extra_E = (kept_BE - base_E).clamp(min=0).sum(dim=0)
        self._add(extra_E, kept_BE.sum(dim=0), base_E * kept_BE.shape[0])


class _SlotMeter(HookedMeter):
    """Meter for layers that keep a running count and can turn a factor into slots per expert."""

    def __init__(self, layer: MoELayerSpec, view: CapacityView, module: nn.Module, base: Capacity) -> None:
        super().__init__(layer.num_experts)
        self._view, self._module, self._base, self._before = view, module, base, torch.zeros(0)
        self._block: Any = module.get_submodule(layer.fqn)
        self._handles.append(self._block.register_forward_pre_hook(self._begin))
        self._handles.append(self._block.register_forward_hook(self._end))

    def _begin(self, block: Any, args: tuple[Any, ...]) -> None:
        self._before = block.tokens_per_expert.clone()

    def _end(self, block: Any, args: tuple[Any, ...], out: object) -> None:
        if not block.training or in_backward():
            return
        kept_E = block.tokens_per_expert
        x = args[0]
        self._add_kept(
            (kept_E - self._before.to(kept_E.device))[None], self._base_slots(x.numel() // x.shape[-1], kept_E)
        )

    def _base_slots(self, num_tokens: int, like_E: Tensor) -> Tensor:
        live = self._view.get(self._module)
        self._view.set(self._module, self._base)
        try:
            slots = self._block.capacity(num_tokens)
        finally:
            self._view.set(self._module, live)
        return slots.to(like_E) if isinstance(slots, Tensor) else torch.full_like(like_E, slots)


class _MaskMeter(HookedMeter):
    """Meter for Switch routers, which give a mask `[B, S, E]` of tokens within capacity, per sequence."""

    def __init__(self, layer: MoELayerSpec, view: ExpertCapacity, module: nn.Module, base: Capacity) -> None:
        super().__init__(layer.num_experts)
        self._base_E = torch.tensor(base if isinstance(base, tuple) else (base,) * layer.num_experts)
        self._handles.append(module.get_submodule(view.module).register_forward_hook(self._end))

    def _end(self, router: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if router.training and not in_backward():
            kept_BE = out[0].sum(dim=-2).reshape(-1, out[0].shape[-1])
            self._base_E = self._base_E.to(kept_BE.device)
            self._add_kept(kept_BE, self._base_E)


class _LoadMeter:
    """Meter for other layers, of which only processed tokens are known; it estimates `extra` from the factor."""

    exact = False

    def __init__(self, found: OperatorSet, layer: MoELayerSpec, module: nn.Module) -> None:
        self._counter = LoadCounter(replace(found, layers=(layer,)), module)
        self._counter.install()

    def take(self, factor: float) -> Measured:
        kept_E = self._counter.read_and_reset()
        return Measured((kept_E * (1 - 1 / factor)).floor().to(torch.int64), kept_E, torch.zeros_like(kept_E))

    def remove(self) -> None:
        self._counter.remove()
