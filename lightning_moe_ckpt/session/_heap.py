"""Full garbage collections kept out of a restore, and short while training: what is alive stays out of them.

Python walks all containers when a quarter more of them have survived than at the last full collection. A Trainer's
heap takes 200 to 300 ms for that (measured, 300,000 objects), on whichever thread happens to allocate, with the
interpreter lock held. Capturing allocates little per step, but a run without checkpoints allocates next to nothing.

`gc.freeze` is for the whole process. So it is done once, undone at the end of the fit, and not at all where somebody
else has arranged collections already. What is frozen is still freed by reference counts; only cycles that become
garbage later wait for the end of the fit. torchtitan and NVRx go further and collect by hand at chosen steps; that
belongs to whoever owns the process.

A restart makes much at once, which brings a full collection on just where everybody waits. There what was alive before is
left out at once and uncollected, and collected and frozen like any other heap when training has caught up.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collections_paused() -> Iterator[None]:
    """No collection runs inside, for what makes many objects and keeps them, such as the layout of a window.

    Half of the time of a restore went into looking for garbage in it, where there is none (measured).
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
    """Who keeps objects of this process out of collections, as far as is known."""

    ours = False
    others = False
    """Found once. Finding it again would hold up training: that counts what is frozen, a tenth of a second per million."""


class FrozenHeap:
    """Objects alive at `freeze` are left out of collections until `thaw`.

    Nothing happens where collections are switched off or objects are frozen already: their owner has other plans.

    Args:
        wanted: `False` makes both do nothing.
    """

    def __init__(self, *, wanted: bool) -> None:
        self._wanted, self._holds = wanted, False

    def spare(self) -> None:
        """Leave out what is alive now, garbage too, until `unspare`, `freeze` or `thaw`; no object is looked at for it."""
        if self._wanted:
            self._hold(collect=False)

    def unspare(self) -> None:
        """Undo `spare`, if it did anything."""
        if self._wanted:
            self._release()

    def freeze(self) -> None:
        """Collect, then freeze; the first call counts."""
        if self._wanted:
            self.thaw()
            self._hold(collect=True)

    def thaw(self) -> None:
        """Let collections see everything again, if `spare` or `freeze` took it from them. Repeating this is allowed."""
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
