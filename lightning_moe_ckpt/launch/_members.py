"""This node's processes, as their supervisor sees them: their ends, connections, beats and output.

Threads wait for events, one for each end of a process and one for each connection, and put them into one queue. The
supervisor takes from the queue and decides, alone.

Rank output is brought to the console, each line with the rank before it, and into files if these are wanted. A rank
writes into pipes; one thread reads all of them, and writes whole lines. A line ends with a newline or, as progress bars have
it, with a carriage return. Files are those of torch: `--log-dir`, `--redirects`, `--tee`.
"""

from __future__ import annotations

import os
import queue
import re
import selectors
import signal
import socket
import struct
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from typing_extensions import override

from lightning_moe_ckpt.launch._supervised import HELLO, Heartbeat, Line, address_of, encode, read_messages

_CREDENTIALS = struct.Struct("iII")
_AGAIN_SECONDS = 0.1


@dataclass(eq=False)
class Member:
    """A process: a rank, or a spare."""

    handler: Any
    """Torch's `SubprocessHandler`."""
    label: Label | None = None
    rank: int = -1
    local_rank: int = -1
    replacement: bool = False
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    connection: socket.socket | None = None
    arrived: int = -1
    """Newest incarnation at which the process has arrived; -1 before the first."""
    why: str = ""
    """Reason why the supervisor has ended the process; empty if it has not."""
    beats: int = 0
    quiet_seconds: float = 0.0
    """Seconds without a beat, as far as this supervisor has watched."""
    stopped_seconds: float = 0.0
    moves_then: int = 0
    """Beats and pauses at the time when all ranks had last come together."""

    @property
    def pid(self) -> int:
        """Id of the process and of its process group."""
        return int(self.handler.proc.pid)

    @property
    def exit_code(self) -> int | None:
        """Exit status, negative for a signal; None while the process runs."""
        code: int | None = self.handler.proc.poll()
        return code

    def send(self, message: Line) -> None:
        """Send a message, if the process is connected and reads."""
        if self.connection is not None:
            with suppress(OSError):  # it has ended, or it was stopped and does not read: that is found out otherwise
                self.connection.send(encode(message), socket.MSG_DONTWAIT)

    def place(self, environment: dict[str, str], incarnation: int, noticed: float) -> None:
        """Send the process its place, and when the newest failure was `noticed`; it has waited for this since connecting."""
        if self.connection is not None:
            with suppress(OSError):
                socket.send_fds(self.connection, [HELLO], [self.heartbeat.descriptor])
            place = {"place": environment, "incarnation": incarnation, "replacement": self.replacement}
            self.send(place | {"noticed": noticed})

    def kill(self, why: str = "") -> None:
        """End the process and its children."""
        self.why = self.why or why
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def watch(self, seconds: float) -> None:
        """Read the heartbeat, `seconds` after the last look, and add up silence."""
        now = self.heartbeat.read()
        quiet = now.watched and now.beats == self.beats
        self.quiet_seconds = self.quiet_seconds + seconds if quiet else 0.0
        self.stopped_seconds = self.stopped_seconds + seconds if _is_stopped(self.pid) else 0.0
        self.beats = now.beats

    @property
    def goes_on(self) -> bool:
        """Whether the process has moved since all ranks came together, or has no heartbeat."""
        moves = self.heartbeat.read().moves
        return moves > self.moves_then or moves <= 1  # `rejoin` is one

    def patience(self, least: float) -> float:
        """Return the seconds of silence allowed: five times the longest step, and at least `least`."""
        return max(least, 5 * self.heartbeat.read().longest)

    def is_silent(self, least: float) -> bool:
        """Return whether the process is in a step, and silent for longer than `patience(least)`."""
        return self.quiet_seconds > self.patience(least)

    def close(self) -> None:
        """Release connection and heartbeat of a process that has ended, and end its remaining children."""
        self.kill()
        if self.connection is not None:
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
            self.connection.close()
            self.connection = None
        self.heartbeat.close()


def _is_stopped(pid: int) -> bool:
    """Return whether a process has got SIGSTOP; a process under a debugger has not."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "T"
    return False


NodeEvent = tuple[str, Any, Any]
"""("exited", pid, None), ("connected", pid, socket), ("said", pid, message), ("logged", prefix, event)."""


class Switchboard:
    """A supervisor's socket, and the queue of events on its node."""

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
        """Put a child's end into the queue, without taking its status."""
        self._start(self._wait, pid)

    def take(self, timeout: float) -> NodeEvent | None:
        """Return the next event; None if there is none for `timeout` seconds."""
        with suppress(queue.Empty):
            return self.queue.get(timeout=max(0.0, timeout))
        return None

    def close(self) -> None:
        """End the threads. Call it when all children have ended, and all connections are closed."""
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
        """Put a member's messages into the queue."""
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


_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r)")
_MOST_NBYTES = 65536
_DRAIN_SECONDS = 1.0
"""Seconds for reading the pipes at the end: processes that outlive their rank may hold pipes open."""


class _Stream:
    """A pipe of one rank."""

    def __init__(self, label: Label, kind: str) -> None:
        self.reader, self.writer = os.pipe()
        self._label, self._kind, self._pending = label, kind, b""

    def pump(self) -> bool:
        """Write the lines that have come, and return whether more can come."""
        received = os.read(self.reader, _MOST_NBYTES)
        self._pending += received or (b"\n" if self._pending else b"")
        whole = _LINE.findall(self._pending)
        self._pending = self._pending[sum(map(len, whole)) :]
        for sink, prefix in self._label.sinks(self._kind) if whole else ():
            sink.write(b"".join(prefix + line for line in whole))
            sink.flush()
        return bool(received)


OpenFiles = dict[str, tuple[BinaryIO | None, bool]]
"""A rank's file, and whether its lines go to the console, by `stdout` and `stderr`."""


class Label:
    """Prefix and files for one process's lines; a spare gets others with its place."""

    def __init__(self, text: str, files: OpenFiles | None = None) -> None:
        self.set(text, files)

    def set(self, text: str, files: OpenFiles | None = None) -> None:
        """Use this prefix and these files from now on."""
        self._prefix, self._files = f"[{text}] ".encode(), files or {}

    def sinks(self, kind: str) -> Iterator[tuple[BinaryIO, bytes]]:
        """Yield (file, prefix) for lines of this kind."""
        file, shown = self._files.get(kind, (None, True))
        if file is not None:
            yield file, b""
        if shown:
            yield getattr(sys, kind).buffer, self._prefix


class RankOutput(LogsSpecs):
    """Pipes from all processes of this node to the console and to torch's choice of files."""

    def __init__(self, files: LogsSpecs) -> None:
        super().__init__()
        self._specs = files
        self._files: dict[int, OpenFiles] = {}
        """Files by local rank."""
        self._opened: list[BinaryIO] = []
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = os.pipe()
        self._selector.register(self._wake_reader, selectors.EVENT_READ, None)
        self._given: list[int] = []
        """Writing ends of pipes whose processes are not started yet."""
        self._closing = False
        self._thread = threading.Thread(target=self._pump, name="moe-ckpt-output", daemon=True)
        self._thread.start()

    def label(self, rank: int, local_rank: int) -> Label:
        """Return a rank's label."""
        return Label(str(rank), self.files_of(local_rank))

    def files_of(self, local_rank: int) -> OpenFiles:
        """Return the files for a local rank."""
        return self._files.get(local_rank, {})

    def pipes(self, label: Label) -> tuple[str, str]:
        """Return paths for standard output and error of a process about to be started."""
        paths = []
        for kind in ("stdout", "stderr"):
            stream = _Stream(label, kind)
            self._given.append(stream.writer)
            self._selector.register(stream.reader, selectors.EVENT_READ, stream)
            paths.append(f"/dev/fd/{stream.writer}")  # which torch's agent opens for the rank
        os.write(self._wake_writer, b"!")
        return paths[0], paths[1]

    def started(self) -> None:
        """Close this process's writing ends: a pipe then ends with the process that was started."""
        for descriptor in self._given:
            os.close(descriptor)
        self._given = []

    def close(self) -> None:
        """Write the remaining lines, and end the thread."""
        self.started()
        self._closing = True
        os.write(self._wake_writer, b"!")
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            os.close(key.fd)
        self._selector.close()
        os.close(self._wake_writer)
        for file in self._opened:
            file.close()

    @override
    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return pipes by local rank, as torch's agent asks for files."""
        wanted = self._specs.reify(envs)
        for local_rank in envs:
            self._files[local_rank] = {
                "stdout": self._open(wanted.stdouts[local_rank], local_rank in wanted.tee_stdouts),
                "stderr": self._open(wanted.stderrs[local_rank], local_rank in wanted.tee_stderrs),
            }
        pairs = {local_rank: self.pipes(self.label(int(env["RANK"]), local_rank)) for local_rank, env in envs.items()}
        return LogsDest(
            stdouts={local_rank: pair[0] for local_rank, pair in pairs.items()},
            stderrs={local_rank: pair[1] for local_rank, pair in pairs.items()},
            error_files=wanted.error_files,
        )

    @property
    @override
    def root_log_dir(self) -> str:
        return self._specs.root_log_dir

    def _open(self, path: str, teed: bool) -> tuple[BinaryIO | None, bool]:
        """Open the file of torch's path (empty for the console), and return it with whether the console gets the lines."""
        if not path:
            return None, True
        # Until the end: lines of ranks that have ended may still come.
        self._opened.append(Path(path).open("wb"))  # noqa: SIM115
        return self._opened[-1], teed

    # -- the thread

    def _pump(self) -> None:
        deadline = float("inf")
        while len(self._selector.get_map()) > 1 or not self._closing:
            if self._closing:
                deadline = min(deadline, time.monotonic() + _DRAIN_SECONDS)
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return
            for key, _ in self._selector.select(None if remaining == float("inf") else remaining):
                self._serve(key.fd, key.data)

    def _serve(self, descriptor: int, stream: _Stream | None) -> None:
        if stream is None:
            os.read(self._wake_reader, _MOST_NBYTES)
            return
        more = False
        with suppress(OSError):  # nobody reads the console any more
            more = stream.pump()
        if not more:
            self._selector.unregister(descriptor)
            os.close(descriptor)
