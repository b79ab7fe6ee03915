"""Plan a window: which operator is FULL in which slot, so that no slot exceeds the bytes a step can hide.

Sources: MoEvement (2024), Sec. 3.5, Algorithm 1 (`planner="algorithm1"`). The default `packed` differs: it counts
real bytes, and since the frozen set shrinks along the window, later slots take more. At a budget of 2.5 bytes per
parameter (12 in FULL, 2 in COMPUTE) Algorithm 1 needs 20 slots, packing 9.

A slot goes over the budget only if COMPUTE of all operators does, if the window would exceed `max_window`, or if an
operator is too large for what COMPUTE leaves (see `split_nbytes`). It is always slot 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lightning_moe_ckpt.policies._packing import (
    Ints,
    excess,
    pack,
    pack_by_algorithm1,
)
from lightning_moe_ckpt.policies._plan import Plan

PlannerName = Literal["packed", "algorithm1"]
OverBudget = Literal["stall", "dense"]


@dataclass(frozen=True, slots=True)
class PlanItem:
    """An operator as the planner sees it."""

    name: str
    full_nbytes: int
    """Bytes of a FULL record on this rank."""
    compute_nbytes: int
    """Bytes of a COMPUTE record; at most `full_nbytes`."""
    order_key: float = 0.0
    """Operators are captured in ascending order of this, equals in the order given."""

    def __post_init__(self) -> None:
        if not 0 <= self.compute_nbytes <= self.full_nbytes:
            raise ValueError(
                f"`PlanItem({self.name!r}, full_nbytes={self.full_nbytes}, compute_nbytes={self.compute_nbytes})` "
                "must have 0 <= compute_nbytes <= full_nbytes."
            )


def plan_window(
    items: Sequence[PlanItem],
    *,
    budget_nbytes: int,
    planner: PlannerName = "packed",
    max_window: int | None = 16,
    over_budget: OverBudget = "stall",
) -> Plan:
    """Plan a window for `items`.

    Args:
        items: all operators, or positions of them; milliseconds for 15,000.
        budget_nbytes: bytes that one step can hide.
        planner: `packed`, or the paper's `algorithm1`, which counts operators instead of bytes.
        max_window: most slots; `None` for no limit.
        over_budget: what to do if the budget cannot be kept: slot 0 makes training wait (`stall`), or everything is
            captured at once every m steps (`dense`).

    Returns:
        The plan; every item is FULL in exactly one slot.

    Raises:
        ValueError: there are no items, the budget or `max_window` is not positive, or under `stall` an item alone
            exceeds the budget and must be split.
    """
    if budget_nbytes < 1 or (max_window is not None and max_window < 1):
        raise ValueError(f"`plan_window(budget_nbytes={budget_nbytes}, max_window={max_window})` must be positive.")
    ordered, full_N, compute_N = _arrays(items)
    if planner == "packed" and over_budget == "stall":
        _require_split(ordered, budget_nbytes)
    most = len(items) if max_window is None else max_window
    packer = pack if planner == "packed" else pack_by_algorithm1
    slots = packer(full_N, compute_N, budget_nbytes, most)
    interval = len(slots)
    if over_budget == "dense" and excess(slots, full_N, compute_N, budget_nbytes):
        slots, interval = [np.arange(len(items))], -(-int(full_N.sum()) // budget_nbytes)
    return Plan.of_slots([[ordered[i].name for i in slot.tolist()] for slot in slots], interval_steps=interval)


def plan_for_window(items: Sequence[PlanItem], window: int) -> Plan:
    """The packed plan with the smallest budget that needs at most `window` slots. Raises as `smallest_budget`."""
    return plan_window(items, budget_nbytes=smallest_budget(items, window), max_window=window)


def smallest_budget(items: Sequence[PlanItem], window: int) -> int:
    """The smallest budget with which a packed plan needs at most `window` slots and does not stall.

    The smallest in the sense that one byte less needs more slots or a stall.

    Raises:
        ValueError: there are no items, or `window` is not positive.
    """
    if window < 1:
        raise ValueError(f"`plan_for_window(window={window})` must be positive.")
    _, full_N, compute_N = _arrays(items)
    low, high = 0, max(1, int(full_N.sum()))  # low never suffices, high always does
    while high - low > 1:
        middle = (low + high) // 2
        if excess(pack(full_N, compute_N, middle, window), full_N, compute_N, middle):
            low = middle
        else:
            high = middle
    return high


def split_nbytes(items: Sequence[PlanItem], budget_nbytes: int) -> int:
    """The FULL bytes above which an operator should be split.

    COMPUTE of all operators leaves `budget - compute` in the first slot, more in later ones. Pieces of half of that
    fit anywhere. Where COMPUTE leaves next to nothing, a 64th of the budget keeps the number of pieces within reason.
    """
    left = budget_nbytes - sum(item.compute_nbytes for item in items)
    return max(left // 2, budget_nbytes // 64, 1)


def _arrays(items: Sequence[PlanItem]) -> tuple[list[PlanItem], Ints, Ints]:
    if not items:
        raise ValueError("There must be at least one item to plan.")
    ordered = sorted(items, key=lambda item: item.order_key)
    full = np.array([item.full_nbytes for item in ordered], dtype=np.int64)
    compute = np.array([item.compute_nbytes for item in ordered], dtype=np.int64)
    return ordered, full, compute


def _require_split(items: Sequence[PlanItem], budget_nbytes: int) -> None:
    large = [item.name for item in items if item.full_nbytes > budget_nbytes]
    if large:
        more = f" and {len(large) - 3} more" if len(large) > 3 else ""
        raise ValueError(
            f"Operators {', '.join(large[:3])}{more} exceed the budget of {budget_nbytes} bytes per step alone. "
            "Split those above `split_nbytes` before planning."
        )
