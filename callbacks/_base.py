"""Define the base class of all checkpoint callbacks, which captures state and inserts the callback that replays.

The user adds one `CheckpointCallback`. It runs last, so that it captures the state that all other callbacks have left.
It inserts a `ReplayHooks` callback, which runs first: replay repairs state before a ModelCheckpoint or validation sees it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from typing_extensions import Unpack, override

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.callbacks._shared_arguments import DEFAULTS, CheckpointArguments, SharedArguments, spelled_out
from lightning_moe_ckpt.errors import CheckpointError, ConfigurationError, Fenced
from lightning_moe_ckpt.fit import Audits, FitSession, InPlace, OnlyBeats, WatchedData, can_rejoin, supervisor
from lightning_moe_ckpt.fit._callbacks import tries_only
from lightning_moe_ckpt.fit._cli import explain_errors
from lightning_moe_ckpt.fit._files import LightningResume, let_best_come_first
from lightning_moe_ckpt.fit._rerun import Rerun
from lightning_moe_ckpt.fit._stops import name_status
from lightning_moe_ckpt.fit.loggers._once import silence_loggers
from lightning_moe_ckpt.fit.loops._trainer import callbacks_of
from lightning_moe_ckpt.goodput import Goodput
from lightning_moe_ckpt.launch import DENSIFY, RerunRequest
from lightning_moe_ckpt.parallel import restart_is_likely
from lightning_moe_ckpt.policies import Policy, TokenLedger
from lightning_moe_ckpt.process import EXIT_STATUS
from lightning_moe_ckpt.session import Report
from lightning_moe_ckpt.storage import checked_url
from lightning_moe_ckpt.tiers import SessionConfig

log = rank_logger(__name__)

_LAST_SECONDS = 2.0
"""Seconds that an exception waits for checkpoints under way."""


class ReplayHooks(Callback):
    """Hooks that restore random state and drop gradients of frozen parameters, before any other callback sees the model.

    `begin` opens the run and loads the generation to resume from, in `on_fit_start`.
    """

    def __init__(self, begin: Callable[[Trainer, LightningModule], FitSession]) -> None:
        self._begin = begin
        self._run: FitSession

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._run = self._begin(trainer, pl_module)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._run.batch_start()

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if (audits := self._run.sessions.audits) is not None:
            audits.backward_ends()
        if (frozen := self._run.sessions.now.repeats.frozen) is not None:
            frozen.fill_gradients()

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self._run.replay_before_optimizer_step(optimizer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._run.batch_end(outputs)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._run.validation_begins()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._run.end()


class SupervisedHooks(ReplayHooks):
    """`ReplayHooks` under a supervisor, which would start another process in the place of a dead one."""

    def __init__(self, in_place: InPlace | OnlyBeats, begin: Callable[[Trainer, LightningModule], FitSession]) -> None:
        super().__init__(lambda trainer, module: in_place.begin(lambda: begin(trainer, module)))
        self._in_place = in_place

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._in_place.batch_begins(self._run, batch)
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._in_place.batch_ends()
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)


class CheckpointCallback(SharedArguments, Checkpoint):
    """Take checkpoints of a run and resume it from them; subclasses choose what is taken at which step.

    Args:
        url: where checkpoints live, one run per URL: a path, `file://`, `s3://`, `gs://`, `az://` or any fsspec URL.
        **shared: arguments of every checkpoint callback, see `CheckpointArguments`.

    Raises:
        TypeError: an argument that the callback does not have.
        ConfigurationError: an argument is out of range.
    """

    @spelled_out
    def __init__(self, url: str | Path, **shared: Unpack[CheckpointArguments]) -> None:
        super().__init__()
        self._take(shared)
        self.url = checked_url(url)
        self._run: FitSession | None = None
        self._carried: set[str] = set()
        self._report: Report | None = None
        self._lightning_resume: LightningResume | None = None
        self._in_place: InPlace | OnlyBeats | None = None
        self._watched: WatchedData | None = None
        self._rerun = None if (asked := _asked_again()) is None else Rerun(asked, self.url)

    def _policy(self) -> Policy:
        """Return the policy that chooses what is taken at which step."""
        raise NotImplementedError

    dense_every_n_steps: int | None = None
    """Steps after which storage gets everything of one boundary in the place of what the policy takes there."""
    best_model_path = ""
    """Always empty: this callback does not look for the best weights. Lightning reads it from every `Checkpoint`."""

    @property
    def keep(self) -> int:
        """Number of newest committed generations that stay, whatever else `retention` keeps."""
        return self.retention.last

    @property
    def report(self) -> Report:
        """Figures of this process's run: window, bytes, stall, overhead, generations; `print` shows a table. Final after `fit`.

        Empty (`began` is false) where a fit ended before its run was opened: with `fast_dev_run`, or by an exception in `setup`.

        Raises:
            ConfigurationError: `fit` was not called yet.
        """
        if self._run is not None:
            return self._run.sessions.report()
        if self._report is None:
            raise ConfigurationError(
                "`report` has no figures before `Trainer.fit`. Read it during or after the fit, and where Lightning starts processes of "
                "its own (spawn, fork, notebooks) in those: a callback reads it in `on_fit_end`."
            )
        return self._report

    @property
    def goodput(self) -> Goodput | None:
        """Parts of the run's wall time so far, over all its starts, as in `report`; `None` outside of `fit`."""
        return self._run.session.goodput if self._run is not None else None

    @property
    def run_id(self) -> str | None:
        """Name of the run at `url`. Its files and its shared memory carry it; `None` outside of `fit`."""
        return self._run.session.run_id if self._run is not None else None

    @property
    def memory_tag(self) -> str | None:
        """Text that all names of this run's shared memory contain; `None` outside of `fit`."""
        return self._run.session.memory_tag if self._run is not None else None

    @property
    def replaying(self) -> bool:
        """Whether a resumed fit is still repeating steps that the previous process had taken."""
        return self._run is not None and self._run.session.replaying

    @property
    def accounting(self) -> TokenLedger | None:
        """Saved and lost tokens of every expert; `None` outside of `fit` and under policies whose restarts are exact."""
        figures = self._run.sessions.report().lost if self._run is not None else None
        return None if figures is None else figures.accounting

    def wait_committed(self, timeout: float = 60.0) -> bool:
        """Block until everything handed to storage so far is durable.

        Args:
            timeout: seconds to wait at most.

        Returns:
            Whether all of it became durable in time.
        """
        return self._run is None or self._run.session.drain(timeout)

    # -- hooks

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not isinstance(trainer, Trainer):
            raise ConfigurationError(
                f"{type(self).__name__} resumes and follows the fit loop of `lightning.pytorch.Trainer`, and found a "
                f"{type(trainer).__module__}.{type(trainer).__qualname__}. Write `import lightning.pytorch as pl` and use "
                "`pl.Trainer`."
            )
        if stage == "fit":
            self._report = None
        let_best_come_first(trainer, self)
        callbacks = callbacks_of(trainer)
        others = [c for c in callbacks if isinstance(c, CheckpointCallback) and c is not self]
        if others:
            raise ConfigurationError(
                f"Found {type(self).__name__} and {type(others[0]).__name__} in one Trainer; they would both resume it. "
                "Keep one of them."
            )
        if stage != "fit" or tries_only(trainer):  # after a trial the fit that trains comes later
            return
        if getattr(trainer, "fast_dev_run", False):
            log.info("no checkpoints are taken or resumed from with `fast_dev_run`")
            return
        self._lightning_resume = LightningResume(trainer)
        self._watched = self._watch(trainer, pl_module)
        if not any(isinstance(c, ReplayHooks) for c in callbacks):
            # A new list: Lightning is iterating over the old one.
            again = [] if self._rerun is None else [self._rerun]
            trainer.callbacks = [self._hooks(trainer, pl_module), *again, *callbacks]  # type: ignore[attr-defined]

    @override
    def on_before_zero_grad(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if self._run is not None:
            self._run.before_zero_grad()

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        if self._run is None:
            return
        if (own := self._run.clock.own) is not None:
            own.end()
        if self._run.trained.may_begin:
            self._run.before_backward()

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if self._run is not None:
            self._run.before_optimizer_step(optimizer)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._run is not None:
            self._run.validation_ends()

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._run is not None:
            self._run.fit_end()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        name_status(exception, EXIT_STATUS)
        if self._run is not None:
            self._run.sessions.failed(exception)
        try:
            self.wait_committed(_LAST_SECONDS)  # commits complete generations; other ranks may be gone
            self._close(
                trainer, keep_memory=restart_is_likely(exception) and not isinstance(exception, (Fenced, SystemExit))
            )
        except (CheckpointError, OSError, RuntimeError):
            log.exception("checkpointing did not end cleanly after %r, which is what ended the fit", exception)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close(trainer)

    # -- private

    def _hooks(self, trainer: Trainer, module: LightningModule) -> ReplayHooks:
        found = supervisor(trainer)
        if found is None:
            return ReplayHooks(self._begin)
        if not can_rejoin(trainer):
            self._in_place = OnlyBeats(trainer, found)
            return SupervisedHooks(self._in_place, self._begin)
        policy = self._policy()
        exact = policy.exact and policy.chains is None and self.batches == "reposition"
        self._in_place = InPlace(trainer, module, found, own_callbacks=_OWN, exact=exact, leave=self._leave)
        return SupervisedHooks(self._in_place, self._begin)

    def _config(self) -> SessionConfig:
        config = SessionConfig(
            url=self.url,
            dense_every_n_steps=self.dense_every_n_steps,
            **{field.name: getattr(self, field.name) for field in fields(SessionConfig) if field.name in DEFAULTS},
        )
        if self._rerun is not None:
            kept = replace(config.retention, last=10**9)  # of what an audit stores
            return replace(
                config, resume="must", rerun=self._rerun.request, replicas=0, dense_every_n_steps=None, retention=kept
            )
        densify = os.environ.get(DENSIFY)
        return replace(config, resume="must", densify=densify, elastic="refuse") if densify else config

    def _begin(self, trainer: Trainer, module: LightningModule) -> FitSession:
        watched, self._watched = self._watched or self._watch(trainer, module), None
        watched.close()
        self._run = FitSession(
            self._config(),
            self._policy(),
            trainer,
            module,
            own_callbacks=_OWN,
            watched=watched,
            stop_grace=self.stop_grace,
            batches=self.batches,
            on_change=self.on_change,
            on_mismatch=self.on_mismatch,
            rerun=self._rerun,
        )
        resumed = self._run.begin()
        config = self._run.sessions.config
        # Where steps of a run are only done again, nothing may be judged: that would make generations of the live run void.
        if self.audit_every_n_steps is not None and not (config.densify or config.rerun):
            every, on_fault = self.audit_every_n_steps, self.on_fault
            self._run.sessions.audits = Audits(trainer, module, self._run, every=every, on_fault=on_fault)
        if self._lightning_resume is not None:
            self._lightning_resume.decide(resumed=resumed)
            self._lightning_resume = None
        return self._run

    def _watch(self, trainer: Trainer, module: LightningModule) -> WatchedData:
        attributes = {"most_nbytes": self.attributes_nbytes, "untouched": self.untouched, "carried": self._carried}
        return WatchedData(trainer, module, _OWN, deterministic=self.deterministic_dataset, attributes=attributes)

    def _leave(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            self._report = run.sessions.report()
            try:
                run.leave()
            except (CheckpointError, OSError, RuntimeError):
                log.exception("checkpointing of the aborted run did not end cleanly")

    def _close(self, trainer: Trainer, *, keep_memory: bool = False) -> None:
        run, self._run = self._run, None
        report = self._report or Report.empty() if run is None else run.sessions.report()
        self._report = report  # a close may raise
        if self._in_place is not None:
            self._in_place.close()
            self._in_place = None
        if self._watched is not None:
            self._watched.close()
            self._watched = None
        if run is not None:
            began = time.perf_counter()
            run.close(keep_memory=keep_memory)
            self._report = replace(report, goodput=report.goodput + Goodput(hooks=time.perf_counter() - began))
        trainer.callbacks = [  # type: ignore[attr-defined]
            callback for callback in callbacks_of(trainer) if not isinstance(callback, (ReplayHooks, Rerun))
        ]


def _asked_again() -> RerunRequest | None:
    """Return the steps that this process is to run again, whose loggers then write nothing; `None` where it trains as ever."""
    if (request := RerunRequest.from_environment()) is not None:
        silence_loggers(Path(request.results).parent / "logs")
    return request


_OWN = (CheckpointCallback, ReplayHooks, Rerun)
"""Callbacks whose state is no part of a run."""


def checkpoint_of(trainer: Trainer) -> CheckpointCallback | None:
    """Return the trainer's checkpoint callback; `None` without."""
    return next((callback for callback in callbacks_of(trainer) if isinstance(callback, CheckpointCallback)), None)


explain_errors()
_asked_again()  # a script that imports this writes nothing before it makes a callback either
