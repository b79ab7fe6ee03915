"""Every part of a record has exactly one writer among its holders, and writers share the bytes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_moe_ckpt.operators import ParamSlice, RecordKind
from lightning_moe_ckpt.policies import Shard, assign_adaptively, assign_writers

Piece = tuple[str, ParamSlice]


def make(i: int, numel: int, nbytes_per_element: int, start: int = 0) -> Piece:
    fqn, stop = f"p{i}.{nbytes_per_element}", start + numel
    return f"op{i}", ParamSlice(
        fqn=fqn, start=start, stop=stop, global_shape=(1000 + numel,), global_start=start + 1000
    )


def width(fqn: str) -> int:
    return int(fqn.rpartition(".")[2])


def nbytes(piece: ParamSlice) -> int:
    return piece.numel * width(piece.fqn)


piece_lists = st.lists(
    st.tuples(st.integers(0, 300), st.sampled_from([1, 2, 4, 12]), st.integers(0, 50)), max_size=20
).map(lambda specs: [make(i, *spec) for i, spec in enumerate(specs)])
rank_lists = st.lists(st.integers(0, 64), unique=True, min_size=1, max_size=6).map(sorted)


def loads(shards: list[Shard], ranks: list[int]) -> list[int]:
    return [sum(nbytes(shard.slice) for shard in shards if shard.writer == rank) for rank in ranks]


@given(piece_lists, rank_lists, st.integers(1, 2000))
def test_parts_cover_each_slice_once(pieces: list[Piece], ranks: list[int], threshold: int) -> None:
    """In order, with their coordinates, written by holders only."""
    parts = assign_writers(pieces, width, ranks, split_nbytes=threshold)
    assert {p.writer for p in parts} <= set(ranks)
    for operator, original in pieces:
        own = [p for p in parts if p.operator == operator]
        assert [p.slice.start for p in own] == [original.start, *(p.slice.stop for p in own[:-1])]
        assert own[-1].slice.stop == original.stop
        assert all(p.slice.global_start - p.slice.start == 1000 for p in own)
        if nbytes(original) < threshold:
            assert len(own) == 1
    order = [p.operator for p in parts]
    assert order == sorted(order, key=[operator for operator, _ in pieces].index)


@given(piece_lists, rank_lists, st.integers(1, 2000))
def test_loads_are_balanced(pieces: list[Piece], ranks: list[int], threshold: int) -> None:
    """No two holders differ by more than the largest slice left whole, and one element per slice cut."""
    parts = assign_writers(pieces, width, ranks, split_nbytes=threshold)
    per_rank = loads(parts, ranks)
    sizes = [nbytes(piece) for _, piece in pieces]
    whole = max((s for s in sizes if s < threshold), default=0)
    slack = sum(width(p.fqn) for (_, p), s in zip(pieces, sizes, strict=True) if s >= threshold)
    assert max(per_rank) - min(per_rank) <= whole + slack


@given(piece_lists, rank_lists)
def test_every_holder_computes_the_same(pieces: list[Piece], ranks: list[int]) -> None:
    """There is no exchange: the assignment is a pure function."""
    assert assign_writers(pieces, width, ranks) == assign_writers(list(pieces), width, list(ranks))


def test_large_slices_are_cut_equally() -> None:
    """64 KiB or more, one interval per holder."""
    pieces = [make(0, 16 * 1024 + 1, 4), make(1, 1000, 4)]
    parts = assign_writers(pieces, width, [1, 3, 5])
    assert [(p.writer, p.slice.numel) for p in parts if p.operator == "op0"] == [(1, 5462), (3, 5462), (5, 5461)]
    assert sum(p.operator == "op1" for p in parts) == 1
    assert len(assign_writers(pieces, width, [1])) == 2


def test_small_slices_go_to_the_least_loaded_largest_first() -> None:
    """Ties go to the lower rank."""
    parts = assign_writers([make(i, n, 1) for i, n in enumerate((10, 40, 30, 20, 20))], width, [0, 1])
    assert [p.writer for p in parts] == [1, 0, 1, 1, 0]


def test_fewer_elements_than_holders() -> None:
    """Some holders write nothing of it."""
    parts = assign_writers([make(0, 2, 40_000)], width, [0, 1, 2])
    assert [(p.writer, p.slice.numel) for p in parts] == [(0, 1), (1, 1)]


def test_someone_must_hold_it() -> None:
    """Else nobody would write it."""
    with pytest.raises(ValueError, match="holders"):
        assign_writers([], width, [])


# -- adaptively

load_lists = st.dictionaries(st.integers(0, 64), st.integers(0, 20_000), max_size=6)


@given(piece_lists, rank_lists, load_lists, st.integers(1, 2000))
def test_adaptive_parts_cover_each_slice_once(
    pieces: list[Piece], ranks: list[int], before: dict[int, int], threshold: int
) -> None:
    """In order, with their coordinates, written by holders only; neighbours of one writer are one part."""
    parts = assign_adaptively(pieces, width, ranks, before, split_nbytes=threshold)
    assert {p.writer for p in parts} <= set(ranks)
    for operator, original in pieces:
        own = [p for p in parts if p.operator == operator]
        assert [p.slice.start for p in own] == [original.start, *(p.slice.stop for p in own[:-1])]
        assert own[-1].slice.stop == original.stop
        assert all(p.slice.global_start - p.slice.start == 1000 for p in own)
        assert all(a.writer != b.writer for a, b in pairwise(own))
    assert parts == assign_adaptively(list(pieces), width, list(ranks), dict(before), split_nbytes=threshold)


@given(piece_lists, rank_lists, load_lists, st.integers(1, 2000))
def test_adaptive_loads_are_balanced_with_what_ranks_write_besides(
    pieces: list[Piece], ranks: list[int], before: dict[int, int], threshold: int
) -> None:
    """The peak is at most the average and one part, or what a rank had to write anyway, and never above equal shares'."""
    parts = assign_adaptively(pieces, width, ranks, before, split_nbytes=threshold)
    start = [before.get(rank, 0) for rank in ranks]
    totals = [a + b for a, b in zip(start, loads(parts, ranks), strict=True)]
    equal = loads(assign_writers(pieces, width, ranks, split_nbytes=threshold), ranks)
    assert max(totals) <= max(a + b for a, b in zip(start, equal, strict=True))
    average = sum(totals) / len(ranks)
    widest = max((width(p.fqn) for _, p in pieces), default=0)
    part = max(threshold, average / 32, widest) + widest
    assert max(totals) <= max(average + part, *start)


def test_a_rank_with_experts_gets_less_of_the_rest() -> None:
    """Two ranks, one with an expert as large as a third of the rest: all end with two thirds of it."""
    parts = assign_adaptively([make(0, 300_000, 4)], width, [0, 1], {1: 400_000})
    written = {rank: sum(4 * p.slice.numel for p in parts if p.writer == rank) for rank in (0, 1)}
    assert written[0] == pytest.approx(800_000, abs=64 * 1024)
    assert written[1] == pytest.approx(400_000, abs=64 * 1024)


def test_someone_must_hold_it_adaptively_too() -> None:
    """Else nobody would write it."""
    with pytest.raises(ValueError, match="holders"):
        assign_adaptively([], width, [], {})


def test_names_tell_boxes_apart() -> None:
    """Also of equal intervals; a slice without a box is called as ever."""
    _, piece = make(0, 8, 4)
    boxes = [None, ((0, 0), (4, 2)), ((0, 4), (4, 2)), ((0, 4), (2, 4)), ((0,), (8,))]
    names = [Shard("op0", RecordKind.FULL, replace(piece, box=box), 0).prefix for box in boxes]
    assert names[0] == "full/p0.4/1000+8"
    assert names[2] == "full/p0.4/1000+8@0,4:4,2"
    assert len(set(names)) == len(names)
