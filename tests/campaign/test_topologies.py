"""A run goes on with other numbers of ranks and in other layouts, bit for bit as from a whole file of Lightning's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from campaign._campaign import Campaigns
from campaign._topologies import Journey, Layout, Leg, Trip, check_trip, compared, reference
from campaign._training import Checkpointing
from lightning_moe_ckpt.testing import Kill, differences

DENSE = Trip(checkpointing=Checkpointing(policy="dense"))
FIRST, SECOND = 3, 10
"""Steps behind which a run is killed: in the midst of an epoch and at an end of one."""


def ranks(number: int, **options: Any) -> Layout:
    return Layout(ranks=number, **options)


FSDP2_4, FSDP2_3, FSDP2_2 = (ranks(number, sharding="fsdp2") for number in (4, 3, 2))
WAYS: dict[str, tuple[Layout, ...]] = {
    "4 to 2 to 4": (ranks(4), ranks(2), ranks(4)),
    "2 to 1 to 3": (ranks(2), ranks(1), ranks(3)),
    "ep 2 to 1 to 2": (ranks(2, experts=2), ranks(2), ranks(2, experts=2)),
    "ep 4 to 2 of 4": (ranks(4, experts=4), ranks(4, experts=2), ranks(2, experts=2)),
    "pp 2 to 1 to 2": (ranks(2, stages=2), ranks(1), ranks(2, stages=2)),
    "pp 3 to 2": (ranks(3, stages=3), ranks(4, stages=2, experts=2), ranks(2)),
    "fsdp2 4 to 3": (FSDP2_4, FSDP2_3, FSDP2_4),
    "moe to fsdp2": (ranks(2), FSDP2_2, ranks(2)),
    "ep to fsdp2": (ranks(4, experts=2), FSDP2_3, ranks(2, experts=2)),
    "fsdp2 to pp": (FSDP2_2, ranks(2, stages=2), FSDP2_3),
    "zero 3 to 4 to 1": (ranks(3, zero=True), ranks(4, zero=True), ranks(1)),
    "zero with ep": (ranks(4, experts=2, zero=True), ranks(3, zero=True), ranks(2, zero=True, experts=2)),
}


def legs(way: tuple[Layout, ...], *steps: int, settle: float = 10.0) -> list[Leg]:
    """Return a life in each layout; all but the last are killed behind a step, when it is durable."""
    kills = [Kill(phase="forward", step=step, settle=settle) for step in steps or (FIRST, SECOND)]
    return [Leg(layout=layout, kill=kill) for layout, kill in zip(way, [*kills, None], strict=True)]


def check(campaigns: Campaigns, trip: Trip, way: str, **options: Any) -> Journey:
    journey = check_trip(campaigns, trip, *legs(WAYS[way]), **options)
    assert journey.begun == [0, FIRST, SECOND]
    return journey


# -- the reference itself


@pytest.mark.parametrize(
    "layout",
    [ranks(1), ranks(2), ranks(4, experts=2), ranks(2, stages=2), ranks(3, zero=True), FSDP2_3],
    ids=str,
)
def test_the_reference_is_the_uninterrupted_run_where_nothing_changes(campaigns: Campaigns, layout: Layout) -> None:
    """Lightning's file in the midst of an epoch and at its end, and the samples that are left, add up to one run."""
    whole = reference(campaigns, DENSE, [layout], [])
    cut = reference(campaigns, DENSE, [layout] * 4, [0, FIRST, SECOND])
    for rank in range(layout.ranks):
        assert not differences(*[compared(life.end(rank)) for life in (whole, cut)])
        lines = {line["step"]: line for line in whole.records(rank, "train")}
        found = cut.records(rank, "train")
        assert [line["step"] for line in found] == [*range(SECOND + 1, DENSE.steps + 1)]
        assert all(line[key] == lines[line["step"]][key] for line in found for key in ("loss", "data", "lr"))


@pytest.mark.parametrize("way", [way for way, layouts in WAYS.items() if layouts[0] == layouts[-1]])
def test_the_reference_is_near_the_run_where_nothing_changes(campaigns: Campaigns, way: str) -> None:
    """Other orders of sums are all that differs: moments of another parameter would be seen."""
    trip = replace(DENSE, auxiliary=0.0)
    ends = [
        reference(campaigns, trip, *where).end() for where in ((WAYS[way][:1], []), (WAYS[way], [FIRST, SECOND]))
    ]
    for name, value in ends[0].items():
        if isinstance(value, Tensor) and value.is_floating_point():
            assert torch.allclose(value, ends[1][name], atol=1e-6, rtol=1e-4), name


# -- dense


@pytest.mark.parametrize("way", [*WAYS])
def test_dense(campaigns: Campaigns, way: str) -> None:
    check(campaigns, DENSE, way)


@pytest.mark.parametrize("layout", [ranks(1), ranks(2), ranks(4, experts=2), ranks(2, stages=2), ranks(3, zero=True), FSDP2_3], ids=str)
def test_same(campaigns: Campaigns, layout: Layout) -> None:
    check_trip(campaigns, DENSE, *legs((layout,) * 3))
