"""Trainings of one model under every way of sharding it, with shapes that no number of ranks divides.

Under `ModelParallelStrategy` parameters are DTensors: `fsdp2` shards each over all ranks, `tp` some over the ranks of a group that
sees the same data, `fsdp2+tp` both, and `hsdp` shards over half of the ranks and replicates over the halves. `hf+ep` is another model, of
Hugging Face: `MoEStrategy` spreads its experts over three ranks, or over each half of four. `zero1` shards the optimizer alone.
"""

# Shape suffixes: B sequences, S places, T = B * S tokens, E experts, D model dim, H hidden dim, V vocabulary.

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from typing_extensions import Self, override

from campaign._data import VOCABULARY
from campaign._drawn import Drawn, DrawnModule, let_compile
from campaign._hugging_face import FamilyModel
from campaign._training import Module
from lightning_moe_ckpt.operators import whole_of
from lightning_moe_ckpt.testing import Attempt

MODEL_DIM, HIDDEN_DIM, UP_DIM = 24, 24, 22
"""Of these only what `Shard(1)` cuts is a multiple of 2, 3, 4 and 8."""

Sharding = Literal["none", "ddp", "moe", "moe+zero1", "hf+ep", "hf+ep+zero1", "fsdp2", "tp", "fsdp2+tp", "hsdp"]
Experts = Literal["stacked", "listed", "columns"]
"""`columns`: stacked, and cut along dimension 1. `listed` ones all get all tokens: FSDP2 waits for a module that some rank leaves out."""
Part = Literal["block", "bias"]
Edits = Literal["", "batch_end", "optimizer_step"]
"""Hook that changes all weights of every other step, by operations that no version of a shard counts."""


@dataclass(frozen=True, kw_only=True)
class Sharded(Drawn):
    """A training run whose parameters may be sharded."""

    sharding: Sharding = "fsdp2"
    experts: Experts = "stacked"
    family: str = "mixtral"
    """Under `hf+ep`, a family of `SPREAD`."""
    num_experts: int = 5
    """Of a layer; under `hf+ep` of each rank."""
    tied: bool = False
    frozen: tuple[Part, ...] = ()
    recompute: bool = False
    kept: bool = False
    """Whether what was gathered for a forward pass is kept for the backward pass."""
    low: bool = False
    """Whether FSDP2 itself computes in bf16, and reduces in float32."""
    edits: Edits = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "strategy", "ddp_ordered" if self.sharding == "ddp" else "moe")
        object.__setattr__(self, "shard_optimizer", "zero1" in self.sharding)
        if "hf+ep" in self.sharding:
            object.__setattr__(
                self, "expert_parallel", self.world_size // 2 if self.world_size > 3 else self.world_size
            )

    @property
    def tensor_parallel(self) -> int:
        """Ranks that see the same data."""
        return {"tp": self.world_size, "fsdp2+tp": 2}.get(self.sharding, 1)

    @property
    def is_sharded(self) -> bool:
        """Whether parameters are DTensors."""
        return self.sharding not in {"none", "ddp", "moe", "moe+zero1", "hf+ep", "hf+ep+zero1"}

    @property
    def complaints(self) -> tuple[str, ...]:
        """Where a rank dies while DDP broadcasts buffers, Lightning leaves its own `forward` in the modules of others. An edit that
        whole parameters count, and that comes while they are copied, costs the first such boundary.
        """
        edited = not self.is_sharded and self.edits == "optimizer_step"
        return (("`module.forward`",) if self.sharding == "ddp" else ()) + ("by a forward or backward pass",) * edited

    @override
    def fault_free(self) -> Self:
        """Over several meshes Lightning's own clipping raises, and the callback's does not. Behind a validation FSDP2 alone trains
        a step on whole weights from before an edit; with the callback it gathers them anew.
        """
        stale = self.kept and self.edits == "optimizer_step"
        return self if stale or ("tp" in self.sharding and self.clip is not None) else super().fault_free()

    @override
    def make_module(self, life: Attempt) -> Module:
        return self.module_of(EDITING[self.edits], life)

    @override
    def made_loaders(self, life: Attempt) -> tuple[Any, Any]:
        return super().made_loaders(replace(life, world_size=life.world_size // self.tensor_parallel))

    @override
    def trainer_options(self, life: Attempt) -> dict[str, Any]:
        options = super().trainer_options(life)
        if not self.is_sharded:
            return options
        from lightning.pytorch.strategies import ModelParallelStrategy

        replicas = life.world_size // self.tensor_parallel
        return options | {"strategy": ModelParallelStrategy(replicas, self.tensor_parallel)}


class ShardedModule(DrawnModule):
    """The module of a `Sharded`."""

    def __init__(self, setup: Sharded, life: Attempt) -> None:
        super().__init__(setup, life)
        self._sharded = setup

    @override
    def configure_model(self) -> None:
        if self.model is None:
            if "hf+ep" in self._sharded.sharding:
                self.model = spreadable(self._sharded)
                return
            self.model = Uneven(self._sharded)
            if self._sharded.is_sharded:
                shard(self.model, self._sharded, self)

    @override
    def on_fit_start(self) -> None:
        super().on_fit_start()
        # Ranks that see the same data draw the same numbers.
        torch.manual_seed(self._life.seed + 101 * (self._life.rank // self._sharded.tensor_parallel))


class EditsAtBatchEnd(ShardedModule):
    """Edits weights behind a step, or behind each batch that a step accumulates."""

    @override
    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        edit(self.trainer)


class EditsInStep(ShardedModule):
    """Edits weights before the closure runs forward and backward."""

    @override
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        edit(self.trainer)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


EDITING: dict[Edits, type[ShardedModule]] = {
    "": ShardedModule,
    "batch_end": EditsAtBatchEnd,
    "optimizer_step": EditsInStep,
}


def edit(trainer: Trainer) -> None:
    """Shrink the weights of an odd step, without a trace if they are in shards; of an optimizer's pieces the whole weights."""
    if trainer.global_step % 2:
        for param in trainer.optimizers[0].param_groups[0]["params"]:
            torch._foreach_mul_([whole_of(param).detach()], 0.999)


def spreadable(setup: Sharded) -> FamilyModel:
    """A whole model, which the strategy spreads."""
    options = {"tied": setup.tied, "frozen": "block" in setup.frozen, "recompute": setup.recompute}
    return FamilyModel(setup.family, setup.num_experts * setup.expert_parallel, **options)


def shard(model: Uneven, setup: Sharded, module: LightningModule) -> None:
    """Shard a model as a user does: blocks, then the root."""
    mesh: Any = module.device_mesh
    along = mesh["data_parallel"]
    if setup.sharding == "hsdp":
        along = init_device_mesh("cpu", (2, setup.world_size // 2), mesh_dim_names=("replicate", "shard"))
    options: dict[str, Any] = {"mesh": along, "reshard_after_forward": not setup.kept}
    if setup.low:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        if setup.tensor_parallel > 1:
            parallelize_module(block, mesh["tensor_parallel"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if setup.sharding == "tp":
            continue
        if setup.experts == "columns":
            fully_shard(block.moe.experts, **options, shard_placement_fn=lambda _: Shard(1))  # type: ignore[arg-type, union-attr]
        fully_shard(block, **options)
    if setup.sharding != "tp":
        fully_shard(model, **options)


class StackedExperts(nn.Module):
    """All experts as one tensor per matrix; every one sees every token, whose weight may be zero."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(num_experts, MODEL_DIM, HIDDEN_DIM) * 0.2)
        self.w2 = nn.Parameter(torch.randn(num_experts, HIDDEN_DIM, MODEL_DIM) * 0.2)
        self.b1 = nn.Parameter(torch.zeros(num_experts, HIDDEN_DIM))

    @override
    def forward(self, x_TD: Tensor, topk_idx_TK: Tensor, weight_TK: Tensor) -> Tensor:
        weight_TE = weight_TK.new_zeros(len(x_TD), len(self.w1)).scatter(-1, topk_idx_TK, weight_TK)
        h_ETH = torch.relu(x_TD @ self.w1 + self.b1[:, None])
        return (h_ETH @ self.w2 * weight_TE.T[..., None]).sum(0)


class ListedExperts(nn.ModuleList):
    """A module per expert; every one sees every token."""

    def __init__(self, num_experts: int) -> None:
        super().__init__(
            nn.Sequential(nn.Linear(MODEL_DIM, HIDDEN_DIM), nn.ReLU(), nn.Linear(HIDDEN_DIM, MODEL_DIM))
            for _ in range(num_experts)
        )

    @override
    def forward(self, x_TD: Tensor, topk_idx_TK: Tensor, weight_TK: Tensor) -> Tensor:
        weight_TE = weight_TK.new_zeros(len(x_TD), len(self)).scatter(-1, topk_idx_TK, weight_TK)
        return torch.stack([expert(x_TD) * weight_TE[:, [e]] for e, expert in enumerate(self)]).sum(0)


class UnevenMoE(nn.Module):
    """Two experts for each token, or all, where each is a module."""

    def __init__(self, setup: Sharded) -> None:
        super().__init__()
        self.gate = nn.Linear(MODEL_DIM, setup.num_experts, bias=False)
        self.experts = (ListedExperts if setup.experts == "listed" else StackedExperts)(setup.num_experts)
        self.top_k = setup.num_experts if setup.experts == "listed" else 2

    @override
    def forward(self, x_TD: Tensor) -> Tensor:
        probs_TE = self.gate(x_TD).float().softmax(-1)
        best = probs_TE.topk(self.top_k, -1)
        y_TD: Tensor = self.experts(x_TD, best.indices, best.values.to(x_TD.dtype))
        return y_TD


class UnevenBlock(nn.Module):
    """A dense part that tensor parallelism can cut, and experts."""

    def __init__(self, setup: Sharded) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(MODEL_DIM)
        self.up, self.down = nn.Linear(MODEL_DIM, UP_DIM), nn.Linear(UP_DIM, MODEL_DIM)
        self.dropout = nn.Dropout(0.1)
        self.moe = UnevenMoE(setup)
        self._recompute = setup.recompute

    @override
    def forward(self, x_TD: Tensor) -> Tensor:
        if self._recompute and torch.is_grad_enabled():
            y_TD: Tensor = checkpoint(self._own, x_TD, use_reentrant=False)
            return y_TD
        return self._own(x_TD)

    def _own(self, x_TD: Tensor) -> Tensor:
        x_TD = x_TD + self.dropout(self.down(torch.tanh(self.up(self.norm(x_TD)))))
        y_TD: Tensor = x_TD + self.moe(x_TD)
        return y_TD


class Uneven(nn.Module):
    """Two blocks between an embedding and a head; a parameter of one element, and a count that each rank keeps."""

    tokens: Tensor

    def __init__(self, setup: Sharded) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, MODEL_DIM)
        self.blocks = nn.ModuleList(UnevenBlock(setup) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(MODEL_DIM, VOCABULARY)
        self.register_buffer("tokens", torch.zeros((), dtype=torch.int64))
        if setup.tied:
            self.head.weight = self.embedding.weight
        if "block" in setup.frozen:
            self.blocks[0].requires_grad_(False)
        if "bias" in setup.frozen:
            self.head.bias.requires_grad_(False)
        if setup.compiled:
            let_compile()
            for block in self.blocks:
                block.compile(backend="aot_eager")

    @override
    def forward(self, tokens_BS: Tensor) -> tuple[Tensor, Tensor]:
        if self.training:
            self.tokens += tokens_BS.sum()
        x_TD = self.embedding(tokens_BS).flatten(0, 1)
        for block in self.blocks:
            x_TD = block(x_TD)
        logits_TV = self.head(functional.rms_norm(x_TD, x_TD.shape[-1:]) * self.scale)
        return logits_TV.unflatten(0, tokens_BS.shape).clone(), x_TD.new_zeros(())  # FSDP2 warns of views
