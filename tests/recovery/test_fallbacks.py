"""Copies that turn out bad or gone while they are restored: mended record by record, or replaced, without a restart."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from door import marker_paths
from stored._segments import LAYOUT

from lightning_moe_ckpt.errors import StorageError
from lightning_moe_ckpt.storage import RING_HEADER_NBYTES, SegmentEntry, Span
from lightning_moe_ckpt.tiers import Holding, shared_name
from lightning_moe_ckpt.tiers._shm import MemoryKind
from recovery._world import Node, World, require, require_part, sources
from recovery.conftest import MakeWorld

NEW, OLD = 20, 10
W, M, V = (LAYOUT.spans[name] for name in "wmv")
ALL_NBYTES = V.offset + V.nbytes - W.offset
"""Of all records, in one run."""
PLACES = {"first record": W.offset + 5, "record": M.offset + 8197}
BETWEEN = {"length": 3, "header": 100, "pad": M.offset - 1, "end": LAYOUT.nbytes - 1}
"""What no record needs: where everything lies is said by the marker too."""


def flip(path: Path, position: int) -> None:
    """Of a segment in storage, or the first one in memory; in place, as a bit flips."""
    if path.suffix in {".ring", ".replica"}:
        position += RING_HEADER_NBYTES
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 4]))


def segment(world: World, rank: int, step: int = NEW) -> SegmentEntry:
    return world.part(step, rank)[0].segments[0]


def in_memory(world: World, node: int, rank: int) -> Path:
    return world.tiers[world.nodes[node]].file_of(rank)


@pytest.fixture
def full(world: World) -> World:
    """The newest step of both ranks is in every place, an older one in storage."""
    world.commit(OLD)
    world.commit(NEW)
    for rank in range(2):
        for node in world.nodes:
            world.keep(NEW, rank, node)
    return world


@pytest.mark.parametrize("position", PLACES.values(), ids=list(PLACES))
def test_a_flipped_bit_in_own_memory_is_mended_from_the_peer(full: World, position: int) -> None:
    """Wherever in a record the bit is."""
    flip(in_memory(full, 0, 0), position)
    require(full, NEW, [{"host", "peer"}, {"host"}])


@pytest.mark.parametrize("position", BETWEEN.values(), ids=list(BETWEEN))
def test_a_flipped_bit_outside_of_records_does_no_harm(world: World, position: int) -> None:
    """Be it in the only copy that there is."""
    for rank in range(2):
        world.keep(NEW, rank, world.nodes[rank])
    flip(in_memory(world, 0, 0), position)
    require(world, NEW, [{"host"}, {"host"}])


@pytest.mark.parametrize("position", PLACES.values(), ids=list(PLACES))
def test_a_flipped_bit_in_memory_is_mended_from_storage(world: World, position: int) -> None:
    """The only copy in memory is bad, storage has the record."""
    world.commit(NEW)
    for rank in range(2):
        world.keep(NEW, rank, world.nodes[rank])
    flip(in_memory(world, 1, 1), position)
    require(world, NEW, [{"host"}, {"host", "storage"}])


@pytest.mark.parametrize("position", PLACES.values(), ids=list(PLACES))
def test_a_flipped_bit_in_storage_is_mended_from_memory(world: World, position: int) -> None:
    """Own memory was lost, the peer's copy is bad in one place and storage in another."""
    world.commit(NEW)
    for rank in range(2):
        world.keep(NEW, rank, world.nodes[1])
    elsewhere = V.offset if position != V.offset else W.offset
    flip(in_memory(world, 1, 0), elsewhere)
    flip(world.file_in_storage(segment(world, 0)), position)
    require(world, NEW, [{"peer", "storage"}, {"host"}])


@pytest.mark.parametrize("bad", ["ring", "replica"])
@pytest.mark.parametrize("node", [0, 1])
def test_of_two_copies_on_one_node_either_may_be_bad(world: World, bad: MemoryKind, node: int) -> None:
    """On the owner's node, and on that of another rank."""
    world.keep(NEW, 1, world.nodes[1])
    tier = world.tiers[world.nodes[node]]
    kinds: tuple[MemoryKind, MemoryKind] = ("ring", "replica")
    for kind in kinds:
        tier.keep(*world.part(NEW, 0), kind)
    flip(tier.directory / shared_name(tier.run_id, 0, bad), W.offset)
    require(world, NEW, [{"peer" if node else "host"}, {"host"}])


def test_only_the_bad_record_is_read_again(full: World) -> None:
    """The bytes that come from elsewhere are those of one record, not the segment."""
    flip(in_memory(full, 0, 0), W.offset)
    found = full.restore()[0]
    assert found is not None
    nbytes = {copy.source: count for copy, count in found[1].nbytes.items()}
    assert nbytes == {"host": 2 * ALL_NBYTES, "peer": W.nbytes}


def test_two_bad_records_of_one_segment_may_come_from_two_places(full: World) -> None:
    """Each is bad in two of the three copies, and in another one good."""
    places = [in_memory(full, 0, 0), in_memory(full, 1, 0), full.file_in_storage(segment(full, 0))]
    for good, span in ((1, W), (2, M), (0, V)):
        for index, path in enumerate(places):
            if index != good:
                flip(path, span.offset)
    require(full, NEW, [{"host", "peer", "storage"}, {"host"}])


@pytest.mark.parametrize("span", [W, M, V], ids="wmv")
def test_with_every_copy_of_a_record_bad_the_older_generation_is_used(full: World, span: Span) -> None:
    """All ranks go back together, and the reason names the record."""
    for path in (in_memory(full, 0, 0), in_memory(full, 1, 0), full.file_in_storage(segment(full, 0))):
        flip(path, span.offset + 1)
    require(full, OLD, [{"storage"}, {"storage"}])
    name = next(name for name, each in LAYOUT.spans.items() if each is span)
    assert full.reasons[0] == full.reasons[1]
    assert len(full.reasons[0]) == 1
    key = segment(full, 0).key
    places = ", ".join(f"{place}: {key} (its digest differs)" for place in ("host", "peer (rank 1)", "storage"))
    assert f"{name} is nowhere as it was written: {places}" in full.reasons[0][0]


def test_without_anything_good_nothing_is_restored(world: World) -> None:
    """And the reasons are there, on every rank."""
    world.commit(NEW)
    flip(world.file_in_storage(segment(world, 1)), W.offset)
    assert world.restore() == [None, None]
    assert world.reasons[0] == world.reasons[1] != []


class Vanishing(Node):
    """Cannot be read any more after so many reads: between the listing and the end of the restore."""

    def __init__(self, node: Node, *, after: int) -> None:
        super().__init__(node.run_id, node.directory)
        self._left = after

    def read_into(self, holding: Holding, entry: SegmentEntry, offset: int, out: memoryview) -> None:
        self._left -= 1
        if self._left < 0:
            raise StorageError("the node went away")
        super().read_into(holding, entry, offset, out)


@pytest.mark.parametrize("after", range(6))
@pytest.mark.parametrize("victim", ["own", "peer"])
def test_a_copy_that_goes_away_during_the_restore_is_replaced(full: World, after: int, victim: str) -> None:
    """At any read: of the owner, or while sending to the owner that lost its own."""
    node = full.nodes[0]
    if victim == "peer":
        for rank in range(2):
            full.tiers[full.nodes[1]].lose(rank)
    full.tiers[node] = Vanishing(full.tiers[node], after=after)
    for rank, found in enumerate(full.restore(message_nbytes=9000)):
        assert found is not None
        require_part(full, NEW, rank, found)


def test_everything_in_memory_may_go_away(full: World, caplog: pytest.LogCaptureFixture) -> None:
    """Then storage has it, and the log says why."""
    for node in full.nodes:
        full.tiers[node] = Vanishing(full.tiers[node], after=0)
    with caplog.at_level(logging.ERROR):
        require(full, NEW, [{"host", "peer", "storage"}, {"host", "peer", "storage"}])
    assert "host: the node went away; another copy is tried" in caplog.text
    assert "peer (rank 1): the node went away (on rank 1); another copy is tried" in caplog.text


class Ambushed(Node):
    """The marker of a rank goes bad after it was listed."""

    def __init__(self, node: Node, *, rank: int) -> None:
        super().__init__(node.run_id, node.directory)
        self._rank = rank

    def holdings(self) -> list[Holding]:
        found = super().holdings()
        for path in marker_paths(self.file_of(self._rank)):
            flip(path, 600)
        return found


@pytest.mark.parametrize(("bad", "expected"), [([0], {"host", "peer"}), ([0, 1], {"host", "peer", "storage"})])
def test_a_marker_that_goes_bad_costs_its_copy(full: World, bad: list[int], expected: set[str]) -> None:
    """The marker comes from elsewhere; without it nothing says where in memory the segments lie, so they do too."""
    for node in bad:
        full.tiers[full.nodes[node]] = Ambushed(full.tiers[full.nodes[node]], rank=0)
    require(full, NEW, [expected, {"host"}])


def test_a_marker_that_was_not_committed_is_refused(world: World) -> None:
    """Another incarnation's bytes under the name of a committed generation: the manifest decides."""
    world.commit(NEW)
    for rank in range(2):
        world.keep(NEW, rank, world.nodes[rank])
    marker, segments = world.part(NEW, 0)
    tier = world.tiers[world.nodes[0]]
    spoilt = bytearray(segments[0])
    spoilt[W.offset] ^= 1
    world.keep_other_bytes(tier, marker, [bytes(spoilt), segments[1]])
    require(world, NEW, [{"host", "storage"}, {"host"}])


def test_markers_that_contradict_each_other_cost_the_version(world: World) -> None:
    """Ranks whose windows do not match cannot go on together."""
    world.commit(OLD)
    world.keep(NEW, 0, world.nodes[0])
    world.keep(NEW, 1, world.nodes[1], window=1)
    require(world, OLD, [{"storage"}, {"storage"}])
    assert world.reasons[0] == ["rank 1: its marker is not of the same generation as rank 0's"]


def test_several_peers_send_at_once(make_world: MakeWorld) -> None:
    """A replaced node pulls stripes from every holder, and each sends about as much."""
    world = make_world("a", "b", "c", "d", "d")
    for rank in range(5):
        for node in set(world.nodes[1:]):
            world.keep(NEW, rank, node)
    require(world, NEW, [{"peer"}, *[{"host"}] * 4])
    sent = {pair[0]: nbytes for pair, nbytes in world.wire.nbytes.items() if pair[1] == 0}
    assert sorted(sent) == [1, 2, 3], "one reader of each node"
    assert max(sent.values()) < 2 * LAYOUT.nbytes / 2
    assert all(pair[1] == 0 for pair in world.wire.nbytes)


def test_a_stripe_with_a_flipped_bit_is_mended_from_another_peer(make_world: MakeWorld) -> None:
    """A record that straddles two peers accuses neither of them before one supplied all of it."""
    world = make_world("a", "b", "c")
    for rank in range(3):
        for node in world.nodes[1:]:
            world.keep(NEW, rank, node)
    for position in range(W.offset, LAYOUT.nbytes, 1024):
        flip(in_memory(world, 1, 0), position)
    require(world, NEW, [{"peer"}, {"host"}, {"host"}])


@pytest.mark.parametrize("message_nbytes", [1000, 4096, 10**6])
def test_nodes_that_swapped_ranks_send_both_ways_at_once(world: World, message_nbytes: int) -> None:
    """Whatever the chunk, two ranks that send to each other do not wait in a circle."""
    for rank in range(2):
        world.keep(NEW, rank, world.nodes[1 - rank])
    require(world, NEW, [{"peer"}, {"peer"}], message_nbytes=message_nbytes)


def test_every_segment_is_read_once_by_one_rank(world: World) -> None:
    """What ranks share has one writer, so nobody reads what another rank reads."""
    for rank in range(2):
        for node in world.nodes:
            world.keep(NEW, rank, node)
    require(world, NEW, [{"host"}, {"host"}])
    reads = [key for tier in world.tiers.values() for key in tier.reads]
    assert sorted(reads) == sorted(entry.key for rank in range(2) for entry in world.part(NEW, rank)[0].segments)


def test_sources_of_a_part_are_its_copies(full: World) -> None:
    """Bytes add up to the segments when nothing was bad."""
    for found in full.restore():
        assert found is not None
        assert sources(found[1]) == {"host"}
        assert sum(found[1].nbytes.values()) == 2 * ALL_NBYTES
