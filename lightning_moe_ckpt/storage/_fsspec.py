"""Objects in any fsspec file system, with a deadline around every call.

Only `pipe_file` writes: `open("wb")` publishes a partial file when an exception passes, or when an unclosed handle is
collected. fsspec wants `bytes`, so a segment is copied once, in chunks that release the GIL in between. File systems
without a deadline of their own (s3fs was seen hanging for minutes) are called in a daemon thread that is abandoned when
time is up. A late success of such a call is harmless, because keys are never reused.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, TypeVar

import fsspec
from fsspec.registry import known_implementations

from lightning_moe_ckpt.errors import ConfigurationError, Corrupt, KeyExists, KeyMissing, StorageError, StorageRefused
from lightning_moe_ckpt.storage._backend import (
    MIN_NBYTES_PER_SECOND,
    Entry,
    Pace,
    chunks_of,
    expect_readable,
    insist,
    probe_create,
)
from lightning_moe_ckpt.storage._names import PROBE_PREFIX

_CHUNK_NBYTES = 16 * 2**20
_IN_PROCESS = {"memory", "file", "local"}  # these check, then write, so calls take turns; none hangs
_MAX_PRUNED = 8  # attempts: another process may remove an emptied folder just before a write to it
_TURNS = threading.RLock()

T = TypeVar("T")


class FsspecBackend:
    """Objects under any fsspec URL. Thread safe. Open one after a fork: asynchronous file systems do not survive a fork."""

    def __init__(
        self,
        url: str,
        *,
        storage_options: Mapping[str, object] | None = None,
        timeout: timedelta = timedelta(seconds=60),
        bandwidth: int | None = None,
    ) -> None:
        """Open the file system of `url` with its own options; nothing is read or written. `memory://` is seen by this
        process only. Raises `ConfigurationError` if unknown scheme, missing package, or options the file system
        refuses.

        `timeout` limits one call, without the time for its bytes. `bandwidth` is in bytes per second that `put` may
        write, as a mean over objects: an object is written in one call, at the file system's speed. `None` for no
        limit.
        """
        self.url = url.rstrip("/") if not url.endswith("://") else url
        self._fs = _file_system(url, dict(storage_options or {}))
        self._root = str(self._fs._strip_protocol(url)).rstrip("/")  # noqa: SLF001 - the documented way to a path
        self._timeout, self._pace = timeout, Pace(bandwidth)
        protocols = {self._fs.protocol} if isinstance(self._fs.protocol, str) else set(self._fs.protocol)
        self._in_process = not protocols.isdisjoint(_IN_PROCESS)

    @cached_property
    def creates_exclusively(self) -> bool:
        """Whether `pipe_file(mode="create")` refuses an existing key; probed once."""
        return probe_create(self.url, self._create, self.get, self.delete)

    def put(self, key: str, *views: bytes | memoryview) -> None:
        body = _joined(views)
        self._pace.wait(len(body))
        self._call("put", key, lambda path: self._pipe(path, body), nbytes=len(body))

    def create(self, key: str, data: bytes) -> None:
        """Upload if the key is free. A first look at the store is needed: many file systems cannot refuse."""
        if self._holds(key):
            raise KeyExists(f"create {key}: exists at {self.url}.")
        try:
            self._create(key, data)
        except KeyExists:
            raise
        except StorageError as error:  # some stores refuse in words of their own
            if self._holds(key):
                raise KeyExists(f"create {key}: exists at {self.url}.") from error
            raise

    def get(self, key: str) -> bytes:
        expect_readable(key, self._call("get", key, self._size), f"{self.url}/{key}", self.get_range)
        return bytes(self._call("get", key, self._fs.cat_file))

    def get_into(self, key: str, out: memoryview) -> None:
        if (nbytes := self._call("get", key, self._size)) != out.nbytes:
            raise Corrupt(f"{self.url}/{key}: has {nbytes} bytes, {out.nbytes} were written. Another copy may be good.")
        self.get_range(key, 0, out)

    def get_range(self, key: str, start: int, out: memoryview) -> None:
        rest = out.cast("B") if out.nbytes else out
        for begin in range(0, out.nbytes, _CHUNK_NBYTES):
            stop = min(begin + _CHUNK_NBYTES, out.nbytes)
            rest[begin:stop] = insist(partial(self._range, key, start + begin, start + stop))

    def list(self, prefix: str, after: str = "", most: int | None = None) -> list[Entry]:
        """List the directory part of `prefix`, past every listing cache; all of it, or an error.

        Not by `find` or `walk`, which take an unlistable folder for an empty one.
        """
        self._fs.invalidate_cache()
        found, folders = [], [prefix.rpartition("/")[0]]
        while folders:
            folder = folders.pop()
            for name, facts in insist(partial(self._entries, folder)):
                if facts["type"] == "directory":
                    folders += [name] * (f"{name}0" > after)  # else all of its keys come before
                elif name.startswith(prefix) and name > after:
                    found.append(Entry(name, int(facts["size"])))
        return sorted(found, key=lambda entry: entry.key)[:most]

    def delete(self, *keys: str) -> None:
        for key in keys:
            with contextlib.suppress(KeyMissing):
                self._call("delete", key, self._fs.rm_file)
        for folder in sorted({key.rpartition("/")[0] for key in keys}):
            while folder and self._has_folders and self._removes(folder):
                folder = folder.rpartition("/")[0]

    def unfinished_writes(self, prefix: str) -> Sequence[Entry]:
        """Return nothing, see `sweep`."""
        return []

    def sweep(self, prefix: str) -> None:
        """Do nothing: incomplete uploads of these file systems are not visible."""

    def close(self) -> None:
        """Refuse further writes; connections belong to fsspec's instance cache."""
        self._pace.close()

    def _holds(self, key: str) -> bool:
        try:
            self._call("create", key, self._size)
        except KeyMissing:
            return False
        return True

    @cached_property
    def _has_folders(self) -> bool:
        """Whether empty folders stay and `rmdir` spares non-empty ones; probed once."""
        folder = f"{PROBE_PREFIX}{uuid.uuid4().hex}"
        self.put(f"{folder}/x", b"x")
        self._removes(folder)
        if spared := self._holds(f"{folder}/x"):
            self._call("delete", f"{folder}/x", self._fs.rm_file)
        self._fs.invalidate_cache()
        stays = self._call("probe", folder, self._fs.isdir)
        self._removes(folder)
        self._removes(PROBE_PREFIX.rstrip("/"))
        return spared and stays

    def _removes(self, folder: str) -> bool:
        """Return whether a folder was empty, and remove it then."""
        try:
            self._call("delete", folder, self._fs.rmdir)
        except StorageError:
            return False
        return True

    def _create(self, key: str, data: bytes) -> None:
        self._call("create", key, lambda path: self._pipe(path, data, mode="create"), nbytes=len(data))

    def _pipe(self, path: str, body: bytes | bytearray, **mode: str) -> None:
        for _ in range(_MAX_PRUNED):
            with contextlib.suppress(FileNotFoundError):
                self._fs.pipe_file(path, body, **mode)
                return
            with contextlib.suppress(FileNotFoundError):  # a file system with real directories
                self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        self._fs.pipe_file(path, body, **mode)

    def _size(self, path: str) -> int:
        self._fs.invalidate_cache()  # all of it: many derive an object's facts from a listing of its folder
        return int(self._fs.info(path)["size"])

    def _range(self, key: str, start: int, stop: int) -> bytes:
        # By keyword: s3fs puts `version_id` where the base class has `start`.
        chunk = self._call("get", key, lambda path: self._fs.cat_file(path, start=start, end=stop), nbytes=stop - start)
        if len(chunk) != stop - start:
            raise Corrupt(f"{self.url}/{key}: ended at byte {start + len(chunk)} of {stop}. Another copy may be good.")
        return bytes(chunk)

    def _entries(self, folder: str) -> Sequence[tuple[str, Mapping[str, Any]]]:
        """Return a folder's entries by key; none if it is missing, or was deleted since its parent was listed."""
        try:
            listed = self._call("list", folder, lambda path: self._fs.ls(path.rstrip("/"), detail=True))
        except KeyMissing:
            return []
        entries = [(self._key(str(each["name"])).rstrip("/"), each) for each in listed]
        # An object store's mark of a folder has the folder's name; so has a file in a folder's place.
        return [entry for entry in entries if entry[0] != folder]

    def _key(self, name: str) -> str:
        return name[len(self._root) :].lstrip("/")

    def _call(self, operation: str, key: str, call: Callable[[str], T], *, nbytes: int = 0) -> T:
        """Run `call(path)` under the deadline and turn its exceptions into `StorageError`s."""
        what = f"{operation} {key} at {self.url}"
        limit = self._timeout.total_seconds() + nbytes / MIN_NBYTES_PER_SECOND
        outcome: Future[T] = Future()
        run = partial(_run, outcome, call, f"{self._root}/{key}")
        if self._in_process:
            with _TURNS:
                run()
        else:  # abandoned if the caller stops waiting
            threading.Thread(target=run, name=f"moe-ckpt {what}", daemon=True).start()
        try:
            error = outcome.exception(limit)
        except FutureTimeoutError as late:
            raise StorageError(f"{what}: no answer in {limit:.0f} s. Check the store and the network.") from late
        if isinstance(error, Exception):
            raise _ours(error, what) from error
        return outcome.result()


def _file_system(url: str, storage_options: dict[str, object]) -> Any:
    scheme = url.partition("://")[0]
    try:
        return fsspec.filesystem(scheme, **storage_options)
    except ImportError as error:
        remedy = known_implementations.get(scheme, {}).get("err", str(error)).rstrip(".")
        raise ConfigurationError(
            f"`{url}` needs a package that is not installed in this environment. {remedy}, with pip, on every machine."
        ) from error
    except ValueError as error:
        raise ConfigurationError(f"`{url}` cannot be opened: {error}. Name a path or a URL fsspec knows.") from error
    except TypeError as error:
        raise ConfigurationError(f"`{url}` does not accept {sorted(storage_options)}: {error}.") from error


def _joined(views: Sequence[bytes | memoryview]) -> bytes | bytearray:
    """Join views into one object that fsspec accepts, slice by slice, so that other threads get the GIL."""
    if len(views) == 1 and isinstance(views[0], bytes):
        return views[0]
    body = bytearray(sum(memoryview(view).nbytes for view in views))
    position = 0
    for chunk in chunks_of(views, _CHUNK_NBYTES):
        body[position : position + chunk.nbytes] = chunk
        position += chunk.nbytes
    return body


def _run(outcome: Future[T], call: Callable[[str], T], path: str) -> None:
    try:
        outcome.set_result(call(path))
    except BaseException as error:  # noqa: BLE001 - thread entry; the caller raises it
        outcome.set_exception(error)


def _ours(error: Exception, what: str) -> StorageError:
    """Turn an exception of a file system into a `StorageError`."""
    if isinstance(error, FileExistsError):
        return KeyExists(f"{what}: exists.")
    if isinstance(error, FileNotFoundError):
        return KeyMissing(f"{what}: not there.")
    kind = StorageRefused if isinstance(error, PermissionError) else StorageError
    return kind(f"{what}: {type(error).__name__}: {error}.")
