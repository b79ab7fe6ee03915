"""Memory of this node for copies of one rank of another: a segment ring with room for two generations.

One is kept, the one that is whole on all ranks of the job; the other is being received. Which one is kept the owner
says when it begins the next, because only then every rank knows of it: a holder that gave up the older copy as soon as
it had a newer one would leave the job with nothing if a node died while others still had the older one only.

Source: TierCheck (arXiv 2605.17821), Sec. 3.4, Fig. 5.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from lightning_moe_ckpt.storage import GenerationId
from lightning_moe_ckpt.tiers._ring import SegmentRing, Slot

log = logging.getLogger(__name__)

COPIES = 2
"""Generations there is room for."""

Publish = Callable[[SegmentRing, GenerationId, bytes], None]


class ReplicaStore:
    """Copies of one owner. Used by one thread after `allocate`.

    Args:
        path: of the ring.
        publish: makes a whole generation, with the bytes of its marker, known to later lives.
    """

    def __init__(self, path: Path, publish: Publish) -> None:
        self._path, self._publish = path, publish
        self._ring: SegmentRing | None = None
        self._slot: Slot | None = None
        self._generation: GenerationId | None = None
        self._whole: list[GenerationId] = []

    def allocate(self, slot_nbytes: int, num_segments: int) -> int:
        """Reserve memory for generations of `num_segments` segments of up to `slot_nbytes`.

        Returns:
            Bytes reserved.

        Raises:
            ConfigurationError: not enough room; the message says how many bytes are missing.
        """
        ring = SegmentRing.create(self._path.name, slot_nbytes, COPIES * num_segments, self._path.parent)
        self._ring = ring
        return ring.memory.numel()

    @property
    def whole(self) -> list[GenerationId]:
        """Copies that are published, oldest first."""
        return list(self._whole)

    def begin(
        self, generation: GenerationId, *, keep: GenerationId | None, num_segments: int, slot_nbytes: int
    ) -> None:
        """Make room for a generation by giving up every other but `keep`.

        Raises:
            ConfigurationError: the generation needs more memory than there is.
        """
        self.reclaim(keep=keep)
        self._allocated().begin_window(generation)
        self._generation = generation

    def reclaim(self, *, keep: GenerationId | None) -> None:
        """Give up every whole copy but one."""
        for each in [each for each in self._whole if each != keep]:
            self._allocated().discard(each)
            self._whole.remove(each)

    def segment(self, step: int, nbytes: int) -> Tensor:
        """Memory for the segment of boundary `step`; uint8, shape `[nbytes]`. The one before is whole."""
        ring, generation = self._allocated(), self._generation
        assert generation is not None
        self._seal()
        self._slot = ring.acquire(generation, step)
        return self._slot.view[:nbytes]

    def publish(self, marker: bytes) -> None:
        """Every segment is whole and as the marker says: the copy may be restored from."""
        ring, generation = self._allocated(), self._generation
        assert generation is not None
        self._seal()
        ring.finish_window(generation)
        self._publish(ring, generation, marker)
        self._whole.append(generation)
        self._generation = None

    def abandon(self) -> None:
        """Forget the generation under way, if there is one."""
        generation, self._generation, self._slot = self._generation, None, None
        if generation is not None:
            self._allocated().abort_window(generation)

    def close(self, *, unlink: bool) -> None:
        """Let go of the memory; nothing may be received any more."""
        ring, self._ring = self._ring, None
        if ring is not None:
            ring.close(unlink=unlink)

    # -- private

    def _seal(self) -> None:
        slot, self._slot = self._slot, None
        if slot is not None:
            self._allocated().seal(slot)

    def _allocated(self) -> SegmentRing:
        assert self._ring is not None, "memory for copies was not allocated"
        return self._ring
