"""Inject faults into the callback's own training, by a script or at random.

The arguments and the record of earlier processes alone decide about faults, never random state of the process, so that training
with faults differs from training without them only by the faults. `Effects` acts on this process, its node, its memory and its storage.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from lightning_moe_ckpt.callbacks._base import CheckpointCallback
from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.fit.loops._trainer import callbacks_of
from lightning_moe_ckpt.session._capture import CaptureSession
from lightning_moe_ckpt.storage import WrappedBackend, wrapping_backends
from lightning_moe_ckpt.testing import _fault_process
from lightning_moe_ckpt.testing._fault import (
    FLIPS,
    LASTING,
    NODE_LOSSES,
    OF_STORAGE,
    SILENT,
    Fault,
    FaultPhase,
    RandomFaults,
    Schedule,
    ScheduledFault,
)
from lightning_moe_ckpt.testing._fault_media import (
    LastingFault,
    LiveFlips,
    StorageFaults,
    TakenMemory,
    WrongProducts,
    flip_memory_bit,
    flip_stored_bit,
)
from lightning_moe_ckpt.testing._fault_record import FaultRecord, fired, read_ranks, record_folder, uptime
from lightning_moe_ckpt.testing._kill import HookPhase, LatePhase, PhaseCallback, send_signal, settle
from lightning_moe_ckpt.testing._records import Record, read_lines
from lightning_moe_ckpt.tiers import shared_directory, shared_name, this_domain

log = logging.getLogger(__name__)

_NODE_PATIENCE = 30.0
"""Seconds that nodes lost together wait for each other."""

_one_stop = threading.Lock()


class FaultInjector(PhaseCallback):
    """Inject faults into training, to show that training survives them. Put this callback first among the callbacks.

    Every fault is logged and recorded in `folder` before it happens, and does not happen again after a restart of the job. `python
    -m lightning_moe_ckpt.testing FOLDER` shows a campaign's results.

    Args:
        faults: faults at given places of training; `None` for none.
        random: faults at random times, with a mean time between them; `None` for none.
        folder: folder of the ranks' records, the same in every start of the job; on a file system of all nodes if nodes or racks
            are to be lost. The default is the environment variable `MOE_CKPT_FAULTS`, else `moe-ckpt-faults` in the Trainer's
            `default_root_dir`. Remove the folder to have all faults happen again.
    """

    def __init__(
        self, faults: list[Fault] | None = None, *, random: RandomFaults | None = None, folder: str | Path | None = None
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
        trainer.callbacks = [*callbacks_of(trainer), LatePhase(self)]  # type: ignore[attr-defined]

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
        left = [each for each in callbacks_of(trainer) if not (isinstance(each, LatePhase) and each.phases is self)]
        trainer.callbacks = left  # type: ignore[attr-defined]


class _Campaign:
    """A campaign's faults in this process."""

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
        checkpoints = [callback for callback in callbacks_of(trainer) if isinstance(callback, CheckpointCallback)]
        flips = LiveFlips(trainer, self._struck)
        self._effects = Effects(self._record, checkpoints[0] if checkpoints else None, flips)
        self._effects.go_on(self._lines)
        self._storage = StorageFaults(self._effects.of_storage, self._strike_due)
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._step = -1
        self._undo = ExitStack()
        self._undo.enter_context(wrapping_backends(lambda backend: WrappedBackend(backend, self._storage.around)))
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
        """Strike the faults due at a phase."""
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
        if outcome := self._effects.strike(scheduled.name, fault, step):
            self._struck(scheduled.name, fault, outcome)

    def _struck(self, name: str, fault: Fault, outcome: str) -> None:
        log.warning("%s: %s", fault.kind, outcome)
        self._record.write("struck", name=name, outcome=outcome)

    # -- the thread of faults at a time

    def _tick(self) -> None:
        try:
            began = time.monotonic() - uptime(self._lines)
            for scheduled in self._schedule.timed():
                assert scheduled.seconds is not None
                if self._closing.wait(max(0.0, began + scheduled.seconds - time.monotonic())):
                    return
                if scheduled.fault.kind in SILENT | {"bit_flip"}:
                    self._schedule.wait_for_hook(scheduled)  # memory is recycled between hooks
                else:
                    self._strike(scheduled, "any_time", self._trainer.global_step)
        except BaseException:  # thread entry: nothing above would see it
            log.exception("no more faults at random strike in this attempt")


class Effects:
    """Means to carry out faults, and to end those with a duration. Storage and memory of `checkpoints` are damaged."""

    def __init__(self, record: FaultRecord, checkpoints: CheckpointCallback | None, flips: LiveFlips) -> None:
        self._record, self._checkpoints, self._flips = record, checkpoints, flips
        self._lasting: list[LastingFault] = []
        self._lock = threading.Lock()

    # -- who is here

    def join(self) -> Record:
        """Return the line that lets other ranks end this process and its node.

        Its `files` are patterns for the run's files in this node's shared memory: this rank's rings, and replicas for other ranks.
        """
        domain, own = this_domain(), os.getpid()
        tag, files = None if self._checkpoints is None else self._checkpoints.memory_tag, list[str]()
        if tag is not None:
            prefix = shared_name(tag, 0).removesuffix("0.ring")
            patterns = (f"{prefix}{self._record.rank}.*", f"{prefix}*.replica*")
            files = [str(shared_directory() / pattern) for pattern in patterns]
        began = _fault_process.start_time(own)
        return {"pid": own, "began": began, "node": domain.node, "rack": domain.rack, "files": files}

    # -- striking

    def concerns(self, fault: Fault) -> bool:
        """Return whether this process carries out the fault. For nodes and racks, one rank on each lost node does."""
        if fault.kind not in NODE_LOSSES:
            return True
        own = self._own_node(lost := self._lost(fault))
        return own is not None and _leader_of(lost, own) == self._record.rank

    def strike(self, name: str, fault: Fault, step: int) -> str:
        """Carry out the fault, and return its outcome as text, empty if the kind says everything, unless it ends this process."""
        if fault.kind in LASTING:
            self._begin(LastingFault(name=name, fault=fault, step=step, since=time.time()))
        elif fault.kind == "sigkill":
            send_signal(signal.SIGKILL)
        elif fault.kind == "sigstop":
            stop(fault.seconds)
        elif fault.kind == "bit_flip":
            return self._flip(name, fault)
        elif fault.kind in FLIPS:
            return self._flips.strike(name, fault)
        else:
            lost = self._lost(fault)
            self._lose_node(name, lost, self._own_node(lost) or "")
        return ""

    def _flip(self, name: str, fault: Fault) -> str:
        draws, rank = random.Random(name), self._record.rank
        if self._checkpoints is None:
            return "nothing is stored: there is no checkpoint callback"
        if fault.at_rest == "storage":
            return flip_stored_bit(self._checkpoints.url, self._checkpoints.storage_options, rank, draws)
        tag = self._checkpoints.memory_tag or ""
        return flip_memory_bit(shared_directory(), tag, fault.at_rest, rank, draws)

    def _lost(self, fault: Fault) -> list[Record]:
        """Return the lost processes' lines, as they joined last."""
        joins = ([line for line in lines if line["event"] == "join"] for _, lines in read_ranks(self._record.folder))
        everybody = [own[-1] for own in joins if own]
        if fault.rank == "all":
            return everybody
        (struck,) = (member for member in everybody if member["rank"] == fault.rank)
        place = "node" if fault.kind == "node_loss" else "rack"
        return [member for member in everybody if member[place] == struck[place]]

    def _own_node(self, lost: Sequence[Record]) -> str | None:
        return next((member["node"] for member in lost if member["rank"] == self._record.rank), None)

    def _lose_node(self, name: str, lost: Sequence[Record], node: str) -> None:
        """End all processes on `node`, this one among them, and remove its files. Does not return."""
        here, folder = [member for member in lost if member["node"] == node], self._record.folder
        ready = {
            each: folder / f"{re.sub('[^0-9A-Za-z]', '-', name)}.node{_leader_of(lost, each):05d}.lost"
            for each in sorted({member["node"] for member in lost})
        }
        order = {
            "processes": [[member["pid"], member["began"]] for member in here],
            "files": sorted({pattern for member in here for pattern in member["files"]}),
            "ready": str(ready[node]),
            "others": [str(path) for other, path in ready.items() if other != node],
            "record": str(self._record.path),
            "patience": _NODE_PATIENCE,
        }
        helper = _start("lose", json.dumps(order))
        raise RuntimeError(f"the helper that should have ended node {node!r} ended with {helper.wait()}")

    # -- what lasts

    def _begin(self, lasting: LastingFault) -> None:
        if lasting.fault.kind == "full_shared_memory":
            lasting.held = TakenMemory(shared_directory(), lasting.fault.nbytes or 0)
        if lasting.fault.kind == "wrong_products":
            lasting.held = WrongProducts(lasting)
        with self._lock:
            self._lasting.append(lasting)

    def go_on(self, lines: Sequence[Record]) -> None:
        """Continue faults that began in an earlier process of this rank and have not ended."""
        over = {line["name"] for line in lines if line["event"] == "over"}
        for line in lines:
            if line["event"] == "fault" and line["kind"] in LASTING and line["name"] not in over:
                fault = Fault(**line["fault"])
                lasting = LastingFault(name=line["name"], fault=fault, step=line["step"], since=line["time"])
                if lasting.outlasts_process and not lasting.over(0):
                    self._begin(lasting)

    def expire(self, step: int) -> None:
        """End the faults whose time is over when training is at `step`."""
        with self._lock:
            over = [each for each in self._lasting if each.over(step)]
            for each in over:
                self._lasting.remove(each)
                each.release()
        for each in over:
            log.warning("%s is over at step %d; it hit %d calls", each.fault, step, each.calls)
            self._record.write("over", name=each.name, step=step, calls=each.calls)

    def of_storage(self) -> list[LastingFault]:
        """Return the storage faults that are active now."""
        with self._lock:
            return [each for each in self._lasting if each.fault.kind in OF_STORAGE and not each.over(-1)]

    def close(self) -> None:
        """End all active faults."""
        self._flips.close()
        with self._lock:
            ended, self._lasting = self._lasting, []
        for each in ended:
            self._record.write("struck", name=each.name, outcome=f"it hit {each.calls} calls", calls=each.calls)
            each.release()


def stop(seconds: float | None) -> None:
    """SIGSTOP this process until a helper, after `seconds`, or others, for `None`, send SIGCONT. Stops in several threads take turns."""
    own = os.getpid()
    with _one_stop:
        if seconds is None:
            os.kill(own, signal.SIGSTOP)
        else:
            _start("stop", str(own), str(seconds)).wait()


def _leader_of(lost: Sequence[Record], node: str) -> int:
    """Return the rank that ends its node."""
    return min(int(member["rank"]) for member in lost if member["node"] == node)


def _start(*command: str) -> subprocess.Popen[bytes]:
    script = Path(_fault_process.__file__)
    return subprocess.Popen([sys.executable, "-I", "-S", str(script), *command], start_new_session=True)  # noqa: S603
