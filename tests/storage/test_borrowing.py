"""Generations that refer to older ones: what one needs is committed before it, and stays as long as it does."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from door import StoredMarker, commit_key, marker_key
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st
from stored._crashes import Crashed, CrashingBackend
from stored._lives import named
from stored._partial import DENSE, EXPERTS, PartialJob, Sources, read_back
from stored._runs import stored
from stored._segments import read_record

from lightning_moe_ckpt.errors import Corrupt
from lightning_moe_ckpt.storage import (
    Backend,
    Commit,
    GenerationId,
    PosixBackend,
    RankMarker,
    Retention,
    RunStore,
    RunView,
    collect_garbage,
    digest_of,
    segment_key,
)
from lightning_moe_ckpt.storage._fsspec import FsspecBackend

A, B, C = EXPERTS
ALL = Retention(last=100)


def memory() -> Backend:
    MemoryFileSystem.store.clear()  # listings take time for all that was ever stored
    MemoryFileSystem.pseudo_dirs[:] = [""]
    return FsspecBackend(f"memory://{uuid.uuid4().hex}/run")


def generation(step: int, incarnation: int = 1) -> GenerationId:
    return named(step=step, incarnation=incarnation)


def steps_of(found: Mapping[int, Sources], step: int) -> list[int]:
    """From which steps the dense part and the experts of a generation are."""
    return [found[step][name].step for name in (DENSE, *EXPERTS)]


def spares_of(marker: RankMarker) -> dict[str, int]:
    """From which step the older copy of each expert is."""
    found = [(r.operator, spare.generation.step) for spare in marker.spares for r in spare.segment.records]
    assert len(dict(found)) == len(found)
    return dict(sorted(found))


def in_turn(backend: Backend, steps: range, keep: Retention | int = 2) -> PartialJob:
    """A job that stores one expert after the other."""
    job = PartialJob(backend)
    for turn, step in enumerate(steps):
        job.save(step, EXPERTS[turn % 3], keep=keep)
    return job


# What stays.


def test_what_a_kept_generation_needs_stays_and_nothing_older() -> None:
    """One expert of three in turn: the last two stay with two copies of every expert, however long it goes on."""
    backend = memory()
    job = in_turn(backend, range(0, 300, 10))
    found = {step: steps_of(job.restorable(), step) for step in job.restorable()}
    assert (found[290], found[280]) == ([290, 270, 280, 290], [280, 270, 280, 260])
    assert stored(backend) == [230, 240, 250, 260, 270, 280, 290]
    newest = job.store.candidates()[0]
    assert spares_of(job.store.read_marker(newest, 1)) == {A: 240, B: 250, C: 260}
    assert sorted(found) == [250, 260, 270, 280, 290], "what is there for others can be restored too while it lasts"
    assert dict(job.store.rejected) == {
        f"step {step} (incarnation 1)": f"needs step {step - 20} (incarnation 1), given up: below the watermark 230"
        for step in (230, 240)
    }
    assert job.store.unreadable == []
    assert [commit.generation.step for commit in job.store.sources] == [240, 230]
    view = {each.generation.step: each for each in RunView.open(backend).generations()}
    assert [step for step, each in view.items() if each.usable] == [290, 280, 270, 260, 250]
    assert view[240].why_not == (
        "only there for step 260 (incarnation 1); needs step 220 (incarnation 1), given up: below the watermark 230"
    )


def test_milestones_keep_what_they_need_by_name() -> None:
    """Far below the watermark, over lives, until a later rule lets both go."""
    backend = memory()
    keep = Retention(last=2, every_n_steps=100)
    job = in_turn(backend, range(0, 250, 10), keep)
    assert stored(backend) == [0, 80, 90, 100, *range(180, 250, 10)], "older copies stay for the last two only"
    assert {0, 100, 200, 230, 240} <= set(job.restorable())
    second = PartialJob(backend)
    second.save(250, A, keep=keep)
    assert {0, 100, 200, 240, 250} <= set(second.restorable())
    assert steps_of(second.restorable(), 100) == [100, 90, 100, 80]
    second.save(260, B, keep=2)
    assert stored(backend) == [190, 200, 220, 230, 240, 250, 260]
    assert {250, 260} <= set(second.restorable())


def test_a_milestone_that_cannot_be_read_now_loses_nothing_that_it_may_need() -> None:
    """Nobody can say what that is, so nothing older goes until it is back; then the rest goes."""
    backend = memory()
    keep = Retention(last=2, every_n_steps=100)
    job = in_turn(backend, range(0, 140, 10), keep)
    key = commit_key(generation(100))
    manifest = backend.get(key)
    backend.put(key, b"the medium is away")
    for turn, step in enumerate(range(140, 200, 10), 14):
        job.save(step, EXPERTS[turn % 3], keep=keep)
    assert 100 not in job.restorable()
    told = {each.generation.step: each.reason for each in collect_garbage(backend, keep, dry_run=True).stays}
    assert told[80] == "may be needed by step 100 (incarnation 1), which cannot be read"
    backend.put(key, manifest)
    assert steps_of(job.restorable(), 100) == [100, 90, 100, 80]
    job.save(200, C, keep=keep)
    assert steps_of(job.restorable(), 100) == [100, 90, 100, 80]
    assert stored(backend) == [0, 80, 90, 100, *range(140, 210, 10)]


def test_an_expert_that_is_never_stored_again_keeps_one_generation() -> None:
    """However far it is behind; the ones between are given up."""
    backend = memory()
    job = PartialJob(backend)
    for step in range(0, 100, 10):
        job.save(step, A, keep=1)
    assert stored(backend) == [0, 70, 80, 90]
    assert steps_of(job.restorable(), 90) == [90, 90, 0, 0]
    job.save(100, B, C, keep=1)
    assert stored(backend) == [0, 80, 90, 100], "the first copies of two experts are their second ones now"
    for step in (110, 120, 130):
        job.save(step, A, B, C, keep=1)
    assert stored(backend) == [110, 120, 130], "they reference nothing; each has the one before it for a second copy"


@settings(max_examples=30)
@given(
    st.lists(st.lists(st.sampled_from(EXPERTS), unique=True, max_size=2), min_size=2, max_size=12), st.integers(1, 2)
)
def test_the_two_newest_copies_of_every_expert_stay(turns: list[list[str]], keep: int) -> None:
    """Whatever is stored when: as soon as there were two, both are there, and the newest generation names them."""
    backend = memory()
    job, copies = PartialJob(backend), {expert: [0] for expert in EXPERTS}
    job.save(0, keep=keep)
    for step, experts in enumerate(turns, start=1):
        job.save(step, *experts, keep=keep)
        for expert in experts:
            copies[expert].append(step)
        commit = job.store.candidates()[0]
        assert steps_of({step: read_back(job.store, commit)}, step) == [step, *(copies[each][-1] for each in EXPERTS)]
        wanted = {expert: taken[-2] for expert, taken in copies.items() if len(taken) > 1}
        markers = [job.store.read_marker(commit, rank) for rank in range(commit.world_size)]
        assert [spares_of(marker) for marker in markers] == [wanted, wanted]
        needed = {taken[-1] for taken in copies.values()} | set(wanted.values())
        assert needed <= set(stored(backend))
        assert len(stored(backend)) <= 2 * len(EXPERTS) + 4, "no more than two of each expert, for each of the last two"
        for marker in markers:
            for spare in marker.spares:
                for record in spare.segment.records:
                    read_record(job.store, spare.segment, record, memoryview(bytearray(record.nbytes)))


def test_a_save_under_way_may_borrow_from_the_last_two_whatever_is_kept() -> None:
    """Ranks that are ahead of the coordinator write their markers before the generation before is committed."""
    backend = memory()
    job = in_turn(backend, range(0, 60, 10), keep=1)
    ahead = job.write(70, A)
    job.save(60, B, keep=1)
    job.previous = None
    job.commit(ahead)
    assert steps_of(job.restorable(), 70) == [70, 70, 40, 50]


# What a commit asks for.


def uncommit(backend: Backend) -> None:
    backend.delete(commit_key(generation(10)))


def damage_manifest(backend: Backend) -> None:
    backend.put(commit_key(generation(10)), b"unreadable")


def remove_file(backend: Backend) -> None:
    backend.delete(segment_key(generation(10), 1, 10))


def cut_file(backend: Backend) -> None:
    backend.put(segment_key(generation(10), 1, 10), b"short")


def give_up(backend: Backend) -> None:
    """Somebody else's watermark, past what a save under way was allowed to refer to."""
    store = RunStore.open(backend, resume="must")
    assert store._coordination is not None
    assert store._coordination.log.append({"type": "watermark"}, store._coordination.history.advanced(20))


REFUSALS = [
    (uncommit, "not committed"),
    (damage_manifest, "not committed"),
    (remove_file, "gone or of another size"),
    (cut_file, "gone or of another size"),
    (give_up, "below the watermark 20"),
]


@pytest.mark.parametrize(("spoil", "reason"), REFUSALS)
@pytest.mark.parametrize("by", ["commit", "promotion"])
def test_what_needs_something_that_is_gone_is_not_committed(
    spoil: Callable[[Backend], None], reason: str, by: str, caplog: pytest.LogCaptureFixture
) -> None:
    """By its own incarnation or the next; the generation before stays the newest. 10 has the only copy of an expert."""
    caplog.set_level("INFO")
    backend = memory()
    job = in_turn(backend, range(0, 30, 10), keep=ALL)
    markers = job.write(30, A)
    assert [need.step for need in markers[0].needs] == [10, 20]
    spoil(backend)
    if by == "commit":
        with pytest.raises(Corrupt, match=reason):
            job.commit(markers)
    else:
        assert RunStore.open(backend, resume="must").promote() == []
        assert reason in caplog.text
    assert not backend.list(commit_key(generation(30)))


@pytest.mark.parametrize("by", ["commit", "promotion"])
def test_what_needs_something_that_is_there_is_committed(by: str) -> None:
    """The control of the test above."""
    backend = memory()
    job = in_turn(backend, range(0, 30, 10), keep=ALL)
    markers = job.write(30, A)
    if by == "commit":
        job.commit(markers)
    else:
        assert RunStore.open(backend, resume="must").promote() == [generation(30)]
    assert steps_of(PartialJob(backend).restorable(), 30) == [30, 30, 10, 20]


def test_a_generation_of_a_dead_timeline_cannot_be_borrowed_from() -> None:
    """An incarnation began again from before it: whoever still refers to it is refused, and the next save goes on."""
    backend = memory()
    first = in_turn(backend, range(0, 30, 10), keep=ALL)
    stale = first.previous
    store = RunStore.open(backend, resume="must")
    assert store.candidates()[-1].generation == generation(0)
    assert store.open_incarnation(generation(0)) == 2
    job = PartialJob(backend)
    assert job.resumed == generation(0)
    good, job.previous = job.previous, stale
    with pytest.raises(
        Corrupt, match=r"step 10 \(incarnation 1\), which must not be used: incarnation 3 began again from step 0"
    ):
        job.commit(job.write(30, A))
    job.previous = good
    job.save(40, A)
    assert steps_of(job.restorable(), 40) == [40, 40, 0, 0]


# What a start passes over.


def without_spares(backend: Backend, commit: Commit, ranks: int = 2) -> None:
    """Store a generation again as one that names no older copies."""
    store = RunStore.open(backend, resume="must")
    markers = []
    for rank in range(ranks):
        marker = replace(store.read_marker(commit, rank), spares=())
        backend.put(marker_key(commit.generation, rank), marker.to_bytes())
        markers.append(StoredMarker(marker, digest_of(marker.to_bytes())))
    backend.put(commit_key(commit.generation), Commit.of(markers).to_bytes())


@pytest.mark.parametrize("damage", [uncommit, damage_manifest])
def test_what_lost_something_it_needs_is_offered_where_it_names_older_copies(damage: Callable[[Backend], None]) -> None:
    """Only a restore can tell whether they do: it is told of the loss; what the next one references is whole again."""
    backend = memory()
    job = in_turn(backend, range(0, 60, 10), keep=ALL)
    damage(backend)
    store = RunStore.open(backend, resume="must")
    assert [commit.generation.step for commit in store.candidates()] == [50, 40, 30, 20, 0]
    assert [where for where, _ in store.unreadable] == ([] if damage is uncommit else ["step 10 (incarnation 1)"])
    view = {each.generation.step: each for each in RunView.open(backend).generations()}
    assert [step for step, each in view.items() if each.usable] == [50, 40, 30, 20, 0]
    job.store.retain(Retention(last=1))
    assert 0 in stored(backend), "what lost something does not count as kept"
    for step in range(60, 120, 10):
        job.save(step, A, B, keep=1)
    newest = job.store.candidates()[0]
    assert steps_of({110: read_back(job.store, newest)}, 110) == [110, 110, 110, 50]


@pytest.mark.parametrize("damage", [uncommit, damage_manifest])
def test_what_needs_something_that_was_lost_is_passed_over_as_a_loss(damage: Callable[[Backend], None]) -> None:
    """With the reason; what does not need it is offered, and a look from outside says the same."""
    backend = memory()
    job = in_turn(backend, range(0, 40, 10), keep=ALL)
    for commit in job.store.candidates()[:2]:
        without_spares(backend, commit)
    damage(backend)
    store = RunStore.open(backend, resume="must")
    assert [commit.generation.step for commit in store.candidates()] == [0]
    lost = dict(store.unreadable)
    assert {f"step {step} (incarnation 1)" for step in (20, 30)} <= set(lost)
    assert all(
        "needs step 10 (incarnation 1), which cannot be read" in lost[f"step {step} (incarnation 1)"]
        for step in (20, 30)
    )
    view = {each.generation.step: each for each in RunView.open(backend).generations()}
    assert [step for step, each in view.items() if each.usable] == [0]
    assert "needs step 10 (incarnation 1)" in (view[30].damage or "")


def test_nothing_that_may_come_back_loses_what_it_needs() -> None:
    """A manifest cannot be read for a while, in which the run gives up others: then all of it is there again."""
    backend = memory()
    job = in_turn(backend, range(0, 50, 10))
    key = commit_key(generation(40))
    manifest = backend.get(key)
    backend.put(key, b"the medium is away")
    job.store.retain(Retention(last=1))
    assert 40 not in job.restorable()
    backend.put(key, manifest)
    assert steps_of(job.restorable(), 40) == [40, 30, 40, 20]


# Crashes.


def crash_while(backend: Backend, crash_at: int, when: str, act: Callable[[PartialJob], object]) -> list[str]:
    """A job that stored 0 to 70 dies at its `crash_at`-th call of `act`; its calls."""
    job = in_turn(backend, range(0, 80, 10))
    dying = CrashingBackend(backend, crash_at=crash_at, when=when)  # type: ignore[arg-type]
    job.store._backend = dying
    assert job.store._coordination is not None
    job.store._coordination.log._backend = dying
    with suppress(Crashed):
        act(job)
    return dying.calls


# A crash after a call leaves in storage what one before the next call leaves.
@pytest.mark.parametrize(
    ("make", "when"),
    [("memory", "before"), ("memory", "after"), pytest.param("posix", "after", marks=pytest.mark.soak)],
)
def test_a_crash_at_any_call_of_a_save_leaves_two_that_read_back(
    make: str, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files, markers, the check of what is needed, commit, watermark, deletions: every operator of both is there."""
    monkeypatch.setattr(os, "fsync", os.fstat)
    crash_at, finished = 0, False
    while not finished:
        backend = memory() if make == "memory" else PosixBackend(tmp_path / str(crash_at))
        calls = crash_while(backend, crash_at, when, lambda job: job.save(80, C))
        finished = len(calls) <= crash_at
        happened = calls if when == "after" or finished else calls[:-1]
        whole = sum(call.startswith("put ") and call.endswith(".done") for call in happened) == 2
        job = PartialJob(backend)
        assert job.resumed == generation(80 if whole else 70), calls[-1]
        found = job.restorable()
        assert steps_of(found, 70) == [70, 60, 70, 50]
        assert not whole or steps_of(found, 80) == [80, 60, 70, 80]
        job.save(90, A)
        assert stored(backend) == [*range(30 if whole else 20, 80, 10), *([80] if whole else []), 90]
        crash_at += 1
    assert {"put", "list", "get", "create", "delete"} <= {call.split()[0] for call in calls}


@pytest.mark.parametrize(("ranks", "when"), [(1, "before"), (2, "after")])
def test_a_crash_at_any_call_of_a_start_loses_nothing(ranks: int, when: str) -> None:
    """Promotion with the check of what is needed, the pick, opening the incarnation."""
    crash_at = 0
    while True:
        backend = memory()
        in_turn(backend, range(0, 50, 10)).write(50, C, ranks=ranks)
        dying = CrashingBackend(backend, crash_at=crash_at, when=when)  # type: ignore[arg-type]
        with suppress(Crashed):
            PartialJob(dying)
            break
        job = PartialJob(backend)
        assert job.resumed == generation(50 if ranks == 2 else 40), dying.calls[-1]
        job.save(60, A)
        crash_at += 1
    assert crash_at > 10


# Garbage.


def test_garbage_collection_says_what_is_needed_by_what() -> None:
    """Without and with rules; a dry run says the same, and nothing that is needed goes."""
    backend = memory()
    job = in_turn(backend, range(0, 80, 10), keep=Retention(last=3, every_n_steps=100))
    assert stored(backend) == [0, 10, 20, 30, 40, 50, 60, 70]
    looked = collect_garbage(backend)
    assert {each.generation.step: each.reason for each in looked.stays} == {
        0: "not given up; needed by step 20 (incarnation 1)",
        10: "not given up; needed by step 30 (incarnation 1)",
        20: "not given up; needed by step 40 (incarnation 1)",
        30: "not given up; needed by step 50 (incarnation 1)",
        40: "not given up; needed by step 60 (incarnation 1)",
        50: "not given up; needed by step 70 (incarnation 1)",
        60: "not given up; needed by step 70 (incarnation 1)",
        70: "not given up",
    }
    dry = collect_garbage(backend, Retention(last=1), dry_run=True)
    done = collect_garbage(backend, Retention(last=1))
    assert (dry.goes, dry.stays) == (done.goes, done.stays)
    assert {each.generation.step: each.reason for each in done.stays} == {
        10: "has older copies for step 60 (incarnation 1)",
        20: "has older copies for step 70 (incarnation 1)",
        30: "has older copies for step 70 (incarnation 1)",
        40: "needed by step 60 (incarnation 1)",
        50: "needed by step 70 (incarnation 1)",
        60: "among the last 2",
        70: "among the last 2",
    }
    assert {each.generation.step for each in done.goes} == {0}
    assert {60, 70} <= set(job.restorable())
    job.save(80, A)
    assert {70, 80} <= set(job.restorable())


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_collection_that_dies_at_any_call_loses_nothing(when: str) -> None:
    """What is kept reads back after it, and the job, which lives, goes on."""
    crash_at = 0
    while True:
        backend = memory()
        job = in_turn(backend, range(0, 80, 10), keep=ALL)
        dying = CrashingBackend(backend, crash_at=crash_at, when=when)  # type: ignore[arg-type]
        with suppress(Crashed):
            collect_garbage(dying, Retention(last=1))
            break
        found = job.restorable()
        assert (steps_of(found, 70), steps_of(found, 60)) == ([70, 60, 70, 50], [60, 60, 40, 50])
        job.save(80, C, keep=1)
        assert {70, 80} <= set(job.restorable())
        assert stored(backend) == [20, 30, 40, 50, 60, 70, 80]
        crash_at += 1
    assert crash_at > 15


# Any selections, rules, deaths and collections.

acts = st.lists(
    st.tuples(
        st.sampled_from(["save", "save", "save", "crash", "restart", "collect"]),
        st.lists(st.sampled_from(EXPERTS), unique=True, max_size=3),
        st.builds(Retention, last=st.integers(1, 3), every_n_steps=st.none() | st.integers(15, 60)),
        st.integers(0, 40),
    ),
    max_size=14,
)


@settings(max_examples=60)
@given(acts)
def test_whatever_is_offered_reads_back_and_is_what_was_saved(
    history: list[tuple[str, list[str], Retention, int]],
) -> None:
    """Every operator of every candidate, from the generation that a dict says stored it last."""
    backend = memory()
    job, step = PartialJob(backend), 0
    wanted: dict[GenerationId, dict[str, GenerationId]] = {}
    for act, experts, keep, number in history:
        if act in {"save", "crash"}:
            step += 10
            new, before = generation(step, job.incarnation), job.previous[0].generation if job.previous else None
            kept = wanted[before] if before is not None else dict.fromkeys(EXPERTS, new)
            wanted[new] = {**kept, **dict.fromkeys([DENSE, *experts], new)}
        if act == "save":
            job.save(step, *experts, keep=keep)
        elif act == "crash":
            job.store._backend = dying = CrashingBackend(backend, crash_at=number, when="after")
            assert job.store._coordination is not None
            job.store._coordination.log._backend = dying
            with suppress(Crashed):
                job.save(step, *experts, keep=keep)
        elif act == "collect":
            collect_garbage(backend, keep)
        if act in {"crash", "restart"}:
            newest = max((c.generation for c in job.store.candidates()), default=None) if act == "restart" else None
            job = PartialJob(backend)
            assert act == "crash" or job.resumed == newest
            assert job.resumed is not None or step <= 10 or newest is None
        for commit in job.store.candidates():
            assert read_back(job.store, commit) == wanted[commit.generation]
        assert job.store.unreadable == []
        if job.previous is not None:
            assert job.previous[0].generation in {c.generation for c in job.store.candidates()}
