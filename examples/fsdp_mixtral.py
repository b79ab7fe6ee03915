"""A Mixtral in shards: `torchrun --standalone --nproc-per-node 3 examples/fsdp_mixtral.py`, or `moe-ckpt run` for `torchrun`.

Hugging Face's model with random weights, under Lightning's own `ModelParallelStrategy`: FSDP2 leaves each process a part of
every tensor, and `--tensor-parallel 2` spreads attention heads over pairs of processes as well. The callback writes of each
process what it has. Kill any process at any moment and run the same command again: the last lines have the same numbers.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import MixtralConfig, MixtralForCausalLM

from corpus import TextCrops
from lightning_moe_ckpt.callbacks import SparseCheckpoint


class Mixtral(LightningModule):
    """A small Mixtral that reads bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Any = None

    def configure_model(self) -> None:
        """Build the model and leave this process its shards; the mesh of all processes is there by now."""
        if self.model is not None:
            return
        config = MixtralConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=8,
            num_experts_per_tok=2,
            output_router_logits=True,  # adds the balancing loss
        )
        self.model = MixtralForCausalLM(config)
        assert self.device_mesh is not None, "`ModelParallelStrategy` makes it"
        data, tensor = self.device_mesh["data_parallel"], self.device_mesh["tensor_parallel"]
        heads = {"q_proj": ColwiseParallel(), "k_proj": ColwiseParallel(), "v_proj": ColwiseParallel()}
        for layer in self.model.model.layers:
            if tensor.size() > 1:
                parallelize_module(layer.self_attn, tensor, {**heads, "o_proj": RowwiseParallel()})
            fully_shard(layer, mesh=data)
        fully_shard(self.model, mesh=data)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        bytes_BT, _ = batch
        loss: Tensor = self.model(input_ids=bytes_BT, labels=bytes_BT).loss  # it shifts labels itself
        if self.global_step % 20 == 0:
            self.print(f"step {self.global_step}: loss {loss.item():.4f}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(argv: Sequence[str] | None = None) -> Mixtral:
    """Train, or go on, and return the trained module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="out/fsdp/checkpoints")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument(
        "--tensor-parallel", type=int, default=1, help="processes over which attention heads are spread"
    )
    args = parser.parse_args(argv)

    ranks, local = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    seed_everything(1)
    trainer = Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=local,
        num_nodes=ranks // local,
        strategy=ModelParallelStrategy(
            data_parallel_size=ranks // args.tensor_parallel,
            tensor_parallel_size=args.tensor_parallel,
        ),
        callbacks=[SparseCheckpoint(args.url, window=4)],
        max_steps=args.steps,
        logger=False,
        enable_progress_bar=False,
    )
    module = Mixtral()
    trainer.fit(module, TextCrops().train_dataloader())
    shards = torch.cat([each.to_local().detach().flatten() for each in module.parameters()])  # type: ignore[attr-defined]
    print(f"rank {trainer.global_rank}: {len(shards)} numbers add up to {float(shards.double().sum()).hex()}")
    return module


if __name__ == "__main__":
    main()
