"""Process groups: a fresh one for each incarnation of a job, and groups by name, looked up when they are used.

A module that kept a `ProcessGroup` could not be pickled, deep-copied or moved to another world. `MoEStrategy` builds
the groups before `configure_model`; without it (single process, plain DDP) the defaults describe one expert-parallel
rank that holds every expert.

Ranks in one expert-parallel group are consecutive, and so are those in one pipeline stage:
rank = (stage * dp_size + dp_rank) * ep_size + ep_rank. Without pipelining there is one stage, which is the world.

From torch 2.4 on all incarnations of a torchrun job share the agent's store. A restarted one then finds the addresses
of dead processes in it, and gloo fails to connect ("Connection refused", pytorch issue 135712), unless
`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` is set for torchrun. Restart counts do not help: they differ between nodes. So
rank 0 serves a fresh store, and the other ranks ask for its address through the shared one. Each question contains a
random word, so that an answer is never that of an earlier incarnation.
"""

from __future__ import annotations

import os
import struct
import time
import uuid
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # exported at run time only

from lightning_moe_ckpt.errors import CheckpointError, ConfigurationError
from lightning_moe_ckpt.parallel._gloo import MESH_RANKS, begin, closed_listeners

T = TypeVar("T")

GroupName = Literal[
    "world",
    "stage",
    "pipeline",
    "expert",
    "expert_data",
    "control",
    "stage_control",
    "pipeline_control",
    "reduce",
    "replicate",
]
"""`stage`: ranks with the same dense parameters, those in one pipeline stage. `pipeline`: one rank of each stage, which
hand activations to each other. `expert`: ranks of a stage that together hold all its experts once. `expert_data`: ranks
that hold the same experts.
`control`, `stage_control` and `pipeline_control`: all ranks, those of `stage` and those of `pipeline`, on gloo with CPU
tensors whatever the training backend; for the training thread only.
`reduce`: the stage's ranks, used by the gradient reduction alone. It runs beside the backward pass, where a rank may
reach its collectives earlier or later than the all-to-alls of expert parallelism, so the two must not share a group.
`replicate`: all ranks, on gloo, for point-to-point operations of background threads. These may wait long for each
other, so they must not share a group with collectives.
Without pipelining the groups of a stage are those of the world, and there are none of a pipeline."""


@dataclass(frozen=True, kw_only=True)
class ParallelGroups:
    """This rank's indices in the world, and its process groups."""

    rank: int = 0
    world_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    num_stages: int = 1
    """Stages of the pipeline, of equally many ranks."""
    groups: dict[GroupName, dist.ProcessGroup] = field(default_factory=dict)
    alike: list[list[int]] = field(default_factory=list)
    """Partition of the ranks by equal shards of parameters; empty if parameters are plain."""
    others: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)
    """Groups for ranks that hold the same parameter shards; see `join`."""

    @classmethod
    def placed(cls, rank: int, world_size: int, *, ep_size: int = 1, num_stages: int = 1) -> ParallelGroups:
        """Return the indices of a rank, without process groups. Raises `ConfigurationError` if `num_stages` and `ep_size` do not divide the
        world.
        """
        check_ep_size(ep_size, world_size, num_stages=num_stages)
        return cls(rank=rank, world_size=world_size, ep_rank=rank % ep_size, ep_size=ep_size, num_stages=num_stages)

    @property
    def stage(self) -> int:
        """This rank's pipeline stage."""
        return self.rank // self.stage_size

    @property
    def stage_size(self) -> int:
        """Ranks per stage; they hold the same dense parameters."""
        return self.world_size // self.num_stages

    @property
    def dp_rank(self) -> int:
        """This rank's index among those that hold the same experts."""
        return self.rank % self.stage_size // self.ep_size

    @property
    def dp_size(self) -> int:
        """Ranks that hold the same experts."""
        return self.stage_size // self.ep_size

    def ranks(self, name: GroupName) -> list[int]:
        """Return the global ranks of this rank's group `name`, ascending."""
        first = self.stage * self.stage_size
        if name == "expert":
            return list(range(first + self.dp_rank * self.ep_size, first + (self.dp_rank + 1) * self.ep_size))
        if name == "expert_data":
            return list(range(first + self.ep_rank, first + self.stage_size, self.ep_size))
        if name in ("stage", "stage_control", "reduce"):
            return list(range(first, first + self.stage_size))
        if name in ("pipeline", "pipeline_control"):
            return list(range(self.rank - first, self.world_size, self.stage_size))
        return list(range(self.world_size))

    def peers(self) -> list[list[int]]:
        """Return the ranks that hold the same experts, or shards, for every such group of the world."""
        if self.alike:
            return self.alike
        firsts = range(0, self.world_size, self.stage_size)
        ranks = range(self.ep_size)
        return [list(range(first + each, first + self.stage_size, self.ep_size)) for first in firsts for each in ranks]

    def group(self, name: GroupName) -> dist.ProcessGroup | None:
        """Return the process group, or `None` in a world of one process."""
        if self.world_size == 1:
            return None
        return self.groups[name]

    def among(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """Return the group for ranks that hold the same bytes, this one among them."""
        for name in ("stage", "expert_data"):
            if ranks == tuple(self.ranks(name)):
                return self.groups[name]
        return self.others[ranks]

    def join(self, regions: Sequence[Sequence[tuple[int, ...]]], timeout: timedelta = timedelta(minutes=30)) -> None:
        """Make groups for ranks that hold the same bytes, given each rank's own, by rank. Collective; call once."""
        equal: dict[tuple[tuple[int, ...], ...], list[int]] = {}
        for rank, own in enumerate(regions):
            equal.setdefault(tuple(own), []).append(rank)
        self.alike[:] = equal.values()
        for ranks in sorted({ranks for own in regions for ranks in own}):
            if 1 < len(ranks) < self.world_size:  # the same on all ranks
                with closed_listeners(lazily=len(ranks) > MESH_RANKS):
                    group = dist.new_group(list(ranks), timeout=timeout, backend="gloo")
                if self.rank in ranks:
                    self.others[ranks] = group


def tree(rank: int, size: int) -> tuple[int, list[int]]:
    """Return a rank's parent in a binomial tree, and its children, ascending. Below a child are the ranks before the next one."""
    span = rank & -rank or size
    return rank & (rank - 1), [rank + 2**power for power in range((span - 1).bit_length()) if rank + 2**power < size]


Steps = Generator[tuple[int, bytes | None], bytes, T]
"""Steps of an exchange on one rank: yields a peer with a message, or with `None`, and is then sent the peer's message."""

ROUTE = struct.Struct("<qq")
"""Receiver and sender of a routed value, by their places."""


def spreading(rank: int, size: int, payload: bytes) -> Steps[bytes]:
    """Return rank 0's payload on all ranks."""
    parent, children = tree(rank, size)
    if rank:
        payload = yield parent, None
    for child in children[::-1]:  # those with most ranks below first
        yield child, payload
    return payload


def uniting(rank: int, size: int, payload: bytes) -> Steps[list[bytes]]:
    """Return each payload of some rank once, in the order of ranks."""
    parent, children = tree(rank, size)
    said = {payload: None}
    for child in children:
        said |= dict.fromkeys(unpacked((yield child, None)))
    if rank:
        yield parent, packed(said)
    return unpacked((yield from spreading(rank, size, packed(said))))


def summing(rank: int, size: int, payload: bytes) -> Steps[bytes]:
    """Return the sum of all ranks' payloads, int64."""
    parent, children = tree(rank, size)
    total = np.frombuffer(payload, np.int64)
    for child in children:
        total = total + np.frombuffer((yield child, None), np.int64)
    if rank:
        yield parent, total.tobytes()
    return (yield from spreading(rank, size, total.tobytes()))


def routing(rank: int, size: int, messages: bytes) -> Steps[list[bytes]]:
    """Send packed rows, each behind its receiver and sender; return this rank's, in the order of senders."""

    def below(top: int, rows: Sequence[tuple[int, bytes]]) -> list[bytes]:
        return [row for to, row in rows if top <= to < top + (top & -top or size)]

    def addressed(message: bytes) -> list[tuple[int, bytes]]:
        return [(ROUTE.unpack_from(row)[0], row) for row in unpacked(message)]

    parent, children = tree(rank, size)
    held = addressed(messages)
    for child in children:
        held += addressed((yield child, None))
    if rank:
        here = set(below(rank, held))
        yield parent, packed([row for _, row in held if row not in here])
        held += addressed((yield parent, None))
    for child in children[::-1]:
        yield child, packed(below(child, held))
    return sorted((row for to, row in held if to == rank), key=lambda row: ROUTE.unpack_from(row)[1])


def packed(rows: Collection[bytes]) -> bytes:
    """Return rows as one message: their number and sizes, then all bytes."""
    return b"".join([np.array([len(rows), *map(len, rows)], np.int64).tobytes(), *rows])


def unpacked(message: bytes) -> list[bytes]:
    """Invert `packed`."""
    number = int.from_bytes(message[:8], "little")
    begin = 8 * (number + 1)
    ends = begin + np.cumsum(np.frombuffer(message, np.int64, number, 8))
    return [message[i:j] for i, j in pairwise([begin, *ends.tolist()])]


_current = ParallelGroups()


def current_groups() -> ParallelGroups:
    """Return the installed groups; a world of one process until a strategy sets them."""
    return _current


def set_current_groups(groups: ParallelGroups | None) -> None:
    """Install `groups` for this process; `None` restores the world of one."""
    global _current  # noqa: PLW0603  # one process has one world; modules look it up by name
    _current = groups if groups is not None else ParallelGroups()


def build_groups(
    ep_size: int = 1, timeout: timedelta = timedelta(minutes=30), *, num_stages: int = 1
) -> ParallelGroups:
    """Build every group over the default process group, and return this rank's. Collective: all ranks call it at the
    same point. They are not installed; see `set_current_groups`. `timeout` limits one collective of the new groups.

    Raises `ConfigurationError` if `num_stages` does not divide the ranks, or `ep_size`, the ranks that share one set of
    experts, does not divide a stage's.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    placed = ParallelGroups.placed(rank, world_size, ep_size=ep_size, num_stages=num_stages)
    if world_size == 1:
        return ParallelGroups()
    new = _Maker(placed, timeout)
    groups = placed.groups
    exchanging: list[GroupName] = ["control", "replicate"]
    exchanging += ["stage_control", "pipeline_control"] if num_stages > 1 else []
    large = [name for name in exchanging if len(placed.ranks(name)) > MESH_RANKS]
    with ExitStack() as closed:  # once for all groups: a look at all sockets costs as much as a group
        if dist.get_backend() == "gloo":
            closed.enter_context(closed_listeners())
        groups["world"] = _world()
        groups["expert"], groups["expert_data"] = new.part("expert"), new.part("expert_data")
        groups["stage"] = groups["world"]
        if num_stages > 1:
            groups["stage"], groups["pipeline"] = new.part("stage"), new.part("pipeline")
        groups["reduce"] = new.own("reduce")
        if dist.get_backend() != "gloo":
            closed.enter_context(closed_listeners())
        groups |= {name: new.own(name, "gloo") for name in exchanging if name not in large}
    groups |= {name: new.large(name) for name in large}
    groups.setdefault("stage_control", groups["control"])
    return placed


def check_ep_size(ep_size: int, world_size: int, *, num_stages: int = 1) -> None:
    """Raise `ConfigurationError` unless the world can form stages in which `ep_size` ranks share the experts."""
    if num_stages < 1 or world_size % num_stages:
        raise ConfigurationError(
            f"`pipeline_parallel={num_stages}` does not divide the {world_size} processes of this run. "
            "Choose a divisor of the number of processes."
        )
    if ep_size < 1 or world_size // num_stages % ep_size:
        of = "of this run" if num_stages == 1 else f"of each of the {num_stages} stages"
        raise ConfigurationError(
            f"`expert_parallel={ep_size}` does not divide the {world_size // num_stages} processes {of}. "
            "Choose a divisor of the number of processes."
        )


class _Maker:
    """Maker of this rank's groups; all ranks take part in making each group."""

    def __init__(self, placed: ParallelGroups, timeout: timedelta) -> None:
        self._placed, self._timeout = placed, timeout

    def part(self, name: GroupName) -> dist.ProcessGroup:
        """Return a group; the world's own group if all ranks are in it."""
        return _world() if len(self._placed.ranks(name)) == self._placed.world_size else self.own(name)

    def own(self, name: GroupName, backend: str | None = None) -> dist.ProcessGroup:
        """Return a group for a single purpose: nothing else uses it."""
        here, seen = self._placed, set[int]()
        if len(here.ranks(name)) == here.world_size:
            return self._new(None, backend)
        if len(here.ranks(name)) == 1:
            # A real group even of one: `None` would mean the whole world to `torch.distributed`.
            return self._new([here.rank], backend, alone=True)
        found: dist.ProcessGroup
        for rank in (each for each in range(here.world_size) if each not in seen):
            ranks = here.placed(rank, here.world_size, ep_size=here.ep_size, num_stages=here.num_stages).ranks(name)
            seen.update(ranks)
            group = self._new(ranks, backend)
            if here.rank in ranks:
                found = group
        return found

    def _new(self, ranks: list[int] | None, backend: str | None, *, alone: bool = False) -> dist.ProcessGroup:
        group: dist.ProcessGroup = dist.new_group(
            ranks, timeout=self._timeout, backend=backend, use_local_synchronization=alone
        )
        return group

    def large(self, name: GroupName) -> dist.ProcessGroup:
        """Return a gloo group of many ranks. A rank is connected to its peers in the tree, and to others on first use."""
        ranks = self._placed.ranks(name)
        with closed_listeners(lazily=True):
            group = self.own(name, "gloo")
            # at once: a rank out of reach is noticed here, and `GroupAbort` and the limit of silence know the connections
            parent, children = tree(place := ranks.index(self._placed.rank), len(ranks))
            for peer in [parent, *children][not place :] if name != "replicate" else ():
                sent = begin(partial(dist.isend, torch.zeros(1), ranks[peer], group), ranks[peer], group)
                dist.recv(torch.zeros(1), ranks[peer], group)
                assert sent is not None
                sent.wait()
        return group


def _world() -> dist.ProcessGroup:
    if (world := dist.group.WORLD) is None:
        raise RuntimeError("The default process group is not initialised. Call `init_process_group` first.")
    return world


_PREFIX = "lightning_moe_ckpt/incarnation"
_POLL_SECONDS = 0.01


def shares_agent_store() -> bool:
    """Whether torchrun offers this process a store that earlier incarnations have used."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def restart_is_likely(error: BaseException) -> bool:
    """Whether the job will probably restart at once after `error` on this rank.

    Either torchrun has restarts left, or a collective failed: then another process died, and launchers restart such jobs.
    """
    return restarts_left() or is_of_collective(error)


def restarts_left() -> bool:
    """Whether torchrun started this process and would start it again."""
    restarts, most = (os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return int(restarts) < int(most)


def is_of_collective(error: BaseException) -> bool:
    """Whether a collective failed, now or behind this error."""
    # NCCL and the store have classes of their own; gloo raises a RuntimeError with its file name in it.
    return any(
        isinstance(each, dist.DistError) or (isinstance(each, RuntimeError) and "gloo/" in str(each))
        for each in with_causes(error)
    )


def with_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def init_fresh_process_group(backend: str, *, rank: int, world_size: int, timeout: timedelta) -> None:
    """Initialise the default process group over a store that no other incarnation has used. Raises `CheckpointError` if not all
    ranks joined in `timeout`, the limit for each collective too.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    shared = PrefixStore(_PREFIX, TCPStore(host, port, is_master=False, timeout=timeout))
    store = _serve(shared, host, world_size, timeout) if rank == 0 else _ask(shared, timeout)
    with closed_listeners() if backend == "gloo" else nullcontext():
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _serve(shared: Store, host: str, world_size: int, timeout: timedelta) -> Store:
    """Start a store, and answer questions for its address until all ranks have joined. Raises `CheckpointError` after `timeout`."""
    store = TCPStore(host, 0, is_master=True, timeout=timeout, wait_for_workers=False)
    address = f"{host}:{store.port}".encode()
    give_up = time.monotonic() + timeout.total_seconds()
    known = first = shared.add("served", 0)  # questions before it were answered for earlier incarnations
    waiting: list[str] = []
    while store.add("joined", 0) < world_size - 1:
        asking = shared.add("asked", 0)
        waiting, known = [*waiting, *(f"question/{number}" for number in range(known, asking))], asking
        # a rank takes a number, then asks; it may have died between
        asked = waiting if not waiting or shared.check(waiting) else [each for each in waiting if shared.check([each])]
        if asked:
            answers = [f"answer/{word.decode()}" for word in shared.multi_get(asked)]
            shared.multi_set(answers, [address] * len(answers))  # type: ignore[attr-defined]  # at run time only
            waiting = [each for each in waiting if each not in set(asked)]
        if time.monotonic() > give_up:
            raise CheckpointError(
                f"{store.add('joined', 0)} of {world_size - 1} other ranks joined within {timeout}. "
                "See whether all processes of the job were started."
            )
        time.sleep(_POLL_SECONDS)
    shared.add("served", known - first)
    return store


def _ask(shared: Store, timeout: timedelta) -> Store:
    word = uuid.uuid4().hex
    shared.set(f"question/{shared.add('asked', 1) - 1}", word)
    shared.wait([f"answer/{word}"], timeout)
    host, _, port = shared.get(f"answer/{word}").decode().rpartition(":")
    store = TCPStore(host, int(port), is_master=False, timeout=timeout)
    store.add("joined", 1)
    return store
