"""Take the progress of Lightning's loops for the journal, at every boundary of which something is taken."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from operator import is_
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.progress import _BaseProgress

from lightning_moe_ckpt.journal import Written, written

_SETTINGS = ("accumulate_grad_batches", "train_loader_epoch", "validation_loader_epoch")


class LoopProgress:
    """Take the progress of all loops of one fit between two batches or epochs.

    It has what `_Loop.state_dict` gives. Of its hundred entries only numbers ever change, so the text around them is made
    once.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._parts: list[object] = []
        """All loops and their progress."""
        self._links: list[tuple[dict[str, Any], str]] = []
        """Their places, in attributes."""
        self._numbers: list[tuple[dict[str, Any], str]] = []
        """Places of what changes, in the order in which it is written."""
        self._loops: list[tuple[str, _Loop]] = []
        self._rest: dict[str, Written] = {}
        """What is no progress: states of the loops themselves, and settings."""
        self._settings: tuple[object, ...] = (self,) * len(_SETTINGS)
        self._text = ""

    def take(self) -> Written:
        """Return the progress."""
        if not self._parts or not all(map(is_, [values[name] for values, name in self._links], self._parts)):
            self._outline()
        for name, loop in self._loops:
            own = loop.on_save_checkpoint()
            # Loaders are repositioned by fetching, see `skip_batches`; their own state is exact only in special cases.
            own.pop("combined_loader", None)
            self._rest[name] = written(own) if own else _NOTHING
        fit_loop = self._trainer.fit_loop
        settings = (
            self._trainer.accumulate_grad_batches,
            fit_loop._last_train_dl_reload_epoch,
            fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch,
        )
        if not all(map(is_, settings, self._settings)):  # they seldom change
            self._settings = settings
            self._rest["settings"] = written(dict(zip(_SETTINGS, settings, strict=True)))
        found = [values[name] for values, name in self._numbers]
        texts = [
            each if type(each) is int else each.text if type(each) is Written else written(each).text for each in found
        ]
        return Written(self._text % tuple(texts))

    def _outline(self) -> None:
        self._parts, self._links, self._numbers, self._loops = [], [], [], []
        entries = [*self._of_loop(self._trainer.fit_loop, ""), self._entry(self._rest, "settings", "settings")]
        self._text = f'["d",{",".join(entries)}]'

    def _link(self, values: dict[str, Any], name: str) -> None:
        self._parts.append(values[name])
        self._links.append((values, name))

    def _entry(self, values: dict[str, Any], name: str, key: str) -> str:
        self._numbers.append((values, name))
        return f'["{key}",%s]'

    def _of_loop(self, loop: _Loop, prefix: str) -> Iterator[str]:
        self._loops.append((f"{prefix}state_dict", loop))
        yield self._entry(self._rest, *[f"{prefix}state_dict"] * 2)
        for name, each in vars(loop).items():
            if isinstance(each, _BaseProgress | _Loop):
                self._link(vars(loop), name)
            if isinstance(each, _BaseProgress):
                yield f'["{prefix}{name}",{self._of_progress(each)}]'
            elif isinstance(each, _Loop):
                yield from self._of_loop(each, f"{prefix}{name}.")

    def _of_progress(self, progress: Any) -> str:
        values, entries = vars(progress), list[str]()
        for name in (each.name for each in fields(progress)):
            if isinstance(values[name], _BaseProgress):
                self._link(values, name)
                entries.append(f'["{name}",{self._of_progress(values[name])}]')
            else:
                entries.append(self._entry(values, name, name))
        return f'["d",{",".join(entries)}]'


_NOTHING = written({})


def last_step(trainer: Trainer) -> int | None:
    """Return the step with which training is planned to end; `None` where only time, or nothing, ends it.

    Call while it trains: before, Lightning would build the loader to find out.
    """
    planned = trainer.estimated_stepping_batches
    return int(planned) if 0 < planned < float("inf") else None
