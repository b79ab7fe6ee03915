"""The planner keeps the budget, takes each operator once, and never needs more slots than Algorithm 1."""

from __future__ import annotations

import functools
import itertools
import math
import random
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lightning_moe_ckpt import policies
from lightning_moe_ckpt.operators import Operator, ParamSlice, RecordKind, split
from lightning_moe_ckpt.policies import Plan
from lightning_moe_ckpt.policies._windows import PlanItem, pack_in_order, plan_for_window, smallest_budget, split_nbytes


def sizes_to_items(sizes: list[tuple[int, int]]) -> list[PlanItem]:
    return [PlanItem(f"op{i}", full + compute, compute, i) for i, (full, compute) in enumerate(sizes)]


item_lists = st.lists(st.tuples(st.integers(0, 100), st.integers(0, 20)), min_size=1, max_size=25).map(sizes_to_items)
uniform_lists = st.builds(
    lambda num, size: [PlanItem(f"op{i}", 12 * size, 2 * size) for i in range(num)],
    st.integers(1, 60),
    st.integers(1, 50),
)


class Window:
    """A plan, and what it costs, from the definition."""

    def __init__(self, plan: Plan, items: list[PlanItem], budget: int) -> None:
        by_name = {item.name: item for item in items}
        self.plan, self.window, self.interval_steps = plan, plan.window, plan.interval_steps
        self.slot_nbytes = [
            sum(by_name[n].full_nbytes for n in plan.full(j))
            + sum(by_name[n].compute_nbytes for n in plan.steps[j].of_kind(RecordKind.COMPUTE))
            for j in range(plan.window)
        ]
        steps = max(1, self.interval_steps // self.window)
        self.stall_nbytes = max(0, *(nbytes - steps * budget for nbytes in self.slot_nbytes))
        self.keeps_budget = self.stall_nbytes == 0


def plan_window(items: list[PlanItem], *, budget_nbytes: int, **options: Any) -> Window:
    return Window(policies.plan_window(items, budget_nbytes=budget_nbytes, **options), items, budget_nbytes)


def compute_of(items: list[PlanItem]) -> int:
    return sum(item.compute_nbytes for item in items)


def fits_anywhere(items: list[PlanItem], budget: int) -> bool:
    """Whether each item fits into any slot, whatever is captured later."""
    left = budget - compute_of(items)
    return all(item.full_nbytes <= left + item.compute_nbytes for item in items)


@given(item_lists | uniform_lists, st.integers(1, 3000), st.sampled_from([None, 1, 2, 3, 8, 16]))
@settings(max_examples=300, deadline=None)
def test_packed_plans(items: list[PlanItem], budget: int, max_window: int | None) -> None:
    """Each operator is FULL once; only slot 0 may exceed the budget, and only where it must."""
    assume(all(item.full_nbytes <= budget for item in items))
    plan = plan_window(items, budget_nbytes=budget, max_window=max_window)
    assert sorted(plan.plan.names) == sorted(item.name for item in items)
    assert max_window is None or plan.window <= max_window
    assert all(n <= budget for n in plan.slot_nbytes[1:])
    assert plan.interval_steps == plan.window
    if max_window is None and fits_anywhere(items, budget):
        assert plan.keeps_budget
    if compute_of(items) > budget + max(item.full_nbytes for item in items):
        assert not plan.keeps_budget


@given(item_lists | uniform_lists, st.integers(1, 3000))
@settings(max_examples=300, deadline=None)
def test_packed_never_needs_more_slots_than_algorithm1(items: list[PlanItem], budget: int) -> None:
    """Wherever the paper's plan keeps the budget with real sizes."""
    paper = plan_window(items, budget_nbytes=budget, planner="algorithm1", max_window=None)
    assume(paper.keeps_budget)
    packed = plan_window(items, budget_nbytes=budget, max_window=None)
    assert packed.keeps_budget
    assert packed.window <= paper.window


@given(item_lists.filter(lambda items: len(items) <= 5), st.integers(1, 400))
@settings(max_examples=150, deadline=None)
def test_no_plan_that_keeps_the_order_needs_fewer_slots(items: list[PlanItem], budget: int) -> None:
    """Against all of them."""
    assume(all(item.full_nbytes <= budget for item in items))
    fewest = None
    for num_cuts in range(len(items)):
        for cuts in itertools.combinations(range(1, len(items)), num_cuts):
            bounds = [0, *cuts, len(items)]
            slots = [items[a:b] for a, b in itertools.pairwise(bounds)]
            loads = [
                sum(i.full_nbytes for i in slot) + sum(i.compute_nbytes for later in slots[j + 1 :] for i in later)
                for j, slot in enumerate(slots)
            ]
            if max(loads) <= budget and fewest is None:
                fewest = len(slots)
    plan = plan_window(items, budget_nbytes=budget, max_window=None)
    if fewest is not None:
        assert plan.keeps_budget
        assert plan.window <= fewest


def _fewest(full: list[int], compute: list[int], budget: int) -> int:
    """Fewest slots of all plans that keep the budget, whatever their order; very many without such a plan."""
    num = len(full)

    @functools.cache
    def needs(packed: int) -> int:
        rest = [i for i in range(num) if not packed >> i & 1]
        room = budget - sum(compute[i] for i in range(num) if packed >> i & 1)
        slots = (taken for size in range(1, len(rest) + 1) for taken in itertools.combinations(rest, size))
        after = (needs(packed | sum(1 << i for i in taken)) for taken in slots if sum(full[i] for i in taken) <= room)
        return 1 + min(after, default=10**6) if rest else 0

    return needs(0)


def test_small_plans_are_the_best_there_are() -> None:
    """Of 400 problems against all plans: no stall where one keeps the budget, and no slot more than it needs."""
    without = 0
    for seed in range(400):
        draw = random.Random(seed)
        full = [draw.randint(1, 30) for _ in range(draw.randint(1, 7))]
        compute = [draw.randint(0, each) if draw.random() < 0.5 else each // 6 for each in full]
        if draw.random() < 0.3:  # experts of one size beside one other operator
            full[1:], compute[1:] = full[:1] * (len(full) - 1), compute[:1] * (len(full) - 1)
        budget, most = draw.randint(max(full), max(full) + sum(compute) + 5), draw.choice([3, 4, 5, 7])
        items = [PlanItem(f"op{i}", *sizes, i) for i, sizes in enumerate(zip(full, compute, strict=True))]
        plan, fewest = plan_window(items, budget_nbytes=budget, max_window=most), _fewest(full, compute, budget)
        assert sorted(plan.plan.names) == sorted(item.name for item in items)
        assert plan.keeps_budget == (fewest <= most), seed
        assert plan.window == fewest or not plan.keeps_budget, seed
        without += not plan.keeps_budget
    assert 40 < without < 360


def test_a_slot_is_filled_to_the_last_byte() -> None:
    """Greedy packing alone, without the plans that break the order and would hide a waste."""
    full, compute = np.array([12, 12, 12, 12]), np.array([2, 2, 2, 2])
    assert [slot.tolist() for slot in pack_in_order(full, compute, 28, 9)] == [[0, 1], [2, 3]]
    assert [slot.tolist() for slot in pack_in_order(full, compute, 48, 9)] == [[0, 1, 2, 3]]
    assert [slot.tolist() for slot in pack_in_order(full, compute, 18, 9)] == [[0], [1], [2], [3]]
    assert [slot.tolist() for slot in pack_in_order(full, compute, 13, 9)] == [[0, 1, 2], [3]]


def paper_schedule(items: list[PlanItem], budget: int) -> list[list[str]]:
    """Algorithm 1, line by line, in exact integers."""
    full, compute, total = sum(i.full_nbytes for i in items), compute_of(items), len(items)
    active = total
    while active > 2:
        frozen = total - active
        if full * active + compute * frozen <= budget * total:
            break
        active -= 1
    window = math.ceil(total / active)
    return [[i.name for i in items[j * active : min((j + 1) * active, total)]] for j in range(window)]


@given(item_lists | uniform_lists, st.integers(1, 3000))
@settings(max_examples=300, deadline=None)
def test_algorithm1_is_the_papers(items: list[PlanItem], budget: int) -> None:
    """The closed form gives the loop's schedule; slots over the budget are reported."""
    plan = plan_window(items, budget_nbytes=budget, planner="algorithm1", max_window=None)
    assert [list(plan.plan.full(j)) for j in range(plan.window)] == paper_schedule(items, budget)
    assert plan.keeps_budget == (max(plan.slot_nbytes) <= budget)


def model_of(num: int, seed: int | None = None) -> tuple[list[PlanItem], int]:
    """`num` operators at 12 and 2 bytes per parameter, and the number of parameters."""
    rng = random.Random(seed)
    params = [1_000_000 if seed is None else rng.randint(200_000, 2_000_000) for _ in range(num)]
    items = [
        PlanItem(f"layers.{i // 250}.moe/expert.{i % 250}", 12 * p, 2 * p, rng.random()) for i, p in enumerate(params)
    ]
    return items, sum(params)


@pytest.mark.parametrize("seed", [None, 1], ids=["uniform", "mixed"])
@pytest.mark.parametrize(("budget", "packed", "paper"), [(2.5, 9, 20), (3.0, 7, 10), (4.0, 4, 5), (6.0, 3, 3)])
def test_fifteen_thousand_operators(budget: float, packed: int, paper: int, seed: int | None) -> None:
    """Window lengths of the design, in milliseconds."""
    items, num_params = model_of(15_000, seed)
    nbytes = int(budget * num_params)
    start = time.process_time()
    policies.plan_window(items, budget_nbytes=nbytes, max_window=None)
    elapsed = time.process_time() - start
    plan = plan_window(items, budget_nbytes=nbytes, max_window=None)
    assert plan.window == packed
    assert plan.keeps_budget
    assert elapsed < 1.0  # about 10 ms on an idle core
    windows = plan_window(items, budget_nbytes=nbytes, planner="algorithm1", max_window=None).window
    assert windows in (paper, paper + (seed is not None))


def test_ascending_order_is_kept() -> None:
    """What has the higher key comes in a later or the same slot."""
    items, num_params = model_of(1000, 3)
    plan = plan_window(items, budget_nbytes=int(2.5 * num_params)).plan
    by_key = [item.name for item in sorted(items, key=lambda item: item.order_key)]
    assert list(plan.names) == by_key


def test_order_is_given_up_only_to_save_a_slot() -> None:
    """A large item between small ones wastes a slot if the order is kept."""
    items = [PlanItem("a", 5, 0), PlanItem("b", 6, 0), PlanItem("c", 5, 0)]
    plan = plan_window(items, budget_nbytes=11)
    assert plan.window == 2
    assert plan_window(items, budget_nbytes=10).window == 2
    smaller = plan_window(items, budget_nbytes=10).plan
    assert [set(smaller.full(j)) for j in range(2)] == [{"b"}, {"a", "c"}]


def test_a_budget_for_everything_is_one_slot() -> None:
    """Then sparse is dense."""
    items, num_params = model_of(10)
    assert plan_window(items, budget_nbytes=12 * num_params).window == 1


def test_compute_over_the_budget_stalls_slot_zero_only() -> None:
    """At 1.9 bytes per parameter COMPUTE alone does not fit; the stall is predicted."""
    items, num_params = model_of(1000)
    budget = int(1.9 * num_params)
    plan = plan_window(items, budget_nbytes=budget)
    assert plan.window == 16
    assert [n > budget for n in plan.slot_nbytes] == [True] + [False] * 15
    assert plan.stall_nbytes == plan.slot_nbytes[0] - budget
    assert plan.stall_nbytes < 1.3 * num_params


def test_compute_over_the_budget_can_be_captured_at_once_instead() -> None:
    """Every m steps, so that m steps hide it."""
    items, num_params = model_of(1000)
    plan = plan_window(items, budget_nbytes=int(1.9 * num_params), over_budget="dense")
    assert (plan.window, plan.interval_steps, plan.keeps_budget) == (1, 7, True)
    within = plan_window(items, budget_nbytes=int(2.5 * num_params), over_budget="dense")
    assert (within.window, within.interval_steps) == (9, 9)


def test_the_window_is_bounded() -> None:
    """The ring is sized for it; slot 0 stalls for what is left."""
    items, num_params = model_of(1000)
    plan = plan_window(items, budget_nbytes=int(2.5 * num_params), max_window=4)
    assert plan.window == 4
    assert not plan.keeps_budget
    paper = plan_window(items, budget_nbytes=int(2.5 * num_params), max_window=4, planner="algorithm1")
    assert paper.window == 4


@given(item_lists, st.integers(1, 10))
@settings(max_examples=100, deadline=None)
def test_the_smallest_budget_for_a_window(items: list[PlanItem], window: int) -> None:
    """It keeps its budget, and one byte less does not suffice."""
    budget = smallest_budget(items, window)
    plan = Window(plan_for_window(items, window), items, budget)
    assert plan.window <= window
    assert plan.keeps_budget
    less = budget - 1
    if less >= max(1, *(item.full_nbytes for item in items)) and len(items) <= 12:
        assert not plan_window(items, budget_nbytes=less, max_window=window).keeps_budget


@given(item_lists, st.integers(20, 3000))
@settings(max_examples=200, deadline=None)
def test_splitting_what_needs_it_lets_every_slot_keep_the_budget(items: list[PlanItem], budget: int) -> None:
    """If COMPUTE leaves something to split for and the window is not bounded."""
    left = budget - compute_of(items)
    assume(left >= 2 and left // 2 >= budget // 64)
    limit = split_nbytes(items, budget)
    large = {item.name for item in items if item.full_nbytes > limit}
    pieces: list[PlanItem] = []
    for item in items:
        if item.name not in large:
            pieces.append(item)
            continue
        num = -(-item.full_nbytes // limit)
        for k in range(num):
            full = item.full_nbytes * (k + 1) // num - item.full_nbytes * k // num
            compute = item.compute_nbytes * (k + 1) // num - item.compute_nbytes * k // num
            pieces.append(PlanItem(f"{item.name}#{k}", max(full, compute), compute))
    assert plan_window(pieces, budget_nbytes=budget, max_window=None).keeps_budget


def test_operators_split_by_rows_fit() -> None:
    """The planner and `split` speak of the same bytes."""
    piece = ParamSlice(fqn="w", start=0, stop=6400, global_shape=(100, 64), global_start=0)
    ops = [Operator(name=f"op{i}", kind="dense", slices=(piece,)) for i in range(3)]
    budget = 3 * 2 * 6400 + 20_000
    items = [PlanItem(op.name, 12 * op.numel, 2 * op.numel) for op in ops]
    with pytest.raises(ValueError, match=r"op0, op1, op2 exceed the budget.*split_nbytes"):
        plan_window(items, budget_nbytes=budget)
    cut = [p for op in ops for p in split(op, split_nbytes(items, budget), 12)]
    plan = plan_window(
        [PlanItem(p.name, 12 * p.numel, 2 * p.numel) for p in cut], budget_nbytes=budget, max_window=None
    )
    assert plan.keeps_budget


@pytest.mark.parametrize(
    "call",
    [
        lambda: plan_window([], budget_nbytes=1),
        lambda: plan_window([PlanItem("a", 1, 1)], budget_nbytes=0),
        lambda: plan_window([PlanItem("a", 1, 1)], budget_nbytes=1, max_window=0),
        lambda: plan_for_window([PlanItem("a", 1, 1)], 0),
        lambda: PlanItem("a", 1, 2),
    ],
)
def test_arguments_that_make_no_sense_are_refused(call: object) -> None:
    """With the argument as it was written."""
    assert callable(call)
    with pytest.raises(ValueError, match=r"plan|item|PlanItem"):
        call()
