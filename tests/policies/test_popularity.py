"""In which order operators are captured, and when to plan anew."""

from __future__ import annotations

import pytest
import torch

from lightning_moe_ckpt.operators import Operator
from lightning_moe_ckpt.policies import (
    decayed_popularity,
    order,
    popularity_per_capacity,
    should_reorder,
    soft_popularity,
)


def expert(layer: int, j: int) -> Operator:
    return Operator(name=f"{layer}/expert.{j}", kind="expert", slices=(), layer=str(layer), expert_idx=j)


OPERATORS = [
    Operator(name="emb", kind="dense", slices=()),
    Operator(name="0/router", kind="router", slices=(), layer="0"),
    expert(0, 0),
    expert(0, 1),
    expert(1, 0),
    expert(1, 1),
    Operator(name="head", kind="dense", slices=()),
]


def test_popular_experts_come_late_and_dense_operators_last() -> None:
    """Equals keep the order of the model; an expert not named had no tokens."""
    loads = {"0/expert.0": 9, "0/expert.1": 3, "1/expert.0": 3}
    assert order(OPERATORS, by="popularity", loads=loads) == (
        "1/expert.1",
        "0/expert.1",
        "1/expert.0",
        "0/expert.0",
        "emb",
        "0/router",
        "head",
    )


def test_without_loads_experts_keep_their_order() -> None:
    """Before the first step there is nothing to sort by."""
    names = order(OPERATORS, by="popularity")
    assert names == ("0/expert.0", "0/expert.1", "1/expert.0", "1/expert.1", "emb", "0/router", "head")


def test_other_orders() -> None:
    """As given, and from the back."""
    assert order(OPERATORS, by="fixed") == tuple(op.name for op in OPERATORS)
    assert order(OPERATORS, by="back_to_front") == tuple(op.name for op in OPERATORS[::-1])


@pytest.mark.parametrize(
    ("old", "new", "want"),
    [
        ([100] * 8, [100] * 8, False),
        ([100] * 8, [200] * 8, False),  # shares did not change
        ([100] * 8, [140, 100, 100, 100, 100, 100, 100, 100], False),  # one of eight
        ([100] * 8, [140, 140, 60, 60, 100, 100, 100, 100], True),  # four of eight
        ([100] * 8, [120, 80, 100, 100, 100, 100, 100, 100], True),  # a quarter exactly
        ([100] * 8, [109, 91, 91, 109, 91, 109, 91, 109], False),  # nobody over 10 %
        ([0] * 8, [1] * 8, True),  # nothing was known
        ([100] * 8, [0] * 8, False),  # nothing is known
        ([0, 100, 100, 100], [5, 100, 100, 95], True),  # from nothing to something counts
        ([], [], False),
    ],
)
def test_a_plan_is_out_of_date_when_enough_shares_have_changed(old: list[int], new: list[int], want: bool) -> None:
    """Over 10 % for at least 25 % of the experts."""
    assert should_reorder(old, new) is want
    assert should_reorder(torch.tensor(old), torch.tensor(new)) is want


def test_thresholds_can_be_chosen() -> None:
    """And vectors must fit."""
    old, new = [100] * 8, [109, 91, 91, 109, 91, 109, 91, 109]
    assert should_reorder(old, new, reorder_threshold=0.05)
    assert not should_reorder(old, [140, 60] + [100] * 6, reorder_fraction=0.5)
    with pytest.raises(ValueError, match="2 and 1 experts"):
        should_reorder([1, 2], [1])


def test_soft_counts_add_up_probabilities() -> None:
    """Over all leading dimensions, without a graph, and in a sum that bf16 would stop."""
    probs = torch.tensor([[[0.5, 0.25, 0.25]], [[0.0, 1.0, 0.0]]], requires_grad=True)
    soft = soft_popularity(probs)
    assert soft.tolist() == [0.5, 1.25, 0.25]
    assert not soft.requires_grad
    many = torch.full((5000, 2), 0.5, dtype=torch.bfloat16)
    assert soft_popularity(many).tolist() == [2500, 2500]


def test_soft_counts_of_parts_add_up() -> None:
    """Steps and ranks are summed as for hard counts."""
    probs = torch.rand(12, 4, dtype=torch.float64).softmax(-1)
    torch.testing.assert_close(soft_popularity(probs[:5]) + soft_popularity(probs[5:]), soft_popularity(probs))


def test_decayed_popularity_halves_in_a_half_life() -> None:
    """What was counted once fades; what is counted always stays."""
    steady, once = torch.tensor([8, 8]), torch.tensor([8, 0])
    popularity = decayed_popularity(None, steady, half_life_windows=3)
    for _ in range(3):
        popularity = decayed_popularity(popularity, once, half_life_windows=3)
    torch.testing.assert_close(popularity, torch.tensor([8.0, 4.0], dtype=torch.float64))
    assert decayed_popularity(popularity, steady, half_life_windows=1).tolist() == pytest.approx([8, 6])


def test_decayed_popularity_is_the_papers_average() -> None:
    """`A(t) = a A(t-1) + (1 - a) n(t)`, and an expert that was popular long ago can be overtaken."""
    counts = [torch.tensor([90, 10]), torch.tensor([10, 20]), torch.tensor([0, 30])]
    keep = 2 ** (-1 / 2)
    want, popularity = counts[0].double(), decayed_popularity(None, counts[0], half_life_windows=2)
    for each in counts[1:]:
        want = keep * want + (1 - keep) * each
        popularity = decayed_popularity(popularity, each, half_life_windows=2)
    torch.testing.assert_close(popularity, want)
    assert popularity.argmax() == 0  # hard counts of the newest window alone would say 1
    for _ in range(2):
        popularity = decayed_popularity(popularity, counts[2], half_life_windows=2)
    assert popularity.argmax() == 1


def test_capacity_turns_load_into_use() -> None:
    """A small expert that is full is more popular than a large one that is half empty."""
    use = popularity_per_capacity(torch.tensor([30, 40]), torch.tensor([30, 80]))
    assert use.tolist() == [1.0, 0.5]
    assert popularity_per_capacity(torch.tensor([3, 4]), torch.tensor(2)).tolist() == [1.5, 2.0]


def test_measures_refuse_what_makes_no_sense() -> None:
    """By the name of the argument."""
    with pytest.raises(ValueError, match="half_life_windows=0"):
        decayed_popularity(None, torch.ones(2), half_life_windows=0)
    with pytest.raises(ValueError, match="3 and 2 experts"):
        decayed_popularity(torch.ones(3), torch.ones(2), half_life_windows=1)
    with pytest.raises(ValueError, match="capacity_E"):
        popularity_per_capacity(torch.ones(2), torch.tensor([1, 0]))
