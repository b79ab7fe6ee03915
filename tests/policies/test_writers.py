"""Every part of a record has exactly one writer among its holders, and writers share the bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_moe_ckpt.operators import ParamSlice, RecordKind
from lightning_moe_ckpt.policies import RecordPiece, WrittenPart, assign_writers

Record = tuple[str, RecordKind]


def make(i: int, numel: int, width: int, start: int = 0) -> RecordPiece[Record]:
    piece = ParamSlice(
        fqn=f"p{i}", start=start, stop=start + numel, global_shape=(1000 + numel,), global_start=start + 1000
    )
    return RecordPiece(record=(f"op{i}", RecordKind.FULL), piece=piece, nbytes_per_element=width)


piece_lists = st.lists(
    st.tuples(st.integers(0, 300), st.sampled_from([1, 2, 4, 12]), st.integers(0, 50)), max_size=20
).map(lambda specs: [make(i, *spec) for i, spec in enumerate(specs)])
rank_lists = st.lists(st.integers(0, 64), unique=True, min_size=1, max_size=6).map(sorted)


def loads(pieces: list[RecordPiece[Record]], parts: list[WrittenPart[Record]], ranks: list[int]) -> list[int]:
    width = {p.record: p.nbytes_per_element for p in pieces}
    return [sum(width[p.record] * p.piece.numel for p in parts if p.writer == r) for r in ranks]


@given(piece_lists, rank_lists, st.integers(1, 2000))
def test_parts_cover_each_slice_once(pieces: list[RecordPiece[Record]], ranks: list[int], threshold: int) -> None:
    """In order, with their coordinates, written by holders only."""
    parts = assign_writers(pieces, ranks, split_nbytes=threshold)
    assert {p.writer for p in parts} <= set(ranks)
    for original in pieces:
        own = [p for p in parts if p.record == original.record]
        assert [p.piece.start for p in own] == [original.piece.start, *(p.piece.stop for p in own[:-1])]
        assert own[-1].piece.stop == original.piece.stop
        assert all(p.piece.global_start - p.piece.start == 1000 for p in own)
        if original.piece.numel * original.nbytes_per_element < threshold:
            assert len(own) == 1
    order = [p.record for p in parts]
    assert order == sorted(order, key=[p.record for p in pieces].index)


@given(piece_lists, rank_lists, st.integers(1, 2000))
def test_loads_are_balanced(pieces: list[RecordPiece[Record]], ranks: list[int], threshold: int) -> None:
    """No two holders differ by more than the largest slice left whole, and one element per slice cut."""
    parts = assign_writers(pieces, ranks, split_nbytes=threshold)
    per_rank = loads(pieces, parts, ranks)
    sizes = [p.piece.numel * p.nbytes_per_element for p in pieces]
    whole = max((s for s in sizes if s < threshold), default=0)
    slack = sum(p.nbytes_per_element for p, s in zip(pieces, sizes, strict=True) if s >= threshold)
    assert max(per_rank) - min(per_rank) <= whole + slack


@given(piece_lists, rank_lists)
def test_every_holder_computes_the_same(pieces: list[RecordPiece[Record]], ranks: list[int]) -> None:
    """There is no exchange: the assignment is a pure function."""
    assert assign_writers(pieces, ranks) == assign_writers(list(pieces), list(ranks))


def test_large_slices_are_cut_equally() -> None:
    """64 KiB or more, one interval per holder."""
    pieces = [make(0, 16 * 1024 + 1, 4), make(1, 1000, 4)]
    parts = assign_writers(pieces, [1, 3, 5])
    assert [(p.writer, p.piece.numel) for p in parts if p.record[0] == "op0"] == [(1, 5462), (3, 5462), (5, 5461)]
    assert sum(p.record[0] == "op1" for p in parts) == 1
    assert len(assign_writers(pieces, [1])) == 2


def test_small_slices_go_to_the_least_loaded_largest_first() -> None:
    """Ties go to the lower rank."""
    parts = assign_writers([make(i, n, 1) for i, n in enumerate((10, 40, 30, 20, 20))], [0, 1])
    assert [p.writer for p in parts] == [1, 0, 1, 1, 0]


def test_fewer_elements_than_holders() -> None:
    """Some holders write nothing of it."""
    parts = assign_writers([make(0, 2, 40_000)], [0, 1, 2])
    assert [(p.writer, p.piece.numel) for p in parts] == [(0, 1), (1, 1)]


def test_someone_must_hold_it() -> None:
    """Else nobody would write it."""
    with pytest.raises(ValueError, match="holders"):
        assign_writers([], [])
