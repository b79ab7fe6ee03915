"""A store of which a share of all calls fails, each kind of call alike, as one that is throttled or far away."""

from __future__ import annotations

import errno
import os
import random
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

CALLS = ("ls", "info", "exists", "cat_file", "pipe_file", "rm_file", "makedirs", "_open")
"""What every other method of a file system is made of."""


class StutteringFileSystem(LocalFileSystem):  # type: ignore[misc]
    """Files, written at once. `share` of the calls fail, the same ones in every process that makes the same ones."""

    protocol = "stutters"
    cachable = False

    def __init__(self, share: float = 0.15, seed: int = 0, **options: Any) -> None:
        super().__init__(**options)
        self.share, self.failed, self._draws = share, dict.fromkeys(CALLS, 0), random.Random(seed)
        self._inside = threading.local()
        for name in CALLS:
            setattr(self, name, self._at_times(name, getattr(self, name)))

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return LocalFileSystem._strip_protocol(str(path).removeprefix("stutters://"))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        """Write whole objects only, and refuse existing ones, as a store of objects does."""
        temporary = Path(f"{path}.{uuid.uuid4().hex}")
        temporary.write_bytes(value)
        try:
            (os.link if mode == "create" else os.replace)(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    def _at_times(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def stuttering(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._inside, "call", None) is not None:  # a part of another call
                return call(*args, **kwargs)
            if self._draws.random() < self.share:
                self.failed[name] += 1
                raise OSError(errno.EIO, f"{name}: input/output error (injected)")
            self._inside.call = name
            try:
                return call(*args, **kwargs)
            finally:
                self._inside.call = None

        return stuttering


fsspec.register_implementation("stutters", StutteringFileSystem, clobber=True)
