"""Which generations stay and which may go: pure decisions over a listing, so that they can be tested against a model.

Mark and sweep: what stays is appended to the log first, as the watermark and the generations kept below it, and only
then is anything else deleted; a crash in between costs space, never a generation. What a life may still be writing is
never touched.

Time is only a reason to keep. It is the time that each manifest records, compared with that of the newest one: no clock
is read, so every process that looks decides the same, whatever its clock says and however long nothing was trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.storage._catalog import Catalog, Contents
from lightning_moe_ckpt.storage._log import History
from lightning_moe_ckpt.storage._names import GenerationId
from lightning_moe_ckpt.storage._records import Commit

_SECONDS_PER_DAY = 86_400


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """Which committed generations stay: each that at least one of these rules keeps.

    Raises:
        ConfigurationError: a value is out of range.
    """

    last: int = 2
    """The newest ones. Two, so that one is left if the newest turns out damaged."""
    every_n_steps: int | None = None
    """The first one at or after each multiple of so many steps, for good; step 0 is a multiple."""
    days: float | None = None
    """Those committed at most so long before the newest one. A clock that was ahead when the newest was committed lets
    others go by so much too early, one that was behind keeps them longer; the other rules hold whatever clocks say."""

    def __post_init__(self) -> None:
        for name, what in (("last", "generations, of which one is resumed from"), ("every_n_steps", "steps")):
            value = getattr(self, name)
            if (value is None and name != "last") or (_is_int(value) and value >= 1):
                continue
            raise ConfigurationError(f"`Retention({name}={value!r})` must be 1 or more {what}.")
        days = self.days
        if days is not None and not (
            isinstance(days, int | float) and not isinstance(days, bool) and 0 < days < math.inf
        ):
            raise ConfigurationError(f"`Retention(days={days!r})` must be above zero, or None.")

    def reasons(self, restorable: Sequence[Commit], doubtful: Sequence[GenerationId]) -> dict[GenerationId, str]:
        """What stays, and why.

        Args:
            restorable: committed and whole, newest first.
            doubtful: committed, but not readable now; perhaps the medium is away.
        """
        reasons: dict[GenerationId, str] = {}
        if self.every_n_steps is not None:
            generations = [commit.generation for commit in restorable]
            for each in (
                *_milestones(generations, self.every_n_steps),
                *_milestones([*generations, *doubtful], self.every_n_steps),
            ):
                reasons[each] = f"first at or after step {each.step // self.every_n_steps * self.every_n_steps}"
        if self.days is not None:
            oldest = max((commit.unix_time for commit in restorable[:1]), default=0) - self.days * _SECONDS_PER_DAY
            reasons |= {c.generation: f"within {self.days:g} days" for c in restorable if c.unix_time >= oldest}
        return reasons | {c.generation: f"among the last {self.last}" for c in restorable[: self.last]}


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _milestones(generations: Iterable[GenerationId], every: int) -> list[GenerationId]:
    """The first generation at or after each multiple of `every`."""
    first: dict[int, GenerationId] = {}
    for each in sorted(generations, reverse=True):
        first[each.step // every] = each
    return list(first.values())


def advanced_history(
    history: History, stay: Iterable[GenerationId], restorable: Sequence[GenerationId]
) -> History | None:
    """The history that gives up whatever need not stay; `None` if it gives up nothing more.

    The watermark is the oldest of the newest ones that stay without a gap; those below it are named.

    Args:
        history: state of the log.
        stay: generations to keep, among them what others of them need.
        restorable: all that may be restored, or is there for what may, newest first.
    """
    stay = set(stay)
    goes = next((index for index, each in enumerate(restorable) if each not in stay), None)
    if not goes:  # nothing goes, or there is nothing that stays
        return None
    watermark = max(restorable[goes - 1].step, history.watermark)
    kept = {each for each in stay if each.step < watermark or each in history.kept}
    advanced = history.advanced(watermark, kept)
    return advanced if (advanced.watermark, advanced.kept) != (history.watermark, history.kept) else None


def doomed_generations(
    catalog: Catalog, history: History, *, epoch: int, run_of: Callable[[GenerationId], str | None]
) -> dict[GenerationId, str]:
    """Generations to delete, oldest first, and why.

    Args:
        catalog: what is stored.
        history: state of the log, with the watermark already appended.
        epoch: the newest life.
        run_of: which run wrote a committed generation; `None` if that cannot be told.
    """
    own = (epoch, history.life)
    ours = [g for g, contents in catalog.items() if (g.epoch, g.life) == own and contents.committed]
    newest_own = max(ours, default=GenerationId(step=-1, epoch=epoch))
    reasons = {g: _why_garbage(g, catalog[g], history, newest_own, run_of) for g in sorted(catalog) if g.epoch <= epoch}
    return {generation: reason for generation, reason in reasons.items() if reason is not None}


def _why_garbage(
    generation: GenerationId,
    contents: Contents,
    history: History,
    newest_own: GenerationId,
    run_of: Callable[[GenerationId], str | None],
) -> str | None:
    if generation.epoch < history.first_epoch:
        # An earlier run stays whole until this one has more generations than it keeps.
        # What the log does not name may be all that is left of a run whose log was lost.
        if contents.committed and (history.watermark == 0 or run_of(generation) not in history.replaced):
            return None
        return "of an earlier run" + ("" if contents.committed else ", not committed")
    if not contents.committed:
        # Ranks write generations in order: below our newest commit nothing is in flight any more.
        if generation.epoch < newest_own.epoch:
            return f"not committed, and epoch {generation.epoch} is over"
        return "not committed, and newer ones are" if generation.step < newest_own.step else None
    return history.why_left_behind(generation)
