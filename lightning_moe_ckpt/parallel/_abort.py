"""Make blocked collectives of this process raise, when a peer is gone that they wait for, directly or through others.

gloo has no abort: `destroy_process_group`, `_abort_process_group` and the backend's `shutdown` from another thread leave
a blocked operation alone until its time-out (measured with torch 2.13). It does notice a connection that ends. So the
connections that appear while groups are made are noted, and `abort` shuts them down; the operation then raises within
milliseconds, in the thread that waits in it. NCCL has an abort of its own.

Only connected sockets are shut down: gloo ends the process when its listening socket fails. Groups of gloo must connect
when they are made, as they do unless `TORCH_GLOO_LAZY_INIT` is set. Linux only; elsewhere gloo's own time-outs remain.
"""

from __future__ import annotations

import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import torch.distributed as dist
from typing_extensions import Self

_DESCRIPTORS = Path("/proc/self/fd")
_AGAIN_SECONDS = 0.005
"""Groups that are being made open connections until the thread that makes them has raised: they are shut down again."""


class GroupAbort:
    """Context for making process groups, and the means to break them.

    Enter it once, in the thread that makes the groups; open the store's connection inside too, so that waiting for a
    peer's address can be broken. Other connections that this process opens meanwhile are taken for the groups' own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._before: set[int] = set()
        self._made: set[int] = set()
        self._making = self._aborted = False

    def __enter__(self) -> Self:
        self._before, self._making = _connected(), True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._lock:
            self._made, self._making = _connected() - self._before, False
            if self._aborted:
                _shut_down(self._made)
        if not dist.is_initialized():
            # Torch names groups by a counter that `destroy_process_group` resets, but a group that failed to be made
            # has advanced: the next one would wait for its peers under another name than theirs.
            dist.distributed_c10d._world.group_count = 0  # noqa: SLF001  # torch has no public way

    def abort(self) -> None:
        """Make operations of the groups raise, now and from now on. Called from any thread but that of the context.

        Returns when the groups' connections are shut down; while groups are being made, when that has raised.
        """
        with self._lock:
            if self._aborted:
                return
            self._aborted = True
            _shut_down(self._targets())
        while self._making:
            time.sleep(_AGAIN_SECONDS)
            with self._lock:
                _shut_down(self._targets())
        _abort_nccl()

    def _targets(self) -> set[int]:
        return _connected() - self._before if self._making else self._made


def _abort_nccl() -> None:
    """Abort NCCL's communicators, which also ends kernels that wait on the device."""
    if dist.is_initialized() and dist.is_nccl_available() and dist.get_backend() == "nccl":
        dist.distributed_c10d._abort_process_group()  # noqa: SLF001  # torch has no public abort


def _connected() -> set[int]:
    """Return the inodes of this process's connected TCP sockets; empty if unknown."""
    found = set[int]()
    for inode, each in _tcp_sockets():
        with suppress(OSError):  # it listens, or the peer has left
            each.getpeername()
            found.add(inode)
    return found


def _shut_down(inodes: set[int]) -> None:
    for inode, each in _tcp_sockets():
        if inode in inodes:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def _tcp_sockets() -> Iterator[tuple[int, socket.socket]]:
    """Yield (inode, duplicate) of every TCP socket; the duplicate is closed when the next one is asked for."""
    if sys.platform != "linux":
        return
    for entry in _DESCRIPTORS.iterdir():
        with suppress(OSError):  # closed meanwhile, such as the descriptor of this listing
            # A duplicate cannot become another file between the look at its inode and what is done to it.
            duplicate = os.dup(int(entry.name))
            status = os.fstat(duplicate)
            if not stat.S_ISSOCK(status.st_mode):
                os.close(duplicate)
                continue
            with socket.socket(fileno=duplicate) as each:
                if each.family in {socket.AF_INET, socket.AF_INET6} and each.type == socket.SOCK_STREAM:
                    yield status.st_ino, each
