"""Bring sealed segments of one rank into one tier, on a background thread, and complete their generations there.

Segments travel as soon as they are sealed. A failure abandons only its generation and is reported by `take_failures`;
training never sees an exception. A generation's memory is given back by `on_released` exactly once, when nothing here
reads it.

One thread per tier: digests run at memory speed without the interpreter lock (xxhash, measured), and media have their
own parallelism. A tier overrides two methods: for a segment and for a whole generation.

A free tier takes the newest complete generation; generations completed while it was busy are never stored there. One
line is logged when such a stretch begins, at its second generation since a single skip is noise. Another line, with the
numbers, is logged at the stretch's end: when eight generations in a row were taken, or at the end of training. Such
stretches are routine where storage is slow, and only make the newest stored generation older, so they are no warning.

A window without a generation concerns no tier. A single one is noise too; several in a row mean that a failure now
would cost everything since then, which is an error.
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
from lightning_moe_ckpt.errors import Fenced, StorageError
from lightning_moe_ckpt.policies import AUDIENCES, Audience
from lightning_moe_ckpt.process import guard_forks
from lightning_moe_ckpt.storage import BadCopies, GenerationId, RankMarker, ReferencedEntry, SegmentEntry
from lightning_moe_ckpt.tiers._delta import DeltaFigures
from lightning_moe_ckpt.tiers._mirrors import Mirroring, RedundancyFigures
from lightning_moe_ckpt.tiers._rank_memory import RankMemory
from lightning_moe_ckpt.tiers._ring import SegmentRing
from lightning_moe_ckpt.tiers._sealed import Markers, SealedSegment

log = rank_logger(__name__)

Released = Callable[[GenerationId], None]
References = tuple[Sequence[ReferencedEntry], Sequence[ReferencedEntry]]
"""Older generations' records that complete a generation, and spare copies of its own records."""

_CLOSE_GRACE = timedelta(seconds=2)
"""Longest time that `close` lets a call under way go on."""
_CLOSE_TIMEOUT = timedelta(seconds=4)
"""Longest wait for the interrupted call after that; it may hang, and the thread is a daemon."""
_MOMENT = timedelta(seconds=1)
"""Longest wait for a call to fail before the process ends: an aborted upload leaves nothing in the bucket."""

_LEAST_SECONDS = 1e-6
_SMOOTHING = 0.8
"""Weight of earlier bytes and seconds in `rate`, per generation."""

_REMEMBERED = 32
"""Complete generations remembered by `holds`."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Reason why a generation is not in a tier, or not as it should be."""

    generation: GenerationId
    reason: str

    def __str__(self) -> str:
        return f"{self.generation}: {self.reason}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """Generation that completes a generation with only some operators."""

    generation: GenerationId | None
    """Newest generation complete in the tier on all ranks; `None` if there is none to complete from."""
    missing: frozenset[str]
    """Names of this rank's operators taken from the base."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteRequest:
    """Generation whose segments are about to come."""

    generation: GenerationId
    """Name of the generation, new to the worker."""
    plan_hash: str
    """Hash of the plan, equal on all ranks, or the commit fails."""
    plan_json: str
    """Plan as kept under `plan` in the marker's policy."""
    num_segments: int
    """Segments after which the generation is finished."""
    sizes: Sequence[int] = ()
    """Bytes that copies of the segments take, with gradients behind them; empty if as planned."""
    unix_time: int = field(default_factory=lambda: int(time.time()))
    """Begin of the generation, seconds since 1970, the same in every tier's marker."""
    on_released: Released | None = None
    """Called once, from any thread, when nothing reads the segments' memory; never if it is held until the end."""
    base: Base | None = None
    """Base of a generation with only some operators, else `None`."""
    follows: Sequence[GenerationId] = ()
    """Generations before this difference: a generation of everything, then differences, each in the tier before it."""
    bad: BadCopies = field(default_factory=dict)
    """Copies that turned out bad, and must not be named by the marker."""


@dataclass(kw_only=True, eq=False)
class WriteJob:
    """Generation under way in a tier."""

    request: WriteRequest
    on_released: Released | None = field(init=False)
    """Callback still to be called; `None` afterwards."""
    abandoned: bool = False
    handed_over: int = 0
    num_put: int = 0
    entries: list[SegmentEntry] = field(default_factory=list)
    """Entries of the stored files in the marker."""
    seconds: float = 0.0
    """Seconds that the worker has spent on the segments."""

    def __post_init__(self) -> None:
        self.on_released = self.request.on_released

    @property
    def generation(self) -> GenerationId:
        """Name of the generation."""
        return self.request.generation

    def is_whole(self) -> bool:
        """Return whether all segments are here, or none will come any more."""
        return self.abandoned or self.handed_over == self.request.num_segments


class TierWorker(ABC):
    """Bring generations of one rank into one tier, in the order of their begin.

    Markers are made for all tiers alike; the tier owns its `memories` on this node. `on_complete` is called from the
    worker's thread with each generation that is complete here.
    """

    takes_every = False
    """Whether every generation comes here; else only the newest available when no rank is busy."""
    paced = False
    """Whether a generation under way advances only with training steps, until `drain` is called."""
    takes_links = False
    """Whether differences come here one by one, if the generations before them have."""
    uses_references = False
    """Whether a generation with only some operators references an older complete one for the rest."""
    audiences: frozenset[Audience] = frozenset(AUDIENCES)
    """Audiences of the files that the tier takes."""

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
        """Whether a later incarnation of the run has begun; nothing more is kept and this process should stop."""
        self.lost_base = False
        """Whether the base of partial generations turned out to be gone, and no whole generation has begun since."""
        self.num_complete = self.nbytes_complete = 0
        """Generations completed here, and this rank's bytes in them."""
        self.rate: float | None = None
        """Bytes per second while not made to wait; recent generations count most. `None` before the first."""
        self.mirroring = Mirroring()
        """State that ranks capture for each other instead of sending."""
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
        """Whether no generation is under way, so that the next can be taken."""
        with self._changed:
            return not self._jobs

    @property
    def readers(self) -> int:
        """Generations that the tier may still read when newer ones are complete."""
        return 0 if self.takes_every else 1

    @property
    def deltas(self) -> DeltaFigures | None:
        """Figures on delta-encoded generations; `None` unless the tier may delta-encode."""
        return None

    @property
    def redundancy(self) -> RedundancyFigures | None:
        """Figures on bytes sent to other nodes and bytes already there; `None` except in the peer tier."""
        return None

    @property
    def wants_gradients(self) -> bool:
        """Whether the gradients that led to the newest generation are of use here."""
        return False

    @property
    def generations_kept(self) -> int | None:
        """Newest generations that stay here, as a number; `None` where another rule decides."""
        return None

    @property
    def newest(self) -> GenerationId | None:
        """Newest generation that this incarnation completed here, on this rank."""
        with self._changed:
            return self._complete[-1] if self._complete else None

    def holds(self, generation: GenerationId) -> bool:
        """Return whether a generation of this incarnation is complete here; the latest are remembered."""
        with self._changed:
            return generation in self._complete

    def gave_up(self, generation: GenerationId) -> bool:
        """Return whether a begun generation has ended incomplete on this rank, as far as `holds` remembers."""
        with self._changed:
            return generation not in self._jobs and generation not in self._complete

    def begin(self, request: WriteRequest) -> None:
        """Begin a generation; `add` brings its segments."""
        with self._changed:
            assert request.generation not in self._jobs, f"{request.generation} was begun before"
            self._jobs[request.generation] = WriteJob(request=request)
        if request.base is None:
            self.lost_base = False
        self._start_thread()

    def add(self, generation: GenerationId, segment: SealedSegment) -> None:
        """Hand over a sealed segment; the tier takes its part. Ignored if the generation has ended."""
        with self._changed:
            if (job := self._jobs.get(generation)) is not None:
                job.handed_over += 1
        if job is not None:
            self._queue.put(partial(self._take, job, segment.of(self.audiences)))

    def abandon(self, generation: GenerationId) -> None:
        """Drop a generation; its memory is released as soon as nothing reads it. Ignored after the generation's end."""
        with self._changed:
            job = self._jobs.get(generation)
        if job is not None:
            job.abandoned = True
            self._queue.put(partial(self._take, job, None))

    def complete_everywhere(self, generation: GenerationId) -> None:  # noqa: B027  # not every tier keeps older ones
        """Let go of older generations: all ranks hold `generation`. Called once per generation."""

    def give_up(self, generation: GenerationId) -> None:  # noqa: B027  # most tiers end what they do by themselves
        """Let go of `generation`: some rank has, so it will never be complete everywhere. Called once."""

    def forget(self) -> None:
        """Forget the complete generations: this rank's copies here are gone."""
        with self._changed:
            self._complete.clear()

    def take_failures(self) -> list[Failure]:
        """Return the failures since the last call."""
        return [self._failures.popleft() for _ in range(len(self._failures))]

    def drain(self, timeout: float) -> bool:
        """Wait until every fully handed over generation is complete, failed or abandoned; `False` after `timeout` s.

        A generation with segments still to come does not count: only further training could complete it.
        """
        with self._changed:
            return self._changed.wait_for(lambda: not any(map(WriteJob.is_whole, self._jobs.values())), timeout)

    def planned(  # noqa: B027  # not for every tier
        self, exchange: Exchange, ring: SegmentRing, sizes: Sequence[int]
    ) -> None:
        """Prepare for generations in this rank's ring, with the bytes of each of its segments, with gradients behind
        it. Collective. May raise together.
        """

    def let_go(self) -> None:  # noqa: B027  # of tiers that hold memory
        """Release memory that is held until a newer generation is complete: none will be soon."""

    def stepped(self, period_steps: int) -> None:  # noqa: B027  # of interest to paced tiers
        """Note a finished training step; generations are `period_steps` apart. Takes constant time."""

    def close(self) -> None:
        """Abandon unfinished generations and end the thread; `drain` before keeps them. May be repeated."""
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
        """Make the call under way fail and clean up within a moment: the process is about to be ended.

        From any thread, and without logging: the interrupted thread may hold the log's lock.
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
        """Bring a segment into the tier and return its files' entries in the marker. On the thread."""

    @abstractmethod
    def _finish(self, job: WriteJob, marker: RankMarker) -> None:
        """Complete the generation, whose segments are all there. On the thread."""

    def _references(self, job: WriteJob) -> References:
        """Return older generations' records of this rank's part, and spares; none for memory. On the thread."""
        return (), ()

    def _wire_nbytes(self, job: WriteJob) -> int:
        """Return the bytes moved for a complete generation. On the thread."""
        return sum(entry.nbytes for entry in job.entries)

    def _take_waited(self) -> float:
        """Return the seconds since the last call in which the worker was made to wait. On the thread."""
        return 0.0

    def _interrupt(self) -> None:  # noqa: B027  # not every medium can wait
        """Make the thread's call under way fail soon; called from another thread."""

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
        """Bring a segment into the tier, the last segment with the marker; without a segment, end the generation."""
        if self._jobs.get(job.generation) is not job:
            return  # the generation ended while this segment was in the queue
        try:
            if segment is not None and self._wanted(job):
                self._expect_not_fenced()
                started = time.perf_counter()
                job.entries += self._put(job, segment)
                job.num_put += 1
                job.seconds += time.perf_counter() - started
                if self._wanted(job):
                    if job.num_put < job.request.num_segments:
                        return
                    self._finish(job, self._marker(job))
                    self._completed(job)
            self._end(job)
        except BaseException as error:  # thread entry: the session takes it from `take_failures`
            if job.abandoned and isinstance(error, StorageError):  # whoever gave it up has said why
                log.info("%s: %s is not stored: a rank has given it up", self.name, job.generation)
            else:
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
            plan_hash=job.request.plan_hash,
            plan_json=job.request.plan_json,
            unix_time=job.request.unix_time,
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


# -- generations that never came

_NOISE = 1
"""Skipped generations in a row that are not logged; the metric counts them."""
_CALM = 8
"""Generations taken in a row that end a stretch, so that occasional skips are one stretch."""
NO_NOISE = 3
"""Windows in a row without a generation that are logged as an error."""


@dataclass(slots=True)
class _Stretch:
    first: GenerationId
    last: GenerationId
    num_skipped: int = 0
    num_taken: int = 0
    num_calm: int = 0
    """Generations taken since the last skip."""


class MissedWindows:
    """Count of windows in a row without a generation; the same on all ranks."""

    def __init__(self) -> None:
        self.in_a_row = 0
        """Windows since the newest generation."""
        self._newest: int | None = None

    @property
    def worth_a_word(self) -> int:
        """Windows in a row without a generation; 0 while their number may be noise."""
        return self.in_a_row if self.in_a_row >= NO_NOISE else 0

    def add(self, step: int, cause: str) -> None:
        """Count the window at boundary `step`, which gives no generation; `cause` includes the remedy."""
        self.in_a_row += 1
        if self.in_a_row == NO_NOISE:
            since = "since the start" if self._newest is None else f"since that of step {self._newest}"
            log.error(
                "%d windows in a row up to step %d gave no checkpoint, and there is none in any tier %s: %s Training goes on, "
                "and a failure would cost all of that",
                *(self.in_a_row, step, since, cause),
            )

    def taken(self, step: int) -> None:
        """Note a generation of boundary `step`."""
        self._newest = step
        self.close()

    def close(self) -> None:
        """End the row of windows, with a log line if the row was logged before."""
        number, self.in_a_row = self.in_a_row, 0
        if number >= NO_NOISE:
            log.warning("checkpoints are taken again: %d windows in a row gave none", number)


class SkipCounter:
    """Count of the generations that one tier, named in messages, has skipped."""

    def __init__(self, tier: str) -> None:
        self.total = 0
        """Generations skipped so far."""
        self._tier = tier
        self._stretch: _Stretch | None = None

    def skipped(self, generation: GenerationId, *, meant: bool = False) -> None:
        """Count a generation never taken: a newer one is complete. Logs nothing if the tier is `meant` to rest."""
        if meant:
            self.total += 1
            return
        if self._stretch is None:
            self._stretch = _Stretch(generation, generation)
        self.total += 1
        self._stretch.num_skipped += 1
        self._stretch.last, self._stretch.num_calm = generation, 0
        if self._stretch.num_skipped == _NOISE + 1:
            log.info(
                "%s is slower than training: generations from %s on are skipped, the newest goes first whenever it is "
                "free. Take generations less often if that goes on",
                *(self._tier, self._stretch.first),
            )

    def taken(self) -> None:
        """Count a generation that the tier takes."""
        if (stretch := self._stretch) is None:
            return
        stretch.num_taken, stretch.num_calm = stretch.num_taken + 1, stretch.num_calm + 1
        if stretch.num_calm == _CALM:
            stretch.num_taken -= _CALM  # taken after the stretch, not during it
            self.close()

    def close(self) -> None:
        """End the stretch of skipped generations, if there is one, with a log line if it was long."""
        stretch, self._stretch = self._stretch, None
        if stretch is not None and stretch.num_skipped > _NOISE:
            log.info(
                "%s was slower than training: %d generations were skipped, from %s to %s, and %d taken meanwhile",
                *(self._tier, stretch.num_skipped, stretch.first, stretch.last, stretch.num_taken),
            )
