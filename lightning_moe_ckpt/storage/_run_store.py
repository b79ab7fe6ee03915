"""A run's checkpoints under one URL: which generations may be restored, and the protocol that adds new ones.

```text
every rank     put_segment ... put_segment, put_marker          data, then the marker that says it is durable
coordinator    commit                                           markers of all ranks -> `_COMMITTED`
coordinator    retain                                           watermark -> log, then delete
next start     open, promote, candidates, (verify), open_incarnation  pick inside the loop: the log has not moved meanwhile
```

The medium has to support exclusive creation only: no rename, no overwrite, no clock. `FORMAT.md` lists crash points.

Threads: `put_*` and `read_*` keep no state, so several threads may call them at once. Only the coordinator (rank 0)
calls the other methods, from one thread at a time: the main thread at start, the persist thread afterwards.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.errors import Corrupt, Fenced, NoUsableGeneration, StorageError
from lightning_moe_ckpt.storage._backend import Backend
from lightning_moe_ckpt.storage._catalog import (
    Contents,
    constants_bytes,
    constants_in,
    delete_generation,
    read_catalog,
    read_committed_marker,
    read_constants,
    run_reader,
    sweep_constants,
)
from lightning_moe_ckpt.storage._commit import (
    Coordination,
    await_markers,
    begin_run,
    complete_markers,
    expect_nothing_lost,
    publish,
    put_receipt,
    read_history,
    read_run,
)
from lightning_moe_ckpt.storage._entries import SegmentEntry
from lightning_moe_ckpt.storage._json import digest_of
from lightning_moe_ckpt.storage._log import Lineage, Log
from lightning_moe_ckpt.storage._markers import Commit, RankMarker
from lightning_moe_ckpt.storage._names import (
    CONST_PREFIX,
    LOG_PREFIX,
    SNAP_PREFIX,
    GenerationId,
    const_key,
    marker_key,
    segment_key,
)
from lightning_moe_ckpt.storage._open import memory_tag, place_of
from lightning_moe_ckpt.storage._retention import Retention, Survey, doomed_generations

log = rank_logger(__name__)

Resume = Literal["auto", "must", "never", "memory"]


class RunStore:
    """Checkpoints of one run. Make a store with `open` on the coordinator and with `join` on every other rank."""

    def __init__(self, backend: Backend, run_id: str, *, coordination: Coordination | None = None) -> None:
        self.run_id = run_id
        self.rejected: list[tuple[str, str]] = []
        """Generations left out by the last `candidates`, newest first, each with the reason."""
        self.unreadable: list[tuple[str, str]] = []
        """Losses among `rejected`: committed generations that the log allows but that cannot be read."""
        self.sources: list[Commit] = []
        """Generations left out by the last `candidates` whose operators others may use; newest first."""
        self._backend = backend
        self._coordination = coordination

    @classmethod
    def open(cls, backend: Backend, *, resume: Resume) -> RunStore:
        """Find the run under the URL, or begin one. One probe object tests that the backend is writable and refuses
        existing keys.

        `auto` and `memory` continue the newest run or begin the first; `must` continues or raises; `never` begins
        another run. The older run stays until the new one has more generations than it keeps.

        Raises `ConfigurationError` if the URL cannot be written, `NoUsableGeneration` with `must` if there is no run,
        `Corrupt` if no entry of the log can be read.
        """
        log.debug("%s: creates exclusively: %s", backend.url, backend.creates_exclusively)
        run_log = Log(backend)
        while True:
            history = read_history(run_log, forgiving=resume == "never")
            if history is None or resume == "never":
                if resume != "never":
                    expect_nothing_lost(backend)
                if resume == "must":
                    raise NoUsableGeneration(
                        f'{backend.url} holds no run, and resume="must" asks for one. Check the URL.'
                    )
                history = begin_run(history, run_log, read_catalog(backend))
                if not run_log.append({"type": "run", "run_id": history.run_id}, history):
                    continue
                log.info("%s: run %s begins", backend.url, history.run_id)
            return cls(backend, history.run_id, coordination=Coordination(run_log, history, run_reader(backend)))

    @classmethod
    def of_ended(cls, backend: Backend) -> RunStore:
        """Open the newest run for generations in memory of its ended processes. Raises `NoUsableGeneration`, `Corrupt`."""
        run_log = Log(backend)
        history = read_run(run_log, backend)
        if run_log.num_lost:
            raise Corrupt(
                f"{backend.url}: the newest log entry cannot be read, and may be of a later start. Start the job."
            )
        number = history.last_incarnation
        return cls(backend, history.run_id, coordination=Coordination(run_log, history, run_reader(backend), number))

    @classmethod
    def join(cls, backend: Backend, *, run_id: str) -> RunStore:
        """Make the store of a rank that only reads and writes data; the coordinator broadcasts `run_id`."""
        return cls(backend, run_id)

    @property
    def url(self) -> str:
        return self._backend.url

    @property
    def incarnation(self) -> int | None:
        """Number of this incarnation; `None` before `open_incarnation`, and on ranks that joined."""
        return None if self._coordination is None else self._coordination.incarnation

    @property
    def nonce(self) -> str:
        """Random name of this incarnation; empty before `open_incarnation`, and on ranks that joined."""
        known = self._coordination
        return "" if known is None or known.incarnation is None else known.history.nonce

    @property
    def lineage(self) -> Lineage | None:
        """Ancestors of this incarnation, for rank 0's markers; `None` before `open_incarnation`, and on ranks that joined."""
        return None if self._coordination is None else self._coordination.lineage

    @property
    def place(self) -> str:
        """URL of the run, spelled alike in all processes: paths have no symbolic links."""
        return place_of(self.url)

    @property
    def memory_tag(self) -> str:
        """Common part of the run's names in shared memory. Coordinator only; final after `open_incarnation`."""
        return memory_tag(self._coordinator().history.key, self.url)

    def name(self, step: int) -> GenerationId:
        """Return the name of this incarnation's generation at `step`; call after `open_incarnation`."""
        return GenerationId(step=step, incarnation=self._coordinator().opened_incarnation(), nonce=self.nonce)

    def tell(self, figures: Callable[[], Mapping[str, object]]) -> None:
        """Set the source of figures, JSON values for people, in this job's later log entries. Coordinator only."""
        self._coordinator().figures = figures

    def told(self) -> Mapping[str, object]:
        """Return the newest figures that a job has told for this run's log; none before. Coordinator only."""
        return self._coordinator().log.figures(self.run_id)

    # Data: any rank, any thread.

    def put_segment(self, generation: GenerationId, rank: int, step: int, view: memoryview) -> str:
        """Store a sealed segment and return its key. On return the segment is durable, and the memory may be reused."""
        key = segment_key(generation, rank, step)
        self._backend.put(key, view)
        return key

    def put_constants(self, generation: GenerationId, digest: str, view: memoryview) -> str:
        """Store a file of constants, a segment, under the incarnation of `generation`, and return its key."""
        key = const_key(generation, digest, "safetensors")
        self._backend.put(key, view)
        return key

    def describe_constants(self, generation: GenerationId, parts: Iterable[bytes]) -> str:
        """Store the description of durable files of constants, and return its key, for policies of this incarnation.

        `parts` are the results of `described` for each rank's files.
        """
        files = [file for part in parts for file in constants_in(part, "constants of a rank")]
        data = constants_bytes(files)
        key = const_key(generation, digest_of(data), "done")
        self._backend.put(key, data)
        return key

    @staticmethod
    def described(files: Sequence[SegmentEntry]) -> bytes:
        """Return the description of constants' files, for the coordinator."""
        return constants_bytes(files)

    def read_constants(self, policy: Mapping[str, Any]) -> Sequence[SegmentEntry]:
        """Return a policy's files of constants; none if it names none. Raises `Corrupt` and `KeyMissing`."""
        return read_constants(self._backend, policy)

    def put_marker(self, marker: RankMarker) -> None:
        """State that all segments of `marker` are durable. Call it last."""
        parts = marker.parts()
        self._backend.put(marker_key(marker.generation, marker.rank), *parts)
        put_receipt(self._backend, marker, parts)

    def read_marker(self, commit: Commit, rank: int) -> RankMarker:
        """Read a rank's marker, as `read_committed_marker` does."""
        return read_committed_marker(self._backend, commit, rank)

    def read_range(self, entry: SegmentEntry, start: int, out: memoryview) -> None:
        """Fill `out` with bytes of a segment from `start` on, without checking digests. Raises `Corrupt` if the file
        ends before `out` is full, or the whole file was requested and has another size; `StorageError` if the segment
        cannot be read, or is gone.
        """
        if start == 0 and out.nbytes == entry.nbytes:
            self._backend.get_into(entry.key, out)
        else:
            self._backend.get_range(entry.key, start, out)

    # Coordination: rank 0, one thread at a time.

    def promote(self) -> list[GenerationId]:
        """Commit generations that the preceding incarnation finished on every rank but did not commit.

        Call this before `candidates`. Older incarnations are left alone: a later one has already begun from another generation. If the
        preceding process still runs, it writes the same manifest; the second writer finds it there. Return committed generations, oldest
        first.
        """
        coordination = self._coordinator()
        coordination.refresh()
        return [g.generation for g in self._promotable(coordination) if self._promote(g)]

    def candidates(self) -> list[Commit]:
        """List the committed generations of this run that may be restored, newest first; `rejected` has the rest.

        The list includes generations that lost needed files but name older copies; only a restore shows whether the
        copies suffice. The call also remembers the position in the log for `open_incarnation`.
        """
        coordination = self._coordinator()
        coordination.refresh()  # before the listing: a watermark moved afterwards makes `open_incarnation` refuse
        coordination.catalog = read_catalog(self._backend)
        survey = Survey.take(self._backend, coordination.history, coordination.catalog)
        passed_over = [skipped for skipped in survey.passed_over if not skipped.may_be_restored]
        self.rejected = [(str(skipped.generation), skipped.reason) for skipped in passed_over]
        self.unreadable = [(str(skipped.generation), skipped.reason) for skipped in passed_over if skipped.is_loss]
        for skipped in survey.passed_over:
            as_it_should_be = logging.DEBUG if skipped.is_for_others else logging.INFO
            level = logging.WARNING if skipped.is_loss else as_it_should_be
            fate = "has to do with older copies" if skipped.may_be_restored else "is skipped"
            log.log(level, "%s %s: %s", skipped.generation, fate, skipped.reason)
        if not survey.offered and (coordination.history.has_commits or coordination.history.watermark):
            reason = "its log says that generations were committed, and none of them is there"
            self.unreadable.append((self.url, reason))
            log.warning("%s: %s", self.url, reason)
        self.sources = survey.sources
        coordination.offered = frozenset(commit.generation for commit in survey.offered)
        return survey.offered

    def why_dead(self, generation: GenerationId) -> str | None:
        """Return why a generation must not be restored from any tier, by the last `candidates`; `None` if it may."""
        return self._coordinator().history.why_dead(generation)

    def why_foreign(self, generation: GenerationId, seen: GenerationId | None) -> str | None:
        """Return why a generation in memory does not descend from the stored log; `None` if it does, or is dead.

        The newest commit known when memory took the generation is `seen`.
        """
        coordination = self._coordinator()
        history = coordination.history
        committed = {each for each, contents in coordination.catalog.items() if contents.committed}
        if generation in committed or history.why_left_behind(generation) is not None:
            return None
        if (unknown := history.why_unknown(generation)) is not None:
            return unknown
        if seen is None or seen in committed or history.why_left_behind(seen) is not None:
            return None
        return f"when it was taken storage had {seen}, which is not there now"

    def may_need(self, generation: GenerationId, has_more: Callable[[Commit], bool] = lambda _: False) -> bool:
        """Whether a later start may restore the copy of `generation` in memory. Any rank may ask; reads the medium.

        False if another run replaced this one, the log has given the generation up, or a commit is as new, unless memory `has_more`
        than that. Raises `StorageError` if the medium failed.
        """
        history = Log(self._backend).read()
        if history is None or history.run_id != self.run_id or history.why_dead(generation) is not None:
            return False
        survey = Survey.take(self._backend, history, read_catalog(self._backend))
        return all(commit.generation < generation or has_more(commit) for commit in survey.usable)

    def is_void(self, generation: GenerationId) -> bool:
        """Return whether a generation was found to be wrong, by the last `candidates`."""
        return self._coordinator().history.is_void(generation)

    def condemn(self, step: int, why: str) -> bool:
        """Make all generations behind `step` void, for every reader. Return false, and change nothing, if storage has none up to
        there. Coordinator only, from any thread.

        This incarnation ends by that: its next commit is refused. Raises `Fenced` if it has ended before.
        """
        run_log, figures = Log(self._backend), self._coordinator().figures
        while True:
            history = run_log.read()
            if history is None or (history.run_id, history.last_incarnation) != (self.run_id, self.incarnation):
                raise Fenced(f"{self.url}: a later start of this job has begun. This process must stop.")
            after = history.condemned(step)
            if not Survey.take(self._backend, after, read_catalog(self._backend)).usable:
                return False
            event = {"type": "void", "incarnation": self.incarnation, "step": step, "why": why}
            if run_log.append(event | {"figures": dict(figures()), "unix_time": round(time.time(), 3)}, after):
                return True

    def open_incarnation(
        self, resumed: GenerationId | None, *, volatile: Collection[GenerationId] = (), foreign: bool = False
    ) -> int | None:
        """Begin this incarnation from one of the last `candidates`, from a copy in memory, or from nothing (`None`):
        from what all ranks restored. Return its number, above all numbers stored or in memory; `None` if another
        process wrote to the log since `candidates`: the caller then has to choose again.

        `volatile` are generations of this run in the ranks' memory, committed or not. With `foreign` `resumed` may come
        from a past that the log does not know; the log then adopts this past. Raises `ValueError` if `resumed` is
        neither a candidate nor a generation in memory that the log allows.
        """
        coordination = self._coordinator()
        if resumed is not None and resumed not in coordination.offered:
            dead = coordination.history.why_dead(resumed) if resumed in volatile else "not one of the candidates"
            if dead is not None and not (foreign and resumed in volatile):
                raise ValueError(
                    f"`open_incarnation({resumed})`: {dead}. Resume from what `candidates` and memory offer."
                )
        if not coordination.open(resumed, [*coordination.catalog, *volatile]):
            return None
        log.info(
            "%s: incarnation %d begins from %s; a process of an earlier start that still runs will find that out and stop",
            self.url,
            coordination.incarnation,
            resumed or "nothing",
        )
        try:
            for prefix in (LOG_PREFIX, SNAP_PREFIX, CONST_PREFIX):
                self._backend.sweep(prefix)
        except StorageError as error:  # the incarnation has begun; leftovers only cost space
            log.warning("unfinished writes stay for now: %s", error)
        return coordination.incarnation

    def commit(self, own: RankMarker, *, timeout: timedelta, cancelled: Callable[[], bool] = lambda: False) -> Commit:
        """Wait until every rank's marker agrees with `own`, already stored, and all its files are there, then publish
        the manifest.

        Waiting ends after `timeout`, or once `cancelled`, which is polled.

        Raises `Fenced` if a later incarnation has begun; `StorageError` if time is up or the medium failed (the
        previous generation stays the newest); `Corrupt` if ranks disagree, or refer to a generation that is not
        committed or was given up.
        """
        coordination = self._coordinator()
        if own.generation != self.name(own.generation.step):
            raise ValueError(
                f"`commit`: {own.generation} is not of this incarnation, number {coordination.incarnation}."
            )
        stored = await_markers(
            self._backend, own, timeout=timeout, cancelled=cancelled, check_fence=coordination.catch_up
        )
        coordination.catch_up()
        while not coordination.advance(None):
            coordination.catch_up()
        return publish(self._backend, stored, coordination.history)

    def commit_ended(self, own: RankMarker, *, timeout: timedelta, check: Callable[..., Sequence[str]]) -> Commit:
        """Commit a generation of an ended incarnation, like `commit`; `check` returns faults of all ranks' markers.

        A log entry comes first: a start that has looked at storage before has to look again.
        """
        coordination = self._coordinator()
        fence = coordination.catch_up
        stored = await_markers(self._backend, own, timeout=timeout, check_fence=fence, by_receipts=False)
        if reasons := check([each.marker for each in stored]):
            raise Corrupt(f"{'; '.join(reasons)}.")
        event = {"type": "flush", "incarnation": coordination.incarnation, "step": own.generation.step}
        while not coordination.append(event, coordination.history):
            pass
        return publish(self._backend, stored, coordination.history)

    def retain(self, retention: Retention, audited: int | None = None) -> list[GenerationId]:
        """Record in the log which generations stay, then delete those that nobody may restore any more. The newest up to step
        `audited` stays besides, see `Survey.reasons`.

        The newest generation always stays: until the first own commit, this incarnation's starting point. Older
        generations whose files a kept one needs stay as well. Return deleted generations, oldest first.

        Raises `Fenced` if a later incarnation has begun; `StorageError` if the medium failed (the next call goes on
        from there).
        """
        coordination = self._coordinator()
        advanced = False
        while not advanced:  # again if `moe-ckpt gc` wrote to the log meanwhile
            coordination.catch_up()
            catalog = coordination.catalog = read_catalog(self._backend)
            survey = Survey.take(self._backend, coordination.history, catalog)
            advanced = coordination.advance(survey.give_up(coordination.history, retention, audited))
        doomed = doomed_generations(
            catalog, coordination.history, incarnation=coordination.opened_incarnation(), run_of=coordination.run_of
        )
        for generation in doomed:
            delete_generation(self._backend, catalog[generation])
        if any(each.incarnation < coordination.opened_incarnation() for each in doomed):
            left = {each: contents for each, contents in catalog.items() if each not in doomed}
            sweep_constants(self._backend, left, incarnation=coordination.opened_incarnation())
        coordination.log.compact()
        return list(doomed)

    def close(self) -> None:
        self._backend.close()

    def _coordinator(self) -> Coordination:
        if self._coordination is None:
            raise ValueError("`RunStore.join` gives a store for data; only the coordinator's `open` may coordinate.")
        return self._coordination

    def _promotable(self, coordination: Coordination) -> list[Contents]:
        """List uncommitted generations of the preceding incarnation that are newer than every commit; oldest first."""
        history = coordination.history
        if coordination.log.num_lost or coordination.incarnation is not None:
            return []  # the preceding incarnation is not known, or it is this one
        catalog = read_catalog(self._backend)
        alive = [contents for generation, contents in catalog.items() if history.why_dead(generation) is None]
        newest = max((c.generation.step for c in alive if c.committed), default=-1)
        finished = [
            c for c in alive if not c.committed and c.ranks and c.generation.incarnation == history.last_incarnation
        ]
        return sorted((c for c in finished if c.generation.step > newest), key=lambda c: c.generation)

    def _promote(self, contents: Contents) -> bool:
        try:
            stored = complete_markers(self._backend, self.run_id, contents, by_receipts=True)
            publish(self._backend, stored, self._coordinator().history)
        except (Corrupt, StorageError) as error:
            # A kill leaves incomplete generations; a failure of storage is another matter.
            level = logging.WARNING if isinstance(error, StorageError) else logging.INFO
            log.log(level, "%s cannot be promoted: %s", contents.generation, error)
            return False
        log.info("%s was complete on every rank and is committed now", contents.generation)
        return True
