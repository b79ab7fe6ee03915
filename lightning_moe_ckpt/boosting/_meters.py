"""Count what raising the capacity of some experts, and lowering that of others, changes; in the same forward.

One definition for every layer: an expert that processed `k` of the `d` tokens that chose it would have processed
`min(d, b)` with the `b` slots that it has without boost. The difference is what the boost has changed: above zero it is
*extra*, below zero it was *displaced*, dropped because the expert has given slots away. Where drops are not visible, no
expert gives any, so that `min(k, b)` says the same. Only `b` is found in different ways, and where a library does not
show its capacity, it is estimated from its busiest expert. Nothing here waits for the device.

Shape suffixes: B sequences, S tokens of one, E all experts of the layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_moe_ckpt.moe._layer import in_backward
from lightning_moe_ckpt.operators import Capacity, CapacityView, ExpertCapacity, LoadCounter, MoELayerSpec, OperatorSet
from lightning_moe_ckpt.operators.adapters import tutel_slots


class Measured(NamedTuple):
    """Counts of this rank since the last reading; float64 `[E]`, all but `use` whole numbers."""

    extra: Tensor
    """Tokens that would have been dropped without boost."""
    displaced: Tensor
    """Tokens that were dropped, and would not have been without boost."""
    kept: Tensor
    """Tokens processed."""
    room: Tensor
    """Tokens that could have been processed without boost; 0 where that is not known."""
    use: Tensor
    """Largest part of that in one forward that tokens wanted, dropped ones included; over sequences, where these have
    slots of their own."""


class Meter(Protocol):
    """Count the tokens of one layer in training forwards, from construction to `remove`."""

    exact: bool
    """Whether `extra` is counted; else it is estimated."""
    factor: float
    """Largest factor on the layer's capacity that is in force."""

    def take(self) -> Measured:
        """Return the counts since the last call."""

    def remove(self) -> None:
        """Stop counting."""


def meter_of(found: OperatorSet, layer: MoELayerSpec, module: nn.Module, base: Capacity) -> Meter:
    """Return the meter for a layer whose capacity without boost is `base`."""
    view = layer.live_capacity
    assert view is not None
    if isinstance(view, ExpertCapacity) and view.attribute == "expert_capacity":
        return _MaskMeter(layer, view, module, base)
    return _DemandMeter(found, layer, module, base)


class HookedMeter:
    """Base of meters that add up counts in hooks."""

    exact = True
    factor = 1.0

    def __init__(self, num_experts: int) -> None:
        self._sums = torch.zeros(4, num_experts, dtype=torch.float64)
        self._use = torch.zeros(num_experts, dtype=torch.float64)
        self._handles: list[RemovableHandle] = []

    def take(self) -> Measured:
        """Return the counts since the last call."""
        sums, self._sums = self._sums, torch.zeros_like(self._sums)
        use, self._use = self._use, torch.zeros_like(self._use)
        extra, displaced, kept, room = sums
        return Measured(extra, displaced, kept, room, use)

    def remove(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()

    def _add(self, changed_E: Tensor, kept_E: Tensor, room_E: Tensor) -> None:
        if self._sums.device != kept_E.device:
            self._sums, self._use = self._sums.to(kept_E.device), self._use.to(kept_E.device)
        self._sums += torch.stack([changed_E.clamp(min=0), (-changed_E).clamp(min=0), kept_E, room_E])

    def _add_kept(self, kept_BE: Tensor, demand_BE: Tensor, base_E: Tensor) -> None:
        """Add the tokens that were kept of those that chose each expert, in sequences that have slots of their own."""
        kept_BE, demand_BE = kept_BE.detach().double(), demand_BE.detach().double()
        changed_BE = kept_BE - torch.minimum(demand_BE, base_E.double())
        self._add(changed_BE.sum(dim=0), kept_BE.sum(dim=0), base_E.double() * kept_BE.shape[0])
        self._use = torch.maximum(self._use, (demand_BE / base_E.clamp(min=1)).amax(dim=0))


BaseSlots = Callable[[int, Tensor], Tensor]
"""BaseSlots `[E]` that experts have without boost, from the tokens of a forward and those that each expert kept."""


class _DemandMeter(HookedMeter):
    """Meter for layers whose counts are visible; see `_slots_of` for their capacity without boost."""

    def __init__(self, found: OperatorSet, layer: MoELayerSpec, module: nn.Module, base: Capacity) -> None:
        super().__init__(layer.num_experts)
        self._kept = LoadCounter(replace(found, layers=(layer,)), module)
        dropped = replace(layer, count=layer.dropped)
        self._dropped = LoadCounter(replace(found, layers=(dropped,)), module) if layer.dropped is not None else None
        block = module.get_submodule(layer.fqn)
        slots = _slots_of(layer, block, module, base)
        visible = slots is None and layer.capacity is not None
        self._live = LoadCounter(replace(found, layers=(layer,)), module, "capacity") if visible else None
        self._slots, self.exact = slots or self._estimated, slots is not None or visible
        self._counters = [each for each in (self._kept, self._dropped, self._live) if each is not None]
        for counter in self._counters:
            counter.install()
        self._handles.append(block.register_forward_hook(self._end))  # behind those of the counters

    def remove(self) -> None:
        """Stop counting."""
        super().remove()
        for counter in self._counters:
            counter.remove()

    def _end(self, block: nn.Module, args: tuple[Any, ...], out: object) -> None:
        if not block.training or in_backward():
            return
        kept_E = self._kept.read_and_reset()
        demand_E = kept_E if self._dropped is None else kept_E + self._dropped.read_and_reset()
        base_E = self._slots(args[0].shape[:-1].numel(), kept_E)
        self._add_kept(kept_E[None], demand_E[None], base_E)

    def _estimated(self, num_tokens: int, kept_E: Tensor) -> Tensor:
        # All experts of such a layer have one capacity. Libraries round it up, so this is at most a slot too much.
        live_E = kept_E.amax().expand_as(kept_E) if self._live is None else self._live.read_and_reset()
        return torch.ceil(live_E.double() / self.factor - 1e-6)


def _slots_of(layer: MoELayerSpec, block: Any, module: nn.Module, base: Capacity) -> BaseSlots | None:
    """Return the capacity without boost as the library itself works it out; `None` where that is not known."""
    view = layer.live_capacity
    assert view is not None
    if callable(getattr(block, "capacity", None)):
        return lambda num_tokens, kept_E: _asked(view, block, module, base, num_tokens).to(kept_E).expand_as(kept_E)
    slots = tutel_slots(block, base)
    return None if slots is None else lambda num_tokens, kept_E: torch.full_like(kept_E, slots(num_tokens))


def _asked(view: CapacityView, block: Any, module: nn.Module, base: Capacity, num_tokens: int) -> Tensor:
    live = view.get(module)
    view.set(module, base)
    try:
        return torch.as_tensor(block.capacity(num_tokens))
    finally:
        view.set(module, live)


class _MaskMeter(HookedMeter):
    """Meter for Switch routers: a mask `[B, S, E]` of tokens within capacity, per sequence, and the logits they are from."""

    def __init__(self, layer: MoELayerSpec, view: ExpertCapacity, module: nn.Module, base: Capacity) -> None:
        super().__init__(layer.num_experts)
        self._base_E = torch.tensor(base if isinstance(base, tuple) else (base,) * layer.num_experts)
        self._handles.append(module.get_submodule(view.module).register_forward_hook(self._end))

    def _end(self, router: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if router.training and not in_backward():
            mask, logits = out[0], out[2]
            num_experts = mask.shape[-1]
            chosen = nn.functional.one_hot(logits.detach().argmax(dim=-1), num_experts)
            kept_BE, demand_BE = (each.sum(dim=-2).reshape(-1, num_experts) for each in (mask, chosen))
            self._base_E = self._base_E.to(kept_BE.device)
            # Rounding of probabilities may decide between equal logits otherwise.
            self._add_kept(kept_BE, torch.maximum(demand_BE, kept_BE), self._base_E)
