"""How fast a backend may write, and the way to stop it: every writer asks before each chunk.

Chunks get consecutive places on one time line, so that the writes of all threads together stay below the rate; the
wait holds neither the interpreter lock nor anybody but the thread that writes. The same question is where a write
under way learns that its backend was closed.
"""

from __future__ import annotations

import threading
import time

from lightning_moe_ckpt.errors import ConfigurationError, StorageError

_CHUNKS_PER_SECOND = 8
_MIN_CHUNK_NBYTES = 16 * 2**10


class Pace:
    """Spreads the chunks of one backend over time.

    Args:
        bandwidth: bytes per second; `None` for as fast as it goes.

    Raises:
        ConfigurationError: `bandwidth` is not positive.
    """

    def __init__(self, bandwidth: int | None = None) -> None:
        if bandwidth is not None and bandwidth < 1:
            raise ConfigurationError(
                f"`bandwidth={bandwidth}` must be bytes per second, one or more; `None` for no cap."
            )
        self.bandwidth = bandwidth
        self._turns = threading.Lock()
        self._next = time.monotonic()
        self._closed = threading.Event()

    def chunk_nbytes(self, most: int, *, least: int = _MIN_CHUNK_NBYTES) -> int:
        """Bytes to write between two questions: small enough that a slow pace is also an even one."""
        return most if self.bandwidth is None else min(most, max(least, self.bandwidth // _CHUNKS_PER_SECOND))

    def seconds(self, nbytes: int) -> float:
        """How long the pace alone makes a write of `nbytes` take."""
        return 0.0 if self.bandwidth is None else nbytes / self.bandwidth

    def wait(self, nbytes: int) -> None:
        """Wait until it is the turn of a chunk of `nbytes`.

        Raises:
            StorageError: the backend was closed.
        """
        if self._closed.wait(self._reserve(nbytes)):
            raise StorageError("the store was closed during a write, which is abandoned. Nothing of it is visible.")

    def close(self) -> None:
        """End every wait, now and from now on, with an error."""
        self._closed.set()

    def _reserve(self, nbytes: int) -> float:
        """Seconds until the turn of a chunk; zero if it may go at once."""
        if self.bandwidth is None:
            return 0.0
        with self._turns:
            now = time.monotonic()
            turn = max(self._next, now)
            self._next = turn + nbytes / self.bandwidth
            return turn - now
