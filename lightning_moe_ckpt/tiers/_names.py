"""Make and parse the names of a run's memory files.

```text
moe-ckpt-<uid>-<tag>-<rank>.ring             generations that the rank captured itself
moe-ckpt-<uid>-<tag>-<rank>.<turn>.ring      the same, while an earlier ring of the rank is still needed
moe-ckpt-<uid>-<tag>-<rank>.replica          generations kept for a rank of another node
<any of these>.<step>.i<incarnation>-<nonce>.done   marker of a complete generation in it
<any of these>.<step>.i<incarnation>-<nonce>.tmp    the marker while it is written; readers ignore it
```

The tag names a run at a place, see `memory_tag` of the storage package. Files of other users are ignored, whatever
they are called.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lightning_moe_ckpt.storage import GenerationId
from lightning_moe_ckpt.tiers._shm import is_own_file

MemoryKind = Literal["ring", "replica"]

_TAG = re.compile(r"[A-Za-z0-9_.-]{1,100}")
_NAME = re.compile(r"moe-ckpt-(\d+)-([A-Za-z0-9_.-]{1,100})-(\d+)(?:\.(\d+))?\.(ring|replica)")
_MARKER = re.compile(r"(.+\.(?:ring|replica))\.(\d+)\.i(\d+)(?:-[0-9a-f]{12})?\.(done|tmp)")


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryName:
    """Parsed name of a memory file."""

    tag: str
    """Tag of the run at its place."""
    owner: int
    """Rank whose segments are in it."""
    kind: MemoryKind
    turn: int = 0
    """Tells rings of one rank apart."""

    @classmethod
    def parse(cls, name: str) -> MemoryName | None:
        """Return the parsed name of a file of this user; `None` for any other."""
        match = _NAME.fullmatch(name)
        if match is None or int(match[1]) != os.getuid():
            return None
        kind: MemoryKind = "ring" if match[5] == "ring" else "replica"
        return cls(tag=match[2], owner=int(match[3]), turn=int(match[4] or 0), kind=kind)

    def __str__(self) -> str:
        turn = f".{self.turn}" if self.turn else ""
        return f"moe-ckpt-{os.getuid()}-{self.tag}-{self.owner}{turn}.{self.kind}"


def shared_name(tag: str, rank: int, kind: MemoryKind = "ring", *, turn: int = 0) -> str:
    """Return the file name for memory that holds one rank's segments of one run of this user.

    Args:
        tag: tag of the run at its place.
        rank: rank whose segments are in the file.
        kind: `ring` if the rank itself keeps them, `replica` if another rank does.
        turn: number that tells files of one rank apart.

    Raises:
        ValueError: `tag` has characters that a file name should not have.
    """
    if not _TAG.fullmatch(tag):
        raise ValueError(f"`shared_name(tag={tag!r})` must be 1 to 100 of the characters A-Z a-z 0-9 _ . -")
    return str(MemoryName(tag=tag, owner=rank, kind=kind, turn=turn))


def marker_path(memory: Path, generation: GenerationId) -> Path:
    """Return the path of the marker of a generation in a memory file."""
    nonce = f"-{generation.nonce}" if generation.nonce else ""
    return memory.with_name(f"{memory.name}.{generation.step}.i{generation.incarnation}{nonce}.done")


def unfinished_path(marker: Path) -> Path:
    """Return the path at which a marker is written before it gets its name."""
    return marker.with_suffix(".tmp")


def marker_paths(memory: Path) -> list[Path]:
    """Return the finished markers beside a memory file, in no order."""
    return [path for path in marker_files(memory) if path.suffix == ".done"]


def marker_files(memory: Path) -> list[Path]:
    """Return all markers beside a memory file, finished or not; they are removed with it."""
    return [path for path, of in _marker_files(memory.parent) if of == memory.name]


def memory_files(directory: Path) -> list[tuple[Path, MemoryName]]:
    """Return every memory file of this user, with its parsed name."""
    named = [(path, MemoryName.parse(path.name)) for path in listing(directory)]
    return [(path, name) for path, name in named if name is not None and is_own_file(path)]


def orphaned_markers(directory: Path) -> list[tuple[Path, MemoryName]]:
    """Return this user's markers, finished or not, whose memory file is gone."""
    there = {path.name for path, _ in memory_files(directory)}
    named = [(path, MemoryName.parse(of)) for path, of in _marker_files(directory) if of not in there]
    return [(path, name) for path, name in named if name is not None]


def _marker_files(directory: Path) -> Iterator[tuple[Path, str]]:
    for path in listing(directory):
        match = _MARKER.fullmatch(path.name)
        if match is not None and is_own_file(path):
            yield path, match[1]


def listing(directory: Path) -> list[Path]:
    """Return the entries of a directory; none if it was removed."""
    try:
        return list(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
