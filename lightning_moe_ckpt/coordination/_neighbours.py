"""Know which process every rank is, so that a rank whose collective has failed can say which of the others is gone.

The error of a collective names an address, if anything. Whether a process of the same node lives, `/proc` says: one that was
killed is gone, or a zombie until its launcher looks. Of ranks on other nodes nothing is known.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from lightning_moe_ckpt.coordination._exchange import Exchange

_PROC = Path("/proc")
_PAUSE_SECONDS = 0.02
_STATE, _STARTED = 0, 19
"""Places in `/proc/<pid>/stat` behind the name of the program."""


@dataclass(frozen=True, slots=True)
class _Process:
    node: str
    """Boot and namespace in which the number means something."""
    pid: int
    started: str
    """Tells it from a later process of the same number."""

    @classmethod
    def own(cls) -> _Process:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        namespace = (_PROC / "self/ns/pid").readlink()
        return cls(f"{boot} {namespace}", os.getpid(), _stat(os.getpid())[_STARTED])

    @property
    def is_gone(self) -> bool:
        try:
            fields = _stat(self.pid)
        except (OSError, IndexError):
            return True
        return fields[_STATE] in "ZX" or fields[_STARTED] != self.started


def _stat(pid: int) -> list[str]:
    return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()


class Neighbours:
    """The processes of all ranks, as of now. Collective.

    Args:
        exchange: between all ranks.
    """

    def __init__(self, exchange: Exchange) -> None:
        own: list[str] = []
        if exchange.world_size > 1 and _PROC.is_dir():
            try:
                mine = _Process.own()
                own = [mine.node, str(mine.pid), mine.started]
            except OSError:  # a hardened /proc: this rank is one of which nothing is known
                own = []
        self._rank, self._own_node = exchange.rank, own[0] if own else ""
        said = exchange.gather_values(own)
        self._processes = {
            rank: _Process(each[0], int(each[1]), each[2])
            for rank, each in enumerate(said)
            if isinstance(each, list) and len(each) == 3 and each[0] == self._own_node
        }

    def gone(self, timeout: float) -> list[int]:
        """Return the ranks of this node whose process has ended, as soon as there are some, or none after `timeout` seconds."""
        end = time.monotonic() + timeout
        while True:
            gone = [rank for rank, process in self._processes.items() if process.is_gone]
            if gone or time.monotonic() > end:
                return gone
            time.sleep(_PAUSE_SECONDS)

    @property
    def speaks(self) -> bool:
        """Whether this rank is the first of those on its node that live."""
        return self._rank == min(
            (r for r, process in self._processes.items() if not process.is_gone), default=self._rank
        )
