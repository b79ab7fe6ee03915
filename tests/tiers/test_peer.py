"""Copies on other nodes: whole or not there, at the pace of the steps, whoever dies meanwhile. Real processes on gloo."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from door import NotReplicated, Replication
from torch import Tensor

from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.storage import GenerationId, RankMarker, SegmentEntry, digest_of, segment_key
from lightning_moe_ckpt.tiers import HostTier

from ._nodes import Cluster, Rank, cluster, run

RUN = "0123456789abcdef"
WINDOW = 3
NBYTES = 300_000
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
    seed = torch.Generator().manual_seed(
        rank * 10**6 + generation.step * 10**3 + generation.incarnation * 10**2 + index
    )
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


def replication(
    rank: Rank,
    holders: Mapping[int, Sequence[int]],
    *,
    max_chunk: int = 100_000,
    resumed: GenerationId | None = None,
) -> Replication:
    """A started one, with memory for two windows of each owner."""
    made = Replication(
        rank.group(),
        run_id=RUN,
        tag=RUN,
        holders=holders[rank.rank],
        owners=[owner for owner, to in holders.items() if rank.rank in to],
        max_chunk=max_chunk,
        url="memory://peers",
        resumed=resumed,
    )
    made.allocate([[NBYTES] * WINDOW] * rank.world_size)
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
    made.stream.begin(generation, keep=keep, sizes=[NBYTES] * WINDOW)
    for step, each in window.items():
        made.pacer.expect(each.numel())
        assert made.stream.send(step, each, lambda: True)
    made.stream.finish(marker_of(rank.rank, generation, window, rank.world_size))


G5, G8 = (
    GenerationId(step=5, incarnation=0, nonce="0123456789ab"),
    GenerationId(step=8, incarnation=0, nonce="0123456789ab"),
)


def test_copies_are_the_owners_bytes_and_their_markers_verify(four_ranks: Cluster) -> None:
    """Four ranks on two nodes send two generations each; every copy is there, bit for bit, with its marker."""

    def work(rank: Rank) -> list[int]:
        made = replication(rank, TWO_NODES)
        send(rank, made, G5)
        send(rank, made, G8, keep=G5)
        made.stream.say_close()
        made.close(30, unlink=False)
        return [threading.active_count()]

    assert run(four_ranks, work) == [[1]] * 4
    for owner in TWO_NODES:
        assert published(four_ranks, owner, G5)
        assert published(four_ranks, owner, G8)


def published(nodes: Cluster, owner: int, generation: GenerationId) -> bool:
    """Whether a later incarnation would find a copy on some node; if so it must be the owner's bytes and its marker."""
    for node in nodes.nodes:
        tier = HostTier(RUN, node)
        for holding in tier.holdings():
            if (holding.owner, holding.generation) == (owner, generation):
                marker = tier.read_marker(holding)
                window = segments(owner, generation)
                assert marker.to_bytes() == marker_of(owner, generation, window, len(nodes.placed))
                for entry in marker.segments:
                    copy = torch.zeros(entry.nbytes, dtype=torch.uint8)
                    tier.read_into(holding, entry, 0, copy.numpy().data)
                    assert torch.equal(copy, window[entry.step])
                tier.close()
                return True
        tier.close()
    return False


def send_until(
    rank: Rank, made: Replication, generation: GenerationId, *, keep: GenerationId | None, stop_at: int
) -> None:
    """The first segment of a generation, and `stop_at` bytes of the second."""
    window = list(segments(rank.rank, generation).items())
    made.pacer.begin(num_segments=WINDOW, num_steps=WINDOW)
    made.pacer.hurry()
    made.stream.begin(generation, keep=keep, sizes=[NBYTES] * WINDOW)
    assert made.stream.send(*window[0], lambda: True)
    limit = made.stream.nbytes_sent + stop_at
    assert not made.stream.send(*window[1], lambda: made.stream.nbytes_sent < limit)


def test_an_owner_killed_in_the_middle_leaves_its_older_copy_whole(three_ranks: Cluster) -> None:
    """Its holder goes on without it, has the older generation, and nothing that looks like the newer one."""

    def work(rank: Rank) -> str:
        made = replication(rank, THREE_NODES)
        send(rank, made, G5)
        rank.tell(f"first-{rank.rank}")
        if rank.rank == 0:
            send_until(rank, made, G8, keep=G5, stop_at=100_000)
            rank.wait_for("first-2")  # which rank 0 holds: this is about owners that die, not holders
            rank.die()
        if rank.rank == 1:
            rank.wait_for(lambda: made.receivers[0].join(0))
        made.stream.say_close()
        made.close(30, unlink=False)
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
        made.stream.say_close()
        made.close(30, unlink=True)
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
    generation = GenerationId(step=8, incarnation=0, nonce="0123456789ab")

    def work(rank: Rank) -> list[int]:
        made = replication(rank, holders, max_chunk=7_000)
        per_step = []
        if rank.rank == 0:
            whole = segment(0, generation, 0)
            made.pacer.begin(num_segments=1, num_steps=8)
            made.pacer.expect(whole.numel())
            made.stream.begin(generation, keep=None, sizes=[NBYTES])
            thread = threading.Thread(target=made.stream.send, args=(8, whole, lambda: True), daemon=True)
            thread.start()
            for step in range(1, 9):
                due = 2 * whole.numel() * step // 8
                rank.wait_for(partial(lambda due: made.stream.nbytes_sent >= due, due))
                per_step.append(made.stream.nbytes_sent)
                made.pacer.step()
            thread.join()
            made.stream.finish(marker_of(0, generation, {8: whole}, 3))
        made.stream.say_close()
        made.close(30, unlink=False)
        return per_step

    per_step = run(three_ranks, work)[0]
    assert per_step == [2 * NBYTES * step // 8 for step in range(1, 9)]
    assert len(three_ranks.files(".done")) == 2


def test_an_unwanted_generation_is_given_up_in_the_middle(three_ranks: Cluster) -> None:
    """Nothing of it is found, its memory takes the next one, and the one before it stays."""
    unwanted, after = G8, GenerationId(step=11, incarnation=0, nonce="0123456789ab")

    def work(rank: Rank) -> None:
        made = replication(rank, THREE_NODES)
        send(rank, made, G5)
        send_until(rank, made, unwanted, keep=G5, stop_at=50_000)
        made.stream.abandon()
        send(rank, made, after, keep=G5)
        made.stream.say_close()
        made.close(30, unlink=False)

    run(three_ranks, work)
    for owner in THREE_NODES:
        assert published(three_ranks, owner, G5)
        assert published(three_ranks, owner, after)
        assert not published(three_ranks, owner, unwanted)


def test_what_arrives_otherwise_than_its_marker_says_is_refused(three_ranks: Cluster) -> None:
    """The holder publishes nothing and says so to the owner and in its own log; the next generation is taken."""

    def work(rank: Rank) -> None:
        made = replication(rank, THREE_NODES)
        window = segments(rank.rank, G5)
        made.pacer.begin(num_segments=WINDOW, num_steps=1)
        made.pacer.hurry()
        made.stream.begin(G5, keep=None, sizes=[NBYTES] * WINDOW)
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
        made.stream.say_close()
        made.close(30, unlink=False)

    run(three_ranks, work)
    assert published(three_ranks, 0, G8)
    assert not published(three_ranks, 0, G5)


@pytest.mark.parametrize("reclaim", ["complete everywhere", "newer copy here"])
def test_a_node_that_dies_while_some_copies_are_newer_takes_nothing_that_is_needed(
    three_ranks: Cluster, reclaim: str
) -> None:
    """TierCheck's Figure 5. Ranks 0 and 1 have replicated generation 8 when the node of rank 2, in the middle of it, dies.

    Generation 5, which alone all ranks have, is there of every owner whose holder lives. The ablation, in which a
    holder gives up the older copy when it has a newer one, shows that this is not so by itself.
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
        if rank.rank == 1 and reclaim == "newer copy here":
            rank.wait_for("newer-0")
            made.stores[0].reclaim(keep=G8)
        rank.wait_for(lambda: made.receivers[-1].join(0) or rank.rank == 1)
        made.stream.say_close()
        made.close(30, unlink=False)
        return "done"

    assert run(three_ranks, work) == ["done", "done", -9]
    three_ranks.lose(2)
    assert not published(three_ranks, 2, G8)
    assert published(three_ranks, 2, G5)
    assert published(three_ranks, 0, G8)
    assert published(three_ranks, 0, G5) == (reclaim == "complete everywhere")


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
        rank.wait_for(lambda: threading.active_count() == 1)
        return threading.active_count()

    assert run(three_ranks, work) == [1, 1, 1]
    assert three_ranks.files() == []


def test_a_larger_plan_moves_to_a_larger_ring_and_the_older_copy_stays_until_then(three_ranks: Cluster) -> None:
    """Four segments instead of three do not fit beside the copy kept: it goes once the new ring holds one for all."""
    larger = GenerationId(step=9, incarnation=0, nonce="0123456789ab")
    holders = {0: (1,), 1: (), 2: ()}

    def send_four(
        made: Replication, keep: GenerationId | None, generation: GenerationId, window: dict[int, Tensor]
    ) -> None:
        made.pacer.begin(num_segments=4, num_steps=1)
        made.pacer.hurry()
        made.stream.begin(generation, keep=keep, sizes=[NBYTES] * 4)
        for step, each in window.items():
            made.stream.send(step, each, lambda: True)
        made.stream.finish(marker_of(0, generation, window, 3))

    def work(rank: Rank) -> list[list[str]]:
        made = replication(rank, holders)
        rank.tell(f"connected-{rank.rank}")
        for other in range(3):  # rank 2 has nothing to do, and would be gone before others have connected to it
            rank.wait_for(f"connected-{other}")
        seen = []
        if rank.rank == 0:
            send(rank, made, G5)
            four = {step: segment(0, larger, step) for step in range(6, 10)}
            send_four(made, G5, larger, four)
            seen.append([path.name.partition(f"-{RUN}-0")[2] for path in rank.cluster.files()])
            send_four(
                made,
                larger,
                GenerationId(step=13, incarnation=0, nonce="0123456789ab"),
                {step + 4: each for step, each in four.items()},
            )
            seen.append([path.name.partition(f"-{RUN}-0")[2] for path in rank.cluster.files()])
        made.stream.say_close()
        made.close(30, unlink=True)
        return seen

    both, new = run(three_ranks, work)[0]
    assert both == [".1.replica", ".1.replica.9.i0-0123456789ab.done", ".replica", ".replica.5.i0-0123456789ab.done"]
    assert new == [".1.replica", ".1.replica.13.i0-0123456789ab.done", ".1.replica.9.i0-0123456789ab.done"]
    assert three_ranks.files() == []


def test_a_later_life_goes_on_in_the_memory_of_the_last_one(three_ranks: Cluster) -> None:
    """After SIGKILL the copy that was resumed from stays, in place, until a newer one is complete; the rest goes."""
    resumed, later = G5, GenerationId(step=11, incarnation=1, nonce="0123456789ab")

    def killed(rank: Rank) -> None:
        made = replication(rank, THREE_NODES)
        send(rank, made, G5)
        send(rank, made, G8, keep=G5)
        rank.tell(f"done-{rank.rank}")
        for other in range(3):
            rank.wait_for(f"done-{other}")
        rank.die()

    def work(rank: Rank) -> list[str]:
        made = replication(rank, THREE_NODES, resumed=resumed)
        (found,) = [path.name.partition(".")[2] for path in rank.cluster.shared_memory(rank.rank).glob("*.done")]
        send(rank, made, later, keep=resumed)
        made.stream.say_close()
        made.close(30, unlink=False)
        return [
            found,
            *(path.name.partition(".")[2] for path in rank.cluster.shared_memory(rank.rank).glob("*.replica")),
        ]

    assert run(three_ranks, killed) == [-9, -9, -9]
    assert run(three_ranks, work) == [["replica.5.i0-0123456789ab.done", "replica"]] * 3
    for owner in THREE_NODES:
        assert published(three_ranks, owner, resumed)
        assert published(three_ranks, owner, later)
        assert not published(three_ranks, owner, G8)


def test_too_little_memory_for_copies_is_an_error_that_says_how_much_is_missing(three_ranks: Cluster) -> None:
    """Before training goes on, not in the middle of it."""

    def work(rank: Rank) -> str:
        group = rank.group()
        dist.barrier()  # a rank that ends at once would close connections that others are still making
        made = Replication(group, run_id=RUN, tag=RUN, url="memory://peers", holders=(), owners=(1,))
        with pytest.raises(ConfigurationError, match=r"[MG]iB are free, [\d.]+ [MG]iB are missing") as raised:
            made.allocate([[2**45] * WINDOW] * 3)
        made.close(1, unlink=True)
        return str(raised.value)

    assert all("ring of 199680.00 GiB" in told for told in run(three_ranks, work))
    assert three_ranks.files() == []
