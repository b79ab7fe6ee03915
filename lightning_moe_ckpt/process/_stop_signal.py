"""Turn SIGTERM into a flag, and end the process after a time if it cannot stop by itself.

Python runs signal handlers between two bytecodes of the main thread. A main thread that waits inside a collective for
a peer that is gone runs none, and would wait there until the launcher kills it. The interpreter's own C handler
therefore writes the signal's number to a pipe too (`signal.set_wakeup_fd`), and a thread that reads the pipe keeps the
time:

    signal -> patience (2 s, and twice the longest step seen) -> `on_late` -> 2 s -> the process exits

If the main thread reaches a boundary in time, it calls `allow_grace` and has the rest of the grace period to save and
leave.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

EXIT_STATUS = 128 + signal.SIGTERM
"""Exit status of a process ended by SIGTERM, as shells report it; unlike 0 it makes launchers restart the job."""

PATIENCE_SECONDS = 2.0
"""Seconds that an agreement with peers may take beyond the steps under way."""

REPEAT_SECONDS = 1.0
"""Seconds within which a second signal counts as the first one: nested launchers deliver it several times."""

_FORCED_SECONDS = 2.0
"""Seconds from `on_late` to the process's end."""

_CLOSE, _LOOK_AGAIN = 0, 255
"""Messages to the watching thread through the pipe; no signal has these numbers."""


class StopSignal:
    """Note SIGTERM, and end the process if the main thread cannot act on it.

    Args:
        grace: longest time from the first signal to the process's end.
        on_late: called by the watching thread when no boundary was reached in time.
        before_exit: called by the watching thread right before it ends the process.
    """

    def __init__(self, grace: timedelta, *, on_late: Callable[[], None], before_exit: Callable[[], None]) -> None:
        self._grace = grace.total_seconds()
        self._on_late, self._before_exit = on_late, before_exit
        self._lock = threading.RLock()  # the handler may interrupt its own thread inside
        self._received_at: float | None = None
        self._requested_at: float | None = None
        """Whether this process or a peer got a signal."""
        self._deadline: float | None = None
        self._heard_at_beat = 0
        self._beats, self._last_beat, self._longest = 0, 0.0, 0.0
        self.late = False
        """Whether to exit at once: no boundary was reached in time, or the signal was repeated."""
        self._watching = threading.current_thread() is threading.main_thread()
        if self._watching:
            self._watch()

    # -- called from the main thread

    @property
    def requested(self) -> bool:
        """Whether this process was asked to stop."""
        return self._requested_at is not None

    def receive(self) -> bool:
        """Note a signal; called by the signal handler. Return whether the signal is a repetition that means "at once"."""
        now = time.monotonic()
        if self._received_at is None:
            self._received_at = now
            self.start_clock()
            return False
        self.late = self.late or now - self._received_at >= REPEAT_SECONDS
        if self.late:
            self._set_deadline(now + _FORCED_SECONDS)
        return self.late

    def start_clock(self) -> None:
        """Start to stop, after a signal to this process or a peer. Starting twice is allowed."""
        if self._requested_at is None:
            self._requested_at = time.monotonic()
            self._tell(signal.SIGTERM)

    def beat(self) -> None:
        """Note that the main thread begins a batch."""
        now = time.monotonic()
        if self._beats:
            self._longest = max(self._longest, now - self._last_beat)
        self._beats, self._last_beat = self._beats + 1, now

    def allow_grace(self) -> float:
        """Allow the rest of the grace period, since a boundary was reached, and return its seconds."""
        assert self._requested_at is not None
        end = self._requested_at + self._grace
        self._set_deadline(end)
        return max(0.0, end - time.monotonic())

    def seconds_since(self) -> float:
        """Seconds since the first signal."""
        return 0.0 if self._requested_at is None else time.monotonic() - self._requested_at

    def close(self) -> None:
        """End the watching thread. The process goes on as if no signal had come. Closing twice is allowed."""
        if not self._watching:
            return
        self._watching = False
        _release_descriptor(self._writer)
        self._tell(_CLOSE)
        self._thread.join()
        os.close(self._reader)
        os.close(self._writer)

    # -- private

    def _watch(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        if (previous := signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)) != -1:
            signal.set_wakeup_fd(previous)  # an event loop needs it; then only the handler tells us
        _descriptors.add(self._writer)
        self._thread = threading.Thread(target=self._serve, name="moe-ckpt-stop", daemon=True)
        self._thread.start()

    def _tell(self, number: int) -> None:
        if self._watching or number == _CLOSE:
            os.write(self._writer, bytes([number]))

    def _set_deadline(self, deadline: float) -> None:
        with self._lock:
            self._deadline = deadline
        self._tell(_LOOK_AGAIN)

    # -- the thread

    def _serve(self) -> None:
        while True:
            ready, _, _ = select.select([self._reader], [], [], self._remaining())
            if ready:
                told = os.read(self._reader, 4096)
                if _CLOSE in told:
                    return
                if signal.SIGTERM in told:
                    self._hear()
            else:
                self._time_is_up()

    def _remaining(self) -> float | None:
        deadline = self._deadline
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    def _hear(self) -> None:
        with self._lock:
            if self._deadline is None:
                self._heard_at_beat = self._beats
                self._deadline = time.monotonic() + min(self._grace, PATIENCE_SECONDS + 2 * self._longest)

    def _time_is_up(self) -> None:
        with self._lock:
            if self._deadline is None or time.monotonic() < self._deadline:
                return
            if not self.requested and self._beats != self._heard_at_beat:
                # The main thread has run Python since, and no handler: a forked child got the signal, not we.
                self._deadline = None
                return
            first, self.late = not self.late, True
            self._deadline += _FORCED_SECONDS
        if first:
            self._on_late()
        else:
            self._exit()

    def _exit(self) -> None:
        self._before_exit()
        # Not by `logging`: the main thread may hold its lock.
        os.write(2, b"moe-ckpt: stopped by SIGTERM, at once: no boundary was reached in time, a peer may be gone\n")
        os._exit(EXIT_STATUS)


_descriptors: set[int] = set()
"""Wakeup descriptors of this process that belong to this module, not to an event loop."""


def _release_descriptor(descriptor: int) -> None:
    if (current := signal.set_wakeup_fd(-1)) not in (-1, descriptor):
        signal.set_wakeup_fd(current)
    _descriptors.discard(descriptor)


def _forget_in_fork() -> None:
    """Release the descriptors in a forked child, whose signals do not concern the parent."""
    for descriptor in list(_descriptors):
        with suppress(ValueError):  # not the main thread of the interpreter, so not a child that gets handlers
            _release_descriptor(descriptor)


os.register_at_fork(after_in_child=_forget_in_fork)
