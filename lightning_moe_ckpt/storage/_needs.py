"""What a generation borrows must be there, and allowed by the log, for as long as the generation is.

Where it names older copies too, what is lost of the newest ones need not be the end of it: a restore finds out. Spares
themselves are never asked for: what is stored without one has one copy less, no more.

Sources: the design, "References"; PEC (2024), Sec. 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lightning_moe_ckpt.errors import Corrupt, KeyMissing
from lightning_moe_ckpt.storage._backend import Backend
from lightning_moe_ckpt.storage._catalog import read_catalog, read_commit
from lightning_moe_ckpt.storage._log import History
from lightning_moe_ckpt.storage._names import GenerationId
from lightning_moe_ckpt.storage._records import Commit, StoredMarker


@dataclass(frozen=True, slots=True)
class Lack:
    """What a generation needs and does not have."""

    reason: str
    is_loss: bool
    """False if the log has given up what is needed: this one stays only for what needs it in turn."""


def what_lacks(commit: Commit, history: History, defects: Mapping[GenerationId, str | None]) -> Lack | None:
    """Why a generation cannot be restored for want of what it borrows; `None` if all of that is there.

    Args:
        commit: its manifest.
        history: state of the log.
        defects: of every stored generation, what is wrong with it by itself; `None` if nothing is.
    """
    for need in commit.needs:
        if (dead := history.why_dead(need)) is not None:
            return Lack(f"needs {need}, given up: {dead}", is_loss=False)
    for need in commit.needs:
        if (defect := defects.get(need, "it is gone")) is not None:
            return Lack(f"needs {need}, which cannot be read: {defect}", is_loss=True)
    return None


def needed_by(commits: Iterable[Commit]) -> dict[GenerationId, GenerationId]:
    """What generations need, each with the newest one that needs it."""
    ascending = sorted(commits, key=lambda commit: commit.generation)
    return {need: commit.generation for commit in ascending for need in commit.needs}


def spare_for(commits: Iterable[Commit]) -> dict[GenerationId, GenerationId]:
    """What has older copies for generations, each with the newest of those."""
    ascending = sorted(commits, key=lambda commit: commit.generation)
    return {spare: commit.generation for commit in ascending for spare in commit.spares}


def expect_needs(backend: Backend, history: History, commit: Commit, stored: Sequence[StoredMarker]) -> None:
    """Check, before a generation becomes visible, that whatever it borrows is committed and stays.

    Args:
        backend: where it is.
        history: state of the log.
        commit: what is about to be created.
        stored: markers of all ranks.

    Raises:
        Corrupt: something it needs was given up, was never committed, or is not what was written.
        StorageError: the medium failed.
    """
    if not commit.needs:
        return
    for need in commit.needs:
        if (dead := history.why_dead(need)) is not None:
            raise Corrupt(f"{commit.generation}: borrows from {need}, which must not be used: {dead}. {_REMEDY}")
        try:
            read_commit(backend, history.run_id, need)
        except (Corrupt, KeyMissing) as error:
            raise Corrupt(
                f"{commit.generation}: borrows from {need}, which is not committed: {error} {_REMEDY}"
            ) from error
    catalog = read_catalog(backend)
    for marker in (each.marker for each in stored):
        for each in marker.borrowed:
            if catalog[each.generation].sizes.get(each.segment.key) != each.segment.nbytes:
                raise Corrupt(
                    f"{commit.generation}: borrows from {each.segment.key}, which is gone or of another size. {_REMEDY}"
                )


_REMEDY = "It is skipped; the next one must store itself what it cannot borrow."
