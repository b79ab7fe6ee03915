"""What a supervisor and a rank of its node say to each other: lines of JSON over a socket, and a page that both map.

    rank -> supervisor    {"arrived": incarnation}
                          {"called_off": incarnation, "why": ...}                           it is to end, and nobody has
    supervisor -> rank    {"place": environment, "incarnation": ..., "replacement": ...}    first, with the page
                          {"failed": incarnation, "rank": ..., "why": ...}
                          {"formed": incarnation, "prefix": ...}                            all ranks have arrived

The socket's name is in the environment of the ranks, in Linux's abstract namespace: nothing is left in the file system.
The supervisor knows who connects by the process id, which the kernel tells.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

SUPERVISOR = "MOE_CKPT_SUPERVISOR"
"""Environment variable with the name of the supervisor's socket."""

SPARE = "MOE_CKPT_SPARE"
"""Environment variable that says that this process waits for a place."""

HELLO = b"!"
"""The byte with which the page comes."""

Line = dict[str, Any]


def encode(message: Line) -> bytes:
    """Return a message as it is sent."""
    return json.dumps(message).encode() + b"\n"


def read_messages(connection: socket.socket) -> Iterator[Line]:
    """Yield messages until the other side is gone."""
    with suppress(OSError), connection.makefile("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):  # else the other side died within it
                yield json.loads(line)


def address_of(name: str) -> str:
    """Return the address of the socket of this name."""
    return f"\0{name}"


class Beats(NamedTuple):
    """What a heartbeat tells."""

    beats: int
    step: int
    """-1 before the first beat."""
    longest: float
    """Seconds of the longest step: from a beat to the next one, or to a pause."""
    moves: int
    """Beats and pauses."""
    watched: bool
    """Whether silence means a hang."""


class Heartbeat:
    """A page of memory in which the main thread of a rank counts its steps; to write it needs no system call.

    Args:
        descriptor: of the page; a new one is made without. Who maps it keeps it open.
    """

    _LAYOUT = struct.Struct("<qqdqq")

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is None:
            descriptor = os.memfd_create("moe-ckpt-heartbeat")
            os.ftruncate(descriptor, mmap.PAGESIZE)
        self.descriptor = descriptor
        self._page = mmap.mmap(descriptor, mmap.PAGESIZE)
        self._last = 0.0
        self._beats, self._moves, self._step, self._longest = 0, 0, -1, 0.0

    def beat(self, step: int) -> None:
        """Note that the main thread has come to `step`."""
        self._end_step()
        self._last, self._beats, self._step = time.monotonic(), self._beats + 1, step
        self._write(watched=True)

    def pause(self, *, aborted: bool = False) -> None:
        """Note that no beats come for a while, and that this is no hang; an aborted step says nothing of how long steps take."""
        if not aborted:
            self._end_step()
        self._last = 0.0
        self._write(watched=False)

    def read(self) -> Beats:
        """Return what was written last, by either side's process."""
        beats, step, longest, moves, watched = self._LAYOUT.unpack_from(self._page)
        return Beats(beats, step if beats else -1, longest, moves, bool(watched))

    def close(self) -> None:
        """Unmap the page."""
        self._page.close()
        os.close(self.descriptor)

    def _end_step(self) -> None:
        if self._last:
            self._longest = max(self._longest, time.monotonic() - self._last)

    def _write(self, *, watched: bool) -> None:
        self._moves += 1
        # One step, such as that of a first batch, is no measure yet of how long steps take.
        watched = watched and self._beats > 1
        self._LAYOUT.pack_into(self._page, 0, self._beats, self._step, self._longest, self._moves, watched)
