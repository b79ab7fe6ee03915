"""Coordinate a run: read its state at start, append to the log, and make generations visible.

A start that finds nothing begins a new run. So a loss must not look like an empty place: generations without a log, or
a log whose generations are all gone, are reported. (The backend itself refuses links in place of folders.)

A commit waits for every rank's marker, checks the markers against the listing, and publishes last: a reader that sees
`_COMMITTED` must find every object, so the manifest is created last, and exclusively. Its bytes follow from the markers
alone. If the same bytes are already there, the commit succeeded, whoever wrote them.

Reading the markers of ten thousand ranks would take minutes. Many ranks therefore store receipts too. The coordinator
lists receipts, and reads a single marker per agreement.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.errors import Corrupt, Fenced, KeyExists, KeyMissing, NoUsableGeneration, StorageError
from lightning_moe_ckpt.storage._backend import Backend, create_once
from lightning_moe_ckpt.storage._catalog import (
    Catalog,
    Contents,
    expect_folder,
    missing_objects,
    missing_parts,
    nothing_at,
    read_catalog,
    read_commit,
    read_marker,
)
from lightning_moe_ckpt.storage._entries import GENERATION, SegmentEntry
from lightning_moe_ckpt.storage._json import digest_of, maybe
from lightning_moe_ckpt.storage._log import History, Lineage, Log, watermark_event
from lightning_moe_ckpt.storage._markers import Commit, RankMarker, StoredMarker
from lightning_moe_ckpt.storage._names import (
    RECEIPTS,
    GenerationId,
    Receipt,
    commit_key,
    marker_key,
    new_nonce,
    receipt_key,
    segment_key,
)

log = rank_logger(__name__)

_FIRST_PAUSE_SECONDS = 0.005
LONGEST_PAUSE_SECONDS = 0.25
RANKS_PER_SECOND = 10_000
"""Most receipts per second that the coordinator lists while waiting: ten requests."""
RECEIPTS_FROM = 64
"""Least number of ranks with receipts, each a request of the rank and a request less of the coordinator."""
QUIET_SECONDS = 5.0
"""Time without a new receipt before everything is listed, in case some rank stored none; then twice as long each time."""
_REMEDY = "It is skipped; the next one must store itself what it cannot reference."


WAYS_ON = (
    "Put back what is missing (`moe-ckpt repair URL` rebuilds a lost log from the generations), begin anew beside what is "
    "there with resume='never', which deletes none of it, or give another URL."
)


def expect_nothing_lost(backend: Backend) -> None:
    """Raise `NoUsableGeneration` if a URL without a log has generations, before its first run begins."""
    committed = sorted(each for each, contents in read_catalog(backend).items() if contents.committed)
    if committed:
        raise NoUsableGeneration(
            f"{backend.url} holds {len(committed)} committed generations, the newest {committed[-1]}, but no log that says "
            f"of which run they are. {WAYS_ON}"
        )


def read_history(run_log: Log, *, forgiving: bool) -> History | None:
    """Read the log; `None` if there is none. Raises `Corrupt` if no entry is readable, unless `forgiving`."""
    try:
        return run_log.read()
    except Corrupt as error:
        if not forgiving:
            raise
        log.warning("a new run begins over an unreadable log: %s", error)
        return None


def read_run(run_log: Log, backend: Backend) -> History:
    """Read the log. Raises `NoUsableGeneration` if there is no run, `Corrupt` if no entry is readable."""
    expect_folder(backend)
    if (history := run_log.read()) is None:
        raise NoUsableGeneration(nothing_at(backend.url))
    return history


def begin_run(history: History | None, run_log: Log, catalog: Catalog) -> History:
    """Return a new run's history; its incarnation numbers follow those of older runs, so names never clash."""
    incarnation = next_incarnation(history, run_log, catalog)
    replaced = (*history.replaced, history.run_id) if history is not None else ()
    key = uuid.uuid4().hex
    return History(
        run_id=uuid.uuid4().hex,
        first_incarnation=incarnation,
        last_incarnation=incarnation - 1,
        replaced=replaced,
        key=key,
    )


def next_incarnation(history: History | None, run_log: Log, known: Collection[GenerationId]) -> int:
    """Return a number that no incarnation has had, even one whose `open` entry was lost."""
    logged = run_log.num_lost + (history.last_incarnation if history is not None else 0)
    return 1 + max([logged, *(generation.incarnation for generation in known)])


@dataclass(slots=True)
class Coordination:
    """The coordinator's state: the log, its history, and its own incarnation's number."""

    log: Log
    history: History
    run_of: Callable[[GenerationId], str | None]
    """Returns the run of a committed generation; `None` if unknown."""
    incarnation: int | None = None
    figures: Callable[[], Mapping[str, object]] = dict
    """Returns the job's figures, JSON values, for every log entry of its own; any thread may call it."""
    offered: frozenset[GenerationId] = frozenset()
    lineage: Lineage | None = None
    """Lineage of our incarnation, as it began."""
    catalog: Catalog = field(default_factory=dict)
    """Last listing."""

    def refresh(self) -> None:
        """Read other processes' entries; after `open` they only mean that this process is fenced. Raises `Fenced` if another run began."""
        if self.incarnation is not None:
            self.catch_up()
            return
        if (history := self.log.read()) is None or history.run_id != self.history.run_id:
            raise Fenced(f"another run replaced run {self.history.run_id} while this one was starting. Start again.")
        self.history = history

    def open(self, resumed: GenerationId | None, known: Collection[GenerationId]) -> bool:
        incarnation = next_incarnation(self.history, self.log, known)
        # Among incarnations that began from the same step, those without stored generations decide nothing.
        floor = None if resumed is None else resumed.step
        stored = {(each.incarnation, each.nonce) for each in known}
        cuts = tuple(c for c in self.history.cuts if c.step != floor or (c.incarnation, c.nonce) in stored)
        history = replace(self.history, cuts=cuts, has_commits=self.history.has_commits or bool(self.offered))
        if resumed is not None and history.why_dead(resumed) is not None:
            history = history.adopted(resumed)
        history = history.opened(incarnation, resumed, new_nonce())
        event = {"type": "open", "incarnation": incarnation, "resumed": maybe(GENERATION).body(resumed)}
        event["unix_time"] = round(time.time(), 3)
        if resumed is not None and resumed not in self.offered:
            event["volatile"] = True  # in memory only, never committed
        if not self.log.append(event, history):
            return False
        self.history, self.incarnation, self.lineage = history, incarnation, history.lineage(time.time_ns())
        return True

    def catch_up(self) -> bool:
        """Adopt entries appended by `moe-ckpt gc`; return whether there were any. Raises `Fenced` for others."""
        news = self.log.news(self.history)
        self.history = news or self.history
        return news is not None

    def advance(self, history: History | None) -> bool:
        """Append a new watermark, or the entry before the first commit; return `False` if `moe-ckpt gc` was faster.

        If the process is killed before that commit, the markers of all ranks stay, and the next incarnation commits.
        """
        incarnation = self.opened_incarnation()
        if history is None and self.history.has_commits:
            return True
        history = history or self.history
        return self.append(watermark_event(incarnation, history.watermark) | {"figures": dict(self.figures())}, history)

    def append(self, event: Mapping[str, object], history: History) -> bool:
        """Append an entry before a commit; return `False` if `moe-ckpt gc` was faster. Raises `Fenced` like `catch_up`."""
        history = replace(history, has_commits=True)
        if not self.log.append({**event, "unix_time": round(time.time(), 3)}, history):
            if not self.catch_up():
                raise Fenced("the log entry after ours was written by somebody else, and is not listed. Start again.")
            return False
        self.history = history
        return True

    def opened_incarnation(self) -> int:
        if self.incarnation is None:
            raise ValueError("`open_incarnation` comes before anything that deletes.")
        return self.incarnation


# -- commits


def await_markers(
    backend: Backend,
    own: RankMarker,
    *,
    timeout: timedelta,
    cancelled: Callable[[], bool] = lambda: False,
    check_fence: Callable[[], object] = lambda: None,
    sleep: Callable[[float], None] = time.sleep,
    by_receipts: bool = True,
) -> list[StoredMarker]:
    """Poll the listing until every rank's marker for this generation and plan is there, with all its files, and agrees
    with `own`, the coordinator's. Return markers in rank order. Listings are polled, never single keys: some stores
    remember for a while that a key was absent.

    Between two listings `cancelled` ends the wait if true, and `check_fence` raises `Fenced` if a later incarnation has
    begun, which may have deleted the files. With `by_receipts` receipts may take the place of markers that agree.
    `sleep` is for tests.

    Raises `StorageError` if time is up; the message says what each missing rank lacks.
    """
    give_up, pause = time.monotonic() + timeout.total_seconds(), _FIRST_PAUSE_SECONDS
    longest = max(LONGEST_PAUSE_SECONDS, own.world_size / RANKS_PER_SECOND)
    by_receipts = by_receipts and own.world_size >= RECEIPTS_FROM
    markers: dict[int, StoredMarker | str] = dict.fromkeys(range(own.world_size), "not all receipts are there yet")
    there, quiet, look_at = 0, QUIET_SECONDS, time.monotonic() + QUIET_SECONDS
    while True:
        is_over = time.monotonic() >= give_up or cancelled()
        if by_receipts and (found := len(backend.list(own.generation.prefix + RECEIPTS))) > there:
            there, look_at = found, time.monotonic() + quiet
        # Files and markers are listed when receipts are complete or come no more, or to say what is missing.
        if is_over or not by_receipts or there >= own.world_size or time.monotonic() >= look_at:
            quiet, look_at = 2 * quiet, time.monotonic() + 2 * quiet
            contents = Contents(own.generation, backend)
            read = _reader(backend, contents, by_receipts=by_receipts)
            for rank in (rank for rank, taken in markers.items() if isinstance(taken, str)):
                markers[rank] = _take(own, contents, read, rank)
        stored = [taken for taken in markers.values() if isinstance(taken, StoredMarker)]
        if len(stored) == own.world_size:
            return stored
        if is_over:
            reasons = [f"rank {rank}: {why.rstrip('.')}" for rank, why in markers.items() if isinstance(why, str)]
            raise StorageError(
                f"commit {own.generation}: at the end of the wait (limit: {timeout.total_seconds():.0f} s), {len(reasons)} of {own.world_size} "
                f"ranks lack something: {'; '.join(reasons[:8])}. The previous generation stays the newest."
            )
        check_fence()
        sleep(pause)
        pause = min(2 * pause, longest)


def _take(own: RankMarker, contents: Contents, read: Callable[[int], StoredMarker], rank: int) -> StoredMarker | str:
    """Return the marker of `rank`, or the reason why it cannot be committed yet."""
    if rank not in contents.ranks:
        return "no marker yet"
    try:
        stored = read(rank)
    except (Corrupt, KeyMissing) as error:
        return str(error)
    marker = stored.marker
    if (marker.run_id, marker.plan_hash) != (own.run_id, own.plan_hash):
        return f"marker is for plan {marker.plan_hash} of run {marker.run_id}"
    if missing := missing_objects(marker, contents):
        return f"{len(missing)} objects are missing or of another size, first {missing[0]}"
    return stored


def _reader(backend: Backend, contents: Contents, *, by_receipts: bool) -> Callable[[int], StoredMarker]:
    """Return a reader of ranks' markers, which turns a receipt into a marker by an earlier marker of the same agreement."""
    receipts, alike = contents.receipts if by_receipts else {}, dict[str, RankMarker]()

    def read(rank: int) -> StoredMarker:
        receipt = receipts.get(rank)
        nbytes = contents.sizes.get(marker_key(contents.generation, rank), 0)
        if receipt is not None and (marker := alike.get(receipt.agreement)) is not None:
            keys = ((step, segment_key(contents.generation, rank, step)) for step in marker.steps)
            files = [SegmentEntry(step=at, key=key, nbytes=contents.sizes.get(key, 0), digest="") for at, key in keys]
            if receipt.sizes == _sizes(nbytes, files):  # else the marker says what is missing
                return StoredMarker(replace(marker, rank=rank, segments=tuple(files)), receipt.digest)
        stored = read_marker(backend, contents.generation, rank)
        if receipt is not None and receipt == receipt_of(stored.marker, stored.digest, nbytes):
            alike[receipt.agreement] = stored.marker
        return stored

    return read


def _sizes(nbytes: int, files: Iterable[SegmentEntry]) -> str:
    return digest_of(" ".join(map(str, [nbytes, *(file.nbytes for file in files)])).encode())


def receipt_of(marker: RankMarker, digest: str, nbytes: int) -> Receipt:
    """Return the receipt of a stored marker with this digest and size; markers of one agreement give one manifest."""
    alike = Commit.of([StoredMarker(replace(marker, rank=0, world_size=1, unix_time=0, lineage=None), "")])
    agreement = replace(alike, world_size=marker.world_size, markers=(), nbytes=0)
    return Receipt(marker.rank, digest, digest_of(agreement.to_bytes()), _sizes(nbytes, marker.segments))


def put_receipt(backend: Backend, marker: RankMarker, parts: Sequence[bytes | memoryview]) -> None:
    """Store the receipt of a stored marker, `parts`, where there are many ranks."""
    if marker.world_size >= RECEIPTS_FROM:
        backend.put(receipt_key(marker.generation, receipt_of(marker, digest_of(*parts), sum(map(len, parts)))), b"")


def complete_markers(backend: Backend, run_id: str, contents: Contents, *, by_receipts: bool) -> list[StoredMarker]:
    """Take all markers of a generation that its incarnation did not commit; the caller counts the ranks. Raises
    `Corrupt` for a marker of another run, a damaged one, or a missing file; `KeyMissing` for a deleted marker.
    """
    stored = [*map(_reader(backend, contents, by_receipts=by_receipts), sorted(contents.ranks))]
    for marker in (each.marker for each in stored):
        if marker.run_id != run_id:
            raise Corrupt(f"rank {marker.rank} wrote it for run {marker.run_id}.")
        if missing := missing_objects(marker, contents):
            raise Corrupt(f"rank {marker.rank}: {missing[0]} is missing or of another size.")
    return stored


def publish(backend: Backend, stored: Sequence[StoredMarker], history: History) -> Commit:
    """Create the manifest for the markers of all ranks, unless the same manifest is there already.

    The history decides whether referenced files may be used. Raises `Corrupt` if a rank is missing, ranks disagree, or a
    referenced file must not be used; `KeyExists` if another manifest has the name.
    """
    commit = Commit.of(stored)
    expect_needs(backend, history, commit)
    key = commit_key(commit.generation)
    if not create_once(backend, key, commit.to_bytes()):
        raise KeyExists(f"{key}: another manifest has this name. The generation is not ours to commit.")
    return commit


def expect_needs(backend: Backend, history: History, commit: Commit) -> None:
    """Raise `Corrupt` unless all generations in `needs` are committed, whole and not given up; the manifest is not visible yet."""
    catalog = read_catalog(backend) if commit.needs else {}
    for need in commit.needs:
        if (dead := history.why_dead(need)) is not None:
            raise Corrupt(f"{commit.generation}: refers to {need}, which must not be used: {dead}. {_REMEDY}")
        try:
            lost = missing_parts(read_commit(backend, need, history.run_id), catalog.get(need, Contents(need)))
        except (Corrupt, KeyMissing) as error:
            raise Corrupt(
                f"{commit.generation}: refers to {need}, which is not committed: {error} {_REMEDY}"
            ) from error
        if lost is not None:
            raise Corrupt(
                f"{commit.generation}: refers to {need}, parts of which are gone or of another size: {lost}. {_REMEDY}"
            )
