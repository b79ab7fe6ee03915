"""Join the plans of pipeline stages: each stage plans for itself, and all take the same windows.

A stage's ranks measure and agree among themselves; other stages' budgets and counts do not concern them. A common
window is as long as the longest of a stage. A stage with a shorter plan is dense sooner, and trains on beside replays.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast

from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.parallel import ParallelGroups
from lightning_moe_ckpt.policies import Policy, all_names
from lightning_moe_ckpt.snapshot import PlanRecord, StateView, WindowLayout, dense_plan_of_stages, split_operators


class StagePlans:
    """Plan of this rank's stage among all stages' plans. Construction is collective. The view's operators are not
    split.
    """

    def __init__(self, view: StateView, groups: ParallelGroups, everyone: Exchange) -> None:
        self._view, self._groups, self.everyone = view, groups, everyone
        self.several = groups.num_stages > 1
        """Whether there is more than one stage."""
        view.dense_plan = dense_plan_of_stages(view, groups, everyone)
        self.exchange = Exchange(groups, "stage_control") if self.several else everyone
        """Exchange between this stage's ranks."""
        self._inputs: list[int] = []

    def riding(self, inputs: list[int]) -> list[int]:
        """Return the part of `inputs` that all ranks exchange: all, or nothing with stages, which measure differently."""
        self._inputs = inputs
        return [] if self.several else inputs

    def exchanged(self, rows: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """Return the inputs of every rank of the stage; `rows` are all ranks' exchanged parts. Collective."""
        return self.exchange.gather(self._inputs) if self.several else rows

    def own(self, record: PlanRecord) -> PlanRecord:
        """Return this stage's record from the record of all stages."""
        if not record.stages:
            return record
        view = self._view.replanned(split_operators(self._view, self._groups, record.split_nbytes), {})
        return replace(record, plan=record.plan.restricted(set(all_names(view.operators))), stages=())

    def joined(self, layout: WindowLayout | None, in_force: WindowLayout | None) -> PlanRecord | None:
        """Return the plan of all stages; `None` if no stage has a new plan. Collective. `layout` is this stage's new
        plan, `None` to keep the plan in force; `in_force` that of all stages, `None` before the first.
        """
        if not any(self._told(layout is not None)):
            return None
        if layout is not None:
            record, lacks = layout.record, layout.is_incomplete
        else:
            assert in_force is not None
            record = self.own(in_force.record)
            lacks = bool(in_force.record.stages[self._groups.stage]["incomplete"])
        rows = [cast("list[Any]", each) for each in self._told([record.to_json(), lacks])]
        records = [PlanRecord.from_json(text) for text, _ in rows]
        return PlanRecord.joined(records, [row[1] for row in rows], self._groups.stage)

    def _told(self, own: object) -> list[object]:
        """Return the value of the first rank of each stage. Collective."""
        return self.everyone.gather_values(own)[:: self._groups.stage_size]


def require_plans(policy: Policy, view: StateView, groups: ParallelGroups, exchange: Exchange) -> None:
    """Raise `ConfigurationError`, on all ranks, if the policy cannot plan for one of them. Collective with stages."""
    refusal = policy.refusal(view.operators)
    if groups.num_stages > 1 and getattr(policy, "schedule", None) is not None:
        refusal = (
            "`SparseCheckpoint(schedule=...)` names operators of the whole model, and pipeline stages plan each for itself. "
            "Use `window` or `budget` with them."
        )
    with exchange.raise_together() if groups.num_stages > 1 else nullcontext():
        if refusal is not None:
            raise ConfigurationError(refusal)
