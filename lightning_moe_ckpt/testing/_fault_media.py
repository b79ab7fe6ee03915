"""Faults of media: bits that turn at rest, and shared memory that somebody else has taken."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
from collections.abc import Iterator, Mapping
from pathlib import Path

from lightning_moe_ckpt.errors import Corrupt
from lightning_moe_ckpt.storage import RING_HEADER_NBYTES, MemoryMarker, Retrying, RingHeader, RunView
from lightning_moe_ckpt.storage._open import open_without_retries
from lightning_moe_ckpt.tiers._names import MemoryKind, MemoryName, marker_paths, memory_files
from lightning_moe_ckpt.tiers._shm import close_shared, open_shared

log = logging.getLogger(__name__)

_STEP_NBYTES = 2**28


def flip_stored_bit(url: str, storage_options: Mapping[str, object] | None, rank: int, draws: random.Random) -> str:
    """Turn a bit of a segment of `rank` in the newest generation at `url`.

    Returns:
        What was done, for the log; also if there is nothing to damage yet.
    """
    backend = Retrying(open_without_retries(url, storage_options=storage_options))  # not through faults of storage
    try:
        view = RunView.open(backend)
        commits = [stored.commit for stored in view.generations() if stored.commit is not None and stored.dead is None]
        if not commits:
            return f"nothing is stored at {url}"
        newest = max(commits, key=lambda commit: commit.generation)
        segment = draws.choice(view.read_marker(newest, rank).segments)
        raw = bytearray(backend.get(segment.key))
        place = _flip(raw, draws)
        backend.put(segment.key, bytes(raw))
        return f"bit {place % 8} of byte {place // 8} of {segment.key}, in {newest.generation}"
    finally:
        backend.close()


def flip_memory_bit(directory: Path, tag: str, kind: MemoryKind, rank: int, draws: random.Random) -> str:
    """Turn a bit of the newest whole generation in a memory file.

    Args:
        directory: shared memory of this node.
        tag: of the run at its place.
        kind: `ring`: what `rank` captured itself; `replica`: what this node keeps for any other.
        rank: of this process.
        draws: decides about the file and the bit.

    Returns:
        What was done, for the log; also if there is nothing to damage yet.
    """
    copies = [copy for copy in _copies(directory, tag) if copy[1].kind == kind]
    if kind == "ring":
        copies = [copy for copy in copies if copy[1].owner == rank]
    if not copies:
        return f"no {kind} in {directory} holds a whole generation"
    newest = max(file.marker.generation for *_, file in copies)
    path, _, file = draws.choice([copy for copy in copies if copy[2].marker.generation == newest])
    segment = draws.choice(file.marker.segments)
    descriptor = open_shared(path, os.O_RDWR)
    try:
        header = RingHeader.from_bytes(os.pread(descriptor, RING_HEADER_NBYTES, 0), str(path))
        start = RING_HEADER_NBYTES + file.slots[segment.step] * header.slot_nbytes + file.marker.slot_offset(segment)
        bit = draws.randrange(8 * segment.nbytes)
        byte = os.pread(descriptor, 1, start + bit // 8)
        os.pwrite(descriptor, bytes([byte[0] ^ 1 << bit % 8]), start + bit // 8)
    finally:
        close_shared(descriptor)  # not by itself: that would take the owner's lock away
    return f"bit {bit % 8} of byte {bit // 8} of {segment.key} in {path}, in {newest}"


def _copies(directory: Path, tag: str) -> Iterator[tuple[Path, MemoryName, MemoryMarker]]:
    for path, name in memory_files(directory):
        if name.tag == tag:
            for marker in marker_paths(path):
                with contextlib.suppress(Corrupt, FileNotFoundError):
                    yield path, name, MemoryMarker.from_bytes(marker.read_bytes(), str(marker))


def _flip(raw: bytearray, draws: random.Random) -> int:
    place = draws.randrange(8 * len(raw))
    raw[place // 8] ^= 1 << place % 8
    return place


class TakenMemory:
    """Room of a tmpfs that nobody else gets, in a file without a name, so that it ends with the process at the latest."""

    def __init__(self, directory: Path, most_nbytes: int) -> None:
        """Take what is free.

        Args:
            directory: in the tmpfs.
            most_nbytes: limit, which others on this machine rely on.
        """
        path = directory / f"moe-ckpt-taken-{os.getuid()}-{os.getpid()}-{id(self)}"
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        path.unlink()
        self.nbytes = 0
        """Bytes taken."""
        while self.nbytes < most_nbytes and self._take(min(_STEP_NBYTES, most_nbytes - self.nbytes)):
            pass
        log.warning("%d bytes of %s are taken", self.nbytes, directory)

    def _take(self, nbytes: int) -> bool:
        """Take up to `nbytes` more; whether there may be more still."""
        stats = os.statvfs(self._file)
        nbytes = min(nbytes, stats.f_bavail * stats.f_frsize)
        if nbytes:
            try:
                os.posix_fallocate(self._file, self.nbytes, nbytes)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                return True  # others took some meanwhile: look again what is left
            self.nbytes += nbytes
        return nbytes > 0

    def release(self) -> None:
        """Give it back."""
        os.close(self._file)
