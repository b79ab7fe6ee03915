"""`moe-ckpt export --format dcp`: Lightning loads the folder as one of its own, and memory holds a tensor at a time."""

from __future__ import annotations

import os
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from launcher import run_world
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader

from inspection._runs import FEATURES
from inspection.test_boxes import same
from inspection.test_shards import Sharded, trained, whole
from lightning_moe_ckpt.callbacks import DenseCheckpoint
from lightning_moe_ckpt.cli import main

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")

State = dict[str, Tensor]


class Look(Callback):
    """Takes weights and optimizer state, gathered, when training begins."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.step = trainer.global_step
        named, state = dict(pl_module.named_parameters()), trainer.optimizers[0].state
        self.optimizer = {f"{name}/{key}": whole(each) for name in named for key, each in state[named[name]].items()}
        self.weights = {name: whole(each) for name, each in [*named.items(), *pl_module.named_buffers()]}


def loaded(path: Path, size: int) -> tuple[int, State, State]:
    """What `fit` of Lightning begins with from a folder, without this package. Collective."""
    os.environ.pop("PL_GLOBAL_SEED", None)
    look, strategy = Look(), ModelParallelStrategy(data_parallel_size=size, tensor_parallel_size=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = tiny.quiet_trainer(look, max_steps=4, devices=size, strategy=strategy, enable_checkpointing=False)
        trainer.fit(Sharded(), tiny.rows(tiny.waves(24, FEATURES), 2), ckpt_path=path)
    return look.step, look.weights, look.optimizer


@pytest.fixture(scope="module")
def run_in_shards(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, State, State, Path]:
    """URL of a run of three ranks at step 3, its weights and optimizer, and the folder that Lightning wrote of it."""
    folder = tmp_path_factory.mktemp("shards")
    url, own = str(folder / "run"), folder / "lightning"

    class Save(Callback):
        def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            trainer.save_checkpoint(own)

    def work(_: int) -> Any:
        return trained(DenseCheckpoint(url, every_n_steps=2), (3, 1), 3, Save())

    weights, optimizer = run_world(3, work, timeout=timedelta(seconds=90), process_group=False)[0]
    return url, weights, optimizer, own


@pytest.mark.parametrize("size", [1, 3])
def test_lightning_goes_on_from_the_folder(
    run_in_shards: tuple[str, State, State, Path], tmp_path: Path, size: int
) -> None:
    """Step, weights and optimizer have the bits of the run, in one process and in three."""
    url, weights, optimizer, _ = run_in_shards
    assert main(["export", url, str(tmp_path / "dcp"), "--format", "dcp"]) == 0
    for found in run_world(
        size, lambda _: loaded(tmp_path / "dcp", size), timeout=timedelta(seconds=90), process_group=False
    ):
        assert found[0] == 3
        assert same(found[1], weights)
        assert same(found[2], optimizer)


def test_the_folder_has_the_keys_of_one_of_lightning(
    run_in_shards: tuple[str, State, State, Path], tmp_path: Path
) -> None:
    """Tensors, parameter groups and the rest."""
    url, *_, own = run_in_shards
    assert main(["export", url, str(tmp_path / "dcp"), "--format", "dcp"]) == 0
    ours, theirs = (FileSystemReader(path).read_metadata().state_dict_metadata for path in (tmp_path / "dcp", own))
    assert set(ours) == set(theirs)
    ours, theirs = (torch.load(path / "meta.pt", weights_only=True) for path in (tmp_path / "dcp", own))
    assert ours.keys() == theirs.keys()
    assert (ours["global_step"], ours["lr_schedulers"]) == (theirs["global_step"], theirs["lr_schedulers"])
