"""Measure how far replicas that were rebuilt from rounded gradients are from their owner's state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from lightning_moe_ckpt.errors import Corrupt
from lightning_moe_ckpt.storage import RankMarker, digest_of


class PartDrift:
    """Collect, block by block, the largest difference and the largest value of each tensor of one part."""

    def __init__(self, num_tensors: int) -> None:
        self._differences, self._values = [0.0] * num_tensors, [0.0] * num_tensors

    def add(self, found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
        """Add one block of each tensor: as rebuilt, and as the owner has it."""
        for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
            self._differences[index] = max(self._differences[index], float((one - other).abs().max()))
            self._values[index] = max(self._values[index], float(other.abs().max()))

    def relative(self) -> list[float]:
        """Return the largest difference relative to the largest value, by tensor."""
        pairs = zip(self._differences, self._values, strict=True)
        return [difference / value if value else float(difference > 0) for difference, value in pairs]


@dataclass(frozen=True, slots=True)
class Drift:
    """Largest difference of a tensor's elements, relative to its largest element, over all parts."""

    params: float = 0.0
    moments: float = 0.0

    def with_part(self, part: PartDrift) -> Drift:
        """Return the drift with one more part, whose first tensor is the parameter."""
        param, *moments = part.relative()
        return Drift(max(self.params, param), max(self.moments, *moments))


def rounded_marker(marker: RankMarker, segment_U8: Tensor, literal: frozenset[str]) -> RankMarker:
    """Return the marker for a replica that was rebuilt from rounded gradients.

    Args:
        marker: the owner's marker over its own bytes.
        segment_U8: bytes of the replica.
        literal: names of the tensors that were sent whole.

    Raises:
        Corrupt: a tensor that was sent whole differs from the owner's.
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
