"""Define what the tiers have in common: their names, what a user configures, and how recovery reads one.

Every tier holds the segments of a rank, byte for byte as storage has them, and the rank's marker, which has all digests.
A copy in any tier can therefore be checked against the marker of any other, and a bad record be read from elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, Protocol

from lightning_moe_ckpt.storage import GenerationId, RankMarker, Resume, Retention, SegmentEntry
from lightning_moe_ckpt.tiers._placement import FailureDomain

TierName = Literal["host", "peer", "storage"]
"""Memory of the own node, memory of another one, or commits in storage."""
HOST: TierName = "host"
PEER: TierName = "peer"
STORAGE: TierName = "storage"
CHEAPEST: tuple[TierName, ...] = (HOST, PEER, STORAGE)

DEFAULT_MAX_CHUNK = 16 * 2**20
"""Bytes of one message. Loopback and fast networks gain nothing from more, and training waits for one at most."""


@dataclass(frozen=True, kw_only=True)
class SessionConfig:
    """Configuration of one incarnation of a run, besides what is taken when."""

    url: str
    retention: Retention = field(default_factory=Retention)
    """Which committed generations stay."""
    resume: Resume = "auto"
    storage_options: Mapping[str, Any] | None = None
    bandwidth: int | None = None
    """Bytes per second that this rank may write to storage; `None` for no cap."""
    replicas: int | Literal["auto"] = "auto"
    """Copies of each rank's generations in memory of other nodes; `auto` is one where there are several nodes."""
    redundancy: bool | Literal["auto"] = "auto"
    """Whether holders take what they have in common with an owner from their own state; `auto` if that is faster."""
    max_chunk: int = DEFAULT_MAX_CHUNK
    """Bytes of one message of a copy, the same on all ranks."""
    failure_domains: Sequence[FailureDomain] | None = None
    """Node and rack of every rank, by rank; `None` for what each finds out."""
    dense_every_n_steps: int | None = None
    """Steps after which storage gets everything of one boundary in the place of a window; `None` for never."""
    commit_timeout: timedelta = timedelta(seconds=120)
    """How long a generation may take to become durable at the end, when training waits for it."""
    overhead_target: float | None = None
    """Share of training's time that checkpoints may cost; `None` for as fast as possible."""
    storage_at_least: timedelta = timedelta(minutes=10)
    """Most time from one generation of a tier to the next, whatever it costs."""
    freeze_heap: bool = True
    """Whether the process's garbage collector may leave out what is alive as training begins."""


@dataclass(frozen=True, order=True, kw_only=True, slots=True)
class Holding:
    """A copy of one rank's part of a generation, in one tier."""

    generation: GenerationId
    plan_hash: str
    owner: int
    """Rank whose segments these are."""
    nbytes: int
    """Bytes of all its segments together."""
    exact: bool = True
    """Whether these are the owner's bytes, and not rebuilt from rounded gradients."""
    whole: bool = True
    """Whether all of the part is there, and not some experts only."""
    file: str = ""
    """For copies in memory: name of the file, which tells several copies of one part apart."""
    seen: GenerationId | None = field(default=None, compare=False)
    """For copies in memory: the newest commit that was known when the copy was taken."""


class Tier(Protocol):
    """A set of copies that this process can read without help of another process; `tests/tiers/_contract.py` tests it.

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
