"""Name the hooks of Lightning at which a kill or a fault can strike.

One callback turns hooks into phases; a second one, which Lightning runs after all others, adds the moment after their
`on_train_batch_end`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from typing_extensions import override

HookPhase = Literal[
    "batch_start",
    "forward",
    "after_backward",
    "before_optimizer_step",
    "batch_end",
    "after_batch_end",
    "validation",
    "sanity_check",
    "epoch_start",
    "epoch_end",
]
"""`forward`: between forward and backward; `batch_end` and `after_batch_end`: before and after other callbacks'
`on_train_batch_end`; `validation`: at the start of a batch of it."""


class PhaseCallback(Callback):
    """Call `reached` at every phase of training. Put it first: hooks run in the order of the callbacks."""

    def __init__(self) -> None:
        self.batches = 0
        """Number of training batches that were begun in this process."""
        self.micro = -1
        """Index of the micro-batch in an accumulated step, from 0."""
        self._micro_step = -1
        self._forward: tuple[LightningModule, Callable[..., Any] | None] | None = None

    def reached(self, trainer: Trainer, phase: HookPhase) -> None:
        """Act on a phase that training has reached; `trainer.global_step` has its value of that hook."""
        raise NotImplementedError

    def watch_forward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the phase `forward` too, by wrapping the module's `training_step` until `unwatch_forward`."""
        training_step = pl_module.training_step

        def step_then_tell(*args: Any, **kwargs: Any) -> Any:
            output = training_step(*args, **kwargs)
            self.reached(trainer, "forward")
            return output

        self._forward = pl_module, vars(pl_module).get("training_step")
        pl_module.training_step = step_then_tell  # type: ignore[method-assign]

    def unwatch_forward(self) -> None:
        """Restore the module's `training_step`."""
        if self._forward is None:
            return
        (module, own), self._forward = self._forward, None
        if own is None:
            del module.training_step  # the class has one
        else:
            module.training_step = own  # type: ignore[method-assign]

    def late(self) -> LatePhase:
        """Return the callback that runs after all others; add it to the same Trainer."""
        return LatePhase(self)

    def is_late(self, callback: Callback) -> bool:
        """Return whether `callback` came from `late`."""
        return isinstance(callback, LatePhase) and callback.phases is self

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        first = trainer.global_step != self._micro_step
        self.micro = 0 if first else self.micro + 1
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
    """Tells of the moment after every other callback's `on_train_batch_end`. A `Checkpoint`, so that Lightning leaves it
    at the end.
    """

    def __init__(self, phases: PhaseCallback) -> None:
        self.phases = phases

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        self.phases.reached(trainer, "after_batch_end")
