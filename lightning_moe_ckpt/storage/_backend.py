"""The contract between checkpoint storage and a medium.

One object, one key, written whole, never changed: that is all the commit protocol needs, next to create-exclusive
for a few small keys. Every backend passes `lightning_moe_ckpt.testing.BackendContract`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, TypeVar

from lightning_moe_ckpt.errors import ConfigurationError, Corrupt, KeyExists, StorageError, StorageRefused
from lightning_moe_ckpt.storage._json import described_nbytes
from lightning_moe_ckpt.storage._names import MAX_DOCUMENT_NBYTES, PROBE_PREFIX, is_marker, most_nbytes

_CHUNKS_PER_SECOND = 8
_MIN_CHUNK_NBYTES = 16 * 2**10


log = logging.getLogger(__name__)

StorageOptions = Mapping[str, object]

T = TypeVar("T")

PATIENCE = timedelta(minutes=2)
"""How long an operation is tried again: what a store needs to come back. Memory holds newer generations meanwhile."""
MIN_NBYTES_PER_SECOND = 4 * 2**20
"""The slowest transfer that counts as alive."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored object as a listing shows it."""

    key: str
    nbytes: int


class Backend(Protocol):
    """A place that keeps objects under slash-separated keys.

    Called from the main thread at start and from the persist thread afterwards; calls may overlap, so an
    implementation must be thread safe. Views belong to the caller again as soon as a call returns or raises.
    Every failure of the medium is a `StorageError` and leaves either the whole object or nothing.
    """

    @property
    def url(self) -> str:
        """Where the objects are, for messages."""

    @property
    def creates_exclusively(self) -> bool:
        """Whether `create` refuses an existing key whatever the timing; probed by writing at first use."""

    def put(self, key: str, *views: bytes | memoryview) -> None:
        """Store the concatenated views; durable and visible when this returns, replacing an older object whole."""

    def create(self, key: str, data: bytes) -> None:
        """Store a small object if the key is free. Raises `KeyExists`; of many callers one wins."""

    def get(self, key: str) -> bytes:
        """Read an object. Raises `KeyMissing`, or `Corrupt` if it is larger than an object of that name ever is."""

    def get_into(self, key: str, out: memoryview) -> None:
        """Fill `out` completely. Raises `KeyMissing`, or `Corrupt` if the object has another size."""

    def get_range(self, key: str, start: int, out: memoryview) -> None:
        """Fill `out` completely with the bytes from `start` on.

        Raises:
            KeyMissing: there is no such object, unless `out` is empty.
            Corrupt: it ends before; some stores say `StorageError`.
        """

    def list(self, prefix: str) -> list[Entry]:
        """All objects whose key starts with `prefix`, sorted by key; never one that is half written."""

    def delete(self, key: str) -> None:
        """Remove an object; a missing one is fine. Need not survive a power cut."""

    def leftovers(self, prefix: str) -> Sequence[Entry]:
        """What interrupted writes left under `prefix`, or writes under way, as far as the store tells; see `sweep`.

        Keys need not be those of objects; sizes are 0 where they are not known.
        """

    def sweep(self, prefix: str) -> None:
        """Remove what interrupted writes left under `prefix` and `list` does not show.

        A write in progress elsewhere may fail from this with a `StorageError`, never silently; its retry succeeds.
        """

    def close(self) -> None:
        """Release connections; no call may follow, but again `close`.

        From any thread: a write that waits, or is between two chunks, ends with a `StorageError` and leaves nothing.
        """


def expect_readable(key: str, nbytes: int, where: str, read_range: Callable[[str, int, memoryview], None]) -> None:
    """Raise `Corrupt` if an object is too large to be read whole, before it is read.

    Args:
        key: of the object.
        nbytes: its size.
        where: path or URL, for the message.
        read_range: see `Backend.get_range`; of a large marker the document is looked at, which says how large it is.
    """
    most = most_nbytes(key)
    if is_marker(key) and MAX_DOCUMENT_NBYTES < nbytes <= most:
        head = bytearray(MAX_DOCUMENT_NBYTES)
        read_range(key, 0, memoryview(head))
        most = described_nbytes(bytes(head)) or MAX_DOCUMENT_NBYTES
    if nbytes > most:
        raise Corrupt(
            f"{where}: has {nbytes} bytes, more than the {most} that such an object may have, and is not read. It was not "
            "written by this package: remove it, or restore it from a copy."
        )


def create_once(backend: Backend, key: str, data: bytes) -> bool:
    """Create `key`, counting it as ours if it already holds exactly `data`.

    After an unknown result (a time-out, a lost reply) the first attempt may have succeeded, and its retry meets our
    own object. Callers put a nonce into `data` where two writers could otherwise write the same bytes.

    Returns:
        Whether the key now holds `data`.
    """
    try:
        backend.create(key, data)
    except KeyExists:
        return backend.get(key) == data
    return True


_PROBES = 4
_PROBE_PAUSE_SECONDS = 0.2


def _refuses(key: str, create: Callable[[str, bytes], None], get: Callable[[str], bytes]) -> bool:
    """Whether a second `create` leaves the object of the first.

    Stores disagree on the error, so what the key holds decides. A request that failed for another reason says nothing:
    it is made again.
    """
    with contextlib.suppress(KeyExists):  # an attempt before may have succeeded without a reply
        _insist(lambda: create(key, b"first"))
    with contextlib.suppress(StorageError):
        _insist(lambda: create(key, b"second"))
    return _insist(lambda: get(key)) == b"first"


def _insist(call: Callable[[], T]) -> T:
    for _ in range(_PROBES - 1):
        try:
            return call()
        except (KeyExists, StorageRefused):  # noqa: PERF203 - trying again is what the loop is for
            raise
        except StorageError:
            time.sleep(_PROBE_PAUSE_SECONDS)
    return call()


def probe_create(
    url: str, create: Callable[[str, bytes], None], get: Callable[[str], bytes], delete: Callable[[str], None]
) -> bool:
    """Find out whether `create` refuses an existing key, by creating a fresh one twice.

    Raises:
        ConfigurationError: nothing can be written at all.
    """
    key = f"{PROBE_PREFIX}{uuid.uuid4().hex}"
    try:
        exclusive = _refuses(key, create, get)
        delete(key)  # this key only: another job may be probing now
    except StorageError as error:
        raise ConfigurationError(f"`{url}` cannot be written: {error} Give a URL this user may write to.") from error
    if not exclusive:
        log.warning(
            "%s ignores create-exclusive: unfenced mode, two jobs started on it at once would not notice each other",
            url,
        )
    return exclusive


class Pace:
    """Spreads the chunks of one backend over time: every writer asks before each chunk.

    Chunks get consecutive places on one time line, so that the writes of all threads together stay below the rate; the
    wait holds neither the interpreter lock nor anybody but the thread that writes. The same question is where a write
    under way learns that its backend was closed.

    Args:
        bandwidth: bytes per second; `None` for as fast as it goes.

    Raises:
        ConfigurationError: `bandwidth` is not positive.
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
        """Bytes to write between two questions: small enough that a slow pace is also an even one."""
        return most if self.bandwidth is None else min(most, max(least, self.bandwidth // _CHUNKS_PER_SECOND))

    def seconds(self, nbytes: int) -> float:
        """How long the pace alone makes a write of `nbytes` take."""
        return 0.0 if self.bandwidth is None else nbytes / self.bandwidth

    def wait(self, nbytes: int) -> None:
        """Wait until it is the turn of a chunk of `nbytes`.

        Raises:
            StorageError: the backend was closed.
        """
        if self._closed.wait(self._reserve(nbytes)):
            raise StorageError("the store was closed during a write, which is abandoned. Nothing of it is visible.")

    def close(self) -> None:
        """End every wait, now and from now on, with an error."""
        self._closed.set()

    def _reserve(self, nbytes: int) -> float:
        """Seconds until the turn of a chunk; zero if it may go at once."""
        if self.bandwidth is None:
            return 0.0
        with self._turns:
            now = time.monotonic()
            turn = max(self._next, now)
            self._next = turn + nbytes / self.bandwidth
            return turn - now
