"""Ranks that agree on what to resume from: the product's code for thousands of ranks, in one process over a simulated network.

`SimulatedRank` is the product's `Exchange`, of which only sending and receiving is replaced. When all ranks have come to an exchange,
`Network` takes its steps for each of them, message by message, on clocks of their own. A message takes its sender `ALPHA`
seconds and `BETA` seconds per byte, and the CPU time of every step here is added.

Ranks that are equal are computed once: of the nodes some run the product's code from end to end (`World.computed`), among them one that
has lost its memory and its neighbours. For every other rank a rank of these says what it says to all, and sends what it sends, to
ranks as far away; so the exchanges of all ranks are carried out, and what the computed ranks receive is what they would.
"""

from __future__ import annotations

import gc
import threading
import time
import tracemalloc
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import torch

from benchmarks.ranks import RanksFigure
from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.moe import MoELayer
from lightning_moe_ckpt.operators import StateSchema, discover
from lightning_moe_ckpt.parallel import ROUTE, ParallelGroups, packed, routing, set_current_groups
from lightning_moe_ckpt.parallel._groups import tree, unpacked
from lightning_moe_ckpt.recovery import Version, _opener
from lightning_moe_ckpt.recovery._attempt import RestoreAttempt
from lightning_moe_ckpt.recovery._inventory import Inventory
from lightning_moe_ckpt.recovery._opener import Search
from lightning_moe_ckpt.snapshot import StateView, dense_layout
from lightning_moe_ckpt.storage import Commit, GenerationId, RankMarker, SegmentEntry, digest_of, segment_key
from lightning_moe_ckpt.tiers import FailureDomain, Holding, place_replicas
from lightning_moe_ckpt.tiers._holders import survival_summary
from lightning_moe_ckpt.tiers._mirrors import mirroring_of

ALPHA, BETA = 2e-4, 8e-10
"""Seconds of a message through Python and gloo, two processes here take 0.14 ms; and of a byte at 10 Gbit/s."""
PER_NODE, LOST_NODE = 8, 1
EXPERTS, LAYERS = 480, 60
"""Experts on a rank, and their layers."""
REQUEST_SECONDS = 11e-6
"""CPU time of a request in torch's store here, which serves one after another."""
Exchanging = Callable[[int, int, bytes], Any]
Steps = Generator[tuple[int, bytes | None], bytes, Any]


class Network:
    """Takes exchanges of all ranks, on simulated clocks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.clocks = [0.0] * size
        self.messages, self.nbytes = [0] * size, [0] * size
        """Sent, by rank."""
        self.peers: list[set[int]] = [set() for _ in range(size)]
        self.held, self.most_held = 0, 0
        """Bytes of Python's memory that rank 0 has taken and not given back, and the most of them; while memory is traced."""

    @contextmanager
    def traced(self, rank: int) -> Iterator[None]:
        """Count what the body allocates, if it is of rank 0."""
        if rank or not tracemalloc.is_tracing():
            yield
            return
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        try:
            yield
        finally:
            after, peak = tracemalloc.get_traced_memory()
            self.most_held = max(self.most_held, self.held + peak - before)
            self.held += after - before

    def take(self, steps: Sequence[Steps]) -> list[Any]:
        """Take an exchange's steps on all ranks; return the results."""
        results: list[Any] = [None] * self.size
        sent: dict[tuple[int, int], tuple[float, bytes]] = {}
        waiting = dict[int, int]()
        ready: list[tuple[int, Any]] = [(rank, None) for rank in range(self.size)]
        while ready:
            rank, message = ready.pop()
            try:
                while True:
                    peer, payload = self._step(rank, steps[rank], message)
                    if payload is None and (peer, rank) not in sent:
                        waiting[rank] = peer
                        break
                    message = None if payload is not None else self.arrive(rank, *sent.pop((peer, rank)))
                    if payload is None:
                        continue
                    self.sends(rank, peer, len(payload))
                    if waiting.get(peer) == rank:
                        del waiting[peer]
                        ready.append((peer, self.arrive(peer, self.clocks[rank], payload)))
                    else:
                        assert (rank, peer) not in sent
                        sent[rank, peer] = self.clocks[rank], payload
            except StopIteration as end:
                results[rank] = end.value
        assert not waiting
        assert not sent
        return results

    def sends(self, rank: int, peer: int, nbytes: int) -> None:
        """Count a message."""
        self.peers[rank].add(peer)
        self.peers[peer].add(rank)
        self.messages[rank] += 1
        self.nbytes[rank] += nbytes
        self.clocks[rank] += ALPHA + BETA * nbytes

    def _step(self, rank: int, steps: Steps, message: Any) -> tuple[int, bytes | None]:
        began = time.thread_time()
        try:
            with self.traced(rank):
                return steps.send(message)
        finally:
            self.clocks[rank] += time.thread_time() - began

    def arrive(self, rank: int, clock: float, payload: bytes) -> bytes:
        self.clocks[rank] = max(self.clocks[rank], clock)
        return payload


class SimulatedRank(Exchange):
    """One rank, on a thread that runs between exchanges, while no other does."""

    def __init__(self, rank: int, world: World) -> None:
        self._world, self._rank, self._place, self._ranks = world, rank, rank, range(world.size)  # type: ignore[assignment]
        self._group, self._is_sparse = cast("Any", self), True
        self.asked: tuple[Exchanging, bytes] | None = None
        self.answer: Any = None
        self.result: Any = None
        self.ended = False
        self._may_run, self._stopped, self._began = threading.Semaphore(0), threading.Semaphore(0), 0.0

    def _take(self, exchange: Callable[[int, int, bytes], Any], said: bytes) -> Any:
        self.asked = exchange, said
        self._pause()
        return self.answer

    def transfer(
        self, sends: Sequence[tuple[int, memoryview]], receives: Sequence[tuple[int, memoryview]]
    ) -> Callable[[], None]:
        network, mail = self._world.network, self._world.mail
        for to, view in sends:
            network.sends(self._rank, to, view.nbytes)
            mail[self._rank, to].append((network.clocks[self._rank], bytes(view)))

        def wait() -> None:
            for source, view in receives:
                while not mail[source, self._rank]:
                    self._pause()
                view[:] = network.arrive(self._rank, *mail[source, self._rank].popleft())

        return wait

    def start(self, life: Callable[[SimulatedRank], object]) -> None:
        """Begin the thread, which waits for `run`."""

        def work() -> None:
            self._may_run.acquire()
            self._began = time.thread_time()
            try:
                self.result = life(self)
            except BaseException as error:  # noqa: BLE001  # the entry of a thread: `run` raises it
                self.result = error
            self._world.network.clocks[self._rank] += time.thread_time() - self._began
            self.ended = True
            self._stopped.release()

        threading.Thread(target=work, name=f"node {self._rank // PER_NODE}", daemon=True).start()

    def run(self) -> None:
        """Run to the next exchange, to a message that was not sent yet, or to the end."""
        with self._world.network.traced(self._rank):
            self._may_run.release()
            self._stopped.acquire()
        if isinstance(self.result, BaseException):
            raise self.result

    def _pause(self) -> None:
        self._world.network.clocks[self._rank] += time.thread_time() - self._began
        self._stopped.release()
        self._may_run.acquire()
        self._began = time.thread_time()


class World:
    """All ranks: those of five nodes are computed, and for each other rank one of the fourth node speaks."""

    def __init__(self, size: int, life: Callable[[SimulatedRank], object]) -> None:
        self.size, self.network = size, Network(size)
        self.mail: dict[tuple[int, int], deque[tuple[float, bytes]]] = defaultdict(deque)
        self.computed = {rank: SimulatedRank(rank, self) for rank in range(min(size, 5 * PER_NODE))}
        self._routed = False
        for each in self.computed.values():
            each.start(life)

    def run(self) -> list[Any]:
        """Run all ranks to their ends; return the results of those of the first four nodes."""
        with _no_collections():
            while not self.computed[0].ended:
                left = [each for rank, each in self.computed.items() if not self._speaks_for(rank)]
                while left:
                    for each in left:
                        each.run()
                    left = [each for each in left if each.asked is None and not each.ended]
                if not self.computed[0].ended:
                    self._exchange()
        return [self.computed[rank].result for rank in range(self.size if self.size <= 5 * PER_NODE else 4 * PER_NODE)]

    def _speaks_for(self, rank: int) -> int:
        """Return by how many ranks the one that speaks for a rank is below it; 0 for the rank itself."""
        # What the fifth node receives from the sixth is not made, so it is computed until it has sent to the fourth.
        own = (4 if self._routed and self.size > 5 * PER_NODE else 5) * PER_NODE
        return 0 if rank < own else rank - 3 * PER_NODE - rank % PER_NODE

    def _exchange(self) -> None:
        steps, kinds = [], set[Any]()
        for rank in range(self.size):
            shift = self._speaks_for(rank)
            asked = self.computed[rank - shift].asked
            assert asked is not None, f"rank {rank - shift} ended before others"
            exchange, said = asked
            kinds.add(exchange)
            if shift and exchange is routing:
                said = packed([_shifted(row, shift, self.size) for row in unpacked(said)])
            steps.append(exchange(rank, self.size, said))
        assert len(kinds) == 1, f"ranks meet in {kinds}"
        for rank, answer in enumerate(self.network.take(steps)):
            if rank in self.computed:
                self.computed[rank].answer, self.computed[rank].asked = answer, None
        self._routed |= kinds == {routing}


def _shifted(row: bytes, by: int, size: int) -> bytes:
    to, sender = ROUTE.unpack_from(row)
    return ROUTE.pack((to + by) % size, sender + by) + row[ROUTE.size :]


@contextmanager
def _no_collections() -> Iterator[None]:
    """Keep the garbage collector from adding seconds to a rank's clock."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# -- what ranks hold

OLD, NEW = (Version(GenerationId(step=step, incarnation=1, nonce="00000000000a"), "p" * 32) for step in (10, 20))
"""Generations in storage and memory, and in memory only."""


def marker_of(version: Version, rank: int, size: int) -> RankMarker:
    """Return a marker with one small file."""
    entry = SegmentEntry(
        key=segment_key(version.generation, rank, version.generation.step),
        step=version.generation.step,
        nbytes=64,
        digest="0" * 16,
        records=(),
    )
    return RankMarker(
        run_id="run", rank=rank, world_size=size, generation=version.generation, plan_hash=version.plan_hash,
        segments=(entry,), policy={"window": 1},
    )  # fmt: skip


class NodeMemory:
    """Memory of a rank's node: its ranks' parts, and copies of the node's before; nothing on the lost node."""

    name = "host"

    def __init__(self, rank: int, size: int) -> None:
        self.node, self._size = rank // PER_NODE, size

    def holdings(self) -> list[Holding]:
        if self.node == LOST_NODE:
            return []
        first = self.node * PER_NODE
        owners = {"ring": range(first, first + PER_NODE), "replica": range(first - PER_NODE, first)}
        return [
            Holding(
                generation=version.generation, plan_hash=version.plan_hash, owner=owner % self._size, nbytes=64,
                file=f"moe-ckpt-0123456789ab-{owner % self._size}.{kind}", seen=OLD.generation, world_size=self._size,
            )
            for kind, of in owners.items()
            for owner in of
            for version in (NEW, OLD)
        ]  # fmt: skip

    def read_marker(self, holding: Holding) -> RankMarker:
        return marker_of(Version(holding.generation, holding.plan_hash), holding.owner, self._size)


class CommittedStore:
    """What a rank asks of the run's store; reading it is measured elsewhere (`ranks_store.py`)."""

    run_id, url = "run", "s3://ranks/run"
    sources: Sequence[Commit] = ()
    unreadable: Sequence[tuple[str, str]] = ()

    def __init__(self, size: int) -> None:
        self._commit = Commit(
            run_id="run", generation=OLD.generation, plan_hash=OLD.plan_hash, world_size=size, steps=(OLD.generation.step,),
            markers=tuple(digest_of(rank.to_bytes(4, "little")) for rank in range(size)), nbytes=64 * size,
        )  # fmt: skip

    def promote(self) -> None:
        pass

    def candidates(self) -> list[Commit]:
        return [self._commit]

    def why_foreign(self, generation: GenerationId, seen: GenerationId | None) -> None:
        return None

    def why_dead(self, generation: GenerationId) -> None:
        return None

    def is_void(self, generation: GenerationId) -> bool:
        return False


class Agreement(Search):
    """The product's search, which ends where bytes would be brought: each rank has its marker, and it is of one generation."""

    marker: RankMarker | None = None

    def _first_of(self, versions: Sequence[Version], *, may_lack: bool) -> Any:
        attempt = RestoreAttempt(
            *(self._exchange, self._reader, self._inventory, versions[0], self._alive),
            digests=self._digests(self._exchange.rank),
        )
        self.marker = attempt.marker()
        return self.marker


def agree(rank: SimulatedRank) -> RankMarker | None:
    """Run one rank's part of the agreement; return its marker of the generation to resume from."""
    size = rank.world_size
    memory = NodeMemory(rank.rank, size)
    search = Agreement(cast("Any", _store(size)), rank, cast("Any", memory), cast("Any", _TRAINS))
    search.run(rank.run_on_coordinator(lambda: [[each.to_bytes() for each in _store(size).candidates()], [], []]))
    return search.marker


_store = cache(CommittedStore)
_TRAINS = SimpleNamespace(rerun=None)
"""What is asked of a job whose steps are not run again."""


def agreement(size: int) -> tuple[Network, list[RankMarker | None]]:
    """Let so many ranks agree; return the network behind it, and the markers of the ranks of the first four nodes."""
    with patch.object(
        _opener, "memory_of", lambda _: threading.current_thread().name
    ):  # a rank's thread is named by its node
        world = World(size, agree)
        return world.network, world.run()


# -- offers of experts


def choose(rank: SimulatedRank) -> dict[str, Version]:
    """Run one rank's part of choosing each expert's version; ranks hold `EXPERTS` experts, 8 ranks all of them together."""
    place, shares = rank.rank % PER_NODE, rank.world_size // PER_NODE
    experts = {f"layer.{e % LAYERS}/expert.{e}": 2**20 for e in range(place, EXPERTS * PER_NODE, PER_NODE)}
    attempt = RestoreAttempt(*(rank, cast("Any", None), Inventory({}, frozenset({OLD})), NEW, [NEW, OLD]), digests={})
    own = 2**20 // shares + (2**20 % shares if rank.rank < PER_NODE else 0)

    def offered(names: Mapping[str, int]) -> dict[str, list[tuple[Version, int]]]:
        return {name: [(OLD, own), *([(NEW, own)] if number % 2 else [])] for number, name in enumerate(names)}

    attempt._index = cast("Any", SimpleNamespace(offered=offered))  # noqa: SLF001  # what markers would give
    chosen = attempt._agree(experts)  # noqa: SLF001  # collective, and the whole comparison
    assert chosen is not None
    return chosen


# -- the start


def start_seconds(size: int) -> dict[str, float]:
    """Return seconds of what rank 0 computes at a start by itself, and of the store that ranks meet in."""
    groups = ParallelGroups.placed(0, size, ep_size=PER_NODE)
    seconds = dict[str, float]()

    @contextmanager
    def timed(what: str) -> Iterator[None]:
        began = time.process_time()
        yield
        seconds[what] = time.process_time() - began

    with timed("placement of copies"):
        domains = [FailureDomain(node=str(rank // PER_NODE), rack=str(rank // 64)) for rank in range(size)]
        placement = place_replicas(domains, groups.peers(), [2**30] * size, 1)
    with timed("mirrors, survival"):
        mirroring_of(placement, 0, groups.peers())
        survival_summary(placement)
    with timed("planning"):
        view = model_view(groups)
        dense_layout(view, groups, 2**16)
    return seconds


def model_view(groups: ParallelGroups) -> StateView:
    """Return the state of a model with few layers, since planning a layer does not depend on others."""
    set_current_groups(groups)
    try:
        module = torch.nn.Sequential(*(MoELayer(8, 8, 64) for _ in range(2)))
        schema = StateSchema.of(torch.optim.AdamW(module.parameters()))
        return StateView(module, discover(module, ep_size=groups.ep_size), schema, {})
    finally:
        set_current_groups(None)


def requests_to_store(size: int) -> int:
    """Return the requests of all ranks to the store of a start: one after another it answers them.

    A rank takes a number, asks, waits and reads the answer, joins and says so; for each of the two groups it stores its address,
    and reads that of each peer (gloo: wait, and a read that waits).
    """
    peers = sum(len(tree(rank, size)[1]) for rank in range(size)) * 2
    return 7 * size + 2 * size + 3 * (peers + 2 * size)


def figures(size: int) -> list[RanksFigure]:
    """Measure so many ranks."""
    network, markers = agreement(size)
    assert all(each is not None and each.generation == NEW.generation for each in markers)
    chosen = World(size, choose)
    results = chosen.run()
    assert len(results[0]) == EXPERTS * PER_NODE
    tracemalloc.start()
    traced = agreement(size)[0].most_held
    tracemalloc.stop()
    found = [
        ("agreement", max(network.clocks), "s", 1.0),
        ("messages of a rank", max(network.messages), "", None),
        ("bytes of a rank", max(network.nbytes), "B", None),
        ("peers of a rank", max(map(len, network.peers)), "", None),
        ("offers of experts", max(chosen.network.clocks), "s", None),
        ("memory of rank 0", traced / 2**20, "MiB", 1024.0),
    ]
    seconds = start_seconds(size) | {"rendezvous": requests_to_store(size) * REQUEST_SECONDS}
    found += [(what, each, "s", None) for what, each in seconds.items()]
    found.append(("start", sum(seconds.values()), "s", 10.0))
    return [RanksFigure(part="agree", what=w, num_ranks=size, value=v, unit=u, most=most) for w, v, u, most in found]
