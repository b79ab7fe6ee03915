"""Several processes with sharded experts: one of them dies, the job starts again, and ends the same on every rank."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, Literal

import pytest
from door import Phase

from campaign._campaign import AFTER_STEP, BEFORE_STEP, Campaigns
from campaign._training import Checkpointing, Setup
from campaign.test_models import operator_names
from lightning_moe_ckpt.testing import Kill

LAYOUTS = [(3, 1), (3, 3), (4, 1), (4, 2), (4, 4)]
"""World size and expert parallelism; 4 processes with 2 are two groups that share experts and two that hold the same."""


def parallel_setup(world_size: int, expert_parallel: int) -> Setup:
    """A run with 12 experts, which 1, 2, 3 and 4 ranks can share."""
    return Setup(
        model="stacked",
        options=(("num_experts", 12),),
        world_size=world_size,
        expert_parallel=expert_parallel,
        batches=6,
        checkpointing=Checkpointing(policy="sparse", window=3, order="popularity"),
    )


def random_kills(setup: Setup, count: int, seed: int) -> list[Kill]:
    """Kills of random ranks at rising steps, in random places of the step."""
    draw = random.Random(seed)
    phases: list[Phase] = [*BEFORE_STEP, *AFTER_STEP]
    steps = sorted(draw.sample(range(1, setup.steps - 1), count))
    return [
        Kill(phase=draw.choice(phases), step=step, rank=draw.randrange(setup.world_size), settle=0.0) for step in steps
    ]


@pytest.mark.parametrize(
    ("world_size", "expert_parallel", "count"),
    [(3, 3, 2), *(pytest.param(*layout, 5, marks=pytest.mark.soak) for layout in LAYOUTS)],
)
def test_killed_on_random_ranks_the_job_ends_the_same(
    campaigns: Campaigns, world_size: int, expert_parallel: int, count: int
) -> None:
    """Several kills in one run: in the first window, in replay and after it."""
    setup = parallel_setup(world_size, expert_parallel)
    lives = campaigns.check(setup, *random_kills(setup, count, seed=10 * world_size + expert_parallel))
    assert [life.outcome for life in lives] == ["killed"] * count + ["finished"]
    assert lives[-1].steps()[0] > 1, "it did not start over"


def sharded_setup(policy: Literal["sparse", "dense", "differential"], **changes: Any) -> Setup:
    """Two groups of two that share experts; each rank's optimizer has a piece of what it shares with others."""
    checkpointing = Checkpointing(policy=policy, every_n_steps=4 if policy == "differential" else 1, batch=2)
    return replace(parallel_setup(4, 2), shard_optimizer=True, checkpointing=checkpointing, **changes)


def test_with_sharded_optimizers_the_job_ends_the_same(campaigns: Campaigns) -> None:
    """Killed between a base and its differences. Experts' pieces have owners among two ranks, those of the rest among four."""
    setup = sharded_setup("differential")
    lives = campaigns.check(setup, Kill(phase="forward", step=7, rank=3, settle=10.0))
    assert lives[-1].steps()[0] > 4, "it did not start over"


@pytest.mark.soak
@pytest.mark.parametrize(
    "setup",
    [
        pytest.param(sharded_setup("dense", precision="bf16-mixed", accumulate=2, epochs=3), id="bf16-mixed"),
        pytest.param(sharded_setup("sparse", optimizer="adamw_fused", clip=None), id="fused"),
        pytest.param(sharded_setup("sparse", averaged="ema", precision="bf16-true"), id="averages"),
        pytest.param(sharded_setup("differential", optimizer="sgd", scheduler="plateau"), id="sgd"),
        pytest.param(replace(sharded_setup("sparse"), world_size=3, expert_parallel=3), id="three"),
        pytest.param(replace(sharded_setup("dense"), expert_parallel=4), id="four"),
    ],
)
def test_with_sharded_optimizers_several_kills_change_nothing(campaigns: Campaigns, setup: Setup) -> None:
    """At random places."""
    campaigns.check(setup, *random_kills(setup, 4, seed=setup.world_size))


def test_a_schedule_names_the_operators_of_all_ranks(campaigns: Campaigns) -> None:
    """Each rank takes those that it holds; killed in a window, the job ends the same."""
    names = operator_names("stacked")
    layer = next(name.partition("/expert.")[0] for name in names if "/expert." in name)
    experts = [f"{layer}/expert.{index}" for index in range(12)]
    dense = tuple(name for name in names if "/expert." not in name)
    checkpointing = Checkpointing(policy="sparse", schedule=(tuple(experts[::2]), tuple(experts[1::2]), dense))
    setup = replace(parallel_setup(3, 3), checkpointing=checkpointing)
    campaigns.check(setup, *random_kills(setup, 1, seed=3))


@pytest.mark.soak
def test_an_expert_that_never_gets_a_token_survives_on_three_ranks(campaigns: Campaigns) -> None:
    """Replicated ModuleList experts, whose gradient is `None` on every rank or only on some; two drawn runs have them too."""
    setup = replace(parallel_setup(3, 1), model="lists", options=(("never_routed", True),))
    campaigns.check(setup, *random_kills(setup, 1, seed=1))


@pytest.mark.soak
def test_a_mixed_precision_job_ends_the_same(campaigns: Campaigns) -> None:
    """bf16 under autocast, two expert-parallel groups of two, accumulation; a rank of each pair is killed."""
    setup = replace(parallel_setup(4, 2), precision="bf16-mixed", accumulate=2, epochs=3)
    campaigns.check(setup, Kill(phase="forward", step=4, rank=1), Kill(phase="forward", step=7, rank=2))


@pytest.mark.soak
def test_a_sharded_run_killed_every_window_and_two_steps_still_finishes(campaigns: Campaigns) -> None:
    """Progress under constant failure, on three ranks; `make test` has it on one, and three killed at random."""
    setup = replace(parallel_setup(3, 3), batches=4)
    kill = Kill(phase="after_batch_end", batches=5, settle=10.0)
    lives = campaigns.check(setup, *[kill] * (2 * setup.steps), must_strike=False)
    reached = [max(life.steps()) for life in lives]
    assert reached[:-1] == sorted(set(reached[:-1])), "every life got further than the one before"
