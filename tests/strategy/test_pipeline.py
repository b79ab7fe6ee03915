"""Training in pipeline stages gives what training in one piece gives, and says no where it could not."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from launcher import WorldFailed
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_moe_ckpt.callbacks import ExpertLoadMonitor
from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.fit import supervisor
from lightning_moe_ckpt.strategy import MoEStrategy
from strategy._staged import BATCH, Staged, train

CLIP: dict[str, Any] = {"gradient_clip_val": 0.05}


def whole(ranks: list[Any], stages: int, ep_size: int = 1) -> dict[str, Tensor]:
    """Parameters of the whole model, from the first replica of every stage."""
    size = len(ranks) // stages
    found: dict[str, Tensor] = {}
    for stage in range(stages):
        row = ranks[stage * size : stage * size + ep_size]
        for name, parameter in row[0].parameters.items():
            shared = name.rpartition(".")[2] in {"w1", "b1", "w2", "b2"} and ep_size > 1
            found[name] = torch.cat([rank.parameters[name] for rank in row]) if shared else parameter
    return found


@pytest.mark.parametrize(
    ("world_size", "stages", "ep_size", "schedule"),
    [(3, 3, 1, "gpipe"), (4, 2, 2, "1f1b"), pytest.param(2, 2, 1, "1f1b", marks=pytest.mark.soak)],
)
def test_stages_change_nothing_but_rounding(world_size: int, stages: int, ep_size: int, schedule: str) -> None:
    """Parameters, losses, metrics and norms are those of the whole model; every gate gets gradients on every stage.

    Micro-batches are batches there, over which gradients accumulate: a balancing loss is not linear in its batch.
    """
    replicas = world_size // stages
    options = {"pipeline_parallel": stages, "expert_parallel": ep_size, "micro_batches": 2, "schedule": schedule}
    found = train(world_size, strategy=options, limit_val_batches=2, **CLIP)
    single: dict[str, Any] = {"strategy": {"expert_parallel": ep_size}, "model": lambda: Staged(batch_size=BATCH // 2)}
    wanted = train(replicas, **single, accumulate_grad_batches=2, limit_val_batches=4, **CLIP)
    one_piece = whole(wanted, 1, ep_size)
    cut = whole(found, stages, ep_size)
    assert cut.keys() == one_piece.keys()
    for name, parameter in cut.items():
        torch.testing.assert_close(parameter, one_piece[name], rtol=1e-4, atol=1e-5)
    for position, rank in enumerate(found):
        same = wanted[position % replicas]
        pairs = [2 * torch.stack(same.losses).view(-1, 2).mean(1), torch.stack(same.logged).view(-1, 2).mean(1)]
        torch.testing.assert_close([torch.stack(rank.losses), torch.stack(rank.logged)], pairs, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(rank.norm, same.norm, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(rank.val, same.val, rtol=1e-4, atol=1e-5)
        assert all(rank.gates)
        first = found[position % replicas]
        assert all(map(torch.equal, rank.losses, first.losses))
        assert all(map(torch.equal, rank.logged, first.logged))
        assert rank.norm is not None
        assert first.norm is not None
        assert torch.equal(rank.norm, first.norm)


STAGES: dict[str, Any] = {"pipeline_parallel": 2, "micro_batches": 2}


@pytest.mark.parametrize(
    ("precision", "plugins"),
    [
        ("bf16-mixed", None),
        pytest.param("bf16-true", None, marks=pytest.mark.soak),
        (None, "16-mixed"),
    ],
    ids=["bf16-mixed", "bf16-true", "16-mixed"],
)
def test_losses_are_scaled_where_they_are_computed(precision: str | None, plugins: Any) -> None:
    """In low precision stages train as one piece does; with a scaler every stage unscales by the same factor."""
    more: dict[str, Any] = {**CLIP, "precision": precision} if precision else dict(CLIP)
    if plugins is not None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        more["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler=scaler)]
    steps = 2 if precision == "bf16-true" else 12  # a third rounding of all weights sends a token to another expert
    found = train(2, strategy=STAGES, limit_train_batches=steps, **more)
    more |= {"accumulate_grad_batches": 2, "limit_train_batches": 2 * steps}
    wanted = train(1, model=lambda: Staged(batch_size=BATCH // 2), **more)
    for name, parameter in whole(found, 2).items():
        torch.testing.assert_close(parameter, wanted[0].parameters[name], rtol=0.05, atol=0.02)


def test_a_checkpoint_of_lightning_has_the_whole_model_and_the_optimizer_of_every_stage(tmp_path: Path) -> None:
    """Saved in stages, it is resumed in stages to the same bits, and its weights load into the whole model."""
    path = tmp_path / "whole.ckpt"

    def save(trainer: pl.Trainer) -> None:
        trainer.save_checkpoint(path)

    train(2, model=lambda: Staged(norm=True), strategy=STAGES, after=save)
    resumed = train(2, model=lambda: Staged(norm=True), strategy=STAGES, max_epochs=2, ckpt_path=str(path))
    straight = train(2, model=lambda: Staged(norm=True), strategy=STAGES, max_epochs=2)
    for rank, same in zip(resumed, straight, strict=True):
        assert rank.parameters.keys() == same.parameters.keys()
        assert all(torch.equal(parameter, same.parameters[name]) for name, parameter in rank.parameters.items())
    model = Staged(norm=True)
    model.configure_model()
    model.load_state_dict(torch.load(path)["state_dict"])
    with pytest.raises(WorldFailed, match="optimizer state of 2 pipeline stages, and this run has 1"):
        train(1, model=lambda: Staged(norm=True), max_epochs=2, ckpt_path=str(path))


@pytest.mark.filterwarnings("ignore:Using `DistributedSampler` with the dataloaders")
def test_loads_of_all_stages_are_logged() -> None:
    """Each layer's tokens add up to those that passed, though a stage counts its own only; validation alone works too."""

    def after(trainer: pl.Trainer) -> tuple[dict[str, float], float]:
        (monitor,) = (callback for callback in trainer.callbacks if isinstance(callback, ExpertLoadMonitor))  # type: ignore[attr-defined]
        row = monitor.latest
        (found,) = trainer.validate(trainer.lightning_module, verbose=False)
        return row, found["val"]

    monitor = ExpertLoadMonitor(every_n_steps=3)
    ranks = train(4, strategy=STAGES, after=after, limit_val_batches=2, callbacks=[monitor])
    row = ranks[0].value[0]
    assert [f"moe/max_share/stage.blocks.{block}.moe" in row for block in range(4)] == [True] * 4
    assert len({rank.value[1] for rank in ranks}) == 1


class Manual(Staged):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Compiled(Staged):
    def configure_stage(self, stage: int, num_stages: int) -> nn.Module:
        made = super().configure_stage(stage, num_stages)
        made._compiled_call_impl = made._call_impl  # all that `made.compile()` leaves, but for seconds of imports
        return made


class Tied(Staged):
    def configure_stage(self, stage: int, num_stages: int) -> nn.Module:
        made = super().configure_stage(stage, num_stages)
        made.shared = nn.Linear(2, 2)
        return made


class Hookless(pl.LightningModule):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class Talkative(Staged):
    def stage_auxiliary_loss(self) -> Tensor | None:
        self.log("balance", 1.0)
        return None


class Several(Staged):
    def stage_loss(self, output: Tensor, target: Tensor) -> Tensor:
        return super().stage_loss(output, target).repeat(2)


class Bare(Staged):
    """Has no step and no validation, as a module that is written for stages only."""

    training_step = pl.LightningModule.training_step  # type: ignore[assignment]
    validation_step = pl.LightningModule.validation_step  # type: ignore[assignment]
    val_dataloader = pl.LightningModule.val_dataloader


def test_a_module_without_steps_trains_without_a_warning() -> None:
    """Lightning would say that it has defined a `validation_step`, which it has not."""
    for rank, validated in zip(*(train(2, model=each, strategy=STAGES) for each in (Bare, Staged)), strict=True):
        assert all(torch.equal(parameter, validated.parameters[name]) for name, parameter in rank.parameters.items())


class Ragged(Staged):
    def train_dataloader(self) -> DataLoader[Any]:
        x = torch.randn(6, 6)
        return DataLoader(TensorDataset(x, x.sum(1)), batch_size=4)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (Manual, {}, "needs automatic optimization"),
        (Compiled, {}, "torch.compile over a pipeline stage"),
        (Tied, {}, r"`stage.shared.weight` and 1 more: stages \[0, 1\]"),
        (Hookless, {}, r"Hookless.configure_stage`, which it does not have"),
        (Talkative, {}, "Stages 0 and 1 both log `balance`"),
        (Several, {}, r"stage_loss` returned a tensor of shape \[2\]"),
        (Ragged, {}, r"\[2, 6\] float32, batches before had \[4, 6\] float32"),
        (lambda: Staged(batch_size=3), {}, "3 samples cannot be cut into `micro_batches=2`"),
        (Staged, {"accumulate_grad_batches": 2}, "accumulated over micro-batches"),
    ],
)
def test_what_no_pipeline_can_run_is_refused_by_name(model: Any, options: dict[str, Any], message: str) -> None:
    """On every rank, and before any of them waits for another."""
    with pytest.raises(WorldFailed, match=message):
        train(2, model=model, strategy=STAGES, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "interleaved"}, r"must be one of \['1f1b', 'gpipe'\]"),
        ({"pipeline_parallel": 0}, "must be one or more"),
        ({"pipeline_parallel": 1}, "has no effect without `pipeline_parallel`"),
        ({"pipeline_parallel": 4}, "as many micro-batches as there are stages"),
        ({"pipeline_parallel": 1, "micro_batches": 1, "localized_recovery": True}, "no other stages that could stay"),
    ],
)
def test_arguments_that_make_no_pipeline_are_refused(options: dict[str, Any], message: str) -> None:
    """They name the argument and what may stand there."""
    with pytest.raises(ConfigurationError, match=message):
        MoEStrategy(**{**STAGES, **options})


def test_other_launchers_recover_no_stage_alone(caplog: pytest.LogCaptureFixture) -> None:
    """The log says so to whoever asks for it."""
    with caplog.at_level(logging.INFO):
        for asks in (False, None, True):
            strategy = MoEStrategy(**STAGES, localized_recovery=asks)
            assert supervisor(pl.Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False)) is None
    said = [record.getMessage() for record in caplog.records if "all stages recover" in record.getMessage()]
    assert len(said) == 1
    assert "only `moe-ckpt run`" in said[0]


def test_stages_divide_the_processes() -> None:
    """Both numbers are named, before any group is made."""
    with pytest.raises(WorldFailed, match="`pipeline_parallel=2` does not divide the 3 processes"):
        train(3, strategy=STAGES)
