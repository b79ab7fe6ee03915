"""In which order operators are captured, and when to plan anew."""

from __future__ import annotations

import pytest
import torch

from lightning_moe_ckpt.operators import Operator
from lightning_moe_ckpt.policies import order, should_reorder


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
