"""Resume without sparsity: data order, random state, loops, schedulers and metrics, killed at every step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from campaign._campaign import Campaigns, two_chains
from campaign._pairs import Row, name, pairwise
from campaign._training import Checkpointing, Setup
from lightning_moe_ckpt.testing import Kill

FACTORS: dict[str, list[Any]] = {
    "world_size": [1, 3],
    "loader": ["plain", "stateful"],
    "workers": [0, 2],
    "validate_every": [None, 2, 5],
    "accumulate": [1, 2],
    "augment": [True, False],
    "every_n_steps": [1, 2],
    "scheduler": ["cosine", "epoch", "plateau"],
}


def _allowed(row: Row) -> bool:
    return row["scheduler"] != "plateau" or row["validate_every"] is not None


def dense_setup(row: Row) -> Setup:
    options = {key: value for key, value in row.items() if key != "every_n_steps"}
    return Setup(**options, checkpointing=Checkpointing(policy="dense", every_n_steps=row["every_n_steps"]))


ROWS = pairwise(FACTORS, allowed=_allowed)


ALONE = [row for row in ROWS if row["world_size"] == 1]
TOGETHER = [row for row in ROWS if row["world_size"] > 1]
"""Only `make soak` kills these at every step: `make test` has runs drawn from more in `test_configurations.py`."""


@pytest.mark.soak
@pytest.mark.parametrize("row", ALONE, ids=name)
def test_killed_at_every_step_the_run_ends_the_same(campaigns: Campaigns, row: Row) -> None:
    """Every life dies two steps further than the one before; the last ends as if nothing had happened."""
    setup = dense_setup(row)
    odd, even = campaigns.check_all(setup, two_chains(setup, offset=ROWS.index(row)))
    assert len(odd) + len(even) == setup.steps + 2


@pytest.mark.soak
@pytest.mark.parametrize("other", [False, True], ids=["some", "others"])
@pytest.mark.parametrize("row", TOGETHER, ids=name)
def test_ranks_killed_at_every_other_step_end_the_same(campaigns: Campaigns, row: Row, other: bool) -> None:
    """At odd steps in one row and at even ones in the next, so that rows together have every step."""
    setup = dense_setup(row)
    chain = two_chains(setup, offset=ROWS.index(row))[(TOGETHER.index(row) + other) % 2]
    (lives,) = campaigns.check_all(setup, [chain])
    assert len(lives) == len(chain) + 1 >= setup.steps // 2 + 1


@pytest.mark.soak
@pytest.mark.parametrize("row", [TOGETHER[0], ALONE[0]], ids=name)
def test_checkpointing_does_not_change_training(campaigns: Campaigns, row: Row) -> None:
    """A run that is never killed ends as it would without the callback."""
    campaigns.check(dense_setup(row))


def test_a_finished_run_that_is_started_again_stays_finished(campaigns: Campaigns) -> None:
    """The generation of the normal end is there, and no step is trained twice."""
    setup = Setup(checkpointing=Checkpointing(policy="dense"))
    first, second = campaigns.check(setup, None)
    assert first.steps()[-1] == setup.steps
    assert second.steps() == []


def test_more_epochs_continue_a_finished_run(campaigns: Campaigns) -> None:
    """Stopping at an epoch boundary and going on later is the same as never having stopped."""
    whole = Setup(epochs=3, checkpointing=Checkpointing(policy="dense", every_n_steps=2))
    campaigns.check_stages(replace(whole, epochs=2), whole)


@pytest.mark.soak
@pytest.mark.parametrize("world_size", [1, 3])
def test_means_over_an_interrupted_epoch_are_those_of_the_whole_epoch(campaigns: Campaigns, world_size: int) -> None:
    """Metrics that collect over the batches of an epoch go on collecting where the killed life stopped."""
    checkpointing = Checkpointing(policy="dense", every_n_steps=2)
    setup = Setup(world_size=world_size, epoch_metrics=True, checkpointing=checkpointing)
    campaigns.check(setup, *[Kill(phase="batch_end", step=step) for step in (4, 5, 8)])
