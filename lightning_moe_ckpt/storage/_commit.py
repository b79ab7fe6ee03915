"""Making a generation visible: wait for every rank's marker, check them against the listing, publish last.

A reader that sees `_COMMITTED` must find every object, so it is created after everything it vouches for, and
exclusively. Its bytes follow from the markers alone: finding them there already is success, whoever wrote them.

Source: the storage study, Sec. 4.3, steps 4 and 5.
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
    """Poll the listing until every rank's marker for this generation and plan is there and true.

    Polls listings, never single keys: some stores remember for a while that a key was absent.

    Args:
        backend: where to look.
        own: the coordinator's marker; every other rank must agree with it.
        timeout: how long to wait.
        cancelled: asked between two listings; whether to give up now.
        check_fence: called between two listings; raises `Fenced` if a later life has begun, which may have deleted what
            is waited for.
        clock: seconds that only grow, for tests.
        sleep: pause between two listings, for tests.

    Returns:
        Markers in rank order.

    Raises:
        StorageError: time is up; the message names what each missing rank lacks.
        Fenced: by `check_fence`.
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
    """Add the marker of `rank` to `markers`; returns what is lacking, `None` if nothing is."""
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
    """Markers of a generation that every rank finished, for a commit its own life did not get to.

    Raises:
        Corrupt: a marker is not good, belongs to another run, or an object it vouches for is not there.
        KeyMissing: something was deleted meanwhile.
    """
    stored = [read_marker(backend, contents.generation, rank) for rank in sorted(contents.ranks)]
    for marker in (each.marker for each in stored):
        if marker.run_id != run_id:
            raise Corrupt(f"rank {marker.rank} wrote it for run {marker.run_id}.")
        if missing := missing_objects(marker, contents):
            raise Corrupt(f"rank {marker.rank}: {missing[0]} is missing or of another size.")
    return stored


def publish(backend: Backend, stored: Sequence[StoredMarker], history: History) -> Commit:
    """Create the manifest these markers add up to, or find that it is there already.

    Args:
        backend: where to.
        stored: markers of all ranks.
        history: state of the log, which decides whether what they borrow may be used.

    Raises:
        Corrupt: a rank is missing, ranks disagree, or something that they borrow is not committed or was given up.
        KeyExists: another manifest has the name.
    """
    commit = Commit.of(stored)
    expect_needs(backend, history, commit, stored)
    key = commit_key(commit.generation)
    if not create_once(backend, key, commit.to_bytes()):
        raise KeyExists(f"{key}: another manifest has this name. The generation is not ours to commit.")
    return commit
