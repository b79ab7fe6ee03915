"""More tokens for some experts of a layer that drops none: tokens that almost chose them go there.

Of the tokens that did not choose an expert in debt, those with the smallest margin between their last choice and it give
up that last choice: a part of as many as chose it by themselves. That is a bias which is right for each batch, with an
exact quota; weights follow from the router's own formula, so gradients flow as ever. It is a pure function of what the
router says, so a forward that activation checkpointing repeats routes alike: who is in debt changes between steps only.

This is an extension: no source says what a boost without capacity is.

Shape suffixes: T tokens, K top-k, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from lightning_moe_ckpt.callbacks._boost_meters import Measured
from lightning_moe_ckpt.operators import MoELayerSpec
from lightning_moe_ckpt.operators._taps import in_backward

Formula: TypeAlias = Literal["softmax", "normalised", "chosen"]
"""Weights of the choices: their probabilities, these divided by their sum, or a softmax over the chosen alone."""

_FORMULAS: dict[str, Formula | None] = {
    "MixtralTopKRouter": "normalised",
    "Qwen2MoeTopKRouter": None,
    "Qwen3MoeTopKRouter": None,
    "OlmoeTopKRouter": None,
    "GptOssTopKRouter": "chosen",
    "GraniteMoeTopKRouter": "chosen",
    "GraniteMoeTopKGating": "chosen",
}
"""Hugging Face routers, which return `(logits [T, E], weights [T, K], indices [T, K])`; `None`: it has a switch for it."""


def find_router(layer: MoELayerSpec, module: nn.Module) -> nn.Module | None:
    """The layer's router, if it is of a family whose formula is known."""
    block = module.get_submodule(layer.fqn)
    return next((child for child in block.children() if _formula(child) is not None), None)


class MarginRoute:
    """Routes for one layer, and counts what it has moved, from construction to `remove`."""

    exact = True

    def __init__(self, layer: MoELayerSpec, router: nn.Module, boost: float) -> None:
        formula = _formula(router)
        assert formula is not None
        self._formula: Formula = formula
        self._boost, self._num_experts = boost, layer.num_experts
        self._debtors: tuple[int, ...] = ()
        self._sums = torch.zeros(3, layer.num_experts, dtype=torch.int64)
        self._handle = router.register_forward_hook(self._routed)

    def aim(self, debt_E: Sequence[int], extra_E: Sequence[int] = (), kept_E: Sequence[int] = ()) -> None:
        """Experts that get more from now on; what a step has shown is of no use to an exact quota."""
        self._debtors = tuple(expert for expert, debt in enumerate(debt_E) if debt)

    def take(self, factor: float) -> Measured:
        """What was counted since the last call."""
        taken, self._sums = self._sums, torch.zeros_like(self._sums)
        return Measured(*taken)

    def remove(self) -> None:
        """Route as the router says."""
        self._handle.remove()

    def _routed(self, router: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        if not router.training or not self._debtors:
            return None
        logits_TE, weights_TK, idx_TK = out
        moved_TK = reroute(logits_TE.detach(), idx_TK, self._debtors, self._boost)
        if not in_backward():
            before_E, after_E = (_count(idx, self._num_experts) for idx in (idx_TK, moved_TK))
            self._sums = self._sums.to(before_E.device)
            self._sums += torch.stack([after_E - before_E, after_E, torch.zeros_like(after_E)])
        return logits_TE, weights(logits_TE, moved_TK, self._formula).to(weights_TK.dtype), moved_TK


def reroute(logits_TE: Tensor, idx_TK: Tensor, debtors: Sequence[int], boost: float) -> Tensor:
    """Choices in which each debtor has `ceil(boost * n)` tokens more than the n that chose it, as far as there are others.

    Args:
        logits_TE: what choices are made by, largest first.
        idx_TK: int64, the choices, best first. Only the last one of a token is ever changed, and only once.
        debtors: experts that get more.
        boost: how much.
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
        # Ranks instead of the smallest n: how many are taken is known to the device only.
        order_T = torch.argsort(margin_T.masked_fill(~free_T, math.inf), stable=True)
        rank_T = torch.empty_like(order_T).scatter_(0, order_T, torch.arange(len(order_T), device=order_T.device))
        quota = torch.ceil(own_TE[:, expert].sum() * boost - 1e-9)
        idx_TK[:, -1] = torch.where(free_T & (rank_T < quota), expert, last_T)
    return idx_TK


def weights(logits_TE: Tensor, idx_TK: Tensor, formula: Formula) -> Tensor:
    """Weights of the choices, float32 `[T, K]`, differentiable."""
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


def _count(idx_TK: Tensor, num_experts: int) -> Tensor:
    flat = idx_TK.reshape(-1)
    return torch.zeros(num_experts, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))
