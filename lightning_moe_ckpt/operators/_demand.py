"""Tokens that a layer with a capacity processes, drops and could take, from the tokens that chose each expert.

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

from lightning_moe_ckpt.operators._taps import TokenCounts, find_indices, in_backward

Share = Literal["processed", "dropped", "capacity"]

Demand = tuple[Tensor, "Tensor | int | None"]
"""Tokens that chose each expert, `[E]`, and the capacity of an expert; `None` if it takes all."""


def add_share(counts: TokenCounts, share: Share, demand: Demand) -> None:
    """Add one share of a forward's demand to `counts`, without waiting for the device."""
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
    """Adds up one share of the demand and capacity in a gate's output."""

    gate: str
    """Name of the module."""
    read: Callable[[Any], Demand]
    """Extracts both from the output."""
    share: Share = "processed"

    def install(self, module: nn.Module, counts: TokenCounts) -> list[RemovableHandle]:
        """Hook the gate's forward."""

        def after(gate: nn.Module, _args: tuple[Any, ...], _kwargs: Mapping[str, Any], out: Any) -> None:
            if gate.training and not in_backward():
                add_share(counts, self.share, self.read(out))

        return [module.get_submodule(self.gate).register_forward_hook(after, with_kwargs=True)]

    def drain(self, module: nn.Module, counts: TokenCounts) -> None:
        """Nothing: the hook has counted."""


@dataclass(frozen=True)
class ChoiceTap:
    """Counts the expert indices that a router emits; one outside `[0, E)` marks a dropped token."""

    router: str
    """Name of the module."""
    limit: str | None = None
    """Name of a module whose `expert_capacity(num_tokens)` returns an expert's capacity; zero means no limit."""
    share: Share = "processed"

    def install(self, module: nn.Module, counts: TokenCounts) -> list[RemovableHandle]:
        """Hook the router's forward."""
        limiting: Any = None if self.limit is None else module.get_submodule(self.limit)

        def after(router: nn.Module, _args: tuple[Any, ...], _kwargs: Mapping[str, Any], out: Any) -> None:
            if not router.training or in_backward():
                return
            idx_TK = find_indices(out)
            if idx_TK is None:
                counts.missed(self.router, "emits no expert indices")
            elif limiting is None:
                with torch.no_grad():
                    counts.add_indices(idx_TK)
            else:
                idx_S = idx_TK.detach().reshape(-1).to(torch.int64)
                demand_E = torch.zeros(counts.num_experts, dtype=torch.int64, device=idx_S.device)
                demand_E.scatter_add_(0, idx_S, torch.ones_like(idx_S))
                capacity = int(limiting.expert_capacity(idx_TK.shape[0]))
                add_share(counts, self.share, (demand_E, capacity or None))

        return [module.get_submodule(self.router).register_forward_hook(after, with_kwargs=True)]

    def drain(self, module: nn.Module, counts: TokenCounts) -> None:
        """Nothing: the hook has counted."""
