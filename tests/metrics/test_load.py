"""Loads and their skew: the paper's formula, exact at both ends, however the tokens were counted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from launcher import run_world

from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.metrics import ExpertLoad, LoadSkew, load_skew

COUNTS = st.integers(2, 64).flatmap(lambda e: st.lists(st.integers(0, 2**30), min_size=e, max_size=e))


@given(COUNTS.filter(any))
def test_the_skew_is_the_papers(counts: list[int]) -> None:
    """Appendix D, written out."""
    shares = [count / sum(counts) for count in counts]
    least = 1 / len(counts)
    want = (sum(share**2 for share in shares) - least) / (1 - least)
    assert load_skew(torch.tensor(counts)).item() == pytest.approx(want, abs=1e-12)
    assert 0 <= load_skew(torch.tensor(counts)) <= 1


@pytest.mark.parametrize("num_experts", [2, 3, 7, 64, 1000])
def test_both_ends_are_reached_exactly(num_experts: int) -> None:
    """No rounding error where a reader knows the answer."""
    assert load_skew(torch.full((num_experts,), 12345)) == 0
    assert load_skew(torch.eye(num_experts, dtype=torch.int64)[1] * 98765) == 1


@given(st.lists(st.lists(st.integers(0, 1000), min_size=5, max_size=5), min_size=1, max_size=6))
def test_how_updates_are_cut_makes_no_difference(parts: list[list[int]]) -> None:
    """Many small updates or one large one: the same bits. `forward` accumulates too."""
    load, skew, whole = ExpertLoad(5), LoadSkew(5), LoadSkew(5)
    for part in parts:
        load(torch.tensor(part))
        skew(torch.tensor(part, dtype=torch.int32))
    total = torch.tensor(parts).sum(0)
    whole.update(total)
    assert torch.equal(load.compute(), total)
    assert torch.equal(skew.compute(), whole.compute()) or not total.any()
    assert torch.isnan(skew.compute()) == (not total.any())


def test_reset_forgets_and_the_result_is_a_copy() -> None:
    """Tokens that come later do not change what was computed."""
    load = ExpertLoad(2)
    load.update(torch.tensor([1, 2]))
    first = load.compute()
    load.update(torch.tensor([1, 0]))
    assert first.tolist() == [1, 2]
    load.reset()
    load.update(torch.tensor([0, 7]))
    assert load.compute().tolist() == [0, 7]


def test_ranks_are_summed() -> None:
    """The skew of the world is that of the summed counts, not a mean of skews."""

    def work(rank: int) -> tuple[list[int], float, list[int]]:
        load, skew = ExpertLoad(3), LoadSkew(3)
        for metric in (load, skew):
            metric.update(torch.tensor([rank, 10 * rank, 5]))
        synced = load.compute().tolist(), skew.compute().item()
        load.update(torch.tensor([1, 0, 0]))  # goes on with this rank's own counts
        return *synced, load.tokens.tolist()

    want = load_skew(torch.tensor([1, 10, 10])).item()
    for rank, result in enumerate(run_world(2, work)):
        assert result == ([1, 10, 10], want, [rank + 1, 10 * rank, 5])


@pytest.mark.parametrize("wrong", [torch.ones(4, dtype=torch.int64), torch.ones(3), torch.tensor(3)])
def test_what_is_not_counts_is_refused(wrong: torch.Tensor) -> None:
    """Probabilities or indices passed by mistake would give a plausible number."""
    with pytest.raises(ValueError, match=r"takes integer counts of shape \[3\]"):
        ExpertLoad(3).update(wrong)


def test_too_few_experts_are_refused() -> None:
    """One expert cannot be used unevenly."""
    with pytest.raises(ConfigurationError, match=r"LoadSkew\(num_experts=1\)"):
        LoadSkew(1)
    with pytest.raises(ConfigurationError, match=r"ExpertLoad\(num_experts=0\)"):
        ExpertLoad(0)
