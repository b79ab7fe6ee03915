"""The run's log: a dense list of small create-exclusive entries that hold epochs (fencing) and the watermark.

Whoever appends entry `n` has seen everything before it, because a create-exclusive at a taken index fails. Every entry
repeats the live history, so the newest readable entry is the whole state, and one that went bad is healed by its
successors. If the newest entry itself is bad, only what it alone said is lost: epochs skip over it, and the life that
wrote it, if it still runs, says it again with its next entry.

Timeline rule: a generation is dead once a later epoch began from an earlier step, however late its commit lands.

Lineage rule: a log may be copied, or put back to an older state, and then another life gets the number that a life has
had. So every life draws a name, which is in its `open` entry and in all that it writes: what the log as it stands does
not name is not of its past. By the nonce of its newest entry a process knows that the log is still the one it writes.
Source: the storage study, Sec. 4; we differ in repeating the history.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from lightning_moe_ckpt.errors import Corrupt, Fenced, KeyMissing
from lightning_moe_ckpt.storage._backend import Backend, create_once
from lightning_moe_ckpt.storage._entries import generation_body, read_life
from lightning_moe_ckpt.storage._json import VERSION, Fields, decode_any, encode, read_integer, read_text
from lightning_moe_ckpt.storage._names import LOG_PREFIX, GenerationId, log_block, log_key, parse_log_key

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Cut:
    """An epoch and the step it began from; generations of earlier epochs beyond that step are dead."""

    epoch: int
    step: int | None
    """`None` if the epoch began from nothing."""
    life: str = ""
    """Name of the epoch's life; empty for one that an older release began."""

    @property
    def floor(self) -> int:
        """Newest step that survives."""
        return -1 if self.step is None else self.step


@dataclass(frozen=True, kw_only=True, slots=True)
class Lineage:
    """The state of the log when a life began; its own cut is the last one.

    Everything that the life stores repeats it, so the log can be made again of what is stored.
    """

    opened_ns: int
    """When that was, by the clock of its coordinator: nanoseconds since 1970."""
    first_epoch: int
    watermark: int
    kept: frozenset[GenerationId]
    cuts: tuple[Cut, ...]

    @property
    def ancestors(self) -> set[tuple[int, str]]:
        """Epochs and names of the lives before."""
        return {(cut.epoch, cut.life) for cut in self.cuts[:-1]}

    def body(self) -> dict[str, object]:
        """JSON form."""
        return {
            "opened_ns": self.opened_ns,
            "first_epoch": self.first_epoch,
            "watermark": self.watermark,
            "kept": kept_body(self.kept),
            "cuts": cuts_body(self.cuts),
        }

    @classmethod
    def read(cls, body: Fields, generation: GenerationId, where: str) -> Lineage | None:
        """Take what a generation's document says of it; `None` in those that do not. Raises `Corrupt`."""
        if not body.has("lineage"):
            return None
        fields = body.mapping("lineage")
        lineage = cls(
            opened_ns=fields.integer("opened_ns"),
            first_epoch=fields.integer("first_epoch"),
            watermark=fields.integer("watermark"),
            kept=read_kept(fields),
            cuts=read_cuts(fields),
        )
        fields.end()
        if not generation.life or [(c.epoch, c.life) for c in lineage.cuts[-1:]] != [
            (generation.epoch, generation.life)
        ]:
            raise Corrupt(f"{where}: its lineage does not end with the life that wrote it. Another copy may be good.")
        return lineage


def cuts_body(cuts: Sequence[Cut]) -> list[dict[str, object]]:
    """JSON form of cuts."""
    return [{"epoch": cut.epoch, "step": cut.step, "life": cut.life} for cut in cuts]


def read_cuts(body: Fields) -> tuple[Cut, ...]:
    """Take the list of cuts. Raises `Corrupt`."""
    return body.rows("cuts", _read_cut)


def kept_body(kept: Iterable[GenerationId]) -> list[dict[str, object]]:
    """JSON form of what stays, by life, which is shorter: every entry repeats them."""
    lives: dict[tuple[int, str], list[int]] = {}
    for each in sorted(kept, key=lambda each: (each.epoch, each.life, each.step)):
        lives.setdefault((each.epoch, each.life), []).append(each.step)
    return [{"epoch": epoch, "life": life, "steps": steps} for (epoch, life), steps in lives.items()]


def read_kept(body: Fields) -> frozenset[GenerationId]:
    """Take the list of what stays. Raises `Corrupt`."""
    return frozenset(chain.from_iterable(body.rows("kept", _read_kept)))


def _read_kept(value: object, where: str) -> list[GenerationId]:
    body = Fields(value, where)
    epoch, life = body.integer("epoch"), _read_life(body, where)
    kept = [GenerationId(step=step, epoch=epoch, life=life) for step in body.rows("steps", read_integer)]
    body.end()
    return kept


def _read_cut(value: object, where: str) -> Cut:
    body = Fields(value, where)
    cut = Cut(body.integer("epoch"), body.optional("step", read_integer), _read_life(body, where))
    body.end()
    return cut


def _read_life(body: Fields, where: str) -> str:
    """Name of a life; older releases say nothing."""
    life = body.text("life") if body.has("life") else ""
    return read_life(life, where) if life else ""


_OF_LIVES = 2
"""Version of entries that name lives."""


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """All that readers need from the log."""

    run_id: str
    first_epoch: int
    """First epoch of this run; earlier ones belong to runs it replaced."""
    last_epoch: int
    """Newest epoch opened under this URL."""
    watermark: int = 0
    """Generations below this step may be gone, but for `kept`; zero until the run has more than it keeps."""
    kept: frozenset[GenerationId] = frozenset()
    """Generations that stay although they are below the watermark or hit by a cut older than they are kept."""
    cuts: tuple[Cut, ...] = ()
    """The epochs that still decide something, oldest first; among them every one with a generation that is neither dead
    nor kept by name."""
    key: str = ""
    """Secret of the run, from which names of its shared memory are derived; empty before the first life of this release."""
    replaced: tuple[str, ...] = ()
    """Runs under this URL that this one replaced, oldest first."""
    has_commits: bool = False
    """Whether this run is known to have committed something."""
    num_lost: int = field(default=0, compare=False)
    """Unreadable entries behind the one that this was read from; each may have opened an epoch."""

    @property
    def life(self) -> str:
        """Name of the newest life."""
        return next((cut.life for cut in self.cuts if cut.epoch == self.last_epoch), "")

    def lineage(self, opened_ns: int) -> Lineage | None:
        """What its newest life repeats of it in all that it stores; `None` for one without a name."""
        if not self.life:
            return None
        return Lineage(
            opened_ns=opened_ns,
            first_epoch=self.first_epoch,
            watermark=self.watermark,
            kept=self.kept,
            cuts=self.cuts,
        )

    def opened(self, epoch: int, resumed: GenerationId | None, life: str = "") -> History:
        """The history after `epoch` began."""
        after = replace(self, last_epoch=epoch, num_lost=0)
        if resumed is None:
            # The steps begin again below the watermark; all it guarded is dead by the cut.
            return replace(after, watermark=0, kept=frozenset(), cuts=(Cut(epoch, None, life),))
        if resumed.step < self.watermark:
            return _began_below(after, resumed, life)
        # What an epoch whose entry is lost began from is not known, but that it was below this.
        lost = [Cut(resumed.epoch, _below(resumed.step), resumed.life)] if resumed.epoch > self.last_epoch else []
        cuts = (*self.cuts, *lost, Cut(epoch, resumed.step, life))
        return replace(after, cuts=_deciding(cuts, self.watermark))

    def adopted(self, generation: GenerationId) -> History:
        """The history in which a generation of another past may be restored, by its name."""
        return replace(self, kept=self.kept | {generation})

    def advanced(self, step: int, kept: Iterable[GenerationId] = ()) -> History:
        """The history after the watermark moved up to `step`, below which only `kept` stay."""
        return replace(self, watermark=step, kept=frozenset(kept), cuts=_deciding(self.cuts, step))

    def why_dead(self, generation: GenerationId) -> str | None:
        """Why a generation must not be restored, `None` if it may."""
        return self.why_left_behind(generation) or self.why_unknown(generation)

    def why_left_behind(self, generation: GenerationId) -> str | None:
        """Why a generation is not wanted any more, whichever life of its epoch wrote it; `None` if it is."""
        if generation.epoch < self.first_epoch:
            return "belongs to an earlier run"
        if generation in self.kept:
            return None
        if generation.step < self.watermark:
            return f"below the watermark {self.watermark}"
        for cut in self.cuts:
            if generation.epoch < cut.epoch and generation.step > cut.floor:
                return f"epoch {cut.epoch} began again from {'nothing' if cut.step is None else f'step {cut.step}'}"
        return None

    def why_unknown(self, generation: GenerationId) -> str | None:
        """Why a generation that is not left behind is of another past than this log's; `None` if it is of this one."""
        if generation in self.kept:
            return None
        wrote = next((cut.life for cut in self.cuts if cut.epoch == generation.epoch), None)
        if wrote is None and self.last_epoch < generation.epoch <= self.last_epoch + self.num_lost:
            return None
        if generation.life == (wrote or ""):
            return None
        return (
            f"written by a life that the log does not name ({generation.directory}): the log is a copy, was put back to an "
            "older state, or is damaged"
        )


def _began_below(history: History, resumed: GenerationId, life: str) -> History:
    """The history after its newest epoch began from one of `kept`: steps begin again there, and so does the watermark.

    Which other generation of that step was dead, only cuts below the old watermark could tell, and they were dropped.
    So this cut is one step lower: of earlier epochs, at or above the new watermark, only `kept` live on.
    """
    kept = frozenset(each for each in history.kept if each.step <= resumed.step)
    cut = Cut(history.last_epoch, _below(resumed.step), life)
    return replace(history, watermark=resumed.step, kept=kept, cuts=(cut,))


def _below(step: int) -> int | None:
    return step - 1 if step else None


def _deciding(cuts: Sequence[Cut], watermark: int) -> tuple[Cut, ...]:
    """Drop cuts that no generation at or above the watermark can tell are missing.

    A cut is implied by a later one with the same or a lower floor; below the watermark the newest is enough.
    """
    kept: list[Cut] = []
    for cut in reversed(cuts):
        if not kept or watermark <= kept[-1].floor > cut.floor:
            kept.append(cut)
    return tuple(reversed(kept))


class Log:
    """Reads and appends entries. Only the coordinator uses it, one thread at a time."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._newest = -1  # index of the newest entry we know of, readable or not
        self._nonce: str | None = None  # of that entry, if it is known
        self.num_lost = 0
        """Unreadable entries after the one the history was read from; each may have opened an epoch."""

    def read(self) -> History | None:
        """Read the newest readable entry; `None` if there is no log yet.

        Raises:
            Corrupt: there are entries, but none can be read.
        """
        indices = self._indices(LOG_PREFIX)
        self._newest = indices[-1] if indices else -1
        self._nonce = None
        for self.num_lost, index in enumerate(reversed(indices)):
            if (entry := self._read_entry(index)) is not None:
                self._nonce = entry.nonce if index == self._newest else None
                return replace(entry.history, num_lost=self.num_lost)
        self.num_lost = len(indices)
        if indices:
            raise Corrupt(
                f"{self._backend.url}: none of the {len(indices)} log entries can be read. "
                "Rebuild the log with `moe-ckpt repair URL`, restore `_log/` from a copy, or start a new run with "
                'resume="never".'
            )
        return None

    def append(self, event: dict[str, object], history: History) -> bool:
        """Create the next entry; the history includes the event.

        Returns:
            False if another process was faster, and nothing was written.
        """
        nonce = uuid.uuid4().hex
        body = {"index": self._newest + 1, "event": event, "nonce": nonce, "history": _body(history)}
        if not create_once(self._backend, log_key(self._newest + 1), encode("log", body, version=_OF_LIVES)):
            return False
        self._newest, self._nonce = self._newest + 1, nonce
        return True

    def news(self, own: History) -> History | None:
        """The state after entries that others appended behind ours, `None` if nobody did.

        Args:
            own: the state after our newest entry.

        Raises:
            Fenced: an entry is of a later life or run, or the newest cannot be read and may be; or our newest is not
                there any more.
        """
        newest = max(self._indices(log_block(self._newest + 1)), default=-1)  # dense: the next one is in this block
        self._expect_own()
        if newest <= self._newest:
            return None
        entry = self._read_entry(newest)
        if entry is None or _names(entry.history) != _names(own):
            raise Fenced(
                f"{self._backend.url}: log entry {newest} was written by a later start of this job. "
                "This process must stop; the newer one carries on."
            )
        self._newest, self._nonce = newest, entry.nonce  # `moe-ckpt gc` wrote it, which begins nothing
        return entry.history

    def _expect_own(self) -> None:
        """Entries are never changed or removed: one that was tells of a log that was put back, or of another one."""
        try:
            found = _parse_entry(self._backend.get(log_key(self._newest)), self._newest).nonce
        except KeyMissing:
            found = "missing"
        except Corrupt:
            return  # damaged, which says nothing of another life
        if self._nonce not in {None, found}:
            raise Fenced(
                f"{self._backend.url}: log entry {self._newest}, the newest that this process wrote or read, is "
                f"{'gone' if found == 'missing' else 'another one now'}: the checkpoints were put back to an older state or "
                "replaced. This process must stop; whatever is started there now carries on."
            )

    def _read_entry(self, index: int) -> _Entry | None:
        try:
            return _parse_entry(self._backend.get(log_key(index)), index)
        except (Corrupt, KeyMissing) as error:
            log.error("log entry %d cannot be read and is skipped: %s", index, error)
            return None

    def _indices(self, prefix: str) -> list[int]:
        found = (parse_log_key(entry.key) for entry in self._backend.list(prefix))
        return sorted(index for index in found if index is not None)


def run_event(run_id: str) -> dict[str, object]:
    """A new run begins under this URL."""
    return {"type": "run", "run_id": run_id}


def open_event(epoch: int, resumed: GenerationId | None, *, volatile: bool = False) -> dict[str, object]:
    """A life of the job begins from a generation; a volatile one was never committed, and is in memory only."""
    event = {"type": "open", "epoch": epoch, "resumed": None if resumed is None else generation_body(resumed)}
    return {**event, "volatile": True} if volatile else event


def watermark_event(epoch: int, step: int) -> dict[str, object]:
    """Generations below `step` are about to be deleted."""
    return {"type": "watermark", "epoch": epoch, "step": step}


@dataclass(frozen=True, slots=True)
class _Entry:
    """What is read of one."""

    nonce: str
    history: History


def _names(history: History) -> tuple[str, int, str]:
    """Of the life that may write."""
    return history.run_id, history.last_epoch, history.life


def _body(history: History) -> dict[str, object]:
    return {
        "run_id": history.run_id,
        "first_epoch": history.first_epoch,
        "last_epoch": history.last_epoch,
        "watermark": history.watermark,
        "kept": kept_body(history.kept),
        "cuts": cuts_body(history.cuts),
        "key": history.key,
        "replaced": list(history.replaced),
        "has_commits": history.has_commits,
    }


def _parse_entry(data: bytes, index: int) -> _Entry:
    where = log_key(index)
    version, entry = decode_any(data, kind="log", where=where, versions=(VERSION, _OF_LIVES))
    if (written := entry.integer("index")) != index:
        raise Corrupt(f"{where}: is entry {written} under a wrong name.")
    nonce = entry.text("nonce")
    entry.plain("event")
    body = entry.mapping("history")
    entry.end()
    history = History(
        run_id=body.text("run_id"),
        first_epoch=body.integer("first_epoch"),
        last_epoch=body.integer("last_epoch"),
        watermark=body.integer("watermark"),
        kept=read_kept(body),
        cuts=read_cuts(body),
    )
    if version == _OF_LIVES:
        history = replace(
            history,
            key=body.text("key"),
            replaced=body.rows("replaced", read_text),
            has_commits=body.flag("has_commits"),
        )
    body.end()
    return _Entry(nonce, history)


def check_entry(data: bytes, index: int) -> None:
    """Raise `Corrupt` unless the bytes are entry `index`."""
    _parse_entry(data, index)
