"""Which stored generations may be restored, by the log and by their manifests, and why the others may not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_moe_ckpt.errors import Corrupt, StorageError
from lightning_moe_ckpt.storage._backend import Backend
from lightning_moe_ckpt.storage._catalog import Catalog, Contents, missing_parts, read_commit
from lightning_moe_ckpt.storage._log import History
from lightning_moe_ckpt.storage._names import GenerationId
from lightning_moe_ckpt.storage._records import Commit
from lightning_moe_ckpt.storage._retention import Retention, advanced_history


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A generation that cannot be restored, and whether it should have been possible."""

    generation: GenerationId
    reason: str
    is_loss: bool


@dataclass(frozen=True, slots=True)
class Survey:
    """What a run can restore."""

    usable: Sequence[Commit]
    """Newest first."""
    passed_over: Sequence[PassedOver]
    """The others, newest first."""

    @classmethod
    def take(cls, backend: Backend, history: History, catalog: Catalog) -> Survey:
        """Read the manifest of every generation that the log allows."""
        usable, passed_over = [], []
        for generation in sorted(catalog, reverse=True):
            found = _read_restorable(backend, history, catalog[generation])
            if isinstance(found, Commit):
                usable.append(found)
            else:
                passed_over.append(found)
        return cls(usable, passed_over)

    def give_up(self, history: History, retention: Retention, catalog: Catalog) -> History | None:
        """The history after what need not stay under `retention` was given up; `None` if it is the same."""
        whole, doubtful = self._sound(catalog)
        return advanced_history(history, retention.reasons(whole, doubtful), [commit.generation for commit in whole])

    def reasons(self, retention: Retention, catalog: Catalog) -> dict[GenerationId, str]:
        """What stays under `retention`, and why."""
        return retention.reasons(*self._sound(catalog))

    def _sound(self, catalog: Catalog) -> tuple[list[Commit], list[GenerationId]]:
        """What all is there of, and what counts neither as kept nor as given up: unreadable, or objects are missing."""
        whole = [commit for commit in self.usable if missing_parts(commit, catalog[commit.generation]) is None]
        counted = {commit.generation for commit in whole}
        doubtful = [commit.generation for commit in self.usable if commit.generation not in counted]
        return whole, doubtful + [each.generation for each in self.passed_over if each.is_loss]


def _read_restorable(backend: Backend, history: History, contents: Contents) -> Commit | PassedOver:
    """The manifest of a generation, or what speaks against it."""
    generation = contents.generation
    if (reason := history.why_dead(generation)) is not None:
        return PassedOver(generation, reason, is_loss=False)
    if not contents.committed:
        return PassedOver(generation, f"not committed; {len(contents.ranks)} ranks had finished", is_loss=False)
    try:
        return read_commit(backend, history.run_id, generation)
    except (Corrupt, StorageError) as error:
        return PassedOver(generation, str(error), is_loss=True)
