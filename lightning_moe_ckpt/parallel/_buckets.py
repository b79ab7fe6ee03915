"""Lay out parameters in one flat vector, and cut it into buckets of equal size, also within a parameter.

Invariant: the layout is a pure function of names and sizes, so all ranks have the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketSlot:
    """The interval `[start, stop)` of one parameter in the flat vector, and the buckets it touches."""

    start: int
    stop: int
    buckets: range


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketLayout:
    """A flat vector of `numel` elements cut into `bucket_numel` pieces; only the last may be shorter."""

    slots: dict[str, BucketSlot]
    """Intervals by parameter name, in the order of the vector."""
    numel: int
    bucket_numel: int

    def interval(self, bucket: int) -> tuple[int, int]:
        """Return first and one past the last element of a bucket."""
        start = bucket * self.bucket_numel
        return start, min(start + self.bucket_numel, self.numel)

    @property
    def num_buckets(self) -> int:
        """Number of buckets."""
        return -(-self.numel // self.bucket_numel)


def plan_buckets(numels: Mapping[str, int], *, bucket_numel: int, multiple: int) -> BucketLayout:
    """Lay out parameters, given by their elements in order of registration, in buckets of `bucket_numel` elements
    before rounding. Bucket sizes, and the padded vector, are multiples of `multiple`, the group's size, so that chunks
    are equal.
    """
    bucket_numel = _round_up(max(bucket_numel, 1), multiple)
    slots: dict[str, BucketSlot] = {}
    start = 0
    for name, numel in reversed(list(numels.items())):
        stop = start + numel
        slots[name] = BucketSlot(start=start, stop=stop, buckets=range(start // bucket_numel, -(-stop // bucket_numel)))
        start = stop
    return BucketLayout(slots=slots, numel=_round_up(start, multiple), bucket_numel=bucket_numel)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
