"""Give each part of a record exactly one writer among the ranks that hold its bytes, balanced by bytes.

Replicated state is written once, not once per rank. The assignment is a pure function of its arguments, so every holder
computes the same and a reader knows every part's writer.

`assign_writers` shares everything alike. `assign_adaptively` gives more to ranks with less else to write: in a partial
generation, some ranks write more experts than others. Source: PEC (2024), Sec. 3.2, Adaptive Data-Parallel Sharding.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from lightning_moe_ckpt.operators import ParamSlice, RecordKind

SPLIT_NBYTES = 64 * 2**10
"""Least bytes of a slice to be cut between all holders; below, a part costs more than it balances."""

Piece = tuple[str, ParamSlice]
"""Slice of an operator's FULL record, with the operator's name."""

Width = Callable[[str], int]
"""Bytes of a record per element, over all its tensors, by parameter."""

_WORDS = {kind: kind.value for kind in RecordKind}


class Shard(NamedTuple):
    """Part of a record, written by a single rank."""

    operator: str
    kind: RecordKind
    slice: ParamSlice
    writer: int

    @property
    def prefix(self) -> str:
        """Start of this shard's tensor names, in global coordinates."""
        piece = self.slice
        return f"{_WORDS[self.kind]}/{piece.fqn}/{piece.global_start}+{piece.stop - piece.start}{box_text(piece.box)}"


def box_text(box: tuple[tuple[int, ...], tuple[int, ...]] | None) -> str:
    """Return a box as tensors' names have it; empty for none."""
    return "" if box is None else "@{}:{}".format(*(",".join(map(str, each)) for each in box))


def assign_writers(
    pieces: Sequence[Piece], width: Width, holders: Sequence[int], *, split_nbytes: int = SPLIT_NBYTES
) -> list[Shard]:
    """Cut slices, the same list on every holder, and assign writers; `width` returns bytes per element of a parameter.
    Raises `ValueError` if there are no holders: ranks with the same bits of all these slices, ascending.

    Slices of `split_nbytes` or more are cut into equal flat intervals, one per holder. Smaller ones go whole to the
    holder with fewest bytes, largest first. Shards are in the order of `pieces`, those of a slice by ascending
    position; together they cover it once.
    """
    shards: list[Shard] = []
    sizes = [piece.numel * width(piece.fqn) for _, piece in pieces]
    writers = writers_of(sizes, holders, split_nbytes=split_nbytes)
    for (operator, piece), writer in zip(pieces, writers, strict=True):
        shares = cut_among(piece, holders) if writer is None else [(piece, writer)]
        shards += [Shard(operator, RecordKind.FULL, share, rank) for share, rank in shares]
    return shards


def writers_of(
    sizes: Sequence[int], holders: Sequence[int], *, split_nbytes: int = SPLIT_NBYTES
) -> Sequence[int | None]:
    """Return the writer of each slice, given its bytes; `None` for slices that all holders share, see `cut_among`.
    Raises `ValueError` if there are no holders.
    """
    if not holders:
        raise ValueError("`assign_writers(holders=[])` must name at least one rank.")
    if len(holders) == 1:
        return [holders[0]] * len(sizes)
    # Equal intervals load all holders alike, so only the rest needs balancing.
    small = [i for i, nbytes in enumerate(sizes) if nbytes < split_nbytes]
    writers: list[int | None] = [None] * len(sizes)
    for i, writer in zip(small, _balance([sizes[i] for i in small], holders), strict=True):
        writers[i] = writer
    return writers


def cut_among(piece: ParamSlice, holders: Sequence[int]) -> list[tuple[ParamSlice, int]]:
    """Return equal intervals of a slice, each with its writer; as many as there are elements, if these are fewer."""
    return list(zip(_cut(piece, len(holders)), holders, strict=False))


def assign_adaptively(
    pieces: Sequence[Piece],
    width: Width,
    holders: Sequence[int],
    loads: Mapping[int, int],
    *,
    split_nbytes: int = SPLIT_NBYTES,
) -> list[Shard]:
    """Assign like `assign_writers`, but so that ranks write equally much in all: largest first, each to the rank with
    least bytes so far. `loads` are other bytes that each holder writes; 0 for ranks left out.

    Slices larger than a fraction of a rank's mean bytes are first cut into equal parts, of at least `split_nbytes`. So
    the rank that writes most does not exceed the average (or its other bytes) by more than one such part; nor does it
    write more than the busiest rank would with equal shares.
    """
    if not holders:
        raise ValueError("`assign_adaptively(holders=[])` must name at least one rank.")
    equal = assign_writers(pieces, width, holders, split_nbytes=split_nbytes)
    adaptive = _greedily(pieces, width, holders, loads, split_nbytes)
    # If ranks have equally much else to write, equal shares fit to the element.
    return min(equal, adaptive, key=lambda shards: _peak(shards, width, holders, loads))


_PARTS_PER_RANK = 32
"""Least number of cut parts that make up a rank's mean bytes."""


def _greedily(
    pieces: Sequence[Piece], width: Width, holders: Sequence[int], loads: Mapping[int, int], split_nbytes: int
) -> list[Shard]:
    start, nbytes = [loads.get(rank, 0) for rank in holders], [piece.numel * width(piece.fqn) for _, piece in pieces]
    largest = max(split_nbytes, (sum(start) + sum(nbytes)) // len(holders) // _PARTS_PER_RANK, 1)
    several = len(holders) > 1
    cuts = [_cut(piece, -(-n // largest) if several else 1) for (_, piece), n in zip(pieces, nbytes, strict=True)]
    writers = iter(_balance([share.numel * width(share.fqn) for cut in cuts for share in cut], holders, start))
    shards: list[Shard] = []
    for (operator, _), cut in zip(pieces, cuts, strict=True):
        shards += _joined([Shard(operator, RecordKind.FULL, share, next(writers)) for share in cut])
    return shards


def _peak(shards: Sequence[Shard], width: Width, holders: Sequence[int], loads: Mapping[int, int]) -> int:
    """Return the busiest rank's bytes."""
    totals = {rank: loads.get(rank, 0) for rank in holders}
    for shard in shards:
        totals[shard.writer] += shard.slice.numel * width(shard.slice.fqn)
    return max(totals.values())


def _balance(sizes: Sequence[int], holders: Sequence[int], start: Sequence[int] | None = None) -> list[int]:
    """Assign largest first to the least loaded holder; ties go to the earlier item and the lower rank."""
    loads = list(zip(start or [0] * len(holders), holders, strict=True))
    heapq.heapify(loads)
    writers = [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        load, rank = heapq.heappop(loads)
        writers[i] = rank
        heapq.heappush(loads, (load + sizes[i], rank))
    return writers


def _cut(piece: ParamSlice, number: int) -> list[ParamSlice]:
    """Return equal flat intervals, the first ones longer by an element if the division leaves a rest; none is empty."""
    number = max(1, min(number, piece.numel))
    each, longer = divmod(piece.numel, number)
    found, start = [], piece.start
    for i in range(number):
        stop = start + each + (i < longer)
        found.append(replace(piece, start=start, stop=stop, global_start=piece.global_start + start - piece.start))
        start = stop
    return found


def _joined(shards: Sequence[Shard]) -> list[Shard]:
    """Return neighbours with the same writer as one shard."""
    found: list[Shard] = []
    for shard in shards:
        last = found[-1] if found else None
        if last is not None and last.writer == shard.writer:
            found[-1] = last._replace(slice=replace(last.slice, stop=shard.slice.stop))
        else:
            found.append(shard)
    return found
