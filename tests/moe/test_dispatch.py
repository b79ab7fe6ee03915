"""Slots are sorted by expert, stably, and dropped from the end."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_moe_ckpt.moe._dispatch import by_expert, combine_rows, gather_rows, plan_dispatch


@st.composite
def choices(draw: st.DrawFn) -> tuple[Tensor, int]:
    num_experts = draw(st.integers(1, 6))
    top_k = draw(st.integers(1, num_experts))
    rows = draw(st.lists(st.permutations(range(num_experts)), max_size=12))
    return torch.tensor([row[:top_k] for row in rows], dtype=torch.int64).view(-1, top_k), num_experts


@given(choices(), st.none() | st.integers(0, 5))
def test_the_plan_is_what_a_loop_would_do(chosen: tuple[Tensor, int], capacity: int | None) -> None:
    """First choices before second ones, tokens in order, at most `capacity` for each expert."""
    topk_idx_TK, num_experts = chosen
    num_tokens, top_k = topk_idx_TK.shape
    queues: list[list[int]] = [[] for _ in range(num_experts)]
    for k in range(top_k):
        for t in range(num_tokens):
            queues[int(topk_idx_TK[t, k])].append(k * num_tokens + t)
    plan = plan_dispatch(topk_idx_TK, num_experts, capacity)
    kept = [queue[:capacity] for queue in queues]
    assert plan.slots.tolist() == [slot for queue in kept for slot in queue]
    assert plan.kept.tolist() == [len(queue) for queue in kept]
    assert plan.routed.tolist() == [len(queue) for queue in queues]


@given(choices(), st.data())
def test_each_expert_may_have_a_capacity_of_its_own(chosen: tuple[Tensor, int], data: st.DataObject) -> None:
    """What one expert keeps is what it would keep if all had its capacity."""
    topk_idx_TK, num_experts = chosen
    capacity_E = data.draw(st.lists(st.integers(0, 5), min_size=num_experts, max_size=num_experts))
    plan = plan_dispatch(topk_idx_TK, num_experts, torch.tensor(capacity_E))
    slots = []
    for e, capacity in enumerate(capacity_E):
        alike = plan_dispatch(topk_idx_TK, num_experts, capacity)
        start = int(alike.kept[:e].sum())
        slots += alike.slots[start : start + int(alike.kept[e])].tolist()
        assert plan.kept[e] == alike.kept[e]
        assert plan.routed[e] == alike.routed[e]
    assert plan.slots.tolist() == slots


@given(choices())
def test_gathering_and_combining_with_weight_one_multiplies_by_the_choices(chosen: tuple[Tensor, int]) -> None:
    """Every kept slot comes back to its own token once."""
    topk_idx_TK, num_experts = chosen
    num_tokens, top_k = topk_idx_TK.shape
    x_TD = torch.arange(num_tokens * 3, dtype=torch.float32).view(num_tokens, 3).requires_grad_()
    plan = plan_dispatch(topk_idx_TK, num_experts, None)
    out_TD = combine_rows(gather_rows(x_TD, plan.slots, top_k), plan.slots, torch.ones(num_tokens, top_k))
    assert torch.equal(out_TD, x_TD * top_k)
    torch.autograd.backward(out_TD.sum())
    assert x_TD.grad is not None
    assert torch.equal(x_TD.grad, torch.full_like(x_TD, float(top_k)))


@given(st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=1, max_size=4))
def test_rows_from_several_ranks_are_regrouped_by_expert(arriving: list[list[int]]) -> None:
    """Within an expert, by source rank and then in the order they were sent."""
    rows = [
        (expert, rank, i) for rank, counts in enumerate(arriving) for expert, n in enumerate(counts) for i in range(n)
    ]
    order = by_expert(torch.tensor(arriving), len(rows)).tolist()
    assert [rows[idx] for idx in order] == sorted(rows)
