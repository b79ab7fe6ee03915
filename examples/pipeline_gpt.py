"""The byte-level GPT in two pipeline stages: `python examples/pipeline_gpt.py fit --config examples/pipeline.yaml`.

The first process has the embeddings and the first half of the blocks, the second one the rest. `MoEStrategy` sends
activations between them, four micro-batches of a batch one behind the other. What is here in place of `training_step` is
all that a model needs for that. Kill either process and run the same command again: it goes on where it was.
"""

# Shape suffixes: as in `moe_gpt`.

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn

import cli
from moe_gpt import VOCABULARY, Architecture, Block, MoEGPT, normal

Part = TypeVar("Part", bound=nn.Module)


class GPTStage(nn.Module):
    """Some consecutive blocks, called by their numbers in the whole model; embeddings before the first, the head behind the last.

    Args:
        wanted: of the whole model.
        blocks: numbers of those that are here.
        make_moe: makes the experts of a block.
        init_seed: of the initial weights, which do not depend on where the model is cut.
    """

    def __init__(
        self, wanted: Architecture, blocks: range, make_moe: Callable[[Architecture, int], nn.Module], init_seed: int
    ) -> None:
        super().__init__()
        self.embed = self.position = self.norm = self.head = None
        if blocks.start == 0:
            self.embed = self._seeded(init_seed, lambda: normal(nn.Embedding(VOCABULARY, wanted.model_dim), std=0.5))
            self.position = self._seeded(
                init_seed + 1, lambda: normal(nn.Embedding(wanted.context, wanted.model_dim), 0.5)
            )
        self.blocks = nn.ModuleDict()
        for number in blocks:
            self.blocks[str(number)] = self._seeded(
                init_seed + 3 + number, partial(self._block, wanted, make_moe, number)
            )
        if blocks.stop == wanted.num_blocks:
            self.norm = nn.LayerNorm(wanted.model_dim)
            self.head = self._seeded(
                init_seed + 2, lambda: normal(nn.Linear(wanted.model_dim, VOCABULARY, bias=False), std=0.02)
            )

    @staticmethod
    def _block(wanted: Architecture, make_moe: Callable[[Architecture, int], nn.Module], number: int) -> Block:
        return Block(wanted, make_moe(wanted, number))

    @staticmethod
    def _seeded(seed: int, make: Callable[[], Part]) -> Part:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return make()

    def forward(self, x: Tensor) -> Tensor:
        """Take bytes `[B, T]` or what the stage before returned, `[B, T, D]`; return that, or logits `[B, T, V]`."""
        if self.embed is not None and self.position is not None:
            x = self.embed(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks.values():
            x = block(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


class PipelineGPT(MoEGPT):
    """Byte-level language model that is trained in stages; arguments as of `MoEGPT`."""

    def configure_stage(self, stage: int, num_stages: int) -> nn.Module:
        """Build the blocks of one stage. Called in place of `configure_model`, when process groups exist."""
        wanted = self.architecture
        first, behind = (wanted.num_blocks * each // num_stages for each in (stage, stage + 1))
        return GPTStage(wanted, range(first, behind), self.make_moe, self.init_seed)

    def split_batch(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Bytes for the first stage, and those that follow them for the loss."""
        bytes_BT, target_BT = batch
        return bytes_BT, target_BT

    def stage_loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy of one micro-batch, on the last stage; what is logged reaches callbacks on all stages."""
        loss = nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())
        if self.training:
            self.log("train/loss", loss, prog_bar=True)
        else:
            self.log("val/bits_per_byte", loss / math.log(2), prog_bar=True, sync_dist=True)
        return loss

    def stage_auxiliary_loss(self) -> Tensor:
        """Balancing loss of the experts of this stage, for the micro-batch that it has just run."""
        found = [layer.l_aux for layer in self.moe_layers() if layer.l_aux is not None]
        return self.recipe.aux_weight * torch.stack(found).sum()


def main(argv: Sequence[str] | None = None, *, run: bool = True) -> LightningCLI:
    """Parse and run; with `run=False` only build the trainer, the model and the data."""
    return cli.main(argv, run=run, model=PipelineGPT)


if __name__ == "__main__":
    cli.show_log()
    main()
