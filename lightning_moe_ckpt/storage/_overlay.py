"""Keep what a process that runs stored steps again writes in that process."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from lightning_moe_ckpt.errors import KeyExists
from lightning_moe_ckpt.storage._backend import Backend, Entry
from lightning_moe_ckpt.storage._open import WrappedBackend


class Overlay(WrappedBackend):
    """Backend whose written objects stay in this process, on top of those of another backend, which is only read."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend, lambda _, operation: operation())
        self._own: dict[str, bytes] = {}
        self._gone: set[str] = set()

    @property
    @override
    def creates_exclusively(self) -> bool:
        return True

    @override
    def put(self, key: str, *views: bytes | memoryview) -> None:
        self._own[key] = b"".join(views)

    @override
    def create(self, key: str, data: bytes) -> None:
        if any(entry.key == key for entry in self.list(key)):
            raise KeyExists(f"{self.url}: {key} is there already.")
        self._own[key] = data

    @override
    def get(self, key: str) -> bytes:
        return self._own[key] if key in self._own else super().get(key)

    @override
    def get_into(self, key: str, out: memoryview) -> None:
        self.get_range(key, 0, out) if key in self._own else super().get_into(key, out)

    @override
    def get_range(self, key: str, start: int, out: memoryview) -> None:
        if key in self._own:
            out[:] = self._own[key][start : start + out.nbytes]
        else:
            super().get_range(key, start, out)

    @override
    def list(self, prefix: str, after: str = "", most: int | None = None) -> list[Entry]:
        below = super().list(prefix, after, None if self._gone else most)
        found = {entry.key: entry for entry in below if entry.key not in self._gone}
        found |= {key: Entry(key, len(own)) for key, own in self._own.items() if key.startswith(prefix) and key > after}
        return [found[key] for key in sorted(found)][:most]

    @override
    def delete(self, *keys: str) -> None:
        self._gone.update(keys)
        for key in keys:
            self._own.pop(key, None)

    @override
    def unfinished_writes(self, prefix: str) -> Sequence[Entry]:
        return ()

    @override
    def sweep(self, prefix: str) -> None:
        """Do nothing: nothing here is unfinished."""
