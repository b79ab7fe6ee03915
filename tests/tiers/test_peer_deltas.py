"""Copies told by gradients: byte for byte the owner's or not there, whoever dies in whichever message. Real processes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from door import EncodedDelta, NotReplicated, PeerWorker, Replication, as_memoryview, encode_delta
from stored._segments import verify_records
from torch import Tensor

from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.native import AdamStep
from lightning_moe_ckpt.parallel import ParallelGroups
from lightning_moe_ckpt.policies import Deltas
from lightning_moe_ckpt.storage import (
    GenerationId,
    RankMarker,
    RecordEntry,
    RecordRows,
    SegmentLayout,
    digest_of,
    dtype_code,
)
from lightning_moe_ckpt.tiers import (
    DeltaFigures,
    Gradients,
    HostTier,
    Markers,
    SealedFile,
    SealedSegment,
    SegmentRing,
    WriteRequest,
    shared_name,
)
from lightning_moe_ckpt.tiers import _peer_receiver as receiving
from lightning_moe_ckpt.tiers._peer_wire import Message, MessageKind, Wire

from ._nodes import Cluster, Rank, cluster, run
from ._steps import Training, baseline

RUN = "0123456789abcdef"
SIZES = (3000, 500, 900)
SELECTIONS = ((0, 1), (0, 1), (0, 1, 2), (1, 2), (1, 2), (2, 0), (0,))
"""Experts by generation; from one to the next some stay, come or go."""
ROUTED = ((0, 1, 2), (0, 1), (0, 1, 2), (1,), (1, 2), (0, 2), (0, 1, 2))
HOLDERS: Mapping[int, tuple[int, ...]] = {0: (1, 2), 1: (), 2: ()}
ONE_HOLDER: Mapping[int, tuple[int, ...]] = {0: (1,), 1: ()}


@dataclass(frozen=True)
class Boundary:
    """What the owner has of one."""

    segment: Tensor
    gradients: Gradients


@cache
def history(dtype: torch.dtype = torch.float32) -> list[Boundary]:
    """The same in every process that asks."""
    training, found = Training(sizes=SIZES, weight_decay=0.1, dtype=dtype), []
    for selected, routed in zip(SELECTIONS, ROUTED, strict=True):
        training.take_step(routed)
        found.append(Boundary(training.segment(selected), training.gradients()))
    return found


def generation(index: int) -> GenerationId:
    """Boundaries follow each other."""
    return GenerationId(step=index + 1, incarnation=1, nonce="0123456789ab")


SLOT = max(each.segment.numel() + each.gradients.area.numel() for each in history())


def records_of(segment: Tensor) -> RecordRows:
    """As a marker would have them."""
    layout = SegmentLayout.parse(as_memoryview(segment))
    return RecordRows([
        RecordEntry(
            name=name, operator="op", kind="full", fqn=name, state_key="param", dtype=dtype_code(span.dtype),
            global_shape=span.shape, global_start=0, numel=span.shape[0], offset=span.offset, nbytes=span.nbytes, digest="",
        )
        for name, span in layout.spans.items()
    ])  # fmt: skip


def marker_of(index: int) -> RankMarker:
    """Of rank 0."""
    segment, name = history()[index].segment, generation(index)
    view, records = as_memoryview(segment), records_of(segment)
    entry = SealedFile(generation=name, rank=0, step=name.step, view=view, records=records).digested()
    return RankMarker(run_id=RUN, rank=0, world_size=3, generation=name, plan_hash="plan", segments=(entry,))


def replication(rank: Rank, holders: Mapping[int, tuple[int, ...]] = HOLDERS, *, max_chunk: int = 9_000) -> Replication:
    """A started one, that sends at once."""
    made = Replication(
        rank.group(), run_id=RUN, tag=RUN, url="memory://peers", holders=holders[rank.rank],
        owners=[owner for owner, to in holders.items() if rank.rank in to], max_chunk=max_chunk, ahead=True,
    )  # fmt: skip
    made.allocate([[SLOT]] * rank.world_size)
    made.start()
    return made


def send(
    made: Replication,
    index: int,
    *,
    by_delta: bool,
    gradients: Gradients | None = None,
    audit: bool = False,
    spoil: Callable[[EncodedDelta], EncodedDelta] = lambda delta: delta,
) -> tuple[float, ...]:
    """A generation; all ranks know of the one before the last."""
    here, name = history()[index], generation(index)
    keep = generation(index - 2) if index > 1 else None
    base = generation(index - 1) if index else None
    made.pacer.begin(num_segments=1, num_steps=1)
    made.pacer.hurry()
    made.stream.begin(name, keep=keep, base=base, sizes=[SLOT])
    if by_delta:
        before = baseline(history()[index - 1].segment)
        delta = spoil(encode_delta(before, here.segment, gradients or here.gradients, audit=audit))
        assert made.stream.offer(name.step, delta) is None
        assert made.stream.send_delta(delta, lambda: True)
        return made.stream.finish(marker_of(index).to_bytes(), like=marker_of(index - 1).to_bytes())
    assert made.stream.send(name.step, here.segment, lambda: True)
    return made.stream.finish(marker_of(index).to_bytes())


def end(made: Replication) -> None:
    made.stream.say_close()
    made.close(30, unlink=False)


def published(nodes: Cluster, holder: int) -> list[int]:
    """Which generations a later incarnation would find on a node, by index; each must have the owner's bytes."""
    tier, found = HostTier(RUN, nodes.nodes[holder]), []
    for holding in tier.holdings():
        index = holding.generation.step - 1
        want, marker = history()[index].segment, tier.read_marker(holding)
        copy = torch.zeros(marker.segments[0].nbytes, dtype=torch.uint8)
        tier.read_into(holding, marker.segments[0], 0, as_memoryview(copy))
        assert torch.equal(copy, want), f"generation {index} has other bytes than its owner's"
        assert marker.segments == marker_of(index).segments
        found.append(index)
    tier.close()
    return sorted(found)


@pytest.fixture
def three_ranks(tmp_path: Path) -> Iterator[Cluster]:
    """Three nodes of one rank."""
    with cluster(tmp_path, [0, 1, 2]) as nodes:
        yield nodes


@pytest.fixture
def two_ranks(tmp_path: Path) -> Iterator[Cluster]:
    """Two nodes of one rank."""
    with cluster(tmp_path, [0, 1]) as nodes:
        yield nodes


def test_copies_told_by_gradients_are_the_owners_bytes(three_ranks: Cluster) -> None:
    """While experts stay, come and go; two holders; far fewer bytes than segments have."""

    def work(rank: Rank) -> tuple[bool, list[bool]]:
        made = replication(rank)
        seen, whole = [], 0
        for index in range(len(SELECTIONS)) if rank.rank == 0 else ():
            send(made, index, by_delta=index > 0)
            seen += [published(rank.cluster, 1) == [*range(max(0, index - 2), index + 1)]]
            whole += history()[index].segment.numel()
        sent = made.stream.nbytes_sent
        end(made)
        return sent < 2 * whole * 0.7, seen

    fewer, seen = run(three_ranks, work)[0]
    assert fewer
    assert all(seen)
    assert published(three_ranks, 1) == published(three_ranks, 2) == [4, 5, 6]


def test_a_delta_of_what_a_holder_has_not_is_refused_before_it_is_sent(two_ranks: Cluster) -> None:
    """The segment follows as it is, in the same generation."""

    def work(rank: Rank) -> str | None:
        made, refusal = replication(rank, ONE_HOLDER), None
        if rank.rank == 0:
            send(made, 0, by_delta=False)
            here, name = history()[2], generation(2)
            made.pacer.begin(num_segments=1, num_steps=1)
            made.pacer.hurry()
            made.stream.begin(name, keep=generation(0), base=generation(1), sizes=[SLOT])
            delta = encode_delta(baseline(history()[1].segment), here.segment, here.gradients)
            refusal = made.stream.offer(name.step, delta)
            assert made.stream.send(name.step, here.segment, lambda: True)
            made.stream.finish(marker_of(2).to_bytes())
        end(made)
        return refusal

    refusal, _ = run(two_ranks, work)
    assert refusal is not None
    assert "there is no copy of" in refusal
    assert published(two_ranks, 1) == [0, 2]


def wrong(gradients: Gradients) -> Gradients:
    """A learning rate that was not the step's."""
    parts = {
        name: part
        if part.settings is None
        else replace(part, settings=replace(part.settings, lr=part.settings.lr * 1.01))
        for name, part in gradients.parts.items()
    }
    return replace(gradients, parts=parts)


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "ablation"])
def test_what_was_rebuilt_otherwise_is_not_published(two_ranks: Cluster, checked: bool) -> None:
    """The digest of the whole segment decides; the next generation, sent as it is, is taken. Without it nobody would know."""

    def work(rank: Rank) -> bool:
        if not checked:
            receiving.ReplicaReceiver._check = lambda *_: None  # type: ignore[method-assign]
        made, refused = replication(rank, ONE_HOLDER), False
        if rank.rank == 0:
            send(made, 0, by_delta=False)
            try:
                send(made, 1, by_delta=True, gradients=wrong(history()[1].gradients))
            except NotReplicated as error:
                refused = error.refused
            if checked:
                send(made, 2, by_delta=False)
        end(made)
        return refused

    assert run(two_ranks, work) == [checked, False]
    if checked:
        assert published(two_ranks, 1) == [0, 2]
    else:
        with pytest.raises(AssertionError, match="generation 1 has other bytes"):
            published(two_ranks, 1)


DEATHS = [
    *((0, "start", kind) for kind in (MessageKind.BEGIN, MessageKind.DELTA, MessageKind.CHUNK, MessageKind.MARKER)),
    *((1, "receive", kind) for kind in (MessageKind.BEGIN, MessageKind.DELTA, MessageKind.CHUNK, MessageKind.MARKER)),
    *((1, "start", kind) for kind in (MessageKind.READY, MessageKind.WHOLE)),
]


@pytest.mark.parametrize(
    ("who", "moment", "kind"), DEATHS, ids=lambda value: value.name if isinstance(value, MessageKind) else str(value)
)
def test_whoever_is_killed_in_whichever_message_copies_are_whole(
    two_ranks: Cluster, who: int, moment: str, kind: MessageKind
) -> None:
    """SIGKILL right behind the message of a generation told by gradients, its bytes under way; the one before stays."""

    def work(rank: Rank) -> None:
        if rank.rank == who:
            _die_at(rank, moment, kind)
        made = replication(rank, ONE_HOLDER, max_chunk=4_000)
        if rank.rank == 0:
            send(made, 0, by_delta=False)
            send(made, 1, by_delta=True)
            rank.tell("last")
            with suppress(NotReplicated) if kind is MessageKind.WHOLE else pytest.raises(NotReplicated):
                send(made, 2, by_delta=True)
        rank.wait_for(lambda: made.started and all(receiver.join(0) for receiver in made.receivers))
        end(made)

    results = run(two_ranks, work)
    assert results[who] == -9
    assert results[1 - who] is None
    assert published(two_ranks, 1) in ([0, 1], [0, 1, 2])
    assert (2 in published(two_ranks, 1)) <= (kind in {MessageKind.MARKER, MessageKind.WHOLE})


def _die_at(rank: Rank, moment: str, kind: MessageKind) -> None:
    """In this process, by what its wire does in the last generation."""
    start, receive = Wire.start, Wire.receive
    chunks, is_last = iter(range(10)), (rank.cluster.folder / "event-last").exists

    def due(message: Message) -> bool:
        return message.kind is kind and is_last() and (kind is not MessageKind.CHUNK or next(chunks) == 1)

    def dying_start(self: Wire, message: Message, payload: Tensor | None = None) -> Any:
        sending = start(self, message, payload)
        if due(message):
            rank.die()
        return sending

    def dying_receive(self: Wire) -> Message:
        message = receive(self)
        if due(message):
            rank.die()
        return message

    if moment == "start":
        Wire.start = dying_start  # type: ignore[method-assign]
    else:
        Wire.receive = dying_receive  # type: ignore[method-assign]


# -- rounded gradients


def rounded(index: int) -> Gradients:
    """What the step consumed, as it travels."""
    return history(torch.bfloat16)[index].gradients


def copies(nodes: Cluster, holder: int) -> dict[int, Tensor]:
    """By index; every byte is as the copy's own marker says, and what is not an expert's is the owner's."""
    tier, found = HostTier(RUN, nodes.nodes[holder]), {}
    for holding in tier.holdings():
        index, (entry,) = holding.generation.step - 1, tier.read_marker(holding).segments
        copy = torch.zeros(entry.nbytes, dtype=torch.uint8)
        tier.read_into(holding, entry, 0, as_memoryview(copy))
        assert digest_of(as_memoryview(copy)) == entry.digest
        verify_records(entry, as_memoryview(copy))
        layout = SegmentLayout.parse(as_memoryview(copy))
        for name in layout.spans:
            near, exact = layout.view(copy, name), layout.view(history()[index].segment, name)
            if name.endswith(("/param", "/exp_avg", "/exp_avg_sq")) and "expert" in name:
                assert torch.allclose(near, exact, rtol=0, atol=0.02 * max(1e-6, float(exact.abs().max()))), name
            else:
                assert torch.equal(near, exact), name
        found[index] = copy
    tier.close()
    return found


def test_copies_of_rounded_gradients_are_near_and_an_audit_makes_them_exact(three_ranks: Cluster) -> None:
    """Two holders have the same bytes, with markers of their own over them; the audit tells how far they had come."""

    def work(rank: Rank) -> list[tuple[float, ...]]:
        made, told = replication(rank), []
        if rank.rank == 0:
            told.append(send(made, 0, by_delta=False))
            for index in (1, 2, 3):
                told.append(send(made, index, by_delta=True, gradients=rounded(index)))
                near = copies(rank.cluster, 1)[index]
                assert not torch.equal(near, history()[index].segment)
                assert torch.equal(near, copies(rank.cluster, 2)[index])
            told.append(send(made, 4, by_delta=True, gradients=rounded(4), audit=True))
            assert torch.equal(copies(rank.cluster, 1)[4], history()[4].segment)
            told.append(send(made, 5, by_delta=True))
        end(made)
        return told

    *nothing, (params, moments), last = run(three_ranks, work)[0]
    assert nothing == [()] * 4
    assert last == ()
    assert 0 < params < 0.01
    assert 0 < moments < 0.02
    assert torch.equal(copies(three_ranks, 2)[5], history()[5].segment), "a lossless delta of an audited copy"


@pytest.mark.parametrize("where", ["literal", "gradient"])
def test_a_bit_turned_on_the_way_is_noticed_without_a_digest_of_the_whole(two_ranks: Cluster, where: str) -> None:
    """What travels as it is has the digests of the owner's marker, gradients have one of their own."""

    def turn(delta: EncodedDelta) -> EncodedDelta:
        index = 0 if where == "literal" else len(delta.payload) - 1
        turned = delta.payload[index].clone()
        turned[turned.numel() // 2] ^= 1
        return replace(delta, payload=[*delta.payload[:index], turned, *delta.payload[index + 1 :]])

    def work(rank: Rank) -> str:
        made, told = replication(rank, ONE_HOLDER), ""
        if rank.rank == 0:
            send(made, 0, by_delta=False)
            with pytest.raises(NotReplicated) as raised:
                send(made, 1, by_delta=True, gradients=rounded(1), spoil=turn)
            told = str(raised.value)
            send(made, 2, by_delta=False)
        end(made)
        return told

    told, _ = run(two_ranks, work)
    assert {"literal": "did not arrive as its marker says", "gradient": "gradients are not those"}[where] in told
    assert published(two_ranks, 1) == [0, 2]


def test_holders_with_different_bytes_are_no_copies(three_ranks: Cluster) -> None:
    """Their processors round otherwise: nobody could mend one from the other, so the next generation is sent whole."""

    def work(rank: Rank) -> bool | None:
        if rank.rank == 2:
            step = AdamStep.step_size.fget  # type: ignore[attr-defined]
            AdamStep.step_size = property(lambda self: step(self) * (1 + 1e-3))  # type: ignore[assignment, method-assign]
        made, refused = replication(rank), None
        if rank.rank == 0:
            send(made, 0, by_delta=False)
            with pytest.raises(NotReplicated, match="other bytes than another") as raised:
                send(made, 1, by_delta=True, gradients=rounded(1))
            refused = raised.value.refused
        end(made)
        return refused

    assert run(three_ranks, work)[0] is True


# -- the worker


class Step:
    """What is known of a step."""

    def __init__(self, gradients: Gradients | None) -> None:
        self._gradients = gradients

    def gradients(self) -> Gradients | None:
        return self._gradients


class Bench:
    """The worker of rank 0, whose copies rank 1 keeps; generations of `history`, one per step."""

    def __init__(self, rank: Rank, deltas: Deltas) -> None:
        self.rank, self.released = rank, list[int]()
        holders, owners = ONE_HOLDER[rank.rank], [0] if rank.rank == 1 else []
        made = Replication(
            rank.group(), run_id=RUN, tag=RUN, url="memory://peers", holders=holders, owners=owners, max_chunk=2_000, ahead=True,
        )  # fmt: skip
        groups = ParallelGroups(rank=rank.rank, world_size=2, groups={"control": rank.group()})
        self.worker = PeerWorker(made, Markers(run_id=RUN, rank=rank.rank, world_size=3), deltas=deltas)
        self.ring = SegmentRing.create(shared_name(RUN, rank.rank), SLOT, 8, rank.cluster.shared_memory(rank.rank))
        self.worker.planned(Exchange(groups), self.ring, [SLOT])

    def begin(self, index: int) -> None:
        name = generation(index)
        self.ring.begin_window(name)
        self.ring.pin(name)
        self.worker.begin(
            WriteRequest(generation=name, plan_hash="plan", plan_json="{}", num_segments=1, on_released=self._release)
        )

    def add(self, index: int, *, gradients: Gradients | str | None = "real") -> None:
        """Seal its segment, and hand it over with what is known of the step."""
        name, here = generation(index), history()[index]
        slot = self.ring.acquire(name, name.step)
        slot.view[: here.segment.numel()].copy_(here.segment)
        self.ring.seal(slot)
        self.ring.finish_window(name)
        found = here.gradients if isinstance(gradients, str) else gradients
        view = as_memoryview(slot.view)[: here.segment.numel()]
        file = SealedFile(generation=name, rank=0, step=name.step, view=view, records=records_of(here.segment))
        self.worker.add(name, SealedSegment(files=[file], view=view, step_record=Step(found)))

    def whole(self, index: int, **options: Any) -> None:
        self.begin(index)
        self.add(index, **options)

    def sees(self) -> tuple[bool, bool]:
        """Whether another generation would be taken, and whether the gradients before it are wanted."""
        return self.worker.idle, self.worker.wants_gradients

    def step_until(self, happened: Callable[[], bool]) -> None:
        """Training takes steps."""

        def stepped() -> bool:
            self.worker.stepped(1)
            return happened()

        self.rank.wait_for(stepped)

    def settle(self, index: int) -> None:
        """It is complete here, and all ranks have voted so."""
        self.step_until(lambda: self.worker.holds(generation(index)))
        self.worker.complete_everywhere(generation(index))

    def close(self) -> None:
        self.worker.close()
        for memory in self.worker.memories:
            memory.close(unlink=False)
        self.ring.close(unlink=True)

    def _release(self, name: GenerationId) -> None:
        self.ring.unpin(name)
        self.released.append(name.step - 1)


def in_bench(nodes: Cluster, work: Callable[[Bench], Any], deltas: Deltas | None = None) -> Any:
    """Work of rank 0, while rank 1 keeps copies."""

    def both(rank: Rank) -> Any:
        logging.getLogger("lightning_moe_ckpt").setLevel(logging.ERROR)
        bench = Bench(rank, deltas or Deltas())
        result = work(bench) if rank.rank == 0 else None
        rank.tell(f"end-{rank.rank}")
        rank.wait_for(f"end-{1 - rank.rank}")
        bench.close()
        return result

    return run(nodes, both)[0]


def test_a_worker_takes_the_next_generation_while_the_one_before_is_under_way(two_ranks: Cluster) -> None:
    """Two at most; slots of the one that others may still complete stay; every generation but the first by gradients."""

    def work(bench: Bench) -> None:
        worker = bench.worker
        bench.begin(0)
        assert bench.sees() == (True, False)
        bench.add(0)
        bench.begin(1)
        assert bench.sees() == (False, True)
        bench.step_until(lambda: worker.holds(generation(0)))
        assert bench.sees() == (True, True)
        bench.add(1)
        bench.step_until(lambda: worker.holds(generation(1)))
        worker.complete_everywhere(generation(0))
        bench.begin(2)
        assert bench.released == []  # others may not have 1, or have it later
        bench.settle(1)
        assert bench.released == [0]
        bench.add(2)
        for index in range(3, len(SELECTIONS)):
            bench.begin(index)
            bench.settle(index - 1)
            bench.add(index)
        bench.settle(len(SELECTIONS) - 1)
        assert worker.take_failures() == []
        figures = worker.deltas
        assert figures is not None
        assert (figures.generations, figures.whole_generations, figures.refused) == (len(SELECTIONS) - 1, 1, 0)
        assert 0 < figures.share < 0.8
        assert not worker._replication.pacer._transfers

    in_bench(two_ranks, work)
    assert published(two_ranks, 1) == [5, 6]


def test_a_broken_chain_goes_on_with_a_whole_generation(two_ranks: Cluster) -> None:
    """A generation that was skipped, one that was given up half way, and one of whose step nothing is known."""

    def work(bench: Bench) -> tuple[int, int]:
        worker = bench.worker
        bench.whole(0)
        bench.settle(0)
        bench.whole(2)  # 1 passed by
        assert bench.sees() == (True, False)
        bench.settle(2)
        bench.begin(3)
        worker.abandon(generation(3))
        bench.ring.abort_window(generation(3))
        bench.rank.wait_for(lambda: not worker._jobs)
        bench.whole(4)
        assert bench.sees() == (True, True)  # gradients are copied before it is known what becomes of 3
        bench.settle(4)
        bench.whole(5, gradients=None)
        bench.settle(5)
        bench.whole(6)
        bench.settle(6)
        assert worker.take_failures() == []
        assert worker.deltas is not None
        return worker.deltas.generations, worker.deltas.whole_generations

    assert in_bench(two_ranks, work) == (1, 4)
    assert published(two_ranks, 1) == [5, 6]


def test_every_so_many_rounded_generations_an_audit_tells_how_far_copies_have_come(two_ranks: Cluster) -> None:
    """Whole ones start the count anew."""

    def work(bench: Bench) -> DeltaFigures | None:
        for index in range(len(SELECTIONS)):
            bench.whole(index, gradients=rounded(index) if index != 4 else None)
            bench.settle(index)
        assert bench.worker.take_failures() == []
        return bench.worker.deltas

    figures = in_bench(two_ranks, work, Deltas(kind="bf16", resync_every=3))
    # 0 whole, 1 and 2 rounded, 3 audited, 4 whole, 5 and 6 rounded
    assert (figures.generations, figures.whole_generations, figures.audits, figures.refused) == (4, 3, 1, 0)
    assert 0 < figures.drift < 0.01
    assert 0 < figures.drift_moments < 0.02
    assert figures.share < 0.6
    assert sorted(copies(two_ranks, 1)) == [5, 6]


def test_after_a_refusal_a_whole_generation_and_after_two_nothing_else(two_ranks: Cluster) -> None:
    """A delta that leads elsewhere costs one generation; if the next one does too, the worker gives deltas up, and says so."""

    def work(bench: Bench) -> tuple[list[bool], list[str], int]:
        worker, wanted, told = bench.worker, [], []

        class Told(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                told.append(record.getMessage())

        log = logging.getLogger("lightning_moe_ckpt.tiers._delta")
        log.setLevel(logging.WARNING)
        log.addHandler(Told())
        for index in range(len(SELECTIONS)):
            bench.begin(index)
            wanted.append(worker.wants_gradients)
            bench.add(index, gradients=wrong(history()[index].gradients))
            bench.step_until(lambda: not worker._jobs)
            if worker.holds(generation(index)):
                worker.complete_everywhere(generation(index))
        assert worker.deltas is not None
        assert len(worker.take_failures()) == 2
        return wanted, told, worker.deltas.whole_generations

    wanted, told, whole = in_bench(two_ranks, work)
    assert wanted == [False, True, True, True, False, False, False]
    assert whole == len(SELECTIONS) - 2
    assert len(told) == 2
    assert "sent whole" in told[0]
    assert "whole from here on" in told[1]
    assert published(two_ranks, 1) == [5, 6]
