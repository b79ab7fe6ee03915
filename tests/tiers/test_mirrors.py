"""What two nodes have in common is not sent: copies are the owner's bytes all the same, or everything is sent."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from door import as_memoryview
from torch import Tensor

from lightning_moe_ckpt.storage import GenerationId
from lightning_moe_ckpt.tiers import FailureDomain, SealedSegment, place_replicas
from lightning_moe_ckpt.tiers._delta_plan import _without
from lightning_moe_ckpt.tiers._mirrors import MirrorStore, mirroring_of

from ._nodes import Cluster, Rank, cluster, run
from ._segments import LAYOUT, fill, generation, value_of
from .test_peer_worker import Bench, copies

G2, G4, G6, G8 = (generation(step) for step in (2, 4, 6, 8))
RUN = (LAYOUT.spans["w"].offset, LAYOUT.spans["w"].offset + LAYOUT.spans["w"].nbytes)


@pytest.fixture
def two_ranks(tmp_path: Path) -> Iterator[Cluster]:
    """Two nodes of one rank."""
    with cluster(tmp_path, [0, 1]) as nodes:
        yield nodes


class MirrorBench(Bench):
    """Each rank captures what the other one has as `w`; `wrong` of it differs."""

    wrong = 0

    def add(self, name: GenerationId, step: int) -> None:
        other = torch.full((1000,), value_of(name, 1 - self.rank.rank, step))
        other[: self.wrong] += 1
        self.worker.add(name, self.mirroring(fill(self.ring, name, step, rank=self.rank.rank), other))

    def mirroring(self, segment: SealedSegment, other: Tensor) -> SealedSegment:
        return replace(segment, mirrors={1 - self.rank.rank: as_memoryview(other.view(torch.uint8))}, mirrored=RUN)

    def sent(self, name: GenerationId) -> int:
        """Bytes sent of a generation."""
        stream = self.worker._replication.stream
        before = stream.nbytes_sent
        self.whole(name)
        self.step_until(lambda: self.worker.idle)
        self.meet(f"sent {name}")
        return stream.nbytes_sent - before


def test_what_both_have_is_not_sent_and_copies_are_whole(two_ranks: Cluster) -> None:
    def work(rank: Rank) -> tuple[bool, int]:
        bench = MirrorBench(rank)
        sent = bench.sent(G2)
        assert bench.worker.take_failures() == []
        figures = bench.worker.redundancy
        assert figures is not None
        assert figures.nbytes_mirrored == 2 * (RUN[1] - RUN[0])
        assert figures.nbytes_sent == sent
        bench.meet("end")
        bench.close()
        return sent < 2 * (LAYOUT.nbytes - 4000) + 4000, threading.active_count()

    assert run(two_ranks, work) == [(True, 1)] * 2
    for owner in (0, 1):
        assert copies(two_ranks, owner) == [2], "every byte is the owner's"


def test_replicas_that_differ_are_found_out_and_everything_is_sent(two_ranks: Cluster) -> None:
    """Two generations have no copy; from then on there are whole ones."""

    def work(rank: Rank) -> list[bool]:
        bench = MirrorBench(rank)
        bench.wrong = 1
        sizes = [bench.sent(each) for each in (G2, G4, G6)]
        failures = bench.worker.take_failures()
        assert [failure.generation for failure in failures] == [G2, G4]
        assert all("did not arrive as their marker says" in failure.reason for failure in failures)
        bench.meet("end")
        bench.close()
        return [size >= 2 * LAYOUT.nbytes for size in sizes]

    assert run(two_ranks, work) == [[False, False, True]] * 2
    for owner in (0, 1):
        assert copies(two_ranks, owner) == [6]


@pytest.mark.parametrize("lacks", ["mirrors", "room"])
def test_a_holder_without_a_mirror_is_sent_everything(two_ranks: Cluster, lacks: str) -> None:
    class Lacking(MirrorBench):
        def mirroring(self, segment: SealedSegment, other: Tensor) -> SealedSegment:
            found = super().mirroring(segment, other if lacks == "mirrors" else other[:-1].clone())
            return replace(found, mirrors={}) if lacks == "mirrors" and self.rank.rank else found

    def work(rank: Rank) -> int:
        bench = Lacking(rank)
        sent = bench.sent(G2)
        assert bench.worker.take_failures() == []
        bench.meet("end")
        bench.close()
        return sent >= 2 * LAYOUT.nbytes

    assert run(two_ranks, work) == [True, lacks == "room"]
    for owner in (0, 1):
        assert copies(two_ranks, owner) == [2]


def test_a_copy_waits_for_what_is_still_to_be_captured(two_ranks: Cluster) -> None:
    """A holder that is behind, and one that gives the generation up."""

    def work(rank: Rank) -> bool:
        bench = MirrorBench(rank)
        if rank.rank == 1:
            rank.wait_for("ahead")
        bench.whole(G2)
        if rank.rank == 0:
            rank.tell("ahead")
        bench.step_until(lambda: bench.worker.holds(G2) and bench.worker.idle)
        bench.meet("first")
        if rank.rank == 0:
            bench.whole(G4)
        else:
            bench.begin(G4)
            bench.worker.abandon(G4)
        bench.step_until(lambda: bench.worker.idle)
        bench.meet("second")
        bench.meet("end")
        bench.close()
        return True

    assert run(two_ranks, work) == [True] * 2
    assert copies(two_ranks, 0)[0] == 4, "what was given up there came whole"


def test_memory_is_not_given_back_while_it_is_read() -> None:
    """`end` returns when no reader is left; later ones are told that there is nothing."""
    store, out = MirrorStore(), torch.zeros(4000, dtype=torch.uint8)
    store.begin(G2)
    found: list[str | None] = []
    reader = threading.Thread(target=lambda: found.append(store.copy(0, G2, 2, out)))
    reader.start()
    store.end(G2)
    reader.join(10)
    (reason,) = found
    assert reason is not None
    assert "there is none" in reason
    assert store.copy(0, G2, 2, out) is not None
    store.begin(G4)
    waiting = threading.Thread(target=lambda: found.append(store.copy(0, G6, 6, out)))
    waiting.start()
    store.close()
    waiting.join(10)
    assert len(found) == 2


@pytest.mark.parametrize(
    ("nodes", "ep_size"),
    [([0, 0, 1, 1], 1), ([0, 0, 1, 1], 2), ([0, 0, 1, 1], 4), ([0, 1, 2], 3), ([0, 0, 0, 1], 2), ([0, 1, 2, 3], 2)],
)
@pytest.mark.parametrize("replicas", [1, 2])
def test_owners_and_holders_agree_on_what_both_have(nodes: list[int], ep_size: int, replicas: int) -> None:
    """By brute force: a group is mirrored if every holder is in the owner's."""
    if replicas >= len(set(nodes)):
        pytest.skip("fewer nodes")
    world = len(nodes)
    peers = [list(range(first, world, ep_size)) for first in range(ep_size)]
    placement = place_replicas([FailureDomain(node=str(n)) for n in nodes], peers, [100] * world, replicas)
    found = [mirroring_of(placement, rank, peers) for rank in range(world)]
    for owner, holder in product(range(world), repeat=2):
        holds = holder in placement.holders[owner]
        assert (owner in found[holder].owners) == holds
        if holds:
            assert found[holder].owners[owner] == found[owner].among
    alike = [all(each in peers[owner % ep_size] for each in placement.holders[owner]) for owner in range(world)]
    for owner in range(world):
        assert found[owner].among == {owner, *placement.holders[owner]}
        assert found[owner].everything == all(alike)


@pytest.mark.parametrize("hole", [(0, 0), (0, 4), (3, 9), (5, 6), (12, 20), (0, 20), (2, 3)])
def test_what_is_left_of_runs_is_what_is_outside(hole: tuple[int, int]) -> None:
    runs = [(0, 3), (4, 7), (9, 14)]
    wanted = [i for start, stop in runs for i in range(start, stop) if not hole[0] <= i < hole[1]]
    left = list(_without(runs, hole))
    assert [i for start, stop in left for i in range(start, stop)] == wanted
    assert all(start < stop for start, stop in left)
