"""Keep what a process that runs stored steps again writes away from what is stored."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence

from typing_extensions import override

from lightning_moe_ckpt.errors import KeyExists, KeyMissing
from lightning_moe_ckpt.storage._backend import Backend, Entry
from lightning_moe_ckpt.storage._open import T, WrappedBackend, open_without_retries
from lightning_moe_ckpt.storage._posix import PosixBackend


class Overlay(WrappedBackend):
    """Backend whose written objects stay in this process, or in `folder`, on top of those of another backend, which is only read."""

    def __init__(self, backend: Backend, folder: str = "") -> None:
        super().__init__(backend, lambda _, operation: operation())
        self._own: Backend = PosixBackend(folder) if folder else open_without_retries(f"memory://{uuid.uuid4().hex}")
        self._gone: set[str] = set()

    @property
    @override
    def creates_exclusively(self) -> bool:
        return True

    @override
    def put(self, key: str, *views: bytes | memoryview) -> None:
        self._own.put(key, *views)

    @override
    def create(self, key: str, data: bytes) -> None:
        if any(entry.key == key for entry in self.list(key)):
            raise KeyExists(f"{self.url}: {key} is there already.")
        self._own.create(key, data)

    @override
    def get(self, key: str) -> bytes:
        return _first(lambda: self._own.get(key), lambda: self._backend.get(key))

    @override
    def get_into(self, key: str, out: memoryview) -> None:
        _first(lambda: self._own.get_into(key, out), lambda: self._backend.get_into(key, out))

    @override
    def get_range(self, key: str, start: int, out: memoryview) -> None:
        _first(lambda: self._own.get_range(key, start, out), lambda: self._backend.get_range(key, start, out))

    @override
    def list(self, prefix: str, after: str = "", most: int | None = None) -> list[Entry]:
        below = self._backend.list(prefix, after, None if self._gone else most)
        found = {entry.key: entry for entry in below if entry.key not in self._gone}
        found |= {entry.key: entry for entry in self._own.list(prefix, after, most)}
        return [found[key] for key in sorted(found)][:most]

    @override
    def delete(self, *keys: str) -> None:
        self._gone.update(keys)
        self._own.delete(*keys)

    @override
    def unfinished_writes(self, prefix: str) -> Sequence[Entry]:
        return ()

    @override
    def sweep(self, prefix: str) -> None:
        """Do nothing: nothing here is unfinished."""


def _first(own: Callable[[], T], below: Callable[[], T]) -> T:
    try:
        return own()
    except KeyMissing:
        return below()
