"""Run a rank of a training to be killed, for `_in_place` and `_pipeline`, which start the rank by a launcher.

python -m lightning_moe_ckpt.benchmarks._killed_fit FOLDER MEMORY {lightning,torchft}
python -m lightning_moe_ckpt.benchmarks._killed_fit FOLDER MEMORY {torchrun,computes_all,in_place,alone} STAGES MICRO_BATCHES STAGE_MS

Steps are taken while FOLDER/turn is there. A stage sleeps `STAGE_MS` in the forward pass of a micro-batch, and as long again
for the gradients of its inputs and for those of its weights: on two cores stages wait for one another as they do on a device
each.

Source of the training with torchft: its `train_ddp.py` at version 0.2.0, with the defaults of that script.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_moe_ckpt.benchmarks._fits import (
    BenchModel,
    ModelSize,
    StepLines,
    bench_trainer,
    own_memory,
    quiet_lightning,
    write_line,
)
from lightning_moe_ckpt.benchmarks._fits import random_tokens as tokens_of
from lightning_moe_ckpt.callbacks import SparseCheckpoint
from lightning_moe_ckpt.launch._supervised import SPARE
from lightning_moe_ckpt.strategy import MoEStrategy
from lightning_moe_ckpt.testing._records import JsonLines

# Shape suffixes: B samples of a micro-batch, D width.

SIZE = ModelSize(batch_size=4)
WINDOW = 4
REPLICA = "REPLICA_GROUP_ID"
"""Environment variable with the rank, as torchft's script has it."""
_NUM_BATCHES = 500
_LAYERS, _DIM = 8, 32
"""Layers of a stage that sleeps, and their width."""
_LOOK_SECONDS = 0.002


class TurnLines(StepLines):
    """Write lines of events, and take steps in turns only; turn and lines are in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.lines = JsonLines(self._folder / f"rank{trainer.global_rank}")
        heard = _Heard(self.lines)
        logging.getLogger("lightning_moe_ckpt.fit.in_place._survivor").handlers = [heard]

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        await_turn(self._folder)


class _Heard(logging.Handler):
    """Note the time at which this process logs that training goes on in place."""

    def __init__(self, lines: JsonLines) -> None:
        super().__init__(logging.WARNING)
        self._lines = lines

    @override
    def emit(self, record: logging.LogRecord) -> None:
        write_line(self._lines, "noticed")


def await_turn(folder: Path) -> None:
    """Return when it is this training's turn."""
    while not (folder / "turn").exists():
        time.sleep(_LOOK_SECONDS)


def note_spare(folder: Path) -> None:
    """Write a line if this process is a spare: everything is imported, and the strategy asks for the rank."""
    if SPARE in os.environ:
        write_line(JsonLines(folder / "spares"), "ready", pid=os.getpid())


def train(folder: Path) -> None:
    """Train with Lightning until somebody ends it."""
    note_spare(folder)
    world_size = int(os.environ["WORLD_SIZE"])
    callbacks = [SparseCheckpoint((folder / "run").as_uri(), window=WINDOW), TurnLines(folder)]
    trainer = bench_trainer(accelerator="cpu", devices=world_size, callbacks=callbacks, max_epochs=-1)
    torch.manual_seed(0)
    trainer.fit(BenchModel(SIZE), tokens_of(SIZE, world_size * _NUM_BATCHES))


class _Loss(nn.Module):
    """The same loss, as a function of a module that DistributedDataParallel can wrap."""

    def __init__(self) -> None:
        super().__init__()
        self.model = BenchModel(SIZE)

    @override
    def forward(self, tokens_BT: Tensor) -> Tensor:
        loss = self.model.cross_entropy(tokens_BT)
        balance = [layer.l_aux for layer in self.model.moe_layers() if layer.l_aux is not None]
        return loss + SIZE.balance * torch.stack(balance).sum()


def train_with_torchft(folder: Path) -> None:
    """Train as torchft's own script does until somebody ends it; each rank is a replica."""
    torchft: Any = importlib.import_module("torchft")
    rank = int(os.environ[REPLICA])
    lines = JsonLines(folder / f"rank{rank}")
    torch.manual_seed(0)
    inner = _Loss()

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optim"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optim": optimizer.state_dict()},
        replica_id=f"bench_{rank}",
        timeout=timedelta(seconds=30),
    )
    model: Any = torchft.DistributedDataParallel(manager, inner)
    optimizer: Any = torchft.Optimizer(manager, torch.optim.AdamW(model.parameters(), lr=1e-3))
    write_line(lines, "begin", pid=os.getpid(), step=manager.current_step())
    while True:
        for (tokens_BT,) in tokens_of(SIZE, _NUM_BATCHES):
            await_turn(folder)
            before = manager.current_step()
            optimizer.zero_grad()
            model(tokens_BT).backward()
            optimizer.step()
            if manager.current_step() > before:
                write_line(lines, "step", step=manager.current_step(), ranks=manager.num_participants())


class _Slow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every matrix product takes a given time: in forward, for its input's gradient, and for its weights' gradient."""

    slept = 0.0
    """Seconds in gradients of weights since it was last read."""

    def __init__(self, seconds: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seconds = seconds

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            time.sleep(self._seconds)
            if out.shape == (_DIM, _DIM):
                _Slow.slept += self._seconds
        return out


class _Layer(nn.Module):
    """One operator of a stage."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(_DIM) + 0.01 * torch.randn(_DIM, _DIM))

    @override
    def forward(self, x_BD: Tensor) -> Tensor:
        return torch.tanh(x_BD @ self.weight)


class _Stage(nn.Module):
    """Some consecutive layers, named by their place in the whole model."""

    def __init__(self, layers: range) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(layer): _Layer() for layer in layers})

    @override
    def forward(self, x_BD: Tensor) -> Tensor:
        for layer in self.layers.values():
            x_BD = layer(x_BD)
        return x_BD


class SleepingModel(LightningModule):
    """Stages of equal length."""

    def configure_stage(self, stage: int, num_stages: int) -> nn.Module:
        """Return the layers of one stage."""
        del num_stages
        torch.manual_seed(stage)
        return _Stage(range(stage * _LAYERS, (stage + 1) * _LAYERS))

    def stage_loss(self, output_BD: Tensor, target_BD: Tensor) -> Tensor:
        """Return the squared error."""
        return (output_BD - target_BD).pow(2).mean()

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), 1e-3)


class _SleepLines(TurnLines):
    """Lines per step that also have the seconds in weight gradients, which replay leaves out for frozen weights."""

    @override
    def values(self) -> dict[str, Any]:
        slept, _Slow.slept = _Slow.slept, 0.0
        return {"slept": slept}


class _LooksAtGradients(Callback):
    """Callback that looks at gradients, for which replay computes all of them."""

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        del trainer, pl_module


def train_in_stages(folder: Path, system: str, stages: int, micro_batches: int, stage_ms: float) -> None:
    """Train a pipeline of stages that sleep until somebody ends it."""
    note_spare(folder)
    callbacks: list[Callback] = [
        SparseCheckpoint((folder / "run").as_uri(), window=WINDOW, order="fixed"),
        _SleepLines(folder),
    ]
    if system == "computes_all":
        callbacks.append(_LooksAtGradients())
    samples = torch.randn(_NUM_BATCHES * micro_batches, _DIM, generator=torch.Generator().manual_seed(0))
    strategy = MoEStrategy(pipeline_parallel=stages, micro_batches=micro_batches, localized_recovery=system == "alone")
    with _Slow(stage_ms / 1e3 / _LAYERS):
        trainer = bench_trainer(
            accelerator="cpu", devices=stages, strategy=strategy, callbacks=callbacks, max_epochs=-1
        )
        trainer.fit(SleepingModel(), DataLoader(TensorDataset(samples, samples.flip(1)), batch_size=micro_batches))


def main() -> None:
    """Train in this process."""
    folder, memory, system, *sizes = sys.argv[1:]
    torch.set_num_threads(1)
    own_memory(memory, lost=False)
    with quiet_lightning():
        if sizes:
            stages, micro_batches, stage_ms = sizes
            train_in_stages(Path(folder), system, int(stages), int(micro_batches), float(stage_ms))
        else:
            {"lightning": train, "torchft": train_with_torchft}[system](Path(folder))


if __name__ == "__main__":
    main()
