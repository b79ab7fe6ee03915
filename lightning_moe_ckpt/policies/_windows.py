"""Plan a window: which operator is FULL in which slot, so that no slot exceeds the bytes a step can hide.

Slot j costs FULL of its own items and COMPUTE of all items in later slots. Seen from the last slot backwards this is
bin packing where each bin's capacity is the budget less the COMPUTE of items already packed.

Filling backwards in the given order, each slot as full as it goes, needs the fewest slots of all plans that keep the
order: let greedy have packed A more than another plan after k slots. To catch up the other plan must pack A in FULL,
which greedy has paid for in COMPUTE only, and COMPUTE <= FULL. So greedy is never behind. Algorithm 1 keeps the order;
where its plan keeps the budget, greedy has no more slots. Plans that break the order are tried only if that can save a
slot. Where these may not be the best, and operators are up to 17, or more with equal sizes, `_pack_exactly` looks at all plans.

A slot goes over the budget only if COMPUTE of all operators does, if the window would exceed `max_window`, or if an
operator is too large for the bytes that COMPUTE leaves (see `split_nbytes`). It is always slot 0.

Ranks that share a reduction must capture a dense operator in the same window step, but rank 0's experts may be popular
in another order than rank 1's. So plans are over *positions*: dense operators and routers by name, and "the k-th least
popular expert here" of each layer. The positions, their sizes and their order depend only on counts summed over all
ranks, so all ranks make the same plan; each then puts its own experts into the positions. We differ there from
MoEvement, which orders one rank's operators only.

Source: MoEvement (2026), Sec. 3.5, Algorithm 1 (`planner="algorithm1"`). The default `packed` differs: it counts real
bytes, and since the frozen set shrinks along the window, later slots take more. At a budget of 2.5 bytes per parameter
(12 in FULL, 2 in COMPUTE) Algorithm 1 needs 20 slots, packing 9.

Shape suffix: N items, in the order of capture unless said otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt
from torch import Tensor

from lightning_moe_ckpt._units import size_text
from lightning_moe_ckpt.operators import MoELayerSpec, Operator, OperatorSet
from lightning_moe_ckpt.policies._plan import Plan, WindowStep
from lightning_moe_ckpt.policies._popularity import Order

PlannerName = Literal["packed", "algorithm1"]
OverBudget = Literal["stall", "dense"]
_MOST_STATES, _MOST_IN_SEARCH, _MOST_ITEMS = 2**17, 2**12, 99
"""Bounds of exact plans: states for a budget (0.1 s of a processor), states for each budget tried, and operators; ranks share no clock."""
Counts = Tensor | Sequence[float]
Ints = npt.NDArray[np.int64]
Slots = list[Ints]
"""Indices of the items by slot, first slot first."""


@dataclass(frozen=True, slots=True)
class PlanItem:
    """An operator as the planner's input."""

    name: str
    full_nbytes: int
    """Bytes of a FULL record on this rank."""
    compute_nbytes: int
    """Bytes of a COMPUTE record; at most `full_nbytes`."""
    order_key: float = 0.0
    """Order of capture: ascending keys, equal keys in the given order."""

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
    """Plan a window for all operators, or positions of them: 15,000 in milliseconds. Every item is FULL in exactly one
    slot.

    A step can hide `budget_nbytes`. If that cannot be kept, slot 0 makes training wait (`stall`), or everything is
    captured at once every m steps (`dense`). The planner is `packed`, or the paper's `algorithm1`, which counts
    operators instead of bytes. `max_window` limits the slots; `None` for no limit.

    Raises `ValueError` if there are no items, the budget or `max_window` is not positive, or under `stall` an item
    alone exceeds the budget and must be split.
    """
    if budget_nbytes < 1 or (max_window is not None and max_window < 1):
        raise ValueError(f"`plan_window(budget_nbytes={budget_nbytes}, max_window={max_window})` must be positive.")
    ordered, full_N, compute_N = _arrays(items)
    if planner == "packed" and over_budget == "stall":
        _require_split(ordered, budget_nbytes)
    most = len(items) if max_window is None else max_window
    slots = (pack if planner == "packed" else pack_by_algorithm1)(full_N, compute_N, budget_nbytes, most)
    interval = len(slots)
    if over_budget == "dense" and excess(slots, full_N, compute_N, budget_nbytes):
        slots, interval = [np.arange(len(items))], -(-int(full_N.sum()) // budget_nbytes)
    return Plan.of_slots([[ordered[i].name for i in slot.tolist()] for slot in slots], interval_steps=interval)


def plan_for_window(items: Sequence[PlanItem], window: int) -> Plan:
    """Return the packed plan of the smallest budget that needs at most `window` slots. Raises as `smallest_budget`."""
    return plan_window(items, budget_nbytes=smallest_budget(items, window), max_window=window)


def smallest_budget(items: Sequence[PlanItem], window: int) -> int:
    """Return the smallest budget with which a packed plan needs at most `window` slots and does not stall: one byte
    less needs more slots or a stall, with exact plans for up to 12 operators. Raises `ValueError` if there are no
    items, or `window` is not positive.
    """
    if window < 1:
        raise ValueError(f"`plan_for_window(window={window})` must be positive.")
    _, full_N, compute_N = _arrays(items)
    low, high = 0, max(1, int(full_N.sum()))  # low never suffices, high always does
    while high - low > 1:
        middle = (low + high) // 2
        if excess(pack(full_N, compute_N, middle, window, _MOST_IN_SEARCH), full_N, compute_N, middle):
            low = middle
        else:
            high = middle
    return high


def split_nbytes(items: Sequence[PlanItem], budget_nbytes: int) -> int:
    """Return the FULL bytes above which an operator should be split.

    COMPUTE of all operators leaves `budget - compute` in the first slot, more in later ones. Pieces of half the rest
    fit anywhere. If COMPUTE leaves next to nothing, a 64th of the budget bounds the number of pieces.
    """
    return max((budget_nbytes - sum(item.compute_nbytes for item in items)) // 2, budget_nbytes // 64, 1)


def _arrays(items: Sequence[PlanItem]) -> tuple[list[PlanItem], Ints, Ints]:
    if not items:
        raise ValueError("There must be at least one item to plan.")
    ordered = sorted(items, key=lambda item: item.order_key)
    full = np.array([item.full_nbytes for item in ordered], dtype=np.int64)
    return ordered, full, np.array([item.compute_nbytes for item in ordered], dtype=np.int64)


def _require_split(items: Sequence[PlanItem], budget_nbytes: int) -> None:
    if large := [item.name for item in items if item.full_nbytes > budget_nbytes]:
        more = f" and {len(large) - 3} more" if len(large) > 3 else ""
        raise ValueError(
            f"Operators {', '.join(large[:3])}{more} exceed the budget of {size_text(budget_nbytes)} per step alone. "
            "Split those above `split_nbytes` before planning."
        )


def pack(full_N: Ints, compute_N: Ints, budget: int, max_slots: int, most_states: int = _MOST_STATES) -> Slots:
    """Return the plan with the fewest slots, preferring the given order. Items have bytes of FULL, at least as many as
    of COMPUTE. All slots keep the budget of bytes, but possibly slot 0, to which items go that do not fit into
    `max_slots`. `most_states` bounds the exact search.
    """
    max_slots = min(max_slots, len(full_N))
    best = pack_in_order(full_N, compute_N, budget, max_slots)
    over, least = excess(best, full_N, compute_N, budget), fewest_slots(full_N, compute_N, budget)
    if not over and len(best) <= least:
        return best
    largest_late_N = np.argsort(full_N, kind="stable")
    for order_N in (np.arange(len(full_N)), _cheapest_late(full_N, compute_N), largest_late_N):
        slots = _pack_filling_gaps(full_N, compute_N, budget, max_slots, order_N)
        over_now = excess(slots, full_N, compute_N, budget)
        if (over_now, len(slots)) < (over, len(best)):
            best, over = slots, over_now
    enough = max_slots if over else len(best) - 1
    return (least <= enough and _pack_exactly(full_N, compute_N, budget, enough, most_states)) or best


def pack_in_order(full_N: Ints, compute_N: Ints, budget: int, max_slots: int) -> Slots:
    """Pack backwards, greedily, without changing the order; O(slots log N)."""
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
    return [np.arange(num - stop, num - start) for start, stop in pairwise(ends)][::-1]


def excess(slots: Slots, full_N: Ints, compute_N: Ints, budget: int) -> int:
    """Return the bytes by which the largest slot goes over the budget; zero if none does."""
    compute = [int(compute_N[slot].sum()) for slot in slots]
    return max(0, *(int(full_N[slot].sum()) + sum(compute[j + 1 :]) - budget for j, slot in enumerate(slots)))


def fewest_slots(full_N: Ints, compute_N: Ints, budget: int) -> int:
    """Return a lower bound on slots within the budget, as if items could be divided.

    Late slots first take items with least COMPUTE per byte of FULL: after every slot the most FULL is packed at the
    least COMPUTE. A very large number if the budget cannot be kept.
    """
    order_N = _cheapest_late(full_N, compute_N)[::-1]
    full_sum = np.concatenate(([0], np.cumsum(full_N[order_N])))
    compute_sum = np.concatenate(([0], np.cumsum(compute_N[order_N])))
    packed, slots = 0.0, 0
    while packed < full_sum[-1] * (1 - 1e-12):  # rounding must not cost a slot
        if (room := budget - float(np.interp(packed, full_sum, compute_sum))) <= 0 or slots > len(full_N):
            return 2**31
        packed += room
        slots += 1
    return max(slots, 1)


def pack_by_algorithm1(full_N: Ints, compute_N: Ints, budget: int, max_slots: int) -> Slots:
    """Return equally many operators per slot, by mean sizes (FindWindowSize and GenerateSchedule of the paper).

    The largest number of active operators whose mean sizes fit, but at least 2 (line 10), or as many as keep the window
    within `max_slots`. Real sizes may go over the budget in any slot.

    Source: MoEvement (2026), Sec. 3.5, Algorithm 1.
    """
    num, full, compute = len(full_N), int(full_N.sum()), int(compute_N.sum())
    active = num
    if full > budget:
        # (full * active + compute * (num - active)) / num <= budget, all in integers
        active = num * (budget - compute) // (full - compute) if full > compute else 0
    active = min(num, max(active, 2, -(-num // max_slots)))
    return [np.arange(start, min(start + active, num)) for start in range(0, num, active)]


def _pack_filling_gaps(full_N: Ints, compute_N: Ints, budget: int, max_slots: int, order_N: Ints) -> Slots:
    """Pack backwards through `order_N`; a misfit waits for the next slot while smaller items pass."""
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
    """Return the first fit in order, vectorised: runs of items that fit, each shorter than the last."""
    taken = np.zeros(len(full), dtype=np.bool_)
    while True:
        fits = np.flatnonzero(~taken & (full <= room))
        if not len(fits):
            return taken
        run = fits[: int(np.searchsorted(np.cumsum(full[fits]), room, side="right"))]
        taken[run] = True
        room -= int(full[run].sum())


def _pack_exactly(full_N: Ints, compute_N: Ints, budget: int, max_slots: int, most_states: int) -> Slots:
    """Return a plan with the fewest slots that all keep the budget; no slots without one, or with too many states.

    A state says how many items of each size are packed, from the last slot on. Its cost is slots, then FULL beyond COMPUTE
    in the newest slot: the least cost leaves most room, as the room of the next slot depends on the state alone.
    """
    sizes, kind_N = np.unique(np.stack([full_N, compute_N]), axis=1, return_inverse=True)
    counts = np.bincount(kind_N := kind_N.reshape(-1))
    if len(full_N) > _MOST_ITEMS or math.prod((counts + 1).tolist()) > most_states:
        return []
    stride = np.cumprod([1, *(counts + 1)])
    states, total = np.arange(stride[-1]), int(full_N.sum())
    packed = [states // stride[k] % (count + 1) for k, count in enumerate(counts)]
    full, compute = (sum(packed[k] * size for k, size in enumerate(row)) for row in sizes)
    slot, room, states = total + 1, budget - compute, states[:1]  # a slot costs more than anything beyond COMPUTE
    cost, newest = np.full(stride[-1], 2**62), np.zeros(stride[-1], np.int64)
    cost[0] = slot
    for _ in full_N:
        reached = []
        for k, (size, later) in enumerate(sizes.T):
            old = states[(packed[k][states] < counts[k]) & (size <= room[states])]
            new, used = old + stride[k], cost[old] % slot
            now = cost[old] + size - later + (used + size > room[old]) * (slot - used)
            # What is left must fit into the room that slots to come have at most.
            better = (now < cost[new]) & (total - full[new] <= room[new] * (max_slots + 1 - now // slot) - now % slot)
            cost[new[better]], newest[new[better]] = now[better], k
            reached.append(new[better])
        states = np.unique(np.concatenate(reached))
    if (num := int(cost[-1] // slot)) > max_slots:
        return []
    slots: list[list[int]] = [[] for _ in range(num)]
    items, state = [np.flatnonzero(kind_N == k).tolist()[::-1] for k in range(len(counts))], int(stride[-1]) - 1
    while state:  # equal items in their order, since this leads from the first slot to the last
        slots[-int(cost[state] // slot)].append(items[newest[state]].pop())
        state -= int(stride[newest[state]])
    return [np.sort(np.array(each)) for each in slots]


def _cheapest_late(full_N: Ints, compute_N: Ints) -> Ints:
    """Return the items' indices, most COMPUTE per FULL first: waiting for a slot costs most for these items."""
    return np.argsort(-compute_N / np.maximum(full_N, 1), kind="stable")


def positions(
    operators: OperatorSet, counts: Counts, *, sizes: Mapping[str, tuple[int, int]], by: Order = "popularity"
) -> list[PlanItem]:
    """Return the positions to plan instead of operators, possibly split; equal on all ranks if `counts` and `by` are.

    Counts are popularity per expert over all layers, summed over all ranks (frozen at the window's first step). `sizes`
    has `(FULL, COMPUTE)` bytes of each operator; experts of one layer must have equal sizes on all ranks. Only the
    order `popularity` looks at counts. A model without experts has no popularity and is captured back to front
    (MoEvement, Appendix E).
    """
    layers = _layers(operators, counts, by)
    if by == "popularity" and not operators.layers:
        by = "back_to_front"
    items = []
    for i, (position, op) in enumerate(_assign(operators, layers)):
        key = {"fixed": i, "back_to_front": -i}.get(by, position.popularity)
        full_nbytes, compute_nbytes = sizes[op.name]
        items.append(PlanItem(position.name, full_nbytes, compute_nbytes, key))
    return items


def assign_positions(plan: Plan, operators: OperatorSet, counts: Counts, *, by: Order = "popularity") -> Plan:
    """Return the plan over operators of all ranks, from the plan over their positions, made by the same counts and
    order; equal on all ranks. Raises `ValueError` if the plan does not name exactly these positions.
    """
    holders = {position.name: position.holders for position, _ in _assign(operators, _layers(operators, counts, by))}
    if set(plan.names) != set(holders):
        raise ValueError("The plan does not belong to these operators: it names other positions.")
    files = [{name: kind for at, kind in step.files["durable"].items() for name in holders[at]} for step in plan.steps]
    return Plan(tuple(WindowStep({"durable": each}) for each in files), plan.interval_steps, plan.partial)


def all_names(operators: OperatorSet) -> list[str]:
    """Return the operator names of all ranks, from this rank's: each rank has as many experts, cut alike."""
    layers = {layer.fqn: (layer, {e: k for k, e in enumerate(layer.local_expert_ids)}) for layer in operators.layers}
    names: list[str] = []
    for op in operators:
        if op.layer is None or op.expert_idx is None:
            names.append(op.name)
        else:
            layer, place = layers[op.layer]
            parts = operators.ep_size if layer.holders == "expert_data" else 1
            each, piece = layer.num_experts // parts, _piece(op)
            names += [f"{layer.prefix}/expert.{r * each + place[op.expert_idx]}{piece}" for r in range(parts)]
    return names


@dataclass(frozen=True, slots=True)
class _Position:
    name: str
    holders: list[str]
    """Operators at the position, one of each expert-parallel rank."""
    popularity: float = float("inf")
    """Popularity of the position; operators that every token uses come after all experts."""


@dataclass(frozen=True, slots=True)
class _Layer:
    prefix: str
    """Prefix of the layer's operator names."""
    ordered: list[int]
    """Local experts, least popular first."""
    everywhere: list[list[int]]
    """Experts of each expert-parallel rank, least popular first; one row if all ranks hold all experts."""
    keys: list[float]
    """Popularity of each position, summed over the expert-parallel ranks."""


def _assign(operators: OperatorSet, layers: Mapping[str, _Layer]) -> Iterator[tuple[_Position, Operator]]:
    """Yield positions in the order of the model, each with this rank's operator for it."""
    local = {(layer.fqn, expert): k for layer in operators.layers for k, expert in enumerate(layer.local_expert_ids)}
    pieces = {(op.layer, op.expert_idx, _piece(op)): op for op in operators}
    for op in operators:
        if op.layer is None or op.expert_idx is None:
            yield _Position(op.name, [op.name]), op
        else:
            k, layer, piece = local[op.layer, op.expert_idx], layers[op.layer], _piece(op)
            holders = [f"{layer.prefix}/expert.{ordered[k]}{piece}" for ordered in layer.everywhere]
            position = _Position(f"{op.layer}/position.{k}{piece}", holders, layer.keys[k])
            yield position, pieces[op.layer, layer.ordered[k], piece]


def _piece(op: Operator) -> str:
    """Return the suffix that `split` appended to the name."""
    _, mark, number = op.name.partition("#")
    return mark + number


def _layers(operators: OperatorSet, counts: Counts, by: Order) -> dict[str, _Layer]:
    values = counts.tolist() if isinstance(counts, Tensor) else list(counts)
    if len(values) != operators.num_experts:
        raise ValueError(f"`counts` has {len(values)} entries for {operators.num_experts} experts.")
    if by != "popularity":
        values = [0.0] * len(values)
    offsets = operators.count_offsets
    return {
        layer.fqn: _layer(layer, values[offsets[layer.fqn] :][: layer.num_experts], operators.ep_size)
        for layer in operators.layers
    }


def _layer(layer: MoELayerSpec, counts_E: list[float], ep_size: int) -> _Layer:
    parts = ep_size if layer.holders == "expert_data" else 1
    each = layer.num_experts // parts
    first = layer.local_expert_ids[0] // each if parts > 1 else 0
    by_popularity = [sorted(range(r * each, (r + 1) * each), key=lambda e: (counts_E[e], e)) for r in range(parts)]
    turns = [_in_turns(row, layer.owners) for row in by_popularity]
    # One turn's positions come together, else one step would hold all experts of an owner.
    sums = [[sum(counts_E[row[k]] for row in each) for k in range(len(each[0]))] for each in zip(*turns, strict=True)]
    totals = accumulate((sum(turn) for turn in sums), max) if layer.owners else iter(())
    keys = [key for turn in sums for key in ([next(totals)] * len(turn) if layer.owners else turn)]
    rows = [[expert for turn in row for expert in turn] for row in turns]
    return _Layer(layer.prefix, rows[first], rows, keys)


def _in_turns(experts: Sequence[int], owners: Sequence[int]) -> list[list[int]]:
    """Return turns with one expert of each owner, in order; a single turn if experts have no owners."""
    if not owners:
        return [list(experts)]
    rows: dict[int, list[int]] = {}
    for expert in experts:
        rows.setdefault(owners[expert], []).append(expert)
    most = max(map(len, rows.values()))
    return [[row[k] for _, row in sorted(rows.items()) if k < len(row)] for k in range(most)]
