"""The same training from a configuration file: `python examples/cli.py fit --config examples/text.yaml`.

Run the same command again after any failure; the callback in the file resumes by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI

import lightning_moe_ckpt  # noqa: F401  # registers the strategy name `moe`
from corpus import TextCrops
from moe_gpt import MoEGPT


def main(argv: Sequence[str] | None = None, *, run: bool = True, model: type[LightningModule] = MoEGPT) -> LightningCLI:
    """Parse and run; with `run=False` only build the trainer, the model and the data."""
    return LightningCLI(
        model,
        TextCrops,
        args=None if argv is None else list(argv),
        run=run,
        # A resumed run finds the file that its first life saved.
        save_config_kwargs={"overwrite": True},
    )


if __name__ == "__main__":
    main()
