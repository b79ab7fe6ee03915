"""Decide which generations stay and which go: pure functions over a listing, tested against a model.

Mark and sweep: the log first records what stays (the watermark, and the generations kept below it), then the rest is
deleted. A crash in between costs space, never a generation. Generations that may still be written are never deleted.

Age is only a reason to keep. It is the time in a manifest relative to the newest manifest. No clock is read, so every
process decides the same, however long the job was stopped.
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
    """Rules for which committed generations stay; one matching rule is enough.

    Raises:
        ConfigurationError: a value is out of range.
    """

    last: int = 2
    """Number of newest generations to keep. With two, one is left if the newest is damaged."""
    every_n_steps: int | None = None
    """Keep for good the first generation at or after each multiple of so many steps; step 0 is a multiple."""
    days: float | None = None
    """Keep generations committed at most so many days before the newest one. If the clock was ahead when the newest was
    committed, others go that much too early; if it was behind, they stay longer."""

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
        """Return the generations that stay, each with the reason.

        Args:
            restorable: committed and whole generations, newest first.
            doubtful: committed generations that cannot be read now; the medium may be unavailable.
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
    """Return the first generation at or after each multiple of `every`."""
    first: dict[int, GenerationId] = {}
    for each in sorted(generations, reverse=True):
        first[each.step // every] = each
    return list(first.values())


def advanced_history(
    history: History, stay: Iterable[GenerationId], restorable: Sequence[GenerationId]
) -> History | None:
    """Return the history after giving up all but `stay`; `None` if that gives up nothing more.

    Counted from the newest, the watermark is the last generation before the first gap. Older ones are kept by name.

    Args:
        history: state of the log.
        stay: generations to keep, including those that others need.
        restorable: all restorable generations and those that they need, newest first.
    """
    stay = set(stay)
    goes = next((index for index, each in enumerate(restorable) if each not in stay), None)
    if not goes:  # nothing goes, or the newest would go
        return None
    watermark = max(restorable[goes - 1].step, history.watermark)
    kept = {each for each in stay if each.step < watermark or each in history.kept}
    advanced = history.advanced(watermark, kept)
    return advanced if (advanced.watermark, advanced.kept) != (history.watermark, history.kept) else None


def doomed_generations(
    catalog: Catalog, history: History, *, incarnation: int, run_of: Callable[[GenerationId], str | None]
) -> dict[GenerationId, str]:
    """Return the generations to delete, oldest first, each with the reason.

    Args:
        catalog: all stored generations.
        history: state of the log, with the watermark already appended.
        incarnation: number of the newest incarnation.
        run_of: returns the run that wrote a committed generation; `None` if unknown.
    """
    own = (incarnation, history.nonce)
    ours = [g for g, contents in catalog.items() if (g.incarnation, g.nonce) == own and contents.committed]
    newest_own = max(ours, default=GenerationId(step=-1, incarnation=incarnation))
    reasons = {
        g: _why_garbage(g, catalog[g], history, newest_own, run_of)
        for g in sorted(catalog)
        if g.incarnation <= incarnation
    }
    return {generation: reason for generation, reason in reasons.items() if reason is not None}


def _why_garbage(
    generation: GenerationId,
    contents: Contents,
    history: History,
    newest_own: GenerationId,
    run_of: Callable[[GenerationId], str | None],
) -> str | None:
    if generation.incarnation < history.first_incarnation:
        # An earlier run stays whole until this one has more generations than it keeps.
        # Generations of a run that the log does not name stay too: the log may have been lost.
        if contents.committed and (history.watermark == 0 or run_of(generation) not in history.replaced):
            return None
        return "of an earlier run" + ("" if contents.committed else ", not committed")
    if not contents.committed:
        # Ranks write generations in order: older ones than our newest commit are not being written any more.
        if generation.incarnation < newest_own.incarnation:
            return f"not committed, and incarnation {generation.incarnation} is over"
        return "not committed, and newer ones are" if generation.step < newest_own.step else None
    return history.why_left_behind(generation)
