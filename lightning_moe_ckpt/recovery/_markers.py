"""Bring every rank the markers of its parts of versions, which list the files and every digest."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.errors import Corrupt
from lightning_moe_ckpt.recovery._inventory import UNREADABLE, Item, Reader, Replica, Version
from lightning_moe_ckpt.recovery._transfer import FetchRequest, Rounds
from lightning_moe_ckpt.storage import MAX_MARKER_NBYTES, RankMarker, digest_of
from lightning_moe_ckpt.tiers import TierName, is_differential, is_partial

log = rank_logger(__name__)

Which = tuple[Version, TierName | None]
"""A version, and the tier whose marker is wanted, since tiers may hold different files; `None` for any whole copy."""


@dataclass(slots=True)
class _Sought:
    """A marker that this rank looks for."""

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
    """Search for this rank's markers, each from its cheapest good copy.

    Args:
        rounds: of this attempt.
        reader: of the copies that this rank reaches.
        copies: copies of this rank's part, cheapest first, by wanted marker.
        digests: markers' digests in manifests, if there are manifests.
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
        self._sought = {which: _Sought(which, list(places)) for which, places in copies.items()}

    def run(self, required: Which | None) -> dict[Which, RankMarker] | None:
        """Search on all ranks. Collective.

        Args:
            required: marker that every rank must find, if any.

        Returns:
            The markers found; `None`, on all ranks, if some rank lacks the required marker, or the ranks' markers
            contradict each other.
        """
        while (fetches := self._begin_round(required)) is not None:
            answers = self._exchange(fetches)
            for number, sought in enumerate(self._sought.values()):
                if sought.is_open:
                    self._accept(sought, sought.left.pop(0), answers[number])
        found = {which: sought.found for which, sought in self._sought.items() if sought.found is not None}
        if self._rounds.reasons:
            return None
        reason = "its marker is not of the same generation as rank 0's"
        if required is not None and not self._rounds.all_equal(_common(found[required]), reason):
            return None
        return found

    def _begin_round(self, required: Which | None) -> list[FetchRequest] | None:
        fetches: list[FetchRequest] = []
        for number, sought in enumerate(self._sought.values()):
            while sought.is_open and sought.left[0].source != "peer":
                copy = sought.left.pop(0)
                try:
                    marker = self._reader.marker(Item(copy.version, self._rank, copy.file))
                    sought.found = self._checked(copy, marker)
                except UNREADABLE as error:
                    sought.complain(copy, str(error))
            if sought.is_open:
                copy = sought.left[0]
                fetches.append(FetchRequest(self._rank, copy.readers[0], copy.version, copy.file, number))
        lost = ""
        if required is not None and not self._sought[required].is_open and self._sought[required].found is None:
            lost = f"its marker is nowhere as it was written: {', '.join(self._sought[required].complaints)}"
        return self._rounds.begin(fetches, busy=bool(fetches), lost=lost)

    def _accept(self, sought: _Sought, copy: Replica, answer: bytes) -> None:
        if not answer:
            sought.complain(copy, "could not be read there")
            return
        try:
            sought.found = self._checked(copy, RankMarker.from_bytes(answer, f"marker of {copy}"))
        except Corrupt as error:
            sought.complain(copy, str(error))

    def _checked(self, copy: Replica, marker: RankMarker) -> RankMarker:
        """Return the marker if it belongs to this rank and version, and equals the committed marker, if any. Raises
        `Corrupt`.

        Memory may have more files of a partial generation than are committed, so its digest is not compared.
        """
        version = copy.version
        found = (marker.generation, marker.plan_hash, marker.rank)
        if found != (version.generation, version.plan_hash, self._rank):
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
        said = transport.gather_values([[each.receiver, each.number, len(answer)] for each, answer in answers])
        sizes = {number: nbytes for row in said for receiver, number, nbytes in row if receiver == self._rank}
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
