"""One run's checkpoints under one URL: what may be restored, and the protocol that makes more of it.

```text
every rank     put_segment ... put_segment, put_marker          data, then the statement that it is durable
coordinator    commit                                           markers of all ranks -> `_COMMITTED`
coordinator    retain                                           watermark -> log, then delete
next start     open, promote, candidates, (verify), open_epoch  pick inside the loop: the log has not moved meanwhile
```

Only create-exclusive is asked of the medium: no rename, no overwrite, no clock. Crash points are in `FORMAT.md`.

Threads: `put_*` and `read_*` keep no state and may be called from any thread at once. The rest
belongs to the coordinator (rank 0), one thread at a time: the main thread at start, the persist thread afterwards.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Literal

from lightning_moe_ckpt.errors import (
    Corrupt,
    NoUsableGeneration,
    StorageError,
)
from lightning_moe_ckpt.storage._backend import Backend
from lightning_moe_ckpt.storage._catalog import (
    Contents,
    RunsOfGenerations,
    delete_generation,
    read_catalog,
    read_committed_marker,
)
from lightning_moe_ckpt.storage._commit import await_markers, complete_markers, publish
from lightning_moe_ckpt.storage._coordination import Coordination, begin_run, expect_nothing_lost, losses, read_history
from lightning_moe_ckpt.storage._entries import SegmentEntry
from lightning_moe_ckpt.storage._log import Lineage, Log, run_event
from lightning_moe_ckpt.storage._names import (
    LOG_PREFIX,
    SNAP_PREFIX,
    GenerationId,
    marker_key,
    segment_key,
)
from lightning_moe_ckpt.storage._open import memory_tag, place_of
from lightning_moe_ckpt.storage._records import Commit, RankMarker
from lightning_moe_ckpt.storage._retention import Retention, doomed_generations
from lightning_moe_ckpt.storage._survey import Survey

log = logging.getLogger(__name__)

Resume = Literal["auto", "must", "never", "memory"]


class RunStore:
    """The checkpoints of one run. Make one with `open` on the coordinator and with `join` on every other rank."""

    def __init__(self, backend: Backend, run_id: str, *, coordination: Coordination | None = None) -> None:
        self.run_id = run_id
        self.rejected: list[tuple[str, str]] = []
        """What the last `candidates` passed over, newest first: generation and reason."""
        self.unreadable: list[tuple[str, str]] = []
        """The part of `rejected` that is a loss: committed and not left behind by the run, but not readable."""
        self.lenders: list[Commit] = []
        """What the last `candidates` passed over, but operators may still be taken from; newest first."""
        self._backend = backend
        self._coordination = coordination

    @classmethod
    def open(cls, backend: Backend, *, resume: Resume) -> RunStore:
        """Find the run under the URL, or begin one.

        Args:
            backend: from `open_backend`; written to once, to see that it can be and refuses existing keys.
            resume: `auto` and `memory` continue the newest run or begin the first; `must` continues or raises; `never`
                begins another run, beside which the older one stays until the new one has more than it keeps.

        Raises:
            ConfigurationError: the URL cannot be written.
            NoUsableGeneration: `must`, and there is no run.
            Corrupt: no entry of the log can be read.
        """
        log.debug("%s: creates exclusively: %s", backend.url, backend.creates_exclusively)
        run_log = Log(backend)
        while True:
            history = read_history(run_log, forgiving=resume == "never")
            if history is not None and resume != "never":
                return cls(
                    backend, history.run_id, coordination=Coordination(run_log, history, RunsOfGenerations(backend))
                )
            if resume != "never":
                expect_nothing_lost(backend)
            if resume == "must":
                raise NoUsableGeneration(f'{backend.url} holds no run, and resume="must" asks for one. Check the URL.')
            history = begin_run(history, run_log, read_catalog(backend))
            if run_log.append(run_event(history.run_id), history):
                log.info("%s: run %s begins", backend.url, history.run_id)
                return cls(
                    backend,
                    history.run_id,
                    coordination=Coordination(run_log, history, RunsOfGenerations(backend)),
                )

    @classmethod
    def join(cls, backend: Backend, *, run_id: str) -> RunStore:
        """The store of a rank that only reads and writes data; `run_id` comes from the coordinator by broadcast."""
        return cls(backend, run_id)

    @property
    def url(self) -> str:
        """Where the run is stored."""
        return self._backend.url

    @property
    def epoch(self) -> int | None:
        """This life's epoch; `None` before `open_epoch`, and on ranks that joined."""
        return None if self._coordination is None else self._coordination.epoch

    @property
    def life(self) -> str:
        """Name of this life; empty before `open_epoch`, and on ranks that joined."""
        return self._coordination.history.life if self._coordination is not None and self.epoch is not None else ""

    @property
    def lineage(self) -> Lineage | None:
        """What markers of rank 0 say of this life's past; `None` before `open_epoch`, and on ranks that joined."""
        return None if self._coordination is None else self._coordination.lineage

    @property
    def place(self) -> str:
        """The URL by which all processes know where the run is stored."""
        return place_of(self.url)

    @property
    def memory_tag(self) -> str:
        """By which shared memory of the run at this place is found. Coordinator only; for good after `open_epoch`."""
        return memory_tag(self._coordinator().history.key, self.url)

    def name(self, step: int) -> GenerationId:
        """A generation of this life, after `open_epoch`."""
        return GenerationId(step=step, epoch=self._coordinator().opened_epoch(), life=self.life)

    # Data: any rank, any thread.

    def put_segment(self, generation: GenerationId, rank: int, step: int, view: memoryview) -> str:
        """Store a sealed segment; durable when this returns its key. The caller may then reuse the memory."""
        key = segment_key(generation, rank, step)
        self._backend.put(key, view)
        return key

    def put_marker(self, marker: RankMarker) -> None:
        """State that all segments of `marker` are durable. Call it last."""
        self._backend.put(marker_key(marker.generation, marker.rank), marker.to_bytes())

    def read_marker(self, commit: Commit, rank: int) -> RankMarker:
        """Read the marker the manifest vouches for.

        Raises:
            Corrupt: it is not the one that was committed.
            KeyMissing: it is gone.
        """
        return read_committed_marker(self._backend, commit, rank)

    def read_range(self, entry: SegmentEntry, start: int, out: memoryview) -> None:
        """Fill `out` with bytes of a segment from `start` on, unverified.

        Raises:
            Corrupt: the whole segment was asked for and has another size, or it ends before.
            StorageError: it cannot be read, or is gone.
        """
        if start == 0 and out.nbytes == entry.nbytes:
            self._backend.get_into(entry.key, out)
        else:
            self._backend.get_range(entry.key, start, out)

    # Coordination: rank 0, one thread at a time.

    def promote(self) -> list[GenerationId]:
        """Commit what the preceding life finished on every rank but was killed before committing; call before a pick.

        Only the immediately preceding epoch: what it left undone nobody has started over yet. If that life still
        lives, it writes the same manifest, and one of the two finds it done.

        Returns:
            Generations committed, oldest first.
        """
        coordination = self._coordinator()
        coordination.refresh()
        return [g.generation for g in self._promotable(coordination) if self._promote(g)]

    def candidates(self) -> list[Commit]:
        """Committed generations of this run that may be restored, newest first; the rest is in `rejected`.

        Among them are those that lost some of what they need, and name older copies: reading them tells whether these do.
        Also notes the position in the log that `open_epoch` builds on.
        """
        coordination = self._coordinator()
        coordination.refresh()  # before the listing: whoever moves the watermark afterwards makes `open_epoch` refuse
        catalog = read_catalog(self._backend)
        coordination.committed = frozenset(g for g, contents in catalog.items() if contents.committed)
        survey = Survey.take(self._backend, coordination.history, catalog)
        passed_over = [each for each in survey.passed_over if not each.may_be_restored]
        self.rejected = [(str(each.generation), each.reason) for each in passed_over]
        self.unreadable = [(str(each.generation), each.reason) for each in passed_over if each.is_loss]
        for each in survey.passed_over:
            as_it_should_be = logging.DEBUG if each.is_for_others else logging.INFO
            level = logging.WARNING if each.is_loss else as_it_should_be
            fate = "has to do with older copies" if each.may_be_restored else "is skipped"
            log.log(level, "%s %s: %s", each.generation, fate, each.reason)
        for where, reason in losses(self._backend, coordination.history, survey.offered):
            self.unreadable.append((where, reason))
            log.warning("%s: %s", where, reason)
        self.lenders = survey.lenders
        coordination.offered = frozenset(commit.generation for commit in survey.offered)
        return survey.offered

    def why_dead(self, generation: GenerationId) -> str | None:
        """Why a generation must not be restored, wherever its bytes are; `None` if it may. As of the last `candidates`."""
        return self._coordinator().history.why_dead(generation)

    def why_foreign(self, generation: GenerationId, seen: GenerationId | None) -> str | None:
        """Why a generation in memory is of another past than storage as it stands; `None` if it is of this one, or dead.

        Args:
            generation: in memory.
            seen: the newest commit that was known when memory took it.
        """
        coordination = self._coordinator()
        history = coordination.history
        if generation in coordination.committed or history.why_left_behind(generation) is not None:
            return None
        if (unknown := history.why_unknown(generation)) is not None:
            return unknown
        if seen is None or seen in coordination.committed or history.why_left_behind(seen) is not None:
            return None
        return f"when it was taken storage had {seen}, which is not there now"

    def may_need(self, generation: GenerationId, has_more: Callable[[Commit], bool] = lambda _: False) -> bool:
        """Whether a later start may restore a copy of `generation` that is in memory. On any rank; reads the medium.

        It does not where this run was replaced, the log has left the generation behind, or what is committed is as new.

        Args:
            generation: in memory.
            has_more: whether memory has something newer than what a commit that is as new consists of.

        Raises:
            StorageError: the medium failed.
        """
        history = Log(self._backend).read()
        if history is None or history.run_id != self.run_id or history.why_dead(generation) is not None:
            return False
        survey = Survey.take(self._backend, history, read_catalog(self._backend))
        return all(commit.generation < generation or has_more(commit) for commit in survey.usable)

    def open_epoch(
        self, resumed: GenerationId | None, *, volatile: Collection[GenerationId] = (), foreign: bool = False
    ) -> int | None:
        """Begin this life from one of the last `candidates`, from a copy in memory, or from nothing.

        Args:
            resumed: what all ranks have.
            volatile: generations of this run that ranks have in memory, committed or not.
            foreign: whether `resumed` may be of a past that the log does not know; it becomes part of this run's.

        Returns:
            The new epoch, past all that are stored or in memory; `None` if another process wrote to the log since
            `candidates`: pick again.

        Raises:
            ValueError: `resumed` is neither a candidate nor a generation in memory that the log allows.
        """
        coordination = self._coordinator()
        if resumed is not None and resumed not in coordination.offered:
            dead = coordination.history.why_dead(resumed) if resumed in volatile else "not one of the candidates"
            if dead is not None and not (foreign and resumed in volatile):
                raise ValueError(f"`open_epoch({resumed})`: {dead}. Resume from what `candidates` and memory offer.")
        if not coordination.open(resumed, [*read_catalog(self._backend), *volatile]):
            return None
        log.info(
            "%s: epoch %d begins from %s; a process of an earlier start that still runs will find that out and stop",
            self.url,
            coordination.epoch,
            resumed or "nothing",
        )
        self._sweep_leftovers()
        return coordination.epoch

    def commit(self, own: RankMarker, *, timeout: timedelta, cancelled: Callable[[], bool] = lambda: False) -> Commit:
        """Wait until every rank's marker agrees with ours and is true, then make the generation visible.

        Args:
            own: the coordinator's marker, already put.
            timeout: how long to wait for the other ranks.
            cancelled: asked now and then while waiting; whether to give up.

        Raises:
            Fenced: a later life has begun.
            StorageError: time is up or the medium failed; the previous generation stays the newest.
            Corrupt: ranks disagree, or borrow from a generation that is not committed or was given up.
        """
        coordination = self._coordinator()
        if own.generation != self.name(own.generation.step):
            raise ValueError(f"`commit`: {own.generation} is not of this life, epoch {coordination.epoch}.")
        stored = await_markers(
            self._backend, own, timeout=timeout, cancelled=cancelled, check_fence=coordination.catch_up
        )
        coordination.catch_up()
        while not coordination.advance(None):
            coordination.catch_up()
        return publish(self._backend, stored, coordination.history)

    def retain(self, retention: Retention) -> list[GenerationId]:
        """Say in the log what stays, then delete what nobody may restore any more.

        What this life began from is the newest until it has committed one of its own, and the newest always stays. With each
        stays what it needs of older ones.

        Returns:
            Generations deleted, oldest first.

        Raises:
            Fenced: a later life has begun.
            StorageError: the medium failed; the next call goes on where this one stopped.
        """
        coordination = self._coordinator()
        advanced = False
        while not advanced:  # again if `moe-ckpt gc` wrote to the log meanwhile
            coordination.catch_up()
            catalog = read_catalog(self._backend)
            survey = Survey.take(self._backend, coordination.history, catalog)
            advanced = coordination.advance(survey.give_up(coordination.history, retention, catalog))
        doomed = doomed_generations(
            catalog, coordination.history, epoch=coordination.opened_epoch(), run_of=coordination.runs.of
        )
        for generation in doomed:
            delete_generation(self._backend, catalog[generation])
        return list(doomed)

    def close(self) -> None:
        """Release the backend."""
        self._backend.close()

    def _coordinator(self) -> Coordination:
        if self._coordination is None:
            raise ValueError("`RunStore.join` gives a store for data; only the coordinator's `open` may coordinate.")
        return self._coordination

    def _promotable(self, coordination: Coordination) -> list[Contents]:
        """Uncommitted generations of the preceding epoch, newer than every committed one; oldest first."""
        history = coordination.history
        if coordination.log.num_lost or coordination.epoch is not None:
            return []  # which epoch preceded is not known, or we are it
        catalog = read_catalog(self._backend)
        alive = [contents for generation, contents in catalog.items() if history.why_dead(generation) is None]
        newest = max((c.generation.step for c in alive if c.committed), default=-1)
        finished = [c for c in alive if not c.committed and c.ranks and c.generation.epoch == history.last_epoch]
        return sorted((c for c in finished if c.generation.step > newest), key=lambda c: c.generation)

    def _promote(self, contents: Contents) -> bool:
        try:
            stored = complete_markers(self._backend, self.run_id, contents)
            publish(self._backend, stored, self._coordinator().history)
        except (Corrupt, StorageError) as error:
            log.info("%s cannot be promoted: %s", contents.generation, error)
            return False
        log.info("%s was complete on every rank and is committed now", contents.generation)
        return True

    def _sweep_leftovers(self) -> None:
        try:
            for prefix in (LOG_PREFIX, SNAP_PREFIX):
                self._backend.sweep(prefix)
        except StorageError as error:  # the epoch is open already; leftovers cost space only
            log.warning("leftovers of interrupted writes stay for now: %s", error)
