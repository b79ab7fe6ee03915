"""An incarnation's repeated steps, from the first boundary it resumes at until every operator is active again."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.journal import Journal
from lightning_moe_ckpt.native import CopyEngine
from lightning_moe_ckpt.parallel import ParallelGroups
from lightning_moe_ckpt.recovery import Frozen, Replay
from lightning_moe_ckpt.session._report import expect
from lightning_moe_ckpt.snapshot import WindowLayout

log = rank_logger(__name__)


class Repeats:
    """One replay, if there is one."""

    def __init__(self) -> None:
        self.replay: Replay | None = None
        """Replay with frozen operators, loaded step by step; `None` if all operators are active."""
        self.frozen: Frozen | None = None
        """The replay's operators that do not train yet; `None` if all operators are active."""
        self.layout: WindowLayout | None = None
        """Layout of the replayed generation."""
        self.unsettled: Replay | None = None
        """Replay whose newest loaded slot may have been changed by hooks since."""
        self.steps = self.mismatches = 0

    def begin(self, replay: Replay, layout: WindowLayout) -> None:
        """Follow a replay whose first slot was just loaded."""
        self.unsettled = replay
        if not replay.dense:
            self.replay, self.frozen, self.layout = replay, replay.frozen, layout

    def go_on(self, layout: WindowLayout, groups: ParallelGroups, engine: CopyEngine) -> None:
        """Go on with a replay in another session, with that session's plan, groups and engine."""
        for each in (self.replay, self.unsettled):
            if each is not None:
                each.groups, each.engine = groups, engine
        if self.replay is not None:
            self.layout = layout

    def outcome(self, step: int) -> Journal | None:
        """Return the original run's outcome of the step that ends at boundary `step`, or `None` after the replay."""
        return self.replay.outcome(step) if self.replay is not None else None

    def freeze(self) -> None:
        """Freeze operators again, since user hooks may have set parameters to train."""
        if self.replay is not None:
            self.replay.freeze()

    def stepped(self, step: int, losses: list[Tensor], known: str) -> Journal:
        """Compare a replayed step with its journal, then load the slot of its boundary.

        Args:
            step: the boundary.
            losses: losses of the replayed step.
            known: known reasons for other losses, in words.

        Returns:
            The start half of the boundary's journal, from the original run.
        """
        replay = expect(self.replay)
        self.steps += 1
        self.mismatches += not replay.matches(step, losses, known)
        replay.load(step)
        self.unsettled = replay
        if replay.dense:
            replay.frozen.thaw()
            self.replay = self.frozen = self.layout = None
            log.info("dense again at step %d after %d replayed steps", step, self.steps)
        return replay.start(step)

    def reconcile(self, all_agree: Callable[[bool], bool], *, disturbed: bool) -> None:
        """Undo changes by hooks since the newest slot was loaded; call as the next batch begins, when the slot was
        sealed.

        Args:
            all_agree: asks all replaying ranks.
            disturbed: whether the loaded state may have changed without a trace.
        """
        expect(self.unsettled).reconcile(all_agree, disturbed=disturbed)
        self.unsettled = None

    def waive_reconciling(self) -> None:
        """Keep changes by hooks to the newest slot, since it was taken right after its step."""
        self.unsettled = None

    def close(self) -> None:
        """Let all operators train again."""
        if self.replay is not None:
            self.replay.frozen.thaw()
            self.replay = self.frozen = None
