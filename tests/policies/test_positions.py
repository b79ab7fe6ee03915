"""Expert-parallel ranks agree on the window and on the slot of every dense operator, whatever their experts do."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_moe_ckpt.operators import MoELayerSpec, Operator, OperatorSet, ParamSlice, discover, split
from lightning_moe_ckpt.policies import Plan, PlanInputs, SparsePolicy, all_names, plan_window
from lightning_moe_ckpt.policies._windows import PlanItem, assign_positions, positions, split_nbytes

By = Literal["popularity", "fixed", "back_to_front"]


def piece(fqn: str, start: int, stop: int) -> ParamSlice:
    return ParamSlice(fqn=fqn, start=start, stop=stop, global_shape=(stop,), global_start=start)


def model(num_layers: int, num_experts: int, ep_size: int, ep_rank: int) -> OperatorSet:
    """Operators of one expert-parallel rank."""
    each = num_experts // ep_size
    ids = tuple(range(ep_rank * each, (ep_rank + 1) * each))
    operators, layers = [Operator(name="emb", kind="dense", slices=(piece("emb", 0, 64),))], []
    for i in range(num_layers):
        layer = f"blocks.{i}.moe"
        operators += [
            Operator(name=f"blocks.{i}", kind="dense", slices=(piece(f"{i}.attn", 0, 48),)),
            Operator(name=f"{layer}/router", kind="router", slices=(piece(f"{i}.gate", 0, 8),), layer=layer),
        ]
        experts = {e: (piece(f"{i}.w", k * 32, k * 32 + 32),) for k, e in enumerate(ids)}
        holders: Literal["stage", "expert_data"] = "expert_data" if ep_size > 1 else "stage"
        layers.append(
            MoELayerSpec(
                fqn=layer,
                num_experts=num_experts,
                local_expert_ids=ids,
                experts=experts,
                router=(f"{i}.gate",),
                holders=holders,
            )
        )
        operators += [
            Operator(
                name=f"{layer}/expert.{e}",
                kind="expert",
                slices=slices,
                layer=layer,
                expert_idx=e,
                holders=holders,
            )
            for e, slices in experts.items()
        ]
    return OperatorSet(operators=tuple(operators), layers=tuple(layers), dtypes={}, ep_size=ep_size)


def sizes(operators: OperatorSet) -> dict[str, tuple[int, int]]:
    return {op.name: (12 * op.numel, 2 * op.numel) for op in operators}


def cut(operators: OperatorSet, budget: float) -> OperatorSet:
    """Split what is too large for `budget` bytes per parameter."""
    items = [PlanItem(name, *nbytes) for name, nbytes in sizes(operators).items()]
    limit = split_nbytes(items, int(budget * sum(op.numel for op in operators)))
    return operators.with_operators([p for op in operators for p in split(op, max(limit, 12), 12)])


def plan_on(operators: OperatorSet, counts: list[int], budget: float, by: By = "popularity") -> tuple[Plan, Plan]:
    """What one rank does: plan positions, put its own experts into them."""
    items = positions(operators, counts, sizes=sizes(operators), by=by)
    nbytes = int(budget * sum(op.numel for op in operators))
    plan = plan_window(items, budget_nbytes=nbytes, max_window=None)
    return plan, local(assign_positions(plan, operators, counts, by=by), operators)


def local(plan: Plan, operators: OperatorSet) -> Plan:
    """What a plan says of the operators of one rank."""
    slots = [[name for name in plan.full(j) if name in operators] for j in range(plan.window)]
    return Plan.of_slots(slots, interval_steps=plan.interval_steps)


cases = st.tuples(st.integers(1, 3), st.sampled_from([(4, 1), (4, 2), (6, 3), (4, 4)]), st.integers(0, 2**32))


@given(cases, st.sampled_from(["popularity", "fixed", "back_to_front"]), st.sampled_from([2.6, 3.5, 6.0]))
@settings(max_examples=100, deadline=None)
def test_ranks_agree(case: tuple[int, tuple[int, int], int], by: By, budget: float) -> None:
    """One plan of positions; equal windows and slots of everything that is not an expert; equal bytes per slot."""
    num_layers, (num_experts, ep_size), seed = case
    rng = random.Random(seed)
    counts = [rng.randint(0, 5) for _ in range(num_layers * num_experts)]
    ranks = [cut(model(num_layers, num_experts, ep_size, r), budget) for r in range(ep_size)]
    planned = [plan_on(rank, counts, budget, by) for rank in ranks]
    assert len({positions_plan.to_json() for positions_plan, _ in planned}) == 1
    nbytes = [
        [sum(sizes(rank)[n][0] for n in slot) for slot in map(plan.full, range(plan.window))]
        for rank, (_, plan) in zip(ranks, planned, strict=True)
    ]
    assert nbytes == [nbytes[0]] * ep_size
    for rank, (_, plan) in zip(ranks, planned, strict=True):
        assert sorted(plan.names) == sorted(rank.names)
        for op in rank:
            if op.kind != "expert":
                assert slot_of(plan, op.name) == slot_of(planned[0][1], op.name)


def slot_of(plan: Plan, name: str) -> int:
    return next(j for j in range(plan.window) if name in plan.full(j))


@given(cases, st.sampled_from(["popularity", "fixed", "back_to_front"]))
@settings(max_examples=50, deadline=None)
def test_every_rank_names_the_operators_of_all(case: tuple[int, tuple[int, int], int], by: By) -> None:
    """The same plan on each; what it says of one rank's operators is said of nobody else's."""
    num_layers, (num_experts, ep_size), seed = case
    rng = random.Random(seed)
    counts = [rng.randint(0, 5) for _ in range(num_layers * num_experts)]
    ranks = [cut(model(num_layers, num_experts, ep_size, r), 3.5) for r in range(ep_size)]
    items = positions(ranks[0], counts, sizes=sizes(ranks[0]), by=by)
    plan = plan_window(items, budget_nbytes=int(3.5 * sum(op.numel for op in ranks[0])), max_window=None)
    named = [assign_positions(plan, rank, counts, by=by) for rank in ranks]
    assert all(each == named[0] for each in named)
    assert (
        sorted(named[0].names)
        == sorted({name for rank in ranks for name in rank.names})
        == sorted(all_names(ranks[-1]))
    )


def test_each_rank_captures_its_own_popular_experts_late() -> None:
    """Expert orders differ between ranks, dense slots do not."""
    counts = [9, 1, 5, 7, 2, 6]  # rank 0: 1, 2, 0 ascending; rank 1: 4, 5, 3
    orders = []
    for r in range(2):
        _, plan = plan_on(model(1, 6, 2, r), counts, 4.0)
        orders.append([name for name in plan.names if "expert" in name])
    assert orders[0] == [f"blocks.0.moe/expert.{e}" for e in (1, 2, 0)]
    assert orders[1] == [f"blocks.0.moe/expert.{e}" for e in (4, 5, 3)]


def test_one_rank_orders_by_its_counts_over_all_layers() -> None:
    """Without expert parallelism positions are experts: ascending over the model, dense last."""
    counts = [4, 1, 3, 2]
    items = positions(model(2, 2, 1, 0), counts, sizes=sizes(model(2, 2, 1, 0)))
    _, plan = plan_on(model(2, 2, 1, 0), counts, 4.0)
    experts = [name for name in plan.names if "expert" in name]
    assert experts == [f"blocks.{i}.moe/expert.{e}" for i, e in ((0, 1), (1, 1), (1, 0), (0, 0))]
    assert [i.order_key for i in items if "position" not in i.name] == [float("inf")] * 5


def test_fixed_orders_ignore_counts() -> None:
    """Then ranks hold expert j at position j."""
    for by, want in (("fixed", [0, 1, 2, 3]), ("back_to_front", [3, 2, 1, 0])):
        plans = [plan_on(model(1, 4, 1, 0), counts, 4.0, by)[1] for counts in ([4, 3, 2, 1], [1, 2, 3, 4])]  # type: ignore[arg-type]
        assert plans[0] == plans[1]
        assert [int(n[-1]) for n in plans[0].names if "expert" in n] == want


def test_split_experts_move_together() -> None:
    """All pieces of an expert get the slots planned for its position."""
    counts = [3, 1, 2, 0]
    for r in range(2):
        whole = model(1, 4, 2, r)
        pieces = whole.with_operators([p for op in whole for p in split(op, 200, 12)])
        assert any("#1" in name for name in pieces.names)
        items = positions(pieces, counts, sizes=sizes(pieces))
        assert {"blocks.0.moe/position.0#0", "blocks.0.moe/position.1#1"} <= {i.name for i in items}
        _, plan = plan_on(pieces, counts, 4.0)
        assert sorted(plan.names) == sorted(pieces.names)
        least = "blocks.0.moe/expert.1" if r == 0 else "blocks.0.moe/expert.3"
        assert next(n for n in plan.names if "expert" in n).startswith(least)


def test_a_plan_of_other_positions_is_refused() -> None:
    """It was stored by another model."""
    with pytest.raises(ValueError, match="other positions"):
        assign_positions(Plan.of_slots([["emb"]]), model(1, 2, 1, 0), [0, 0])
    with pytest.raises(ValueError, match="1 entries for 2"):
        positions(model(1, 2, 1, 0), [0], sizes={})


def test_fifteen_thousand_positions_take_no_time() -> None:
    """Linear in the operators: this would take minutes if it were quadratic."""
    operators = model(60, 250, 1, 0)
    items = positions(operators, list(range(15_000)), sizes=sizes(operators))
    assert isinstance(items[0], PlanItem)
    assert len(items) == 15_121


def test_a_model_without_experts_is_planned_back_to_front() -> None:
    """There is no popularity to order by."""
    operators = discover(nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))))
    sizes = dict.fromkeys(operators.names, (12, 4))
    items = positions(operators, [], sizes=sizes, by="popularity")
    assert [item.name for item in sorted(items, key=lambda item: item.order_key)] == [*reversed(operators.names)]


@pytest.mark.parametrize("by", ["popularity", "fixed", "back_to_front"])
def test_steps_have_experts_of_all_owners(by: By) -> None:
    """Experts in shards, in rows: two, two, and one by owner. Else one rank would write all of its part in one step."""
    owners = (0, 0, 0, 1, 1, 1, 2, 2)
    whole = model(2, 8, 1, 0)
    operators = replace(whole, layers=tuple(replace(layer, owners=owners) for layer in whole.layers))
    counts = [5, 0, 3, 9, 9, 9, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    items = positions(operators, counts, sizes=sizes(operators), by=by)
    plan = assign_positions(Plan.of_slots([[each.name for each in items]]), operators, counts, by=by)
    order = [int(name.rpartition(".")[2]) for name in plan.names if ".0.moe/expert" in name]
    turns = [[owners[e] for e in order[start : start + 3]] for start in (0, 3, 6)]
    assert turns == [[0, 1, 2], [0, 1, 2], [0, 1]]
    if by == "popularity":
        keys = [item.order_key for item in items if ".0.moe/position" in item.name]
        assert keys == sorted(keys)
        assert [e for e in order if owners[e] == 0] == [1, 2, 0]


@pytest.mark.parametrize("by", ["popularity", "fixed", "back_to_front"])
def test_what_others_are_averaged_into_comes_last(by: By) -> None:
    """A frozen parameter that changes all the same, although its weights are all that there is of it, and cheap early."""
    operators = replace(model(2, 4, 1, 0), dtypes={"emb": torch.float32}).without((), ["emb"])
    nbytes = sizes(operators) | {"emb/thawed": (128, 128)}
    plan = SparsePolicy(window=3, order=by).plan(PlanInputs(operators=operators, popularity=[0] * 8, sizes=nbytes))
    assert plan.window == 3
    assert "emb/thawed" in plan.full(2)
    assert sorted(plan.names) == sorted(operators.names)
