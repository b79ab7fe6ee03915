"""A model with two layers of experts, as one rank of a world has it; no process but this one is needed."""

from __future__ import annotations

import torch
from torch import nn

from lightning_moe_ckpt.moe import MoELayer
from lightning_moe_ckpt.operators import StateSchema, discover
from lightning_moe_ckpt.parallel import ParallelGroups, set_current_groups
from lightning_moe_ckpt.snapshot import StateView

NUM_EXPERTS = 12


class Model(nn.Module):
    """Two layers of experts between dense ones of unequal size; never run."""

    def __init__(self, num_experts: int = NUM_EXPERTS) -> None:
        super().__init__()
        self.tokens, self.norm, self.head = nn.Embedding(50, 16), nn.LayerNorm(16), nn.Linear(16, 50)
        self.layers = nn.ModuleList(MoELayer(16, 40, num_experts, top_k=1) for _ in range(2))
        self.register_buffer("seen", torch.arange(5))


def rank_of_world(
    rank: int, world_size: int, ep_size: int, num_experts: int = NUM_EXPERTS
) -> tuple[StateView, ParallelGroups]:
    """What one rank would have of the model."""
    groups = ParallelGroups(rank=rank, world_size=world_size, ep_rank=rank % ep_size, ep_size=ep_size)
    set_current_groups(groups)
    model = Model(num_experts)
    schema = StateSchema.of(torch.optim.AdamW(model.parameters()))
    return StateView(model, discover(model, ep_size=ep_size), schema, {}), groups
