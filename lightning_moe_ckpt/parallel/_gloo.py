"""Sockets of gloo: close those that listen once a process group is complete, and break connections that a collective waits for.

*Listeners.* gloo accepts connections as long as a group lives, and keeps those that never say which pair they belong to.
When the process runs out of descriptors, `accept` fails, and gloo ends the process (measured with torch 2.13: 250 silent
connections and a limit of 256). But all pairs of a group are connected when `new_group` returns, and never again. So
the sockets that began to listen meanwhile get a filter that drops every packet. A stranger's connection then takes no
descriptor, no memory and no thread; existing connections are not affected.

*Abort.* When a peer is gone that this process's collectives wait for, directly or through others, they are made to raise.
gloo has no abort: `destroy_process_group`, `_abort_process_group` and the backend's `shutdown` from another thread leave
a blocked operation alone until its time-out (measured with torch 2.13). It does notice a connection that ends. So the
connections that appear while groups are made are noted, and `abort` shuts them down; the operation then raises within
milliseconds, in the thread that waits in it. NCCL has an abort of its own.

A rank that makes a group may wait for a peer that has died before it connected, for five times the group's time-out. There
is no connection yet. So `abort` connects in the peer's place to the socket on which gloo listens, and leaves again.

An operation that has sent or received a part when its connection ends, or that begins to send in that moment, is not told
(`Pair::signalException` knows only what is pending): it waits on for the group's time-out. So threads wait for operations
in turns, and leave one that has not returned soon after `abort`. Its group is kept until it does, since to destroy a
group is to wait for its operations.

`abort` does not shut listening sockets down: gloo ends the process when one of its own fails. Control groups of many ranks
connect most pairs on first use (`MESH_RANKS`), so their sockets stay open. Of these later connections `abort` shuts down those
that peers opened; the peers' own `abort` ends the others. The first operation of a pair begins in a thread of its own (`begin`),
which is left when it is still there after `abort`: it waits for the peer. Linux only: elsewhere sockets stay open, and gloo's
time-outs remain.

Source: gloo/transport/tcp, `Pair` and `Listener`, as of torch 2.13.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import ctypes
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import ClassVar, TypeVar

import torch.distributed as dist
from typing_extensions import Self

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.launch._network import choose_interface, is_connected, limit_silence, tcp_sockets

T = TypeVar("T")

MESH_RANKS = 8
"""Most ranks in a control group with all pairs connected; larger groups connect along a tree."""

_AGAIN_SECONDS = 0.005
"""Groups that are being made open connections until the thread that makes them has raised: they are shut down again."""
_KNOCK_SECONDS = 0.1
"""Limit for a connection to a socket of this process, which succeeds at once unless its door is closed."""
_TURN = timedelta(milliseconds=100)
"""Time for which a thread waits for an operation before it looks whether the groups were aborted."""
_LEAVE_SECONDS = 0.5
"""Seconds for an operation to return after its connections are shut down, with the bytes received already."""
_FOR_EVER = timedelta(days=1)
"""Least time-out that means to wait until the operation returns."""
_POINT_TO_POINT = {12, 13, 14}
"""Types of operations whose groups are closed when waiting for them takes too long: another thread waits."""
_SILENCE_SECONDS = 120.0
"""Longest silence of another node's kernel; then operations with it raise."""


class GroupAbort:
    """Context for making process groups, of at most `world_size` ranks, and the means to break them.

    Enter it once, in the thread that makes the groups. Open the store's connection inside too: then waiting for a
    peer's address can be broken. Other sockets that this process opens meanwhile count as the groups' own.
    """

    _newest: ClassVar[GroupAbort | None] = None

    def __init__(self, world_size: int) -> None:
        self._world_size, self._lock = world_size, threading.Lock()
        self._left: list[Callable[[], bool]] = []
        self.begun = set[tuple[str, int]]()
        """Groups with peers that are connected in them."""
        self._aborted_at = float("inf")
        self._before: set[int] = set()
        self._made: set[int] = set()
        self._listened, self._knocked, self._ports = set[int](), set[int](), set[int]()
        self._making = self._aborted = False

    def __enter__(self) -> Self:
        self._before, self._listened, self._making = _connected(), set(listening()), True
        self._knocked = set(self._listened)
        GroupAbort._newest = self
        dist.Work.wait = _wait  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._lock:
            self._made, self._making = _connected() - self._before, False
            self._ports = {port for inode, (_, port) in listening().items() if inode not in self._listened}
            if self._aborted:
                _shut_down(self._made)
        if not dist.is_initialized():
            # Torch names groups by a counter that `destroy_process_group` resets, but a group that failed to be made
            # has advanced: the next one would wait for its peers under another name than theirs.
            dist.distributed_c10d._world.group_count = 0  # noqa: SLF001  # torch has no public way

    def abort(self) -> None:
        """Make operations of the groups raise, now and from now on. Called from any thread but the context's.

        Returns when the groups' connections are shut down; while groups are being made, when making them has raised.
        """
        with self._lock:
            if self._aborted:
                return
            self._aborted = True
            _shut_down(self._targets())
        while self._making:
            for inode, address in listening().items():
                if inode in self._knocked:
                    continue
                self._knocked.add(inode)
                with suppress(OSError):  # its door is closed, as the group is complete, or it is gone
                    for number in range(self._world_size):
                        with socket.create_connection(address, _KNOCK_SECONDS) as peer:
                            peer.sendall(struct.pack("q", number))
            time.sleep(_AGAIN_SECONDS)
            with self._lock:
                _shut_down(self._targets())
        self._aborted_at = time.monotonic()
        if dist.is_initialized() and dist.is_nccl_available() and dist.get_backend() == "nccl":
            dist.distributed_c10d._abort_process_group()  # noqa: SLF001  # torch has no public abort, which also ends kernels that wait

    def close(self, groups: Iterable[dist.ProcessGroup | None]) -> None:
        """Keep the groups of abandoned operations until these return, or the process ends. Call before `groups` are destroyed."""
        if self._left:
            _kept.append((self._left, list(groups)))
        _kept[:] = [each for each in _kept if not all(has_returned() for has_returned in each[0])]

    def outlast(self, turn: Callable[[], T | None], has_returned: Callable[[], bool]) -> T:
        """Wait in turns for an operation's result. Abandon and note it if it has not returned `_LEAVE_SECONDS` after the abort."""
        while (result := turn()) is None:
            if time.monotonic() - self._aborted_at > _LEAVE_SECONDS:
                self._left.append(has_returned)
                raise RuntimeError("gloo/transport: an operation was aborted, and has not returned")
        return result

    def _targets(self) -> set[int]:
        return _connected() - self._before if self._making else self._made | _connected(self._ports)


_native_wait = dist.Work.wait
_kept: list[tuple[list[Callable[[], bool]], list[dist.ProcessGroup | None]]] = []
"""Whether abandoned operations have returned, and the groups to which one of them may belong."""


def _wait(work: dist.Work, timeout: timedelta | None = None) -> bool:
    """Do what `Work.wait` does, until the groups are aborted."""
    abort = GroupAbort._newest  # noqa: SLF001  # of this module
    limited = timeout is not None and timeout < _FOR_EVER
    if abort is None or limited or not dist.is_initialized() or dist.get_backend() != "gloo":
        return _native_wait(work) if timeout is None else _native_wait(work, timeout)
    if work._get_op_type() not in _POINT_TO_POINT:  # type: ignore[attr-defined]  # noqa: SLF001  # torch has no public way
        return abort.outlast(partial(_wait_for_turn, work), work.is_completed)
    waiting = beside(partial(_native_wait, work) if timeout is None else partial(_native_wait, work, timeout))
    return abort.outlast(partial(_turn_of, waiting), work.is_completed)


def begin(operate: Callable[[], T], peer: int, group: dist.ProcessGroup | None) -> T:
    """Begin an operation with a peer. In a group of many ranks the first one connects: wait for that until the groups are aborted."""
    abort = GroupAbort._newest  # noqa: SLF001  # of this module
    if abort is None or group is None or group.size() <= MESH_RANKS or (group.group_name, peer) in abort.begun:
        return operate()
    begun = beside(operate)
    result = abort.outlast(partial(_turn_of, begun), begun.done)
    abort.begun.add((group.group_name, peer))
    return result


def _wait_for_turn(work: dist.Work) -> bool | None:
    try:
        return _native_wait(work, _TURN)
    except RuntimeError as error:
        if str(error) != "Operation timed out!":
            raise
    return None


def _turn_of(waiting: Future[T]) -> T | None:
    done, _ = concurrent.futures.wait([waiting], _TURN.total_seconds())
    return waiting.result() if done else None


def beside(act: Callable[[], T], name: str = "moe-ckpt-wait") -> Future[T]:
    """Begin to act in another thread of that name."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(act())
        except BaseException as error:  # noqa: BLE001  # the entry of a thread: who waits raises it
            result.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return result


@atexit.register
def _keep_for_ever() -> None:
    for works, groups in _kept:
        for each in (*works, *groups):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


def _connected(ports: Collection[int] | None = None) -> set[int]:
    """Return the inodes of this process's TCP sockets that are connected, or about to be, to own `ports` if given; empty if unknown."""
    alive = ((inode, each) for inode, each in tcp_sockets() if is_connected(each))
    return {inode for inode, each in alive if ports is None or each.getsockname()[1] in ports}


def _shut_down(inodes: set[int]) -> None:
    for inode, each in tcp_sockets():
        if inode in inodes:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RD)


log = rank_logger(__name__)

_SO_ATTACH_FILTER = 26
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
"""Program for the kernel's packet filter: return 0, which drops the packet."""
_LAZY = "TORCH_GLOO_LAZY_INIT"
"""Environment variable that makes gloo connect pairs on first use instead."""


@contextmanager
def closed_listeners(*, open_ports: Collection[int] = (), lazily: bool = False) -> Iterator[None]:
    """Close the listening sockets of every gloo group made in this context, on this rank, and limit its connections'
    silence.

    Groups listen at an address of this node that other nodes reach. Ports in `open_ports` stay open, such as a store's,
    which ranks join later; with `lazily`, as with `TORCH_GLOO_LAZY_INIT`, pairs connect on first use, and all stay
    open.
    """
    choose_interface()
    before, connected, given = set(listening()), _connected(), os.environ.get(_LAZY)
    lazily = lazily or (given or "0").lower() not in {"0", "", "false", "off", "no"}
    try:
        os.environ[_LAZY] = str(int(lazily))
        yield
    finally:
        os.environ.pop(_LAZY)
        os.environ.update({} if given is None else {_LAZY: given})
    limit_silence(_SILENCE_SECONDS, but=connected)
    if lazily:
        log.info("process groups of many ranks, or with %s, go on listening for connections", _LAZY)
        return
    for inode, each in tcp_sockets():
        if inode not in before and _listens(each) and each.getsockname()[1] not in open_ports:
            _drop_connections(each)


def listening() -> dict[int, tuple[str, int]]:
    """Return (host, port) of every listening TCP socket of this process, by inode; empty if unknown."""
    # Not from /proc/self/net/tcp: the kernel goes through the connections of the whole machine to write that.
    return {inode: each.getsockname()[:2] for inode, each in tcp_sockets() if _listens(each)}


def _listens(each: socket.socket) -> bool:
    return bool(each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _drop_connections(listener: socket.socket) -> None:
    program = ctypes.create_string_buffer(_DROP_ALL)
    try:
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))
    except OSError as error:
        log.info("port %d goes on listening after its process group is whole: %s", listener.getsockname()[1], error)
