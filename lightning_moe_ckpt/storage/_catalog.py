"""Each generation's stored objects, from one listing of `snap/`, and readers of manifests and markers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from lightning_moe_ckpt.errors import Corrupt, KeyMissing, NoUsableGeneration
from lightning_moe_ckpt.storage._backend import Backend
from lightning_moe_ckpt.storage._json import digest_of
from lightning_moe_ckpt.storage._names import (
    COMMITTED,
    LOG_PREFIX,
    SNAP_PREFIX,
    GenerationId,
    commit_key,
    marker_key,
    parse_data_name,
    parse_marker_name,
    parse_snap_key,
)
from lightning_moe_ckpt.storage._records import Commit, RankMarker, StoredMarker


@dataclass(slots=True)
class Contents:
    """Stored objects of a generation."""

    generation: GenerationId
    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes by key."""
    ranks: set[int] = field(default_factory=set)
    """Ranks with a stored marker."""
    committed: bool = False
    """Whether there is a `_COMMITTED` object, readable or not."""


Catalog = Mapping[GenerationId, Contents]


def read_catalog(backend: Backend, prefix: str = SNAP_PREFIX) -> Catalog:
    """List everything below `prefix` by generation; objects with foreign names are ignored."""
    catalog: dict[GenerationId, Contents] = {}
    for entry in backend.list(prefix):
        place = parse_snap_key(entry.key)
        if place is None:
            continue
        contents = catalog.setdefault(place[0], Contents(place[0]))
        contents.sizes[entry.key] = entry.nbytes
        contents.committed |= place[1] == COMMITTED
        if (rank := parse_marker_name(place[1])) is not None:
            contents.ranks.add(rank)
    return catalog


def read_commit(backend: Backend, generation: GenerationId, run_id: str | None = None) -> Commit:
    """Read a manifest and check that it is this generation's, and this run's if `run_id` is given.

    Raises:
        Corrupt: the manifest is damaged, or belongs to another generation or run.
        KeyMissing: the manifest was deleted.
    """
    key = commit_key(generation)
    commit = Commit.from_bytes(backend.get(key), key)
    if commit.generation != generation or run_id not in {None, commit.run_id}:
        raise Corrupt(f"{key}: belongs to {commit.generation} of run {commit.run_id}. It is skipped.")
    return commit


def run_reader(backend: Backend) -> Callable[[GenerationId], str | None]:
    """Return a function from a generation to its run's name, `None` if the manifest is damaged or missing.

    The function reads each manifest once, and raises `StorageError` if the medium fails.
    """
    read = cache(lambda generation: read_commit(backend, generation).run_id)

    def run_of(generation: GenerationId) -> str | None:
        try:
            return read(generation)
        except (Corrupt, KeyMissing):
            return None

    return run_of


def read_marker(backend: Backend, generation: GenerationId, rank: int) -> StoredMarker:
    """Read a marker and check its generation and rank.

    Raises:
        Corrupt: the marker is damaged, or belongs to another generation or rank.
        KeyMissing: the marker was deleted.
    """
    key = marker_key(generation, rank)
    data = backend.get(key)
    marker = RankMarker.from_bytes(data, key)
    if (marker.generation, marker.rank) != (generation, rank):
        raise Corrupt(f"{key}: is the marker of rank {marker.rank} for {marker.generation}. It is skipped.")
    return StoredMarker(marker, digest_of(data))


def read_committed_marker(backend: Backend, commit: Commit, rank: int) -> RankMarker:
    """Read a rank's marker and check it against the digest in the manifest.

    Raises:
        Corrupt: the marker is not the one that was committed.
        KeyMissing: the marker was deleted.
    """
    stored = read_marker(backend, commit.generation, rank)
    if stored.digest != commit.markers[rank]:
        raise Corrupt(f"{marker_key(commit.generation, rank)}: is not the marker that was committed.")
    return stored.marker


def missing_objects(marker: RankMarker, contents: Contents) -> list[str]:
    """Return the keys of the marker's files that the listing lacks, or shows with another size."""
    return [segment.key for segment in marker.segments if contents.sizes.get(segment.key) != segment.nbytes]


def missing_parts(commit: Commit, contents: Contents) -> str | None:
    """Return a text on a committed generation's missing parts in the listing; `None` if all are there."""
    absent = sorted(set(range(commit.world_size)) - contents.ranks)
    if absent:
        return f"markers of ranks {absent[:8]} are missing"
    # An abandoned window may have left segments of other steps beside a generation of its last step.
    steps = {key: parse_data_name(key.rpartition("/")[2]) for key in contents.sizes}
    nbytes = sum(size for key, size in contents.sizes.items() if steps[key] in commit.steps)
    if nbytes != commit.nbytes:
        return f"{nbytes} of {commit.nbytes} bytes of segments are there"
    return None


def delete_generation(backend: Backend, contents: Contents) -> None:
    """Delete a generation with its leftovers, manifest first: readers must never see a manifest without files."""
    # The manifest, then markers, then segments.
    for key in sorted(
        contents.sizes, key=lambda key: (not key.endswith(f"/{COMMITTED}"), not key.endswith(".done"), key)
    ):
        backend.delete(key)
    backend.sweep(contents.generation.prefix)


_NAMED = 4


def nothing_at(url: str) -> str:
    """Return a message that there is no run at `url`, with the contents of a local folder."""
    folder = Path(url.removeprefix("file://"))
    if not url.startswith("file://"):
        return f"{url} holds no run. Check the URL."
    if not folder.is_dir():
        return (
            f"{url} holds no run: {'it is a file' if folder.exists() else 'there is no such folder'}. Check the path."
        )
    names = sorted(path.name for path in folder.iterdir())
    if not names:
        return f"{url} holds no run: the folder is empty. A run stores something there as soon as training begins."
    below = sorted(str(path.parent) for path in (*folder.glob(f"*/{LOG_PREFIX}"), *folder.glob(f"*/*/{LOG_PREFIX}")))
    if below:
        return f"{url} holds no run itself, folders below it do: {_named(below)}. Give one of these."
    return f"{url} holds no run, but other files: {_named(names)}. Check the path."


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def expect_folder(backend: Backend) -> None:
    """Raise `NoUsableGeneration` if the path is a file, where a listing could only fail."""
    # Not `Path.is_file`, which raises for a path that is too long; the listing reports that better.
    if backend.url.startswith("file://") and os.path.isfile(backend.url.removeprefix("file://")):  # noqa: PTH113
        raise NoUsableGeneration(nothing_at(backend.url))
