"""How long a restarted process needs to have its state back out of memory of the node, without imports.

A process captures one generation in a ring, publishes it and dies by SIGKILL. The clock runs from that signal to the
moment at which another process has found the generation, holds its bytes, and has verified them as a restore does, by
the digest of the whole and the places of records: the death, the search, the marker, the copy. A rank of a real job
starts new processes in between, which is not counted.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_moe_ckpt.benchmarks._benchmark import Goal
from lightning_moe_ckpt.benchmarks._fits import HandOver, TurnTaker
from lightning_moe_ckpt.session._layout import as_memoryview
from lightning_moe_ckpt.session._sealed import Markers, SealedFile
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
from lightning_moe_ckpt.tiers import HostTier, SegmentRing, shared_directory, shared_name

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
_GENERATION = GenerationId(step=1, epoch=1)


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


def host_restore_seconds(nbytes: int, *, directory: Path | None = None) -> float:
    """From the SIGKILL of a process to its `nbytes` of state, verified, in another one.

    Args:
        nbytes: of one rank's segments together, in one segment of 64 records.
        directory: of shared memory; default as in `shared_directory`.

    Raises:
        TurnFailed: the process that was to be killed did not get that far.
    """
    directory = directory if directory is not None else shared_directory()
    run_id = f"bench-host-{os.getpid()}"
    path = directory / shared_name(run_id, 0)

    def capture(hand_over: HandOver[None]) -> None:
        ring = _capture(path, run_id, nbytes)
        hand_over(None)
        ring.close()

    out = torch.empty(nbytes + 2**20, dtype=torch.uint8).fill_(0)  # memory that a model has when it is restored to
    with _removed(path), TurnTaker(capture) as taker:
        taker.take()
        began = time.perf_counter()
        taker.kill()
        _restore(run_id, directory, out)
        return time.perf_counter() - began


@contextmanager
def _removed(path: Path) -> Iterator[None]:
    try:
        yield
    finally:
        ring = SegmentRing.adopt(path)
        if ring is not None:
            ring.close()


def _capture(path: Path, run_id: str, nbytes: int) -> SegmentRing:
    layout = made_up_layout("r", nbytes)
    ring = SegmentRing.create(path.name, layout.nbytes, 1, path.parent)
    ring.begin_window(_GENERATION)
    slot = ring.acquire(_GENERATION, 1)
    slot.view.fill_(7)
    layout.write_header(slot.view)
    ring.seal(slot)
    ring.finish_window(_GENERATION)
    view = as_memoryview(slot.view)[: layout.nbytes]
    file = SealedFile(generation=_GENERATION, rank=0, step=1, view=view, records=made_up_rows(layout))
    markers = Markers(run_id=run_id, rank=0, world_size=1)
    ring.publish(_GENERATION, markers.of(_GENERATION, [file.digested()], plan_hash="", plan_json="{}"))
    return ring


def _restore(run_id: str, directory: Path, out: torch.Tensor) -> None:
    tier = HostTier(run_id, directory)
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
