"""Measure the host memory of checkpoints of a training in pipeline stages: everything at once, or spread over a window of steps,
with a log of what crosses the borders of stages.

    dense     everything every few steps; if a rank fails all stages go back, so nothing else is kept
    sparse    a window of steps, and the upstream log, from which one stage recovers alone

Nothing is killed: what is asked for is bytes, which are the same on every machine. Ranks are started by `moe-ckpt run`, as

python -m benchmarks.pipeline_memory FOLDER MEMORY WINDOW SIZE

Source: MoEvement (2026), Sec. 5.6 and Table 6.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from benchmarks.steps import train_in_ranks
from lightning_moe_ckpt.benchmarks._fits import (
    BenchModel,
    ModelSize,
    bench_folders,
    bench_trainer,
    own_memory,
    quiet_lightning,
)
from lightning_moe_ckpt.callbacks import DenseCheckpoint, SparseCheckpoint
from lightning_moe_ckpt.callbacks._base import CheckpointCallback
from lightning_moe_ckpt.moe import MoELayer
from lightning_moe_ckpt.strategy import MoEStrategy
from lightning_moe_ckpt.testing._records import JsonLines, read_lines

DENSE = 0
"""In the place of a window: everything at once."""
_EVERY = 6
"""Steps between two dense checkpoints."""
_WINDOWS = 4
"""Windows that a training has room for: at the end of the second one the log is as large as it gets."""
_LIMIT_SECONDS = 300

# Shape suffixes: N crops in total, B crops of a micro-batch, T tokens of a crop, D model dim, V vocabulary.


_STAGE = ModelSize(num_blocks=2, model_dim=64, num_experts=8, expert_dim=512, context=32, batch_size=4)


@dataclass(frozen=True, kw_only=True)
class PipelineSize:
    """What is trained, and how it is cut."""

    stage: ModelSize = _STAGE
    """One stage; the first one has the embedding too, the last one the head."""
    stages: int = 3
    micro_batches: int = 4


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Bytes of one rank, or of all."""

    params: int
    """Parameters, which are no bytes."""
    generation: int
    """One generation: everything once, weights of what waits for its step, and a journal of each step."""
    log: int
    """The upstream log when it was largest."""
    log_steps: int
    """Most steps in it."""
    shared: int
    """Shared memory that is reserved: room for several generations."""


def measure(window: int, size: PipelineSize) -> HostMemory:
    """Train under `moe-ckpt run`, and return what all ranks have together; of `log_steps` the most.

    Args:
        window: steps of a sparse checkpoint, or `DENSE`.
        size: what is trained.

    Raises:
        CheckpointError: the training failed.
    """
    with bench_folders() as (folder, memory):
        what = [str(folder), str(memory), str(window), json.dumps(asdict(size))]
        train_in_ranks(__name__, what, ranks=size.stages, seconds=_LIMIT_SECONDS)
        ranks = [HostMemory(**line) for rank in range(size.stages) for line in read_lines(folder / f"rank{rank}")]
    whole = {name: sum(getattr(rank, name) for rank in ranks) for name in HostMemory.__dataclass_fields__}
    return HostMemory(**{**whole, "log_steps": max(rank.log_steps for rank in ranks)})


# -- one rank


class _Stage(nn.Module):
    """Consecutive blocks, named by their place in the whole model."""

    def __init__(self, size: ModelSize, stage: int, num_stages: int) -> None:
        super().__init__()
        blocks, first = BenchModel.blocks_of(size), stage * size.num_blocks
        self.embed = nn.Embedding(size.vocabulary, size.model_dim) if stage == 0 else None
        self.blocks = nn.ModuleDict({str(first + index): block for index, block in enumerate(blocks)})
        self.head = nn.Linear(size.model_dim, size.vocabulary) if stage == num_stages - 1 else None

    @override
    def forward(self, x: Tensor) -> Tensor:
        x_BTD = x if self.embed is None else self.embed(x)
        for block in self.blocks.values():
            x_BTD = block(x_BTD)
        return x_BTD if self.head is None else cast("Tensor", self.head(x_BTD))


class _StagedModel(LightningModule):
    """The blocks of `BenchModel`, in stages."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.size = size

    def configure_stage(self, stage: int, num_stages: int) -> nn.Module:
        """Return the blocks of one stage."""
        torch.manual_seed(stage)
        return _Stage(self.size, stage, num_stages)

    def stage_loss(self, logits_BTV: Tensor, target_BT: Tensor) -> Tensor:
        """Return the mean cross-entropy, in nats."""
        return nn.functional.cross_entropy(logits_BTV.float().flatten(0, 1), target_BT.flatten())

    def stage_auxiliary_loss(self) -> Tensor:
        """Return the experts' balancing loss."""
        found = [module.l_aux for module in self.modules() if isinstance(module, MoELayer) and module.l_aux is not None]
        return self.size.balance * torch.stack(found).sum()

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW, 12 bytes per parameter with its weights."""
        return torch.optim.AdamW(self.parameters(), 1e-3)


class _Sizes(Callback):
    """Writes the sizes of one rank as training ends.

    Args:
        checkpoint: what takes the memory.
        every: steps from one generation to the next.
        folder: of the files.
    """

    def __init__(self, checkpoint: CheckpointCallback, every: int, folder: Path) -> None:
        self._checkpoint, self._every, self._folder = checkpoint, every, folder
        self._captured = [0]
        self._log = self._log_steps = 0

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        self._checkpoint.wait_committed()  # steps of a larger model leave that much time

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        report = self._checkpoint.report
        self._captured.append(report.nbytes_captured)
        self._log = max(self._log, report.upstream_log_nbytes)
        assert isinstance(trainer.strategy, MoEStrategy)
        self._log_steps = max(self._log_steps, len(trainer.strategy.upstream.steps))

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        found = HostMemory(
            params=sum(parameter.numel() for parameter in pl_module.parameters()),
            # Plans stay as they are for as few steps: any so many in a row are one of each segment.
            generation=max(b - a for a, b in zip(self._captured, self._captured[self._every :], strict=False)),
            log=self._log,
            log_steps=self._log_steps,
            shared=sum(self._checkpoint.report.reserved_nbytes.values()),
        )
        JsonLines(self._folder / f"rank{trainer.global_rank}").write(asdict(found))


def main() -> None:
    """Train one rank."""
    folder, memory, window, text = sys.argv[1:]
    read = json.loads(text)
    size = PipelineSize(**{**read, "stage": ModelSize(**read["stage"])})
    torch.set_num_threads(1)
    own_memory(memory, lost=False)
    every, url = int(window) or _EVERY, (Path(folder) / "run").as_uri()
    checkpoint: CheckpointCallback = (
        DenseCheckpoint(url, every_n_steps=every, overhead_target=None)
        if int(window) == DENSE
        else SparseCheckpoint(url, window=every, overhead_target=None)
    )
    strategy = MoEStrategy(
        pipeline_parallel=size.stages, micro_batches=size.micro_batches, localized_recovery=int(window) != DENSE
    )
    steps, crops = _WINDOWS * every, size.stage.batch_size
    shape_NT = steps * crops, size.stage.context + 1
    tokens_NT = torch.randint(size.stage.vocabulary, shape_NT, generator=torch.Generator().manual_seed(0))
    with quiet_lightning():
        trainer = bench_trainer(
            accelerator="cpu",
            devices=size.stages,
            strategy=strategy,
            precision="bf16-mixed",
            callbacks=[checkpoint, _Sizes(checkpoint, every, Path(folder))],
            max_steps=steps,
        )
        trainer.fit(
            _StagedModel(size.stage),
            DataLoader(TensorDataset(tokens_NT[:, :-1], tokens_NT[:, 1:]), batch_size=crops),
        )


if __name__ == "__main__":
    main()
