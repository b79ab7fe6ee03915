"""Ten thousand ranks store, commit, delete, start and restore: requests are counted, and time is that of a simulated clock.

`python -m benchmarks ranks store` has more numbers of ranks and larger windows.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from benchmarks.ranks import growth_of
from benchmarks.ranks_store import Client, ManyRanks, figures
from lightning_moe_ckpt.errors import Corrupt, StorageError
from lightning_moe_ckpt.storage import RankMarker, RunStore, RunView, _commit

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
    # Everything once, three manifests, the log; three kinds of 30,001 objects in thousands.
    assert retained.requests <= 31 + 20 + 31
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
    for key, said in (("rank00002.done", "no marker"), ("rank00003.000000000010.safetensors", "bytes of its segments")):
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
