"""Pass the calls of a backend through a function, which can add delays and failures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from lightning_moe_ckpt.storage import Backend, Entry

T = TypeVar("T")
Verb = Literal["put", "create", "get", "get_into", "get_range", "list", "delete", "sweep"]


@dataclass(frozen=True, slots=True)
class StorageCall:
    """One call of a backend."""

    verb: Verb
    key: str
    """Key of the object; a prefix for `list` and `sweep`."""
    nbytes: int = 0
    """Bytes written or to be filled; 0 if only the answer shows them."""

    @property
    def writes(self) -> bool:
        """Whether the call needs room in the store."""
        return self.verb in {"put", "create"}

    def __str__(self) -> str:
        return f"{self.verb} {self.key}"


class Around(Protocol):
    """Function around the calls of a backend. Several threads may call it at once."""

    def __call__(self, call: StorageCall, operation: Callable[[], T]) -> T:
        """Run `operation` and return its result, or raise an error in its place."""


class WatchedBackend:
    """A `Backend` that passes every call of `backend`, and its result, through `around`."""

    def __init__(self, backend: Backend, around: Around) -> None:
        self._backend, self._around = backend, around

    @property
    def url(self) -> str:
        return self._backend.url

    @property
    def creates_exclusively(self) -> bool:
        return self._backend.creates_exclusively

    def put(self, key: str, *views: bytes | memoryview) -> None:
        nbytes = sum(memoryview(view).nbytes for view in views)
        self._around(StorageCall("put", key, nbytes), lambda: self._backend.put(key, *views))

    def create(self, key: str, data: bytes) -> None:
        self._around(StorageCall("create", key, len(data)), lambda: self._backend.create(key, data))

    def get(self, key: str) -> bytes:
        return self._around(StorageCall("get", key), lambda: self._backend.get(key))

    def get_into(self, key: str, out: memoryview) -> None:
        self._around(StorageCall("get_into", key, out.nbytes), lambda: self._backend.get_into(key, out))

    def get_range(self, key: str, start: int, out: memoryview) -> None:
        self._around(StorageCall("get_range", key, out.nbytes), lambda: self._backend.get_range(key, start, out))

    def list(self, prefix: str) -> list[Entry]:
        return self._around(StorageCall("list", prefix), lambda: self._backend.list(prefix))

    def delete(self, key: str) -> None:
        self._around(StorageCall("delete", key), lambda: self._backend.delete(key))

    def unfinished_writes(self, prefix: str) -> Sequence[Entry]:
        return self._around(StorageCall("list", prefix), lambda: self._backend.unfinished_writes(prefix))

    def sweep(self, prefix: str) -> None:
        self._around(StorageCall("sweep", prefix), lambda: self._backend.sweep(prefix))

    def close(self) -> None:
        self._backend.close()
