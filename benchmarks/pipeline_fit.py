"""Run a pipeline stage of a training to be killed, for `pipeline`, which starts the stages by a launcher.

python -m benchmarks.pipeline_fit FOLDER MEMORY {torchrun,computes_all,in_place,reordered,alone} STAGES MICRO_BATCHES STAGE_MS EXPERTS

Steps are taken while FOLDER/turn is there. A stage sleeps `STAGE_MS` in the forward pass of a micro-batch, and as long again
for the gradients of its inputs and for those of its weights: on two cores stages wait for one another as they do on a device
each. With experts, each product sleeps by its size: experts of many tokens take long.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from benchmarks.killed_fit import NUM_BATCHES, WINDOW, TurnLines, note_spare
from lightning_moe_ckpt.benchmarks._fits import bench_trainer, own_memory, quiet_lightning
from lightning_moe_ckpt.callbacks import SparseCheckpoint
from lightning_moe_ckpt.moe import MoELayer
from lightning_moe_ckpt.policies import Popularity
from lightning_moe_ckpt.strategy import MoEStrategy

# Shape suffixes: B samples of a micro-batch, T tokens of a sample, D width, E experts.

_LAYERS, _DIM = 8, 32
"""Layers of a stage that sleeps, and their width."""
_MOE_LAYERS, _MOE_DIM, _MOE_HIDDEN, _TOKENS = 2, 48, 96, 40
"""Of a stage with experts; fewer tokens than the width, so that gradients of weights are known by their shape."""
_STEEP = 0.4
"""By which logits fall from one expert to the next, in an order that is not the model's; what tokens add deviates by about 0.6."""
_REORDER = 8
_NAP = 0.0005
"""Seconds below which sleeps are put together."""


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


class _SlowBySize(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every matrix product takes a time by its size; `_Slow.slept` has that of gradients of weights."""

    def __init__(self, seconds: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rate = seconds / (_MOE_LAYERS * 2 * _TOKENS * _MOE_DIM * _MOE_HIDDEN)
        self._owed = 0.0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            left = args[0] if func is torch.ops.aten.mm.default else args[1]
            seconds = self._rate * out.numel() * left.shape[-1]
            if tuple(out.shape) in _WEIGHTS:
                _Slow.slept += seconds
            self._owed += seconds
            if self._owed > _NAP:
                time.sleep(self._owed)
                self._owed = 0.0
        return out


_WEIGHTS = {(_MOE_DIM, _MOE_HIDDEN), (_MOE_HIDDEN, _MOE_DIM)}


class _ExpertStage(nn.Module):
    """Some layers of experts, few of which have most tokens."""

    def __init__(self, layers: range, num_experts: int) -> None:
        super().__init__()
        by_name = {str(i): MoELayer(_MOE_DIM, _MOE_HIDDEN, num_experts, top_k=1) for i in layers}
        for layer in by_name.values():
            logits_E = -_STEEP * torch.randperm(num_experts)
            layer.gate.register_forward_hook(lambda _, __, out, logits_E=logits_E: out + logits_E)
        self.layers = nn.ModuleDict(by_name)

    @override
    def forward(self, x_BTD: Tensor) -> Tensor:
        for layer in self.layers.values():
            x_BTD = x_BTD + layer(nn.functional.layer_norm(x_BTD, x_BTD.shape[-1:]))
        return x_BTD


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
    """Stages of equal length, with experts or without."""

    def __init__(self, num_experts: int = 0) -> None:
        super().__init__()
        self._num_experts = num_experts

    def configure_stage(self, stage: int, num_stages: int) -> nn.Module:
        """Return the layers of one stage."""
        del num_stages
        torch.manual_seed(stage)
        if self._num_experts:
            return _ExpertStage(range(stage * _MOE_LAYERS, (stage + 1) * _MOE_LAYERS), self._num_experts)
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


def _checkpoint(url: str, system: str, num_experts: int) -> SparseCheckpoint:
    if num_experts and system in ("reordered", "alone"):
        popularity = Popularity(reorder_every_n_steps=_REORDER)
        return SparseCheckpoint(url, window=WINDOW, popularity=popularity)
    return SparseCheckpoint(url, window=WINDOW, order="fixed")


def train_in_stages(
    folder: Path, system: str, *, stages: int, micro_batches: int, stage_ms: float, num_experts: int
) -> None:
    """Train a pipeline of stages that sleep until somebody ends it."""
    note_spare(folder)
    callbacks: list[Callback] = [
        _checkpoint((folder / "run").as_uri(), system, num_experts),
        _SleepLines(folder),
    ]
    if system == "computes_all":
        callbacks.append(_LooksAtGradients())
    shape = (_TOKENS, _MOE_DIM) if num_experts else (_DIM,)
    samples = torch.randn(NUM_BATCHES * micro_batches, *shape, generator=torch.Generator().manual_seed(0))
    strategy = MoEStrategy(pipeline_parallel=stages, micro_batches=micro_batches, localized_recovery=system == "alone")
    with _SlowBySize(stage_ms / 1e3) if num_experts else _Slow(stage_ms / 1e3 / _LAYERS):
        trainer = bench_trainer(
            accelerator="cpu", devices=stages, strategy=strategy, callbacks=callbacks, max_epochs=-1
        )
        trainer.fit(
            SleepingModel(num_experts), DataLoader(TensorDataset(samples, samples.flip(1)), batch_size=micro_batches)
        )


def main() -> None:
    """Train in this process."""
    folder, memory, system, stages, micro_batches, stage_ms, experts = sys.argv[1:]
    torch.set_num_threads(1)
    own_memory(memory, lost=False)
    with quiet_lightning():
        train_in_stages(
            Path(folder),
            system,
            stages=int(stages),
            micro_batches=int(micro_batches),
            stage_ms=float(stage_ms),
            num_experts=int(experts),
        )


if __name__ == "__main__":
    main()
