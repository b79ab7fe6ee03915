"""Garbage collection beside the job: deletes what the log gave up, gives up what it is told, and disturbs nobody."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
from door import log_key
from servers._s3 import S3Server, running
from stored._crashes import Crashed, CrashingBackend
from stored._lives import named
from stored._runs import begin, save, steps, stored, write

from lightning_moe_ckpt.errors import ConfigurationError, Corrupt, Fenced, NoUsableGeneration
from lightning_moe_ckpt.storage import (
    Backend,
    ObjectBackend,
    PosixBackend,
    Retention,
    RunStore,
    collect_garbage,
)

ALL = Retention(last=100)


@pytest.fixture(params=["posix", "moto"])
def backend(request: pytest.FixtureRequest, s3: Callable[[str], S3Server], tmp_path: Path) -> Backend:
    """An empty store, also on a real S3 server."""
    if request.param == "posix":
        return PosixBackend(tmp_path / "run")
    moto = s3("moto")
    return ObjectBackend(moto.url(), storage_options=moto.storage_options)


def history_of_failures(backend: Backend) -> RunStore:
    """A run with everything that can be left behind; returns its third incarnation, which is alive.

    Steps 10 and 20 of an earlier run; of this one 30 (dead: the second incarnation began again from 20), 25 (never committed,
    its incarnation is over), 40 to 60 of the third incarnation, which is in the middle of 70.
    """
    earlier = begin(backend)
    save(earlier, 10, ALL)
    write(earlier, 20)
    first = RunStore.open(backend, resume="never")
    assert first.open_incarnation(None) == 2
    for step in (10, 20, 30):
        save_without_retention(first, step)
    second = begin(backend, at=20)
    write(second, 25)
    third = begin(backend, at=20)
    for step in (40, 50, 60):
        save_without_retention(third, step)
    write(third, 70)
    return third


def save_without_retention(store: RunStore, step: int) -> None:
    store.commit(write(store, step), timeout=timedelta())


def test_only_what_the_log_gave_up_goes_and_the_job_goes_on(backend: Backend) -> None:
    """Each with its reason; what is under way and what could be restored stays; a second look finds nothing."""
    job = history_of_failures(backend)
    looked = collect_garbage(backend, dry_run=True)
    before = backend.list("")
    assert {
        (generation.generation.step, generation.generation.incarnation): generation.reason for generation in looked.goes
    } == {
        (20, 1): "of an earlier run, not committed",
        (25, 3): "not committed, and incarnation 3 is over",
        (30, 2): "incarnation 4 began again from step 20",
    }
    assert not looked.deleted
    done = collect_garbage(backend)
    assert (done.goes, done.stays, done.deleted) == (looked.goes, looked.stays, True)
    after = backend.list("")
    gone = {entry.key: entry.nbytes for entry in before if entry not in after}
    assert (sum(gone.values()), len(gone)) == (done.nbytes, sum(generation.num_objects for generation in done.goes))
    assert {key.split("/")[2][:7] for key in gone} == {"i000001", "i000002", "i000003"}
    assert collect_garbage(backend).goes == ()
    save(job, 80, Retention(last=2))
    assert (steps(job), stored(backend)) == ([60, 80], [60, 80])


def test_what_is_given_up_for_a_job_that_lives_is_news_to_it(backend: Backend) -> None:
    """It goes on, commits, and keeps by its own rules what is left; a later incarnation still fences it."""
    job = history_of_failures(backend)
    found = collect_garbage(backend, Retention(last=1, every_n_steps=40))
    assert {generation.generation.step for generation in found.stays} == {10, 40, 60, 70}
    assert {(e.generation.step, e.reason) for e in found.stays if e.generation.incarnation > 1} == {
        (10, "first at or after step 0"),
        (40, "first at or after step 40"),
        (60, "among the last 1"),
        (70, "not committed yet"),
    }
    assert steps(job) == [10, 40, 60]
    save(job, 80, Retention(last=2, every_n_steps=40))
    assert steps(job) == [10, 40, 60, 80]
    collect_garbage(backend, Retention(last=1))
    late = write(job, 90)
    begin(backend)
    with pytest.raises(Fenced):
        job.commit(late, timeout=timedelta())
    with pytest.raises(Fenced):
        job.retain(Retention(last=1))


def test_a_dry_run_writes_nothing_and_says_what_the_other_does(backend: Backend) -> None:
    """Byte for byte, also where the log would have to be told."""
    history_of_failures(backend)
    before = backend.list("")
    looked = collect_garbage(backend, Retention(last=2), dry_run=True)
    assert backend.list("") == before
    done = collect_garbage(backend, Retention(last=2))
    assert (looked.goes, looked.stays, looked.watermark) == (done.goes, done.stays, done.watermark)
    assert len(done.goes) > 3


def local(tmp_path: Path) -> PosixBackend:
    return PosixBackend(tmp_path / "run")


def test_a_start_and_a_collection_that_meet_look_again(tmp_path: Path) -> None:
    """Whoever is second: a job whose pick was given up meanwhile, and a collection in whose middle a job starts."""
    backend = local(tmp_path)
    store = begin(backend)
    for step in (10, 20):
        save(store, step, ALL)
    starting = RunStore.open(backend, resume="auto")
    older = starting.candidates()[-1].generation
    collect_garbage(backend, Retention(last=1))
    assert starting.open_incarnation(older) is None
    assert [commit.generation.step for commit in starting.candidates()] == [20]
    assert starting.open_incarnation(starting.candidates()[0].generation) == 2
    for step in (30, 40):
        save(starting, step, ALL)

    class Meanwhile(CrashingBackend):
        """A job starts right before the first entry is appended."""

        started = False

        def create(self, key: str, data: bytes) -> None:
            if not self.started:
                self.started = True
                save(begin(backend, at=30), 35, ALL)
            super().create(key, data)

    found = collect_garbage(Meanwhile(backend), Retention(last=2))
    assert [generation.generation.step for generation in found.stays] == [30, 35]
    assert stored(backend) == [30, 35]
    assert steps(begin(backend)) == [30, 35]


def test_a_collection_that_dies_at_any_call_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest two stay whole, the job goes on, and the next collection ends up where this one would have."""
    monkeypatch.setattr(os, "fsync", os.fstat)
    crash_at = 0
    while True:
        backend = PosixBackend(tmp_path / str(crash_at))
        job = history_of_failures(backend)
        dying = CrashingBackend(backend, crash_at=crash_at, when="before")
        with suppress(Crashed):
            collect_garbage(dying, Retention(last=2))
            break
        assert steps(job)[-2:] == [50, 60]
        assert all(backend.get(entry.key) for entry in backend.list("snap/000000000060/"))
        collect_garbage(backend, Retention(last=2))
        assert stored(backend) == [50, 60, 70]
        save(job, 80, Retention(last=2))
        crash_at += 1
    assert crash_at > 20


def test_without_a_sound_log_nothing_more_is_given_up(tmp_path: Path) -> None:
    """The newest entry may be the start of a job: plain collection goes by what older entries say."""
    backend = local(tmp_path)
    history_of_failures(backend)
    entries = backend.list("_log/")
    backend.put(entries[-1].key, b"spoilt")
    assert entries[-1].key == log_key(len(entries) - 1)
    with pytest.raises(Corrupt, match="newest log entry cannot be read"):
        collect_garbage(backend, Retention(last=1))
    found = collect_garbage(backend)
    assert [(generation.generation.step, generation.generation.incarnation) for generation in found.goes] == [
        (20, 1),
        (30, 2),
    ]
    assert "of a later incarnation than the log shows" in {generation.reason for generation in found.stays}
    for entry in entries:
        backend.put(entry.key, b"spoilt")
    with pytest.raises(Corrupt, match="none of the"):
        collect_garbage(backend)


def test_a_store_that_cannot_fence_refuses_to_give_up_more(tmp_path: Path) -> None:
    """A real one: rclone ignores conditions."""
    with running("rclone", tmp_path) as server:
        backend = ObjectBackend(server.url(), storage_options=server.storage_options)
        history_of_failures(backend)
        with pytest.raises(ConfigurationError, match="retention to the callback of the job"):
            collect_garbage(backend, Retention(last=1))
        assert len(collect_garbage(backend).goes) == 3


def test_where_there_is_no_run_there_is_no_garbage(tmp_path: Path) -> None:
    with pytest.raises(NoUsableGeneration, match="holds no run"):
        collect_garbage(local(tmp_path))
    assert not (tmp_path / "run").exists()


def test_an_earlier_run_goes_once_the_newer_one_has_more_than_it_keeps(tmp_path: Path) -> None:
    """Not by asking for less: its own rules count, unless the collection gives something up."""
    backend = local(tmp_path)
    save(begin(backend), 10, ALL)
    store = RunStore.open(backend, resume="never")
    store.open_incarnation(None)
    for step in (10, 20):
        save(store, step, Retention(last=2))
    assert collect_garbage(backend).goes == collect_garbage(backend, Retention(last=2)).goes == ()
    found = collect_garbage(backend, Retention(last=1))
    assert [generation.generation for generation in found.goes] == [
        named(step=10, incarnation=1),
        named(step=10, incarnation=2),
    ]
    assert "of an earlier run" in found.goes[0].reason
