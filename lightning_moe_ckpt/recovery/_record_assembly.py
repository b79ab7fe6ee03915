"""Putting some records of a rank together, each by range from the cheapest copy that turns out to be good.

Where `Assembly` brings a file, this brings records, which may come from several files, in which they lie at different
places: of an expert from an older generation, or of the dense part from what storage has instead of what memory had.
Records that are neighbours in a file and in the buffer are read at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from lightning_moe_ckpt.recovery._assembly import Exhausted, Request, described
from lightning_moe_ckpt.recovery._inventory import Copy
from lightning_moe_ckpt.storage import SegmentEntry, digest_of

_FILLER_NBYTES = 64
"""Tensors start at multiples of this. Closer neighbours have nothing between them but filler, which is read along."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a copy has a record."""

    copy: Copy
    entry: SegmentEntry
    """The file."""
    offset: int
    """From its start."""


@dataclass(slots=True, eq=False)
class Wanted:
    """A record to be brought."""

    name: str
    place: int
    """Where it goes in the buffer."""
    nbytes: int
    digest: str
    places: Sequence[Place]
    """Where it may come from, cheapest first."""
    good: bool = False
    supplier: Place | None = None
    bad_in: set[Copy] = field(default_factory=set)


class RecordAssembly:
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
        self.done = not records
        self.supplied = Counter[Copy]()
        """Bytes read, by copy."""
        self.complaints: list[str] = []
        """What was wrong with copies, since somebody last emptied this."""
        self._view = memoryview(buffer_U8.numpy())  # type: ignore[arg-type]  # numpy's stubs do not say that arrays are buffers
        self._records = sorted(records, key=lambda each: each.place)
        self._gone: dict[Copy, str] = {}
        self._may_be_lost = may_be_lost

    @property
    def view(self) -> memoryview:
        """The buffer's bytes, to be filled."""
        return self._view

    def requests(self) -> list[Request]:
        """What to read in the next round; nothing if it is done.

        Raises:
            Exhausted: some of it is bad everywhere, and must not be.
        """
        if self.done:
            return []
        try:
            for record in self._records:
                record.supplier = None if record.good else self._next(record)
        except Exhausted as error:
            if not self._may_be_lost:
                raise
            self.lost, self.done = str(error), True
            return []
        requests = self._runs()
        for request in requests:
            self.supplied[request.copy] += request.nbytes
        return requests

    def gone(self, copy: Copy, reason: str) -> None:
        """A copy could not be read: the bytes asked of it are rubbish."""
        if copy not in self._gone:
            self._gone[copy] = reason
            self.complaints.append(f"{described(copy)}: {reason}")

    def check(self) -> None:
        """Verify what was read since the last call."""
        for record in self._records:
            if record.supplier is not None:
                self._check(record, record.supplier)
        self.done = all(record.good for record in self._records)

    def _check(self, record: Wanted, supplier: Place) -> None:
        copy, record.supplier = supplier.copy, None
        record.good = copy not in self._gone and digest_of(self._bytes(record)) == record.digest
        if not record.good:
            record.bad_in.add(copy)
            if copy not in self._gone:
                where = f"{described(copy)}: {supplier.entry.key}"
                self.complaints.append(f"{where}: {record.name} is not what was written")

    def _bytes(self, record: Wanted) -> memoryview:
        return self._view[record.place : record.place + record.nbytes]

    def _next(self, record: Wanted) -> Place:
        for place in record.places:
            if place.copy not in self._gone and place.copy not in record.bad_in:
                return place
        tried = [
            f"{described(p.copy)}: {p.entry.key} ({self._gone.get(p.copy, 'its digest differs')})"
            for p in record.places
        ]
        raise Exhausted(f"{self.what}: {record.name} is nowhere as it was written: {', '.join(tried) or 'no copy'}")

    def _runs(self) -> list[Request]:
        """Requests for every record that has a supplier; neighbours that a copy has side by side in one."""
        runs: list[Request] = []
        for record in self._records:
            if record.supplier is None:
                continue
            request = _request(record, record.supplier)
            joined = _joined(runs[-1], request) if runs else None
            if joined is None:
                runs.append(request)
            else:
                runs[-1] = joined
        return runs


def _request(record: Wanted, place: Place) -> Request:
    return Request(place.copy, place.copy.readers[0], place.entry, place.offset, record.nbytes, record.place)


def _joined(one: Request, two: Request) -> Request | None:
    """Both at once, if they are close and lie alike in the file and in the buffer."""
    same = (one.copy, one.entry.key, one.offset - one.place) == (two.copy, two.entry.key, two.offset - two.place)
    if not same or not 0 <= two.offset - one.end < _FILLER_NBYTES:
        return None
    return Request(one.copy, one.reader, one.entry, one.offset, two.end - one.offset, one.place)
