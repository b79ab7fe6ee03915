"""Give some experts more tokens in a layer that drops none, by their margin or by a second term beside a router's bias.

By margin: some tokens that did not choose an expert in debt give up their last choice for it, those with the smallest
margin between the two. Their number is a fraction of the tokens that chose the expert by themselves, so the quota is
exact. Weights follow from the router's own formula, so gradients flow as before. The choices are a pure function of the
router's output, so a forward that activation checkpointing repeats routes alike; debts change between steps only.

By bias: a term beside it is adjusted at each step until experts get their quota. The bias that the model trains is not
changed, since the rule that balances it would work against the change. The router is asked in the same forward what it
would choose without the term, so that additional tokens are counted, not estimated.

This is an extension: no source describes a boost for layers without capacity.

Shape suffixes: T tokens, K top-k, E experts.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call
from typing_extensions import override

from lightning_moe_ckpt.boosting._meters import HookedMeter
from lightning_moe_ckpt.moe._layer import in_backward
from lightning_moe_ckpt.operators import BiasView, MoELayerSpec

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


def find_router(layer: MoELayerSpec, module: nn.Module) -> nn.Module | None:
    """Return the layer's router, if its formula is known."""
    block = module.get_submodule(layer.fqn)
    return next((child for child in block.children() if _formula(child) is not None), None)


def find_bias(layer: MoELayerSpec) -> BiasView | None:
    """Return the layer's selection-only bias, if its router can be called a second time in a forward."""
    view = layer.bias
    return view if view is not None and view.owner != view.layer else None


class Route(HookedMeter, ABC):
    """Change one layer's routing and count the tokens that it moves, from construction to `remove`."""

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
    """Route tokens that nearly chose an expert in debt to it."""

    def __init__(self, layer: MoELayerSpec, router: nn.Module, boost: float) -> None:
        super().__init__(layer.num_experts)
        formula = _formula(router)
        assert formula is not None
        self._formula: Formula = formula
        self._boost, self._debtors = boost, tuple[int, ...]()
        self._handles.append(router.register_forward_hook(self._routed))

    @override
    def aim(self, debt_E: Sequence[int], extra_E: Sequence[int] = (), kept_E: Sequence[int] = ()) -> None:
        """Set the experts that get more from now on. The counts of a step are not used, since the quota is exact."""
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
        self.term = [
            term + _RATE * short / mean if debt else 0.0
            for term, short, debt in zip(self.term, short_E, debt_E, strict=True)
        ]

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
    """Return choices in which each debtor has `ceil(boost * n)` more tokens than the n that chose it, if there are enough.

    Args:
        logits_TE: scores by which the router chooses; larger is better.
        idx_TK: int64, the choices, best first. Only the last choice of a token is changed, and only once.
        debtors: experts that get more tokens.
        boost: additional tokens, as a fraction of n.
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
    """Return the weights of the choices, float32 `[T, K]`, differentiable."""
    if formula == "chosen":
        return logits_TE.gather(1, idx_TK).float().softmax(dim=-1)
    chosen_TK = logits_TE.float().softmax(dim=-1).gather(1, idx_TK)
    return chosen_TK / chosen_TK.sum(dim=-1, keepdim=True) if formula == "normalised" else chosen_TK


def _formula(router: nn.Module) -> Formula | None:
    for base in type(router).__mro__:
        if base.__name__ in _FORMULAS:
            formula = _FORMULAS[base.__name__]
            return formula or ("normalised" if getattr(router, "norm_topk_prob", False) else "softmax")
    return None
