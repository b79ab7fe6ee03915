"""Training in pipeline stages gives what training in one piece gives, and says no where it could not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from strategy._staged import BATCH, Staged, train

CLIP: dict[str, Any] = {"gradient_clip_val": 0.05}


def whole(ranks: list[Any], stages: int, ep_size: int = 1) -> dict[str, Tensor]:
    """Parameters of the whole model, from the first replica of every stage."""
    size = len(ranks) // stages
    found: dict[str, Tensor] = {}
    for stage in range(stages):
        row = ranks[stage * size : stage * size + ep_size]
        for name, parameter in row[0].parameters.items():
            shared = name.rpartition(".")[2] in {"w1", "b1", "w2", "b2"} and ep_size > 1
            found[name] = torch.cat([rank.parameters[name] for rank in row]) if shared else parameter
    return found


@pytest.mark.parametrize(
    ("world_size", "stages", "ep_size", "schedule"), [(2, 2, 1, "1f1b"), (3, 3, 1, "gpipe"), (4, 2, 2, "1f1b")]
)
def test_stages_change_nothing_but_rounding(world_size: int, stages: int, ep_size: int, schedule: str) -> None:
    """Parameters, losses, metrics and norms are those of the whole model; every gate gets gradients on every stage.

    Micro-batches are batches there, over which gradients accumulate: a balancing loss is not linear in its batch.
    """
    replicas = world_size // stages
    options = {"pipeline_parallel": stages, "expert_parallel": ep_size, "micro_batches": 2, "schedule": schedule}
    found = train(world_size, strategy=options, limit_val_batches=2, **CLIP)
    single: dict[str, Any] = {"strategy": {"expert_parallel": ep_size}, "model": lambda: Staged(batch_size=BATCH // 2)}
    wanted = train(replicas, **single, accumulate_grad_batches=2, limit_val_batches=4, **CLIP)
    one_piece = whole(wanted, 1, ep_size)
    cut = whole(found, stages, ep_size)
    assert cut.keys() == one_piece.keys()
    for name, parameter in cut.items():
        torch.testing.assert_close(parameter, one_piece[name], rtol=1e-4, atol=1e-5)
    for position, rank in enumerate(found):
        same = wanted[position % replicas]
        pairs = [2 * torch.stack(same.losses).view(-1, 2).mean(1), torch.stack(same.logged).view(-1, 2).mean(1)]
        torch.testing.assert_close([torch.stack(rank.losses), torch.stack(rank.logged)], pairs, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(rank.norm, same.norm, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(rank.val, same.val, rtol=1e-4, atol=1e-5)
        assert all(rank.gates)
        first = found[position % replicas]
        assert all(map(torch.equal, rank.losses, first.losses))
        assert all(map(torch.equal, rank.logged, first.logged))
        assert rank.norm is not None
        assert first.norm is not None
        assert torch.equal(rank.norm, first.norm)
