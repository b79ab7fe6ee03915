"""Keep trial steps of Lightning's tuners out of the run, and their results in it.

Tuners search for a learning rate or a batch size by trial steps in the trainer's own fit loop. Meanwhile all other
callbacks are put aside and our taps rest. A resumed run uses the values found, since a new search may find others.

Like `_lightning`, it uses private attributes of Lightning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.utilities.parsing import lightning_getattr, lightning_hasattr, lightning_setattr

_LEARNING_RATES = ("lr", "learning_rate")
"""Names under which Lightning looks for the learning rate by default."""


def tries_only(trainer: Trainer) -> bool:
    """Return whether this fit is one of `Tuner`, which trains nothing."""
    return any(each._early_exit for each in _finders(trainer))


def resting(trainer: Trainer) -> Callable[[], bool]:
    """Return a function that says whether the trainer's callbacks are put aside; call in `on_fit_start`."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    first = callbacks[0]
    return lambda: not any(each is first for each in trainer.callbacks)  # type: ignore[attr-defined]


class Findings:
    """Values that tuners of one fit have found; they are part of every boundary.

    Args:
        trainer: a trainer in `on_fit_start`, before the search.
        module: the module it trains.
    """

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
            finder.on_fit_start = _find_nothing  # type: ignore[method-assign]

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


def _find_nothing(trainer: Trainer, pl_module: LightningModule) -> None:
    """Do nothing, in place of a search."""


def _finders(trainer: Trainer) -> Iterable[BatchSizeFinder | LearningRateFinder]:
    found: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return (each for each in found if isinstance(each, (BatchSizeFinder, LearningRateFinder)))
