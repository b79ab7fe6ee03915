"""Retries around a backend: growing pauses until the operation has had its time, then the error goes up.

The only place of this package that tries a storage operation again, but for the few quick attempts that a request has
within obstore. `KeyExists`, `KeyMissing` and `Corrupt` are answers, not failures, and pass at once; so does
`StorageRefused`, which no pause mends.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

from lightning_moe_ckpt.errors import KeyExists, KeyMissing, StorageError, StorageRefused
from lightning_moe_ckpt.storage._backend import MIN_NBYTES_PER_SECOND, PATIENCE, Backend, Entry

log = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 10.0
# Not the generator of the process: training draws from that, and a hiccup of storage must not change what it draws.
_JITTER = random.SystemRandom()


class Retrying:
    """A backend whose calls are tried again; see `Backend` for what each promises.

    A retried `create` may meet the object of its own first attempt as `KeyExists`: use `create_once`.

    Args:
        backend: what is called.
        patience: from the first attempt of an operation to the beginning of its last, beside the time for its bytes.
        min_nbytes_per_second: how fast bytes are expected to go.
        clock: seconds that only grow, for tests.
        sleep: waits so many seconds and returns whether the backend was closed, for tests.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        patience: timedelta = PATIENCE,
        min_nbytes_per_second: int = MIN_NBYTES_PER_SECOND,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], bool] | None = None,
    ) -> None:
        self._backend = backend
        self._patience, self._min_rate = patience.total_seconds(), min_nbytes_per_second
        self._closed = threading.Event()
        self._clock, self._sleep = clock, sleep or self._closed.wait

    @property
    def url(self) -> str:
        """Where the objects are."""
        return self._backend.url

    @property
    def creates_exclusively(self) -> bool:
        """Whether `create` refuses an existing key."""
        return self._backend.creates_exclusively

    def put(self, key: str, *views: bytes | memoryview) -> None:
        """Store an object."""
        self._retry(lambda: self._backend.put(key, *views), sum(memoryview(view).nbytes for view in views))

    def create(self, key: str, data: bytes) -> None:
        """Store an object if the key is free."""
        self._retry(lambda: self._backend.create(key, data))

    def get(self, key: str) -> bytes:
        """Read an object."""
        return self._retry(lambda: self._backend.get(key))

    def get_into(self, key: str, out: memoryview) -> None:
        """Fill `out`."""
        self._retry(lambda: self._backend.get_into(key, out), out.nbytes)

    def get_range(self, key: str, start: int, out: memoryview) -> None:
        """Fill `out` from `start` on."""
        self._retry(lambda: self._backend.get_range(key, start, out), out.nbytes)

    def list(self, prefix: str) -> list[Entry]:
        """List objects."""
        return self._retry(lambda: self._backend.list(prefix))

    def delete(self, key: str) -> None:
        """Remove an object."""
        self._retry(lambda: self._backend.delete(key))

    def leftovers(self, prefix: str) -> Sequence[Entry]:
        """List leftovers."""
        return self._retry(lambda: self._backend.leftovers(prefix))

    def sweep(self, prefix: str) -> None:
        """Remove leftovers."""
        self._retry(lambda: self._backend.sweep(prefix))

    def close(self) -> None:
        """Release connections; nothing is tried again any more."""
        self._closed.set()
        self._backend.close()

    def _retry(self, operation: Callable[[], T], nbytes: int = 0) -> T:
        start, pause = self._clock(), _FIRST_PAUSE_SECONDS
        end = start + self._patience + nbytes / self._min_rate
        while True:
            try:
                return operation()
            except (KeyExists, KeyMissing, StorageRefused):  # noqa: PERF203 - trying again is what the loop is for
                raise
            except StorageError as error:
                # Ranks that failed together must not come back together.
                seconds = pause * _JITTER.uniform(0.5, 1.0)
                if self._clock() + seconds > end:
                    raise
                log.warning("%s Trying again in %.1f s, for up to %.0f s more.", error, seconds, end - self._clock())
                if self._sleep(seconds):
                    raise
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
