"""`batches="log"`: data that cannot be read twice is replayed from the checkpoint, and only replayed."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from door import digest
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from campaign._campaign import Campaigns
from campaign._data import SEQUENCE, VOCABULARY, make_validation_loader
from campaign._training import Checkpointing, Module
from campaign._variants import Variant
from lightning_moe_ckpt.testing import Attempt, AttemptFailed, AttemptResult, Kill

LOG = Checkpointing(policy="sparse", window=3, batches="log")
KILL = Kill(phase="after_batch_end", step=9, settle=10.0)


@dataclass(frozen=True, kw_only=True)
class Queue(Variant):
    """A run whose data is gone once it was read."""

    unknown: bool = False
    """Whether batches hold an object that no journal can store."""
    grows: bool = False
    """Whether batches become larger in mid-run."""

    @override
    def make_module(self, life: Attempt) -> Module:
        return QueueModule(self, life)

    @override
    def callbacks(self, life: Attempt) -> Sequence[Callback]:
        return [Fingerprints()]

    @override
    def loaders(self, life: Attempt) -> tuple[Any, Any]:
        data = DataLoader(Once(self), batch_size=None, num_workers=self.workers)
        return data, make_validation_loader(self.batch_size) if self.validate_every else None


class Once(IterableDataset[Any]):
    """Nested batches from the entropy of the machine."""

    def __init__(self, setup: Queue) -> None:
        self._setup = setup

    @override
    def __iter__(self) -> Iterator[Any]:
        for index in range(self._setup.batches):
            rows = 10_000 if self._setup.grows and index == 5 else 4
            tokens = (
                torch.frombuffer(bytearray(os.urandom(rows * (SEQUENCE + 1))), dtype=torch.uint8).long() % VOCABULARY
            )
            torch.rand(1)  # reading moves the generators of this process
            random.random()
            tokens_BS = tokens.view(rows, SEQUENCE + 1)
            batch = {"pair": (tokens_BS[:, :-1], [tokens_BS[:, 1:]]), "name": f"batch {index}", "number": index}
            yield {**batch, "lock": random.Random()} if self._setup.unknown else batch


class QueueModule(Module):
    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert isinstance(batch["name"], str)
        tokens, (targets,) = batch["pair"]
        return super().training_step((tokens, targets), batch_idx)


class Fingerprints(Callback):
    """Writes down all parameters at the start of every batch."""

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        state = digest(dict(pl_module.state_dict()))
        print(f"FINGERPRINT {trainer.global_step} {batch_idx} {state} {digest(batch['pair'])}")


def seen(life: AttemptResult) -> dict[str, str]:
    """Parameters and data by step and batch."""
    lines = [line.split() for line in life.log().splitlines() if line.startswith("FINGERPRINT")]
    return {f"{step} {batch}": f"{state} {data}" for _, step, batch, state, data in lines}


def dense_step(life: AttemptResult) -> int:
    """The step from which the state of a resumed life was dense."""
    (line,) = [line for line in life.log().splitlines() if "dense again at step" in line]
    return int(line.split("dense again at step ")[1].split()[0])


@pytest.mark.parametrize(("workers", "accumulate"), [pytest.param(0, 1, marks=pytest.mark.soak), (0, 2), (1, 1)])
def test_replay_sees_the_logged_batches_and_ends_dense_with_the_same_bits(
    campaigns: Campaigns, workers: int, accumulate: int
) -> None:
    """The data is the same up to the dense step, the parameters at it, and a restart says that it ends there."""
    batches = 12 * accumulate
    setup = Queue(batches=batches, epochs=1, accumulate=accumulate, workers=workers, checkpointing=LOG)
    first, second = campaigns.run(setup, KILL)
    before, after, dense = seen(first), seen(second), dense_step(second)
    common = [place for place in after if place in before and int(place.split()[0]) < dense]
    assert len(common) == 2 * accumulate, "a window of three takes two steps to replay"
    data = [place for place in common if before[place].split()[1] != after[place].split()[1]]
    assert not data
    turn = next(place for place in after if int(place.split()[0]) == dense)
    assert after[turn].split()[0] == before[turn].split()[0], "all parameters"
    assert after[turn].split()[1] != before[turn].split()[1], "the pipeline went on by itself"
    assert "gave another loss" not in second.log()
    assert "exact up to the step at which the state is dense, not beyond" in second.log()


def test_without_the_log_replay_notices_other_batches(campaigns: Campaigns) -> None:
    """The ablation: this data cannot be repositioned, and batches tell before they are trained on; where that is wanted, losses do."""
    repositioned = replace(LOG, batches="reposition")
    with pytest.raises(
        AttemptFailed, match=r"OtherData: the batch that follows step \d+ is not the one of the original run"
    ):
        campaigns.run(Queue(batches=12, epochs=1, checkpointing=repositioned), KILL)
    warned = replace(repositioned, arguments=(("on_mismatch", "warn"),))
    _, second = campaigns.run(Queue(batches=12, epochs=1, checkpointing=warned), KILL)
    assert "gave another loss" in second.log()


def test_a_batch_that_cannot_be_stored_is_refused_by_name(campaigns: Campaigns) -> None:
    """At the first one."""
    with pytest.raises(AttemptFailed, match=r"a batch cannot be stored exactly: .*lock.*Random"):
        campaigns.run(Queue(unknown=True, batches=12, epochs=1, checkpointing=LOG))


def test_a_batch_too_big_costs_its_window_and_is_reported(campaigns: Campaigns) -> None:
    """Training goes on, later windows have room."""
    # Of a known length: journals of a stream without one reserve room for a thousand random states, and the batch would fit.
    setup = Queue(grows=True, batches=12, epochs=1, checkpointing=LOG, trainer=(("limit_train_batches", 12),))
    (life,) = campaigns.run(setup)
    (line,) = [line for line in life.log().splitlines() if "its record holds" in line]
    assert "generation 6 was not taken" in line
    assert life.steps()[-1] == 12
