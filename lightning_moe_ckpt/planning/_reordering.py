"""When the order of capture changes, and to what: a function of the run's steps, not of a process's timing.

A look at the order is taken at fixed steps. The exchange that opens a window carries what ranks have held since; each
compares the sum with the popularity the newest plan was made of, and if enough has changed makes the next plan on a
thread of its own. That plan holds from the next window on, whether it takes milliseconds or not: so a run that is
killed and resumed follows the same sequence of plans, though its windows start at other steps.

Source: MoEvement (2024), Sec. 3.5.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.planning._popularity import PopularityMeter, sum_in_order
from lightning_moe_ckpt.policies import Popularity, should_reorder

log = logging.getLogger(__name__)


class Reordering:
    """Decides at window boundaries whether the order is out of date.

    Args:
        config: thresholds.
        meter: popularity on this rank.
    """

    def __init__(self, config: Popularity, meter: PopularityMeter) -> None:
        self._config, self.meter = config, meter
        self._planned: list[float] | None = None
        """Popularity of the newest plan, in force or not."""

    def first(self, exchange: Exchange) -> list[float]:
        """What to make the first plan of this incarnation of: what all ranks have measured, else that of the one before."""
        popularity: list[float] = sum_in_order(exchange.gather_tensor(self.meter.newest().cpu())).tolist()
        if self._planned is None or any(popularity):
            self._planned = popularity
        return self._planned

    def inputs(self) -> list[int]:
        """What this rank adds to the exchange that opens a window: bits of its popularity, usually nothing."""
        values: list[int] = self.meter.take_held().view(torch.int64).flatten().tolist()
        return values

    def agreed(self, rows: Sequence[Sequence[int]]) -> list[float] | None:
        """Take what every rank added, by rank; the popularity of which another plan is due, if one is."""
        due = None
        if rows[0]:
            own = [torch.tensor(list(row), dtype=torch.int64).view(torch.float64) for row in rows]
            for look_E in sum_in_order(own).view(-1, self.meter.num_experts):
                due = look_E.tolist() if self._is_out_of_date(look_E.tolist()) else due
        return due

    def distrust(self, layers: Collection[str]) -> None:
        """Experts of these layers keep their order: their tokens are not counted right."""
        self.meter.distrust(layers)

    def state(self) -> dict[str, Any]:
        """See `PopularityMeter.state`."""
        planned = None if self._planned is None else torch.tensor(self._planned, dtype=torch.float64)
        return {**self.meter.state(), "planned": planned}

    def restore(self, state: Mapping[str, Any], in_force: Sequence[float] | None) -> list[float] | None:
        """Go on from a state.

        Args:
            state: of the boundary that this incarnation starts from.
            in_force: popularity of the plan that it has adopted, if any.

        Returns:
            The popularity of a newer plan, if one was under way.
        """
        if not self.meter.restore(state):
            log.info("popularity is measured otherwise than by the run before: it starts anew")
            return None
        planned: Tensor | None = state["planned"]
        self._planned = None if planned is None else planned.tolist()
        return None if in_force is None or list(in_force) == self._planned else self._planned

    def _is_out_of_date(self, popularity: list[float]) -> bool:
        config = self._config
        if self._planned is not None and not should_reorder(
            self._planned,
            popularity,
            reorder_threshold=config.reorder_threshold,
            reorder_fraction=config.reorder_fraction,
        ):
            return False
        self._planned = popularity
        return True
