"""Make calls beside the training thread, at moments at which that leaves the interpreter lock alone.

A thread that wakes up takes the lock from training as soon as that calls into torch, and holds up its next line. While
backward runs, training has no lines of Python, or few: what a thread does then costs training next to nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from lightning_moe_ckpt.process._fork import guard_forks


class CallThread:
    """A thread that makes one call at a time, for the training thread."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._ended: SimpleQueue[BaseException | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.busy = False
        """Whether `join` is due."""

    def begin(self, call: Callable[[], None]) -> None:
        """Make `call` on the thread; `join` comes before the next `begin`."""
        if self._thread is None:
            guard_forks()
            self._thread = threading.Thread(target=self._serve, name="moe-ckpt-seal", daemon=True)
            self._thread.start()
        self.busy = True
        self._calls.put(call)

    def join(self) -> None:
        """Wait for the call, and raise what it raised."""
        error = self._ended.get()
        self.busy = False  # after it: a signal may have ended the wait
        if error is not None:
            raise error

    def finish(self) -> None:
        """End the thread when its call has ended, whatever became of it."""
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join()
        self._thread, self.busy = None, False
        self._calls, self._ended = SimpleQueue(), SimpleQueue()

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except BaseException as error:  # noqa: BLE001  # thread entry: raised by `join`
                self._ended.put(error)
            else:
                self._ended.put(None)
            del call  # while waiting, hold on to nobody's memory
