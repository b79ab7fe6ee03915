"""Fork a world of ranks from the process of a test, and collect their results.

Importing torch takes seconds, forking a process that has imported it milliseconds, so the ranks are forked. Before that
the parent must not start anything with threads (a process group, a CUDA context). A rank has the environment of
torchrun, so that Lightning joins the world instead of launching one.

The store is hosted by rank 0 on a port the system chooses; no port is guessed, so worlds never collide.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Generic, NoReturn, TypeVar, cast

import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # exported at run time only

from lightning_moe_ckpt.process import compute_alone

T = TypeVar("T")

_FORK = multiprocessing.get_context("fork")
_HOST = "127.0.0.1"
_SHOW_STACKS = signal.SIGUSR1
_STDERR = 2


class WorldFailed(RuntimeError):
    """A rank raised, died or was too late; the other ranks were killed. The message has the rank's traceback."""


def exit_after(work: Callable[[], object]) -> NoReturn:
    """Do the work of a forked process, then end it: pytest must not go on in it. The status is that of an interpreter."""
    status = 1
    try:
        try:
            work()
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:  # noqa: BLE001  # the entry of a process
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # whether or not anybody reads that
        os._exit(status)


def run_world(
    world_size: int,
    work: Callable[[int], T],
    *,
    timeout: timedelta = timedelta(seconds=60),
    process_group: bool = True,
) -> list[T]:
    """Run `work(rank)` in forked processes.

    Args:
        world_size: number of ranks.
        work: any callable, including closures; its result must pickle.
        timeout: limit for the whole world; ranks that are late write their stacks to stderr.
        process_group: whether to initialise gloo first. Lightning initialises its own.

    Returns:
        Results by rank.

    Raises:
        WorldFailed: a rank raised, died or was too late.
    """
    world = _World(world_size, work, timeout, process_group, _FORK.SimpleQueue())
    ranks = [_Rank(rank, world) for rank in range(world_size)]
    patience = 0.0  # after a failure the others wait for the one that failed
    try:
        results = _collect(ranks, time.monotonic() + timeout.total_seconds())
        patience = 5.0
        return results
    finally:
        for rank in ranks:
            rank.end(patience)


@dataclass(frozen=True)
class _World(Generic[T]):
    size: int
    work: Callable[[int], T]
    timeout: timedelta
    process_group: bool
    port: SimpleQueue[int]


class _Rank(Generic[T]):
    """One forked process and the pipe for its result."""

    def __init__(self, rank: int, world: _World[T]) -> None:
        self.rank = rank
        self.pipe, child = _FORK.Pipe(duplex=False)
        self.process: ForkProcess = _FORK.Process(target=_child, args=(rank, world, child))
        self.process.start()
        child.close()  # else the end of the child would not be seen as the end of the pipe

    def receive(self) -> T:
        try:
            succeeded, result = pickle.loads(self.pipe.recv_bytes())  # noqa: S301  # from our own child
        except EOFError:
            self.process.join()
            succeeded, result = False, f"ended with exit code {self.process.exitcode} and no result; {_memory()}"
        if not succeeded:
            raise WorldFailed(f"rank {self.rank}: {result}")
        return cast("T", result)

    def end(self, patience: float) -> None:
        """Wait `patience` seconds for the process to end, then kill it."""
        self.process.join(timeout=patience)
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _collect(ranks: list[_Rank[T]], deadline: float) -> list[T]:
    results: dict[int, T] = {}
    waiting: dict[object, _Rank[T]] = {rank.pipe: rank for rank in ranks}
    while waiting:
        ready = wait([rank.pipe for rank in waiting.values()], timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise WorldFailed(_show_stacks(list(waiting.values())))
        for pipe in ready:
            rank = waiting.pop(pipe)
            results[rank.rank] = rank.receive()
    return [results[rank] for rank in range(len(ranks))]


def _memory() -> str:
    """What tells a SIGKILL of the kernel, for lack of memory, from any other: the process itself can say nothing."""
    known = dict(
        line.split()[:2] for name in ("vmstat", "meminfo") for line in Path("/proc", name).read_text().splitlines()
    )
    return f"so far the kernel has killed {known.get('oom_kill', '?')} for lack of memory, and {known['MemAvailable:']} KiB are free"


def _show_stacks(late: list[_Rank[T]]) -> str:
    for rank in late:
        if rank.process.pid is not None and rank.process.is_alive():
            os.kill(rank.process.pid, _SHOW_STACKS)
            rank.process.join(timeout=0.2)  # to let it write
    return f"ranks {sorted(rank.rank for rank in late)} did not finish in time; their stacks are on stderr"


def _child(rank: int, world: _World[T], pipe: Connection) -> None:
    compute_alone()
    # Not `dump_traceback_later`: where the parent has it armed, a fork that touches it waits for a thread it lacks.
    faulthandler.register(_SHOW_STACKS, file=_STDERR)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    try:
        store = _join_store(rank, world.size, world.port)
        if world.process_group:
            dist.init_process_group("gloo", timeout=world.timeout)
        _send(pipe, succeeded=True, result=world.work(rank))
        if dist.is_initialized():
            dist.barrier()  # rank 0 hosts the store: leave together
            dist.destroy_process_group()
        del store
    except BaseException:  # noqa: BLE001  # process entry: the parent reports it
        _send(pipe, succeeded=False, result=traceback.format_exc())
        os._exit(1)  # without the exit hooks of the parent's libraries, which may wait for peers


def _send(pipe: Connection, *, succeeded: bool, result: object) -> None:
    # Not `pipe.send`: torch would send tensors as handles to memory that ends with this process.
    pipe.send_bytes(pickle.dumps((succeeded, result)))


def _join_store(rank: int, world_size: int, port: SimpleQueue[int]) -> Store | None:
    store = None
    if rank == 0:
        store = TCPStore(_HOST, 0, world_size, is_master=True, wait_for_workers=False)
        for _ in range(world_size):
            port.put(store.port)
    environment = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GROUP_RANK": 0,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": port.get(),
        "TORCHELASTIC_RUN_ID": "forked",
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    os.environ.update({key: str(value) for key, value in environment.items()})
    return store
