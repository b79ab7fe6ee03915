"""How long a restarted process needs to have its state back out of memory of the node, without imports.

A process captures one generation in a ring, publishes it and dies by SIGKILL. The clock runs from that signal to the
moment at which another process has found the generation, holds its bytes, and has verified them as a restore does, by
the digest of the whole and the places of records: the death, the search, the marker, the copy. A rank of a real job
starts new processes in between, which is not counted.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_moe_ckpt.benchmarks._benchmark import Goal
from lightning_moe_ckpt.benchmarks._fits import HandOver, TurnTaker, bench_folders
from lightning_moe_ckpt.snapshot._layout import as_memoryview
from lightning_moe_ckpt.storage import (
    GenerationId,
    RecordEntry,
    RecordRows,
    SegmentLayout,
    TensorSpec,
    check_places,
    digest_of,
    dtype_code,
)
from lightning_moe_ckpt.tiers import HostTier, SegmentRing, shared_name
from lightning_moe_ckpt.tiers._sealed import Markers, SealedFile

_NUM_RECORDS = 64
"""Enough that digests of records are not for free."""


def made_up_layout(name: str, nbytes: int) -> SegmentLayout:
    """The layout of about `nbytes`; records begin with `name`."""
    shape = (nbytes // (4 * _NUM_RECORDS),)
    specs = [TensorSpec(f"{name}.{index}", torch.float32, shape) for index in range(_NUM_RECORDS)]
    return SegmentLayout(specs, metadata={})


def made_up_rows(layout: SegmentLayout) -> RecordRows:
    """A record per tensor, each an operator of its own."""
    entries = [
        RecordEntry(
            name=name, operator=name, kind="full", fqn=name, state_key="param", dtype=dtype_code(span.dtype),
            global_shape=span.shape, global_start=0, numel=span.shape[0], offset=span.offset, nbytes=span.nbytes, digest="",
        )
        for name, span in layout.spans.items()
    ]  # fmt: skip
    return RecordRows(entries)


GOAL = Goal("host", "from a SIGKILL to 50 MB out of host memory", 100, "ms", at_least=False)
_RUN, _GENERATION = "bench", GenerationId(step=1, incarnation=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostRestoreFigure:
    """Kills of one process, and its state read back."""

    nbytes: int
    seconds: list[float]
    """From each SIGKILL to verified bytes in another process."""

    @property
    def median(self) -> float:
        """Of all kills."""
        return statistics.median(self.seconds)

    @property
    def outcome(self) -> str:
        """Of the goal, which is in proportion above 50 MB."""
        return GOAL.outcome(1e3 * self.median / max(1.0, self.nbytes / 50e6))


def host_restore_seconds(nbytes: int) -> float:
    """From the SIGKILL of a process to its `nbytes` of state, in one segment of 64 records, verified in another process.

    Raises:
        TurnFailed: the process that was to be killed did not get that far.
    """
    out = torch.empty(nbytes + 2**20, dtype=torch.uint8).fill_(0)  # memory that a model has when it is restored to
    with bench_folders() as (_, memory):

        def capture(hand_over: HandOver[None]) -> None:
            ring = _capture(memory, nbytes)
            hand_over(None)
            ring.close()

        with TurnTaker(capture) as taker:
            taker.take()
            began = time.perf_counter()
            taker.kill()
            _restore(memory, out)
            return time.perf_counter() - began


def _capture(memory: Path, nbytes: int) -> SegmentRing:
    layout = made_up_layout("r", nbytes)
    ring = SegmentRing.create(shared_name(_RUN, 0), layout.nbytes, 1, memory)
    ring.begin_window(_GENERATION)
    slot = ring.acquire(_GENERATION, 1)
    slot.view.fill_(7)
    layout.write_header(slot.view)
    ring.seal(slot)
    ring.finish_window(_GENERATION)
    view = as_memoryview(slot.view)[: layout.nbytes]
    file = SealedFile(generation=_GENERATION, rank=0, step=1, view=view, records=made_up_rows(layout))
    markers = Markers(run_id=_RUN, rank=0, world_size=1)
    ring.publish(_GENERATION, markers.of(_GENERATION, [file.digested()], plan_hash="", plan_json="{}"))
    return ring


def _restore(memory: Path, out: torch.Tensor) -> None:
    tier = HostTier(_RUN, memory)
    try:
        (holding,) = tier.holdings()
        (entry,) = tier.read_marker(holding).segments
        view = as_memoryview(out)[: entry.nbytes]
        tier.read_into(holding, entry, 0, view)
        if digest_of(view) != entry.digest:
            raise RuntimeError("The bytes in memory are not those that were captured.")
        check_places(entry, view)
    finally:
        tier.close()
