"""What is taken when, as far as whole windows go: everything every so many steps, or a sparse window after the other."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.policies import Plan, PlanItem, Popularity, WindowPlan, plan_for_window, plan_window

log = logging.getLogger(__name__)


class PlannedWindows(Protocol):
    """What is taken when, as far as whole windows go."""

    @property
    def kind(self) -> Literal["dense", "sparse"]:
        """Whether a window is one slot of everything."""

    @property
    def measures(self) -> bool:
        """Whether a plan needs measured budgets."""

    def least_steps(self, num_operators: int) -> int:
        """Steps before the first generation after the start can be complete, as far as is known before a plan."""

    def config(self) -> dict[str, Any]:
        """Identifies the policy; a stored plan is adopted only under an equal one."""

    def check(self, names: Sequence[str]) -> None:
        """Refuse what cannot be planned over operators of these names; called at start."""

    def plan(self, items: Sequence[PlanItem], budget_nbytes: int) -> WindowPlan:
        """Plan a window over `items`."""

    def due(self, step: int, last: int | None, interval_steps: int) -> bool:
        """Whether a window should start at boundary `step`; `last` is where the newest one of this life started."""


@dataclass(frozen=True, kw_only=True)
class DenseWindows:
    """Everything at once, every so many steps."""

    every_n_steps: int

    kind: Literal["dense"] = "dense"
    measures: bool = False

    def least_steps(self, num_operators: int) -> int:
        """One cadence."""
        return self.every_n_steps

    def config(self) -> dict[str, Any]:
        """See `WindowPolicy`; the cadence does not change what a window looks like."""
        return {"kind": self.kind}

    def check(self, names: Sequence[str]) -> None:
        """Anything goes."""

    def plan(self, items: Sequence[PlanItem], budget_nbytes: int) -> WindowPlan:
        """One slot."""
        return plan_for_window(items, 1)

    def due(self, step: int, last: int | None, interval_steps: int) -> bool:
        """At multiples of `every_n_steps`, whatever life this is."""
        return step % self.every_n_steps == 0


@dataclass(frozen=True, kw_only=True)
class SparseWindows:
    """MoEvement's sparse windows; arguments as in `SparseCheckpoint`, `None` for `auto`."""

    window: int | None
    budget_nbytes: int | None
    planner: Literal["packed", "algorithm1"]
    order: Literal["popularity", "fixed", "back_to_front"]
    schedule: tuple[tuple[str, ...], ...] | None
    max_window: int
    over_budget: Literal["stall", "dense"]
    popularity: Popularity | None = None
    """Given if and only if the order depends on it."""

    kind: Literal["sparse"] = "sparse"

    @property
    def measures(self) -> bool:
        """Neither a window nor a budget nor a schedule was given."""
        return self.window is None and self.budget_nbytes is None and self.schedule is None

    def least_steps(self, num_operators: int) -> int:
        """One window; each step of it takes an operator at least."""
        return min(self.window or 1, num_operators) if self.schedule is None else len(self.schedule)

    def config(self) -> dict[str, Any]:
        """See `WindowPolicy`."""
        config: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return config

    def check(self, names: Sequence[str]) -> None:
        """A schedule must name every operator once.

        Raises:
            ConfigurationError: the message names those that it does not, and those that it should not.
        """
        if self.schedule is None:
            return
        times = Counter(name for slot in self.schedule for name in slot)
        missing = [name for name in names if name not in times]
        wrong = sorted(name for name, count in times.items() if count > 1 or name not in set(names))
        if missing or wrong:
            raise ConfigurationError(
                f"`SparseCheckpoint(schedule=...)` must name every operator once. Not named: {missing[:8] or 'none'}; "
                f"unknown or repeated: {wrong[:8] or 'none'}. `moe-ckpt inspect` shows the names of a run."
            )

    def plan(self, items: Sequence[PlanItem], budget_nbytes: int) -> WindowPlan:
        """By schedule, by window, or by budget."""
        if self.schedule is not None:
            return self._by_schedule(items)
        if self.window is not None:
            return plan_for_window(items, self.window)
        if budget_nbytes < (least := max(item.full_nbytes for item in items)):
            log.warning("a budget of %d bytes is less than a piece of the model; it is %d now", budget_nbytes, least)
            budget_nbytes = least
        return plan_window(
            items,
            budget_nbytes=budget_nbytes,
            planner=self.planner,
            max_window=self.max_window,
            over_budget=self.over_budget,
        )

    def due(self, step: int, last: int | None, interval_steps: int) -> bool:
        """Back to back, unless the plan asks for a longer interval."""
        return last is None or step - last >= interval_steps

    def _by_schedule(self, items: Sequence[PlanItem]) -> WindowPlan:
        assert self.schedule is not None
        self.check([item.name for item in items])
        return WindowPlan(
            plan=Plan.of_slots(self.schedule),
            planner=self.planner,
            budget_nbytes=0,
            slot_nbytes=tuple(0 for _ in self.schedule),
        )
