"""A small GPT with experts and a stream of random tokens: something to train while checkpoints are measured.

What is learned does not matter. What does: a realistic mix of a few large expert tensors and many small dense ones,
clipped gradients, a logged metric and a learning rate schedule, since each has its share in the journal.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from lightning_moe_ckpt.moe import MoELayer

# Shape suffixes: N crops in total, B crops of a batch, T tokens of a crop, D model dim, H heads, V vocabulary.


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """What is trained; the defaults have 4.6 million parameters, nine in ten of them in experts."""

    num_blocks: int = 4
    """Transformer blocks, each with one layer of experts."""
    model_dim: int = 128
    """Width of the residual stream, 32 for each attention head."""
    num_experts: int = 16
    """Experts per block."""
    expert_dim: int = 256
    """Hidden width of one expert."""
    vocabulary: int = 256
    """Different tokens."""
    context: int = 64
    """Tokens of a crop."""
    batch_size: int = 16
    """Crops of a batch."""
    capacity_factor: float = 0.0
    """Room per expert relative to an even load; 0 drops nothing."""
    balance: float = 0.01
    """Weight of the experts' balancing loss."""
    dropout: float = 0.0
    """Share of the embedding's elements that are dropped."""

    def num_params(self) -> int:
        """Parameters of the model; it is not built."""
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in BenchModel(self).parameters())


class _Block(nn.Module):
    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        dim = size.model_dim
        self.num_heads = max(1, dim // 32)
        self.norm_attention, self.norm_moe = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.moe = MoELayer(dim, size.expert_dim, size.num_experts, top_k=2, capacity_factor=size.capacity_factor)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self._attend(self.norm_attention(x_BTD))
        out_BTD: Tensor = x_BTD + self.moe(self.norm_moe(x_BTD))
        return out_BTD

    def _attend(self, x_BTD: Tensor) -> Tensor:
        q, k, v = self.qkv(x_BTD).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        y_BHTD = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y_BTD: Tensor = self.out(y_BHTD.transpose(1, 2).flatten(2))
        return y_BTD


class BenchModel(LightningModule):
    """Predicts the next token.

    Args:
        size: what is built.
    """

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.size = size
        self._build(size)

    def _build(self, size: ModelSize) -> None:
        self.embed = nn.Embedding(size.vocabulary, size.model_dim)
        self.position = nn.Embedding(size.context, size.model_dim)
        self.blocks = nn.Sequential(*(_Block(size) for _ in range(size.num_blocks)))
        self.head = nn.Linear(size.model_dim, size.vocabulary)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy and the experts' balancing loss."""
        (tokens_BT,) = batch
        loss = self.cross_entropy(tokens_BT)
        self.log("loss", loss)
        balance = [layer.l_aux for layer in self.moe_layers() if layer.l_aux is not None]
        return loss + self.size.balance * torch.stack(balance).sum()

    def cross_entropy(self, tokens_BT: Tensor) -> Tensor:
        """Of every token but the first, in nats, mean."""
        x_BTD = self.embed(tokens_BT[:, :-1]) + self.position.weight[: tokens_BT.shape[1] - 1]
        x_BTD = nn.functional.dropout(x_BTD, self.size.dropout, self.training)
        logits_BTV = self.head(self.blocks(x_BTD))
        return nn.functional.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten())

    def moe_layers(self) -> list[MoELayer]:
        """First block first."""
        return [module for module in self.modules() if isinstance(module, MoELayer)]

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW, 12 bytes per parameter with its weights, under a warm-up."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def random_tokens(size: ModelSize, num_batches: int) -> DataLoader[tuple[Tensor, ...]]:
    """Batches for `num_batches` steps, each crop one token longer than the context, which is what is predicted."""
    generator = torch.Generator().manual_seed(0)
    shape_NT = (num_batches * size.batch_size, size.context + 1)
    tokens_NT = torch.randint(size.vocabulary, shape_NT, generator=generator)
    return DataLoader(TensorDataset(tokens_NT), batch_size=size.batch_size, shuffle=True)
