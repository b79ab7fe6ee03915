"""Runs to look at, each written once by a real fit."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest
from launcher import run_world
from lightning.pytorch import seed_everything
from torch import Tensor

from inspection._partial import add_referring
from inspection._runs import SGD, Small, SmallMoE, train
from lightning_moe_ckpt.callbacks import DenseCheckpoint, SparseCheckpoint
from lightning_moe_ckpt.strategy import MoEStrategy


@pytest.fixture(scope="session")
def dense_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Small]:
    """URL of a dense run with generations 4 and 6, and the model as it was at the end."""
    url, module = str(tmp_path_factory.mktemp("dense") / "run"), Small()
    train(module, DenseCheckpoint(url, every_n_steps=2), steps=6)
    return url, module


@pytest.fixture(scope="session")
def sparse_run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """URL of a run with windows that end at 4 and 6, and a dense generation 7 where it ended."""
    url = str(tmp_path_factory.mktemp("sparse") / "run")
    train(Small(), SparseCheckpoint(url, window=2, keep=3), steps=7)
    return url


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run with one generation and little in it, for tests that damage every byte."""
    root = tmp_path_factory.mktemp("tiny") / "run"
    train(Small(SGD), DenseCheckpoint(str(root), keep=1), steps=2)
    return root


@pytest.fixture(scope="session")
def tiny_partial_run(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the same run with a generation 5, which has half of generation 2 and references the other half from it."""
    target = tmp_path_factory.mktemp("tiny-partial") / "run"
    return Path(add_referring(str(tiny_run), target, ["net.1"], older=2, newer=2))


@pytest.fixture(scope="session")
def sharded_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Tensor], dict[str, Tensor]]:
    """URL of a run of two ranks with two experts each, and what Lightning would save: weights, and `exp_avg` by name."""
    url = str(tmp_path_factory.mktemp("sharded") / "run")

    def work(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        os.environ.pop("PL_GLOBAL_SEED", None)
        seed_everything(1, verbose=False)
        module = SmallMoE()
        strategy = MoEStrategy(expert_parallel=2)
        trainer = train(module, DenseCheckpoint(url, every_n_steps=2), steps=4, devices=2, strategy=strategy)
        names = [name for name, _ in module.named_parameters()]
        states = strategy.optimizer_state(trainer.optimizers[0])["state"]
        averages = {name: states[i]["exp_avg"] for i, name in enumerate(names) if i in states}
        return dict(strategy.lightning_module_state_dict()), averages

    weights, averages = run_world(2, work, timeout=timedelta(seconds=90), process_group=False)[0]
    return url, weights, averages


@pytest.fixture(scope="session")
def partial_run(
    sharded_run: tuple[str, dict[str, Tensor], dict[str, Tensor]], tmp_path_factory: pytest.TempPathFactory
) -> str:
    """URL of the same run with a generation 5: that of step 4, but experts 1 and 2 (one of each rank) as of step 2."""
    target = tmp_path_factory.mktemp("partial") / "run"
    return add_referring(sharded_run[0], target, ["moe/expert.1", "moe/expert.2"], older=2, newer=4)
