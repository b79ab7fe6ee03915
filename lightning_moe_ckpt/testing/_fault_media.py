"""Faults of media: bits that turn at rest, and shared memory that somebody else has taken."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Mapping
from pathlib import Path

from lightning_moe_ckpt.storage import Retrying, RunView
from lightning_moe_ckpt.storage._backend import open_without_retries

log = logging.getLogger(__name__)


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


def flip_file_bit(path: Path, draws: random.Random) -> str:
    """Turn a bit of a file in shared memory, which whoever maps it sees at once."""
    with path.open("r+b", buffering=0) as file:
        place = draws.randrange(8 * path.stat().st_size)
        byte = os.pread(file.fileno(), 1, place // 8)
        os.pwrite(file.fileno(), bytes([byte[0] ^ 1 << place % 8]), place // 8)
    return f"bit {place % 8} of byte {place // 8} of {path}"


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
        stats = os.statvfs(directory)
        self.nbytes = min(most_nbytes, stats.f_bavail * stats.f_frsize)
        """Bytes taken."""
        if self.nbytes:
            os.posix_fallocate(self._file, 0, self.nbytes)
        log.warning("%d bytes of %s are taken", self.nbytes, directory)

    def release(self) -> None:
        """Give it back."""
        os.close(self._file)
