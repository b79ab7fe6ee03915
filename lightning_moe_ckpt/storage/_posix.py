"""Objects as files: written to a temporary name, synced, then renamed or linked to the final name.

fsspec's local file system writes in place and never syncs: a kill leaves half a file under its final name, a power cut
an empty one. Here a file gets its name only when all its bytes are on the medium: write and fsync a temporary file in
the same directory, rename it (`put`) or link it (`create`; link refuses an existing name, also on NFS), fsync the
directory. A directory is synced into its parent when this process first uses it, whoever made it. There are no lock
files: their meaning depends on mount options.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import islice
from pathlib import Path

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.errors import Corrupt, KeyExists, KeyMissing, StorageError, StorageRefused
from lightning_moe_ckpt.native import append
from lightning_moe_ckpt.storage._backend import Entry, Pace, chunks_of, expect_readable, probe_create
from lightning_moe_ckpt.storage._names import LOG_PREFIX, is_ours

log = rank_logger(__name__)

_CHUNK_NBYTES = 4 * 2**20
_MAX_PRUNED = 100
_UNLINKED_AT_ONCE = 16
_UNPACED = Pace()  # for small objects that the caller waits for: the log, manifests
_TEMPORARY = re.compile(r".*\.[0-9a-f]{32}\.tmp")
_NO_DIRECTORY_SYNC = {errno.EINVAL, errno.ENOTSUP}  # some FUSE and CIFS mounts: names are durable with the file there
_LASTING = {
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR,
    errno.ENAMETOOLONG, errno.EEXIST, errno.ELOOP,
}  # fmt: skip
_STRANGE = {errno.ELOOP, errno.EMLINK, errno.ENXIO, errno.ENODEV}
"""Errors for a path that is a link, a socket or an absent device."""
_KINDS = {
    stat.S_ISLNK: "a link", stat.S_ISFIFO: "a named pipe", stat.S_ISSOCK: "a socket", stat.S_ISDIR: "a folder",
    stat.S_ISREG: "a file",
    stat.S_ISCHR: "a device", stat.S_ISBLK: "a device",
}  # fmt: skip
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


class PosixBackend:
    """Files under one directory: local disk, Lustre, NFS. Safe to use from any thread and after a fork."""

    def __init__(self, root: str | os.PathLike[str], *, bandwidth: int | None = None) -> None:
        """Name the directory; the first write makes it. `put` writes `bandwidth` bytes per second at most."""
        self._root = Path(root).expanduser().absolute()
        self._prefix = os.path.join(self._root, "")  # noqa: PTH118  # a `Path` drops the slash
        self._pace = Pace(bandwidth)
        self._synced: set[Path] = set()  # directories whose entry in their parent is on the medium
        self._looked_at_root = False
        self._told: set[str] = set()

    @property
    def url(self) -> str:
        return f"file://{self._root}"

    @cached_property
    def creates_exclusively(self) -> bool:
        """Whether the file system has hard links; probed once."""
        return probe_create(self.url, self._link, self.get, self.delete)

    def put(self, key: str, *views: bytes | memoryview) -> None:
        path = self._path(key)
        with _reported("put", path), self._written(path, views, self._pace) as temporary:
            temporary.replace(path)
            _sync_directory(path.parent)

    def create(self, key: str, data: bytes) -> None:
        """Write, sync, link, sync the directory. Without hard links it checks first, and a race can defeat that."""
        if self.creates_exclusively:
            self._link(key, data)
        elif self._path(key).exists():
            raise KeyExists(f"create {key}: exists at {self.url}.")
        else:
            self.put(key, data)

    def get(self, key: str) -> bytes:
        path = self._path(key)
        with _reported("get", path), _opened(path) as (file, nbytes):
            expect_readable(key, nbytes, str(path), self.get_range)
            return b"".join(_read_all(file, nbytes))

    def get_into(self, key: str, out: memoryview) -> None:
        path = self._path(key)
        with _reported("get", path), _opened(path) as (file, nbytes):
            if nbytes != out.nbytes or _read_into(file, out) != nbytes:
                raise Corrupt(f"{path}: has {nbytes} bytes, {out.nbytes} were written. Another copy may be good.")

    def get_range(self, key: str, start: int, out: memoryview) -> None:
        path = self._path(key)
        with _reported("get", path), _opened(path) as (file, _):
            if (filled := _read_into(file, out, start)) != out.nbytes:
                raise Corrupt(
                    f"{path}: ended at byte {start + filled} of {start + out.nbytes}. Another copy may be good."
                )

    def list(self, prefix: str, after: str = "", most: int | None = None) -> list[Entry]:
        """List files in the directory part of `prefix`; temporary files are not shown."""
        return [*islice(self._entries(prefix, temporary=False, after=after), most)]

    def delete(self, *keys: str) -> None:
        """Unlink files, and every directory left empty; anything but a file stays."""

        def unlink(path: Path) -> None:
            with _reported("delete", path):
                if path.is_file() and not path.is_symlink():
                    path.unlink(missing_ok=True)

        paths = [self._path(key) for key in keys]
        with ThreadPoolExecutor(_UNLINKED_AT_ONCE, "moe-ckpt-delete") as pool:  # a file server takes its time for each
            list(pool.map(unlink, paths))
        for folder in {path.parent for path in paths}:
            self._prune(folder)

    def unfinished_writes(self, prefix: str) -> Sequence[Entry]:
        return [*self._entries(prefix, temporary=True)]

    def sweep(self, prefix: str) -> None:
        """Unlink temporary files; a process still writing such a file gets a `StorageError` at the rename."""
        directory = self._root / prefix.rpartition("/")[0]
        with _reported("sweep", directory):
            for file in self._files(directory):
                if self._key(file).startswith(prefix) and _TEMPORARY.fullmatch(file.name):
                    log.info("removing %s, left by an interrupted write", file.path)
                    Path(file.path).unlink(missing_ok=True)
                    self._prune(Path(file.path).parent)

    def modified(self, key: str) -> float:
        """Return an object's time of writing, in seconds since 1970 by the file server's clock."""
        path = self._path(key)
        with _reported("get", path):
            return path.stat().st_mtime

    def close(self) -> None:
        """Abandon running writes; no file is held open."""
        self._pace.close()

    def _entries(self, prefix: str, *, temporary: bool, after: str = "") -> Iterator[Entry]:
        directory = self._root / prefix.rpartition("/")[0]
        with _reported("list", directory):
            for file in self._files(directory, after):
                if self._key(file).startswith(prefix) and temporary == bool(_TEMPORARY.fullmatch(file.name)):
                    with suppress(FileNotFoundError):  # deleted since the directory was read
                        status = file.stat(follow_symlinks=False)
                        yield Entry(self._key(file), status.st_size if stat.S_ISREG(status.st_mode) else 0)

    def _files(self, directory: Path, after: str = "") -> Iterator[os.DirEntry[str]]:
        """Yield files below `directory` in the order of keys, behind a key; tolerates concurrent deletion and follows no links.

        Anything but a file under an object's name is named once and yielded too, as empty: no reader takes it for an object. Raises
        `StorageRefused` if a link may lead to a run's object or folder, or a strange entry belongs to the log.
        """
        for above in self._below_root(directory):
            if above.is_symlink():
                raise StorageRefused(_strange(above))
        found = _entries(directory)
        while found:
            entry = found.pop()
            folder, file = entry.is_dir(follow_symlinks=False), entry.is_file(follow_symlinks=False)
            if (key := self._key(entry)) + "0" * folder <= after:  # which comes behind the slash, and all in the folder
                continue
            if (not file and is_ours(key, folder=False)) or (not folder and is_ours(key, folder=True)):
                with suppress(FileNotFoundError):  # deleted since the directory was read
                    self._pass_over(entry)
                if is_ours(key, folder=False):
                    yield entry
            elif folder:
                found += _entries(Path(entry.path))
            elif file:
                yield entry

    def _pass_over(self, entry: os.DirEntry[str]) -> None:
        """Warn, once per path, of a strange entry in place of our file or folder. Raises `StorageRefused` if a run must not go on without
        the real file or folder: it is of the log, on top, or behind a link.
        """
        said = _strange(Path(entry.path))
        parts = self._key(entry).split("/")
        if parts[0] == LOG_PREFIX.rstrip("/") or len(parts) == 1 or (entry.is_symlink() and Path(entry.path).exists()):
            raise StorageRefused(said)
        if entry.path not in self._told:
            self._told.add(entry.path)
            log.warning("%s Until then what needs it counts as damaged, and something older is used.", said)

    def _link(self, key: str, data: bytes) -> None:
        path = self._path(key)
        with _reported("create", path), self._written(path, (data,), _UNPACED) as temporary:
            try:
                path.hardlink_to(temporary)
            except FileExistsError as error:
                # NFS repeats a link whose reply was lost, and reports our own first link as a conflict.
                if temporary.stat().st_nlink == 1:
                    raise KeyExists(f"create {key}: exists at {self.url}.") from error
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                temporary.replace(path)  # the probe then sees that a second create was not refused
            _sync_directory(path.parent)

    @contextmanager
    def _written(self, path: Path, views: Sequence[bytes | memoryview], pace: Pace) -> Iterator[Path]:
        """Yield a synced temporary file beside `path`; removed afterwards unless the caller renamed it."""
        temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
        try:
            file = self._open_new(temporary)
            try:
                _write_all(file, views, pace)
                os.fsync(file)
            finally:
                os.close(file)
            yield temporary
        except BaseException:
            temporary.unlink(missing_ok=True)
            self._prune(path.parent)
            raise
        temporary.unlink(missing_ok=True)

    def _open_new(self, path: Path) -> int:
        """Create a file; make its directory again if another process prunes it before the file is there."""
        for _ in range(_MAX_PRUNED):
            with suppress(FileNotFoundError):
                self._make_directory(path.parent)
                return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        raise StorageError(f"put {path}: its directory vanishes again and again. Who else writes to {self.url}?")

    def _make_directory(self, directory: Path) -> None:
        absent = [] if self._root.exists() else [d for d in (self._root, *self._root.parents) if not d.exists()]
        ours = [*self._below_root(directory), *absent]
        self._stripe_root()
        for needed in reversed(ours):
            if needed not in self._synced or not needed.is_dir():
                needed.mkdir(exist_ok=True)
                _sync_directory(needed.parent)
                self._synced.add(needed)
            self._stripe_root()

    def _stripe_root(self) -> None:
        """Set the Lustre layout of the root once, when it exists and is still empty."""
        if not self._looked_at_root and self._root.is_dir():
            self._looked_at_root = True
            if not any(self._root.iterdir()):
                stripe(self._root)

    def _prune(self, directory: Path) -> None:
        with suppress(OSError):  # not empty, or another process was faster
            while directory != self._root:
                directory.rmdir()
                self._synced.discard(directory)
                directory = directory.parent

    def _path(self, key: str) -> Path:
        parts = key.split("/")
        if any(part in {"", ".", ".."} for part in parts) or _TEMPORARY.fullmatch(parts[-1]):
            raise ValueError(f"`{key}` is not a key: it must be a relative path without `.` and `..`.")
        return self._root.joinpath(*parts)

    def _key(self, file: os.DirEntry[str]) -> str:
        return file.path.removeprefix(self._prefix)

    def _below_root(self, directory: Path) -> Sequence[Path]:
        """Return a folder and its parents, up to the root and without it."""
        return [directory, *directory.parents][: len(directory.parts) - len(self._root.parts)]


@contextmanager
def _reported(operation: str, path: Path) -> Iterator[None]:
    """Turn an `OSError` into a `StorageError` with the operation and the path."""
    try:
        yield
    except StorageError:
        raise
    except FileNotFoundError as error:
        kind = KeyMissing if operation == "get" else StorageError
        raise kind(f"{operation} {path}: not there.") from error
    except OSError as error:
        kind = StorageRefused if error.errno in _LASTING else StorageError
        where = path if error.filename is None or operation != "list" else error.filename  # a folder below
        raise kind(f"{operation} {where}: {error.strerror or error}.") from error


def _entries(directory: Path) -> list[os.DirEntry[str]]:
    """Return a folder's entries, the last key first."""
    try:
        with os.scandir(directory) as entries:
            return sorted(entries, key=lambda each: each.name + "/" * each.is_dir(follow_symlinks=False), reverse=True)
    except FileNotFoundError:
        return []


@contextmanager
def _opened(path: Path) -> Iterator[tuple[int, int]]:
    """Yield the descriptor of a regular file and its size; anything else is refused without reading or waiting."""
    try:
        # O_NONBLOCK: opening a pipe without a writer would block. It has no effect on regular files.
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        if error.errno in _STRANGE:
            raise Corrupt(_strange(path)) from error
        raise
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise Corrupt(_strange(path))
        yield file, status.st_size
    finally:
        os.close(file)


def _strange(path: Path) -> str:
    """Describe a strange entry at the path of our file or folder. Raises `FileNotFoundError`."""
    mode = path.lstat().st_mode
    kind = next((word for is_it, word in _KINDS.items() if is_it(mode)), "something else")
    leads = f" to {path.readlink()}" if stat.S_ISLNK(mode) else ""
    return (
        f"{path}: is {kind}{leads}, and not what this package writes under that name; it is not followed or read. Remove it, or "
        "put what belongs there in its place."
    )


def _sync_directory(directory: Path) -> None:
    file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_SYNC:
            raise
    finally:
        os.close(file)


def _write_all(file: int, views: Sequence[bytes | memoryview], pace: Pace) -> None:
    position = 0
    for chunk in chunks_of(views, pace.chunk_nbytes(_CHUNK_NBYTES)):
        pace.wait(chunk.nbytes)
        append(file, chunk, position)
        position += chunk.nbytes


def _read_all(file: int, nbytes: int) -> Iterator[bytes]:
    """Yield a file's bytes, all at once where the system allows: without zeroing and copying."""
    while nbytes > 0 and (data := os.read(file, nbytes)):
        yield data
        nbytes -= len(data)


def _read_into(file: int, out: memoryview, start: int = 0) -> int:
    """Fill `out` from byte `start` on; return the bytes read, fewer only at the file's end."""
    rest, filled = out.cast("B") if out.nbytes else memoryview(bytearray()), 0
    while rest.nbytes:
        if (count := os.preadv(file, [rest[:_CHUNK_NBYTES]], start + filled)) == 0:
            break
        filled, rest = filled + count, rest[count:]
    return filled


STRIPES, STRIPE_SIZE = 4, "4M"
_MOUNTS = Path("/proc/self/mounts")
_TIMEOUT_SECONDS = 10


def stripe(directory: Path) -> bool:
    """Ask Lustre to stripe new files below `directory` over several servers; return whether it accepted.

    A file inherits its layout from its directory when it is created, so the call is made once, on a run's empty
    directory. Without `lfs`, on another file system, or after a refusal, files keep the administrator's layout.

    Source: Lustre wiki (1 to 4 stripes of 4 MiB for files of up to 1 GiB from one client).
    """
    if (command := shutil.which("lfs")) is None or file_system(directory) != "lustre":
        return False
    arguments = [command, "setstripe", "-c", str(STRIPES), "-S", STRIPE_SIZE, str(directory)]
    try:
        subprocess.run(arguments, check=True, capture_output=True, timeout=_TIMEOUT_SECONDS)  # noqa: S603 - no shell
    except (OSError, subprocess.SubprocessError) as error:
        log.debug("%s keeps the layout it has: %s", directory, error)
        return False
    log.debug("%s: files have %d stripes of %s", directory, STRIPES, STRIPE_SIZE)
    return True


def file_system(path: Path) -> str | None:
    """Return the type of the file system under `path`, such as `lustre`, `nfs4` or `ext4`; `None` if unknown."""
    try:
        lines = _MOUNTS.read_text().splitlines()
    except OSError:
        return None
    places = [(Path(_plain(line.split()[1])), line.split()[2]) for line in lines]
    resolved = path.resolve()
    holding = [(len(place.parts), kind) for place, kind in places if place == resolved or place in resolved.parents]
    # Of two mounts at one place the later one counts.
    return max(enumerate(holding), key=lambda each: (each[1][0], each[0]))[1][1] if holding else None


def _plain(text: str) -> str:
    """Decode a path from the mount table, where blanks and the like are octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
