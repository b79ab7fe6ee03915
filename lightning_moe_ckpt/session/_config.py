"""What a user says of one life of a run, besides what is taken when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from lightning_moe_ckpt.storage import Resume, Retention


@dataclass(frozen=True, kw_only=True)
class LifeConfig:
    """Where a run's checkpoints live and how it resumes."""

    url: str
    retention: Retention = field(default_factory=Retention)
    """Which committed generations stay."""
    resume: Resume = "auto"
    storage_options: Mapping[str, Any] | None = None
    bandwidth: int | None = None
    """Bytes per second that this rank may write to storage; `None` for no cap."""
    commit_timeout: timedelta = timedelta(seconds=120)
    """How long a generation may take to become durable at start and end, when training waits for it."""
    freeze_heap: bool = True
    """Whether the process's garbage collector may leave out what is alive after the first generation."""
