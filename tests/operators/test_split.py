"""An operator larger than a budget is cut into pieces that cover it once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_moe_ckpt.operators import (
    MoELayerSpec,
    Operator,
    OperatorSet,
    ParamSlice,
    split,
    stacked_slices,
    whole_slice,
)


def operator(*shapes: tuple[int, ...], first: int = 0) -> Operator:
    slices = []
    for i, shape in enumerate(shapes):
        numel = 1
        for size in shape:
            numel *= size
        at = first * numel
        slices.append(
            ParamSlice(fqn=f"p{i}", start=at, stop=at + numel, global_shape=(first + 1, *shape), global_start=at + 7)
        )
    return Operator(name="op", kind="expert", slices=tuple(slices), layer="l", expert_idx=first)


shapes = st.lists(st.lists(st.integers(1, 6), min_size=0, max_size=3).map(tuple), min_size=1, max_size=4)


@given(shapes, st.integers(0, 3), st.integers(12, 400))
def test_pieces_cover_the_operator_once_within_the_budget(
    shapes: list[tuple[int, ...]], first: int, max_nbytes: int
) -> None:
    """Each piece fits, keeps its coordinates, and nothing is lost or doubled."""
    whole = operator(*shapes, first=first)
    pieces = split(whole, max_nbytes, 12)
    assert all(12 * piece.numel <= max_nbytes for piece in pieces)
    for original in whole.slices:
        parts = [s for piece in pieces for s in piece.slices if s.fqn == original.fqn]
        assert [s.start for s in parts] == [original.start, *(s.stop for s in parts[:-1])]
        assert parts[-1].stop == original.stop
        assert all(s.global_start - s.start == original.global_start - original.start for s in parts)
    if 12 * whole.numel <= max_nbytes:
        assert pieces == [whole]
    else:
        assert [p.name for p in pieces] == [f"op#{i}" for i in range(len(pieces))]
        assert {(p.layer, p.expert_idx, p.kind) for p in pieces} == {("l", first, "expert")}


def test_rows_stay_whole_where_one_fits() -> None:
    """Cuts fall between rows of the last dimension."""
    pieces = split(operator((10, 8)), 20 * 12, 12)
    assert {s.stop % 8 for piece in pieces for s in piece.slices} == {0}
    assert len(pieces) == 5


def test_a_row_larger_than_the_budget_is_torn() -> None:
    """There is no other way."""
    assert [p.numel for p in split(operator((2, 100)), 60 * 12, 12)] == [60, 60, 60, 20]


def test_bytes_per_element_may_differ_by_slice() -> None:
    """An operator can hold parameters with and without optimizer state."""
    pieces = split(operator((4, 4), (4, 4)), 64, lambda s: 12 if s.fqn == "p0" else 4)
    assert [[(s.fqn, s.numel) for s in p.slices] for p in pieces] == [
        [("p0", 4)],
        [("p0", 4)],
        [("p0", 4)],
        [("p0", 4), ("p1", 4)],
        [("p1", 12)],
    ]


def test_a_budget_below_one_element_is_refused() -> None:
    """Nothing could be captured within it."""
    with pytest.raises(ValueError, match="one element of `p0`"):
        split(operator((2, 2)), 11, 12)


def test_what_an_optimizer_updates_together_stays_together() -> None:
    """Whole matrices, or whole parameters; a limit below one is refused."""
    stack = operator((4, 5, 6), (7,))
    assert [[p.numel for p in each.slices] for each in split(stack, 70 * 4, 4, "matrix")] == [[60], [60, 7]]
    assert [[p.numel for p in each.slices] for each in split(stack, 125 * 4, 4, "parameter")] == [[120], [7]]
    with pytest.raises(ValueError, match="cannot hold 30 elements of `p0`"):
        split(stack, 29 * 4, 4, "matrix")


def stacked(*shapes: tuple[int, ...], experts: int = 3) -> OperatorSet:
    """Experts in rows of stacks, and a dense operator."""
    params = {f"p{i}": nn.Parameter(torch.zeros(experts, *shape)) for i, shape in enumerate(shapes)}
    slices = stacked_slices(params, range(experts), experts)
    layer = MoELayerSpec(fqn="l", num_experts=experts, local_expert_ids=(0, 1, 2), experts=slices, router=())
    found = [
        Operator(name=f"l/expert.{i}", kind="expert", slices=each, layer="l", expert_idx=i)
        for i, each in slices.items()
    ]
    dense = Operator(name="d", kind="dense", slices=(whole_slice("d", nn.Parameter(torch.zeros(2))),))
    return OperatorSet(operators=(*found, dense), layers=(layer,), dtypes={})


def test_experts_are_one_operator_if_an_optimizer_updates_several_together() -> None:
    """A stack of matrices falls apart for Muon, a stack of vectors is a matrix."""
    matrices, vectors = stacked((4, 5)), stacked((4, 5), (4,))
    assert matrices.joined("matrix").names == matrices.names
    for joined, sizes in [
        (matrices.joined("parameter"), [60]),
        (vectors.joined("matrix"), [60, 12]),
        (vectors.joined("parameter"), [60, 12]),
    ]:
        assert joined.names == ("l/experts", "d")
        assert [(piece.start, piece.numel) for piece in joined["l/experts"].slices] == [(0, size) for size in sizes]
        assert joined.layers == ()
    assert vectors.joined("element") is vectors
