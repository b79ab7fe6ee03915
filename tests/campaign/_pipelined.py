"""A training run whose model is cut into pipeline stages."""

# Shape suffixes: B sequences, S places, D model dim, V vocabulary.

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from door import Phase
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from typing_extensions import Self, override

from campaign._data import VOCABULARY, make_loader, make_validation_loader
from campaign._models import MODEL_DIM
from campaign._training import Checkpointing, Module, Setup
from lightning_moe_ckpt.moe import MoELayer
from lightning_moe_ckpt.strategy import MoEStrategy
from lightning_moe_ckpt.testing import Attempt, Kill, Seam

BLOCKS = 4


class Block(nn.Module):
    """Normalised statistics, experts and dropout on a residual stream; counts its calls, which it depends on."""

    calls: Tensor

    def __init__(self, num_experts: int, *, recomputes: bool = False) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.norm = nn.BatchNorm1d(MODEL_DIM)
        self.moe = MoELayer(MODEL_DIM, 24, num_experts, top_k=1)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    @override
    def forward(self, x_BSD: Tensor) -> Tensor:
        if self.training:
            self.calls = self.calls + 1
        x_TD = x_BSD.flatten(0, 1)
        y_TD = checkpoint(self.norm, x_TD, use_reentrant=False) if self.recomputes else self.norm(x_TD)
        y_BSD = y_TD.view(x_BSD.shape) * (1 + 1e-3 * self.calls)
        out_BSD: Tensor = x_BSD + self.dropout(self.moe(y_BSD))
        return out_BSD


class Stage(nn.Module):
    """Some of the blocks, by their number in the whole model; embedding and head at its ends."""

    def __init__(
        self, stage: int, num_stages: int, num_experts: int, *, recomputes: bool = False, max_norm: float | None = None
    ) -> None:
        super().__init__()
        # The last stage has fewest blocks, so that windows of stages have different lengths.
        cuts = [-(-BLOCKS * i // num_stages) for i in range(num_stages + 1)]
        self.embed = nn.Embedding(VOCABULARY, MODEL_DIM, max_norm=max_norm) if stage == 0 else None
        blocks = range(cuts[stage], cuts[stage + 1])
        self.blocks = nn.ModuleDict({str(i): Block(num_experts, recomputes=recomputes) for i in blocks})
        self.head = nn.Linear(MODEL_DIM, VOCABULARY) if stage == num_stages - 1 else None

    @override
    def forward(self, x: Tensor) -> Tensor:
        x_BSD = x if self.embed is None else self.embed(x)
        for block in self.blocks.values():
            x_BSD = block(x_BSD)
        return x_BSD if self.head is None else self.head(x_BSD)


class PipelinedModule(Module):
    """Hooks of a module in stages."""

    def configure_stage(self, stage: int, num_stages: int) -> nn.Module:
        options = dict(self._setup.options)
        more = {name: options[name] for name in ("recomputes", "max_norm") if name in options}
        return Stage(stage, num_stages, options.get("num_experts", 4), **more)

    def stage_loss(self, output: Tensor, target: Tensor) -> Tensor:
        if not self.training:
            torch.rand(1)  # validation that draws numbers moves the generator for training
        loss = functional.cross_entropy(output.float().flatten(0, 1), target.flatten())
        self.log("train_loss" if self.training else "validation_loss", loss, batch_size=len(target))
        return loss

    def stage_auxiliary_loss(self) -> Tensor | None:
        found = [module.l_aux for module in self.modules() if isinstance(module, MoELayer) and module.l_aux is not None]
        return 0.01 * torch.stack(found).sum() if found else None


@dataclass(frozen=True, kw_only=True)
class Pipelined(Setup):
    """A `Setup` in stages; a batch is cut into two micro-batches."""

    stages: int = 2
    micro_batches: int = 2
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    strategy_options: tuple[tuple[str, Any], ...] = ()

    @override
    def make_module(self, life: Attempt) -> Module:
        return PipelinedModule(self, life)

    @override
    def loaders(self, life: Attempt) -> tuple[Any, Any]:
        replicas = life.world_size // self.stages
        length = self.batches * self.batch_size * replicas
        training = make_loader(
            self.loader, length=length, batch_size=self.batch_size, workers=self.workers, augment=self.augment
        )
        return training, make_validation_loader(self.batch_size, replicas) if self.validate_every else None

    @override
    def fault_free(self) -> Self:
        kept = tuple(
            option for option in self.strategy_options if option[0] == "shard_optimizer"
        )  # it shows in the state
        return replace(super().fault_free(), strategy_options=kept)

    @override
    def trainer_options(self, life: Attempt) -> dict[str, Any]:
        # Each process measures how fast it copies, for which models of kilobytes need no more than a mebibyte.
        Seam(module="lightning_moe_ckpt.native._bubbles", attribute="_PROBE_NBYTES", replacement=2**20).apply()
        strategy = MoEStrategy(
            expert_parallel=self.expert_parallel,
            pipeline_parallel=self.stages,
            micro_batches=self.micro_batches,
            schedule=self.schedule,
            **{"localized_recovery": True} | dict(self.strategy_options),
        )
        return {**super().trainer_options(life), "strategy": strategy}


def draw(seed: int) -> tuple[Pipelined, list[Kill]]:
    """A run in stages and where its lives end, by a number: how it is spread, trained and stored."""
    rng = random.Random(f"stages {seed}")
    stages, replicas, ep_size = rng.choice([(2, 1, 1), (2, 2, 1), (2, 2, 2), (3, 1, 1), (4, 1, 1)])
    checkpointing = rng.choice(
        [
            Checkpointing(policy="dense", every_n_steps=rng.randint(1, 3)),
            Checkpointing(policy="sparse", window=rng.randint(1, 5), order=rng.choice(["popularity", "fixed"])),
            # As much as steps hide, or a given number of bytes: windows of stages have lengths of their own.
            Checkpointing(policy="sparse", window="auto", budget_nbytes=rng.choice([None, 12_000, 20_000, 40_000])),
            Checkpointing(policy="differential", every_n_steps=rng.randint(2, 7), batch=rng.randint(1, 3)),
        ]
    )
    setup = Pipelined(
        stages=stages,
        world_size=stages * replicas,
        expert_parallel=ep_size,
        micro_batches=4 if stages > 2 else rng.choice([2, 4]),
        schedule=rng.choice(["1f1b", "gpipe"]),
        batches=rng.randint(4, 7),
        precision=rng.choice(["32-true", "32-true", "bf16-mixed", "16-mixed"]),
        optimizer=rng.choice(["adamw", "adam", "sgd", "adamw_fused"]),
        scheduler=rng.choice(["none", "cosine", "epoch", "plateau"]),
        clip=rng.choice([0.5, None]),
        validate_every=rng.choice([2, 3]),
        averaged=rng.choice([None, None, "ema"]),
        workers=rng.choice([0, 0, 1]),
        checkpointing=checkpointing,
    )
    if setup.precision != "32-true" and setup.optimizer == "adamw_fused":  # Lightning does not clip it then
        setup = replace(setup, optimizer="adamw")
    phases: list[Phase] = [
        "batch_start",
        "forward",
        "after_backward",
        "before_optimizer_step",
        "batch_end",
        "after_batch_end",
    ]
    steps = sorted(rng.sample(range(setup.steps - 1), rng.randint(1, 3)))
    ranks = [rng.randrange(setup.world_size) for _ in steps]
    kills = [
        Kill(phase=rng.choice(phases), step=step, rank=rank, settle=rng.choice([0.0, 10.0]))
        for step, rank in zip(steps, ranks, strict=True)
    ]
    return setup, kills
