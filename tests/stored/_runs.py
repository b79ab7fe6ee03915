"""Lives of a job of one rank that stores a few bytes at each step it is told to."""

from __future__ import annotations

from datetime import timedelta

from lightning_moe_ckpt.storage import Backend, RankMarker, Retention, RunStore, SegmentEntry, digest_of


def begin(backend: Backend, at: int | None = None) -> RunStore:
    """An incarnation that goes on from generation `at`, or the newest."""
    store = RunStore.open(backend, resume="auto")
    steps = {commit.generation.step: commit.generation for commit in store.candidates()}
    assert store.open_incarnation(steps[max(steps) if at is None else at] if steps else None) is not None
    return store


def write(store: RunStore, step: int, unix_time: int = 0, *, with_line: bool = True) -> RankMarker:
    """A generation of one rank, complete but for its commit, with or without its lineage."""
    generation = store.name(step)
    data = f"{generation}".encode()
    key = store.put_segment(generation, 0, step, memoryview(data))
    entry = SegmentEntry(step=step, key=key, nbytes=len(data), digest=digest_of(data))
    marker = RankMarker(
        run_id=store.run_id, rank=0, world_size=1, generation=generation, plan_hash="p", segments=(entry,),
        unix_time=unix_time, lineage=store.lineage if with_line else None,
    )  # fmt: skip
    store.put_marker(marker)
    return marker


def save(
    store: RunStore,
    step: int,
    retention: Retention,
    unix_time: int = 0,
    *,
    with_line: bool = True,
    audited: int | None = None,
) -> None:
    store.commit(write(store, step, unix_time, with_line=with_line), timeout=timedelta())
    store.retain(retention, audited)


def steps(store: RunStore) -> list[int]:
    """What can be restored, oldest first."""
    return [commit.generation.step for commit in reversed(store.candidates())]


def stored(backend: Backend) -> list[int]:
    """Steps of which anything is stored."""
    return sorted({int(entry.key.split("/")[1]) for entry in backend.list("snap/")})
