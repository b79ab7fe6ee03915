"""The two callbacks behind every checkpoint policy: one that runs last and captures, one that runs first and replays.

Capturing has to see the state after every other callback, replaying has to repair it before any other callback (a
ModelCheckpoint, a validation) looks at it. The user adds only the first; it inserts the second.
"""

from __future__ import annotations

import logging
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.strategies import Strategy
from typing_extensions import override

from lightning_moe_ckpt import _lightning
from lightning_moe_ckpt.callbacks._recorder import BoundaryRecorder
from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.operators import StateSchema
from lightning_moe_ckpt.parallel import ParallelGroups, build_groups
from lightning_moe_ckpt.session import Life, LifeConfig, Report, WindowPolicy

log = logging.getLogger(__name__)

Resume = Literal["auto", "must", "never"]


class CheckpointCallback(Checkpoint):
    """Takes checkpoints of a run and resumes it from them; subclasses choose what is taken when.

    Args:
        url: where checkpoints live, one run per URL: a path, `file://` or any fsspec URL.
        keep: committed generations to keep; older ones are deleted once newer ones are durable.
        resume: `auto` continues a run found at `url` and starts one otherwise, `must` refuses to start a new one,
            `never` starts anew beside what is there.
        storage_options: passed to the storage backend.
    """

    def __init__(
        self,
        url: str,
        *,
        keep: int = 2,
        resume: Resume = "auto",
        storage_options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if keep < 1:
            raise ConfigurationError(
                f"`{type(self).__name__}(keep={keep})` must be 1 or more: one generation to resume from."
            )
        if resume not in ("auto", "must", "never"):
            raise ConfigurationError(f"`{type(self).__name__}(resume={resume!r})` must be 'auto', 'must' or 'never'.")
        self.url, self.keep, self.resume = url, keep, resume
        self.storage_options = storage_options
        self._run: _Run | None = None
        self._report: Report | None = None

    def _policy(self) -> WindowPolicy:
        """What is taken when."""
        raise NotImplementedError

    @property
    def report(self) -> Report:
        """Figures of this life: window, bytes, stall, generations; final after `fit`.

        Raises:
            ConfigurationError: `fit` was not called yet.
        """
        if self._run is not None:
            return self._run.life.report()
        if self._report is None:
            raise ConfigurationError("`report` has no figures before `Trainer.fit`. Read it during or after the fit.")
        return self._report

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
        if stage == "fit" and not any(isinstance(c, _Replay) for c in callbacks):
            # A new list: Lightning is iterating over the old one.
            trainer.callbacks = [_Replay(self), *callbacks]  # type: ignore[attr-defined]

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if self._run is not None:
            self._run.before_optimizer_step(optimizer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._run is not None:
            self._run.batch_end()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._run is not None:
            self._run.end()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close(trainer)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close(trainer)

    # -- private

    def _begin(self, trainer: Trainer, module: LightningModule) -> None:
        self._run = _Run(self, trainer, module)
        self._run.begin()

    def _close(self, trainer: Trainer) -> None:
        run, self._run = self._run, None
        if run is not None:
            self._report = run.life.report()
            run.close()
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        trainer.callbacks = [c for c in callbacks if not isinstance(c, _Replay)]  # type: ignore[attr-defined]


class _Replay(Callback):
    """Runs first: restores random state and replays slots before any other callback sees the model."""

    def __init__(self, owner: CheckpointCallback) -> None:
        self._owner = owner

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._owner._begin(trainer, pl_module)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._owner._run is not None:
            self._owner._run.batch_start()

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if self._owner._run is not None:
            self._owner._run.replay_before_optimizer_step(optimizer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._owner._run is not None:
            self._owner._run.replay_batch_end(outputs)


class _Run:
    """Joins one trainer's fit to one life of checkpointing."""

    def __init__(self, owner: CheckpointCallback, trainer: Trainer, module: LightningModule) -> None:
        if len(trainer.optimizers) != 1:
            raise ConfigurationError(
                f"Found {len(trainer.optimizers)} optimizers, can capture exactly one. "
                "Put all parameters into one optimizer with several param groups."
            )
        for reason in _lightning.inexact_reasons(trainer, module):
            log.warning("this run cannot be reproduced bit for bit: %s", reason)
        self._trainer, self._module = trainer, module
        self._optimizer: torch.optim.Optimizer = trainer.optimizers[0]
        strategy = trainer.strategy
        groups: ParallelGroups = _groups_of(strategy)
        schema = StateSchema.of(self._optimizer)
        self.life = Life(
            LifeConfig(url=owner.url, keep=owner.keep, resume=owner.resume, storage_options=owner.storage_options),
            policy=owner._policy(),
            module=module,
            schema=schema,
            groups=groups,
            autocast_dtype=_lightning.autocast_dtype(trainer),
            may_skip=_lightning.may_toggle_requires_grad(trainer),
        )
        self._recorder = BoundaryRecorder(trainer, module, (CheckpointCallback, _Replay))
        self._clip = _lightning.ClipTap(trainer, getattr(strategy, "grad_norm", None))
        self._found_inf = _lightning.FoundInf(trainer)
        self._hold: _lightning.NoLightningCheckpoints | None = None
        self._step = trainer.global_step
        self._losses: list[torch.Tensor] = []
        self._found: float | None = None

    def begin(self) -> None:
        start = self.life.begin()
        if start is not None:
            self._recorder.resume(start)
            self._step = self._trainer.global_step
        if self.life.replaying:
            self._hold = _lightning.NoLightningCheckpoints(self._trainer, self._held)

    def close(self) -> None:
        self._release()
        self._clip.remove()
        self._recorder.remove()
        self.life.close()

    # -- first callback

    def batch_start(self) -> None:
        start = self._recorder.complete_start()
        if start is not None:
            self.life.seal(start, step=self._step)
        outcome = self.life.replay_outcome(self._step + 1)
        self._clip.override = None if outcome is None else outcome["grad_norm"]
        self.life.forward_begins()

    def replay_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        outcome = self.life.replay_outcome(self._step + 1)
        if outcome is None:
            return
        self.life.drop_frozen_gradients()
        if outcome["found_inf"] is not None:
            self._found_inf.write(optimizer, outcome["found_inf"], self._module.device)

    def replay_batch_end(self, outputs: Any) -> None:
        if isinstance(outputs, dict) and isinstance(outputs.get("loss"), torch.Tensor):
            self._losses.append(outputs["loss"].detach().clone())
        if self._stepped and self.life.replaying:
            dense = self.life.replayed(self._trainer.global_step, self._losses)
            if dense:
                self._release()

    # -- last callback

    def before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._found = self._found_inf.read(optimizer)
        self.life.fence()

    def batch_end(self) -> None:
        if not self._stepped:
            return
        self._step = self._trainer.global_step
        losses, self._losses = self._losses, []
        outcome = {
            "step": self._step,
            "epoch": self._trainer.current_epoch,
            "grad_norm": self._clip.last,
            "found_inf": self._found,
            "losses": losses,
        }
        self.life.boundary(self._step, outcome)
        self._recorder.want_start()

    def end(self) -> None:
        self.life.end(self._step, self._recorder.take_end())

    # -- private

    @property
    def _stepped(self) -> bool:
        """Whether the batch that ends now ended with an optimizer step."""
        return self._trainer.global_step != self._step

    def _held(self) -> None:
        log.info("a Lightning checkpoint was not written: some operators are still frozen in replay")

    def _release(self) -> None:
        if self._hold is not None:
            self._hold.release()
            self._hold = None


def _groups_of(strategy: Strategy) -> ParallelGroups:
    """The strategy's groups; for others than `MoEStrategy`, every rank holds everything."""
    own: object = getattr(strategy, "groups", None)
    if isinstance(own, ParallelGroups):
        return own
    return build_groups() if dist.is_available() and dist.is_initialized() else ParallelGroups()
