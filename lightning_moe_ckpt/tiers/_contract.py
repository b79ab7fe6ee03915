"""Define the tiers' common contract: names, configuration, and how recovery reads a copy.

Every tier holds a rank's segments, byte for byte as in storage, and the rank's marker with all digests. So a copy in
any tier can be checked against the marker in any other, and a bad record can be read from elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, Protocol

from lightning_moe_ckpt.storage import GenerationId, RankMarker, Resume, Retention, SegmentEntry
from lightning_moe_ckpt.tiers._placement import FailureDomain

TierName = Literal["host", "peer", "storage"]
"""Memory of this node, memory of another node, or commits in storage."""
HOST: TierName = "host"
PEER: TierName = "peer"
STORAGE: TierName = "storage"
CHEAPEST: tuple[TierName, ...] = (HOST, PEER, STORAGE)

DEFAULT_MAX_CHUNK = 16 * 2**20
"""Bytes per message. Larger messages gain nothing even on fast networks, and training waits for one at most."""


@dataclass(frozen=True, kw_only=True)
class SessionConfig:
    """Configuration of one incarnation of a run, without the capture policy."""

    url: str
    retention: Retention = field(default_factory=Retention)
    """Rule for the committed generations to keep."""
    resume: Resume = "auto"
    storage_options: Mapping[str, Any] | None = None
    bandwidth: int | None = None
    """Bytes per second that this rank may write to storage; `None` for no cap."""
    replicas: int | Literal["auto"] = "auto"
    """Copies of each rank's generations in memory of other nodes; `auto` is 1 on several nodes, else 0."""
    redundancy: bool | Literal["auto"] = "auto"
    """Whether holders fill the state shared with an owner from their own memory; `auto` decides by measured speed."""
    max_chunk: int = DEFAULT_MAX_CHUNK
    """Bytes per message of a copy, the same on all ranks."""
    failure_domains: Sequence[FailureDomain] | None = None
    """Node and rack of every rank, by rank; `None` to let each rank detect its own."""
    dense_every_n_steps: int | None = None
    """Steps between dense generations in storage, each with all state of one boundary; `None` for never."""
    commit_timeout: timedelta = timedelta(seconds=120)
    """Longest wait at the end of training for a generation to become durable."""
    overhead_target: float | None = None
    """Share of training time that checkpoints may cost; `None` for as fast as possible."""
    storage_at_least: timedelta = timedelta(minutes=10)
    """Longest time from one generation of a tier to the next, whatever the cost."""
    freeze_heap: bool = True
    """Whether the garbage collector may ignore all objects alive as training begins."""


@dataclass(frozen=True, order=True, kw_only=True, slots=True)
class Holding:
    """Copy of a rank's part of a generation, in a tier."""

    generation: GenerationId
    plan_hash: str
    owner: int
    """Rank whose segments the copy holds."""
    nbytes: int
    """Bytes of all segments together."""
    exact: bool = True
    """Whether the bytes are the owner's, not rebuilt from rounded gradients."""
    whole: bool = True
    """Whether the whole part is there, not some experts only."""
    file: str = ""
    """File name of a copy in memory, different for each copy of the same part."""
    seen: GenerationId | None = field(default=None, compare=False)
    """Newest commit known when the copy in memory was taken."""


class Tier(Protocol):
    """Copies that this process can read without another process's help; `tests/tiers/_contract.py` tests the contract.

    Any thread may read. The caller checks digests: a tier promises nothing about the bytes.
    """

    @property
    def name(self) -> str:
        """Name of the tier: `host`, `peer` or `storage`."""

    def holdings(self) -> list[Holding]:
        """Return every complete copy, newest first; incomplete copies and those of other runs are left out."""

    def read_marker(self, holding: Holding) -> RankMarker:
        """Return a copy's marker. Raises `Corrupt` if the marker is damaged, `KeyMissing` if the copy is gone."""

    def read_into(self, holding: Holding, entry: SegmentEntry, offset: int, out: memoryview) -> None:
        """Fill all of `out` with a segment's bytes from `offset` on, without checking digests, or raise.

        Raises:
            KeyMissing: the copy is gone, or has no such bytes.
            StorageError: the copy cannot be read.
            Corrupt: the copy is too short.
        """

    def close(self) -> None:
        """Close all files opened for reading; nothing is deleted."""
