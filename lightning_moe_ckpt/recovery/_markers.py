"""Bringing every rank the marker over its part of a version, which says what its segments are and every digest."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

from lightning_moe_ckpt.errors import Corrupt
from lightning_moe_ckpt.recovery._assembly import described
from lightning_moe_ckpt.recovery._inventory import Copy, Item, Version
from lightning_moe_ckpt.recovery._reader import UNREADABLE, Reader
from lightning_moe_ckpt.recovery._rounds import Rounds
from lightning_moe_ckpt.recovery._schedule import Ask
from lightning_moe_ckpt.storage import RankMarker, digest_of

log = logging.getLogger(__name__)


class MarkerSearch:
    """This rank's marker, from the cheapest copy that has it whole.

    Args:
        rounds: of this attempt.
        reader: of what this rank reaches.
        version: what is being brought.
        copies: of this rank's part, cheapest first.
        digest: what a manifest says of the marker, if there is one.
    """

    def __init__(
        self, rounds: Rounds, reader: Reader, version: Version, copies: Sequence[Copy], digest: str | None
    ) -> None:
        self._rounds, self._reader, self._version = rounds, reader, version
        self._rank = rounds.transport.rank
        self._left, self._digest = list(copies), digest
        self._found: RankMarker | None = None
        self._complaints: list[str] = []

    def run(self) -> RankMarker | None:
        """Search on all ranks. Collective.

        Returns:
            `None`, on all ranks, if one found no good marker, or markers of different ranks contradict each other.
        """
        while (asks := self._begin_round()) is not None:
            answers = self._swap(asks)
            if self._found is None and self._left:
                self._accept(self._left.pop(0), answers)
        if self._rounds.reasons or self._found is None:
            return None
        agreed = self._rounds.all_equal(_common(self._found), "its marker is not of the same generation as rank 0's")
        return self._found if agreed else None

    def _begin_round(self) -> list[Ask] | None:
        while self._found is None and self._left and self._left[0].source != "peer":
            self._read(self._left.pop(0))
        asks = []
        if self._found is None and self._left:
            copy = self._left[0]
            asks = [Ask(self._rank, copy.readers[0], copy.tier, 0, 0, 0)]
        lost = ""
        if self._found is None and not self._left:
            lost = f"its marker is nowhere as it was written: {', '.join(self._complaints)}"
        return self._rounds.begin(asks, busy=bool(asks), lost=lost)

    def _read(self, copy: Copy) -> None:
        try:
            marker = self._reader.marker(Item(self._version, self._rank, copy.tier))
            self._found = self._checked(marker)
        except UNREADABLE as error:
            self._complain(copy, str(error))

    def _accept(self, copy: Copy, answer: bytes) -> None:
        if not answer:
            self._complain(copy, "could not be read there")
            return
        try:
            self._found = self._checked(RankMarker.from_bytes(answer, f"marker of {described(copy)}"))
        except Corrupt as error:
            self._complain(copy, str(error))

    def _complain(self, copy: Copy, reason: str) -> None:
        self._complaints.append(f"{described(copy)} ({reason})")
        log.error("%s, marker from %s: %s; another copy is tried", self._version, described(copy), reason)

    def _checked(self, marker: RankMarker) -> RankMarker:
        """The marker, if it is that of this rank and version, and the one that was committed, if one was."""
        found = (marker.generation, marker.plan_hash, marker.rank)
        if found != (self._version.generation, self._version.plan_hash, self._rank):
            raise Corrupt(f"is of rank {marker.rank}, {marker.generation}, plan {marker.plan_hash[:8]}.")
        if self._digest is not None and digest_of(marker.to_bytes()) != self._digest:
            raise Corrupt("is not the marker that was committed.")
        return marker

    def _swap(self, asks: Sequence[Ask]) -> bytes:
        """Send what others ask for; what this rank asked for, empty if it did not or could not be given it. Collective."""
        transport = self._rounds.transport
        answers = {ask.receiver: self._answer(ask) for ask in asks if ask.reader == self._rank}
        sizes = transport.gather_values([[receiver, len(answer)] for receiver, answer in answers.items()])
        received = {
            ask.reader: bytearray(_size_for(sizes[ask.reader], self._rank))
            for ask in asks
            if ask.receiver == self._rank
        }
        wait = transport.transfer(
            [(receiver, memoryview(answer)) for receiver, answer in answers.items() if answer],
            [(reader, memoryview(buffer)) for reader, buffer in received.items() if buffer],
        )
        wait()
        return b"".join(bytes(buffer) for buffer in received.values())

    def _answer(self, ask: Ask) -> bytes:
        try:
            return self._reader.marker(Item(self._version, ask.receiver, ask.tier)).to_bytes()
        except UNREADABLE as error:
            log.error("%s, marker of rank %d kept here: %s", self._version, ask.receiver, error)
            return b""


def _size_for(sizes: object, receiver: int) -> int:
    assert isinstance(sizes, list)
    return next((nbytes for rank, nbytes in sizes if rank == receiver), 0)


def _common(marker: RankMarker) -> str:
    """Digest of what the markers of all ranks must say alike."""
    said = [marker.run_id, marker.world_size, marker.plan_hash, list(marker.steps), dict(marker.policy)]
    generation = [marker.generation.step, marker.generation.epoch]
    return digest_of(json.dumps([said, generation], sort_keys=True).encode())
