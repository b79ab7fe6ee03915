"""Rebuilding a lost log from the manifests of committed generations.

Each generation says what its life descends from, so one tells the whole line. Where there are several lines, since a
backup was put back and a job on another line went on, the life counts that began last and committed something: who was
overtaken began before.

Generations of older releases do not say it. There a life is taken to have begun right below the oldest of its
generations that is there, since it wrote nothing at or below the step it began from: what earlier lives have from there
on is dead.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_moe_ckpt.errors import ConfigurationError, Corrupt, KeyMissing, NoUsableGeneration
from lightning_moe_ckpt.storage._backend import Backend
from lightning_moe_ckpt.storage._catalog import Contents, read_catalog, read_manifest, read_marker
from lightning_moe_ckpt.storage._commit import complete_markers
from lightning_moe_ckpt.storage._log import Cut, History, Lineage, Log
from lightning_moe_ckpt.storage._names import GenerationId, commit_key
from lightning_moe_ckpt.storage._records import Commit


@dataclass(frozen=True, kw_only=True, slots=True)
class RepairedLog:
    """A log that was made of manifests, or would be."""

    url: str
    run_id: str
    usable: Sequence[GenerationId]
    """What a restart may try, newest first."""
    left_out: Mapping[GenerationId, str]
    """Other committed generations, and why they are not of this run as it is taken to have been."""
    mended: Sequence[GenerationId]
    """Those with a manifest that cannot be read and was made again of the markers, or would be."""
    written: bool


def repair_log(backend: Backend, *, dry_run: bool) -> RepairedLog:
    """Make the first entry of a log for the run that committed last.

    Args:
        backend: where generations are, and no log that can be read.
        dry_run: only say what it would name.

    Raises:
        ConfigurationError: there is a log that can be read, or somebody has just begun one.
        NoUsableGeneration: there is no manifest that can be read.
        StorageError: the medium failed.
    """
    log = Log(backend)
    if _is_readable(log):
        raise ConfigurationError(
            f"{backend.url} has a log that can be read. There is nothing to repair; see `moe-ckpt ls`."
        )
    catalog = read_catalog(backend)
    commits, mended, left_out = _manifests(backend, [each for each in catalog.values() if each.committed])
    if not commits:
        raise NoUsableGeneration(f"{backend.url} holds no committed generation that can be read. Check the URL.")
    history = _history_of(commits, last_epoch=max(each.epoch for each in catalog))
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
    """All that are known; those of them that had to be made again of markers; and what is wrong with others."""
    commits, mended, bad = list[Commit](), list[Commit](), dict[GenerationId, str]()
    for contents in committed:
        try:
            commits.append(read_manifest(backend, contents.generation))
        except (Corrupt, KeyMissing) as error:  # noqa: PERF203  # each is judged by itself
            try:
                mended.append(_manifest_of_markers(backend, contents))
            except (Corrupt, KeyMissing):
                bad[contents.generation] = str(error)
    return [*commits, *mended], mended, bad


def _manifest_of_markers(backend: Backend, contents: Contents) -> Commit:
    """A manifest that was written says what the markers add up to. Raises `Corrupt` or `KeyMissing` where these are not good."""
    first = read_marker(backend, contents.generation, 0).marker
    return Commit.of(complete_markers(backend, first.run_id, contents))


def _history_of(commits: Sequence[Commit], *, last_epoch: int) -> History:
    """That of the life which began last, as its generations tell it."""
    ancestors = {life for each in commits if each.lineage is not None for life in each.lineage.ancestors}
    # Whoever is descended from began before, whatever the clocks of two nodes say.
    leaves = [each for each in commits if (each.generation.epoch, each.generation.life) not in ancestors]
    newest = max(leaves or commits, key=_beginning)
    lineage = newest.lineage or _guessed([each for each in commits if each.run_id == newest.run_id])
    return History(
        run_id=newest.run_id,
        first_epoch=lineage.first_epoch,
        last_epoch=last_epoch,
        watermark=lineage.watermark,
        kept=lineage.kept,
        cuts=lineage.cuts,
        key=uuid.uuid4().hex,
        has_commits=True,
    )


def _beginning(commit: Commit) -> tuple[int, int, int, int]:
    """By which lives are ordered, and the generations of one."""
    opened_ns = 0 if commit.lineage is None else commit.lineage.opened_ns
    return opened_ns, commit.generation.epoch, commit.unix_time, commit.generation.step


def _guessed(commits: Sequence[Commit]) -> Lineage:
    """Of generations of one run which do not say it."""
    own = sorted(commits, key=lambda each: each.unix_time)
    # Two lives of one number: a copy, or a job that a backup overtook. The one that committed last counts.
    lives = {each.generation.epoch: each.generation.life for each in own}
    cuts = []
    for epoch in sorted(lives):
        first = min(c.generation.step for c in own if (c.generation.epoch, c.generation.life) == (epoch, lives[epoch]))
        cuts.append(Cut(epoch, first - 1 if first else None, lives[epoch]))
    return Lineage(opened_ns=0, first_epoch=min(lives), watermark=0, kept=frozenset(), cuts=tuple(cuts))
