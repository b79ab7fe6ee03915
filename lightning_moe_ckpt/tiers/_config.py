"""What a user says of one incarnation of a run, besides what is taken when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

from lightning_moe_ckpt.storage import Resume, Retention
from lightning_moe_ckpt.tiers._domains import FailureDomain
from lightning_moe_ckpt.tiers._peer import DEFAULT_MAX_CHUNK


@dataclass(frozen=True, kw_only=True)
class SessionConfig:
    """Where a run's checkpoints live and how it resumes."""

    url: str
    retention: Retention = field(default_factory=Retention)
    """Which committed generations stay."""
    resume: Resume = "auto"
    storage_options: Mapping[str, Any] | None = None
    bandwidth: int | None = None
    """Bytes per second that this rank may write to storage; `None` for no cap."""
    replicas: int | Literal["auto"] = "auto"
    """Copies of each rank's generations in memory of other nodes; `auto` is one where there are several nodes."""
    max_chunk: int = DEFAULT_MAX_CHUNK
    """Bytes of one message of a copy."""
    failure_domains: Sequence[FailureDomain] | None = None
    """Node and rack of every rank, by rank; `None` for what each finds out."""
    commit_timeout: timedelta = timedelta(seconds=120)
    """How long a generation may take to become durable at start and end, when training waits for it."""
    freeze_heap: bool = True
    """Whether the process's garbage collector may leave out what is alive after the first generation."""
