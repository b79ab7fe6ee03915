"""A dense generation of one boundary, made durable while training waits: the first and the last of a run.

It streams through a temporary buffer, since the ring is sized for windows, and at the start there is none yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lightning_moe_ckpt.native import CopyEngine
from lightning_moe_ckpt.parallel import ParallelGroups
from lightning_moe_ckpt.session._codec import encode
from lightning_moe_ckpt.session._exchange import Exchange
from lightning_moe_ckpt.session._journal import Journal
from lightning_moe_ckpt.session._layout import StateView
from lightning_moe_ckpt.session._persist import PersistWorker
from lightning_moe_ckpt.session._planning import dense_layout
from lightning_moe_ckpt.session._stall import StallMeter
from lightning_moe_ckpt.session._worker import Announced
from lightning_moe_ckpt.session._writer import SegmentWriter
from lightning_moe_ckpt.storage import GenerationId


class DenseCapture:
    """Takes dense generations of one life.

    Args:
        view: live state.
        groups: this rank's place.
        exchange: control exchange between the ranks.
        engine: copies device tensors.
        worker: of the tier that is waited for.
        stalls: where the wait is recorded.
    """

    def __init__(
        self,
        *,
        view: StateView,
        groups: ParallelGroups,
        exchange: Exchange,
        engine: CopyEngine,
        worker: PersistWorker,
        stalls: StallMeter,
    ) -> None:
        self._view, self._groups, self._exchange = view, groups, exchange
        self._engine, self._worker, self._stalls = engine, worker, stalls

    def write(
        self, generation: GenerationId, start: Journal, *, state: Mapping[str, Any], journal_nbytes: int, timeout: float
    ) -> bool:
        """Capture everything at once and wait until it is durable. Collective.

        Args:
            generation: named by the boundary it is of.
            start: the journal's start half.
            state: what the planner adds to the journal's outcome.
            journal_nbytes: capacity of the journal record, at least.
            timeout: seconds.

        Returns:
            Whether it is durable on all ranks.
        """
        outcome = {"step": generation.step, "losses": [], **state}
        journal = {"outcome": outcome, "start": start}
        with self._stalls.measure("dense"):
            # A stop's journal lacks the moments that never came; who resumes from it reserves for those that do.
            journal_nbytes = max(2 * len(encode(journal)), journal_nbytes)
            layout = dense_layout(self._view, self._groups, journal_nbytes)
            slot = layout.slots[0]
            writer = SegmentWriter(slot, torch.zeros(slot.segment.nbytes, dtype=torch.uint8), self._engine)
            ticket = writer.start()
            writer.write_local(journal)
            self._worker.begin(
                Announced(generation=generation, plan_hash=layout.plan_hash, plan_json=layout.plan_json, num_segments=1)
            )
            self._worker.add(generation, writer.sealed(generation, generation.step, ticket))
            self._worker.drain(timeout)
            # Nobody trains on, or leaves, before the coordinator has committed.
            return self._exchange.all_agree(self._worker.holds(generation))
