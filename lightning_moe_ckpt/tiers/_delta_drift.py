"""Copies whose gradients were rounded on the way: how far they are from their owner's state, and what is said of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from lightning_moe_ckpt.errors import Corrupt
from lightning_moe_ckpt.storage import RankMarker, digest_of


class PartDrift:
    """Of the tensors of one part, block by block: the largest difference, and the largest value."""

    def __init__(self, num_tensors: int) -> None:
        self._differences, self._values = [0.0] * num_tensors, [0.0] * num_tensors

    def add(self, found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
        """A block of each tensor, as it came out and as it is."""
        for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
            self._differences[index] = max(self._differences[index], float((one - other).abs().max()))
            self._values[index] = max(self._values[index], float(other.abs().max()))

    def relative(self) -> list[float]:
        """Of each tensor."""
        pairs = zip(self._differences, self._values, strict=True)
        return [difference / value if value else float(difference > 0) for difference, value in pairs]


@dataclass(frozen=True, slots=True)
class Drift:
    """The largest difference of a tensor's elements relative to its largest element, over all parts."""

    params: float = 0.0
    moments: float = 0.0

    def with_part(self, part: PartDrift) -> Drift:
        """One more part, parameter first."""
        param, *moments = part.relative()
        return Drift(max(self.params, param), max(self.moments, *moments))


def rounded_marker(marker: RankMarker, segment_U8: Tensor, literal: frozenset[str]) -> RankMarker:
    """What a marker has to say of a copy that was rebuilt from rounded gradients.

    Args:
        marker: of the owner, over its own bytes.
        segment_U8: the copy.
        literal: names of the tensors that came as they are.

    Raises:
        Corrupt: one of those is not as the owner's.
    """
    (entry,) = marker.segments
    view, records = segment_U8.numpy().data, []
    for record in entry.records:
        digest = digest_of(view[record.offset : record.offset + record.nbytes])
        if record.name in literal and digest != record.digest:
            raise Corrupt(f"{entry.key}: `{record.name}` did not arrive as its marker says. The next one may.")
        records.append(replace(record, digest=digest))
    if view.nbytes != entry.nbytes:
        raise Corrupt(f"{entry.key}: {view.nbytes} bytes, its marker says {entry.nbytes}. The next one may arrive.")
    return replace(marker, segments=(replace(entry, digest=digest_of(view), records=records),), rounded=True)
