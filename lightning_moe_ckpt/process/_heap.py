"""Keep full garbage collections out of a restore, and short in training, by leaving living objects out of them.

Python walks all containers when a quarter more of them have survived than at the last full collection. A Trainer's
heap takes 200 to 300 ms for that (measured, 300,000 objects), on whichever thread happens to allocate, with the
interpreter lock held. Capturing allocates little per step, but a run without checkpoints allocates next to nothing.

`gc.freeze` acts on the whole process. It is done once, undone at the end of the fit, and not done if other code
has changed collections already. Frozen objects are still freed by reference counts; only cycles that become
garbage later wait for the end of the fit. torchtitan and NVRx go further and collect by hand at chosen steps; that
is left to the owner of the process.

A restart makes many objects at once, which triggers a full collection while training waits. There, objects alive before
are left out at once without a collection. They are collected and frozen like any others when training has caught up.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
    """Checked once: a check counts the frozen objects, which takes a tenth of a second per million."""


class FrozenHeap:
    """Leave objects that are alive at `freeze` out of collections until `thaw`.

    Nothing happens if collections are switched off or objects are frozen already, since other code decided that.

    Args:
        wanted: `False` makes all methods do nothing.
    """

    def __init__(self, *, wanted: bool) -> None:
        self._wanted, self._holds = wanted, False

    def freeze_unswept(self) -> None:
        """Leave out all objects until `unfreeze`, `freeze` or `thaw`, garbage included, without a collection."""
        if self._wanted:
            self._hold(collect=False)

    def unfreeze(self) -> None:
        """Undo `freeze_unswept`, if it did anything."""
        if self._wanted:
            self._release()

    def freeze(self) -> None:
        """Collect, then freeze; the first call counts."""
        if self._wanted:
            self.thaw()
            self._hold(collect=True)

    def thaw(self) -> None:
        """Undo `freeze_unswept` or `freeze`, for good. Repeating this is allowed."""
        self._wanted = False
        self._release()

    def _hold(self, *, collect: bool) -> None:
        if not gc.isenabled() or _Owner.ours or _Owner.others:
            return
        _Owner.others = gc.get_freeze_count() > 0
        if not _Owner.others:
            if collect:
                gc.collect()  # garbage that is frozen would stay
            gc.freeze()
            _Owner.ours = self._holds = True

    def _release(self) -> None:
        if self._holds:
            _Owner.ours = self._holds = False
            gc.unfreeze()
