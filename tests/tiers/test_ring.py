"""Slots are never shared or overwritten too early, and sealed bytes outlive the process."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import random
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lightning_moe_ckpt.errors import ConfigurationError, Corrupt, RingFull
from lightning_moe_ckpt.storage import RING_HEADER_NBYTES, RingHeader
from lightning_moe_ckpt.tiers import RingRoom, SegmentRing, Slot, _shm, shared_directory, shared_name
from lightning_moe_ckpt.tiers._ring_state import SlotPool
from lightning_moe_ckpt.tiers._shm import unlink_shared_file


@pytest.fixture
def name() -> Iterator[str]:
    """A ring name of this test process; nothing of it is left in shared memory."""
    name = shared_name(f"test-{os.getpid()}", 0)
    yield name
    unlink_shared_file(shared_directory() / name)


def memory_ring(num_slots: int) -> SegmentRing:
    """A ring over ordinary memory, for what has nothing to do with files."""
    header = RingHeader(nonce="", slot_nbytes=4096, num_slots=num_slots, origin="")
    return SegmentRing(Path("unused"), torch.zeros(header.nbytes - RING_HEADER_NBYTES, dtype=torch.uint8), header)


def in_forked_child(action: Callable[[], None]) -> int:
    """Exit code of a child that runs `action`; negative for a signal, 1 if it raised."""
    child = os.fork()
    if child == 0:
        try:
            action()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def fill(ring: SegmentRing, generation: int, window: int) -> list[Slot]:
    """A whole window of sealed segments, each filled with the generation's number."""
    ring.begin_window(generation)
    slots = [ring.acquire(generation, step) for step in range(window)]
    for slot in slots:
        slot.view.fill_(generation)
        ring.seal(slot)
    return slots


class RingMachine(RuleBasedStateMachine):
    """Random life of a ring beside a model of what must still be readable."""

    @initialize(num_slots=st.integers(3, 9), keep=st.integers(1, 3))
    def make(self, num_slots: int, keep: int) -> None:
        self.ring = memory_ring(num_slots)
        self.ring.keep = self.keep = keep
        self.kept: list[int] = []
        self.num_slots = num_slots
        self.next = 1
        self.open: int | None = None
        self.filling: list[Slot] = []
        self.held: dict[int, list[Slot]] = {}  # slots by generation, in the order of their windows
        self.complete: list[int] = []
        self.everywhere = 0
        self.aborted: set[int] = set()
        self.pins: dict[int, int] = {}

    @precondition(lambda self: self.open is None)
    @rule()
    def begin(self) -> None:
        self.open, self.next = self.next, self.next + 1
        self.held[self.open] = []
        self.ring.begin_window(self.open)

    @precondition(lambda self: self.open is not None)
    @rule()
    def acquire(self) -> None:
        assert self.open is not None
        used = sum(map(len, self.held.values()))
        try:
            slot = self.ring.acquire(self.open, step=0)
        except RingFull:
            assert used == self.num_slots  # only when nothing is free
            return
        assert used < self.num_slots
        slot.view.fill_(self.open)
        self.held[self.open].append(slot)
        self.filling.append(slot)

    @precondition(lambda self: self.filling)
    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.filling))
        self.filling.remove(slot)
        self.ring.seal(slot)

    @precondition(lambda self: self.open is not None and self.held[self.open] and not self.filling)
    @rule()
    def finish(self) -> None:
        assert self.open is not None
        self.ring.finish_window(self.open)
        self.complete.append(self.open)
        self.open = None

    @precondition(lambda self: self.open is not None)
    @rule()
    def abort(self) -> None:
        assert self.open is not None
        self.ring.abort_window(self.open)
        self.aborted.add(self.open)
        self.open, self.filling = None, []

    @precondition(lambda self: any(g >= self.everywhere for g in self.complete))
    @rule(data=st.data())
    def told(self, data: st.DataObject) -> None:
        before, self.everywhere = (
            self.everywhere,
            data.draw(st.sampled_from([g for g in self.complete if g >= self.everywhere])),
        )
        newer = [g for g in self.complete if before < g <= self.everywhere]
        self.kept = [*self.kept, *newer][-self.keep :]
        self.ring.complete_everywhere(self.everywhere)

    @precondition(lambda self: self.open is not None or self.complete)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        alive = [g for g in self.complete if g > self.everywhere or g in self.kept]
        alive += [self.open] if self.open is not None else []
        generation = data.draw(st.sampled_from(alive))
        self.ring.pin(generation)
        self.pins[generation] = self.pins.get(generation, 0) + 1

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        generation = data.draw(st.sampled_from(sorted(self.pins)))
        self.ring.unpin(generation)
        self.pins[generation] -= 1
        if not self.pins[generation]:
            del self.pins[generation]

    @invariant()
    def what_must_be_readable_is_intact_and_the_rest_is_free(self) -> None:
        """The newest that are complete everywhere, newer ones and pinned ones keep their bytes; nothing else has a slot."""
        if not hasattr(self, "ring"):
            return
        newer = {g for g in self.held if g > self.everywhere and g not in self.aborted}
        keep = newer | {g for g in self.held if g in self.pins or g in self.kept}
        self.held = {g: slots for g, slots in self.held.items() if g in keep}
        assert all(bool((slot.view == g).all()) for g, slots in self.held.items() for slot in slots)
        indices = [slot.index for slots in self.held.values() for slot in slots]
        assert len(set(indices)) == len(indices)  # no slot in two generations
        assert self.ring.free_slots == self.num_slots - len(indices)  # no leak


RingMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRingMachine = RingMachine.TestCase


@pytest.mark.parametrize("generations", [2, 3])
@pytest.mark.parametrize("seed", range(8))
def test_windows_find_room_however_generations_come_and_go(seed: int, generations: int) -> None:
    """Plans change, generations are late or aborted, tiers read for long: as soon as one is free, there is room for the next."""
    draws = random.Random(seed)
    steps = [draws.randint(1, 30) * 4096 - draws.randint(0, 4095) for _ in range(draws.randint(1, 6))]
    room = RingRoom(steps=steps, generations=generations)
    ring = memory_ring(room.block * room.blocks)
    ring.lay(room.block)
    complete, pinned, taken = list[int](), list[int](), 0
    for generation in range(1, 300):
        draws.shuffle(steps)  # another plan, in the same pages
        assert ring.fits(steps)
        if draws.random() < 0.3 and complete:
            pinned.append(complete[-1])
            ring.pin(complete[-1])
        for _ in range(min(len(pinned), draws.choice([0, 0, 1, len(pinned)]))):
            ring.unpin(pinned.pop(0))
        if complete and draws.random() < 0.8:  # the vote says that all ranks have the newest
            ring.complete_everywhere(complete[-1])
        held = len(ring._generations)
        assert ring.can_begin(steps) == (held < generations)
        if not ring.can_begin(steps):
            while pinned:
                ring.unpin(pinned.pop())
            ring.complete_everywhere(complete[-1])
            assert ring.can_begin(steps)
        slots = []
        ring.begin_window(generation)
        for step, nbytes in enumerate(steps):
            slots.append(ring.acquire(generation, step, nbytes))
            slots[-1].view.fill_(generation % 251)
            ring.seal(slots[-1])
        if draws.random() < 0.1:
            ring.abort_window(generation)
            continue
        ring.finish_window(generation)
        complete = [*complete[-1:], generation]
        taken += 1
        for name, entry in ring._generations.items():
            assert all(bool((ring._view(slot) == name % 251).all()) for slot in entry.slots)
    assert taken > 200


def test_blocks_of_an_earlier_plan_are_used_again_once_they_are_free() -> None:
    """A later process divides the same pages otherwise; those with segments count as used until these are gone."""
    pool = SlotPool(RingHeader(nonce="", slot_nbytes=4096, num_slots=50, origin=""))
    assert pool.claim({3: 5 * 4096, 20: 10 * 4096})
    assert not pool.claim({7: 4096})
    assert not pool.claim({49: 2 * 4096})
    pool.lay(20)
    assert pool.free == 0
    assert not pool.fits([4096], [])
    pool.give_back([20])
    assert (pool.free, pool.take(20 * 4096)) == (20, 20)
    assert not pool.fits([21 * 4096], [3, 20])


def test_several_generations_are_kept_where_one_has_not_everything() -> None:
    """A ring for partial windows of one segment never meets a full ring either, and says so before a window begins."""
    ring = memory_ring(5)
    ring.keep = 4
    for generation in range(1, 12):
        assert ring.can_begin([4096])
        fill(ring, generation, 1)
        ring.finish_window(generation)
        ring.complete_everywhere(generation)
        assert ring.complete == list(range(max(1, generation - 3), generation + 1))
    assert ring.fits([4096])
    ring.keep = 5
    assert not ring.fits([4096])


def test_a_slow_reader_costs_slots_and_then_windows_but_no_bytes() -> None:
    """A pinned generation stays until `unpin`; meanwhile windows are filled as long as slots remain."""
    ring = memory_ring(5)
    old = fill(ring, 1, 2)
    ring.pin(1)
    ring.finish_window(1)
    fill(ring, 2, 2)
    ring.finish_window(2)
    ring.complete_everywhere(2)
    assert ring.free_slots < 2
    assert not ring.can_begin([4096] * 2)
    ring.begin_window(3)
    ring.acquire(3, 0)
    with pytest.raises(RingFull, match="2 complete, 2 dropped and pinned, 1 open"):
        ring.acquire(3, 1)
    assert all(bool((slot.view == 1).all()) for slot in old)
    ring.unpin(1)
    ring.acquire(3, 1)
    ring.abort_window(3)
    assert ring.free_slots == 3


def test_misuse_is_caught() -> None:
    """The session's mistakes fail loudly instead of corrupting a generation."""
    ring = memory_ring(4)
    ring.begin_window(1)
    slot = ring.acquire(1, 0)
    for wrong in (
        lambda: ring.begin_window(2),
        lambda: ring.finish_window(1),
        lambda: ring.complete_everywhere(1),
        lambda: ring.unpin(1),
        lambda: ring.acquire(7, 0),
    ):
        with pytest.raises(AssertionError):
            wrong()
    ring.seal(slot)
    with pytest.raises(AssertionError):
        ring.seal(slot)
    ring.finish_window(1)
    with pytest.raises(AssertionError):
        ring.acquire(1, 1)
    with pytest.raises(AssertionError):
        ring.begin_window(1)


def test_slots_are_page_aligned_parts_of_one_mapping(name: str) -> None:
    """Sizes are rounded up to pages; the slots tile the memory."""
    ring = SegmentRing.create(name, slot_nbytes=5000, num_slots=3)
    assert ring.slot_nbytes == 8192
    ring.begin_window(1)
    slots = [ring.acquire(1, step) for step in range(3)]
    starts = sorted(slot.view.data_ptr() - ring.memory.data_ptr() for slot in slots)
    assert starts == [0, 8192, 16384]
    assert ring.memory.data_ptr() % 4096 == 0
    assert ring.path.stat().st_size == RING_HEADER_NBYTES + ring.memory.numel()
    ring.close()


def test_sealed_bytes_survive_sigkill_and_the_next_life_replaces_them(name: str) -> None:
    """A killed process leaves its segments in place, bit for bit; the same rank's next ring takes their name."""
    path = shared_directory() / name

    def fill_and_die() -> None:
        ring = SegmentRing.create(name, slot_nbytes=4096, num_slots=4)
        ring.begin_window(1)
        for step in range(3):
            slot = ring.acquire(1, step)
            slot.view.copy_(torch.arange(4096).remainder(251).add(step).to(torch.uint8))
            ring.seal(slot)
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_forked_child(fill_and_die) == -signal.SIGKILL
    left = path.read_bytes()
    wanted = {bytes((i % 251 + step) % 256 for i in range(4096)) for step in range(3)}
    assert wanted < {left[start : start + 4096] for start in range(RING_HEADER_NBYTES, 5 * 4096, 4096)}

    with path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as survivor:
        ring = SegmentRing.create(name, slot_nbytes=4096, num_slots=2)
        assert path.stat().st_size == RING_HEADER_NBYTES + 2 * 4096
        assert not ring.memory.any()
        assert survivor[:] == left  # who still maps the old ring keeps it
    ring.close()
    assert not path.exists()


def test_a_ring_that_does_not_fit_says_how_much_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has the number, and nothing is left behind."""
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=3, f_frsize=4096))
    with pytest.raises(ConfigurationError, match=r"0.01 MiB are free, 0.03 MiB are missing"):
        SegmentRing.create("r", slot_nbytes=4096, num_slots=10, directory=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_room_that_vanishes_meanwhile_is_the_same_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is reserved at once, so a tmpfs that fills up gives an error here and not a SIGBUS in training."""

    def full(descriptor: int, offset: int, nbytes: int) -> None:
        monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=1, f_frsize=4096))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigurationError, match=r"<0.01 MiB are free, 0.01 MiB are missing"):
        SegmentRing.create("r", slot_nbytes=8192, num_slots=1, directory=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_memory_is_reserved_not_promised(name: str) -> None:
    """Every page is allocated when the ring is made."""
    ring = SegmentRing.create(name, slot_nbytes=2**20, num_slots=2)
    assert ring.path.stat().st_blocks * 512 >= 2 * 2**20
    ring.close()


def test_close_leaves_neither_name_nor_mapping_nor_descriptor(name: str) -> None:
    """The mapping goes with the last view, and a view that is still in use stays valid."""
    gc.collect()  # what other tests left is not ours
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    ring = SegmentRing.create(name, slot_nbytes=4096, num_slots=2)
    ring.begin_window(1)
    view = ring.acquire(1, 0).view
    ring.close()
    ring.close()
    view.fill_(7)
    assert view.sum().item() == 7 * 4096
    assert name in Path("/proc/self/maps").read_text()
    del view
    gc.collect()
    assert name not in Path("/proc/self/maps").read_text()
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
    assert not ring.path.exists()


def test_a_forked_child_does_not_unlink(name: str) -> None:
    """A data loader worker that tears down a copy of the ring leaves the parent's alone."""
    ring = SegmentRing.create(name, slot_nbytes=4096, num_slots=1)
    assert in_forked_child(ring.close) == 0
    assert ring.path.exists()
    ring.close()


def test_names_belong_to_user_run_and_rank() -> None:
    """The same rank of the same run finds its ring again; no two share one."""
    assert shared_name("a", 0) == shared_name("a", 0)
    assert len({shared_name("a", 0), shared_name("a", 1), shared_name("b", 0)}) == 3
    assert str(os.getuid()) in shared_name("a", 0)
    for bad in ("", "a/b", "a\0", "x" * 101):
        with pytest.raises(ValueError, match="tag"):
            shared_name(bad, 0)


def test_another_directory_is_used_where_there_is_no_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fallback works the same, only slower."""
    monkeypatch.setattr(_shm, "_SHARED_MEMORY", tmp_path / "absent")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert shared_directory() == tmp_path
    ring = SegmentRing.create("r", slot_nbytes=4096, num_slots=1, directory=shared_directory())
    ring.memory.fill_(3)
    assert (tmp_path / "r").read_bytes()[RING_HEADER_NBYTES:] == b"\3" * 4096
    ring.close()
    assert list(tmp_path.iterdir()) == []


def test_pins_may_come_from_another_thread() -> None:
    """A reader thread pins and unpins while windows run; the count of slots is right in the end."""
    ring = memory_ring(7)
    errors: list[BaseException] = []

    def read(generation: int, done: threading.Event) -> None:
        try:
            done.wait(10)
            ring.unpin(generation)
        except BaseException as error:
            errors.append(error)
            raise

    for generation in range(1, 200):
        ring.begin_window(generation)
        ring.pin(generation)
        done = threading.Event()
        reader = threading.Thread(target=read, args=(generation, done))
        reader.start()
        slot = ring.acquire(generation, 0)
        ring.seal(slot)
        done.set()
        ring.finish_window(generation)
        ring.complete_everywhere(generation)
        reader.join(10)
    assert not errors
    assert ring.free_slots == 6


@pytest.mark.parametrize("nbytes", [100, 2**22])
def test_a_withdrawn_file_is_gone_at_once_and_its_pages_soon(tmp_path: Path, nbytes: int) -> None:
    """The marker of thousands of operators has 50 MB, which the kernel frees beside training. Nothing keeps it open."""
    path, other = tmp_path / "marker", tmp_path / "other"
    _shm.write_shared(path, bytes(nbytes))
    _shm.withdraw_shared(path)
    assert not path.exists()
    for thread in threading.enumerate():
        if thread.name == "moe-ckpt-free":
            thread.join()
    assert not [
        each for each in Path("/proc/self/fd").iterdir() if os.path.lexists(each) and "marker" in str(each.readlink())
    ]
    _shm.withdraw_shared(path)  # gone already
    other.symlink_to(tmp_path)
    _shm.withdraw_shared(other)
    assert other.is_symlink()  # is no file of this user


def test_memory_that_runs_out_in_the_midst_is_given_back_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only when nobody holds the error any more: what is free is said, and another ring may be made."""
    reserve = os.posix_fallocate

    def run_out(descriptor: int, start: int, nbytes: int) -> None:
        if nbytes > mmap.PAGESIZE:
            raise OSError(errno.ENOSPC, "No space left on device")
        reserve(descriptor, start, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", run_out)
    with pytest.raises(ConfigurationError, match="does not fit") as raised:
        SegmentRing.create(name, 2**22, 2)
    assert name not in Path("/proc/self/maps").read_text(), raised.value
    monkeypatch.undo()
    SegmentRing.create(name, 2**22, 2).close()


def test_a_file_whose_process_died_before_it_reserved_anything_takes_no_memory(name: str) -> None:
    """To look at its header through a mapping would, and end this process where there is none."""
    path = shared_directory() / name
    path.touch(mode=0o600)
    os.truncate(path, 2**22)
    with pytest.raises(Corrupt):
        SegmentRing.adopt(path)
    assert path.stat().st_blocks == 0
