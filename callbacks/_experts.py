"""Define the callbacks that take the dense part and some experts: so many of every layer, or what budgets allow."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from torchmetrics import Metric
from typing_extensions import Unpack, override

from lightning_moe_ckpt._units import number_of_bytes
from lightning_moe_ckpt.callbacks._base import CheckpointCallback
from lightning_moe_ckpt.callbacks._monitor import ExpertLoadMonitor
from lightning_moe_ckpt.callbacks._shared_arguments import (
    CheckpointArguments,
    require_choice,
    require_count,
    spelled_out,
)
from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.fit.loops._trainer import callbacks_of, log_row
from lightning_moe_ckpt.metrics import MoementaryLostTokens, PortionOfLostTokens, TokensAtRisk
from lightning_moe_ckpt.policies import Budget, Deltas, DynamicK, PartialPolicy, Policy, SelectivePolicy


class ExpertCheckpoint(CheckpointCallback):
    """Base of callbacks whose restarts are not exact: logs their cost so far, and the cost of a loss now.

    Beside an `ExpertLoadMonitor`, which logs the same and more, the callback logs none of these.
    """

    def __init__(self, url: str | Path, **shared: Unpack[CheckpointArguments]) -> None:
        super().__init__(url, **shared)
        self.metrics: dict[str, Metric] = {}
        """PLT, MLT and tokens at risk by the names under which they are logged, as of the newest row; empty before that."""
        self._logged = 0

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        every, step = int(trainer.log_every_n_steps), trainer.global_step  # type: ignore[attr-defined]
        if not every or step % every or step == self._logged:
            return
        self._logged = step
        if not any(isinstance(callback, ExpertLoadMonitor) for callback in callbacks_of(trainer)):
            self._log(trainer)

    def _log(self, trainer: Trainer) -> None:
        if (ledger := self.accounting) is None or not trainer.is_global_zero:
            return
        if not self.metrics:
            alone = {"sync_on_compute": False}  # ranks have the same
            self.metrics = {
                "moe/plt": PortionOfLostTokens(sum(ledger.num_experts), **alone),
                "moe/mlt": MoementaryLostTokens(ledger.num_experts, **alone),
                "moe/unsaved_tokens": TokensAtRisk([*ledger.saved], **alone),
            }
        plt, mlt, risk = self.metrics.values()
        plt.update(ledger.lost, ledger.processed, ledger.dropped, ledger.progress)
        mlt.update(ledger.lost, ledger.processed, ledger.dropped)
        risk.update({level: int(ledger.unsaved(level).sum()) for level in ledger.saved})
        row = {"moe/plt": float(plt.compute()), "moe/mlt": float(mlt.compute())}
        log_row(trainer, row | {f"moe/unsaved_tokens/{level}": float(n) for level, n in risk.compute().items()})


class PartialExpertCheckpoint(ExpertCheckpoint):
    """Take the dense part and `k` experts per layer every few steps. A restart is not exact.

    A restart goes back to the newest generation. The dense part has the state of its step. Each expert has the state of its
    newest copy in storage or in the memory of surviving nodes. What an expert had learned since that copy is lost. The
    portion of lost tokens (PLT) is counted and logged; taking more experts after faults keeps it within `plt_budget`.
    If storage is too slow for a generation, the experts of that generation come next.
    Storage keeps two copies of every expert. A background thread reads the copies in older files again to check them.
    Storage therefore keeps about twice as many generations, each with its dense part, as one round of all experts takes.

    Args:
        url: where checkpoints live, one run per URL: a path, `file://`, `s3://`, `gs://`, `az://` or any fsspec URL.
        every_n_steps: most optimizer steps between two snapshots in memory; `None` for 1, or more within `overhead_target`.
        k: experts per layer that each snapshot sends to storage.
        snapshot_k: experts per layer that each snapshot takes to host memory and to replicas on other nodes, at least
            `k`; `None` for `k`, `auto` for as many as measured bandwidth copies to host memory while a step computes.
        select: `sequential` takes the experts that were saved longest ago first, in an order that spreads them over layers
            and ranks; `load_aware` takes those with most unsaved tokens.
        plt_budget: largest acceptable PLT, as a fraction of all tokens that the planned training routes (of those so far,
            where `Trainer` knows no last step). A fault doubles `k` if another such fault would exceed it; `k` falls again,
            at most to what is given here, as soon as it would not. `None` never changes `k`.
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
        every_n_steps: int | None = None,
        k: int = 1,
        snapshot_k: int | Literal["auto"] | None = None,
        select: Literal["sequential", "load_aware"] = "sequential",
        plt_budget: float | None = 0.05,
        allow_missing_experts: bool = False,
        **shared: Unpack[CheckpointArguments],
    ) -> None:
        super().__init__(url, **shared)
        self.allow_missing_experts = allow_missing_experts
        self.every_n_steps = require_count(self, "every_n_steps", every_n_steps, what="steps", also=[None])
        self.k = require_count(self, "k", k, what="experts per layer")
        require_count(self, "snapshot_k", snapshot_k, what="experts per layer", also=[None, "auto"])
        self.select = require_choice(self, "select", select, ("sequential", "load_aware"))
        if isinstance(snapshot_k, int) and snapshot_k < k:
            raise ConfigurationError(
                f"`PartialExpertCheckpoint(k={k}, snapshot_k={snapshot_k})`: what goes to storage goes to memory first. "
                "Give a `snapshot_k` of `k` or more."
            )
        if plt_budget is not None and not (isinstance(plt_budget, int | float) and 0 <= plt_budget <= 1):
            raise ConfigurationError(
                f"`PartialExpertCheckpoint(plt_budget={plt_budget!r})` must be a portion from 0 to 1, or None."
            )
        self.snapshot_k, self.plt_budget = snapshot_k, plt_budget

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


class SelectiveExpertCheckpoint(ExpertCheckpoint):
    """Take the dense part and, within budgets of bytes, the experts with most unsaved tokens. A restart is not exact.

    Each generation takes the dense part first. The rest of a budget goes to layers in proportion to their unsaved tokens, and
    in each layer to the experts with most of them. The local budget limits what is copied to host memory, the remote budget
    what leaves the node. A restart goes back to the newest generation. The dense part has the state of its step. Each expert
    has the state of its newest copy in storage or in the memory of surviving nodes. What an expert had learned since that
    copy is lost, and counted (PLT, MLT).
    Storage keeps two copies of every expert. A background thread reads the copies in older files again to check them.
    Storage therefore keeps about twice as many generations, each with its dense part, as one round of all experts takes.

    Args:
        url: where checkpoints live, one run per URL: a path, `file://`, `s3://`, `gs://`, `az://` or any fsspec URL.
        every_n_steps: most optimizer steps between two snapshots in memory; `None` for 1, or more within `overhead_target`.
        local_budget: bytes that each rank may copy to host memory per snapshot, a number or text such as `400MB`; `auto`
            for what measured bandwidth moves while a step computes.
        remote_budget: bytes per snapshot that each rank may send to storage, at most `local_budget`, written alike; `auto`
            for what moves between two snapshots at the rate of the newest ones.
        delta: send other nodes gradients instead of states, for experts of the previous snapshot. `lossless` rebuilds
            states to the last bit; `bf16` takes half the bytes, and replicas are approximate. Needs `every_n_steps=1` and
            Adam or AdamW in float32 (`lossless` plain, on a CPU); otherwise, and with `None`, states are sent whole.
        resync_every: with `bf16`, generations until replicas are sent whole again; their error is logged then.
        allow_missing_experts: whether to restore the rest if every copy of some experts is bad. These experts keep the
            weights that the model starts with and have no optimizer state; a warning names them.
        **shared: arguments of every checkpoint callback, see `CheckpointArguments`.

    Raises:
        ConfigurationError: an argument is out of range, or, when training starts, the model has no experts.

    Source: MOETION (2024), Sec. 4, Algorithm 1.
    """

    @spelled_out
    def __init__(
        self,
        url: str | Path,
        *,
        every_n_steps: int | None = None,
        local_budget: int | str = "auto",
        remote_budget: int | str = "auto",
        delta: Literal["lossless", "bf16"] | None = "lossless",
        resync_every: int = 64,
        allow_missing_experts: bool = False,
        **shared: Unpack[CheckpointArguments],
    ) -> None:
        super().__init__(url, **shared)
        self.allow_missing_experts = allow_missing_experts
        self.every_n_steps = require_count(self, "every_n_steps", every_n_steps, what="steps", also=[None])
        self.delta = require_choice(self, "delta", delta, ("lossless", "bf16", None))
        self.resync_every = require_count(self, "resync_every", resync_every, what="generations")
        local: Budget = number_of_bytes(self, "local_budget", local_budget, also=["auto"])
        remote: Budget = number_of_bytes(self, "remote_budget", remote_budget, also=["auto"])
        if isinstance(local, int) and isinstance(remote, int) and remote > local:
            raise ConfigurationError(
                f"`{type(self).__name__}(local_budget={local_budget!r}, remote_budget={remote_budget!r})`: what leaves the "
                "node is copied to host memory first. Give a `local_budget` of `remote_budget` or more."
            )
        self.local_budget, self.remote_budget = local, remote

    @override
    def _policy(self) -> Policy:
        return SelectivePolicy(
            every_n_steps=self.every_n_steps,
            local_budget=self.local_budget,
            remote_budget=self.remote_budget,
            deltas=None if self.delta is None else Deltas(kind=self.delta, resync_every=self.resync_every),
            allow_missing_experts=self.allow_missing_experts,
        )
