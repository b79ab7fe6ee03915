"""Names of stored objects, and their way back to what they name.

```text
_log/<n:020d>.json                                                      epochs and watermark, dense
snap/<step:012d>/e<epoch:06d>-<life>/rank<r:05d>.<step:012d>.safetensors     one segment
snap/<step:012d>/e<epoch:06d>-<life>/rank<r:05d>.done                    that rank's marker over all its segments
snap/<step:012d>/e<epoch:06d>-<life>/_COMMITTED                         the generation exists
```

Invariant: a name is used by one life only, so no reader ever sees it change. Epochs count the lives that a log knows;
where a log was put back to an older state, or copied, two lives get the same number. `life` is drawn anew for each.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass

LOG_PREFIX = "_log/"
SNAP_PREFIX = "snap/"
PROBE_PREFIX = "_probe/"
COMMITTED = "_COMMITTED"
DURABLE, NODE = "durable", "node"
"""Audiences of files: every tier, or memory only."""

# No longer than 64 bits hold: with more digits a name is nobody's.
_LOG = re.compile(r"_log/(00\d{18})\.json")
_SNAP = re.compile(r"snap/(\d{12,18})/e(\d{6,18})(?:-([0-9a-f]{12}))?/([^/]+)")
_MARKER = re.compile(r"rank(\d{5,18})\.done")
_DATA = re.compile(r"rank\d{5,18}\.(\d{12,18})\.safetensors")
_OURS = re.compile(r"_log(/00\d{18}\.json)?|snap(/\d{12,18}(/e\d{6,18}(-[0-9a-f]{12})?(/[^/]+)?)?)?")

MAX_DOCUMENT_NBYTES = 16 * 2**20
"""Of a document: what parses slowly, and into many times its size, is not parsed unless it can be one of ours."""
MAX_MARKER_NBYTES = 256 * 2**20
"""Of a marker, with the lines behind its document, and of whatever else is read whole. A marker above the size of a document
is read only if that says so: see `expect_readable`."""


@dataclass(frozen=True, order=True, slots=True)
class GenerationId:
    """What recovery can start from; ordered by step, then by epoch."""

    step: int
    """Boundary at which the generation becomes dense."""
    epoch: int
    """Life of the job that wrote it."""
    life: str = ""
    """What tells that life from any other with the same number: see `new_life`. Empty for what older releases wrote."""

    def __str__(self) -> str:
        return f"step {self.step} (epoch {self.epoch})"

    @property
    def prefix(self) -> str:
        """Prefix of every key of this generation, with the slash."""
        return f"{SNAP_PREFIX}{self.step:012d}/{self.directory}/"

    @property
    def directory(self) -> str:
        """Of its life, as it is part of keys."""
        return f"e{self.epoch:06d}-{self.life}" if self.life else f"e{self.epoch:06d}"


def new_life() -> str:
    """48 random bits, by which a life of the job is known, in hexadecimal."""
    return uuid.uuid4().hex[:12]


def most_nbytes(key: str) -> int:
    """How large an object that is read whole may be: log entries, manifests, and markers, which name every record.

    Far above what is ever written, and little enough that a made-up file does not take the memory of whoever reads it.
    """
    return MAX_DOCUMENT_NBYTES if key.endswith((".json", COMMITTED)) else MAX_MARKER_NBYTES


def is_marker(key: str) -> bool:
    """Whether an object is a rank's marker, by its key."""
    return key.endswith(".done")


def is_ours(key: str, *, folder: bool) -> bool:
    """Whether a path has the form of an object of a run, or of a folder that has some; other names are left alone."""
    names_object = parse_log_key(key) is not None or parse_snap_key(key) is not None
    return _OURS.fullmatch(key) is not None and names_object != folder


def log_key(index: int) -> str:
    """Key of entry `index` of the log."""
    return f"{LOG_PREFIX}{index:020d}.json"


def log_block(index: int) -> str:
    """Prefix shared by the thousand log keys around `index`."""
    return f"{LOG_PREFIX}{index:020d}"[:-3]


def segment_key(generation: GenerationId, rank: int, step: int, audience: str = DURABLE) -> str:
    """Key of what `rank` captured at `step`; files that are not for storage have one too, by which markers name them."""
    told = "" if audience == DURABLE else f".{audience}"
    return f"{generation.prefix}rank{rank:05d}.{step:012d}{told}.safetensors"


def marker_key(generation: GenerationId, rank: int) -> str:
    """Key of the marker of `rank`."""
    return f"{generation.prefix}rank{rank:05d}.done"


def commit_key(generation: GenerationId) -> str:
    """Key of the manifest that makes `generation` visible."""
    return f"{generation.prefix}{COMMITTED}"


def parse_log_key(key: str) -> int | None:
    """Index of a log entry, `None` for any other key."""
    match = _LOG.fullmatch(key)
    return int(match[1]) if match else None


def parse_snap_key(key: str) -> tuple[GenerationId, str] | None:
    """Generation and last part of a key, `None` for a key that is not of this layout."""
    match = _SNAP.fullmatch(key)
    if match is None:
        return None
    return GenerationId(step=int(match[1]), epoch=int(match[2]), life=match[3] or ""), match[4]


def parse_data_name(name: str) -> int | None:
    """Step of a segment from the last part of its key, `None` for any other object."""
    match = _DATA.fullmatch(name)
    return int(match[1]) if match else None


def parse_marker_name(name: str) -> int | None:
    """Rank of a marker from the last part of its key, `None` for any other object."""
    match = _MARKER.fullmatch(name)
    return int(match[1]) if match else None
