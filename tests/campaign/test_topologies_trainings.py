"""Everything that a training may do otherwise, and everything that may go wrong on the way, while its number of ranks changes."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from servers._s3 import S3Server

from campaign._campaign import Campaigns
from campaign._topologies import Layout, Trip, check_trip, run_trip
from campaign._training import Checkpointing
from campaign.test_topologies import DENSE, FIRST, FSDP2_2, FSDP2_3, FSDP2_4, SECOND, legs, ranks
from lightning_moe_ckpt.testing import Kill

UP_AND_DOWN = (ranks(4), ranks(2), ranks(3))
SHARDED = (FSDP2_4, FSDP2_3, FSDP2_2)
EXPERTS = (ranks(4, experts=2), ranks(1), ranks(2, experts=2))
STAGES = (ranks(2, stages=2), ranks(3), ranks(2, stages=2))
PIECES = (ranks(3, zero=True), ranks(4, experts=2, zero=True), ranks(2))

TRAININGS: dict[str, tuple[Trip, tuple[tuple[Layout, ...], ...]]] = {
    "accumulated": (
        replace(DENSE, accumulate=2, global_batch=24, samples=120),
        (UP_AND_DOWN, SHARDED, EXPERTS, PIECES),
    ),
    "bf16": (replace(DENSE, precision="bf16-mixed"), (UP_AND_DOWN, SHARDED, EXPERTS, STAGES, PIECES)),
    "by value": (replace(DENSE, clip_algorithm="value", clip=0.02), (UP_AND_DOWN, SHARDED, PIECES)),
    "not clipped": (replace(DENSE, clip=None), (UP_AND_DOWN, SHARDED, STAGES)),
    "frozen": (replace(DENSE, frozen=True), (UP_AND_DOWN, SHARDED, EXPERTS, STAGES, PIECES)),
    "thaws": (replace(DENSE, thaws_at=7), (UP_AND_DOWN, EXPERTS, PIECES)),
    "thawed before": (replace(DENSE, thaws_at=2), (UP_AND_DOWN, EXPERTS, PIECES)),
    "ema": (replace(DENSE, averaged="ema"), (UP_AND_DOWN,)),
    "mean": (replace(DENSE, averaged="mean"), (UP_AND_DOWN,)),
    "batch norm": (replace(DENSE, batch_norm=True), (UP_AND_DOWN, EXPERTS, PIECES)),
    "validated": (replace(DENSE, validated=True), (UP_AND_DOWN, SHARDED, EXPERTS)),
    "sgd": (replace(DENSE, optimizer="sgd"), (UP_AND_DOWN, EXPERTS, PIECES)),
    "amsgrad": (replace(DENSE, optimizer="adamw_amsgrad"), (UP_AND_DOWN, SHARDED, PIECES)),
    "fused": (replace(DENSE, optimizer="adamw_fused", clip=None), (UP_AND_DOWN, EXPERTS)),
    "unfilled last steps": (replace(DENSE, samples=65, epochs=2), (UP_AND_DOWN, EXPERTS)),
    "top 2": (replace(DENSE, top_k=2), (UP_AND_DOWN, EXPERTS)),
}


@pytest.mark.soak
@pytest.mark.parametrize(
    ("training", "way"),
    [
        pytest.param(name, way, id=f"{name}: {', '.join(map(str, way))}")
        for name, (_, ways) in TRAININGS.items()
        for way in ways
    ],
)
def test_trainings(campaigns: Campaigns, training: str, way: tuple[Layout, ...]) -> None:
    journey = check_trip(campaigns, TRAININGS[training][0], *legs(way))
    # A layer that begins to train costs the generations that were under way, whatever the number of ranks.
    assert journey.begun[1:] in ([FIRST, SECOND], *[[FIRST - 1, SECOND]] * (training == "thawed before"))


# -- orders of events


def at(phase: Any, step: int, **options: Any) -> Kill:
    return Kill(phase=phase, step=step, **options)


PATIENT = at("forward", FIRST, settle=10.0)
ORDERS: dict[str, tuple[Kill, ...]] = {
    "at once, and back": (PATIENT, at("batch_start", FIRST)),
    "in the first backward pass": (PATIENT, at("after_backward", FIRST, rank=1)),
    "before the first optimizer step": (PATIENT, at("before_optimizer_step", FIRST)),
    "behind the first step": (PATIENT, at("batch_end", FIRST + 1)),
    "in the second step": (PATIENT, at("forward", FIRST + 1)),
    "in the second step, stored": (PATIENT, at("forward", FIRST + 1, settle=10.0)),
    "before anything is stored": (at("forward", 0), at("forward", FIRST, settle=10.0)),
    "in the first step, stored": (at("forward", 0, settle=10.0), at("forward", FIRST, settle=10.0)),
    "while storage is at work": (at("forward", FIRST), at("forward", SECOND)),
    "in the last step": (at("forward", DENSE.steps - 1, settle=10.0), at("after_backward", DENSE.steps - 1)),
}


@pytest.mark.soak
@pytest.mark.parametrize("policy", ["dense", "differential"])
@pytest.mark.parametrize("order", [*ORDERS])
def test_orders(campaigns: Campaigns, order: str, policy: Any) -> None:
    """4 to 2 to 4 ranks, all on one node, whose memory stays."""
    trip = replace(
        DENSE, checkpointing=Checkpointing(policy=policy, every_n_steps=1 if policy == "dense" else 3, batch=2)
    )
    check_trip(campaigns, trip, *legs((ranks(4), ranks(2), ranks(4)), *ORDERS[order]))


@pytest.mark.soak
@pytest.mark.parametrize("operation", range(0, 24, 3))
def test_killed_while_it_resumes_on_fewer_ranks(campaigns: Campaigns, operation: int) -> None:
    """At an operation of storage, on either rank: the next life finds what the first one stored."""
    during = Kill(phase="storage", operation=operation, rank=operation % 2)
    first, second, last = legs((ranks(4), ranks(2), ranks(4)), PATIENT, during)
    journey = run_trip(campaigns, DENSE, first, second, last)
    assert journey.begun[-1] >= FIRST


@pytest.mark.soak
@pytest.mark.parametrize("to", ["sparse", "differential", "partial"])
def test_another_policy_from_there_on(campaigns: Campaigns, to: Any) -> None:
    other = Checkpointing(policy=to, window=1, every_n_steps=3, k=4)
    first, second, last = legs((ranks(4), ranks(2), ranks(3)))
    check_trip(campaigns, DENSE, first, replace(second, checkpointing=other), last)


@pytest.mark.soak
def test_in_a_bucket(campaigns: Campaigns, moto: S3Server) -> None:
    """Records of four ranks are read by range."""
    url: dict[str, Any] = {"url": moto.url(), "storage_options": tuple(moto.storage_options.items())}
    trip = replace(DENSE, checkpointing=replace(DENSE.checkpointing, **url))
    assert check_trip(campaigns, trip, *legs((ranks(4), ranks(2)))).begun == [0, FIRST]


# -- what is merged, drawn anew and named


def ends_of_epochs(log: str) -> list[dict[str, float]]:
    return [json.loads(each) for each in re.findall(r"at the end of the epoch: (.*)", log)]


def test_metrics_of_all_ranks_are_merged(campaigns: Campaigns) -> None:
    """A metric that counted on four ranks goes on on two: at the end of the epoch it has counted each sample once."""
    trip = replace(DENSE, counted=True)
    journey = check_trip(campaigns, trip, *legs((ranks(4), ranks(2))))
    assert [each["samples"] for each in ends_of_epochs(journey.log)] == [trip.samples] * trip.epochs


@pytest.mark.soak
def test_random_state_is_drawn_anew_by_a_rule(campaigns: Campaigns) -> None:
    """Two runs with dropout that go the same way end alike, and say that they are not the run of one number of ranks."""
    trip = replace(DENSE, dropout=0.2)
    ends = [run_trip(campaigns, trip, *legs((ranks(2), ranks(3)))) for _ in range(2)]
    for rank in range(3):
        one, other = (journey.lives[-1].end(rank) for journey in ends)
        assert {key: str(value) for key, value in one.items()} == {key: str(value) for key, value in other.items()}
    warning = next(line for line in ends[0].log.splitlines() if "WARNING" in line and "random" in line)
    assert "drew apart" in warning
