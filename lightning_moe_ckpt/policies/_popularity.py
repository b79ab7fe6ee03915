"""In which order operators are captured within a window, and when that order is out of date.

What is captured late stays frozen long in replay and saves work there; so popular experts come last, after them the
operators that every token uses. In a dense model the back comes first: gradients of a frozen front need not be
computed.

Source: MoEvement (2024), Sec. 3.5, Appendix B and E. Hard counts only.
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
