"""Bring sealed segments of one rank into one tier, on a background thread, and complete their generations there.

Segments travel as soon as they are sealed. Whatever fails abandons that one generation and is reported by
`take_failures`; training never sees an exception. A generation's memory is given back by `on_released` exactly once,
when nothing here reads it.

One thread per tier: digests run at memory speed without the interpreter lock (xxhash, measured), and media have their
own parallelism. What a tier does with a segment and with a whole generation are the two methods that it overrides.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from queue import SimpleQueue

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.errors import Fenced
from lightning_moe_ckpt.policies import AUDIENCES, Audience
from lightning_moe_ckpt.process import guard_forks
from lightning_moe_ckpt.storage import BadCopies, GenerationId, RankMarker, ReferencedEntry, SegmentEntry
from lightning_moe_ckpt.tiers._delta_chain import DeltaFigures
from lightning_moe_ckpt.tiers._mirrors import Mirroring, RedundancyFigures
from lightning_moe_ckpt.tiers._rank_memory import RankMemory
from lightning_moe_ckpt.tiers._ring import SegmentRing
from lightning_moe_ckpt.tiers._sealed import Markers, SealedSegment

log = rank_logger(__name__)

Released = Callable[[GenerationId], None]
References = tuple[Sequence[ReferencedEntry], Sequence[ReferencedEntry]]
"""Records of older generations that complete one, and spare copies of its own."""

_CLOSE_GRACE = timedelta(seconds=2)
"""How long `close` lets a call under way go on."""
_CLOSE_TIMEOUT = timedelta(seconds=4)
"""How long it then waits for the call to be interrupted, which may hang; the thread is a daemon."""
_MOMENT = timedelta(seconds=1)
"""For a call to fail before the process ends: an upload that is aborted leaves nothing in the bucket."""

_LEAST_SECONDS = 1e-6
_SMOOTHING = 0.8
"""Part of what was moved, and of its seconds, that counts a generation later."""

_REMEMBERED = 32
"""Complete generations that `holds` knows of."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a generation is not in a tier, or not as it should be."""

    generation: GenerationId
    reason: str

    def __str__(self) -> str:
        return f"{self.generation}: {self.reason}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """Generation that completes one which has only some operators."""

    generation: GenerationId | None
    """The newest one that is complete in the tier on all ranks; `None` if there is none, and this one cannot be whole."""
    missing: frozenset[str]
    """Names of operators on this rank that are taken from it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Announced:
    """A generation whose segments are about to come."""

    generation: GenerationId
    """New to the worker."""
    plan_hash: str
    """Equal on all ranks, or the commit fails."""
    plan_json: str
    """Kept as `plan` in the marker's policy."""
    num_segments: int
    """After so many the generation is finished."""
    unix_time: int = field(default_factory=lambda: int(time.time()))
    """When it was begun, in its marker; tiers that get it later state the same."""
    on_released: Released | None = None
    """Called once, from any thread, when the segments' memory is not read any more; not for what is held until the end."""
    base: Base | None = None
    """Completes it, where it has only some operators."""
    follows: Sequence[GenerationId] = ()
    """What it follows on, if it is differences: a generation of everything, then differences, each in the tier before it."""
    bad: BadCopies = field(default_factory=dict)
    """Copies that turned out bad: its marker names none of them, however many operators it has."""


@dataclass(kw_only=True, eq=False)
class WriteJob:
    """A generation under way."""

    announced: Announced
    on_released: Released | None = field(init=False)
    """Still to be called."""
    abandoned: bool = False
    handed_over: int = 0
    num_put: int = 0
    entries: list[SegmentEntry] = field(default_factory=list)
    """Entries of their files in the marker."""
    seconds: float = 0.0
    """Time that the worker has spent on its segments."""

    def __post_init__(self) -> None:
        self.on_released = self.announced.on_released

    @property
    def generation(self) -> GenerationId:
        """Return its name."""
        return self.announced.generation

    def is_whole(self) -> bool:
        """Return whether all its segments are here, or none will come any more."""
        return self.abandoned or self.handed_over == self.announced.num_segments


class TierWorker(ABC):
    """Bring generations of one rank into one tier, in the order in which they come.

    Args:
        name: name of the tier.
        markers: makes this rank's markers, for all tiers alike.
        memories: memory on this node that the tier owns.
        on_complete: called from the worker's thread with each generation that is complete here.
    """

    takes_every = False
    """Whether every generation comes here; else the newest one that is there when no rank is busy."""
    paced = False
    """Whether what is under way goes on with the steps of training only, until `drain` is called."""
    takes_links = False
    """Whether differences come here one by one, if what they follow on has."""
    uses_references = False
    """Whether a generation with only some operators takes the others from an older one that is complete here."""
    audiences: frozenset[Audience] = frozenset(AUDIENCES)
    """Files that it takes."""

    def __init__(
        self,
        name: str,
        markers: Markers,
        *,
        memories: Sequence[RankMemory] = (),
        on_complete: Callable[[GenerationId], None] | None = None,
    ) -> None:
        self.name, self.memories = name, memories
        self.fenced = False
        """A later incarnation of the run has begun; nothing more is kept and this process should stop."""
        self.lost_base = False
        """What generations with only some operators were built on turned out to be gone, and nothing whole has begun since."""
        self.num_complete = self.nbytes_complete = 0
        """Generations completed here, and this rank's bytes of them."""
        self.rate: float | None = None
        """Bytes per second that moved for the newest of them, while they were not made to wait; older ones count for less."""
        self.mirroring = Mirroring()
        """What ranks take for each other instead of sending it."""
        self._moved = self._moving_seconds = 0.0
        self._markers, self._on_complete = markers, on_complete
        self._jobs: dict[GenerationId, WriteJob] = {}
        self._changed = threading.Condition()
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._failures: deque[Failure] = deque()
        self._complete: deque[GenerationId] = deque(maxlen=_REMEMBERED)
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    # -- called from the training thread

    @property
    def idle(self) -> bool:
        """Return whether no generation is under way, so that the next one can be taken."""
        with self._changed:
            return not self._jobs

    @property
    def readers(self) -> int:
        """Return the number of generations that it may still read when newer ones are complete."""
        return 0 if self.takes_every else 1

    @property
    def deltas(self) -> DeltaFigures | None:
        """Return what generations took on the wire; `None` unless they may be delta-encoded."""
        return None

    @property
    def redundancy(self) -> RedundancyFigures | None:
        """Return what was sent to other nodes, and what they have anyway; `None` for other tiers."""
        return None

    @property
    def wants_gradients(self) -> bool:
        """Return whether the gradients that led to the generation begun last are of use here."""
        return False

    @property
    def generations_kept(self) -> int | None:
        """Return how many of the newest generations given to it stay here; `None` where what is needed stays."""
        return None

    @property
    def newest(self) -> GenerationId | None:
        """Return the newest generation that this incarnation completed here, on this rank."""
        with self._changed:
            return self._complete[-1] if self._complete else None

    def holds(self, generation: GenerationId) -> bool:
        """Return whether a generation of this incarnation is complete here, on this rank; the latest ones are remembered."""
        with self._changed:
            return generation in self._complete

    def gave_up(self, generation: GenerationId) -> bool:
        """Return whether a generation that was begun here has ended without being complete on this rank."""
        with self._changed:
            return generation not in self._jobs and generation not in self._complete

    def begin(self, announced: Announced) -> None:
        """Begin a generation, whose segments `add` brings."""
        with self._changed:
            assert announced.generation not in self._jobs, f"{announced.generation} was begun before"
            self._jobs[announced.generation] = WriteJob(announced=announced)
        if announced.base is None:
            self.lost_base = False
        self._start_thread()

    def add(self, generation: GenerationId, segment: SealedSegment) -> None:
        """Hand over what is sealed, of which the tier takes its part. Ignored if the generation has failed or was abandoned."""
        with self._changed:
            job = self._jobs.get(generation)
            if job is not None:
                job.handed_over += 1
        if job is not None:
            self._queue.put(partial(self._take, job, segment.of(self.audiences)))

    def abandon(self, generation: GenerationId) -> None:
        """Drop a generation; it is released as soon as nothing reads it. Ignored if it has ended already."""
        with self._changed:
            job = self._jobs.get(generation)
        if job is not None:
            job.abandoned = True
            self._queue.put(partial(self._take, job, None))

    def complete_everywhere(self, generation: GenerationId) -> None:  # noqa: B027  # not every tier keeps older ones
        """Let go of what is older: all ranks hold `generation` here. Called once per generation."""

    def give_up(self, generation: GenerationId) -> None:  # noqa: B027  # most tiers end what they do by themselves
        """Let go of `generation`: some rank has, so it will never be complete here on all ranks. Called once per generation."""

    def forget(self) -> None:
        """Note that what this rank holds here is gone."""
        with self._changed:
            self._complete.clear()

    def take_failures(self) -> list[Failure]:
        """Return what went wrong since the last call."""
        return [self._failures.popleft() for _ in range(len(self._failures))]

    def drain(self, timeout: float) -> bool:
        """Wait until every generation handed over whole is complete, failed or abandoned; `False` after `timeout` s.

        A generation of which segments are still to come does not count: only training on could complete it.
        """
        with self._changed:
            return self._changed.wait_for(lambda: not any(map(WriteJob.is_whole, self._jobs.values())), timeout)

    def planned(  # noqa: B027  # not for every tier
        self, exchange: Exchange, ring: SegmentRing, num_segments: int, spare_nbytes: int = 0
    ) -> None:
        """Prepare for generations of so many segments, in slots of `ring`. Collective. May raise together.

        Args:
            exchange: between the ranks.
            ring: of this rank.
            num_segments: of a generation.
            spare_nbytes: bytes of a slot that are never this rank's segment.
        """

    def stepped(self, period_steps: int) -> None:  # noqa: B027  # of interest to paced tiers
        """Note that a step of training has ended; generations are so many steps apart. Takes constant time."""

    def close(self) -> None:
        """Abandon what is left and end the thread. Call `drain` first to keep it. Closing twice is allowed."""
        self._closing.set()
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(_CLOSE_GRACE.total_seconds())
            if self._thread.is_alive():
                self._interrupt()
                self._thread.join(_CLOSE_TIMEOUT.total_seconds())
            if self._thread.is_alive():
                log.warning("%s does not answer; its thread is left behind", self.name)
            self._thread = None

    def cut_short(self) -> None:
        """Make the call under way fail and clean up, if that takes but a moment: the process is about to be ended.

        From any thread, and without logging: the thread that the process is ended over may hold the lock of the log.
        """
        self._closing.set()
        self._queue.put(None)
        thread = self._thread
        self._interrupt()
        if thread is not None:
            thread.join(_MOMENT.total_seconds())

    # -- what a tier does

    @abstractmethod
    def _put(self, job: WriteJob, segment: SealedSegment) -> list[SegmentEntry]:
        """Bring a segment into the tier and return what the marker says of its files. On the thread."""

    @abstractmethod
    def _finish(self, job: WriteJob, marker: RankMarker) -> None:
        """Make the generation complete, whose segments are all there. On the thread."""

    def _references(self, job: WriteJob) -> References:
        """Return what older generations hold of this rank's part. On the thread. Memory has all of it itself."""
        return (), ()

    def _wire_nbytes(self, job: WriteJob) -> int:
        """Return the bytes that a complete generation has moved. On the thread."""
        return sum(entry.nbytes for entry in job.entries)

    def _take_waited(self) -> float:
        """Return the seconds since the last call in which the worker was made to wait. On the thread."""
        return 0.0

    def _interrupt(self) -> None:  # noqa: B027  # not every medium can wait
        """Make the call under way on the thread fail soon; called from another thread."""

    # -- the thread

    def _start_thread(self) -> None:
        if self._thread is None:
            guard_forks()
            self._thread = threading.Thread(target=self._serve, name=f"moe-ckpt-{self.name}", daemon=True)
            self._thread.start()

    def _serve(self) -> None:
        while (task := self._queue.get()) is not None:
            task()
            del task  # while waiting, hold on to nobody's memory
        for job in list(self._jobs.values()):
            self._take(job, None)

    def _take(self, job: WriteJob, segment: SealedSegment | None) -> None:
        """Bring a segment into the tier, the last one with the marker; without one, end the generation."""
        if self._jobs.get(job.generation) is not job:
            return  # it ended while this segment was waiting in the queue
        try:
            if segment is not None and self._wanted(job):
                self._expect_not_fenced()
                started = time.perf_counter()
                job.entries += self._put(job, segment)
                job.num_put += 1
                job.seconds += time.perf_counter() - started
                if self._wanted(job):
                    if job.num_put < job.announced.num_segments:
                        return
                    self._finish(job, self._marker(job))
                    self._completed(job)
            self._end(job)
        except BaseException as error:  # thread entry: the session takes it from `take_failures`
            self._note(job.generation, f"not stored: {error or type(error).__name__}", error)
            log.debug("%s: %s failed", self.name, job.generation, exc_info=error)
            try:
                self._end(job)
            except BaseException as another:  # noqa: BLE001  # thread entry: what gives memory back may fail too
                self._note(job.generation, f"not released: {another or type(another).__name__}", another)

    def _expect_not_fenced(self) -> None:
        if self.fenced:
            raise Fenced("a later incarnation of this run has begun. This process should stop.")

    def _marker(self, job: WriteJob) -> RankMarker:
        referenced, spares = self._references(job)
        return self._markers.of(
            job.generation,
            job.entries,
            plan_hash=job.announced.plan_hash,
            plan_json=job.announced.plan_json,
            unix_time=job.announced.unix_time,
            referenced=referenced,
            spares=spares,
        )

    def _wanted(self, job: WriteJob) -> bool:
        return not (job.abandoned or self._closing.is_set())

    def _completed(self, job: WriteJob) -> None:
        nbytes = sum(entry.nbytes for entry in job.entries)
        with self._changed:
            self._complete.append(job.generation)
            self.num_complete += 1
            self.nbytes_complete += nbytes
            self._moved = _SMOOTHING * self._moved + self._wire_nbytes(job)
            self._moving_seconds = _SMOOTHING * self._moving_seconds + max(
                job.seconds - self._take_waited(), _LEAST_SECONDS
            )
            self.rate = self._moved / self._moving_seconds
        if self._on_complete is not None:
            self._on_complete(job.generation)

    def _note(self, generation: GenerationId, reason: str, error: BaseException) -> None:
        self.fenced = self.fenced or isinstance(error, Fenced)
        self._failures.append(Failure(generation, reason))

    def _end(self, job: WriteJob) -> None:
        try:
            self._release(job)
        finally:
            with self._changed:
                self._jobs.pop(job.generation, None)
                self._changed.notify_all()

    def _release(self, job: WriteJob) -> None:
        on_released, job.on_released = job.on_released, None
        if on_released is not None:
            on_released(job.generation)
