"""More experts per generation after every fault that costs too many tokens, so that what is lost stays in proportion.

Source: PEC (2024), Sec. 3.1 (Dynamic-K). The paper doubles K once lost tokens exceed the limit; we differ in doubling
before that, as soon as another fault like the last one would exceed it, so that the limit is passed by one fault at most.
"""

from __future__ import annotations

from dataclasses import dataclass


def next_k(k: int, *, plt: float, last_loss: float, plt_budget: float, num_experts: int) -> int:
    """K after a recovery.

    Doubled until another fault that costs as much as the last one (less in proportion, as K grows) would leave PLT
    within the budget, or until every generation takes all experts. PLT never exceeds the budget by more than one
    fault's loss: once it does, K is E, and no further fault loses a token.

    Args:
        k: experts per layer until now.
        plt: portion of lost tokens, the last fault included.
        last_loss: part of it that the last fault has cost.
        plt_budget: the limit, PEC proposes 0.05.
        num_experts: E of the largest layer.

    Raises:
        ValueError: a number is out of range.
    """
    if k < 1 or plt < 0 or last_loss < 0 or not plt_budget >= 0 or num_experts < 1:
        raise ValueError(
            f"`next_k(k={k}, plt={plt}, last_loss={last_loss}, plt_budget={plt_budget}, num_experts={num_experts})`: "
            "a number is out of range."
        )
    grown = min(k, num_experts)
    while grown < num_experts and plt + last_loss * k / grown > plt_budget:
        grown = min(2 * grown, num_experts)
    return grown


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicK:
    """The rule of one run."""

    plt_budget: float | None = 0.05
    """Limit of PLT; `None` keeps K as it is."""

    def __post_init__(self) -> None:
        if self.plt_budget is not None and not 0 <= self.plt_budget <= 1:
            raise ValueError(f"`DynamicK(plt_budget={self.plt_budget})` must be between 0 and 1, or None.")

    def after_fault(self, k: int, *, plt: float, last_loss: float, num_experts: int) -> int:
        """See `next_k`."""
        if self.plt_budget is None:
            return k
        return next_k(k, plt=plt, last_loss=last_loss, plt_budget=self.plt_budget, num_experts=num_experts)
