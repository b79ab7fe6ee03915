"""The full product, and a long campaign: run by `make soak`, not by `make test`."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from campaign._campaign import Campaigns, one_kill_per_step
from campaign._pairs import Row, name, product
from campaign._training import Checkpointing, Setup
from campaign.test_dense import FACTORS as DENSE_FACTORS
from campaign.test_dense import dense_setup
from campaign.test_expert_parallel import LAYOUTS, parallel_setup
from campaign.test_sparse import allowed as sparse_allowed
from campaign.test_sparse import sparse_setup
from lightning_moe_ckpt.testing import AttemptResult, Kill

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

KILLS = 200
"""Over all layouts."""
SPARSE_FACTORS: dict[str, list[Any]] = {
    "model": ["lists", "tied", "stacked", "mixtral"],
    "precision": ["32-true", "bf16-mixed", "bf16-true", "16-mixed"],
    "accumulate": [1, 3],
    "window": [2, 4],
    "order": ["popularity"],
    "optimizer": ["adamw", "adamw_fused", "sgd"],
    "scheduler": ["plateau"],
    "clip": [("norm", 0.5)],
    "workers": [0, 2],
    "loader": ["plain", "stateful"],
}


def test_two_hundred_kills_of_random_ranks_at_random_times(
    campaigns: Campaigns, capsys: pytest.CaptureFixture[str]
) -> None:
    """Long runs on 3 and 4 processes, each life killed after a random number of batches or milliseconds."""
    draw = random.Random(0)
    survived = 0
    for world_size, expert_parallel in LAYOUTS:
        base = parallel_setup(world_size, expert_parallel)
        setup = replace(base, epochs=40, checkpointing=Checkpointing(policy="sparse", window=4))
        kills = [_random_kill(draw, setup) for _ in range(KILLS // len(LAYOUTS))]
        lives = campaigns.check(setup, *kills, must_strike=False, patience=3000.0)
        killed = sum(life.outcome == "killed" for life in lives)
        survived += killed
        with capsys.disabled():
            print(f"\n{world_size} processes, expert parallel {expert_parallel}: {_tally(lives, setup, killed)}")
    with capsys.disabled():
        print(f"{survived} kills survived bit for bit")
    assert survived == KILLS


def _tally(lives: list[AttemptResult], setup: Setup, killed: int) -> str:
    trained = sum(len(life.steps()) for life in lives)
    seconds = sum(life.seconds for life in lives)
    return f"{killed} kills, {setup.steps} steps exact, {trained} trained in {seconds:.0f} s"


def _random_kill(draw: random.Random, setup: Setup) -> Kill:
    """Early enough that the run does not end first: a life gains about as many batches as it lives beyond a window."""
    rank = draw.randrange(setup.world_size)
    if draw.random() < 0.5:
        return Kill(phase="random_time", seconds=draw.uniform(0.0, 0.15), rank=rank)
    return Kill(phase=draw.choice(["forward", "batch_start", "batch_end"]), batches=draw.randrange(1, 9), rank=rank)


@pytest.mark.parametrize("row", [row for row in product(SPARSE_FACTORS) if sparse_allowed(row)], ids=name)
def test_every_sparse_combination(campaigns: Campaigns, row: Row) -> None:
    """One run per step, killed there once."""
    setup = sparse_setup(row)
    campaigns.check_all(setup, one_kill_per_step(setup))


@pytest.mark.parametrize("row", product({**DENSE_FACTORS, "scheduler": ["cosine"]}), ids=name)
def test_every_dense_combination(campaigns: Campaigns, row: Row) -> None:
    """Every data path, killed at every step."""
    setup = dense_setup(row)
    campaigns.check_all(setup, one_kill_per_step(setup))
    campaigns.check_all(setup, one_kill_per_step(setup))


def test_loader_workers_forked_while_checkpoints_are_written_always_answer(campaigns: Campaigns) -> None:
    """Copy, persist and reduction threads run while every epoch forks new workers: none may inherit a held lock."""
    checkpointing = Checkpointing(policy="sparse", window=2)
    setup = Setup(world_size=3, loader="stateful", workers=2, batches=2, epochs=60, checkpointing=checkpointing)
    lives = campaigns.check(setup, timeout=600.0, patience=900.0)
    assert len(lives[-1].steps()) == setup.steps
