"""Copy this rank's generations to memory of other nodes, at the pace of the steps.

The peer tier takes a generation when it is idle on all ranks: the generation that begins, whose segments then travel as
they are sealed, or the newest complete one that passed it by. Each generation gets as many steps as lie between two
generations. Training waits for a transfer only if the next generation has no slots without those still being read.

Copies alone bring nobody back: when a node dies, the surviving ranks need the same generation in their own memory. So a
generation complete on all ranks in this tier keeps its slots in the ring until a newer generation is, however far the
host tier has got. (TierCheck, arXiv 2605.17821, Sec. 3.4, Fig. 5, across two tiers.)

Where generations are differences (`Chains`), every generation is taken, and waits behind its base, which is spread over
a few steps. Surviving ranks have the state before a base until the base is complete here (`session/_tiers.py`).

Where generations may be delta-encoded (`DeltaChain`), the next generation is taken while the previous one is still
under way: the next must be of the very next boundary. All ranks then know only one window later that a generation is
complete everywhere.

The worker's thread sends, one thread per owner receives, and the training thread only counts steps. Both sides end with
the owner's last message. If that message does not come in time, because the owner is stuck or training ended here only,
this side closes its connections, so that no thread wakes up while the interpreter ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt._units import size_text
from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.parallel import ParallelGroups
from lightning_moe_ckpt.policies import Audience, Chains, Deltas
from lightning_moe_ckpt.storage import GenerationId, RankMarker, SegmentEntry, SlotClass
from lightning_moe_ckpt.tiers._delta import DeltaChain, DeltaFigures
from lightning_moe_ckpt.tiers._delta_plan import Run
from lightning_moe_ckpt.tiers._holders import (
    FailureDomain,
    expect_domains,
    place_replicas,
    survival_summary,
    this_domain,
)
from lightning_moe_ckpt.tiers._mirrors import (
    Mirroring,
    MirrorUse,
    RedundancyFigures,
    mirroring_of,
    mirrors_pay,
    nbytes_of,
)
from lightning_moe_ckpt.tiers._peer_receiver import COPIES
from lightning_moe_ckpt.tiers._peer_stream import NotReplicated, Replication
from lightning_moe_ckpt.tiers._rank_memory import MemoryClaim
from lightning_moe_ckpt.tiers._readers import PEER, SessionConfig
from lightning_moe_ckpt.tiers._ring import SegmentRing
from lightning_moe_ckpt.tiers._sealed import Markers, SealedSegment
from lightning_moe_ckpt.tiers._shm import expect_room, has_room, shared_directory
from lightning_moe_ckpt.tiers._tier_worker import Released, TierWorker, WriteJob, WriteRequest

log = rank_logger(__name__)

_RING_GENERATIONS = 2
"""Generations of a ring besides the kept ones, roughly: one captured, one read. Also differences that holders keep beyond
the ring's, since the owner tells them later which may go."""
_BASE_STEPS = 8
"""Steps over which a base is spread at most."""
_GOODBYE = timedelta(seconds=5)
"""Longest wait at the end for the last messages of owners of copies kept here: they come at once or not at all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerRoom:
    """Memory that holders of copies reserve for one rank."""

    slot_nbytes: int
    """Bytes of the rank's largest segment."""
    keep: int
    """Generations kept; the same for all ranks."""


class PeerPlan(Protocol):
    """Facts of the plan about copies on other nodes."""

    @property
    def chains(self) -> Chains | None:
        """Plan of differences between generations, if any; the same on all ranks."""

    @property
    def generations_kept(self) -> int:
        """Generations kept of every rank, as known before the first plan; the same on all ranks."""

    @property
    def peer_audiences(self) -> frozenset[Audience]:
        """Audiences of the files that copies have."""

    def peer_room(self) -> PeerRoom | None:
        """Return the memory that holders reserve for this rank, given a plan; `None` for slots as in the ring."""

    def deltas(self) -> Deltas | None:
        """Return how gradients may replace segments; `None` for never. The same on all ranks. Collective."""


class PeerWorker(TierWorker):
    """Replicate generations of one rank; the replication ends with the worker.

    Copies of the generation that this incarnation began from, `resumed`, stay until a newer generation is complete
    everywhere. `room` returns the memory that holders reserve, once there is a plan; `None` for a slot of the ring.
    `deltas` says how gradients may be sent, if the replication sends ahead; `chains` is the plan of differences between
    generations, if any.
    """

    paced = True
    mirrors_pay: bool | None = None
    """Result of `mirrors_pay`, here or in an earlier start; `None` if nobody has measured."""

    def __init__(
        self,
        replication: Replication,
        markers: Markers,
        *,
        resumed: GenerationId | None = None,
        keep: int = 1,
        room: Callable[[], PeerRoom | None] = lambda: None,
        deltas: Deltas | None = None,
        chains: Chains | None = None,
    ) -> None:
        super().__init__(PEER, markers, memories=replication.memories)
        self._room = room
        self._waited = 0.0
        self._wire = 0
        """Bytes per copy of the newest generation, sent or mirrored; sent gradients are smaller than segments."""
        self._replication, self._keep, self._num_kept = replication, resumed, keep
        self._sending: GenerationId | None = None
        self._held: dict[GenerationId, Released] = {}
        """Callbacks that give back slots, by generation whose copies are complete."""
        self._chains, self.takes_links = chains, chains is not None
        self._base: GenerationId | None = None
        """Base of the current differences; `None` before the first, and once any rank has given it up."""
        self._period_steps = 1
        self._sizes: list[int] = []
        """Bytes of each segment in a generation, with gradients behind it."""
        self._link_nbytes = 0
        self._begun: GenerationId | None = None
        self._follows = False
        """Whether the newest generation is of the boundary right after the previous generation's."""
        self._chain = DeltaChain(deltas or Deltas())
        self._nbytes_before = 0
        """Bytes sent before the generation under way."""
        self._mirror_use = MirrorUse()

    # -- called from the training thread

    @override
    def planned(self, exchange: Exchange, ring: SegmentRing, sizes: Sequence[int]) -> None:
        """Reserve memory for the copies kept here and begin to receive, with the first plan. Collective.

        Holders follow a later plan by themselves, when its first generation comes.
        """
        room = self._room()
        self._sizes = list(sizes) if room is None else [room.slot_nbytes]
        self._num_kept = self._num_kept if room is None else room.keep
        links = ring.header.small[-1] if self._chains is not None else SlotClass(0, 0)
        self._link_nbytes = links.nbytes
        if self._replication.started:
            return
        if self._keep is not None and self._keep in ring.complete:
            ring.pin(self._keep)
            self._held[self._keep] = ring.unpin
        rows = exchange.gather([links.nbytes, links.slots + _RING_GENERATIONS, *self._sizes])
        with exchange.raise_together():
            kept = [SlotClass(*row[:2]) for row in rows if row[0]]
            self._replication.allocate([row[2:] for row in rows], kept, keep=self._num_kept)
        self._replication.start()
        self._start_thread()

    @property
    @override
    def idle(self) -> bool:
        with self._changed:
            return len(self._jobs) <= self._replication.ahead

    @property
    @override
    def readers(self) -> int:
        return 1 + self._replication.ahead

    @property
    @override
    def wants_gradients(self) -> bool:
        return self._replication.ahead and self._follows and not self._chain.given_up

    @property
    @override
    def deltas(self) -> DeltaFigures | None:
        return self._chain.figures if self._replication.ahead else None

    @property
    @override
    def redundancy(self) -> RedundancyFigures | None:
        return self._mirror_use.figures

    @override
    def stepped(self, period_steps: int) -> None:
        self._period_steps = period_steps
        self._replication.pacer.step()

    @override
    def begin(self, request: WriteRequest) -> None:
        before, self._begun = self._begun, request.generation
        self._follows = before is not None and before.step + 1 == request.generation.step
        num_segments = request.num_segments
        num_steps = max(num_segments, self._period_steps)
        undecided = before if self._replication.ahead else self._base
        # A generation that some rank failed to replicate cannot be restored from copies.
        self._give_back(lambda held: held not in {self._keep, undecided})
        if (chains := self._chains) is not None:
            num_steps = 1 if request.follows else max(1, min(chains.batch, chains.every_n_steps // 2, _BASE_STEPS))
            self._base = self._base if request.follows else request.generation
        self._replication.pacer.begin(num_segments=num_segments, num_steps=num_steps, name=request.generation)
        self._replication.mirrors.begin(request.generation)
        super().begin(request)

    @override
    def add(self, generation: GenerationId, segment: SealedSegment) -> None:
        nbytes = segment.of(self.audiences).view.nbytes - nbytes_of(self._mirror_use.run(segment))
        self._replication.pacer.expect(nbytes, name=generation)
        self._replication.mirrors.add(segment)
        super().add(generation, segment)

    @override
    def abandon(self, generation: GenerationId) -> None:
        super().abandon(generation)
        self._replication.mirrors.end(generation)  # a holder waiting for a capture still to come would wait in vain
        self._replication.pacer.wake()

    @override
    def complete_everywhere(self, generation: GenerationId) -> None:
        if self._chains is not None:
            if self._base is None or generation < self._base:
                return
            generation = self._base
        self._keep = generation  # holders hear of it with the next generation, when they need the room
        self._give_back(lambda held: held < generation)

    @override
    def give_up(self, generation: GenerationId) -> None:
        self._base = None if generation == self._base else self._base
        self._give_back(lambda held: held == generation)

    @override
    def let_go(self) -> None:
        self._give_back(lambda _: True)

    @override
    def drain(self, timeout: float) -> bool:
        self._replication.pacer.hurry()  # no steps come while somebody waits
        return super().drain(timeout)

    @property
    @override
    def generations_kept(self) -> int | None:
        return self._num_kept

    @override
    def close(self) -> None:
        self._closing.set()
        self._replication.mirrors.close()
        self._replication.pacer.wake()
        super().close()  # held slots stay: this incarnation may end because another rank died, and the next needs them
        self._replication.end(_GOODBYE.total_seconds())

    def _give_back(self, which: Callable[[GenerationId], bool]) -> None:
        with self._changed:
            given = [(held, self._held.pop(held)) for held in list(self._held) if which(held)]
        for held, on_released in given:
            self._replication.mirrors.end(held)
            on_released(held)

    # -- the thread

    @override
    def _serve(self) -> None:
        super()._serve()
        self._replication.stream.say_close()

    @override
    def _put(self, job: WriteJob, segment: SealedSegment) -> list[SegmentEntry]:
        entries, stream = segment.digested(), self._replication.stream
        if self._sending is None:
            self._sending, self._nbytes_before = job.generation, stream.nbytes_sent
            self._mirror_use.begin()
            stream.begin(
                job.generation,
                keep=self._keep,
                base=self._chain.newest if self._replication.ahead else None,
                sizes=self._sizes_of(job, segment),
                is_link=bool(job.request.follows),
            )
        view_U8, run = torch.frombuffer(segment.view, dtype=torch.uint8), self._filled(segment)
        if not (self._replication.ahead and self._send_delta(job, segment, view_U8, run)):
            stream.send(segment.step, view_U8, lambda: self._wanted(job), mirrored=run)
        self._mirror_use.filled(run)
        return entries

    def _sizes_of(self, job: WriteJob, first: SealedSegment) -> list[int]:
        """Return the bytes to reserve for each segment."""
        if job.request.follows:
            return [max(self._link_nbytes, first.view.nbytes)]
        # The plan may have changed since the generation began; a single segment may have room for later plans.
        sizes = self._sizes if len(self._sizes) == job.request.num_segments == 1 else job.request.sizes or self._sizes
        return [max(sizes[0], first.view.nbytes), *sizes[1 : job.request.num_segments]]

    def _filled(self, segment: SealedSegment) -> Run | None:
        """Let holders fill a segment's run shared with this rank, and return it; `None` if all is sent."""
        if (run := self._mirror_use.run(segment)) is None:
            return None
        if (refusal := self._replication.stream.fill(segment.step, run)) is None:
            return run
        log.info("boundary %d of %s is sent whole: %s", segment.step, segment.generation, refusal)
        self._replication.pacer.more(nbytes_of(run))
        return None

    def _send_delta(self, job: WriteJob, segment: SealedSegment, view_U8: Tensor, run: Run | None) -> bool:
        """Send a segment as a delta; return `False`, with nothing sent, if that cannot be done."""
        stream, delta = self._replication.stream, self._chain.encode(segment, view_U8, run)
        if delta is None or not self._chain.offered(stream.offer(segment.step, delta, mirrored=run)):
            return False
        self._replication.pacer.resize(delta.payload_nbytes)
        stream.send_delta(delta, lambda: self._wanted(job))
        return True

    @override
    def _wire_nbytes(self, job: WriteJob) -> int:
        return self._wire

    @override
    def _take_waited(self) -> float:
        waited, self._waited = self._waited, self._replication.pacer.waited_seconds
        return self._waited - waited

    @override
    def _finish(self, job: WriteJob, marker: RankMarker) -> None:
        stream = self._replication.stream
        try:
            drift = stream.finish(marker.to_bytes(), like=self._chain.marker)
        except NotReplicated as error:
            if error.refused:
                self._chain.refused(str(error))
                self._mirror_use.refused(stream.holders, str(error))
            raise
        nbytes = (stream.nbytes_sent - self._nbytes_before) // len(stream.holders)
        mirrored = self._mirror_use.whole(nbytes)
        self._wire = nbytes + mirrored
        if self._replication.ahead:
            self._chain.whole(marker, nbytes, drift)
        self._sending = None
        with self._changed:
            if job.on_released is not None and not job.request.follows:
                self._held[job.generation], job.on_released = job.on_released, None
        log.log(
            logging.DEBUG if job.request.follows else logging.INFO,
            "%s is replicated to ranks %s: %s, and %s that are there anyway",
            *(job.generation, stream.holders, size_text(nbytes), size_text(mirrored)),
        )

    @override
    def _end(self, job: WriteJob) -> None:
        sending, self._sending = self._sending, None
        self._replication.pacer.end(job.generation)
        if sending is not None:
            self._replication.stream.abandon()
        if job.generation not in self._held:  # its memory is about to be used again
            self._replication.mirrors.end(job.generation)
        super()._end(job)


def _replicas(config: SessionConfig, most: int, *, may_lack_nodes: bool) -> int:
    """Return the number of copies, of which at most `most` are possible."""
    if config.replicas == "auto":
        return min(1, most)
    if not may_lack_nodes or config.replicas <= most:
        return config.replicas
    log.warning("replicas=%d: %d here, until there are more nodes", config.replicas, most, alike=True)
    return most


def join_peers(
    config: SessionConfig,
    claim: MemoryClaim,
    markers: Markers,
    exchange: Exchange,
    groups: ParallelGroups,
    *,
    dense_nbytes: int,
    resumed: GenerationId | None,
    plan: PeerPlan,
    device: torch.device,
    may_lack_nodes: bool = False,
    pays: bool | None = None,
) -> list[PeerWorker]:
    """Return this rank's worker in the peer tier, as a list; empty if no rank keeps copies of others. Collective.
    Raises `ConfigurationError` on every rank if there are too few nodes, or the memory of one has no room.

    `dense_nbytes` are those of a snapshot of everything on this rank, on `device`. With `may_lack_nodes` there may be
    fewer nodes than copies, since a run goes on without some. `pays` is what `mirrors_pay` has returned in an earlier start, if known.
    """
    domains, sizes = _domains(config.failure_domains, exchange, groups, dense_nbytes)
    replicas = _replicas(config, len({domain.node for domain in domains}) - 1, may_lack_nodes=may_lack_nodes)
    peers = groups.peers()
    placement = place_replicas(domains, peers, sizes, replicas)
    if (group := groups.group("replicate")) is None or replicas == 0:
        return []
    here = [rank for rank, domain in enumerate(domains) if domain.node == domains[groups.rank].node]
    held_nbytes, keep = sum(map(placement.held_nbytes, here)), plan.generations_kept
    with exchange.raise_together() as room:  # the memory that this node's ranks reserve, as known before the first plan
        expect_room(shared_directory(), COPIES * held_nbytes)
        room.append(has_room(shared_directory(), (COPIES + _RING_GENERATIONS + keep) * held_nbytes))
    if exchange.is_coordinator:
        log.info("%s", survival_summary(placement))
    mirroring = mirroring_of(placement, groups.rank, peers)
    if config.redundancy == "auto":
        if all(room) and pays is None:
            pays = mirrors_pay(group, placement, exchange, device, replicas)
        mirrors = all(room) and bool(pays)
    else:
        mirrors = config.redundancy
    if not mirrors:
        mirroring = Mirroring()
    deltas = None if mirroring.everything else plan.deltas()
    replication = Replication(
        group,
        run_id=markers.run_id,
        tag=claim.tag,
        url=claim.url,
        resumed=resumed,
        offered=claim.offered,
        keep=keep,
        holders=placement.holders[groups.rank],
        owners=placement.owners(groups.rank),
        max_chunk=config.max_chunk,
        ahead=deltas is not None,
        chained=plan.chains is not None,
    )
    for memory in replication.memories:
        memory.saw(claim.seen)
    worker = PeerWorker(
        replication, markers, resumed=resumed, keep=keep, room=plan.peer_room, deltas=deltas, chains=plan.chains
    )
    worker.audiences, worker.mirroring, worker.mirrors_pay = plan.peer_audiences, mirroring, pays
    return [worker]


def _domains(
    given: Sequence[FailureDomain] | None, exchange: Exchange, groups: ParallelGroups, dense_nbytes: int
) -> tuple[list[FailureDomain], list[int]]:
    """Return every rank's domain, as given or as each rank detects its own, and every rank's `dense_nbytes`. Collective."""
    with exchange.raise_together() as rows:
        own = this_domain() if given is None else expect_domains(given, groups.world_size)[groups.rank]
        rows.append([own.node, own.rack, own.host, dense_nbytes])
    return [FailureDomain(node=node, rack=rack, host=host) for node, rack, host, _ in rows], [row[-1] for row in rows]
