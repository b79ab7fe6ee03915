"""`RunStore`: who resumes what, which bytes are refused, and what retention may never touch."""

from __future__ import annotations

import dataclasses
import json
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from door import History, Log, await_markers, commit_key, log_key, marker_key, publish
from fsspec.implementations.memory import MemoryFileSystem
from stored._crashes import Crashed, CrashingBackend
from stored._lives import LIFE, named
from stored._segments import LAYOUT, entry_of, read_segment, segment_bytes, verify_records

from lightning_moe_ckpt.errors import Corrupt, Fenced, KeyExists, KeyMissing, NoUsableGeneration, StorageError
from lightning_moe_ckpt.storage import Backend, Commit, RankMarker, Retention, RunStore, open_backend, segment_key
from lightning_moe_ckpt.storage._fsspec import FsspecBackend

NOW = timedelta()


@pytest.fixture
def backend() -> Backend:
    MemoryFileSystem.store.clear()  # listings take time for all that was ever stored
    MemoryFileSystem.pseudo_dirs[:] = [""]
    return FsspecBackend(f"memory://{uuid.uuid4().hex}/run")


def _start(backend: Backend, resume: str = "auto") -> RunStore:
    """An incarnation that takes the newest generation there is."""
    store = RunStore.open(backend, resume=resume)  # type: ignore[arg-type]
    incarnation = None
    while incarnation is None:
        newest = [commit.generation for commit in store.candidates()][:1]
        incarnation = store.open_incarnation(newest[0] if newest else None)
    return store


def _write(store: RunStore, step: int, rank: int = 0, world_size: int = 1, plan_hash: str = "plan") -> RankMarker:
    """One rank's segment and marker; the bytes depend on step and rank."""
    assert store.incarnation is not None
    generation = named(step=step, incarnation=store.incarnation)
    data = segment_bytes(1000 * step + rank)
    entry = entry_of(store.put_segment(generation, rank, step, memoryview(data)), step, data)
    marker = RankMarker(
        run_id=store.run_id, rank=rank, world_size=world_size, generation=generation, plan_hash=plan_hash,
        segments=(entry,), policy={"window": 1},
    )  # fmt: skip
    store.put_marker(marker)
    return marker


def _save(store: RunStore, step: int, keep: int = 2) -> Commit:
    commit = store.commit(_write(store, step), timeout=NOW)
    store.retain(Retention(last=keep))
    return commit


def _steps(store: RunStore) -> list[int]:
    return [commit.generation.step for commit in store.candidates()]


def _flip(backend: Backend, key: str, position: int) -> None:
    data = bytearray(backend.get(key))
    data[position] ^= 1 << position % 8
    backend.put(key, bytes(data))


# Which run, which incarnation.


def test_a_new_url_begins_a_run_and_the_next_start_continues_it(tmp_path: Path) -> None:
    """Over real files, through the front door."""
    first = _start(open_backend(f"file://{tmp_path}/run"))
    assert (first.incarnation, _steps(first)) == (1, [])
    written = _save(first, 10)
    second = _start(open_backend(f"file://{tmp_path}/run"), "must")
    assert (second.run_id, second.incarnation, second.candidates()) == (first.run_id, 2, [written])
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["_log", "snap"]


def test_must_needs_a_run(backend: Backend) -> None:
    with pytest.raises(NoUsableGeneration, match='resume="must"'):
        RunStore.open(backend, resume="must")
    assert backend.list("") == []


def test_never_begins_another_run_and_releases_the_older_one_late(backend: Backend) -> None:
    """The older run stays, though invisible, until the new one has more generations than it keeps."""
    old = _start(backend)
    _save(old, 10)
    _save(old, 20)
    old.put_segment(named(step=30, incarnation=1), 0, 30, memoryview(b"never finished"))
    new = _start(backend, "never")
    assert new.run_id != old.run_id
    assert new.incarnation == 2
    assert _steps(new) == []
    assert dict(new.rejected)["step 20 (incarnation 1)"] == "belongs to an earlier run"
    assert new.unreadable == [], "nothing of this run is lost"
    with pytest.raises(Fenced):
        _save(old, 30)
    _save(new, 5)
    _save(new, 6)
    assert backend.list("snap/000000000010/"), "the older run is a fallback until now"
    _save(new, 7)
    assert {entry.key.split("/")[2] for entry in backend.list("snap/")} == {"i000002-00112233aabb"}
    assert _steps(_start(backend)) == [7, 6]


def test_numbers_of_incarnations_are_never_reused(backend: Backend) -> None:
    """Not after a lost `open` entry, and not after the whole log was lost."""
    first = _start(backend)
    _save(first, 10)
    backend.put(log_key(1), b"spoilt")  # the entry that opened incarnation 1
    second = _start(backend)
    assert second.incarnation == 2
    backend.put(log_key(2), b"spoilt")  # the entry that opened incarnation 2, which has written nothing
    third = _start(backend)
    assert third.incarnation is not None
    assert third.incarnation > 2
    assert third.candidates()[0].generation == named(step=10, incarnation=1)
    for entry in backend.list("_log/"):
        backend.delete(entry.key)
    fourth = _start(backend, "never")
    assert fourth.incarnation == 2  # above every incarnation of which anything is stored
    assert dict(fourth.rejected)["step 10 (incarnation 1)"] == "belongs to an earlier run"


def test_an_unreadable_log_stops_auto_but_not_never(backend: Backend) -> None:
    _save(_start(backend), 10)
    for entry in backend.list("_log/"):
        backend.put(entry.key, b"spoilt")
    with pytest.raises(Corrupt, match="none of the 3 log entries"):
        RunStore.open(backend, resume="auto")
    assert _start(backend, "never").incarnation == 4


def test_of_jobs_started_at_once_each_gets_a_number_of_its_own(backend: Backend) -> None:
    """And only the last one may go on writing."""
    _save(_start(backend), 10)
    with ThreadPoolExecutor(6) as pool:
        stores = list(pool.map(lambda _: _start(backend), range(8)))
    incarnations = sorted(store.incarnation or 0 for store in stores)
    assert incarnations == list(range(2, 10))
    for store in stores:
        if store.incarnation == 9:
            _save(store, 20)
        else:
            with pytest.raises(Fenced):
                _save(store, 20)


def test_a_run_replaced_while_starting_is_noticed(backend: Backend) -> None:
    store = RunStore.open(backend, resume="auto")
    store.candidates()
    RunStore.open(backend, resume="never")
    assert store.open_incarnation(None) is None
    with pytest.raises(Fenced, match="another run"):
        store.candidates()


def test_only_candidates_can_be_resumed(backend: Backend) -> None:
    store = RunStore.open(backend, resume="auto")
    store.candidates()
    with pytest.raises(ValueError, match="not one of the candidates"):
        store.open_incarnation(named(step=10, incarnation=1))


def _last_event(backend: Backend) -> object:
    """What happened, without when."""
    entry = json.loads(backend.get(backend.list("_log/")[-1].key))
    event = entry["document"]["body"]["event"]
    assert abs(event.pop("unix_time") - time.time()) < 3600
    return event


def test_a_life_may_begin_from_memory_ahead_of_storage(backend: Backend) -> None:
    """The log says so; what the earlier incarnation commits late beyond that step is dead, what it commits up to it is not."""
    first = _start(backend)
    _save(first, 10)
    ahead = named(step=15, incarnation=1)
    late = [_write(first, 12), _write(first, 20)]
    store = RunStore.open(backend, resume="must")
    assert [commit.generation.step for commit in store.candidates()] == [10]
    assert store.why_dead(ahead) is None
    assert store.open_incarnation(ahead, volatile=[ahead]) == 2
    assert _last_event(backend) == {
        "type": "open", "incarnation": 2, "resumed": {"incarnation": 1, "nonce": LIFE, "step": 15}, "volatile": True,
    }  # fmt: skip
    for marker in late:  # the earlier incarnation looked at the log before `open_incarnation`, and writes after it
        publish(backend, await_markers(backend, marker, timeout=NOW), _history(backend))
    assert _steps(RunStore.open(backend, resume="must")) == [12, 10]


def _history(backend: Backend) -> History:
    history = Log(backend).read()
    assert history is not None
    return history


def test_a_generation_that_storage_has_is_not_volatile(backend: Backend) -> None:
    first = _start(backend)
    commit = _save(first, 10)
    store = RunStore.open(backend, resume="must")
    store.candidates()
    store.open_incarnation(commit.generation, volatile=[commit.generation])
    assert _last_event(backend) == {
        "type": "open",
        "incarnation": 2,
        "resumed": {"incarnation": 1, "nonce": LIFE, "step": 10},
    }


@pytest.mark.parametrize("commits", [False, True], ids=["before its first commit", "after a commit"])
def test_when_all_memory_is_lost_an_older_commit_is_resumed(backend: Backend, commits: bool) -> None:
    """An incarnation that began from memory dies with the whole cluster; what it left in memory or storage stays dead."""
    _save(_start(backend), 10)
    second = RunStore.open(backend, resume="must")
    second.candidates()
    ahead = named(step=15, incarnation=1)
    second.open_incarnation(ahead, volatile=[ahead])
    unfinished = _write(second, 17)
    if commits:
        _save(second, 16)
    third = RunStore.open(backend, resume="must")
    newest = third.candidates()[0].generation
    assert newest == (named(step=16, incarnation=2) if commits else named(step=10, incarnation=1))
    assert third.open_incarnation(newest) == 3
    publish(backend, await_markers(backend, unfinished, timeout=NOW), _history(backend))  # late
    fourth = RunStore.open(backend, resume="must")
    assert fourth.candidates()[0].generation == newest
    # A node comes back with what it had in memory.
    assert (fourth.why_dead(ahead) is None) == commits
    assert fourth.why_dead(named(step=17, incarnation=2)) is not None
    for dead in (named(step=17, incarnation=2), named(step=18, incarnation=1)):
        with pytest.raises(ValueError, match=r"incarnation \d began again from step"):
            fourth.open_incarnation(dead, volatile=[ahead, dead])


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_crash_while_a_life_begins_from_memory_changes_nothing(backend: Backend, when: str) -> None:
    """Before or after any call to the store: the next start may begin from the same copy, or from storage."""
    _save(_start(backend), 10)
    ahead, crash_at, done = named(step=15, incarnation=1), 0, False
    while not done:
        dying = CrashingBackend(backend, crash_at=crash_at, when=when)  # type: ignore[arg-type]
        try:
            store = RunStore.open(dying, resume="must")
            store.candidates()
            store.open_incarnation(ahead, volatile=[ahead])
            done = True
        except Crashed:
            crash_at += 1
        store = RunStore.open(backend, resume="must")
        assert [commit.generation.step for commit in store.candidates()] == [10]
        assert store.why_dead(ahead) is None
    assert crash_at > 5
    incarnation = store.open_incarnation(ahead, volatile=[ahead])
    assert incarnation is not None
    assert incarnation > 2


def test_what_memory_holds_below_the_watermark_is_not_resumed(backend: Backend) -> None:
    """The log forgets there which incarnations began where."""
    first = _start(backend)
    for step in (10, 20, 30):
        _save(first, step)
    store = RunStore.open(backend, resume="must")
    store.candidates()
    below = named(step=15, incarnation=1)
    with pytest.raises(ValueError, match="below the watermark 20"):
        store.open_incarnation(below, volatile=[below])


def test_numbers_are_past_those_in_memory(backend: Backend) -> None:
    """Also when the log lost the entry that opened one: names in memory must not meet either."""
    _save(_start(backend), 10)
    store = RunStore.open(backend, resume="must")
    store.candidates()
    ahead = named(step=15, incarnation=1)
    assert store.open_incarnation(ahead, volatile=[ahead, named(step=12, incarnation=7)]) == 8


def test_a_joined_store_reads_and_writes_but_does_not_coordinate(backend: Backend) -> None:
    coordinator = _start(backend)
    rank1 = RunStore.join(backend, run_id=coordinator.run_id)
    assert backend.get(rank1.put_segment(named(step=10, incarnation=1), 1, 10, memoryview(b"x"))) == b"x"
    assert rank1.incarnation is None
    for misuse in (rank1.candidates, rank1.promote, lambda: rank1.retain(Retention(last=1))):
        with pytest.raises(ValueError, match="only the coordinator"):
            misuse()


# Bytes that must not be loaded.


def test_a_generation_is_read_back_and_its_records_verify(backend: Backend) -> None:
    store = _start(backend)
    commit = _save(store, 10)
    segment = store.read_marker(commit, 0).segments[0]
    out = bytearray(segment.nbytes)
    read_segment(store, segment, memoryview(out))
    assert out == segment_bytes(10_000)
    verify_records(segment, memoryview(out))
    assert commit.nbytes == LAYOUT.nbytes


def test_every_flipped_byte_of_a_segment_is_refused(backend: Backend) -> None:
    """Header, padding and data, one flip per byte; and every truncation."""
    store = _start(backend)
    segment = _write(store, 10).segments[0]
    data = bytearray(backend.get(segment.key))
    out = memoryview(bytearray(segment.nbytes))
    for position in range(len(data)):
        data[position] ^= 1 << position % 8
        backend.put(segment.key, bytes(data))
        with pytest.raises(Corrupt, match="digest"):
            read_segment(store, segment, out)
        data[position] ^= 1 << position % 8
    for length in (0, 1, 4095, 4096, len(data) - 1):
        backend.put(segment.key, bytes(data[:length]))
        with pytest.raises(Corrupt):
            read_segment(store, segment, out)
    backend.put(segment.key, bytes(data))
    read_segment(store, segment, out)


def test_every_flipped_byte_of_a_manifest_or_marker_is_refused(backend: Backend) -> None:
    """A generation whose manifest is not as written is no candidate; one with a spoilt marker cannot be read."""
    store = _start(backend)
    commit = _save(store, 10)
    for key in (commit_key(commit.generation), marker_key(commit.generation, 0)):
        data = backend.get(key)
        for position in range(len(data)):
            _flip(backend, key, position)
            if key.endswith(".done"):
                with pytest.raises(Corrupt):
                    store.read_marker(commit, 0)
            else:
                assert store.candidates() == []
            backend.put(key, data)
    assert store.candidates() == [commit]


def test_spoilt_files_are_refused_whatever_was_spoilt(backend: Backend) -> None:
    """Missing, foreign, or moved from another place of the same run."""
    store = _start(backend)
    older, newer = _save(store, 10), _save(store, 20)
    old_segment, new_segment = (store.read_marker(commit, 0).segments[0] for commit in (older, newer))
    out = memoryview(bytearray(LAYOUT.nbytes))

    backend.put(new_segment.key, backend.get(old_segment.key))
    with pytest.raises(Corrupt, match="its marker says"):
        read_segment(store, new_segment, out)
    backend.delete(new_segment.key)
    with pytest.raises(KeyMissing):
        read_segment(store, new_segment, out)

    backend.put(marker_key(newer.generation, 0), backend.get(marker_key(older.generation, 0)))
    with pytest.raises(Corrupt, match="marker of rank 0 for step 10"):
        store.read_marker(newer, 0)
    _write(store, 20, plan_hash="other plan")
    with pytest.raises(Corrupt, match="not the marker that was committed"):
        store.read_marker(newer, 0)

    backend.put(commit_key(newer.generation), backend.get(commit_key(older.generation)))
    assert store.candidates() == [older]
    assert "belongs to step 10" in dict(store.rejected)["step 20 (incarnation 1)"]
    assert store.unreadable == store.rejected


def test_a_manifest_of_another_run_is_refused(backend: Backend) -> None:
    """A generation copied in from elsewhere keeps its run id."""
    foreign_backend = FsspecBackend(f"memory://{uuid.uuid4().hex}/run")
    _save(_start(foreign_backend), 10)
    store = _start(backend)
    for entry in foreign_backend.list("snap/"):
        backend.put(entry.key, foreign_backend.get(entry.key))
    assert store.candidates() == []
    assert "of run " in store.rejected[0][1]


def test_records_are_verified_one_by_one(backend: Backend) -> None:
    """The digest of a record, its place and its dtype; the file's own digest is another check."""
    marker = _write(_start(backend), 10)
    segment = marker.segments[0]
    data = bytearray(backend.get(segment.key))
    verify_records(segment, memoryview(data))
    for record in segment.records:
        data[record.offset + record.nbytes - 1] ^= 1
        with pytest.raises(Corrupt, match=rf"{record.name}: digest"):
            verify_records(segment, memoryview(data))
        data[record.offset + record.nbytes - 1] ^= 1
    first = segment.records[0]
    changes: list[dict[str, Any]] = [{"name": "x"}, {"offset": first.offset + 64}, {"nbytes": 4}, {"dtype": "I32"}]
    for change in changes:
        moved = dataclasses.replace(first, **change)
        with pytest.raises(Corrupt, match="not where its marker says"):
            verify_records(dataclasses.replace(segment, records=(moved,)), memoryview(data))
    with pytest.raises(Corrupt):
        verify_records(segment, memoryview(data)[:-1])


# Commit.


def test_the_coordinator_waits_for_the_other_ranks(backend: Backend) -> None:
    """Each pause, one more rank finishes; markers come back in rank order."""
    store = _start(backend)
    own = _write(store, 10, world_size=3)
    late = [1, 2]

    def pause(_: float) -> None:
        _write(store, 10, late.pop(), world_size=3)

    found = await_markers(backend, own, timeout=timedelta(hours=1), sleep=pause)
    assert [stored.marker.rank for stored in found] == [0, 1, 2]


def _nothing(backend: Backend, store: RunStore) -> None:
    """Rank 1 never came this far."""


def _no_segment(backend: Backend, store: RunStore) -> None:
    _write(store, 10, 1, world_size=2)
    backend.delete(segment_key(named(step=10, incarnation=1), 1, 10))


def _short_segment(backend: Backend, store: RunStore) -> None:
    _write(store, 10, 1, world_size=2)
    backend.put(segment_key(named(step=10, incarnation=1), 1, 10), b"short")


def _spoilt_marker(backend: Backend, store: RunStore) -> None:
    _write(store, 10, 1, world_size=2)
    _flip(backend, marker_key(named(step=10, incarnation=1), 1), 50)


def _other_plan(backend: Backend, store: RunStore) -> None:
    _write(store, 10, 1, world_size=2, plan_hash="other")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_nothing, "rank 1: no marker yet"),
        (_no_segment, "rank 1: 1 objects are missing or of another size"),
        (_short_segment, "rank 1: 1 objects are missing or of another size"),
        (_spoilt_marker, "rank 1: .*Another copy may be good"),
        (_other_plan, "rank 1: marker is for plan other"),
    ],
)
def test_nothing_is_committed_before_every_rank_is_whole(
    backend: Backend, spoil: Callable[[Backend, RunStore], None], reason: str
) -> None:
    """The error says what each rank lacks, and the generation stays invisible; mended, it commits."""
    store = _start(backend)
    own = _write(store, 10, world_size=2)
    spoil(backend, store)
    with pytest.raises(StorageError, match=reason):
        store.commit(own, timeout=NOW)
    assert store.candidates() == []
    assert store.rejected[0][1].startswith("not committed")
    _write(store, 10, 1, world_size=2)
    store.commit(own, timeout=NOW)
    assert _steps(store) == [10]


def test_a_repeated_commit_succeeds_and_another_one_does_not(backend: Backend) -> None:
    """The retry after a lost answer finds its own bytes; other bytes under the name are an error."""
    store = _start(backend)
    own = _write(store, 10)
    assert store.commit(own, timeout=NOW) == store.commit(own, timeout=NOW)
    with pytest.raises(KeyExists):
        store.commit(_write(store, 10, plan_hash="other"), timeout=NOW)


def test_another_lifes_generation_cannot_be_committed(backend: Backend) -> None:
    store = _start(backend)
    foreign = dataclasses.replace(_write(store, 10), generation=named(step=10, incarnation=7))
    with pytest.raises(ValueError, match="not of this incarnation"):
        store.commit(foreign, timeout=NOW)


# Retention.


def test_what_a_life_began_from_stays_until_it_has_committed(backend: Backend) -> None:
    """However few are kept, and however often somebody asks: also while a generation of its own is under way."""
    _save(_start(backend), 10)
    second = _start(backend)
    marker = _write(second, 20)
    for _ in range(2):
        assert second.retain(Retention(last=1)) == []
        assert _steps(second) == [10]
    second.commit(marker, timeout=NOW)
    assert second.retain(Retention(last=1)) == [named(step=10, incarnation=1)]
    assert _steps(second) == [20]


def test_what_is_in_flight_is_never_deleted(backend: Backend) -> None:
    """Segments of a later generation of this incarnation, while an older one is committed and swept."""
    store = _start(backend)
    for step in (10, 20, 30):
        store.put_segment(named(step=step + 10, incarnation=1), 0, step + 10, memoryview(b"under way"))
        _save(store, step, keep=1)
        assert [entry.nbytes for entry in backend.list(f"snap/{step + 10:012d}/")] == [len(b"under way")]


def test_a_manifest_that_cannot_be_read_is_not_deleted_above_the_watermark(backend: Backend) -> None:
    """The medium may only be away; it does not count as kept either."""
    store = _start(backend)
    for step in (10, 20, 30):
        _save(store, step, keep=3)
    key = commit_key(named(step=20, incarnation=1))
    data = backend.get(key)
    backend.put(key, b"unreadable for now")
    _save(store, 40, keep=3)
    assert _steps(store) == [40, 30, 10]
    backend.put(key, data)
    assert _steps(store) == [40, 30, 20, 10]


def test_an_interrupted_deletion_is_finished(backend: Backend) -> None:
    """What is left of a generation below the watermark goes with the next call."""
    store = _start(backend)
    for step in (10, 20, 30):
        store.commit(_write(store, step), timeout=NOW)
    victim = segment_key(named(step=10, incarnation=1), 0, 10)
    assert store.retain(Retention(last=2)) == [named(step=10, incarnation=1)]
    backend.put(victim, b"left over")
    assert store.retain(Retention(last=2)) == [named(step=10, incarnation=1)]
    assert backend.list("snap/000000000010/") == []


def test_retention_needs_an_incarnation(backend: Backend) -> None:
    unopened = RunStore.open(backend, resume="auto")
    with pytest.raises(ValueError, match="open_incarnation"):
        unopened.retain(Retention(last=1))


def test_memory_is_needed_only_of_what_is_newer_than_storage_and_not_left_behind(backend: Backend) -> None:
    """What a rank that only joined can find out: a commit, another start from an older step, another run."""
    store = _start(backend)
    joined = RunStore.join(backend, run_id=store.run_id)
    _save(store, 4)
    here = [named(step=step, incarnation=1) for step in (3, 4, 5)]
    assert [joined.may_need(each) for each in here] == [False, False, True]
    _write(store, 5)
    assert joined.may_need(here[2]), "stored, and not committed"
    _start(backend)
    assert not joined.may_need(here[2]), "the run went on from step 4"
    assert joined.may_need(named(step=5, incarnation=2))
    _start(backend, "never")
    assert not joined.may_need(named(step=5, incarnation=2)), "another run"
