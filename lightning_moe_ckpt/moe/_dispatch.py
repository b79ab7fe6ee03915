"""Choose each token's experts, move tokens there and back, and compute the loss that balances experts.

A *slot* is one choice of one token, numbered choice-major: slot `k * T + t`. Slots are sorted by expert, stably, so
every expert sees first choices before second ones and tokens in their order: an order that no atomic operation can change.
Slots beyond its capacity are dropped from the end. A token's gradient is the sum over its K slots in the order of k.

Between expert-parallel ranks the sorted rows travel by one uneven all-to-all each way.

Source: GShard (2020), Sec. 3.2 and Alg. 1; Tutel's notion of capacity, per expert and source rank, and its noise and scale of
the loss (`gates/top.py`, `impls/losses.py`). We differ in computing probabilities in fp32 whatever the precision of the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.parallel import ExpertParallelModule, current_groups
from lightning_moe_ckpt.process import MADE, RECEIVED, Messages, OwnWork

# Shape suffixes: T tokens on this rank, K top-k, E all experts, e experts on this rank, R expert-parallel ranks,
# N slots kept on this rank, M rows that arrive on this rank, D model dim.


class Dispatch(NamedTuple):
    """Assignment of slots to experts."""

    slots: Tensor
    """int64 `[N]`, kept slots in the order in which they are sent: by expert, then by slot."""
    kept: Tensor
    """int64 `[E]`, slots per global expert after dropping."""
    routed: Tensor
    """int64 `[E]`, slots per global expert before dropping."""


def plan_dispatch(topk_idx_TK: Tensor, num_experts: int, capacity: int | Tensor | None) -> Dispatch:
    """Sort slots by expert and drop those beyond `capacity`: a number, one per expert (`[E]`), or `None` for none."""
    expert_S = topk_idx_TK.t().reshape(-1)
    slot_S = torch.argsort(expert_S, stable=True)
    routed_E = torch.zeros(num_experts, dtype=torch.int64, device=expert_S.device)
    routed_E.scatter_add_(0, expert_S, torch.ones_like(expert_S))  # integers: any order gives the same sum
    if capacity is None:
        return Dispatch(slot_S, routed_E, routed_E)
    sorted_S = expert_S[slot_S]
    start_E = routed_E.cumsum(0) - routed_E
    place_S = torch.arange(sorted_S.numel(), device=sorted_S.device) - start_E[sorted_S]
    limit_S = capacity[sorted_S] if isinstance(capacity, Tensor) else capacity
    return Dispatch(slot_S[place_S < limit_S], routed_E.clamp(max=capacity), routed_E)


def gather_rows(x_TD: Tensor, slot_N: Tensor, top_k: int) -> Tensor:
    """Return the rows of the slots' tokens, in the order of `slot_N`. Shape `[N, D]`."""
    rows_ND: Tensor = _GatherRows.apply(x_TD, slot_N, top_k)  # type: ignore[no-untyped-call]
    return rows_ND


def combine_rows(y_ND: Tensor, slot_N: Tensor, weight_TK: Tensor) -> Tensor:
    """Return the weighted sum over each token's slots, in fp32 or fp64; a dropped slot adds nothing. Shape `[T, D]`."""
    num_tokens, top_k = weight_TK.shape
    y_SD = y_ND.new_zeros(top_k * num_tokens, y_ND.shape[1]).index_copy(0, slot_N, y_ND)
    y_KTD = y_SD.view(top_k, num_tokens, y_SD.shape[1])
    y_KTD = y_KTD.to(torch.promote_types(y_KTD.dtype, torch.float32))
    return (y_KTD * weight_TK.t().unsqueeze(-1)).sum(dim=0)


def apply_everywhere(
    rows_ND: Tensor, kept_E: Tensor, group: dist.ProcessGroup | None, experts: Callable[[Tensor, list[int]], Tensor]
) -> Tensor:
    """Send rows to their experts' ranks, apply the experts, and return the results in the original order. Collective
    over the expert-parallel `group`; `None` is a world of one.

    `rows_ND` are sorted by global expert, `kept_E` of them for each. `experts` applies this rank's experts to rows
    sorted by expert, with the number of rows of each; shape and precision stay, and must be those on all ranks.
    """
    ep_size = 1 if group is None else group.size()
    arriving_Re = exchange_counts(kept_E, group)
    send = kept_E.view(ep_size, -1).sum(dim=1).tolist()
    received = arriving_Re.tolist()
    receive = [sum(per_expert) for per_expert in received]
    rows_MD = all_to_all_rows(rows_ND, send, receive, group)
    per_expert = [sum(counts) for counts in zip(*received, strict=True)]
    if ep_size == 1:
        return experts(rows_MD, per_expert)
    order_M = by_expert(arriving_Re, rows_MD.shape[0])
    y_MD = experts(rows_MD.index_select(0, order_M), per_expert)
    y_MD = torch.zeros_like(y_MD).index_copy(0, order_M, y_MD)
    return all_to_all_rows(y_MD, receive, send, group)


def expert_group(layer: ExpertParallelModule) -> dist.ProcessGroup | None:
    """Return the group that shares a layer's experts; `None` if each rank has them all. Raises `ConfigurationError` if the layer was built
    for another number of ranks than the one in force.
    """
    groups = current_groups()
    if groups.ep_size != layer.ep_size:
        raise ConfigurationError(
            f"This {type(layer).__name__} was built for `expert_parallel={layer.ep_size}`, but {groups.ep_size} is in force. "
            "Build it in `configure_model`, and use it while the Trainer that built it runs."
        )
    return groups.group("expert") if layer.ep_size > 1 else None


def all_to_all_rows(x_ND: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup | None) -> Tensor:
    """Send `send[r]` consecutive rows to rank r of `group`; return the `receive[r]` rows that arrive from each, by
    rank. `None` is a world of one and returns `x_ND`.

    If gradients are recorded, the result requires gradients even if `x_ND` does not: the exchange of gradients is a
    collective, and every rank must take part even if its parameters are frozen.
    """
    anchor = torch.zeros((), device=x_ND.device, requires_grad=True)
    rows_MD: Tensor = _AllToAll.apply(x_ND, anchor, send, receive, group)  # type: ignore[no-untyped-call]
    return rows_MD


def exchange_counts(kept_E: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the number of rows for each expert of this rank, by source rank. Shape `[R, e]`, int64. Collective over `group`."""
    if group is None:
        return kept_E.view(1, -1)
    return _send(kept_E, torch.empty_like(kept_E), None, None, group).view(group.size(), -1)


def by_expert(arriving_Re: Tensor, num_rows: int) -> Tensor:
    """Return the order that sorts rows by (expert, source rank) instead of (source rank, expert). int64 `[M]`."""
    num_ranks, num_local = arriving_Re.shape
    expert_Re = torch.arange(num_local, device=arriving_Re.device).expand(num_ranks, num_local)
    expert_M = expert_Re.reshape(-1).repeat_interleave(arriving_Re.reshape(-1), output_size=num_rows)
    return torch.argsort(expert_M, stable=True)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, slot_N: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(slot_N)
        ctx.num_tokens, ctx.top_k = x_TD.shape[0], top_k
        return x_TD.index_select(0, slot_N % max(x_TD.shape[0], 1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None, None]:
        (slot_N,) = ctx.saved_tensors
        # Each slot is written once; adding rows of one token directly would leave the order to atomics on CUDA.
        grad_SD = grad_ND.new_zeros(ctx.top_k * ctx.num_tokens, grad_ND.shape[1]).index_copy_(0, slot_N, grad_ND)
        return grad_SD.view(ctx.top_k, ctx.num_tokens, grad_SD.shape[1]).sum(dim=0), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, _anchor: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup | None
    ) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return _exchange(x, send, receive, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _exchange(grad, ctx.receive, ctx.send, ctx.group), None, None, None, None


def _exchange(rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup | None) -> Tensor:
    if group is None:
        return rows.view_as(rows)
    return _send(rows, rows.new_empty(sum(receive), *rows.shape[1:]), send, receive, group)


def _send(
    rows: Tensor, out: Tensor, send: list[int] | None, receive: list[int] | None, group: dist.ProcessGroup
) -> Tensor:
    """Exchange rows into `out`; as many with each rank, unless numbers are given."""
    OwnWork.ends()
    dist.all_to_all_single(out, rows.contiguous(), receive, send, group=group)
    if Messages.listener is not None:
        Messages.listener(MADE, [rows])
        Messages.listener(RECEIVED, [out])
    return out


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
