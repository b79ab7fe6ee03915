"""The contract between checkpoint storage and a medium.

The commit protocol needs objects that are written whole and never changed, and exclusive creation for a few small
keys. Every backend passes `lightning_moe_ckpt.testing.BackendContract`.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, TypeVar

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.errors import ConfigurationError, Corrupt, KeyExists, KeyMissing, StorageError, StorageRefused
from lightning_moe_ckpt.storage._json import described_nbytes
from lightning_moe_ckpt.storage._names import COMMITTED, MAX_DOCUMENT_NBYTES, MAX_MARKER_NBYTES, PROBE_PREFIX

_CHUNKS_PER_SECOND = 8
_MIN_CHUNK_NBYTES = 16 * 2**10


log = rank_logger(__name__)

StorageOptions = Mapping[str, object]

T = TypeVar("T")

PATIENCE = timedelta(minutes=2)
"""Longest time that a failed operation is retried, so that a store can come back; memory has newer generations."""
MIN_NBYTES_PER_SECOND = 4 * 2**20
"""Slowest transfer that counts as alive."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Stored object in a listing."""

    key: str
    nbytes: int


class Backend(Protocol):
    """Place that keeps objects under slash-separated keys.

    The main thread calls it at start, the persist thread afterwards. Calls may overlap, so an implementation must be
    thread safe. Views belong to the caller again as soon as a call returns or raises. Every failure of the medium is a
    `StorageError` and leaves either the whole object or nothing.
    """

    @property
    def url(self) -> str:
        """URL of the place, for messages."""

    @property
    def creates_exclusively(self) -> bool:
        """Whether `create` refuses an existing key even in a race; probed by writing at first use."""

    def put(self, key: str, *views: bytes | memoryview) -> None:
        """Store the concatenated views and replace an older object; durable and visible on return."""

    def create(self, key: str, data: bytes) -> None:
        """Store a small object if the key is free, else raise `KeyExists`. Exactly one of several callers succeeds."""

    def get(self, key: str) -> bytes:
        """Read an object. Raises `KeyMissing`, or `Corrupt` if the object is larger than its name allows."""

    def get_into(self, key: str, out: memoryview) -> None:
        """Fill `out` completely. Raises `KeyMissing`, or `Corrupt` if the object has another size."""

    def get_range(self, key: str, start: int, out: memoryview) -> None:
        """Fill `out` completely with the bytes from `start` on.

        Raises:
            KeyMissing: there is no such object, unless `out` is empty.
            Corrupt: the object ends before `out` is full; some stores raise `StorageError` instead.
        """

    def list(self, prefix: str, after: str = "", most: int | None = None) -> list[Entry]:
        """List the complete objects whose key starts with `prefix`, sorted by key: those behind the key `after`, `most` at most."""

    def delete(self, *keys: str) -> None:
        """Remove objects in any order; a missing object is no error. The removal need not survive a power cut."""

    def unfinished_writes(self, prefix: str) -> Sequence[Entry]:
        """List leftovers of interrupted or running writes under `prefix`, as far as the store tells; see `sweep`.

        Keys need not name objects. An unknown size is 0.
        """

    def sweep(self, prefix: str) -> None:
        """Remove the unfinished writes under `prefix`, which `list` does not show.

        A write in another process may then fail with a `StorageError`, never silently; its retry succeeds.
        """

    def close(self) -> None:
        """Release connections. Any thread may call it, also twice; no other call may follow.

        A write that waits, or is between two chunks, ends with a `StorageError` and leaves nothing.
        """


def expect_readable(key: str, nbytes: int, where: str, read_range: Callable[[str, int, memoryview], None]) -> None:
    """Raise `Corrupt` if an object at `where` is too large to be read whole, before any of it is read.

    The document at the start of a large marker states its size, and is read by `read_range`, see `Backend.get_range`.
    """
    most = MAX_DOCUMENT_NBYTES if key.endswith((".json", COMMITTED)) else MAX_MARKER_NBYTES
    if key.endswith(".done") and MAX_DOCUMENT_NBYTES < nbytes <= most:
        head = bytearray(MAX_DOCUMENT_NBYTES)
        read_range(key, 0, memoryview(head))
        most = described_nbytes(bytes(head)) or MAX_DOCUMENT_NBYTES
    if nbytes > most:
        raise Corrupt(
            f"{where}: has {nbytes} bytes, more than the {most} that such an object may have, and is not read. It was not "
            "written by this package: remove it, or restore it from a copy."
        )


def chunks_of(views: Sequence[bytes | memoryview], nbytes: int) -> Iterator[memoryview]:
    """Yield slices, up to `nbytes` bytes long, from the views, without copying."""
    for each in views:
        view = memoryview(each)
        flat = view.cast("B") if view.nbytes else memoryview(b"")
        for start in range(0, flat.nbytes, nbytes):
            yield flat[start : start + nbytes]


def create_once(backend: Backend, key: str, data: bytes) -> bool:
    """Create `key`; an existing object with exactly `data` counts as success.

    After a time-out or a lost reply the first attempt may have succeeded, and the retry meets our own object. Callers put a nonce into
    `data` where two writers could otherwise write the same bytes. Return whether the key now holds `data`.
    """
    try:
        backend.create(key, data)
    except KeyExists:
        return backend.get(key) == data
    return True


_INSIST_SECONDS = 2.0
_INSIST_PAUSE_SECONDS = 0.05


def insist(call: Callable[[], T]) -> T:
    """Return the result of `call`, which is tried again for two seconds; for one request of an operation with many.

    `Retrying` repeats whole operations, which would hardly ever succeed if a share of all requests fails.
    """
    end, pause = time.monotonic() + _INSIST_SECONDS, _INSIST_PAUSE_SECONDS
    while True:
        try:
            return call()
        except (KeyExists, KeyMissing, StorageRefused):
            raise
        except StorageError:
            if time.monotonic() + pause > end:
                raise
        time.sleep(pause)
        pause = min(2 * pause, 8 * _INSIST_PAUSE_SECONDS)


def _refuses(key: str, create: Callable[[str, bytes], None], get: Callable[[str], bytes]) -> bool:
    """Return whether a second `create` leaves the first object.

    Stores disagree on the error, so the stored bytes decide. A request that failed for another reason is repeated.
    """
    with contextlib.suppress(KeyExists):  # an earlier attempt may have succeeded without a reply
        insist(lambda: create(key, b"first"))
    with contextlib.suppress(StorageError):
        insist(lambda: create(key, b"second"))
    return insist(lambda: get(key)) == b"first"


def probe_create(
    url: str, create: Callable[[str, bytes], None], get: Callable[[str], bytes], delete: Callable[[str], None]
) -> bool:
    """Return whether `create` refuses an existing key; tested by creating a new key twice. Raises `ConfigurationError`
    if the store refuses to be written; `StorageError` if the store fails.
    """
    key = f"{PROBE_PREFIX}{uuid.uuid4().hex}"
    try:
        exclusive = _refuses(key, create, get)
        insist(lambda: delete(key))  # only this key: another job may be probing now
    except StorageRefused as error:
        raise ConfigurationError(f"`{url}` cannot be written: {error} Give a URL this user may write to.") from error
    if not exclusive:
        log.warning(
            "%s ignores create-exclusive: unfenced mode, two jobs started on it at once would not notice each other",
            url,
        )
    return exclusive


class Pace:
    """Limit one backend's `bandwidth`, bytes per second or `None`: every writer calls `wait` before each chunk.

    Chunks of all threads get consecutive places on one time line, so together they stay below the rate. The wait blocks only the
    writing thread and releases the GIL. `wait` also ends a running write whose backend was closed. Raises `ConfigurationError` if
    `bandwidth` is not positive.
    """

    def __init__(self, bandwidth: int | None = None) -> None:
        if bandwidth is not None and bandwidth < 1:
            raise ConfigurationError(
                f"`bandwidth={bandwidth}` must be bytes per second, one or more; `None` for no cap."
            )
        self.bandwidth = bandwidth
        self._turns = threading.Lock()
        self._next = time.monotonic()
        self._closed = threading.Event()

    def chunk_nbytes(self, most: int, *, least: int = _MIN_CHUNK_NBYTES) -> int:
        """Return the bytes to write between two waits; fewer than `most` at a low bandwidth, to keep writes even."""
        return most if self.bandwidth is None else min(most, max(least, self.bandwidth // _CHUNKS_PER_SECOND))

    def seconds(self, nbytes: int) -> float:
        """Return the seconds that `nbytes` take at this bandwidth; zero without a limit."""
        return 0.0 if self.bandwidth is None else nbytes / self.bandwidth

    def wait(self, nbytes: int) -> None:
        """Wait until a chunk of `nbytes` may be written. Raises `StorageError` if the backend was closed."""
        with self._turns:
            now = time.monotonic()
            turn = max(self._next, now)
            self._next = turn + self.seconds(nbytes)
        if self._closed.wait(turn - now):
            raise StorageError("the store was closed during a write, which is abandoned. Nothing of it is visible.")

    def close(self) -> None:
        """End every current and later `wait` with an error."""
        self._closed.set()
