"""What recovery may ask of a tier: which generations it holds, of which rank, and any byte of them.

A tier holds the same two things everywhere: the segments of a rank, byte for byte as they would be stored, and that
rank's marker over them, which carries every digest. So a copy in any tier can be checked against the marker from any
other, and one bad record can be taken from elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from lightning_moe_ckpt.storage import GenerationId, RankMarker, SegmentEntry


@dataclass(frozen=True, order=True, kw_only=True, slots=True)
class Holding:
    """One rank's part of a generation, whole, in one tier."""

    generation: GenerationId
    plan_hash: str
    owner: int
    """Rank whose segments these are."""
    nbytes: int
    """Of all its segments together."""
    exact: bool = True
    """Whether these are the owner's bytes, and not rebuilt from rounded gradients."""
    seen: GenerationId | None = field(default=None, compare=False)
    """In memory: the newest commit that was known when it was taken."""


class Tier(Protocol):
    """Copies of generations that this process can read without any other process. `testing.TierContract` tests it.

    Reads may come from any thread. Nothing read is trusted before its digest is checked, by the caller.
    """

    @property
    def name(self) -> str:
        """`host`, `peer` or `object`."""

    def holdings(self) -> list[Holding]:
        """Every whole copy, newest first; what is torn, or of another run, is left out."""

    def read_marker(self, holding: Holding) -> RankMarker:
        """The marker of a copy. Raises `Corrupt` if it is not what was written, `KeyMissing` if it is gone."""

    def read_into(self, holding: Holding, entry: SegmentEntry, offset: int, out: memoryview) -> None:
        """Fill all of `out` with the bytes of a segment from `offset` on, unverified, or raise.

        Raises:
            KeyMissing: the copy is gone, or has no such bytes.
            StorageError: it cannot be read.
            Corrupt: it ends before.
        """

    def close(self) -> None:
        """Let go of what was opened for reading; nothing is deleted."""
