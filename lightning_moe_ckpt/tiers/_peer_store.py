"""Keep the replicas of one rank of another node, in segment rings with room for one generation more than is kept.

Usually one generation is kept, which is complete on all ranks; the other is being received. The owner says which one is
kept when it begins the next, because only then does every rank know of it. If a holder gave up the older replica as soon as
it had a newer one, and a node died while other holders had only the older one, no generation would be left.

If an owner begins a generation before all ranks know of the previous one, there is room for that one too: the newer may
be rebuilt from it.

A plan that needs more memory gets a new ring; the old one stays until the new one has the generations to keep.

Source: TierCheck (arXiv 2605.17821), Sec. 3.4, Fig. 5.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from lightning_moe_ckpt.errors import CheckpointError
from lightning_moe_ckpt.storage import GenerationId, RankMarker
from lightning_moe_ckpt.tiers._rank_memory import RankMemory
from lightning_moe_ckpt.tiers._ring import SegmentRing, Slot

COPIES = 2
"""Generations that there is room for if one is kept."""


class ReplicaStore:
    """Keep the replicas of one owner. One thread uses it after `allocate`.

    Args:
        memory: memory of the owner's replicas on this node.
        resumed: the generation that this process resumed from; an earlier process's replica of it stays.
        keep: generations to keep besides the one being received.
        ahead: whether a generation may begin before all ranks know of the previous one.
        offered: see `RankMemory.claim`.
    """

    def __init__(
        self,
        memory: RankMemory,
        resumed: GenerationId | None = None,
        *,
        keep: int = 1,
        ahead: bool = False,
        offered: Collection[GenerationId] = (),
    ) -> None:
        self._memory, self._keep, self._room = memory, keep, 1 + keep + ahead
        memory.claim(resumed, older=keep > 1, offered=offered)
        self._slot: Slot | None = None
        self._generation: GenerationId | None = None

    def allocate(self, slot_nbytes: int, num_segments: int, *, keep: int | None = None) -> int:
        """Reserve memory for generations of `num_segments` segments of up to `slot_nbytes`.

        Args:
            slot_nbytes: bytes of the largest segment.
            num_segments: segments of a generation.
            keep: generations to keep; `None` leaves the number.

        Returns:
            Bytes reserved.

        Raises:
            ConfigurationError: not enough room; the message says how many bytes are missing.
        """
        self._keep = keep or self._keep
        return self._make(slot_nbytes, num_segments).memory.numel()

    def begin(
        self,
        generation: GenerationId,
        *,
        keep: GenerationId | None,
        base: GenerationId | None = None,
        num_segments: int,
        slot_nbytes: int,
    ) -> None:
        """Make room for a generation: give up all others but `base`, `keep` and those that are kept with `keep`.

        Raises:
            ConfigurationError: the generation needs more memory than there is.
        """
        if not self._ring.is_named:
            self._memory.renew()
        self.reclaim(keep=keep, base=base)
        ring = self._ring
        if ring.slot_nbytes < slot_nbytes or not ring.has_room(num_segments):
            ring = self._make(slot_nbytes, num_segments)
        ring.begin_window(generation)
        self._generation = generation

    def reclaim(self, *, keep: GenerationId | None, base: GenerationId | None = None) -> None:
        """Give up every complete replica but `base`, `keep` and those that are kept with `keep`."""
        if keep is not None:
            self._memory.complete_everywhere(keep)
        for each in self._ring.published:
            if each != base and (keep is None or each > keep or (each < keep and self._keep == 1)):
                self._ring.discard(each)

    def slot(self, step: int) -> Tensor:
        """Return uint8 memory for the segment of boundary `step` and gradients behind it; the previous segment is complete."""
        assert self._generation is not None
        if self._slot is None or self._slot.step != step:
            self._seal()
            self._slot = self._ring.acquire(self._generation, step)
        return self._slot.view

    def whole(self, generation: GenerationId, step: int) -> Tensor | None:
        """Return memory that begins with a segment of a complete replica, which is valid while that is kept; `None` if gone."""
        return self._memory.view(generation, step)

    def publish(self, marker: RankMarker) -> None:
        """Publish the replica for restores: every segment is complete and has the marker's digest.

        Raises:
            CheckpointError: something has removed the name of the memory.
            OSError: there is no room for the marker.
        """
        generation = self._generation
        assert generation is not None
        self._seal()
        self._ring.finish_window(generation)
        self._generation = None
        try:
            self._ring.publish(generation, marker)
        except (CheckpointError, OSError):
            self._ring.discard(generation)
            raise

    def abandon(self) -> None:
        """Give up the generation being received, if there is one."""
        generation, self._generation, self._slot = self._generation, None, None
        if generation is not None:
            self._ring.abort_window(generation)

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return self._memory.nbytes

    def saw(self, committed: GenerationId | None) -> None:
        """Note the newest commit; see `RankMemory.saw`."""
        self._memory.saw(committed)

    def unlink(self) -> None:
        """Remove all names without logging: for the last moment of a process, from any thread."""
        self._memory.unlink()

    def close(self, *, unlink: bool) -> None:
        """Release the memory; nothing may be received after that.

        Args:
            unlink: whether the replicas are removed too; otherwise a later process finds them.
        """
        self._memory.close(unlink=unlink)

    # -- private

    def _make(self, slot_nbytes: int, num_segments: int) -> SegmentRing:
        return self._memory.make(slot_nbytes, self._room * num_segments, keep=self._keep)

    def _seal(self) -> None:
        slot, self._slot = self._slot, None
        if slot is not None:
            self._ring.seal(slot)

    @property
    def _ring(self) -> SegmentRing:
        ring = self._memory.ring
        assert ring is not None, "memory for copies was not allocated"
        return ring
