"""A backend whose process dies at a chosen call, for tests of crash points."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeVar

from lightning_moe_ckpt.storage import Backend, Entry

T = TypeVar("T")


class Crashed(BaseException):
    """The simulated process is dead. A `BaseException`, so that no handler of the code under test survives it."""


class CrashingBackend:
    """Passes calls on until the chosen one, and dies before or after it; every later call finds a dead process."""

    def __init__(
        self, backend: Backend, *, crash_at: int | None = None, when: Literal["before", "after"] = "before"
    ) -> None:
        """Wrap `backend`.

        Args:
            backend: the store, which outlives the process.
            crash_at: index of the fatal call; `None` only counts.
            when: whether that call still takes effect.
        """
        self.calls: list[str] = []
        """Every call so far, e.g. `put snap/...`."""
        self._backend = backend
        self._crash_at = crash_at
        self._when = when
        self._dead = False

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
        self._pass(f"put {key}", lambda: self._backend.put(key, *views))

    def create(self, key: str, data: bytes) -> None:
        """Store an object if the key is free."""
        self._pass(f"create {key}", lambda: self._backend.create(key, data))

    def get(self, key: str) -> bytes:
        """Read an object."""
        return self._pass(f"get {key}", lambda: self._backend.get(key))

    def get_into(self, key: str, out: memoryview) -> None:
        """Fill `out`."""
        self._pass(f"get_into {key}", lambda: self._backend.get_into(key, out))

    def get_range(self, key: str, start: int, out: memoryview) -> None:
        """Fill `out` from `start` on."""
        self._pass(f"get_range {key}", lambda: self._backend.get_range(key, start, out))

    def list(self, prefix: str) -> list[Entry]:
        """List objects."""
        return self._pass(f"list {prefix}", lambda: self._backend.list(prefix))

    def delete(self, key: str) -> None:
        """Remove an object."""
        self._pass(f"delete {key}", lambda: self._backend.delete(key))

    def sweep(self, prefix: str) -> None:
        """Remove leftovers."""
        self._pass(f"sweep {prefix}", lambda: self._backend.sweep(prefix))

    def close(self) -> None:
        """Release connections."""
        self._backend.close()

    def _pass(self, call: str, operation: Callable[[], T]) -> T:
        if self._dead:
            raise Crashed(call)
        self._dead = self._crash_at == len(self.calls)
        self.calls.append(call)
        if self._dead and self._when == "before":
            raise Crashed(call)
        result = operation()
        if self._dead:
            raise Crashed(call)
        return result
