"""Define the callback for partial expert checkpoints: the dense part and some experts of every layer."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from typing_extensions import Unpack, override

from lightning_moe_ckpt.callbacks._base import CheckpointCallback
from lightning_moe_ckpt.callbacks._shared_arguments import (
    CheckpointArguments,
    require_choice,
    require_count,
    spelled_out,
)
from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.policies import DynamicK, PartialPolicy, Policy


class PartialExpertCheckpoint(CheckpointCallback):
    """Take the dense part and `k` experts per layer every few steps. A restart is not exact.

    A restart goes back to the newest generation. The dense part has the state of its step. Each expert has the state of its
    newest copy in storage or in the memory of surviving nodes. What an expert had learned since that copy is lost. The
    portion of lost tokens (PLT) is counted and logged; taking more experts after faults keeps it within `plt_budget`.
    If storage is too slow for a generation, the experts of that generation come next.
    Storage keeps two copies of every expert. A background thread reads the copies in older files again to check them.
    Storage therefore keeps about twice as many generations, each with its dense part, as one round of all experts takes.

    Args:
        url: where checkpoints live, one run per URL: a path, `file://`, `s3://`, `gs://`, `az://` or any fsspec URL.
        every_n_steps: optimizer steps between two snapshots.
        k: experts per layer that each snapshot sends to storage.
        snapshot_k: experts per layer that each snapshot takes to host memory and to replicas on other nodes, at least
            `k`; `None` for `k`.
        select: `sequential` takes the experts that were saved longest ago first, in an order that spreads them over layers
            and ranks; `load_aware` takes those with most unsaved tokens.
        plt_budget: largest acceptable PLT, as a fraction. After a fault `k` doubles until another such fault
            would stay within it; `None` never changes `k`.
        allow_missing_experts: whether to restore the rest if every copy of some experts is bad. These experts keep the
            weights that the model starts with and have no optimizer state; a warning names them.
        **shared: arguments of every checkpoint callback, see `CheckpointArguments`.

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
