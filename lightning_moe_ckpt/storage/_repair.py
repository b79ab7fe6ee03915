"""Rebuilding a lost log from the manifests of committed generations.

What each life began from is only in the log. A life wrote nothing at or below the step it began from, so it is taken to
have begun right below the oldest of its generations that is there: what earlier lives have from there on is dead.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_moe_ckpt.errors import ConfigurationError, Corrupt, KeyMissing, NoUsableGeneration
from lightning_moe_ckpt.storage._backend import Backend
from lightning_moe_ckpt.storage._catalog import read_catalog, read_manifest
from lightning_moe_ckpt.storage._log import Cut, History, Log
from lightning_moe_ckpt.storage._names import GenerationId
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
    commits, left_out = _manifests(backend, [each for each, contents in catalog.items() if contents.committed])
    if not commits:
        raise NoUsableGeneration(f"{backend.url} holds no committed generation that can be read. Check the URL.")
    history = _history_of(commits, last_epoch=max(each.epoch for each in catalog))
    for commit in commits:
        if commit.run_id != history.run_id:
            left_out[commit.generation] = f"of run {commit.run_id}, which committed nothing later"
        elif (dead := history.why_dead(commit.generation)) is not None:
            left_out[commit.generation] = dead
    event: dict[str, object] = {"type": "repair", "run_id": history.run_id}
    if not dry_run and not log.append(event, history):
        raise ConfigurationError(f"{backend.url}: somebody has begun a log meanwhile. Look again.")
    usable = sorted((each.generation for each in commits if each.generation not in left_out), reverse=True)
    return RepairedLog(url=backend.url, run_id=history.run_id, usable=usable, left_out=left_out, written=not dry_run)


def _is_readable(log: Log) -> bool:
    try:
        return log.read() is not None
    except Corrupt:
        return False


def _manifests(backend: Backend, committed: Sequence[GenerationId]) -> tuple[list[Commit], dict[GenerationId, str]]:
    """Those that can be read, and what is wrong with others."""
    commits, bad = list[Commit](), dict[GenerationId, str]()
    for generation in committed:
        try:
            commits.append(read_manifest(backend, generation))
        except (Corrupt, KeyMissing) as error:  # noqa: PERF203  # each is judged by itself
            bad[generation] = str(error)
    return commits, bad


def _history_of(commits: Sequence[Commit], *, last_epoch: int) -> History:
    """That of the run which committed last, as its generations tell it."""
    newest = max(commits, key=lambda each: (each.generation.epoch, each.unix_time, each.generation.step))
    own = sorted((each for each in commits if each.run_id == newest.run_id), key=lambda each: each.unix_time)
    # Two lives of one number: a copy, or a job that a backup overtook. The one that committed last counts.
    lives = {each.generation.epoch: each.generation.life for each in own}
    cuts = []
    for epoch in sorted(lives):
        first = min(c.generation.step for c in own if (c.generation.epoch, c.generation.life) == (epoch, lives[epoch]))
        cuts.append(Cut(epoch, first - 1 if first else None, lives[epoch]))
    return History(
        run_id=newest.run_id,
        first_epoch=min(lives),
        last_epoch=last_epoch,
        cuts=tuple(cuts),
        key=uuid.uuid4().hex,
        has_commits=True,
    )
