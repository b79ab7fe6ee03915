"""What is referenced is read again in the background: what is bad is found once, and what may be gone is not called bad."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from lightning_moe_ckpt.errors import KeyMissing, StorageError
from lightning_moe_ckpt.planning._ledger import BAD_COPIES_WIDTH as WIDTH
from lightning_moe_ckpt.planning._ledger import BadCopyList
from lightning_moe_ckpt.policies import TierLedger
from lightning_moe_ckpt.storage import GenerationId, RankMarker, RecordEntry, ReferencedEntry, SegmentEntry, digest_of
from lightning_moe_ckpt.tiers import BadCopy, Scrubber

FAST = 2**40


def generation(step: int) -> GenerationId:
    return GenerationId(step=step, incarnation=1, nonce="0123456789ab")


class Stored:
    """Files of records of 100 bytes, one per expert."""

    def __init__(self) -> None:
        self.files: dict[str, bytearray] = {}
        self.marker: RankMarker | None = None
        self.read = threading.Semaphore(0)
        self.down, self.out_of_reach = False, ""

    def entry(self, step: int, *experts: int) -> ReferencedEntry:
        """A file with these experts."""
        key, data = f"file{step}", bytearray(b"".join(bytes([step, expert]) * 50 for expert in experts))
        self.files[key] = data
        records = [
            RecordEntry(
                name=f"full/e{expert}", operator=f"e{expert}", kind="full", fqn="w", state_key="param", dtype="U8",
                global_shape=(100,), global_start=0, numel=100, offset=100 * i, nbytes=100,
                digest=digest_of(bytes(data[100 * i : 100 * i + 100])),
            )
            for i, expert in enumerate(experts)
        ]  # fmt: skip
        segment = SegmentEntry(step=step, key=key, nbytes=len(data), digest=digest_of(bytes(data)), records=records)
        return ReferencedEntry(generation=generation(step), segment=segment)

    def names(self, *referenced: ReferencedEntry, spares: tuple[ReferencedEntry, ...] = ()) -> None:
        """The newest marker does."""
        self.marker = RankMarker(
            run_id="r", rank=0, world_size=1, generation=generation(9), plan_hash="p", segments=(), referenced=referenced,
            spares=spares,
        )  # fmt: skip

    def read_range(self, entry: SegmentEntry, start: int, out: memoryview) -> None:
        self.read.release()
        if self.down:
            raise StorageError("the medium is away")
        if entry.key == self.out_of_reach:
            raise StorageError(f"{entry.key}: bad sector")
        if entry.key not in self.files:
            raise KeyMissing(f"{entry.key}: not there.")
        out[:] = self.files[entry.key][start : start + out.nbytes]


@pytest.fixture
def stored() -> Stored:
    found = Stored()
    found.names(found.entry(3, 0, 1), spares=(found.entry(1, 0), found.entry(2, 1)))
    return found


def test_what_is_good_is_read_and_nothing_is_found(stored: Stored) -> None:
    """Referenced records and spares, byte for byte."""
    scrubber = Scrubber(stored.read_range, lambda: stored.marker, bandwidth=FAST)
    assert scrubber.round() == 400
    assert scrubber.take_found(9) == []


def test_a_turned_bit_and_a_file_that_is_gone_are_found_once(stored: Stored, caplog: pytest.LogCaptureFixture) -> None:
    """Each by operator and generation; other experts of the same file are good. A warning names them."""
    scrubber = Scrubber(stored.read_range, lambda: stored.marker, bandwidth=FAST)
    stored.files["file3"][150] ^= 1
    del stored.files["file1"]
    scrubber.round()
    scrubber.round()
    assert scrubber.take_found(1) == [BadCopy("e1", generation(3))]
    assert scrubber.take_found(9) == [BadCopy("e0", generation(1))]
    assert scrubber.take_found(9) == []
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [each.split(":")[0] for each in warned] == ["e1", "e0"]


def test_what_the_newest_marker_names_no_more_is_not_called_bad(stored: Stored) -> None:
    """It is deleted while it is read: that is how it should be."""
    old, calls = stored.marker, 0

    def newest() -> RankMarker | None:
        nonlocal calls
        calls += 1
        if calls == 3:  # while the first record is read
            stored.files.clear()
            stored.names()
        return old if calls < 3 else stored.marker

    scrubber = Scrubber(stored.read_range, newest, bandwidth=FAST)
    scrubber.round()
    assert calls > 3
    assert scrubber.take_found(9) == []


def test_a_medium_that_is_away_says_nothing_of_the_bytes(stored: Stored) -> None:
    """The round ends; a later one finds all of it good."""
    scrubber = Scrubber(stored.read_range, lambda: stored.marker, bandwidth=FAST)
    stored.down = True
    with pytest.raises(StorageError, match="away"):
        scrubber.round()
    stored.down = False
    assert scrubber.round() == 400
    assert scrubber.take_found(9) == []


def test_a_file_that_cannot_be_read_does_not_hide_those_behind_it(stored: Stored) -> None:
    """As on a disk with a bad sector: every other file is looked at in every round."""
    scrubber = Scrubber(stored.read_range, lambda: stored.marker, bandwidth=FAST)
    stored.out_of_reach = "file3"
    stored.files["file2"][0] ^= 1
    with pytest.raises(StorageError, match="file3: bad sector"):
        scrubber.round()
    assert scrubber.take_found(9) == [BadCopy("e1", generation(2))]


def test_it_reads_on_a_thread_of_its_own_and_ends_in_the_middle_of_a_wait(stored: Stored) -> None:
    """At a byte per second the first record takes its time; closing does not."""
    scrubber = Scrubber(stored.read_range, lambda: stored.marker, bandwidth=1)
    scrubber.start()
    assert stored.read.acquire(timeout=20)
    (thread,) = [each for each in threading.enumerate() if each.name == "moe-ckpt-scrub"]
    scrubber.close()
    assert not thread.is_alive()


def test_ranks_tell_each_other_and_forget_when_storage_has_the_expert_again(stored: Stored) -> None:
    """Only the rank that reads a file finds it bad; all of them take the expert again and reference another copy."""
    scrubber = Scrubber(stored.read_range, lambda: stored.marker, bandwidth=FAST)
    stored.files["file3"][150] ^= 1
    scrubber.round()
    ranks = [BadCopyList(["e0", "e1"]) for _ in range(3)]
    ranks[1].scrubber = scrubber
    rows = [rank.inputs() for rank in ranks]
    assert {len(row) for row in rows} == {WIDTH}
    book = TierLedger.empty(2)
    book = replace(book, step=book.step.fill_(3))
    for rank in ranks:
        rank.agreed(rows, book)
        assert rank.not_referenced == {"e1": {generation(3)}}
        assert rank.again(book) == [1]
    taken = book.take(4, [1], book.alive)
    assert ranks[0].again(taken) == [], "it is on its way"
    ranks[0].completed(taken, 4)
    assert ranks[0].not_referenced == {}
    assert ranks[0].again(taken.complete(4)) == []


def test_a_bad_copy_is_remembered_until_what_was_begun_since_is_complete(stored: Stored) -> None:
    """A generation under way has the expert, and names the bad copy as its second: a second good one is wanted yet."""
    found = BadCopyList(["e0", "e1"])
    found.scrubber = Scrubber(stored.read_range, lambda: stored.marker, bandwidth=FAST)
    stored.files["file3"][150] ^= 1
    found.scrubber.round()
    book = TierLedger.empty(2)
    book = replace(book, step=book.step.fill_(3)).take(4, [1], book.alive)
    found.agreed([found.inputs()], book)
    found.completed(book, 4)
    book = book.complete(4)
    assert (found.not_referenced, found.all_have_copies) == ({}, True), "its newest copy is good"
    assert found.again(book) == [1]
    book = book.take(5, [1], book.alive)
    found.completed(book, 5)
    assert found.again(book.complete(5)) == []


def test_without_another_copy_nothing_is_built_on_what_is_stored(stored: Stored) -> None:
    """The newest one is bad, and no older one is named, or that is bad too: what comes next must be whole."""
    book = TierLedger.empty(2)
    book = replace(book, step=book.step.fill_(3))
    for hit, spares in ((["file3"], ()), (["file3", "file2"], (stored.entry(1, 0), stored.entry(2, 1)))):
        stored.names(stored.entry(3, 0, 1), spares=spares)
        for key in hit:
            stored.files[key][-1] ^= 1
        found = BadCopyList(["e0", "e1"])
        found.scrubber = Scrubber(stored.read_range, lambda: stored.marker, bandwidth=FAST)
        found.scrubber.round()
        found.agreed([found.inputs()], book)
        assert not found.all_have_copies
        assert set(found.not_referenced) == {"e1"}
        taken = book.take(4, [0, 1], book.alive)
        found.completed(taken, 4)
        assert (found.all_have_copies, found.not_referenced) == (True, {})


def test_a_bad_spare_is_made_up_for_and_the_newest_copy_stays_in_use(stored: Stored) -> None:
    """Two copies are wanted; the one that is good is referenced on."""
    scrubber = Scrubber(stored.read_range, lambda: stored.marker, bandwidth=FAST)
    stored.files["file2"][0] ^= 1
    scrubber.round()
    found = BadCopyList(["e0", "e1"])
    found.scrubber = scrubber
    book = TierLedger.empty(2)
    book = replace(book, step=book.step.fill_(3))
    found.agreed([found.inputs()], book)
    assert (found.not_referenced, found.again(book)) == ({}, [1])
