"""Retries around a backend: a few attempts with growing pauses, then the error goes up.

`KeyExists` and `KeyMissing` are answers, not failures, and pass at once; so does `Corrupt`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from lightning_moe_ckpt.errors import KeyExists, KeyMissing, StorageError
from lightning_moe_ckpt.storage._backend import Backend, Entry

log = logging.getLogger(__name__)

T = TypeVar("T")


class Retrying:
    """A backend whose calls are tried again; see `Backend` for what each promises.

    A retried `create` may meet the object of its own first attempt as `KeyExists`: use `create_once`.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        attempts: int = 4,
        first_pause: timedelta = timedelta(milliseconds=100),
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._backend = backend
        self._attempts = attempts
        self._first_pause = first_pause
        self._sleep = sleep

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
        self._retry(lambda: self._backend.put(key, *views))

    def create(self, key: str, data: bytes) -> None:
        """Store an object if the key is free."""
        self._retry(lambda: self._backend.create(key, data))

    def get(self, key: str) -> bytes:
        """Read an object."""
        return self._retry(lambda: self._backend.get(key))

    def get_into(self, key: str, out: memoryview) -> None:
        """Fill `out`."""
        self._retry(lambda: self._backend.get_into(key, out))

    def get_range(self, key: str, start: int, out: memoryview) -> None:
        """Fill `out` from `start` on."""
        self._retry(lambda: self._backend.get_range(key, start, out))

    def list(self, prefix: str) -> list[Entry]:
        """List objects."""
        return self._retry(lambda: self._backend.list(prefix))

    def delete(self, key: str) -> None:
        """Remove an object."""
        self._retry(lambda: self._backend.delete(key))

    def sweep(self, prefix: str) -> None:
        """Remove leftovers."""
        self._retry(lambda: self._backend.sweep(prefix))

    def close(self) -> None:
        """Release connections."""
        self._backend.close()

    def _retry(self, operation: Callable[[], T]) -> T:
        for attempt in range(1, self._attempts):
            try:
                return operation()
            except (KeyExists, KeyMissing):  # noqa: PERF203 - trying again is what the loop is for
                raise
            except StorageError as error:
                pause = self._first_pause.total_seconds() * 2 ** (attempt - 1)
                log.warning("attempt %d of %d: %s Trying again in %.1f s", attempt, self._attempts, error, pause)
                self._sleep(pause)
        return operation()
