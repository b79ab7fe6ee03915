"""A process that is forked while threads of this package log can write where they do."""

from __future__ import annotations

import fcntl
import gc
import logging
import os
import signal
import struct
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_moe_ckpt.process import _threads

DEADLINE = 60.0
"""Seconds; what hangs takes for ever."""


class Lock:
    """A handler's lock, which knows when somebody waits for it with a limit, as only a fork does."""

    def __init__(self, lock: Any) -> None:
        self._lock, self.wanted = lock, threading.Event()

    def acquire(self, *, timeout: float = -1) -> bool:
        if timeout >= 0:
            self.wanted.set()
        return bool(self._lock.acquire(timeout=timeout))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


class Pipe:
    """Standard error of a job whose reader is slow: a thread of ours is in the middle of a message when it is full."""

    def __init__(self) -> None:
        self.read_end, write_end = os.pipe()
        self.stream = os.fdopen(write_end, "w", buffering=1, encoding="utf-8")
        self.handler = logging.StreamHandler(self.stream)
        self.lock = Lock(self.handler.lock)
        self.handler.lock = self.lock  # type: ignore[assignment]
        self.text = b""
        message = "x" * 2**20
        self._logger = logging.getLogger("lightning_moe_ckpt")
        self._logger.addHandler(self.handler)
        self._chatter = threading.Thread(target=self._logger.error, args=(message,), name="moe-ckpt-chatter")
        self._chatter.start()
        deadline = time.monotonic() + DEADLINE
        while self._filled() < fcntl.fcntl(write_end, fcntl.F_GETPIPE_SZ):
            assert time.monotonic() < deadline

    def _filled(self) -> int:
        return int(struct.unpack("i", fcntl.ioctl(self.read_end, termios.FIONREAD, b"\0" * 4))[0])

    def drain(self) -> None:
        """Read to the end."""
        while chunk := os.read(self.read_end, 2**16):
            self.text += chunk

    def close(self) -> None:
        self._chatter.join(DEADLINE)
        self._logger.removeHandler(self.handler)
        self.stream.close()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    _threads.guard_forks()
    pipe = Pipe()
    yield pipe
    os.close(pipe.read_end)


def _forked(pipe: Pipe) -> int:
    """A child that says something and ends."""
    child = os.fork()
    if child == 0:
        try:
            pipe.stream.write("said by the child\n")
        finally:
            os._exit(0)
    return child


def _ended(child: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if os.waitpid(child, os.WNOHANG)[0]:
            return True
        time.sleep(0.005)
    return False


def test_a_fork_waits_for_the_message_under_way(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the child's own is written behind it, and the parent goes on logging."""
    monkeypatch.setattr(_threads, "PATIENCE_SECONDS", DEADLINE)

    def reader() -> None:
        assert pipe.lock.wanted.wait(DEADLINE)
        pipe.drain()

    reading = threading.Thread(target=reader)
    reading.start()
    child = _forked(pipe)
    assert _ended(child, DEADLINE)
    logging.getLogger("lightning_moe_ckpt").error("said by the parent")
    pipe.close()
    reading.join(DEADLINE)
    assert pipe.text.endswith(b"x\nsaid by the child\nsaid by the parent\n")


def test_without_waiting_the_child_hangs(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ablation."""
    monkeypatch.setattr(_threads, "_handlers", list)
    child = _forked(pipe)
    reading = threading.Thread(target=pipe.drain)
    reading.start()
    try:
        assert not _ended(child, 0.5)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    pipe.close()
    reading.join(DEADLINE)
    assert pipe.text.endswith(b"x\n"), "the parent's message is whole"


def test_a_handler_that_is_not_free_in_time_does_not_stop_a_fork(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is it released by a fork that does not hold it."""
    monkeypatch.setattr(_threads, "PATIENCE_SECONDS", 0.0)
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert _ended(child, DEADLINE)
    reading = threading.Thread(target=pipe.drain)
    reading.start()
    pipe.close()
    reading.join(DEADLINE)
    assert pipe.text == b"x" * 2**20 + b"\n"


def test_a_fork_leaves_garbage_of_its_parent_alone(tmp_path: Path) -> None:
    """A process group that is left in a cycle waits for its threads when it is collected; a child does not have them."""
    _threads.guard_forks()
    store = dist.FileStore(str(tmp_path / "store"), 1)  # type: ignore[attr-defined]  # exported at run time only
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    cycle: list[Any] = [dist.group.WORLD]
    cycle.append(cycle)
    dist.destroy_process_group()
    del cycle
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    gc.collect()
