"""Define the callback for dense checkpoints: the whole state, every few steps."""

from __future__ import annotations

from pathlib import Path

from typing_extensions import Unpack, override

from lightning_moe_ckpt.callbacks._base import CheckpointCallback
from lightning_moe_ckpt.callbacks._shared_arguments import CheckpointArguments, require_count, spelled_out
from lightning_moe_ckpt.policies import DensePolicy, Policy


class DenseCheckpoint(CheckpointCallback):
    """Take the full state every `every_n_steps` steps and resume from it, bit for bit.

    Args:
        url: where checkpoints live, one run per URL: a path, `file://`, `s3://`, `gs://`, `az://` or any fsspec URL.
        every_n_steps: optimizer steps between two snapshots.
        **shared: arguments of every checkpoint callback, see `CheckpointArguments`.

    Raises:
        ConfigurationError: an argument is out of range.

    Source: CheckFreq (2021) and Gemini (2023), the baselines of MoEvement (2024), Sec. 5.
    """

    @spelled_out
    def __init__(
        self,
        url: str | Path,
        *,
        every_n_steps: int = 100,
        **shared: Unpack[CheckpointArguments],
    ) -> None:
        super().__init__(url, **shared)
        require_count(self, "every_n_steps", every_n_steps, what="steps")
        self.every_n_steps = every_n_steps

    @override
    def _policy(self) -> Policy:
        return DensePolicy(every_n_steps=self.every_n_steps)
