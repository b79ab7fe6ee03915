"""Copies that are late hold training up only where the next generation would have no memory without theirs.

The ring of a rank has room for what it captures, for what is complete, and for one generation that each slower tier
still reads. What is complete in copies is kept besides. So it is full when a transfer and storage are both late.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from door import CheckpointCallback, Pacer, WriteJob
from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from campaign._campaign import Campaigns
from campaign._nodes import AwaitsCopies, Nodes
from campaign._training import Checkpointing, Setup, train
from lightning_moe_ckpt.session import Report
from lightning_moe_ckpt.session._tiers import Tiers
from lightning_moe_ckpt.storage import SegmentEntry
from lightning_moe_ckpt.testing import Attempt, Seam
from lightning_moe_ckpt.tiers import PersistWorker, SealedSegment

SETUP = Setup(
    model="stacked",
    world_size=2,
    batches=15,
    validate_every=None,
    checkpointing=Checkpointing(policy="sparse", window=3),
)
FIRST_COPIED, FIRST_UNSTORED = 5, 15
"""Steps: copies of the first generation are awaited there; the one that storage is late with is at or after that."""
PATIENCE = 30.0
put, flush, begin, left = PersistWorker._put, Tiers.flush, Pacer.begin, Pacer._left


class Late:
    """From the second transfer on copies go only if somebody waits for them; storage may wait for that too."""

    def __init__(self, *, storage: bool, flushes: bool) -> None:
        self.storage, self.flushes = storage, flushes
        self.num_transfers = self.num_flushes = 0
        self.flushed = threading.Event()

    def apply(self) -> None:
        """In this process, for good."""
        for module, attribute, replacement in (
            (Pacer.__module__, "Pacer.begin", self._as_function(self.begin)),
            (Pacer.__module__, "Pacer._left", lambda pacer: left(pacer) if self.num_transfers == 1 else 0),
            (PersistWorker.__module__, "PersistWorker._put", self._as_function(self.put)),
            (Tiers.__module__, "Tiers.flush", self._as_function(self.flush)),
        ):
            Seam(module=module, attribute=attribute, replacement=replacement).apply()

    @staticmethod
    def _as_function(method: Callable[..., Any]) -> Callable[..., Any]:
        """What becomes a method of another class: bound methods do not."""
        return lambda *args, **options: method(*args, **options)  # noqa: PLW0108

    def begin(self, pacer: Pacer, **options: int) -> None:
        self.num_transfers += 1
        begin(pacer, **options)

    def flush(self, tiers: Tiers, timeout: float) -> None:
        self.num_flushes += 1
        if self.flushes:
            flush(tiers, timeout)
            self.flushed.set()

    def put(self, worker: PersistWorker, job: WriteJob, segment: SealedSegment) -> list[SegmentEntry]:
        if self.storage and job.generation.step >= FIRST_UNSTORED:
            assert self.flushed.wait(PATIENCE), "nobody needed the memory of the copies"
        return put(worker, job, segment)


class Watch(AwaitsCopies):
    """Keeps the newest report; waits for the first copies, and for storage where it is not to be late."""

    def __init__(self, late: Late) -> None:
        super().__init__(lambda step: 0 if step == FIRST_COPIED else None)
        self.late = late
        self.report: Report | None = None

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        (callback,) = (each for each in trainer.callbacks if isinstance(each, CheckpointCallback))  # type: ignore[attr-defined]
        assert self.late.storage or callback.wait_committed(PATIENCE)
        self.report = callback.report
        if self.report.windows_skipped:
            self.late.flushed.set()  # in vain: storage must not make the room meanwhile


def train_late(nodes: Nodes, storage: bool, flushes: bool, life: Attempt) -> Mapping[str, Any]:
    """Prints how often training waited for copies, how many windows it did without, and the newest copy."""
    late = Late(storage=storage, flushes=flushes)
    watch = Watch(late)
    late.apply()
    Seam(module="campaign._training", attribute="Setup.callbacks", replacement=lambda *_: [watch]).apply()
    nodes.settle(life)
    returned = train(SETUP, life)
    assert watch.report is not None
    copied = watch.report.generations["peer"]
    print(f"{late.num_flushes} flushes, {watch.report.windows_skipped} windows skipped, copies up to step {copied}")
    return returned


@pytest.mark.parametrize(
    ("storage", "flushes", "wanted"),
    [
        pytest.param(True, True, "[1-9] flushes, 0 windows skipped, copies up to step [1-9]", id="storage-late-too"),
        pytest.param(False, True, "[1-9] flushes, 0 windows skipped, copies up to step [1-9]", id="storage-in-time"),
        pytest.param(True, False, "[1-9] flushes, [1-9] windows skipped", id="ablation", marks=pytest.mark.soak),
    ],
)
def test_a_late_transfer_is_hurried_only_for_the_next_generation(
    campaigns: Campaigns, folder: Path, storage: bool, flushes: bool, wanted: str
) -> None:
    """Where there is no memory left the transfer ends at once, and no generation is left out for it."""
    nodes = Nodes(folder, (0, 1))
    (life,) = campaigns.check(SETUP, fit=partial(train_late, nodes, storage, flushes), may_complain=True)
    for rank in range(2):
        (said,) = (line for line in life.log(rank).splitlines() if " flushes, " in line)
        assert re.match(wanted, said), said
    assert nodes.files() == []
