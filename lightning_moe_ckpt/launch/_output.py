"""Bring what ranks write to the console, each line with the rank before it.

A rank writes into pipes; one thread reads all of them, and writes whole lines. A line ends with a newline or, as
progress bars have it, with a carriage return.
"""

from __future__ import annotations

import os
import re
import selectors
import sys
import threading
import time
from contextlib import suppress
from typing import BinaryIO

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from typing_extensions import override

_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r)")
_MOST_NBYTES = 65536
_DRAIN_SECONDS = 1.0
"""Limit for what is still in the pipes at the end: processes that outlive their rank may hold them open."""


class _Stream:
    """One pipe of one rank."""

    def __init__(self, label: Label, console: BinaryIO) -> None:
        self.reader, self.writer = os.pipe()
        self._label, self._console, self._pending = label, console, b""

    @property
    def path(self) -> str:
        """Name under which torch's agent opens the pipe for a rank."""
        return f"/dev/fd/{self.writer}"

    def pump(self) -> bool:
        """Bring on what is there, and return whether more can come."""
        received = os.read(self.reader, _MOST_NBYTES)
        self._pending += received or (b"\n" if self._pending else b"")
        whole = _LINE.findall(self._pending)
        self._pending = self._pending[sum(map(len, whole)) :]
        if whole:
            self._console.write(b"".join(self._label.prefix + line for line in whole))
            self._console.flush()
        return bool(received)


class Label:
    """What stands before the lines of one process; a spare's changes when it gets a place."""

    def __init__(self, text: str) -> None:
        self.set(text)

    def set(self, text: str) -> None:
        """Say who writes from now on."""
        self.prefix = f"[{text}] ".encode()


class RankOutput(LogsSpecs):
    """Pipes from all processes of this node to the console."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = os.pipe()
        self._selector.register(self._wake_reader, selectors.EVENT_READ, None)
        self._given: list[int] = []
        """Ends of pipes for writing whose processes are not started yet."""
        self._closing = False
        self._thread = threading.Thread(target=self._pump, name="moe-ckpt-output", daemon=True)
        self._thread.start()

    def pipes(self, label: Label) -> tuple[str, str]:
        """Return paths for standard output and error of a process about to be started."""
        paths = []
        for console in (sys.stdout.buffer, sys.stderr.buffer):
            stream = _Stream(label, console)
            self._given.append(stream.writer)
            self._selector.register(stream.reader, selectors.EVENT_READ, stream)
            paths.append(stream.path)
        os.write(self._wake_writer, b"!")
        return paths[0], paths[1]

    def started(self) -> None:
        """Leave the pipes to the processes that were started: an end of one is then the end of its lines."""
        for descriptor in self._given:
            os.close(descriptor)
        self._given = []

    def close(self) -> None:
        """Write what is left, and end."""
        self.started()
        self._closing = True
        os.write(self._wake_writer, b"!")
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            os.close(key.fd)
        self._selector.close()
        os.close(self._wake_writer)

    @override
    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return pipes by local rank, as torch's agent asks for files."""
        pairs = {local_rank: self.pipes(Label(env["RANK"])) for local_rank, env in envs.items()}
        for env in envs.values():
            env["TORCHELASTIC_ERROR_FILE"] = ""
        return LogsDest(
            stdouts={local_rank: pair[0] for local_rank, pair in pairs.items()},
            stderrs={local_rank: pair[1] for local_rank, pair in pairs.items()},
            error_files=dict.fromkeys(envs, os.devnull),
        )

    @property
    @override
    def root_log_dir(self) -> str:
        return os.devnull

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
