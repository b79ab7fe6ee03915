"""The background thread that makes generations durable while training goes on.

Segments travel as soon as they are sealed: wait for the copy, digest every record and the whole file, store. After a
generation's last segment comes this rank's marker; on the coordinator then the commit over all ranks, and retention.
Whatever fails abandons that one generation and is reported by `take_failures`; training never sees an exception.

One thread: digests run at memory speed without the interpreter lock (xxhash, measured), and storage backends have
their own parallelism. A generation's memory is given back by `on_released` exactly once, when nothing here reads it.

Invariant: a marker is stored only after every segment it names, a commit only after every marker.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from queue import SimpleQueue
from typing import Protocol, TypeVar

from lightning_moe_ckpt.errors import CheckpointError, Fenced, StorageError
from lightning_moe_ckpt.native import Ticket
from lightning_moe_ckpt.storage import (
    GenerationId,
    ModuleEntry,
    ModuleLine,
    RankMarker,
    RecordRows,
    SegmentEntry,
    digest_of,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

_RETRY_PAUSES = (timedelta(seconds=1), timedelta(seconds=4))
"""The backend has retried hiccups already; these cover an outage of some seconds."""
_CLOSE_TIMEOUT = timedelta(seconds=10)
"""How long `close` waits for a storage call under way, which may hang; the thread is a daemon."""


class GenerationSink(Protocol):
    """What the worker needs of a run's storage; `RunStore` is one. Called from the worker's thread only."""

    run_id: str

    def put_segment(self, generation: GenerationId, rank: int, step: int, view: memoryview) -> str:
        """Store a segment; durable when its key is returned, and `view` is not read any more."""

    def put_marker(self, marker: RankMarker) -> None:
        """State that all segments of `marker` are durable."""

    def commit(self, own: RankMarker, *, timeout: timedelta, cancelled: Callable[[], bool]) -> object:
        """Wait for the markers of all ranks, or until `cancelled`, and make the generation visible. Coordinator only."""

    def retain(self, keep: int, in_use: GenerationId | None) -> object:
        """Delete what is older than the newest `keep` generations. Coordinator only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SealedSegment:
    """A segment whose bytes are final, or will be when its ticket is done."""

    step: int
    view: memoryview
    """All bytes of the file; not written to until the generation is released."""
    records: RecordRows
    """What the marker says of its records, but for their digests."""
    ticket: Ticket | None = None


@dataclass(frozen=True, slots=True)
class PersistFailure:
    """Why a generation is not stored, or not as it should be."""

    generation: GenerationId
    reason: str

    def __str__(self) -> str:
        return f"{self.generation}: {self.reason}"


@dataclass(kw_only=True, eq=False)
class _Job:
    generation: GenerationId
    plan_hash: str
    policy: Mapping[str, object]
    num_segments: int
    on_released: Callable[[GenerationId], None] | None
    abandoned: bool = False
    handed_over: int = 0
    entries: list[SegmentEntry] = field(default_factory=list)
    seconds: float = 0.0
    """Spent by the worker on the segments so far."""

    def is_whole(self) -> bool:
        """Whether all its segments are here, or none will come any more."""
        return self.abandoned or self.handed_over == self.num_segments


class PersistWorker:
    """Takes sealed segments of one rank and makes their generations durable, in the order in which they come.

    Args:
        store: where to.
        rank: this rank; rank 0 is the coordinator, which commits and deletes.
        world_size: ranks whose markers a commit needs.
        keep: committed generations that retention leaves.
        policy: what the markers say of the policy, the same on all ranks; JSON values.
        module: what the marker of rank 0 says of the module.
        on_durable: called from the worker's thread with the generation, the seconds the worker spent on it, and the
            bytes of this rank. Durable means committed on the coordinator, and "my part is stored" elsewhere.
        in_use: the generation the run restored from, never deleted.
        commit_timeout: how long the coordinator waits for the other ranks.
        retry_pauses: pauses before each further attempt to store something.
    """

    def __init__(
        self,
        store: GenerationSink,
        *,
        rank: int,
        world_size: int,
        keep: int,
        policy: Mapping[str, object] | None = None,
        module: ModuleEntry | None = None,
        on_durable: Callable[[GenerationId, float, int], None] | None = None,
        in_use: GenerationId | None = None,
        commit_timeout: timedelta = timedelta(minutes=2),
        retry_pauses: Sequence[timedelta] = _RETRY_PAUSES,
    ) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._keep, self._in_use = keep, in_use
        self._policy = dict(policy or {})
        self._module = None if module is None else ModuleLine.of(module)  # spelled once, not per generation
        self._on_durable = on_durable
        self._commit_timeout, self._retry_pauses = commit_timeout, retry_pauses
        self._jobs: dict[GenerationId, _Job] = {}
        self._changed = threading.Condition()
        self._queue: SimpleQueue[tuple[_Job, SealedSegment | None] | None] = SimpleQueue()
        self._failures: deque[PersistFailure] = deque()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self.fenced = False
        """A later life of the run has begun; nothing more is stored and this process should stop."""

    # -- called from the training thread

    @property
    def idle(self) -> bool:
        """Whether no generation is under way, so that the next one can be taken."""
        with self._changed:
            return not self._jobs

    def begin(
        self,
        generation: GenerationId,
        *,
        plan_hash: str,
        plan_json: str,
        num_segments: int,
        on_released: Callable[[GenerationId], None] | None = None,
    ) -> None:
        """Announce a generation of `num_segments` segments, which `add` brings.

        Args:
            generation: its name, new to this worker.
            plan_hash: equal on all ranks, or the commit fails.
            plan_json: kept as `plan` in the marker's policy.
            num_segments: after so many the generation is finished.
            on_released: called once from the worker's thread when the segments' memory is not read any more.
        """
        policy = {**self._policy, "plan": plan_json}
        job = _Job(
            generation=generation,
            plan_hash=plan_hash,
            policy=policy,
            num_segments=num_segments,
            on_released=on_released,
        )
        with self._changed:
            assert generation not in self._jobs, f"{generation} was begun before"
            self._jobs[generation] = job
        self._start_thread()

    def add(self, generation: GenerationId, segment: SealedSegment) -> None:
        """Hand over a sealed segment. Ignored if the generation has failed or was abandoned meanwhile."""
        with self._changed:
            job = self._jobs.get(generation)
            if job is not None:
                job.handed_over += 1
        if job is not None:
            self._queue.put((job, segment))

    def abandon(self, generation: GenerationId) -> None:
        """Drop a generation; it is released as soon as nothing reads it. Ignored if it has ended already."""
        with self._changed:
            job = self._jobs.get(generation)
        if job is not None:
            job.abandoned = True
            self._queue.put((job, None))

    def take_failures(self) -> list[PersistFailure]:
        """What went wrong since the last call."""
        return [self._failures.popleft() for _ in range(len(self._failures))]

    def drain(self, timeout: float) -> bool:
        """Wait until every generation handed over whole is durable, failed or abandoned; `False` after `timeout` seconds.

        A generation of which segments are still to come does not count: only training on could complete it.
        """
        with self._changed:
            return self._changed.wait_for(lambda: not any(map(_Job.is_whole, self._jobs.values())), timeout)

    def close(self) -> None:
        """Abandon what is left and end the thread. Call `drain` first to keep it. Closing twice is allowed."""
        self._closing.set()
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(_CLOSE_TIMEOUT.total_seconds())
            if self._thread.is_alive():
                log.warning("storage does not answer; the persist thread is left behind")
            self._thread = None

    # -- the thread

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="moe-ckpt-persist", daemon=True)
            self._thread.start()

    def _serve(self) -> None:
        while (task := self._queue.get()) is not None:
            self._take(*task)
            del task  # while waiting, hold on to nobody's memory
        for job in list(self._jobs.values()):
            self._take(job, None)

    def _take(self, job: _Job, segment: SealedSegment | None) -> None:
        if self._jobs.get(job.generation) is not job:
            return  # it ended while this segment was waiting in the queue
        if not self._guarded(job, lambda: self._advance(job, segment)):
            self._guarded(job, lambda: self._end(job))

    def _guarded(self, job: _Job, action: Callable[[], None]) -> bool:
        try:
            action()
        except BaseException as error:  # thread entry: the session takes it from `take_failures`
            self._note(job.generation, f"not stored: {error or type(error).__name__}", error)
            log.debug("persisting %s failed", job.generation, exc_info=error)
            return False
        return True

    def _advance(self, job: _Job, segment: SealedSegment | None) -> None:
        if segment is None or job.abandoned or self._closing.is_set():
            self._end(job)
            return
        if self.fenced:
            raise Fenced("a later life of this run has begun. This process should stop.")
        started = time.perf_counter() - job.seconds
        job.entries.append(self._put(job.generation, segment))
        job.seconds = time.perf_counter() - started
        if len(job.entries) == job.num_segments:
            self._release(job)  # storage has the bytes; other ranks may take long
            self._finish(job, started)
            self._end(job)

    def _put(self, generation: GenerationId, segment: SealedSegment) -> SegmentEntry:
        if segment.ticket is not None:
            segment.ticket.wait()
        digest = digest_of(segment.view)
        records = segment.records.digested(segment.view)
        key = self._retry(lambda: self._store.put_segment(generation, self._rank, segment.step, segment.view))
        return SegmentEntry(step=segment.step, key=key, nbytes=segment.view.nbytes, digest=digest, records=records)

    def _finish(self, job: _Job, started: float) -> None:
        marker = RankMarker(
            run_id=self._store.run_id,
            rank=self._rank,
            world_size=self._world_size,
            generation=job.generation,
            plan_hash=job.plan_hash,
            segments=tuple(sorted(job.entries, key=lambda entry: entry.step)),
            policy=job.policy,
            module=self._module,
        )
        self._retry(lambda: self._store.put_marker(marker))
        if self._rank == 0:
            self._store.commit(marker, timeout=self._commit_timeout, cancelled=self._closing.is_set)
            self._retain(job.generation)
        if self._on_durable is not None:
            nbytes = sum(entry.nbytes for entry in job.entries)
            self._on_durable(job.generation, time.perf_counter() - started, nbytes)

    def _retain(self, generation: GenerationId) -> None:
        """Deleting can fail without harm to what was just committed; the next time goes on where this one stopped."""
        try:
            self._store.retain(self._keep, self._in_use)
        except CheckpointError as error:
            self._note(generation, f"committed, but older ones could not be deleted: {error}", error)

    def _retry(self, operation: Callable[[], T]) -> T:
        for pause in self._retry_pauses:
            try:
                return operation()
            except StorageError as error:  # noqa: PERF203  # a retry is a try in a loop
                if not error.try_next:
                    raise
                log.warning("%s Trying again in %s.", error, pause)
                if self._closing.wait(pause.total_seconds()):
                    raise
        return operation()

    def _note(self, generation: GenerationId, reason: str, error: BaseException) -> None:
        self.fenced = self.fenced or isinstance(error, Fenced)
        self._failures.append(PersistFailure(generation, reason))

    def _end(self, job: _Job) -> None:
        try:
            self._release(job)
        finally:
            with self._changed:
                self._jobs.pop(job.generation, None)
                self._changed.notify_all()

    def _release(self, job: _Job) -> None:
        on_released, job.on_released = job.on_released, None
        if on_released is not None:
            on_released(job.generation)
