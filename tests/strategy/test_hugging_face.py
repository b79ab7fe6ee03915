"""Hugging Face models under `MoEStrategy(expert_parallel=...)`, in a script that knows nothing of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from launcher import WorldFailed, run_world
from lightning.pytorch.callbacks import WeightAveraging
from operators._families import COMMON, balanced, mixtral
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_moe_ckpt.parallel import expert_parallel_fqns
from lightning_moe_ckpt.strategy import MoEStrategy
from strategy._staged import QUIET

E = 6


class LitMixtral(pl.LightningModule):
    """A Mixtral with its balancing loss.

    Args:
        late: whether it is built in `configure_model` and not in `__init__`.
        make: builds the model.
    """

    def __init__(self, *, late: bool = False, make: Callable[[], nn.Module] = lambda: balanced("mixtral", E)) -> None:
        super().__init__()
        self.make = make
        self.model: Any = None if late else self.whole()

    def whole(self) -> nn.Module:
        torch.manual_seed(5)
        return self.make()

    def configure_model(self) -> None:
        if self.model is None:
            self.model = self.whole()

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch[0], labels=batch[0]).loss
        return loss

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        self.log("val", self.model(input_ids=batch[0], labels=batch[0]).loss, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)

    def train_dataloader(self) -> DataLoader[Any]:
        tokens = torch.randint(1, COMMON["vocab_size"], (24, 7), generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(tokens), batch_size=2)

    val_dataloader = train_dataloader


class Trained(NamedTuple):
    """What one rank holds at the end."""

    parameters: dict[str, Tensor]
    sharded: set[str]
    norm: Tensor | None
    value: Any


def trained(
    world_size: int,
    ep_size: int,
    *,
    before: Callable[[pl.Trainer, LitMixtral], Any] = lambda *_: None,
    after: Callable[[pl.Trainer, LitMixtral], Any] = lambda *_: None,
    callbacks: Callable[[], list[pl.Callback]] = list,
    ckpt_path: str | None = None,
    module: dict[str, Any] | None = None,
    **options: Any,
) -> list[Trained]:
    """Four optimizer steps on every rank."""

    def work(_: int) -> Trained:
        os.environ.pop("PL_GLOBAL_SEED", None)
        pl.seed_everything(1, verbose=False)
        strategy = MoEStrategy(expert_parallel=ep_size)
        fresh = {"accelerator": "cpu", "devices": world_size, "strategy": strategy, "callbacks": callbacks()}
        short = {
            "limit_val_batches": 1,
            "num_sanity_val_steps": 0,
            "max_epochs": -1,
            "max_steps": 4,
            "gradient_clip_val": 0.5,
        }
        trainer = pl.Trainer(**{**QUIET, **fresh, **short, **options})
        made = LitMixtral(**(module or {}))
        before(trainer, made)
        trainer.fit(made, ckpt_path=ckpt_path)
        value = after(trainer, made)
        parameters = {name: p.detach() for name, p in made.named_parameters()}
        return Trained(parameters, expert_parallel_fqns(made), strategy.last_grad_norm, value)

    return run_world(world_size, work, timeout=timedelta(seconds=90), process_group=False)


def whole(ranks: list[Trained], ep_size: int) -> dict[str, Tensor]:
    """Parameters of the whole model, from the first expert-parallel group."""
    return {
        name: torch.cat([rank.parameters[name] for rank in ranks[:ep_size]]) if name in ranks[0].sharded else parameter
        for name, parameter in ranks[0].parameters.items()
    }


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-3, atol=2e-4, msg=name)


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], value) for name, value in want.items())


def validate(trainer: pl.Trainer, module: LitMixtral) -> float:
    (found,) = trainer.validate(module, verbose=False)
    return found["val"]


@pytest.mark.filterwarnings("ignore:Using `DistributedSampler` with the dataloaders")
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_a_spread_model_trains_like_a_whole_one(tmp_path: Path) -> None:
    """On three ranks: in `__init__` or in `configure_model` with the same bits, a validation before changes none, and a checkpoint of
    Lightning has all experts: one rank goes on from it, and three from that of one.
    """
    file, file_of_one = str(tmp_path / "three.ckpt"), str(tmp_path / "one.ckpt")
    spread = trained(3, 3, after=lambda trainer, _: trainer.save_checkpoint(file))
    assert {name.rpartition(".")[2] for name in spread[0].sharded} == {"gate_up_proj", "down_proj"}
    assert len(spread[0].parameters["model.model.layers.0.mlp.experts.down_proj"]) == E // 3

    for late, before in ((True, lambda *_: None), (False, validate)):
        again = trained(3, 3, module={"late": late}, before=before)
        for rank, first in zip(again, spread, strict=True):
            assert_same(rank.parameters, first.parameters)

    replicated = trained(3, 1, before=validate)
    assert_close(whole(spread, 3), whole(replicated, 1))
    torch.testing.assert_close(spread[0].norm, replicated[0].norm)

    stored = torch.load(file, weights_only=True)
    assert_same(stored["state_dict"], whole(spread, 3))
    one = trained(1, 1, ckpt_path=file, max_steps=6, after=lambda trainer, _: trainer.save_checkpoint(file_of_one))
    back = trained(3, 3, ckpt_path=file_of_one, max_steps=6)  # takes no further step
    assert_same(whole(back, 3), whole(one, 1))


class EveryStep(WeightAveraging):
    """The plain mean over all steps."""


@pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback")
def test_averages_of_spread_experts_are_spread() -> None:
    """Lightning copies the module before the strategy sees it; two groups of two, in bf16, with accumulation."""

    def average(trainer: pl.Trainer, _: LitMixtral) -> dict[str, Tensor]:
        (callback,) = (each for each in trainer.callbacks if isinstance(each, EveryStep))  # type: ignore[attr-defined]
        assert callback._average_model is not None
        return {name: p.detach() for name, p in callback._average_model.module.named_parameters()}

    options: dict[str, Any] = {"precision": "bf16-mixed", "accumulate_grad_batches": 2, "max_steps": 2}
    found = trained(4, 2, callbacks=lambda: [EveryStep()], after=average, **options)
    wanted = trained(4, 1, callbacks=lambda: [EveryStep()], after=average, **options)
    for rank, result in enumerate(found):
        assert_same(result.value, found[rank % 2].value)
    averages = [result._replace(parameters=result.value) for result in found]
    for name, value in whole(averages, 2).items():
        torch.testing.assert_close(value, wanted[0].value[name], rtol=0.05, atol=0.02, msg=name)


def test_experts_that_the_ranks_do_not_divide_are_refused() -> None:
    """By the name of the module."""
    with pytest.raises(WorldFailed, match=r"`model.model.layers.0.mlp.experts` \(MixtralExperts\) has 4 experts"):
        trained(3, 3, module={"make": mixtral})


def test_a_model_without_experts_that_can_be_spread_is_refused() -> None:
    """With the names of all that can."""
    with pytest.raises(WorldFailed, match=r"would have no effect: found no expert .* Take a Hugging Face model"):
        trained(3, 3, module={"make": lambda: nn.Linear(2, 2)})
