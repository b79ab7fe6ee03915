"""Show notes in the trainer's progress bar, whichever class it has.

Lightning's bars show logged numbers. They show a text only if the bar's own `get_metrics` returns it, which is
meant to be replaced. This module replaces it on one bar until the fit ends. A note is not logged: it reaches neither
the journal of a step nor `callback_metrics`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ProgressBar

_notes: WeakKeyDictionary[ProgressBar, dict[str, Callable[[], str | None]]] = WeakKeyDictionary()
"""Notes of each bar, by name."""


class ProgressNote:
    """Show an entry in the trainer's progress bar, if there is one, until `remove`.

    Args:
        trainer: the trainer with the bar.
        name: name of the entry.
        text: called whenever the bar is drawn; nothing is shown if it returns `None`.
    """

    def __init__(self, trainer: Trainer, name: str, text: Callable[[], str | None]) -> None:
        self._bar, self._name = trainer.progress_bar_callback, name
        if self._bar is None:
            return
        if self._bar not in _notes:
            _show_notes(self._bar)
        _notes[self._bar][name] = text

    def remove(self) -> None:
        """Remove the note; after the last one the bar gets its own method back."""
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
