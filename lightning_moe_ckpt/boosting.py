"""Capacity boosting after a recovery: extra capacity for experts in debt, its donors, its meters, and routers that give it.

An expert in debt gets a part more than its share until it has processed as many tokens beyond that share as were lost.
The extra is taken from experts that do not fill their shares, so a step costs the same. Donors keep their largest use
so far, which fades slowly: the next step may need it again.

What boosting changes is counted in the same forward, with one definition for every layer: an expert that processed `k`
of the `d` tokens that chose it would have processed `min(d, b)` with the `b` slots that it has without boost. The
difference is what the boost has changed: above zero it is *extra*, below zero it was *displaced*, dropped because the
expert has given slots away. Where drops are not visible, no expert gives any, so that `min(k, b)` says the same. Only
`b` is found in different ways, and where a library does not show its capacity, it is estimated from its busiest expert.
Nothing here waits for the device.

A layer that drops no tokens gives some experts more of them by margin, or by a second term beside a router's bias. By
margin: some tokens that did not choose an expert in debt give up their last choice for it, those with the smallest
margin between the two. Their number is a fraction of the tokens that chose the expert by themselves, so the quota is
exact. Weights follow from the router's own formula, so gradients flow as before. The choices are a pure function of the
router's output, so a forward that activation checkpointing repeats routes alike; debts change between steps only. By
bias: a term beside it is adjusted at each step until experts get their quota. The bias that the model trains is not
changed, since the rule that balances it would work against the change. The router is asked in the same forward what it
would choose without the term, so that additional tokens are counted, not estimated.

Source: MOETION (2024), Sec. 6; we differ in paying a debt only with tokens that an expert would not have processed
without more capacity (ordinary tokens would pay it in a few steps), and in a bound on a debt's age. No source describes
a boost for layers without capacity: that is an extension.

Internal: may change in any version.

Shape suffixes: B sequences, S tokens of one, T tokens, K top-k, E all experts of the layer.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_moe_ckpt.errors import Corrupt
from lightning_moe_ckpt.moe._layer import in_backward
from lightning_moe_ckpt.operators import (
    BiasView,
    Capacity,
    CapacityView,
    ExpertCapacity,
    LoadCounter,
    MoELayerSpec,
    OperatorSet,
)
from lightning_moe_ckpt.operators.adapters import tutel_slots

USE_DECAY = 0.99
"""Part of the largest use that counts a step later: half after 69 steps."""

WATCHED_STEPS = 10
"""Steps that experts are watched before giving anything."""

BaseSlots = Callable[[int, Tensor], Tensor]
"""Slots `[E]` of experts without boost, from the number of tokens in a forward and the tokens that each expert kept."""

Formula: TypeAlias = Literal["softmax", "normalised", "chosen"]
"""How weights of choices are made: probabilities, probabilities divided by their sum, or a softmax over the chosen."""

_FORMULAS: dict[str, Formula | None] = {
    "MixtralTopKRouter": "normalised",
    "Qwen2MoeTopKRouter": None,
    "Qwen3MoeTopKRouter": None,
    "OlmoeTopKRouter": None,
    "GptOssTopKRouter": "chosen",
    "GraniteMoeTopKRouter": "chosen",
    "GraniteMoeTopKGating": "chosen",
}
"""Hugging Face routers, which return `(logits [T, E], weights [T, K], indices [T, K])`; `None` if a switch decides."""

_RATE = 0.05
"""Change of the bias's term per step, for a shortfall of one mean load; scores are between 0 and 1."""


@dataclass(frozen=True, slots=True)
class TokenDeficits:
    """Token deficits of one layer; entries by global expert index."""

    lost: tuple[int, ...]
    """Tokens lost over all faults, from the ledger."""
    repaid: tuple[int, ...]
    """Tokens processed beyond the capacity without boost."""
    expired: tuple[int, ...]
    """Tokens not made up for in time."""

    @classmethod
    def none(cls, num_experts: int) -> TokenDeficits:
        """Return the deficits of experts without losses."""
        return cls((0,) * num_experts, (0,) * num_experts, (0,) * num_experts)

    @property
    def open(self) -> tuple[int, ...]:
        """Tokens still to make up for."""
        return tuple(max(a - b - c, 0) for a, b, c in zip(self.lost, self.repaid, self.expired, strict=True))

    @property
    def any(self) -> bool:
        """Whether some expert is in debt."""
        return any(self.open)

    def with_lost(self, lost_E: Sequence[int]) -> TokenDeficits:
        """Return the deficits with the ledger's present numbers; repaid tokens stay repaid."""
        return replace(self, lost=tuple(lost_E))

    def repay(self, extra_E: Sequence[int]) -> TokenDeficits:
        """Return the deficits once experts in debt have processed `extra_E` more tokens; other experts owe nothing."""
        paid = (a + b if owed else a for a, b, owed in zip(self.repaid, extra_E, self.open, strict=True))
        return replace(self, repaid=tuple(paid))

    def expire(self) -> TokenDeficits:
        """Return the deficits with all open tokens given up."""
        return replace(self, expired=tuple(a + b for a, b in zip(self.expired, self.open, strict=True)))

    def to_state(self) -> dict[str, list[int]]:
        """Return plain values."""
        return {"lost": list(self.lost), "repaid": list(self.repaid), "expired": list(self.expired)}

    @classmethod
    def from_state(cls, state: Any) -> TokenDeficits:
        """Read what `to_state` wrote. Raises `Corrupt`."""
        try:
            lost, repaid = (tuple(map(int, state[name])) for name in ("lost", "repaid"))
            found = cls(lost, repaid, tuple(map(int, state.get("expired", [0] * len(lost)))))
        except (KeyError, TypeError, ValueError) as error:
            raise Corrupt(f"The state of a capacity boost cannot be read: {error}.") from error
        if not len(found.lost) == len(found.repaid) == len(found.expired):
            raise Corrupt("The state of a capacity boost has debts of other experts than repayments.")
        return found


def faded_use(use_E: Sequence[float], now_E: Sequence[float]) -> list[float]:
    """Return each expert's largest use so far, with older uses fading; `now_E` is the use in one step."""
    return [max(USE_DECAY * before, now) for before, now in zip(use_E, now_E, strict=True)]


def boost_factors(
    debt_E: Sequence[int], boost: float, *, use_E: Sequence[float] | None = None, room_E: Sequence[int] | None = None
) -> list[float]:
    """Return the factor of each expert's capacity: `1 + boost` for experts with a debt of tokens to make up for (0.1 is
    a tenth); for all others 1 less their gift, a part of their unused capacity: no expert drops a token unless its use
    grows.

    `use_E` is the largest used part of each expert's capacity without boost, on any rank; `None` while unknown, when
    nobody gives. `room_E` are tokens that each expert could have processed in the last step at that capacity.
    """
    factors = [1 + boost if debt else 1.0 for debt in debt_E]
    if use_E is None or room_E is None:
        return factors
    wanted = boost * sum(room for room, debt in zip(room_E, debt_E, strict=True) if debt)
    unused = [0.0 if debt else max(1.0 - u, 0.0) * r for r, u, debt in zip(room_E, use_E, debt_E, strict=True)]
    part = min(1.0, wanted / sum(unused)) if sum(unused) else 0.0
    # An expert without tokens keeps a part: no library takes a capacity of zero.
    return [f - min(part * u / r, 0.5) if u else f for f, u, r in zip(factors, unused, room_E, strict=True)]


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
        """Add, for each expert, the kept among the tokens that chose it, in sequences with slots of their own."""
        kept_BE, demand_BE = kept_BE.detach().double(), demand_BE.detach().double()
        changed_BE = kept_BE - torch.minimum(demand_BE, base_E.double())
        self._add(changed_BE.sum(dim=0), kept_BE.sum(dim=0), base_E.double() * kept_BE.shape[0])
        self._use = torch.maximum(self._use, (demand_BE / base_E.clamp(min=1)).amax(dim=0))


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
    """Return the capacity without boost, as the library itself computes it; `None` if the formula is not known."""
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
    """Meter for Switch routers: their mask `[B, S, E]` of tokens within capacity, per sequence, and the logits before it."""

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


def find_router(layer: MoELayerSpec, module: nn.Module) -> nn.Module | None:
    """Return the layer's router, if its formula is known."""
    block = module.get_submodule(layer.fqn)
    return next((child for child in block.children() if _formula(child) is not None), None)


def find_bias(layer: MoELayerSpec) -> BiasView | None:
    """Return the layer's selection-only bias, if its router can be called a second time in a forward."""
    view = layer.bias
    return view if view is not None and view.owner != view.layer else None


class Route(HookedMeter, ABC):
    """Change of one layer's routing, and count of the moved tokens, from construction to `remove`."""

    term: list[float] | None = None
    """Term that is added to the router's bias, by expert; `None` for routes without one."""

    @abstractmethod
    def aim(self, debt_E: Sequence[int], extra_E: Sequence[int], kept_E: Sequence[int]) -> None:
        """Give experts in debt more tokens from now on, by the counts of the last step."""

    def _add_moved(self, before: Tensor, after: Tensor) -> None:
        if not in_backward():
            before_E, after_E = self._counts(before), self._counts(after)
            # Tokens that go elsewhere are not dropped: nothing is displaced.
            self._add((after_E - before_E).clamp(min=0), after_E, torch.zeros_like(after_E))

    def _counts(self, idx: Tensor) -> Tensor:
        flat = idx.reshape(-1).to(torch.int64)
        zeros_E = torch.zeros(self._sums.shape[1], dtype=torch.int64, device=flat.device)
        return zeros_E.scatter_add_(0, flat, torch.ones_like(flat))


class MarginRoute(Route):
    """Route to an expert in debt the tokens that nearly chose it."""

    def __init__(self, layer: MoELayerSpec, router: nn.Module, boost: float) -> None:
        super().__init__(layer.num_experts)
        formula = _formula(router)
        assert formula is not None
        self._formula: Formula = formula
        self._boost, self._debtors = boost, tuple[int, ...]()
        self._handles.append(router.register_forward_hook(self._routed))

    @override
    def aim(self, debt_E: Sequence[int], extra_E: Sequence[int] = (), kept_E: Sequence[int] = ()) -> None:
        """Set the experts that get more from now on. A step's counts are not used, since the quota is exact."""
        self._debtors = tuple(expert for expert, debt in enumerate(debt_E) if debt)

    def _routed(self, router: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        if not router.training or not self._debtors:
            return None
        logits_TE, weights_TK, idx_TK = out
        moved_TK = reroute(logits_TE.detach(), idx_TK, self._debtors, self._boost)
        self._add_moved(idx_TK, moved_TK)
        return logits_TE, weights(logits_TE, moved_TK, self._formula).to(weights_TK.dtype), moved_TK


class BiasRoute(Route):
    """Route by a term beside the router's bias."""

    def __init__(
        self, layer: MoELayerSpec, view: BiasView, module: nn.Module, boost: float, term: Sequence[float] | None
    ) -> None:
        super().__init__(layer.num_experts)
        self._boost, self._name, self._asking = boost, view.attribute, False
        self.term: list[float] = list(term or [0.0] * layer.num_experts)
        router = module.get_submodule(view.owner)
        self._handles.append(router.register_forward_hook(self._routed, with_kwargs=True))

    @override
    def aim(self, debt_E: Sequence[int], extra_E: Sequence[int], kept_E: Sequence[int]) -> None:
        """Adjust the term so that experts in debt come nearer to their quota, by the counts of the last step."""
        mean = max(sum(kept_E) / len(self.term), 1.0)
        short_E = [(1 + self._boost) * (kept - extra) - kept for kept, extra in zip(kept_E, extra_E, strict=True)]
        rows = zip(self.term, short_E, debt_E, strict=True)
        self.term = [term + _RATE * short / mean if debt else 0.0 for term, short, debt in rows]

    def _routed(self, router: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        if self._asking or not router.training:
            return None
        nudged = self._ask(router, args, kwargs) if any(self.term) else out
        self._add_moved(_choices(out), _choices(nudged))
        return nudged

    def _ask(self, router: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bias: Tensor = getattr(router, self._name)
        term = torch.tensor(self.term, dtype=bias.dtype, device=bias.device).view_as(bias)
        self._asking = True
        try:
            return functional_call(router, {self._name: bias.detach() + term}, args, kwargs)
        finally:
            self._asking = False


def _choices(out: Any) -> Tensor:
    """Return the choices in a router's output: its integer tensor."""
    return next(tensor for tensor in out if isinstance(tensor, Tensor) and not tensor.is_floating_point())


def reroute(logits_TE: Tensor, idx_TK: Tensor, debtors: Sequence[int], boost: float) -> Tensor:
    """Return choices with `ceil(boost * n)` more tokens for each debtor than the n that chose it, as far as there are
    enough. `logits_TE` are the router's scores, larger is better; `idx_TK`, int64, its choices, best first. Only a
    token's last choice is changed, and only once.
    """
    scores_TE = logits_TE.float().softmax(dim=-1)
    idx_TK = idx_TK.clone()
    own_TE = torch.zeros_like(scores_TE, dtype=torch.bool).scatter_(1, idx_TK, value=True)
    for expert in debtors:
        last_T = idx_TK[:, -1]
        margin_T = scores_TE.gather(1, last_T[:, None])[:, 0] - scores_TE[:, expert]
        free_T = ~own_TE[:, expert]
        for other in debtors:
            free_T &= last_T != other
        # Sort instead of topk: only the device knows how many tokens are taken.
        order_T = torch.argsort(margin_T.masked_fill(~free_T, math.inf), stable=True)
        rank_T = torch.empty_like(order_T).scatter_(0, order_T, torch.arange(len(order_T), device=order_T.device))
        quota = torch.ceil(own_TE[:, expert].sum() * boost - 1e-9)
        idx_TK[:, -1] = torch.where(free_T & (rank_T < quota), expert, last_T)
    return idx_TK


def weights(logits_TE: Tensor, idx_TK: Tensor, formula: Formula) -> Tensor:
    """Return the choices' weights, float32 `[T, K]`, differentiable."""
    if formula == "chosen":
        return logits_TE.gather(1, idx_TK).float().softmax(dim=-1)
    chosen_TK = logits_TE.float().softmax(dim=-1).gather(1, idx_TK)
    return chosen_TK / chosen_TK.sum(dim=-1, keepdim=True) if formula == "normalised" else chosen_TK


def _formula(router: nn.Module) -> Formula | None:
    for base in type(router).__mro__:
        if base.__name__ in _FORMULAS:
            return _FORMULAS[base.__name__] or ("normalised" if getattr(router, "norm_topk_prob", False) else "softmax")
    return None
