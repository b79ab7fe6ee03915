"""Give each part of a record exactly one writer among the ranks that hold its bytes, balanced by bytes.

Replicated state is written once, not once per rank. The assignment is a pure function of its arguments, so every
holder computes the same and a reader knows who wrote what.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from lightning_moe_ckpt.operators import ParamSlice

SPLIT_NBYTES = 64 * 2**10
"""Slices of this many bytes or more are cut between all holders; below it a part costs more than it balances."""

RecordId = TypeVar("RecordId", bound=Hashable)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordPiece(Generic[RecordId]):
    """One slice of one record."""

    record: RecordId
    """Whatever names the record, e.g. `(operator, kind)`."""
    piece: ParamSlice
    nbytes_per_element: int
    """Bytes of the record per element of the slice, over all its tensors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenPart(Generic[RecordId]):
    """A part of one record and the rank that writes it."""

    record: RecordId
    piece: ParamSlice
    writer: int


def assign_writers(
    pieces: Sequence[RecordPiece[RecordId]], holders: Sequence[int], *, split_nbytes: int = SPLIT_NBYTES
) -> list[WrittenPart[RecordId]]:
    """Cut and assign.

    Args:
        pieces: the same list in the same order on every holder.
        holders: ranks that hold the same bits of all these slices, ascending.
        split_nbytes: slices from this size on are cut into equal flat intervals, one per holder. Smaller ones go
            whole to the holder with fewest bytes, largest first.

    Returns:
        Parts in the order of `pieces`, those of one slice by ascending position; together they cover it once.

    Raises:
        ValueError: there are no holders.
    """
    if not holders:
        raise ValueError("`assign_writers(holders=[])` must name at least one rank.")
    cut = [len(holders) > 1 and _nbytes(p) >= split_nbytes for p in pieces]
    small = [i for i, is_cut in enumerate(cut) if not is_cut]
    # Equal intervals load all holders alike, so only the rest needs balancing.
    writers = _balance([_nbytes(pieces[i]) for i in small], holders)
    by_piece = dict(zip(small, writers, strict=True))
    parts: list[WrittenPart[RecordId]] = []
    for i, p in enumerate(pieces):
        if cut[i]:
            parts += [WrittenPart(record=p.record, piece=s, writer=r) for s, r in _intervals(p.piece, holders)]
        else:
            parts.append(WrittenPart(record=p.record, piece=p.piece, writer=by_piece[i]))
    return parts


def _nbytes(p: RecordPiece[RecordId]) -> int:
    return p.piece.numel * p.nbytes_per_element


def _balance(sizes: Sequence[int], holders: Sequence[int]) -> list[int]:
    """Largest first to the least loaded holder; ties go to the earlier item and the lower rank."""
    loads = [(0, rank) for rank in holders]
    heapq.heapify(loads)
    writers = [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        load, rank = heapq.heappop(loads)
        writers[i] = rank
        heapq.heappush(loads, (load + sizes[i], rank))
    return writers


def _intervals(piece: ParamSlice, holders: Sequence[int]) -> list[tuple[ParamSlice, int]]:
    """Equal flat intervals, the first ones longer by one element where the length does not divide."""
    each, longer = divmod(piece.numel, len(holders))
    found, start = [], piece.start
    for i, rank in enumerate(holders):
        stop = start + each + (i < longer)
        if stop > start:
            moved = piece.global_start + start - piece.start
            found.append((replace(piece, start=start, stop=stop, global_start=moved), rank))
        start = stop
    return found
