"""Names of stored objects, and parsers of these names.

```text
_log/<n:020d>.json                                                      incarnations and watermark, dense
snap/<step:012d>/i<incarnation:06d>-<nonce>/rank<r:05d>.<step:012d>.safetensors     one segment
snap/<step:012d>/i<incarnation:06d>-<nonce>/rank<r:05d>.done                    that rank's marker over all its segments
snap/<step:012d>/i<incarnation:06d>-<nonce>/done.rank<r:05d>.<digest>.<agreement>.<sizes>   receipt of that marker, empty
snap/<step:012d>/i<incarnation:06d>-<nonce>/_COMMITTED                         the generation exists
const/i<incarnation:06d>-<nonce>/<digest>.safetensors                           parameters that training does not change
const/i<incarnation:06d>-<nonce>/<digest>.done                                  which they are, and in which of these files
```

Invariant: only one incarnation uses a name, so no reader sees an object change. `incarnation` counts the starts in the
log. If a log was copied or put back to an older state, two incarnations get the same number; `nonce` is random.

The manifest sorts before all other names of its generation, then receipts, then files: pages of a listing begin with these.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from typing import NamedTuple

LOG_PREFIX = "_log/"
SNAP_PREFIX = "snap/"
CONST_PREFIX = "const/"
PROBE_PREFIX = "_probe/"
COMMITTED = "_COMMITTED"
RECEIPTS = "done.rank"
DURABLE, NODE = "durable", "node"
"""Audiences of files: `durable` files go to every tier, `node` files to memory only."""

# At most as many digits as 64 bits hold.
_LOG = re.compile(r"_log/(00\d{18})\.json")
_SNAP = re.compile(r"snap/(\d{12,18})/i(\d{6,18})-([0-9a-f]{12})/([^/]+)")
_MARKER = re.compile(r"rank(\d{5,18})\.done")
_DATA = re.compile(r"rank\d{5,18}\.(\d{12,18})\.safetensors")
_RECEIPT = re.compile(r"done\.rank(\d{5,18})\.([0-9a-f]{32})\.([0-9a-f]{32})\.([0-9a-f]{32})")
_CONST = re.compile(r"const/i(\d{6,18})-([0-9a-f]{12})/([0-9a-f]{32})\.(done|safetensors)")
_OURS = re.compile(
    r"_log(/00\d{18}\.json)?|snap(/\d{12,18}(/i\d{6,18}-[0-9a-f]{12}(/[^/]+)?)?)?|const(/i\d{6,18}-[0-9a-f]{12}(/[^/]+)?)?"
)

MAX_DOCUMENT_NBYTES = 16 * 2**20
"""Bytes of the largest document. Parsing larger ones is slow and takes many times their size in memory."""
MAX_MARKER_NBYTES = 256 * 2**20
"""Bytes of the largest marker, including the lines after its document. A marker above `MAX_DOCUMENT_NBYTES` is read
only if its document states that size: see `expect_readable`."""


@dataclass(frozen=True, order=True, slots=True)
class GenerationId:
    """Name of a generation, from which a restart can resume; ordered by step, then by incarnation."""

    step: int
    """Step boundary whose state the generation has."""
    incarnation: int
    """Number of the incarnation that wrote the generation."""
    nonce: str = ""
    """Random name of that incarnation, see `new_nonce`; nothing is stored without one."""

    def __str__(self) -> str:
        return f"step {self.step} (incarnation {self.incarnation})"

    @property
    def prefix(self) -> str:
        """Prefix of this generation's keys, with the slash."""
        return f"{SNAP_PREFIX}{self.step:012d}/{self.directory}/"

    @property
    def directory(self) -> str:
        """Part of every key that names the incarnation."""
        return f"i{self.incarnation:06d}-{self.nonce}"


def new_nonce() -> str:
    """Draw an incarnation's name: 48 random bits in hexadecimal."""
    return uuid.uuid4().hex[:12]


def is_ours(key: str, *, folder: bool) -> bool:
    """Return whether a path looks like a run's object or, with `folder`, like a folder with such objects."""
    names_object = any(parse(key) is not None for parse in (parse_log_key, parse_snap_key, parse_const_key))
    return _OURS.fullmatch(key) is not None and names_object != folder


def log_key(index: int) -> str:
    return f"{LOG_PREFIX}{index:020d}.json"


def segment_key(generation: GenerationId, rank: int, step: int, audience: str = DURABLE) -> str:
    """Return the key of the file that `rank` captured at `step`. Node files have a key too: markers name them by it."""
    told = "" if audience == DURABLE else f".{audience}"
    return f"{generation.prefix}rank{rank:05d}.{step:012d}{told}.safetensors"


def marker_key(generation: GenerationId, rank: int) -> str:
    return f"{generation.prefix}rank{rank:05d}.done"


class Receipt(NamedTuple):
    """Facts about a stored marker in the name of an empty object: a page of a listing has a thousand receipts."""

    rank: int
    digest: str
    """Digest of the marker's bytes."""
    agreement: str
    """Digest of the facts common to all markers of a manifest; see `receipt_of`."""
    sizes: str
    """Digest of the sizes of the marker and its own segments."""


def receipt_key(generation: GenerationId, receipt: Receipt) -> str:
    return f"{generation.prefix}{RECEIPTS}{receipt.rank:05d}.{receipt.digest}.{receipt.agreement}.{receipt.sizes}"


def commit_key(generation: GenerationId) -> str:
    """Key of the manifest that makes `generation` visible."""
    return f"{generation.prefix}{COMMITTED}"


def const_key(generation: GenerationId, digest: str, ending: str) -> str:
    """Return the key of a constants file, or a description; only `generation`'s incarnation counts."""
    return f"{CONST_PREFIX}{generation.directory}/{digest}.{ending}"


def parse_const_key(key: str) -> tuple[int, str] | None:
    """Return incarnation and digest from the key of a constants file, or their description; else `None`."""
    match = _CONST.fullmatch(key)
    return (int(match[1]), match[3]) if match else None


def parse_log_key(key: str) -> int | None:
    """Return the index of a log entry; `None` for any other key."""
    match = _LOG.fullmatch(key)
    return int(match[1]) if match else None


def parse_snap_key(key: str) -> tuple[GenerationId, str] | None:
    """Return generation and last part of a key; `None` for a foreign key."""
    if (match := _SNAP.fullmatch(key)) is None:
        return None
    return GenerationId(step=int(match[1]), incarnation=int(match[2]), nonce=match[3]), match[4]


def parse_data_name(name: str) -> int | None:
    """Return a segment's step from its key's last part; `None` for any other object."""
    match = _DATA.fullmatch(name)
    return int(match[1]) if match else None


def parse_receipt_name(name: str) -> Receipt | None:
    """Return the receipt spelled by a key's last part; `None` for any other object."""
    match = _RECEIPT.fullmatch(name)
    return Receipt(int(match[1]), match[2], match[3], match[4]) if match else None


def parse_marker_name(name: str) -> int | None:
    """Return a marker's rank from its key's last part; `None` for any other object."""
    match = _MARKER.fullmatch(name)
    return int(match[1]) if match else None
