"""Processes of this node, as their supervisor sees them: ends, connections, beats.

Threads wait for what may happen, one for each end of a process and one for each connection, and put it into one queue.
Whoever takes from the queue decides, alone.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import struct
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_moe_ckpt.launch._output import Label
from lightning_moe_ckpt.launch._wire import HELLO, Heartbeat, Line, address_of, encode, read_messages

_CREDENTIALS = struct.Struct("iII")
_AGAIN_SECONDS = 0.1


@dataclass(eq=False)
class Member:
    """One process: a rank, or a spare."""

    handler: Any
    """Torch's `SubprocessHandler`."""
    label: Label | None = None
    rank: int = -1
    local_rank: int = -1
    replacement: bool = False
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    connection: socket.socket | None = None
    arrived: int = -1
    """The newest incarnation that it has come to."""
    why: str = ""
    """Reason for which the supervisor has ended it."""
    beats: int = 0
    quiet_seconds: float = 0.0
    """For how long it has not beaten, as far as this supervisor has watched."""
    stopped_seconds: float = 0.0
    moves_then: int = 0
    """Beats and pauses when all ranks had last come together."""

    @property
    def pid(self) -> int:
        """Process id; that of its process group, too."""
        return int(self.handler.proc.pid)

    @property
    def exit_code(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        code: int | None = self.handler.proc.poll()
        return code

    def send(self, message: Line) -> None:
        """Tell it something, if it listens."""
        if self.connection is not None:
            with suppress(OSError):  # it has ended, or it was stopped and does not read: that is found out otherwise
                self.connection.send(encode(message), socket.MSG_DONTWAIT)

    def place(self, environment: dict[str, str], incarnation: int) -> None:
        """Give it its place; it waits for that from the moment it connects."""
        if self.connection is not None:
            with suppress(OSError):
                socket.send_fds(self.connection, [HELLO], [self.heartbeat.descriptor])
            self.send({"place": environment, "incarnation": incarnation, "replacement": self.replacement})

    def kill(self, why: str = "") -> None:
        """End it and what it has started."""
        self.why = self.why or why
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def watch(self, seconds: float) -> None:
        """Look at its heart, `seconds` after the last look."""
        now = self.heartbeat.read()
        quiet = now.watched and now.beats == self.beats
        self.quiet_seconds = self.quiet_seconds + seconds if quiet else 0.0
        self.stopped_seconds = self.stopped_seconds + seconds if _is_stopped(self.pid) else 0.0
        self.beats = now.beats

    @property
    def goes_on(self) -> bool:
        """Whether it has moved since all ranks came together, or never tells."""
        moves = self.heartbeat.read().moves
        return moves > self.moves_then or moves <= 1  # `rejoin` is one

    def patience(self, least: float) -> float:
        """Return for how many seconds it may be silent: five times its longest step, and at least `least`."""
        return max(least, 5 * self.heartbeat.read().longest)

    def is_silent(self, least: float) -> bool:
        """Whether it has not passed a step for longer than that, and is not between two steps."""
        return self.quiet_seconds > self.patience(least)

    def close(self) -> None:
        """Give up what belongs to a process that has ended, and end what it has left behind."""
        self.kill()
        if self.connection is not None:
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
            self.connection.close()
            self.connection = None
        self.heartbeat.close()


def _is_stopped(pid: int) -> bool:
    """Whether a process has got SIGSTOP; one that a debugger holds has not."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "T"
    return False


NodeEvent = tuple[str, Any, Any]
"""("exited", pid, None), ("connected", pid, socket), ("said", pid, message), ("logged", prefix, event)."""


class Switchboard:
    """The socket of a supervisor, and the queue of what happens on its node."""

    def __init__(self) -> None:
        self.name = f"moe-ckpt-{uuid.uuid4()}"
        self.queue: queue.SimpleQueue[NodeEvent] = queue.SimpleQueue()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(address_of(self.name))
        self._socket.listen(128)
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def expect_exit(self, pid: int) -> None:
        """Put the end of a child into the queue. It remains to be waited for."""
        self._start(self._wait, pid)

    def take(self, timeout: float) -> NodeEvent | None:
        """Return what happened next; None if nothing does for `timeout` seconds."""
        with suppress(queue.Empty):
            return self.queue.get(timeout=max(0.0, timeout))
        return None

    def close(self) -> None:
        """End the threads. All children have ended, and all connections are closed."""
        self._closed.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(1.0)
        self._socket.close()

    def _start(self, target: Any, *arguments: Any) -> None:
        thread = threading.Thread(target=target, args=arguments, name="moe-ckpt-switchboard", daemon=True)
        self._threads = [each for each in self._threads if each.is_alive()]
        thread.start()
        self._threads.append(thread)

    def _wait(self, pid: int) -> None:
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # torch's agent asks for the status
        self.queue.put(("exited", pid, None))

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed; or there is no descriptor left, and who connects waits until there is one
                self._closed.wait(_AGAIN_SECONDS)
                continue
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            pid, user, _ = _CREDENTIALS.unpack(credentials)
            if user == os.getuid() and _is_child(pid):
                self.queue.put(("connected", pid, connection))
            else:
                connection.close()

    def serve(self, pid: int, connection: socket.socket) -> None:
        """Put what a member says into the queue."""
        self._start(self._read, pid, connection)

    def _read(self, pid: int, connection: socket.socket) -> None:
        for message in read_messages(connection):
            self.queue.put(("said", pid, message))


def _is_child(pid: int) -> bool:
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


class Clock:
    """Seconds between looks, without those in which this process itself stood still."""

    def __init__(self, most: float) -> None:
        self._most, self._last = most, time.monotonic()

    def tick(self) -> float:
        """Return the seconds since the last call."""
        now = time.monotonic()
        passed, self._last = now - self._last, now
        return min(passed, self._most)
