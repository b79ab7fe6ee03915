"""Give some experts more tokens in a layer that drops none: tokens that almost chose them go there.

Some tokens that did not choose an expert in debt give up their last choice for it: those with the smallest margin
between the two. Their number is a fraction of the tokens that chose the expert by themselves, so the quota is exact.
Weights follow from the router's own formula, so gradients flow as before. The choices are a pure function of the
router's output, so a forward that activation checkpointing repeats routes alike; debts change between steps only.

This is an extension: no source describes a boost for layers without capacity.

Shape suffixes: T tokens, K top-k, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from lightning_moe_ckpt.boosting._meters import Measured
from lightning_moe_ckpt.moe._layer import in_backward
from lightning_moe_ckpt.operators import MoELayerSpec

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


def find_router(layer: MoELayerSpec, module: nn.Module) -> nn.Module | None:
    """Return the layer's router, if its formula is known."""
    block = module.get_submodule(layer.fqn)
    return next((child for child in block.children() if _formula(child) is not None), None)


class MarginRoute:
    """Change one layer's routing and count the tokens that it moves, from construction to `remove`."""

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
        """Set the experts that get more from now on. The counts of a step are not used, since the quota is exact."""
        self._debtors = tuple(expert for expert, debt in enumerate(debt_E) if debt)

    def take(self, factor: float) -> Measured:
        """Return the counts since the last call."""
        taken, self._sums = self._sums, torch.zeros_like(self._sums)
        return Measured(*taken)

    def remove(self) -> None:
        """Stop changing the router's choices."""
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


def _count(idx_TK: Tensor, num_experts: int) -> Tensor:
    flat = idx_TK.reshape(-1)
    return torch.zeros(num_experts, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))
