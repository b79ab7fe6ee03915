"""Ten thousand ranks store, commit, delete, start and restore: requests are counted, and time is that of a simulated clock.

`python -m benchmarks ranks store` has more numbers of ranks and larger windows.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest

from benchmarks.ranks import growth_of
from benchmarks.ranks_store import Bucket, Client, ManyRanks, figures
from lightning_moe_ckpt.errors import Corrupt, StorageError
from lightning_moe_ckpt.storage import (
    GenerationId,
    RankMarker,
    ReferencedEntry,
    Retention,
    RunStore,
    RunView,
    _catalog,
    _commit,
)
from lightning_moe_ckpt.storage._fsspec import FsspecBackend
from lightning_moe_ckpt.storage._upkeep import repair_log

NOW = timedelta()


def test_ten_thousand_ranks_commit_within_seconds() -> None:
    """Two requests of every rank, a page of a listing or of a deletion per thousand objects of the first; none of them longer."""
    job = ManyRanks(10_000, window=1)
    for step in (10, 20):
        job.save(step)
    committed, retained, most = job.save(30, late=9_999)
    pause = max(_commit.LONGEST_PAUSE_SECONDS, 10_000 / _commit.RANKS_PER_SECOND)
    assert most == 2
    # Twice the receipts, once everything, the log, one marker, the manifest.
    assert committed.requests <= 2 * 11 + 31 + 10
    assert committed.requests * 0.02 + pause < 5
    # Three generations once, their manifests, the log; three kinds of 30,001 objects in thousands.
    assert retained.requests <= 3 * 31 + 20 + 31
    assert {step for step, _ in _stored(job)} == {20, 30}
    before = job.first.requests.total()
    job.store = RunStore.open(job.first, resume="auto")
    offered = job.begin()
    assert job.first.requests.total() - before < 25
    client = Client(job.bucket)
    marker = RunStore.join(client, run_id=job.store.run_id).read_marker(offered[0], 7_777)
    assert (marker.rank, client.requests.total()) == (7_777, 1)


def _stored(job: ManyRanks) -> set[tuple[int, str]]:
    return {(int(key.split("/")[1]), key.rpartition(".")[2]) for key in job.bucket.keys if key.startswith("snap/")}


def test_requests_grow_no_faster_than_ranks() -> None:
    """Of no process; the same figures are in the benchmark's table."""
    found = [figures(size, window=1) for size in (64, 640)]
    for row in zip(*found, strict=True):
        if "requests" in row[0].what:
            assert growth_of(row) < 0.5, row
    assert next(each.value for each in found[0] if "mean" in each.what) <= 3


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> ManyRanks:
    """Four ranks with receipts."""
    monkeypatch.setattr(_commit, "RECEIPTS_FROM", 4)
    return ManyRanks(4, window=2)


def _write(job: ManyRanks, step: int) -> RankMarker:
    markers = [job.write(step, rank, job.first) for rank in range(4)]
    return markers[0]


def test_receipts_give_the_same_manifest_as_markers(job: ManyRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte for byte; with receipts one marker is read, without them all are."""
    own = _write(job, 10)
    reads = job.first.requests["get"]
    by_receipts = job.store.commit(own, timeout=NOW)
    few = job.first.requests["get"] - reads
    monkeypatch.setattr(_commit, "RECEIPTS_FROM", 5)
    assert job.store.commit(own, timeout=NOW) == by_receipts, "another manifest would be refused"
    assert job.first.requests["get"] - reads - few == few + 3 + 1, "and the manifest that is there"


def test_a_start_promotes_by_receipts(job: ManyRanks) -> None:
    """What all ranks finished, although nobody committed it."""
    _write(job, 10)
    reads = job.first.requests["get"]
    store = RunStore.open(job.first, resume="auto")
    assert [each.step for each in store.promote()] == [10]
    assert job.first.requests["get"] - reads <= 4
    assert RunView.open(job.first).generations()[0].usable


def _receipts(job: ManyRanks) -> list[str]:
    return [key for key in job.bucket.keys if "/done.rank" in key]


def test_a_rank_that_died_before_its_receipt_is_read(job: ManyRanks) -> None:
    """At the end of the wait, or by the next start; its marker says more than the receipt would."""
    own = _write(job, 10)
    job.bucket.delete(_receipts(job)[2])
    assert job.store.commit(own, timeout=NOW).generation.step == 10


def test_receipts_that_contradict_each_other_say_nothing(job: ManyRanks) -> None:
    """The markers are read instead, and decide."""
    own = _write(job, 10)
    receipt = _receipts(job)[1]
    job.bucket.put(receipt.replace("rank00001.", "rank00001.0", 1)[: len(receipt)], b"")
    job.bucket.put(receipt[:-1] + "7", b"")
    commit = job.store.commit(own, timeout=NOW)
    assert [job.store.read_marker(commit, rank).rank for rank in range(4)] == [0, 1, 2, 3]


def test_a_receipt_without_marker_or_file_is_not_enough(job: ManyRanks) -> None:
    """The listing has to show both."""
    own = _write(job, 10)
    prefix = own.generation.prefix
    for key, said in (("rank00002.done", "no marker"), ("rank00003.000000000010.safetensors", "1 objects are missing")):
        data = job.bucket.objects[prefix + key]
        job.bucket.delete(prefix + key)
        with pytest.raises(StorageError, match=f"rank {key[8]}: .*{said}"):
            job.store.commit(own, timeout=NOW)
        job.bucket.put(prefix + key, data)
    job.store.commit(own, timeout=NOW)


def test_a_rank_of_another_plan_is_not_counted_in(job: ManyRanks) -> None:
    """Its receipt does not agree, so its marker is read."""
    own = _write(job, 10)
    other = replace(job.store.read_marker(job.store.commit(own, timeout=NOW), 2), plan_hash="other")
    second = replace(own, generation=job.store.name(20), segments=())
    for rank in range(4):
        plan = other.plan_hash if rank == 2 else own.plan_hash
        job.store.put_marker(replace(second, rank=rank, plan_hash=plan, lineage=own.lineage if rank == 0 else None))
    with pytest.raises(StorageError, match="rank 2: marker is for plan other"):
        job.store.commit(second, timeout=NOW)


def test_a_marker_that_was_spoilt_behind_its_receipt_costs_one_generation(job: ManyRanks) -> None:
    """The commit has its digest, so a restore takes the generation before."""
    job.store.commit(_write(job, 10), timeout=NOW)
    own = _write(job, 20)
    key = f"{own.generation.prefix}rank00002.done"
    job.bucket.put(key, job.bucket.objects[key].replace(b'"plan"', b'"plam"'))
    commit = job.store.commit(own, timeout=NOW)
    with pytest.raises(Corrupt):
        job.store.read_marker(commit, 2)
    assert job.store.read_marker(job.store.candidates()[1], 2).rank == 2


def test_a_marker_of_another_size_than_its_receipt_says_is_read(job: ManyRanks) -> None:
    """It was damaged, or written again by a process that was killed before the receipt."""
    own = _write(job, 10)
    key = f"{own.generation.prefix}rank00002.done"
    good = job.bucket.objects[key]
    job.bucket.put(key, b"rubbish")
    with pytest.raises(StorageError, match=r"rank 2: .*rank00002"):
        job.store.commit(own, timeout=NOW)
    assert RunStore.open(job.first, resume="auto").promote() == []
    marker = RankMarker.from_bytes(good, key)
    job.bucket.put(key, b"".join(replace(marker, unix_time=99).parts()))
    commit = job.store.commit(own, timeout=NOW)
    assert job.store.read_marker(commit, 2).unix_time == 99


def test_files_of_the_right_size_together_are_not_enough(job: ManyRanks) -> None:
    """Each counts."""
    own = _write(job, 10)
    for segment, more in zip(job.write(10, 3, job.first).segments, (1, -1), strict=True):
        job.bucket.put(segment.key, bytes(segment.nbytes + more))
    with pytest.raises(StorageError, match="rank 3: 2 objects are missing or of another size"):
        job.store.commit(own, timeout=NOW)


def test_a_repair_reads_every_marker(job: ManyRanks) -> None:
    """Also one that has kept its size."""
    for step in (10, 20):
        job.store.commit(_write(job, step), timeout=NOW)
    prefix = job.store.name(20).prefix
    key = f"{prefix}rank00002.done"
    job.bucket.put(key, job.bucket.objects[key].replace(b'"plan"', b'"plam"'))
    job.bucket.put(f"{prefix}_COMMITTED", b"rubbish")
    for entry in job.first.list("_log/"):
        job.bucket.delete(entry.key)
    assert [each.step for each in repair_log(job.first, dry_run=False).usable] == [10]


def test_a_missing_receipt_does_not_cost_the_time_out(job: ManyRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once no more have come for a while, the listing of everything decides; it is rare while a rank is late."""
    monkeypatch.setattr(_commit, "QUIET_SECONDS", 0.05)
    own = _write(job, 10)
    job.bucket.delete(_receipts(job)[2])
    assert job.store.commit(own, timeout=timedelta(minutes=9), cancelled=_polled_at_most(12)).generation.step == 10
    own = _write(job, 20)
    job.bucket.delete(f"{own.generation.prefix}rank00002.done")
    job.bucket.delete(next(each for each in _receipts(job) if "20/" in each and "rank00002" in each))
    looks = job.first.requests["get"]
    with pytest.raises(AssertionError, match="polled too often"):
        job.store.commit(own, timeout=timedelta(minutes=9), cancelled=_polled_at_most(10))
    assert job.first.requests["get"] - looks < 10 + 4, "one for the fence at each look, and the marker"


def _polled_at_most(times: int) -> Callable[[], bool]:
    polls = iter(range(times))

    def cancelled() -> bool:
        assert next(polls, None) is not None, "polled too often"
        return False

    return cancelled


@pytest.fixture
def paged(job: ManyRanks, monkeypatch: pytest.MonkeyPatch) -> ManyRanks:
    """Generations of more than a page."""
    monkeypatch.setattr(_catalog, "_PAGE", 4)
    return job


def _save(job: ManyRanks, step: int) -> None:
    job.store.commit(_write(job, step), timeout=NOW)


def _committed(job: ManyRanks) -> list[int]:
    return [int(key.split("/")[1]) for key in job.bucket.keys if key.endswith("/_COMMITTED")]


def test_a_generation_that_was_listed_before_its_commit_stays(paged: ManyRanks) -> None:
    """Other ranks are ahead of the coordinator: they store the next generation while it deletes."""
    for step in (10, 20, 30, 40, 50):
        _save(paged, step)
        for rank in (1, 2, 3):
            paged.write(step + 10, rank, paged.first)
        paged.store.retain(Retention(last=3))
        assert _committed(paged) == [each for each in (10, 20, 30, 40, 50) if step - 30 < each <= step]


def test_a_file_lost_between_two_commits_is_noticed(paged: ManyRanks) -> None:
    """A generation without it is none of the last that stay."""
    for step in (10, 20, 30):
        _save(paged, step)
        assert paged.store.retain(Retention(last=3)) == []
    for step in (20, 30):
        paged.bucket.delete(paged.write(step, 3, Client(Bucket())).segments[0].key)
    _save(paged, 40)
    assert paged.store.retain(Retention(last=3)) == []
    assert _committed(paged) == [10, 20, 30, 40]


def test_a_file_lost_from_a_generation_that_is_needed_is_noticed(paged: ManyRanks) -> None:
    """Before the commit that refers to it."""
    _save(paged, 10)
    paged.store.retain(Retention(last=3))
    older = paged.store.name(10)
    held = [
        ReferencedEntry(generation=older, segment=paged.write(10, rank, Client(Bucket())).segments[-1])
        for rank in range(4)
    ]
    markers = list[RankMarker]()
    for rank, each in enumerate(held):
        marker = replace(paged.write(20, rank, Client(paged.bucket)), referenced=(each,))
        paged.bucket.delete(next(key for key in _receipts(paged) if f"20/{older.directory}/done.rank0000{rank}" in key))
        paged.store.put_marker(marker)
        markers.append(marker)
    paged.bucket.delete(held[3].segment.key)
    with pytest.raises(Corrupt, match="parts of which are gone"):
        paged.store.commit(markers[0], timeout=NOW)


@pytest.mark.parametrize("page", [2, 1000])
def test_what_lies_deeper_in_a_generation_stays(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is nobody's name of ours; a generation of several pages is no other."""
    monkeypatch.setattr(_catalog, "_PAGE", page)
    backend, generation = FsspecBackend(f"memory://{uuid.uuid4().hex}"), GenerationId(1, 1, "0" * 12)
    own = [
        f"{generation.prefix}{name}" for name in ("_COMMITTED", "rank00000.000000000001.safetensors", "rank00000.done")
    ]
    foreign = f"{generation.prefix}notes/mine"
    for key in (*own, foreign):
        backend.put(key, b"1")
    contents = _catalog.read_catalog(backend)[generation]
    assert sorted(contents.sizes) == own
    _catalog.delete_generation(backend, contents)
    assert [entry.key for entry in backend.list("snap/")] == [foreign]
