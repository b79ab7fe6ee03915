"""Metrics of torchmetrics that one stage updates have the value on all ranks that they would have in one piece."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from launcher import WorldFailed
from torch import Tensor, nn
from torchmetrics import CatMetric, MeanMetric, Metric, MetricCollection, MinMaxMetric, SumMetric
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC, BinaryPrecision, BinaryRecall
from typing_extensions import override

from strategy._staged import Staged, train

STAGES: dict[str, Any] = {"pipeline_parallel": 2, "micro_batches": 2}


class Measuring(Staged):
    """Has metrics with states of every kind, which it logs or asks for in hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.area, self.accuracy, self.validated = BinaryAUROC(), BinaryAccuracy(), BinaryAUROC()
        self.synced = MeanMetric(dist_sync_on_step=True)
        self.several = MetricCollection([BinaryPrecision(), BinaryRecall(), BinaryAccuracy()], prefix="several_")
        self.losses, self.most, self.everywhere = CatMetric(), MinMaxMetric(SumMetric()), SumMetric()
        self.never, self.first = SumMetric(), BinaryAUROC()
        self.steps: list[Tensor] = []
        self.given: dict[bool, list[tuple[Tensor, Tensor, Tensor]]] = {True: [], False: []}
        self.found: dict[str, Any] = {}

    @override
    def stage_loss(self, output: Tensor, target: Tensor) -> Tensor:
        loss = super().stage_loss(output, target)
        score, label = output[:, 0].detach().sigmoid(), (target > 0).long()
        self.given[self.training].append((loss.detach(), score, label))
        if not self.training:
            self.validated.update(score, label)
            self.log("validated", self.validated)
            return loss
        self.accuracy(score, label)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.area.update(score, label)
        self.log("area", self.area, False, False, False, True)
        self.several.update(score, label)
        self.log_dict(self.several, on_step=False, on_epoch=True)
        self.steps.append(self.synced(loss.detach()))
        self.losses.update(loss.detach())
        self.most.update(loss.detach())
        return loss

    @override
    def stage_auxiliary_loss(self) -> Tensor | None:
        if self.training and self.stage.inp is not None:
            self.first.update(torch.tensor([0.2, 0.8]), torch.tensor([0, 1]))
            self.log("first", self.first, on_step=False, on_epoch=True)
        return super().stage_auxiliary_loss()

    @override
    def on_train_batch_end(self, *args: Any) -> None:
        self.everywhere.update(args[0]["loss"])
        assert self.trainer.callback_metrics["accuracy_step"].numel() == 1

    @override
    def on_train_epoch_end(self) -> None:
        for name in ("losses", "most", "everywhere", "never"):
            found = getattr(self, name).compute()
            self.found[name] = found["raw"] if isinstance(found, dict) else found

    @override
    def on_validation_epoch_end(self) -> None:
        self.found["in_hook"] = self.validated.compute()


def measured(trainer: pl.Trainer) -> Any:
    module: Any = trainer.lightning_module
    assert not any(hasattr(each.compute, "own") for each in module.modules() if isinstance(each, Metric))
    return module.given, module.steps, {**module.found, **trainer.callback_metrics}


def value(metric: Metric, rows: list[Any]) -> Any:
    """What one process would have found."""
    for row in rows:
        metric.update(*row)
    return metric.compute()


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric SumMetric")
@pytest.mark.parametrize("replicas", [2, pytest.param(1, marks=pytest.mark.soak)])
def test_all_ranks_see_what_one_stage_measures(replicas: int) -> None:
    """Sums, lists, collections, metrics of metrics; logged, asked for in hooks, and synchronised in every step."""
    found = train(2 * replicas, model=Measuring, strategy=STAGES, after=measured, limit_val_batches=2)
    ranks = [each.value for each in found]
    given, steps = [rank[0] for rank in ranks[replicas:]], [torch.stack(rank[1]) for rank in ranks[replicas:]]
    trained, checked = ([row for generation in given for row in generation[phase]] for phase in (True, False))
    scored, losses = [row[1:] for row in trained], [row[:1] for row in trained]
    validated = value(BinaryAUROC(), [row[1:] for row in checked])
    wanted = {
        "area": value(BinaryAUROC(), scored),
        "accuracy_epoch": value(BinaryAccuracy(), scored),
        "validated": validated,
        "in_hook": validated,
        "several_BinaryPrecision": value(BinaryPrecision(), scored),
        "several_BinaryRecall": value(BinaryRecall(), scored),
        "losses": value(CatMetric(), losses),
        "most": value(SumMetric(), losses),
        "everywhere": sum(torch.stack(each.losses).sum() for each in found[:replicas]),
        "never": torch.tensor(0.0),
        "first": torch.tensor(1.0),
    }
    for _, _, seen in ranks:
        torch.testing.assert_close({name: seen[name] for name in wanted}, wanted)
        assert all(torch.equal(seen[name], ranks[0][2][name]) for name in wanted)
    means = torch.stack([torch.stack([row[0] for row in generation[True]]) for generation in given]).mean(0)
    for replica, of_steps in enumerate(steps):
        torch.testing.assert_close(of_steps, means)
        assert torch.equal(of_steps, steps[0])
        assert torch.equal(ranks[replica][2]["accuracy_step"], ranks[replicas + replica][2]["accuracy_step"])


class OfStage(nn.Module):
    """A stage with a metric of its own."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.blocks, self.own = stage, MeanMetric()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.blocks(x)
        self.own.update(y.detach().mean())
        return y


class Alone(Staged):
    """Logs a metric that other stages do not have."""

    @override
    def configure_stage(self, stage: int, num_stages: int) -> nn.Module:
        return OfStage(super().configure_stage(stage, num_stages))

    @override
    def stage_loss(self, output: Tensor, target: Tensor) -> Tensor:
        self.log("own", self.stage.own)  # type: ignore[arg-type]
        return super().stage_loss(output, target)


def test_a_metric_that_other_stages_do_not_have_is_refused() -> None:
    """With what to do."""
    with pytest.raises(WorldFailed, match=r"MeanMetric that is part of a pipeline stage.*Make it an attribute in"):
        train(2, model=Alone, strategy=STAGES)
