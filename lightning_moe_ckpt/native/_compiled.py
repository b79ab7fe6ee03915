"""The compiled copy engine between CPU tensors: one call per list, on one thread that never takes the GIL.

Keeps the contract of `CopyEngine`; `CpuCopyEngine` is its twin in Python. A list that was not prepared, or that the library
cannot arrange, such as a conversion that only torch knows, goes to the twin's thread, behind what was submitted before.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from torch import Tensor
from typing_extensions import override

from lightning_moe_ckpt.errors import CheckpointError
from lightning_moe_ckpt.native._copies import Copy, CopyList
from lightning_moe_ckpt.native._cpu import CpuCopyEngine
from lightning_moe_ckpt.native._engine import Ticket
from lightning_moe_ckpt.native._library import Library
from lightning_moe_ckpt.native._memory import Preparation
from lightning_moe_ckpt.native._plan import Arrangement, CopyPlan, PlannedCopies, slices_of
from lightning_moe_ckpt.native._worker import CompiledEngine, CompiledTicket, Worker

_DEPTH = 2
"""Chunks between two looks at what else is to be done; copies on the CPU are made one after another anyway."""


class CompiledCpuEngine(CompiledEngine):
    """Copies in the order they were submitted, on one thread outside the interpreter.

    Args:
        library: the CPU part.
        arrangement: how lists are cut; fences do not wait for whole lists of others.
        threads: that share the copying of one chunk. One is right beside training: copies are bound by memory.
    """

    def __init__(self, library: Library, arrangement: Arrangement | None = None, *, threads: int = 1) -> None:
        self._library, self._threads = library, threads
        self._arrangement = arrangement if arrangement is not None else Arrangement()
        self._worker: Worker | None = None
        self._twin = CpuCopyEngine()
        self._newest: Ticket | None = None
        self._newest_of_twin: Ticket | None = None
        self._preparations: dict[int, Preparation] = {}

    @override
    def register(self, buffer: Tensor) -> None:
        """Let the first copies meet memory that is mapped already; in the background."""
        self._preparations[buffer.data_ptr()] = Preparation(buffer)

    @override
    def unregister(self, buffer: Tensor) -> None:
        self._preparations.pop(buffer.data_ptr()).stop()

    @override
    def prepare(self, copies: Sequence[Copy]) -> PlannedCopies:
        planned = PlannedCopies(copies)
        slices = slices_of(planned)
        if slices is not None:
            planned.keep()
            planned.plan = CopyPlan(self._library, slices, self._arrangement)
        return planned

    @override
    def close(self) -> None:
        self._twin.close()
        if self._worker is not None:
            self._worker.stop()
        while self._preparations:
            self._preparations.popitem()[1].stop()
        self._worker, self._newest, self._newest_of_twin = None, None, None

    @override
    def _check(self, copies: Sequence[Copy]) -> PlannedCopies:
        # Arranging takes 2 to 3 us a pair, torch's own call 0.6: a list gains from it when it is submitted again.
        return PlannedCopies(copies)

    @override
    def _submit(self, copies: PlannedCopies) -> Ticket:
        worker = self._running_worker()
        if copies.plan is not None and (self._newest_of_twin is None or self._newest_of_twin.done):
            return worker.submit(copies)
        self._newest_of_twin = self._twin.submit(_Later(copies, self._newest))
        return self._newest_of_twin

    @override
    def _running_worker(self) -> Worker:
        if self._worker is None or not self._worker.is_ours:
            self._worker = Worker(self._library, _DEPTH, self._threads)
            self._newest, self._newest_of_twin = None, None
        return self._worker


class _Later(CopyList):
    """Copies that wait, on the twin's thread, until what was submitted before them has been made."""

    def __init__(self, copies: CopyList, after: Ticket | None) -> None:
        super().__init__(list(copies.pairs()))
        self._after = after

    @override
    def run(self, *, non_blocking: bool = False) -> None:
        if isinstance(self._after, CompiledTicket):
            with suppress(CheckpointError):  # told to whoever holds that ticket; the order is kept either way
                self._after.wait()
        super().run(non_blocking=non_blocking)
