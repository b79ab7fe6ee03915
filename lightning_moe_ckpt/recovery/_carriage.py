"""Rounds in which all ranks get what they lack: from copies that they read themselves, and from each other.

In each round a rank says what it wants of others, or that something is bad in every copy; it reads local copies
meanwhile, sends what it was asked for, receives, and verifies. Nobody ever waits for a rank that has gone on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, repeat

from lightning_moe_ckpt.recovery._assembly import UNREADABLE, Assembly, Exhausted, Request, Wanted
from lightning_moe_ckpt.recovery._inventory import Item
from lightning_moe_ckpt.recovery._reader import Reader
from lightning_moe_ckpt.recovery._rounds import Rounds
from lightning_moe_ckpt.recovery._schedule import FetchRequest, TransferStep, turns

log = logging.getLogger(__name__)

NUM_READERS = 4
"""Threads that read and verify."""

VERIFIED_NBYTES = 4 * 2**20
"""Bytes of records that a thread verifies before it takes the next ones, at least."""

Requests = list[tuple[Assembly, Request]]


class Transfer:
    """Brings assemblies their bytes; every method is collective.

    Args:
        rounds: of this attempt.
        reader: of what this rank reaches.
        what: is being brought, for the log.
        chunk_nbytes: most bytes per message.
    """

    def __init__(self, rounds: Rounds, reader: Reader, what: str, chunk_nbytes: int) -> None:
        self._rounds, self._reader, self._what, self._chunk_nbytes = rounds, reader, what, chunk_nbytes
        self._rank = rounds.transport.rank
        self._broken = ""

    def carry(self, assemblies: Sequence[Assembly], broken: str = "") -> bool:
        """Fill all of them. Whether every rank could; the reasons are those of the rounds.

        Args:
            assemblies: of this rank.
            broken: why there is nothing to be had for this rank, if that is so.
        """
        self._broken = broken
        with ThreadPoolExecutor(NUM_READERS, thread_name_prefix="moe-ckpt-restore") as pool:
            while self._round(assemblies, pool):
                pass
        return not self._rounds.reasons

    def _round(self, assemblies: Sequence[Assembly], pool: ThreadPoolExecutor) -> bool:
        """Read, send, receive and verify once. Returns whether there was anything to do, on any rank."""
        wanted, lost = self._wanted(assemblies)
        self._log_complaints(assemblies)
        remote = [self._ask(i, request) for i, (_, request) in enumerate(wanted) if request.reader != self._rank]
        asks = self._rounds.begin(remote, busy=bool(wanted), lost=lost)
        if asks is None:
            return False
        local = [(assembly, request) for assembly, request in wanted if request.reader == self._rank]
        read = partial(read_local, self._reader, self._rank)
        reading = [pool.submit(assembly.read, request, read) for assembly, request in local]
        if asks:
            self._travel(asks, wanted)
        for each in reading:
            each.result()
        list(pool.map(_verify, _portions(assemblies)))
        for assembly in assemblies:
            assembly.finish_round()
        self._log_complaints(assemblies)
        return True

    def _wanted(self, assemblies: Sequence[Assembly]) -> tuple[Requests, str]:
        if self._broken:
            return [], self._broken
        try:
            return [(assembly, request) for assembly in assemblies for request in assembly.requests()], ""
        except Exhausted as error:
            return [], str(error)

    def _ask(self, number: int, request: Request) -> FetchRequest:
        copy = request.copy
        return FetchRequest(
            self._rank,
            request.reader,
            copy.version,
            copy.tier,
            request.entry.key,
            request.offset,
            request.nbytes,
            number,
        )

    def _log_complaints(self, assemblies: Sequence[Assembly]) -> None:
        for assembly in assemblies:
            for complaint in assembly.complaints:
                log.error("%s: %s; another copy is tried", self._what, complaint)
            assembly.complaints.clear()

    # -- between ranks

    def _travel(self, asks: Sequence[FetchRequest], wanted: Requests) -> None:
        """Send and receive what all ranks asked for; learn which of it could not be read. Collective."""
        transport = self._rounds.transport
        failures: dict[tuple[int, int], str] = {}
        arrived: Callable[[], None] | None = None
        for turn in turns(asks, self._rank, self._chunk_nbytes):
            sends = [(ask.receiver, memoryview(self._bytes_for(ask, failures))) for ask in turn.sends]
            if arrived is not None:
                arrived()  # while it was under way, the next chunks were read
            arrived = transport.transfer(sends, _places(turn, wanted))
        if arrived is not None:
            arrived()
        rows = [[receiver, number, why] for (receiver, number), why in failures.items()]
        for reader, told in enumerate(transport.gather_values(rows)):
            self._hear(reader, told, wanted)

    def _bytes_for(self, ask: FetchRequest, failures: dict[tuple[int, int], str]) -> bytearray:
        """What another rank asked for; if it cannot be read, as many other bytes: the receiver waits for them."""
        chunk = bytearray(ask.nbytes)
        try:
            item = Item(ask.version, ask.receiver, ask.tier)
            self._reader.read_into(item, ask.key, ask.offset, memoryview(chunk))
        except UNREADABLE as error:
            failures[ask.receiver, ask.number] = str(error)
        return chunk

    def _hear(self, reader: int, rows: object, wanted: Requests) -> None:
        assert isinstance(rows, list)
        for receiver, number, why in rows:
            if receiver == self._rank:
                assembly, request = wanted[number]
                assembly.gone(request.copy, f"{why} (on rank {reader})")


def read_local(reader: Reader, rank: int, request: Request, out: memoryview) -> None:
    """Read what a rank wants of a copy of its own part, unverified. Raises what is in `UNREADABLE`."""
    copy = request.copy
    if copy.source == "storage":
        reader.read_stored(copy.version, rank, request.entry, request.offset, out)
    else:
        reader.read_into(Item(copy.version, rank, copy.tier), request.entry.key, request.offset, out)


def _portions(assemblies: Sequence[Assembly]) -> Iterator[list[tuple[Assembly, Wanted]]]:
    """Records to be verified, as many as are worth the way to a thread."""
    portion: list[tuple[Assembly, Wanted]] = []
    nbytes = 0
    for assembly, record in chain.from_iterable(zip(repeat(each), each.unverified) for each in assemblies):
        portion.append((assembly, record))
        nbytes += record.nbytes
        if nbytes >= VERIFIED_NBYTES:
            yield portion
            portion, nbytes = [], 0
    yield portion


def _verify(portion: Sequence[tuple[Assembly, Wanted]]) -> None:
    for assembly, record in portion:
        record.verify(assembly.view)


def _places(turn: TransferStep, wanted: Requests) -> list[tuple[int, memoryview]]:
    places = []
    for ask in turn.receives:
        assembly, request = wanted[ask.number]
        start = request.start + ask.offset - request.offset
        places.append((ask.reader, assembly.view[start : start + ask.nbytes]))
    return places
