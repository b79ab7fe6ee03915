"""Faults of media: storage that is slow, fails or is full, shared memory that is taken, and bits that turn at rest.

Faults of storage stand below the retries of `open_backend`, where failures of a real medium come from, and act on
whatever is stored or read meanwhile, restores included.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from lightning_moe_ckpt.errors import Corrupt, StorageError, StorageRefused
from lightning_moe_ckpt.storage import RING_HEADER_NBYTES, MemoryMarker, Retrying, RingHeader, RunView, StorageCall
from lightning_moe_ckpt.storage._names import COMMITTED, parse_marker_name, parse_snap_key
from lightning_moe_ckpt.storage._open import open_without_retries
from lightning_moe_ckpt.testing._fault import Fault, FaultPhase
from lightning_moe_ckpt.tiers._shm import MemoryKind, MemoryName, close_shared, marker_paths, memory_files, open_shared

T = TypeVar("T")
log = logging.getLogger(__name__)
_STEP_NBYTES = 2**28
"""Bytes of shared memory that are taken at a time."""


@dataclass(kw_only=True, eq=False)
class LastingFault:
    """A fault that goes on for a while."""

    name: str
    fault: Fault
    step: int
    """Step at which the fault began."""
    since: float
    """Seconds since 1970 at which the fault began, so that the fault can outlast a process."""
    calls: int = 0
    """Calls of storage that the fault delayed or failed in this attempt."""
    memory: TakenMemory | None = None
    """Shared memory filled by the fault."""
    draws: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.draws = random.Random(self.name)

    def over(self, step: int) -> bool:
        """Return whether it has ended when training is at `step`."""
        late = self.fault.seconds is not None and time.time() >= self.since + self.fault.seconds
        return late or (self.fault.steps is not None and step >= self.step + self.fault.steps)

    @property
    def outlasts_process(self) -> bool:
        """Whether the next attempt meets the fault too."""
        return self.fault.seconds is not None

    def release(self) -> None:
        """Give taken memory back."""
        if self.memory is not None:
            self.memory.release()


class StorageFaults:
    """Faults around every call of this process's storage; `reached` is called before every call that is a phase, with its
    generation's step.
    """

    def __init__(
        self, active: Callable[[], Sequence[LastingFault]], reached: Callable[[FaultPhase, int], None]
    ) -> None:
        self._active, self._reached = active, reached
        self._lock = threading.Lock()

    def around(self, call: StorageCall, operation: Callable[[], T]) -> T:
        """Run a call, delayed or failed by the lasting faults."""
        place = phase_of(call)
        if place is not None:
            self._reached(*place)
        for lasting in self._active():
            self._fail(lasting, call)
        result = operation()
        nbytes = call.nbytes or (len(result) if isinstance(result, bytes) else 0)
        for lasting in self._active():
            self._delay(lasting, nbytes)
        return result

    def _fail(self, lasting: LastingFault, call: StorageCall) -> None:
        kind = lasting.fault.kind
        if kind == "full_disk" and call.writes:
            self._count(lasting)
            full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise StorageRefused(f"{call}: {full.strerror} (injected).") from full
        if kind == "storage_errors" and self._drawn(lasting):
            self._count(lasting)
            failed = OSError(errno.EIO, os.strerror(errno.EIO))
            raise StorageError(f"{call}: input/output error (injected).") from failed

    def _drawn(self, lasting: LastingFault) -> bool:
        with self._lock:
            return lasting.draws.random() < (lasting.fault.probability or 0.0)

    def _delay(self, lasting: LastingFault, nbytes: int) -> None:
        fault = lasting.fault
        if fault.kind == "slow_storage":
            self._count(lasting)
            time.sleep(fault.latency + (nbytes / fault.bandwidth if fault.bandwidth else 0.0))

    def _count(self, lasting: LastingFault) -> None:
        with self._lock:
            lasting.calls += 1


def phase_of(call: StorageCall) -> tuple[FaultPhase, int] | None:
    """Return a call's phase, and its generation's step; `None` for any other call."""
    parsed = parse_snap_key(call.key)
    if parsed is None or not (call.writes or call.verb == "delete"):
        return None
    generation, name = parsed
    if call.verb == "delete":
        return "reclaim", generation.step
    if name == COMMITTED:
        return "commit", generation.step
    return ("persist" if parse_marker_name(name) is None else "marker"), generation.step


def flip_stored_bit(url: str, storage_options: Mapping[str, object] | None, rank: int, draws: random.Random) -> str:
    """Flip a bit in a segment of `rank` in the newest generation at `url`. Return text for the log; also if there is nothing to damage yet."""
    backend = Retrying(open_without_retries(url, storage_options=storage_options))  # not through faults of storage
    try:
        view = RunView.open(backend)
        commits = [stored.commit for stored in view.generations() if stored.commit is not None and stored.dead is None]
        if not commits:
            return f"nothing is stored at {url}"
        newest = max(commits, key=lambda commit: commit.generation)
        segment = draws.choice(view.read_marker(newest, rank).segments)
        raw = bytearray(backend.get(segment.key))
        place = draws.randrange(8 * len(raw))
        raw[place // 8] ^= 1 << place % 8
        backend.put(segment.key, bytes(raw))
        return f"bit {place % 8} of byte {place // 8} of {segment.key}, in {newest.generation}"
    finally:
        backend.close()


def flip_memory_bit(directory: Path, tag: str, kind: MemoryKind, rank: int, draws: random.Random) -> str:
    """Flip a bit in the newest whole generation in a memory file with this tag, and return text for the log.

    A `ring` has captures of `rank` itself, a `replica` this node's copies for any other rank.
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
        start = RING_HEADER_NBYTES + file.places(header)[segment.key][0][2]
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


class TakenMemory:
    """The free memory of a tmpfs, taken by a file without a name, which ends with the process at the latest.

    `most_nbytes` is a limit for the sake of other users of this machine.
    """

    def __init__(self, directory: Path, most_nbytes: int) -> None:
        path = directory / f"moe-ckpt-taken-{os.getuid()}-{os.getpid()}-{id(self)}"
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        path.unlink()
        self.nbytes = 0
        """Bytes taken."""
        while self.nbytes < most_nbytes and self._take(min(_STEP_NBYTES, most_nbytes - self.nbytes)):
            pass
        log.warning("%d bytes of %s are taken", self.nbytes, directory)

    def _take(self, nbytes: int) -> bool:
        """Take up to `nbytes` more, and return whether there may be more still."""
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
        """Give the memory back."""
        os.close(self._file)
