"""A store that outlives a simulated process, which dies at a chosen call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeVar

from lightning_moe_ckpt.storage import Backend, StorageCall, WrappedBackend

T = TypeVar("T")
When = Literal["before", "after"]


class Crashed(BaseException):
    """The simulated process is dead. A `BaseException`, so that no handler of the code under test survives it."""


class CrashingBackend(WrappedBackend):
    """Pass calls on until the chosen one, and raise `Crashed` before or after it, and at every later call."""

    def __init__(self, backend: Backend, *, crash_at: int | None = None, when: When = "before") -> None:
        """Wrap `backend`.

        Args:
            backend: the store, which outlives the process.
            crash_at: index of the fatal call; `None` only counts.
            when: whether that call still takes effect.
        """
        super().__init__(backend, self._pass)
        self.calls: list[str] = []
        """Every call so far, e.g. `put snap/...`."""
        self._crash_at, self._when, self._dead = crash_at, when, False

    def delete(self, *keys: str) -> None:
        """Delete one by one: a process may die with some of the objects gone."""
        for key in keys:
            super().delete(key)

    def _pass(self, call: StorageCall, operation: Callable[[], T]) -> T:
        if self._dead:
            raise Crashed(call)
        self._dead = self._crash_at == len(self.calls)
        self.calls.append(str(call))
        if self._dead and self._when == "before":
            raise Crashed(call)
        result = operation()
        if self._dead:
            raise Crashed(call)
        return result
