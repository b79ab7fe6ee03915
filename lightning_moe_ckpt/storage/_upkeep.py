"""Upkeep of a stored run by another process: collect garbage, possibly while the job runs, and rebuild a lost log.

Any process may delete generations that the log has given up, because no process restores them. To give up more, an
entry is appended to the log. A job that starts at the same time needs the same index, so one of the two reads the log
again. The entry names the newest incarnation, so that a running job adopts it and is not fenced.

Never deleted: files of incarnations newer than the log's newest, the newest incarnation's uncommitted files, and the
newest restorable generation with the older files that it needs.

Manifests and listings show names and sizes, not whether the bytes are intact. Files can be read before anything is
given up: a damaged generation then counts neither as kept nor as given up, and an older generation stays in its place.

A lost log is rebuilt from the manifests of committed generations. Each manifest has the lineage of the incarnation that
wrote it, so one manifest is enough for the whole history. There are several lineages if a backup was restored while a job
with another lineage continued. Then the incarnation counts that began last and committed something.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

from lightning_moe_ckpt.errors import ConfigurationError, Corrupt, KeyMissing, NoUsableGeneration
from lightning_moe_ckpt.storage._backend import Backend, Entry
from lightning_moe_ckpt.storage._catalog import (
    Catalog,
    Contents,
    delete_generation,
    nothing_at,
    read_catalog,
    read_commit,
    read_marker,
    run_reader,
    sweep_constants,
)
from lightning_moe_ckpt.storage._commit import complete_markers, read_run
from lightning_moe_ckpt.storage._log import History, Lineage, Log, watermark_event
from lightning_moe_ckpt.storage._markers import Commit
from lightning_moe_ckpt.storage._names import SNAP_PREFIX, GenerationId, commit_key, parse_snap_key
from lightning_moe_ckpt.storage._retention import Retention, Survey, doomed_generations, needed_by, spare_for


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgedGeneration:
    """Stored generation, with the reason why it stays or goes."""

    generation: GenerationId
    reason: str
    """Reason why the generation stays or goes."""
    nbytes: int
    """Bytes of its objects and leftovers, as far as the store tells."""
    num_objects: int
    num_unfinished: int = 0
    """Interrupted or running writes and uploads, which are no objects yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Garbage:
    """Result of `collect_garbage`."""

    url: str
    run_id: str
    watermark: int
    """Step below which generations are given up, except those kept by name."""
    goes: Sequence[JudgedGeneration]
    """Generations given up, oldest first."""
    stays: Sequence[JudgedGeneration]
    """Generations that stay, oldest first."""
    deleted: bool
    """Whether `goes` was deleted; false for a dry run."""

    @property
    def nbytes(self) -> int:
        return sum(generation.nbytes for generation in self.goes)


def collect_garbage(
    backend: Backend,
    retention: Retention | None = None,
    *,
    dry_run: bool = False,
    check: Callable[[GenerationId], str | None] | None = None,
) -> Garbage:
    """Delete generations that nobody may restore any more; with `dry_run` only report them. A job may be using the run.

    `retention` gives up generations first; `None` deletes only what the log has given up already. `check` reads a
    generation's files and those it references, and returns a defect, or `None`. `check` is called for as many of the
    newest generations as `retention` keeps, and for another in place of each damaged generation.

    Raises `NoUsableGeneration` if there is no run, `Corrupt` if the log cannot be read, or not well enough for
    `retention`, `ConfigurationError` if the store cannot tell a job about `retention`, `StorageError` if the medium
    failed; the next call goes on where this one stopped.
    """
    log = Log(backend)
    checked = None if check is None else cache(check)
    while True:
        history = read_run(log, backend)
        unfinished = _unfinished(backend)
        # A generation may consist of leftovers only, of a past incarnation or of a running write.
        catalog = {g: Contents(g) for g in unfinished} | dict(read_catalog(backend))
        survey = Survey.take(backend, history, catalog)
        if checked is not None and retention is not None:
            survey = survey.read(checked, retention.last)
        told = None if retention is None else log.figures(history.run_id).get("audited")
        audited = told if isinstance(told, int) else None  # a job with audits goes back there
        advanced = None if retention is None else survey.give_up(history, retention, audited)
        if retention is not None:
            _require_fence(backend, log)
        if advanced is None or dry_run:
            break
        if log.append(watermark_event(history.last_incarnation, advanced.watermark), advanced):
            break
    history = advanced or history
    run_of = run_reader(backend)
    doomed = doomed_generations(catalog, history, incarnation=history.last_incarnation, run_of=run_of)
    if not dry_run:
        for generation in doomed:
            delete_generation(backend, catalog[generation])
        left = {each: contents for each, contents in catalog.items() if each not in doomed}
        sweep_constants(backend, left, incarnation=history.last_incarnation)
    kept = {} if retention is None else survey.reasons(retention, audited)
    kept |= {generation: f"damaged: {reason}" for generation, reason in survey.damaged.items()}
    needed = spare_for(survey.usable) | needed_by(survey.usable)
    rest = [each for each in sorted(catalog) if each not in doomed]
    staying = {g: kept.get(g) or _why_it_stays(catalog[g], history, needed.get(g), run_of) for g in rest}
    return Garbage(
        url=backend.url,
        run_id=history.run_id,
        watermark=history.watermark,
        goes=_judged(doomed, catalog, unfinished),
        stays=_judged(staying, catalog, unfinished),
        deleted=not dry_run,
    )


def _require_fence(backend: Backend, log: Log) -> None:
    """Refuse stores on which a running or starting job could miss the new entry."""
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


def _why_it_stays(
    contents: Contents, history: History, needed_by: GenerationId | None, run_of: Callable[[GenerationId], str | None]
) -> str:
    generation = contents.generation
    if generation.incarnation > history.last_incarnation:
        return "of a later incarnation than the log shows"
    if generation.incarnation < history.first_incarnation:
        if run_of(generation) not in history.replaced:
            return "of a run that the log does not name"
        return "of an earlier run, until the newer one has more than it keeps"
    if not contents.committed:
        return "not committed yet"
    if (unknown := history.why_unknown(generation)) is not None:
        return unknown
    why = "kept below the watermark" if generation.step < history.watermark else "not given up"
    return why if needed_by is None else f"{why}; needed by {needed_by}"


def _unfinished(backend: Backend) -> dict[GenerationId, list[Entry]]:
    found: dict[GenerationId, list[Entry]] = {}
    for entry in backend.unfinished_writes(SNAP_PREFIX):
        if (place := parse_snap_key(entry.key)) is not None:
            found.setdefault(place[0], []).append(entry)
    return found


def _judged(
    reasons: Mapping[GenerationId, str], catalog: Catalog, unfinished: Mapping[GenerationId, Sequence[Entry]]
) -> tuple[JudgedGeneration, ...]:
    sizes = {generation: catalog[generation].sizes for generation in reasons}
    return tuple(
        JudgedGeneration(
            generation=generation,
            reason=reason,
            nbytes=sum(sizes[generation].values()) + sum(each.nbytes for each in unfinished.get(generation, ())),
            num_objects=len(sizes[generation]),
            num_unfinished=len(unfinished.get(generation, ())),
        )
        for generation, reason in reasons.items()
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RepairedLog:
    """Log rebuilt from manifests, or the log that a dry run would write."""

    url: str
    run_id: str
    usable: Sequence[GenerationId]
    """Generations that a restart may try, newest first."""
    left_out: Mapping[GenerationId, str]
    """Other committed generations, each with the reason why it does not belong to the rebuilt run."""
    mended: Sequence[GenerationId]
    """Generations whose unreadable manifest was, or would be, rebuilt from the markers."""
    written: bool


def repair_log(backend: Backend, *, dry_run: bool) -> RepairedLog:
    """Write the first entry of a new log, where there is no readable one, for the run that committed last; with
    `dry_run` only report it. Raises `ConfigurationError` if there is a readable log, or another process has just begun
    a log, `NoUsableGeneration` if there is no readable manifest, `StorageError` if the medium failed.
    """
    log = Log(backend)
    with suppress(Corrupt):
        if log.read() is not None:
            raise ConfigurationError(
                f"{backend.url} has a log that can be read. There is nothing to repair; see `moe-ckpt ls`."
            )
    catalog = read_catalog(backend)
    commits, mended, left_out = _manifests(backend, [each for each in catalog.values() if each.committed])
    if all(each.lineage is None for each in commits):
        raise NoUsableGeneration(
            f"{backend.url} holds no committed generation that can be read." if catalog else nothing_at(backend.url)
        )
    history = _history_of(commits, last_incarnation=max(generation.incarnation for generation in catalog))
    for commit in commits:
        if commit.run_id != history.run_id:
            left_out[commit.generation] = f"of run {commit.run_id}, which committed nothing later"
        elif (dead := history.why_dead(commit.generation)) is not None:
            left_out[commit.generation] = dead
    event: dict[str, object] = {"type": "repair", "run_id": history.run_id}
    if not dry_run:
        for commit in mended:
            backend.put(commit_key(commit.generation), commit.to_bytes())
        if not log.append(event, history):
            raise ConfigurationError(f"{backend.url}: somebody has begun a log meanwhile. Look again.")
    return RepairedLog(
        url=backend.url,
        run_id=history.run_id,
        usable=sorted((each.generation for each in commits if each.generation not in left_out), reverse=True),
        left_out=left_out,
        mended=[each.generation for each in mended],
        written=not dry_run,
    )


def _manifests(
    backend: Backend, committed: Sequence[Contents]
) -> tuple[list[Commit], list[Commit], dict[GenerationId, str]]:
    """Return all manifests, the subset rebuilt from markers, and the defects of unreadable ones."""
    commits, mended, bad = list[Commit](), list[Commit](), dict[GenerationId, str]()
    for contents in committed:
        try:
            commits.append(read_commit(backend, contents.generation))
        except (Corrupt, KeyMissing) as error:  # noqa: PERF203  # each is judged by itself
            try:
                run_id = read_marker(backend, contents.generation, 0).marker.run_id
                mended.append(Commit.of(complete_markers(backend, run_id, contents, by_receipts=False)))
            except (Corrupt, KeyMissing):
                bad[contents.generation] = str(error)
    return [*commits, *mended], mended, bad


def _history_of(commits: Sequence[Commit], *, last_incarnation: int) -> History:
    named = [(commit, commit.lineage) for commit in commits if commit.lineage is not None]
    ancestors = {one for _, lineage in named for one in lineage.ancestors}
    # An ancestor began earlier, whatever the clocks of two nodes say.
    leaves = [pair for pair in named if (pair[0].generation.incarnation, pair[0].generation.nonce) not in ancestors]
    newest, lineage = max(leaves or named, key=_beginning)
    return History(
        run_id=newest.run_id,
        first_incarnation=lineage.first_incarnation,
        last_incarnation=last_incarnation,
        watermark=lineage.watermark,
        kept=lineage.kept,
        cuts=lineage.cuts,
        key=uuid.uuid4().hex,
        has_commits=True,
    )


def _beginning(named: tuple[Commit, Lineage]) -> tuple[int, int, int, int]:
    """Return a sort key for incarnations by their beginning, with the generations of each."""
    commit, lineage = named
    return lineage.opened_ns, commit.generation.incarnation, commit.unix_time, commit.generation.step
