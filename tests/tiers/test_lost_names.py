"""Memory whose names something has removed, and room that is not there: what is made again, and what stays as it is."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from door import SharedFile

from lightning_moe_ckpt.errors import CheckpointError, ConfigurationError
from lightning_moe_ckpt.storage import RankMarker, SegmentEntry, segment_key
from lightning_moe_ckpt.tiers import Markers, RankMemory, SegmentRing, shared_directory
from lightning_moe_ckpt.tiers._peer_receiver import ReplicaStore
from tiers._segments import LAYOUT, RUN, Child, generation, keep, readable, seal

SLOT = LAYOUT.nbytes
G3, G6, G9 = (generation(step) for step in (3, 6, 9))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Path]:
    """Shared memory of one node, in a directory of its own."""
    directory = shared_directory() / f"moe-ckpt-test-{tmp_path.parent.name}-{tmp_path.name}"
    directory.mkdir()
    yield directory
    clean(directory)
    directory.rmdir()


def clean(node: Path) -> None:
    """As what tidies up does."""
    for path in node.iterdir():
        path.unlink(missing_ok=True)


def memory(node: Path) -> RankMemory:
    return RankMemory(RUN, 0, url="file:///run", directory=node)


def test_a_ring_that_lost_its_name_is_made_again(node: Path) -> None:
    """As large as it was; who reads from the old one keeps its bytes, and the new one is what a later incarnation finds."""
    own = memory(node)
    ring = own.make(SLOT, 9, keep=2)
    keep(ring, G3, (2, 3))
    ring.pin(G3)
    seen = ring.view(G3, 3)
    assert seen is not None
    before = seen.clone()
    named = ring.is_named
    clean(node)
    assert (named, ring.is_named) == (True, False)
    with pytest.raises(CheckpointError, match="has removed"):
        keep(ring, G6, (5, 6))
    renewed = own.renew()
    assert (renewed.slot_nbytes, renewed.num_slots, renewed.keep) == (ring.slot_nbytes, 9, 2)
    assert torch.equal(seen, before)
    ring.unpin(G3)
    assert own.published == []
    keep(renewed, G9, (8, 9))
    assert readable(node) == [(0, 9)]
    own.close(unlink=True)
    assert [*node.iterdir()] == []


def test_a_name_that_leads_to_another_file_is_lost_too(node: Path) -> None:
    """Somebody has put something in its place, which stays."""
    own = memory(node)
    ring = own.make(SLOT, 9)
    clean(node)
    ring.path.write_bytes(b"not a ring")
    assert not ring.is_named
    renewed = own.renew()
    assert renewed.path != ring.path
    keep(renewed, G3, (2, 3))
    assert readable(node) == [(0, 3)]
    own.close(unlink=True)


def test_a_process_that_was_replaced_makes_no_memory_again(node: Path) -> None:
    """A later start of the run has removed the name and lives: two would be found by the next one."""
    own = memory(node)
    own.make(SLOT, 9)
    clean(node)
    successor = Child(lambda: memory(node).make(SLOT, 9))
    try:
        with pytest.raises(ConfigurationError, match="belongs to another process that lives"):
            own.renew()
    finally:
        successor.kill()
    assert own.renew().is_named, "its successor is dead"
    own.close(unlink=True)


def test_without_room_memory_is_made_again_later(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call tries it; in between nothing is found and nothing is left behind."""
    own = memory(node)
    own.make(SLOT, 9)
    clean(node)
    with monkeypatch.context() as patch:
        patch.setattr(SharedFile, "create", refuse)
        for _ in range(3):
            with pytest.raises(ConfigurationError, match="no room"):
                own.renew()
    assert [*node.iterdir()] == []
    assert own.renew().num_slots == 9
    own.close(unlink=True)


def test_a_directory_that_is_gone_is_made_again_with_the_memory(node: Path) -> None:
    """What tidies up may remove all of it."""
    own = memory(node)
    keep(own.make(SLOT, 9), G3, (2, 3))
    shutil.rmtree(node)
    keep(own.renew(), G6, (5, 6))
    assert readable(node) == [(0, 6)]
    own.close(unlink=True)


def test_a_directory_that_cannot_be_made_again_ends_nothing(node: Path) -> None:
    """Each attempt says where memory cannot be made; the end of an incarnation leaves nothing, and raises nothing."""
    own = memory(node)
    keep(own.make(SLOT, 9), G3, (2, 3))
    shutil.rmtree(node)
    node.write_bytes(b"in its place")
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=r"cannot be made in .*: Not a directory. Make that directory"):
            own.renew()
    node.unlink()
    own.close(unlink=True)
    with pytest.raises(ConfigurationError, match=r"cannot be made in .*: No such file or directory"):
        memory(node).make(SLOT, 9)
    node.mkdir()


def refuse(*_: object) -> None:
    raise ConfigurationError("no room")


def test_a_larger_ring_that_finds_no_room_leaves_one_that_can_be_made_again(
    node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory was given up for a second attempt: the one in use has no name then, and everybody can see it."""
    own = memory(node)
    ring = own.make(SLOT, 9)
    keep(ring, G3, (2, 3))
    with monkeypatch.context() as patch:
        patch.setattr(SharedFile, "create", refuse)
        with pytest.raises(ConfigurationError, match="no room"):
            own.make(2 * SLOT, 9)
    assert own.ring is ring
    assert not ring.is_named
    assert own.renew().slot_nbytes == ring.slot_nbytes
    assert own.nbytes == own.renew().nbytes, "nothing is counted twice"
    own.close(unlink=True)


def test_what_one_rank_gave_up_is_free_when_nobody_reads_it(node: Path) -> None:
    """Until then its statement stays too: copies of what other ranks lack may make it whole."""
    own = memory(node)
    ring = own.make(SLOT, 4)
    keep(ring, G3, (2, 3))
    seal(ring, G6, (5, 6))
    ring.pin(G3)
    assert not ring.can_begin([SLOT] * 2)
    own.give_up(G6)
    own.give_up(G6)
    own.give_up(G3)
    assert ring.free_slots == 2
    assert readable(node) == [(0, 3)]
    ring.unpin(G3)
    assert ring.free_slots == 4
    assert readable(node) == []
    own.close(unlink=True)


# -- copies for others


def copy(store: ReplicaStore, step: int, *, kept: int | None = None) -> None:
    """Take a generation of one segment in."""
    name = generation(step)
    store.begin(name, keep=None if kept is None else generation(kept), sizes=[SLOT])
    store.slot(step)
    store.publish(marker(step))


def marker(step: int) -> RankMarker:
    name = generation(step)
    entry = SegmentEntry(step=step, key=segment_key(name, 4, step), nbytes=SLOT, digest="")
    return Markers(run_id=RUN, rank=4, world_size=5).of(name, [entry], plan_hash="plan", plan_json="{}")


def test_copies_whose_names_are_gone_are_taken_in_again(node: Path) -> None:
    """The one that comes then fails, and the next one is kept."""
    own = RankMemory(RUN, 4, url="file:///run", directory=node, kind="replica")
    store = ReplicaStore(own)
    store.allocate([SLOT])
    copy(store, 1)
    store.begin(generation(2), keep=generation(1), sizes=[SLOT])
    clean(node)
    store.slot(2)
    with pytest.raises(CheckpointError, match="has removed"):
        store.publish(marker(2))
    copy(store, 3, kept=1)
    assert own.published == [generation(3)]
    store.memory.close(unlink=True)


def test_copies_that_could_not_be_stated_take_no_memory(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the reason: the same ring has room for all that follow."""
    own = RankMemory(RUN, 4, url="file:///run", directory=node, kind="replica")
    store = ReplicaStore(own)
    store.allocate([SLOT])
    copy(store, 1)
    for step, error in enumerate((OSError, CheckpointError, OSError, CheckpointError), 2):
        with monkeypatch.context() as patch:
            patch.setattr(SegmentRing, "_expect_name", fail_with(error))
            with pytest.raises(error, match="full"):
                copy(store, step, kept=1)
    ring = own.ring
    copy(store, 6, kept=1)
    assert own.ring is ring
    assert own.published == [generation(1), generation(6)]
    store.memory.close(unlink=True)


def fail_with(error: type[Exception]) -> object:
    def fail(*_: object) -> None:
        raise error("full")

    return fail
