"""When the order of capture changes, and to what: a function of the run's steps, not of a process's timing.

A look at the order is taken at fixed steps. The exchange that opens a window carries what ranks have held since; each
compares the sum with the popularity the newest plan was made of, and if enough has changed makes the next plan on a
thread of its own. That plan holds from the next window on, whether it takes milliseconds or not: so a run that is
killed and resumed follows the same sequence of plans, though its windows start at other steps.

Source: MoEvement (2024), Sec. 3.5.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_moe_ckpt.policies import Popularity, should_reorder
from lightning_moe_ckpt.session._layout import WindowLayout
from lightning_moe_ckpt.session._popularity import PopularityMeter, sum_in_order

log = logging.getLogger(__name__)

Replan = Callable[[list[float]], Callable[[], WindowLayout]]
"""Takes popularity by expert; what it returns makes the plan, on any thread."""


class Succession(Protocol):
    """Plans that follow each other, agreed on by the exchange that opens a window."""

    def inputs(self) -> list[int]:
        """What this rank adds to the exchange; equally many integers on all ranks."""

    def agreed(self, rows: Sequence[Sequence[int]]) -> None:
        """What every rank added, by rank."""

    def take_next(self) -> WindowLayout | None:
        """The plan that holds from this window on, the same on all ranks; `None` for the one in force."""

    def started(self, step: int, layout: WindowLayout) -> None:
        """A window of `layout` begins with boundary `step`."""


class Reordering:
    """Decides at window boundaries whether the order is out of date.

    Args:
        config: thresholds.
        meter: popularity on this rank.
        replan: makes a plan like the one in force in another order.
    """

    def __init__(self, config: Popularity, meter: PopularityMeter, replan: Replan) -> None:
        self._config, self._meter, self._replan = config, meter, replan
        self._planned: list[float] | None = None
        """Popularity of the newest plan, in force or not."""
        self._next: Background | None = None

    def first(self, popularity: list[float]) -> list[float]:
        """What to make the first plan of this life of: `popularity`, or that of the life before if nothing is known yet."""
        if self._planned is None or any(popularity):
            self._planned = popularity
        return self._planned

    def inputs(self) -> list[int]:
        """What this rank adds to the exchange that opens a window: bits of its popularity, usually nothing."""
        values: list[int] = self._meter.take_held().view(torch.int64).flatten().tolist()
        return values

    def agreed(self, rows: Sequence[Sequence[int]]) -> None:
        """What every rank added, by rank."""
        if not rows[0]:
            return
        own = [torch.tensor(list(row), dtype=torch.int64).view(torch.float64) for row in rows]
        for look_E in sum_in_order(own).view(-1, self._meter.num_experts):
            self._look(look_E.tolist())

    def take_next(self) -> WindowLayout | None:
        """The plan that was due to hold from this window on, if there is one; waits for it."""
        background, self._next = self._next, None
        return None if background is None else background.result()

    def forget_next(self) -> None:
        """Records hold more than they did: a plan that was made before does not hold any more."""
        self._next = None

    def started(self, step: int, layout: WindowLayout) -> None:
        """A window begins; plans change only with what is measured."""

    def state(self) -> dict[str, Any]:
        """See `PopularityMeter.state`."""
        planned = None if self._planned is None else torch.tensor(self._planned, dtype=torch.float64)
        return {**self._meter.state(), "planned": planned}

    def restore(self, state: Mapping[str, Any], in_force: Sequence[float] | None) -> None:
        """Go on from a state.

        Args:
            state: of the boundary that this life starts from.
            in_force: popularity of the plan that it has adopted, if any; a newer one was under way if it differs.
        """
        if not self._meter.restore(state):
            log.info("popularity is measured otherwise than by the run before: it starts anew")
            return
        planned: Tensor | None = state["planned"]
        self._planned = None if planned is None else planned.tolist()
        if self._planned is not None and in_force is not None and list(in_force) != self._planned:
            self._next = Background(self._replan(self._planned))

    def _look(self, popularity: list[float]) -> None:
        config = self._config
        if self._planned is not None and not should_reorder(
            self._planned,
            popularity,
            reorder_threshold=config.reorder_threshold,
            reorder_fraction=config.reorder_fraction,
        ):
            return
        self._planned = popularity
        self._next = Background(self._replan(popularity))


class Background:
    """A plan being made on a thread of its own: for thousands of operators that takes a good part of a second."""

    def __init__(self, make: Callable[[], WindowLayout]) -> None:
        self._result: Future[WindowLayout] = Future()
        threading.Thread(target=self._run, args=(make,), name="moe-ckpt-plan", daemon=True).start()

    def _run(self, make: Callable[[], WindowLayout]) -> None:
        try:
            self._result.set_result(make())
        except BaseException as error:  # noqa: BLE001  # thread entry: raised by `result` on the training thread
            self._result.set_exception(error)

    def result(self) -> WindowLayout:
        """The plan; waits for it."""
        return self._result.result()
