"""Give each part of a record exactly one writer among the ranks that hold its bytes, balanced by bytes.

Replicated state is written once, not once per rank. The assignment is a pure function of its arguments, so every holder
computes the same and a reader knows every part's writer.

`assign_writers` shares everything alike. `assign_adaptively` gives more to ranks with less else to write: in a partial
generation, some ranks write more experts than others. Source: PEC (2024), Sec. 3.2, Adaptive Data-Parallel Sharding.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from lightning_moe_ckpt.operators import ParamSlice

SPLIT_NBYTES = 64 * 2**10
"""Least bytes of a slice to be cut between all holders; below, a part costs more than it balances."""

RecordId = TypeVar("RecordId", bound=Hashable)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordPiece(Generic[RecordId]):
    """One slice of one record."""

    record: RecordId
    """Key of the record, e.g. `(operator, kind)`."""
    piece: ParamSlice
    nbytes_per_element: int
    """The record's bytes per element of the slice, over all its tensors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenPart(Generic[RecordId]):
    """A part of one record and the rank that writes it."""

    record: RecordId
    piece: ParamSlice
    writer: int


def assign_writers(
    pieces: Sequence[RecordPiece[RecordId]], holders: Sequence[int], *, split_nbytes: int = SPLIT_NBYTES
) -> list[WrittenPart[RecordId]]:
    """Cut slices and assign writers.

    Args:
        pieces: the same list in the same order on every holder.
        holders: ranks that hold the same bits of all these slices, ascending.
        split_nbytes: slices from this size on are cut into equal flat intervals, one per holder. Smaller ones go whole
            to the holder with fewest bytes, largest first.

    Returns:
        Parts in the order of `pieces`, a slice's parts by ascending position; together they cover it once.

    Raises:
        ValueError: there are no holders.
    """
    parts: list[WrittenPart[RecordId]] = []
    writers = writers_of([_nbytes(p) for p in pieces], holders, split_nbytes=split_nbytes)
    for p, writer in zip(pieces, writers, strict=True):
        shares = cut_among(p.piece, holders) if writer is None else [(p.piece, writer)]
        parts += [WrittenPart(record=p.record, piece=s, writer=rank) for s, rank in shares]
    return parts


def writers_of(
    sizes: Sequence[int], holders: Sequence[int], *, split_nbytes: int = SPLIT_NBYTES
) -> Sequence[int | None]:
    """Return the writer of each slice, given its bytes; `None` for slices that all holders share, see `cut_among`.

    Raises:
        ValueError: there are no holders.
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
    pieces: Sequence[RecordPiece[RecordId]],
    holders: Sequence[int],
    loads: Mapping[int, int],
    *,
    split_nbytes: int = SPLIT_NBYTES,
) -> list[WrittenPart[RecordId]]:
    """Assign so that ranks write equally much in all: largest first, each to the rank with least bytes so far.

    Slices larger than a fraction of a rank's mean bytes are first cut into equal parts. So the rank that writes most
    does not exceed the average (or its other bytes) by more than one such part; nor does it write more than the busiest
    rank would with equal shares.

    Args:
        pieces: the same list in the same order on every holder.
        holders: ranks that hold the same bits of all these slices, ascending.
        loads: other bytes that each holder writes; 0 for ranks left out.
        split_nbytes: least bytes of a part that is cut off.

    Returns:
        Parts in the order of `pieces`, a slice's parts by ascending position; together they cover it once.

    Raises:
        ValueError: there are no holders.
    """
    if not holders:
        raise ValueError("`assign_adaptively(holders=[])` must name at least one rank.")
    equal = assign_writers(pieces, holders, split_nbytes=split_nbytes)
    adaptive = _greedily(pieces, holders, loads, split_nbytes)
    # If ranks have equally much else to write, equal shares fit to the element.
    return min(equal, adaptive, key=lambda parts: _peak(pieces, parts, holders, loads))


_PARTS_PER_RANK = 32
"""Least number of cut parts that make up a rank's mean bytes."""


def _greedily(
    pieces: Sequence[RecordPiece[RecordId]], holders: Sequence[int], loads: Mapping[int, int], split_nbytes: int
) -> list[WrittenPart[RecordId]]:
    start = [loads.get(rank, 0) for rank in holders]
    average = (sum(start) + sum(_nbytes(p) for p in pieces)) // len(holders)
    largest = max(split_nbytes, average // _PARTS_PER_RANK, 1)
    cuts = [_cut(p.piece, -(-_nbytes(p) // largest) if len(holders) > 1 else 1) for p in pieces]
    sizes = [s.numel * p.nbytes_per_element for p, cut in zip(pieces, cuts, strict=True) for s in cut]
    writers = iter(_balance(sizes, holders, start))
    parts: list[WrittenPart[RecordId]] = []
    for p, cut in zip(pieces, cuts, strict=True):
        parts += _joined([WrittenPart(record=p.record, piece=s, writer=next(writers)) for s in cut])
    return parts


def _peak(
    pieces: Sequence[RecordPiece[RecordId]],
    parts: Sequence[WrittenPart[RecordId]],
    holders: Sequence[int],
    loads: Mapping[int, int],
) -> int:
    """Return the busiest rank's bytes."""
    width = {(p.record, p.piece.fqn): p.nbytes_per_element for p in pieces}
    totals = {rank: loads.get(rank, 0) for rank in holders}
    for part in parts:
        totals[part.writer] += part.piece.numel * width[part.record, part.piece.fqn]
    return max(totals.values())


def _nbytes(p: RecordPiece[RecordId]) -> int:
    return p.piece.numel * p.nbytes_per_element


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


def _joined(parts: Sequence[WrittenPart[RecordId]]) -> list[WrittenPart[RecordId]]:
    """Return neighbours with the same writer as one part."""
    found: list[WrittenPart[RecordId]] = []
    for part in parts:
        last = found[-1] if found else None
        if last is not None and last.writer == part.writer:
            found[-1] = replace(last, piece=replace(last.piece, stop=part.piece.stop))
        else:
            found.append(part)
    return found
