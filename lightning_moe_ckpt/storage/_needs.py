"""Checks that the files a generation references exist, and that the log allows them, as long as the generation exists.

If a referenced file is lost and the generation names spares, a restore finds out whether these suffice. Spares are not
checked here: without one an operator only has one copy less.

Source: PEC (2024), Sec. 3.
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
    """Why a referenced file is not available."""

    reason: str
    is_loss: bool
    """False if the log gave the referenced files up; then the generation itself only stays because others need it."""


def what_lacks(commit: Commit, history: History, defects: Mapping[GenerationId, str | None]) -> Lack | None:
    """Return why a generation's referenced files are not available; `None` if all are.

    Args:
        commit: manifest of the generation.
        history: state of the log.
        defects: every stored generation with its own defect, or `None` if it has none.
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


def expect_needs(backend: Backend, history: History, commit: Commit, stored: Sequence[StoredMarker]) -> None:
    """Check, before a generation becomes visible, that the files it references are committed and not given up.

    Args:
        backend: where the run is stored.
        history: state of the log.
        commit: the manifest that is about to be created.
        stored: markers of all ranks.

    Raises:
        Corrupt: a referenced file was given up, was never committed, or is not what was written.
        StorageError: the medium failed.
    """
    if not commit.needs:
        return
    for need in commit.needs:
        if (dead := history.why_dead(need)) is not None:
            raise Corrupt(f"{commit.generation}: refers to {need}, which must not be used: {dead}. {_REMEDY}")
        try:
            read_commit(backend, history.run_id, need)
        except (Corrupt, KeyMissing) as error:
            raise Corrupt(
                f"{commit.generation}: refers to {need}, which is not committed: {error} {_REMEDY}"
            ) from error
    catalog = read_catalog(backend)
    for marker in (each.marker for each in stored):
        for each in marker.referenced:
            if catalog[each.generation].sizes.get(each.segment.key) != each.segment.nbytes:
                raise Corrupt(
                    f"{commit.generation}: refers to {each.segment.key}, which is gone or of another size. {_REMEDY}"
                )


_REMEDY = "It is skipped; the next one must store itself what it cannot reference."
