"""Storage that goes away."""

from __future__ import annotations

from typing import Any

from door import WriteJob

from lightning_moe_ckpt.errors import StorageError
from lightning_moe_ckpt.storage import SegmentEntry
from lightning_moe_ckpt.testing import Seam
from lightning_moe_ckpt.tiers import PersistWorker, SealedSegment, TierWorker


def stop_storing_after(step: int, tier: type[TierWorker] = PersistWorker) -> None:
    """In this process a tier, storage by default, fails behind the generation of a boundary."""
    put = tier._put

    def put_until(worker: Any, job: WriteJob, segment: SealedSegment) -> list[SegmentEntry]:
        if job.generation.step > step:
            raise StorageError("this store takes nothing any more.")
        return put(worker, job, segment)

    Seam(module=tier.__module__, attribute=f"{tier.__name__}._put", replacement=put_until).apply()
