"""Policies whose restarts are exact: sparse windows, everything at once every few steps, and differences between.

Each step of a sparse window takes FULL of some operators and COMPUTE of those still to come. A window is planned by
schedule, by length, or by a step's bytes, as given or measured.

Sources: MoEvement (2026), Sec. 3.2-3.5; its baselines, Sec. 5, are CheckFreq (2021) and Gemini (2023). TierCheck
(2026), Sec. 3.2, for differences.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from typing_extensions import override

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt._units import size_text
from lightning_moe_ckpt.operators import OperatorSet
from lightning_moe_ckpt.policies._expert_tables import MEMORY
from lightning_moe_ckpt.policies._plan import Plan
from lightning_moe_ckpt.policies._policy import (
    Budget,
    Chains,
    DifferentialMode,
    Measurement,
    PeriodicPolicy,
    PlanInputs,
    Policy,
)
from lightning_moe_ckpt.policies._popularity import Order, Popularity
from lightning_moe_ckpt.policies._windows import (
    OverBudget,
    PlanItem,
    PlannerName,
    all_names,
    assign_positions,
    plan_for_window,
    plan_window,
    positions,
    split_nbytes,
)

log = rank_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class SparsePolicy(Policy):
    """Arguments as in `SparseCheckpoint`, `None` for `auto`."""

    window: int | None = None
    budget_nbytes: int | None = None
    planner: PlannerName = "packed"
    order: Order = "popularity"
    schedule: tuple[tuple[str, ...], ...] | None = None
    max_window: int = 16
    over_budget: OverBudget = "stall"
    popularity: Popularity | None = None
    """Given if and only if the order depends on it."""
    every_n_steps: int | None = None

    kind = "sparse"
    replays = True

    @property
    @override
    def needs(self) -> frozenset[Measurement]:
        """Also precisions, for COMPUTE, and popularity if plans depend on it."""
        own: set[Measurement] = {"compute_dtypes"} if self.popularity is None else {"compute_dtypes", "popularity"}
        return super().needs | own

    @property
    @override
    def budgets(self) -> Mapping[str, Budget]:
        if self.window is not None or self.schedule is not None:
            return {}
        return {MEMORY: "auto" if self.budget_nbytes is None else self.budget_nbytes}

    @override
    def least_steps(self, num_operators: int) -> int:
        """Return the length of one window, whose steps each take at least one operator, or the user's period."""
        least = min(self.window or 1, num_operators) if self.schedule is None else len(self.schedule)
        return self.every_n_steps or least

    @property
    @override
    def bound(self) -> str:
        if self.every_n_steps is not None:
            return f"every_n_steps={self.every_n_steps}"
        given = self.window if self.schedule is None else len(self.schedule)
        return "" if given is None else f"{'window' if self.schedule is None else 'steps of the schedule'}={given}"

    @override
    def config(self) -> dict[str, Any]:
        config = {**json.loads(json.dumps(asdict(self))), "kind": self.kind}
        del config["every_n_steps"]
        return config

    @override
    def refusal(self, operators: OperatorSet) -> str | None:
        """Return the fault if a schedule does not name every operator of all ranks once; `None` without a fault or schedule."""
        if self.schedule is None:
            return None
        names = all_names(operators)
        times = Counter(name for slot in self.schedule for name in slot)
        missing = [name for name in names if name not in times]
        known = {*names, *all_names(operators.whole or operators)}  # constants are stored once, named or not
        wrong = sorted(name for name, count in times.items() if count > 1 or name not in known)
        if not missing and not wrong:
            return None
        return (
            f"`SparseCheckpoint(schedule=...)` must name every operator once. Not named: {missing[:8] or 'none'}; unknown or "
            f"repeated: {wrong[:8] or 'none'}. `moe-ckpt inspect` shows the names of a run."
        )

    @override
    def due(self, step: int, last: int | None, interval_steps: int) -> bool:
        """Start windows back to back, unless the user or the plan asks for a longer interval."""
        return last is None or step - last >= (self.every_n_steps or interval_steps)

    @override
    def split_nbytes(self, inputs: PlanInputs) -> int:
        budget = inputs.budgets.get(MEMORY)
        return 0 if budget is None else split_nbytes(self._items(inputs), budget)

    @override
    def plan(self, inputs: PlanInputs) -> Plan:
        if self.schedule is not None:
            names = set(all_names(inputs.operators))
            slots = [[name for name in slot if name in names] for slot in self.schedule]
            return Plan.of_slots([slot for slot in slots if slot])
        plan = self._plan(self._items(inputs), inputs.budgets)
        return _thawed_last(assign_positions(plan, inputs.operators, inputs.popularity, by=self.order))

    def _plan(self, items: Sequence[PlanItem], budgets: Mapping[str, int]) -> Plan:
        if self.window is not None:
            return plan_for_window(items, self.window)
        budget, least = budgets[MEMORY], max(item.full_nbytes for item in items)
        if budget < least:
            said = size_text(budget), size_text(least)
            log.warning("a budget of %s is less than a piece of the model; it is %s now", *said, alike=True)
        return plan_window(
            items,
            budget_nbytes=max(budget, least),
            planner=self.planner,
            max_window=self.max_window,
            over_budget=self.over_budget,
        )

    def _items(self, inputs: PlanInputs) -> list[PlanItem]:
        return positions(inputs.operators, inputs.popularity, sizes=inputs.sizes, by=self.order)


def _thawed_last(plan: Plan) -> Plan:
    """Return the plan with thawed parameters in the last step: what user code makes of other weights, as averages, needs all of these."""
    slots = [plan.full(step) for step in range(plan.window)]
    last = dict.fromkeys(name for slot in slots for name in slot if name.partition("#")[0].endswith("/thawed"))
    if not last:
        return plan
    others = [[name for name in slot if name not in last] for slot in slots]
    others[-1] += last
    return Plan.of_slots([slot for slot in others if slot], interval_steps=plan.interval_steps)


@dataclass(frozen=True, kw_only=True)
class DensePolicy(PeriodicPolicy):
    """Everything at multiples of `every_n_steps`."""

    cuts = False
    default_steps = 100
    kind = "dense"


@dataclass(frozen=True, kw_only=True)
class DifferentialPolicy(Policy):
    """A base every `every_n_steps`, and a difference to the step before at every step between."""

    cuts = False
    every_n_steps: int = 64
    batch: int = 8
    mode: DifferentialMode = "lossless"
    error_feedback: bool = False

    kind = "differential"

    @property
    @override
    def chains(self) -> Chains:  # type: ignore[override]
        """Distance and form of bases and differences."""
        return Chains(
            every_n_steps=self.every_n_steps, batch=self.batch, mode=self.mode, error_feedback=self.error_feedback
        )

    @override
    def least_steps(self, num_operators: int) -> int:
        return 1

    @override
    def due(self, step: int, last: int | None, interval_steps: int) -> bool:
        return True
