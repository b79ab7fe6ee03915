"""One slot of a window per step: FULL of its operators, COMPUTE of those whose slot is still to come.

Source: MoEvement (2024), Sec. 3.2-3.5; we differ in packing slots by bytes and in windows that may lie apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_moe_ckpt.operators import Operator
from lightning_moe_ckpt.policies._base import Decision, Plan


@dataclass(frozen=True, kw_only=True)
class SparsePolicy:
    """Carries out one plan, window after window."""

    plan: Plan
    first_step: int
    """Boundary of slot 0 of the first window."""
    every_n_steps: int | None = None
    """Steps from one window's slot 0 to the next one's; `None` for back to back."""

    def __post_init__(self) -> None:
        if self.every_n_steps is not None and self.every_n_steps < self.plan.window:
            raise ValueError(
                f"`SparsePolicy(every_n_steps={self.every_n_steps})` must be at least the window of {self.plan.window}."
            )

    def slot(self, step: int) -> int | None:
        """The slot that boundary `step` takes, or `None` between windows."""
        since = step - self.first_step
        slot = since % (self.every_n_steps or self.plan.window)
        return slot if since >= 0 and slot < self.plan.window else None

    def decide(
        self, step: int, operators: Sequence[Operator], loads: Mapping[str, int], budgets: Mapping[str, int]
    ) -> Decision:
        """See `Policy.decide`; loads and budgets went into the plan.

        Raises:
            ValueError: the plan was made for other operators.
        """
        if {op.name for op in operators} != set(self.plan.names):
            raise ValueError("The plan does not name exactly these operators; plan anew.")
        slot = self.slot(step)
        if slot is None:
            return {}
        return {(name, tier): kind for tier in budgets for name, kind in self.plan.records(slot).items()}
