"""Models that train otherwise than most: recomputed activations, no expert at all, experts that some ranks avoid."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from campaign._campaign import Campaigns, require_resumed
from campaign._training import Checkpointing, Setup
from lightning_moe_ckpt.testing._kill import Kill

SPARSE = Checkpointing(policy="sparse", window=3)
PLAIN = Setup(checkpointing=SPARSE)
FIRST_GENERATION = 7


@pytest.mark.parametrize(
    ("model", "precision", "recompute"),
    [
        ("lists", "bf16-mixed", "reentrant"),
        ("stacked", "32-true", "not_reentrant"),
        pytest.param("lists", "bf16-mixed", "not_reentrant", marks=pytest.mark.soak),
        pytest.param("stacked", "32-true", "reentrant", marks=pytest.mark.soak),
    ],
)
def test_recomputed_experts_are_replayed(campaigns: Campaigns, model: Any, precision: Any, recompute: str) -> None:
    """Forward runs twice, frozen or not, with the same dropout; the probe of dtypes sees both."""
    setup = replace(PLAIN, model=model, precision=precision).with_options(recompute=recompute)
    scripts = [[Kill(phase="forward", step=8, settle=10.0)]]
    require_resumed(campaigns.check_all(setup, scripts), scripts, after=FIRST_GENERATION)


def test_a_model_without_experts_is_replayed_block_by_block(campaigns: Campaigns) -> None:
    """Tied weights, and windows over the blocks of a dense model."""
    checkpointing = Checkpointing(policy="sparse", window=4, order="popularity")
    setup = replace(PLAIN, model="dense", precision="bf16-mixed", checkpointing=checkpointing)
    scripts = [[Kill(phase="forward", step=9, settle=10.0)]]
    require_resumed(campaigns.check_all(setup, scripts), scripts, after=FIRST_GENERATION + 1)


def test_experts_that_some_ranks_and_one_that_all_avoid_are_restored(campaigns: Campaigns) -> None:
    """Two expert-parallel groups of two; each rank avoids an expert of its own, and all avoid a fifth."""
    setup = replace(PLAIN, model="stacked", world_size=4, expert_parallel=2)
    setup = setup.with_options(num_experts=12, never_routed=True)
    campaigns.check(setup, *[Kill(phase="forward", step=step, rank=step % 4, settle=10.0) for step in (7,)])


@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["moe", "ddp_ordered"])
def test_an_overflow_in_one_expert_skips_the_same_steps_on_three_ranks(campaigns: Campaigns, strategy: Any) -> None:
    """Whether that expert is frozen or active in replay; with the ordered reduction as strategy or as hook of DDP."""
    setup = replace(PLAIN, precision="16-mixed", overflow_steps=(4, 5, 8), world_size=3, strategy=strategy)
    lives = campaigns.check(setup, Kill(phase="batch_end", step=7, rank=1, settle=10.0))
    assert lives[-1].end()["precision/scale"] < 2.0**14, "steps were skipped"


@pytest.mark.parametrize(("strategy", "words"), [("ddp", "ordered_hook"), ("moe_fast", "use 'ordered'")])
def test_a_reduction_without_order_is_named_once(campaigns: Campaigns, strategy: Any, words: str) -> None:
    """By rank 0, with the remedy; the tests above would fail if the ordered ones were named."""
    (life,) = campaigns.run(replace(PLAIN, world_size=3, strategy=strategy, epochs=1))
    assert [life.log(rank).count(words) for rank in range(3)] == [1, 0, 0]
