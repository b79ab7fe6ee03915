"""The worker of the peer tier by itself: two real processes on two nodes, each with a ring, keep each other's copies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from door import PeerWorker, Replication

from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.parallel import ParallelGroups
from lightning_moe_ckpt.policies import Chains
from lightning_moe_ckpt.storage import GenerationId, SlotClass
from lightning_moe_ckpt.tiers import Markers, SegmentRing, WriteRequest, shared_name

from ._networks import INTERFACE, two_networks
from ._nodes import Cluster, Rank, cluster, run
from ._segments import LAYOUT, RUN, fill, generation, readable

WINDOW = 2
SLOTS = 8
LINK_NBYTES = -(-LAYOUT.nbytes // 4096) * 4096
G2, G4, G6 = (generation(step) for step in (2, 4, 6))


@pytest.fixture
def two_ranks(tmp_path: Path) -> Iterator[Cluster]:
    """Two nodes of one rank."""
    with cluster(tmp_path, [0, 1]) as nodes:
        yield nodes


@pytest.fixture
def two_networked_ranks(tmp_path: Path) -> Iterator[Cluster]:
    """Each node has a network of its own too."""
    with two_networks() as networks, cluster(tmp_path, [0, 1]) as nodes:
        yield replace(nodes, networks=networks)


class Bench:
    """The worker of one rank, which keeps copies of the other one, and what it gave back."""

    def __init__(self, rank: Rank, *, resumed: GenerationId | None = None, chains: Chains | None = None) -> None:
        self.rank = rank
        self.released: list[GenerationId] = []
        replication = Replication(
            rank.group(),
            run_id=RUN,
            tag=RUN,
            url="memory://peers",
            holders=[1 - rank.rank],
            owners=[1 - rank.rank],
            max_chunk=1000,
            resumed=resumed,
            chained=chains is not None,
        )
        groups = ParallelGroups(rank=rank.rank, world_size=2, groups={"control": rank.group()})
        markers = Markers(run_id=RUN, rank=rank.rank, world_size=2)
        self.worker = PeerWorker(replication, markers, resumed=resumed, chains=chains)
        name, small = (
            shared_name(RUN, rank.rank),
            [] if chains is None else [SlotClass(LINK_NBYTES, chains.links_kept(3) - 2)],
        )
        self.ring = SegmentRing.create(name, LAYOUT.nbytes, SLOTS, rank.cluster.shared_memory(rank.rank), small=small)
        self.worker.planned(Exchange(groups), self.ring, [LAYOUT.nbytes] * (WINDOW if chains is None else 1))

    def begin(self, name: GenerationId) -> None:
        self.ring.begin_window(name)
        self.ring.pin(name)
        self.worker.begin(
            WriteRequest(
                generation=name, plan_hash="plan", plan_json="{}", num_segments=WINDOW, on_released=self._release
            )
        )

    def add(self, name: GenerationId, step: int) -> None:
        """Seal a segment, and hand it over."""
        self.worker.add(name, fill(self.ring, name, step, rank=self.rank.rank))

    def link(self, name: GenerationId, *, base: GenerationId | None = None) -> None:
        """A generation of one boundary: a base, or a difference that follows on one."""
        is_link = base is not None
        self.ring.begin_window(name, is_link=is_link)
        self.ring.pin(name)
        follows = () if base is None else (base,)
        self.worker.begin(
            WriteRequest(
                generation=name,
                plan_hash="plan",
                plan_json="{}",
                num_segments=1,
                on_released=self._release,
                follows=follows,
            )
        )
        nbytes = LINK_NBYTES if is_link else 0
        self.worker.add(name, fill(self.ring, name, name.step, rank=self.rank.rank, nbytes=nbytes))
        self.ring.finish_window(name)

    def whole(self, name: GenerationId) -> None:
        """A generation from beginning to end, though not its steps."""
        self.begin(name)
        for step in (name.step - 1, name.step):
            self.add(name, step)
        self.ring.finish_window(name)

    def step_until(self, happened: Callable[[], bool]) -> None:
        """Training takes steps."""

        def stepped() -> bool:
            self.worker.stepped(WINDOW)
            return happened()

        self.rank.wait_for(stepped)

    def meet(self, where: str) -> None:
        """Wait for the other rank."""
        self.rank.tell(f"{where}-{self.rank.rank}")
        self.rank.wait_for(f"{where}-{1 - self.rank.rank}")

    def close(self, *, unlink: bool = False) -> None:
        self.worker.close()
        for memory in self.worker.memories:
            memory.close(unlink=unlink)
        self.ring.close(unlink=True)

    def _release(self, name: GenerationId) -> None:
        self.ring.unpin(name)
        self.released.append(name)


def copies(nodes: Cluster, owner: int) -> list[int]:
    """Steps of which the other node has a copy of `owner`, newest first; every byte is looked at."""
    return [step for holder, step in readable(nodes.nodes[1 - owner]) if holder == owner]


def test_generations_are_copied_at_the_pace_of_steps_and_keep_their_slots(two_ranks: Cluster) -> None:
    """Nothing goes without steps; what is complete here is held until a newer one is complete on all ranks."""

    def work(rank: Rank) -> tuple[bool, list[GenerationId], list[GenerationId], int]:
        bench = Bench(rank)
        bench.whole(G2)
        sent = bench.worker._replication.stream
        rank.wait_for(lambda: sent.nbytes_sent >= LAYOUT.nbytes)
        before = bench.worker.holds(G2)  # its second half has no step yet
        bench.step_until(lambda: bench.worker.holds(G2) and bench.worker.idle)
        bench.whole(G4)
        bench.step_until(lambda: bench.worker.holds(G4) and bench.worker.idle)
        held = list(bench.released)
        bench.meet("both")
        bench.worker.complete_everywhere(G4)
        given_back = list(bench.released)
        assert bench.worker.take_failures() == []
        assert sum(memory.nbytes for memory in bench.worker.memories) > 2 * WINDOW * LAYOUT.nbytes
        bench.meet("end")
        bench.close()
        return before, held, given_back, threading.active_count()

    # G2 was complete here, but not known to be so everywhere, when G4 began: it was of no use.
    assert run(two_ranks, work) == [(False, [G2], [G2], 1)] * 2
    for owner in (0, 1):
        assert copies(two_ranks, owner)[0] == 4


def test_what_is_complete_everywhere_stays_while_the_next_one_travels(two_ranks: Cluster) -> None:
    """Its slots here and its copy there: a node that dies meanwhile takes nothing that all need."""

    def work(rank: Rank) -> tuple[list[GenerationId], list[GenerationId]]:
        bench = Bench(rank)
        bench.whole(G2)
        bench.step_until(lambda: bench.worker.holds(G2) and bench.worker.idle)
        bench.meet("first")
        bench.worker.complete_everywhere(G2)
        bench.whole(G4)
        bench.step_until(lambda: bench.worker.holds(G4) and bench.worker.idle)
        while_travelling = list(bench.released)
        bench.meet("second")
        assert copies(rank.cluster, rank.rank) == [4, 2]
        bench.meet("looked")
        bench.worker.complete_everywhere(G4)
        bench.whole(G6)  # holders hear of it with the next one
        bench.step_until(lambda: bench.worker.holds(G6))
        bench.meet("end")
        after = list(bench.released)
        bench.close()
        return while_travelling, after

    assert run(two_ranks, work) == [([], [G2])] * 2
    for owner in (0, 1):
        assert copies(two_ranks, owner) == [6, 4]


def test_copies_cross_from_one_network_to_another(two_networked_ranks: Cluster) -> None:
    """Nodes that share neither memory nor a network stack, but for the cable between them."""

    def work(rank: Rank) -> bool:
        bench = Bench(rank)
        bench.whole(G2)
        bench.step_until(lambda: bench.worker.holds(G2))
        assert bench.worker.take_failures() == []
        bench.meet("end")
        bench.close()
        return INTERFACE in Path("/proc/self/net/dev").read_text()

    assert run(two_networked_ranks, work) == [True] * 2
    for owner in (0, 1):
        assert copies(two_networked_ranks, owner) == [2]


def test_flush_sends_what_no_step_would_have(two_ranks: Cluster) -> None:
    """Somebody needs the slots: the transfer ends though no step comes any more."""

    def work(rank: Rank) -> tuple[bool, bool]:
        bench = Bench(rank)
        bench.worker.stepped(1000)  # generations are so many steps apart
        bench.whole(G2)
        early = bench.worker.holds(G2)
        bench.worker.drain(30)
        flushed = bench.worker.holds(G2)
        bench.meet("end")
        bench.close()
        return early, flushed

    assert run(two_ranks, work) == [(False, True)] * 2


def test_a_holder_that_dies_is_a_failure_and_nothing_else(two_ranks: Cluster) -> None:
    """Training hears of it from `take_failures`; slots come back, the end does not hang, no thread is left."""

    def work(rank: Rank) -> tuple[list[GenerationId], int]:
        bench = Bench(rank)
        bench.whole(G2)
        bench.step_until(lambda: bench.worker.holds(G2) and bench.worker.idle)
        bench.meet("first")
        bench.worker.complete_everywhere(G2)
        if rank.rank == 1:
            rank.die()
        rank.wait_for_death(1)
        bench.whole(G4)
        bench.step_until(lambda: bench.worker.idle)
        (failure,) = bench.worker.take_failures()
        assert failure.generation == G4
        assert "rank 1 is gone" in failure.reason
        assert not bench.worker.holds(G4)
        released = list(bench.released)
        bench.close()
        return released, threading.active_count()

    # What both had stays for the next incarnation.
    assert run(two_ranks, work) == [([G4], 1), -9]
    assert copies(two_ranks, 0) == [2]


def test_closing_in_the_middle_of_a_transfer_ends_it(two_ranks: Cluster) -> None:
    """No step will come; nothing half is found, and what was whole stays for the next start."""

    def work(rank: Rank) -> tuple[list[GenerationId], int]:
        bench = Bench(rank)
        bench.whole(G2)
        bench.step_until(lambda: bench.worker.holds(G2) and bench.worker.idle)
        bench.meet("first")
        bench.worker.complete_everywhere(G2)
        bench.begin(G4)
        bench.add(G4, 3)
        bench.step_until(lambda: bench.worker._replication.stream.nbytes_sent > WINDOW * LAYOUT.nbytes)
        bench.meet("middle")
        bench.close()
        return bench.released, threading.active_count()

    assert run(two_ranks, work) == [([G4], 1)] * 2
    for owner in (0, 1):
        assert copies(two_ranks, owner) == [2]


def test_differences_stay_with_the_base_that_they_follow_on(two_ranks: Cluster) -> None:
    """One by one behind it, until the next base is complete everywhere; of many the newest."""

    def work(rank: Rank) -> None:
        bench = Bench(rank, chains=Chains(every_n_steps=20, batch=2))
        first, second, third, fourth = (generation(step) for step in (1, 12, 14, 16))
        bench.link(first)
        for step in range(2, 12):
            bench.ring.make_room(LINK_NBYTES, generation(step - 1))
            bench.link(generation(step), base=first)
            bench.step_until(lambda step=step: bench.worker.holds(generation(step)))  # type: ignore[misc]
        assert bench.released == [generation(step) for step in range(2, 12)]
        assert copies(two_ranks, rank.rank) == [*range(11, 5, -1), 1], (
            "there is room for two more than their owner keeps"
        )
        bench.worker.complete_everywhere(generation(11))

        bench.link(second)
        bench.step_until(lambda: bench.worker.holds(second))
        assert copies(two_ranks, rank.rank) == [12, *range(11, 5, -1), 1], "it is not known yet who has the new one"
        bench.worker.complete_everywhere(second)
        assert bench.released[10:] == [first]
        bench.ring.make_room(LINK_NBYTES, second)
        bench.link(generation(13), base=second)
        bench.step_until(lambda: bench.worker.holds(generation(13)))
        assert copies(two_ranks, rank.rank) == [13, 12]

        bench.link(third)  # some rank fails to copy it, and all hear of that
        bench.step_until(lambda: bench.worker.holds(third))
        bench.worker.give_up(third)
        bench.worker.complete_everywhere(generation(15))
        bench.link(fourth)
        assert third in bench.released
        bench.step_until(lambda: bench.worker.holds(fourth))
        assert copies(two_ranks, rank.rank) == [16, 13, 12]
        bench.meet("end")
        bench.close(unlink=True)

    run(two_ranks, work)
