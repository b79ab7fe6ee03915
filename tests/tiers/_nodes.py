"""Real processes on nodes of their own: each node is a directory of shared memory, each rank a forked process.

Ranks may be killed; what the others return comes back. A rank is told what to do through `Rank.wait_for` and tells
others by `Rank.tell`: named events, files of the test's folder, so that no test sleeps and hopes.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import shutil
import signal
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from door import DIRECTORY_VARIABLE
from torch.distributed import FileStore  # type: ignore[attr-defined]  # exported at run time only

from lightning_moe_ckpt.tiers import shared_directory

from ._networks import enter

_FORK = multiprocessing.get_context("fork")
_PATIENCE = 60.0
"""Seconds for everything a rank waits for; the whole is under a time-out of its own."""


@dataclass(frozen=True)
class Cluster:
    """Nodes of a test."""

    folder: Path
    """Of ordinary files."""
    nodes: tuple[Path, ...]
    """Shared memory of each node."""
    placed: tuple[int, ...]
    """Node of each rank."""
    networks: tuple[str, ...] = ()
    """Network namespace of each node; empty for the network of the machine."""

    def shared_memory(self, rank: int) -> Path:
        """Of the node that `rank` runs on."""
        return self.nodes[self.placed[rank]]

    def files(self, suffix: str = "") -> list[Path]:
        """What there is in shared memory, on all nodes."""
        return sorted(path for node in self.nodes for path in node.iterdir() if path.name.endswith(suffix))

    def lose(self, node: int) -> None:
        """Its processes are dead; its memory goes now."""
        for path in self.nodes[node].iterdir():
            path.unlink()


@contextmanager
def cluster(folder: Path, placed: Sequence[int]) -> Iterator[Cluster]:
    """Nodes for ranks placed on them; nothing of them is left afterwards."""
    base = shared_directory() / f"test-nodes-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    nodes = tuple(base / f"node{index}" for index in range(max(placed) + 1))
    for node in nodes:
        node.mkdir(parents=True)
    try:
        yield Cluster(folder=folder, nodes=nodes, placed=tuple(placed))
    finally:
        shutil.rmtree(base)


class Rank:
    """What one process knows and may do."""

    def __init__(self, cluster: Cluster, rank: int) -> None:
        self.cluster, self.rank, self.world_size = cluster, rank, len(cluster.placed)

    def group(self) -> dist.ProcessGroup:
        """A new gloo group over all ranks."""
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=_PATIENCE))
        return group

    def tell(self, event: str) -> None:
        """Let an event happen."""
        (self.cluster.folder / f"event-{event}").touch()

    def wait_for(self, event: str | Callable[[], bool]) -> None:
        """Until an event has happened, or a condition holds."""
        happened = (self.cluster.folder / f"event-{event}").exists if isinstance(event, str) else event
        deadline = time.monotonic() + _PATIENCE
        while not happened():
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {self.rank} waits for {event}")
            time.sleep(0.002)

    def wait_for_death(self, other: int) -> None:
        """Until another rank has been killed and its connections are closed."""
        pid = int((self.cluster.folder / f"pid-{other}").read_text())
        self.wait_for(lambda: _is_dead(pid))

    def die(self) -> None:
        """By SIGKILL, as the kernel or a power cut would end it."""
        os.kill(os.getpid(), signal.SIGKILL)


def _is_dead(pid: int) -> bool:
    try:
        # Behind the name in brackets: `Z` until the parent has asked for the exit code.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def run(cluster: Cluster, work: Callable[[Rank], Any], *, timeout: timedelta = timedelta(seconds=120)) -> list[Any]:
    """Run `work` in every rank at once.

    Returns:
        What each rank returned, by rank; the exit code of those that ended without, negative for a signal.

    Raises:
        AssertionError: a rank raised, or was too late; with its traceback.
    """
    store = cluster.folder / f"store-{uuid.uuid4().hex[:8]}"
    pipes = [_FORK.Pipe(duplex=False) for _ in cluster.placed]
    processes = [
        _FORK.Process(target=_serve, args=(cluster, rank, work, store, pipe[1]), daemon=True)
        for rank, pipe in enumerate(pipes)
    ]
    for process, (_, child) in zip(processes, pipes, strict=True):
        process.start()
        child.close()
    try:
        deadline = time.monotonic() + timeout.total_seconds()
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        late = [rank for rank, process in enumerate(processes) if process.exitcode is None]
        for rank in late:
            os.kill(processes[rank].pid or 0, signal.SIGUSR1)
        results = [
            _result(parent, process)
            for (parent, _), process in zip(pipes, processes, strict=True)
            if process.exitcode is not None
        ]
        assert not late, f"ranks {late} are not done after {timeout}; their stacks are on stderr; others: {results}"
        return results
    finally:
        for process in processes:
            process.kill()
            process.join()


def _result(pipe: Any, process: Any) -> Any:
    if not pipe.poll():
        return process.exitcode
    try:
        succeeded, result = pickle.loads(pipe.recv_bytes())  # noqa: S301  # from our own child
    except EOFError:
        return process.exitcode
    assert succeeded, result
    return result


def _serve(cluster: Cluster, rank: int, work: Callable[[Rank], Any], store: Path, pipe: Any) -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    (cluster.folder / f"pid-{rank}").write_text(str(os.getpid()))
    os.environ[DIRECTORY_VARIABLE] = str(cluster.shared_memory(rank))
    try:
        if cluster.networks:
            enter(cluster.networks[cluster.placed[rank]])
        world_size = len(cluster.placed)
        dist.init_process_group(
            "gloo",
            store=FileStore(str(store), world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=_PATIENCE),
        )
        pipe.send_bytes(pickle.dumps((True, work(Rank(cluster, rank)))))
    except BaseException:  # noqa: BLE001  # process entry: the parent reports it
        pipe.send_bytes(pickle.dumps((False, f"rank {rank}: {traceback.format_exc()}")))
        os._exit(1)
