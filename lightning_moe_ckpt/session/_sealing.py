"""Bring the newest boundary from its copies to the tiers.

Copies begin at the boundary, and overlap with forward and backward of the next step. As the next batch begins, the
journal is taken, and everything that has changed in place since is copied again. A thread writes the journal while
backward runs without the interpreter lock, and hands the segment to the tiers.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.errors import CheckpointError, CodecError
from lightning_moe_ckpt.journal import UNFIT, Arrivals, Journal, JournalOverflow
from lightning_moe_ckpt.native import Ticket
from lightning_moe_ckpt.planning import Planner
from lightning_moe_ckpt.process import CallThread
from lightning_moe_ckpt.session._job import SessionJob
from lightning_moe_ckpt.session._pacing import StepKind
from lightning_moe_ckpt.session._tiers import Tiers
from lightning_moe_ckpt.session._window import Window
from lightning_moe_ckpt.snapshot import (
    BoundaryCapture,
    BufferChanged,
    DataAccess,
    RecordedStep,
    SegmentWriter,
    StepCopies,
)
from lightning_moe_ckpt.tiers import Slot

log = rank_logger(__name__)

_TORN = "weights were changed in place, by a forward or backward pass, while they were copied; from here on it waits for copies"


class PassEdits:
    """Whether passes change weights, as `nn.Embedding(max_norm=...)` does, which is unknown before the first change, unless `known`.

    Each batch waits for copies during the first window, and always after the first change. In between, copies run
    beside passes, and a copy that may have met a change is not used. For changes through `.data` see `DataAccess`.
    """

    def __init__(self, *, known: bool) -> None:
        self._seen: bool | None = known or None
        """Whether a pass has changed weights; `None` before the first window."""
        self.may_come = True
        """Whether a batch begins with a wait for the boundary's copies."""

    def torn(self, pending: BoundaryCapture) -> str | None:
        """Return why a taken boundary is useless, since its copies may have met a change; `None` if they have not."""
        if self._seen or not pending.is_overtaken:
            pending.had_arrived = pending.ticket.done
            return None
        waited, self._seen, self.may_come = self._seen is None, True, True
        log.info("forward or backward passes change weights in place: from here on they wait for copies of a boundary")
        return None if waited or pending.had_arrived else _TORN

    def window_taken(self) -> None:
        """Take the first window's observation as valid from here on."""
        self._seen = self.may_come = bool(self._seen)


class Seal(Enum):
    """How far the newest boundary is."""

    NONE = auto()
    """It is sealed, was not captured, or there is none."""
    CAPTURED = auto()
    """Copies have begun, and the next batch has not."""
    TAKEN = auto()
    """The next batch has begun, and journal and buffers are taken: the segment can be written."""
    WRITING = auto()
    """The thread writes the journal and hands the segment to the tiers."""
    SPOILED = auto()
    """The next batch has begun, and the window is spoiled: the boundary counts only if the window ends with it."""


_MOVES = {
    Seal.NONE: {Seal.NONE, Seal.CAPTURED, Seal.SPOILED},
    Seal.CAPTURED: {Seal.CAPTURED, Seal.TAKEN, Seal.SPOILED, Seal.NONE},
    Seal.TAKEN: {Seal.WRITING, Seal.SPOILED, Seal.NONE},
    Seal.WRITING: {Seal.NONE},
    Seal.SPOILED: {Seal.SPOILED, Seal.NONE},
}
"""Moves: `capture` to CAPTURED, `take` to TAKEN or SPOILED, `begin` to WRITING, `spoil` to SPOILED, others to NONE."""


@dataclass(frozen=True, slots=True)
class _Boundary:
    window: Window
    pending: BoundaryCapture
    slot: Slot
    num_accesses: int
    """Accesses to `.data` before the capture."""


class Sealing:
    """Own the newest boundary, from its copies until the tiers have its segment, and the thread that writes it.

    Args:
        tiers: get the segment.
        plans: knows the size of journals.
        failures: gets the reason of each failure that spoils a window.
    """

    def __init__(self, job: SessionJob, tiers: Tiers, plans: Planner, failures: list[str]) -> None:
        self._engine, self._stalls = job.engine, job.stalls
        self._tiers, self._plans, self._failures = tiers, plans, failures
        self.state = Seal.NONE
        self._boundary: _Boundary | None = None
        """The boundary; `None` in the state NONE, and where nothing was captured."""
        self._step = -1
        """Step of the boundary, from `take` on."""
        self._ticket: Ticket | None = None
        """Ticket of the newest copies; outlives the seal, since the optimizer steps after the seal."""
        self._thread, self.edits, self._arrivals = CallThread(), PassEdits(known=job.may_edit_unseen), Arrivals()
        self._data = DataAccess(job.module.parameters(), self._before_data)
        self.journal_nbytes = 0
        """Bytes that later journal records need; 0 if all records had room, and once plans have it."""
        self._nearly_full = 0  # capacity of journal records for which more room was last requested

    # -- a boundary's way

    def capture(
        self,
        window: Window,
        slot: Slot,
        copies: StepCopies,
        *,
        step: int,
        outcome: Journal,
        record: RecordedStep | None,
    ) -> None:
        """Begin to copy boundary `step` into its slot."""
        writer = SegmentWriter(copies.layout, slot.view, self._engine, self._arrivals, copies)
        pending = BoundaryCapture(writer, step, outcome, record)
        self._boundary, self._ticket = _Boundary(window, pending, slot, self._data.count), pending.ticket
        self._move(Seal.CAPTURED)

    def capture_again(self, slot: Slot, copies: StepCopies) -> None:
        """Begin to copy a captured boundary anew, into other records and another slot."""
        if (boundary := self._boundary) is not None:
            writer = SegmentWriter(copies.layout, slot.view, self._engine, self._arrivals, copies)
            pending = boundary.pending.again(writer)
            self._boundary, self._ticket = replace(boundary, pending=pending, slot=slot), pending.ticket

    def take(self, window: Window, start: Journal, *, step: int, disturbed: bool) -> None:
        """Take the rest of the boundary as the next batch begins, see `CaptureSession.seal`."""
        boundary, self._step = self._boundary, step
        if UNFIT in start:
            self.spoil(window, start[UNFIT], failed=False)
        if boundary is None or window.spoiled:
            self._move(Seal.SPOILED)
            return
        self._move(Seal.TAKEN)
        with self._stalls.measure("journal"):
            try:
                # Hooks and validation may have changed buffers since the step; the next forward will.
                boundary.pending.take_rest(start, disturbed=disturbed or self._data.count != boundary.num_accesses)
                if self.edits.may_come:
                    self._engine.fence(boundary.pending.ticket)
            except (CheckpointError, BufferChanged, RuntimeError) as error:  # RuntimeError: torch's, without memory
                changed = isinstance(error, BufferChanged)
                if changed:  # plans are laid out anew for the buffers' new shapes
                    self.journal_nbytes = self._plans.journal_nbytes
                self.spoil(window, f"its buffers or what was changed cannot be stored: {error}", failed=not changed)

    def begin(self) -> None:
        """Begin to write a taken boundary on the thread; call where training is about to run without Python.

        Copies on a device wait for the fence: there the training thread runs ahead of the device, and loses nothing.
        """
        boundary = self._boundary
        if self.state is not Seal.TAKEN or boundary is None:
            return
        if (torn := self.edits.torn(boundary.pending)) is not None:
            self.spoil(boundary.window, torn)
        elif not boundary.pending.waits_for_device:
            self._move(Seal.WRITING)
            self._thread.begin(partial(self._hand_over, boundary))

    def complete(self, *, wait: bool = True) -> int | None:
        """Hand the boundary to the tiers and return its step; `None` if none was taken. Skip a device's copies without `wait`."""
        state, boundary = self.state, self._boundary
        if state is Seal.NONE or state is Seal.CAPTURED:
            return None
        if not wait and boundary is not None and boundary.pending.waits_for_device:
            return None
        self._boundary = None
        self._move(Seal.NONE)  # first: an error leaves nothing to be completed again
        if boundary is not None and state is not Seal.SPOILED:
            window, pending = boundary.window, boundary.pending
            torn = self.edits.torn(pending)
            try:
                if pending.waits_for_device and torn is None:
                    with self._stalls.measure("arrival"):
                        pending.arrive()
                with self._stalls.measure("journal"):
                    if state is Seal.WRITING:
                        self._thread.join()
                    elif torn is None:
                        self._hand_over(boundary)
            except (JournalOverflow, CodecError, RuntimeError) as error:  # RuntimeError: torch's, from a lost device
                self.journal_nbytes = 2 * error.nbytes if isinstance(error, JournalOverflow) else 0
                self.spoil(window, f"its journal cannot be stored: {error}")
            if torn is not None:
                self.spoil(window, torn)
        return self._step

    def spoil(self, window: Window | None, reason: str, *, failed: bool = True) -> None:
        """Spoil the window under way: it runs to its end, so that ranks stay in step, but gives no generation."""
        if window is None or window.spoiled:
            return
        window.spoiled, window.why = True, f"{reason.rstrip('.')}."
        if failed:
            self._failures.append(f"generation {window.generation.step} was not taken: {reason}")
        self._tiers.abandon(window)
        if self.state is Seal.TAKEN:
            self._move(Seal.SPOILED)

    def forget(self) -> None:
        """Leave the boundary: its window is dropped."""
        self._boundary = None
        self._move(Seal.NONE)

    # -- waits

    def fence(self, window: Window | None, *, cause: str = "fence") -> None:
        """Wait until the sources of the newest copies may be overwritten; the wait counts as `cause`."""
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            with self._stalls.measure_both(cause):
                try:
                    self._engine.fence(ticket)
                except CheckpointError as error:
                    self.spoil(window, str(error))

    def wait(self, window: Window | None) -> None:
        """End the thread's call, and wait until all copies into the ring have ended, successful or not."""
        self._thread.finish()
        sealed = [] if window is None else window.segments
        pending = None if self._boundary is None else self._boundary.pending.ticket
        for ticket in {self._ticket, pending, *(segment.ticket for segment in sealed)}:
            if ticket is not None:
                with suppress(CheckpointError):  # reported by the fence, or useless by now
                    ticket.wait()

    def close(self) -> None:
        """Stop watching accesses to `.data`."""
        self._data.close()

    # -- private

    def _move(self, state: Seal) -> None:
        assert state in _MOVES[self.state], f"{self.state} to {state}"
        self.state = state

    def _hand_over(self, boundary: _Boundary) -> None:
        """Write the journal, and hand the segment to the tiers. On the training thread, or beside it."""
        window, pending = boundary.window, boundary.pending
        segment = pending.sealed(window.generation)
        if 3 * pending.journal_nbytes > 2 * pending.journal_capacity > 2 * self._nearly_full:
            self.journal_nbytes, self._nearly_full = 3 * pending.journal_nbytes, pending.journal_capacity
        window.ring.seal(boundary.slot)
        window.segments.append(segment)
        self._tiers.governor.measured.note(StepKind.CAPTURED)
        for worker in window.workers:
            worker.add(segment.generation, segment)

    def _before_data(self) -> None:
        """Wait for copies: a change through `.data` during a copy leaves no trace."""
        if (ticket := self._ticket) is not None and not ticket.done:
            with self._stalls.measure_both("fence"), suppress(CheckpointError):  # reported by the fence
                self._engine.fence(ticket)
