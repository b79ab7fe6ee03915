"""The shipped backends keep the contract, and what each promises beyond it."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import shutil
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from lightning_moe_ckpt.errors import ConfigurationError, Corrupt, KeyExists, KeyMissing, StorageError, StorageRefused
from lightning_moe_ckpt.storage import Backend, Entry, PosixBackend, Retrying, RunStore, _backend, _posix, open_backend
from lightning_moe_ckpt.storage._backend import create_once, probe_create
from lightning_moe_ckpt.storage._fsspec import FsspecBackend
from lightning_moe_ckpt.testing import BackendContract


def fails_after(number: int, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return `call`, of which all calls behind the first `number` fail as a disk or a network does."""
    left = itertools.count()

    def failing(*args: Any, **kwargs: Any) -> Any:
        if next(left) >= number:
            raise OSError(errno.EIO, "Input/output error")
        return call(*args, **kwargs)

    return failing


def break_folders(monkeypatch: pytest.MonkeyPatch, file_system: type[Any], after: int) -> None:
    """Let a file system list so many folders and fail then, also when it is asked again, which is done for a shorter time."""
    monkeypatch.setattr(file_system, "ls", fails_after(after, file_system.ls))
    monkeypatch.setattr(_backend, "_INSIST_SECONDS", 0.2)


class TestPosixBackend(BackendContract):
    """Our own files."""

    def break_listings(self, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
        monkeypatch.setattr(os, "scandir", fails_after(after, os.scandir))

    def make_backend(self, tmp_path: Path) -> Backend:
        return PosixBackend(tmp_path / "deep" / "run")

    def make_paced_backend(self, tmp_path: Path, bandwidth: int) -> Backend:
        return PosixBackend(tmp_path / "run", bandwidth=bandwidth)


class TestFsspecMemory(BackendContract):
    """fsspec's dictionary of objects."""

    def make_backend(self, tmp_path: Path) -> Backend:
        MemoryFileSystem.store.clear()  # listings take time for all that was ever stored
        return FsspecBackend(f"memory://{uuid.uuid4().hex}/run")

    def break_listings(self, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
        break_folders(monkeypatch, MemoryFileSystem, after)


class TestFsspecLocal(BackendContract):
    """A file system with real directories behind fsspec, as sftp or hdfs would be."""

    def make_backend(self, tmp_path: Path) -> Backend:
        return FsspecBackend(f"file://{tmp_path}/run")

    def break_listings(self, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
        break_folders(monkeypatch, LocalFileSystem, after)


class _RemoteFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """A store across a network: safe for threads, and called under a deadline."""

    protocol = "remote"
    store: dict[str, Any] = {}  # noqa: RUF012 - as the base class declares it
    pseudo_dirs = [""]  # noqa: RUF012 - as the base class declares it
    lock = threading.RLock()

    def pipe_file(self, *args: Any, **kwargs: Any) -> None:
        with self.lock:
            super().pipe_file(*args, **kwargs)

    def cat_file(self, *args: Any, **kwargs: Any) -> Any:
        with self.lock:
            return super().cat_file(*args, **kwargs)

    def ls(self, *args: Any, **kwargs: Any) -> Any:
        with self.lock:
            return super().ls(*args, **kwargs)

    def rm_file(self, *args: Any, **kwargs: Any) -> None:
        with self.lock:
            super().rm_file(*args, **kwargs)


class TestFsspecRemote(BackendContract):
    """A file system that is called in a thread of its own."""

    def make_backend(self, tmp_path: Path) -> Backend:
        return FsspecBackend(f"remote://{uuid.uuid4().hex}/run")

    def break_listings(self, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
        break_folders(monkeypatch, _RemoteFileSystem, after)

    def make_paced_backend(self, tmp_path: Path, bandwidth: int) -> Backend:
        return FsspecBackend(f"remote://{uuid.uuid4().hex}/run", bandwidth=bandwidth)


class TestRetrying(BackendContract):
    """Retries change no answer."""

    def make_backend(self, tmp_path: Path) -> Backend:
        return open_backend(f"file://{tmp_path}/run", patience=timedelta(milliseconds=1))

    def break_listings(self, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
        monkeypatch.setattr(os, "scandir", fails_after(after, os.scandir))

    def make_paced_backend(self, tmp_path: Path, bandwidth: int) -> Backend:
        return open_backend(f"file://{tmp_path}/run", bandwidth=bandwidth)


class Clock:
    """Time that passes only in pauses."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> bool:
        self.pauses.append(seconds)
        self.now += seconds
        return False


def retrying(backend: Backend, patience: timedelta = timedelta(minutes=1)) -> tuple[Retrying, Clock]:
    """Retries that take no time."""
    clock = Clock()
    return Retrying(backend, patience=patience, clock=clock, sleep=clock.sleep), clock


# POSIX: durability and interrupted writes.


@pytest.fixture
def system_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(call, path) of every system call that matters for durability, in order."""
    calls: list[tuple[str, str]] = []
    paths: dict[int, str] = {}
    real_open, real_fsync, real_write = os.open, os.fsync, os.write

    def fake_open(path: Any, *args: Any, **kwargs: Any) -> int:
        file = real_open(path, *args, **kwargs)
        paths[file] = os.fspath(path)
        return file

    def note(name: str, real: Callable[..., Any], which: int) -> Callable[..., Any]:
        def fake(*args: Any, **kwargs: Any) -> Any:
            calls.append((name, os.fspath(args[which])))
            return real(*args, **kwargs)

        return fake

    def fake_fsync(file: int) -> None:
        calls.append(("fsync", paths[file]))
        real_fsync(file)

    def fake_write(file: int, view: memoryview) -> int:
        calls.append(("write", paths[file]))
        return real_write(file, view)

    monkeypatch.setattr(os, "open", fake_open)
    monkeypatch.setattr(os, "fsync", fake_fsync)
    monkeypatch.setattr(os, "write", fake_write)
    monkeypatch.setattr(os, "mkdir", note("mkdir", os.mkdir, 0))
    monkeypatch.setattr(os, "replace", note("publish", os.replace, 1))
    monkeypatch.setattr(os, "link", note("publish", os.link, 1))
    return calls


@pytest.mark.parametrize("verb", ["put", "create"])
def test_a_name_appears_after_its_bytes_are_synced(
    verb: str, tmp_path: Path, system_calls: list[tuple[str, str]]
) -> None:
    """Power may go at any moment: write, sync the file, publish, sync the directory; new directories are synced too."""
    backend = PosixBackend(tmp_path / "run")
    assert backend.creates_exclusively
    system_calls.clear()
    getattr(backend, verb)("snap/1/a", b"x" * 100)

    names = [name for name, _ in system_calls]
    directory = str(tmp_path / "run" / "snap" / "1")
    assert names == ["mkdir", "fsync", "mkdir", "fsync", "write", "fsync", "publish", "fsync"]
    assert [path for name, path in system_calls if name == "fsync"] == [
        str(tmp_path / "run"),
        str(tmp_path / "run" / "snap"),
        system_calls[4][1],
        directory,
    ]
    assert system_calls[4][1].startswith(f"{directory}/a.")
    assert system_calls[6] == ("publish", f"{directory}/a")


def test_a_directory_another_rank_made_is_synced_by_us_too(tmp_path: Path, system_calls: list[tuple[str, str]]) -> None:
    """Its maker may be killed before its own sync."""
    first, second = PosixBackend(tmp_path), PosixBackend(tmp_path)
    first.put("snap/rank0", b"x")
    system_calls.clear()
    second.put("snap/rank1", b"x")
    assert ("fsync", str(tmp_path)) in system_calls
    system_calls.clear()
    second.put("snap/rank1", b"y")
    assert ("fsync", str(tmp_path)) not in system_calls


class _Killed(BaseException):
    pass


@pytest.mark.parametrize("verb", ["put", "create"])
def test_a_kill_at_any_system_call_leaves_the_old_object_or_the_new(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies at its k-th system call, for every k: no half object, and nothing a sweep does not remove."""
    outcomes = set()
    for fatal in range(100):
        root = tmp_path / str(fatal)
        backend = PosixBackend(root)
        assert backend.creates_exclusively
        backend.put("snap/1/a", b"old") if verb == "put" else None
        with monkeypatch.context() as patch:
            survived = _dies_at(patch, fatal, lambda: getattr(backend, verb)("snap/1/a", b"new" * 10))  # noqa: B023

        later = PosixBackend(root)
        objects = {entry.key: later.get(entry.key) for entry in later.list("")}
        outcomes.add(objects.get("snap/1/a"))
        later.sweep("")
        left = [path for path in root.rglob("*") if path.is_file()]
        assert left == ([root / "snap" / "1" / "a"] if objects else [])
        if survived:
            break
    assert survived
    assert outcomes == ({b"old", b"new" * 10} if verb == "put" else {None, b"new" * 10})


def _dies_at(patch: pytest.MonkeyPatch, fatal: int, operation: Callable[[], None]) -> bool:
    """Run `operation` in a process that dies at its `fatal`-th system call; returns whether it got through."""
    count = 0

    def deadly(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count > fatal:  # dead processes do not clean up either
                raise _Killed
            return real(*args, **kwargs)

        return call

    for name in ("open", "write", "fsync", "replace", "link", "unlink", "mkdir"):
        patch.setattr(os, name, deadly(getattr(os, name)))
    try:
        operation()
    except _Killed:
        return False
    return True


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk is an error with the place, and costs no space."""
    backend = PosixBackend(tmp_path)

    def no_space(file: int, view: memoryview) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", no_space)
        with pytest.raises(StorageError, match=r"put .*/snap/a: No space left"):
            backend.put("snap/a", b"x")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may take fewer bytes than offered."""
    real = os.write
    monkeypatch.setattr(os, "write", lambda file, view: real(file, view[: max(1, len(view) // 3)]))
    PosixBackend(tmp_path).put("a", bytes(range(256)), b"tail")
    assert (tmp_path / "a").read_bytes() == bytes(range(256)) + b"tail"


def test_sweeping_away_a_live_write_is_an_error_its_retry_heals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator that starts may sweep under a writer it cannot know of; the writer notices."""
    sweeper = PosixBackend(tmp_path)
    real = os.fsync
    swept: list[bool] = []

    def fsync_then_sweep(file: int) -> None:
        real(file)
        if not swept:
            swept.append(True)
            sweeper.sweep("")

    monkeypatch.setattr(os, "fsync", fsync_then_sweep)
    backend, _ = retrying(PosixBackend(tmp_path))
    backend.put("a", b"x")
    assert backend.get("a") == b"x"
    assert swept


def test_a_directory_pruned_before_the_file_is_in_it_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process deletes the last object of a directory just when we want to write there."""
    real = os.open
    pruned: list[str] = []

    def open_after_pruning(path: Any, flags: int, *args: Any) -> int:
        if flags & os.O_CREAT and len(pruned) < 3:
            (tmp_path / "snap").rmdir()
            pruned.append(path)
        return real(path, flags, *args)

    monkeypatch.setattr(os, "open", open_after_pruning)
    PosixBackend(tmp_path).put("snap/a", b"x")
    assert len(pruned) == 3
    assert (tmp_path / "snap" / "a").read_bytes() == b"x"


@pytest.mark.parametrize("make", [PosixBackend, lambda path: FsspecBackend(f"file://{path}")], ids=["posix", "fsspec"])
def test_emptied_directories_go(make: Callable[[Path], Backend], tmp_path: Path) -> None:
    """Deleting a generation leaves no skeleton behind, so that a long run does not grow by one for each."""
    backend = make(tmp_path)
    for step in range(3):
        backend.put(f"snap/{step}/e1/a", b"x")
        backend.put(f"snap/{step}/e1/b", b"x")
        backend.delete(f"snap/{step}/e1/a")
        assert [path.name for path in (tmp_path / "snap" / str(step)).iterdir()] == ["e1"]
        backend.delete(f"snap/{step}/e1/b")
        assert list(tmp_path.iterdir()) == []


def test_a_folder_is_not_removed_with_what_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems, as Arrow's, take `rmdir` for all below: there emptied folders stay."""
    monkeypatch.setattr(LocalFileSystem, "rmdir", lambda _, path: shutil.rmtree(path))
    backend = FsspecBackend(f"file://{tmp_path}")
    backend.put("snap/1/a", b"x")
    backend.put("snap/1/b", b"x")
    backend.delete("snap/1/a")
    assert backend.list("") == [Entry("snap/1/b", 1)]


def test_a_folder_that_vanishes_before_its_file_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process deletes the last object of a folder just when this one makes it."""
    real, pruned = LocalFileSystem.makedirs, list[str]()

    def makes_in_vain(self: LocalFileSystem, path: str, **how: bool) -> None:
        pruned.append(path)
        if len(pruned) > 3:
            real(self, path, **how)

    monkeypatch.setattr(LocalFileSystem, "makedirs", makes_in_vain)
    backend = FsspecBackend(f"file://{tmp_path}")
    backend.put("snap/a", b"x")
    assert len(pruned) == 4
    assert backend.get("snap/a") == b"x"


def test_without_hard_links_the_backend_says_it_is_unfenced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Some FUSE and FAT mounts have no links; the weaker mode still refuses a key it can see."""

    def no_link(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", no_link)
    backend = PosixBackend(tmp_path)
    assert not backend.creates_exclusively
    assert "unfenced" in caplog.text
    backend.create("a", b"first")
    with pytest.raises(KeyExists):
        backend.create("a", b"second")
    assert backend.list("") == [Entry("a", 5)]


def test_a_link_whose_reply_was_lost_counts_as_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS clients repeat a link and then report the conflict with their own first attempt."""
    real = os.link
    backend = PosixBackend(tmp_path)
    assert backend.creates_exclusively

    def link_twice(*args: Any, **kwargs: Any) -> None:
        real(*args, **kwargs)
        real(*args, **kwargs)

    monkeypatch.setattr(os, "link", link_twice)
    backend.create("a", b"x")
    assert backend.get("a") == b"x"


@pytest.mark.parametrize("key", ["", "/etc/passwd", "../up", "a/../b", "a//b", "a/", f"a.{'0' * 32}.tmp"])
def test_only_relative_names_are_keys(tmp_path: Path, key: str) -> None:
    """A key cannot leave the run's directory, nor look like a temporary file."""
    with pytest.raises(ValueError, match="is not a key"):
        PosixBackend(tmp_path).put(key, b"x")


# Lustre: a program in the place of its `lfs`, and a table of mounts.


@pytest.fixture
def lfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What `lfs` was called with, a line per call; `tmp_path / "lustre dir"` is on Lustre."""
    calls, program = tmp_path / "calls", tmp_path / "bin" / "lfs"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> "{calls}"\ntest ! -e "{tmp_path}/refuses"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    escaped = str(tmp_path / "lustre dir").replace(" ", "\\040")
    table = f"overlay / overlay rw 0 0\ntmpfs {escaped} tmpfs rw 0 0\nmgs@tcp:/fs {escaped} lustre rw 0 0\n"
    (tmp_path / "mounts").write_text(table)
    monkeypatch.setattr(_posix, "_MOUNTS", tmp_path / "mounts")
    calls.touch()
    return calls


def test_a_run_on_lustre_is_striped_once_before_anything_is_in_it(lfs: Path, tmp_path: Path) -> None:
    """Files inherit the layout of the directory they are made in; a directory that is in use keeps its own."""
    root = tmp_path / "lustre dir" / "run"
    for _ in range(2):
        backend = PosixBackend(root)
        backend.put("snap/a", b"x")
        backend.put("_log/b", b"y")
    assert lfs.read_text() == f"setstripe -c 4 -S 4M {root}\n"
    (tmp_path / "lustre dir" / "made").mkdir()
    PosixBackend(tmp_path / "lustre dir" / "made").put("a", b"x")
    assert lfs.read_text().count("setstripe") == 2
    PosixBackend(tmp_path / "elsewhere").put("a", b"x")
    assert lfs.read_text().count("setstripe") == 2


def test_a_striping_that_is_refused_disturbs_nobody(
    lfs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A line for whoever looks for it, and the file is written."""
    (tmp_path / "refuses").touch()
    with caplog.at_level(logging.DEBUG, "lightning_moe_ckpt"):
        backend = PosixBackend(tmp_path / "lustre dir" / "run")
        backend.put("a", b"x")
    assert backend.get("a") == b"x"
    assert [record.levelno for record in caplog.records] == [logging.DEBUG]
    assert "keeps the layout it has" in caplog.text


def test_an_interrupted_write_leaves_no_directory(tmp_path: Path) -> None:
    """Nor its temporary file; the next write makes the directory again."""
    backend = PosixBackend(tmp_path / "run", bandwidth=1)
    backend.put("first", b"x" * 10_000)  # its time is what the next one waits for
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(backend.put, "snap/deep/a", b"x")
        while not list(tmp_path.rglob("*.tmp")):
            assert not writing.done()
        backend.close()
        assert isinstance(writing.exception(30), StorageError)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["first"]


# fsspec: deadlines and stores that ignore conditions.


class _StuckFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """Accepts and never answers."""

    protocol = "stuck"
    released = threading.Event()

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: object) -> None:
        self.released.wait(60)


class _CarelessFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """Ignores conditions, as some S3 servers do."""

    protocol = "careless"
    store: dict[str, Any] = {}  # noqa: RUF012 - as the base class declares it
    pseudo_dirs = [""]  # noqa: RUF012 - as the base class declares it

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: object) -> None:
        super().pipe_file(path, value)


class _VagueFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """Refuses an existing key with an error of its own, as ministack behind s3fs does."""

    protocol = "vague"
    store: dict[str, Any] = {}  # noqa: RUF012 - as the base class declares it
    pseudo_dirs = [""]  # noqa: RUF012 - as the base class declares it

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: object) -> None:
        if mode == "create" and self.exists(path):
            raise OSError(errno.EINVAL, "PreconditionFailed")
        super().pipe_file(path, value)


@pytest.fixture(autouse=True)
def _file_systems() -> Iterator[None]:
    for file_system in (_RemoteFileSystem, _StuckFileSystem, _CarelessFileSystem, _VagueFileSystem):
        fsspec.register_implementation(file_system.protocol, file_system, clobber=True)
    _StuckFileSystem.released.clear()
    yield
    _StuckFileSystem.released.set()


def test_a_store_that_never_answers_is_an_error_in_time() -> None:
    """s3fs was seen hanging for minutes; the deadline is ours."""
    backend = FsspecBackend("stuck://run", timeout=timedelta(milliseconds=50))
    with pytest.raises(StorageError, match=r"put a at stuck://run: no answer"):
        backend.put("a", b"x")


def test_a_store_that_ignores_conditions_is_found_out(caplog: pytest.LogCaptureFixture) -> None:
    """The probe decides by what the key holds, and the weaker mode is announced."""
    backend = FsspecBackend("careless://run")
    assert not backend.creates_exclusively
    assert "unfenced" in caplog.text
    backend.create("a", b"first")
    with pytest.raises(KeyExists):
        backend.create("a", b"second")
    assert backend.list("") == [Entry("a", 5)]


def test_a_refusal_by_any_error_counts() -> None:
    """Reading back tells a refusal from a failure."""
    backend = retrying(FsspecBackend("vague://run"))[0]
    assert backend.creates_exclusively
    assert create_once(backend, "a", b"first")
    assert create_once(backend, "a", b"first")
    assert not create_once(backend, "a", b"second")


# Retries.


class _FlakyBackend(PosixBackend):
    """Fails a number of times before each success."""

    failures = 0
    error: StorageError = StorageError("the network is away.")

    def get(self, key: str) -> bytes:
        self._fail()
        return super().get(key)

    def put(self, key: str, *views: bytes | memoryview) -> None:
        self._fail()
        super().put(key, *views)

    def _fail(self) -> None:
        if self.failures:
            self.failures -= 1
            raise self.error


def test_failures_are_retried_with_growing_pauses(tmp_path: Path) -> None:
    """Each pause is twice as long up to a limit, a part of it by chance, so that ranks do not come back together."""
    inner = _FlakyBackend(tmp_path)
    backend, clock = retrying(inner, timedelta(hours=1))
    backend.put("a", b"x")
    inner.failures = 12
    assert backend.get("a") == b"x"
    for pause, longest in zip(clock.pauses, [0.1 * 2**turn for turn in range(7)] + [10.0] * 5, strict=True):
        assert longest / 2 <= pause <= longest


def test_an_operation_has_a_deadline(tmp_path: Path) -> None:
    """Counted from its first attempt, with time for its bytes on top; then the error goes up."""
    inner = _FlakyBackend(tmp_path)
    inner.failures = 10**6
    for nbytes, limit in ((0, 60.0), (80 * 2**20, 80.0)):
        backend, clock = retrying(inner)
        with pytest.raises(StorageError, match="network"):
            backend.put("a", bytes(nbytes))
        assert limit - 10 <= clock.now <= limit


@pytest.mark.parametrize("error", [StorageRefused("no space left."), Corrupt("digest")], ids=["refused", "corrupt"])
def test_what_no_pause_mends_is_not_retried(tmp_path: Path, error: StorageError) -> None:
    """A full disk is reported at once; the next generation tries anew."""
    inner = _FlakyBackend(tmp_path)
    inner.failures, inner.error = 1, error
    backend, clock = retrying(inner)
    with pytest.raises(type(error)):
        backend.put("a", b"x")
    assert clock.pauses == []
    backend.put("a", b"x")


def test_closing_ends_a_pause(tmp_path: Path) -> None:
    """A process that wants to end does not wait for a store that is down."""
    inner = _FlakyBackend(tmp_path)
    inner.failures = 10**6
    backend = Retrying(inner, patience=timedelta(hours=1))
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(backend.put, "a", b"x")
        with pytest.raises(FutureTimeoutError):
            writing.result(0.2)
        backend.close()
        with pytest.raises(StorageError, match="network"):
            writing.result(30)


def test_answers_are_not_retried(tmp_path: Path) -> None:
    """A missing or existing key is not a failure."""
    backend, clock = retrying(PosixBackend(tmp_path))
    backend.create("a", b"x")
    with pytest.raises(KeyMissing):
        backend.get("b")
    with pytest.raises(KeyExists):
        backend.create("a", b"y")
    assert clock.pauses == []


@pytest.mark.parametrize("lost", ["request", "reply"])
@pytest.mark.parametrize("honours", [True, False])
def test_a_probe_is_not_misled_by_a_failure(*, honours: bool, lost: str) -> None:
    """A second create that merely failed is no refusal, and one whose reply was lost is no overwriting."""
    stored: dict[str, bytes] = {}
    turns = itertools.count()

    def create(key: str, data: bytes) -> None:
        fails = next(turns) % 2 == 0
        if fails and lost == "request":
            raise StorageError("lost")
        if honours and key in stored:
            raise KeyExists(key)
        stored[key] = data
        if fails:
            raise StorageError("lost")

    found = probe_create("flaky://", create, stored.__getitem__, stored.__delitem__)
    assert found == honours
    assert stored == {}


# Choosing a backend.


@pytest.mark.parametrize("form", ["{}", "file://{}", "local://{}"])
def test_paths_go_to_our_own_files(form: str, tmp_path: Path) -> None:
    """However a path is spelled, fsspec's local file system is not used."""
    backend = open_backend(form.format(tmp_path / "run"))
    backend.put("a", b"x")
    assert (tmp_path / "run" / "a").read_bytes() == b"x"
    assert backend.url == f"file://{tmp_path}/run"


def test_other_schemes_go_to_fsspec() -> None:
    """`memory://` for tests, anything else fsspec knows."""
    name = uuid.uuid4().hex
    backend = open_backend(f"memory://{name}/run")
    backend.put("a", b"x")
    assert fsspec.filesystem("memory").cat_file(f"/{name}/run/a") == b"x"


def test_what_cannot_be_opened_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown scheme, a missing package, options that do not fit: each names the URL and the remedy."""
    with pytest.raises(ConfigurationError, match=r"nosuch://x.*Name a path, or a URL that fsspec knows"):
        open_backend("nosuch://x")
    with pytest.raises(ConfigurationError, match="does not accept"):
        open_backend("vague://x", storage_options={"self": 1})
    with pytest.raises(ConfigurationError, match=r"takes no storage_options.*key"):
        open_backend("/some/path", storage_options={"key": "x"})
    with pytest.raises(ConfigurationError, match="chains file systems"):
        open_backend("simplecache::s3://bucket")
    monkeypatch.setitem(sys.modules, "gdrivefs", None)
    with pytest.raises(ConfigurationError, match=r"gdrive://folder.*[Ii]nstall gdrive"):
        open_backend("gdrive://folder")


def test_a_url_that_cannot_be_written_is_said_at_once(tmp_path: Path) -> None:
    """A file where the directory should be, as any user can meet it."""
    (tmp_path / "taken").write_bytes(b"")
    with pytest.raises(ConfigurationError, match=r"file://.*taken/run.*cannot be written"):
        RunStore.open(open_backend(str(tmp_path / "taken" / "run")), resume="auto")
