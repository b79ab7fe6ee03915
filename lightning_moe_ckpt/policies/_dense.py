"""Everything, every so many steps: the baseline.

Sources: CheckFreq (2021) and Gemini (2023), as far as what is taken and when; recovery is rolling back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_moe_ckpt.operators import Operator, RecordKind
from lightning_moe_ckpt.policies._base import Decision


@dataclass(frozen=True, kw_only=True, slots=True)
class DensePolicy:
    """FULL of all operators, to every tier, every `every_n_steps`."""

    every_n_steps: int = 1
    """Optimizer steps between two captures."""
    first_step: int = 0
    """First boundary that is captured."""

    def __post_init__(self) -> None:
        if self.every_n_steps < 1:
            raise ValueError(f"`DensePolicy(every_n_steps={self.every_n_steps})` must be one or more.")

    def due(self, step: int) -> bool:
        """Whether boundary `step` is captured."""
        return step >= self.first_step and (step - self.first_step) % self.every_n_steps == 0

    def decide(
        self, step: int, operators: Sequence[Operator], loads: Mapping[str, int], budgets: Mapping[str, int]
    ) -> Decision:
        """See `Policy.decide`; loads and budgets do not matter here."""
        if not self.due(step):
            return {}
        return {(op.name, tier): RecordKind.FULL for tier in budgets for op in operators}
