"""Pack items of two sizes into the fewest slots: the arithmetic behind the planner.

Slot j costs FULL of its own items and COMPUTE of all items in later slots. Seen from the last slot backwards this is
bin packing where each bin's capacity is the budget less the COMPUTE of what is already packed.

Filling backwards in the given order, each slot as full as it goes, needs the fewest slots of all plans that keep the
order: let greedy have packed A more than another plan after k slots. To catch up the other plan must pack A in FULL,
which greedy has paid for in COMPUTE only, and COMPUTE <= FULL. So greedy is never behind. Algorithm 1 keeps the
order; where its plan keeps the budget, greedy has no more slots. Plans that break the order are tried only if that
can save a slot.

Shape suffixes: N items, in the order of capture unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Slots = list[Ints]
"""Indices of the items by slot, first slot first."""
Packer = Callable[[Ints, Ints, int, int], Slots]


def pack(full_N: Ints, compute_N: Ints, budget: int, max_slots: int) -> Slots:
    """The plan with the fewest slots, preferring the given order.

    Args:
        full_N: bytes of FULL; at least `compute_N` each.
        compute_N: bytes of COMPUTE.
        budget: bytes per slot.
        max_slots: slot 0 takes what does not fit into this many slots, or into any, and goes over the budget.

    Returns:
        Slots; all keep the budget but possibly slot 0.
    """
    best = pack_in_order(full_N, compute_N, budget, max_slots)
    over = excess(best, full_N, compute_N, budget)
    if not over and len(best) <= fewest_slots(full_N, compute_N, budget):
        return best
    for order_N in (_given(full_N, compute_N), _cheapest_late(full_N, compute_N), _largest_late(full_N, compute_N)):
        slots = _pack_filling_gaps(full_N, compute_N, budget, max_slots, order_N)
        over_now = excess(slots, full_N, compute_N, budget)
        if (over_now, len(slots)) < (over, len(best)):
            best, over = slots, over_now
    return best


def pack_in_order(full_N: Ints, compute_N: Ints, budget: int, max_slots: int) -> Slots:
    """Backwards, greedily, without changing the order; O(slots log N)."""
    num = len(full_N)
    full_sum = np.concatenate(([0], np.cumsum(full_N[::-1])))
    compute_sum = np.concatenate(([0], np.cumsum(compute_N[::-1])))
    ends = [0]  # items packed so far, counted from the last
    while ends[-1] < num and len(ends) < max_slots:
        room = budget - compute_sum[ends[-1]]
        end = int(np.searchsorted(full_sum, full_sum[ends[-1]] + room, side="right")) - 1
        if end <= ends[-1]:
            break
        ends.append(end)
    if ends[-1] < num:
        ends.append(num)
    slots = [np.arange(num - stop, num - start) for start, stop in pairwise(ends)]
    return slots[::-1]


def excess(slots: Slots, full_N: Ints, compute_N: Ints, budget: int) -> int:
    """Bytes by which the largest slot goes over the budget; zero if none does."""
    return max(0, *(nbytes - budget for nbytes in slot_nbytes(slots, full_N, compute_N)))


def slot_nbytes(slots: Slots, full_N: Ints, compute_N: Ints) -> list[int]:
    """Bytes of each slot: FULL of its items, COMPUTE of all later ones."""
    full = [int(full_N[slot].sum()) for slot in slots]
    compute = [int(compute_N[slot].sum()) for slot in slots]
    return [f + sum(compute[j + 1 :]) for j, f in enumerate(full)]


def fewest_slots(full_N: Ints, compute_N: Ints, budget: int) -> int:
    """A lower bound on slots within the budget, as if items could be divided.

    Late slots take first what leaves least COMPUTE behind per byte of FULL: after every slot the most FULL is packed
    at the least COMPUTE. A very large number if the budget cannot be kept.
    """
    order_N = _cheapest_late(full_N, compute_N)[::-1]
    full_sum = np.concatenate(([0], np.cumsum(full_N[order_N])))
    compute_sum = np.concatenate(([0], np.cumsum(compute_N[order_N])))
    packed, slots = 0.0, 0
    while packed < full_sum[-1] * (1 - 1e-12):  # rounding must not cost a slot
        room = budget - float(np.interp(packed, full_sum, compute_sum))
        if room <= 0 or slots > len(full_N):
            return 2**31
        packed += room
        slots += 1
    return max(slots, 1)


def pack_by_algorithm1(full_N: Ints, compute_N: Ints, budget: int, max_slots: int) -> Slots:
    """FindWindowSize and GenerateSchedule of the paper: equally many operators per slot, sizes as if all were equal.

    The largest number of active operators whose mean sizes fit, but at least 2 (line 10), or as many as keep the
    window within `max_slots`. Real sizes may go over the budget in any slot.

    Source: MoEvement (2024), Sec. 3.5, Algorithm 1.
    """
    num, full, compute = len(full_N), int(full_N.sum()), int(compute_N.sum())
    active = num
    if full > budget:
        # (full * active + compute * (num - active)) / num <= budget, all in integers
        active = num * (budget - compute) // (full - compute) if full > compute else 0
    active = min(num, max(active, 2, -(-num // max_slots)))
    return [np.arange(start, min(start + active, num)) for start in range(0, num, active)]


def _pack_filling_gaps(full_N: Ints, compute_N: Ints, budget: int, max_slots: int, order_N: Ints) -> Slots:
    """Backwards through `order_N`; what does not fit waits for the next slot while smaller items pass it."""
    left, compute = order_N[::-1], 0
    slots: Slots = []
    while len(left) and len(slots) < max_slots - 1:
        taken = _fill(full_N[left], budget - compute)
        if not taken.any():
            break
        slots.append(left[taken])
        compute += int(compute_N[left[taken]].sum())
        left = left[~taken]
    if len(left):
        slots.append(left)
    return [np.sort(slot) for slot in slots[::-1]]


def _fill(full: Ints, room: int) -> npt.NDArray[np.bool_]:
    """First fit in order, vectorised: runs of items that fit, each shorter than the last."""
    taken = np.zeros(len(full), dtype=np.bool_)
    while True:
        fits = np.flatnonzero(~taken & (full <= room))
        if not len(fits):
            return taken
        run = fits[: int(np.searchsorted(np.cumsum(full[fits]), room, side="right"))]
        taken[run] = True
        room -= int(full[run].sum())


def _given(full_N: Ints, compute_N: Ints) -> Ints:
    return np.arange(len(full_N))


def _cheapest_late(full_N: Ints, compute_N: Ints) -> Ints:
    """Items with most COMPUTE per FULL first: they cost most for as long as they wait."""
    return np.argsort(-compute_N / np.maximum(full_N, 1), kind="stable")


def _largest_late(full_N: Ints, compute_N: Ints) -> Ints:
    return np.argsort(full_N, kind="stable")
