"""Work beside Lightning's own callbacks: tuners, averages of weights, the progress bar.

Tuners search for a learning rate or a batch size by trial steps in the trainer's own fit loop. Meanwhile all other
callbacks are put aside and our taps rest. A resumed run uses the values found: a new search may find different values.

Progress bars show logged numbers. They show a text only if the bar's own `get_metrics` returns it, a method meant to be
replaced: here on one bar, until the fit ends. A note is not logged, and reaches neither a step's journal nor
`callback_metrics`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from lightning.pytorch import Callback, LightningModule, Trainer, callbacks
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    LearningRateFinder,
    ProgressBar,
    RichProgressBar,
    TQDMProgressBar,
)
from lightning.pytorch.utilities.parsing import lightning_getattr, lightning_hasattr, lightning_setattr
from torch.optim.swa_utils import AveragedModel

from lightning_moe_ckpt.fit.loops._trainer import callbacks_of
from lightning_moe_ckpt.snapshot import Averages

_notes: WeakKeyDictionary[ProgressBar, dict[str, Callable[[], str | None]]] = WeakKeyDictionary()
"""Notes of each bar, by name."""

_LEARNING_RATES = ("lr", "learning_rate")
"""Names under which Lightning looks for the learning rate by default."""


def tries_only(trainer: Trainer) -> bool:
    """Return whether this fit is a trial by `Tuner`, without training."""
    return any(finder._early_exit for finder in _finders(trainer))


def resting(trainer: Trainer) -> Callable[[], bool]:
    """Return a function that says whether the trainer's callbacks are put aside; call in `on_fit_start`."""
    first = callbacks_of(trainer)[0]
    return lambda: first not in trainer.callbacks  # type: ignore[attr-defined]  # untyped


class Findings:
    """Values found by one fit's tuners, part of every boundary. Made before the search."""

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self._module = module
        self._silenced: list[Callback] = []
        self._finders = list(_finders(trainer))

    def take(self) -> dict[str, Any]:
        """Return the values, by attribute."""
        return {name: lightning_getattr(self._module, name) for name in self._names()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set the values, and prevent another search."""
        self.follow(state)
        self._silenced = list(self._finders)
        for finder in self._silenced:
            finder.on_fit_start = lambda *_: None  # type: ignore[method-assign]

    def follow(self, state: Mapping[str, Any]) -> None:
        """Set the original run's values in replay."""
        for name, value in state.items():
            if lightning_hasattr(self._module, name):
                lightning_setattr(self._module, name, value)

    def remove(self) -> None:
        """Restore the callbacks' own hooks."""
        while self._silenced:
            self._silenced.pop().__dict__.pop("on_fit_start", None)

    def _names(self) -> Iterable[str]:
        for finder in self._finders:
            if isinstance(finder, BatchSizeFinder):
                names: tuple[str, ...] = (finder._batch_arg_name,)
            elif finder._update_attr:
                names = (finder._attr_name,) if finder._attr_name else _LEARNING_RATES
            else:
                names = ()
            yield from [name for name in names if lightning_hasattr(self._module, name)][:1]


def _finders(trainer: Trainer) -> Iterable[BatchSizeFinder | LearningRateFinder]:
    return (each for each in callbacks_of(trainer) if isinstance(each, (BatchSizeFinder, LearningRateFinder)))


def averages_of(trainer: Trainer) -> Averages:
    """Return the averaged copies of the trained module, in the order of the callbacks; call in `on_fit_start`."""
    models = averaged_models(trainer)
    return Averages(models, consumed=bool(models) and bool(trainer.enable_validation))


def averaged_models(trainer: Trainer) -> list[AveragedModel]:
    """Return the averaged copies of the trained module, in the order of the callbacks; none outside a fit."""
    models = (callback._average_model for callback in averaging_callbacks(trainer))
    return [model for model in models if model is not None]


def finish_with_averages(trainer: Trainer, module: LightningModule) -> None:
    """Put the averages into the module, as the callbacks do at the end of training.

    For a run that had ended before: the callbacks' hook is not called then.
    """
    for callback in averaging_callbacks(trainer):
        callback._copy_average_to_current(module)


def averaging_callbacks(trainer: Trainer) -> list[Any]:
    """Return Lightning's callbacks that average weights."""
    kind = getattr(callbacks, "WeightAveraging", None)  # Lightning 2.6 and later
    return [callback for callback in callbacks_of(trainer) if kind is not None and isinstance(callback, kind)]


def show_epoch(trainer: Trainer, num_done: int) -> None:
    """Let the bar show the epoch of a resume without its first `num_done` batches: bars learn number and length only at its start."""
    bar, module = trainer.progress_bar_callback, trainer.lightning_module
    if isinstance(bar, (TQDMProgressBar, RichProgressBar)):
        # Lightning counts only the remaining steps if `max_steps` ends the epoch.
        total = min(trainer.num_training_batches, bar.total_train_batches + num_done)
    if isinstance(bar, TQDMProgressBar) and bar._train_progress_bar is not None:
        TQDMProgressBar.on_train_epoch_start(bar, trainer, module)
        line = bar.train_progress_bar
        line.total, line.initial, line.n = None if total == math.inf else total, num_done, num_done
        line.refresh()
    elif isinstance(bar, RichProgressBar) and bar.progress is not None:
        RichProgressBar.on_train_epoch_start(bar, trainer, module)
        if (task := bar.train_progress_bar_id) is not None:
            bar.progress.update(task, total=None if total == math.inf else total, completed=num_done)


class ProgressNote:
    """Show `text()` in the trainer's progress bar, if both exist, until `remove`."""

    def __init__(self, trainer: Trainer, name: str, text: Callable[[], str | None]) -> None:
        self._bar, self._name = trainer.progress_bar_callback, name
        if self._bar is None:
            return
        if self._bar not in _notes:
            _show_notes(self._bar)
        _notes[self._bar][name] = text

    def remove(self) -> None:
        """Remove the note; after the last note the bar gets its own method back."""
        bar, self._bar = self._bar, None
        if bar is None:
            return
        notes = _notes[bar]
        notes.pop(self._name, None)
        if not notes:
            del _notes[bar]
            bar.__dict__.pop("get_metrics", None)


def _show_notes(bar: ProgressBar) -> None:
    notes = _notes[bar] = {}
    original = bar.get_metrics

    def get_metrics(*args: Any, **kwargs: Any) -> dict[str, Any]:
        shown = {name: text() for name, text in notes.items()}
        # Notes come first, so that a narrow terminal does not cut them off.
        return {**{name: text for name, text in shown.items() if text is not None}, **original(*args, **kwargs)}

    bar.get_metrics = get_metrics  # type: ignore[method-assign]
