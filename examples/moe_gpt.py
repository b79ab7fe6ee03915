"""A byte-level GPT whose feed-forward layers are mixtures of experts.

Small enough for a laptop's CPU, yet with everything that makes a resume hard: experts spread over ranks, dropout, two
parameter groups, warm-up with a cosine, gradient clipping and an auxiliary loss.
"""

# Shape suffixes: B crops, T bytes of a crop, D model dim, H heads, V byte values.

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from lightning_moe_ckpt.moe import MoELayer

VOCABULARY = 256


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """What is built."""

    num_blocks: int = 4
    """Transformer blocks."""
    model_dim: int = 96
    """Width of the residual stream."""
    num_heads: int = 4
    """Attention heads per block."""
    num_experts: int = 12
    """Experts per block, over all ranks: a multiple of the number of expert-parallel ranks."""
    expert_dim: int = 192
    """Hidden width of one expert."""
    top_k: int = 2
    """Experts that see each byte."""
    capacity_factor: float = 0.0
    """Room per expert relative to an even load; 0 drops nothing."""
    context: int = 64
    """Longest input in bytes."""
    dropout: float = 0.05
    """After attention weights, attention and experts."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How it is trained."""

    learning_rate: float = 4e-3
    """Peak, reached after the warm-up."""
    weight_decay: float = 0.1
    """Of matrices; vectors and embeddings have none."""
    warmup_steps: int = 20
    """Optimizer steps of linear warm-up."""
    total_steps: int = 400
    """Optimizer steps after which the cosine has come down to a tenth of the peak."""
    aux_weight: float = 0.01
    """Weight of the load-balancing loss."""

    def relative_rate(self, step: int) -> float:
        """Learning rate of optimizer step `step`, relative to the peak."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress)))


Weighted = TypeVar("Weighted", nn.Linear, nn.Embedding)


def normal(layer: Weighted, std: float) -> Weighted:
    """Draw the weights of a layer anew, from a normal distribution."""
    nn.init.normal_(layer.weight, std=std)
    return layer


class CausalAttention(nn.Module):
    """Multi-head self-attention in which a byte sees itself and what came before."""

    def __init__(self, wanted: Architecture) -> None:
        super().__init__()
        self.num_heads, self.dropout = wanted.num_heads, wanted.dropout
        self.qkv = normal(nn.Linear(wanted.model_dim, 3 * wanted.model_dim, bias=False), std=wanted.model_dim**-0.5)
        self.out = normal(nn.Linear(wanted.model_dim, wanted.model_dim, bias=False), std=wanted.model_dim**-0.5)

    def forward(self, x_BTD: Tensor) -> Tensor:
        B, T, D = x_BTD.shape
        q, k, v = self.qkv(x_BTD).view(B, T, 3, self.num_heads, D // self.num_heads).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y_BHTD = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        y_BTD: Tensor = self.out(y_BHTD.transpose(1, 2).reshape(B, T, D))
        return y_BTD


class Block(nn.Module):
    """Attention, then experts, each on a normalised residual stream."""

    def __init__(self, wanted: Architecture, moe: nn.Module) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(wanted.model_dim)
        self.attention = CausalAttention(wanted)
        self.norm_moe = nn.LayerNorm(wanted.model_dim)
        self.moe = moe
        self.dropout = nn.Dropout(wanted.dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.dropout(self.attention(self.norm_attention(x_BTD)))
        y_BTD: Tensor = x_BTD + self.dropout(self.moe(self.norm_moe(x_BTD)))
        return y_BTD


class MoEGPT(LightningModule):
    """Byte-level language model.

    Args:
        architecture: what is built.
        recipe: how it is trained.
        init_seed: of the initial weights, which are the same on any number of ranks.
    """

    def __init__(
        self, architecture: Architecture | None = None, recipe: Recipe | None = None, init_seed: int = 0
    ) -> None:
        super().__init__()
        self.architecture = architecture or Architecture()
        self.recipe = recipe or Recipe()
        self.init_seed = init_seed
        self.blocks = nn.ModuleList()

    def configure_model(self) -> None:
        """Build the layers: the process groups exist by now, so that each rank makes its own experts only."""
        if len(self.blocks) > 0:
            return
        wanted = self.architecture
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.init_seed)
            self.embed = normal(nn.Embedding(VOCABULARY, wanted.model_dim), std=0.5)
            self.position = normal(nn.Embedding(wanted.context, wanted.model_dim), std=0.5)
            self.blocks.extend(Block(wanted, self.make_moe(wanted, i)) for i in range(wanted.num_blocks))
            self.norm = nn.LayerNorm(wanted.model_dim)
            # Close to zero: the first guess is uniform, 8 bits per byte.
            self.head = normal(nn.Linear(wanted.model_dim, VOCABULARY, bias=False), std=0.02)

    def make_moe(self, wanted: Architecture, block: int) -> nn.Module:
        """The experts of block number `block`: a layer that leaves its balancing loss in `l_aux`."""
        return MoELayer(
            wanted.model_dim,
            wanted.expert_dim,
            wanted.num_experts,
            top_k=wanted.top_k,
            capacity_factor=wanted.capacity_factor,
        )

    def moe_layers(self) -> list[MoELayer]:
        """The layers with experts, first block first."""
        return [module for module in self.modules() if isinstance(module, MoELayer)]

    def forward(self, bytes_BT: Tensor) -> Tensor:
        """Logits of the next byte, `[B, T, V]`."""
        positions_T = torch.arange(bytes_BT.shape[1], device=bytes_BT.device)
        x_BTD = self.embed(bytes_BT) + self.position(positions_T)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV: Tensor = self.head(self.norm(x_BTD))
        return logits_BTV

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train/loss", loss, prog_bar=True)
        balance = torch.stack([block.moe.l_aux for block in self.blocks])  # type: ignore[union-attr, misc]
        return loss + self.recipe.aux_weight * balance.sum()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val/bits_per_byte", self._loss(batch) / math.log(2), prog_bar=True, sync_dist=True)

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Cross-entropy in nats per byte."""
        bytes_BT, target_BT = batch
        return nn.functional.cross_entropy(self(bytes_BT).flatten(0, 1), target_BT.flatten())

    def configure_optimizers(self) -> OptimizerLRScheduler:
        embeddings = {id(module.weight) for module in self.modules() if isinstance(module, nn.Embedding)}
        decayed = [p for p in self.parameters() if p.ndim >= 2 and id(p) not in embeddings]
        chosen = {id(p) for p in decayed}
        groups = [
            {"params": decayed, "weight_decay": self.recipe.weight_decay},
            {"params": [p for p in self.parameters() if id(p) not in chosen], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.recipe.learning_rate, betas=(0.9, 0.95))
        schedule = LambdaLR(optimizer, self.recipe.relative_rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
