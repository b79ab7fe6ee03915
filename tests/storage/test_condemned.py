"""Generations that an audit has found to be wrong: no reader takes them, and one from before the fault is always there."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from stored._runs import begin, save, steps, stored, write

from lightning_moe_ckpt.errors import Corrupt, Fenced
from lightning_moe_ckpt.storage import PosixBackend, Retention, RunStore, RunView, collect_garbage, repair_log

LAST = Retention(last=2)
WHY = "rank 1 computes other values"


@pytest.fixture
def backend(tmp_path: Path) -> PosixBackend:
    return PosixBackend(tmp_path / "run")


def grow(store: RunStore, *at: int, audited: int | None = None, retention: Retention = LAST) -> None:
    for step in at:
        save(store, step, retention, audited=audited)


def test_the_newest_from_before_the_last_clean_audit_stays(backend: PosixBackend) -> None:
    """However many come after it; once a later audit is clean a newer one takes its place."""
    store = begin(backend)
    grow(store, 0, 10, 20, 30, 40, audited=0)
    assert stored(backend) == [0, 30, 40]
    grow(store, 50, 60, 70, audited=45)
    assert stored(backend) == [40, 60, 70]
    grow(store, 80, 90, audited=80)
    assert stored(backend) == [80, 90]
    grow(store, 100)
    assert stored(backend) == [90, 100]


def test_it_stays_for_the_garbage_collector_too(backend: PosixBackend) -> None:
    """Which knows the audit from the job's last words in the log."""
    store = begin(backend)
    store.tell(lambda: {"audited": 20})
    grow(store, 0, 10, 20, 30, 40, audited=20)
    found = collect_garbage(backend, Retention(last=1))
    assert stored(backend) == [20, 40]
    assert [each.reason for each in found.stays] == [
        "newest before the last clean audit, at step 20",
        "among the last 1",
    ]


@pytest.mark.parametrize("audited", [10, 15, 40])
def test_what_came_after_the_audit_is_void(backend: PosixBackend, audited: int) -> None:
    """For a start, for who looks, and for generations that arrive late; also where the good one is below the watermark."""
    store = begin(backend)
    grow(store, 0, 10, 20, 30, 40, audited=audited)
    assert store.condemn(audited, WHY)
    good = max(step for step in (0, 10, 20, 30, 40) if step <= audited)
    late = write(store, 50)
    with pytest.raises(Fenced):
        store.commit(late, timeout=timedelta())
    seen = {each.generation.step: each for each in RunView.open(backend).generations()}
    assert [step for step, each in sorted(seen.items()) if each.usable][-1] == good
    assert all("void: an audit" in (each.why_not or "") for step, each in seen.items() if step > audited)
    after = begin(backend)
    assert after.incarnation == 3
    assert steps(after)[-1] == good
    grow(after, 50, 60)
    assert steps(after) == stored(backend) == [50, 60]
    assert begin(backend).candidates()[0].generation == after.name(60)


def test_milestones_behind_the_audit_are_void_too(backend: PosixBackend) -> None:
    """They were to stay for good, by name."""
    store, milestones = begin(backend), Retention(last=1, every_n_steps=20)
    grow(store, 0, 10, 20, 30, 40, 50, 60, audited=30, retention=milestones)
    assert stored(backend) == [0, 20, 30, 40, 60]
    assert store.condemn(30, WHY)
    assert steps(begin(backend)) == [0, 20, 30]


def test_nothing_is_void_where_nothing_would_be_left(backend: PosixBackend) -> None:
    """The job cannot go back, so it must not lose what it has."""
    store = begin(backend)
    grow(store, 10, 20)
    assert not store.condemn(5, WHY)
    assert steps(store) == [10, 20]
    grow(store, 30)


def test_only_the_incarnation_that_runs_condemns(backend: PosixBackend) -> None:
    """A later start has other generations, of which this process knows nothing."""
    store = begin(backend)
    grow(store, 0, 10)
    after = begin(backend)
    with pytest.raises(Fenced):
        store.condemn(0, WHY)
    assert after.condemn(0, WHY)
    with pytest.raises(Fenced):
        after.condemn(0, WHY)
    assert steps(begin(backend)) == [0]


def test_a_log_that_is_lost_afterwards_is_rebuilt_with_it(backend: PosixBackend) -> None:
    """Generations of the next incarnation repeat the cut."""
    store = begin(backend)
    grow(store, 0, 10, 20, 30, audited=10)
    assert store.condemn(10, WHY)
    after = begin(backend)
    grow(after, 11, 12, retention=Retention(last=9))
    backend.delete(*(entry.key for entry in backend.list("_log/")))
    repair_log(backend, dry_run=False)
    found = steps(begin(backend))
    assert found[-2:] == [11, 12]
    assert not {20, 30} & set(found)
    with pytest.raises((Corrupt, Fenced)):
        store.commit(write(store, 40), timeout=timedelta())
