"""What popularity is made of, and when to plan anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.policies import (
    Popularity,
    decayed_popularity,
    popularity_per_capacity,
    should_reorder,
)


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
        ([0.1, 0.3], [0.1, 0.3], False),  # popularity may sum up to less than one
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


ZEROS = torch.zeros(2)


def test_decayed_popularity_halves_in_a_half_life() -> None:
    """What was counted once fades, in relation to what is counted always."""
    popularity = ZEROS
    for _ in range(40):
        popularity = decayed_popularity(popularity, torch.tensor([8, 8]), half_life_steps=3)
    before = popularity
    for _ in range(3):
        popularity = decayed_popularity(popularity, torch.tensor([8, 0]), half_life_steps=3)
    assert (popularity[1] / before[1]).item() == pytest.approx(0.5)


def test_decayed_popularity_is_the_papers_average() -> None:
    """`A(t) = a A(t-1) + (1 - a) n(t)`, and an expert that was popular long ago can be overtaken."""
    counts = [torch.tensor([90, 10]), torch.tensor([10, 20]), torch.tensor([0, 30])]
    keep = 2 ** (-1 / 2)
    want, popularity = ZEROS.double(), ZEROS
    for count in counts:
        want = keep * want + (1 - keep) * count.double()
        popularity = decayed_popularity(popularity, count, half_life_steps=2)
    assert torch.equal(popularity, want)
    assert popularity.argmax() == 0  # hard counts of the newest step alone would say 1
    for _ in range(3):
        popularity = decayed_popularity(popularity, counts[2], half_life_steps=2)
    assert popularity.argmax() == 1


COUNTS = st.lists(st.lists(st.integers(0, 10**6), min_size=3, max_size=3), min_size=1, max_size=8)
HALF_LIVES = st.floats(0.1, 1e4)


@given(COUNTS, COUNTS, HALF_LIVES)
def test_averages_of_ranks_add_up_to_the_average_of_all_tokens(
    one: list[list[int]], other: list[list[int]], half_life: float
) -> None:
    """So that ranks exchange averages at a window boundary, and nothing in between."""
    steps = min(len(one), len(other))
    averages = [torch.zeros(3, dtype=torch.float64)] * 3
    for a, b in zip(one[:steps], other[:steps], strict=True):
        counts = (torch.tensor(a), torch.tensor(b), torch.tensor(a) + torch.tensor(b))
        averages = [decayed_popularity(p, n, half_life_steps=half_life) for p, n in zip(averages, counts, strict=True)]
    torch.testing.assert_close(averages[0] + averages[1], averages[2], rtol=1e-9, atol=1e-9)


@given(COUNTS, st.integers(0, 7), HALF_LIVES)
def test_an_average_goes_on_from_any_step(counts: list[list[int]], cut: int, half_life: float) -> None:
    """Bit for bit: a restart that restores the value of a step and counts the rest ends as if it had not been."""

    def follow(start: torch.Tensor, steps: list[list[int]]) -> torch.Tensor:
        for step in steps:
            start = decayed_popularity(start, torch.tensor(step), half_life_steps=half_life)
        return start

    zeros = torch.zeros(3, dtype=torch.float64)
    assert torch.equal(follow(follow(zeros, counts[:cut]), counts[cut:]), follow(zeros, counts))


@given(COUNTS, HALF_LIVES)
def test_an_expert_that_never_had_fewer_tokens_is_not_less_popular(counts: list[list[int]], half_life: float) -> None:
    """Whatever the half-life; and none is below zero or above its largest count."""
    popularity = torch.zeros(3, dtype=torch.float64)
    for count in counts:
        ordered = torch.tensor(sorted(count))
        popularity = decayed_popularity(popularity, ordered, half_life_steps=half_life)
    assert torch.equal(popularity, popularity.sort().values)
    assert popularity.min() >= 0
    assert popularity.max() <= max(max(count) for count in counts) * (1 + 1e-9)


@given(st.lists(st.integers(0, 1000), min_size=2, max_size=9), st.floats(0.01, 100))
def test_reordering_looks_at_shares_only(counts: list[int], scale: float) -> None:
    """Soft counts, averages and use of capacity have other totals than tokens; a scale alone is no change."""
    scaled = [scale * count for count in counts]
    assert not should_reorder(counts, scaled, reorder_threshold=1e-6, reorder_fraction=1 / len(counts))


def test_capacity_turns_load_into_use() -> None:
    """A small expert that is full is more popular than a large one that is half empty; one without room is not."""
    use = popularity_per_capacity(torch.tensor([30, 40]), torch.tensor([30, 80]))
    assert use.tolist() == [1.0, 0.5]
    assert popularity_per_capacity(torch.tensor([3.0, 0.0]), torch.tensor([2, 0])).tolist() == [1.5, 0.0]


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 99)), min_size=1, max_size=9), st.integers(1, 50))
def test_use_of_capacity_is_a_ratio(pairs: list[tuple[int, int]], scale: int) -> None:
    """Twice the tokens in twice the room is the same use."""
    counts, capacity = (torch.tensor(column) for column in zip(*pairs, strict=True))
    use = popularity_per_capacity(counts, capacity)
    torch.testing.assert_close(popularity_per_capacity(counts * scale, capacity * scale), use)
    assert torch.equal(use * capacity > capacity, counts > capacity)


def test_measures_refuse_what_makes_no_sense() -> None:
    """By the name of the argument."""
    with pytest.raises(ValueError, match="half_life_steps=0"):
        decayed_popularity(ZEROS, torch.ones(2), half_life_steps=0)
    with pytest.raises(ValueError, match="3 and 2 experts"):
        decayed_popularity(torch.ones(3), torch.ones(2), half_life_steps=1)
    with pytest.raises(ValueError, match="2 and 1 experts"):
        popularity_per_capacity(torch.ones(2), torch.ones(1))


@pytest.mark.parametrize(
    "wrong",
    [
        {"counts": "medium"},
        {"half_life_steps": 0.0},
        {"half_life_steps": float("nan")},
        {"reorder_every_n_steps": 0},
        {"reorder_threshold": -0.1},
        {"reorder_fraction": 1.5},
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    """By name and value, as the user wrote it."""
    ((name, value),) = wrong.items()
    with pytest.raises(ConfigurationError, match=f"{name}={value!r}"):
        Popularity(**wrong)
