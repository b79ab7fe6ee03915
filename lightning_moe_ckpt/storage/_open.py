"""Open the backend for a URL: check the URL, choose the medium, and put retries around it.

Client libraries are imported when a store is opened, because that takes half a second. Only `Retrying` retries storage
operations, besides a few quick attempts within obstore. It retries with growing pauses until `patience` is over, then
raises the error. `KeyExists`, `KeyMissing` and `Corrupt` are answers, not failures, and are raised at once. So is
`StorageRefused`, which waiting cannot cure.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, Protocol, TypeVar

from fsspec.registry import known_implementations, registry
from typing_extensions import override

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.errors import ConfigurationError, KeyExists, KeyMissing, StorageError, StorageRefused
from lightning_moe_ckpt.launch import RERUN
from lightning_moe_ckpt.storage._backend import MIN_NBYTES_PER_SECOND, PATIENCE, Backend, Entry, StorageOptions
from lightning_moe_ckpt.storage._object_options import SCHEMES, Unmapped
from lightning_moe_ckpt.storage._posix import PosixBackend

log = rank_logger(__name__)

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_SHORT = 3
"""Length of a scheme in which a wrong letter is half the word."""
_HALF_A_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/?(?!/)")


def scheme_of(url: str) -> str:
    """Return the scheme in lower case; `file` for a path."""
    match = _SCHEME.match(url)
    return match[1].lower() if match else "file"


def place_of(url: str) -> str:
    """Return the URL spelled alike in all processes: paths have no symbolic links."""
    return f"file://{os.path.realpath(url[len('file://') :])}" if url.startswith("file://") else url


def memory_tag(key: str, url: str) -> str:
    """Return the common part of the names of a run's shared memory: 32 hexadecimal digits, from its secret and its URL.

    Only readers of the log can compute it. A copy of the run's directory gets another tag, because the shared memory belongs to the
    job at the original place.
    """
    return hashlib.blake2b(place_of(url).encode(), key=bytes.fromhex(key), digest_size=16).hexdigest()


def checked_url(url: object) -> str:
    """Return a path, as text or as an object, or a URL as text. Raises `ConfigurationError` if the URL names no place, or is probably a
    typing error.
    """
    if not isinstance(url, str | os.PathLike):
        raise ConfigurationError(f"`url={url!r}` is a {type(url).__name__}. Give a path or a URL as text.")
    text = os.fspath(url)
    if not isinstance(text, str) or not text.strip():
        raise ConfigurationError(
            f"`url={url!r}` names no place. Give a folder for the checkpoints of this run, or a URL."
        )
    if "::" in text:
        raise ConfigurationError(f"`{text}` chains file systems, whose caches hide failures. Name one store.")
    if (half := _HALF_A_SCHEME.match(text)) and half[1].lower() in known_implementations:
        rest = text.partition(":")[2].lstrip("/")
        slashes = ":///" if half[1].lower() in {"file", "local"} else "://"
        raise ConfigurationError(f"`{text}` is neither a path nor a URL. Did you mean `{half[1]}{slashes}{rest}`?")
    if _SCHEME.match(text) and re.search(r"[?#]", text):
        raise ConfigurationError(
            f"`{text}` has a query, which no store reads here. Give options as storage_options; a file name with such a "
            "character is given as a path without scheme."
        )
    return text


def _expect_known(url: str) -> None:
    """Raise `ConfigurationError` for a scheme that no file system has, with the most similar known scheme."""
    known = {*known_implementations, *registry, *SCHEMES}
    if (scheme := scheme_of(url)) in known:
        return
    near = difflib.get_close_matches(scheme, known, n=1, cutoff=0.5 if len(scheme) <= _SHORT else 0.7)
    meant = f"Did you mean `{near[0]}{url[len(scheme) :]}`?" if near else "Name a path, or a URL that fsspec knows."
    raise ConfigurationError(f"`{url}`: there is no file system called {scheme}. {meant}")


T = TypeVar("T")
Verb = Literal["put", "create", "get", "get_into", "get_range", "list", "delete", "sweep"]

_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 10.0
# A separate generator: training draws from the process's own, and a retry must not change its numbers.
_JITTER = random.SystemRandom()


@dataclass(frozen=True, slots=True)
class StorageCall:
    """A call of a backend."""

    verb: Verb
    key: str
    """Key of the object, of the first for `delete`; a prefix for `list` and `sweep`."""
    nbytes: int = 0
    """Bytes written or to be filled; 0 if only the answer shows them."""

    @property
    def writes(self) -> bool:
        """Whether the call needs room in the store."""
        return self.verb in {"put", "create"}

    def __str__(self) -> str:
        return f"{self.verb} {self.key}"


class Around(Protocol):
    """Function around each call of a backend. Several threads may call it at once."""

    def __call__(self, call: StorageCall, operation: Callable[[], T]) -> T:
        """Run `operation` and return its result, or raise an error in its place."""


class WrappedBackend:
    """A `Backend` that passes every call of `backend`, and its result, through `around`."""

    def __init__(self, backend: Backend, around: Around) -> None:
        self._backend, self._around = backend, around

    @property
    def url(self) -> str:
        return self._backend.url

    @property
    def creates_exclusively(self) -> bool:
        return self._backend.creates_exclusively

    def put(self, key: str, *views: bytes | memoryview) -> None:
        nbytes = sum(memoryview(view).nbytes for view in views)
        self._around(StorageCall("put", key, nbytes), lambda: self._backend.put(key, *views))

    def create(self, key: str, data: bytes) -> None:
        self._around(StorageCall("create", key, len(data)), lambda: self._backend.create(key, data))

    def get(self, key: str) -> bytes:
        return self._around(StorageCall("get", key), lambda: self._backend.get(key))

    def get_into(self, key: str, out: memoryview) -> None:
        self._around(StorageCall("get_into", key, out.nbytes), lambda: self._backend.get_into(key, out))

    def get_range(self, key: str, start: int, out: memoryview) -> None:
        self._around(StorageCall("get_range", key, out.nbytes), lambda: self._backend.get_range(key, start, out))

    def list(self, prefix: str, after: str = "", most: int | None = None) -> list[Entry]:
        return self._around(StorageCall("list", prefix), lambda: self._backend.list(prefix, after, most))

    def delete(self, *keys: str) -> None:
        for first in keys[:1]:
            self._around(StorageCall("delete", first), lambda: self._backend.delete(*keys))

    def unfinished_writes(self, prefix: str) -> Sequence[Entry]:
        return self._around(StorageCall("list", prefix), lambda: self._backend.unfinished_writes(prefix))

    def sweep(self, prefix: str) -> None:
        self._around(StorageCall("sweep", prefix), lambda: self._backend.sweep(prefix))

    def close(self) -> None:
        self._backend.close()


class Retrying(WrappedBackend):
    """Backend that retries another backend's failed calls; see `Backend` for the methods.

    A retried `create` may raise `KeyExists` because of its own first attempt: use `create_once`. `patience` is the time
    from an operation's first attempt to the start of its last, without the time for its bytes, which follows from the
    slowest expected transfer. For tests `clock` gives monotonic seconds; `sleep` waits so many and returns whether the
    backend was closed.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        patience: timedelta = PATIENCE,
        min_nbytes_per_second: int = MIN_NBYTES_PER_SECOND,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], bool] | None = None,
    ) -> None:
        super().__init__(backend, lambda call, operation: self._retry(operation, call.nbytes))
        self._patience, self._min_rate = patience.total_seconds(), min_nbytes_per_second
        self._closed = threading.Event()
        self._clock, self._sleep = clock, sleep or self._closed.wait

    @property
    @override
    def creates_exclusively(self) -> bool:
        return self._retry(lambda: super(Retrying, self).creates_exclusively)

    @override
    def close(self) -> None:
        self._closed.set()
        super().close()

    def _retry(self, operation: Callable[[], T], nbytes: int = 0) -> T:
        start, pause = self._clock(), _FIRST_PAUSE_SECONDS
        end = start + self._patience + nbytes / self._min_rate
        while True:
            try:
                return operation()
            except (KeyExists, KeyMissing, StorageRefused):  # noqa: PERF203 - trying again is what the loop is for
                raise
            except StorageError as error:
                # Jitter, so that ranks that failed together do not retry together.
                seconds = pause * _JITTER.uniform(0.5, 1.0)
                if self._clock() + seconds > end:
                    raise
                left = end - self._clock()
                log.warning(
                    "%s. Trying again in %.1f s, for up to %.0f s more.", str(error).rstrip(". "), seconds, left
                )
                if self._sleep(seconds):
                    raise
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


class ReadOnly(WrappedBackend):
    """Backend that refuses to write."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend, self._read)

    @property
    @override
    def creates_exclusively(self) -> bool:
        return False  # a probe would write

    def _read(self, call: StorageCall, operation: Callable[[], T]) -> T:
        if call.writes or call.verb in {"delete", "sweep"}:
            raise StorageRefused(
                f"{self.url}: `{call}` is refused: `moe-ckpt replay` changes nothing that is stored. Leave it out of the script "
                "where MOE_CKPT_RERUN is in the environment."
            )
        return operation()


_wrappers: list[Callable[[Backend], Backend]] = []


def open_backend(
    url: str,
    *,
    storage_options: StorageOptions | None = None,
    bandwidth: int | None = None,
    patience: timedelta = PATIENCE,
) -> Backend:
    """Choose a backend by the scheme of `url` and put retries around it; nothing is written yet. Raises
    `ConfigurationError` if the URL names no place, its scheme is unknown, a package is missing, or options do not fit.

    The URL is a path, `file://`, `s3://`, `gs://`, `az://`, or any other known to fsspec. Open after a fork, not
    before. Options are those of s3fs, gcsfs, adlfs or the URL's fsspec file system; paths take none. `bandwidth` is in
    bytes per second that `put` may write, all threads of this process together; `None` for no limit. A failing
    operation is retried for `patience`, without the time for its bytes.
    """
    backend = open_without_retries(url, storage_options=storage_options, bandwidth=bandwidth)
    for wrap in [*_wrappers, *([ReadOnly] if RERUN in os.environ else [])]:
        backend = wrap(backend)
    rate = min(MIN_NBYTES_PER_SECOND, bandwidth or MIN_NBYTES_PER_SECOND)
    return Retrying(backend, patience=patience, min_nbytes_per_second=rate)


@contextlib.contextmanager
def wrapping_backends(wrap: Callable[[Backend], Backend]) -> Iterator[None]:
    """Wrap every backend that `open_backend` opens in this context, below its retries; for tests of failures."""
    _wrappers.append(wrap)
    try:
        yield
    finally:
        _wrappers.remove(wrap)


def open_without_retries(
    url: str, *, storage_options: StorageOptions | None = None, bandwidth: int | None = None
) -> Backend:
    """Open a backend like `open_backend`, without retries."""
    url, options = checked_url(url), storage_options or {}
    _expect_known(url)
    if (scheme := scheme_of(url)) in SCHEMES:
        return _open_object(url, options, bandwidth)
    if scheme not in {"file", "local"}:
        return _open_fsspec(url, options, bandwidth)
    if options:
        raise ConfigurationError(f"`{url}` is a path and takes no storage_options, got {sorted(options)}.")
    return PosixBackend(re.sub(r"^\w+://", "", url), bandwidth=bandwidth)


def _open_fsspec(url: str, storage_options: StorageOptions, bandwidth: int | None) -> Backend:
    from lightning_moe_ckpt.storage._fsspec import FsspecBackend

    return FsspecBackend(url, storage_options=storage_options, bandwidth=bandwidth)


def _open_object(url: str, storage_options: StorageOptions, bandwidth: int | None) -> Backend:
    from lightning_moe_ckpt.storage._object import ObjectBackend

    try:
        return ObjectBackend(url, storage_options=storage_options, bandwidth=bandwidth)
    except Unmapped as unmapped:
        log.warning("%s: obstore has no word for %s; the fsspec file system is used, which is slower", url, unmapped)
        return _open_fsspec(url, storage_options, bandwidth)
