"""Keep full garbage collections out of a restore, and short in training, by leaving living objects out of them.

Python walks all containers when a quarter more of them have survived than at the last full collection. A Trainer's
heap takes 200 to 300 ms for that (measured, 300,000 objects), on whichever thread happens to allocate, with the
interpreter lock held. Capturing allocates little per step, but a run without checkpoints allocates next to nothing.

`gc.freeze` acts on the whole process. It is undone at the fit's end, and not done if other code has changed
collections already. Frozen objects are still freed by reference counts; only cycles that become garbage later wait for
the fit's end. torchtitan and NVRx go further and collect by hand at chosen steps; that is left to the owner of the
process.

The one full collection comes before the first batch, where no step waits for it. What the first steps make is collected
and frozen with the first generation: a walk over that alone. A restart makes many objects at once, and so does the layout
of a window, a few for every operator, which would trigger full collections while training waits. There, objects are left
out without one, and cycles that were garbage by then wait for the end of the fit too; but where an earlier fit of this
process may have left much of it, they are collected when training has caught up.
"""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def collections_paused() -> Iterator[None]:
    """Suspend collections in this context, for code that makes many objects and keeps them, such as a window's layout.

    Half of the time of a restore went into collections that found no garbage there (measured).
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class _Owner:
    """Whether this package or other code keeps objects of the process out of collections."""

    ours = False
    others = False
    """Owner, found once: the check counts the frozen objects, a tenth of a second per million."""
    had_fit = False
    """Whether another fit of this process came before."""


class FrozenHeap:
    """Leave objects alive at `freeze` out of collections until `thaw`.

    Nothing happens if not `wanted`, if collections are switched off or objects are frozen already, since other code decided that.
    """

    def __init__(self, *, wanted: bool) -> None:
        self._wanted, self._holds = wanted, False
        self._swept, _Owner.had_fit = not _Owner.had_fit, True
        """Whether garbage that is left out is not worth a collection."""

    @contextmanager
    def keeping(self, *, when: bool = True) -> Iterator[None]:
        """Suspend collections in this context, and leave its new objects out of later collections, until `thaw`; nothing unless
        `when`.

        Later collections would walk all of these objects several times, and find nothing.
        """
        if not when:
            yield
            return
        self.freeze_unswept()
        with collections_paused():
            yield
            if self._wanted and self._holds:
                gc.freeze()

    def freeze_unswept(self) -> None:
        """Leave out all objects, garbage included, without a collection."""
        if self._wanted:
            self._hold(collect=False)

    def sweep(self) -> None:
        """Collect the objects that `freeze_unswept` has left out, and leave out the survivors; call before training."""
        if self._wanted:
            self._release()
            self._hold(collect=True)
            self._swept = True

    def freeze(self) -> None:
        """Collect objects made since, and leave out the survivors too. Only the first call does so."""
        if not self._wanted:
            return
        self._wanted = False
        if not self._swept:
            self._release()
        if not self._holds:
            self._hold(collect=True)
        elif gc.isenabled():
            _collect()
            gc.freeze()

    def thaw(self) -> None:
        """Undo all freezing, for good. Repeated calls are allowed."""
        self._wanted = False
        self._release()

    def _hold(self, *, collect: bool) -> None:
        if not gc.isenabled() or _Owner.ours or _Owner.others:
            return
        _Owner.others = gc.get_freeze_count() > 0
        if not _Owner.others:
            if collect:
                _collect()  # garbage that is frozen would stay
            gc.freeze()
            _Owner.ours = self._holds = True

    def _release(self) -> None:
        if self._holds:
            _Owner.ours = self._holds = False
            gc.unfreeze()


def _collect() -> None:
    """Collect, and let an interrupt wait for the end: Python drops what is raised while an object dies."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        gc.collect()
        return
    received: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda *signal_and_frame: received.append(signal_and_frame))
    try:
        gc.collect()
    finally:
        signal.signal(signal.SIGINT, handler)
    if received:
        handler(*received[0])
