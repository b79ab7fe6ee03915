"""Rebuild a lost log from the manifests of committed generations.

Each manifest has the lineage of the incarnation that wrote it, so one manifest is enough for the whole history. There
are several lineages if a backup was restored while a job with another lineage continued. Then the incarnation counts
that began last and committed something.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_moe_ckpt.errors import ConfigurationError, Corrupt, KeyMissing, NoUsableGeneration
from lightning_moe_ckpt.storage._backend import Backend
from lightning_moe_ckpt.storage._catalog import Contents, nothing_at, read_catalog, read_commit, read_marker
from lightning_moe_ckpt.storage._coordination import complete_markers
from lightning_moe_ckpt.storage._log import History, Lineage, Log
from lightning_moe_ckpt.storage._names import GenerationId, commit_key
from lightning_moe_ckpt.storage._records import Commit


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
    """Write the first entry of a new log for the run that committed last.

    Args:
        backend: a place with generations and without a readable log.
        dry_run: report the result, but write nothing.

    Raises:
        ConfigurationError: there is a readable log, or another process has just begun one.
        NoUsableGeneration: there is no readable manifest.
        StorageError: the medium failed.
    """
    log = Log(backend)
    if _is_readable(log):
        raise ConfigurationError(
            f"{backend.url} has a log that can be read. There is nothing to repair; see `moe-ckpt ls`."
        )
    catalog = read_catalog(backend)
    commits, mended, left_out = _manifests(
        backend, [generation for generation in catalog.values() if generation.committed]
    )
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


def _is_readable(log: Log) -> bool:
    try:
        return log.read() is not None
    except Corrupt:
        return False


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
                mended.append(_manifest_of_markers(backend, contents))
            except (Corrupt, KeyMissing):
                bad[contents.generation] = str(error)
    return [*commits, *mended], mended, bad


def _manifest_of_markers(backend: Backend, contents: Contents) -> Commit:
    """Rebuild a manifest, which follows from the markers alone. Raises `Corrupt` or `KeyMissing` for bad markers."""
    first = read_marker(backend, contents.generation, 0).marker
    return Commit.of(complete_markers(backend, first.run_id, contents))


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
    """Return a sort key of incarnations by their beginning, with the generations of each."""
    commit, lineage = named
    return lineage.opened_ns, commit.generation.incarnation, commit.unix_time, commit.generation.step
