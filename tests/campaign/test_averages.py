"""Running averages of the weights, by Lightning's own callbacks: averaged, validated on and restored to the bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from campaign._campaign import Campaigns, one_kill_per_step, require_resumed
from campaign._training import Checkpointing, Setup
from lightning_moe_ckpt.snapshot._layout import Averages
from lightning_moe_ckpt.testing._attempts import Seam
from lightning_moe_ckpt.testing._kill import Kill

SPARSE = Checkpointing(policy="sparse", window=3)
AVERAGED = Setup(averaged="ema", validate_every=1, checkpointing=SPARSE)
FIRST_GENERATION = 7

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
    require_resumed(campaigns.check_all(CASES[name], scripts), scripts, after=FIRST_GENERATION)


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


def test_without_capturing_averages_the_run_is_not_exact(campaigns: Campaigns) -> None:
    """The tests above can fail."""
    seams = [
        Seam(module=Averages.__module__, attribute=f"Averages.{name}", replacement=_no_averages)
        for name in ("of", "consumed_of")
    ]
    with pytest.raises(AssertionError, match=r"differences from the fault-free run(.|\n)*param/"):
        campaigns.check(AVERAGED, Kill(phase="after_batch_end", step=7, settle=10.0), seams=seams)
