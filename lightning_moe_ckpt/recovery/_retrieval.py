"""Bringing every rank its part of one version into memory, from the cheapest copies that turn out to be good.

In rounds, which all ranks take together: each says what it lacks and which rank should send it, or that some bytes of
it are bad in every copy; local copies are read meanwhile; what arrived is verified; what was bad is asked of the next
copy. The version is given up by all as soon as one rank has to, and nobody ever waits for a rank that has gone on.

Every segment has one owner and every record one writer, so no byte is read twice, by whatever rank: what ranks share is
read by its owner and broadcast when it is loaded.

Source: the design, Sec. 6; Gemini (2023) for several peers at once.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from lightning_moe_ckpt.errors import Corrupt
from lightning_moe_ckpt.recovery._assembly import Assembly, Exhausted, Request
from lightning_moe_ckpt.recovery._inventory import Copy, Inventory, Item, Version
from lightning_moe_ckpt.recovery._markers import MarkerSearch
from lightning_moe_ckpt.recovery._reader import UNREADABLE, Reader
from lightning_moe_ckpt.recovery._rounds import Rounds
from lightning_moe_ckpt.recovery._schedule import CHUNK_NBYTES, Ask, Turn, turns
from lightning_moe_ckpt.recovery._transport import Transport
from lightning_moe_ckpt.storage import RankMarker, SegmentLayout

log = logging.getLogger(__name__)

NUM_READERS = 4
"""Segments that a rank reads and verifies at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One rank's part of a version, verified byte for byte."""

    marker: RankMarker
    segments: list[torch.Tensor]
    """One uint8 tensor per step; the bytes of the file."""
    layouts: list[SegmentLayout]
    nbytes: dict[Copy, int]
    """Bytes read, by copy; what was read again counts again."""


class Retrieval:
    """One attempt at one version; all ranks make it together.

    Args:
        transport: to the other ranks.
        reader: of what this rank reaches.
        inventory: of all ranks.
        version: what to bring.
        marker_digest: what a manifest says of this rank's marker, if there is one.
        chunk_nbytes: most bytes per message.
    """

    def __init__(
        self,
        transport: Transport,
        reader: Reader,
        inventory: Inventory,
        version: Version,
        *,
        marker_digest: str | None = None,
        chunk_nbytes: int = CHUNK_NBYTES,
    ) -> None:
        self._transport, self._reader, self._version = transport, reader, version
        self._copies = inventory.copies(version, transport.rank)
        self._marker_digest, self._chunk_nbytes = marker_digest, chunk_nbytes
        self._rounds = Rounds(transport)
        self._broken = ""

    @property
    def reasons(self) -> list[str]:
        """Why the version was given up, the same on all ranks."""
        return self._rounds.reasons

    def marker(self) -> RankMarker | None:
        """This rank's marker; `None`, on all ranks, if one of them has none. Collective."""
        return MarkerSearch(self._rounds, self._reader, self._version, self._copies, self._marker_digest).run()

    def part(self, marker: RankMarker) -> Part | None:
        """All segments of this rank; `None`, on all ranks, if one of them lacks bytes in every copy. Collective.

        Args:
            marker: what `marker` returned.
        """
        assemblies = [Assembly(entry, self._copies) for entry in marker.segments]
        self._broken = "" if assemblies else "it has no segments"
        with ThreadPoolExecutor(NUM_READERS, thread_name_prefix="moe-ckpt-restore") as pool:
            while self._round(assemblies, pool):
                pass
        if self._rounds.reasons:
            return None
        return Part(
            marker=marker,
            segments=[assembly.buffer for assembly in assemblies],
            layouts=[assembly.layout for assembly in assemblies if assembly.layout is not None],
            nbytes=dict(sum((assembly.supplied for assembly in assemblies), Counter[Copy]())),
        )

    # -- a round

    def _round(self, assemblies: Sequence[Assembly], pool: ThreadPoolExecutor) -> bool:
        """Read, send, receive and verify once. Returns whether there was anything to do, on any rank."""
        wanted, lost = self._wanted(assemblies)
        remote = [self._ask(assembly, request) for assembly, request in wanted if request.reader != self._rank]
        asks = self._rounds.begin(remote, busy=bool(wanted), lost=lost)
        if asks is None:
            return False
        local = [(assembly, request) for assembly, request in wanted if request.reader == self._rank]
        reading = [pool.submit(self._read, *each) for each in local]
        if asks:
            self._travel(asks, assemblies)
        for each in reading:
            each.result()
        list(pool.map(self._check, [assembly for assembly in assemblies if not assembly.done]))
        self._log_complaints(assemblies)
        return True

    @property
    def _rank(self) -> int:
        return self._transport.rank

    def _wanted(self, assemblies: Sequence[Assembly]) -> tuple[list[tuple[Assembly, Request]], str]:
        if self._broken:
            return [], self._broken
        try:
            return [(assembly, request) for assembly in assemblies for request in assembly.requests()], ""
        except Exhausted as error:
            return [], str(error)

    def _ask(self, assembly: Assembly, request: Request) -> Ask:
        return Ask(self._rank, request.reader, request.copy.tier, assembly.entry.step, request.offset, request.nbytes)

    def _read(self, assembly: Assembly, request: Request) -> None:
        out = assembly.view[request.offset : request.end]
        try:
            item = Item(self._version, self._rank, request.copy.tier)
            self._reader.read_into(item, assembly.entry.step, request.offset, out)
        except UNREADABLE as error:
            assembly.buffer[request.offset : request.end].zero_()  # new memory may hold what the heap had there before
            assembly.gone(request.copy, str(error))

    def _check(self, assembly: Assembly) -> None:
        try:
            assembly.check()
        except Corrupt as error:
            self._broken = str(error)

    def _log_complaints(self, assemblies: Sequence[Assembly]) -> None:
        for assembly in assemblies:
            for complaint in assembly.complaints:
                log.error("%s: %s; another copy is tried", self._version, complaint)
            assembly.complaints.clear()

    # -- between ranks

    def _travel(self, asks: Sequence[Ask], assemblies: Sequence[Assembly]) -> None:
        """Send and receive what all ranks asked for; learn which of it could not be read. Collective."""
        by_step = {assembly.entry.step: assembly for assembly in assemblies}
        failures: dict[Ask, str] = {}
        arrived: Callable[[], None] | None = None
        for turn in turns(asks, self._rank, self._chunk_nbytes):
            sends = [(ask.receiver, memoryview(self._bytes_for(ask, failures))) for ask in turn.sends]
            if arrived is not None:
                arrived()  # while it was under way, the next chunks were read
            arrived = self._transport.transfer(sends, _places(turn, by_step))
        if arrived is not None:
            arrived()
        told = self._transport.gather_values([[ask.receiver, ask.tier, ask.step, why] for ask, why in failures.items()])
        for reader, rows in enumerate(told):
            self._hear(reader, rows, by_step)

    def _bytes_for(self, ask: Ask, failures: dict[Ask, str]) -> bytearray:
        """What another rank asked for; if it cannot be read, as many other bytes: the receiver waits for them."""
        chunk = bytearray(ask.nbytes)
        try:
            item = Item(self._version, ask.receiver, ask.tier)
            self._reader.read_into(item, ask.step, ask.offset, memoryview(chunk))
        except UNREADABLE as error:
            failures[ask] = str(error)
        return chunk

    def _hear(self, reader: int, rows: object, by_step: dict[int, Assembly]) -> None:
        assert isinstance(rows, list)
        for receiver, tier, step, why in rows:
            if receiver == self._rank:
                copy = next(each for each in self._copies if each.tier == tier and reader in each.readers)
                by_step[step].gone(copy, f"{why} (on rank {reader})")


def _places(turn: Turn, by_step: dict[int, Assembly]) -> list[tuple[int, memoryview]]:
    return [(ask.reader, by_step[ask.step].view[ask.offset : ask.offset + ask.nbytes]) for ask in turn.receives]
