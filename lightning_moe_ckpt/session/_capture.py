"""Capture windows: boundaries are captured, sealed one batch later, and handed to the tiers.

At boundary t this window step's slices are copied into a segment of the ring, overlapped with forward and backward of
t+1. `seal` takes the journal at the next batch start; a thread writes the journal while backward runs without the
interpreter lock. `fence` completes the segment, and waits for the copies before the optimizer overwrites their sources.
A window whose segments are all sealed is a generation. All ranks open windows together: one small exchange decides
whether a window starts and which tiers take it, so no rank fills half a generation.

Source: MoEvement (2026), Sec. 3.2; PEC/MoC (2024), Sec. 5 (triple buffering).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from operator import attrgetter

from torch import Tensor

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt._units import size_text
from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.errors import CheckpointError, CodecError, ConfigurationError, RingFull, UnsupportedOptimizer
from lightning_moe_ckpt.journal import UNFIT, Arrivals, Journal, JournalOverflow
from lightning_moe_ckpt.native import CopyEngine, Ticket
from lightning_moe_ckpt.planning import Planner
from lightning_moe_ckpt.process import CallThread, StallMeter
from lightning_moe_ckpt.session._edits import PassEdits
from lightning_moe_ckpt.session._tiers import Tiers
from lightning_moe_ckpt.session._window import TiersVote, Window, WindowVote, gather_votes
from lightning_moe_ckpt.snapshot import (
    BoundaryCapture,
    BufferChanged,
    DataAccess,
    GradientRecorder,
    RecordedStep,
    SegmentWriter,
    StepLayout,
    WindowCopies,
    WindowLayout,
)
from lightning_moe_ckpt.storage import GenerationId
from lightning_moe_ckpt.tiers import MissedWindows, SegmentRing, Slot

log = rank_logger(__name__)

FLUSH_TIMEOUT = timedelta(seconds=30)
"""Longest wait of training for slots under transfer, before training goes on without a window."""


class CaptureSession:
    """Capture windows for one incarnation of a run.

    `name` names a generation by its step. `make_ring` allocates a ring for a layout's windows; `renew_ring` copies the
    ring in use after its name was removed. `params` are the trained parameters. `gradients` records the gradients
    before each boundary, for tiers that want them.
    """

    def __init__(
        self,
        *,
        name: Callable[[int], GenerationId],
        exchange: Exchange,
        engine: CopyEngine,
        tiers: Tiers,
        stalls: StallMeter,
        make_ring: Callable[[WindowLayout], SegmentRing],
        renew_ring: Callable[[], SegmentRing],
        plans: Planner,
        params: Sequence[Tensor],
        gradients: GradientRecorder | None = None,
    ) -> None:
        self._name, self._exchange, self._engine, self._gradients = name, exchange, engine, gradients
        self._tiers, self._stalls, self._make_ring, self._renew_ring = tiers, stalls, make_ring, renew_ring
        self._plans, self._arrivals, self._journal_nbytes = plans, Arrivals(), 0
        self.failures: list[str] = []
        """Reasons why windows were spoiled; the owner reports and clears them."""
        self._given_up: GenerationId | None = None
        """Generation of an aborted window: tiers may still read from it, so no other window gets its name."""
        self.layout: WindowLayout | None = None
        """The plan in force; `None` before the first."""
        self._ring: SegmentRing | None = None
        self._nearly_full = 0  # capacity of journal records for which more room was last requested
        self.window: Window | None = None
        """Window that takes the next boundary; `None` between windows."""
        self._pending: BoundaryCapture | None = None
        self._slot: Slot | None = None
        """Memory of the newest capture."""
        self._sealing: int | None = None
        """Boundary for which `complete_seal` is due."""
        self._seal_thread, self._edits, self._data = CallThread(), PassEdits(), DataAccess(params, self._before_data)
        self._accesses = 0
        """Accesses to `.data` before the newest capture."""
        self._ticket: Ticket | None = None
        """Ticket of the newest copies; outlives the seal, since the optimizer steps after the seal."""
        self.whole_at: int | None = None
        """The newest boundary, if a dense generation replaces its window, see `Tiers.wants_whole`."""
        self._copies = WindowCopies(engine)
        self._complete: Window | None = None
        self._ended: Window | None = None
        """Window that ended last, complete or spoiled on this rank, until the next vote tells all ranks."""
        self.missed_windows = MissedWindows()
        self.generations_complete = self.windows_skipped = self.segments_captured = self.nbytes_captured = 0

    def is_within(self, step: int) -> bool:
        """Whether boundary `step` is neither the first nor the last of the window under way."""
        return self.window is not None and self.window.first < step < self.window.generation.step

    @property
    def window_position(self) -> int:
        """Sealed boundaries of the window under way; 0 between windows."""
        return 0 if self.window is None else len(self.window.segments)

    def use_layout(self, layout: WindowLayout) -> bool:
        """Put a plan in force from the next window on; return `False` if the plan does not fit the ring. All ranks call
        it.

        Raises:
            ConfigurationError: on every rank, if any rank has no memory for its first ring.
        """
        assert self.window is None
        if self._ring is None:
            with self._exchange.raise_together():
                self._ring = self._make_ring(layout)
        elif self.layout is None and not self._fitted(layout):
            return False
        elif not self._fits(layout):
            log.warning(
                "a new plan needs %d segments of %s, more than the ring has; the old plan stays in force",
                *(len(layout.steps), size_text(layout.slot_nbytes)),
            )
            return False
        self.layout = layout
        self._tiers.planned(self._exchange, self._ring, layout)
        return True

    def forget_layout(self) -> None:
        """Abort the window under way, and take none until another plan is in force. All ranks call it."""
        self._given_up = None if self.window is None else self.window.generation
        self.abort_window()
        self.layout = None

    def open_window(self, step: int, use: Callable[[WindowLayout], None] | None = None, *, dense: bool = False) -> bool:
        """Agree with all ranks to start a window whose first boundary is `step`; return whether it starts. Collective.

        Args:
            step: the boundary just reached.
            use: puts a plan in force, if the plan may change here.
            dense: whether storage gets this whole boundary instead; the same on all ranks.
        """
        assert self.layout is not None
        if self._name(step + len(self.layout.steps) - 1) == self._given_up:
            return False
        # The plan stays in replay, so the next look at the order waits: it would overtake a plan made before.
        plans = self._plans if use is not None else None
        with self._stalls.measure("plan"):
            following = plans.take_next() if plans is not None else None  # the same on all ranks
        inputs = plans.inputs() if plans is not None else []
        with self._stalls.measure("exchange"):
            own = self._vote(step, following), self._tiers.vote()
            votes, of_tiers, of_plans = gather_votes(self._exchange, *own, inputs)
        if plans is not None:
            plans.agreed(of_plans)
        self._close_last_window(votes)
        self._hear(of_tiers)
        following, grown = self._grow_journal(max(map(attrgetter("journal_nbytes"), votes)), following)
        if following is not None and use is not None:
            self._follow(following, use, fits=all(map(attrgetter("fits"), votes)))
        why_not = self._restore_names() if not grown or any(map(attrgetter("unnamed"), votes)) else None
        whole = dense or self._tiers.wants_whole(self._name(step), self.layout)
        self.whole_at = step if whole else None
        if whole:
            return False
        if why_not is None and not all(map(attrgetter("has_room"), votes)):
            why_not = self._make_room()
        if why_not is not None:
            self.windows_skipped += 1
            self.missed_windows.add(step, why_not)
            return False
        self._start(step)
        if plans is not None:
            plans.started(step, self.layout)
        return True

    def capture(self, step: int, outcome: Journal) -> None:
        """Start copying this window step's slices of boundary `step`; call right after the optimizer step."""
        window, ring = self.window, self._ring
        assert window is not None
        assert ring is not None
        if step > window.first and self._tiers.outstanding:
            with self._stalls.measure("exchange"):
                self.hear(filling=window.generation)
        if window.spoiled:
            return
        layout = window.layout.steps[step - window.first]
        try:
            slot = ring.acquire(window.generation, step, layout.nbytes if window.is_link else None)
        except RingFull as error:
            self._spoil(str(error))
            return
        try:
            copies = self._copies.of(layout, window.layout)
            writer = SegmentWriter(layout, slot.view, self._engine, self._arrivals, copies)
            record = self._record_step(window, layout, slot)  # first: gradients go sooner than the changed parameters
            pending = BoundaryCapture(writer, step, outcome, record)
        except UnsupportedOptimizer as error:  # the state's form has changed; said once
            self._spoil(str(error), failed=self.missed_windows.in_a_row == 0)
            return
        self._pending, self._slot, self._ticket, self._accesses = pending, slot, pending.ticket, self._data.count
        self.segments_captured += 1
        self.nbytes_captured += layout.files_nbytes

    def fence_gradients(self) -> None:
        """Wait until gradients may be overwritten or freed."""
        if self._gradients is not None:
            with self._stalls.measure_both("gradients"):
                self._gradients.fence()

    def fence(self) -> None:
        """Wait until the optimizer may overwrite the sources of the newest capture."""
        self.complete_seal()
        if self._gradients is not None:
            self.fence_gradients()  # in case nobody called it before gradients were set to zero
            self._gradients.step_begins()
        ticket, self._ticket = self._ticket, None
        if ticket is None:
            return
        with self._stalls.measure_both("fence"):
            try:
                self._engine.fence(ticket)
            except CheckpointError as error:
                self._spoil(str(error))

    def seal(self, start: Journal, *, step: int, disturbed: bool = False) -> None:
        """Take the rest of boundary `step` as the next batch begins; the next fence completes it.

        Args:
            start: the journal's start half.
            step: the boundary.
            disturbed: whether sources may have changed unseen since `capture`; then all are copied again.
        """
        if self.window is None:
            return
        self._sealing, pending = step, self._pending
        if UNFIT in start:
            self._spoil(start[UNFIT], failed=False)
        if pending is not None and not self.window.spoiled:
            with self._stalls.measure("journal"):
                if self._gradients is not None:
                    self._gradients.sealed()
                try:
                    # Hooks and validation may have changed buffers since the step; the next forward will.
                    pending.take_rest(start, disturbed=disturbed or self._data.count != self._accesses)
                    if self._edits.may_come:
                        self._engine.fence(pending.ticket)
                except (CheckpointError, BufferChanged, RuntimeError) as error:  # RuntimeError: torch's, without memory
                    changed = isinstance(error, BufferChanged)
                    if changed:  # plans are laid out anew for the buffers' new shapes
                        self._journal_nbytes = self._plans.journal_nbytes
                    self._spoil(f"its buffers or what was changed cannot be stored: {error}", failed=not changed)

    def begin_seal(self, why_not: str = "") -> None:
        """Begin to complete the newest boundary on a thread; call where training is about to run without Python.

        Copies on a device wait for the fence: there the training thread runs ahead of the device, and loses nothing.
        With a reason `why_not` the boundary is given up, which does not count as a failure.
        """
        if why_not:
            self._spoil(why_not, failed=False)
            if self.window is None and self.whole_at is not None:
                self._tiers.abandon_whole(self._name(self.whole_at))
        window, pending = self.window, self._pending
        if self._sealing is None or window is None or pending is None or window.spoiled or self._seal_thread.busy:
            return
        if (torn := self._edits.torn(pending)) is not None:
            self._spoil(torn)
        elif not pending.waits_for_device:
            assert self._slot is not None
            self._seal_thread.begin(partial(self._hand_over, window, pending, self._slot))

    def complete_seal(self, *, wait: bool = True) -> None:
        """Complete the newest boundary after `seal`, and hand it to the tiers. Without `wait`, skip a device's copies."""
        window, pending, step = self.window, self._pending, self._sealing
        if window is None or step is None or (not wait and pending is not None and pending.waits_for_device):
            return
        self._pending = self._sealing = None
        if pending is not None and not window.spoiled:
            torn = self._edits.torn(pending)
            if self._seal_thread.busy or torn is None:
                self._complete_journal(window, pending)
            if torn is not None:
                self._spoil(torn)
        if step == window.generation.step:
            self._finish(window)

    def _complete_journal(self, window: Window, pending: BoundaryCapture) -> None:
        assert self._slot is not None
        try:
            if pending.waits_for_device:
                with self._stalls.measure("arrival"):
                    pending.arrive()
            with self._stalls.measure("journal"):
                if self._seal_thread.busy:
                    self._seal_thread.join()
                else:
                    self._hand_over(window, pending, self._slot)
        except (JournalOverflow, CodecError, RuntimeError) as error:  # RuntimeError: torch's, from a lost device
            self._journal_nbytes = 2 * error.nbytes if isinstance(error, JournalOverflow) else 0
            self._spoil(f"its journal cannot be stored: {error}")

    def _hand_over(self, window: Window, pending: BoundaryCapture, slot: Slot) -> None:
        """Write the journal, and hand the segment to the tiers. On the training thread, or beside it."""
        segment = pending.sealed(window.generation)
        if 3 * pending.journal_nbytes > 2 * pending.journal_capacity > 2 * self._nearly_full:
            self._journal_nbytes, self._nearly_full = 3 * pending.journal_nbytes, pending.journal_capacity
        window.ring.seal(slot)
        window.segments.append(segment)
        self._tiers.add(window, segment)

    def _record_step(self, window: Window, layout: StepLayout, slot: Slot) -> RecordedStep | None:
        """Begin to copy the gradients before the boundary, if a tier can use them."""
        if self._gradients is None:
            return None
        if not self._tiers.want_gradients(window):
            self._gradients.skip()
            return None
        return self._gradients.start(layout, slot.view)

    def hear(self, *, filling: GenerationId | None = None) -> None:
        """Exchange the tiers' votes. Collective; `filling` as in `Tiers.agreed`."""
        own = self._tiers.vote()
        self._hear([own.read(row) for row in self._exchange.gather(own.row())], filling=filling)

    def abort_window(self) -> None:
        """Forget the window under way; every rank does so at the same boundary."""
        self.whole_at = None
        self._seal_thread.finish()
        self._await_copies()
        if self.window is not None:
            self._tiers.withdraw(self.window)
            self._drop(self.window)

    def close(self) -> None:
        """End all writes to the ring. A boundary that a failed step left unsealed goes to the tiers."""
        self._data.close()
        self.complete_seal()
        self._seal_thread.finish()
        self._await_copies()
        if self._gradients is not None:
            self._gradients.close()

    # -- private

    def _before_data(self) -> None:
        """Wait for copies: a change through `.data` during a copy leaves no trace."""
        ticket = self._ticket
        if ticket is not None and not ticket.done:
            with self._stalls.measure_both("fence"), suppress(CheckpointError):  # reported by the fence
                self._engine.fence(ticket)

    def _vote(self, step: int, following: WindowLayout | None) -> WindowVote:
        """Return this rank's vote before a window."""
        assert self.layout is not None
        assert self._ring is not None
        fits = following is None or self._fits(following)
        window = max(len(self.layout.steps), len(following.steps) if following is not None and fits else 0)
        room, named = self._ring.can_begin(window), self._ring.is_named
        spoiled = self._ended is not None and self._ended.spoiled
        return WindowVote(int(room and named), self._journal_nbytes, int(spoiled), int(fits), int(not named))

    def _follow(self, following: WindowLayout, use: Callable[[WindowLayout], None], *, fits: bool) -> None:
        """Put a plan in force, in a larger ring if need be; without memory the old plan stays. Collective."""
        if fits or self._fitted(following):
            use(following)
        else:
            self._plans.refused()
            log.warning(
                "there is no memory for another plan of windows; the one before stays in force, and it is tried again"
            )

    def _start(self, step: int) -> None:
        assert self.layout is not None
        assert self._ring is not None
        generation = self._name(step + len(self.layout.steps) - 1)
        self.window = Window(generation=generation, first=step, layout=self.layout, ring=self._ring)
        self._ring.begin_window(generation)
        if not self.layout.record.plan.partial:
            self._tiers.offer(self._complete)  # the next partial one is newer, with the operators that tiers lack most
        self._tiers.open(self.window)

    def _close_last_window(self, votes: Sequence[WindowVote]) -> None:
        """Close the previous window: every rank sealed it, or nobody offers it and the generation before stays."""
        spoiled = [rank for rank, vote in enumerate(votes) if vote.spoiled]
        last, self._ended = self._ended, None
        if last is None:
            return
        if spoiled and not last.spoiled and self._complete is not None:
            self._tiers.abandon(self._complete)
            self._complete.ring.discard(last.generation)
            self._complete = None
        elif 0 < len(spoiled) < self._exchange.world_size:
            self._forget_complete()  # the other ranks have dropped it: all ranks offer a generation, or none does
        if spoiled:
            self.missed_windows.add(
                last.first, last.why or f"ranks {list(spoiled)} could not take it, and their logs say why."
            )
        else:
            self.missed_windows.taken(last.generation.step)

    def _hear(self, votes: Sequence[TiersVote], *, filling: GenerationId | None = None) -> None:
        """Give all ranks' votes to the tiers, and stop offering a generation that memory has given up."""
        freed = self._tiers.agreed(votes, filling=filling)
        if self._complete is not None and self._complete.generation in freed:
            self._forget_complete()

    def _forget_complete(self) -> None:
        """Stop offering the newest complete generation to further tiers."""
        if self._complete is not None:
            self._tiers.superseded(self._complete)
        self._complete = None

    def _make_room(self) -> str | None:
        """Make room for a window; return the reason if some rank has none, else `None`. Collective."""
        assert self._ring is not None
        if self._has_room_now() or self._has_room_after_flush():
            return None
        return (
            f"memory has no free segments ({self._ring.usage} of {self._ring.num_slots} on this rank, read by "
            f"{', '.join(self._tiers.busy) or 'nobody'}). If a tier hangs, look there; else take generations less "
            "often."
        )

    def _has_room_now(self) -> bool:
        """Return whether every rank's ring has room for a window, counting recyclable slots. Collective."""
        assert self.layout is not None
        assert self._ring is not None
        return self._exchange.all_agree(self._ring.can_begin(len(self.layout.steps)))

    def _has_room_after_flush(self) -> bool:
        """Wait for transfers that hold slots, then return whether every rank's ring has room. Collective."""
        assert self.layout is not None
        assert self._ring is not None
        with self._stalls.measure("flush"):
            if not self._ring.can_begin(len(self.layout.steps)):
                self._tiers.flush(FLUSH_TIMEOUT.total_seconds())
            self.hear()
            return self._has_room_now()

    def _grow_journal(self, nbytes: int, following: WindowLayout | None) -> tuple[WindowLayout | None, bool]:
        """Lay plans out for journals of `nbytes`; return the following plan, and whether all ranks have room. Collective."""
        if nbytes == 0:
            return following, True
        assert self.layout is not None
        assert self._ring is not None
        self._journal_nbytes = 0
        layout = self._plans.relayout(self.layout, nbytes)
        following = None if following is None else self._plans.relayout(following, nbytes)
        if not self._fitted(layout):
            return None, False
        self.layout = layout
        self._tiers.planned(self._exchange, self._ring, layout)
        return following, True

    def _fitted(self, layout: WindowLayout) -> bool:
        """Return whether all ranks have a ring for a plan that may need a larger ring. Collective."""
        # Storage may still read the old ring, whose memory goes with its last segment.
        return self._replace_ring(lambda: self._make_ring(layout), wanted=not self._fits(layout))

    def _fits(self, layout: WindowLayout) -> bool:
        """Return whether a layout's windows fit into this rank's ring."""
        assert self._ring is not None
        return self._ring.fits(layout.slot_nbytes, len(layout.steps))

    def _restore_names(self) -> str | None:
        """Make rings without a name again, since a later incarnation would not find them. Collective.

        Returns:
            The reason if some rank could not; `None` if all rings have names.
        """
        assert self._ring is not None
        lost = not self._ring.is_named
        if self._exchange.all_agree(not lost):
            return None
        self._tiers.memory_lost(here=lost)
        if self._replace_ring(self._renew_ring, wanted=lost):
            return None
        return (
            "the name of some rank's memory was removed, and it cannot be made again, as the log of that rank says. "
            "Make room there, and keep what tidies up shared memory away from `moe-ckpt-*`."
        )

    def _replace_ring(self, make: Callable[[], SegmentRing], *, wanted: bool) -> bool:
        """Go on with another ring where `wanted`; return whether every rank has the ring it wanted. Collective."""
        if self._exchange.all_agree(not wanted):
            return True
        self._forget_complete()  # on all ranks: they offer a generation together
        made = True
        if wanted:
            self._await_copies()
            self._copies.clear()  # copies may depend on the old ring's memory, or keep it
            try:
                self._ring = make()
            except (ConfigurationError, OSError) as error:
                made = False
                if self.missed_windows.in_a_row == 0:  # else said already, and tried again at every window
                    self.failures.append(f"there is no memory for checkpoints: {error}")
        return self._exchange.all_agree(made)

    def _spoil(self, reason: str, *, failed: bool = True) -> None:
        """Spoil the window under way: it runs to its end, so that ranks stay in step, but gives no generation."""
        window = self.window
        if window is None or window.spoiled:
            return
        window.spoiled, window.why = True, f"{reason.rstrip('.')}."
        if failed:
            self.failures.append(f"generation {window.generation.step} was not taken: {reason}")
        self._tiers.abandon(window)

    def _finish(self, window: Window) -> None:
        self._ended = window
        if window.spoiled:
            self._await_copies()
            self._drop(window)
            return
        self.window = None
        window.ring.finish_window(window.generation)
        self._edits.window_taken()
        if self._complete is not None:
            self._tiers.superseded(self._complete)
        self._complete = window
        self.generations_complete += 1

    def _drop(self, window: Window) -> None:
        self.window = self._pending = self._sealing = None
        window.ring.abort_window(window.generation)

    def _await_copies(self) -> None:
        """Wait until all copies into the ring have ended, successful or not."""
        sealed = self.window.segments if self.window is not None else []
        pending = self._pending.ticket if self._pending is not None else None
        for ticket in {self._ticket, pending, *(segment.ticket for segment in sealed)}:
            if ticket is not None:
                with suppress(CheckpointError):  # reported by the fence, or useless by now
                    ticket.wait()
        if self._gradients is not None:
            self._gradients.wait()
