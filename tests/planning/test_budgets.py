"""Budgets of bytes: what ranks agree on, from what each was given or has measured."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_moe_ckpt.planning._budgets import ExpertBudgets, SlotSizes
from lightning_moe_ckpt.policies import MEMORY, STORAGE, Budget, ExpertLayout

LAYOUTS = [ExpertLayout(layer="moe", rank_of=(0,) * 8, nbytes=1000)]
SIZES = {MEMORY: SlotSizes(bare=500, full=8500), STORAGE: SlotSizes(bare=500, full=8500)}


def budgets(local: Budget = "auto", remote: Budget = "auto", every_n_steps: int = 1) -> ExpertBudgets:
    config = {MEMORY: local, STORAGE: remote}
    return ExpertBudgets(config, torch.device("cpu"), LAYOUTS, lambda: SIZES, every_n_steps=every_n_steps)


def measured(seconds: float, rate: float | None, every_n_steps: int = 1) -> ExpertBudgets:
    """As of steps that take so long, with so much leaving the node per second."""
    found = budgets(every_n_steps=every_n_steps)
    found.clock._seconds.extend([seconds] * 3)
    found.remote_rate = lambda: rate
    found.measure()
    return found


def agree(*ranks: ExpertBudgets) -> dict[str, int]:
    rows = [rank.inputs() for rank in ranks]
    for rank in ranks:
        rank.agreed(rows)
    assert all(rank.in_force == ranks[0].in_force for rank in ranks)
    return ranks[0].in_force


@pytest.mark.parametrize(("given", "left"), [(3500, 3000), (8500, 8000), (10**9, None), (600, 1000), (10, 1000)])
def test_the_dense_part_comes_first_and_one_expert_always(given: int, left: int | None) -> None:
    """What is given counts all that a rank writes."""
    found = agree(budgets(given, given))
    assert found[MEMORY] == found[STORAGE]
    assert found[MEMORY] >= 8000 if left is None else found[MEMORY] == left


def test_the_smallest_budget_of_all_ranks_counts_and_what_leaves_the_node_is_part_of_what_is_copied() -> None:
    """On all ranks alike."""
    found = agree(budgets(4500, 4500), budgets(2500, 8500))
    assert found == {MEMORY: 2000, STORAGE: 2000}


@pytest.mark.parametrize("every_n_steps", [1, 3])
def test_slower_storage_gets_fewer_experts(every_n_steps: int) -> None:
    """In proportion to what it moves between two generations; memory has one step whatever their number."""
    slow, fast = measured(1.0, 2000.0, every_n_steps), measured(1.0, 4000.0, every_n_steps)
    fewer, more = agree(slow), agree(fast)
    assert fewer[STORAGE] == max(1000, math.floor(2000 * every_n_steps * 0.8) - 500)
    assert more[STORAGE] == math.floor(4000 * every_n_steps * 0.8) - 500
    assert fewer[MEMORY] >= 8000, "this machine copies more than eight kilobytes in a second"


def test_noise_changes_nothing_and_a_fall_does() -> None:
    """A fifth or more counts: plans are laid out by selection."""
    here = measured(1.0, 4000.0)
    before = agree(here)[STORAGE]
    here.remote_rate = lambda: 3700.0
    assert agree(here)[STORAGE] == before
    here.remote_rate = lambda: 2000.0
    assert agree(here)[STORAGE] == 1100


def test_a_budget_that_grows_stays_within_the_ring(caplog: pytest.LogCaptureFixture) -> None:
    """Which is made once, for the first estimate and a quarter more. That is said once, and counted."""
    caplog.set_level("INFO", logger="lightning_moe_ckpt.planning._budgets")
    here = measured(1e-3, None)
    here._local_rate, here._ring_nbytes = 2000.0, 2500
    before = agree(here)
    caplog.clear()
    here.clock._seconds.extend([1000.0] * 32)
    agree(here)
    assert before == {MEMORY: 1000, STORAGE: 1000}
    assert agree(here) == {MEMORY: 2000, STORAGE: 2000}
    said = [record.getMessage().split("`")[1] for record in caplog.records if "could hide" in record.getMessage()]
    assert said == ["local_budget='auto'", "remote_budget='auto'"]
    assert here.capped == dict.fromkeys(["local_budget", "remote_budget"], int(2000.0 * 1000 * 0.8) - 2500)
