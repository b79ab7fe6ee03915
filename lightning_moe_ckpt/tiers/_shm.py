"""Make and open shared memory that outlives its process: named files in `/dev/shm`, mapped into tensors.

The name follows from user, run, place and rank, not from the process, so a restarted rank finds its previous file. The
name cannot be guessed without reading the run's log, and other users' files under such a name are ignored. Memory is
reserved when the file is made. So a full tmpfs gives an error with the number of missing bytes, where a sparse file
would give a SIGBUS in the middle of a copy.

The process that owns a file holds a record lock on it (`fcntl`). The lock ends with the process, however the process
ends, and a forked child does not inherit the lock. A process that gets the lock knows that the owner is dead, in
whatever container the owner ran; a process stopped by a signal still has the lock. The lock is lost as soon as *any*
descriptor of the file is closed in its process. All files are therefore opened and closed through this module, which
defers such closes.

All users can write to the directory. Files are made exclusively, and only this user may open them, whatever the umask.
Only ordinary files of this user are removed. Only files that no other user may open are opened or mapped: a file that
others can write is no checkpoint. Anything else under our names, such as a link, a pipe, a folder or another user's
file, is neither followed, waited for nor changed. It is named once, and another name is used.

```text
moe-ckpt-<uid>-<tag>-<rank>.ring             generations that the rank captured itself
moe-ckpt-<uid>-<tag>-<rank>.<turn>.ring      the same, while an earlier ring of the rank is still needed
moe-ckpt-<uid>-<tag>-<rank>.replica          generations kept for a rank of another node
<any of these>.<step>.i<incarnation>-<nonce>.done   marker of a complete generation in it
<any of these>.<step>.i<incarnation>-<nonce>.tmp    the marker while it is written; readers ignore it
```

The tag names a run at a place, see `memory_tag` in the storage package.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import Self

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt._units import size_text
from lightning_moe_ckpt.errors import ConfigurationError, Corrupt
from lightning_moe_ckpt.native import map_file, take_huge_pages
from lightning_moe_ckpt.storage import GenerationId

log = rank_logger(__name__)

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # a tmpfs by definition; names carry the user and are created exclusively
DIRECTORY_VARIABLE = "MOE_CKPT_SHARED_MEMORY"


def shared_directory() -> Path:
    """Return the directory of rings: `/dev/shm`, or the temporary directory if there is none.

    A temporary directory on a disk works, but the kernel then writes the ring to the disk now and then. The environment variable
    `MOE_CKPT_SHARED_MEMORY` names another tmpfs; processes that share a tmpfs are one node to the tiers.
    """
    if chosen := os.environ.get(DIRECTORY_VARIABLE):
        return Path(chosen)
    if _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK):
        return _SHARED_MEMORY
    directory = Path(tempfile.gettempdir())
    log.warning(
        "no writable %s: the ring goes to %s and survives a kill there, at the speed of its disk",
        _SHARED_MEMORY,
        directory,
    )
    return directory


_GROUPS, _CONTROL_GROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
"""Control groups of version 2, and a file that names this process's own."""

FileId = tuple[int, int]
"""Device and inode of a file."""
_held: dict[FileId, SharedFile] = {}
"""Files locked by this process."""


@dataclass(kw_only=True, eq=False)
class SharedFile:
    """File owned by this process: mapped and locked until it is closed."""

    path: Path
    memory: Tensor
    """The whole file, uint8; the mapping ends with the last view."""
    descriptor: int
    """Descriptor of the file; negative after `close`."""
    pid: int = field(default_factory=os.getpid)
    deferred: list[int] = field(default_factory=list)
    """Further descriptors of the same file, to be used again by the next opener: closing any would lose the lock."""

    @classmethod
    def create(cls, path: Path, nbytes: int) -> Self:
        """Make a private file of reserved, zeroed memory; replaces our file of the same name. A process that still maps
        the old file keeps its pages to itself until the process ends. Raises like `expect_room`, and `FileExistsError`
        if a file under the name may not be replaced by us.
        """
        unlink_shared_file(path)
        expect_room(path.parent, nbytes)
        try:
            descriptor = _make_private(path, os.O_RDWR)
        except FileExistsError:
            raise
        except OSError as error:
            raise _unusable(path.parent, error) from error
        memory: Tensor | None = None
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, nbytes)
            memory = map_file(descriptor)
            take_huge_pages(descriptor, memory)
            os.posix_fallocate(descriptor, 0, nbytes)
            return cls._owned(path, descriptor, memory)
        except OSError as error:
            path.unlink(missing_ok=True)
            os.close(descriptor)
            if error.errno != errno.ENOSPC:
                raise
            memory = error.__traceback__ = None  # the frames of both hold the pages
            raise _no_room(path.parent, nbytes, _free_nbytes(path.parent)) from error

    @classmethod
    def take_over(cls, path: Path) -> Self | None:
        """Become the owner of a dead process's file; `None` if the owner is alive, perhaps this process. Raises
        `FileNotFoundError` if there is no such file, or it is another user's; `Corrupt` if the owner died before it had
        reserved any memory.
        """
        descriptor = open_shared(path, os.O_RDWR)
        if _owned_here(descriptor) is not None:
            close_shared(descriptor)
            return None
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        status = os.fstat(descriptor)
        if status.st_nlink == 0 or status.st_size == 0:
            os.close(descriptor)
            if status.st_nlink == 0:
                raise FileNotFoundError(errno.ENOENT, "removed meanwhile", str(path))
            raise Corrupt(f"{path}: is empty. Its process died while it reserved memory; it can be removed.")
        return cls._owned(path, descriptor, map_file(descriptor))

    @classmethod
    def _owned(cls, path: Path, descriptor: int, memory: Tensor) -> Self:
        file = cls(path=path, memory=memory, descriptor=descriptor)
        _held[_file_id(descriptor)] = file
        return file

    def is_mine(self) -> bool:
        """Return whether the name still leads to this file, and this process owns it."""
        if self.descriptor < 0 or self.pid != os.getpid():
            return False  # closed, or a forked child
        try:
            return file_id(self.path) == _file_id(self.descriptor)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def close(self, *, unlink: bool) -> None:
        """Release the lock, and the name if `unlink` and still ours. A forked child only releases the mapping."""
        if self.descriptor < 0 or self.pid != os.getpid():
            self.memory = torch.empty(0, dtype=torch.uint8)
            return
        if unlink and self.is_mine():
            unlink_shared_file(self.path)
        del _held[_file_id(self.descriptor)]
        for descriptor in (*self.deferred, self.descriptor):
            os.close(descriptor)
        self.descriptor, self.memory = -1, torch.empty(0, dtype=torch.uint8)


def open_shared(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a file that only this user may open, for `close_shared` to close. Raises `FileNotFoundError`."""
    if not is_private_file(path):
        raise FileNotFoundError(errno.ENOENT, _NOT_PRIVATE, str(path))
    if (kept := _kept_descriptor(path, flags)) is not None:
        return kept
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _REFUSED:
            raise FileNotFoundError(errno.ENOENT, f"{_NOT_PRIVATE} ({error.strerror})", str(path)) from error
        raise
    if not _is_private(os.fstat(descriptor)):  # replaced meanwhile
        close_shared(descriptor)
        raise FileNotFoundError(errno.ENOENT, _NOT_PRIVATE, str(path))
    return descriptor


_NOT_PRIVATE = "is no file that only this user may open"

_REFUSED = {errno.EACCES, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.EPERM}
"""Kernel errors on opening another user's file, a folder, a link or a socket."""


def is_own_file(path: Path) -> bool:
    """Return whether a name leads to a file of this user; other users may make such names too."""
    try:
        return _is_own(path.lstat())
    except (FileNotFoundError, NotADirectoryError):
        return False


_told: set[Path] = set()


def is_private_file(path: Path, *, say: bool = False) -> bool:
    """Return whether a name leads to a file that only this user may open; with `say`, any other file is named once."""
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    if (private := _is_private(status)) or not say or path in _told:
        return private
    _told.add(path)
    log.warning(
        "%s is not used: it is `%s` of user %d. Wanted is `-rw-------` of user %d, which no other user can have written. It is left "
        "alone: copies elsewhere in memory and in storage are looked for, and what is new gets another name. Remove it; if it is "
        "yours and you trust what is in it, `chmod 600` it before the next start.",
        *(path, stat.filemode(status.st_mode), status.st_uid, os.geteuid()),
    )
    return False


def _is_own(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def _is_private(status: os.stat_result) -> bool:
    return _is_own(status) and not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)


def _make_private(path: Path, flags: int) -> int:
    """Create a file that only this user may open and return its descriptor. Raises `FileExistsError`."""
    descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    os.fchmod(descriptor, 0o600)  # a umask may have taken our own rights
    return descriptor


_LARGEST_NBYTES = 2**30


def read_shared(path: Path) -> bytes:
    """Return a small file's bytes. Raises `FileNotFoundError` like `open_shared`, `Corrupt` if too large."""
    descriptor = open_shared(path)
    try:
        with open(descriptor, "rb", closefd=False) as file:
            if (nbytes := os.fstat(descriptor).st_size) > _LARGEST_NBYTES:
                raise Corrupt(f"{path}: has {nbytes} bytes, which no statement has. It can be removed.")
            return file.read(nbytes)
    finally:
        close_shared(descriptor)


def write_shared(path: Path, *parts: bytes | memoryview) -> None:
    """Write a private file of these bytes. Raises `FileExistsError` if an existing file may not be replaced by us."""
    remove_shared(path)
    with os.fdopen(_make_private(path, os.O_WRONLY), "wb") as file:
        file.writelines(parts)


def remove_shared(path: Path) -> None:
    """Remove a name if it leads to a file of this user. An error of the file system is logged, not raised."""
    if is_own_file(path):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            log.warning(
                "%s cannot be removed and stays: %s. What it takes of memory stays taken.", path, error.strerror
            )


_FREED_AT_ONCE_NBYTES = 2**20


def withdraw_shared(path: Path) -> None:
    """Remove a name like `remove_shared`; a thread frees a large file's pages, which takes 15 ms for 50 MB."""
    descriptor = None
    with contextlib.suppress(OSError):
        if path.lstat().st_size > _FREED_AT_ONCE_NBYTES:
            descriptor = open_shared(path)  # pages stay until both the name and all descriptors are gone
    remove_shared(path)
    if descriptor is not None:
        threading.Thread(target=close_shared, args=(descriptor,), name="moe-ckpt-free", daemon=True).start()


def close_shared(descriptor: int) -> None:
    """Close a descriptor, later if this process owns the file: closing would lose the lock."""
    if (owner := _owned_here(descriptor)) is None:
        os.close(descriptor)
    else:
        owner.deferred.append(descriptor)


def _kept_descriptor(path: Path, flags: int) -> int | None:
    """Return an idle descriptor of a file that this process owns, else `None`: every recovery opens its files again."""
    with contextlib.suppress(OSError):
        idle = [] if (owner := _owner(file_id(path))) is None else owner.deferred
        for descriptor in [*idle]:
            if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == flags & os.O_ACCMODE:
                with contextlib.suppress(ValueError):  # another thread was first
                    idle.remove(descriptor)
                    os.lseek(descriptor, 0, os.SEEK_SET)
                    return descriptor
    return None


def _owned_here(descriptor: int) -> SharedFile | None:
    return _owner(_file_id(descriptor))


def _owner(file: FileId) -> SharedFile | None:
    owner = _held.get(file)
    return owner if owner is not None and owner.pid == os.getpid() else None


def is_owned_elsewhere(path: Path) -> bool:
    """Return whether another living process owns a file, without changing the file."""
    try:
        descriptor = open_shared(path, os.O_RDWR)
    except OSError:
        return False
    try:
        if _owned_here(descriptor) is None:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        close_shared(descriptor)
    return False


def _file_id(descriptor: int) -> FileId:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def file_id(path: Path) -> FileId:
    """Return device and inode of the file that a name leads to now. Raises `FileNotFoundError`."""
    status = path.lstat()
    return status.st_dev, status.st_ino


def unlink_shared_file(path: Path) -> None:
    """Remove a name if it exists and is ours; processes that map the file keep their pages."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        status = path.lstat()
        if _is_own(status):
            remove_shared(path)
            log.info("removed ring %s of %s", path, size_text(status.st_size))


def expect_room(directory: Path, nbytes: int) -> None:
    """Raise `ConfigurationError` unless `directory` has room for a ring of `nbytes`; the message says how many bytes are missing."""
    if (free := _free_nbytes(directory)) < nbytes:
        raise _no_room(directory, nbytes, free)


def has_room(directory: Path, nbytes: int) -> bool:
    """Return whether `directory` has room for `nbytes`."""
    return _free_nbytes(directory) >= nbytes


def room_nbytes(directory: Path) -> int:
    """Return the bytes that are free in `directory`, and within the container's memory limit, which counts shared memory too."""
    found = [_free_nbytes(directory)]
    with contextlib.suppress(OSError):
        own = _CONTROL_GROUP.read_text(encoding="ascii").rpartition("::")[2].strip().lstrip("/")
        for group in [_GROUPS / own, *(_GROUPS / own).parents]:
            with contextlib.suppress(OSError, ValueError):  # `max` is no number
                said = ((group / f"memory.{name}").read_text(encoding="ascii") for name in ("max", "current", "stat"))
                limit, used, facts = said
                # Pages of files that were read are in use as long as nobody else wants them.
                cached = re.findall(r"^inactive_file (\d+)", facts, re.MULTILINE)
                found.append(int(limit) - int(used) + sum(map(int, cached)))
    return min(found)


def _free_nbytes(directory: Path) -> int:
    try:
        stats = os.statvfs(directory)
    except OSError as error:
        raise _unusable(directory, error) from error
    return stats.f_bavail * stats.f_frsize


def _unusable(directory: Path, error: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"Shared memory cannot be made in {directory}: {error.strerror}. Make that directory, with rights to write in it, or "
        f"name another one in `{DIRECTORY_VARIABLE}`."
    )


def _no_room(directory: Path, nbytes: int, free: int) -> ConfigurationError:
    return ConfigurationError(
        f"A ring of {size_text(nbytes)} does not fit into {directory}: {size_text(free)} are free, {size_text(nbytes - free)} "
        "are missing. "
        "Make that file system larger (docker: `--shm-size`), spread the model over more ranks, or lower `max_window`."
    )


# -- names of files and of the markers beside them

MemoryKind = Literal["ring", "replica"]

_TAG = re.compile(r"[A-Za-z0-9_.-]{1,100}")
_NAME = re.compile(r"moe-ckpt-(\d+)-([A-Za-z0-9_.-]{1,100})-(\d+)(?:\.(\d+))?\.(ring|replica)")
_MARKER = re.compile(r"(.+\.(?:ring|replica))\.(\d+)\.i(\d+)(?:-[0-9a-f]{12})?\.(done|tmp)")


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryName:
    """Parsed name of a memory file."""

    tag: str
    """Tag of the run at its place."""
    owner: int
    """Rank whose segments the file holds."""
    kind: MemoryKind
    """`ring` if the rank itself keeps the segments, `replica` if another rank does."""
    turn: int = 0
    """Number that tells rings of one rank apart."""

    @classmethod
    def parse(cls, name: str) -> MemoryName | None:
        """Return the parsed name of this user's memory file; `None` for any other name."""
        if (match := _NAME.fullmatch(name)) is None or int(match[1]) != os.getuid():
            return None
        kind: MemoryKind = "ring" if match[5] == "ring" else "replica"
        return cls(tag=match[2], owner=int(match[3]), turn=int(match[4] or 0), kind=kind)

    def __str__(self) -> str:
        turn = f".{self.turn}" if self.turn else ""
        return f"moe-ckpt-{os.getuid()}-{self.tag}-{self.owner}{turn}.{self.kind}"


def shared_name(tag: str, rank: int, kind: MemoryKind = "ring", *, turn: int = 0) -> str:
    """Return the file name for memory with one rank's segments of one run of this user; see `MemoryName`. Raises
    `ValueError` if `tag` has characters that a file name should not have.
    """
    if not _TAG.fullmatch(tag):
        raise ValueError(f"`shared_name(tag={tag!r})` must be 1 to 100 of the characters A-Z a-z 0-9 _ . -")
    return str(MemoryName(tag=tag, owner=rank, kind=kind, turn=turn))


def marker_path(memory: Path, generation: GenerationId) -> Path:
    """Return the path of a generation's marker beside a memory file."""
    return memory.with_name(f"{memory.name}.{generation.step}.i{generation.incarnation}-{generation.nonce}.done")


def unfinished_path(marker: Path) -> Path:
    """Return a marker's path while the marker is written."""
    return marker.with_suffix(".tmp")


def marker_paths(memory: Path) -> list[Path]:
    """Return the finished markers beside a memory file, in no order; a marker that other users may write is named once."""
    return [path for path in _markers_of(memory) if path.suffix == ".done" and is_private_file(path, say=True)]


def marker_files(memory: Path) -> list[Path]:
    """Return all markers of this user beside a memory file, finished or not; they are removed with the file."""
    return [path for path in _markers_of(memory) if is_own_file(path)]


def memory_files(directory: Path, tag: str = "") -> list[tuple[Path, MemoryName]]:
    """Return the memory files that only this user may open, with names; any other of run `tag` is named once."""
    named = [(directory / file, name) for file in listing(directory) if (name := MemoryName.parse(file)) is not None]
    return [(path, name) for path, name in named if is_private_file(path, say=name.tag == tag)]


def orphaned_markers(directory: Path) -> list[tuple[Path, MemoryName]]:
    """Return this user's markers, finished or not, without their memory file."""
    there = set(listing(directory))
    matches = [match for name in there if (match := _MARKER.fullmatch(name)) is not None and match[1] not in there]
    named = [(directory / match[0], MemoryName.parse(match[1])) for match in matches]
    return [(path, name) for path, name in named if name is not None and is_own_file(path)]


def _markers_of(memory: Path) -> list[Path]:
    # A directory may hold what many runs have left, and is read for each memory file: most names are no paths.
    names = [name for name in listing(memory.parent) if name.startswith(memory.name)]
    return [memory.with_name(name) for name in names if (match := _MARKER.fullmatch(name)) and match[1] == memory.name]


def listing(directory: Path) -> list[str]:
    """Return the names in a directory; none if the directory was removed."""
    try:
        with os.scandir(directory) as entries:
            return [entry.name for entry in entries]
    except (FileNotFoundError, NotADirectoryError):
        return []
