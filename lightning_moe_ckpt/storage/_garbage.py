"""Garbage collection of a stored run by a process that is not its job, perhaps while the job goes on.

What the log has given up may be deleted by anybody at any time: nobody restores it, whoever is alive. To give up more,
an entry is appended to the log, at the index that a job which starts meanwhile needs (one of the two looks again), and
in the name of the newest epoch, so that the job of that epoch takes it over and is not fenced.

Never touched: what epochs after the newest one in the log wrote, what the newest epoch has not committed yet, and the
newest generation that can be restored, with what it needs of older ones.

Manifests and listings say what is there and how large it is, not that it is what was written. Before anything is given
up, files can be read: what is damaged then counts neither as kept nor as given up, and older ones stay in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from lightning_moe_ckpt.errors import ConfigurationError, Corrupt, NoUsableGeneration
from lightning_moe_ckpt.storage._backend import Backend, Entry
from lightning_moe_ckpt.storage._catalog import Catalog, Contents, RunsOfGenerations, delete_generation, read_catalog
from lightning_moe_ckpt.storage._log import History, Log, watermark_event
from lightning_moe_ckpt.storage._names import SNAP_PREFIX, GenerationId, parse_snap_key
from lightning_moe_ckpt.storage._retention import Retention, doomed_generations
from lightning_moe_ckpt.storage._survey import Survey


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgedGeneration:
    """A stored generation, on one of the two heaps."""

    generation: GenerationId
    reason: str
    """Why it goes, or why it stays."""
    nbytes: int
    """Of all its objects and leftovers, as far as the store tells."""
    num_objects: int
    num_leftovers: int = 0
    """Interrupted writes and uploads of it, which are no objects; or some that are under way."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Garbage:
    """What a collection found."""

    url: str
    run_id: str
    watermark: int
    """Generations below this step are given up, but for those that stay by name."""
    goes: Sequence[JudgedGeneration]
    """Oldest first."""
    stays: Sequence[JudgedGeneration]
    """Oldest first."""
    deleted: bool
    """Whether it was deleted, or only looked for."""

    @property
    def nbytes(self) -> int:
        """Size of what goes."""
        return sum(each.nbytes for each in self.goes)


def collect_garbage(
    backend: Backend,
    retention: Retention | None = None,
    *,
    dry_run: bool = False,
    check: Callable[[GenerationId], str | None] | None = None,
) -> Garbage:
    """Delete what nobody may restore any more.

    Args:
        backend: where the run is; a job may be using it.
        retention: gives up generations first; `None` leaves it at what the log has given up.
        dry_run: only look.
        check: reads the files of a generation, and what it borrows; what is wrong with them. Called for as many of the
            newest as `retention` keeps, and for more in the place of each that is damaged.

    Raises:
        NoUsableGeneration: there is no run.
        Corrupt: the log cannot be read, or not well enough for `retention`.
        ConfigurationError: the store cannot tell a job about `retention`.
        StorageError: the medium failed; the next call goes on where this one stopped.
    """
    log = Log(backend)
    checked = None if check is None else cache(check)
    while True:
        history = _read(log, backend)
        leftovers = _leftovers(backend)
        # Of a life that is over, or of one that is writing it: known by what is left, as if nothing had been written.
        catalog = {g: Contents(g) for g in leftovers} | dict(read_catalog(backend))
        survey = Survey.take(backend, history, catalog)
        if checked is not None and retention is not None:
            survey = survey.read(checked, retention.last, catalog)
        advanced = None if retention is None else survey.give_up(history, retention, catalog)
        if retention is not None:
            _require_fence(backend, log)
        if advanced is None or dry_run:
            break
        if log.append(watermark_event(history.last_epoch, advanced.watermark), advanced):
            break
    history = advanced or history
    runs = RunsOfGenerations(backend)
    doomed = doomed_generations(catalog, history, epoch=history.last_epoch, run_of=runs.of)
    if not dry_run:
        for generation in doomed:
            delete_generation(backend, catalog[generation])
    kept = {} if retention is None else survey.reasons(retention, catalog)
    kept |= {generation: f"damaged: {reason}" for generation, reason in survey.damaged.items()}
    needed = survey.spare | survey.needed
    staying = {
        g: kept.get(g) or _why_it_stays(catalog[g], history, needed.get(g), runs)
        for g in sorted(catalog)
        if g not in doomed
    }
    return Garbage(
        url=backend.url,
        run_id=history.run_id,
        watermark=history.watermark,
        goes=_judged(doomed, catalog, leftovers),
        stays=_judged(staying, catalog, leftovers),
        deleted=not dry_run,
    )


def _read(log: Log, backend: Backend) -> History:
    history = log.read()
    if history is None:
        raise NoUsableGeneration(f"{backend.url} holds no run. Check the URL.")
    return history


def _require_fence(backend: Backend, log: Log) -> None:
    """What is given up must not be lost on a job that runs or starts meanwhile."""
    if log.num_lost:
        raise Corrupt(
            f"{backend.url}: the newest log entry cannot be read, and may be of a job that runs. Without a retention only "
            "what older entries have given up is deleted; the next start of the job writes a new entry."
        )
    if not backend.creates_exclusively:
        raise ConfigurationError(
            f"{backend.url} replaces objects that exist, so a job that uses it would not notice what is given up here. "
            "Give the retention to the callback of the job."
        )


def _why_it_stays(contents: Contents, history: History, needed_by: GenerationId | None, runs: RunsOfGenerations) -> str:
    generation = contents.generation
    if generation.epoch > history.last_epoch:
        return "of a later life than the log shows"
    if generation.epoch < history.first_epoch:
        if runs.of(generation) not in history.replaced:
            return "of a run that the log does not name"
        return "of an earlier run, until the newer one has more than it keeps"
    if not contents.committed:
        return "not committed yet"
    if (unknown := history.why_unknown(generation)) is not None:
        return unknown
    why = "kept below the watermark" if generation.step < history.watermark else "not given up"
    return why if needed_by is None else f"{why}; needed by {needed_by}"


def _leftovers(backend: Backend) -> dict[GenerationId, list[Entry]]:
    """What interrupted writes have left, by generation; what is nobody's is left out."""
    found: dict[GenerationId, list[Entry]] = {}
    for entry in backend.leftovers(SNAP_PREFIX):
        place = parse_snap_key(entry.key)
        if place is not None:
            found.setdefault(place[0], []).append(entry)
    return found


def _judged(
    reasons: Mapping[GenerationId, str], catalog: Catalog, leftovers: Mapping[GenerationId, Sequence[Entry]]
) -> tuple[JudgedGeneration, ...]:
    sizes = {generation: catalog[generation].sizes for generation in reasons}
    return tuple(
        JudgedGeneration(
            generation=generation,
            reason=reason,
            nbytes=sum(sizes[generation].values()) + sum(each.nbytes for each in leftovers.get(generation, ())),
            num_objects=len(sizes[generation]),
            num_leftovers=len(leftovers.get(generation, ())),
        )
        for generation, reason in reasons.items()
    )
