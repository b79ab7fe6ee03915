"""A partial run whose stored base is gone, or never was there, stores a whole generation and builds on that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from campaign._campaign import Campaigns, checkpoints
from campaign._partial_runs import Machines, restarts, train_partial, two_level_setup
from campaign._training import Setup
from lightning_moe_ckpt.callbacks import PartialExpertCheckpoint
from lightning_moe_ckpt.storage import GenerationId, RankMarker, RunStore, open_backend
from lightning_moe_ckpt.testing import Attempt, Kill

KILL = Kill(phase="forward", step=9, settle=30.0)

Ruin = Callable[[Path, list[RankMarker]], None]
"""Given the folder of a run and the markers of its newest generation, ruins something that the next one needs."""


class Ruins(Callback):
    """Lets the newest generation be stored, then ruins, in the first life only, on the first rank.

    Args:
        ruin: how.
        at: value of `global_step` after which it does so.
    """

    def __init__(self, ruin: Ruin, at: int, life: Attempt) -> None:
        self._ruin, self._at, self._life = ruin, at, life

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        if self._life.index or trainer.global_step != self._at:
            return
        (own,) = (callback for callback in trainer.callbacks if isinstance(callback, PartialExpertCheckpoint))  # type: ignore[attr-defined]
        assert own.wait_committed()
        trainer.strategy.barrier()
        if self._life.rank == 0:
            self._ruin(checkpoints(self._life.workdir), newest(self._life.workdir))
        trainer.strategy.barrier()


class Down(Callback):
    """Storage refuses every segment from the start of the first life until step `until` has ended."""

    def __init__(self, until: int, life: Attempt) -> None:
        self._until, self._life = until, life
        self._folder = checkpoints(life.workdir) / "snap"

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._life.index == 0 and self._life.rank == 0:
            self._folder.touch(exist_ok=False)
        trainer.strategy.barrier()

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        trainer.strategy.barrier()
        if self._life.index == 0 and self._life.rank == 0 and trainer.global_step == self._until:
            self._folder.unlink()


def train_ruined(setup: Setup, machines: Machines, ruin: Ruin, at: int, life: Attempt) -> Mapping[str, Any]:
    return train_partial(setup, machines, life, Ruins(ruin, at, life))


def train_while_down(setup: Setup, machines: Machines, until: int, life: Attempt) -> Mapping[str, Any]:
    return train_partial(setup, machines, life, Down(until, life))


def newest(workdir: Path) -> list[RankMarker]:
    """Markers of the newest generation that is committed."""
    backend = open_backend(checkpoints(workdir).as_uri())
    store = RunStore.open(backend, resume="must")
    commit = store.candidates()[0]
    markers = [store.read_marker(commit, rank) for rank in range(commit.world_size)]
    backend.close()
    return markers


def delete_what_is_borrowed(root: Path, markers: list[RankMarker]) -> None:
    (root / markers[-1].referenced[-1].segment.key).unlink()


def truncate_what_is_borrowed(root: Path, markers: list[RankMarker]) -> None:
    path = root / markers[-1].referenced[-1].segment.key
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-100])


def damage_the_manifest(root: Path, markers: list[RankMarker]) -> None:
    path = root / f"{markers[0].generation.prefix}_COMMITTED"
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-100])


def stored_steps(workdir: Path) -> dict[int, tuple[GenerationId, ...]]:
    """Generations that the first life committed and a restart may use, by step, and what each refers to."""
    backend = open_backend(checkpoints(workdir).as_uri())
    commits = RunStore.open(backend, resume="must").candidates()
    backend.close()
    return {c.generation.step: tuple(c.needs) for c in commits if c.generation.incarnation == 1}


@pytest.mark.parametrize(
    ("ruin", "world_size"),
    [
        (delete_what_is_borrowed, 1),
        pytest.param(delete_what_is_borrowed, 3, marks=pytest.mark.soak),
        pytest.param(truncate_what_is_borrowed, 1, marks=pytest.mark.soak),
        pytest.param(damage_the_manifest, 1, marks=pytest.mark.soak),
    ],
)
def test_what_is_borrowed_goes_bad_in_mid_run(campaigns: Campaigns, folder: Path, ruin: Ruin, world_size: int) -> None:
    """The next generation is refused, the one after it is whole, and later ones refer to that; a kill finds them."""
    machines = Machines(folder, (0,) * world_size, lost=((0,),))
    setup = two_level_setup(world_size, world_size)
    found = restarts(campaigns, setup, machines, KILL, fit=partial(train_ruined, setup, machines, ruin, 5))
    promise = found.require(1)
    assert promise.generation.step == 9
    needs = stored_steps(found.workdir)
    assert 5 not in needs, "it was refused"
    assert needs[6] == (), "it is whole"
    assert all(min(need.step for need in needs[step]) >= 6 for step in (7, 8, 9))
    found.require_accounting()


@pytest.mark.parametrize("world_size", [1, pytest.param(3, marks=pytest.mark.soak)])
def test_storage_that_was_down_at_the_start_is_used_when_it_is_back(
    campaigns: Campaigns, folder: Path, world_size: int
) -> None:
    """There is no generation 0; attempts at a whole one go on until one succeeds, and partial ones follow it."""
    machines = Machines(folder, (0,) * world_size, lost=((0,),))
    setup = two_level_setup(world_size, world_size)
    found = restarts(campaigns, setup, machines, KILL, fit=partial(train_while_down, setup, machines, 3))
    assert found.require(1).generation.step == 9
    needs = stored_steps(found.workdir)
    assert min(needs) >= 3
    assert needs[min(needs)] == ()
    assert needs[9] != ()
    found.require_accounting()
