"""The byte-level GPT with Tutel's layers: `python examples/tutel_gpt.py fit --config examples/tutel.yaml`.

Install Tutel first, by its own instructions, against the torch you use. Its layers are as they are: they are built in
`configure_model`, where the process group exists, and spread over all ranks by themselves. `MoEStrategy` finds their
experts, sums gradients where they belong and puts all experts into `.ckpt` files; the callback resumes as ever.
"""

# Shape suffixes: as in `moe_gpt`.

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from lightning.pytorch.cli import LightningCLI
from torch import nn

import cli
from moe_gpt import Architecture, MoEGPT, Recipe


class TutelGPT(MoEGPT):
    """Byte-level language model with experts by Tutel.

    Args:
        architecture: what is built; experts must be a multiple of the number of processes.
        recipe: how it is trained.
        init_seed: of the initial weights.
        gate_noise: of the logits in training, relative to `1 / num_experts`.
    """

    def __init__(
        self,
        architecture: Architecture | None = None,
        recipe: Recipe | None = None,
        init_seed: int = 0,
        gate_noise: float = 0.0,
    ) -> None:
        super().__init__(architecture, recipe, init_seed)
        self.gate_noise = gate_noise

    def make_moe(self, wanted: Architecture, block: int) -> nn.Module:
        """One of Tutel's layers: gates alike on all ranks, experts of their own."""
        from tutel.moe import moe_layer

        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        seed = self.init_seed + 1000 * block
        layer: nn.Module = moe_layer(
            gate_type={
                "type": "top",
                "k": wanted.top_k,
                "capacity_factor": wanted.capacity_factor,
                "gate_noise": self.gate_noise,
            },
            model_dim=wanted.model_dim,
            experts={
                "type": "ffn",
                "num_experts_per_device": wanted.num_experts // ranks,
                "hidden_size_per_expert": wanted.expert_dim,
                "activation_fn": nn.functional.gelu,
            },
            seeds=(seed, seed + 1 + rank, seed),
        )
        return layer


def main(argv: Sequence[str] | None = None, *, run: bool = True) -> LightningCLI:
    """Parse and run; with `run=False` only build the trainer, the model and the data."""
    return cli.main(argv, run=run, model=TutelGPT)


if __name__ == "__main__":
    cli.show_log()
    main()
