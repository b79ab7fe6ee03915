"""Bring markers, then records, in rounds: each rank reads its reachable copies itself, and fetches the rest from others.

In each round a rank announces its fetches, or that something is bad in every copy. Meanwhile it reads local copies;
then it sends, receives, and verifies. Nobody ever waits for a rank that has gone on. A rank's markers list the files
and every digest of its parts of versions, so they come first (`MarkerSearch`).

Every rank computes from the same requests which bytes travel in which order. Requests are cut into messages, and each
pair of ranks works off its own queue. A rank's step `n` is the `n`-th message in each of its queues, received and sent
at once. A step waits only for steps with smaller numbers elsewhere, so no cycle can form, and memory is one message per
queue and step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, Protocol

from torch import Tensor

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.errors import Corrupt
from lightning_moe_ckpt.recovery._assembly import Assembly, Exhausted, Wanted
from lightning_moe_ckpt.recovery._index import VERIFIED_NBYTES
from lightning_moe_ckpt.recovery._inventory import UNREADABLE, Inventory, Item, Reader, Replica, Request, Stock, Version
from lightning_moe_ckpt.storage import MAX_MARKER_NBYTES, RankMarker, digest_of
from lightning_moe_ckpt.tiers import TierName, is_differential, is_partial

log = rank_logger(__name__)

MESSAGE_NBYTES = 8 * 2**20

_NUM_READERS = 4
"""Threads that read and verify."""

_OTHER_MARKER = "its marker is not of the same generation as rank 0's"

RankBytes = tuple[int, memoryview]
"""Another rank, and bytes to or from this rank; never empty."""


class Transport(Protocol):
    """A world of ranks that call the same methods in the same order; a lost rank is an error, not an endless wait."""

    @property
    def rank(self) -> int:
        """Number of this rank."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    def gather_values(self, value: object) -> list[Any]:
        """Return every rank's plain value, by rank. Collective."""

    def gather_distinct(self, value: object) -> list[Any]:
        """Return all ranks' plain values, rank 0's first and possibly each once. Collective."""

    def sum(self, own: Tensor) -> Tensor:
        """Return the sum of every rank's integers, int64 of one shape. Collective."""

    def route(self, messages: Sequence[tuple[int, object]]) -> list[tuple[int, Any]]:
        """Send plain values to single ranks; return this rank's, each behind its sender, in one order. Collective."""

    def transfer(self, sends: Sequence[RankBytes], receives: Sequence[RankBytes]) -> Callable[[], None]:
        """Begin to send and to receive, and return a function to wait for all messages; until then the views stay untouched.

        Between two ranks messages arrive in the order of sending, and sizes must be equal. Not collective: a rank without messages
        need not call it.
        """


def agreed_inventory(
    transport: Transport,
    own: Stock,
    committed: Collection[Version],
    sources: Collection[Version] = (),
    wrote: Mapping[Version, int] = MappingProxyType({}),
) -> Inventory:
    """Return the copies of this rank's part, and all ranks' versions. Collective; the other arguments are of `Inventory`.

    Each rank is told the readers of copies of its part, and names the versions without any. Parts of more writers than ranks
    are shared out.
    """
    rank, size = transport.rank, transport.world_size
    firsts = {item.version: item for item in sorted(own.items, key=lambda item: not item.world_size)[::-1]}
    # of no rank and no file: ranks of like nodes say the same
    alike = tuple(replace(firsts[each], owner=0, file="", whole=True) for each in sorted(firsts))
    told = transport.gather_distinct(Stock("", alike, own.seen).plain())
    offers = Inventory.of(told, ()).offers
    offers = offers._replace(writers={version: number or size for version, number in offers.writers.items()})
    homes: dict[int, list[Item]] = {rank: []}
    for item in own.items:
        homes.setdefault(item.owner % size, []).append(item)
    said = transport.route([(home, Stock(own.memory, (*its,)).plain()) for home, its in homes.items()])
    stocks = {reader: Stock.from_plain(stock) for reader, stock in said}
    stored_ones = frozenset(committed), frozenset(sources), dict.fromkeys((*committed, *sources), size) | dict(wrote)
    found = Inventory(stocks, *stored_ones, offers)
    lacking = transport.gather_distinct([each.plain() for each in sorted(found.lacking(rank, size))])
    lost = {Version.from_plain(each) for row in lacking for each in row}
    return replace(found, agreed=offers._replace(whole=found.in_memory.difference(lost)))


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """Bytes, or the marker, requested by one rank from a copy of its part that another rank can read."""

    receiver: int
    reader: int
    version: Version
    owner: int
    """Rank that wrote the part."""
    file: str
    """Name of the copy in the reader's memory."""
    number: int
    """Number of the request among the receiver's in this round; equal in all its messages."""
    key: str = ""
    """Key of the wanted file; empty for the marker."""
    offset: int = 0
    nbytes: int = 0

    @property
    def item(self) -> Item:
        """The copy, as the reader finds it."""
        return Item(self.version, self.owner, self.file)

    def plain(self) -> list[object]:
        """Return the fields as plain values for `gather_values`, without `receiver`: it is the rank that sends them."""
        where = self.owner, self.file, self.number, self.key, self.offset, self.nbytes
        return [*self.version.plain(), self.reader, *where]

    @classmethod
    def from_plain(cls, receiver: int, row: Sequence[Any]) -> FetchRequest:
        """Invert `plain`."""
        return cls(receiver, row[4], Version.from_plain(row[:4]), *row[5:])


TransferStep = tuple[Sequence[FetchRequest], Sequence[FetchRequest]]
"""A rank's receives and sends at once: at most one message per other rank and direction."""


def transfer_steps(fetches: Sequence[FetchRequest], rank: int, message_nbytes: int) -> list[TransferStep]:
    """Return the steps of one rank for the fetches of all ranks, in the same order on all."""
    incoming: dict[int, list[FetchRequest]] = {}
    outgoing: dict[int, list[FetchRequest]] = {}
    for fetch in fetches:
        if fetch.receiver == rank:
            incoming.setdefault(fetch.reader, []).extend(_messages(fetch, message_nbytes))
        elif fetch.reader == rank:
            outgoing.setdefault(fetch.receiver, []).extend(_messages(fetch, message_nbytes))
    return [*zip_longest(_heads(incoming), _heads(outgoing), fillvalue=())]


def _messages(fetch: FetchRequest, nbytes: int) -> Iterator[FetchRequest]:
    end = fetch.offset + fetch.nbytes
    for start in range(fetch.offset, end, nbytes):
        yield replace(fetch, offset=start, nbytes=min(nbytes, end - start))


def _heads(queues: dict[int, list[FetchRequest]]) -> list[tuple[FetchRequest, ...]]:
    """Return the first messages of all queues, then the second ones, and so on."""
    return [tuple(each for each in row if each is not None) for row in zip_longest(*queues.values())]


@dataclass(slots=True)
class Rounds:
    """Rounds of one attempt at one version. Every method is collective."""

    transport: Transport
    reasons: list[str] = field(default_factory=list)
    """Reasons why the version is given up, the same on all ranks; empty otherwise."""
    fetching: bool = False
    """Whether any rank fetches something in this round."""

    def begin(
        self, fetches: Sequence[FetchRequest], *, busy: bool, lost: str, common: str = ""
    ) -> list[FetchRequest] | None:
        """Announce this rank's fetches of the next round. Return them, and those of others from it, in one order;
        `None` if the rounds end: nobody lacks anything, or some rank lost a record.

        A rank is `busy` if it lacks records, from other ranks or from its own copies; `lost` is the reason why it
        cannot be given its records, empty otherwise. `common`, the digest of the facts common to all ranks' markers, is
        empty until the marker is found, and must be equal as rounds end.
        """
        said = self.transport.gather_distinct([busy, self._told(lost), bool(fetches), common])
        self.reasons += [row[1] for row in said if row[1]]
        if self.reasons or not any(row[0] for row in said):
            if not self.reasons and any(row[3] != said[0][3] for row in said):
                told = self._told("" if common == said[0][3] else _OTHER_MARKER)
                self.reasons += filter(None, self.transport.gather_distinct(told))
            return None
        self.fetching = any(row[2] for row in said)
        asked = self.transport.route([(each.reader, each.plain()) for each in fetches]) if self.fetching else []
        found = [*fetches, *(FetchRequest.from_plain(receiver, plain) for receiver, plain in asked)]
        return sorted(found, key=lambda each: each.receiver)

    def _told(self, reason: str) -> str:
        return f"rank {self.transport.rank}: {reason}" if reason else ""


_Requests = list[tuple[Assembly, Request]]


class Transfer:
    """Rounds in which all ranks read, send and receive the bytes of their assemblies; every method is collective."""

    def __init__(self, rounds: Rounds, reader: Reader, what: str, message_nbytes: int) -> None:
        self._rounds, self._reader, self._what, self._message_nbytes = rounds, reader, what, message_nbytes
        self._rank = rounds.transport.rank

    def fill(self, assemblies: Sequence[Assembly], broken: str) -> bool:
        """Fill all assemblies. Return whether every rank could; otherwise the reasons are in the rounds, this rank's if `broken`."""
        with ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="moe-ckpt-restore") as pool:
            while self._round(assemblies, broken, pool):
                pass
        return not self._rounds.reasons

    def _round(self, assemblies: Sequence[Assembly], broken: str, pool: ThreadPoolExecutor) -> bool:
        """Read, send, receive and verify once; return whether any rank had anything to do."""
        wanted: _Requests = []
        try:
            if not broken:
                wanted = [(assembly, request) for assembly in assemblies for request in assembly.requests()]
        except Exhausted as error:
            broken = str(error)
        self._log_complaints(assemblies)
        remote = [self._fetch(i, request) for i, (_, request) in enumerate(wanted) if request.reader != self._rank]
        if (fetches := self._rounds.begin(remote, busy=bool(wanted), lost=broken)) is None:
            return False
        local = [(assembly, request) for assembly, request in wanted if request.reader == self._rank]
        reading = [pool.submit(assembly.read, request, self._reader.read) for assembly, request in local]
        if self._rounds.fetching:
            self._exchange(fetches, wanted)
        for each in reading:
            each.result()
        list(pool.map(_verify, _portions(assemblies)))
        for assembly in assemblies:
            assembly.finish_round()
        self._log_complaints(assemblies)
        return True

    def _fetch(self, number: int, request: Request) -> FetchRequest:
        copy = request.copy
        wanted = (request.entry.key, request.offset, request.nbytes)
        return FetchRequest(self._rank, request.reader, copy.version, copy.owner, copy.file, number, *wanted)

    def _log_complaints(self, assemblies: Sequence[Assembly]) -> None:
        for assembly in assemblies:
            for complaint in assembly.complaints:
                log.error("%s: %s; another copy is tried", self._what, complaint)
            assembly.complaints.clear()

    def _exchange(self, fetches: Sequence[FetchRequest], wanted: _Requests) -> None:
        """Send and receive all ranks' requests; mark copies that could not be read. Collective."""
        transport = self._rounds.transport
        failures: dict[tuple[int, int], str] = {}
        wait: Callable[[], None] | None = None
        for receives, sends in transfer_steps(fetches, self._rank, self._message_nbytes):
            messages = [(send.receiver, memoryview(self._bytes_for(send, failures))) for send in sends]
            if wait is not None:
                wait()  # overlaps with reading the next messages
            wait = transport.transfer(messages, _destinations(receives, wanted))
        if wait is not None:
            wait()
        rows = [(receiver, [number, why]) for (receiver, number), why in failures.items()]
        for reader, (number, why) in transport.route(rows):
            assembly, request = wanted[number]
            assembly.gone(request.copy, f"{why} (on rank {reader})")

    def _bytes_for(self, fetch: FetchRequest, failures: dict[tuple[int, int], str]) -> bytearray:
        """Return the bytes another rank requested; if unreadable, as many zeros, since the receiver waits for them."""
        message = bytearray(fetch.nbytes)
        try:
            self._reader.read_into(fetch.item, fetch.key, fetch.offset, memoryview(message))
        except UNREADABLE as error:
            failures[fetch.receiver, fetch.number] = str(error)
        return message


def _destinations(receives: Sequence[FetchRequest], wanted: _Requests) -> list[RankBytes]:
    """Return each message's sender, and the place in an assembly's buffer that it fills."""
    found = []
    for fetch in receives:
        assembly, request = wanted[fetch.number]
        start = request.start + fetch.offset - request.offset
        found.append((fetch.reader, assembly.view[start : start + fetch.nbytes]))
    return found


def _portions(assemblies: Sequence[Assembly]) -> Iterator[list[tuple[Assembly, Wanted]]]:
    """Yield records to be verified, in portions worth a thread's start."""
    portion: list[tuple[Assembly, Wanted]] = []
    nbytes = 0
    for assembly in assemblies:
        for record in assembly.unverified:
            portion.append((assembly, record))
            nbytes += record.nbytes
            if nbytes >= VERIFIED_NBYTES:
                yield portion
                portion, nbytes = [], 0
    yield portion


def _verify(portion: Sequence[tuple[Assembly, Wanted]]) -> None:
    for assembly, record in portion:
        record.verify(assembly.view)


# -- markers

Which = tuple[Version, TierName | None]
"""A version, and the tier whose marker is wanted, since tiers may hold different files; `None` for any whole copy."""


@dataclass(slots=True)
class _Sought:
    """Search for one marker: its copies still to be tried, and the marker once found."""

    which: Which
    left: list[Replica]
    """Copies still to be tried, cheapest first."""
    found: RankMarker | None = None
    complaints: list[str] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        """Whether a copy is left to be tried."""
        return self.found is None and bool(self.left)

    def complain(self, copy: Replica, reason: str) -> None:
        self.complaints.append(f"{copy} ({reason})")
        log.error("%s, marker from %s: %s; another copy is tried", copy.version, copy, reason)


class MarkerSearch:
    """Search for this rank's markers, each from its cheapest good copy; markers' digests come from manifests, if there are any."""

    def __init__(
        self, rounds: Rounds, reader: Reader, copies: Mapping[Which, Sequence[Replica]], digests: Mapping[Version, str]
    ) -> None:
        self._rounds, self._reader, self._digests = rounds, reader, digests
        self._rank = rounds.transport.rank
        self._sought = {which: _Sought(which, list(places)) for which, places in copies.items()}

    def run(self, required: Which | None) -> dict[Which, RankMarker] | None:
        """Search on all ranks, and return the markers found. Collective.

        `None`, on all ranks, if some rank lacks the `required` marker, or the ranks' markers contradict each other.
        """
        while (fetches := self._begin_round(required)) is not None:
            answers = self._exchange(fetches)
            for number, sought in enumerate(self._sought.values()):
                if sought.is_open:
                    self._accept(sought, sought.left.pop(0), answers[number])
        found = {which: sought.found for which, sought in self._sought.items() if sought.found is not None}
        return None if self._rounds.reasons else found

    def _begin_round(self, required: Which | None) -> list[FetchRequest] | None:
        fetches: list[FetchRequest] = []
        for number, sought in enumerate(self._sought.values()):
            while sought.is_open and sought.left[0].source != "peer":
                copy = sought.left.pop(0)
                try:
                    marker = self._reader.marker(Item(copy.version, copy.owner, copy.file))
                    sought.found = self._checked(copy, marker)
                except UNREADABLE as error:
                    sought.complain(copy, str(error))
            if sought.is_open:
                copy = sought.left[0]
                fetches.append(FetchRequest(self._rank, copy.readers[0], copy.version, copy.owner, copy.file, number))
        lost = common = ""
        if required is not None and (found := self._sought[required].found) is not None:
            common = _common(found)
        elif required is not None and not self._sought[required].is_open:
            lost = f"its marker is nowhere as it was written: {', '.join(self._sought[required].complaints)}"
        return self._rounds.begin(fetches, busy=bool(fetches), lost=lost, common=common)

    def _accept(self, sought: _Sought, copy: Replica, answer: bytes) -> None:
        if not answer:
            sought.complain(copy, "could not be read there")
            return
        try:
            sought.found = self._checked(copy, RankMarker.from_bytes(answer, f"marker of {copy}"))
        except Corrupt as error:
            sought.complain(copy, str(error))

    def _checked(self, copy: Replica, marker: RankMarker) -> RankMarker:
        """Return the marker if it belongs to the copy's owner and version, and equals the committed marker, if any. Raises
        `Corrupt`.

        Memory may have more files of a partial generation than are committed, so its digest is not compared.
        """
        version = copy.version
        found = (marker.generation, marker.plan_hash, marker.rank)
        if found != (version.generation, version.plan_hash, copy.owner):
            raise Corrupt(f"is of rank {marker.rank}, {marker.generation}, plan {marker.plan_hash[:8]}.")
        digest = self._digests.get(version)
        if copy.source != "storage" and (is_partial(marker.policy) or is_differential(marker.policy)):
            digest = None
        if digest is not None and digest_of(marker.to_bytes()) != digest:
            raise Corrupt("is not the marker that was committed.")
        return marker

    def _exchange(self, fetches: Sequence[FetchRequest]) -> dict[int, bytes]:
        """Send the markers that other ranks requested; return this rank's, empty if unreadable there. Collective."""
        transport = self._rounds.transport
        own = [fetch for fetch in fetches if fetch.receiver == self._rank]
        answers = [(fetch, self._answer(fetch)) for fetch in fetches if fetch.reader == self._rank]
        said = transport.route([(each.receiver, [each.number, len(answer)]) for each, answer in answers])
        sizes = {number: nbytes for _, (number, nbytes) in said}
        if max(sizes.values(), default=0) > MAX_MARKER_NBYTES:
            raise Corrupt(
                f"another rank announces a marker of more than {MAX_MARKER_NBYTES} bytes. Start again without it."
            )
        received = {each.number: bytearray(sizes.get(each.number, 0)) for each in own}
        wait = transport.transfer(
            [(each.receiver, memoryview(answer)) for each, answer in answers if answer],
            [(each.reader, memoryview(received[each.number])) for each in own if received[each.number]],
        )
        wait()
        return {number: bytes(answer) for number, answer in received.items()}

    def _answer(self, fetch: FetchRequest) -> bytes:
        try:
            return self._reader.marker(fetch.item).to_bytes()
        except UNREADABLE as error:
            log.error("%s, marker of rank %d kept here: %s", fetch.version, fetch.receiver, error)
            return b""


def _common(marker: RankMarker) -> str:
    """Return the digest of the facts common to all ranks' markers; of batched differences, only the last step."""
    steps = list(marker.steps)[-1 if is_differential(marker.policy) else 0 :]
    said = [marker.run_id, marker.world_size, marker.plan_hash, steps, dict(marker.policy)]
    generation = [marker.generation.step, marker.generation.incarnation, marker.generation.nonce]
    return digest_of(json.dumps([said, generation], sort_keys=True).encode())
