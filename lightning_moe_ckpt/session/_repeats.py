"""The steps that an incarnation repeats, from the first boundary of what it resumed from until every operator is active again."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.journal import Journal
from lightning_moe_ckpt.native import CopyEngine
from lightning_moe_ckpt.parallel import ParallelGroups
from lightning_moe_ckpt.recovery import Frozen, Replay
from lightning_moe_ckpt.session._report import made
from lightning_moe_ckpt.snapshot import WindowLayout

log = rank_logger(__name__)


class Repeats:
    """Follows one replay, if there is one."""

    def __init__(self) -> None:
        self.replay: Replay | None = None
        """What is frozen and loaded step by step; `None` if everything is active."""
        self.layout: WindowLayout | None = None
        """Of the generation that is replayed."""
        self.unsettled: Replay | None = None
        """What has loaded a slot that hooks may have changed since."""
        self.steps = self.mismatches = 0

    def begin(self, replay: Replay, layout: WindowLayout) -> None:
        """Follow what was just loaded."""
        self.unsettled = replay
        if not replay.dense:
            self.replay, self.layout = replay, layout

    def go_on(self, layout: WindowLayout, groups: ParallelGroups, engine: CopyEngine) -> None:
        """Follow on where another session is opened in the midst of it, with a plan, groups and an engine of its own."""
        for each in (self.replay, self.unsettled):
            if each is not None:
                each.groups, each.engine = groups, engine
        if self.replay is not None:
            self.layout = layout

    @property
    def frozen(self) -> Frozen | None:
        """What does not train yet; `None` if everything is active."""
        return None if self.replay is None else self.replay.frozen

    def outcome(self, step: int) -> Journal | None:
        """Return the original run's outcome of the step that ends at boundary `step`, while replaying it."""
        return self.replay.outcome(step) if self.replay is not None else None

    def freeze(self) -> None:
        """Freeze operators again, as hooks of the user may have changed what trains."""
        if self.replay is not None:
            self.replay.freeze()

    def stepped(self, step: int, losses: list[Tensor], known: str) -> Journal:
        """Compare a replayed step with its journal, then load the slot of its boundary.

        Args:
            step: the boundary.
            losses: what the step gave.
            known: what is known to give other losses, in words.

        Returns:
            The start half that the original run took of that boundary.
        """
        replay = made(self.replay)
        self.steps += 1
        self.mismatches += not replay.matches(step, losses, known)
        replay.load(step)
        self.unsettled = replay
        if replay.dense:
            replay.frozen.thaw()
            self.replay = self.layout = None
            log.info("dense again at step %d after %d replayed steps", step, self.steps)
        return replay.start(step)

    def reconcile(self, all_agree: Callable[[bool], bool], *, disturbed: bool) -> None:
        """Undo what hooks did since the newest slot was loaded; call as the next batch begins, when it was sealed.

        Args:
            all_agree: asks all ranks that replay.
            disturbed: whether what was loaded may have changed without a trace.
        """
        made(self.unsettled).reconcile(all_agree, disturbed=disturbed)
        self.unsettled = None

    def waive_reconciling(self) -> None:
        """Let hooks until the next batch change what was loaded, since it was taken right after its step."""
        self.unsettled = None

    def close(self) -> None:
        """Let everything train again."""
        if self.replay is not None:
            self.replay.frozen.thaw()
            self.replay = None
