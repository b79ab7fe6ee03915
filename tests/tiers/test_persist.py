"""The persist thread makes generations durable in order, and nothing it meets reaches training."""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from stored._segments import read_segment, verify_records

from lightning_moe_ckpt.errors import Corrupt, Fenced, KeyExists, StorageError
from lightning_moe_ckpt.storage import (
    GenerationId,
    RankMarker,
    RecordEntry,
    RecordRows,
    Retention,
    RingHeader,
    RunStore,
    SegmentEntry,
    SegmentLayout,
    TensorSpec,
    open_backend,
)
from lightning_moe_ckpt.tiers import Base, Markers, PersistWorker, SealedFile, SealedSegment, SegmentRing, WriteRequest
from lightning_moe_ckpt.tiers import _tier_worker as _worker
from lightning_moe_ckpt.tiers._tier_worker import Released

LAYOUT = SegmentLayout([TensorSpec("w", torch.float32, (8,)), TensorSpec("b", torch.bfloat16, (3,))], metadata={})
NOW = timedelta(0)


def generation(step: int, incarnation: int = 1, life: str = "") -> GenerationId:
    return GenerationId(step=step, incarnation=incarnation, nonce=life)


def request(name: GenerationId, num_segments: int, on_released: Released | None = None) -> WriteRequest:
    return WriteRequest(
        generation=name, plan_hash="h", plan_json="{}", num_segments=num_segments, on_released=on_released
    )


def segment(
    step: int,
    value: float = 1.0,
    memory: torch.Tensor | None = None,
    *,
    of: GenerationId | None = None,
    rank: int = 0,
) -> SealedSegment:
    """A real segment whose tensors all hold `value`; of the generation of its own step, unless said otherwise."""
    memory = memory if memory is not None else torch.zeros(LAYOUT.nbytes, dtype=torch.uint8)
    LAYOUT.write_header(memory)
    for name in LAYOUT.spans:
        LAYOUT.view(memory, name).fill_(value)
    entries = [
        RecordEntry(
            name=name, operator="op", kind="full", fqn=name, state_key="param",
            dtype={"w": "F32", "b": "BF16"}[name], global_shape=span.shape, global_start=0, numel=span.shape[0],
            offset=span.offset, nbytes=span.nbytes, digest="",
        )
        for name, span in LAYOUT.spans.items()
    ]  # fmt: skip
    view = memoryview(memory.numpy().data)[: LAYOUT.nbytes]
    named = of if of is not None else generation(step)
    file = SealedFile(generation=named, rank=rank, step=step, view=view, records=RecordRows(entries))
    return SealedSegment(files=[file], view=view)


class Pages(bytearray):
    """Stands in for the ring's mapping; unlike a tensor it is the same object for everybody who holds a view."""


class ScriptedSink:
    """A store that writes down its calls and fails, or waits, where the test says so."""

    def __init__(self) -> None:
        self.run_id = "run"
        self.calls: list[str] = []
        self.faults: dict[str, list[BaseException]] = {}
        self.markers: list[RankMarker] = []
        self.hold: dict[str, threading.Event] = {}
        self.reached = threading.Event()

    def put_segment(self, generation: GenerationId, rank: int, step: int, view: memoryview) -> str:
        self._call(f"segment {step}")
        return f"{generation.step}/{rank}/{step}"

    def put_marker(self, marker: RankMarker) -> None:
        self._call(f"marker {marker.generation.step}")
        self.markers.append(marker)

    def commit(self, own: RankMarker, *, timeout: timedelta, cancelled: Callable[[], bool]) -> None:
        self._call(f"commit {own.generation.step}")

    def retain(self, retention: Retention, audited: int | None) -> None:
        self._call(f"retain {retention.last}")

    def read_range(self, entry: SegmentEntry, start: int, out: memoryview) -> None:
        """Nothing is read again."""

    def close(self) -> None:
        for held in self.hold.values():
            held.set()

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.hold:
            self.reached.set()
            assert self.hold[name].wait(30)
        if self.faults.get(name):
            raise self.faults[name].pop(0)


class Bench:
    """A worker over a scripted sink, with what it called back."""

    def __init__(self) -> None:
        self.sink = ScriptedSink()
        self.durable: list[int] = []
        self.released: list[int] = []
        self.worker = self.make()

    def make(self, **options: Any) -> PersistWorker:
        return PersistWorker(
            cast(RunStore, self.sink), Markers(run_id="run", rank=options.pop("rank", 0), world_size=1), retention=Retention(last=2),
            on_complete=lambda g, *_: self.durable.append(g.step), **options,
        )  # fmt: skip

    def begin(self, step: int, num_segments: int) -> GenerationId:
        self.worker.begin(request(generation(step), num_segments, self.release))
        return generation(step)

    def release(self, generation: GenerationId) -> None:
        self.released.append(generation.step)
        self.sink.calls.append(f"release {generation.step}")

    def save(self, step: int) -> None:
        """A generation of one segment, from start to end."""
        self.worker.add(self.begin(step, 1), segment(step))
        assert self.worker.drain(30)

    def idle(self) -> bool:
        return self.worker.idle

    def failures(self) -> list[str]:
        return [str(failure) for failure in self.worker.take_failures()]


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    for held in bench.sink.hold.values():
        held.set()
    bench.worker.close()


def test_segments_then_marker_then_commit_then_retention(bench: Bench) -> None:
    """The order that makes a crash at any point harmless; memory is given back as soon as storage has the bytes."""
    begun = bench.begin(5, 2)
    assert not bench.idle()
    bench.worker.add(begun, segment(4))
    bench.worker.add(begun, segment(5))
    assert bench.worker.drain(30)
    assert bench.sink.calls == ["segment 4", "segment 5", "release 5", "marker 5", "commit 5", "retain 2"]
    assert bench.durable == bench.released == [5]
    assert bench.idle()
    assert bench.failures() == []


def test_only_the_coordinator_commits_and_deletes(bench: Bench) -> None:
    """Another rank is done when its marker is durable."""
    bench.worker = bench.make(rank=1)
    bench.save(1)
    assert bench.sink.calls == ["segment 1", "release 1", "marker 1"]
    assert bench.durable == [1]


def test_what_is_built_on_stays_known_however_many_fail_on_other_ranks(bench: Bench) -> None:
    """This rank stores its part of each, none of which is committed: all of them lack what the first one has."""
    bench.worker = bench.make(rank=1)
    bench.save(1)
    base = Base(generation=generation(1), missing=frozenset({"op"}))
    for step in range(2, 12):
        bench.worker.begin(replace(request(generation(step), 1), base=base))
        bench.worker.add(generation(step), segment(step))
        assert bench.worker.drain(30)
    assert bench.failures() == []
    assert {entry.generation.step for marker in bench.sink.markers[1:] for entry in marker.referenced} == {1}


def test_a_bad_copy_is_no_spare_of_a_generation_that_has_everything(bench: Bench) -> None:
    """Nobody would find out again that it is bad."""
    bench.worker = bench.make(duplicated=["op"])
    bench.save(1)
    bench.worker.complete_everywhere(generation(1))
    for step, bad in ((2, {}), (3, {"op": {generation(1)}})):
        bench.worker.begin(replace(request(generation(step), 1), bad=bad))
        bench.worker.add(generation(step), segment(step))
        assert bench.worker.drain(30)
    spares = {
        marker.generation.step: [spare.generation.step for spare in marker.spares] for marker in bench.sink.markers
    }
    assert spares == {1: [], 2: [1], 3: []}


def test_nothing_is_completed_by_a_copy_that_is_bad_and_has_no_other(bench: Bench) -> None:
    """A generation without the operator would count as whole; the next one has to be."""
    bench.worker = bench.make(duplicated=["op"])
    bench.save(1)
    base = Base(generation=generation(1), missing=frozenset({"op"}))
    bench.worker.begin(replace(request(generation(2), 1), base=base, bad={"op": {generation(1)}}))
    bench.worker.add(generation(2), segment(2))
    assert bench.worker.drain(30)
    (failure,) = bench.failures()
    assert "no good copy of op" in str(failure)
    assert bench.worker.lost_base
    assert bench.durable == [1]


def test_a_generation_that_another_rank_has_given_up_is_not_waited_for(bench: Bench) -> None:
    """The commit that waits for markers of all ranks ends, and the next generation can be taken. Whose fault it was says that rank."""
    waiting = threading.Event()

    def commit(own: RankMarker, *, timeout: timedelta, cancelled: Callable[[], bool]) -> None:
        waiting.set()
        deadline = time.monotonic() + 30
        while not cancelled():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        raise StorageError("cancelled")

    bench.sink.commit = commit  # type: ignore[method-assign]
    bench.worker.add(bench.begin(1, 1), segment(1))
    assert waiting.wait(30)
    bench.worker.give_up(generation(1))
    assert bench.worker.drain(30)
    assert bench.worker.gave_up(generation(1))
    assert bench.failures() == []


@pytest.mark.parametrize("call", ["segment 1", "marker 1", "commit 1"])
def test_a_lasting_outage_costs_one_generation(bench: Bench, call: str) -> None:
    """It is reported with its reason, its memory is given back once, and the next one is stored."""
    bench.sink.faults[call] = [StorageError("disk is gone")]
    bench.save(1)
    assert bench.failures() == ["step 1 (incarnation 1): not stored: disk is gone"]
    assert bench.durable == []
    assert bench.released == [1]
    bench.save(2)
    assert bench.durable == [2]
    assert bench.failures() == []


@pytest.mark.parametrize(
    "error", [KeyExists("taken"), Corrupt("ranks disagree"), StorageError("down"), RuntimeError("a bug"), SystemExit()]
)
def test_whatever_is_raised_the_thread_lives_on(bench: Bench, error: BaseException) -> None:
    """One attempt (retries are the backend's), one report, and the next generation is stored."""
    bench.sink.faults["segment 1"] = [error]
    bench.save(1)
    assert bench.sink.calls.count("segment 1") == 1
    assert len(bench.failures()) == 1
    bench.save(2)
    assert bench.durable == [2]


def test_failing_to_delete_does_not_undo_a_commit(bench: Bench) -> None:
    """The generation is durable; that old ones stay is reported."""
    bench.sink.faults["retain 2"] = [StorageError("busy")]
    bench.save(1)
    assert bench.durable == [1]
    assert bench.failures() == ["step 1 (incarnation 1): committed, but older ones could not be deleted: busy"]


def test_a_fenced_process_stores_nothing_more(bench: Bench) -> None:
    """A later incarnation has begun: every generation from then on is refused and reported."""
    bench.sink.faults["commit 1"] = [Fenced("incarnation 2 has begun")]
    bench.save(1)
    fenced = bench.worker.fenced
    assert fenced
    bench.save(2)
    assert bench.sink.calls[-2:] == ["commit 1", "release 2"]
    assert len(bench.failures()) == 2


def test_memory_is_not_given_back_while_it_is_read(bench: Bench) -> None:
    """An abandon in the middle of a write takes effect after it."""
    bench.sink.hold["segment 1"] = threading.Event()
    begun = bench.begin(2, 2)
    bench.worker.add(begun, segment(1))
    bench.worker.add(begun, segment(2))
    assert bench.sink.reached.wait(30)
    bench.worker.abandon(begun)
    assert not bench.worker.drain(0.0)
    assert bench.released == []
    bench.sink.hold["segment 1"].set()
    assert bench.worker.drain(30)
    assert bench.sink.calls == ["segment 1", "release 2"]


def test_a_callback_that_raises_is_reported_and_survived(bench: Bench) -> None:
    """The session's own mistakes do not end the thread either."""

    def broken(generation: GenerationId) -> None:
        raise ValueError("callback")

    bench.worker.begin(request(generation(1), 1, broken))
    bench.worker.add(generation(1), segment(1))
    assert bench.worker.drain(30)
    assert bench.failures() == ["step 1 (incarnation 1): not stored: callback"]
    bench.save(2)
    assert bench.durable == [2]


def test_nothing_of_a_segment_is_kept_after_its_generation_ended(bench: Bench) -> None:
    """Otherwise the ring's memory could not be unmapped."""
    pages = Pages(LAYOUT.nbytes)
    memory, alive = torch.frombuffer(pages, dtype=torch.uint8), weakref.ref(pages)
    bench.sink.faults["segment 2"] = [RuntimeError("x")]
    for step in (1, 2):
        bench.worker.add(bench.begin(step, 1), segment(step, memory=memory))
    del memory, pages
    assert bench.worker.drain(30)
    deadline = time.monotonic() + 10
    while alive() is not None and time.monotonic() < deadline:  # the thread is on its way back to the queue
        gc.collect()
    assert alive() is None


def test_close_interrupts_a_call_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that waits, for a store that is down or for bandwidth, ends when the process wants to."""
    monkeypatch.setattr(_worker, "_CLOSE_GRACE", NOW)
    bench = Bench()
    bench.sink.hold["segment 1"] = threading.Event()
    bench.sink.faults["segment 1"] = [StorageError("closed")]
    bench.worker.add(bench.begin(1, 1), segment(1))
    assert bench.sink.reached.wait(30)
    bench.worker.close()
    assert bench.idle()
    assert bench.released == [1]


def test_a_process_that_is_ended_leaves_nothing_half_written(caplog: pytest.LogCaptureFixture) -> None:
    """The call under way fails before the process does, and not a word is logged on the way."""
    bench = Bench()
    bench.sink.hold["segment 1"] = threading.Event()
    bench.sink.faults["segment 1"] = [StorageError("closed")]
    bench.worker.add(bench.begin(1, 1), segment(1))
    assert bench.sink.reached.wait(30)
    with caplog.at_level(logging.INFO):
        bench.worker.cut_short()
    assert bench.worker.drain(30)
    assert bench.released == [1]
    assert not caplog.records
    bench.worker.close()


def test_a_store_that_hangs_is_left_behind(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """`close` returns after a bounded time and says so."""
    monkeypatch.setattr(_worker, "_CLOSE_GRACE", NOW)
    monkeypatch.setattr(ScriptedSink, "close", lambda _: None)
    monkeypatch.setattr(_worker, "_CLOSE_TIMEOUT", timedelta(milliseconds=20))
    bench = Bench()
    bench.sink.hold["segment 1"] = threading.Event()
    bench.worker.add(bench.begin(1, 1), segment(1))
    assert bench.sink.reached.wait(30)
    bench.worker.close()
    assert "storage does not answer" in caplog.text
    assert bench.released == []  # it may still be read
    bench.sink.hold["segment 1"].set()
    assert bench.worker.drain(30)


def open_ranks(tmp_path: Path, world_size: int) -> list[RunStore]:
    """The stores of all ranks of a fresh incarnation."""
    coordinator = RunStore.open(open_backend(str(tmp_path)), resume="auto")
    coordinator.candidates()
    coordinator.open_incarnation(None)
    others = [RunStore.join(open_backend(str(tmp_path)), run_id=coordinator.run_id) for _ in range(1, world_size)]
    return [coordinator, *others]


def each(workers: list[PersistWorker], action: Callable[[int, PersistWorker], Any]) -> list[Any]:
    return [action(rank, worker) for rank, worker in enumerate(workers)]


def test_three_ranks_commit_to_a_real_store_and_every_byte_is_verified(tmp_path: Path) -> None:
    """Rings, copies, workers and the run store together: what is read back is what was captured."""
    stores = open_ranks(tmp_path / "run", 3)
    name = stores[0].name
    header = RingHeader(nonce="", slot_nbytes=4096 * 2, num_slots=6, origin="")
    rings = [SegmentRing(tmp_path, torch.zeros(6 * 4096 * 2, dtype=torch.uint8), header) for _ in stores]
    workers = [
        PersistWorker(store, Markers(run_id=store.run_id, rank=rank, world_size=3), retention=Retention(last=1))
        for rank, store in enumerate(stores)
    ]
    for last in (2, 4):
        taken = stores[0].name(last)
        for rank in (2, 1, 0):  # the coordinator is not the last to start, and waits for the others
            rings[rank].begin_window(taken)
            rings[rank].pin(taken)
            workers[rank].begin(request(taken, 2, rings[rank].unpin))
            for step in (last - 1, last):
                slot = rings[rank].acquire(taken, step)
                sealed = segment(step, value=float(100 * rank + step), memory=slot.view, of=taken, rank=rank)
                rings[rank].seal(slot)
                workers[rank].add(taken, sealed)
            rings[rank].finish_window(taken)
        assert all(each(workers, lambda _, worker: worker.drain(30)))
        for ring in rings:
            ring.complete_everywhere(taken)
    assert each(workers, lambda _, worker: worker.take_failures()) == [[], [], []]
    assert [ring.free_slots for ring in rings] == [4, 4, 4]

    (commit,) = stores[0].candidates()  # keep=1: the older one is gone
    assert commit.generation == name(4)
    for rank, store in enumerate(stores):
        for entry in store.read_marker(commit, rank).segments:
            out = torch.zeros(entry.nbytes, dtype=torch.uint8)
            view = memoryview(out.numpy().data)
            read_segment(store, entry, view)
            verify_records(entry, view)
            assert torch.equal(LAYOUT.view(out, "w"), torch.full((8,), float(100 * rank + entry.step)))
    each(workers, lambda _, worker: worker.close())


def test_a_rank_that_fails_leaves_the_older_generation_the_newest(tmp_path: Path) -> None:
    """The coordinator gives up after its time-out; nothing half is visible."""
    stores = open_ranks(tmp_path / "run", 2)
    name = stores[0].name
    workers = [
        PersistWorker(
            store,
            Markers(run_id=store.run_id, rank=rank, world_size=2),
            retention=Retention(last=2),
            commit_timeout=timedelta(milliseconds=50),
        )
        for rank, store in enumerate(stores)
    ]
    for step, num_ranks in ((1, 2), (2, 1)):
        for rank in reversed(range(num_ranks)):
            workers[rank].begin(request(name(step), 1))
            workers[rank].add(name(step), segment(step, of=name(step), rank=rank))
            assert num_ranks == 1 or rank == 0 or workers[rank].drain(30)
        assert workers[0].drain(30)
    assert [commit.generation.step for commit in stores[0].candidates()] == [1]
    (failure,) = workers[0].take_failures()
    assert failure.generation.step == 2
    assert "rank 1: no marker yet" in failure.reason
    each(workers, lambda _, worker: worker.close())
