"""The baseline: everything at once, every so many steps.

Source: CheckFreq (2021) and Gemini (2023), the baselines of MoEvement (2024), Sec. 5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from lightning_moe_ckpt.policies._plan import Plan
from lightning_moe_ckpt.policies._planner import plan_for_window
from lightning_moe_ckpt.policies._policy import PeriodicPolicy, PlanInputs
from lightning_moe_ckpt.policies._positions import assign_positions, positions


@dataclass(frozen=True, kw_only=True)
class DensePolicy(PeriodicPolicy):
    """Everything at multiples of `every_n_steps`."""

    kind = "dense"

    @override
    def config(self) -> dict[str, Any]:
        """The period does not change what a window looks like."""
        return {"kind": self.kind}

    @override
    def plan(self, inputs: PlanInputs) -> Plan:
        items = positions(inputs.operators, inputs.popularity, sizes=inputs.sizes, by="fixed")
        return assign_positions(plan_for_window(items, 1), inputs.operators, inputs.popularity, by="fixed")
