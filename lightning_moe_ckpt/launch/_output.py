"""Bring what ranks write to the console, each line with the rank before it, and into files if these are wanted.

A rank writes into pipes; one thread reads all of them, and writes whole lines. A line ends with a newline or, as
progress bars have it, with a carriage return. Files are those of torch: `--log-dir`, `--redirects`, `--tee`.
"""

from __future__ import annotations

import os
import re
import selectors
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from typing_extensions import override

_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r)")
_MOST_NBYTES = 65536
_DRAIN_SECONDS = 1.0
"""Limit for what is still in the pipes at the end: processes that outlive their rank may hold them open."""


class _Stream:
    """One pipe of one rank."""

    def __init__(self, label: Label, kind: str) -> None:
        self.reader, self.writer = os.pipe()
        self._label, self._kind, self._pending = label, kind, b""

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
            self._write(whole)
        return bool(received)

    def _write(self, lines: list[bytes]) -> None:
        for sink, prefix in self._label.sinks(self._kind):
            sink.write(b"".join(prefix + line for line in lines))
            sink.flush()


OpenFiles = dict[str, tuple[BinaryIO | None, bool]]
"""By `stdout` and `stderr` the file of a rank's lines, and whether they go to the console."""


class Label:
    """What stands before the lines of one process, and where they go; those of a spare change when it gets a place."""

    def __init__(self, text: str, files: OpenFiles | None = None) -> None:
        self.set(text, files)

    def set(self, text: str, files: OpenFiles | None = None) -> None:
        """Say who writes from now on."""
        self._prefix, self._files = f"[{text}] ".encode(), files or {}

    def sinks(self, kind: str) -> Iterator[tuple[BinaryIO, bytes]]:
        """Yield files for lines of this kind, and what stands before the lines there."""
        file, shown = self._files.get(kind, (None, True))
        if file is not None:
            yield file, b""
        if shown:
            yield getattr(sys, kind).buffer, self._prefix


class RankOutput(LogsSpecs):
    """Pipes from all processes of this node to the console and to files.

    Args:
        files: says which lines go into which files.
    """

    def __init__(self, files: LogsSpecs) -> None:
        super().__init__()
        self._specs = files
        self._files: dict[int, OpenFiles] = {}
        """By local rank."""
        self._opened: list[BinaryIO] = []
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = os.pipe()
        self._selector.register(self._wake_reader, selectors.EVENT_READ, None)
        self._given: list[int] = []
        """Ends of pipes for writing whose processes are not started yet."""
        self._closing = False
        self._thread = threading.Thread(target=self._pump, name="moe-ckpt-output", daemon=True)
        self._thread.start()

    def label(self, rank: int, local_rank: int) -> Label:
        """Return the label of a rank."""
        return Label(str(rank), self.files_of(local_rank))

    def files_of(self, local_rank: int) -> OpenFiles:
        """Return where the lines of a rank of this node go."""
        return self._files.get(local_rank, {})

    def pipes(self, label: Label) -> tuple[str, str]:
        """Return paths for standard output and error of a process about to be started."""
        paths = []
        for kind in ("stdout", "stderr"):
            stream = _Stream(label, kind)
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
        """Return the file of torch's path, which is empty for the console, and whether the console gets the lines, too."""
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
