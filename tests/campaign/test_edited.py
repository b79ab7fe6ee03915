"""State that is changed beside the optimizer: counting buffers, router biases moved after each batch, averages of the weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from campaign._campaign import Campaigns, one_kill_per_step, require_resumed
from campaign._training import Checkpointing, Setup
from lightning_moe_ckpt.recovery import Replay
from lightning_moe_ckpt.snapshot import Averages
from lightning_moe_ckpt.testing import Kill, Seam

SPARSE = Checkpointing(policy="sparse", window=3)
DENSE = Checkpointing(policy="dense", every_n_steps=2)
COUNTING = Setup(model="counting", checkpointing=SPARSE)
BIASED = Setup(model="biased", checkpointing=SPARSE)
FIRST_GENERATION = 4


@pytest.mark.parametrize(
    "checkpointing", [SPARSE, pytest.param(DENSE, marks=pytest.mark.soak)], ids=["sparse", "dense"]
)
def test_buffers_that_count_in_training_and_in_validation_go_on_counting(
    campaigns: Campaigns, checkpointing: Checkpointing
) -> None:
    """Persistent and not, changed in place and replaced; and weights that shrink every epoch.

    What was recorded after validation and after the start of an epoch is not counted on top of in replay.
    """
    setup = replace(COUNTING, checkpointing=checkpointing)
    scripts = one_kill_per_step(setup, every=4)
    lives = campaigns.check_all(setup, scripts)
    require_resumed(lives, scripts, after=FIRST_GENERATION)
    end = lives[0][-1].end()
    assert end["buffer/model.validated"] == 2 * 4, "validation was counted"
    assert end["buffer/model.epochs"] == setup.epochs, "epochs were counted"


@pytest.mark.parametrize(
    ("bias", "balanced_by"),
    [("buffer", "callback"), pytest.param("parameter", "module", marks=pytest.mark.soak), ("data", "module")],
)
def test_a_router_bias_moved_after_each_batch_is_moved_once(campaigns: Campaigns, bias: str, balanced_by: Any) -> None:
    """As a buffer, as a frozen parameter, and as one changed through `.data`, which no version counter sees."""
    setup = replace(BIASED, balanced_by=balanced_by).with_options(bias=bias)
    scripts = one_kill_per_step(setup, offset=len(bias), every=4)
    lives = campaigns.check_all(setup, scripts)
    require_resumed(lives, scripts, after=FIRST_GENERATION)
    end = lives[0][-1].end()
    bias_E = end["buffer/model.moe.bias" if bias == "buffer" else "param/model.moe.bias"]
    assert bias_E.abs().max() > 0, "the bias has moved"


@pytest.mark.parametrize(
    ("bias", "balanced_by"), [pytest.param("buffer", "callback", marks=pytest.mark.soak), ("parameter", "module")]
)
def test_a_router_bias_moved_on_three_ranks_is_moved_once(campaigns: Campaigns, bias: str, balanced_by: Any) -> None:
    """By the load of all ranks."""
    setup = replace(BIASED, world_size=3, balanced_by=balanced_by).with_options(bias=bias)
    campaigns.check(setup, Kill(phase="batch_end", step=7, rank=1, settle=10.0))


def _unsettled(*args: object, **kwargs: object) -> None:
    """Repairs nothing."""


def _early(replay: Replay, step: int) -> None:
    """Sets buffers before validation to what they were after it."""
    _load(replay, step)
    replay.load_buffers()


_load = Replay.load
SEAMS = {
    "unsettled": Seam(
        module="lightning_moe_ckpt.session._session", attribute="CheckpointSession.reconcile", replacement=_unsettled
    ),
    "early": Seam(module="lightning_moe_ckpt.recovery._replay", attribute="Replay.load", replacement=_early),
}


@pytest.mark.soak
def test_without_settling_the_start_of_an_epoch_is_counted_twice(campaigns: Campaigns) -> None:
    """Buffers are recorded after `on_train_epoch_start`, and a run that resumes between two epochs calls it again."""
    setup = replace(COUNTING, checkpointing=Checkpointing(policy="dense", every_n_steps=5))
    with pytest.raises(AssertionError, match=r"buffer/model\.epochs"):
        campaigns.check(setup, Kill(phase="forward", step=5, settle=10.0), seams=[SEAMS["unsettled"]])


@pytest.mark.soak
def test_with_buffers_loaded_before_validation_it_is_counted_twice(campaigns: Campaigns) -> None:
    """Weights are loaded before validation, buffers after it: they were recorded with what it had changed."""
    setup = replace(COUNTING, validate_every=1)
    with pytest.raises(AssertionError, match="validation"):
        campaigns.check(setup, Kill(phase="after_batch_end", step=7, settle=10.0), seams=[SEAMS["early"]])


AVERAGED = Setup(averaged="ema", validate_every=1, checkpointing=SPARSE)
FIRST_AVERAGED = 7

CASES: dict[str, Setup] = {
    "ema": replace(AVERAGED, model="batch_norm"),
    "mean": replace(AVERAGED, averaged="mean", validate_every=None),
    "tied": replace(AVERAGED, model="tied", precision="bf16-mixed"),
    "true": replace(AVERAGED, precision="bf16-true"),
    "dense": replace(AVERAGED, model="batch_norm", checkpointing=Checkpointing(policy="dense", every_n_steps=2)),
}


SOAKED = {"true", "tied", "dense"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.soak] * (name in SOAKED)) for name in CASES])
def test_averages_of_a_killed_run_are_those_of_a_run_in_peace(campaigns: Campaigns, name: str) -> None:
    """Weights of operators that are still frozen in replay enter no average, and no validation on averages."""
    scripts = one_kill_per_step(CASES[name], offset=len(name) + 2, every=10)
    require_resumed(campaigns.check_all(CASES[name], scripts), scripts, after=FIRST_AVERAGED)


@pytest.mark.soak
def test_averages_of_sharded_experts_are_restored(campaigns: Campaigns) -> None:
    """Three ranks, each of which averages its own experts."""
    setup = replace(AVERAGED, model="stacked", world_size=3, expert_parallel=3).with_options(num_experts=6)
    campaigns.check(setup, *[Kill(phase="batch_end", step=step, rank=step % 3, settle=10.0) for step in (6, 8)])


def test_more_epochs_go_on_from_the_weights_and_end_with_the_averages(campaigns: Campaigns) -> None:
    """At the end of training the averages take the place of the weights; training goes on with the weights."""
    whole = replace(AVERAGED, epochs=3)
    campaigns.check_stages(replace(whole, epochs=2), whole, whole)


def _no_averages(averages: Any, fqn: str) -> dict[str, Any]:
    return {}


@pytest.mark.soak
def test_without_capturing_averages_the_run_is_not_exact(campaigns: Campaigns) -> None:
    """The tests above can fail."""
    seams = [
        Seam(module=Averages.__module__, attribute=f"Averages.{name}", replacement=_no_averages)
        for name in ("of", "consumed_of")
    ]
    with pytest.raises(AssertionError, match=r"differences from the fault-free run(.|\n)*param/"):
        campaigns.check(AVERAGED, Kill(phase="after_batch_end", step=7, settle=10.0), seams=seams)
