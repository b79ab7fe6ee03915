"""Capture bases, and between them differences: the gradients that lead from each step to the next.

A boundary is taken as a difference if all ranks took the boundary before, the newest optimizer step leads from there to
here on all ranks, and the last base is not too long ago. Otherwise a base is taken, which needs nothing else. So no
generation follows on a failed one.

Memory drops a chain from its old end once storage has that part on all ranks and room is needed. Bases have slots of
their own, of which one is free when a difference begins: the difference may have to become a base.

Source: TierCheck (2026), Sec. 3.2 and 3.4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from typing_extensions import override

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.errors import CheckpointError, RingFull
from lightning_moe_ckpt.journal import Journal
from lightning_moe_ckpt.native import CopyEngine
from lightning_moe_ckpt.policies import Chains
from lightning_moe_ckpt.session._capture import FLUSH_TIMEOUT, CaptureSession
from lightning_moe_ckpt.session._window import Window, WindowVote
from lightning_moe_ckpt.snapshot import (
    DifferentialRecorder,
    GradientRecorder,
    SegmentWriter,
    StateView,
    WindowLayout,
    log_whole,
    repeatable,
)
from lightning_moe_ckpt.tiers import STORAGE

log = rank_logger(__name__)

Capture: TypeAlias = CaptureSession
_DTYPES = {"lossless": torch.float32, "bf16": torch.bfloat16, "compressed": torch.uint8}


class ChainCapture(CaptureSession):
    """Capture the windows of one incarnation, each of one boundary; `arguments` go to `CaptureSession`."""

    def __init__(self, chains: Chains, view: StateView, **arguments: Any) -> None:
        super().__init__(**arguments)
        exact = chains.mode == "lossless"
        view.repeatable, whole = repeatable(view, exact=exact)
        view.difference_dtype = _DTYPES[chains.mode]
        log_whole(whole, len(view.params))
        if not exact:
            log.warning(
                "restarts are not exact: gradients are kept %s, and what is restored differs by what that leaves out from what "
                "was trained. `DifferentialCheckpoint(mode='lossless')` keeps them as they are.",
                "as bfloat16" if chains.mode == "bf16" else "compressed",
            )
        self._chains = chains
        self._recorder = DifferentialRecorder(view, error_feedback=chains.error_feedback)
        self._differential: WindowLayout | None = None
        """Layout of differences to `_cut_as`."""
        self._cut_as: WindowLayout | None = None
        self._base = self._last = -1
        """Steps of the newest base, and of the newest boundary that a difference may follow on; -1 without."""
        self._link = self._is_open = self._reads_gradients = False
        """Whether this boundary is a difference; tiers know the window; the boundary's gradients are being copied."""

    # -- whether

    @override
    def _vote(self, step: int, following: WindowLayout | None) -> WindowVote:
        assert self._ring is not None
        if self._cut_as is not self.layout and self.layout is not None:
            self._cut_as, self._differential = self.layout, self._plans.differential(self.layout)
        lost = self._tiers.lost_chain and step - self._base >= self._chains.batch
        due = following is not None or lost or step - self._base >= self._chains.every_n_steps
        self._link = self._recorder.boundary() and self._last == step - 1 and not due
        has_room = self._has_room() and self._ring.is_named
        return super()._vote(step, following)._replace(has_room=int(has_room), follows=int(self._link))

    @override
    def _close_last_window(self, votes: Sequence[WindowVote]) -> None:
        """Also decide by the votes whether this boundary is a difference."""
        ended = self._ended
        super()._close_last_window(votes)
        spoiled, grown = any(vote.spoiled for vote in votes), any(vote.journal_nbytes for vote in votes)
        if spoiled and ended is not None:
            self._tiers.not_taken(ended.generation)
        self._link = all(vote.follows for vote in votes) and not (spoiled or grown)

    def _has_room(self) -> bool:
        """Return whether this rank has room, after dropping differences that storage has."""
        assert self._ring is not None
        if not self._link or self._differential is None:
            return self._ring.can_begin(1)
        nbytes = self._differential.slot_nbytes
        self._ring.make_room(nbytes, self._tiers.everywhere.get(STORAGE))
        return self._ring.can_begin(1) and self._ring.free(nbytes) > 0

    @override
    def _fits(self, layout: WindowLayout) -> bool:
        assert self._ring is not None
        nbytes = self._plans.differential(layout).slot_nbytes
        return self._ring.fits(layout.slot_nbytes, len(layout.steps), link_nbytes=nbytes)

    @override
    def _has_room_now(self) -> bool:
        return self._exchange.all_agree(self._has_room())

    @override
    def _has_room_after_flush(self) -> bool:
        with self._stalls.measure("flush"):  # a base on all ranks' memory makes all the room there is
            for wait in (self._tiers.settle, self._tiers.flush):
                wait(FLUSH_TIMEOUT.total_seconds())
                self.hear()
                if self._has_room_now():
                    return True
        return False

    # -- taking it

    @override
    def _start(self, step: int) -> None:
        layout = self._differential if self._link else self.layout
        assert layout is not None
        assert self._ring is not None
        if not self._link and self._tiers.base_under_way:
            with self._stalls.measure("flush"):  # TierCheck, Sec. 3.2
                self._tiers.flush(FLUSH_TIMEOUT.total_seconds(), paced_only=True)
                self.hear()
        self._last, self._is_open = step, False
        self._base = self._base if self._link else step
        self.window = Window(
            generation=self._name(step),
            first=step,
            layout=layout,
            ring=self._ring,
            is_chained=True,
            is_link=self._link,
            ends_batch=self._chains.ends_batch(step - self._base),
        )
        self._ring.begin_window(self.window.generation, is_link=self._link)
        self._tiers.offer(self._complete)  # tiers hear of this window at its seal, since it may have to become a base

    @override
    def capture(self, step: int, outcome: Journal) -> None:
        self._reads_gradients = self._link
        if not self._link:
            self._recorder.based()
        elif self._chains.mode == "compressed":
            assert self._differential is not None
            with self._stalls.measure_both("compression"):
                self._recorder.compress(self._differential.steps[0])
        super().capture(step, {**outcome, "consumed": self._recorder.settings()} if self._link else outcome)

    @override
    def fence_gradients(self) -> None:
        super().fence_gradients()
        if not self._reads_gradients:
            return
        self._reads_gradients = False
        with self._stalls.measure_both("gradients"):
            try:
                if self._ticket is not None:
                    self._engine.fence(self._ticket)
            except CheckpointError as error:
                self._spoil(str(error))
        if not self._recorder.release():
            self._spoil("gradients were changed after the step, so what led to it is not known")
        self._copies.let_go()

    @override
    def fence(self) -> None:
        self.fence_gradients()  # first: changed gradients spoil the window before it is handed over
        super().fence()
        self._recorder.step_begins()

    @override
    def seal(self, start: Journal, *, step: int, disturbed: bool = False) -> None:
        if (window := self.window) is not None:
            same = self._recorder.sealed()
            if (
                self._link and disturbed
            ):  # changes may have left no trace, as after a validation; all ranks know of that
                self._take_whole(window, step)
            if not self._is_open:
                self._is_open = True
                self._tiers.open(window)
            if window.spoiled:
                self._tiers.abandon(window)
            elif self._link and not same:
                self._spoil("weights were changed after the step, so its gradients do not lead to what they are now")
        super().seal(start, step=step, disturbed=disturbed)

    def _take_whole(self, window: Window, step: int) -> None:
        """Take a base in place of a difference. On all ranks."""
        assert self.layout is not None
        self._await_copies()
        self._link, self._base = False, step
        self._recorder.based()
        window.is_link, window.layout = False, self.layout
        window.ring.whole(window.generation)
        if window.spoiled or self._pending is None:
            return
        try:
            self._slot = window.ring.acquire(window.generation, step)
        except RingFull as error:
            self._spoil(str(error))
            return
        layout = self.layout.steps[0]
        writer = SegmentWriter(
            layout, self._slot.view, self._engine, self._arrivals, self._copies.of(layout, window.layout)
        )
        self._pending = self._pending.again(writer)
        self._ticket = self._pending.ticket

    @override
    def abort_window(self) -> None:
        self._last = -1
        super().abort_window()

    @override
    def close(self) -> None:
        super().close()
        self._recorder.close()


def capture_session(chains: Chains | None, view: StateView, *, engine: CopyEngine, **arguments: Any) -> Capture:
    """Return the capture session for a policy; with `chains` its generations may follow on each other."""
    arguments |= {"engine": engine, "params": list(view.params.values())}
    arguments["gradients"] = GradientRecorder(view, engine) if view.gradient_dtype is not None else None
    return CaptureSession(**arguments) if chains is None else ChainCapture(chains, view, **arguments)
