"""Documents of the memory tiers: what a ring says of itself, and what stands beside it for each whole generation.

```text
<name>.ring                              one page of header, then equal slots
<name>.ring.<step>.e<epoch>-<life>.done  a line that says in which slots the segments lie, then the rank's marker
```

The ring's nonce is in both, so a marker is never taken for a ring that was made later under the same name.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lightning_moe_ckpt.errors import Corrupt
from lightning_moe_ckpt.storage._entries import generation_body, read_generation
from lightning_moe_ckpt.storage._json import Fields, decode, digest_of, encode
from lightning_moe_ckpt.storage._names import GenerationId
from lightning_moe_ckpt.storage._records import RankMarker

RING_HEADER_NBYTES = 4096
"""The slots begin behind one page."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RingHeader:
    """First page of a ring."""

    nonce: str
    """Different in every ring."""
    slot_nbytes: int
    num_slots: int
    origin: str
    """Digest of the URL of the run; rings of replaced runs are known by it."""

    @property
    def nbytes(self) -> int:
        """Of the whole file."""
        return RING_HEADER_NBYTES + self.slot_nbytes * self.num_slots

    def to_bytes(self) -> bytes:
        """The page."""
        body = {name: getattr(self, name) for name in ("nonce", "slot_nbytes", "num_slots", "origin")}
        return encode("ring", body).ljust(RING_HEADER_NBYTES, b"\0")

    @classmethod
    def from_bytes(cls, page: bytes, where: str) -> RingHeader:
        """Read the page back. Raises `Corrupt`."""
        body = decode(page[: page.find(b"\n") + 1], kind="ring", where=where)
        header = cls(
            nonce=body.text("nonce"),
            slot_nbytes=body.integer("slot_nbytes"),
            num_slots=body.integer("num_slots"),
            origin=body.text("origin"),
        )
        body.end()
        return header


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryMarker:
    """States that the slots of a ring hold all segments of a generation."""

    ring: str
    """The ring's nonce."""
    slots: Mapping[int, int]
    """Slot of each segment, by the segment's step."""
    marker: RankMarker
    seen: GenerationId | None = None
    """The newest commit of the run that its process knew of. Storage that lacks it has another past."""

    def to_bytes(self) -> bytes:
        """The file: one document, then the marker byte for byte as it is stored."""
        data = self.marker.to_bytes()
        slots = [{"step": step, "slot": self.slots[step]} for step in sorted(self.slots)]
        seen = None if self.seen is None else generation_body(self.seen)
        return encode("memory", {"ring": self.ring, "slots": slots, "marker": digest_of(data), "seen": seen}) + data

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> MemoryMarker:
        """Read the file back. Raises `Corrupt`."""
        end = data.find(b"\n") + 1
        body = decode(data[:end], kind="memory", where=where)
        ring, digest = body.text("ring"), body.text("marker")
        slots = dict(body.rows("slots", _read_slot))
        seen = body.optional("seen", read_generation)
        body.end()
        if digest_of(data[end:]) != digest:
            raise Corrupt(f"{where}: the marker in it is not the one that was written. Another copy may be good.")
        marker = RankMarker.from_bytes(data[end:], where)
        if tuple(slots) != marker.steps or len(set(slots.values())) != len(slots):
            raise Corrupt(f"{where}: its slots are not those of its segments. Another copy may be good.")
        return cls(ring=ring, slots=slots, marker=marker, seen=seen)


def _read_slot(value: object, where: str) -> tuple[int, int]:
    body = Fields(value, where)
    pair = body.integer("step"), body.integer("slot")
    body.end()
    return pair


_MEMORY = Path("/proc/meminfo")


def lacking_memory(nbytes: int) -> str | None:
    """Return why so many bytes cannot be had; `None` if they can, or the machine does not say.

    Asked before memory is taken for what a document says, which may be made up: the kernel grants far more than there
    is, and ends whoever uses it.
    """
    with suppress(OSError, ValueError, IndexError):
        lines = dict(line.split(":", 1) for line in _MEMORY.read_text(encoding="ascii").splitlines())
        available = int(lines.get("MemAvailable", "").split()[0]) * 1024
        if nbytes > available:
            return f"takes {nbytes} bytes of memory, {available} are available"
    return None
