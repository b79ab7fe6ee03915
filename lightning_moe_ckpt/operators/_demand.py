"""What layers with a capacity process, drop and could take, from how many tokens chose each expert.

An expert with capacity C takes `min(demand, C)` whatever the order in which a library fills it.

Shape suffixes: E all experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_moe_ckpt.operators._taps import TokenCounts, in_backward

Share = Literal["processed", "dropped", "capacity"]

Demand = tuple[Tensor, "Tensor | int | None"]
"""Tokens that chose each expert, `[E]`, and what an expert takes, `None` for all."""


def add_share(counts: TokenCounts, share: Share, demand: Demand) -> None:
    """Add one forward; nothing waits for the device."""
    with torch.no_grad():
        demand_E, capacity = demand[0].detach().to(torch.int64), demand[1]
        if capacity is None:
            capacity = demand_E.sum()
        limit = torch.as_tensor(capacity, dtype=torch.int64, device=demand_E.device)
        kept_E = torch.minimum(demand_E, limit)
        counts.add_sums(
            {"processed": kept_E, "dropped": demand_E - kept_E, "capacity": limit.expand(len(kept_E))}[share]
        )


@dataclass(frozen=True)
class DemandTap:
    """Adds up one share of what a gate's output says of demand and capacity."""

    gate: str
    """Name of the module."""
    read: Callable[[Any], Demand]
    """Finds both in the output."""
    share: Share = "processed"

    def install(self, module: nn.Module, counts: TokenCounts) -> list[RemovableHandle]:
        """Hook the gate's forward."""

        def after(gate: nn.Module, _args: tuple[Any, ...], _kwargs: Mapping[str, Any], out: Any) -> None:
            if gate.training and not in_backward():
                add_share(counts, self.share, self.read(out))

        return [module.get_submodule(self.gate).register_forward_hook(after, with_kwargs=True)]

    def drain(self, module: nn.Module, counts: TokenCounts) -> None:
        """Nothing: the hook has counted."""
