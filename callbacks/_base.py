"""The two callbacks behind every checkpoint policy: one that runs last and captures, one that runs first and replays.

Capturing has to see the state after every other callback, replaying has to repair it before any other callback (a
ModelCheckpoint, a validation) looks at it. The user adds only the first; it inserts the second.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from typing_extensions import override

from lightning_moe_ckpt._lightning_files import LightningResume
from lightning_moe_ckpt._lightning_stops import name_status
from lightning_moe_ckpt.callbacks._arguments import require_choice, require_count
from lightning_moe_ckpt.callbacks._batches import Batches
from lightning_moe_ckpt.callbacks._replay import Replay
from lightning_moe_ckpt.callbacks._run import FitRun
from lightning_moe_ckpt.errors import CheckpointError, ConfigurationError, Fenced
from lightning_moe_ckpt.parallel import restart_is_likely
from lightning_moe_ckpt.policies import Accounting
from lightning_moe_ckpt.session import EXIT_STATUS, LifeConfig, Report, WindowPolicy
from lightning_moe_ckpt.storage import Resume, Retention, checked_url
from lightning_moe_ckpt.tiers import DEFAULT_MAX_CHUNK, FailureDomain

log = logging.getLogger(__name__)

STOP_GRACE = timedelta(seconds=25)
"""Within the 30 s that launchers commonly give, with time left for the rest of the script."""

_LAST_SECONDS = 2.0
"""How long an exception is held up for checkpoints under way."""


class CheckpointCallback(Checkpoint):
    """Takes checkpoints of a run and resumes it from them; subclasses choose what is taken when.

    Args:
        url: where checkpoints live, one run per URL: a path, `file://`, `s3://`, `gs://`, `az://` or any fsspec URL.
        keep: short for `retention=Retention(last=keep)`; 2 if neither is given.
        retention: which committed generations stay, by number, step and age; the others are deleted once newer ones
            are durable.
        resume: `auto` continues a run found at `url` and starts one otherwise, `must` refuses to start a new one,
            `never` starts anew beside what is there.
        storage_options: of the store, in the words of s3fs, gcsfs, adlfs or another fsspec file system; a path takes none.
        bandwidth: bytes per second that each rank may write to storage, so that checkpoints leave the network to
            training; `None` for no cap. What does not fit skips generations.
        replicas: copies of every rank's generations in memory of other nodes, kept at the pace of training; `auto` is one
            where the ranks are on several nodes, else none.
        max_chunk: bytes of one message of such a copy, which is what training's own messages may have to wait for.
        failure_domains: node and rack of every rank, by rank; `None` for what each finds out, or what `MOE_CKPT_NODE`
            and `MOE_CKPT_RACK` say.
        batches: `reposition` lets the loaders fetch again what a resumed run has to train on again. `log` is for data
            that cannot be read twice: the batches of a window are stored with it, and a restart is exact up to the step
            at which the state is dense, not beyond.
        stop_grace: how long SIGTERM may take from the signal to the end of the process. Within it all ranks agree on
            a boundary and store it; what cannot be stored by then is left. Keep it below the patience of your
            launcher: torchrun and SLURM kill after 30 s.
        freeze_heap: keep what is alive after the first generation out of garbage collections until the fit ends
            (`gc.freeze`); not done where collections are off or frozen already.
    """

    def __init__(
        self,
        url: str | Path,
        *,
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
        super().__init__()
        require_count(self, "keep", keep, what="generations, of which one is resumed from", also=[None])
        if keep is not None and retention is not None:
            raise ConfigurationError(
                f"`{type(self).__name__}(keep={keep}, retention={retention})`: `keep` is short for "
                f"`retention=Retention(last={keep})`. Give one of the two."
            )
        require_choice(self, "resume", resume, ("auto", "must", "never"))
        if not isinstance(storage_options, dict | None):
            raise ConfigurationError(
                f"`{type(self).__name__}(storage_options={storage_options!r})` must be a dict: arguments of the file "
                "system of the URL."
            )
        require_count(self, "bandwidth", bandwidth, what="bytes per second", also=[None])
        require_count(self, "replicas", replicas, what="copies", also=["auto", 0])
        require_count(self, "max_chunk", max_chunk, what="bytes")
        require_choice(self, "batches", batches, ("reposition", "log"))
        if stop_grace < timedelta(0):
            raise ConfigurationError(f"`{type(self).__name__}(stop_grace={stop_grace})` must not be negative.")
        if not isinstance(retention, Retention | None):
            raise ConfigurationError(
                f"`{type(self).__name__}(retention={retention!r})` must be a Retention, such as Retention(last=3)."
            )
        self.url, self.resume, self.batches = checked_url(url), resume, batches
        self.retention = retention or (Retention() if keep is None else Retention(last=keep))
        self.stop_grace = stop_grace
        self.storage_options, self.bandwidth, self.freeze_heap = storage_options, bandwidth, freeze_heap
        self.replicas, self.max_chunk, self.failure_domains = replicas, max_chunk, failure_domains
        self._run: FitRun | None = None
        self._report: Report | None = None
        self._lightning_resume: LightningResume | None = None

    def _policy(self) -> WindowPolicy:
        """What is taken when."""
        raise NotImplementedError

    @property
    def keep(self) -> int:
        """Newest committed generations that stay, whatever else `retention` keeps."""
        return self.retention.last

    @property
    def report(self) -> Report:
        """Figures of this life: window, bytes, stall, overhead, generations; final after `fit`.

        Raises:
            ConfigurationError: `fit` was not called yet.
        """
        if self._run is not None:
            return self._run.life.report()
        if self._report is None:
            raise ConfigurationError("`report` has no figures before `Trainer.fit`. Read it during or after the fit.")
        return self._report

    @property
    def run_id(self) -> str | None:
        """Name of the run at `url`, which its files and its shared memory carry; `None` outside of `fit`."""
        return self._run.life.run_id if self._run is not None else None

    @property
    def replaying(self) -> bool:
        """Whether a resumed fit is still re-running steps that the run before it had taken."""
        return self._run is not None and self._run.life.replaying

    @property
    def accounting(self) -> Accounting | None:
        """Tokens of every expert, saved and lost, under a lossy policy and in `fit`; `None` under policies that are exact."""
        figures = self._run.life.report().lost if self._run is not None else None
        return None if figures is None else figures.accounting

    def wait_committed(self, timeout: float = 60.0) -> bool:
        """Block until everything handed to storage so far is durable.

        Args:
            timeout: seconds to wait at most.

        Returns:
            Whether it is.
        """
        return self._run is None or self._run.life.drain(timeout)

    # -- hooks

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        others = [c for c in callbacks if isinstance(c, CheckpointCallback) and c is not self]
        if others:
            raise ConfigurationError(
                f"Found {type(self).__name__} and {type(others[0]).__name__} in one Trainer; they would both resume it. "
                "Keep one of them."
            )
        if stage == "fit" and getattr(trainer, "fast_dev_run", False):
            log.info("no checkpoints are taken or resumed from with `fast_dev_run`")
            return
        if stage == "fit":
            self._lightning_resume = LightningResume(trainer)
        if stage == "fit" and not any(isinstance(c, Replay) for c in callbacks):
            # A new list: Lightning is iterating over the old one.
            trainer.callbacks = [Replay(self._begin), *callbacks]  # type: ignore[attr-defined]

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if self._run is not None:
            self._run.before_optimizer_step(optimizer)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._run is not None:
            self._run.fit_end()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        name_status(exception, EXIT_STATUS)
        try:
            self.wait_committed(_LAST_SECONDS)  # what is whole already; other ranks may be gone
            self._close(
                trainer, keep_memory=restart_is_likely(exception) and not isinstance(exception, (Fenced, SystemExit))
            )
        except (CheckpointError, OSError, RuntimeError):
            log.exception("checkpointing did not end cleanly after %r, which is what ended the fit", exception)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close(trainer)

    # -- private

    def _begin(self, trainer: Trainer, module: LightningModule) -> FitRun:
        config = LifeConfig(
            url=self.url,
            retention=self.retention,
            resume=self.resume,
            storage_options=self.storage_options,
            bandwidth=self.bandwidth,
            replicas=self.replicas,
            max_chunk=self.max_chunk,
            failure_domains=self.failure_domains,
            freeze_heap=self.freeze_heap,
        )
        own = (CheckpointCallback, Replay)
        self._run = FitRun(
            config, self._policy(), trainer, module, own_callbacks=own, stop_grace=self.stop_grace, batches=self.batches
        )
        resumed = self._run.begin()
        if self._lightning_resume is not None:
            self._lightning_resume.decide(resumed=resumed)
            self._lightning_resume = None
        return self._run

    def _close(self, trainer: Trainer, *, keep_memory: bool = False) -> None:
        run, self._run = self._run, None
        if run is not None:
            self._report = run.life.report()
            run.close(keep_memory=keep_memory)
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        trainer.callbacks = [c for c in callbacks if not isinstance(c, Replay)]  # type: ignore[attr-defined]
