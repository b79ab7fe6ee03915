"""Partial expert checkpoints: all of the dense part and some experts of every layer, in turns or by load."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from typing_extensions import Unpack, override

from lightning_moe_ckpt.callbacks._arguments import require_choice, require_count
from lightning_moe_ckpt.callbacks._base import CheckpointCallback
from lightning_moe_ckpt.callbacks._shared_arguments import CheckpointArguments, spelled_out
from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.policies import DynamicK, PartialPolicy, Policy


class PartialExpertCheckpoint(CheckpointCallback):
    """Takes the full state of the dense part and of `k` experts per layer every few steps. A restart is not exact.

    A restart goes back to the newest generation: the dense part is as of its step, each expert as of the newest copy
    that memory of nodes that still live or storage has. What an expert had learned since is lost, and counted: the
    portion of lost tokens (PLT) is logged and kept within `plt_budget` by taking more experts after faults. Experts of a generation that storage had
    no time for come next.

    Storage keeps two copies of every expert, of which a background thread reads those in older files again. That takes about
    twice as many older generations, each with its dense part, as a round of all experts.

    Args:
        url: where checkpoints live, one run per URL: a path, `file://`, `s3://`, `gs://`, `az://` or any fsspec URL.
        every_n_steps: optimizer steps between two snapshots.
        k: experts per layer that each snapshot takes to storage.
        snapshot_k: experts per layer that each snapshot takes to host memory and to copies on other nodes, at least `k`,
            which is the default.
        select: `sequential` takes those first that were saved longest ago, in an order that spreads them over layers
            and ranks; `load_aware` those with most tokens that are not saved yet.
        plt_budget: `k` doubles after a fault until another one like it would leave PLT within this; `None` for never.
        allow_missing_experts: where no generation can be restored because every copy of some experts is bad, restore all
            else; these keep the weights that the model starts with, and have no optimizer state. A warning names them.
        **shared: what every checkpoint callback takes, see `CheckpointArguments`.

    Raises:
        ConfigurationError: an argument is out of range, or, when training starts, the model has no experts.

    Source: PEC/MoC (2024), Sec. 3.
    """

    @spelled_out
    def __init__(
        self,
        url: str | Path,
        *,
        every_n_steps: int = 1,
        k: int = 1,
        snapshot_k: int | None = None,
        select: Literal["sequential", "load_aware"] = "sequential",
        plt_budget: float | None = 0.05,
        allow_missing_experts: bool = False,
        **shared: Unpack[CheckpointArguments],
    ) -> None:
        super().__init__(url, **shared)
        self.allow_missing_experts = allow_missing_experts
        require_count(self, "every_n_steps", every_n_steps, what="steps")
        require_count(self, "k", k, what="experts per layer")
        require_count(self, "snapshot_k", snapshot_k, what="experts per layer", also=[None])
        require_choice(self, "select", select, ("sequential", "load_aware"))
        if snapshot_k is not None and snapshot_k < k:
            raise ConfigurationError(
                f"`PartialExpertCheckpoint(k={k}, snapshot_k={snapshot_k})`: what goes to storage goes to memory first. "
                "Give a `snapshot_k` of `k` or more."
            )
        if plt_budget is not None and not 0 <= plt_budget <= 1:
            raise ConfigurationError(
                f"`PartialExpertCheckpoint(plt_budget={plt_budget})` must be a portion from 0 to 1, or None."
            )
        self.every_n_steps, self.k, self.snapshot_k = every_n_steps, k, snapshot_k
        self.select, self.plt_budget = select, plt_budget

    @override
    def _policy(self) -> Policy:
        return PartialPolicy(
            every_n_steps=self.every_n_steps,
            k=self.k,
            snapshot_k=self.snapshot_k,
            order=self.select,
            dynamic_k=DynamicK(plt_budget=self.plt_budget),
            allow_missing_experts=self.allow_missing_experts,
        )
