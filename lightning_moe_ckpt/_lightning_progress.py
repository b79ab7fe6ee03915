"""A note in the progress bar, whichever it is.

Lightning's bars show numbers that were logged, and a text among them only from the bar's own `get_metrics`, which is
made to be replaced. So it is, on one bar, until the fit ends. What is shown this way is not logged: it reaches neither
the journal of a step nor `callback_metrics`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer


class ProgressNote:
    """Shows one more entry in the trainer's progress bar, until `remove`; nothing where there is no bar.

    Args:
        trainer: whose bar.
        name: of the entry.
        text: asked whenever the bar is drawn; `None` shows nothing.
    """

    def __init__(self, trainer: Trainer, name: str, text: Callable[[], str | None]) -> None:
        self._bar = trainer.progress_bar_callback
        if self._bar is None:
            return
        original = self._bar.get_metrics

        def get_metrics(*args: Any, **kwargs: Any) -> dict[str, Any]:
            note = text()
            # First, where a narrow terminal does not cut it off.
            return {**({} if note is None else {name: note}), **original(*args, **kwargs)}

        self._bar.get_metrics = get_metrics  # type: ignore[method-assign]

    def remove(self) -> None:
        """Give the bar its own method back."""
        if self._bar is not None:
            self._bar.__dict__.pop("get_metrics", None)
            self._bar = None
