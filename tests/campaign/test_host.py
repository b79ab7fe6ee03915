"""Processes die, their node lives on: every rank restores from memory of the node and reads no segment from storage."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest
from door import DIRECTORY_VARIABLE
from lightning.pytorch import Callback, Trainer
from typing_extensions import override

from campaign._campaign import Campaigns
from campaign._training import Checkpointing, Setup, train
from lightning_moe_ckpt.testing import Attempt, AttemptResult, Kill, Seam

SPARSE = Setup(model="stacked", batches=6, checkpointing=Checkpointing(policy="sparse", window=3))
EXPERTS = replace(SPARSE, world_size=3, options=(("num_experts", 6),), expert_parallel=3)
REPLICATED = replace(SPARSE, world_size=4, checkpointing=Checkpointing(policy="dense", every_n_steps=2))


def train_without_segments(setup: Setup, life: Attempt) -> Mapping[str, Any]:
    """Train; but for the first life, there is not one segment in storage: who asks for one gets nothing."""
    if life.index > 0 and life.rank == 0:
        for path in Path(urlparse(life.url).path).glob("snap/*/*/*.safetensors"):
            path.unlink(missing_ok=True)
    return train(setup, life)


def check(campaigns: Campaigns, setup: Setup, *kills: Kill) -> list[AttemptResult]:
    """Every life but the first restores from memory alone, on all ranks, and the end is that of the undisturbed run."""
    lives = campaigns.check(setup, *kills, fit=partial(train_without_segments, setup), may_complain=True)
    for life in lives[1:]:
        for rank in range(setup.world_size):
            told = [line for line in life.log(rank).splitlines() if " MiB from " in line]
            assert told, life.log(rank)
            assert all(line.endswith(" MiB from host") for line in told), told
        assert life.steps()[:1] != [1], "it did not start over"
    return lives


@pytest.mark.parametrize(
    ("setup", "everyone"),
    [
        pytest.param(SPARSE, False, id="1"),
        pytest.param(EXPERTS, True, id="3-all", marks=pytest.mark.soak),
        pytest.param(REPLICATED, False, id="4-one", marks=pytest.mark.soak),
        pytest.param(EXPERTS, False, id="3-one", marks=pytest.mark.soak),
        pytest.param(REPLICATED, True, id="4-all", marks=pytest.mark.soak),
    ],
)
def test_after_sigkill_all_ranks_restore_from_memory(campaigns: Campaigns, setup: Setup, everyone: bool) -> None:
    """One rank is killed, and the launcher kills the others; or all at once: the node's memory has everything."""
    kill = Kill(phase="forward", step=9, rank=setup.world_size - 1, everyone=everyone, settle=10.0)
    check(campaigns, setup, kill)


@pytest.mark.parametrize("setup", [SPARSE, pytest.param(EXPERTS, marks=pytest.mark.soak)], ids=["1", "3"])
def test_killed_again_in_replay_they_restore_from_memory_again(campaigns: Campaigns, setup: Setup) -> None:
    """Before anything new is complete the ring that was adopted still holds what was resumed from."""
    kills = [
        Kill(phase="forward", step=9, everyone=True, settle=10.0),
        Kill(phase="forward", batches=1, everyone=True),
        Kill(phase="before_optimizer_step", batches=2, everyone=True),
    ]
    lives = check(campaigns, setup, *kills)
    resumed = {line for life in lives[1:] for line in life.log().splitlines() if "resumes from step" in line}
    assert len({line.split("resumes from ")[1].split(",")[0] for line in resumed}) == 1, resumed


class Cleaner(Callback):
    """Removes all names from shared memory before a step."""

    def __init__(self, memory: Path, step: int) -> None:
        self._memory, self._step = memory, step

    @override
    def on_train_batch_start(self, trainer: Trainer, *args: object) -> None:
        if trainer.global_step == self._step:
            for path in self._memory.iterdir():
                path.unlink(missing_ok=True)


def train_beside_a_cleaner(setup: Setup, memory: Path, without_segments: bool, life: Attempt) -> Mapping[str, Any]:
    """In memory of its own, whose names are removed in the first life before step 7."""
    os.environ[DIRECTORY_VARIABLE] = str(memory)
    if life.index == 0:
        cleaner = Cleaner(memory, 6)
        Seam(module="campaign._training", attribute="Setup.callbacks", replacement=lambda *_: [cleaner]).apply()
    return train_without_segments(setup, life) if without_segments else train(setup, life)


@pytest.mark.parametrize("step", [7, 11])
def test_killed_after_names_of_memory_were_removed(campaigns: Campaigns, folder: Path, step: int) -> None:
    """Before the next window storage is all there is; after it, memory that was made again has everything."""
    kill = Kill(phase="forward", step=step, settle=10.0)
    again = step == 11
    fit = partial(train_beside_a_cleaner, SPARSE, folder, again)
    lives = campaigns.check(SPARSE, kill, fit=fit, may_complain=True)
    told = [line for line in lives[1].log().splitlines() if " MiB from " in line]
    assert told
    assert all(line.endswith(" MiB from host" if again else " MiB from storage") for line in told), told
    assert [*folder.iterdir()] == []
