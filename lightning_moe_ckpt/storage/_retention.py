"""Decide which generations may be restored, which stay and which go: by log, listing and manifests.

Most of it is pure functions over a listing, tested against a model. Mark and sweep: the log first records the
generations that stay (the watermark, and those kept below it), then the rest is deleted. A crash in between costs
space, never a generation. Generations that may still be written are never deleted.

A generation's referenced files must exist, and the log must allow them, as long as the generation exists. If such a
file is lost and the generation names spares, a restore finds out whether these suffice. Spares are not checked: without
its spare an operator only has one copy less. Source: PEC (2024), Sec. 3.

Age is only a reason to keep. It is a manifest's time relative to the newest manifest's. No clock is read, so every
process decides the same, however long the job was stopped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lightning_moe_ckpt.errors import ConfigurationError, Corrupt, StorageError
from lightning_moe_ckpt.storage._backend import Backend
from lightning_moe_ckpt.storage._catalog import Catalog, Contents, missing_parts, read_commit
from lightning_moe_ckpt.storage._log import History
from lightning_moe_ckpt.storage._markers import Commit
from lightning_moe_ckpt.storage._names import GenerationId

_SECONDS_PER_DAY = 86_400


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """Rules for the committed generations to keep; one matching rule is enough. Raises `ConfigurationError` if a value is out of range."""

    last: int = 2
    """Newest generations to keep. With two, one is left if the newest is damaged."""
    every_n_steps: int | None = None
    """Steps between generations kept for good: the first at or after each multiple of this; step 0 is a multiple."""
    days: float | None = None
    """Days before the newest commit for which generations stay. If the clock was ahead at the newest commit, others go
    that much too early; if it was behind, they stay longer."""

    dense: int = 0
    """Newest dense generations to keep besides: with everything at one step, so that they can be exported."""

    def __post_init__(self) -> None:
        if not (_is_int(self.dense) and self.dense >= 0):
            raise ConfigurationError(f"`Retention(dense={self.dense!r})` must be 0 or more generations.")
        for name, what in (("last", "generations, of which one is resumed from"), ("every_n_steps", "steps")):
            value = getattr(self, name)
            if not ((value is None and name != "last") or (_is_int(value) and value >= 1)):
                raise ConfigurationError(f"`Retention({name}={value!r})` must be 1 or more {what}.")
        days = self.days
        if days is not None and not (
            isinstance(days, int | float) and not isinstance(days, bool) and 0 < days < math.inf
        ):
            raise ConfigurationError(f"`Retention(days={days!r})` must be above zero, or None.")

    def reasons(self, restorable: Sequence[Commit], doubtful: Sequence[GenerationId]) -> dict[GenerationId, str]:
        """Return the generations that stay, each with the reason, from restorable ones, newest first, and ones that cannot be read now."""
        reasons: dict[GenerationId, str] = {}
        if self.every_n_steps is not None:
            generations = [commit.generation for commit in restorable]
            for milestone in (
                *_milestones(generations, self.every_n_steps),
                *_milestones([*generations, *doubtful], self.every_n_steps),
            ):
                reasons[milestone] = (
                    f"first at or after step {milestone.step // self.every_n_steps * self.every_n_steps}"
                )
        if self.days is not None:
            oldest = max((commit.unix_time for commit in restorable[:1]), default=0) - self.days * _SECONDS_PER_DAY
            reasons |= {c.generation: f"within {self.days:g} days" for c in restorable if c.unix_time >= oldest}
        whole = [commit.generation for commit in restorable if len(commit.steps) == 1 and not commit.needs]
        reasons |= dict.fromkeys(whole[: self.dense], f"among the last {self.dense} with everything at one step")
        return reasons | {c.generation: f"among the last {self.last}" for c in restorable[: self.last]}


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _milestones(generations: Iterable[GenerationId], every: int) -> list[GenerationId]:
    """Return the first generation at or after each multiple of `every`."""
    first: dict[int, GenerationId] = {}
    for generation in sorted(generations, reverse=True):
        first[generation.step // every] = generation
    return list(first.values())


def advanced_history(
    history: History, stay: Iterable[GenerationId], restorable: Sequence[GenerationId]
) -> History | None:
    """Return the history after giving up all but `stay`, with those that others need; `None` if nothing more is given up.

    Counted from the newest, the watermark is the last generation before the first gap in `restorable` and needed ones, newest
    first. Older generations are kept by name.
    """
    stay = set(stay)
    goes = next((index for index, generation in enumerate(restorable) if generation not in stay), None)
    if not goes:  # nothing goes, or the newest would go
        return None
    watermark = max(restorable[goes - 1].step, history.watermark)
    kept = {generation for generation in stay if generation.step < watermark or generation in history.kept}
    advanced = history.advanced(watermark, kept)
    return advanced if (advanced.watermark, advanced.kept) != (history.watermark, history.kept) else None


def doomed_generations(
    catalog: Catalog, history: History, *, incarnation: int, run_of: Callable[[GenerationId], str | None]
) -> dict[GenerationId, str]:
    """Return the generations to delete, oldest first, each with the reason; the watermark is in the history already.

    `run_of` returns the run that wrote a committed generation; `None` if unknown.
    """
    own = (incarnation, history.nonce)
    ours = [g for g, contents in catalog.items() if (g.incarnation, g.nonce) == own and contents.committed]
    newest_own = max(ours, default=GenerationId(step=-1, incarnation=incarnation))
    known = [each for each in sorted(catalog) if each.incarnation <= incarnation]
    reasons = {each: _why_garbage(each, catalog[each], history, newest_own, run_of) for each in known}
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
        # Ranks write in order: uncommitted generations older than our newest commit are not written any more.
        if generation.incarnation < newest_own.incarnation:
            return f"not committed, and incarnation {generation.incarnation} is over"
        return "not committed, and newer ones are" if generation.step < newest_own.step else None
    return history.why_left_behind(generation)


# -- what may be restored


@dataclass(frozen=True, slots=True)
class Lack:
    """Reason why a referenced file is not available."""

    reason: str
    is_loss: bool
    """Whether files are lost; false if the log gave them up, and the generation only stays for other generations."""


def what_lacks(commit: Commit, history: History, defects: Mapping[GenerationId, str | None]) -> Lack | None:
    """Return the reason why a generation's referenced files are not available; `None` if all are.

    `defects` has the defect of every stored generation, `None` for a sound one.
    """
    for need in commit.needs:
        if (dead := history.why_dead(need)) is not None:
            return Lack(f"needs {need}, given up: {dead}", is_loss=False)
    for need in commit.needs:
        if (defect := defects.get(need, "it is gone")) is not None:
            return Lack(f"needs {need}, which cannot be read: {defect}", is_loss=True)
    return None


def needed_by(commits: Iterable[Commit]) -> dict[GenerationId, GenerationId]:
    """Map each needed generation to the newest generation that needs it."""
    ascending = sorted(commits, key=lambda commit: commit.generation)
    return {need: commit.generation for commit in ascending for need in commit.needs}


def spare_for(commits: Iterable[Commit]) -> dict[GenerationId, GenerationId]:
    """Map each generation that holds spares to the newest generation that names them."""
    ascending = sorted(commits, key=lambda commit: commit.generation)
    return {spare: commit.generation for commit in ascending for spare in commit.spares}


@dataclass(frozen=True, slots=True)
class PassedOver:
    """Generation that cannot be restored, with the reason; `is_loss` if it should be restorable."""

    generation: GenerationId
    reason: str
    is_loss: bool
    commit: Commit | None = None
    """Manifest, if only referenced files are missing."""

    @property
    def is_for_others(self) -> bool:
        """Whether the generation only stays because other generations refer to it: no defect."""
        return self.commit is not None and not self.is_loss

    @property
    def may_be_restored(self) -> bool:
        """Whether spares may replace all missing files; only a restore can tell."""
        return self.is_loss and self.commit is not None and bool(self.commit.spares)


@dataclass(frozen=True, slots=True)
class Survey:
    """Stored generations of a run, sorted into restorable ones and the rest."""

    usable: Sequence[Commit]
    """Restorable generations, newest first."""
    passed_over: Sequence[PassedOver]
    """Generations that cannot be restored, newest first."""
    catalog: Catalog
    """Listing of the generations."""
    damaged: Mapping[GenerationId, str] = field(default_factory=dict)
    """Defects found by reading the files, by usable generation."""

    @classmethod
    def take(cls, backend: Backend, history: History, catalog: Catalog) -> Survey:
        """Read the manifest of every generation that the log allows."""
        read = {each: _read_restorable(backend, history, catalog[each]) for each in sorted(catalog, reverse=True)}
        defects = {each: None if isinstance(found, Commit) else found.reason for each, found in read.items()}
        judged = [_complete(found, history, defects) for found in read.values()]
        usable = [found for found in judged if isinstance(found, Commit)]
        return cls(usable, [found for found in judged if isinstance(found, PassedOver)], catalog)

    def read(self, check: Callable[[GenerationId], str | None], number: int) -> Survey:
        """Return this survey with `damaged` filled: `check` reads files, newest first, until `number` generations have no defect."""
        damaged: dict[GenerationId, str] = {}
        whole, _ = self._sound()
        for commit in whole:
            if number == 0:
                break
            if (reason := check(commit.generation)) is None:
                number -= 1
            else:
                damaged[commit.generation] = reason
        return replace(self, damaged=damaged)

    @property
    def offered(self) -> list[Commit]:
        """Generations that a restore may try, newest first."""
        partly = [each.commit for each in self.passed_over if each.commit is not None and each.may_be_restored]
        return sorted([*self.usable, *partly], key=lambda commit: commit.generation, reverse=True)

    @property
    def sources(self) -> list[Commit]:
        """Generations that a restore does not try, but may take operators from; newest first."""
        return [each.commit for each in self.passed_over if each.commit is not None and not each.may_be_restored]

    def give_up(self, history: History, retention: Retention, audited: int | None = None) -> History | None:
        """Return the history after `retention` gave up unneeded generations; `None` if nothing changes."""
        whole, _ = self._sound()
        return advanced_history(history, self.reasons(retention, audited), self._in_order(whole))

    def reasons(self, retention: Retention, audited: int | None = None) -> dict[GenerationId, str]:
        """Return the generations that stay under `retention`, each with the reason; and the newest up to step `audited`, that of
        the last clean audit, to go on from if the next audit finds a fault.
        """
        whole, doubtful = self._sound()
        if any(commit.needs or commit.spares for commit in whole[:1]):
            # A running save may refer to either of the last two, and to their references. Keeping both also
            # keeps two copies of their records.
            retention = replace(retention, last=max(2, retention.last))
        reasons = retention.reasons(whole, doubtful)
        if audited is not None:
            good = [commit.generation for commit in whole if commit.generation.step <= audited]
            reasons = dict.fromkeys(good[:1], f"newest before the last clean audit, at step {audited}") | reasons
        counted = {commit.generation for commit in whole}
        # An unreadable generation may come back, so the files that it needs stay until the log gives it up.
        needing = [c for each, c in self._manifests.items() if each in reasons or each not in counted]
        for_others = {skipped.generation for skipped in self.passed_over if skipped.is_for_others}
        needed = needed_by(c for c in needing if c.generation not in for_others)
        spare = {each: f"has older copies for {by}" for each, by in spare_for(whole[: retention.last]).items()}
        there = {each: reason for each, reason in spare.items() if each in self._allowed}
        needs = {need: f"needed by {by}" for need, by in needed.items()}
        return self._perhaps_needed(reasons) | there | needs | reasons

    def _perhaps_needed(self, stay: Mapping[GenerationId, str]) -> dict[GenerationId, str]:
        """Return the generations that an unreadable one may need: all older ones, if the run references any."""
        manifests = self._manifests
        silent = [skipped.generation for skipped in self.passed_over if skipped.is_loss and skipped.commit is None]
        newest = max((generation for generation in silent if generation in stay), default=None)
        if newest is None or not any(commit.needs for commit in manifests.values()):
            return {}
        return {each: f"may be needed by {newest}, which cannot be read" for each in manifests if each < newest}

    def _in_order(self, whole: Sequence[Commit]) -> list[GenerationId]:
        """Return the generations that the log can give up, newest first: whole ones, and older ones kept for others."""
        newest = max((commit.generation for commit in whole), default=None)
        others = [skipped.generation for skipped in self.passed_over if skipped.is_for_others]
        older = [each for each in others if newest is not None and each < newest]
        return sorted([*(commit.generation for commit in whole), *older], reverse=True)

    @property
    def _allowed(self) -> set[GenerationId]:
        return {*self._manifests, *(skipped.generation for skipped in self.passed_over if skipped.is_loss)}

    @property
    def _manifests(self) -> Mapping[GenerationId, Commit]:
        known = [*self.usable, *(skipped.commit for skipped in self.passed_over if skipped.commit is not None)]
        return {commit.generation: commit for commit in known}

    def _sound(self) -> tuple[list[Commit], list[GenerationId]]:
        """Return whole generations, and doubtful ones: unreadable, damaged or with missing objects."""
        whole = [commit for commit in self.usable if self._is_whole(commit)]
        counted = {commit.generation for commit in whole}
        doubtful = [commit.generation for commit in self.usable if commit.generation not in counted]
        return whole, doubtful + [skipped.generation for skipped in self.passed_over if skipped.is_loss]

    def _is_whole(self, commit: Commit) -> bool:
        """Return whether no object of the generation, or of generations it needs, is missing or known to be damaged."""
        if commit.generation in self.damaged:
            return False
        manifests = self._manifests
        parts = [commit, *(manifests[need] for need in commit.needs)]
        return all(missing_parts(part, self.catalog[part.generation]) is None for part in parts)


def _complete(
    found: Commit | PassedOver, history: History, defects: Mapping[GenerationId, str | None]
) -> Commit | PassedOver:
    """Return the manifest, or the generation as passed over if its referenced files are not available."""
    if isinstance(found, PassedOver) or (lack := what_lacks(found, history, defects)) is None:
        return found
    return PassedOver(found.generation, lack.reason, lack.is_loss, commit=found)


def _read_restorable(backend: Backend, history: History, contents: Contents) -> Commit | PassedOver:
    """Return a generation's manifest, or the generation as passed over with the reason."""
    generation = contents.generation
    if (reason := history.why_left_behind(generation)) is not None:
        return PassedOver(generation, reason, is_loss=False)
    if (reason := history.why_unknown(generation)) is not None:
        return PassedOver(generation, reason, is_loss=contents.committed)
    if not contents.committed:
        return PassedOver(generation, "not committed", is_loss=False)
    try:
        return read_commit(backend, generation, history.run_id)
    except (Corrupt, StorageError) as error:
        return PassedOver(generation, str(error), is_loss=True)
