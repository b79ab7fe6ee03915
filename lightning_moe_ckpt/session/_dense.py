"""Take dense generations of one boundary: a run's first, its last, and any other that storage must have whole.

Training waits until the last is durable; all others are stored while training goes on. Each streams through a temporary
buffer, freed once stored: the ring is sized for windows, and does not exist at the start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.errors import CheckpointError, CodecError
from lightning_moe_ckpt.journal import UNFIT, Journal, JournalOverflow, encode
from lightning_moe_ckpt.native import Preparation
from lightning_moe_ckpt.planning import Planner
from lightning_moe_ckpt.session._job import SessionJob
from lightning_moe_ckpt.snapshot import BoundaryCapture, SegmentWriter, WindowLayout, dense_layout
from lightning_moe_ckpt.storage import GenerationId
from lightning_moe_ckpt.tiers import PersistWorker, WriteRequest

log = rank_logger(__name__)

_MAPPED_AHEAD_NBYTES = 64 * 2**20
"""Least bytes whose pages are mapped ahead; copies map a smaller snapshot's pages themselves, at about 1 GB/s."""

_T = TypeVar("_T")
_Captured: TypeAlias = tuple[WindowLayout, BoundaryCapture]

_NOT_TAKEN = "a checkpoint was not taken; training goes on: step %d as a whole: %s"


class DenseTurns:
    """Boundaries where a dense generation, for exports, replaces a window: once in every `every_n_steps`, or never."""

    def __init__(self, every_n_steps: int | None) -> None:
        self._every, self._turn = every_n_steps, -1

    def due(self, step: int, *, replaying: bool) -> bool:
        """Return whether boundary `step`, where a window could begin, takes a dense generation instead, on all ranks alike.

        Never in replay, whose frozen parts are of an older step. A run's first generation is dense already.
        """
        if self._every is None or replaying:
            return False
        turn, before = step // self._every, self._turn
        self._turn = turn
        return 0 <= before < turn


class DenseCapture:
    """Take dense generations of one incarnation, for the tier of `worker`; `plans` adds entries to journals and markers."""

    def __init__(
        self, job: SessionJob, *, name: Callable[[int], GenerationId], worker: PersistWorker, plans: Planner
    ) -> None:
        self._job, self._name, self._worker, self._plans = job, name, worker, plans
        self._held: _Captured | None = None
        self._holds = False
        self.losses: list[Tensor] = []
        """Losses of the newest step, for the journal."""

    def hold(self, step: int, start: Journal) -> None:
        """Capture the whole state for `write`. Later hooks may add one entry to `start`: `end`."""
        with self._job.stalls.measure("dense"):
            self._held, self._holds = self._tried(self._captured, step, start), True

    def write(self, step: int, start: Journal, *, timeout: float) -> GenerationId | None:
        """Capture the whole state, or use the held capture, and wait until the generation is durable. Collective.

        Args:
            step: the boundary.
            start: the journal's start half.
            timeout: seconds.

        Returns:
            The generation if it is durable on all ranks, else `None`.
        """
        with self._job.stalls.measure("dense"):
            captured = self._held if self._holds else self._tried(self._captured, step, start)
            self._held, self._holds = None, False
            generation = None if captured is None else self._tried(self._submit, captured, start)
            self._worker.drain(timeout)
            # No rank trains on, or leaves, before the coordinator has committed.
            held = generation is not None and self._worker.holds(generation)
            return generation if self._job.exchange.all_agree(held) else None

    def begin(self, step: int, start: Journal) -> None:
        """Capture the whole state, to be stored beside training; wait for the copies, since passes may change weights.

        Without memory this logs an error, takes nothing, and training goes on.

        Args:
            step: the boundary at which the next batch begins.
            start: the journal's start half.
        """
        with self._job.stalls.measure("dense"):
            if (captured := self._tried(self._captured, step, start)) is not None:
                self._tried(self._submit, captured, start)

    def _tried(self, take: Callable[[Any, Journal], _T], of: Any, start: Journal) -> _T | None:
        try:
            return None if UNFIT in start else take(of, start)
        except (RuntimeError, CheckpointError) as error:  # torch has no other error for missing memory
            log.error(_NOT_TAKEN, of if isinstance(of, int) else of[1].step, error)
            return None

    def _captured(self, step: int, start: Journal) -> _Captured:
        journal = {"outcome": {"step": step, "losses": self.losses, **self._plans.state()}, "start": start}
        # A stop's journal lacks later moments and the last hooks' results; a resuming run reserves room for both.
        layout = dense_layout(
            self._job.view, self._job.groups, max(3 * len(encode(journal)), self._plans.journal_nbytes)
        )
        (written,) = layout.steps
        writer = SegmentWriter(written, _memory(written.files_nbytes), self._job.engine)
        capture = BoundaryCapture(writer, step, journal["outcome"])
        capture.take_rest(start, disturbed=False)
        self._job.engine.fence(capture.ticket)  # hooks and passes may change weights
        return layout, capture

    def _submit(self, captured: _Captured, start: Journal) -> GenerationId:
        layout, capture = captured
        generation = self._name(capture.step)
        if "end" in start:
            try:
                capture.add({"end": start["end"]})
            except (JournalOverflow, CodecError) as error:
                log.warning(
                    "a later start of this finished run shows what it had before the hooks of its last epoch's end: %s",
                    error,
                )
        segment = capture.sealed(generation)  # first: a failed seal must not leave a generation begun
        self._worker.begin(
            WriteRequest(
                generation=generation,
                plan_hash=layout.record.plan_hash,
                plan_json=layout.record.to_json(),
                num_segments=1,
                bad=self._plans.bad_copies,
            )
        )
        self._worker.add(generation, segment)
        return generation


def _memory(nbytes: int) -> Tensor:
    """Return zeros, whose pages a few threads map ahead of the copies where mapping takes long.

    Not page-locked: for a single use, locking takes as long as copies into ordinary mapped memory.
    """
    memory_U8 = torch.zeros(nbytes, dtype=torch.uint8)
    if nbytes >= _MAPPED_AHEAD_NBYTES:
        Preparation(memory_U8)
    return memory_U8
