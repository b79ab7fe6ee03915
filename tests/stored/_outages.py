"""Storage that goes away."""

from __future__ import annotations

from door import WriteJob

from lightning_moe_ckpt.errors import StorageError
from lightning_moe_ckpt.storage import SegmentEntry
from lightning_moe_ckpt.testing import Seam
from lightning_moe_ckpt.tiers import PersistWorker, SealedSegment


def stop_storing_after(step: int) -> None:
    """In this process storage fails behind the generation of a boundary."""
    put = PersistWorker._put

    def put_until(worker: PersistWorker, job: WriteJob, segment: SealedSegment) -> list[SegmentEntry]:
        if job.generation.step > step:
            raise StorageError("this store takes nothing any more.")
        return put(worker, job, segment)

    Seam(module=PersistWorker.__module__, attribute="PersistWorker._put", replacement=put_until).apply()
