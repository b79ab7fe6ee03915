"""The clock of a stop: a flag, a repetition, and the end of a process whose main thread cannot act."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import pytest
from torch._C._distributed_c10d import TCPStore

from lightning_moe_ckpt.process import EXIT_STATUS, StopSignal, _stop_signal

SHORT = 0.05


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits are short."""
    monkeypatch.setattr(_stop_signal, "PATIENCE_SECONDS", SHORT)
    monkeypatch.setattr(_stop_signal, "_FORCED_SECONDS", SHORT)


@pytest.fixture
def events() -> dict[str, threading.Event]:
    return {"late": threading.Event(), "exit": threading.Event()}


@pytest.fixture
def stop(events: dict[str, threading.Event]) -> Iterator[StopSignal]:
    """A stop signal that has SIGTERM for itself."""
    stop = _stop(events)
    before = signal.signal(signal.SIGTERM, _handler(stop))
    yield stop
    signal.signal(signal.SIGTERM, before)
    stop.close()


def _handler(stop: StopSignal) -> Callable[[int, FrameType | None], None]:
    def handle(*_: object) -> None:
        stop.receive()

    return handle


def _stop(events: dict[str, threading.Event]) -> StopSignal:
    return StopSignal(timedelta(seconds=20), on_late=events["late"].set, before_exit=events["exit"].set)


def test_a_signal_sets_the_flag_and_a_boundary_gets_the_rest_of_the_grace(stop: StopSignal) -> None:
    """Nothing else happens while the main thread is on its way."""
    before = stop.requested
    os.kill(os.getpid(), signal.SIGTERM)
    assert (before, stop.requested) == (False, True)
    assert not stop.late
    assert 19 < stop.allow_grace() <= 20


def test_a_signal_that_is_delivered_twice_is_one(stop: StopSignal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers of launchers each pass it on; only a later one means "at once"."""
    assert not stop.receive()
    assert not stop.receive()
    monkeypatch.setattr(_stop_signal, "REPEAT_SECONDS", 0.0)
    assert stop.receive()
    assert stop.late


def test_news_of_a_peer_before_the_own_signal_is_no_repetition(
    stop: StopSignal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks are signalled, the others first."""
    monkeypatch.setattr(_stop_signal, "REPEAT_SECONDS", 0.0)
    stop.start_clock()
    assert not stop.receive()


@pytest.mark.usefixtures("patient")
def test_a_main_thread_that_reaches_no_boundary_is_told(stop: StopSignal, events: dict[str, threading.Event]) -> None:
    """First it is asked to leave by itself."""
    os.kill(os.getpid(), signal.SIGTERM)
    assert events["late"].wait(10)
    stop.allow_grace()  # it does
    assert stop.late
    assert not events["exit"].is_set()


def test_patience_grows_with_the_steps(stop: StopSignal, events: dict[str, threading.Event]) -> None:
    """Agreement takes a step, however long steps are."""
    stop._last_beat, stop._beats = time.monotonic() - 100, 1
    stop.beat()
    os.kill(os.getpid(), signal.SIGTERM)
    assert not events["late"].wait(SHORT)
    assert stop._remaining() is not None
    assert 15 < (stop._remaining() or 0) <= 20, "but not beyond the grace"


def _wait_in_torch(ready: int, status: int) -> NoReturn:
    """Wait for ever for a peer, as a collective does: in C++, where no Python handler runs."""

    def last_words() -> None:
        os.write(status, b"handled" if clock.requested else b"blocked")

    clock = StopSignal(timedelta(seconds=20), on_late=lambda: None, before_exit=last_words)
    signal.signal(signal.SIGTERM, _handler(clock))
    os.write(ready, b"!")
    TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=True, timeout=timedelta(seconds=60))
    os._exit(0)


def _sleeps(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


@pytest.mark.usefixtures("patient")
def test_a_process_that_waits_for_a_peer_in_torch_ends() -> None:
    """Its Python handler never runs, as the main thread does not come back; the status says SIGTERM."""
    (ready, tell_ready), (status, tell_status) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _wait_in_torch(tell_ready, tell_status)
        finally:
            os._exit(1)  # whatever happens, the child must not go on with the tests
    os.read(ready, 1)
    deadline = time.monotonic() + 30
    while not all(_sleeps(pid) for _ in range(20)):  # it wakes up now and then to look for its peer
        assert time.monotonic() < deadline, "the child does not wait"
    os.kill(pid, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == EXIT_STATUS
    assert os.read(status, 10) == b"blocked"


@pytest.mark.usefixtures("patient")
def test_a_signal_to_a_forked_child_is_not_ours(stop: StopSignal, events: dict[str, threading.Event]) -> None:
    """Even if the child writes to the descriptor that it inherited."""
    os.write(stop._writer, bytes([signal.SIGTERM]))
    stop.beat()
    deadline = time.monotonic() + 10
    while stop._deadline is None and time.monotonic() < deadline:
        stop.beat()
    while stop._deadline is not None and time.monotonic() < deadline:
        stop.beat()
    assert stop._deadline is None
    assert not events["late"].is_set()
    assert not stop.late


def test_a_fork_does_not_inherit_the_descriptor(stop: StopSignal) -> None:
    """What a child receives does not reach the parent's thread."""
    child = os.fork()
    if child == 0:
        os._exit(0 if signal.set_wakeup_fd(-1) == -1 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert signal.set_wakeup_fd(stop._writer) == stop._writer, "the parent still has it"


def test_an_event_loops_descriptor_is_left_alone(events: dict[str, threading.Event]) -> None:
    """Then the Python handler alone tells the thread."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    try:
        stop = _stop(events)
        stop.receive()
        stop.close()
        assert signal.set_wakeup_fd(before) == theirs.fileno()
    finally:
        signal.set_wakeup_fd(before)
        ours.close()
        theirs.close()


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_closing_ends_the_thread_and_may_be_repeated(events: dict[str, threading.Event]) -> None:
    """Nothing stays: no thread, no descriptor."""
    before = _open_files()
    stop = _stop(events)
    stop.close()
    stop.close()
    assert _open_files() == before
    assert not [thread for thread in threading.enumerate() if thread.name == "moe-ckpt-stop"]


def test_outside_the_main_thread_only_the_flag_works(events: dict[str, threading.Event]) -> None:
    """No handler can be installed there, by nobody."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(_stop(events)))
    thread.start()
    thread.join()
    results[0].start_clock()
    assert results[0].requested
    results[0].close()
