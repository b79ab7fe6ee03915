"""Inject faults into the training that the callback is part of, by a script or at random.

The arguments and the record of earlier processes alone decide which faults strike, never random state of the
process, so that training with faults differs from training without them only by the faults.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_moe_ckpt.callbacks._base import CheckpointCallback
from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.session._capture import CaptureSession
from lightning_moe_ckpt.storage import wrapping_backends
from lightning_moe_ckpt.testing._backends import WatchedBackend
from lightning_moe_ckpt.testing._fault import Fault, FaultPhase, RandomFaults, Schedule, ScheduledFault
from lightning_moe_ckpt.testing._fault_effects import Effects
from lightning_moe_ckpt.testing._fault_media import StorageFaults
from lightning_moe_ckpt.testing._fault_record import FaultRecord, fired, record_folder, uptime
from lightning_moe_ckpt.testing._kill import HookPhase, LatePhase, PhaseCallback, settle
from lightning_moe_ckpt.testing._records import read_lines
from lightning_moe_ckpt.tiers import this_domain

log = logging.getLogger(__name__)


class FaultInjector(PhaseCallback):
    """Inject faults into training, to show what survives. Put it first among the callbacks.

    Every fault is logged and recorded in `folder` before it happens, and does not happen again when the job restarts.
    `python -m lightning_moe_ckpt.testing FOLDER` shows the results of a campaign.

    Args:
        faults: faults that each strike at a given place of training; `None` for none.
        random: faults at random times, with a mean time between them; `None` for none.
        folder: folder of the ranks' records, the same in every start of the job, on a file system that all nodes
            share if nodes or racks are to be lost. The default is the environment variable `MOE_CKPT_FAULTS`, else
            `moe-ckpt-faults` in the Trainer's `default_root_dir`. Remove the folder to have all faults happen again.
    """

    def __init__(
        self,
        faults: list[Fault] | None = None,
        *,
        random: RandomFaults | None = None,
        folder: str | Path | None = None,
    ) -> None:
        super().__init__()
        self.faults, self.random, self.folder = list(faults or []), random, folder
        for fault in self.faults:
            if not isinstance(fault, Fault):
                raise ConfigurationError(f"`FaultInjector(faults=[{fault!r}])` must hold `Fault`s, see `fail_at`.")
        self._campaign: _Campaign | None = None

    # -- hooks

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit" or getattr(trainer, "fast_dev_run", False):
            return
        self._check_places(trainer.world_size)
        self._campaign = _Campaign(self, trainer)
        # A new list: Lightning is iterating over the old one.
        trainer.callbacks = [*_callbacks(trainer), LatePhase(self)]  # type: ignore[attr-defined]

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._campaign is not None:
            self.watch_forward(trainer, pl_module)
            self._campaign.join()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._campaign is not None:
            self._campaign.train()

    @override
    def reached(self, trainer: Trainer, phase: HookPhase) -> None:
        if self._campaign is not None and phase != "sanity_check":
            self._campaign.reached(phase)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._campaign is not None:
            self._campaign.end()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close(trainer)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close(trainer)

    # -- private

    def _check_places(self, world_size: int) -> None:
        for fault in self.faults:
            if fault.rank != "all" and fault.rank >= world_size:
                raise ConfigurationError(f"{fault} strikes no rank: the job has ranks 0 to {world_size - 1}.")
        possible = [*self.faults, *(self.random.kinds if self.random is not None else [])]
        racks = [fault for fault in possible if fault.kind == "rack_loss"]
        if racks and not this_domain().rack:
            raise ConfigurationError(
                f"{racks[0]}: nothing says in which rack this process is. Set MOE_CKPT_RACK in the environment of each."
            )

    def _close(self, trainer: Trainer) -> None:
        campaign, self._campaign = self._campaign, None
        if campaign is not None:
            campaign.close()
        self.unwatch_forward()
        own = [
            callback for callback in _callbacks(trainer) if isinstance(callback, LatePhase) and callback.phases is self
        ]
        trainer.callbacks = [callback for callback in _callbacks(trainer) if callback not in own]  # type: ignore[attr-defined]


class _Campaign:
    """Faults of one process of a campaign, on one rank."""

    def __init__(self, injector: FaultInjector, trainer: Trainer) -> None:
        self._trainer = trainer
        folder = record_folder(injector.folder, trainer.default_root_dir)
        self._record = FaultRecord(folder, trainer.global_rank)
        self._lines = read_lines(self._record.path)
        self._record.write("start", world_size=trainer.world_size)
        log.warning("faults are injected into this training; the record is %s", self._record.path)
        rank, world_size = trainer.global_rank, trainer.world_size
        self._schedule = Schedule(
            injector.faults, injector.random, rank=rank, world_size=world_size, fired=fired(folder)
        )
        checkpoints = [callback for callback in _callbacks(trainer) if isinstance(callback, CheckpointCallback)]
        self._effects = Effects(self._record, checkpoints[0] if checkpoints else None)
        self._effects.go_on(self._lines)
        self._storage = StorageFaults(self._effects.of_storage, self._strike_due)
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._step = -1
        self._undo = ExitStack()
        self._undo.enter_context(wrapping_backends(lambda backend: WatchedBackend(backend, self._storage.around)))
        self._wrap("capture", lambda: None, lambda: self.reached("capture"))
        self._wrap("seal", lambda: self.reached("seal"), lambda: None)

    def _wrap(self, name: str, before: Callable[[], None], after: Callable[[], None]) -> None:
        original: Callable[..., Any] = getattr(CaptureSession, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            before()
            result = original(*args, **kwargs)
            after()
            return result

        setattr(CaptureSession, name, wrapped)
        self._undo.callback(setattr, CaptureSession, name, original)

    def join(self) -> None:
        """Record this process when the run is open, so that other ranks can end its node."""
        self._record.write("join", **self._effects.join())

    def train(self) -> None:
        """Start the faults at random when training begins."""
        self._step = self._trainer.global_step
        self._record.write("train", step=self._step)
        self._thread = threading.Thread(target=self._tick, name="moe-ckpt-faults", daemon=True)
        self._thread.start()

    def reached(self, phase: FaultPhase) -> None:
        """Strike the faults that are due at a phase of training."""
        step = self._trainer.global_step
        if phase == "batch_end" and step != self._step:
            self._step = step
            self._record.write("step", step=step)
        self._effects.expire(step)
        self._strike_due(phase, step)

    def end(self) -> None:
        """Note that the fit has ended by itself."""
        self._record.write("end", sync=True, step=self._trainer.global_step)
        for each in self._schedule.waiting:
            if self._effects.concerns(each.fault):
                log.warning("%s never struck: training did not get there", each.fault)

    def close(self) -> None:
        """Undo all changes to the training."""
        self._closing.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._undo.close()
        self._effects.close()
        self._record.close()

    # -- from any thread

    def _strike_due(self, phase: FaultPhase, step: int) -> None:
        for scheduled in self._schedule.take(phase, step):
            self._strike(scheduled, phase, step)

    def _strike(self, scheduled: ScheduledFault, phase: str, step: int) -> None:
        fault = scheduled.fault
        if not self._effects.concerns(fault):
            return
        if fault.settle:
            settle(self._trainer, fault.settle)
        log.warning("fault injected at step %d, %s: %s", step, phase, fault)
        self._record.write(
            "fault", sync=True, name=scheduled.name, kind=fault.kind, step=step, phase=phase, fault=fault.given()
        )
        outcome = self._effects.strike(scheduled.name, fault, step)
        if outcome:
            log.warning("%s: %s", fault.kind, outcome)
            self._record.write("struck", name=scheduled.name, outcome=outcome)

    # -- the thread of faults at a time

    def _tick(self) -> None:
        try:
            began = time.monotonic() - uptime(self._lines)
            for scheduled in self._schedule.timed():
                assert scheduled.seconds is not None
                if self._closing.wait(max(0.0, began + scheduled.seconds - time.monotonic())):
                    return
                if scheduled.fault.kind == "bit_flip":
                    self._schedule.wait_for_hook(scheduled)  # memory is recycled between hooks
                else:
                    self._strike(scheduled, "any_time", self._trainer.global_step)
        except BaseException:  # thread entry: nothing above would see it
            log.exception("no more faults at random strike in this attempt")


def _callbacks(trainer: Trainer) -> list[Callback]:
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks
