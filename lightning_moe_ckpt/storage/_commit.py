"""Make a generation visible: wait for every rank's marker, check the markers against the listing, publish last.

A reader that sees `_COMMITTED` must find every object, so that manifest is created last, and exclusively. Its bytes
follow from the markers alone. If the same bytes are already there, the commit succeeded, whoever wrote them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from lightning_moe_ckpt.errors import Corrupt, KeyExists, KeyMissing, StorageError
from lightning_moe_ckpt.storage._backend import Backend, create_once
from lightning_moe_ckpt.storage._catalog import Contents, missing_objects, read_catalog, read_marker
from lightning_moe_ckpt.storage._log import History
from lightning_moe_ckpt.storage._names import commit_key
from lightning_moe_ckpt.storage._needs import expect_needs
from lightning_moe_ckpt.storage._records import Commit, RankMarker, StoredMarker

_FIRST_PAUSE_SECONDS = 0.005
_LONGEST_PAUSE_SECONDS = 0.25


def await_markers(
    backend: Backend,
    own: RankMarker,
    *,
    timeout: timedelta,
    cancelled: Callable[[], bool] = lambda: False,
    check_fence: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[StoredMarker]:
    """Poll the listing until every rank's marker for this generation and plan is there, with all files it names.

    It polls listings, never single keys: some stores remember for a while that a key was absent.

    Args:
        backend: where the run is stored.
        own: the coordinator's marker; every other rank must agree with it.
        timeout: how long to wait.
        cancelled: called between two listings; true ends the wait.
        check_fence: called between two listings; raises `Fenced` if a later incarnation has begun, because that one may
            have deleted the files.
        clock: monotonic seconds, for tests.
        sleep: pause between two listings, for tests.

    Returns:
        Markers in rank order.

    Raises:
        StorageError: time is up; the message says what each missing rank lacks.
        Fenced: raised by `check_fence`.
    """
    give_up, pause = clock() + timeout.total_seconds(), _FIRST_PAUSE_SECONDS
    markers: dict[int, StoredMarker] = {}
    while True:
        contents = read_catalog(backend, own.generation.prefix).get(own.generation, Contents(own.generation))
        lacking = [(rank, _take(backend, own, rank, contents, markers)) for rank in range(own.world_size)]
        reasons = [f"rank {rank}: {reason.rstrip('.')}" for rank, reason in lacking if reason is not None]
        if not reasons:
            return [markers[rank] for rank in range(own.world_size)]
        if clock() >= give_up or cancelled():
            raise StorageError(
                f"commit {own.generation}: at the end of the wait (limit: {timeout.total_seconds():.0f} s), {len(reasons)} of {own.world_size} "
                f"ranks lack something: {'; '.join(reasons[:8])}. The previous generation stays the newest."
            )
        check_fence()
        sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def _take(
    backend: Backend, own: RankMarker, rank: int, contents: Contents, markers: dict[int, StoredMarker]
) -> str | None:
    """Add the marker of `rank` to `markers`; return what is missing, `None` if nothing is."""
    if rank in markers:
        return None
    if rank not in contents.ranks:
        return "no marker yet"
    try:
        stored = read_marker(backend, own.generation, rank)
    except (Corrupt, KeyMissing) as error:
        return str(error)
    marker = stored.marker
    if (marker.run_id, marker.plan_hash) != (own.run_id, own.plan_hash):
        return f"marker is for plan {marker.plan_hash} of run {marker.run_id}"
    if missing := missing_objects(marker, contents):
        return f"{len(missing)} objects are missing or of another size, first {missing[0]}"
    markers[rank] = stored
    return None


def complete_markers(backend: Backend, run_id: str, contents: Contents) -> list[StoredMarker]:
    """Read all markers of a generation that every rank finished but its incarnation did not commit.

    Raises:
        Corrupt: a marker is damaged, belongs to another run, or names an object that is missing.
        KeyMissing: a marker was deleted meanwhile.
    """
    stored = [read_marker(backend, contents.generation, rank) for rank in sorted(contents.ranks)]
    for marker in (each.marker for each in stored):
        if marker.run_id != run_id:
            raise Corrupt(f"rank {marker.rank} wrote it for run {marker.run_id}.")
        if missing := missing_objects(marker, contents):
            raise Corrupt(f"rank {marker.rank}: {missing[0]} is missing or of another size.")
    return stored


def publish(backend: Backend, stored: Sequence[StoredMarker], history: History) -> Commit:
    """Create the manifest for these markers, unless the same manifest is there already.

    Args:
        backend: where the run is stored.
        stored: markers of all ranks.
        history: state of the log, which decides whether referenced files may be used.

    Raises:
        Corrupt: a rank is missing, ranks disagree, or a referenced file is not committed or was given up.
        KeyExists: another manifest has the name.
    """
    commit = Commit.of(stored)
    expect_needs(backend, history, commit, stored)
    key = commit_key(commit.generation)
    if not create_once(backend, key, commit.to_bytes()):
        raise KeyExists(f"{key}: another manifest has this name. The generation is not ours to commit.")
    return commit
