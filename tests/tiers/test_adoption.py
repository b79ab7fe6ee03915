"""A restarted process finds what its last incarnation captured, and nothing else."""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from door import MemoryName, as_memoryview, marker_path, unfinished_path
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_moe_ckpt.errors import CheckpointError, ConfigurationError, Corrupt, KeyMissing
from lightning_moe_ckpt.storage import (
    RING_HEADER_NBYTES,
    GenerationId,
    MemoryMarker,
    RankMarker,
    SegmentEntry,
    segment_key,
)
from lightning_moe_ckpt.tiers import Holding, HostTier, Markers, RankMemory, SegmentRing, _ring, _shm, shared_name
from lightning_moe_ckpt.tiers._peer_receiver import ReplicaStore
from lightning_moe_ckpt.tiers._shm import marker_files
from tiers._segments import LAYOUT, RUN, Child, check, check_whole, generation, keep, leave_behind, readable, seal

URL = "file:///run"
SLOT = LAYOUT.nbytes


@pytest.fixture
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Shared memory of one node, in a directory of its own."""
    parent = Path("/dev/shm")  # noqa: S108  # this is about shared memory
    directory = parent / f"moe-ckpt-test-{os.getpid()}-{tmp_path_factory.mktemp('node').name}"
    directory.mkdir()
    yield directory
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def make_ring(node: Path, *, rank: int = 0, num_slots: int = 9, run_id: str = RUN) -> SegmentRing:
    return SegmentRing.create(shared_name(run_id, rank), SLOT, num_slots, node)


def memory(node: Path, *, rank: int = 0, run_id: str = RUN, url: str = URL) -> RankMemory:
    return RankMemory(run_id, rank, url=url, directory=node)


def life(
    node: Path, *steps: int, rank: int = 0, window: int = 2, incarnation: int = 1, num_slots: int = 9
) -> Callable[[], object]:
    """A process that captures generations at `steps` in a ring of its own."""

    def live() -> object:
        own = memory(node, rank=rank)
        own.claim(None)
        ring = own.make(SLOT, num_slots)
        for step in steps:
            keep(ring, generation(step, incarnation), range(step - window + 1, step + 1), rank=rank)
        return own, ring

    return live


# -- what is found


def test_a_killed_process_leaves_its_published_generations(node: Path) -> None:
    """Every byte, read by another process, equals what was captured; older ones first in age, newest first in the list."""
    leave_behind(life(node, 3, 6))
    assert readable(node) == [(0, 6), (0, 3)]


def test_what_was_not_published_is_not_found(node: Path) -> None:
    """Sealed segments without the statement, and windows that were still being filled, are torn."""

    def torn() -> object:
        ring = make_ring(node)
        keep(ring, generation(3), (2, 3))
        seal(ring, generation(6), (5, 6))
        ring.begin_window(generation(9))
        slot = ring.acquire(generation(9), 8)
        slot.view.fill_(7)
        return ring

    leave_behind(torn)
    assert readable(node) == [(0, 3)]
    ring = SegmentRing.adopt(node / shared_name(RUN, 0))
    assert ring is not None
    assert ring.published == [generation(3)]
    ring.lay(1)
    assert ring.free_slots == 7
    ring.close()


def test_two_ranks_and_two_jobs_on_one_node_never_mix(node: Path) -> None:
    """Same steps, same sizes, same user: each is found by its own run and rank only."""
    other = "f" * 32

    def live(rank: int, run_id: str, step: int) -> Callable[[], object]:
        def live() -> object:
            ring = make_ring(node, rank=rank, run_id=run_id)
            keep(ring, generation(step), (step - 1, step), rank=rank, run_id=run_id)
            return ring

        return live

    for rank, run_id, step in ((0, RUN, 3), (1, RUN, 3), (0, other, 5)):
        leave_behind(live(rank, run_id, step))
    assert readable(node) == [(1, 3), (0, 3)]
    assert readable(node, other) == [(0, 5)]
    ours = memory(node, rank=1)
    ours.claim(generation(3))
    assert ours.make(SLOT, 9).published == [generation(3)]
    assert readable(node) == [(1, 3), (0, 3)]
    ours.close(unlink=True)
    assert readable(node) == [(0, 3)]


def test_replicas_are_listed_with_their_owner(node: Path) -> None:
    """Memory kept for a rank of another node is the same format under another name."""
    ring = SegmentRing.create(shared_name(RUN, 7, "replica"), SLOT, 4, node)
    keep(ring, generation(3), (2, 3), rank=7)
    assert readable(node) == [(7, 3)]
    ring.close()
    assert names(node) == []


def test_a_marker_that_is_torn_flipped_or_of_another_ring_counts_for_nothing(node: Path) -> None:
    """Each bit of it matters: its own digest, the nonce, and the name."""
    leave_behind(life(node, 3))
    path = marker_path(node / shared_name(RUN, 0), generation(3))
    good = path.read_bytes()
    for place in range(0, len(good), 41):
        path.write_bytes(good[:place] + bytes([good[place] ^ 4]) + good[place + 1 :])
        assert readable(node) == []
        path.write_bytes(good[:place])
        assert readable(node) == []
    path.write_bytes(good)
    assert readable(node) == [(0, 3)]
    path.rename(node / path.name.replace(f"{RUN}-0", f"{RUN}-1"))
    assert readable(node) == []


def test_a_ring_made_anew_under_the_same_name_does_not_take_the_old_markers(node: Path) -> None:
    """Slots of equal size at equal places, but the nonce differs."""
    leave_behind(life(node, 3))
    path = marker_path(node / shared_name(RUN, 0), generation(3))
    old = path.read_bytes()
    ring = make_ring(node)
    assert names(node) == [shared_name(RUN, 0)]  # making one removes what spoke of the old one
    path.write_bytes(old)
    assert readable(node) == []
    ring.close()
    adopted = make_ring(node)
    path.write_bytes(old)
    adopted.close(unlink=False)
    again = SegmentRing.adopt(node / shared_name(RUN, 0))
    assert again is not None
    assert again.published == []
    assert not path.exists()
    again.close()


def test_reading_says_what_is_gone_or_out_of_bounds(node: Path) -> None:
    """Errors that recovery goes on from, with the next copy."""
    ring = make_ring(node)
    keep(ring, generation(3), (2, 3))
    tier = HostTier(RUN, node)
    (holding,) = tier.holdings()
    entry = tier.read_marker(holding).segments[0]
    with pytest.raises(KeyMissing, match="has no"):
        tier.read_into(holding, entry, SLOT, memoryview(bytearray(8192)))
    path = marker_path(ring.path, generation(3))
    good = path.read_bytes()
    path.write_bytes(good[:-9] + b"\0" + good[-8:])
    with pytest.raises(Corrupt, match="marker in it"):
        tier.read_marker(holding)
    ring.discard(generation(3))
    with pytest.raises(KeyMissing, match="filled anew"):
        tier.read_into(holding, entry, 0, memoryview(bytearray(8)))
    tier.close()
    with pytest.raises(KeyMissing, match="no memory of"):
        tier.read_marker(holding)
    ring.close()


# -- the statement beside the ring


def test_a_statement_goes_before_any_of_its_slots_may_be_filled_again(node: Path) -> None:
    """Superseded, it stays while somebody reads, and is gone when a slot is free."""
    ring = make_ring(node, num_slots=6)
    keep(ring, generation(3), (2, 3))
    ring.pin(generation(3))
    keep(ring, generation(6), (5, 6))
    ring.complete_everywhere(generation(6))
    assert readable(node) == [(0, 6), (0, 3)]
    ring.unpin(generation(3))
    assert (readable(node), ring.free_slots) == ([(0, 6)], 4)
    ring.close()
    assert names(node) == []


def test_a_generation_that_was_given_up_is_not_published(node: Path) -> None:
    """Its slots may be in use for something else."""
    ring = make_ring(node)
    marker = seal(ring, generation(3), (2, 3))
    ring.discard(generation(3))
    with pytest.raises(CheckpointError, match="given up"):
        ring.publish(generation(3), marker)
    assert names(node) == [shared_name(RUN, 0)]
    ring.close()


# -- adoption


def test_an_adopted_ring_goes_on_in_place(node: Path) -> None:
    """Same memory, no copy; the generation stays until a newer one is complete everywhere, and its slots are not given."""
    leave_behind(life(node, 3, 6))
    before = (node / shared_name(RUN, 0)).stat().st_ino
    own = memory(node)
    own.claim(generation(6))
    ring = own.make(SLOT, 9)
    assert ring.path.stat().st_ino == before
    assert (ring.published, ring.free_slots) == ([generation(6)], 7)
    keep(ring, generation(9, incarnation=2), (8, 9))
    assert readable(node) == [(0, 9), (0, 6)]
    own.complete_everywhere(generation(9, incarnation=2))
    assert (readable(node), ring.free_slots) == ([(0, 9)], 7)
    own.close(unlink=True)
    assert names(node) == []


def test_only_what_was_resumed_from_is_kept(node: Path) -> None:
    """A newer generation that not every rank had is of a time line that is over."""
    leave_behind(life(node, 3, 6, 8))
    own = memory(node)
    own.claim(generation(6))
    assert readable(node) == [(0, 6)]
    own.close(unlink=True)


def test_older_generations_stay_where_one_has_not_everything(node: Path) -> None:
    """They go as newer ones take their place; what is newer than what was resumed from goes at once."""
    leave_behind(life(node, 3, 5, 7, 9))
    own = memory(node)
    own.claim(generation(7), older=True)
    assert readable(node) == [(0, 7), (0, 5), (0, 3)]
    ring = own.make(SLOT, 9, keep=3)
    for step, kept in ((8, [8, 7, 5]), (10, [10, 8, 7])):
        keep(ring, generation(step, 2), (step - 1, step))
        own.complete_everywhere(generation(step, 2))
        assert readable(node) == [(0, each) for each in kept]
    own.close(unlink=True)


def test_a_ring_that_does_not_fit_stays_until_the_new_one_has_as_many_as_are_kept(node: Path) -> None:
    """More experts per generation need larger slots; until they are all taken again, the older ring has the others."""
    leave_behind(life(node, 3, 5, num_slots=4))
    own = memory(node)
    own.claim(generation(5), older=True)
    ring = own.make(SLOT, 9, keep=2)
    keep(ring, generation(6, 2), (5, 6))
    own.complete_everywhere(generation(6, 2))
    assert readable(node) == [(0, 6), (0, 5), (0, 3)]
    keep(ring, generation(8, 2), (7, 8))
    own.complete_everywhere(generation(8, 2))
    assert readable(node) == [(0, 8), (0, 6)]
    own.close(unlink=True)


def test_copies_for_others_are_kept_as_many_as_they_keep_themselves(node: Path) -> None:
    """And one more is received meanwhile; what is newer than what the owner names is not whole on all ranks."""
    store = ReplicaStore(memory(node, rank=4), keep=3)
    store.allocate([SLOT])
    before = None
    for step in range(1, 7):
        store.begin(generation(step), keep=before, sizes=[SLOT])
        store.slot(step)
        store.publish(_marker_of(4, step))
        before = generation(step) if step != 4 else before
    assert sorted(each.step for each in store.memory.published) == [2, 3, 5, 6]
    store.memory.close(unlink=True)


def _marker_of(rank: int, step: int) -> RankMarker:
    entry = SegmentEntry(step=step, key=segment_key(generation(step), rank, step), nbytes=SLOT, digest="")
    markers = Markers(run_id=RUN, rank=rank, world_size=5)
    return markers.of(generation(step), [entry], plan_hash="plan", plan_json="{}")


def test_killed_again_before_anything_new_is_complete(node: Path) -> None:
    """Two lives in a row die in the middle of a window: the generation is still there, in the ring they both adopted."""
    leave_behind(life(node, 3))
    for incarnation in (2, 3):

        def replay(incarnation: int = incarnation) -> object:
            own = memory(node)
            own.claim(generation(3))
            ring = own.make(SLOT, 9)
            ring.begin_window(generation(6, incarnation))
            ring.acquire(generation(6, incarnation), 5).view.fill_(1)
            return own, ring

        leave_behind(replay)
        assert readable(node) == [(0, 3)]


@pytest.mark.parametrize("num_slots", [3, 40])
def test_a_ring_that_does_not_fit_is_kept_until_the_new_one_has_something(node: Path, num_slots: int) -> None:
    """Too small or far too large for the plan: another is made beside it, and the old one goes with its first success."""
    leave_behind(life(node, 3, num_slots=num_slots))
    own = memory(node)
    own.claim(generation(3))
    ring = own.make(SLOT, 9)
    assert ring.published == []
    assert readable(node) == [(0, 3)]
    keep(ring, generation(6, 2), (5, 6))
    assert readable(node) == [(0, 6), (0, 3)]
    own.complete_everywhere(generation(6, 2))
    assert readable(node) == [(0, 6)]
    assert len(names(node)) == 2
    own.close(unlink=True)
    assert names(node) == []


def test_killed_again_beside_a_ring_that_did_not_fit(node: Path) -> None:
    """The next incarnation finds both, and takes the one that fits."""
    leave_behind(life(node, 3, num_slots=3))

    def second() -> object:
        own = memory(node)
        own.claim(generation(3))
        return own, own.make(SLOT, 9)

    leave_behind(second)
    assert len([name for name in names(node) if name.endswith(".ring")]) == 2
    own = memory(node)
    own.claim(generation(3))
    ring = own.make(SLOT, 9)
    assert len([name for name in names(node) if name.endswith(".ring")]) == 2
    assert readable(node) == [(0, 3)]
    keep(ring, generation(6, 2), (5, 6))
    own.complete_everywhere(generation(6, 2))
    assert readable(node) == [(0, 6)]
    own.close(unlink=True)
    assert names(node) == []


def test_a_fresh_start_uses_the_memory_and_forgets_what_was_in_it(node: Path) -> None:
    """Nothing was resumed from."""
    leave_behind(life(node, 3))
    own = memory(node)
    own.claim(None)
    assert readable(node) == []
    assert own.make(SLOT, 9).free_slots == 9
    own.close(unlink=False)
    assert names(node) == []  # nothing in it is worth keeping


def test_what_a_replaced_run_left_goes_and_other_jobs_keep_theirs(node: Path) -> None:
    """Found by the URL: `resume="never"` gives the run another id."""

    def earlier(url: str, run_id: str) -> Callable[[], object]:
        def live() -> object:
            own = memory(node, run_id=run_id, url=url, rank=3)
            keep(ring := own.make(SLOT, 9), generation(3), (2, 3), rank=3, run_id=run_id)
            return own, ring

        return live

    leave_behind(earlier(URL, "a" * 32))
    leave_behind(earlier("s3://elsewhere", "b" * 32))
    running = Child(earlier(URL, "c" * 32))
    own = memory(node)
    own.claim(None)
    assert [readable(node, run * 32) for run in "abc"] == [[], [(3, 3)], [(3, 3)]]
    running.kill()
    own.close(unlink=True)


# -- owners that live


def test_the_ring_of_a_stopped_process_is_read_but_stays_its_own(node: Path) -> None:
    """A zombie that wakes up writes into its own pages, and takes no name away from its successor."""
    zombie = Child(life(node, 3))
    zombie.stop()
    assert SegmentRing.adopt(node / shared_name(RUN, 0)) is None
    own = memory(node)
    own.claim(generation(3))
    ring = own.make(SLOT, 9)
    assert readable(node) == [(0, 3)]
    keep(ring, generation(6, 2), (5, 6))
    own.complete_everywhere(generation(6, 2))
    assert readable(node) == [(0, 6)]
    os.kill(zombie.pid, signal.SIGCONT)
    assert readable(node) == [(0, 6)]
    zombie.kill()
    assert readable(node) == [(0, 6)]
    own.close(unlink=True)
    assert names(node) == []


def test_a_name_that_another_life_has_taken_since_is_left_to_it(node: Path) -> None:
    """The stopped owner is dead, its file gone, and the name leads to a later incarnation's ring: not what was found at start."""
    zombie = Child(life(node, 3))
    zombie.stop()
    own = memory(node)
    own.claim(generation(3))
    own.make(SLOT, 9)
    zombie.kill()
    for path in [node / shared_name(RUN, 0), *marker_files(node / shared_name(RUN, 0))]:
        path.unlink()
    successor = Child(life(node, 9, rank=0, incarnation=3))
    own.close(unlink=True)
    assert readable(node) == [(0, 9)]
    successor.kill()


def test_what_ranks_left_that_are_on_other_nodes_now_goes_when_all_have_something_newer(node: Path) -> None:
    """Not what lives, nor what is as new: its owner may have died a moment ago."""
    leave_behind(life(node, 3, rank=1))
    leave_behind(life(node, 6, rank=2, incarnation=2))
    living = Child(life(node, 3, rank=3))
    replica = RankMemory(RUN, 1, url=URL, directory=node, kind="replica")
    replica.claim(None)
    keep(replica.make(SLOT, 4), generation(3), (2, 3), rank=1)
    replica.close(unlink=False)
    own = memory(node)
    own.claim(None)
    ring = own.make(SLOT, 9)
    keep(ring, generation(3, 2), (2, 3))
    assert len(readable(node)) == 4, "ring and replica of rank 1 are two places of one copy"
    keep(ring, generation(6, 2), (5, 6))
    own.complete_everywhere(generation(6, 2))
    left = sorted(readable(node))
    # Copies go by what is complete in copies.
    assert left == [(0, 6), (1, 3), (2, 6), (3, 3)]
    assert not (node / shared_name(RUN, 1)).exists()
    living.kill()
    other = RankMemory(RUN, 4, url=URL, directory=node, kind="replica")
    other.claim(None)
    keep(other.make(SLOT, 4), generation(6, 2), (5, 6), rank=4)
    other.complete_everywhere(generation(6, 2))
    assert sorted(readable(node)) == [(0, 6), (2, 6), (3, 3), (4, 6)]
    for each in (own, other):
        each.close(unlink=True)


def test_reading_a_copy_piece_by_piece_parses_its_marker_once(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many records are read; another marker in its place is noticed."""
    ring = make_ring(node)
    keep(ring, generation(3), (2, 3))
    parsed: list[str] = []
    parse = MemoryMarker.from_bytes

    def counted(data: bytes, where: str) -> MemoryMarker:
        parsed.append(where)
        return parse(data, where)

    monkeypatch.setattr(MemoryMarker, "from_bytes", counted)
    tier = HostTier(RUN, node)
    (holding,) = tier.holdings()
    entry = tier.read_marker(holding).segments[0]
    before = len(parsed)
    out = memoryview(bytearray(8))
    for offset in range(0, 800, 8):
        tier.read_into(holding, entry, offset, out)
    assert len(parsed) == before <= 2
    path = marker_path(ring.path, generation(3))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(Corrupt):
        tier.read_into(holding, entry, 0, out)
    tier.close()
    ring.close()


def test_a_process_removes_only_its_own_names(node: Path) -> None:
    """Its ring was replaced under its name while it stood still: closing it leaves the successor's alone."""
    ring = make_ring(node)
    keep(ring, generation(3), (2, 3))
    ring.path.rename(node / "away")
    successor = Child(life(node, 6, incarnation=2))
    ring.unlink()
    ring.close()
    assert readable(node) == [(0, 6)]
    successor.kill()


def test_reading_the_own_ring_does_not_lose_the_lock(node: Path) -> None:
    """POSIX drops a record lock when any descriptor of the file is closed by the process that holds it."""
    before = HostTier(RUN, node)
    before.holdings()
    ring = make_ring(node)
    keep(ring, generation(3), (2, 3))
    tier = HostTier(RUN, node)
    (holding,) = tier.holdings()
    check(tier, holding)
    tier.close()
    before.close()
    assert SegmentRing.adopt(ring.path) is None  # in this process
    num_open = len([*Path("/proc/self/fd").iterdir()])
    for _ in range(5):  # as in one recovery after another
        check(tier := HostTier(RUN, node), holding := tier.holdings()[0])
        tier.close()
        assert SegmentRing.adopt(ring.path) is None
    assert len([*Path("/proc/self/fd").iterdir()]) == num_open, "descriptors that may not be closed are used again"
    probe = Child(lambda: _assert_owned(ring.path))
    probe.kill()
    ring.close(unlink=False)
    again = SegmentRing.adopt(ring.path)
    assert again is not None
    again.close()


def _assert_owned(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR)
    with pytest.raises(BlockingIOError):
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_forked_child_neither_owns_nor_removes(node: Path) -> None:
    """A data loader worker that outlives its parent for a moment does not keep the next incarnation from adopting."""
    ring = make_ring(node)
    keep(ring, generation(3), (2, 3))

    def worker() -> object:
        ring.close()
        assert ring.path.exists()
        return ring

    child = Child(worker)
    ring.close(unlink=False)
    adopted = SegmentRing.adopt(ring.path)
    assert adopted is not None
    adopted.close()
    child.kill()


def test_no_room_for_a_second_ring_gives_the_first_up(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training on matters more than a copy that only a second failure would need."""
    leave_behind(life(node, 3, num_slots=3))
    own = memory(node)
    own.claim(generation(3))

    def full_beside_another(directory: Path, nbytes: int) -> None:
        if list(directory.glob("*.ring")):
            raise ConfigurationError("full")

    monkeypatch.setattr(_shm, "expect_room", full_beside_another)
    ring = own.make(SLOT, 9)
    assert readable(node) == []
    assert ring.num_slots == 9
    own.close(unlink=True)


# -- nothing leaks


def test_descriptors_mappings_and_names_are_given_back(node: Path) -> None:
    """After adoption, reading, replacement and the end."""

    def count() -> tuple[int, int]:
        gc.collect()
        maps = Path("/proc/self/maps").read_text()
        return len(list(Path("/proc/self/fd").iterdir())), maps.count(str(node))

    before = count()
    leave_behind(life(node, 3, num_slots=3))
    own = memory(node)
    own.claim(generation(3))
    readable(node)
    ring = own.make(SLOT, 9)
    keep(ring, generation(6, 2), (5, 6))
    readable(node)
    own.complete_everywhere(generation(6, 2))
    own.close(unlink=True)
    own.close(unlink=True)
    del ring, own
    assert count() == before
    assert names(node) == []


def test_names_stay_where_a_later_life_can_restore_something(node: Path) -> None:
    """The end of an incarnation that failed, and then the next."""
    own = memory(node)
    own.claim(None)
    keep(own.make(SLOT, 9), generation(3), (2, 3))
    own.close(unlink=False)
    assert readable(node) == [(0, 3)]
    own = memory(node)
    own.claim(generation(3))
    assert own.make(SLOT, 9).published == [generation(3)]
    own.close(unlink=True)
    assert names(node) == []


def test_leftovers_of_a_process_killed_while_it_published_are_cleared(node: Path) -> None:
    """A temporary name, and markers whose ring is gone."""
    leave_behind(life(node, 3))
    path = marker_path(node / shared_name(RUN, 0), generation(5))
    unfinished_path(path).write_bytes(b"torn")
    gone = node / shared_name(RUN, 0, turn=4)
    marker_path(gone, generation(5)).write_bytes(b"?")
    own = memory(node)
    own.claim(generation(3))
    assert len(names(node)) == 2
    own.close(unlink=True)
    assert names(node) == []


def test_a_statement_that_has_not_got_its_name_yet_says_nothing(node: Path) -> None:
    """Killed between the last byte and the rename: whole as it is, it is neither listed nor adopted, and it goes."""
    leave_behind(life(node, 3, 6))
    path = marker_path(node / shared_name(RUN, 0), generation(6))
    path.rename(unfinished_path(path))
    assert readable(node) == [(0, 3)]
    ring = SegmentRing.adopt(node / shared_name(RUN, 0))
    assert ring is not None
    ring.lay(1)
    assert (ring.published, ring.free_slots) == ([generation(3)], 7)
    assert len(names(node)) == 2
    ring.close()
    assert names(node) == []


def test_names_removed_while_a_statement_is_written_leave_none(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the last moment of a process: the statement gets its name after the others were looked for."""
    ring = make_ring(node)
    marker = seal(ring, generation(3), (2, 3))

    def removed_then_listed(memory: Path) -> list[Path]:
        found = marker_files(memory)
        with pytest.raises(CheckpointError, match="has removed"):
            ring.publish(generation(3), marker)
        return found

    monkeypatch.setattr(_ring, "marker_files", removed_then_listed)
    ring.unlink()
    assert names(node) == []
    ring.close()


@pytest.mark.parametrize("content", [b"", bytes(8192), b"x" * 5000])
def test_a_ring_torn_while_it_was_made_is_replaced(
    node: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Reserved but without a header, or not even reserved: nothing of it stays beside the new one. Only another header warns."""
    path = node / shared_name(RUN, 0)
    path.touch(0o600)
    path.write_bytes(content)
    assert readable(node) == []
    own = memory(node)
    own.claim(generation(3))
    assert names(node) == []
    assert ("is not used and goes" in caplog.text) is any(content)
    keep(own.make(SLOT, 9), generation(6), (5, 6))
    assert readable(node) == [(0, 6)]
    assert names(node) == [path.name, marker_path(path, generation(6)).name]
    own.close(unlink=True)
    assert names(node) == []


def test_a_process_killed_while_it_reserves_memory_leaves_nothing_to_the_next(node: Path) -> None:
    """A name without memory, as the kernel takes back what it had reserved: the next incarnation uses that name again."""
    pid = os.fork()
    if pid == 0:
        os.posix_fallocate = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        make_ring(node)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert names(node) == [shared_name(RUN, 0)]
    own = memory(node)
    own.claim(None)
    assert names(node) == []
    assert own.make(SLOT, 9).path.name == shared_name(RUN, 0)
    own.close(unlink=True)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ops=st.lists(st.sampled_from(["window", "torn", "told", "die"]), max_size=14))
def test_after_any_history_what_is_listed_is_whole_and_the_newest_told_is_there(node: Path, ops: list[str]) -> None:
    """Random windows, completions and deaths: whatever the tier lists passes every digest, and nothing needed is gone."""
    own = memory(node)
    own.claim(None)
    ring, incarnation, step = own.make(SLOT, 6), 1, 0
    newest: GenerationId | None = None
    told: GenerationId | None = None
    for op in ops:
        step += 2
        if op == "window" and ring.free_slots >= 2:
            keep(ring, newest := generation(step, incarnation), (step - 1, step))
        elif op == "torn" and ring.free_slots:
            ring.begin_window(torn := generation(step, incarnation))
            ring.acquire(torn, step).view.fill_(9)
            ring.abort_window(torn)
        elif op == "told" and newest is not None:
            own.complete_everywhere(told := newest)
        elif op == "die":
            own.close(unlink=False)
            own, incarnation = memory(node), incarnation + 1
            own.claim(newest)
            told, ring = newest, own.make(SLOT, 6)
        listed = readable(node)
        if told is not None:
            assert (0, told.step) in listed
    own.close(unlink=True)
    assert names(node) == []


def test_publishing_and_reading_from_other_threads(node: Path) -> None:
    """A worker publishes while the training thread fills the next window and another rank's process reads."""
    ring = make_ring(node, num_slots=6)
    keep(ring, generation(2), (1, 2))
    for step in range(4, 40, 2):
        marker = seal(ring, generation(step), (step - 1, step))
        worker = threading.Thread(target=ring.publish, args=(generation(step), marker))
        worker.start()
        assert readable(node) in ([(0, step - 2)], [(0, step), (0, step - 2)])
        worker.join()
        ring.complete_everywhere(generation(step))
    assert readable(node) == [(0, 38)]
    ring.close()


def test_what_is_filled_anew_while_it_is_read_is_never_taken_for_what_was_listed(node: Path) -> None:
    """The reader gets every byte as it was captured, or an error that recovery goes on from: gone, or a wrong digest."""
    ring = make_ring(node, num_slots=6)
    keep(ring, generation(2), (1, 2))
    over = threading.Event()
    outcomes: list[str] = []
    reader = threading.Thread(target=lambda: outcomes.extend(_read_until(over, node)))
    reader.start()
    for step in range(4, 400, 2):
        keep(ring, generation(step), (step - 1, step))
        ring.complete_everywhere(generation(step))
    over.set()
    reader.join()
    assert outcomes[-1] == "whole: 398"
    ring.close()


def _read_until(over: threading.Event, node: Path) -> Iterator[str]:
    """What became of every copy that was listed, the last time after `over`."""
    last = False
    while not last:
        last = over.is_set()
        tier = HostTier(RUN, node)
        yield from [_outcome(tier, holding) for holding in tier.holdings()]
        tier.close()


def _outcome(tier: HostTier, holding: Holding) -> str:
    try:
        return f"whole: {check_whole(tier, holding).generation.step}"
    except (KeyMissing, Corrupt) as error:
        return str(error)


def test_the_documents_are_read_back_as_they_were_written(node: Path) -> None:
    """And the marker in it is byte for byte the one that storage would have."""
    ring = make_ring(node)
    marker = seal(ring, generation(3), (2, 3))
    ring.publish(generation(3), marker)
    data = marker_path(ring.path, generation(3)).read_bytes()
    read = MemoryMarker.from_bytes(data, "here")
    assert data.endswith(marker.to_bytes())
    assert read.to_bytes() == data
    assert read.slots == {2: 0, 3: 1}
    out = torch.zeros(LAYOUT.nbytes, dtype=torch.uint8)
    start = RING_HEADER_NBYTES + ring.slot_nbytes
    out.copy_(torch.frombuffer(bytearray(ring.path.read_bytes()[start : start + LAYOUT.nbytes]), dtype=torch.uint8))
    assert bytes(as_memoryview(out)) == bytes(as_memoryview(ring.memory[ring.slot_nbytes :][: LAYOUT.nbytes]))
    ring.close()


def test_names_lead_back_to_what_they_name() -> None:
    """Runs with hyphens and dots, turns, replicas; nothing of another user."""
    for name in (
        MemoryName(tag=RUN, owner=0, kind="ring"),
        MemoryName(tag="a-b.c-7", owner=12, kind="ring", turn=3),
        MemoryName(tag=RUN, owner=3, kind="replica"),
    ):
        assert MemoryName.parse(str(name)) == name
    assert MemoryName.parse(shared_name(RUN, 0).replace(str(os.getuid()), "54321", 1)) is None
    assert MemoryName.parse("moe-ckpt-test.ring") is None


def test_a_ring_whose_name_a_later_life_has_removed_publishes_nothing(node: Path) -> None:
    """A statement without its ring would stay for good."""
    ring = make_ring(node)
    keep(ring, generation(3), (2, 3))
    later = memory(node)
    later.claim(generation(3))
    later.close(unlink=True)
    assert names(node) == []
    seal(ring, generation(6), (5, 6))
    with pytest.raises(CheckpointError, match="has removed"):
        keep(ring, generation(9), (8, 9))
    assert names(node) == []
    assert generation(9) not in ring.published
    ring.close()
