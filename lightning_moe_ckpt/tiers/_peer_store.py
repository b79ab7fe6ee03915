"""Memory of this node for copies of one rank of another: segment rings with room for one generation more than is kept.

Usually one is kept, the one that is whole on all ranks of the job; the other is being received. Which one is kept the owner
says when it begins the next, because only then every rank knows of it: a holder that gave up the older copy as soon as
it had a newer one would leave the job with nothing if a node died while others still had the older one only.

An owner that begins a generation before all ranks know of the one before has room for that one too: the newer one may
be rebuilt from it.

A plan that needs more memory gets a ring of its own; the ring before stays until the new one holds what is kept.

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
"""Generations there is room for, where one is kept."""


class ReplicaStore:
    """Copies of one owner. Used by one thread after `allocate`.

    Args:
        memory: of the owner's replicas on this node.
        resumed: the generation that this life goes on from; a copy that an earlier life left of it stays.
        keep: generations that are kept besides the one that is received.
        ahead: whether a generation may come before all ranks know of the one before.
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
            slot_nbytes: of the largest segment.
            num_segments: of a generation.
            keep: generations that are kept, where that is known only now.

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
        """Make room for a generation by giving up every other but `base`, `keep` and those before it that are kept with it.

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
        """Give up every whole copy but two, and as many before `keep` as are kept with it."""
        if keep is not None:
            self._memory.complete_everywhere(keep)
        for each in self._ring.published:
            if each != base and (keep is None or each > keep or (each < keep and self._keep == 1)):
                self._ring.discard(each)

    def slot(self, step: int) -> Tensor:
        """Memory for the segment of boundary `step`, and what may lie behind it; uint8. The one before is whole."""
        assert self._generation is not None
        if self._slot is None or self._slot.step != step:
            self._seal()
            self._slot = self._ring.acquire(self._generation, step)
        return self._slot.view

    def whole(self, generation: GenerationId, step: int) -> Tensor | None:
        """Memory that begins with a segment of a whole copy, which stays while it is `keep` or `base`; `None` if gone."""
        return self._memory.view(generation, step)

    def publish(self, marker: RankMarker) -> None:
        """Every segment is whole and as the marker says: the copy may be restored from.

        Raises:
            CheckpointError: something has removed the name of the memory.
            OSError: there is no room for the statement.
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
        """Forget the generation under way, if there is one."""
        generation, self._generation, self._slot = self._generation, None, None
        if generation is not None:
            self._ring.abort_window(generation)

    @property
    def nbytes(self) -> int:
        """Reserved."""
        return self._memory.nbytes

    def saw(self, committed: GenerationId | None) -> None:
        """See `RankMemory.saw`."""
        self._memory.saw(committed)

    def unlink(self) -> None:
        """Remove all names without a word: for the last moment of a process, from any thread."""
        self._memory.unlink()

    def close(self, *, unlink: bool) -> None:
        """Let go of the memory; nothing may be received any more.

        Args:
            unlink: whether the copies go too; else a later life finds them.
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
