"""Keep sealed segments in place: the tier that survives the process.

The bytes are in named shared memory already. This tier waits for the copies, digests, and puts the marker beside the
ring, where a restarted process looks for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from weakref import ref

from torch import Tensor
from typing_extensions import override

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.errors import CheckpointError
from lightning_moe_ckpt.native import CopyEngine
from lightning_moe_ckpt.storage import GenerationId, RankMarker, SegmentEntry, SlotClass, digest_of
from lightning_moe_ckpt.tiers._holders import this_domain
from lightning_moe_ckpt.tiers._rank_memory import MemoryClaim, RankMemory, log_unused_memory
from lightning_moe_ckpt.tiers._readers import HOST
from lightning_moe_ckpt.tiers._ring import SegmentRing
from lightning_moe_ckpt.tiers._ring_state import PAGE_NBYTES, slot_classes
from lightning_moe_ckpt.tiers._sealed import Markers, SealedSegment
from lightning_moe_ckpt.tiers._shm import expect_room, room_nbytes, shared_directory
from lightning_moe_ckpt.tiers._tier_worker import TierWorker, WriteJob, WriteRequest

log = rank_logger(__name__)

_GENERATIONS = 2
"""Least generations for which a ring has room: one is whole while the next is taken."""

RING_HEADROOM = 0.25
"""Share by which later budgets may exceed the first plan's, where generations have only some experts."""

_OTHER_PLANS = 1 / 64
"""Share of a generation by which plans in another order pack worse."""

_LAST_SECONDS = 2.0
"""Seconds that an incarnation's end waits for sealed segments to be digested."""


def claim_memory(
    claim: MemoryClaim, rank: int, resumed: GenerationId | None, *, dense_nbytes: int, older: bool = False
) -> RankMemory:
    """Claim and return this rank's shared memory, with the earlier incarnations' copy of `resumed`, `None` for a fresh
    start. With `older` generations before are kept too, since `resumed` lacks some of the state. Raises like
    `expect_room`.
    """
    log_unused_memory(claim, rank, resumed)
    memory = RankMemory(claim.tag, rank, url=claim.url)
    memory.claim(resumed, older=older, offered=claim.offered, world_size=claim.world_size)
    memory.saw(claim.seen)
    # The first plan decides the ring's exact size.
    expect_room(shared_directory(), _GENERATIONS * dense_nbytes - memory.nbytes)
    return memory


def has_plenty(wanted: int, reserved: int, exchange: Exchange) -> bool:
    """Return whether all nodes have twice the memory that their ranks want. Collective. `reserved` bytes this rank has
    already, and may use again.
    """
    node = int(digest_of(this_domain().node.encode())[:15], 16)
    rows = exchange.gather([node, 2 * wanted - reserved, room_nbytes(shared_directory())])
    nodes = {row[0]: row[2] for row in rows}
    return all(sum(row[1] for row in rows if row[0] == each) <= free for each, free in nodes.items())


@dataclass(frozen=True, kw_only=True)
class RingRoom:
    """What a rank's ring has room for: generations of a window's `steps`, each with its segment's bytes, 2 or more
    whole.

    `back_to_back`: the next window begins as soon as a window is full. `experts` has the bytes of the operators of
    which the newest copies are kept, by name, and `links` those of the largest difference between windows of
    everything, and their number.
    """

    steps: Sequence[int]
    generations: int = _GENERATIONS
    back_to_back: bool = False
    experts: Mapping[str, int] = field(default_factory=dict)
    copies: int = 1
    links: SlotClass | None = None

    @property
    def small(self) -> tuple[SlotClass, ...]:
        """Slots for differences, or for single experts."""
        if self.links is not None:
            return slot_classes([self.links.nbytes] * self.links.slots)
        return slot_classes(nbytes for nbytes in self.experts.values() for _ in range(self.copies))

    @property
    def block(self) -> int:
        """Pages for a generation."""
        pages = sum(-(-nbytes // PAGE_NBYTES) for nbytes in self.steps)
        share = RING_HEADROOM if self.experts else _OTHER_PLANS if len(self.steps) > 1 else 0
        return pages + int(share * pages)

    @property
    def blocks(self) -> int:
        """Number of generations; one more where each step takes one, and the newest may not be everywhere as the next begins."""
        alone = self.links is None and len(self.steps) == 1
        return self.generations + (self.generations > 2 and self.back_to_back and alone)

    @property
    def purposes(self) -> dict[str, int]:
        """Bytes by purpose."""
        kept = sum(each.nbytes * each.slots for each in self.small)
        whole = sum(-(-nbytes // PAGE_NBYTES) for nbytes in self.steps)
        found = {
            "generations": self.blocks * whole * PAGE_NBYTES,
            "room for other plans": self.blocks * (self.block - whole) * PAGE_NBYTES,
            "differences" if self.links is not None else "newest copies of experts": kept,
        }
        return {purpose: nbytes for purpose, nbytes in found.items() if nbytes}


class Rings:
    """Make a rank's ring, and register it with the engine that copies there."""

    def __init__(self, memory: RankMemory, engine: CopyEngine) -> None:
        self._memory, self._engine = memory, engine
        self._registered: ref[Tensor] | None = None  # weak: the memory must go with the ring

    def make(self, room: RingRoom) -> SegmentRing:
        """Return a ring with this room. Raises like `expect_room`."""
        self._unregister()
        pages, block = room.block * room.blocks, room.block
        return self._register(
            self._memory.make(PAGE_NBYTES, pages, block=block, small=room.small, experts=room.experts)
        )

    def renew(self) -> SegmentRing:
        """Replace the ring by another of the same size, see `RankMemory.renew`. Copies to the old ring must be done."""
        self._unregister()  # a registered ring would keep its memory
        return self._register(self._memory.renew())

    def _register(self, ring: SegmentRing) -> SegmentRing:
        self._registered = ref(ring.memory)
        self._engine.register(ring.memory, written=ring.is_adopted)
        return ring

    def _unregister(self) -> None:
        before = None if self._registered is None else self._registered()
        self._registered = None
        if before is not None:
            self._engine.unregister(before)


class HostWorker(TierWorker):
    """Publish every generation of one rank in its own memory, in the ring in use at the generation's begin."""

    takes_every = True

    def __init__(self, memory: RankMemory, markers: Markers) -> None:
        super().__init__(HOST, markers, memories=[memory])
        self._memory = memory
        self._rings: dict[GenerationId, SegmentRing] = {}

    @override
    def begin(self, request: WriteRequest) -> None:
        assert self._memory.ring is not None
        self._rings[request.generation] = ring = self._memory.ring
        ring.on_retired = lambda: self._queue.put(partial(self._condense, ring))
        super().begin(request)

    @override
    def complete_everywhere(self, generation: GenerationId) -> None:
        self._memory.complete_everywhere(generation)

    @override
    def give_up(self, generation: GenerationId) -> None:
        self.abandon(generation)
        self._memory.give_up(generation)

    @property
    @override
    def generations_kept(self) -> int | None:
        return None if self._memory.ring is None or self._memory.ring.experts else self._memory.ring.keep

    def _condense(self, ring: SegmentRing) -> None:
        """Bring experts of retired generations to small slots, see `SegmentRing.condense`; log an error. On the tier's thread."""
        try:
            ring.condense()
        except (CheckpointError, OSError) as error:
            log.error("memory has older copies of some experts than it should: %s", error)

    @override
    def close(self) -> None:
        self.drain(_LAST_SECONDS)
        super().close()

    @override
    def _put(self, job: WriteJob, segment: SealedSegment) -> list[SegmentEntry]:
        return segment.digested()

    @override
    def _finish(self, job: WriteJob, marker: RankMarker) -> None:
        self._rings[job.generation].publish(job.generation, marker)

    @override
    def _end(self, job: WriteJob) -> None:
        self._rings.pop(job.generation, None)
        super()._end(job)
