"""Put a rank's records together in memory, each from its cheapest good copy.

The caller lays the buffer out. Records that are neighbours in both the file and the buffer are read at once, so a whole
segment is one read; from other nodes a read comes in stripes, from several nodes. Each record is verified by its own
digest, neighbours by the million in few calls. A bad record is read again by itself, from a copy that has not supplied
it yet. An unreadable copy supplies nothing more.

Every round rules out a copy for each bad record, or asks a single copy instead of stripes. So there are few rounds:
either all records are good, or some record is bad in every copy.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import eq

import numpy as np
import torch
from typing_extensions import override

from lightning_moe_ckpt.native import Column, Ranges
from lightning_moe_ckpt.recovery._inventory import UNREADABLE, Replica, Request
from lightning_moe_ckpt.storage import SegmentEntry, digest_of

MAX_STREAMS = 4
"""Most peers that send stripes of one run of adjacent records at once; more do not fill a link better."""

_PAGE_NBYTES = 4096

FILLER_NBYTES = 64
"""Alignment of tensors in bytes. Closer neighbours have only filler between them, which is read along."""


class Exhausted(Exception):
    """Some bytes are bad, or missing, in every copy; never leaves the package."""


Read = Callable[[Request, memoryview], None]
"""Function that fills memory with a request's bytes, or raises one of `UNREADABLE`."""


@dataclass(frozen=True, slots=True)
class Place:
    """A record's place in a copy."""

    copy: Replica
    entry: SegmentEntry
    """The file."""
    offset: int
    """First byte in the file."""


@dataclass(slots=True, eq=False)
class Wanted:
    """A record to be read."""

    name: str
    start: int
    """First byte in the buffer."""
    nbytes: int
    digest: str
    places: Sequence[Place]
    """Places to read the record from, cheapest first."""
    good: bool = False
    bad_in: set[Replica] = field(default_factory=set)
    asked: Place | None = None
    """Place to which this round's request, or its first stripe, was sent."""
    requests: Sequence[Request] = ()
    """This round's requests for parts of the record."""

    @property
    def end(self) -> int:
        """End in the buffer."""
        return self.start + self.nbytes

    @property
    def suppliers(self) -> set[Replica]:
        """Copies asked for parts of the record in this round."""
        return {request.copy for request in self.requests if request.start < self.end and request.end > self.start}

    def verify(self, buffer: memoryview) -> None:
        """Verify the record's bytes by its digest, and note the result in `good`."""
        self.good = digest_of(buffer[self.start : self.end]) == self.digest

    def left(self) -> Sequence[Wanted]:
        """Return the records still to be read, each by itself."""
        return () if self.good else (self,)


@dataclass(slots=True, eq=False)
class WantedNeighbours(Wanted):
    """Non-empty records to be read that follow each other in the file as in the buffer.

    The places are the first record's; there is no common digest.
    """

    names: Callable[[], Sequence[str]] = tuple
    starts: Column = field(default_factory=lambda: np.empty(0, np.int64))
    """First byte of each record in the buffer."""
    sizes: Column = field(default_factory=lambda: np.empty(0, np.int64))
    digests: bytes = b""
    """Digests as in a marker's line."""
    goods: Sequence[bool] = ()
    """Whether each record is good; empty before verification."""

    @override
    def verify(self, buffer: memoryview) -> None:
        ranges = Ranges(np.stack([self.starts, self.starts + self.sizes]) - self.start)
        found = bytes(ranges.digest(buffer[self.start : self.end], b'","')[0])
        self.good = found == self.digests[1:-1]
        if not self.good:
            self.goods = list(map(eq, found.decode("ascii").split('","'), json.loads(b"[" + self.digests + b"]")))

    @override
    def left(self) -> Sequence[Wanted]:
        if self.good:
            return ()
        names, digests = self.names(), json.loads(b"[" + self.digests + b"]")
        goods = self.goods or [False] * len(names)
        rows = zip(names, self.starts.tolist(), self.sizes.tolist(), digests, goods, strict=True)
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
    """Neighbours that one copy holds side by side, as they lie in the buffer."""

    place: Place
    """Place of the first record."""
    records: list[Wanted]

    @property
    def start(self) -> int:
        """First byte in the buffer."""
        return self.records[0].start

    @property
    def nbytes(self) -> int:
        """Bytes of the records, with the filler between them."""
        return self.records[-1].end - self.start

    def takes(self, record: Wanted, place: Place) -> bool:
        """Add a record if it comes next in this copy; return whether it was added."""
        here = (self.place.copy, self.place.entry.key, self.place.offset - self.start)
        near = 0 <= record.start - self.records[-1].end < FILLER_NBYTES
        if near and here == (place.copy, place.entry.key, place.offset - record.start):
            self.records.append(record)
            return True
        return False

    def request(self) -> Request:
        """Return one request for the whole run, to its copy."""
        copy = self.place.copy
        return Request(copy, copy.readers[0], self.place.entry, self.place.offset, self.nbytes, self.start)

    def stripes(self) -> list[Request]:
        """Return requests for the whole run; if on other nodes, to several copies at once."""
        places = [place for place in self.records[0].places if place.entry is self.place.entry]
        streams = _streams([place.copy for place in places if place.copy.source == "peer"])
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
    """Records that do not overlap, on their way into memory; `what` names them in messages. `may_be_lost` says whether
    a record that is bad in every copy ends only this assembly; else it raises `Exhausted`.
    """

    def __init__(self, what: str, buffer_U8: torch.Tensor, records: Sequence[Wanted], *, may_be_lost: bool) -> None:
        self.what, self.lost = what, ""
        """Reason why a record cannot be read; empty while all may."""
        self.supplied = Counter[Replica]()
        """Bytes read, by copy."""
        self.complaints: list[str] = []
        """Faults of copies since the caller last emptied the list."""
        self.view = memoryview(buffer_U8.numpy())  # type: ignore[arg-type]  # numpy's stubs do not say that arrays are buffers
        """The buffer's bytes, to be filled."""
        self._left = sorted((record for record in records if record.nbytes), key=lambda record: record.start)
        self._gone: dict[Replica, str] = {}
        self._may_be_lost = may_be_lost
        self._is_first = True

    def requests(self) -> list[Request]:
        """Return the reads of the next round; none if the assembly is done. Raises `Exhausted` if a record is bad everywhere, and
        `may_be_lost` is false.
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
        """Note that a copy could not be read: the bytes requested from the copy are rubbish."""
        if copy not in self._gone:
            self._gone[copy] = reason
            self.complaints.append(f"{copy}: {reason}")

    @property
    def unverified(self) -> Sequence[Wanted]:
        """Records requested in this round."""
        return self._left

    def finish_round(self) -> None:
        """Drop the good records; a bad record rules out the copy that supplied it."""
        self._left = [part for record in self._left for part in record.left()]
        for record in self._left:
            if len(suppliers := record.suppliers) == 1:  # with several, the faulty one is unknown
                (copy,) = suppliers
                record.bad_in.add(copy)
                if copy not in self._gone and record.asked is not None:
                    where = f"{copy}: {record.asked.entry.key}"
                    self.complaints.append(f"{where}: {record.name} is not what was written")

    def fill(self, read: Read) -> bool:
        """Read all records from copies that this process reaches itself; return whether all are good."""
        while requests := self.requests():
            for request in requests:
                self.read(request, read)
            for record in self.unverified:
                record.verify(self.view)
            self.finish_round()
        return not self.lost

    def read(self, request: Request, read: Read) -> None:
        """Read a request, or note that its copy is gone."""
        out = self.view[request.start : request.end]
        try:
            read(request, out)
        except UNREADABLE as error:
            out[:] = bytes(out.nbytes)  # new memory may hold old contents of the heap
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
    """Return the readers to ask at once: one of each copy, then a second of each, and so on; at most `MAX_STREAMS`."""
    turns = max((len(copy.readers) for copy in copies), default=0)
    streams = [(copy, copy.readers[turn]) for turn in range(turns) for copy in copies if turn < len(copy.readers)]
    return streams[:MAX_STREAMS]
