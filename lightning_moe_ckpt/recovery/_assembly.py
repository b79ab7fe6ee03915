"""Put records of a rank together in memory, each from the cheapest copy that turns out to be good.

Whoever wants the records lays the buffer out. Records that are neighbours in a file and in the buffer are read at once, so a
whole segment is one read; from other nodes it comes in stripes, from several of them. Each record is verified by its own digest,
neighbours by the million in few calls. What is bad is read again record by record, each from a copy that has not supplied it
yet. A copy that cannot be read supplies nothing more.

Every round rules out a copy for each record that is still bad, or asks a single one for what came in stripes. So there are few
rounds: either all records are good, or some record is bad in every copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import eq

import torch
from typing_extensions import override

from lightning_moe_ckpt.native import Ranges
from lightning_moe_ckpt.recovery._inventory import UNREADABLE, Replica, Request
from lightning_moe_ckpt.storage import SegmentEntry, digest_of

MAX_STREAMS = 4
"""Peers that send parts of one run at once; more do not fill a link better."""

_PAGE_NBYTES = 4096

FILLER_NBYTES = 64
"""Tensors start at multiples of this. Closer neighbours have nothing between them but filler, which is read along."""


class Exhausted(Exception):
    """Some bytes are bad, or gone, in every copy; never leaves the package."""


Read = Callable[[Request, memoryview], None]
"""Fills memory with the bytes of a request, or raises what is in `UNREADABLE`."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a copy has a record."""

    copy: Replica
    entry: SegmentEntry
    """The file."""
    offset: int
    """From its start."""


@dataclass(slots=True, eq=False)
class Wanted:
    """A record to be brought."""

    name: str
    start: int
    """Where it goes in the buffer."""
    nbytes: int
    digest: str
    places: Sequence[Place]
    """Where it may come from, cheapest first."""
    good: bool = False
    bad_in: set[Replica] = field(default_factory=set)
    asked: Place | None = None
    """Where it, or its first stripe, was asked for in this round."""
    requests: Sequence[Request] = ()
    """For parts of it, in this round."""

    @property
    def end(self) -> int:
        """Where in the buffer it ends."""
        return self.start + self.nbytes

    @property
    def suppliers(self) -> set[Replica]:
        """Copies that were asked for parts of it in this round."""
        return {each.copy for each in self.requests if each.start < self.end and each.end > self.start}

    def verify(self, buffer: memoryview) -> None:
        """Note whether its bytes are what was written."""
        self.good = digest_of(buffer[self.start : self.end]) == self.digest

    def left(self) -> Sequence[Wanted]:
        """Return what is still to be brought, record by record."""
        return () if self.good else (self,)


@dataclass(slots=True, eq=False)
class WantedNeighbours(Wanted):
    """Records to be brought that lie in a file one behind the other as they will in the buffer; not empty ones.

    Its places are those of the first; it has no digest of its own.
    """

    names: Sequence[str] = ()
    starts: Sequence[int] = ()
    """Where each goes in the buffer."""
    sizes: Sequence[int] = ()
    digests: Sequence[str] = ()
    goods: Sequence[bool] = ()
    """Of each, once they were verified."""

    @override
    def verify(self, buffer: memoryview) -> None:
        ranges = Ranges(
            (at - self.start, at - self.start + size) for at, size in zip(self.starts, self.sizes, strict=True)
        )
        found = bytes(ranges.digest(buffer[self.start : self.end], b",")[0])
        self.good = found == ",".join(self.digests).encode()
        if not self.good:
            self.goods = list(map(eq, found.decode("ascii").split(","), self.digests))

    @override
    def left(self) -> Sequence[Wanted]:
        if self.good:
            return ()
        goods = self.goods or [False] * len(self.names)
        rows = zip(self.names, self.starts, self.sizes, self.digests, goods, strict=True)
        return [
            Wanted(
                *(name, start, nbytes, digest),
                [replace(place, offset=place.offset + start - self.start) for place in self.places],
                asked=self.asked,
                requests=self.requests,
            )
            for name, start, nbytes, digest, good in rows
            if not good
        ]


@dataclass(slots=True)
class _Run:
    """Neighbours that one copy has side by side, as they lie in the buffer."""

    place: Place
    """Of the first."""
    records: list[Wanted]

    @property
    def start(self) -> int:
        """Where in the buffer it goes."""
        return self.records[0].start

    @property
    def nbytes(self) -> int:
        """Of the records, and of the filler between them."""
        return self.records[-1].end - self.start

    def takes(self, record: Wanted, place: Place) -> bool:
        """Add a record and return whether it is the next one here."""
        here = (self.place.copy, self.place.entry.key, self.place.offset - self.start)
        near = 0 <= record.start - self.records[-1].end < FILLER_NBYTES
        if near and here == (place.copy, place.entry.key, place.offset - record.start):
            self.records.append(record)
            return True
        return False

    def request(self) -> Request:
        """Return the request for all of it, to its copy."""
        copy = self.place.copy
        return Request(copy, copy.readers[0], self.place.entry, self.place.offset, self.nbytes, self.start)

    def stripes(self) -> list[Request]:
        """Return requests for all of it; from other nodes, to several at once."""
        places = [each for each in self.records[0].places if each.entry is self.place.entry]
        streams = _streams([each.copy for each in places if each.copy.source == "peer"])
        if self.place.copy.source != "peer" or len(streams) < 2:
            return [self.request()]
        size = -(-self.nbytes // len(streams))
        size += -size % _PAGE_NBYTES
        starts = range(0, self.nbytes, size)
        offset, entry = self.place.offset, self.place.entry
        return [
            Request(copy, reader, entry, offset + start, min(size, self.nbytes - start), self.start + start)
            for (copy, reader), start in zip(streams, starts, strict=False)
        ]


class Assembly:
    """Records on their way into memory.

    Args:
        what: they are, for messages.
        buffer_U8: that they go into.
        records: none of them overlaps another.
        may_be_lost: whether what is bad in every copy ends this assembly only; else it raises `Exhausted`.
    """

    def __init__(self, what: str, buffer_U8: torch.Tensor, records: Sequence[Wanted], *, may_be_lost: bool) -> None:
        self.what, self.lost = what, ""
        """Why some of it cannot be had; empty while it may."""
        self.supplied = Counter[Replica]()
        """Bytes read, by copy."""
        self.complaints: list[str] = []
        """What was wrong with copies, since somebody last emptied this."""
        self.view = memoryview(buffer_U8.numpy())  # type: ignore[arg-type]  # numpy's stubs do not say that arrays are buffers
        """The buffer's bytes, to be filled."""
        self._left = sorted((each for each in records if each.nbytes), key=lambda each: each.start)
        self._gone: dict[Replica, str] = {}
        self._may_be_lost = may_be_lost
        self._is_first = True

    def requests(self) -> list[Request]:
        """Return what to read in the next round; nothing if it is done.

        Raises:
            Exhausted: some of it is bad everywhere, and must not be.
        """
        try:
            runs = self._runs()
        except Exhausted as error:
            if not self._may_be_lost:
                raise
            self.lost, self._left = str(error), []
            return []
        found = [request for run in runs for request in self._requests(run)]
        self._is_first = False
        return found

    def gone(self, copy: Replica, reason: str) -> None:
        """Note that a copy could not be read: the bytes asked of it are rubbish."""
        if copy not in self._gone:
            self._gone[copy] = reason
            self.complaints.append(f"{copy}: {reason}")

    @property
    def unverified(self) -> Sequence[Wanted]:
        """Records that were asked for in this round."""
        return self._left

    def finish_round(self) -> None:
        """Drop what was verified as good since the last round; what is bad accuses the copy that supplied it."""
        self._left = [part for record in self._left for part in record.left()]
        for record in self._left:
            if len(suppliers := record.suppliers) == 1:  # of several, nothing says whose part is bad
                (copy,) = suppliers
                record.bad_in.add(copy)
                if copy not in self._gone and record.asked is not None:
                    where = f"{copy}: {record.asked.entry.key}"
                    self.complaints.append(f"{where}: {record.name} is not what was written")

    def fill(self, read: Read) -> bool:
        """Read all of it from copies that this process reads itself; return whether it could be had."""
        while requests := self.requests():
            for request in requests:
                self.read(request, read)
            for record in self.unverified:
                record.verify(self.view)
            self.finish_round()
        return not self.lost

    def read(self, request: Request, read: Read) -> None:
        """Read what was asked for, or note that the copy is gone."""
        out = self.view[request.start : request.end]
        try:
            read(request, out)
        except UNREADABLE as error:
            out[:] = bytes(out.nbytes)  # new memory may hold what the heap had there before
            self.gone(request.copy, str(error))

    def _next(self, record: Wanted) -> Place:
        for place in record.places:
            if place.copy not in self._gone and place.copy not in record.bad_in:
                return place
        tried = [f"{p.copy}: {p.entry.key} ({self._gone.get(p.copy, 'its digest differs')})" for p in record.places]
        raise Exhausted(f"{self.what}: {record.name} is nowhere as it was written: {', '.join(tried) or 'no copy'}")

    def _runs(self) -> list[_Run]:
        runs: list[_Run] = []
        for record in self._left:
            record.asked = place = self._next(record)
            if not runs or not runs[-1].takes(record, place):
                runs.append(_Run(place, [record]))
        return runs

    def _requests(self, run: _Run) -> Iterator[Request]:
        requests = run.stripes() if self._is_first else [run.request()]
        for record in run.records:
            record.requests = requests
        for request in requests:
            self.supplied[request.copy] += request.nbytes
            yield request


def _streams(copies: Sequence[Replica]) -> list[tuple[Replica, int]]:
    """Return the readers to ask at once: one of each copy, then a second of each, and so on."""
    turns = max((len(copy.readers) for copy in copies), default=0)
    streams = [(copy, copy.readers[turn]) for turn in range(turns) for copy in copies if turn < len(copy.readers)]
    return streams[:MAX_STREAMS]
