"""Documents of the memory tiers: a ring's header page, and one marker file beside the ring per generation.

```text
<name>.ring                              one page of header, then slots: pages for segments, then small ones of a piece
<name>.ring.<step>.i<incarnation>-<nonce>.done  a line with the segments' slots, then the rank's marker
```

Both contain the ring's nonce, so a marker is never matched with a later ring of the same name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from lightning_moe_ckpt._units import size_text
from lightning_moe_ckpt.errors import Corrupt
from lightning_moe_ckpt.storage._entries import GENERATION, RecordColumns
from lightning_moe_ckpt.storage._json import INTEGER, TEXT, decode, digest_of, encode, keys, many, maybe
from lightning_moe_ckpt.storage._markers import RankMarker
from lightning_moe_ckpt.storage._names import GenerationId

RING_HEADER_NBYTES = 4096
"""Size of the header page; the slots begin after it."""


class SlotClass(NamedTuple):
    """Slots of equal size."""

    nbytes: int
    slots: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RingHeader:
    """Content of a ring's first page."""

    nonce: str
    """Different in every ring."""
    slot_nbytes: int
    num_slots: int
    """Slots for segments, each of which takes a run."""
    small: tuple[SlotClass, ...] = ()
    """Further slots behind the segments' slots: for one difference, or for one expert each."""
    origin: str
    """Digest of the run's URL, which identifies rings of replaced runs."""

    @property
    def classes(self) -> tuple[SlotClass, ...]:
        return (SlotClass(self.slot_nbytes, self.num_slots), *self.small)

    @property
    def nbytes(self) -> int:
        return RING_HEADER_NBYTES + sum(slot_class.nbytes * slot_class.slots for slot_class in self.classes)

    def extent(self, slot: int, nbytes: int = 0) -> tuple[int, int]:
        """Return the first byte behind the header, and the bytes, of the slots for `nbytes` from `slot` on. Raises `LookupError` if there
        are no such slots.
        """
        start, index = 0, slot
        for size, slots in self.classes:
            run = max(1, -(-nbytes // size))
            if 0 <= index <= slots - run:
                return start + index * size, run * size
            start, index = start + size * slots, index - slots
        raise LookupError(f"slot {slot} of {sum(slot_class.slots for slot_class in self.classes)}")

    def to_bytes(self) -> bytes:
        return encode("ring", _RING.body(self)).ljust(RING_HEADER_NBYTES, b"\0")

    @classmethod
    def from_bytes(cls, page: bytes, where: str) -> RingHeader:
        """Read the page back. Raises `Corrupt`."""
        return decode(page[: page.find(b"\n") + 1], _RING, kind="ring", where=where)


_SMALL = many(keys(SlotClass, nbytes=INTEGER, slots=INTEGER))
_RING = keys(RingHeader, nonce=TEXT, slot_nbytes=INTEGER, num_slots=INTEGER, small=_SMALL, origin=TEXT)


class ExpertSlot(NamedTuple):
    """Place in a ring of one operator's records, from a generation that is not kept whole."""

    operator: str
    step: int
    start: int
    """First byte in the step's files, one behind the other."""
    nbytes: int
    slot: int

    @classmethod
    def all_of(cls, marker: RankMarker, operators: Collection[str]) -> list[ExpertSlot]:
        """Return the places of these operators in a generation's files, as far as they are there; in no slot."""
        found: dict[str, ExpertSlot] = {}
        for entry in marker.segments:
            base, columns = marker.slot_offset(entry), RecordColumns.of(entry.records).by_offset()
            for operator, offset, nbytes in zip(columns.operator, columns.offset, columns.nbytes, strict=True):
                if operator in operators:
                    start = base + offset
                    first = found.setdefault(operator, cls(operator, entry.step, start, 0, -1))
                    found[operator] = first._replace(nbytes=max(first.nbytes, start + nbytes - first.start))
        return list(found.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryMarker:
    """Statement that a ring's slots hold all segments of a generation, or some of its experts."""

    ring: str
    """The ring's nonce."""
    slots: Mapping[int, int]
    """Slot of each segment, by the segment's step; empty if there are only `experts`."""
    experts: tuple[ExpertSlot, ...] = ()
    """Experts left of the generation, whose dense part newer generations replace."""
    marker: RankMarker
    """Marker with the records that are there."""
    seen: GenerationId | None = None
    """Newest commit known to the writing process. Storage without that commit has another past."""

    def to_bytes(self) -> bytes:
        """Encode the file: one document, then the rank's marker with the same bytes as in storage."""
        return b"".join(self.parts())

    def parts(self) -> list[bytes | memoryview]:
        """Return the bytes of `to_bytes` in parts, see `RankMarker.parts`."""
        data = self.marker.parts()
        slots = [{"step": step, "slot": self.slots[step]} for step in sorted(self.slots)]
        seen = maybe(GENERATION).body(self.seen)
        experts = _EXPERTS.body(self.experts)
        body = {"ring": self.ring, "slots": slots, "experts": experts, "marker": digest_of(*data), "seen": seen}
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
        experts: tuple[ExpertSlot, ...] = body["experts"]
        taken = [*slots.values(), *(expert.slot for expert in experts)]
        steps = () if experts else marker.steps
        if tuple(slots) != steps or len(set(taken)) != len(taken) or {e.step for e in experts} - {*marker.steps}:
            raise Corrupt(f"{where}: its slots are not those of its segments. Another copy may be good.")
        return cls(ring=body["ring"], slots=slots, experts=experts, marker=marker, seen=body["seen"])

    def only(self, experts: Collection[ExpertSlot]) -> MemoryMarker:
        """Return the statement that only these experts are left of the generation."""
        names = {expert.operator for expert in experts}
        segments = [
            replace(entry, records=tuple(RecordColumns.of(entry.records).of_operators(names).entries()))
            for entry in self.marker.segments
        ]
        marker = replace(self.marker, segments=tuple(segments), module=None)
        return replace(self, slots={}, experts=tuple(experts), marker=marker)

    def places(self, header: RingHeader) -> dict[str, list[tuple[int, int, int]]]:
        """Return extents by file key: first byte of the file, end, and position behind the ring's header. Raises `LookupError` if the ring
        has no such slot.
        """
        found: dict[str, list[tuple[int, int, int]]] = {}
        for entry in self.marker.segments:
            base = self.marker.slot_offset(entry)
            end = base + entry.nbytes
            held = [(expert.start, expert.nbytes, expert.slot) for expert in self.experts if expert.step == entry.step]
            if not self.experts:
                held = [(0, end, self.slots[entry.step])]
            found[entry.key] = [
                (first - base, min(first + nbytes, end) - base, header.extent(slot, nbytes)[0] + first - start)
                for start, nbytes, slot in held
                if (first := max(start, base)) < min(start + nbytes, end)
            ]
        return found


_EXPERTS = many(keys(ExpertSlot, operator=TEXT, step=INTEGER, start=INTEGER, nbytes=INTEGER, slot=INTEGER))
_SLOT = keys(lambda step, slot: (step, slot), step=INTEGER, slot=INTEGER)
_MEMORY_MARKER = keys(
    dict[str, Any], ring=TEXT, slots=many(_SLOT), experts=_EXPERTS, marker=TEXT, seen=maybe(GENERATION)
)

_MEMORY = Path("/proc/meminfo")


def lacking_memory(nbytes: int) -> str | None:
    """Return the reason why `nbytes` of memory are not available; `None` if they are, or if the machine does not say.

    Call it before allocating by a document's numbers, because the document may be forged. The kernel grants more memory
    than there is and kills the process that uses it.
    """
    with suppress(OSError, ValueError, IndexError):
        lines = dict(line.split(":", 1) for line in _MEMORY.read_text(encoding="ascii").splitlines())
        available = int(lines.get("MemAvailable", "").split()[0]) * 1024
        if nbytes > available:
            return f"takes {size_text(nbytes)} of memory, {size_text(available)} are available"
    return None
