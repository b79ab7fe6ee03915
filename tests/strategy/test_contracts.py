"""What Lightning promises of checkpoints holds under MoEStrategy, with experts shared by three ranks.

The same contracts as in Lightning's own tests of checkpoints, plugins and restoring, each run in three processes.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from launcher import WorldFailed, run_world
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_moe_ckpt.moe import MoELayer
from lightning_moe_ckpt.strategy import MoEStrategy

D, E, RANKS = 6, 6, 3
Result = TypeVar("Result")

pytestmark = [
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:.*ckpt_path=.*is already.*"),
]


class Model(LightningModule):
    """A dense layer and experts; every stage logs or returns the same figure of its batch.

    Args:
        lr: of the optimizer.
        num_experts: over all ranks.
        extra: whether there is a layer that checkpoints of others do not have.
    """

    def __init__(self, lr: float = 1e-2, num_experts: int = E, extra: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr, self.num_experts = lr, num_experts
        self.dense = nn.Linear(D, D)
        self.extra = nn.Linear(D, D) if extra else None
        self.moe: MoELayer | None = None
        self.seen: dict[str, Any] = {}

    def configure_model(self) -> None:
        if self.moe is None:
            self.moe = MoELayer(D, 4, self.num_experts)

    def forward(self, x: Tensor) -> Tensor:
        assert self.moe is not None
        out: Tensor = self.moe(self.dense(x))
        return out

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0]).pow(2).mean()  # type: ignore[no-any-return]

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("figure", self(batch[0]).pow(2).mean(), sync_dist=True)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("tested", self(batch[0]).pow(2).mean(), sync_dist=True)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), self.lr)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = self.global_step

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen["mine"] = checkpoint["mine"]


class Counting(Callback):
    """Has a state, which a checkpoint brings back."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_end(self, *args: object) -> None:
        self.batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches = state_dict["batches"]


def loader() -> DataLoader[Any]:
    x = torch.randn(8 * RANKS, D, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x), batch_size=2)


def trainer(*callbacks: Callback, epochs: int = 2, **options: Any) -> Trainer:
    """Four steps an epoch on each rank."""
    return Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=MoEStrategy(expert_parallel=RANKS),
        max_epochs=epochs,
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        **options,
    )


def on_ranks(work: Callable[[int], Result]) -> list[Result]:
    """Results of every rank; an assertion that fails on one fails the test, with its traceback."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    def seeded(rank: int) -> Result:
        os.environ.pop("PL_GLOBAL_SEED", None)
        warnings.filterwarnings("ignore", category=PossibleUserWarning)  # Lightning's advice about this tiny run
        seed_everything(1, verbose=False)
        return work(rank)

    return run_world(RANKS, seeded, timeout=timedelta(seconds=120), process_group=False)


def parameters(module: LightningModule) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def optimizer_state(of: Trainer) -> dict[str, Tensor]:
    """Of this rank, flat."""
    states = of.optimizers[0].state_dict()["state"].items()
    return {f"{index}/{key}": value.clone() for index, state in states for key, value in state.items()}


def test_everything_a_checkpoint_holds_comes_back(tmp_path: Path) -> None:
    """Weights, moments, rates, scheduler, loops, callbacks and the module's own; then both runs go the same way."""
    path = str(tmp_path / "mid.ckpt")

    def work(rank: int) -> None:
        straight, model, counting = trainer(Counting()), Model(), Counting()
        straight.fit(model, loader())
        seed_everything(1, verbose=False)
        first, half = trainer(counting, epochs=1), Model()
        first.fit(half, loader())
        first.save_checkpoint(path)
        told: dict[str, Any] = {}

        class Look(Callback):
            def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
                told["same weights"] = same(parameters(pl_module), parameters(half))
                told["same moments"] = same(optimizer_state(trainer), optimizer_state(first))
                told["lr"] = trainer.optimizers[0].param_groups[0]["lr"]
                told["scheduler"] = trainer.lr_scheduler_configs[0].scheduler.state_dict()["last_epoch"]
                told["place"] = trainer.current_epoch, trainer.global_step

        torch.manual_seed(2)  # nothing is right by chance; the seed that Lightning gives its sampler stays
        theirs = Counting()
        again, resumed = trainer(Look(), theirs), Model(lr=1.0)
        again.fit(resumed, loader(), ckpt_path=path)
        assert told == {"same weights": True, "same moments": True, "lr": 0.005, "scheduler": 1, "place": (1, 4)}
        assert resumed.seen == {"mine": 4}
        assert theirs.batches == 8
        assert same(parameters(resumed), parameters(model))
        assert same(optimizer_state(again), optimizer_state(straight))

    on_ranks(work)


def test_weights_only_files_hold_whole_weights_and_nothing_else(tmp_path: Path) -> None:
    """They serve to evaluate; to train on from one is an error that says what is missing."""

    def work(rank: int) -> None:
        model = Model()
        saver = ModelCheckpoint(tmp_path, filename="weights", save_weights_only=True)
        trainer(saver, epochs=1).fit(model, loader())
        checkpoint = torch.load(tmp_path / "weights.ckpt", weights_only=True)
        assert not {"optimizer_states", "lr_schedulers", "callbacks"} & checkpoint.keys()
        assert checkpoint["state_dict"]["moe.w1"].shape[0] == E
        other = Model()
        trainer().validate(other, loader(), ckpt_path=str(tmp_path / "weights.ckpt"), verbose=False)
        assert same(parameters(other), parameters(model))
        with pytest.raises(KeyError, match="contains only the model"):
            trainer().fit(Model(), loader(), ckpt_path=str(tmp_path / "weights.ckpt"))

    on_ranks(work)


@pytest.mark.parametrize("weights_only", [True, False])
def test_a_whole_checkpoint_is_read_without_pickled_code(tmp_path: Path, weights_only: bool) -> None:
    """`weights_only=True` is torch's safe reader; what the strategy adds passes it."""
    path = str(tmp_path / "whole.ckpt")

    def work(rank: int) -> None:
        first, model = trainer(epochs=1), Model()
        first.fit(model, loader())
        first.save_checkpoint(path)
        again, resumed = trainer(epochs=1), Model()
        again.fit(resumed, loader(), ckpt_path=path, weights_only=weights_only)  # nothing left to train
        assert same(parameters(resumed), parameters(model))
        assert again.global_step == 4

    on_ranks(work)
    assert {"state_dict", "optimizer_states", "loops"} <= torch.load(path, weights_only=True).keys()


@pytest.mark.parametrize("which", ["best", "last"])
def test_evaluation_takes_the_checkpoint_it_is_told(tmp_path: Path, which: str) -> None:
    """`validate`, `test` and `predict` give what the model gave when that file was saved."""

    def work(rank: int) -> None:
        saver = ModelCheckpoint(tmp_path, monitor="figure", mode="max", save_top_k=1, save_last=True)
        run, model = trainer(saver, epochs=3), Model()
        run.fit(model, loader(), loader())
        wanted = saver.best_model_path if which == "best" else saver.last_model_path
        state = torch.load(wanted, weights_only=True)["state_dict"]
        (validated,) = run.validate(model, loader(), ckpt_path=which, verbose=False)
        now = parameters(model)
        own = slice(2 * rank, 2 * rank + 2)
        for name, value in state.items():
            part = value[own] if name.startswith("moe.") and name.split(".")[1] in {"w1", "b1", "w2", "b2"} else value
            assert torch.equal(now[name], part), name
        if which == "best":
            assert validated["figure"] == pytest.approx(float(saver.best_model_score or 0.0), rel=1e-6)
        (tested,) = run.test(model, loader(), ckpt_path=which, verbose=False)
        assert tested["tested"] == pytest.approx(validated["figure"], rel=1e-6)
        predicted = run.predict(model, loader(), ckpt_path=which)
        assert predicted is not None
        mean = torch.stack([each.pow(2).mean() for each in predicted]).mean()  # type: ignore[union-attr]
        torch.distributed.all_reduce(mean)
        assert float(mean) / RANKS == pytest.approx(tested["tested"], rel=1e-5)

    on_ranks(work)
    assert len({path.read_bytes() for path in tmp_path.glob("*.ckpt")}) == 2, "the best is not the last"


def test_hyperparameters_rebuild_the_module_on_any_number_of_processes(tmp_path: Path) -> None:
    """`load_from_checkpoint` in one plain process: all experts, and the arguments of the run."""
    path = tmp_path / "run.ckpt"

    def work(rank: int) -> dict[str, Tensor]:
        run, model = trainer(epochs=1), Model(lr=0.003, num_experts=9)
        run.fit(model, loader())
        run.save_checkpoint(path)
        return parameters(model)

    ranks = on_ranks(work)
    model = Model.load_from_checkpoint(path, map_location="cpu", weights_only=True)
    assert (model.hparams["lr"], model.num_experts, model.hparams["extra"]) == (0.003, 9, False)
    assert torch.equal(model.moe.w1, torch.cat([rank["moe.w1"] for rank in ranks]))  # type: ignore[union-attr]
    assert torch.equal(model.dense.weight, ranks[0]["dense.weight"])
    assert Model.load_from_checkpoint(path, lr=0.5, weights_only=True).lr == 0.5


def test_loading_is_strict_unless_the_module_says_otherwise(tmp_path: Path) -> None:
    """A missing layer is an error that names it; with `strict_loading = False` it keeps what it had."""
    path = str(tmp_path / "less.ckpt")

    def save(rank: int) -> None:
        run = trainer(epochs=1)
        run.fit(Model(), loader())
        run.save_checkpoint(path)

    def load(rank: int, *, strict: bool) -> None:
        model = Model(extra=True)
        model.strict_loading = strict
        assert model.extra is not None
        before = model.extra.weight.clone()
        trainer().validate(model, loader(), ckpt_path=path, verbose=False)
        assert torch.equal(model.extra.weight, before)
        assert torch.equal(model.dense.weight, torch.load(path, weights_only=True)["state_dict"]["dense.weight"])

    on_ranks(save)
    with pytest.raises(WorldFailed, match="extra"):
        on_ranks(lambda rank: load(rank, strict=True))
    on_ranks(lambda rank: load(rank, strict=False))


class Noting(TorchCheckpointIO):
    """A user's plugin: notes who calls it with what."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, Any]] = []

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        experts = checkpoint["state_dict"]["moe.w1"].shape[0]
        self.calls.append(("save", Path(path).name, (experts, storage_options)))
        super().save_checkpoint(checkpoint, path)

    @override
    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        self.calls.append(("load", Path(path).name, weights_only))
        return super().load_checkpoint(path, map_location=map_location, weights_only=weights_only)

    @override
    def remove_checkpoint(self, path: Any) -> None:
        self.calls.append(("remove", Path(path).name, None))
        super().remove_checkpoint(path)


def test_a_plugin_for_files_gets_every_call(tmp_path: Path) -> None:
    """Saving and removing on rank 0 only, whole state dicts, and loading on every rank; options pass through."""

    def work(rank: int) -> list[tuple[str, str, Any]]:
        plugin = Noting()
        saver = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=1, monitor="epoch", mode="max")
        run, model = trainer(saver, plugins=[plugin]), Model()

        class Epoch(Callback):
            def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
                pl_module.log("epoch", float(trainer.current_epoch), sync_dist=False)

        run.callbacks.insert(0, Epoch())  # type: ignore[attr-defined]
        run.fit(model, loader())
        run.save_checkpoint(tmp_path / "mine.ckpt", storage_options={"to": "somewhere"})
        run.validate(model, loader(), ckpt_path=str(tmp_path / "mine.ckpt"), verbose=False)
        return plugin.calls

    first, *others = on_ranks(work)
    saved = [("save", "epoch=0.ckpt", (E, None)), ("save", "epoch=1.ckpt", (E, None)), ("remove", "epoch=0.ckpt", None)]
    assert first == [*saved, ("save", "mine.ckpt", (E, {"to": "somewhere"})), ("load", "mine.ckpt", None)]
    assert others == [[("load", "mine.ckpt", None)]] * 2


def test_an_asynchronous_plugin_writes_what_was_there_when_it_was_told(tmp_path: Path) -> None:
    """Training goes on while the file is written; the file is that of its step, and whole when `fit` returns."""

    def work(rank: int) -> list[dict[str, Tensor]]:
        then: list[dict[str, Tensor]] = []

        class Save(Callback):
            def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
                trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")
                then.append(parameters(pl_module))

        trainer(Save(), epochs=1, plugins=[AsyncCheckpointIO()]).fit(Model(), loader())
        return then

    ranks = on_ranks(work)
    for step in range(1, 5):
        state = torch.load(tmp_path / f"{step}.ckpt", weights_only=True)["state_dict"]
        assert torch.equal(state["moe.w2"], torch.cat([rank[step - 1]["moe.w2"] for rank in ranks]))
        assert torch.equal(state["dense.weight"], ranks[0][step - 1]["dense.weight"])
