"""Metrics of torchmetrics that a stage updates: a stage recovers alone, and they are the same in every bit."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from door import bits, digest
from lightning.pytorch import Trainer
from torch import Tensor
from torchmetrics import MeanMetric
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy
from typing_extensions import override

from campaign._campaign import Campaigns
from campaign._data import VOCABULARY
from campaign._in_place import Death
from campaign._training import Module
from campaign.test_stages_alone import (
    Counted,
    CountedModule,
    Without,
    check,
    check_alone,
    death,
    die_one_after_another,
    drawn_setup,
    said,
)
from lightning_moe_ckpt.testing import Attempt


class MeasuredModule(CountedModule):
    """Measures by sums and by lists, logs both, and trains by what it measures."""

    def __init__(self, setup: Measured, life: Attempt) -> None:
        super().__init__(setup, life)
        self.accuracy, self.validated = MulticlassAccuracy(VOCABULARY), MulticlassAccuracy(VOCABULARY)
        self.area, self.mean = BinaryAUROC(), MeanMetric()

    @override
    def stage_loss(self, output: Tensor, target: Tensor) -> Tensor:
        loss = super().stage_loss(output, target)
        logits_BV, target_B = output.detach().float().flatten(0, 1), target.flatten()
        if not self.training:
            self.validated.update(logits_BV, target_B)
            self.log("validated", self.validated)
            return loss
        self.accuracy(logits_BV, target_B)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.area.update(logits_BV[:, 0].sigmoid(), target_B % 2)
        self.mean.update(loss.detach())
        return loss * (1 + 0.1 * self.mean.compute())

    @override
    def on_validation_epoch_end(self) -> None:
        self.log("area_until_now", self.area.compute())

    @override
    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.log("area", self.area.compute())
        self.area.reset()

    @override
    def configure_optimizers(self) -> Any:
        found = super().configure_optimizers()
        found["lr_scheduler"]["monitor"] = "validated"
        return found


@dataclass(frozen=True, kw_only=True)
class Measured(Counted):
    """A run of two epochs with metrics, which a scheduler follows."""

    batches: int = 9
    epochs: int = 2
    validate_every: int | None = 4
    scheduler: Any = "plateau"

    @override
    def make_module(self, life: Attempt) -> Module:
        return MeasuredModule(self, life)

    @override
    def returned(self, life: Attempt, trainer: Trainer) -> dict[str, Any]:
        mean = trainer.lightning_module.mean
        assert isinstance(mean, MeanMetric)
        states = [torch.as_tensor(mean.update_count), *(getattr(mean, name) for name in mean._defaults)]
        logged = {name: bits(value) for name, value in sorted(trainer.callback_metrics.items())}
        return {**super().returned(life, trainer), "logged": logged, "metric": digest(states)}


TWO, FOUR = Measured(world_size=2), Measured(world_size=4)


def deaths(last: int) -> list[Death]:
    """Before a commit, at it and behind it, the second time when the stage that measures is in its second epoch."""
    return [death("after_backward", 0, nth=6), death("commit", last, nth=6), death("commit>", 0, nth=2)]


@pytest.mark.parametrize("setup", [TWO, pytest.param(FOUR, marks=pytest.mark.soak)], ids=["2x1x1", "2x2x1"])
def test_metrics_are_the_same(campaigns: Campaigns, setup: Measured) -> None:
    """Values that callbacks see on every rank, and states that go on."""
    last, size = setup.world_size - 1, setup.world_size // 2
    lives = check_alone(campaigns, setup, deaths(last))
    repeated = [
        (int(first), int(end)) for first, end in re.findall(r"goes from step (\d+) to step (\d+)", said(lives, last))
    ]
    assert repeated[0][0] < setup.batches < repeated[0][1], f"{repeated} has no end of an epoch"
    found = [lives[-1].returned(rank)["logged"] for rank in range(setup.world_size)]
    assert {"accuracy_epoch", "area", "area_until_now", "validated"} <= found[0].keys()
    assert found[:size] == found[size:], "stages see different values"


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(40))
def test_ranks_die_one_after_another(campaigns: Campaigns, seed: int) -> None:
    """However a run with metrics is spread, trained and stored."""
    draw = random.Random(f"metrics {seed}")
    drawn = drawn_setup(draw)
    setup = Measured(**{field.name: getattr(drawn, field.name) for field in fields(drawn)})
    die_one_after_another(campaigns, draw, setup)


@pytest.mark.soak
def test_without_putting_back_states_of_metrics_the_end_is_another(campaigns: Campaigns) -> None:
    """What has counted a micro-batch twice changes the loss of the next."""
    ended = [death("after_backward", 0, nth=9)]
    without = Without(TWO, ended, "lightning_moe_ckpt.fit.in_place._undo", "hold_metrics")
    with pytest.raises(AssertionError, match=r"loss|metric"):
        check(campaigns, TWO, ended, fit=without)
