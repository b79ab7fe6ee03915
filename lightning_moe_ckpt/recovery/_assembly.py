"""Putting one segment together from copies of which any may be bad: what to read next, and what was wrong with it.

The whole segment comes from the cheapest copy, or striped from several peers. If the digest of the file is not the one in the
marker, each record is checked, and the bad ones are read again from a copy that has not supplied them yet. If all are good, the bytes
between them are bad, and the file is read whole from the next copy. A copy that cannot be read supplies nothing more.

Every round rules out a copy for each part that is still bad, so there are few rounds: either the segment is good
byte for byte, or some record is bad in every copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from lightning_moe_ckpt.recovery._inventory import Copy
from lightning_moe_ckpt.storage import SegmentEntry, SegmentLayout, check_places, digest_of

MAX_STREAMS = 4
"""Peers that send parts of one segment at once; more do not fill a link better."""

_PAGE_NBYTES = 4096


class Exhausted(Exception):
    """Some bytes are bad, or gone, in every copy; never leaves the package."""


@dataclass(frozen=True, slots=True)
class Request:
    """Bytes of a segment to be read from a copy by a rank."""

    copy: Copy
    reader: int
    entry: SegmentEntry
    """The segment, as far as where it is goes."""
    offset: int
    nbytes: int
    place: int
    """Where in the receiver's buffer they go."""

    @property
    def end(self) -> int:
        """First byte that is not asked for."""
        return self.offset + self.nbytes


@dataclass(slots=True, eq=False)
class _Part:
    """Bytes that are verified together: a record, or the file, which stands for what lies between records."""

    name: str
    offset: int
    nbytes: int
    digest: str
    supplier: Copy | None = None
    """The one copy that all its bytes came from; `None` if they came from several."""
    bad_in: set[Copy] = field(default_factory=set)

    def supplied(self, requests: Sequence[Request]) -> None:
        """Note where its bytes come from now, if all of them are read anew."""
        end = self.offset + self.nbytes
        pieces = [(each.copy, min(end, each.end) - max(self.offset, each.offset)) for each in requests]
        nbytes = Counter[Copy]()
        for copy, overlap in pieces:
            if overlap > 0:
                nbytes[copy] += overlap
        if nbytes and sum(nbytes.values()) == self.nbytes:
            self.supplier = next(iter(nbytes)) if len(nbytes) == 1 else None


class Assembly:
    """One segment on its way into memory.

    Args:
        entry: what the marker says of it.
        copies: where it may come from, cheapest first.
    """

    def __init__(self, entry: SegmentEntry, copies: Sequence[Copy]) -> None:
        self.entry = entry
        self.buffer = torch.empty(entry.nbytes, dtype=torch.uint8)
        """The bytes of the file, once `done`."""
        self.layout: SegmentLayout | None = None
        self.done = False
        self.supplied = Counter[Copy]()
        """Bytes read, by copy."""
        self.complaints: list[str] = []
        """What was wrong with copies, since somebody last emptied this."""
        self._copies = list(copies)
        self._gone: dict[Copy, str] = {}
        self._file = _Part("the file", 0, entry.nbytes, entry.digest)
        self._records: list[_Part] = []
        """Looked at only when the file is bad."""
        self._asked: list[list[Request]] = []
        """All requests so far."""
        self._bad: list[_Part] | None = None

    @property
    def view(self) -> memoryview:
        """The buffer's bytes, to be filled."""
        return memoryview(self.buffer.numpy())  # type: ignore[arg-type]  # numpy's stubs do not say that arrays are buffers

    def requests(self) -> list[Request]:
        """What to read in the next round; nothing if it is done.

        Raises:
            Exhausted: some of it is bad everywhere.
        """
        if self.done:
            return []
        requests = self._striped() if self._bad is None else self._mending(self._bad)
        self._asked.append(requests)
        for part in (self._file, *self._records):
            part.supplied(requests)
        for request in requests:
            self.supplied[request.copy] += request.nbytes
        return requests

    def gone(self, copy: Copy, reason: str) -> None:
        """A copy could not be read: the bytes asked of it are rubbish."""
        if copy not in self._gone:
            self._gone[copy] = reason
            self.complaints.append(f"{described(copy)}: {reason}")

    def check(self) -> None:
        """Verify what was read since the last call. Raises `Corrupt` if the marker contradicts the file it describes."""
        if digest_of(self.view) == self.entry.digest:
            self.layout = check_places(self.entry, self.view)
            self.done = True
            return
        self._records = self._records or self._noted()
        bad = [part for part in self._records if digest_of(self._bytes(part)) != part.digest]
        self._bad = bad or [self._file]
        for part in self._bad:
            if part.supplier is not None:
                part.bad_in.add(part.supplier)
                self._complain(part, part.supplier)

    def _noted(self) -> list[_Part]:
        """The records, as if they had been there from the start."""
        parts = [_Part(each.name, each.offset, each.nbytes, each.digest) for each in self.entry.records]
        for part in parts:
            for requests in self._asked:
                part.supplied(requests)
        return parts

    def _complain(self, part: _Part, copy: Copy) -> None:
        if copy not in self._gone:
            what = part.name if part is not self._file else "what lies between its records"
            self.complaints.append(f"{described(copy)}: {self.entry.key}: {what} is not what was written")

    def _bytes(self, part: _Part) -> memoryview:
        return self.view[part.offset : part.offset + part.nbytes]

    def _striped(self) -> list[Request]:
        """The whole file from the cheapest kind of copy there is; from peers, from several at once."""
        first = self._next(self._file)
        if first.source != "peer":
            return [self._request(first, first.readers[0], 0, self.entry.nbytes)]
        streams = _streams([copy for copy in self._copies if copy.source == "peer"])
        return [self._request(*stripe) for stripe in _stripes(streams, self.entry.nbytes)]

    def _request(self, copy: Copy, reader: int, offset: int, nbytes: int) -> Request:
        return Request(copy, reader, self.entry, offset, nbytes, offset)

    def _mending(self, bad: Sequence[_Part]) -> list[Request]:
        sources = {id(part): self._next(part) for part in bad}
        if len(set(sources.values())) == 1 and len(bad) >= len(self._records):
            bad = [self._file]
            sources = {id(self._file): next(iter(sources.values()))}
        return [
            self._request(copy, copy.readers[0], part.offset, part.nbytes)
            for part in bad
            for copy in [sources[id(part)]]
        ]

    def _next(self, part: _Part) -> Copy:
        for copy in self._copies:
            if copy not in self._gone and copy not in part.bad_in:
                return copy
        places = [f"{described(copy)} ({self._gone.get(copy, 'its digest differs')})" for copy in self._copies]
        raise Exhausted(
            f"{self.entry.key}: {part.name if part is not self._file else 'its header'} is nowhere as it was written: "
            f"{', '.join(places)}"
        )


def described(copy: Copy) -> str:
    """A copy in words."""
    if copy.source != "peer":
        return copy.source
    return f"peer (rank{'s' if len(copy.readers) > 1 else ''} {', '.join(map(str, sorted(copy.readers)))})"


def _streams(copies: Sequence[Copy]) -> list[tuple[Copy, int]]:
    """Readers to ask at once: one of each copy, then a second of each, and so on."""
    turns = max(len(copy.readers) for copy in copies)
    streams = [(copy, copy.readers[turn]) for turn in range(turns) for copy in copies if turn < len(copy.readers)]
    return streams[:MAX_STREAMS]


def _stripes(streams: Sequence[tuple[Copy, int]], nbytes: int) -> list[tuple[Copy, int, int, int]]:
    """Copy, reader, offset and size of each stripe."""
    size = -(-nbytes // len(streams))
    size += -size % _PAGE_NBYTES
    starts = range(0, nbytes, size)
    return [
        (copy, reader, start, min(size, nbytes - start)) for (copy, reader), start in zip(streams, starts, strict=False)
    ]
