"""What a campaign of faults writes down: one file of JSON lines per rank, which outlives every process.

A line is one `write` to a file opened for appending, so that lines of several threads do not mix and those of a killed
process stay. Lines about faults are synced before the fault happens, so that none is forgotten by whatever it breaks: the
next start of the job reads here what has struck already.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from lightning_moe_ckpt.errors import ConfigurationError

FOLDER_VARIABLE = "MOE_CKPT_FAULTS"
Line = dict[str, Any]
Event = Literal["start", "join", "train", "step", "fault", "struck", "over", "removed", "end"]
"""`start`: a fit begins. `join`: who the process is, once the run is open. `train`: training begins. `step`: an optimizer
step ended. `fault`: one is about to strike. `struck`: what it came to. `over`: it has ended. `removed`: files of a lost node. `end`: the fit
ended by itself."""


def record_folder(given: str | Path | None, default_root: str | Path) -> Path:
    """Where lines go: as given, else `MOE_CKPT_FAULTS`, else `moe-ckpt-faults` in the Trainer's `default_root_dir`."""
    return Path(given or os.environ.get(FOLDER_VARIABLE) or Path(default_root) / "moe-ckpt-faults").absolute()


def record_path(folder: Path, rank: int) -> Path:
    """The file of one rank."""
    return folder / f"rank{rank:05d}.jsonl"


class FaultRecord:
    """The file of this rank, open for appending, and what is in those of all ranks."""

    def __init__(self, folder: Path, rank: int) -> None:
        """Open it.

        Args:
            folder: the same in every life; one that all nodes see, if racks are to be lost.
            rank: of this process.

        Raises:
            ConfigurationError: nothing can be written there.
        """
        self.folder, self.rank = folder, rank
        self.path = record_path(folder, rank)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._begin()
        except OSError as error:
            raise ConfigurationError(
                f"`FaultInjector(folder='{folder}')` cannot be written: {error.strerror}. Give a folder that every start "
                "of the job can write to."
            ) from error

    def _begin(self) -> None:
        """Make the file's name durable; end a line that a dying machine left torn."""
        directory = os.open(self.folder, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)
        nbytes = os.fstat(self._file).st_size
        if nbytes and os.pread(self._file, 1, nbytes - 1) != b"\n":
            os.write(self._file, b"\n")

    def write(self, event: Event, *, sync: bool = False, **values: Any) -> None:
        """Append a line; with `sync` it is on the medium when this returns."""
        line = {"event": event, "time": time.time(), "rank": self.rank, **values}
        os.write(self._file, (json.dumps(line) + "\n").encode())
        if sync:
            os.fsync(self._file)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def read_lines(path: Path) -> list[Line]:
    """The lines of one rank; one that a dying machine left torn is passed over."""
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            lines.append(json.loads(text))
    return lines


def read_ranks(folder: Path) -> Iterator[tuple[int, list[Line]]]:
    """Rank and lines of every file in `folder`, by rank."""
    for path in sorted(folder.glob("rank*.jsonl")):
        yield int(path.stem.removeprefix("rank")), read_lines(path)


def fired(folder: Path) -> set[str]:
    """Names of the faults that have struck, on any rank."""
    return {line["name"] for _, lines in read_ranks(folder) for line in lines if line["event"] == "fault"}


def uptime(lines: list[Line]) -> float:
    """Seconds that a rank has spent in training loops, over all lives."""
    total, last = 0.0, None
    for line in lines:
        if line["event"] == "start":
            last = None
        elif last is not None:
            total += line["time"] - last
            last = line["time"]
        elif line["event"] == "train":
            last = line["time"]
    return total
