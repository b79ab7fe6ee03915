"""Documents of the memory tiers: a ring's header page, and one marker file beside the ring per whole generation.

```text
<name>.ring                              one page of header, then equal slots
<name>.ring.<step>.i<incarnation>-<nonce>.done  a line that says in which slots the segments lie, then the rank's marker
```

Both contain the ring's nonce, so a marker is never matched with a later ring of the same name.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_moe_ckpt.errors import Corrupt
from lightning_moe_ckpt.storage._entries import GENERATION
from lightning_moe_ckpt.storage._json import INTEGER, TEXT, decode, digest_of, encode, keys, many, maybe
from lightning_moe_ckpt.storage._names import GenerationId
from lightning_moe_ckpt.storage._records import RankMarker

RING_HEADER_NBYTES = 4096
"""Size of the header page; the slots begin after it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RingHeader:
    """Content of a ring's first page."""

    nonce: str
    """Different in every ring."""
    slot_nbytes: int
    num_slots: int
    origin: str
    """Digest of the run's URL, by which rings of replaced runs are recognized."""

    @property
    def nbytes(self) -> int:
        return RING_HEADER_NBYTES + self.slot_nbytes * self.num_slots

    def to_bytes(self) -> bytes:
        return encode("ring", _RING.body(self)).ljust(RING_HEADER_NBYTES, b"\0")

    @classmethod
    def from_bytes(cls, page: bytes, where: str) -> RingHeader:
        """Read the page back. Raises `Corrupt`."""
        return decode(page[: page.find(b"\n") + 1], _RING, kind="ring", where=where)


_RING = keys(RingHeader, nonce=TEXT, slot_nbytes=INTEGER, num_slots=INTEGER, origin=TEXT)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryMarker:
    """Statement that the slots of a ring hold all segments of a generation."""

    ring: str
    """The ring's nonce."""
    slots: Mapping[int, int]
    """Slot of each segment, by the segment's step."""
    marker: RankMarker
    seen: GenerationId | None = None
    """Newest commit that the writing process knew of. Storage without that commit has another past."""

    def to_bytes(self) -> bytes:
        """Encode the file: one document, then the rank's marker with the same bytes as in storage."""
        return b"".join(self.parts())

    def parts(self) -> list[bytes | memoryview]:
        """Return the bytes of `to_bytes` one behind the other, see `RankMarker.parts`."""
        data = self.marker.parts()
        slots = [{"step": step, "slot": self.slots[step]} for step in sorted(self.slots)]
        seen = maybe(GENERATION).body(self.seen)
        body = {"ring": self.ring, "slots": slots, "marker": digest_of(*data), "seen": seen}
        return [encode("memory", body), *data]

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> MemoryMarker:
        """Read the file back. Raises `Corrupt`."""
        end = data.find(b"\n") + 1
        body = decode(data[:end], _MEMORY_MARKER, kind="memory", where=where)
        slots = dict(body["slots"])
        if digest_of(memoryview(data)[end:]) != body["marker"]:
            raise Corrupt(f"{where}: the marker in it is not the one that was written. Another copy may be good.")
        marker = RankMarker.from_bytes(data, where, start=end)
        if tuple(slots) != marker.steps or len(set(slots.values())) != len(slots):
            raise Corrupt(f"{where}: its slots are not those of its segments. Another copy may be good.")
        return cls(ring=body["ring"], slots=slots, marker=marker, seen=body["seen"])


_SLOT = keys(lambda step, slot: (step, slot), step=INTEGER, slot=INTEGER)
_MEMORY_MARKER = keys(dict[str, Any], ring=TEXT, slots=many(_SLOT), marker=TEXT, seen=maybe(GENERATION))

_MEMORY = Path("/proc/meminfo")


def lacking_memory(nbytes: int) -> str | None:
    """Return why `nbytes` of memory are not available; `None` if they are, or if the machine does not say.

    Call it before allocating what a document asks for, because the document may be forged. The kernel grants more
    memory than there is and kills the process that uses it.
    """
    with suppress(OSError, ValueError, IndexError):
        lines = dict(line.split(":", 1) for line in _MEMORY.read_text(encoding="ascii").splitlines())
        available = int(lines.get("MemAvailable", "").split()[0]) * 1024
        if nbytes > available:
            return f"takes {nbytes} bytes of memory, {available} are available"
    return None
