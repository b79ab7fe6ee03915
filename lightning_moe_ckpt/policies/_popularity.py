"""In which order operators are captured within a window, and when that order is out of date.

What is captured late stays frozen long in replay and saves work there; so popular experts come last, after them the
operators that every token uses. In a dense model the back comes first: gradients of a frozen front need not be
computed.

Popularity is the number of tokens routed to an expert since it was last read (hard counts). The other measures of the
paper are functions here, for orders of one's own (`SparseCheckpoint(schedule=...)`).

Shape suffixes: T tokens, E experts.

Source: MoEvement (2024), Sec. 3.5, Appendix B and E.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from lightning_moe_ckpt.operators import Operator

Order = Literal["popularity", "fixed", "back_to_front"]


def order(operators: Sequence[Operator], *, by: Order, loads: Mapping[str, int] | None = None) -> tuple[str, ...]:
    """Names of the operators in the order of capture.

    Args:
        operators: in the order of the model.
        by: `popularity`: experts by ascending load, then everything else; `fixed`: as given; `back_to_front`: from
            the output to the input.
        loads: tokens by expert operator; an expert not named had none. Without it, experts keep their order.
    """
    if by == "fixed":
        return tuple(op.name for op in operators)
    if by == "back_to_front":
        return tuple(op.name for op in reversed(operators))
    known = loads or {}
    ranked = sorted(
        operators, key=lambda op: (op.kind != "expert", known.get(op.name, 0) if op.kind == "expert" else 0)
    )
    return tuple(op.name for op in ranked)


def should_reorder(
    old_counts: Tensor | Sequence[int],
    new_counts: Tensor | Sequence[int],
    *,
    reorder_threshold: float = 0.10,
    reorder_fraction: float = 0.25,
) -> bool:
    """Whether the experts' shares of the tokens have changed enough to plan anew.

    Args:
        old_counts: tokens per expert when the plan was made.
        new_counts: the same now; the totals may differ.
        reorder_threshold: relative change of an expert's share that counts.
        reorder_fraction: share of the experts that must have changed.

    Source: MoEvement (2024), Sec. 3.5: "over 10% for at least 25% of experts".
    """
    old, new = torch.as_tensor(old_counts, dtype=torch.float64), torch.as_tensor(new_counts, dtype=torch.float64)
    if old.shape != new.shape:
        raise ValueError(f"`should_reorder` got counts of {old.numel()} and {new.numel()} experts.")
    if not old.numel() or not float(new.sum()):
        return False
    before, now = old / old.sum().clamp(min=1), new / new.sum()
    changed = (now - before).abs() > reorder_threshold * before
    return float(changed.double().mean()) >= reorder_fraction


def soft_popularity(probs_TE: Tensor) -> Tensor:
    """The router's probabilities, summed over tokens: also experts that were nearly chosen count.

    Args:
        probs_TE: after softmax or sigmoid, before the choice of experts; `[..., E]`.

    Returns:
        float64 `[E]` on the device of the input; sums of several steps or ranks add up.

    Source: MoEvement (2024), Appendix B, "Soft-Count Popularity".
    """
    # Not the dtype of the router: in bf16 a sum over thousands of tokens stops growing.
    return probs_TE.detach().reshape(-1, probs_TE.shape[-1]).sum(dim=0, dtype=torch.float64)


def decayed_popularity(previous_E: Tensor | None, counts_E: Tensor, *, half_life_windows: float) -> Tensor:
    """Popularity that forgets: an exponential moving average over windows.

    `a * previous + (1 - a) * counts` with `a = 2 ** (-1 / half_life_windows)`; the first window counts in full.

    Args:
        previous_E: the result for the window before; `None` for the first one.
        counts_E: hard or soft counts of one window, summed over all ranks.
        half_life_windows: after how many windows a count weighs half, above zero. The paper's average is over
            mini-batches; windows are when counts are read.

    Returns:
        float64 `[E]`. Equal inputs give equal bits, so ranks that agree on counts agree on this.

    Source: MoEvement (2024), Appendix B, "Time-Decayed Popularity".
    """
    if half_life_windows <= 0:
        raise ValueError(f"`decayed_popularity(half_life_windows={half_life_windows})` must be above zero.")
    if previous_E is None:
        return counts_E.double()
    if previous_E.shape != counts_E.shape:
        raise ValueError(f"`decayed_popularity` got {previous_E.numel()} and {counts_E.numel()} experts.")
    keep = 2.0 ** (-1.0 / half_life_windows)
    popularity_E: Tensor = keep * previous_E.double() + (1.0 - keep) * counts_E.double()
    return popularity_E


def popularity_per_capacity(counts_E: Tensor, capacity_E: Tensor) -> Tensor:
    """How far experts of different capacity are used: tokens in relation to the tokens they can take.

    Args:
        counts_E: hard, soft or decayed counts.
        capacity_E: tokens that an expert can take in the same time, above zero; a scalar if all are alike.

    Returns:
        float64 `[E]`.

    Source: MoEvement (2024), Appendix B, "Capacity-Aware Ordering".
    """
    if not bool((capacity_E > 0).all()):
        raise ValueError("`popularity_per_capacity(capacity_E=...)` must be above zero for every expert.")
    return counts_E.double() / capacity_E.double()
