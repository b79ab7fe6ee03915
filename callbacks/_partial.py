"""Partial expert checkpoints: all of the dense part and some experts of every layer, in turns or by load."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from typing_extensions import override

from lightning_moe_ckpt.callbacks._arguments import require_choice, require_count
from lightning_moe_ckpt.callbacks._base import STOP_GRACE, CheckpointCallback
from lightning_moe_ckpt.callbacks._batches import Batches
from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.policies import DynamicK, PartialPolicy
from lightning_moe_ckpt.session import LossyWindows, WindowPolicy
from lightning_moe_ckpt.storage import Resume, Retention
from lightning_moe_ckpt.tiers import DEFAULT_MAX_CHUNK, FailureDomain


class PartialExpertCheckpoint(CheckpointCallback):
    """Takes the full state of the dense part and of `k` experts per layer every few steps. A restart is not exact.

    A restart goes back to the newest generation: the dense part is as of its step, each expert as of the newest copy
    that memory of nodes that still live or storage has. What an expert had learned since is lost, and counted: the
    portion of lost tokens (PLT) is logged and kept within `plt_budget` by taking more experts after faults.

    Args:
        url: where checkpoints live, one run per URL: a path, `file://`, `s3://`, `gs://`, `az://` or any fsspec URL.
        every_n_steps: optimizer steps between two snapshots.
        k: experts per layer that each snapshot takes to storage.
        snapshot_k: experts per layer that each snapshot takes to host memory and to copies on other nodes, at least `k`,
            which is the default.
        select: `sequential` takes those first that were saved longest ago, in an order that spreads them over layers
            and ranks; `load_aware` those with most tokens that are not saved yet.
        plt_budget: `k` doubles after a fault until another one like it would leave PLT within this; `None` for never.
        keep: short for `retention=Retention(last=keep)`; 2 if neither is given.
        retention: which committed generations stay, by number, step and age; the others are deleted once newer ones
            are durable, and no generation that stays needs them.
        resume: `auto` continues a run found at `url` and starts one otherwise, `must` refuses to start a new one,
            `never` starts anew beside what is there.
        storage_options: of the store, in the words of s3fs, gcsfs, adlfs or another fsspec file system; a path takes none.
        bandwidth: bytes per second that each rank may write to storage, so that checkpoints leave the network to
            training; `None` for no cap. What does not fit skips generations, and the experts they had come next.
        replicas: copies of every rank's generations in memory of other nodes, kept at the pace of training; `auto` is one
            where the ranks are on several nodes, else none.
        max_chunk: bytes of one message of such a copy, which is what training's own messages may have to wait for.
        failure_domains: node and rack of every rank, by rank; `None` for what each finds out, or what `MOE_CKPT_NODE`
            and `MOE_CKPT_RACK` say.
        batches: `reposition` lets the loaders go on where the restored step was. `log` is for data that cannot be read
            twice.
        stop_grace: how long SIGTERM may take from the signal to the end of the process. Within it all ranks agree on
            a boundary and store it whole; what cannot be stored by then is left. Keep it below the patience of your
            launcher: torchrun and SLURM kill after 30 s.
        freeze_heap: keep what is alive after the first generation out of garbage collections until the fit ends
            (`gc.freeze`); not done where collections are off or frozen already.

    Raises:
        ConfigurationError: an argument is out of range, or, when training starts, the model has no experts.

    Source: PEC/MoC (2024), Sec. 3.
    """

    def __init__(
        self,
        url: str | Path,
        *,
        every_n_steps: int = 1,
        k: int = 1,
        snapshot_k: int | None = None,
        select: Literal["sequential", "load_aware"] = "sequential",
        plt_budget: float | None = 0.05,
        keep: int | None = None,
        retention: Retention | None = None,
        resume: Resume = "auto",
        storage_options: dict[str, Any] | None = None,
        bandwidth: int | None = None,
        replicas: int | Literal["auto"] = "auto",
        max_chunk: int = DEFAULT_MAX_CHUNK,
        failure_domains: Sequence[FailureDomain] | None = None,
        batches: Batches = "reposition",
        stop_grace: timedelta = STOP_GRACE,
        freeze_heap: bool = True,
    ) -> None:
        super().__init__(
            url,
            keep=keep,
            retention=retention,
            resume=resume,
            storage_options=storage_options,
            bandwidth=bandwidth,
            replicas=replicas,
            max_chunk=max_chunk,
            failure_domains=failure_domains,
            batches=batches,
            stop_grace=stop_grace,
            freeze_heap=freeze_heap,
        )
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
    def _policy(self) -> WindowPolicy:
        return LossyWindows(
            every_n_steps=self.every_n_steps,
            experts=PartialPolicy(k=self.k, snapshot_k=self.snapshot_k, order=self.select),
            dynamic_k=DynamicK(plt_budget=self.plt_budget),
            callback=type(self).__name__,
        )
