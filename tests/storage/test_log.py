"""The log: dense entries, fencing, healing, and a history that forgets only what no longer decides anything."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_moe_ckpt.errors import Corrupt, Fenced
from lightning_moe_ckpt.storage import Backend, FsspecBackend, GenerationId
from lightning_moe_ckpt.storage._log import Cut, History, Log
from lightning_moe_ckpt.storage._names import log_key

EVENT: dict[str, object] = {"type": "test"}


@pytest.fixture
def backend() -> Backend:
    MemoryFileSystem.store.clear()  # listings take time for all that was ever stored
    MemoryFileSystem.pseudo_dirs[:] = [""]
    return FsspecBackend(f"memory://{uuid.uuid4().hex}")


def _spoil(backend: Backend, key: str, position: int = 30) -> None:
    data = bytearray(backend.get(key))
    data[position] ^= 1
    backend.put(key, bytes(data))


def _written_log(backend: Backend) -> list[History]:
    """Three lives and a watermark; returns the history after each entry."""
    log = Log(backend)
    log.read()
    history = History(run_id="r", first_epoch=1, last_epoch=0)
    histories = [history]
    histories.append(histories[-1].opened(1, None))
    histories.append(histories[-1].opened(2, GenerationId(step=30, epoch=1)))
    histories.append(histories[-1].advanced(20))
    histories.append(histories[-1].opened(3, GenerationId(step=40, epoch=2)))
    for written in histories:
        assert log.append(EVENT, written)
    return histories


def test_the_newest_entry_is_the_state(backend: Backend) -> None:
    assert Log(backend).read() is None
    histories = _written_log(backend)
    assert Log(backend).read() == histories[-1]
    assert histories[-1] == History(
        run_id="r", first_epoch=1, last_epoch=3, watermark=20, cuts=(Cut(1, None), Cut(2, 30), Cut(3, 40))
    )


@pytest.mark.parametrize("index", range(4))
def test_a_spoilt_entry_is_healed_by_the_ones_after_it(backend: Backend, index: int) -> None:
    """Flipped, truncated or gone makes no difference, even for the entry that names the run."""
    histories = _written_log(backend)
    for spoil in (lambda key: _spoil(backend, key), lambda key: backend.put(key, b""), backend.delete):
        spoil(log_key(index))
        log = Log(backend)
        assert log.read() == histories[-1]
        assert log.num_lost == 0


def test_a_spoilt_newest_entry_is_passed_over_and_counted(backend: Backend, caplog: pytest.LogCaptureFixture) -> None:
    """Its predecessor is the state; what it may have opened is counted, so that no epoch is given twice."""
    histories = _written_log(backend)
    _spoil(backend, log_key(4))
    log = Log(backend)
    assert log.read() == histories[3]
    assert log.num_lost == 1
    assert "entry 4" in caplog.text
    assert log.append(EVENT, histories[3])
    assert backend.list(log_key(5)), "the next entry goes behind the spoilt one"


def test_an_entry_under_a_wrong_name_is_spoilt(backend: Backend) -> None:
    histories = _written_log(backend)
    backend.put(log_key(5), backend.get(log_key(1)))
    assert Log(backend).read() == histories[-1]


def test_a_log_without_a_readable_entry_is_an_error_with_the_remedy(backend: Backend) -> None:
    _written_log(backend)
    for index in range(5):
        _spoil(backend, log_key(index))
    with pytest.raises(Corrupt, match=r'none of the 5 log entries.*resume="never"'):
        Log(backend).read()


def test_every_flipped_bit_of_an_entry_is_seen(backend: Backend) -> None:
    """Exhaustively: the state is then the entry before."""
    histories = _written_log(backend)
    key = log_key(4)
    data = backend.get(key)
    for position in range(len(data)):
        spoilt = bytearray(data)
        spoilt[position] ^= 1 << position % 8
        backend.put(key, bytes(spoilt))
        assert Log(backend).read() == histories[3]
    for length in range(0, len(data), 7):
        backend.put(key, data[:length])
        assert Log(backend).read() == histories[3]


def test_only_the_first_of_two_writers_appends(backend: Backend) -> None:
    """And the other is fenced."""
    _written_log(backend)
    first, second = Log(backend), Log(backend)
    history = first.read()
    assert history is not None
    second.read()
    assert first.append(EVENT, history)
    assert not second.append(EVENT, history)
    first.check_fence()
    with pytest.raises(Fenced):
        second.check_fence()


def test_an_unreadable_foreign_entry_fences_too(backend: Backend) -> None:
    _written_log(backend)
    log = Log(backend)
    log.read()
    backend.put(log_key(5), b"rubbish")
    with pytest.raises(Fenced):
        log.check_fence()


def test_the_fence_is_seen_across_a_block_of_keys(backend: Backend) -> None:
    """The tail is looked for among a thousand names; the next one may be in the next thousand."""
    log, history = Log(backend), History(run_id="r", first_epoch=1, last_epoch=0)
    backend.put(log_key(998), b"spoilt")
    for index in range(999, 1003):
        with pytest.raises(Corrupt):
            Log(backend).read()
        log = Log(backend)
        with pytest.raises(Corrupt):
            log.read()
        log.check_fence()
        backend.put(log_key(index), b"spoilt")
        with pytest.raises(Fenced):
            log.check_fence()
    assert not log.append(EVENT, history)


def test_of_many_writers_each_appends_once_per_index(backend: Backend) -> None:
    """Threads that re-read and try again: every append lands, on an index of its own."""
    _written_log(backend)

    def append(worker: int) -> int:
        log = Log(backend)
        for attempt in range(1000):
            history = log.read()
            assert history is not None
            if log.append({"worker": worker}, history):
                return attempt
        raise AssertionError("never won")

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(append, range(12)))
    assert [entry.key for entry in backend.list("_log/")] == [log_key(index) for index in range(5 + 12)]


epochs = st.lists(st.none() | st.integers(0, 12), max_size=8)


@settings(deadline=None)
@given(epochs, st.lists(st.integers(0, 12), max_size=3), st.integers(0, 12), st.integers(0, 9))
def test_forgetting_cuts_changes_no_verdict(
    floors: list[int | None], watermarks: list[int], step: int, epoch: int
) -> None:
    """Against the timeline rule taken literally over every epoch ever opened."""
    history, watermark = History(run_id="r", first_epoch=0, last_epoch=0), 0
    for opened, floor in enumerate(floors, start=1):
        history = history.opened(opened, None if floor is None else GenerationId(step=floor, epoch=0))
        watermark = 0 if floor is None else watermark
        if opened <= len(watermarks):
            watermark = max(watermark, watermarks[opened - 1])
            history = history.advanced(watermark)
    literally_dead = step < watermark or any(
        epoch < opened and (floor is None or step > floor) for opened, floor in enumerate(floors, start=1)
    )
    assert (history.why_dead(GenerationId(step=step, epoch=epoch)) is not None) == literally_dead


def test_the_history_stays_small() -> None:
    """A thousand lives that each get one generation further and keep two."""
    history = History(run_id="r", first_epoch=1, last_epoch=0)
    for epoch in range(1, 1000):
        history = history.opened(epoch, GenerationId(step=epoch, epoch=epoch - 1)).advanced(max(0, epoch - 1))
    assert len(history.cuts) <= 3
