"""No damage to a stored run goes unnoticed: every flipped bit and every missing end, one after another."""

from __future__ import annotations

import dataclasses
import io
import logging
import pickle
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from stored._segments import read_record, verify_records

from lightning_moe_ckpt.errors import CheckpointError, Corrupt, KeyMissing
from lightning_moe_ckpt.inspection import export, verify
from lightning_moe_ckpt.inspection._verify import _verify_file
from lightning_moe_ckpt.storage import (
    Commit,
    Entry,
    RunStore,
    RunView,
    SegmentEntry,
    digest_of,
    open_backend,
    scrub_segment,
)


class Held:
    """A run in memory whose objects can be damaged; it cannot be written through the backend."""

    url = "held://run"
    creates_exclusively = True

    def __init__(self, objects: dict[str, bytes]) -> None:
        self.objects = objects

    def get(self, key: str) -> bytes:
        assert not key.endswith(".safetensors"), "reads a whole segment into memory"
        if key not in self.objects:
            raise KeyMissing(key)
        return bytes(self.objects[key])

    def get_range(self, key: str, start: int, out: memoryview) -> None:
        if key not in self.objects:
            raise KeyMissing(key)
        if start + out.nbytes > len(self.objects[key]):
            raise Corrupt(f"{key}: ended")
        out[:] = memoryview(self.objects[key])[start : start + out.nbytes]

    def get_into(self, key: str, out: memoryview) -> None:
        raise AssertionError("reads whole segments")

    def list(self, prefix: str, after: str = "", most: int | None = None) -> list[Entry]:
        keys = sorted(key for key in self.objects if key.startswith(prefix) and key > after)
        return [Entry(key, len(self.objects[key])) for key in keys[:most]]

    def put(self, key: str, *views: bytes | memoryview) -> None:
        raise AssertionError("writes")

    def create(self, key: str, data: bytes) -> None:
        raise AssertionError("writes")

    def delete(self, *keys: str) -> None:
        raise AssertionError("deletes")

    def unfinished_writes(self, prefix: str) -> Sequence[Entry]:
        return []

    def sweep(self, prefix: str) -> None:
        raise AssertionError("sweeps")

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What the log says of damaged entries is not collected a hundred thousand times."""
    caplog.set_level(logging.CRITICAL)
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def held(tiny_run: Path, quiet: None) -> Held:
    """The run, undamaged."""
    return hold(tiny_run)


@pytest.fixture
def borrowing(tiny_partial_run: Path, quiet: None) -> Held:
    """The run with a generation that references, undamaged."""
    return hold(tiny_partial_run)


def hold(root: Path) -> Held:
    files = [path for path in root.rglob("*") if path.is_file()]
    return Held({path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(files)})


def noticed(held: Held) -> bool:
    return not verify(held).sound


def segment_of(held: Held) -> SegmentEntry:
    view = RunView.open(held)
    commit = view.generations()[0].commit
    assert commit is not None
    return view.read_marker(commit, 0).segments[0]


def test_the_run_has_one_file_of_each_kind_and_is_good(held: Held) -> None:
    """What the tests below damage is all that a run consists of."""
    names = [key.rpartition("/")[2] for key in held.objects]
    assert {Path(name).suffix for name in names} == {".json", ".safetensors", ".done", ""}
    assert names.count("_COMMITTED") == 1
    assert verify(held).sound


EVERY = pytest.mark.parametrize("every", [17, pytest.param(1, marks=pytest.mark.soak)])
"""So that every other byte has a bit flipped, another one than its neighbours; or all."""


def document_refused(held: Held, key: str, commit: Commit) -> bool:
    """Whether the reader of this document, which `verify` asks, complains."""
    if key.startswith("_log/"):
        return bool(RunView.open(held).log_damage())
    if key.endswith(".done"):
        return refused(lambda: RunView.open(held).read_marker(commit, 0))
    return refused(lambda: Commit.from_bytes(held.objects[key], key))


def commit_of(held: Held) -> Commit:
    commit = RunView.open(held).generations()[0].commit
    assert commit is not None
    return commit


@EVERY
def test_every_flipped_bit_of_every_document_is_noticed(held: Held, every: int) -> None:
    """Log entries, marker and manifest: bits of all bytes by their reader, each 61st through the whole of `verify`."""
    missed, commit = [], commit_of(held)
    for key in [key for key in held.objects if not key.endswith(".safetensors")]:
        original = held.objects[key]
        for bit in range(0, 8 * len(original), every):
            damaged = bytearray(original)
            damaged[bit // 8] ^= 1 << bit % 8
            held.objects[key] = bytes(damaged)
            if not document_refused(held, key, commit) or (bit % 61 == 0 and not noticed(held)):
                missed.append((key, bit))
        held.objects[key] = original
    assert missed == []
    assert not noticed(held)


@EVERY
def test_every_flipped_bit_of_a_segment_is_noticed(held: Held, every: int) -> None:
    """Bits of every byte of the header, and in the data one bit of every eleventh byte, or of all."""
    entry = segment_of(held)
    data = bytearray(held.objects[entry.key])
    held.objects[entry.key] = data  # type: ignore[assignment]  # damaged in place
    header_nbytes = 8 + struct.unpack("<Q", data[:8])[0]
    bits = [
        *range(0, 8 * header_nbytes, every),
        *(8 * i + i % 8 for i in range(header_nbytes, len(data), min(every, 11))),
    ]
    missed = []
    for bit in bits:
        data[bit // 8] ^= 1 << bit % 8
        if not refused(lambda: scrub_segment(held, entry)):
            missed.append(bit)
        data[bit // 8] ^= 1 << bit % 8
    assert missed == []
    scrub_segment(held, entry)
    data[-1] ^= 1
    assert noticed(held)


def test_the_stream_is_judged_as_a_restore_judges_the_whole(held: Held) -> None:
    """Even where the digest of the file was made anew after the damage: headers and records decide alike."""
    entry = segment_of(held)
    data = bytearray(held.objects[entry.key])
    held.objects[entry.key] = data  # type: ignore[assignment]  # damaged in place
    verdicts = []
    for position in [*range(0, 4096, 3), *range(4096, len(data), 29)]:
        data[position] ^= 1 << position % 8
        forged = dataclasses.replace(entry, digest=digest_of(memoryview(data)))
        restored = refused(partial(verify_records, forged, memoryview(data)))
        assert refused(partial(scrub_segment, held, forged)) == restored, position
        verdicts.append(restored)
        data[position] ^= 1 << position % 8
    assert verdicts.count(True) > 4096 // 3  # the header, and records; fillers have no digest of their own
    assert not refused(lambda: scrub_segment(held, entry))


def refused(check: Callable[[], object]) -> bool:
    try:
        check()
    except CheckpointError:
        return True
    return False


def test_every_truncation_is_noticed(held: Held) -> None:
    """Every file, cut at every length, by its reader, each 97th through the whole of `verify`; and one byte too many."""
    missed, commit, segment = [], commit_of(held), segment_of(held)
    stored = RunView.open(held).generations()[0]
    for key, original in list(held.objects.items()):
        for nbytes in range(len(original)):
            held.objects[key] = original[:nbytes]
            if key == segment.key:
                seen = refused(partial(_verify_file, held, {**stored.sizes, key: nbytes}, segment))
            else:
                seen = document_refused(held, key, commit)
            if not seen or (nbytes % 97 == 0 and not noticed(held)):
                missed.append((key, nbytes))
        held.objects[key] = original + b"\0"
        if not noticed(held):
            missed.append((key, len(original) + 1))
        held.objects[key] = original
    assert missed == []
    assert not noticed(held)


def test_every_missing_file_is_noticed(held: Held) -> None:
    """But for the newest log entry, without which the run is as it was before that entry."""
    newest = max(key for key in held.objects if key.startswith("_log/"))
    for key in [key for key in held.objects if key != newest]:
        original = held.objects.pop(key)
        assert noticed(held), key
        held.objects[key] = original


def test_a_generation_deleted_meanwhile_is_no_damage(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run goes on while somebody looks: retention takes the manifest first, then the rest."""
    snap = [key for key in held.objects if key.startswith("snap/")]
    read = held.get

    def retire_at_marker(key: str) -> bytes:
        if key.endswith(".done"):
            for each in snap:
                held.objects.pop(each, None)
        return read(key)

    monkeypatch.setattr(held, "get", retire_at_marker)
    verdict = verify(held)
    assert (verdict.problems, verdict.generations, verdict.skipped) == ([], [], 1)


def test_two_files_swapped_are_noticed(held: Held) -> None:
    """A good document under another's name is not that document."""
    logs = sorted(key for key in held.objects if key.startswith("_log/"))
    held.objects[logs[0]], held.objects[logs[1]] = held.objects[logs[1]], held.objects[logs[0]]
    assert noticed(held)


def borrowed_of(held: Held) -> SegmentEntry:
    """The file that the newest generation refers to, with the records that it references."""
    (entry,) = RunView.open(held).read_marker(commit_of(held), 0).referenced
    assert {record.operator for record in entry.segment.records} == {"net.1"}
    return entry.segment


@EVERY
def test_every_flipped_bit_of_documents_that_borrow_is_noticed(borrowing: Held, every: int) -> None:
    """Marker, with the line of referenced records, and manifest: bits by their reader, each 71st of those by `verify`."""
    missed, commit = [], commit_of(borrowing)
    assert commit.needs
    for key in [key for key in borrowing.objects if key.startswith(commit.generation.prefix)]:
        original = borrowing.objects[key]
        for bit in range(0, 8 * len(original) if not key.endswith(".safetensors") else 0, every):
            damaged = bytearray(original)
            damaged[bit // 8] ^= 1 << bit % 8
            borrowing.objects[key] = bytes(damaged)
            alone = bit // every % 71 == 0
            if not document_refused(borrowing, key, commit) or (alone and not noticed(borrowing)):
                missed.append((key, bit))
        borrowing.objects[key] = original
    assert missed == []
    assert not noticed(borrowing)


@EVERY
def test_every_flipped_bit_of_a_file_that_is_borrowed_from_is_noticed_by_who_borrows(
    borrowing: Held, every: int
) -> None:
    """One bit of every seventh byte, or of all, where the borrower reads the file; each 97th by `verify` of the borrower."""
    entry = borrowed_of(borrowing)
    data = bytearray(borrowing.objects[entry.key])
    borrowing.objects[entry.key] = data  # type: ignore[assignment]  # damaged in place
    missed = []
    for position in range(0, len(data), every):
        data[position] ^= 1 << position % 8
        alone = position // every % 97 == 0
        if not refused(lambda: scrub_segment(borrowing, entry)) or (alone and verify(borrowing, step=5).sound):
            missed.append(position)
        data[position] ^= 1 << position % 8
    assert missed == []
    assert verify(borrowing, step=5).sound


def test_every_flipped_bit_of_a_borrowed_record_is_noticed_when_it_is_restored(borrowing: Held) -> None:
    """All bits of all records that are referenced, read one by one as a restore reads them."""
    entry = borrowed_of(borrowing)
    data = bytearray(borrowing.objects[entry.key])
    borrowing.objects[entry.key] = data  # type: ignore[assignment]  # damaged in place
    store = RunStore.join(borrowing, run_id="")
    for record in entry.records:
        out = memoryview(bytearray(record.nbytes))
        for bit in range(8 * record.offset, 8 * (record.offset + record.nbytes)):
            data[bit // 8] ^= 1 << bit % 8
            with pytest.raises(Corrupt):
                read_record(store, entry, record, out)
            data[bit // 8] ^= 1 << bit % 8
        read_record(store, entry, record, out)


def test_every_truncation_of_a_file_that_is_borrowed_from_is_noticed_by_who_borrows(borrowing: Held) -> None:
    """Cut at every length, each 97th by `verify` of the borrower alone; one byte too many; gone."""
    entry = borrowed_of(borrowing)
    original = borrowing.objects[entry.key]
    for nbytes in range(len(original)):
        borrowing.objects[entry.key] = original[:nbytes]
        assert refused(partial(_verify_file, borrowing, {entry.key: nbytes}, entry))
        assert nbytes % 97 or not verify(borrowing, step=5).sound
    borrowing.objects[entry.key] = original + b"\0"
    assert not verify(borrowing, step=5).sound
    del borrowing.objects[entry.key]
    reasons = [problem.reason for problem in verify(borrowing, step=5).problems]
    assert any(f"{entry.key}: is gone" in reason for reason in reasons)
    assert "no good copy is left of 1 operators, first net.1" in reasons


class Bomb:
    """Unpickling it is seen."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (_explode, ())


def _explode() -> None:
    raise AssertionError("something stored was unpickled")


def test_nothing_stored_is_ever_unpickled(held: Held, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file in turn replaced by a pickle, raw and as `torch.save` writes it: an error, never a call.

    While any look at a run goes on, `pickle` itself is a trap too.
    """
    zipped = io.BytesIO()
    torch.save(Bomb(), zipped)
    bombs = [pickle.dumps(Bomb()), zipped.getvalue()]
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, lambda *_, **__: _explode())
    monkeypatch.setattr(torch, "load", lambda *_, **__: _explode())
    for key, original in list(held.objects.items()):
        for bomb in bombs:
            held.objects[key] = bomb
            assert noticed(held), key
            if key.startswith("snap/"):
                with pytest.raises(CheckpointError):
                    export(held, tmp_path / "m.safetensors")
        held.objects[key] = original
    export(held, tmp_path / "m.safetensors")
    export(held, tmp_path / "m.ckpt")


def test_a_missing_object_is_an_error_of_ours(tmp_path: Path) -> None:
    """Ranged reads name what is not there, or ends too soon."""
    backend = open_backend(str(tmp_path))
    backend.put("a", b"123")
    with pytest.raises(KeyMissing):
        backend.get_range("b", 0, memoryview(bytearray(1)))
    with pytest.raises(Corrupt, match="ended at byte 3 of 5"):
        backend.get_range("a", 2, memoryview(bytearray(3)))
