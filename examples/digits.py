"""A vision transformer with experts on the handwritten digits of scikit-learn, from a configuration file.

    python examples/digits.py fit --config examples/digits.yaml

1,797 images of 8 x 8 pixels come with scikit-learn, nothing is downloaded. It is a smoke test that trains in a minute on
one core: of its 360 validation images 96 % are recognised after 30 epochs, give or take two points by the seed alone.
"""

# Shape suffixes: B images, P patches of an image, D model dim, H heads, C classes.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import cli
from extras import require
from lightning_moe_ckpt.moe import MoELayer

NUM_CLASSES, IMAGE, PATCH = 10, 8, 2
NUM_PATCHES = (IMAGE // PATCH) ** 2
WHITE = 16.0  # brightest pixel


class Digits(LightningDataModule):
    """Four in five images for training, the others for validation.

    Args:
        batch_size: images per step and process.
        seed: of the split. The order of an epoch is the sampler's business.
    """

    def __init__(self, batch_size: int = 64, seed: int = 1) -> None:
        super().__init__()
        self.batch_size, self.seed = batch_size, seed

    def setup(self, stage: str) -> None:
        """Read the images and split them, on every rank alike."""
        require("sklearn")
        from sklearn.datasets import load_digits

        digits = load_digits()
        images_BP4 = torch.as_tensor(digits.images, dtype=torch.float32) / WHITE
        classes_B = torch.as_tensor(digits.target, dtype=torch.int64)
        order_B = torch.randperm(len(classes_B), generator=torch.Generator().manual_seed(self.seed))
        split = len(order_B) * 4 // 5
        self.train, self.validation = (
            TensorDataset(_patches(images_BP4[chosen]), classes_B[chosen])
            for chosen in (order_B[:split], order_B[split:])
        )

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.validation, batch_size=self.batch_size)


def _patches(images_BHW: Tensor) -> Tensor:
    """`[B, P, 4]`: squares of 2 x 2 pixels, row by row."""
    return images_BHW.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH).reshape(len(images_BHW), NUM_PATCHES, PATCH**2)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """What is built."""

    num_blocks: int = 2
    """Transformer blocks."""
    model_dim: int = 32
    """Width of the residual stream."""
    num_heads: int = 4
    """Attention heads per block."""
    num_experts: int = 8
    """Experts per block, over all ranks: a multiple of the number of expert-parallel ranks."""
    expert_dim: int = 64
    """Hidden width of one expert."""
    top_k: int = 2
    """Experts that see each patch."""
    capacity_factor: float = 1.25
    """Room per expert relative to an even load; what exceeds it passes by. 0 drops nothing."""


class _Block(nn.Module):
    def __init__(self, wanted: Architecture) -> None:
        super().__init__()
        dim = wanted.model_dim
        self.norm_attention, self.norm_moe = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, wanted.num_heads, batch_first=True)
        self.moe = MoELayer(
            dim, wanted.expert_dim, wanted.num_experts, top_k=wanted.top_k, capacity_factor=wanted.capacity_factor
        )

    def forward(self, x_BPD: Tensor) -> Tensor:
        normed_BPD = self.norm_attention(x_BPD)
        x_BPD = x_BPD + self.attention(normed_BPD, normed_BPD, normed_BPD, need_weights=False)[0]
        y_BPD: Tensor = x_BPD + self.moe(self.norm_moe(x_BPD))
        return y_BPD


class MoEViT(LightningModule):
    """Classifies images that are given as patches.

    Args:
        architecture: what is built.
        learning_rate: peak of AdamW, halved along a cosine over `total_steps`.
        total_steps: optimizer steps.
        aux_weight: weight of the load-balancing loss.
        init_seed: of the initial weights, which are the same on any number of ranks.
    """

    def __init__(
        self,
        architecture: Architecture | None = None,
        learning_rate: float = 3e-3,
        total_steps: int = 660,
        aux_weight: float = 0.01,
        init_seed: int = 0,
    ) -> None:
        super().__init__()
        self.architecture = architecture or Architecture()
        self.learning_rate, self.total_steps = learning_rate, total_steps
        self.aux_weight, self.init_seed = aux_weight, init_seed
        self.blocks = nn.ModuleList()
        self.accuracy = MulticlassAccuracy(NUM_CLASSES, average="micro")

    def configure_model(self) -> None:
        """Build the layers: the process groups exist by now, so that each rank makes its own experts only."""
        if len(self.blocks) > 0:
            return
        wanted = self.architecture
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.init_seed)
            self.embed = nn.Linear(PATCH**2, wanted.model_dim)
            self.position = nn.Parameter(0.02 * torch.randn(NUM_PATCHES, wanted.model_dim))
            self.blocks.extend(_Block(wanted) for _ in range(wanted.num_blocks))
            self.norm = nn.LayerNorm(wanted.model_dim)
            self.head = nn.Linear(wanted.model_dim, NUM_CLASSES)

    def forward(self, patches_BP4: Tensor) -> Tensor:
        """Logits, `[B, C]`."""
        x_BPD = self.embed(patches_BP4) + self.position
        for block in self.blocks:
            x_BPD = block(x_BPD)
        logits_BC: Tensor = self.head(self.norm(x_BPD).mean(1))
        return logits_BC

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        patches_BP4, classes_B = batch
        loss = nn.functional.cross_entropy(self(patches_BP4), classes_B)
        self.log("train/loss", loss, prog_bar=True)
        balance = [layer.l_aux for layer in self.modules() if isinstance(layer, MoELayer) and layer.l_aux is not None]
        return loss + self.aux_weight * torch.stack(balance).sum()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        patches_BP4, classes_B = batch
        self.accuracy(self(patches_BP4), classes_B)
        self.log("val/accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
        schedule = CosineAnnealingLR(optimizer, self.total_steps, eta_min=self.learning_rate / 2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main(argv: Sequence[str] | None = None, *, run: bool = True) -> LightningCLI:
    """Parse and run; with `run=False` only build the trainer, the model and the data."""
    return cli.main(argv, run=run, model=MoEViT, data=Digits)


if __name__ == "__main__":
    cli.show_log()
    main()
