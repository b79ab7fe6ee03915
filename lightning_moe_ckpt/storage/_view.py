"""Read-only view of a stored run.

`RunStore.open` begins a run where there is none and probes the medium by writing. This view does neither, so it may be
used while the job runs. It applies the same rules: the newest readable log entry, the timeline rule, manifests.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from lightning_moe_ckpt.errors import CheckpointError, Corrupt, KeyMissing
from lightning_moe_ckpt.storage._backend import Backend
from lightning_moe_ckpt.storage._catalog import (
    Contents,
    missing_parts,
    read_catalog,
    read_commit,
    read_committed_marker,
)
from lightning_moe_ckpt.storage._commit import read_run
from lightning_moe_ckpt.storage._log import KEPT_ENTRIES, History, Log, LogEntry, is_compacted, log_indices, read_entry
from lightning_moe_ckpt.storage._markers import Commit, RankMarker
from lightning_moe_ckpt.storage._names import LOG_PREFIX, GenerationId, log_key
from lightning_moe_ckpt.storage._retention import needed_by, spare_for, what_lacks

_READERS = 16
"""Threads that read log entries, one request each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredGeneration:
    """Generation by listing and manifest; segments were not read."""

    generation: GenerationId
    committed: bool
    """Whether there is a manifest, readable or not."""
    commit: Commit | None
    """Manifest; `None` if missing or unreadable."""
    ranks: tuple[int, ...]
    """Ranks with a stored marker."""
    sizes: Mapping[str, int]
    """Bytes by key, as listed."""
    dead: str | None
    """Reason why the log forbids a restore; `None` if it does not."""
    damage: str | None
    """Reason why a restore is impossible although the log allows it, as far as listing and manifest show."""

    @property
    def nbytes(self) -> int:
        return sum(nbytes for key, nbytes in self.sizes.items() if key.endswith(".safetensors"))

    @property
    def needs(self) -> tuple[GenerationId, ...]:
        """Older generations that this generation refers to."""
        return () if self.commit is None else self.commit.needs

    @property
    def usable(self) -> bool:
        """Whether a restart would try the generation."""
        return self.commit is not None and self.dead is None and self.damage is None

    @property
    def why_not(self) -> str | None:
        """Reason why the generation is not usable; `None` if usable."""
        return self.dead or self.damage or (None if self.committed else f"not committed; ranks done: {len(self.ranks)}")


class RunView:
    """Run under a URL, read only."""

    def __init__(self, backend: Backend, history: History | None) -> None:
        self.history = history
        """State of the newest readable log entry; `None` if there is no such entry."""
        self._backend = backend

    @classmethod
    def open(cls, backend: Backend) -> RunView:
        """Read the log. Raises `NoUsableGeneration` if there is no run; `StorageError` if the medium failed."""
        try:
            return cls(backend, read_run(Log(backend), backend))
        except Corrupt:
            return cls(backend, None)

    @property
    def url(self) -> str:
        return self._backend.url

    @property
    def run_id(self) -> str:
        """Name of the newest run under the URL; empty if the log cannot be read."""
        return "" if self.history is None else self.history.run_id

    def generations(self) -> list[StoredGeneration]:
        """List all stored generations, newest first, including those of earlier runs and incarnations."""
        catalog = read_catalog(self._backend)
        found = {generation: self._look_at(catalog[generation]) for generation in sorted(catalog, reverse=True)}
        defects = {each: stored.why_not for each, stored in found.items()}
        judged = [self._with_needs(stored, defects) for stored in found.values()]
        usable = [each.commit for each in judged if each.commit is not None and each.usable]
        lent = spare_for(usable) | needed_by(usable)
        only_lent = {g: f"only there for {by}" for g, by in lent.items() if g in found and found[g].dead is None}
        return [
            replace(each, dead=f"{why}; {each.dead}") if each.dead and (why := only_lent.get(each.generation)) else each
            for each in judged
        ]

    def events(self, known: Mapping[int, LogEntry] | None = None) -> dict[int, LogEntry]:
        """Return the log's newest thousand entries by index, oldest first; unreadable ones are left out.

        Entries in `known`, the result of an earlier call, are not read again.
        """
        known = known or {}
        indices = log_indices(self._backend)[-KEPT_ENTRIES:]
        wanted = [index for index in indices if index not in known]
        with ThreadPoolExecutor(_READERS, "moe-ckpt-log") as pool:
            read = dict(zip(wanted, pool.map(self._entry, wanted), strict=True))
        found = {index: known.get(index) or read.get(index) for index in indices}
        return {index: event for index, event in found.items() if event is not None}

    def _entry(self, index: int) -> LogEntry | None:
        try:
            return read_entry(self._backend.get(log_key(index)), index)
        except CheckpointError:
            return None

    def log_damage(self) -> list[str]:
        """Read every log entry and return the defects of damaged and missing ones."""
        indices, damage, due = log_indices(self._backend), [], 0
        for index in indices:
            due = max(due, indices[-1] + 1 - KEPT_ENTRIES)  # older ones may have been deleted
            if index > due:
                which = f"entry {due} is" if index == due + 1 else f"entries {due} to {index - 1} are"
                damage.append(f"{LOG_PREFIX}: {which} missing, later ones are there.")
            due = max(due, index + 1)
            try:
                read_entry(self._backend.get(log_key(index)), index)
            except CheckpointError as error:
                if not (isinstance(error, KeyMissing) and is_compacted(self._backend, index)):
                    damage.append(str(error))
        return damage

    def read_marker(self, commit: Commit, rank: int) -> RankMarker:
        """Read a rank's marker, as `read_committed_marker` does."""
        return read_committed_marker(self._backend, commit, rank)

    def _look_at(self, contents: Contents) -> StoredGeneration:
        generation = contents.generation
        commit, damage = None, None
        dead = self.history.why_dead(generation) if self.history is not None else "the log cannot be read"
        if contents.committed:
            try:
                # A dead generation may belong to another run.
                commit = read_commit(self._backend, generation, self.run_id if dead is None else None)
                damage = missing_parts(commit, contents)
            except CheckpointError as error:
                damage = str(error)
        return StoredGeneration(
            generation=generation,
            committed=contents.committed,
            commit=commit,
            ranks=tuple(sorted(contents.ranks)),
            sizes=contents.sizes,
            dead=dead,
            damage=damage,
        )

    def _with_needs(self, stored: StoredGeneration, defects: Mapping[GenerationId, str | None]) -> StoredGeneration:
        """Return `stored`, marked as damaged if files that it references are missing."""
        if not stored.usable or stored.commit is None or self.history is None:
            return stored
        lack = what_lacks(stored.commit, self.history, defects)
        if lack is None or (lack.is_loss and stored.commit.spares):  # spares may suffice
            return stored
        return replace(stored, damage=lack.reason) if lack.is_loss else replace(stored, dead=lack.reason)
