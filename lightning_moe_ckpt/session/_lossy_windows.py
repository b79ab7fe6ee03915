"""What lossy policies take when: one boundary every so many steps, all of the dense part and some experts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch

from lightning_moe_ckpt.policies import DynamicK, ExpertLayout, PartialPolicy, SelectivePolicy
from lightning_moe_ckpt.session._deltas import Deltas
from lightning_moe_ckpt.session._lossy_budgets import Budgets, ByteBudgets, SlotSizes
from lightning_moe_ckpt.session._lossy_choice import BudgetedChoice, CountedChoice, ExpertChoice


@dataclass(frozen=True, kw_only=True)
class LossyWindows:
    """A generation of one boundary every so many steps, with some experts of each layer."""

    every_n_steps: int
    experts: PartialPolicy | SelectivePolicy
    """Chooses them."""
    dynamic_k: DynamicK = field(default_factory=DynamicK)
    """Whether more of them are chosen after faults, where they are counted."""
    budgets: ByteBudgets = field(default_factory=ByteBudgets)
    """What may be taken, where that is not counted."""
    deltas: Deltas | None = None
    """Whether and how gradients may stand for experts that stay chosen, on their way to other nodes."""
    allow_missing_experts: bool = False
    """Whether experts of which there is no good copy may begin anew, where nothing whole is left."""
    callback: str = "PartialExpertCheckpoint"
    """What the user calls it."""

    measures: bool = False

    @property
    def kind(self) -> Literal["partial", "selective"]:
        """Whether experts are counted, or chosen by bytes."""
        return "partial" if isinstance(self.experts, PartialPolicy) else "selective"

    def choice(
        self, layouts: Sequence[ExpertLayout], sizes: Callable[[], Mapping[str, SlotSizes]], device: torch.device
    ) -> ExpertChoice:
        """How experts are chosen in one life; arguments as in `Budgets`."""
        if isinstance(self.experts, PartialPolicy):
            return CountedChoice(self.experts, self.dynamic_k, layouts)
        budgets = Budgets(
            config=self.budgets, layouts=layouts, sizes=sizes, device=device, every_n_steps=self.every_n_steps
        )
        return BudgetedChoice(self.experts, budgets, layouts)

    def least_steps(self, num_operators: int) -> int:
        """One cadence."""
        return self.every_n_steps

    def config(self) -> dict[str, Any]:
        """What a stored plan says of the policy; the cadence does not change what a generation looks like."""
        config: dict[str, Any] = json.loads(json.dumps(asdict(self.experts)))
        return {"kind": self.kind, **config}

    def check(self, names: Sequence[str]) -> None:
        """Anything goes that has experts, which the planner sees."""

    def due(self, step: int, last: int | None, interval_steps: int) -> bool:
        """At multiples of `every_n_steps`, whatever life this is."""
        return step % self.every_n_steps == 0
