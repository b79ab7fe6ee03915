"""Host memory is made ready in the background without a byte of it changing, and is given back at the end."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_moe_ckpt.native import Preparation, _host_memory, _library
from lightning_moe_ckpt.native._cpu import CompiledCpuEngine
from lightning_moe_ckpt.native._host_memory import (
    _HUGE_PAGE,
    HugePages,
    PageLocks,
    host_buffer,
    huge_page_nbytes,
    map_file,
    node_of_pci_device,
    num_nodes,
    populate,
    prefer_node,
    preparing_threads,
    take_huge_pages,
)
from lightning_moe_ckpt.session import _dense
from lightning_moe_ckpt.tiers import SegmentRing, shared_directory

NBYTES = 64 * mmap.PAGESIZE


def _mapped() -> Tensor:
    """Pages that no one has touched."""
    return torch.frombuffer(mmap.mmap(-1, NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)


def _resident_pages(memory: Tensor) -> int:
    flags = (ctypes.c_ubyte * (memory.nbytes // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    code = libc.mincore(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes), flags)
    assert code == 0, os.strerror(ctypes.get_errno())
    return sum(flag & 1 for flag in flags)


def _is_mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


def test_populated_pages_are_there_and_hold_what_they_held() -> None:
    """Old kernels cannot, and say so."""
    memory = _mapped()
    memory[5 * mmap.PAGESIZE] = 7
    if not populate(memory.data_ptr(), memory.nbytes):
        pytest.skip("MADV_POPULATE_WRITE needs Linux 5.14")
    assert _resident_pages(memory) == 64
    assert memory.sum() == 7


def test_a_large_snapshot_of_everything_meets_pages_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults would come one by one on the thread that copies."""
    probe = _mapped()
    if not populate(probe.data_ptr(), probe.nbytes):
        pytest.skip("MADV_POPULATE_WRITE needs Linux 5.14")
    monkeypatch.setattr(_dense, "_MAPPED_AHEAD_NBYTES", 2**20)
    memory = _dense._memory(2**21)
    for thread in threading.enumerate():
        if thread.name == "moe-ckpt-prepare":
            thread.join()
    first = -memory.data_ptr() % mmap.PAGESIZE
    whole = memory[first : first + 2**21 - mmap.PAGESIZE]
    assert _resident_pages(whole) == whole.nbytes // mmap.PAGESIZE
    assert not memory.any()


def _huge_nbytes(memory: Tensor) -> int:
    """Bytes of a mapped file that are mapped in huge pages."""
    entry = Path("/proc/self/smaps").read_text().partition(f"{memory.data_ptr():x}-")[2]
    return int(entry.partition("ShmemPmdMapped:")[2].split()[0]) << 10


def _in_a_quiet_moment(memory: Tensor, nbytes: int, again: Callable[[], object]) -> None:
    """Try again a few times: the kernel may use a page at any moment, and leaves it alone then."""
    for _ in range(10):
        if _huge_nbytes(memory) != nbytes:
            again()


def _file(folder: Path, nbytes: int) -> int:
    descriptor = os.open(folder, os.O_RDWR | os.O_TMPFILE)
    os.ftruncate(descriptor, nbytes)
    return descriptor


@pytest.mark.parametrize("nbytes", [1, mmap.PAGESIZE, 2**21, 5 * 2**20 + 123])
def test_a_mapped_file_goes_with_its_last_view(tmp_path: Path, nbytes: int) -> None:
    """What is written is in the file, also behind the end of its descriptor; huge pages would fit."""
    path = tmp_path / "file"
    path.write_bytes(bytes(nbytes))
    descriptor = os.open(path, os.O_RDWR)
    memory = map_file(descriptor)
    os.close(descriptor)
    assert (len(memory), memory.data_ptr() % (huge_page_nbytes() or mmap.PAGESIZE)) == (nbytes, 0)
    view = memory[-1:]
    del memory
    view.fill_(7)
    assert _is_mapped(path)
    assert path.read_bytes() == bytes(nbytes - 1) + b"\7"
    del view
    assert not _is_mapped(path)


def test_an_empty_file_is_not_mapped(tmp_path: Path) -> None:
    descriptor = _file(tmp_path, 0)
    with pytest.raises(OSError, match="mapping 0 bytes"):
        map_file(descriptor)
    os.close(descriptor)


def test_a_mapping_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    """Neither where there are no addresses left, nor where the file may not be written."""
    (tmp_path / "file").write_bytes(bytes(2**21))
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    own = Path("/proc/self/status").read_text().partition("VmSize:")[2].split()[0]
    before, limits = len(Path("/proc/self/maps").read_text().splitlines()), resource.getrlimit(resource.RLIMIT_AS)
    for limit in (limits[0], int(own) * 1024 + 2**20):
        resource.setrlimit(resource.RLIMIT_AS, (limit, limits[1]))
        try:
            with pytest.raises(OSError, match="mapping") as raised:
                map_file(descriptor)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)
        assert raised.value.errno == (errno.EACCES if limit == limits[0] else errno.ENOMEM)
        assert not _is_mapped(tmp_path / "file")
    assert len(Path("/proc/self/maps").read_text().splitlines()) <= before + 3, "what Python itself took"
    os.close(descriptor)


def test_a_tmpfs_gives_huge_pages_whatever_its_mount_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the end, which is no whole page; they are there, zeroed, and mapped as one."""
    unit = huge_page_nbytes()
    descriptor = _file(shared_directory(), 3 * unit + mmap.PAGESIZE)
    memory = map_file(descriptor)
    if not unit or not (taken := take_huge_pages(descriptor, memory)):
        pytest.skip("huge pages of files need Linux 6.1, and a tmpfs")
    _in_a_quiet_moment(memory, 3 * unit, lambda: HugePages(1).take(memory.data_ptr(), memory.data_ptr() + 3 * unit))
    assert taken == _huge_nbytes(memory) == 3 * unit
    assert os.fstat(descriptor).st_blocks * 512 == 3 * unit
    assert not memory.any()
    os.close(descriptor)


def test_a_kernel_that_takes_long_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """After one piece the rest is left alone; a page that somebody uses at this moment ends nothing."""
    asked = list[int]()

    def refuse(_address: int, nbytes: int, _advice: int) -> bool:
        asked.append(nbytes)
        return False

    monkeypatch.setattr(_host_memory, "huge_page_nbytes", lambda: 2**21)
    monkeypatch.setattr(_host_memory, "_advise", refuse)
    monkeypatch.setattr(ctypes, "get_errno", lambda: errno.EAGAIN)
    pages, at = HugePages(2**30), 3 * 2**20
    while at < 20 * 2**20:
        at = pages.take(at, 20 * 2**20)
    assert (asked, pages.wanted) == ([5 * 2**20, 8 * 2**20, 4 * 2**20], True)
    monkeypatch.setattr(_host_memory, "_PATIENCE_SECONDS", -1.0)
    assert pages.take(0, 2**24) == 2**23
    assert not pages.wanted
    assert pages.take(2**23, 2**24) == 2**24
    assert len(asked) == 4


def test_a_mount_that_gives_huge_pages_need_not_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before Linux 6.1 with the option `huge=within_size`: a file has a whole one for each page that it asks for."""
    descriptor = _file(shared_directory(), 2**22)
    os.posix_fallocate(descriptor, 0, 2**22)
    monkeypatch.setattr(_host_memory, "huge_page_nbytes", lambda: 2**21)
    monkeypatch.setattr(_host_memory, "_advise", lambda *_: False)
    assert take_huge_pages(descriptor, map_file(descriptor)) == 2**22
    os.close(descriptor)


@pytest.mark.parametrize(("text", "nbytes"), [("2097152\n", 2**21), ("536870912\n", 0), ("", 0), (None, 0)])
def test_only_huge_pages_that_fit_rings_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None, nbytes: int
) -> None:
    """None of 512 MiB, as beside small pages of 64 KiB, nor of a kernel that says nothing."""
    if text is not None:
        (tmp_path / "size").write_text(text)
    monkeypatch.setattr(_host_memory, "_HUGE_PAGE", tmp_path / "size")
    assert huge_page_nbytes.__wrapped__() == nbytes


def test_a_preparation_goes_on_with_huge_pages() -> None:
    """Whole ones within a buffer, beside what is written there already; the rest is mapped in small pages."""
    unit = huge_page_nbytes()
    descriptor = _file(shared_directory(), 3 * unit)
    os.posix_fallocate(descriptor, 0, 3 * unit)
    memory = map_file(descriptor)
    memory[unit // 2 :: unit] = 7
    Preparation(memory[mmap.PAGESIZE :]).wait()
    if not _huge_nbytes(memory):
        pytest.skip("huge pages of files need Linux 6.1, and a tmpfs")
    _in_a_quiet_moment(memory, 2 * unit, lambda: Preparation(memory[mmap.PAGESIZE :]).wait())
    os.close(descriptor)
    assert _huge_nbytes(memory) == 2 * unit
    assert (int(memory.sum()), int(memory[unit + unit // 2])) == (3 * 7, 7)
    assert _resident_pages(memory) == 3 * unit // mmap.PAGESIZE


def test_other_files_have_no_huge_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where the kernel refuses, nor where it knows of none."""
    monkeypatch.setattr(_host_memory, "_MADV_COLLAPSE", 999)
    descriptor = _file(tmp_path, 2 * (huge_page_nbytes() or 2**21))
    memory = map_file(descriptor)
    assert take_huge_pages(descriptor, memory) == 0
    assert not _huge_nbytes(memory)
    monkeypatch.setattr(_host_memory, "huge_page_nbytes", lambda: 0)
    assert take_huge_pages(descriptor, map_file(descriptor)) == 0
    os.close(descriptor)


def test_memory_that_is_not_mapped_is_an_error() -> None:
    """A wrong address is our mistake, never silently nothing."""
    memory = _mapped()
    if not populate(memory.data_ptr(), memory.nbytes):
        pytest.skip("MADV_POPULATE_WRITE needs Linux 5.14")
    with pytest.raises(OSError, match="mapping 4096 bytes ahead"):
        populate(mmap.PAGESIZE, 4096)


def test_a_buffer_is_prepared_piece_by_piece() -> None:
    """Every range is announced once its pages are there, in order; then the whole."""
    memory, seen, finished = _mapped(), list[tuple[int, int]](), list[bool]()
    base, step = memory.data_ptr(), 24 * mmap.PAGESIZE
    preparation = Preparation(
        memory, per_step=lambda *step: seen.append(step), done=lambda: finished.append(True), step_nbytes=step
    )
    preparation.wait()
    assert seen == [(base, step), (base + step, step), (base + 2 * step, 16 * mmap.PAGESIZE)]
    assert finished == [True]
    assert preparation.failure is None


@pytest.mark.parametrize("threads", [1, 3, 8, 100])
def test_threads_map_every_page_once(threads: int) -> None:
    """Whatever the number of threads, a range is announced when all its pages are there, and no byte changes."""
    memory, resident = _mapped(), list[int]()
    memory[-1] = 7
    if not populate(memory.data_ptr(), 1):
        pytest.skip("MADV_POPULATE_WRITE needs Linux 5.14")
    half = memory.nbytes // 2
    preparation = Preparation(
        memory, per_step=lambda *_: resident.append(_resident_pages(memory)), step_nbytes=half, threads=threads
    )
    preparation.wait()
    assert preparation.failure is None
    assert resident == [33, 64], "half and the page that was written, then all"
    assert memory.sum() == 7


def test_ranks_of_one_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the cores, eight threads at most, one at least."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(32)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert preparing_threads() == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert preparing_threads() == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")
    assert preparing_threads() == 1


def test_what_fails_is_kept_and_said(caplog: pytest.LogCaptureFixture) -> None:
    """Registration may hit a limit of locked memory: copies go on, slower, and the log says why."""

    def refuse(address: int, nbytes: int) -> None:
        raise RuntimeError("no more locked memory")

    finished = list[bool]()
    preparation = Preparation(_mapped(), per_step=refuse, done=lambda: finished.append(True))
    preparation.wait()
    assert str(preparation.failure) == "no more locked memory"
    assert not finished
    assert "copies will be slower: no more locked memory" in caplog.text


def test_a_forked_process_gives_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker of a loader may collect an engine that it has a copy of, and CUDA does not work there."""
    given_back: list[int] = []
    locks = [PageLocks(torch.empty(8), given_back.append) for _ in range(2)]
    for lock in locks:
        lock.pieces.append((1, 32))
    locks.pop().release()
    assert given_back == [1]
    monkeypatch.setattr(os, "getpid", lambda: -1)
    locks.pop().release()
    assert given_back == [1]


def test_pages_may_be_wished_from_a_node() -> None:
    """Node 0 exists everywhere; the kernel may lack the call."""
    memory = _mapped()
    assert isinstance(prefer_node(memory.data_ptr(), memory.nbytes, 0), bool)
    memory.fill_(1)
    assert memory.sum() == NBYTES
    assert not prefer_node(memory.data_ptr(), memory.nbytes, 1000)
    assert num_nodes() >= 1
    assert node_of_pci_device("ffff:ff:1f.7") is None


@pytest.mark.parametrize("explicitly", [True, False])
def test_a_ring_is_given_back_whole(tmp_path: Path, explicitly: bool) -> None:
    """After `close` nothing maps the file any more, whether the buffer was unregistered or not."""
    library = _library.cpu()
    if library is None:
        pytest.skip(_library.status("cpu").reason)
    engine = CompiledCpuEngine(library)
    ring = SegmentRing.create("given-back.ring", slot_nbytes=2**20, num_slots=4, directory=tmp_path)
    engine.register(ring.memory)
    ring.begin_window(1)
    slot = ring.acquire(1, 0)
    engine.wait(engine.submit([(torch.ones(100, dtype=torch.uint8), slot.view[:100])]))
    assert slot.view.sum() == 100
    assert _is_mapped(ring.path)
    if explicitly:
        engine.unregister(ring.memory)
    ring.close()
    engine.close()
    path = ring.path
    del slot, ring
    assert not _is_mapped(path)
    assert not path.exists()


@pytest.mark.parametrize("nbytes", [0, 5, 2**21, 64 * 2**20 + 123])
def test_buffers_hold_what_is_written(nbytes: int) -> None:
    """Faults come once per huge page where the kernel has free ones, and lets a process ask for them."""
    faults = list[int]()
    for _ in range(3):  # some free memory may have been in small pieces
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        buffer = host_buffer(nbytes).fill_(7)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        assert (len(buffer), int(buffer.sum(dtype=torch.int64))) == (nbytes, 7 * nbytes)
    if nbytes > 2**25 and "[never]" not in _HUGE_PAGE.with_name("enabled").read_text():
        assert min(faults) < nbytes // mmap.PAGESIZE // 2
