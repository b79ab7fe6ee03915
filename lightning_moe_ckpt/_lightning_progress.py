"""Notes in the progress bar, whichever it is.

Lightning's bars show numbers that were logged, and a text among them only from the bar's own `get_metrics`, which is
made to be replaced. So it is, on one bar, until the fit ends. What is shown this way is not logged: it reaches neither
the journal of a step nor `callback_metrics`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ProgressBar

_notes: WeakKeyDictionary[ProgressBar, dict[str, Callable[[], str | None]]] = WeakKeyDictionary()
"""Of each bar, by name."""


class ProgressNote:
    """Shows one more entry in the trainer's progress bar, until `remove`; nothing where there is no bar.

    Args:
        trainer: whose bar.
        name: of the entry.
        text: asked whenever the bar is drawn; `None` shows nothing.
    """

    def __init__(self, trainer: Trainer, name: str, text: Callable[[], str | None]) -> None:
        self._bar, self._name = trainer.progress_bar_callback, name
        if self._bar is None:
            return
        if self._bar not in _notes:
            _show_notes(self._bar)
        _notes[self._bar][name] = text

    def remove(self) -> None:
        """Give the bar its own method back, if this is the last note."""
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
        # First, where a narrow terminal does not cut them off.
        return {**{name: text for name, text in shown.items() if text is not None}, **original(*args, **kwargs)}

    bar.get_metrics = get_metrics  # type: ignore[method-assign]
