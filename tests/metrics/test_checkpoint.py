"""Metrics of checkpoints: equal to sums by hand, at one and three ranks, pickled, moved and reset."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from launcher import run_world
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.goodput import Goodput
from lightning_moe_ckpt.metrics import (
    CapturedPerStep,
    ExpertLoad,
    Generations,
    GoodputShare,
    LoadSkew,
    PersistedPerSecond,
    WindowPosition,
)

RATIOS: list[Callable[[], Metric]] = [CapturedPerStep, PersistedPerSecond]
Updates = list[tuple[int, int]]
UPDATES = st.lists(st.tuples(st.integers(0, 10**12), st.integers(1, 10**6)), min_size=1, max_size=5)


def by_hand(ranks: list[Updates]) -> float:
    """Amounts of all ranks together over the base."""
    amounts = [sum(amount for amount, _ in updates) for updates in ranks]
    base = max(sum(base for _, base in updates) for updates in ranks)
    return sum(amounts) / base


@pytest.mark.parametrize("metric", RATIOS)
@settings(max_examples=20)
@given(updates=UPDATES)
def test_a_ratio_is_the_sum_over_the_sum(metric: Callable[[], Metric], updates: Updates) -> None:
    """Not the mean of ratios; `forward` gives that of its own update and accumulates all the same."""
    updated, forwarded = metric(), metric()
    for amount, base in updates:
        updated.update(amount, base)
        assert forwarded(amount, base).item() == pytest.approx(amount / base)
    assert updated.compute().item() == pytest.approx(by_hand([updates]))
    assert torch.equal(forwarded.compute(), updated.compute())
    updated.reset()
    updated.update(0, 0)
    assert math.isnan(updated.compute().item())
    updated.update(*updates[0])
    assert updated.compute().item() == pytest.approx(updates[0][0] / updates[0][1])


RANKS = [[(7, 2), (1, 3)], [(100, 5)], [(0, 1), (3, 1), (4, 3)]]
"""Three ranks; all have the same base, 5, as steps and wall time do."""


def test_ranks_are_added_up() -> None:
    """At three ranks: the same as by hand on each, and every rank goes on with its own state."""

    def work(rank: int) -> list[tuple[float, float, dict[str, Any]]]:
        results = []
        for make in RATIOS:
            metric = make()
            for amount, base in RANKS[rank]:
                metric.update(amount, base)
            synced = metric.compute().item()
            metric.update(0, 5)  # the result is not cached, and the state is this rank's own again
            results.append((synced, metric.compute().item(), states(metric)))
        return results

    for rank, results in enumerate(run_world(3, work)):
        for synced, longer, own in results:
            assert synced == pytest.approx(by_hand(RANKS))
            assert longer == pytest.approx(by_hand(RANKS) / 2)
            assert own["amount"] == [sum(amount for amount, _ in RANKS[rank])]


def test_shares_of_the_wall_time_add_up_to_one_over_all_ranks() -> None:
    """At three ranks, whose accounts differ a little; the newest account replaces the one before."""

    def work(rank: int) -> tuple[dict[str, float], dict[str, float]]:
        metric = GoodputShare()
        metric.update(Goodput(idle=99.0))
        own = metric(Goodput(productive=6.0 + rank, hooks=2.0 - rank, restore=2.0))
        return own, {name: share.item() for name, share in metric.compute().items()}

    for rank, (own, synced) in enumerate(run_world(3, work)):
        assert own["goodput"].item() == pytest.approx((6 + rank) / 10)  # type: ignore[attr-defined]
        assert synced["goodput"] == synced["goodput/productive"] == pytest.approx(0.7)
        assert synced["goodput/hooks"] == pytest.approx(0.1)
        assert synced["goodput/idle"] == 0
        assert sum(synced.values()) == pytest.approx(1.7)
    empty = GoodputShare()
    empty.update(Goodput())
    assert math.isnan(empty.compute()["goodput"].item())


def test_a_generation_is_as_new_as_on_the_rank_behind() -> None:
    """And a tier in which one rank has none holds none."""
    held = [{"storage": 40, "host": 60}, {"storage": 36, "host": 60, "peer": 50}, {"storage": 40, "host": 57}]

    def work(rank: int) -> tuple[dict[str, int], dict[str, int]]:
        metric = Generations()
        metric.update(61, held[rank])
        synced = {name: int(value) for name, value in metric.compute().items()}
        window = WindowPosition()
        window.update(6, 3)
        return synced, {name: int(value) for name, value in window.compute().items()}

    for synced, window in run_world(3, work):
        assert synced == {
            "generation/host": 57,
            "generation/storage": 36,
            "lag_steps/host": 4,
            "lag_steps/storage": 25,
        }
        assert window == {"window": 6, "position": 3}


def test_the_newest_values_replace_the_older_ones() -> None:
    """Also when a tier loses what it had, as host memory does with its node."""
    generations, window = Generations(["host", "storage"]), WindowPosition()
    generations.update(1, {})
    assert generations.compute() == {}
    generations.update(10, {"host": 9, "storage": 6})
    generations.update(12, {"storage": 6})
    window.update(4, 4)
    window.update(3, 0)
    assert {name: int(value) for name, value in generations.compute().items()} == {
        "generation/storage": 6,
        "lag_steps/storage": 6,
    }
    assert {name: int(value) for name, value in window.compute().items()} == {"window": 3, "position": 0}


FILLED: list[tuple[Callable[[], Metric], tuple[Any, ...]]] = [
    *[(ratio, (10, 4)) for ratio in RATIOS],
    (GoodputShare, (Goodput(productive=3.0, hooks=1.0),)),
    (WindowPosition, (6, 2)),
    (Generations, (9, {"storage": 6})),
    (lambda: ExpertLoad(3), (torch.tensor([1, 2, 3]),)),
    (lambda: LoadSkew(3), (torch.tensor([1, 2, 3]),)),
]


@pytest.mark.parametrize(("make", "update"), FILLED)
def test_a_pickled_metric_goes_on_where_it_was(make: Callable[[], Metric], update: tuple[Any, ...]) -> None:
    """With its state, and with one that was loaded from a persistent `state_dict`."""
    metric = make()
    metric.persistent(True)
    metric.update(*update)
    loaded = make()
    loaded.persistent(True)
    loaded.load_state_dict(metric.state_dict())
    for other in (pickle.loads(pickle.dumps(metric)), metric.clone(), loaded):  # noqa: S301  # our own
        assert states(other) == states(metric)
        other.update(*update)
        metric_twice = metric.clone()
        metric_twice.update(*update)
        assert states(other) == states(metric_twice)


def states(metric: Metric) -> dict[str, list[Any]]:
    return {name: getattr(metric, name).flatten().tolist() for name in metric._defaults}


@pytest.mark.parametrize(("make", "update"), FILLED)
def test_a_metric_moves_with_its_state(make: Callable[[], Metric], update: tuple[Any, ...]) -> None:
    """To a device, where it can be updated and reset; `half` leaves it as exact as it was."""
    metric = make()
    metric.update(*update)
    dtypes = {name: getattr(metric, name).dtype for name in metric._defaults}
    metric.half()
    assert {name: getattr(metric, name).dtype for name in metric._defaults} == dtypes
    metric.to("meta")
    assert {getattr(metric, name).device.type for name in metric._defaults} == {"meta"}
    metric.reset()
    assert {getattr(metric, name).device.type for name in metric._defaults} == {"meta"}
    metric.update(*update)
    assert {getattr(metric, name).device.type for name in metric._defaults} == {"meta"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_metric_counts_the_same_on_a_gpu() -> None:
    """Counts may be on the device already; states come back as they would be here."""
    for make, update in FILLED:
        here, there = make(), make().to("cuda")
        for metric in (here, there):
            metric.update(*(each.to(metric.device) if isinstance(each, Tensor) else each for each in update))
        assert states(here) == states(there)
        assert states(here) == states(there.to("cpu"))


@settings(max_examples=10)
@given(updates=UPDATES)
def test_a_collection_names_every_figure(updates: Updates) -> None:
    """As `self.log_dict` takes them; metrics that share states do not share what they must not."""
    collection = MetricCollection([CapturedPerStep(), PersistedPerSecond()], compute_groups=False)
    for amount, base in updates:
        collection.update(amount, base)
    values = collection.compute()
    assert set(values) == {"CapturedPerStep", "PersistedPerSecond"}
    assert values["CapturedPerStep"].item() == pytest.approx(by_hand([updates]))


def test_impossible_numbers_are_refused() -> None:
    """Quoted with the metric's name."""
    with pytest.raises(ValueError, match=r"CapturedPerStep.update\(nbytes, steps\)` takes no negative number: -1"):
        CapturedPerStep().update(-1, 2)
    with pytest.raises(ValueError, match=r"window=3, position=4"):
        WindowPosition().update(3, 4)
    with pytest.raises(ValueError, match=r"got \['tape'\], the tiers are \['host', 'peer', 'storage'\]"):
        Generations().update(3, {"tape": 1})
    with pytest.raises(ConfigurationError, match=r"Generations\(tiers=\['host', 'host'\]\)"):
        Generations(["host", "host"])
