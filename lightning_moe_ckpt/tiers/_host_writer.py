"""Keep sealed segments in place: the tier that survives the process.

The bytes are in named shared memory already. This tier waits for the copies, digests, and puts the marker beside the
ring, where a restarted process looks for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from weakref import ref

from torch import Tensor
from typing_extensions import override

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.errors import CheckpointError
from lightning_moe_ckpt.native import CopyEngine
from lightning_moe_ckpt.storage import GenerationId, RankMarker, SegmentEntry, SlotClass
from lightning_moe_ckpt.tiers._rank_memory import MemoryClaim, RankMemory, log_unused_memory
from lightning_moe_ckpt.tiers._readers import HOST
from lightning_moe_ckpt.tiers._ring import SegmentRing, slots_needed
from lightning_moe_ckpt.tiers._ring_state import slot_classes
from lightning_moe_ckpt.tiers._sealed import Markers, SealedSegment
from lightning_moe_ckpt.tiers._shm import expect_room, shared_directory
from lightning_moe_ckpt.tiers._tier_worker import TierWorker, WriteJob, WriteRequest

log = rank_logger(__name__)

_DENSE_GENERATIONS = 3
"""Dense generations for which a ring has room, roughly: snapshot, persist and recovery each hold one."""

_LAG = 2
"""Boundaries until all ranks know that a generation is complete, where windows follow each other."""

_BASES_IN_LINE = 1
"""Windows of everything that storage may still have to read besides the current one, where differences follow them."""

RING_HEADROOM = 0.25
"""Share by which a later plan's segments may exceed the first plan's."""

_LAST_SECONDS = 2.0
"""Seconds that an incarnation's end waits for sealed segments to be digested."""


def claim_memory(
    claim: MemoryClaim, rank: int, resumed: GenerationId | None, *, dense_nbytes: int, older: bool = False
) -> RankMemory:
    """Claim and return this rank's shared memory, with the earlier incarnations' copy of `resumed`.

    Args:
        claim: claim of this incarnation.
        rank: this rank.
        resumed: the generation resumed from; `None` for a fresh start.
        dense_nbytes: bytes of a snapshot of everything on this rank.
        older: whether generations before `resumed` are kept too, since `resumed` lacks some of the state.

    Raises:
        ConfigurationError: there is no room for a ring; the message says how many bytes are missing.
    """
    log_unused_memory(claim, rank, resumed)
    memory = RankMemory(claim.tag, rank, url=claim.url)
    memory.claim(resumed, older=older, offered=claim.offered, world_size=claim.world_size)
    memory.saw(claim.seen)
    # The first plan decides the ring's exact size.
    expect_room(shared_directory(), _DENSE_GENERATIONS * dense_nbytes - memory.nbytes)
    return memory


class Rings:
    """Make a rank's ring, and register it with the engine that copies there."""

    def __init__(self, memory: RankMemory, engine: CopyEngine) -> None:
        self._memory, self._engine = memory, engine
        self._registered: ref[Tensor] | None = None  # weak: the memory must go with the ring

    def make(
        self,
        slot_nbytes: int,
        window: int,
        *,
        readers: int,
        back_to_back: bool,
        links: SlotClass | None = None,
        experts: Mapping[str, int] = MappingProxyType({}),
        copies: int = 1,
    ) -> SegmentRing:
        """Return a ring for windows of `window` segments of up to `slot_nbytes`.

        Args:
            slot_nbytes: bytes of the largest segment.
            window: segments per generation.
            readers: tiers that read from the ring at their own pace.
            back_to_back: whether the next window begins as soon as one is full.
            links: differences between windows of everything: bytes of the largest, and how many the ring keeps.
            experts: bytes of the operators whose newest copy is kept, by name.
            copies: copies of each such operator that fit.

        Raises:
            ConfigurationError: there is no room; the message says how many bytes are missing.
        """
        # Later plans order operators differently, which packs a little differently.
        slot_nbytes += int(slot_nbytes * RING_HEADROOM)
        lag = _LAG if back_to_back else 0
        small = slot_classes(nbytes for nbytes in experts.values() for _ in range(copies))
        if links is not None:
            link_nbytes = int(links.nbytes * (1 + RING_HEADROOM))
            small, lag = slot_classes([link_nbytes] * (links.slots + lag)), _BASES_IN_LINE
        slots = slots_needed(window, readers=readers, lag=lag)
        self._unregister()
        return self._register(self._memory.make(slot_nbytes, slots, small=small, experts=experts))

    def renew(self) -> SegmentRing:
        """Replace the ring by another of the same size, see `RankMemory.renew`. Copies to the old ring must be done."""
        self._unregister()  # a registered ring would keep its memory
        return self._register(self._memory.renew())

    def _register(self, ring: SegmentRing) -> SegmentRing:
        self._registered = ref(ring.memory)
        self._engine.register(ring.memory)
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
