"""Capture windows: boundaries are captured, sealed one batch later, and handed to the tiers.

At boundary t this window step's slices are copied into a segment of the ring, overlapped with forward and backward of
t+1, and sealed as `Sealing` says. A window whose segments are all sealed is a generation. All ranks open windows
together: one small exchange decides whether a window starts and which tiers take it, so no rank fills half a generation.

Memory drops a chain of differences from its old end once storage has that part on all ranks and room is needed. Bases
have slots of their own, of which one is free when a difference begins: the difference may have to become a base.

Source: MoEvement (2026), Sec. 3.2; PEC/MoC (2024), Sec. 5 (triple buffering).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from operator import attrgetter
from typing import Literal

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt._units import size_text
from lightning_moe_ckpt.errors import ConfigurationError, RingFull, UnsupportedOptimizer
from lightning_moe_ckpt.journal import Journal
from lightning_moe_ckpt.planning import PlanMaker, Planner
from lightning_moe_ckpt.session._job import SessionJob
from lightning_moe_ckpt.session._sealing import Sealing
from lightning_moe_ckpt.session._tiers import Tiers
from lightning_moe_ckpt.session._window import Chain, TiersVote, Window, WindowVote, gather_votes
from lightning_moe_ckpt.snapshot import GradientRecorder, WindowCopies, WindowLayout
from lightning_moe_ckpt.storage import GenerationId
from lightning_moe_ckpt.tiers import HOST, PEER, STORAGE, MissedWindows, RingRoom, Rings, SegmentRing, has_plenty

log = rank_logger(__name__)

FLUSH_TIMEOUT = timedelta(seconds=30)
"""Longest wait of training for slots under transfer, before training goes on without a window."""


class WindowMemory:
    """Own the plan in force and the ring for its windows; all ranks change them together, between windows.

    Args:
        tiers: told of every plan.
        leave_ring: called before the ring is replaced, on all ranks.
        failed: called with the reason why this rank has no ring that it wanted.
    """

    ring: SegmentRing
    """Ring in use, once `has_ring`."""
    has_ring = False

    def __init__(
        self,
        job: SessionJob,
        tiers: Tiers,
        maker: PlanMaker,
        rings: Rings,
        *,
        leave_ring: Callable[[], None],
        failed: Callable[[str], None],
    ) -> None:
        self._exchange, self._tiers, self._maker, self._chained = job.exchange, tiers, maker, bool(job.policy.chains)
        self._rings, self._least_steps, self._leave_ring, self._failed = rings, job.least_steps, leave_ring, failed
        self._generations: int | Literal["auto"] = job.config.memory_generations
        self.copies = WindowCopies(job.engine)
        self.layout: WindowLayout | None = None
        """The plan in force; `None` before the first."""
        self.difference: WindowLayout | None = None
        """The plan's layout of a difference; `None` if the policy takes none."""

    def use(self, layout: WindowLayout) -> bool:
        """Put a plan in force from the next window on; return `False` if it does not fit the ring. On all ranks. Raises
        `ConfigurationError` on every rank if any of them has no memory for its first ring.
        """
        if not self.has_ring:
            self._choose_generations(layout)
            with self._exchange.raise_together():
                self.ring, self.has_ring = self._make_ring(layout), True
        elif self.layout is None and not self.fitted(layout):
            return False
        elif not self.fits(layout):
            log.warning(
                "a new plan needs %d segments with %s, more than the ring has; the old plan stays in force",
                *(len(layout.steps), size_text(layout.nbytes)),
            )
            return False
        self._put(layout)
        return True

    @property
    def is_short(self) -> bool:
        """Whether the ring has no room for a tier that is late."""
        return self._generations == 2

    def grow_journal(self, nbytes: int, following: WindowLayout | None) -> tuple[WindowLayout | None, bool]:
        """Lay plans out for journals of `nbytes`; return the following plan, and whether all ranks have room. Collective."""
        assert self.layout is not None
        layout = self._maker.enlarged(self.layout, nbytes)
        following = None if following is None else self._maker.enlarged(following, nbytes)
        if not self.fitted(layout):
            return None, False
        self._put(layout)
        return following, True

    def fits(self, layout: WindowLayout) -> bool:
        """Return whether a layout's windows fit into this rank's ring."""
        link_nbytes = self._maker.differential(layout).slot_nbytes if self._chained else 0
        return self.ring.fits(layout.room, link_nbytes=link_nbytes)

    def fitted(self, layout: WindowLayout) -> bool:
        """Return whether all ranks have a ring for a plan that may need a larger ring. Collective."""
        # Storage may still read the old ring, whose memory goes with its last segment.
        return self._replace_ring(lambda: self._make_ring(layout), wanted=not self.fits(layout))

    def has_room(self, layout: WindowLayout | None = None, *, link: bool = False) -> bool:
        """Return whether this rank's ring has room for a window of this layout, by default that in force, or for a difference (`link`)."""
        layout = layout or self.layout
        assert layout is not None
        if not link or self.difference is None:
            return self.ring.can_begin(layout.sizes)
        nbytes = self.difference.slot_nbytes
        self.ring.make_room(nbytes, self._tiers.everywhere.get(STORAGE))
        return self.ring.can_begin(layout.sizes) and self.ring.free_small(nbytes) > 0

    def restore_names(self) -> str | None:
        """Make rings without a name again, since a later incarnation would not find them. Collective.

        Returns:
            The reason if some rank could not; `None` if all rings have names.
        """
        lost = not self.ring.is_named
        if self._exchange.all_agree(not lost):
            return None
        self._tiers.memory_lost(here=lost)
        if self._replace_ring(self._rings.renew, wanted=lost):
            return None
        return (
            "the name of some rank's memory was removed, and it cannot be made again, as the log of that rank says. "
            "Make room there, and keep what tidies up shared memory away from `moe-ckpt-*`."
        )

    def _make_ring(self, layout: WindowLayout) -> SegmentRing:
        """Return a ring for a layout's windows."""
        assert self._generations != "auto"
        ring = self._rings.make(room := self._room(layout, self._generations))
        parts = {**room.purposes, "copies of other ranks": self._tiers.reserved().get(PEER, 0)}
        journals, captured = len(layout.steps) * self._maker.journal.nbytes, layout.nbytes - sum(layout.copied)
        log.info(
            "shared memory: host %s for %d generations (%s); each has %s of journals and %s captured for other ranks",
            *(size_text(self._tiers.reserved().get(HOST, 0)), room.blocks),
            ", ".join(f"{purpose} {size_text(nbytes)}" for purpose, nbytes in parts.items() if nbytes),
            *(size_text(journals), size_text(captured)),
        )
        return ring

    def _room(self, layout: WindowLayout, generations: int) -> RingRoom:
        """Return the room for a layout's windows."""
        has_peers = any(worker.name == PEER for worker in self._tiers.workers)
        room, busy = self._maker.room(layout, generations), self._least_steps <= len(layout.steps)
        return replace(
            room, copies=1 + has_peers, back_to_back=busy
        )  # of two copies one completes other nodes' generations

    def _choose_generations(self, layout: WindowLayout) -> None:
        """Decide how many generations this rank's ring has room for. Collective."""
        workers, chosen = self._tiers.workers, self._generations
        most = 2 + sum(worker.readers for worker in workers)
        if chosen == "auto":
            copies = sum(len(worker.memories) for worker in workers if worker.name == PEER)
            wanted = sum(self._room(layout, min(3, most)).purposes.values()) + 2 * copies * sum(layout.copied)
            chosen = 3 if has_plenty(wanted, sum(self._tiers.reserved().values()), self._exchange) else 2
        self._generations = most if layout.record.plan.partial else min(chosen, most)

    def _put(self, layout: WindowLayout) -> None:
        if not layout.record.plan.partial and self.ring.block >= 2 * (block := self._maker.room(layout, 2).block):
            self.ring.lay(block)  # shorter windows leave room for more of them
        self.layout = layout
        self.difference = self._maker.differential(layout) if self._chained else None
        self._tiers.planned(self._exchange, self.ring, layout)

    def _replace_ring(self, make: Callable[[], SegmentRing], *, wanted: bool) -> bool:
        """Go on with another ring where `wanted`; return whether every rank has the ring it wanted. Collective."""
        if self._exchange.all_agree(not wanted):
            return True
        self._leave_ring()
        made = True
        if wanted:
            self.copies.clear()  # copies may depend on the old ring's memory, or keep it
            try:
                self.ring = make()
            except (ConfigurationError, OSError) as error:
                made = False
                self._failed(f"there is no memory for checkpoints: {error}")
        return self._exchange.all_agree(made)


class CaptureSession:
    """Own the windows of one incarnation: which begins, what its boundaries capture, and which generation is offered.

    `CheckpointSession` says when a window may begin, `WindowMemory` has the plan and the ring, and `Sealing` brings each
    captured boundary to the tiers. `name` names a generation by its step.
    """

    def __init__(
        self, job: SessionJob, *, name: Callable[[int], GenerationId], tiers: Tiers, plans: Planner, rings: Rings
    ) -> None:
        self._name, self._exchange, self._tiers, self._stalls = name, job.exchange, tiers, job.stalls
        self._plans, view, chains = plans, job.view, job.policy.chains
        self._chain = None if chains is None else Chain(chains, view, job.stalls, may_edit_steps=job.may_edit_steps)
        self._gradients = GradientRecorder(view, job.engine) if view.gradient_dtype is not None else None
        self.failures: list[str] = []
        """Reasons why windows were spoiled; the owner reports and clears them."""
        self.sealing = Sealing(job, tiers, plans, self.failures)
        self.memory = WindowMemory(
            job, tiers, plans.maker, rings, leave_ring=self._leave_ring, failed=self._failed_memory
        )
        self._given_up: GenerationId | None = None
        """Generation of an aborted window: tiers may still read from it, so no other window gets its name."""
        self.window: Window | None = None
        """Window that takes the next boundary; `None` between windows."""
        self.whole_at: int | None = None
        """The newest boundary, if a dense generation replaces its window, see `Tiers.wants_whole`."""
        self._complete: Window | None = None
        self._ended: Window | None = None
        """Window that ended last, complete or spoiled on this rank, until the next vote tells all ranks."""
        self.missed_windows = MissedWindows()
        self.generations_complete = self.windows_skipped = self.segments_captured = self.nbytes_captured = 0

    def forget_layout(self) -> None:
        """Abort the window under way, and take none until another plan is in force. All ranks call it."""
        self._given_up = None if self.window is None else self.window.generation
        self.abort_window()
        self.memory.layout = None

    def open_window(self, step: int, use: Callable[[WindowLayout], None] | None = None, *, dense: bool = False) -> bool:
        """Agree with all ranks to start a window whose first boundary is `step`; return whether it starts. Collective.

        Args:
            step: the boundary just reached.
            use: puts a plan in force, if the plan may change here.
            dense: whether storage gets this whole boundary instead; the same on all ranks.
        """
        memory = self.memory
        assert memory.layout is not None
        if self._name(step + len(memory.layout.steps) - 1) == self._given_up:
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
        spoiled = [rank for rank, vote in enumerate(votes) if vote.spoiled]
        self._close_last_window(spoiled)
        self._hear(of_tiers)
        nbytes, grown = max(map(attrgetter("journal_nbytes"), votes)), True
        link = all(map(attrgetter("follows"), votes)) and not (spoiled or nbytes)
        if nbytes:
            self.sealing.journal_nbytes = 0
            following, grown = memory.grow_journal(nbytes, following)
        if following is not None and use is not None:
            self._follow(following, use, fits=not nbytes and all(map(attrgetter("fits"), votes)))
        why_not = memory.restore_names() if not grown or any(map(attrgetter("unnamed"), votes)) else None
        whole = dense or self._tiers.wants_whole(self._name(step), memory.layout)
        self.whole_at = step if whole else None
        if whole:
            return False
        if why_not is None and not all(map(attrgetter("has_room"), votes)):
            why_not, link = self._make_room(link=link)
        if why_not is not None:
            self.windows_skipped += 1
            self.missed_windows.add(step, why_not)
            return False
        self._start(step, link=link)
        if plans is not None:
            plans.started(step, memory.layout)
        return True

    def capture(self, step: int, outcome: Journal) -> None:
        """Start copying this window step's slices of boundary `step`; call right after the optimizer step."""
        window = self.window
        assert window is not None
        if self._chain is not None:
            outcome = self._chain.capture(window, outcome)
        index = step - window.first
        layout, nbytes = window.layout.steps[index], window.layout.sizes[index]
        if step > window.first and self._tiers.outstanding:
            with self._stalls.measure("exchange"):
                self.hear(filling=window.generation)
        if window.spoiled:
            return
        try:
            slot = window.ring.acquire(window.generation, step, nbytes)
            copies = self.memory.copies.of(layout, window.layout)
            record = None
            if self._gradients is not None:  # first: gradients go sooner than the changed parameters
                record = self._gradients.start(layout, slot.view if self._tiers.want_gradients(window) else None)
            self.sealing.capture(window, slot, copies, step=step, outcome=outcome, record=record)
        except RingFull as error:
            self._spoil(str(error))
        except UnsupportedOptimizer as error:  # the state's form has changed; said once
            self._spoil(str(error), failed=self.missed_windows.in_a_row == 0)
        else:
            self.segments_captured += 1
            self.nbytes_captured += layout.files_nbytes

    def fence_gradients(self) -> None:
        """Wait until gradients may be overwritten or freed."""
        if self._gradients is not None:
            with self._stalls.measure_both("gradients"):
                self._gradients.fence()
        if self._chain is not None and self._chain.reads_gradients:
            self.sealing.fence(self.window, cause="gradients")
            if not self._chain.release():
                self._spoil("gradients were changed after the step, so what led to it is not known")
            self.memory.copies.let_go()

    def fence(self) -> None:
        """Wait until the optimizer may overwrite the sources of the newest capture."""
        if self._chain is not None:
            self.fence_gradients()  # first: changed gradients spoil the window before it is handed over
            self._chain.recorder.step_begins()
        self.complete_seal()
        if self._gradients is not None:
            self.fence_gradients()  # in case nobody called it before gradients were set to zero
            self._gradients.step_begins()
        self.sealing.fence(self.window)

    def seal(self, start: Journal, *, step: int, disturbed: bool = False) -> None:
        """Take the rest of boundary `step` as the next batch begins; the next fence completes it.

        Args:
            start: the journal's start half.
            step: the boundary.
            disturbed: whether sources may have changed unseen since `capture`; then all are copied again.
        """
        if (window := self.window) is None:
            return
        if self._chain is not None:
            self._begin_in_chain(window, self._chain, disturbed=disturbed)
        if self._gradients is not None and not window.spoiled:
            self._gradients.sealed()
        self.sealing.take(window, start, step=step, disturbed=disturbed)

    def give_up(self, why_not: str) -> None:
        """Give up the newest boundary, which does not count as a failure."""
        self._spoil(why_not, failed=False)
        if self.window is None and self.whole_at is not None:
            self._tiers.abandon_whole(self._name(self.whole_at))

    def complete_seal(self, *, wait: bool = True) -> None:
        """Complete the newest boundary after `seal`, and its window. Without `wait`, skip a device's copies."""
        step, window, ended = self.sealing.complete(wait=wait), self.window, self._ended
        if window is not None and step == window.generation.step:
            self._finish(window)
        elif ended is not None and not ended.is_settled:
            ended.is_settled = True  # one step after its last boundary: a restart goes back no further
            with self._stalls.measure("flush"):
                self._tiers.settle(FLUSH_TIMEOUT.total_seconds())

    def hear(self, *, filling: GenerationId | None = None) -> None:
        """Exchange the tiers' votes. Collective; `filling` as in `Tiers.agreed`."""
        own = self._tiers.vote()
        self._hear([own.read(row) for row in self._exchange.gather(own.row())], filling=filling)

    def abort_window(self) -> None:
        """Forget the window under way; every rank does so at the same boundary."""
        self.whole_at = None
        if self._chain is not None:
            self._chain.abort()
        self._await_copies()
        if self.window is not None:
            self._tiers.withdraw(self.window)
            self._drop(self.window)

    def agree_on_last(self) -> None:
        """Tell all ranks whether the newest window is spoiled here, so that none waits for its generation. Collective."""
        own = self._ended is not None and self._ended.spoiled
        self._close_last_window([rank for rank, vote in enumerate(self._exchange.gather([int(own)])) if vote[0]])

    def hand_over(self) -> None:
        """See `Tiers.hand_over`."""
        self._tiers.hand_over(self._complete)

    def close(self) -> None:
        """End all writes to the ring. A boundary that a failed step left unsealed goes to the tiers."""
        self.sealing.close()
        self.complete_seal()
        self._await_copies()
        if self._gradients is not None:
            self._gradients.close()
        if self._chain is not None:
            self._chain.recorder.close()

    # -- private

    def _vote(self, step: int, following: WindowLayout | None) -> WindowVote:
        """Return this rank's vote before a window."""
        memory, chain = self.memory, self._chain
        assert memory.layout is not None
        link = chain is not None and chain.follows(step, new_plan=following is not None, lost=self._tiers.lost_chain)
        fits = following is None or memory.fits(following)
        room, named = memory.has_room(following if fits else None, link=link), memory.ring.is_named
        spoiled, nbytes = self._ended is not None and self._ended.spoiled, self.sealing.journal_nbytes
        return WindowVote(int(room and named), nbytes, int(spoiled), int(fits), int(not named), int(link))

    def _follow(self, following: WindowLayout, use: Callable[[WindowLayout], None], *, fits: bool) -> None:
        """Put a plan in force, in a larger ring if need be; without memory the old plan stays. Collective."""
        if fits or self.memory.fitted(following):
            use(following)
        else:
            self._plans.refused()
            log.warning(
                "there is no memory for another plan of windows; the one before stays in force, and it is tried again"
            )

    def _start(self, step: int, *, link: bool) -> None:
        chain, ring, layout = self._chain, self.memory.ring, self.memory.difference if link else self.memory.layout
        assert layout is not None
        if chain is not None and not link and self._tiers.base_under_way:
            with self._stalls.measure("flush"):  # TierCheck, Sec. 3.2
                self._tiers.flush(FLUSH_TIMEOUT.total_seconds())
                self.hear()
        generation = self._name(step + len(layout.steps) - 1)
        window = Window(generation=generation, first=step, layout=layout, ring=ring, is_settled=not self._tiers.bounded)
        window.is_chained, window.is_link, self.window = chain is not None, link, window
        ring.begin_window(generation, is_link=link)
        if not layout.record.plan.partial:
            self._tiers.offer(self._complete)  # the next partial one is newer, with the operators that tiers lack most
        if chain is not None:
            chain.begin(window)  # tiers hear of this window at its seal, since it may have to become a base
        else:
            self._tiers.open(window)

    def _begin_in_chain(self, window: Window, chain: Chain, *, disturbed: bool) -> None:
        """Tell tiers of the window, a difference if it still can be. On all ranks."""
        same = chain.recorder.sealed()
        # changes may have left no trace, as after a validation; all ranks know of that
        if window.is_link and disturbed:
            self._take_whole(window, chain)
        self._tiers.open(window)
        if window.spoiled:
            self._tiers.abandon(window)
        elif window.is_link and not same:
            self._spoil("weights were changed after the step, so its gradients do not lead to what they are now")

    def _take_whole(self, window: Window, chain: Chain) -> None:
        """Take a base in place of a difference. On all ranks."""
        assert self.memory.layout is not None
        self._await_copies()
        chain.take_whole(window, self.memory.layout)
        if window.spoiled:
            return
        try:
            slot = window.ring.acquire(window.generation, window.first, window.layout.steps[0].nbytes)
        except RingFull as error:
            self._spoil(str(error))
            return
        self.sealing.capture_again(slot, self.memory.copies.of(window.layout.steps[0], window.layout))

    def _close_last_window(self, spoiled: Sequence[int]) -> None:
        """Close the previous window: no rank has `spoiled` it, or nobody offers it and the generation before stays."""
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
            self._tiers.not_taken(last.generation)
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

    def _make_room(self, *, link: bool) -> tuple[str | None, bool]:
        """Make room for a window. Return the reason if some rank has none, else `None`, and whether it is still a difference. Collective.

        All ranks hear what may go, then wait for transfers that hold slots, kind by kind, until each ring has room. Where only storage is
        late with differences, nobody waits for it: a base needs none of their slots, and all before it may go.
        """
        chained, tiers = self._chain is not None, self._tiers
        waits = [tiers.settle] if chained else []  # a base on all ranks' memory makes all the room there is
        waits += [tiers.flush] if chained or tiers.bounded or not self.memory.is_short else []
        # Once: where storage does not answer, windows are missed, and training does not wait for each of them.
        waits += [tiers.drain] if (chained or tiers.bounded) and not self.missed_windows.in_a_row else []
        for wait in (None, *waits):
            if wait is not None:
                with self._stalls.measure("flush"):
                    if chained or not self.memory.has_room():
                        wait(FLUSH_TIMEOUT.total_seconds())
                    self.hear()
            link = link and (tiers.base_under_way or tiers.outstanding)
            if self._exchange.all_agree(self.memory.has_room(link=link)):
                return None, link
        if not chained:  # with a newer generation, tiers let go of the one they hold
            tiers.make_room(self._complete)
        return (
            f"memory has no room ({self.memory.ring.usage} on this rank, read by {', '.join(tiers.busy) or 'nobody'}). If a tier "
            "hangs, look there; else give `memory_generations=3`, or take generations less often."
        ), link

    def _spoil(self, reason: str, *, failed: bool = True) -> None:
        self.sealing.spoil(self.window, reason, failed=failed)

    def _finish(self, window: Window) -> None:
        self._ended = window
        if window.spoiled:
            self._await_copies()
            self._drop(window)
            return
        self.window = None
        window.ring.finish_window(window.generation)
        self.sealing.edits.window_taken()
        if self._complete is not None:
            self._tiers.superseded(self._complete)
        self._complete = window
        self.generations_complete += 1

    def _drop(self, window: Window) -> None:
        self.window = None
        self.sealing.forget()
        window.ring.abort_window(window.generation)

    def _leave_ring(self) -> None:
        self._forget_complete()  # on all ranks: they offer a generation together
        self._await_copies()

    def _failed_memory(self, reason: str) -> None:
        if self.missed_windows.in_a_row == 0:  # else said already, and tried again at every window
            self.failures.append(reason)

    def _await_copies(self) -> None:
        """End all writes to the ring, see `Sealing.wait`."""
        self.sealing.wait(self.window)
        if self._gradients is not None:
            self._gradients.wait()
