"""Define how recovery reads a tier: which generations it holds, of which rank, and any bytes of them.

Every tier holds the segments of a rank, byte for byte as storage has them, and the rank's marker, which has all digests.
A copy in any tier can therefore be checked against the marker of any other, and a bad record be read from elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from lightning_moe_ckpt.storage import GenerationId, RankMarker, SegmentEntry

TierName = Literal["host", "peer", "storage"]
"""Memory of the own node, memory of another one, or commits in storage."""
HOST: TierName = "host"
PEER: TierName = "peer"
STORAGE: TierName = "storage"
CHEAPEST: tuple[TierName, ...] = (HOST, PEER, STORAGE)


@dataclass(frozen=True, order=True, kw_only=True, slots=True)
class Holding:
    """A complete copy of one rank's part of a generation, in one tier."""

    generation: GenerationId
    plan_hash: str
    owner: int
    """Rank whose segments these are."""
    nbytes: int
    """Bytes of all its segments together."""
    exact: bool = True
    """Whether these are the owner's bytes, and not rebuilt from rounded gradients."""
    seen: GenerationId | None = field(default=None, compare=False)
    """For copies in memory: the newest commit that was known when the copy was taken."""


class Tier(Protocol):
    """A set of copies that this process can read without help of another process; `testing.TierContract` tests it.

    Any thread may read. The caller checks digests: nothing that was read is trusted before.
    """

    @property
    def name(self) -> str:
        """Name of the tier: `host`, `peer` or `storage`."""

    def holdings(self) -> list[Holding]:
        """Return every complete copy, newest first; incomplete copies and those of other runs are left out."""

    def read_marker(self, holding: Holding) -> RankMarker:
        """Return the marker of a copy. Raises `Corrupt` if it is not what was written, `KeyMissing` if it is gone."""

    def read_into(self, holding: Holding, entry: SegmentEntry, offset: int, out: memoryview) -> None:
        """Fill all of `out` with the bytes of a segment from `offset` on, without checking digests, or raise.

        Raises:
            KeyMissing: the copy is gone, or has no such bytes.
            StorageError: the copy cannot be read.
            Corrupt: the copy is too short.
        """

    def close(self) -> None:
        """Release what was opened for reading; nothing is deleted."""
