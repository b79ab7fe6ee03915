"""Whether a killed run ends with the same bits under the versions of torch and Lightning that are installed here.

`make versions` runs it with the lowest ones that pyproject.toml declares and with the newest; it needs none of the
packages that tests need.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_moe_ckpt.callbacks import DenseCheckpoint, SparseCheckpoint
from lightning_moe_ckpt.moe import MoELayer
from lightning_moe_ckpt.testing import Attempt, Kill, assert_same_end, run_attempts

FEATURES = 8
STEPS = (2, 5, 7, 12)
"""In the first epoch of five, at its end, and in later ones."""
POLICIES: dict[str, Callable[[str], Any]] = {
    "dense": partial(DenseCheckpoint, every_n_steps=2),
    "sparse": partial(SparseCheckpoint, window=3),
}


class Net(LightningModule):
    """Experts, dropout, validation in mid-epoch, and a learning rate that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.moe = nn.Linear(FEATURES, FEATURES), MoELayer(FEATURES, 16, 4)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.moe(nn.functional.dropout(self.first(batch[0]), 0.1)).pow(2).mean()
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.first(batch[0]).pow(2).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def fit(policy: str | None, life: Attempt) -> Mapping[str, Any]:
    """Three epochs of five steps."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    seed_everything(life.seed)
    own = [] if policy is None else [POLICIES[policy](life.url)]
    items = TensorDataset(torch.arange(40.0 * FEATURES).view(-1, FEATURES).sin())
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=3,
        val_check_interval=2,
        gradient_clip_val=0.5,
        callbacks=life.callbacks(*own),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), DataLoader(items, batch_size=8, shuffle=True), DataLoader(items, batch_size=20))
    return {}


def main() -> int:
    """Kill a run at several steps, under each policy; how many ended with other bits."""
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        workdir = Path(folder)
        reference = run_attempts(partial(fit, None), url="", workdir=workdir / "reference")
        for policy in POLICIES:
            for step in STEPS:
                url = workdir / f"{policy}-{step}"
                kill = Kill(phase="after_batch_end", step=step, settle=10.0)
                lives = run_attempts(partial(fit, policy), url=str(url / "run"), workdir=url, kills=[kill])
                try:
                    assert_same_end(reference, lives)
                except AssertionError as error:
                    wrong += 1
                    print(f"{policy}, killed in step {step}: {error}")
    versions = f"lightning {lightning.__version__}, torch {torch.__version__}"
    print(
        f"{versions}: {len(POLICIES) * len(STEPS) - wrong} of {len(POLICIES) * len(STEPS)} killed runs end with the same bits"
    )
    return wrong


if __name__ == "__main__":
    sys.exit(main())
