"""A Mixtral whose experts are spread over processes: `python examples/mixtral_ep.py fit --config examples/mixtral_ep.yaml`.

Hugging Face's model as it is, made in `configure_model`. `MoEStrategy(expert_parallel=3)` gives each process a third of the experts
while the model is drawn, or loaded with `--model.path FOLDER`: none ever holds all of them.
"""

# Shape suffixes: B sequences, T bytes.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM

import cli


class Mixtral(LightningModule):
    """A small Mixtral that reads bytes.

    Args:
        path: folder with a model for `from_pretrained`; by default weights are drawn.
        num_experts: experts per layer when weights are drawn; a multiple of the number of processes.
        learning_rate: of AdamW.
    """

    def __init__(self, path: str | None = None, num_experts: int = 12, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.path, self.num_experts, self.learning_rate = path, num_experts, learning_rate
        self.model: Any = None

    def configure_model(self) -> None:
        """Make the model, here and not in `__init__`: by now each process knows its experts."""
        if self.model is not None:
            return
        if self.path is not None:
            self.model = MixtralForCausalLM.from_pretrained(self.path).train()
            return
        config = MixtralConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=self.num_experts,
            num_experts_per_tok=2,
            output_router_logits=True,  # adds the balancing loss
        )
        self.model = MixtralForCausalLM(config)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val/loss", self._loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        bytes_BT, _ = batch
        loss: Tensor = self.model(input_ids=bytes_BT, labels=bytes_BT).loss  # it shifts labels itself
        return loss


def main(argv: Sequence[str] | None = None, *, run: bool = True) -> LightningCLI:
    """Parse and run; with `run=False` only build the trainer, the model and the data."""
    return cli.main(argv, run=run, model=Mixtral)


if __name__ == "__main__":
    cli.show_log()
    main()
