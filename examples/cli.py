"""The same training from a configuration file: `python examples/cli.py fit --config examples/text.yaml`.

Run the same command again after any failure; the callback in the file resumes by itself.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI

import lightning_moe_ckpt  # noqa: F401  # registers the strategy name `moe`
from corpus import TextCrops
from extras import require
from moe_gpt import MoEGPT


def main(
    argv: Sequence[str] | None = None,
    *,
    run: bool = True,
    model: type[LightningModule] = MoEGPT,
    data: type[LightningDataModule] = TextCrops,
) -> LightningCLI:
    """Parse and run; with `run=False` only build the trainer, the model and the data."""
    require("jsonargparse")
    return LightningCLI(
        model,
        data,
        args=None if argv is None else list(argv),
        run=run,
        # A resumed run finds the file that its first attempt saved.
        save_config_kwargs={"overwrite": True},
    )


def show_log() -> None:
    """Say on the terminal what is durable, resumed from and lost, once per node; Python shows warnings only by itself."""
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    level = logging.INFO if os.environ.get("LOCAL_RANK", "0") == "0" else logging.WARNING
    logging.getLogger("lightning_moe_ckpt").setLevel(level)


if __name__ == "__main__":
    show_log()
    main()
