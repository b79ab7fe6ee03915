"""Test what both halves of every tier promise: inherit, say how to make a tier, and run pytest.

```python
class TestMyTier(TierContract):
    @contextmanager
    def make_tier(self, tmp_path: Path) -> Iterator[TierHalves]:
        yield TierHalves(worker=MyWorker(...), make_reader=lambda: MyTier(...), lose=...)
```

Writing (`TierWorker`). The training thread calls `begin`, `add` in the order of steps, `abandon`, `give_up` and
`complete_everywhere`, and none of them waits for the medium. One thread of the tier does the work, one generation after the
other.

Memory. It belongs to the caller. From `add` on the tier may read a segment, once its copy has arrived, and nothing may
write to it; `on_released` ends that, once per generation and from any thread: when the generation failed or was abandoned,
when the tier has its bytes, or, if a complete generation has to stay in the caller's memory too, when a newer one is
complete on all ranks. Memory that is still held when the worker is closed is not released. A tier that keeps segments where they
are publishes them in the caller's ring, which knows when a slot may be filled again.

Completion. A generation is complete when every segment that was announced has been added and is in the tier. Until then,
and when it failed, was abandoned or was cut off by `close`, no reader lists it. A failure is reported, never raised.

Reading (`Tier`). `holdings` lists complete copies, newest first. `read_marker` returns the writer's marker. `read_into` may be
called from any thread; it fills all of its memory with the bytes as they were sealed, or raises `StorageError`,
`KeyMissing` or `Corrupt`. Nothing that a reader does changes what the tier holds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_moe_ckpt.errors import Corrupt, KeyMissing, StorageError
from lightning_moe_ckpt.tiers import Holding

from ._capture import (
    PLAN,
    PLAN_HASH,
    SLOT_NBYTES,
    TIMEOUT,
    HeldCopy,
    TierCapture,
    TierHalves,
)

_CLOSE_SECONDS = 10.0
"""Seconds within which `close` has to return."""


class TierContract:
    """Tests that every tier passes; the module's docstring has the contract. Every test gets an empty tier."""

    slot_nbytes = SLOT_NBYTES
    """Bytes of the largest segment."""
    num_slots = 16
    """Number of segments that are in memory at once."""

    def make_tier(self, tmp_path: Path) -> AbstractContextManager[TierHalves]:
        """Return a context with an empty tier. On exit, after the worker was closed, all of the tier is removed."""
        raise NotImplementedError

    @pytest.fixture
    def capture(self, tmp_path: Path) -> Iterator[TierCapture]:
        """Yield the tier under test, with a simulated training that writes to it."""
        with self.make_tier(tmp_path) as tier:
            capture = TierCapture(tier)
            yield capture
            capture.end()

    # -- writing: completion

    def test_a_generation_is_complete_when_every_segment_was_added(self, capture: TierCapture) -> None:
        """Before that, `drain` does not wait for missing segments, and no reader lists the generation."""
        worker, name = capture.worker, capture.begin(4, num_segments=2)
        capture.add(name, 3)
        assert worker.drain(TIMEOUT)
        assert (worker.idle, worker.holds(name), worker.gave_up(name), worker.newest) == (False, False, False, None)
        assert capture.readable() == []
        capture.add(name, 4)
        capture.finish(name)
        assert worker.drain(TIMEOUT)
        assert (worker.idle, worker.holds(name), worker.gave_up(name), worker.newest) == (True, True, False, name)
        assert worker.take_failures() == []
        assert capture.readable() == [name]

    @pytest.mark.parametrize("num_segments", [1, 3])
    def test_files_of_its_audiences_come_as_they_were_sealed(self, capture: TierCapture, num_segments: int) -> None:
        """Every segment has one file per audience, and the tier gets only files of its audiences."""
        name = capture.whole(5, num_segments=num_segments)
        assert len(capture.files[name]) == num_segments * len(capture.worker.audiences)
        assert capture.readable() == [name]

    def test_generations_are_complete_in_the_order_in_which_they_began(self, capture: TierCapture) -> None:
        """A newer generation waits for an older one whose bytes have not arrived."""
        worker, copy = capture.worker, HeldCopy()
        older = capture.whole(1, copy=copy, wait=False)
        newer = capture.whole(2, wait=False)
        assert not worker.drain(0.0)
        assert (worker.holds(older), worker.holds(newer)) == (False, False)
        copy.arrive()
        assert worker.drain(TIMEOUT)
        assert (worker.holds(older), worker.holds(newer), worker.newest) == (True, True, newer)
        assert capture.readable()[0] == newer

    # -- writing: memory

    def test_memory_is_given_back_once_and_is_not_read_afterwards(self, capture: TierCapture) -> None:
        """Memory is released at the latest when a newer generation is complete everywhere; the test then overwrites it."""
        names = []
        for step in (1, 2, 3, 4):
            names.append(capture.whole(step))
            capture.worker.complete_everywhere(names[-1])
            assert set(capture.released) >= set(names[:-1])
            assert capture.readable()[0] == names[-1]
        assert len(set(capture.released)) == len(capture.released)

    def test_a_copy_that_has_not_arrived_is_waited_for(self, capture: TierCapture) -> None:
        """The tier holds the bytes that arrive, not those that were there when the segment was added."""
        copy = HeldCopy()
        name = capture.whole(1, copy=copy, wait=False)
        assert not capture.worker.drain(0.0)
        assert capture.released == []
        copy.arrive()
        assert capture.worker.drain(TIMEOUT)
        assert capture.readable() == [name]

    def test_memory_that_a_copy_writes_to_is_not_given_back(self, capture: TierCapture) -> None:
        """This holds for an abandoned generation too, which is not complete when its last copy arrives."""
        copy, name = HeldCopy(), capture.begin(1, num_segments=1)
        capture.add(name, 1, copy=copy)
        capture.abandon(name)
        assert not capture.worker.drain(0.0)
        assert capture.released == []
        copy.arrive()
        assert capture.worker.drain(TIMEOUT)
        assert (capture.released, capture.worker.gave_up(name), capture.readable()) == ([name], True, [])

    # -- writing: what goes wrong

    @pytest.mark.parametrize("withdrawn", [False, True], ids=["abandoned", "given-up"])
    def test_what_is_not_wanted_any_more_leaves_nothing(self, capture: TierCapture, *, withdrawn: bool) -> None:
        """Later segments of the generation are ignored, no failure is reported, and the next generation is taken."""
        worker, name = capture.worker, capture.begin(3, num_segments=3)
        capture.add(name, 1)
        late = capture.seal(name, 2)
        if withdrawn:
            worker.give_up(name)
        capture.abandon(name)
        worker.add(name, late)
        assert worker.drain(TIMEOUT)
        worker.abandon(name)
        assert (worker.idle, worker.gave_up(name), worker.holds(name)) == (True, True, False)
        assert (capture.released, worker.take_failures(), capture.readable()) == ([name], [], [])
        after = capture.whole(4)
        assert capture.readable() == [after]

    def test_what_another_rank_has_given_up_is_whole_or_not_there(self, capture: TierCapture) -> None:
        """A tier may end the generation or complete it: replicas of the other rank's part can make it useful."""
        worker, name = capture.worker, capture.begin(2, num_segments=2)
        capture.add(name, 1)
        worker.give_up(name)
        capture.add(name, 2)
        capture.finish(name)
        assert worker.drain(TIMEOUT)
        assert capture.readable() == ([name] if worker.holds(name) else [])
        after = capture.whole(3)
        assert capture.released.count(name) == 1
        assert capture.readable()[0] == after

    @pytest.mark.parametrize("failing", [1, 2])
    def test_a_copy_that_fails_costs_one_generation(self, capture: TierCapture, failing: int) -> None:
        """The failure is reported once with its reason, later segments are ignored, and the next generation is taken."""
        worker, name = capture.worker, capture.begin(3, num_segments=3)
        for step in (1, 2):
            capture.add(name, step, copy=HeldCopy.failed() if step == failing else None)
        capture.wait_released(name)
        capture.add(name, 3)
        capture.finish(name)
        assert worker.drain(TIMEOUT)
        (failure,) = worker.take_failures()
        assert failure.generation == name
        assert "the copy failed" in failure.reason
        assert worker.take_failures() == []
        assert (worker.gave_up(name), worker.holds(name), capture.readable()) == (True, False, [])
        worker.give_up(name)
        after = capture.whole(4)
        assert capture.released.count(name) == 1
        assert capture.readable() == [after]

    # -- writing: the end

    def test_closing_abandons_what_is_open_and_keeps_what_is_complete(self, capture: TierCapture) -> None:
        """Closing takes bounded time and ends the tier's thread, and closing again changes nothing."""
        worker, complete = capture.worker, capture.whole(1)
        worker.complete_everywhere(complete)
        name = capture.begin(3, num_segments=2)
        capture.add(name, 2)
        started = time.monotonic()
        worker.close()
        assert time.monotonic() - started < _CLOSE_SECONDS
        worker.close()
        assert f"moe-ckpt-{worker.name}" not in {thread.name for thread in threading.enumerate()}
        assert (worker.idle, worker.gave_up(name), capture.released.count(name)) == (True, True, 1)
        capture.finish(name)
        assert capture.readable() == [complete]

    def test_closing_waits_for_a_copy_under_way(self, capture: TierCapture) -> None:
        """The tier may abandon the generation or complete it first; memory is released when nothing writes to it."""
        worker, copy = capture.worker, HeldCopy()
        name = capture.whole(1, copy=copy, wait=False)
        late = threading.Timer(0.05, copy.arrive)
        late.start()
        worker.close()
        late.join()
        assert worker.idle
        assert worker.holds(name) or capture.released == [name]
        assert capture.readable() == ([name] if worker.holds(name) else [])

    def test_closing_before_anything_began_is_allowed(self, capture: TierCapture) -> None:
        """Closing twice is allowed too, and neither call waits."""
        assert capture.worker.idle
        assert capture.worker.drain(0.0)
        capture.worker.close()
        capture.worker.close()
        assert capture.worker.newest is None
        assert capture.readable() == []

    # -- reading

    def test_what_is_whole_is_listed_newest_first(self, capture: TierCapture) -> None:
        """Complete copies are listed newest first, with owner, plan and size."""
        older, newer = capture.two()
        with closing(capture.tier.make_reader()) as reader:
            found = reader.holdings()
        assert [replace(each, file="") for each in found] == [
            Holding(generation=each, plan_hash=PLAN_HASH, owner=0, nbytes=capture.nbytes(each))
            for each in (newer, older)
        ]

    def test_the_marker_is_what_the_writer_said(self, capture: TierCapture) -> None:
        """The marker of each generation has identity, plan, and every file with its digests."""
        capture.two()
        with closing(capture.tier.make_reader()) as reader:
            for holding in reader.holdings():
                marker = reader.read_marker(holding)
                assert (marker.generation, marker.rank, marker.plan_hash) == (holding.generation, 0, PLAN_HASH)
                assert marker.policy["plan"] == PLAN
                assert list(marker.segments) == capture.entries(holding.generation)

    def test_any_range_is_read_from_any_thread(self, capture: TierCapture) -> None:
        """Reads return the sealed bytes, also while other threads read."""
        capture.two()
        with closing(capture.tier.make_reader()) as reader, ThreadPoolExecutor(4) as pool:
            found = reader.holdings()

            def read(seed: int) -> None:
                for holding, entry, start, stop in capture.ranges(found, seed):
                    out = bytearray(stop - start)
                    reader.read_into(holding, entry, start, memoryview(out))
                    assert out == capture.files[holding.generation][entry.key][start:stop], (entry.key, start, stop)

            list(pool.map(read, range(8)))

    def test_what_is_not_there_is_an_error(self, capture: TierCapture) -> None:
        """Ranges past the end, missing files and missing generations raise, since another copy may have them."""
        capture.two()
        with closing(capture.tier.make_reader()) as reader:
            holding = reader.holdings()[0]
            entry = reader.read_marker(holding).segments[0]
            for start, nbytes in ((entry.nbytes, 1), (entry.nbytes - 1, 2), (1, entry.nbytes), (2**40, 1)):
                with pytest.raises((StorageError, Corrupt)):
                    reader.read_into(holding, entry, start, memoryview(bytearray(nbytes)))
            with pytest.raises(StorageError):
                reader.read_into(holding, replace(entry, key=f"{entry.key}-not"), 0, memoryview(bytearray(1)))
            with pytest.raises(KeyMissing):
                reader.read_marker(replace(holding, generation=capture.tier.name(1000)))

    def test_what_went_meanwhile_is_an_error(self, capture: TierCapture) -> None:
        """A read of a lost copy never returns other bytes, and a later reader does not list the copy."""
        capture.two()
        with closing(capture.tier.make_reader()) as reader:
            holding = reader.holdings()[0]
            entry = reader.read_marker(holding).segments[0]
            capture.tier.lose()
            with pytest.raises((StorageError, Corrupt)):
                reader.read_marker(holding)
            with pytest.raises((StorageError, Corrupt)):
                reader.read_into(holding, entry, 0, memoryview(bytearray(1)))
        assert capture.readable() == []

    def test_closing_a_reader_deletes_nothing(self, capture: TierCapture) -> None:
        """A reader may be closed twice; readers made before and after read the same."""
        older, newer = capture.two()
        other = capture.tier.make_reader()
        found = other.holdings()
        reader = capture.tier.make_reader()
        assert reader.holdings() == found
        reader.close()
        reader.close()
        for holding in found:
            capture.check(other, holding)
        other.close()
        assert capture.readable() == [newer, older]
