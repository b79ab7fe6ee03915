"""Whatever call an incarnation dies at, the next one finds the old generation or the new, whole, and cleans up.

A job of several ranks runs in this process over a real backend; a crash ends all its ranks at once.
"""

from __future__ import annotations

import os
import re
import sys
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Literal

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st
from servers._s3 import S3Server
from stored._crashes import Crashed, CrashingBackend, When
from stored._lives import named
from stored._segments import read_segment

from lightning_moe_ckpt.errors import Corrupt, Fenced, KeyMissing, StorageError
from lightning_moe_ckpt.storage import (
    Backend,
    Commit,
    GenerationId,
    ObjectBackend,
    PosixBackend,
    RankMarker,
    Retention,
    RunStore,
    SegmentEntry,
    _commit,
    digest_of,
)
from lightning_moe_ckpt.storage._fsspec import FsspecBackend

WORLD_SIZE = 3
WINDOW = 2
KEEP = 2


def _content(generation: GenerationId, rank: int, step: int) -> bytes:
    """What `rank` captures; differs for every generation, incarnation, rank and step."""
    return f"{generation.step}/{generation.incarnation}/{rank}/{step};".encode() * 5


class Job:
    """One incarnation of a job: starts, picks a generation that verifies, and saves."""

    def __init__(self, backend: Backend) -> None:
        self.store = RunStore.open(backend, resume="auto")
        self.resumed: GenerationId | None = None
        incarnation = None
        while incarnation is None:
            self.store.promote()
            self.resumed = next(filter(self.is_good, map(_generation, self.candidates())), None)
            incarnation = self.store.open_incarnation(self.resumed)
        self.incarnation = incarnation

    def candidates(self) -> list[Commit]:
        self.commits = {commit.generation: commit for commit in self.store.candidates()}
        return list(self.commits.values())

    def is_good(self, generation: GenerationId) -> bool:
        """Whether every byte of every rank is what that generation wrote."""
        try:
            return all(self._reads_back(self.commits[generation], rank) for rank in range(WORLD_SIZE))
        except (Corrupt, KeyMissing):
            return False

    def _reads_back(self, commit: Commit, rank: int) -> bool:
        for segment in self.store.read_marker(commit, rank).segments:
            out = bytearray(segment.nbytes)
            read_segment(self.store, segment, memoryview(out))
            assert out == _content(commit.generation, rank, segment.step), "verified, but not what was written"
        return True

    def write(self, step: int, ranks: int = WORLD_SIZE) -> RankMarker:
        """Segments and markers of the first `ranks` ranks; returns the coordinator's marker."""
        generation = named(step=step, incarnation=self.incarnation)
        markers = [self._write_rank(generation, rank) for rank in range(ranks)]
        return markers[0]

    def _write_rank(self, generation: GenerationId, rank: int) -> RankMarker:
        segments = []
        for step in range(generation.step - WINDOW + 1, generation.step + 1):
            content = _content(generation, rank, step)
            key = self.store.put_segment(generation, rank, step, memoryview(content))
            segments.append(SegmentEntry(step=step, key=key, nbytes=len(content), digest=digest_of(content)))
        marker = RankMarker(
            run_id=self.store.run_id, rank=rank, world_size=WORLD_SIZE, generation=generation, plan_hash="plan",
            segments=tuple(segments),
        )  # fmt: skip
        self.store.put_marker(marker)
        return marker

    def save(self, step: int, keep: int = KEEP) -> None:
        self.store.commit(self.write(step), timeout=timedelta())
        self.store.retain(Retention(last=keep))


def _generation(commit: Commit) -> GenerationId:
    return commit.generation


def _stored_generations(backend: Backend) -> list[tuple[int, int]]:
    """(step, incarnation) of every generation of which anything is left."""
    return sorted({(int(key.split("/")[1]), int(key.split("/")[2][1:7])) for key in _keys(backend)})


def _keys(backend: Backend) -> list[str]:
    return [entry.key for entry in backend.list("snap/")]


def _memory(tmp_path: Path) -> Backend:
    MemoryFileSystem.store.clear()  # listings take time for all that was ever stored
    MemoryFileSystem.pseudo_dirs[:] = [""]
    return FsspecBackend(f"memory://{uuid.uuid4().hex}/run")


def _posix(tmp_path: Path) -> Backend:
    return PosixBackend(tmp_path / uuid.uuid4().hex)


def _first_life(backend: Backend) -> Job:
    job = Job(backend)
    for step in (20, 30):
        job.save(step)
    return job


def _crash_while(
    backend: Backend, crash_at: int, when: When, act: Callable[[Job], None], *, born: Backend | None = None
) -> CrashingBackend:
    """An incarnation that has saved 20 and 30, in `born` if that takes less time, dies at its `crash_at`-th call of `act`."""
    dying = CrashingBackend(backend, crash_at=crash_at, when=when)
    job = _first_life(born or backend)
    if born is not None:
        _copy(born, backend)
    job.store._backend = dying
    assert job.store._coordination is not None
    job.store._coordination.log._backend = dying
    try:
        act(job)
    except Crashed:
        return dying
    assert len(dying.calls) <= crash_at, "died, and went on"
    return dying


def _copy(source: Backend, target: Backend) -> None:
    for entry in source.list(""):
        target.put(entry.key, source.get(entry.key))


def _expect_recovery(backend: Backend, calls: list[str], when: When) -> None:
    """The next incarnation resumes as far as its predecessor's calls allow, and leaves nothing but what it keeps."""
    happened = calls if when == "after" else calls[:-1]
    num_markers = sum(call.startswith("put ") and call.endswith(".done") for call in happened)
    job = Job(backend)
    assert job.resumed == named(step=40 if num_markers == WORLD_SIZE else 30, incarnation=1), calls[-1]
    assert job.is_good(named(step=30, incarnation=1))
    assert len(job.commits) >= KEEP
    job.save(50, keep=1)
    assert _stored_generations(backend) == [(50, 2)]
    assert len(_keys(backend)) == WORLD_SIZE * (WINDOW + 1 + (WORLD_SIZE >= _commit.RECEIPTS_FROM)) + 1


# A crash after a call leaves in storage what one before the next call leaves.
@pytest.mark.parametrize(
    ("make", "when", "receipts_from"), [(_memory, "before", 64), (_posix, "after", 64), (_memory, "before", 1)]
)
def test_a_crash_at_any_call_of_a_save_loses_at_most_that_save(
    make: Callable[[Path], Backend], when: When, receipts_from: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Segments, markers, receipts, commit, watermark and deletions, by every rank."""
    monkeypatch.setattr(_commit, "RECEIPTS_FROM", receipts_from)
    monkeypatch.setattr(os, "fsync", os.fstat)  # quick; what is synced when is tested with the backend
    crash_at, finished = 0, False
    while not finished:
        backend = make(tmp_path)
        dying = _crash_while(backend, crash_at, when, lambda job: job.save(40))
        finished = len(dying.calls) <= crash_at
        _expect_recovery(backend, [*dying.calls, ""] if finished else dying.calls, when)
        crash_at += 1
    assert crash_at > WORLD_SIZE * (WINDOW + 1) * 2  # the deletions were reached too
    assert {"put", "list", "get", "create", "delete"} <= {call.split()[0] for call in dying.calls}


@pytest.mark.parametrize(("finished_ranks", "when"), [(2, "before"), (3, "after")])
def test_a_crash_at_any_call_of_a_start_loses_nothing(finished_ranks: int, when: When, tmp_path: Path) -> None:
    """Promotion, the pick, opening the incarnation, the sweep; the generation under way is whole or one rank short."""
    crash_at = 0
    while True:
        backend = _memory(tmp_path)
        _first_life(backend).write(40, finished_ranks)
        dying = CrashingBackend(backend, crash_at=crash_at, when=when)
        with suppress(Crashed):
            Job(dying)
            break
        job = Job(backend)
        assert job.resumed == named(step=40 if finished_ranks == WORLD_SIZE else 30, incarnation=1), dying.calls[-1]
        job.save(50, keep=1)
        assert _stored_generations(backend) == [(50, job.incarnation)]
        crash_at += 1
    assert crash_at > 10


# The same over the wire: an S3 server on loopback.


def _bucket(server: S3Server) -> Backend:
    return ObjectBackend(server.url(), storage_options=server.storage_options)


def _kind(call: str) -> str:
    """What a call does, whatever generation and rank it is for: `put .done`."""
    operation, _, key = call.partition(" ")
    return f"{operation} {re.split(r'[0-9]', key)[0]} {re.split(r'[0-9/]', key)[-1]}"


def _one_of_each_kind(calls: list[str]) -> list[tuple[int, When]]:
    """In turns before the last and after the first call of a kind: each is half done, or not begun by some ranks.

    Of those that change something: a crash at any other leaves in storage what one at the change before leaves.
    """
    places: dict[str, list[int]] = {}
    for index, call in enumerate(calls):
        if call.split()[0] not in {"list", "get", "get_into"}:
            places.setdefault(_kind(call), []).append(index)
    return [(place[0], "after") if turn % 2 else (place[-1], "before") for turn, place in enumerate(places.values())]


def _every_point(calls: list[str]) -> list[tuple[int, When]]:
    whens: tuple[When, ...] = ("before", "after")
    return [(index, when) for index in range(len(calls)) for when in whens]


Choose = Callable[[list[str]], list[tuple[int, When]]]
choices = pytest.mark.parametrize(
    "choose", [_one_of_each_kind, pytest.param(_every_point, marks=[pytest.mark.soak, pytest.mark.timeout(3000)])]
)


@choices
def test_a_crash_of_a_save_to_s3_loses_at_most_that_save(choose: Choose, moto: S3Server, tmp_path: Path) -> None:
    """Segments, markers, commit, watermark and deletions, by every rank."""
    unfinished = moto.unfinished_uploads()
    undisturbed = _crash_while(_bucket(moto), 10**6, "before", lambda job: job.save(40)).calls
    points = choose(undisturbed)
    for crash_at, when in points:
        backend = _bucket(moto)
        dying = _crash_while(backend, crash_at, when, lambda job: job.save(40), born=_memory(tmp_path))
        assert [_kind(call) for call in dying.calls] == [_kind(call) for call in undisturbed[: crash_at + 1]]
        _expect_recovery(backend, dying.calls, when)
    assert {"put", "create", "delete", "sweep"} <= {undisturbed[at].split()[0] for at, _ in points}
    assert moto.unfinished_uploads() == unfinished
    sys.stdout.write(f"{len(points)} crash points of a save to S3\n")


@choices
@pytest.mark.parametrize("finished_ranks", [pytest.param(2, marks=pytest.mark.soak), 3])
def test_a_crash_of_a_start_from_s3_loses_nothing(
    finished_ranks: int, choose: Choose, moto: S3Server, tmp_path: Path
) -> None:
    """Promotion, the pick, opening the incarnation, the sweep; the generation under way is whole or one rank short."""
    undisturbed = _crash_at_start(_memory(tmp_path), _bucket(moto), finished_ranks, 10**6, "before").calls
    points = choose(undisturbed)
    for crash_at, when in points:
        backend = _bucket(moto)
        dying = _crash_at_start(_memory(tmp_path), backend, finished_ranks, crash_at, when)
        job = Job(backend)
        assert job.resumed == named(step=40 if finished_ranks == WORLD_SIZE else 30, incarnation=1), dying.calls[-1]
        job.save(50, keep=1)
        assert _stored_generations(backend) == [(50, job.incarnation)]
    assert {"create", "sweep"} <= {undisturbed[at].split()[0] for at, _ in points}
    sys.stdout.write(f"{len(points)} crash points of a start from S3\n")


def _crash_at_start(born: Backend, backend: Backend, finished_ranks: int, crash_at: int, when: When) -> CrashingBackend:
    """A second incarnation dies at its `crash_at`-th call, before it has saved anything; the first has lived in `born`."""
    job = Job(born)
    job.save(30)
    job.write(40, finished_ranks)
    _copy(born, backend)
    dying = CrashingBackend(backend, crash_at=crash_at, when=when)
    with suppress(Crashed):
        Job(dying)
    return dying


def test_crashes_in_a_row_lose_nothing(tmp_path: Path) -> None:
    """Every incarnation dies one call later than the one before; the newest generation never moves back."""
    backend = _memory(tmp_path)
    _first_life(backend)
    newest, incarnations = 30, {1}
    for crash_at in range(60):
        with suppress(Crashed):
            job = Job(CrashingBackend(backend, crash_at=crash_at))
            incarnations.add(job.incarnation)
            job.save(newest + 10)
        job = Job(backend)
        assert job.resumed is not None
        assert newest <= job.resumed.step <= newest + 10
        assert job.incarnation not in incarnations
        newest = job.resumed.step
        incarnations.add(job.incarnation)
    assert newest > 30


# Zombies: an incarnation that goes on after another has begun.


class _Hooked(CrashingBackend):
    """Runs `hook` once, right before the first `_COMMITTED` is created."""

    hook: Callable[[], object] | None = None

    def create(self, key: str, data: bytes) -> None:
        hook, self.hook = self.hook, None if key.endswith("_COMMITTED") else self.hook
        if hook is not None and self.hook is None:
            hook()
        super().create(key, data)


def test_a_late_commit_of_an_earlier_life_is_dead(tmp_path: Path) -> None:
    """It pauses between its fence check and its commit, while a new incarnation starts from 30 and gets to 35."""
    backend = _memory(tmp_path)
    hooked = _Hooked(backend)
    zombie = Job(hooked)
    for step in (20, 30):
        zombie.save(step)
    new_lives: list[Job] = []

    def start_another() -> None:
        backend.delete(
            "snap/000000000040/i000001-00112233aabb/rank00002.done"
        )  # the new incarnation must not promote 40
        new_lives.append(Job(backend))
        new_lives[0].save(35)

    hooked.hook = start_another
    with pytest.raises(Fenced):
        zombie.save(40)  # the commit lands; the watermark does not
    job = new_lives[0]
    assert job.resumed == named(step=30, incarnation=1)
    assert (40, 1) in _stored_generations(backend)
    assert [commit.generation for commit in job.candidates()] == [
        named(step=35, incarnation=2),
        named(step=30, incarnation=1),
    ]
    assert dict(job.store.rejected)["step 40 (incarnation 1)"] == "incarnation 2 began again from step 30"

    with pytest.raises(Fenced):
        zombie.store.commit(zombie.write(50), timeout=timedelta())
    assert not backend.list("snap/000000000050/i000001-00112233aabb/_COMMITTED")
    with pytest.raises(Fenced):
        zombie.store.retain(Retention(last=1))
    job.save(40)
    assert Job(backend).resumed == named(step=40, incarnation=2)
    assert (40, 1) not in _stored_generations(backend)


def test_a_commit_in_time_is_taken_by_the_new_life(tmp_path: Path) -> None:
    """The old incarnation commits and moves the watermark between the pick and the opening: the pick is repeated."""
    backend = _memory(tmp_path)
    old = _first_life(backend)
    store = RunStore.open(backend, resume="auto")
    picked = store.candidates()[0].generation
    assert picked.step == 30
    old.save(40)
    assert store.open_incarnation(picked) is None
    assert store.incarnation is None
    assert store.candidates()[0].generation.step == 40
    assert store.open_incarnation(store.candidates()[0].generation) == 2


def test_a_life_and_its_successor_may_commit_the_same_generation(tmp_path: Path) -> None:
    """Promotion writes the bytes the late coordinator writes; whoever is second finds them there."""
    backend = _memory(tmp_path)
    hooked = _Hooked(backend)
    old = Job(hooked)
    promoted: list[GenerationId] = []

    def promote() -> None:
        promoted.extend(RunStore.open(backend, resume="auto").promote())

    hooked.hook = promote
    old.save(10)
    assert promoted == [named(step=10, incarnation=1)]
    old.save(20)


def test_only_whole_generations_of_the_preceding_life_are_promoted(tmp_path: Path) -> None:
    """Not one of an older incarnation, not one whose files are not as its markers say, not one older than a commit."""
    backend = _memory(tmp_path)
    first = _first_life(backend)
    first.write(25)
    first.write(40)
    backend.put("snap/000000000040/i000001-00112233aabb/rank00001.000000000039.safetensors", b"short")
    assert RunStore.open(backend, resume="auto").promote() == []
    second = Job(backend)
    assert second.resumed == named(step=30, incarnation=1)
    first.write(50)
    third = Job(backend)
    assert third.resumed == named(step=30, incarnation=1)
    third.write(60)
    third.write(70)
    assert Job(backend).resumed == named(step=70, incarnation=3)


# Any history at all.

Action = tuple[Literal["save", "crash", "restart", "spoil", "zombie"], int, bool]
actions = st.lists(
    st.tuples(
        st.sampled_from(["save", "save", "crash", "crash", "restart", "spoil", "zombie"]),
        st.integers(0, 60),
        st.booleans(),
    ),
    max_size=12,
)


class Model:
    """What must be restorable, from the outside: steps and whether their bytes are good."""

    def __init__(self) -> None:
        self.backend = _memory(Path())
        self.job = Job(self.backend)
        self.previous: Job | None = None
        self.good: dict[GenerationId, bool] = {}
        self.step = 0

    def apply(self, action: Action) -> None:
        kind, number, flag = action
        if kind == "save":
            self.save(keep=1 + number % 3)
        elif kind == "crash":
            self.crash(number, "before" if flag else "after")
        elif kind == "restart":
            self.restart({})
        elif kind == "spoil":
            self.spoil(number)
        elif self.previous is not None:
            with pytest.raises(Fenced):
                self.previous.save(self.step + 1 + number)

    def save(self, keep: int) -> None:
        self.step += 10
        readable = [commit.generation for commit in reversed(self.job.candidates())]
        self.job.save(self.step, keep)
        new = named(step=self.step, incarnation=self.job.incarnation)
        readable.append(new)
        self.good[new] = True
        # Below the watermark everything goes; unreadable ones above it stay.
        floor = readable[-keep] if len(readable) > keep else min(self.good)
        self.good = {g: good for g, good in self.good.items() if g.step >= floor.step}
        assert _stored_generations(self.backend) == sorted((g.step, g.incarnation) for g in self.good)

    def crash(self, crash_at: int, when: When) -> None:
        backend = CrashingBackend(self.backend, crash_at=crash_at, when=when)
        tentative: dict[GenerationId, bool] = {}
        with suppress(Crashed):
            job = Job(backend)
            self._follow(job)
            tentative[named(step=self.step + 10, incarnation=job.incarnation)] = True
            job.save(self.step + 10)
        self.restart(tentative)

    def restart(self, tentative: dict[GenerationId, bool]) -> None:
        self.previous, self.job = self.job, Job(self.backend)
        if self.job.resumed in tentative:
            self.good |= tentative
        self._follow(self.job)

    def _follow(self, job: Job) -> None:
        """The new incarnation must have taken the newest good generation; what is beyond it is dead."""
        assert job.resumed == max((g for g, good in self.good.items() if good), default=None)
        self.step = job.resumed.step if job.resumed is not None else 0
        self.good = {g: good for g, good in self.good.items() if g.step <= self.step}
        assert all(g in job.commits for g in sorted(self.good)[-KEEP:] if self.good[g])
        # A save that died may have got as far as its watermark.
        assert job.store._coordination is not None
        watermark = job.store._coordination.history.watermark
        self.good = {g: good for g, good in self.good.items() if g.step >= watermark}

    def spoil(self, number: int) -> None:
        """One byte of one object of the newest generation."""
        newest = max(self.good, default=None)
        if newest is None or not self.good[newest]:
            return  # spoiling twice may mend
        entries = self.backend.list(newest.prefix)
        entry = entries[number % len(entries)]
        data = bytearray(self.backend.get(entry.key))
        data[number % len(data)] ^= 16
        self.backend.put(entry.key, bytes(data))
        self.good[newest] = False


@settings(max_examples=150, deadline=None)
@given(actions)
def test_any_history_keeps_what_it_promised(history: list[Action]) -> None:
    """Saves, crashes anywhere, restarts, bit rot and zombies, in any order, against a model."""
    model = Model()
    for action in history:
        model.apply(action)
    model.restart({})
    assert all(model.job.is_good(g) == good for g, good in model.good.items() if g in model.job.commits)


def test_a_generation_is_deleted_from_the_top(tmp_path: Path) -> None:
    """Manifest, markers, files: whoever lists in the middle sees nothing that claims what is gone."""
    backend = _memory(tmp_path)
    job = _first_life(backend)
    recording = CrashingBackend(backend)
    job.store._backend = recording
    job.save(40)
    deleted = [call.rpartition(".")[2].rpartition("/")[2] for call in recording.calls if call.startswith("delete ")]
    assert deleted == ["_COMMITTED"] + ["done"] * WORLD_SIZE + ["safetensors"] * WORLD_SIZE * WINDOW


def test_unfinished_files_go_with_their_generation_or_at_the_next_start(tmp_path: Path) -> None:
    """A write that was interrupted leaves a temporary file, which no listing shows."""
    job = _first_life(PosixBackend(tmp_path))
    unfinished = [
        tmp_path / f"snap/{step:012d}/i000001-00112233aabb/rank00001.done.{'0' * 32}.tmp" for step in (20, 30)
    ]
    for path in unfinished:
        path.write_bytes(b"half a mar")
    job.save(40)
    assert not unfinished[0].parent.parent.exists()
    assert unfinished[1].exists(), "a rank of this incarnation might be writing it"
    Job(PosixBackend(tmp_path))
    assert not unfinished[1].exists()


def test_a_failed_save_leaves_the_run_going(tmp_path: Path) -> None:
    """A rank that never finishes costs that generation only; its remains are swept later."""
    backend = _memory(tmp_path)
    job = _first_life(backend)
    with pytest.raises(StorageError, match="rank 2: no marker yet"):
        job.store.commit(job.write(40, ranks=2), timeout=timedelta())
    with pytest.raises(StorageError):
        job.store.commit(job.write(45, ranks=2), timeout=timedelta())
    assert _stored_generations(backend) == [(20, 1), (30, 1), (40, 1), (45, 1)]
    job.save(50)
    assert _stored_generations(backend) == [(30, 1), (50, 1)]
