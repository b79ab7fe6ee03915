"""Reach a place of training, a hook of Lightning or a call of storage, and die there by a scripted signal.

One callback turns hooks into phases; a second one, which Lightning runs after all others, adds the moment after their
`on_train_batch_end`.

A SIGKILL is never an exception: nothing is flushed, no `finally` runs, no destructor either. Other signals leave it to
the process how it ends. Just before it, the process appends a line to its record file, so that the parent can tell a
scripted end from any other death.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from torch import nn
from typing_extensions import override

from lightning_moe_ckpt.storage import StorageCall, WrappedBackend, wrapping_backends

T = TypeVar("T")
StepPhase = Literal["batch_start", "forward", "after_backward", "before_optimizer_step", "batch_end", "after_batch_end"]
TrainingPhase = Literal[StepPhase, "validation", "epoch_start", "epoch_end"]
HookPhase = Literal[TrainingPhase, "sanity_check"]
"""`forward`: between forward and backward; `batch_end` and `after_batch_end`: before and after other callbacks'
`on_train_batch_end`; `validation`: at the start of a batch of it."""
Phase = Literal[HookPhase, "random_time", "storage", "ckpt_file"]
Strike = Callable[[], None]
"""Sends the signal; does not return if it is SIGKILL."""


class PhaseCallback(Callback):
    """Call `reached` at every phase of training. Put this callback first: hooks run in the callbacks' order."""

    def __init__(self) -> None:
        self.batches = 0
        """Number of training batches that were begun in this process."""
        self.micro = -1
        """Index of the micro-batch in an accumulated step, from 0."""
        self._micro_step = -1
        self._forward: Callable[[], None] | None = None
        """Ends the watch over forward."""

    def reached(self, trainer: Trainer, phase: HookPhase) -> None:
        """Act on a phase of training; `trainer.global_step` has its value of that hook."""
        raise NotImplementedError

    def watch_forward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the phase `forward` too, until `unwatch_forward`.

        The module's `training_step` is wrapped; a pipeline stage reports the first of its micro-batches.
        """
        stage = getattr(trainer.strategy, "pipeline_stage", None)  # of `MoEStrategy`
        if isinstance(stage, nn.Module):
            self._forward = self._watch_stage(trainer, stage)
            return
        training_step, own = pl_module.training_step, vars(pl_module).get("training_step")

        def step_then_tell(*args: Any, **kwargs: Any) -> Any:
            output = training_step(*args, **kwargs)
            self.reached(trainer, "forward")
            return output

        def restore() -> None:
            if own is None:
                del pl_module.training_step  # the class has one
            else:
                pl_module.training_step = own  # type: ignore[method-assign]

        self._forward = restore
        pl_module.training_step = step_then_tell  # type: ignore[method-assign]

    def unwatch_forward(self) -> None:
        """Report the phase `forward` no more."""
        restore, self._forward = self._forward, None
        if restore is not None:
            restore()

    def _watch_stage(self, trainer: Trainer, stage: nn.Module) -> Callable[[], None]:
        told = -1

        def tell(module: nn.Module, *_: object) -> None:
            nonlocal told
            if module.training and told != self.batches:
                told = self.batches
                self.reached(trainer, "forward")

        return stage.register_forward_hook(tell).remove

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        self.micro = 0 if (trainer.global_step != self._micro_step) else self.micro + 1
        self._micro_step = trainer.global_step
        self.batches += 1
        self.reached(trainer, "batch_start")

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.reached(trainer, "after_backward")

    @override
    def on_before_optimizer_step(self, trainer: Trainer, *args: object) -> None:
        self.reached(trainer, "before_optimizer_step")

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        self.reached(trainer, "batch_end")

    @override
    def on_validation_batch_start(self, trainer: Trainer, *args: object) -> None:
        self.reached(trainer, "sanity_check" if trainer.sanity_checking else "validation")

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.reached(trainer, "epoch_start")

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.reached(trainer, "epoch_end")


class LatePhase(Checkpoint):
    """Report to `phases` the moment after every other callback's `on_train_batch_end`; add it to the same Trainer.

    A `Checkpoint`, so that Lightning leaves it at the end.
    """

    def __init__(self, phases: PhaseCallback) -> None:
        self.phases = phases

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        self.phases.reached(trainer, "after_batch_end")


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """A signal to a rank, at the same place in every run of the same script."""

    phase: Phase
    step: int | None = None
    """Value of `trainer.global_step` when the kill strikes: before the optimizer step for the phases `batch_start`,
    `forward` and `before_optimizer_step`, after it for the others."""
    batches: int | None = None
    """Batch in this attempt in which the kill strikes, counted from 1, instead of `step`."""
    rank: int = 0
    """Rank that dies first; the parent kills the others shortly after."""
    micro: int | None = None
    """Micro-batch of an accumulated step, counted from 0; `None`: the first micro-batch that matches."""
    settle: float = 0.0
    """Seconds to wait at most, before dying, until the checkpoint callbacks of this rank have committed all they have."""
    seconds: float = 0.0
    """Seconds after `on_train_start`, for `random_time`."""
    operation: int = 0
    """Number of the operation, from 0, for `storage`: among this attempt's operations that match `verb`.
    Number of the file, from 0, for `ckpt_file`: among those that Lightning writes at this step; half of the file lies under
    its final name then, as a copy between file systems leaves it."""
    verb: str = ""
    """Regular expression, for `storage`: an operation counts if its method name and key, with a space between, match it
    somewhere, e.g. `^(put|create|delete) ` for all that change anything."""
    signal: signal.Signals = signal.SIGKILL
    """Another one than SIGKILL lets the rank run on, and the parent waits until all ranks have ended by themselves."""
    everyone: bool = False
    """Whether every rank sends itself the signal, each when it gets to the place."""
    group: bool = False
    """Whether the processes that the rank has started get the signal too, as a cluster or a terminal sends it."""
    after: bool = False
    """Whether to strike when the operation has returned, not before it starts, for `storage`."""

    def __post_init__(self) -> None:
        anywhere = self.phase in {"random_time", "storage", "sanity_check"}
        if anywhere != (self.step is None and self.batches is None):
            raise ValueError(f"`Kill(phase={self.phase!r}, step={self.step}, batches={self.batches})` names no place.")


def send_signal(number: signal.Signals, *, group: bool = False) -> None:
    """Send a signal to this process, or to its process group. Does not return from SIGKILL."""
    (os.killpg if group else os.kill)(os.getpgid(0) if group else os.getpid(), number)
    if number == signal.SIGKILL:
        threading.Event().wait()  # the signal may need a moment to arrive; nothing may run until then


def strike(write_record: Callable[[dict[str, Any]], None], kill: Kill) -> None:
    """Record the kill, then send the signal. Does not return from SIGKILL."""
    write_record({"kind": "killed", "phase": kill.phase, "step": kill.step, "at": time.monotonic()})
    send_signal(kill.signal, group=kill.group)


def settle(trainer: Trainer, seconds: float) -> None:
    """Let checkpoint callbacks store everything under way. Raises `TimeoutError` if they have not within `seconds`."""
    for callback in list(trainer.callbacks):  # type: ignore[attr-defined]
        if (wait := getattr(callback, "wait_committed", None)) is not None and not wait(seconds):
            raise TimeoutError(f"{callback} has not committed within {seconds:g} s")


class Killer(PhaseCallback):
    """Die in hooks before those of the other callbacks; `LatePhase(killer)` dies after them."""

    def __init__(self, kill: Kill, strike: Strike) -> None:
        super().__init__()
        self._kill = kill
        self._strike = strike

    @override
    def reached(self, trainer: Trainer, phase: HookPhase) -> None:
        if self._due(trainer, phase):
            if self._kill.settle:
                settle(trainer, self._kill.settle)
            self._strike()

    def _due(self, trainer: Trainer, phase: Phase) -> bool:
        kill = self._kill
        here = kill.step == trainer.global_step
        if kill.step is None:
            here = phase == "sanity_check" or kill.batches == self.batches
        return phase == kill.phase and here and kill.micro in {None, self.micro}

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._kill.phase == "forward":
            self.watch_forward(trainer, pl_module)
        if self._kill.phase == "ckpt_file":
            files = trainer.strategy.checkpoint_io
            files.save_checkpoint = self._tearing(trainer, files.save_checkpoint)  # type: ignore[method-assign]

    def _tearing(self, trainer: Trainer, save: Callable[..., Any]) -> Callable[..., Any]:
        written: dict[int, int] = {}

        def save_or_tear(checkpoint: Any, path: Any, *args: Any, **options: Any) -> None:
            number = written.setdefault(trainer.global_step, 0)
            written[trainer.global_step] += 1
            save(checkpoint, path, *args, **options)
            if number == self._kill.operation and self._due(trainer, "ckpt_file"):
                os.truncate(path, Path(path).stat().st_size // 2)
                self._strike()

        return save_or_tear

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._kill.phase == "random_time":
            timer = threading.Timer(self._kill.seconds, self._strike)
            timer.daemon = True
            timer.start()


class StorageKiller:
    """Count the operations of every backend opened in this process, and die at the scripted operation."""

    def __init__(self, kill: Kill, strike: Strike) -> None:
        self._kill = kill
        self._strike = strike
        self._lock = threading.Lock()
        self._count = 0
        self._installed = ExitStack()

    def install(self) -> None:
        """Watch all backends opened from here on, for the rest of this process."""
        self._installed.enter_context(wrapping_backends(lambda backend: WrappedBackend(backend, self.around)))

    def around(self, call: StorageCall, operation: Callable[[], T]) -> T:
        """Run one storage operation, or die before or after it."""
        if (due := self._due(call)) and not self._kill.after:
            self._strike()
        result = operation()
        if due and self._kill.after:
            self._strike()
        return result

    def _due(self, call: StorageCall) -> bool:
        if not re.search(self._kill.verb, str(call)):
            return False
        with self._lock:
            self._count += 1
            return self._count == self._kill.operation + 1
