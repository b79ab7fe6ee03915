"""Faults of processes: one that stands still for a while, and nodes that are lost with their memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_moe_ckpt.testing import _fault_process
from lightning_moe_ckpt.testing._fault_record import FaultRecord, Line, read_ranks

_NODE_PATIENCE = 30.0
"""Seconds that nodes which are lost together wait for each other."""


_one_stop = threading.Lock()


def stop(seconds: float | None) -> None:
    """SIGSTOP this process; returns when it goes on.

    Stops in several threads come one after the other, each for as long as it should.

    Args:
        seconds: after which a helper process sends SIGCONT; `None` leaves that to others.
    """
    own = os.getpid()
    with _one_stop:
        if seconds is None:
            os.kill(own, signal.SIGSTOP)
        else:
            _start("stop", str(own), str(seconds)).wait()


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A process of the job, as it described itself when it joined."""

    rank: int
    pid: int
    began: int
    """Start time, see `_fault_process.start_time`."""
    node: str
    rack: str
    files: tuple[str, ...]
    """Patterns of the files in shared memory that are lost with its node."""

    @classmethod
    def of(cls, line: Line) -> Member:
        """From the `join` line of a record."""
        names = ("rank", "pid", "began", "node", "rack")
        return cls(**{name: line[name] for name in names}, files=tuple(line["files"]))


def members(record: FaultRecord) -> list[Member]:
    """Who joined last under each rank, by rank."""
    found = []
    for _, lines in read_ranks(record.folder):
        joins = [line for line in lines if line["event"] == "join"]
        found += [Member.of(line) for line in joins[-1:]]
    return found


def leader_of(lost: Sequence[Member], node: str) -> int:
    """The rank that ends its node."""
    return min(member.rank for member in lost if member.node == node)


def lose_node(record: FaultRecord, name: str, lost: Sequence[Member], node: str) -> None:
    """End all processes of `node`, this one among them, and remove its files. Does not return.

    Args:
        record: of this rank; what was removed is appended to it.
        name: of the fault.
        lost: the processes of all nodes that are lost with this one.
        node: of this process.

    Raises:
        RuntimeError: the helper process has failed.
    """
    here = [member for member in lost if member.node == node]
    nodes = sorted({member.node for member in lost})
    ready = {each: record.folder / f"{_file_name(name)}.node{leader_of(lost, each):05d}.lost" for each in nodes}
    order = {
        "processes": [[member.pid, member.began] for member in here],
        "files": sorted({pattern for member in here for pattern in member.files}),
        "ready": str(ready[node]),
        "others": [str(path) for other, path in ready.items() if other != node],
        "record": str(record.path),
        "patience": _NODE_PATIENCE,
    }
    helper = _start("lose", json.dumps(order))
    raise RuntimeError(f"the helper that should have ended node {node!r} ended with {helper.wait()}")


def _file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name)


def _start(*command: str) -> subprocess.Popen[bytes]:
    script = Path(_fault_process.__file__)
    return subprocess.Popen([sys.executable, "-I", "-S", str(script), *command], start_new_session=True)  # noqa: S603
