"""Bringing every rank its part of one version into memory, from the cheapest copies that turn out to be good.

In rounds, which all ranks take together: each says what it lacks and which rank should send it, or that some bytes of
it are bad in every copy; local copies are read meanwhile; what arrived is verified; what was bad is asked of the next
copy. The version is given up by all as soon as one rank has to, and nobody ever waits for a rank that has gone on.

Every segment has one owner and every record one writer, so no byte is read twice, by whatever rank: what ranks share is
read by its owner and broadcast when it is loaded.

Source: the design, Sec. 6; Gemini (2023) for several peers at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lightning_moe_ckpt.recovery._assembly import Assembly, Place, Wanted
from lightning_moe_ckpt.recovery._carriage import Carriage
from lightning_moe_ckpt.recovery._inventory import Copy, Inventory, Version
from lightning_moe_ckpt.recovery._markers import MarkerSearch
from lightning_moe_ckpt.recovery._reader import Reader
from lightning_moe_ckpt.recovery._rounds import Rounds
from lightning_moe_ckpt.recovery._schedule import CHUNK_NBYTES
from lightning_moe_ckpt.recovery._transport import Transport
from lightning_moe_ckpt.storage import RankMarker, SegmentEntry, SegmentLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One rank's part of a version, verified record by record."""

    marker: RankMarker
    segments: list[torch.Tensor]
    """One uint8 tensor per step, laid out as `layouts` says."""
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
        self._reader, self._version = reader, version
        self._copies = inventory.copies(version, transport.rank)
        self._digests = {} if marker_digest is None else {version: marker_digest}
        self._rounds = Rounds(transport)
        self._carriage = Carriage(self._rounds, reader, str(version), chunk_nbytes)

    @property
    def reasons(self) -> list[str]:
        """Why the version was given up, the same on all ranks."""
        return self._rounds.reasons

    def marker(self) -> RankMarker | None:
        """This rank's marker; `None`, on all ranks, if one of them has none. Collective."""
        search = MarkerSearch(self._rounds, self._reader, {self._version: self._copies}, self._digests)
        found = search.run(required=[self._version])
        return None if found is None else found[self._version]

    def part(self, marker: RankMarker, layouts: Sequence[SegmentLayout]) -> Part | None:
        """All segments of this rank; `None`, on all ranks, if one of them lacks a record in every copy. Collective.

        Args:
            marker: what `marker` returned.
            layouts: where this rank wants the records of each segment, all of them.
        """
        buffers = [torch.empty(layout.nbytes, dtype=torch.uint8) for layout in layouts]
        assemblies = [self._assembly(*each) for each in zip(marker.segments, layouts, buffers, strict=True)]
        if not self._carriage.carry(assemblies, "" if assemblies else "it has no segments"):
            return None
        nbytes = dict(sum((assembly.supplied for assembly in assemblies), Counter[Copy]()))
        return Part(marker=marker, segments=buffers, layouts=list(layouts), nbytes=nbytes)

    def _assembly(self, entry: SegmentEntry, layout: SegmentLayout, buffer: torch.Tensor) -> Assembly:
        layout.write_header(buffer)
        spans = layout.spans
        records = [
            Wanted(r.name, spans[r.name].offset, r.nbytes, r.digest, [Place(c, entry, r.offset) for c in self._copies])
            for r in entry.records
        ]
        return Assembly(f"step {entry.step} of {self._version.generation}", buffer, records, may_be_lost=False)
