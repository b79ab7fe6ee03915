"""Find out which stored generations may be restored, by log and manifests, and why the others may not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lightning_moe_ckpt.errors import Corrupt, StorageError
from lightning_moe_ckpt.storage._backend import Backend
from lightning_moe_ckpt.storage._catalog import Catalog, Contents, missing_parts, read_commit
from lightning_moe_ckpt.storage._log import History
from lightning_moe_ckpt.storage._names import GenerationId
from lightning_moe_ckpt.storage._needs import needed_by, spare_for, what_lacks
from lightning_moe_ckpt.storage._records import Commit
from lightning_moe_ckpt.storage._retention import Retention, advanced_history


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A generation that cannot be restored, with the reason; `is_loss` if it should be restorable."""

    generation: GenerationId
    reason: str
    is_loss: bool
    commit: Commit | None = None
    """The manifest, if only files that the generation references are missing."""

    @property
    def is_for_others(self) -> bool:
        """Whether it only stays because other generations refer to it; this is no defect."""
        return self.commit is not None and not self.is_loss

    @property
    def may_be_restored(self) -> bool:
        """Whether spares may replace all that is missing; only a restore can tell."""
        return self.is_loss and self.commit is not None and bool(self.commit.spares)


@dataclass(frozen=True, slots=True)
class Survey:
    """The stored generations of a run, sorted into restorable ones and others."""

    usable: Sequence[Commit]
    """Restorable generations, newest first."""
    passed_over: Sequence[PassedOver]
    """The others, newest first."""
    damaged: Mapping[GenerationId, str] = field(default_factory=dict)
    """Usable generations whose files were read and found damaged, with the defect."""

    @classmethod
    def take(cls, backend: Backend, history: History, catalog: Catalog) -> Survey:
        """Read the manifest of every generation that the log allows."""
        read = {each: _read_restorable(backend, history, catalog[each]) for each in sorted(catalog, reverse=True)}
        defects = {each: None if isinstance(found, Commit) else found.reason for each, found in read.items()}
        judged = [_complete(found, history, defects) for found in read.values()]
        usable = [found for found in judged if isinstance(found, Commit)]
        return cls(usable, [found for found in judged if isinstance(found, PassedOver)])

    def read(self, check: Callable[[GenerationId], str | None], number: int, catalog: Catalog) -> Survey:
        """Return this survey with `damaged` filled: files are read, newest first, until `number` generations are good.

        Args:
            check: reads all files of a generation and those it references; returns a defect, or `None`.
            number: how many good generations to find.
            catalog: the listing given to `take`.
        """
        damaged: dict[GenerationId, str] = {}
        whole, _ = self._sound(catalog)
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

    @property
    def needed(self) -> dict[GenerationId, GenerationId]:
        """Generations that usable ones need, each with the newest that needs it."""
        return needed_by(self.usable)

    @property
    def spare(self) -> dict[GenerationId, GenerationId]:
        """Generations that hold spares of usable ones, each with the newest that names it."""
        return spare_for(self.usable)

    def give_up(self, history: History, retention: Retention, catalog: Catalog) -> History | None:
        """Return the history after `retention` gave up what need not stay; `None` if nothing changes."""
        whole, _ = self._sound(catalog)
        return advanced_history(history, self.reasons(retention, catalog), self._in_order(whole))

    def reasons(self, retention: Retention, catalog: Catalog) -> dict[GenerationId, str]:
        """Return the generations that stay under `retention`, each with the reason."""
        whole, doubtful = self._sound(catalog)
        if any(commit.needs or commit.spares for commit in whole[:1]):
            # A running save may refer to either of the last two, and to what these refer to. Keeping both also
            # keeps two copies of what they hold.
            retention = replace(retention, last=max(2, retention.last))
        reasons = retention.reasons(whole, doubtful)
        counted = {commit.generation for commit in whole}
        # An unreadable generation may come back, so what it needs stays until the log gives it up.
        needing = [c for each, c in self._manifests.items() if each in reasons or each not in counted]
        needed = {need: f"needed by {by}" for need, by in needed_by(c for c in needing if self._stays(c)).items()}
        spare = {each: f"has older copies for {by}" for each, by in spare_for(whole[: retention.last]).items()}
        there = {each: reason for each, reason in spare.items() if each in self._allowed}
        return self._perhaps_needed(reasons) | there | needed | reasons

    def _perhaps_needed(self, stay: Mapping[GenerationId, str]) -> dict[GenerationId, str]:
        """Return all generations older than a kept one whose manifest is unreadable, if the run references at all."""
        manifests = self._manifests
        silent = [each.generation for each in self.passed_over if each.is_loss and each.commit is None]
        newest = max((each for each in silent if each in stay), default=None)
        if newest is None or not any(commit.needs for commit in manifests.values()):
            return {}
        return {each: f"may be needed by {newest}, which cannot be read" for each in manifests if each < newest}

    def _stays(self, commit: Commit) -> bool:
        """Whether the generation is there for its own sake, not only because others refer to it."""
        return all(each.commit is not commit or not each.is_for_others for each in self.passed_over)

    def _in_order(self, whole: Sequence[Commit]) -> list[GenerationId]:
        """Return the generations that the log can give up, newest first: whole ones, and older ones kept for others."""
        newest = max((commit.generation for commit in whole), default=None)
        others = [each.generation for each in self.passed_over if each.is_for_others]
        older = [each for each in others if newest is not None and each < newest]
        return sorted([*(commit.generation for commit in whole), *older], reverse=True)

    @property
    def _allowed(self) -> set[GenerationId]:
        """Committed generations that the log allows, readable or not."""
        return {*self._manifests, *(each.generation for each in self.passed_over if each.is_loss)}

    @property
    def _manifests(self) -> Mapping[GenerationId, Commit]:
        """Readable manifests of generations that the log allows."""
        known = [*self.usable, *(each.commit for each in self.passed_over if each.commit is not None)]
        return {commit.generation: commit for commit in known}

    def _sound(self, catalog: Catalog) -> tuple[list[Commit], list[GenerationId]]:
        """Return whole generations, and doubtful ones: unreadable, damaged or with missing objects."""
        whole = [commit for commit in self.usable if self._is_whole(commit, catalog)]
        counted = {commit.generation for commit in whole}
        doubtful = [commit.generation for commit in self.usable if commit.generation not in counted]
        return whole, doubtful + [each.generation for each in self.passed_over if each.is_loss]

    def _is_whole(self, commit: Commit, catalog: Catalog) -> bool:
        """Whether no object of it, or of the generations it needs, is missing or known to be damaged."""
        if commit.generation in self.damaged:
            return False
        manifests = self._manifests
        parts = [commit, *(manifests[need] for need in commit.needs)]
        return all(missing_parts(each, catalog[each.generation]) is None for each in parts)


def _complete(
    found: Commit | PassedOver, history: History, defects: Mapping[GenerationId, str | None]
) -> Commit | PassedOver:
    """Return the manifest, or why files that the generation references are not available."""
    if isinstance(found, PassedOver) or (lack := what_lacks(found, history, defects)) is None:
        return found
    return PassedOver(found.generation, lack.reason, lack.is_loss, commit=found)


def _read_restorable(backend: Backend, history: History, contents: Contents) -> Commit | PassedOver:
    """Return the manifest of a generation, or why it cannot be restored."""
    generation = contents.generation
    if (reason := history.why_left_behind(generation)) is not None:
        return PassedOver(generation, reason, is_loss=False)
    if (reason := history.why_unknown(generation)) is not None:
        return PassedOver(generation, reason, is_loss=contents.committed)
    if not contents.committed:
        return PassedOver(generation, f"not committed; {len(contents.ranks)} ranks had finished", is_loss=False)
    try:
        return read_commit(backend, history.run_id, generation)
    except (Corrupt, StorageError) as error:
        return PassedOver(generation, str(error), is_loss=True)
