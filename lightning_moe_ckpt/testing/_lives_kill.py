"""Where a life ends: scripted signals, placed by Lightning callbacks or at a storage operation.

A SIGKILL is never an exception: nothing is flushed, no `finally` runs, no destructor either. Other signals leave it to
the process how it ends. Just before it, the process appends a line to its record file, so that the parent can tell a
scripted end from any other death.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from typing_extensions import override

Phase = Literal[
    "batch_start",
    "forward",
    "before_optimizer_step",
    "batch_end",
    "after_batch_end",
    "validation",
    "sanity_check",
    "epoch_start",
    "epoch_end",
    "random_time",
    "storage",
    "ckpt_file",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """One signal to one rank, at a place that is the same in every run of the same script."""

    phase: Phase
    step: int | None = None
    """Value of `trainer.global_step` when the kill strikes: before the optimizer step for the phases `batch_start`,
    `forward` and `before_optimizer_step`, after it for the others."""
    batches: int | None = None
    """Instead of `step`: in which batch of this life the kill strikes, counted from 1."""
    rank: int = 0
    """The rank that dies first; the parent kills the others shortly after."""
    micro: int | None = None
    """Which micro-batch of an accumulated step, counted from 0; `None` is the first that matches."""
    settle: float = 0.0
    """Seconds to wait at most, before dying, until the checkpoint callbacks of this rank have committed all they have."""
    seconds: float = 0.0
    """For `random_time`: how long after `on_train_start`."""
    operation: int = 0
    """For `storage`: which operation of this life, counted from 0, among those that match `verb`.
    For `ckpt_file`: which file of this step that Lightning writes, counted from 0; half of it lies under its final name
    then, as a copy between file systems leaves it."""
    verb: str = ""
    """For `storage`: only operations count whose method name and key, with a space between, match this regular
    expression somewhere, e.g. `^(put|create|delete) ` for those that change anything."""
    signal: signal.Signals = signal.SIGKILL
    """Another one than SIGKILL lets the rank run on, and the parent waits until all ranks have ended by themselves."""
    everyone: bool = False
    """Whether every rank sends itself the signal, each when it gets to the place."""
    after: bool = False
    """For `storage`: strike when the operation has returned instead of before it starts."""

    def __post_init__(self) -> None:
        anywhere = self.phase in {"random_time", "storage", "sanity_check"}
        if anywhere != (self.step is None and self.batches is None):
            raise ValueError(f"`Kill(phase={self.phase!r}, step={self.step}, batches={self.batches})` names no place.")


Strike = Callable[[], None]
"""Sends the signal; does not return if it is SIGKILL."""


def strike(write_record: Callable[[dict[str, Any]], None], kill: Kill) -> None:
    """Record the kill, then send the signal. Does not return from SIGKILL."""
    write_record({"kind": "killed", "phase": kill.phase, "step": kill.step, "at": time.monotonic()})
    os.kill(os.getpid(), kill.signal)
    if kill.signal == signal.SIGKILL:
        threading.Event().wait()  # the signal may need a moment to arrive; nothing may run until then


class _Place:
    """Where training is, and whether the kill strikes here."""

    def __init__(self, kill: Kill) -> None:
        self._kill = kill
        self._batches = 0
        self._micro = -1
        self._micro_step = -1

    def next_batch(self, trainer: Trainer) -> None:
        first = trainer.global_step != self._micro_step
        self._micro = 0 if first else self._micro + 1
        self._micro_step = trainer.global_step
        self._batches += 1

    def due(self, trainer: Trainer, phase: Phase) -> bool:
        kill = self._kill
        here = kill.step == trainer.global_step
        if kill.step is None:
            here = phase == "sanity_check" or kill.batches == self._batches
        return phase == kill.phase and here and kill.micro in {None, self._micro}

    def settle(self, trainer: Trainer) -> None:
        """Let checkpoint callbacks finish what they have begun, if the script says so."""
        if self._kill.settle:
            for callback in list(trainer.callbacks):  # type: ignore[attr-defined]
                wait = getattr(callback, "wait_committed", None)
                if wait is not None and not wait(self._kill.settle):
                    raise TimeoutError(f"{callback} has not committed within {self._kill.settle:g} s")


class Killer(Callback):
    """Dies in the hooks that run before those of the other callbacks. Put it first."""

    def __init__(self, kill: Kill, strike: Strike) -> None:
        self._kill = kill
        self._strike = strike
        self._place = _Place(kill)

    def _pass(self, trainer: Trainer, phase: Phase) -> None:
        if self._place.due(trainer, phase):
            self._place.settle(trainer)
            self._strike()

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._kill.phase == "forward":
            pl_module.training_step = self._dying(trainer, pl_module.training_step)  # type: ignore[method-assign]
        if self._kill.phase == "ckpt_file":
            files = trainer.strategy.checkpoint_io
            files.save_checkpoint = self._tearing(trainer, files.save_checkpoint)  # type: ignore[method-assign]

    def _tearing(self, trainer: Trainer, save: Callable[..., Any]) -> Callable[..., Any]:
        written: dict[int, int] = {}

        def save_or_tear(checkpoint: Any, path: Any, *args: Any, **options: Any) -> None:
            number = written.setdefault(trainer.global_step, 0)
            written[trainer.global_step] += 1
            save(checkpoint, path, *args, **options)
            if number == self._kill.operation and self._place.due(trainer, "ckpt_file"):
                os.truncate(path, Path(path).stat().st_size // 2)
                self._strike()

        return save_or_tear

    def _dying(self, trainer: Trainer, training_step: Callable[..., Any]) -> Callable[..., Any]:
        def step_then_die(*args: Any, **kwargs: Any) -> Any:
            output = training_step(*args, **kwargs)
            self._pass(trainer, "forward")
            return output

        return step_then_die

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._kill.phase == "random_time":
            timer = threading.Timer(self._kill.seconds, self._strike)
            timer.daemon = True
            timer.start()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        self._place.next_batch(trainer)
        self._pass(trainer, "batch_start")

    @override
    def on_before_optimizer_step(self, trainer: Trainer, *args: object) -> None:
        self._pass(trainer, "before_optimizer_step")

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        self._pass(trainer, "batch_end")

    @override
    def on_validation_batch_start(self, trainer: Trainer, *args: object) -> None:
        self._pass(trainer, "sanity_check" if trainer.sanity_checking else "validation")

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pass(trainer, "epoch_start")

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pass(trainer, "epoch_end")


class LateKiller(Checkpoint):
    """Dies after every other callback's `on_train_batch_end`. A `Checkpoint`, so that Lightning leaves it at the end."""

    def __init__(self, kill: Kill, strike: Strike) -> None:
        self._strike = strike
        self._place = _Place(kill)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        self._place.next_batch(trainer)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        if self._place.due(trainer, "after_batch_end"):
            self._place.settle(trainer)
            self._strike()


class StorageKiller:
    """Counts the operations of every backend opened in this process and dies at the scripted one."""

    def __init__(self, kill: Kill, strike: Strike) -> None:
        self._kill = kill
        self._strike = strike
        self._lock = threading.Lock()
        self._count = 0

    def install(self) -> None:
        """Wrap `lightning_moe_ckpt.storage.open_backend` wherever a module of the package holds it."""
        from lightning_moe_ckpt import storage

        replace_everywhere(storage.open_backend, self._opening(storage.open_backend))

    def _opening(self, open_backend: Callable[..., Any]) -> Callable[..., Any]:
        def opened(*args: Any, **kwargs: Any) -> Any:
            return _Counted(open_backend(*args, **kwargs), self.around)

        return opened

    def around(self, name: str, operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run one storage operation, or die before or after it."""
        due = self._due(f"{name} {args[0]}" if args else name)
        if due and not self._kill.after:
            self._strike()
        result = operation(*args, **kwargs)
        if due:
            self._strike()
        return result

    def _due(self, call: str) -> bool:
        if not re.search(self._kill.verb, call):
            return False
        with self._lock:
            self._count += 1
            return self._count == self._kill.operation + 1


class _Counted:
    """A backend whose public methods pass through `around`."""

    def __init__(self, backend: Any, around: Callable[..., Any]) -> None:
        self._backend = backend
        self._around = around

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._backend, name)
        if name.startswith("_") or not callable(value):
            return value
        return lambda *args, **kwargs: self._around(name, value, *args, **kwargs)


def replace_everywhere(original: Any, replacement: Any) -> None:
    """Rebind every module-level name of this package that holds `original`. For forked children only: it is not undone."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "lightning_moe_ckpt":
            continue
        for attribute, value in list(vars(module).items()):
            if value is original:
                setattr(module, attribute, replacement)
