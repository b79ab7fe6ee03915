"""Metrics of lost tokens show what was last told, in every process the same, also after a restart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.metrics import ExpertsTaken, ExpertTokens, MoementaryLostTokens, PortionOfLostTokens

LOST, PROCESSED, UNSAVED = (torch.tensor(row) for row in ([1, 0, 4, 5], [10, 10, 30, 50], [7, 8, 9, 0]))


def told() -> list[tuple[Metric, Any]]:
    """Every metric, updated twice, with what it must show."""
    plt, mlt = PortionOfLostTokens(4), MoementaryLostTokens([2, 2])
    for metric in (plt, mlt):
        metric.update(LOST, PROCESSED + 1)
        metric.update(LOST, PROCESSED)
    tokens, taken = ExpertTokens(4), ExpertsTaken()
    tokens.update(PROCESSED, UNSAVED, LOST)
    taken.update({"memory": 4, "storage": 1})
    shown = {"processed": PROCESSED, "unsaved": UNSAVED, "lost": LOST}
    numbers = {"memory": torch.tensor(4), "storage": torch.tensor(1)}
    by_layer = torch.tensor(1 / 20 + 9 / 80, dtype=torch.float64)
    return [(plt, torch.tensor(0.1, dtype=torch.float64)), (mlt, by_layer), (tokens, shown), (taken, numbers)]


def equal(found: Any, wanted: Any) -> bool:
    if isinstance(found, Tensor):
        return torch.equal(found, wanted)
    return bool(found.keys() == wanted.keys()) and all(torch.equal(found[name], wanted[name]) for name in found)


def test_the_newest_counts() -> None:
    """Totals are not added up: two updates with one run's numbers say what the second one says."""
    for metric, wanted in told():
        assert equal(metric.compute(), wanted), metric


def test_they_survive_in_a_state_dict() -> None:
    """In a `.ckpt`, and in the journal of a generation."""
    for metric, wanted in told():
        arguments = {"PortionOfLostTokens": (4,), "MoementaryLostTokens": ([2, 2],), "ExpertTokens": (4,)}
        fresh = type(metric)(*arguments.get(type(metric).__name__, ()))
        fresh.load_state_dict(metric.state_dict())
        fresh._update_count = 1
        assert equal(fresh.compute(), wanted), metric


def test_nothing_processed_is_nothing_lost() -> None:
    """Zero before the first token, not a division by it."""
    plt, zeros = PortionOfLostTokens(4), torch.zeros(4, dtype=torch.int64)
    plt.update(zeros, zeros)
    assert plt.compute() == 0


def test_wrong_arguments_are_named() -> None:
    """As the caller wrote them."""
    for make in (lambda: PortionOfLostTokens(0), lambda: ExpertTokens(0), lambda: MoementaryLostTokens([2, 0])):
        with pytest.raises(ConfigurationError, match="num_experts="):
            make()
    with pytest.raises(ConfigurationError, match="levels="):
        ExpertsTaken(["memory", "memory"])
    with pytest.raises(ValueError, match=r"`lost` as int64 of shape \[4\], got torch.float32 of shape \[3\]"):
        PortionOfLostTokens(4).update(torch.zeros(3), PROCESSED)
    with pytest.raises(ValueError, match="the levels are"):
        ExpertsTaken().update({"memory": 1})
