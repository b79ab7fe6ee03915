"""Choose the experts of each token and their weights, and compute the loss that balances experts.

Source: GShard (2020), Alg. 1; Tutel (`gates/top.py`, `impls/losses.py`) for the noise and the scale of the loss. We
differ in computing probabilities in fp32 whatever the precision of the logits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Shape suffixes: T tokens on this rank, K top-k, E all experts.


class Routing(NamedTuple):
    """Choices of every token, best first."""

    topk_idx: Tensor
    """int64 `[T, K]`, global expert index."""
    weight: Tensor
    """fp32 `[T, K]`, differentiable."""
    l_aux: Tensor
    """Scalar, fp32, differentiable; 1 when tokens and probability are spread evenly."""
    probs: Tensor
    """fp32 `[T, E]`, probabilities of all experts, differentiable."""


def route(logits_TE: Tensor, top_k: int, *, normalize: bool, noise: Tensor | None = None) -> Routing:
    """Choose the `top_k` most probable experts of every token.

    Args:
        logits_TE: the router's output, any floating dtype.
        top_k: choices per token, at most E.
        normalize: whether the weights of one token sum to one (for `top_k` > 1; one choice keeps its probability).
        noise: added to the logits, same shape.
    """
    logits_TE = logits_TE.float() if noise is None else logits_TE.float() + noise
    probs_TE = logits_TE.softmax(dim=-1)
    weight_TK, topk_idx_TK = probs_TE.topk(top_k, dim=-1)
    if normalize and top_k > 1:
        weight_TK = weight_TK / weight_TK.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(weight_TK.dtype).eps)
    return Routing(topk_idx_TK, weight_TK, balance_loss(probs_TE, topk_idx_TK[:, 0]), probs_TE)


def balance_loss(probs_TE: Tensor, first_choice_T: Tensor) -> Tensor:
    """Return GShard's auxiliary loss over this rank's tokens: `E * sum_e(mean_t(probs) * share of first choices)`."""
    num_tokens, num_experts = max(probs_TE.shape[0], 1), probs_TE.shape[1]
    chosen_E = torch.zeros_like(probs_TE).scatter_(1, first_choice_T[:, None], 1.0).sum(dim=0)
    return (probs_TE.sum(dim=0) * chosen_E).sum() * (num_experts / num_tokens**2)
