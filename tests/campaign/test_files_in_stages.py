"""Files and rows that Lightning writes, and its callbacks' decisions, beside a pipeline stage that recovers alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from door import bits
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from typing_extensions import override

from campaign._campaign import Campaigns
from campaign._training import Module
from campaign.test_stages_alone import (
    ELSEWHERE,
    TOPOLOGIES,
    Counted,
    CountedModule,
    chain,
    check,
    check_alone,
    death,
    decisions,
)
from lightning_moe_ckpt.testing import Attempt


class LoggingModule(CountedModule):
    """Gives rows to the logger itself, in each micro-batch."""

    @override
    def stage_auxiliary_loss(self) -> Tensor | None:
        found = super().stage_auxiliary_loss()
        if self.training and self.logger is not None:
            self.logger.log_metrics({"asked": self.asked}, step=self.trainer.global_step)
        return found


@dataclass(frozen=True, kw_only=True)
class Filed(Counted):
    """Files every few steps, and the best two by validation; rows of every step, and stopping that never comes."""

    batches: int = 8
    epochs: int = 2
    validate_every: int | None = 3

    @override
    def make_module(self, life: Attempt) -> Module:
        return LoggingModule(self, life)

    @override
    def callbacks(self, life: Attempt) -> Sequence[Callback]:
        folder = self._folder(life)
        often = ModelCheckpoint(folder / "often", filename="{step}", every_n_train_steps=3, save_top_k=-1)
        best = ModelCheckpoint(
            folder / "best", filename="{step}", monitor="validation_loss", save_top_k=2, save_last=True
        )
        return [*super().callbacks(life), often, best, EarlyStopping("validation_loss", patience=50)]

    @override
    def trainer_options(self, life: Attempt) -> dict[str, Any]:
        rows = CSVLogger(self._folder(life), name="", version=0)
        return {**super().trainer_options(life), "logger": rows, "log_every_n_steps": 1}

    @override
    def returned(self, life: Attempt, trainer: Trainer) -> dict[str, Any]:
        files = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
        stopping = trainer.early_stopping_callback
        assert isinstance(stopping, EarlyStopping)
        names = {file.state_key: sorted(Path(path).name for path in file.best_k_models) for file in files}
        written: dict[str, Any] = {}
        if life.rank == 0:
            folder = self._folder(life)
            written["there"] = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.ckpt"))
            written["rows"] = (folder / "version_0" / "metrics.csv").read_text()
        stopped = [bits(stopping.best_score), stopping.wait_count]
        return {**super().returned(life, trainer), "files": [*names.values()], "stopping": stopped, **written}

    def _folder(self, life: Attempt) -> Path:
        return life.workdir / ("files" if self.checkpointing else "plain")


def filed(name: str) -> Filed:
    """Return such a run, spread as those without files are."""
    setup = TOPOLOGIES[name]
    return Filed(
        world_size=setup.world_size,
        stages=setup.stages,
        micro_batches=setup.micro_batches,
        expert_parallel=setup.expert_parallel,
    )


def soak_but(row: tuple[Any, ...], rows: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Return rows of which only one is part of an ordinary run."""
    return [pytest.param(*each, marks=[] if each == row else pytest.mark.soak) for each in rows]


@pytest.mark.parametrize(
    ("name", "first"), soak_but(("2x1x1", 0), [(name, first) for name in TOPOLOGIES for first in (0, 1)])
)
def test_files_are_written_while_a_stage_recovers_alone(campaigns: Campaigns, name: str, first: int) -> None:
    """The same files and rows: a stage that repeats steps writes none, and takes part as soon as all are in the same step.

    Scales change meanwhile, and steps are left out on all ranks.
    """
    options: dict[str, Any] = {"precision": "16-mixed", "overflow_steps": (5, 9), "scheduler": "plateau"}
    setup = replace(filed(name), schedule="gpipe", **options)
    size, places = (
        setup.world_size // setup.stages,
        ["forward", "after_backward", "clip", "before_optimizer_step", "commit"],
    )
    stages = [(first + index) % setup.stages for index in range(len(places))]
    check_alone(campaigns, setup, chain(places, [stage * size for stage in stages]))


@pytest.mark.parametrize(
    ("place", "name"),
    soak_but(("file", "2x1x1"), [(place, name) for place in ("validation", "file") for name in TOPOLOGIES]),
)
def test_everybody_recovers_from_each_rank(campaigns: Campaigns, place: str, name: str) -> None:
    """Which dies in a validation, or as a file is written, one after another."""
    setup = filed(name)
    deaths = [death(place, rank, nth=1 if rank else 3) for rank in range(setup.world_size)]
    assert decisions(check(campaigns, setup, deaths)) == [ELSEWHERE] * len(deaths)
