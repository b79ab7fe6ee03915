"""The run's log: a dense list of small, exclusively created entries with incarnations (fencing) and the watermark.

Each start of the job is an incarnation; `incarnation` is its number, `nonce` its random name. The writer of entry `n`
has seen all entries before, because creating a taken index fails. Every entry repeats the whole history, so the newest
readable entry is the state, and a damaged older entry does no harm. If the newest entry is damaged, only its own event
is lost: later numbers skip it, and its writer, if still running, repeats the event with its next entry.

Timeline rule: a generation is dead once a later incarnation began from an earlier step, however late its commit lands.

Lineage rule: a log may be copied or put back to an older state, and a number is then given twice. So each incarnation
draws a name and puts it into its `open` entry and all its markers. A name that the log lacks is not of its past. The
newest entry's nonce tells a process that the log is still the one it writes.

Void rule: generations that are found to be wrong go by the timeline rule too. `condemned` cuts them off as an incarnation would
that began from the last good step, but no process has that number or that name, `VOID`. So whoever reads a log obeys.

Compaction deletes all but the newest `KEPT_ENTRIES`. This is harmless at any time, in any order and by anybody, because the
newest entries repeat the history. But the index of a deleted entry is free again, and a writer that slept may create an
entry there. After each creation the writer therefore looks for entries so much later. If there are any, the entry is void.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.errors import CheckpointError, Corrupt, Fenced, KeyMissing
from lightning_moe_ckpt.storage._backend import Backend, create_once
from lightning_moe_ckpt.storage._entries import NONCE
from lightning_moe_ckpt.storage._json import (
    FLAG,
    INTEGER,
    OBJECT,
    TEXT,
    Form,
    OtherVersion,
    decode,
    encode,
    keys,
    many,
    maybe,
)
from lightning_moe_ckpt.storage._names import LOG_PREFIX, GenerationId, log_key, parse_log_key

log = rank_logger(__name__)

KEPT_ENTRIES = 1000
"""Newest entries of a log that stay; older ones are deleted, a thousand with one request."""
VOID = "0" * 12
"""Name of cuts that no incarnation made."""
_MOST_WITHOUT = 64
"""Newest entries that are read for figures: starts that ended before their first commit have none."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Start of an incarnation from a step; older incarnations' generations beyond that step are dead."""

    incarnation: int
    step: int | None
    """Step that the incarnation began from; `None` if it began from nothing."""
    nonce: str

    @property
    def floor(self) -> int:
        """Newest surviving step of earlier incarnations; -1 if none survives."""
        return -1 if self.step is None else self.step


@dataclass(frozen=True, kw_only=True, slots=True)
class Lineage:
    """State of the log when an incarnation began; the incarnation's own cut is the last one.

    Every marker of rank 0 and every manifest repeats it, so that a lost log can be rebuilt from them.
    """

    opened_ns: int
    """Begin of the incarnation by its coordinator's clock, in nanoseconds since 1970."""
    first_incarnation: int
    watermark: int
    kept: frozenset[GenerationId]
    cuts: tuple[Cut, ...]

    @property
    def ancestors(self) -> set[tuple[int, str]]:
        return {(cut.incarnation, cut.nonce) for cut in self.cuts[:-1]}


def _kept_body(kept: Iterable[GenerationId]) -> list[dict[str, object]]:
    """Encode kept generations as JSON, grouped by incarnation to be short: every entry repeats them."""
    grouped: dict[tuple[int, str], list[int]] = {}
    for each in sorted(kept, key=lambda each: (each.incarnation, each.nonce, each.step)):
        grouped.setdefault((each.incarnation, each.nonce), []).append(each.step)
    return [{"incarnation": number, "nonce": nonce, "steps": steps} for (number, nonce), steps in grouped.items()]


def _group(incarnation: int, nonce: str, steps: Sequence[int]) -> list[GenerationId]:
    return [GenerationId(step=step, incarnation=incarnation, nonce=nonce) for step in steps]


_GROUPS = many(keys(_group, incarnation=INTEGER, nonce=NONCE, steps=many(INTEGER)))
_KEPT = Form(lambda value, where: frozenset(chain.from_iterable(_GROUPS.read(value, where))), _kept_body)
_CUTS = many(keys(Cut, incarnation=INTEGER, step=maybe(INTEGER), nonce=NONCE))
LINEAGE = keys(Lineage, opened_ns=INTEGER, first_incarnation=INTEGER, watermark=INTEGER, kept=_KEPT, cuts=_CUTS)


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """State of a run's log, with everything that readers need."""

    run_id: str
    first_incarnation: int
    """First incarnation of this run; earlier incarnations belong to replaced runs."""
    last_incarnation: int
    """Newest incarnation under this URL."""
    watermark: int = 0
    """Step below which generations may be deleted, except `kept`; 0 until the run has more than it keeps."""
    kept: frozenset[GenerationId] = frozenset()
    """Generations that stay by name, although the watermark or a cut would give them up."""
    cuts: tuple[Cut, ...] = ()
    """Incarnations that still decide something, oldest first: all with living generations that `kept` does not name."""
    key: str = ""
    """The run's secret, from which the names of its shared memory derive."""
    replaced: tuple[str, ...] = ()
    """Runs under this URL replaced by this run, oldest first."""
    has_commits: bool = False
    """Whether this run is known to have committed something."""
    num_lost: int = field(default=0, compare=False)
    """Unreadable entries after the newest readable one; each may have opened an incarnation."""

    @property
    def nonce(self) -> str:
        """Name of the newest incarnation; empty before the first began."""
        return next((cut.nonce for cut in self.cuts if cut.incarnation == self.last_incarnation), "")

    def lineage(self, opened_ns: int) -> Lineage:
        """Return the past that the newest incarnation repeats in its markers and manifests; it began at `opened_ns`."""
        return Lineage(
            opened_ns=opened_ns,
            first_incarnation=self.first_incarnation,
            watermark=self.watermark,
            kept=self.kept,
            cuts=self.cuts,
        )

    def opened(self, incarnation: int, resumed: GenerationId | None, nonce: str) -> History:
        """Return the history after `incarnation` began from `resumed`."""
        after = replace(self, last_incarnation=incarnation, num_lost=0)
        if resumed is None:
            # Steps restart below the watermark. The cut already makes all older generations dead.
            return replace(after, watermark=0, kept=frozenset(), cuts=(Cut(incarnation, None, nonce),))
        if resumed.step < self.watermark:
            return _began_below(after, resumed, nonce)
        # `resumed` may belong to an incarnation whose entry is lost; it began somewhere below `resumed`.
        lost = []
        if resumed.incarnation > self.last_incarnation:
            lost = [Cut(resumed.incarnation, _below(resumed.step), resumed.nonce)]
        cuts = (*self.cuts, *lost, Cut(incarnation, resumed.step, nonce))
        return replace(after, cuts=_deciding(cuts, self.watermark))

    def condemned(self, step: int) -> History:
        """Return the history after all generations behind `step`, of any incarnation so far, were found to be wrong."""
        number = self.last_incarnation + self.num_lost + 1
        kept, cuts = frozenset(each for each in self.kept if each.step <= step), (*self.cuts, Cut(number, step, VOID))
        return replace(self, last_incarnation=number, num_lost=0, kept=kept, cuts=_deciding(cuts, self.watermark))

    def is_void(self, generation: GenerationId) -> bool:
        """Return whether a generation was found to be wrong, as far as no later incarnation has begun."""
        return any(cut.nonce == VOID for cut in self._left_behind_by(generation))

    def adopted(self, generation: GenerationId) -> History:
        """Return the history that also allows `generation`, by name, although its past is another."""
        return replace(self, kept=self.kept | {generation})

    def advanced(self, step: int, kept: Iterable[GenerationId] = ()) -> History:
        """Return the history after the watermark moved up to `step`; below it only `kept` stay."""
        return replace(self, watermark=step, kept=frozenset(kept), cuts=_deciding(self.cuts, step))

    def why_dead(self, generation: GenerationId) -> str | None:
        """Return the reason why a generation must not be restored; `None` if it may be."""
        return self.why_left_behind(generation) or self.why_unknown(generation)

    def why_left_behind(self, generation: GenerationId) -> str | None:
        """Return why a generation was given up, by step and incarnation number; `None` if it was not."""
        if generation.incarnation < self.first_incarnation:
            return "belongs to an earlier run"
        if generation in self.kept:
            return None
        if generation.step < self.watermark:
            return f"below the watermark {self.watermark}"
        later = self._left_behind_by(generation)
        if not later:
            return None
        cut = max(later, key=lambda cut: (-cut.floor, cut.incarnation))
        if cut.nonce == VOID:
            return f"void: an audit has found a fault, and the last clean one was at step {cut.step}"
        return f"incarnation {cut.incarnation} began again from {'nothing' if cut.step is None else f'step {cut.step}'}"

    def _left_behind_by(self, generation: GenerationId) -> list[Cut]:
        return [c for c in self.cuts if generation.incarnation < c.incarnation and generation.step > c.floor]

    def why_unknown(self, generation: GenerationId) -> str | None:
        """Return why a generation is not of this log's past, by its incarnation's name; `None` if it is."""
        if generation in self.kept:
            return None
        wrote = next((cut.nonce for cut in self.cuts if cut.incarnation == generation.incarnation), None)
        if wrote is None and self.last_incarnation < generation.incarnation <= self.last_incarnation + self.num_lost:
            return None
        if generation.nonce == wrote:
            return None
        return (
            f"written by an incarnation that the log does not name ({generation.directory}): the log is a copy, was put back to an "
            "older state, or is damaged"
        )


def _began_below(history: History, resumed: GenerationId, nonce: str) -> History:
    """Return the history after its newest incarnation began from a kept generation below the watermark.

    The watermark moves down to that step. Other generations of the same step may be dead, but the cuts that said so
    were dropped. So the new cut is one step lower: from earlier incarnations only `kept` generations live on.
    """
    kept = frozenset(each for each in history.kept if each.step <= resumed.step)
    cut = Cut(history.last_incarnation, _below(resumed.step), nonce)
    return replace(history, watermark=resumed.step, kept=kept, cuts=(cut,))


def _below(step: int) -> int | None:
    return step - 1 if step else None


def _deciding(cuts: Sequence[Cut], watermark: int) -> tuple[Cut, ...]:
    """Drop cuts that decide nothing about generations at or above the watermark.

    A later cut with a lower floor implies an older one. With the same floor it does not: the older incarnation may have
    written a generation of the step that it began from. Below the watermark the newest cut is enough.
    """
    kept: list[Cut] = []
    for cut in reversed(cuts):
        if not kept or watermark <= kept[-1].floor >= cut.floor:
            kept.append(cut)
    return tuple(reversed(kept))


class Log:
    """Reader and writer of entries. Only the coordinator uses it, from a single thread at a time."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._oldest = 0  # no older entry is there
        self._newest = -1  # index of the newest known entry, readable or not
        self._nonce: str | None = None  # nonce of that entry, if it could be read
        self._defect: CheckpointError | None = None  # error of the last unreadable entry
        self.num_lost = 0
        """Unreadable entries after the newest readable one; each may have opened an incarnation."""

    def read(self) -> History | None:
        """Read the newest readable entry; `None` if there is no log yet. Raises `Corrupt` if there are entries, but none can be read."""
        indices = log_indices(self._backend)
        self._oldest, self._newest = (indices[0], indices[-1]) if indices else (0, -1)
        self._nonce = None
        for self.num_lost, index in enumerate(reversed(indices)):
            if (entry := self._read_entry(index)) is not None:
                self._nonce = entry.nonce if index == self._newest else None
                return replace(entry.history, num_lost=self.num_lost)
        self.num_lost = len(indices)
        if indices and isinstance(self._defect, OtherVersion):
            raise Corrupt(
                f"{self._backend.url}: another release wrote this run. {self._defect} Go on with that release, or begin a new run "
                "under another URL."
            )
        if indices:
            raise Corrupt(
                f"{self._backend.url}: none of the {len(indices)} log entries can be read. "
                f"{self._defect} Rebuild the log with `moe-ckpt repair URL`, restore `_log/` from a copy, or start a new run with "
                'resume="never".'
            )
        return None

    def figures(self, run_id: str) -> Mapping[str, object]:
        """Return the newest figures of the run that an entry has, among the newest entries; none without."""
        for index in range(self._newest, max(-1, self._newest - _MOST_WITHOUT), -1):
            if (entry := self._read_entry(index)) is not None and entry.history.run_id != run_id:
                break
            if entry is not None and isinstance(figures := entry.event.get("figures"), dict) and figures:
                return figures
        return {}

    def append(self, event: dict[str, object], history: History) -> bool:
        """Create the next entry from an event, see FORMAT.md, and the state after it. Return False if another process took the index first;
        nothing that counts was written then.
        """
        nonce = uuid.uuid4().hex
        entry = LogEntry(self._newest + 1, nonce, event, history)
        if not create_once(self._backend, log_key(entry.index), encode("log", _ENTRY.body(entry))):
            return False
        is_void = is_compacted(self._backend, entry.index)  # if it fails, a later call finds a foreign entry
        self._newest, self._nonce = entry.index, nonce
        return not is_void

    def compact(self) -> None:
        """Delete entries of old events, once there are a thousand too many. Call after `append`."""
        first = self._newest + 1 - KEPT_ENTRIES
        if first - self._oldest >= KEPT_ENTRIES and self._read_entry(self._newest) is not None:
            old = [log_key(index) for index in log_indices(self._backend) if index < first]  # gaps may be vast
            self._backend.delete(*old)
            self._oldest = first

    def news(self, own: History) -> History | None:
        """Return the state after other processes' entries newer than our newest, whose state is `own`; `None` if there are none. Raises
        `Fenced` if a later incarnation or run wrote an entry, the newest entry cannot be read, or our own is gone.
        """
        newest = max(log_indices(self._backend, log_key(self._newest)), default=-1)
        self._expect_own()
        if newest <= self._newest:
            return None
        if (entry := self._read_entry(newest)) is None or _names(entry.history) != _names(own):
            raise Fenced(
                f"{self._backend.url}: log entry {newest} was written by a later start of this job. "
                "This process must stop; the newer one carries on."
            )
        self._newest, self._nonce = newest, entry.nonce  # written by `moe-ckpt gc`, which begins no incarnation
        return entry.history

    def _expect_own(self) -> None:
        """Raise `Fenced` if our newest entry changed or vanished: then the log was put back or replaced."""
        try:
            found = read_entry(self._backend.get(log_key(self._newest)), self._newest).nonce
        except KeyMissing:
            found = "missing"
        except Corrupt:
            return  # a damaged entry is no sign of another process
        if self._nonce not in {None, found}:
            raise Fenced(
                f"{self._backend.url}: log entry {self._newest}, the newest that this process wrote or read, is "
                f"{'gone' if found == 'missing' else 'another one now'}: the checkpoints were put back to an older state or "
                "replaced. This process must stop; whatever is started there now carries on."
            )

    def _read_entry(self, index: int) -> LogEntry | None:
        try:
            return read_entry(self._backend.get(log_key(index)), index)
        except (Corrupt, KeyMissing) as error:
            self._defect = error
            log.error("log entry %d cannot be read and is skipped: %s", index, error)
            return None


def log_indices(backend: Backend, after: str = "") -> list[int]:
    """Return the indices of the entries behind the key `after`, in order, as listed."""
    found = (parse_log_key(entry.key) for entry in backend.list(LOG_PREFIX, after))
    return sorted(index for index in found if index is not None)


def is_compacted(backend: Backend, index: int) -> bool:
    """Whether an entry is so old that a compaction may have deleted it."""
    return bool(backend.list(LOG_PREFIX, log_key(index + KEPT_ENTRIES - 1), 1))


def watermark_event(incarnation: int, step: int) -> dict[str, object]:
    """Return the event of giving up generations below `step`."""
    return {"type": "watermark", "incarnation": incarnation, "step": step}


@dataclass(frozen=True, slots=True)
class LogEntry:
    """Event, and the log's state after it; readers of the state take only `nonce` and `history`."""

    index: int
    nonce: str
    event: dict[str, object]
    history: History


def _names(history: History) -> tuple[str, int, str]:
    """Return run, number and nonce of the incarnation that may write."""
    return history.run_id, history.last_incarnation, history.nonce


HISTORY = keys(
    History, run_id=TEXT, first_incarnation=INTEGER, last_incarnation=INTEGER, watermark=INTEGER, kept=_KEPT,
    cuts=_CUTS, key=TEXT, replaced=many(TEXT), has_commits=FLAG,
)  # fmt: skip
_ENTRY = keys(LogEntry, index=INTEGER, nonce=TEXT, event=OBJECT, history=HISTORY)


def read_entry(data: bytes, index: int) -> LogEntry:
    """Read an entry. Raises `Corrupt` unless the bytes are entry `index`."""
    where = log_key(index)
    entry = decode(data, _ENTRY, kind="log", where=where)
    if entry.index != index:
        raise Corrupt(f"{where}: is entry {entry.index} under a wrong name.")
    return entry
