"""Exchanges between ranks outside the training collectives: small values, living processes, and releases of libraries.

Values are a few integers or a journal-codec value, over a control group (gloo, CPU tensors), in an order that is the same
on every rank. No pickle: `torch.distributed`'s object collectives would execute what a peer sends.

Among more than `MESH_RANKS` ranks an exchange goes up and down a binomial tree: a rank has `log N` peers at most, and two on average.
Equal values travel once; a message to one rank turns at the first rank with both ends below it.

The error of a collective names an address, if anything. Whether a process of the same node lives, `/proc` says: one that was
killed is gone, or a zombie until its launcher looks. Of ranks on other nodes nothing is known.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_moe_ckpt import errors
from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.errors import CheckpointError, ConfigurationError
from lightning_moe_ckpt.journal import decode, encode
from lightning_moe_ckpt.parallel import (
    MESH_RANKS,
    ROUTE,
    ParallelGroups,
    Steps,
    begin,
    packed,
    routing,
    spreading,
    summing,
    uniting,
)

log = rank_logger(__name__)

T = TypeVar("T")
_HEAD_NBYTES = 2**11
"""Bytes of a value that travel with its size."""
_MAX_VALUE_NBYTES = 2**30
"""Most bytes of a value between ranks, such as a manifest, a memory inventory or a message."""
_TOO_LARGE = b"?"
"""Stands for a value over that; no encoded one is so short."""
_TAKING = threading.Lock()
"""Held in an exchange along the tree: messages of two would be mixed up."""

_PROC = Path("/proc")
_STATE, _STARTED = 0, 19
"""Places in `/proc/<pid>/stat` behind the program's name."""
_PAUSE_SECONDS = 0.02

VERSIONS = "versions"
"""Key in a marker's `policy`."""

_DISTRIBUTIONS = ("torch", "lightning", "lightning-moe-ckpt")
"""Libraries that decide the bits of a step: the same state and data give the same bits only in the same kernels and loops."""


@cache
def _version(name: str) -> str:
    """Return a distribution's release from its metadata, without Python's slow parser for mail."""
    found = re.search(r"(?m)^Version: (.+)$", metadata.distribution(name).read_text("METADATA") or "")
    return found[1].strip() if found else metadata.version(name)


class Exchange:
    """Collectives on control values between all ranks, this rank's stage, or its pipeline: `among`. All of them call every method;
    more than one rank need a control group.
    """

    def __init__(
        self, groups: ParallelGroups, among: Literal["control", "stage_control", "pipeline_control"] = "control"
    ) -> None:
        self._rank, self._ranks = groups.rank, groups.ranks(among)
        self._group = groups.group(among) if len(self._ranks) > 1 else None
        self._place, self._is_sparse = self._ranks.index(self._rank), len(self._ranks) > MESH_RANKS

    @property
    def rank(self) -> int:
        """Place of this rank among the ranks that take part: its number, where all ranks do."""
        return self._place

    @property
    def world_size(self) -> int:
        """Number of participating ranks."""
        return len(self._ranks)

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank decides for all; always the first."""
        return self._rank == self._ranks[0]

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """Return every rank's integers, by rank; all ranks must pass equally many."""
        if self._group is None:
            return [list(values)]
        return [tensor.tolist() for tensor in self.gather_tensor(torch.tensor(list(values), dtype=torch.int64))]

    def gather_tensor(self, own: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's CPU tensor, by rank; shapes and dtypes must agree."""
        if self._group is None:
            return [own]
        if self._is_sparse:
            return cast("list[Tensor]", self.gather_values(own))
        out = [torch.empty_like(own) for _ in self._ranks]
        dist.all_gather(out, own.contiguous(), group=self._group)
        return out

    def all_agree(self, flag: bool) -> bool:
        """Return whether every rank passes true."""
        return all(self.gather_distinct(flag))

    @contextmanager
    def raise_together(self, error: type[CheckpointError] = ConfigurationError) -> Iterator[list[Any]]:
        """If the body raises a `CheckpointError` on any rank, raise `error` on all ranks, with the reasons of all that
        failed; a reason of all ranks is said once. Other exceptions are not caught: they leave the other ranks waiting
        in the exchange. Collective.

        Yields an empty list for a plain value, on all ranks or none; behind the body, the values of all ranks.
        """
        failed, said = None, list[Any]()
        try:
            yield said
        except CheckpointError as reason:
            failed = reason
        rows = cast("list[list[Any]]", self.gather_values([None if failed is None else str(failed), *said]))
        reasons, said[:] = [row[0] for row in rows], [row[1] for row in rows if row[1:]]
        told = [f"rank {rank}: {why}" for rank, why in zip(self._ranks, reasons, strict=True) if why is not None]
        if told:
            raise error(str(failed) if len(set(reasons)) == 1 else " ".join(told)) from failed
        assert len(said) in {0, len(rows)}, "ranks take part in exchanges of different kinds"

    def broadcast(self, value: object) -> object:
        """Return the coordinator's value on every rank."""
        if self._group is None:
            return value
        payload = encode(value) if self.is_coordinator else b""
        if self._is_sparse:
            return _decoded(self._take(spreading, _limited(payload)))
        first = _headed(payload)
        dist.broadcast(first, src=self._ranks[0], group=self._group)
        head, nbytes = _opened(first)
        rest = torch.empty(nbytes - len(head), dtype=torch.uint8)
        if len(rest):
            if self.is_coordinator:
                rest = torch.frombuffer(bytearray(payload[len(head) :]), dtype=torch.uint8)
            dist.broadcast(rest, src=self._ranks[0], group=self._group)
        return decode(head + rest.numpy().tobytes())

    def gather_values(self, value: object) -> list[object]:
        """Return every rank's value, by rank; equal values may be the same object."""
        if self._group is None:
            return [value]
        payload = encode(value)
        if self._is_sparse:
            said, places = self._take(uniting, _limited(payload)), torch.zeros(self.world_size, dtype=torch.int64)
            values = list(map(_decoded, said))
            places[self._place] = said.index(payload)
            return [values[place] for place in self.sum(places).tolist()]
        found = [_opened(row) for row in self.gather_tensor(_headed(payload))]
        if (most := max(nbytes for _, nbytes in found)) > _HEAD_NBYTES:
            rows = self.gather_tensor(torch.frombuffer(bytearray(payload.ljust(most, b"\0")), dtype=torch.uint8))
            found = [(row[:nbytes].numpy().tobytes(), nbytes) for row, (_, nbytes) in zip(rows, found, strict=True)]
        return [decode(each) for each, _ in found]

    def gather_distinct(self, value: object) -> list[Any]:
        """Return all ranks' values, rank 0's first and possibly each once; the same list on all ranks."""
        if not self._is_sparse:
            return self.gather_values(value)
        return list(map(_decoded, self._take(uniting, _limited(encode(value)))))

    def sum(self, own: Tensor) -> Tensor:
        """Return the sum of every rank's integers, int64 of one shape."""
        if not self._is_sparse:
            return torch.stack(self.gather_tensor(own)).sum(0)
        total = self._take(summing, own.numpy().tobytes())
        return torch.frombuffer(bytearray(total), dtype=torch.int64).view(own.shape)

    def route(self, messages: Sequence[tuple[int, object]]) -> list[tuple[int, Any]]:
        """Send values to single ranks; return this rank's, each behind its sender, in the order of senders. Collective."""
        if not self._is_sparse:
            said = cast("list[list[list[Any]]]", self.gather_values([[to, value] for to, value in messages]))
            return [(sender, value) for sender, row in enumerate(said) for to, value in row if to == self.rank]
        brought = packed([ROUTE.pack(to, self.rank) + encode(value) for to, value in messages])
        if _limited(brought) is _TOO_LARGE:
            brought = packed([ROUTE.pack(to, self.rank) + _TOO_LARGE for to in range(self.world_size)])
        return [(ROUTE.unpack_from(row)[1], _decoded(row[ROUTE.size :])) for row in self._take(routing, brought)]

    def _take(self, exchange: Callable[[int, int, bytes], Steps[T]], said: bytes) -> T:
        """Take this rank's steps of an exchange, to which `said` is brought, and return the result."""
        return _taken(exchange(self._place, len(self._ranks), said), self._ranks, self._group)

    def transfer(
        self, sends: Sequence[tuple[int, memoryview]], receives: Sequence[tuple[int, memoryview]]
    ) -> Callable[[], None]:
        """Begin to send bytes to ranks and to receive bytes from them; not collective, see `recovery.Transport`."""
        incoming = [(torch.frombuffer(view, dtype=torch.uint8), source) for source, view in receives]
        outgoing = [(torch.frombuffer(bytearray(v) if v.readonly else v, dtype=torch.uint8), to) for to, v in sends]
        under_way = [(_begin(dist.irecv, tensor, source, self._group), tensor) for tensor, source in incoming]
        under_way += [(_begin(dist.isend, tensor, to, self._group), tensor) for tensor, to in outgoing]

        def wait() -> None:
            _wait(under_way)
            under_way.clear()  # the memory had to stay until here

        return wait

    def run_on_coordinator(self, action: Callable[[], object]) -> object:
        """Run an action on the coordinator, and return its result or raise its error on every rank. Collective."""
        value: object = None
        if self.is_coordinator:
            try:
                value = [action()]
            except CheckpointError as error:
                value = (type(error).__name__, str(error))
        value = self.broadcast(value)
        if isinstance(value, tuple):
            raise getattr(errors, value[0], CheckpointError)(value[1])
        assert isinstance(value, list)
        return value[0]


def _taken(steps: Steps[T], ranks: Sequence[int], group: dist.ProcessGroup | None) -> T:
    """Take an exchange's steps; its peers are places in `ranks`. Return the result."""
    sent, message = list[Sent](), cast("Any", None)
    if not _TAKING.acquire(blocking=False):
        raise RuntimeError("two threads exchange values with other ranks at once. Leave that to the training thread.")
    try:
        while True:
            peer, payload = steps.send(message)
            # All ranks' values may come in one message, and what packs them takes less than another.
            message = _receive(ranks[peer], group, len(ranks) + 1) if payload is None else None
            sent += [] if payload is None else _send(payload, ranks[peer], group)
    except StopIteration as end:
        _wait(sent)
        return cast("T", end.value)
    finally:
        _TAKING.release()


class _RefusedExchange(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves these untyped
    """Fail operations between ranks before they begin.

    All functions of `torch.distributed` that use a process group come here as operations of `c10d`, also asynchronous and functional ones.
    """

    asked = ""
    """Name of the first one."""

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            self.asked = self.asked or str(func)
            raise RuntimeError(f"`{func}` is refused here")
        return func(*args, **(kwargs or {}))


@contextmanager
def without_exchange(error: Callable[[str], CheckpointError]) -> Iterator[None]:
    """Raise `error` of an operation's name if the body asks other ranks for something, instead of waiting for them.

    It is raised behind the body too, in case the failure was caught in there.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    refused = _RefusedExchange()  # type: ignore[no-untyped-call]
    try:
        with refused:
            yield
    finally:
        if refused.asked:
            raise error(refused.asked)


def _headed(payload: bytes) -> Tensor:
    """Return a payload's size and first bytes in a message of one size: short values need no other."""
    message = len(payload).to_bytes(8, "little") + payload[:_HEAD_NBYTES]
    return torch.frombuffer(bytearray(message.ljust(8 + _HEAD_NBYTES, b"\0")), dtype=torch.uint8)


def _opened(message: Tensor) -> tuple[bytes, int]:
    """Return the first bytes and the whole size of a payload from `_headed`."""
    said = message.numpy().tobytes()
    nbytes = expected_nbytes(int.from_bytes(said[:8], "little"))
    return said[8 : 8 + min(nbytes, _HEAD_NBYTES)], nbytes


def expected_nbytes(nbytes: int, values: int = 1) -> int:
    """Check the size that a rank announces for values, before memory is made. Raises `CheckpointError` if out of range."""
    if not 0 <= nbytes <= _MAX_VALUE_NBYTES * values:
        raise CheckpointError(f"a rank announces a value of {nbytes} bytes. Start all ranks with one release.")
    return nbytes


def _limited(payload: bytes) -> bytes:
    """Return a rank's bytes for others, or what tells all that they are too many."""
    return payload if len(payload) <= _MAX_VALUE_NBYTES else _TOO_LARGE


def _decoded(payload: bytes) -> Any:
    if payload == _TOO_LARGE:
        raise CheckpointError(
            f"a rank has a value of more than {_MAX_VALUE_NBYTES} bytes. Start all ranks with one release."
        )
    return decode(payload)


@dataclass(frozen=True, slots=True)
class _Process:
    node: str
    """Boot and namespace of the process number."""
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
    """All ranks' processes, as of now. Collective over `exchange`."""

    def __init__(self, exchange: Exchange) -> None:
        own = [socket.gethostname()]
        if exchange.world_size > 1 and _PROC.is_dir():
            with suppress(OSError):  # a hardened /proc: this rank is one of which nothing is known
                mine = _Process.own()
                own += [mine.node, str(mine.pid), mine.started]
        self._rank, self._own_node = exchange.rank, own[1] if own[1:] else ""
        said = cast("list[list[str]]", exchange.gather_values(own))
        self.hosts = tuple(each[0] for each in said)
        """Host name of each rank."""
        here = {rank: each for rank, each in enumerate(said) if each[1:] and each[1] == self._own_node}
        self._processes = {rank: _Process(each[1], int(each[2]), each[3]) for rank, each in here.items()}

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
        """Whether this rank is the first living rank on its node."""
        return self._rank == min((r for r, each in self._processes.items() if not each.is_gone), default=self._rank)


class Segment:
    """Consecutive stages that repeat steps together, without all others, as this rank sees them.

    Everything goes through the host and gloo, whatever the training backend: nobody has to know shapes before, and a sender never
    waits for a receiver, so that two neighbours may send to each other at once.
    """

    def __init__(self, groups: ParallelGroups, stages: range) -> None:
        size, here = groups.stage_size, groups.stage
        self._rank, self._ranks = groups.rank, range(stages.start * size, stages.stop * size)
        self._group = groups.group("control")
        self.before = _Link(groups, groups.rank - size) if here - 1 in stages else None
        """Border to the stage before, if it is in the segment."""
        self.behind = _Link(groups, groups.rank + size) if here + 1 in stages else None
        """The same of the stage behind."""

    def meet(self) -> None:
        """Wait until all ranks of these stages have come here; no other is asked."""
        _taken(summing(self._ranks.index(self._rank), len(self._ranks), bytes(8)), self._ranks, self._group)


class _Link:
    """A border of this rank's stage, with the rank `peer` on the other side."""

    def __init__(self, groups: ParallelGroups, peer: int) -> None:
        self._group, self._peer = groups.group("pipeline_control"), peer
        self._under_way: list[Sent] = []

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Begin to send copies on the host."""
        self._under_way += _send(encode(list(tensors)), self._peer, self._group)

    def settle(self) -> None:
        """Wait until the other side has received every tensor; no further call of this side is needed for that."""
        _wait(self._under_way)
        self._under_way = []

    def receive(self) -> list[Tensor]:
        """Return the next tensors from the other side."""
        return cast("list[Tensor]", decode(_receive(self._peer, self._group)))


Sent = tuple["dist.Work | None", Tensor]
"""A message on its way, with its memory."""


def _send(payload: bytes, peer: int, group: dist.ProcessGroup | None) -> list[Sent]:
    """Begin to send bytes, behind their number."""
    said = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    return [(_begin(dist.isend, each, peer, group), each) for each in (torch.tensor([said.nbytes]), said)]


def _wait(sent: Sequence[Sent]) -> None:
    for work, _ in sent:
        if work is not None:
            work.wait()


def _receive(peer: int, group: dist.ProcessGroup | None, values: int = 1) -> bytes:
    """Return bytes that a peer sends, no more than so many values have."""
    nbytes = torch.zeros(1, dtype=torch.int64)
    _wait([(_begin(dist.irecv, nbytes, peer, group), nbytes)])
    payload = torch.empty(expected_nbytes(int(nbytes), values), dtype=torch.uint8)
    dist.recv(payload, peer, group)
    return payload.numpy().tobytes()


def _begin(
    operate: Callable[..., dist.Work | None], tensor: Tensor, peer: int, group: dist.ProcessGroup | None
) -> dist.Work | None:
    return begin(partial(operate, tensor, peer, group), peer, group)


def own_versions() -> dict[str, str]:
    """Return the releases of this process, by distribution."""
    return {name: _version(name) for name in _DISTRIBUTIONS}


def agreed_versions(exchange: Exchange) -> dict[str, str]:
    """Return the releases of rank 0, for all markers; a rank with others is named in a warning. Collective."""
    said = exchange.gather_values(own_versions())
    agreed = said[0]
    assert isinstance(agreed, dict)
    others = {rank: each for rank, each in enumerate(said) if each != agreed}
    if others and exchange.is_coordinator:
        rank, versions = next(iter(others.items()))
        log.warning(
            "ranks %s do not run what rank 0 runs (rank %d: %s; rank 0: %s): exact restarts are promised only where "
            "all ranks have the same versions. Install the same everywhere",
            *(sorted(others), rank, in_words(versions), in_words(agreed)),
        )
    return agreed


def warn_of_other_versions(policy: Mapping[str, object], generation: object, now: Mapping[str, str]) -> None:
    """Warn that a restart may not be exact, if a generation with this `policy` was written by other releases than `now`."""
    if (stored := policy.get(VERSIONS)) == now:
        return
    log.warning(
        "%s was written with %s, and this job runs %s: its state is restored as it was, but that the steps after it "
        "are exact, bit for bit, is promised only with the versions that wrote it. Install those to be sure",
        *(generation, in_words(stored), in_words(now)),
    )


def in_words(versions: object) -> str:
    """Return the releases as a list for people."""
    if not isinstance(versions, Mapping):
        return "versions that it does not say"
    return ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
