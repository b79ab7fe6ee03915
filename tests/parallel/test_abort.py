"""A rank that waits for a peer which will never answer can be made to raise from another thread."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launcher import run_world
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # exported at run time only

from lightning_moe_ckpt.parallel import GroupAbort

LONG = timedelta(seconds=60)
"""Time-out of the groups: a test that waits for it fails by its own."""


@pytest.fixture(autouse=True)
def _store_outside_of_the_ranks(agent_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under a launcher: a rank that hosted it would shut down the others' connections with its own."""
    monkeypatch.setenv("AGENT_PORT", str(agent_port))


def agent_store() -> Store:
    return TCPStore("127.0.0.1", int(os.environ["AGENT_PORT"]), is_master=False, timeout=LONG)


def join(rank: int, world_size: int, name: str, within: GroupAbort | None = None) -> GroupAbort:
    with within or GroupAbort(world_size) as abort:
        store = PrefixStore(name, agent_store())
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=LONG)
    return abort


def later(act: Callable[[], None]) -> threading.Thread:
    thread = threading.Timer(0.1, act)
    thread.start()
    return thread


def test_an_abort_ends_operations_that_wait_for_live_peers() -> None:
    """Rank 2 is stuck and alive; rank 1 waits for it, rank 0 for rank 1. Then they form a new group over new sockets."""

    def work(rank: int) -> float:
        signals = agent_store()
        abort = join(rank, 3, "first")
        if rank == 2:
            signals.wait(["both have raised"], LONG)
        else:
            thread = later(abort.abort)
            with pytest.raises(RuntimeError, match=r"gloo|onnection"):
                dist.recv(torch.ones(4), src=rank + 1)
            thread.join()
            if signals.add("raised", 1) == 2:
                signals.set("both have raised", "")
        dist.destroy_process_group()
        join(rank, 3, "second")
        total = torch.tensor([float(rank)])
        dist.all_reduce(total)
        dist.barrier()
        dist.destroy_process_group()
        return float(total)

    assert run_world(3, work, process_group=False) == [3.0] * 3


def test_an_abort_ends_the_making_of_groups() -> None:
    """The peer does not come: who waits for its address in the store raises, and meets it under the next store's keys."""

    def work(rank: int) -> None:
        abort = GroupAbort(2)
        thread = later(abort.abort)
        if rank == 0:
            with pytest.raises(RuntimeError):
                join(0, 2, "lonely", abort)
        thread.join()
        join(rank, 2, "both")
        dist.barrier()
        dist.destroy_process_group()

    run_world(2, work, process_group=False)


def test_an_abort_ends_waiting_for_a_peer_that_never_connects() -> None:
    """It has told its address and gone: one side listens for it, or it listens itself and nobody is behind the door."""

    def work(rank: int) -> None:
        signals = agent_store()
        for name in map(str, range(6)):  # which side listens is up to the numbers of their ports
            abort = GroupAbort(2)
            if rank == 1:
                with pytest.raises(RuntimeError, match="gone"):
                    meet(abort, Leaving(PrefixStore(f"never {name}", agent_store()), signals, name))
                continue
            thread = later(abort.abort)
            with pytest.raises(RuntimeError):
                meet(abort, PrefixStore(f"never {name}", agent_store()))
            thread.join()
            signals.set(f"raised {name}", "")
            if dist.is_initialized():
                dist.destroy_process_group()

    def meet(abort: GroupAbort, store: Store) -> None:
        rank = int(isinstance(store, Leaving))
        with abort:
            dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=LONG)
        dist.recv(torch.ones(1), src=1)  # the kernel had answered for the peer

    run_world(2, work, process_group=False)


class Leaving(Store):
    """A store whose owner leaves when it has told its address."""

    def __init__(self, store: Store, signals: Store, name: str) -> None:
        super().__init__()
        self._store, self._signals, self._name = store, signals, name

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)
        self._signals.wait([f"raised {self._name}"], LONG)
        raise RuntimeError("gone")


@pytest.mark.parametrize(
    "operate", [partial(dist.broadcast, src=0), partial(dist.send, dst=1)], ids=["collective", "point_to_point"]
)
def test_an_operation_that_is_lost_is_left(operate: partial[object]) -> None:
    """Half of a message is sent when the connection ends: gloo waits for the other half, or has just noticed, but not for
    the time-out. The group is destroyed later."""

    def work(rank: int) -> None:
        signals = agent_store()
        abort = join(rank, 2, "lost")
        message = torch.ones(2**24)
        if rank == 0:
            stopped = int(signals.get("stops"))
            thread = later(abort.abort)
            with pytest.raises(RuntimeError, match=r"has not returned|Connection closed by peer"):
                operate(message)
            thread.join()
            os.kill(stopped, signal.SIGCONT)
        else:
            receive = dist.irecv if operate.func is dist.send else partial(dist.broadcast, async_op=True)
            begun: Any = receive(message, 0)
            signals.set("stops", str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
            abort.abort()
            with pytest.raises(RuntimeError):
                begun.wait()
        abort.close([dist.group.WORLD])
        dist.destroy_process_group()

    run_world(2, work, process_group=False)


def test_groups_made_after_an_abort_are_broken_from_the_start() -> None:
    """The failure was announced first: the first operation raises instead of waiting for who is gone."""

    def work(rank: int) -> None:
        signals = agent_store()
        if rank == 0:
            broken = GroupAbort(2)
            broken.abort()
            join(rank, 2, "late", broken)
            with pytest.raises(RuntimeError):
                dist.recv(torch.ones(1), src=1)
            signals.set("raised", "")
        else:
            with suppress(RuntimeError):  # when rank 0 has broken its end before all is connected
                join(rank, 2, "late")
        signals.wait(["raised"], LONG)
        if dist.is_initialized():
            dist.destroy_process_group()

    run_world(2, work, process_group=False)


def test_other_connections_stay() -> None:
    """What was connected before the context is not touched, and a second abort does nothing."""

    def work(rank: int) -> None:
        signals = agent_store()
        abort = join(rank, 2, "groups")
        dist.barrier()
        abort.abort()
        abort.abort()
        signals.add("alive", 1)
        while signals.add("alive", 0) < 2:
            time.sleep(0.01)
        dist.destroy_process_group()

    run_world(2, work, process_group=False)


def test_the_survivors_of_a_kill_raise_at_once() -> None:
    """The connections of rank 1 end, as the kernel ends those of a killed process; rank 0 waits for rank 2, which waits for rank 1, and whose abort reaches both."""

    def work(rank: int) -> None:
        signals = agent_store()
        abort = join(rank, 3, "world")
        dist.barrier()
        if os.fork() == 0:
            os._exit(0)  # a fork that has duplicates of all sockets does no harm once it has ended
        os.wait()
        if rank == 1:
            signals.wait(["they wait"], LONG)
            dist.destroy_process_group()
            return
        thread = later(abort.abort)
        signals.set("they wait", "")
        with pytest.raises(RuntimeError):
            dist.recv(torch.ones(1), src=2 if rank == 0 else 1)
        thread.join()
        dist.destroy_process_group()

    run_world(3, work, process_group=False)


@pytest.mark.gpu
def test_nccl_is_aborted_and_made_anew(agent_port: int) -> None:
    """The same context and call; a group of one rank, since NCCL takes no two ranks on one device."""
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=abort_nccl, args=(agent_port,))
    process.start()
    process.join(120)
    assert process.exitcode == 0


def abort_nccl(port: int) -> None:
    os.environ["AGENT_PORT"] = str(port)
    for name in ("first", "second"):
        with GroupAbort(1) as abort:
            store = PrefixStore(name, agent_store())
            dist.init_process_group("nccl", store=store, rank=0, world_size=1, timeout=LONG)
        total = torch.ones(1, device="cuda")
        dist.all_reduce(total)
        assert float(total) == 1.0
        abort.abort()
        if dist.is_initialized():
            dist.destroy_process_group()
