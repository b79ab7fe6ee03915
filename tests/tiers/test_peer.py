"""Copies on other nodes: whole or not there, at the pace of the steps, whoever dies meanwhile. Real processes on gloo."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_moe_ckpt.storage import RING_HEADER_NBYTES, GenerationId, RankMarker, SegmentEntry, digest_of
from lightning_moe_ckpt.storage._names import segment_key
from lightning_moe_ckpt.tiers._peer import Replication
from lightning_moe_ckpt.tiers._peer_stream import NotReplicated
from lightning_moe_ckpt.tiers._ring import SegmentRing

from ._nodes import Cluster, Rank, cluster, run

RUN = "0123456789abcdef"
WINDOW = 3
NBYTES = 300_000
SLOT = 303_104
"""Whole pages."""
TWO_NODES = {0: (2,), 1: (3,), 2: (0,), 3: (1,)}
"""Holders of each of four ranks, two on each node."""
THREE_NODES = {0: (1,), 1: (2,), 2: (0,)}
"""A ring."""


@pytest.fixture
def four_ranks(tmp_path: Path) -> Iterator[Cluster]:
    """Two nodes of two ranks."""
    with cluster(tmp_path, [0, 0, 1, 1]) as nodes:
        yield nodes


@pytest.fixture
def three_ranks(tmp_path: Path) -> Iterator[Cluster]:
    """Three nodes of one rank."""
    with cluster(tmp_path, [0, 1, 2]) as nodes:
        yield nodes


def segment(rank: int, generation: GenerationId, index: int) -> Tensor:
    """What a rank has at a boundary: bytes of no other rank, generation or boundary."""
    seed = torch.Generator().manual_seed(rank * 10**6 + generation.step * 10**3 + generation.epoch * 10**2 + index)
    return torch.randint(0, 256, (NBYTES - 1000 * index,), dtype=torch.uint8, generator=seed)


def segments(rank: int, generation: GenerationId) -> dict[int, Tensor]:
    """A whole window, by step."""
    return {generation.step - WINDOW + 1 + index: segment(rank, generation, index) for index in range(WINDOW)}


def marker_of(rank: int, generation: GenerationId, window: Mapping[int, Tensor], world_size: int) -> bytes:
    """As the rank would store it."""
    entries = tuple(
        SegmentEntry(
            step=step,
            key=segment_key(generation, rank, step),
            nbytes=each.numel(),
            digest=digest_of(each.numpy().data),
        )
        for step, each in window.items()
    )
    return RankMarker(
        run_id=RUN, rank=rank, world_size=world_size, generation=generation, plan_hash="plan", segments=entries
    ).to_bytes()


def replication(rank: Rank, holders: Mapping[int, Sequence[int]], *, max_chunk: int = 100_000) -> Replication:
    """A started one, with memory for two windows of each owner."""
    made = Replication(
        rank.group(),
        run_id=RUN,
        holders=holders[rank.rank],
        owners=[owner for owner, to in holders.items() if rank.rank in to],
        max_chunk=max_chunk,
        publish=publish,
    )
    made.allocate([NBYTES] * rank.world_size, WINDOW)
    made.start()
    return made


def send(
    rank: Rank,
    made: Replication,
    generation: GenerationId,
    *,
    keep: GenerationId | None = None,
    paced: bool = False,
) -> None:
    """A whole generation of this rank."""
    window = segments(rank.rank, generation)
    made.pacer.begin(num_segments=WINDOW, num_steps=WINDOW)
    if not paced:
        made.pacer.hurry()
    made.stream.begin(generation, keep=keep, num_segments=WINDOW, slot_nbytes=NBYTES)
    for step, each in window.items():
        made.pacer.expect(each.numel())
        assert made.stream.send(step, each, lambda: True)
    made.stream.finish(marker_of(rank.rank, generation, window, rank.world_size))


def publish(ring: SegmentRing, generation: GenerationId, marker: bytes) -> None:
    path = ring.path.with_name(f"{ring.path.name}.{generation.step}.e{generation.epoch}.done")
    path.with_suffix(".tmp").write_bytes(marker)
    path.with_suffix(".tmp").rename(path)


G5, G8 = GenerationId(step=5, epoch=0), GenerationId(step=8, epoch=0)


def test_copies_are_the_owners_bytes_and_their_markers_verify(four_ranks: Cluster) -> None:
    """Four ranks on two nodes send two generations each; every copy is there, bit for bit, with its marker."""

    def work(rank: Rank) -> list[int]:
        made = replication(rank, TWO_NODES)
        send(rank, made, G5)
        send(rank, made, G8, keep=G5)
        made.stream.bye()
        made.close(30, unlink=False)
        return [threading.active_count()]

    assert run(four_ranks, work) == [[1]] * 4
    for owner, (holder,) in TWO_NODES.items():
        node = four_ranks.shared_memory(holder)
        size = RING_HEADER_NBYTES + 2 * WINDOW * SLOT
        kept = torch.from_file(str(next(node.glob(f"*-{owner}.replica"))), size=size, dtype=torch.uint8)
        slots = torch.split(kept[RING_HEADER_NBYTES:], SLOT)
        for generation in (G5, G8):
            marker = next(node.glob(f"*-{owner}.replica.{generation.step}.e0.done")).read_bytes()
            assert marker == marker_of(owner, generation, segments(owner, generation), 4)
            for each in segments(owner, generation).values():
                assert any(torch.equal(slot[: each.numel()], each) for slot in slots)


def published(nodes: Cluster, owner: int, generation: GenerationId) -> bool:
    """Whether some node has a whole copy, by its marker and by its bytes."""
    for path in nodes.files(f"-{owner}.replica.{generation.step}.e{generation.epoch}.done"):
        ring = path.with_name(path.name.split(".replica")[0] + ".replica")
        kept = torch.from_file(str(ring), size=ring.stat().st_size, dtype=torch.uint8)
        slots = torch.split(kept[RING_HEADER_NBYTES:], SLOT)
        wanted = segments(owner, generation).values()
        assert all(any(torch.equal(slot[: each.numel()], each) for slot in slots) for each in wanted), path
        return True
    return False


def send_until(
    rank: Rank, made: Replication, generation: GenerationId, *, keep: GenerationId | None, stop_at: int
) -> None:
    """The first segment of a generation, and `stop_at` bytes of the second."""
    window = list(segments(rank.rank, generation).items())
    made.pacer.begin(num_segments=WINDOW, num_steps=WINDOW)
    made.pacer.hurry()
    made.stream.begin(generation, keep=keep, num_segments=WINDOW, slot_nbytes=NBYTES)
    assert made.stream.send(*window[0], lambda: True)
    limit = made.stream.nbytes_sent + stop_at
    assert not made.stream.send(*window[1], lambda: made.stream.nbytes_sent < limit)


def test_an_owner_killed_in_the_middle_leaves_its_older_copy_whole(three_ranks: Cluster) -> None:
    """Its holder goes on without it, has the older generation, and nothing that looks like the newer one."""

    def work(rank: Rank) -> str:
        made = replication(rank, THREE_NODES)
        send(rank, made, G5)
        if rank.rank == 0:
            send_until(rank, made, G8, keep=G5, stop_at=100_000)
            rank.die()
        if rank.rank == 1:
            rank.wait_for(lambda: made.receivers[0].join(0))
        made.stream.bye()
        made.close(5, unlink=False)
        return "done"

    assert run(three_ranks, work) == [-9, "done", "done"]
    assert published(three_ranks, 0, G5)
    assert not published(three_ranks, 0, G8)


def test_a_dead_holder_stops_neither_steps_nor_the_way_out(three_ranks: Cluster) -> None:
    """Its owner's steps go on while the sender finds out, the others replicate on, and nobody hangs at the end."""

    def work(rank: Rank) -> tuple[int, str]:
        made = replication(rank, THREE_NODES)
        send(rank, made, G5)
        if rank.rank == 1:
            rank.wait_for("sending")
            rank.die()
        told = []

        def sender() -> None:
            try:
                send(rank, made, G8, keep=G5, paced=True)
                told.append("sent")
            except NotReplicated as error:
                told.append(str(error))

        thread = threading.Thread(target=sender, daemon=True)
        thread.start()
        if rank.rank == 0:
            rank.wait_for(lambda: made.stream.nbytes_sent > 3 * NBYTES)
            rank.tell("sending")
            rank.wait_for_death(1)
        steps = 0
        while thread.is_alive():
            made.pacer.step()
            steps += 1
            thread.join(0.005)
        made.stream.bye()
        made.close(5, unlink=True)
        return threading.active_count(), told[0]

    alone, killed, other = run(three_ranks, work)
    assert killed == -9
    assert other == (1, "sent")
    assert alone[0] == 1
    assert "rank 1 is gone" in alone[1]
    assert all(path.parent == three_ranks.shared_memory(1) for path in three_ranks.files(".replica"))


def test_no_step_sends_more_than_it_was_given(three_ranks: Cluster) -> None:
    """A dense generation of 8 steps: an eighth per step, counted by the sender, with two holders at once."""
    holders = {0: (1, 2), 1: (), 2: ()}
    generation = GenerationId(step=8, epoch=0)

    def work(rank: Rank) -> list[int]:
        made = replication(rank, holders, max_chunk=7_000)
        per_step = []
        if rank.rank == 0:
            whole = segment(0, generation, 0)
            made.pacer.begin(num_segments=1, num_steps=8)
            made.pacer.expect(whole.numel())
            made.stream.begin(generation, keep=None, num_segments=1, slot_nbytes=NBYTES)
            thread = threading.Thread(target=made.stream.send, args=(8, whole, lambda: True), daemon=True)
            thread.start()
            for step in range(1, 9):
                due = 2 * whole.numel() * step // 8
                rank.wait_for(partial(lambda due: made.stream.nbytes_sent >= due, due))
                per_step.append(made.stream.nbytes_sent)
                made.pacer.step()
            thread.join()
            made.stream.finish(marker_of(0, generation, {8: whole}, 3))
        made.stream.bye()
        made.close(10, unlink=False)
        return per_step

    per_step = run(three_ranks, work)[0]
    assert per_step == [2 * NBYTES * step // 8 for step in range(1, 9)]
    assert len(three_ranks.files(".done")) == 2


def test_an_unwanted_generation_is_given_up_in_the_middle(three_ranks: Cluster) -> None:
    """Nothing of it is found, its memory takes the next one, and the one before it stays."""
    unwanted, after = G8, GenerationId(step=11, epoch=0)

    def work(rank: Rank) -> None:
        made = replication(rank, THREE_NODES)
        send(rank, made, G5)
        send_until(rank, made, unwanted, keep=G5, stop_at=50_000)
        made.stream.abandon()
        send(rank, made, after, keep=G5)
        made.stream.bye()
        made.close(30, unlink=False)

    run(three_ranks, work)
    for owner in THREE_NODES:
        assert published(three_ranks, owner, G5)
        assert published(three_ranks, owner, after)
        assert not published(three_ranks, owner, unwanted)


def test_what_arrives_otherwise_than_its_marker_says_is_refused(three_ranks: Cluster) -> None:
    """The holder publishes nothing and says so to the owner and in its own log; the next generation is taken."""

    def work(rank: Rank) -> list[str]:
        made = replication(rank, THREE_NODES)
        window = segments(rank.rank, G5)
        made.pacer.begin(num_segments=WINDOW, num_steps=1)
        made.pacer.hurry()
        made.stream.begin(G5, keep=None, num_segments=WINDOW, slot_nbytes=NBYTES)
        for step, each in window.items():
            flipped = each.clone()
            flipped[-1] ^= int(rank.rank == 0 and step == 4)
            made.stream.send(step, flipped, lambda: True)
        marker = marker_of(rank.rank, G5, window, rank.world_size)
        if rank.rank == 0:
            with pytest.raises(NotReplicated, match="did not arrive as their marker says"):
                made.stream.finish(marker)
        else:
            made.stream.finish(marker)
        send(rank, made, G8)
        made.stream.bye()
        made.close(30, unlink=False)
        return made.take_failures()

    told = run(three_ranks, work)
    assert [len(each) for each in told] == [0, 1, 0]
    assert "copy of rank 0 was not kept" in told[1][0]
    assert published(three_ranks, 0, G8)
    assert not published(three_ranks, 0, G5)


def test_a_node_that_dies_while_some_copies_are_newer_takes_nothing_that_is_needed(three_ranks: Cluster) -> None:
    """TierCheck's Figure 5. Ranks 0 and 1 have replicated generation 8 when the node of rank 2, in the middle of it, dies.

    Generation 5, which alone all ranks have, is there of every owner whose holder lives.
    """

    def work(rank: Rank) -> str:
        made = replication(rank, THREE_NODES)
        send(rank, made, G5)
        rank.tell(f"first-{rank.rank}")
        for other in range(3):
            rank.wait_for(f"first-{other}")
        if rank.rank == 2:
            send_until(rank, made, G8, keep=G5, stop_at=150_000)
            for other in range(2):
                rank.wait_for(f"newer-{other}")
            rank.die()
        send(rank, made, G8, keep=G5)
        rank.tell(f"newer-{rank.rank}")
        rank.wait_for(lambda: made.receivers[-1].join(0) or rank.rank == 1)
        made.stream.bye()
        made.close(5, unlink=False)
        return "done"

    assert run(three_ranks, work) == ["done", "done", -9]
    three_ranks.lose(2)
    assert not published(three_ranks, 2, G8)
    assert published(three_ranks, 2, G5)
    assert published(three_ranks, 0, G8)
    assert published(three_ranks, 0, G5)


def test_an_owner_that_says_no_goodbye_is_cut_off(three_ranks: Cluster) -> None:
    """Training ended here by an exception while the others are stuck: no thread is left, and none at the others."""

    def work(rank: Rank) -> int:
        made = replication(rank, THREE_NODES)
        if rank.rank == 0:
            made.close(0.1, unlink=True)
            rank.tell("left")
        else:
            rank.wait_for("left")
            made.close(0.1, unlink=True)
        return threading.active_count()

    assert run(three_ranks, work) == [1, 1, 1]
    assert three_ranks.files() == []
