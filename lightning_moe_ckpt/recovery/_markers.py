"""Bringing every rank the markers over its parts of versions, which say what its segments are and every digest."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_moe_ckpt.errors import Corrupt
from lightning_moe_ckpt.recovery._assembly import UNREADABLE, described
from lightning_moe_ckpt.recovery._inventory import Item, Replica, Version, is_partial
from lightning_moe_ckpt.recovery._reader import Reader
from lightning_moe_ckpt.recovery._rounds import Rounds
from lightning_moe_ckpt.recovery._schedule import FetchRequest
from lightning_moe_ckpt.storage import MAX_MARKER_NBYTES, RankMarker, digest_of
from lightning_moe_ckpt.tiers import TierName

log = logging.getLogger(__name__)

Which = tuple[Version, TierName | None]
"""A version, and the kind of copies whose marker is wanted, where they may hold different files."""


@dataclass(slots=True)
class _Hunt:
    """For a marker."""

    which: Which
    left: list[Replica]
    """Copies to be asked, cheapest first."""
    found: RankMarker | None = None
    complaints: list[str] = field(default_factory=list)

    @property
    def asks(self) -> bool:
        """Whether another rank has to be asked."""
        return self.found is None and bool(self.left)


class MarkerSearch:
    """This rank's markers, each from the cheapest copy that has it whole.

    Args:
        rounds: of this attempt.
        reader: of what this rank reaches.
        copies: of this rank's part, cheapest first, by what is looked for.
        digests: what manifests say of markers, where there are manifests.
    """

    def __init__(
        self,
        rounds: Rounds,
        reader: Reader,
        copies: Mapping[Which, Sequence[Replica]],
        digests: Mapping[Version, str],
    ) -> None:
        self._rounds, self._reader, self._digests = rounds, reader, digests
        self._rank = rounds.transport.rank
        self._hunts = [_Hunt(which, list(places)) for which, places in copies.items()]

    def run(self, *, required: Collection[Which]) -> dict[Which, RankMarker] | None:
        """Search on all ranks. Collective.

        Args:
            required: of which one must be found; of one version, so that ranks that found theirs can compare.

        Returns:
            What was found; `None`, on all ranks, if one found nothing of what is required, or the markers of different ranks
            contradict each other.
        """
        while (asks := self._begin_round(required)) is not None:
            answers = self._swap(asks)
            for number, hunt in enumerate(self._hunts):
                if hunt.asks:
                    self._accept(hunt, hunt.left.pop(0), answers[number])
        found = {hunt.which: hunt.found for hunt in self._hunts if hunt.found is not None}
        if self._rounds.reasons:
            return None
        if required:
            first = next(found[which] for which in required if which in found)
            reason = "its marker is not of the same generation as rank 0's"
            if not self._rounds.all_equal(_common(first), reason):
                return None
        return found

    def _begin_round(self, required: Collection[Which]) -> list[FetchRequest] | None:
        for hunt in self._hunts:
            while hunt.asks and hunt.left[0].source != "peer":
                self._read(hunt, hunt.left.pop(0))
        asks = [self._ask(number, hunt) for number, hunt in enumerate(self._hunts) if hunt.asks]
        return self._rounds.begin(asks, busy=bool(asks), lost=self._lost(required))

    def _ask(self, number: int, hunt: _Hunt) -> FetchRequest:
        copy = hunt.left[0]
        return FetchRequest(self._rank, copy.readers[0], copy.version, copy.tier, "", 0, 0, number)

    def _lost(self, required: Collection[Which]) -> str:
        hunts = [hunt for hunt in self._hunts if hunt.which in required]
        if not required or any(hunt.found is not None or hunt.left for hunt in hunts):
            return ""
        complaints = [complaint for hunt in hunts for complaint in hunt.complaints]
        return f"its marker is nowhere as it was written: {', '.join(complaints)}"

    def _read(self, hunt: _Hunt, copy: Replica) -> None:
        try:
            marker = self._reader.marker(Item(copy.version, self._rank, copy.tier))
            hunt.found = self._checked(copy, marker)
        except UNREADABLE as error:
            _complain(hunt, copy, str(error))

    def _accept(self, hunt: _Hunt, copy: Replica, answer: bytes) -> None:
        if not answer:
            _complain(hunt, copy, "could not be read there")
            return
        try:
            marker = RankMarker.from_bytes(answer, f"marker of {described(copy)}")
            hunt.found = self._checked(copy, marker)
        except Corrupt as error:
            _complain(hunt, copy, str(error))

    def _checked(self, copy: Replica, marker: RankMarker) -> RankMarker:
        """The marker, if it is that of this rank and version, and the one that was committed, if one was.

        What memory has of a partial generation may be more files than are committed.
        """
        version = copy.version
        found = (marker.generation, marker.plan_hash, marker.rank)
        if found != (version.generation, version.plan_hash, self._rank):
            raise Corrupt(f"is of rank {marker.rank}, {marker.generation}, plan {marker.plan_hash[:8]}.")
        digest = self._digests.get(version)
        if copy.source != "storage" and is_partial(marker.policy):
            digest = None
        if digest is not None and digest_of(marker.to_bytes()) != digest:
            raise Corrupt("is not the marker that was committed.")
        return marker

    def _swap(self, asks: Sequence[FetchRequest]) -> dict[int, bytes]:
        """Send what others ask for; what this rank asked for, empty if it could not be given it, by number. Collective."""
        transport = self._rounds.transport
        answers = [(ask, self._answer(ask)) for ask in asks if ask.reader == self._rank]
        told = transport.gather_values([[ask.receiver, ask.number, len(answer)] for ask, answer in answers])
        sizes = {(receiver, number): nbytes for rows in told for receiver, number, nbytes in _rows(rows)}
        own = [(ask, sizes.get((ask.receiver, ask.number), 0)) for ask in asks if ask.receiver == self._rank]
        if max((nbytes for _, nbytes in own), default=0) > MAX_MARKER_NBYTES:
            raise Corrupt(
                f"another rank announces a marker of more than {MAX_MARKER_NBYTES} bytes. Start again without it."
            )
        received = [(ask, bytearray(nbytes)) for ask, nbytes in own]
        wait = transport.transfer(
            [(ask.receiver, memoryview(answer)) for ask, answer in answers if answer],
            [(ask.reader, memoryview(buffer)) for ask, buffer in received if buffer],
        )
        wait()
        return {ask.number: bytes(buffer) for ask, buffer in received}

    def _answer(self, ask: FetchRequest) -> bytes:
        try:
            return self._reader.marker(Item(ask.version, ask.receiver, ask.tier)).to_bytes()
        except UNREADABLE as error:
            log.error("%s, marker of rank %d kept here: %s", ask.version, ask.receiver, error)
            return b""


def _complain(hunt: _Hunt, copy: Replica, reason: str) -> None:
    hunt.complaints.append(f"{described(copy)} ({reason})")
    log.error("%s, marker from %s: %s; another copy is tried", copy.version, described(copy), reason)


def _rows(rows: object) -> list[tuple[int, int, int]]:
    assert isinstance(rows, list)
    return [(receiver, number, nbytes) for receiver, number, nbytes in rows]


def _common(marker: RankMarker) -> str:
    """Digest of what the markers of all ranks must say alike."""
    said = [marker.run_id, marker.world_size, marker.plan_hash, list(marker.steps), dict(marker.policy)]
    generation = [marker.generation.step, marker.generation.incarnation, marker.generation.nonce]
    return digest_of(json.dumps([said, generation], sort_keys=True).encode())
