"""Jobs under `moe-ckpt run`, as tests start them, wait for them and read their consoles."""

from __future__ import annotations

import gc
import hashlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from _forks import fork_ranks
from launcher import exit_after
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported at run time only
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from lightning_moe_ckpt.launch.run_command import run

ADD_UP = Path(__file__).with_name("add_up.py")
LIMIT_SECONDS = 120.0


@dataclass
class Ended:
    """A job that has ended, as its console shows it."""

    code: int
    output: str

    def pids(self, rank: int) -> list[int]:
        """Processes that have had this rank, in their order."""
        return [int(pid) for pid in re.findall(rf"^\[{rank}\] pid (\d+) begins$", self.output, re.MULTILINE)]

    def totals(self) -> dict[int, int]:
        found = re.findall(r"^\[(\d+)\] pid \d+ total (\d+)$", self.output, re.MULTILINE)
        return {int(rank): int(total) for rank, total in found}

    def sentences(self) -> list[str]:
        return re.findall(r"^moe-ckpt: (.*)$", self.output, re.MULTILINE)


def descriptors() -> set[str]:
    """What this process has open."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the listing's own
            found.add(f"{entry.name} {entry.readlink()}")
    return found


class Job:
    """A supervisor in a process of its own, forked from here, where torch is imported already; so are its ranks.

    With `forks=False` each rank is an interpreter that imports what it needs. `program` is what ranks run; `work` is done in its
    place.
    """

    def __init__(self, folder: Path, ranks: int, steps: int, *script: str, **options: Any) -> None:
        self.folder, self.ranks, self.steps = folder, ranks, steps
        self._name = hashlib.blake2s(str(folder).encode()).hexdigest()[:15]
        folder.mkdir(exist_ok=True)
        self._console, self._forks = folder / options.pop("name", "console"), options.pop("forks", True)
        torchrun = ["--nproc-per-node", str(ranks), *options.pop("torchrun", ())]
        command = [str(options.pop("program", ADD_UP)), str(folder), str(steps), *script]
        work = options.pop("work", None) or (lambda: run(command, torchrun=torchrun, **options))
        self.pid = os.fork()
        if self.pid == 0:
            exit_after(lambda: self._run(work))

    def _run(self, work: Callable[[], int]) -> None:
        # Nodes that meet look again after a second, and begin to after up to 0.3: torch spares a store of thousands.
        vars(dynamic_rendezvous)["_delay"] = lambda **_: time.sleep(0.1)
        console = os.open(self._console, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(console, 1)
        os.dup2(console, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
        if self._forks:
            fork_ranks(self._name)
        # The first store leaves a pipe of libuv in a process.
        TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        before = descriptors()
        code = work()
        gc.collect()  # torch's rendezvous refers to itself, and so holds its store
        left = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
        sys.stdout.write(f"left: {left} {sorted(descriptors() - before)}\n")
        sys.stdout.flush()
        os._exit(code)

    @property
    def output(self) -> str:
        return self._console.read_text() if self._console.exists() else ""

    def wait_until_step(self, step: int) -> None:
        state = self.folder / "rank0"
        self.wait_until(lambda: state.exists() and int(state.read_text().split()[0]) >= step)

    def wait_until(self, reached: Callable[[], bool]) -> None:
        give_up = time.monotonic() + LIMIT_SECONDS
        while not reached():
            assert time.monotonic() < give_up, self.output
            time.sleep(0.01)

    def end(self) -> Ended:
        """Wait for its end; nothing is left of it."""
        give_up = time.monotonic() + LIMIT_SECONDS
        while not os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if time.monotonic() > give_up:
                os.kill(self.pid, signal.SIGABRT)
                os.waitpid(self.pid, 0)
                pytest.fail(f"it has not ended:\n{self.output}")
            time.sleep(0.01)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        assert self.left() == []
        if code >= 0:
            assert "left: [] []\n" in self.output, self.output
        return Ended(code, self.output)

    def left(self) -> list[int]:
        """Processes of the job, other than its supervisor."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended meanwhile
                forked = (entry / "comm").read_text().strip() == self._name
                started = str(self.folder).encode() in (entry / "cmdline").read_bytes().split(b"\0")
                if (forked or started) and self._runs(entry):
                    found.append(int(entry.name))
        return found

    def _runs(self, process: Path) -> bool:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
