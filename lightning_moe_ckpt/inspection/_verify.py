"""Reading every byte of a stored run and comparing it with what was written.

Each digest is in the document above it: records and files in a rank's marker, markers in the manifest; markers,
manifests and log entries carry their own. So a flipped bit or a missing end anywhere is found, and named.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from lightning_moe_ckpt.errors import CheckpointError, Corrupt
from lightning_moe_ckpt.storage import (
    Backend,
    Commit,
    OverflowEntry,
    RankMarker,
    RunView,
    SegmentEntry,
    StoredGeneration,
    scrub_overflow,
    scrub_segment,
)

Show = Callable[[int], None]
"""Called with the bytes of each file that was read."""


@dataclass(frozen=True, slots=True)
class FileProblem:
    """Something that is not as it was written."""

    generation: str
    """Empty for the log."""
    reason: str


@dataclass(kw_only=True, slots=True)
class Verdict:
    """What `verify` found."""

    generations: list[str] = field(default_factory=list)
    """Those that were read, newest first."""
    skipped: int = 0
    """Generations that were not: not committed, or not to be restored any more."""
    num_files: int = 0
    """Segments and side files read whole."""
    nbytes: int = 0
    """Their size."""
    seconds: float = 0.0
    problems: list[FileProblem] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        """Whether there is at least one generation and nothing wrong."""
        return bool(self.generations) and not self.problems

    @property
    def nbytes_per_second(self) -> float:
        """Speed of reading and digesting."""
        return self.nbytes / max(self.seconds, 1e-9)


def verify(backend: Backend, *, step: int | None = None, everything: bool = False, show: Show | None = None) -> Verdict:
    """Read all files of committed generations, and the log.

    Args:
        backend: from `open_backend`.
        step: only generations of this step.
        everything: also committed generations that the log rules out (of earlier runs, lives started over).
        show: progress.

    Raises:
        NoUsableGeneration: there is no run.
        StorageError: the medium failed where that says nothing about the bytes.
    """
    view, verdict, started = RunView.open(backend), Verdict(), time.perf_counter()
    verdict.problems = [FileProblem("", reason) for reason in view.log_damage()]
    for stored in view.generations():
        if step not in {None, stored.generation.step}:
            continue
        if not stored.committed or (stored.dead is not None and not everything and view.history is not None):
            verdict.skipped += 1
            continue
        reasons = list(_verify_generation(backend, view, stored, verdict, show))
        if reasons and _was_retired(view, stored):
            verdict.skipped += 1
            continue
        verdict.generations.append(str(stored.generation))
        verdict.problems += [FileProblem(str(stored.generation), reason) for reason in reasons]
    verdict.seconds = time.perf_counter() - started
    return verdict


def _verify_generation(
    backend: Backend, view: RunView, stored: StoredGeneration, verdict: Verdict, show: Show | None
) -> Iterator[str]:
    """What is wrong with one generation."""
    if stored.damage is not None:
        yield stored.damage
    if stored.commit is None:
        return
    markers = []
    for rank in range(stored.commit.world_size):
        try:
            markers.append(_read_marker(view, stored.commit, rank))
        except CheckpointError as error:
            yield str(error)
            continue
        for entry in _files(markers[-1]):
            try:
                _verify_file(backend, stored, entry)
            except CheckpointError as error:
                yield str(error)
            verdict.num_files += 1
            verdict.nbytes += entry.nbytes
            if show is not None:
                show(entry.nbytes)


def _was_retired(view: RunView, stored: StoredGeneration) -> bool:
    """Whether the run, going on meanwhile, deleted the generation; it begins with the manifest."""
    return not any(each.committed for each in view.generations() if each.generation == stored.generation)


def _read_marker(view: RunView, commit: Commit, rank: int) -> RankMarker:
    marker = view.read_marker(commit, rank)
    agreed = (marker.run_id, marker.world_size, marker.plan_hash, marker.steps, marker.policy)
    if agreed != (commit.run_id, commit.world_size, commit.plan_hash, commit.steps, commit.policy):
        raise Corrupt(f"{commit.generation}: the marker of rank {rank} does not agree with the manifest.")
    return marker


def _files(marker: RankMarker) -> Iterator[SegmentEntry | OverflowEntry]:
    for segment in marker.segments:
        yield segment
        if segment.side_file is not None:
            yield segment.side_file


def _verify_file(backend: Backend, stored: StoredGeneration, entry: SegmentEntry | OverflowEntry) -> None:
    if (nbytes := stored.sizes.get(entry.key)) != entry.nbytes:
        raise Corrupt(f"{entry.key}: {'is gone' if nbytes is None else f'has {nbytes} bytes'}, {entry.nbytes} written.")
    if isinstance(entry, SegmentEntry):
        scrub_segment(backend, entry)
    else:
        scrub_overflow(backend, entry)
