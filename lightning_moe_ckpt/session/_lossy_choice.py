"""How a lossy policy chooses, as far as planning windows goes: by numbers of experts, which faults raise, or by bytes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Protocol

from torch import Tensor
from typing_extensions import override

from lightning_moe_ckpt.policies import (
    MAX_GENERATIONS,
    Accounting,
    DynamicK,
    ExpertLayout,
    PartialPolicy,
    Selection,
    SelectivePolicy,
)
from lightning_moe_ckpt.session._lossy_budgets import Budgets
from lightning_moe_ckpt.session._peers import PeerRoom

log = logging.getLogger(__name__)

_IN_FLIGHT = 4
"""Generations of which a journal says that they are under way, over all tiers, roughly."""


class ExpertChoice(Protocol):
    """Chooses the experts of each generation; equal on all ranks."""

    @property
    def k(self) -> int | None:
        """Experts per layer that go to storage at first, where they are counted."""

    @property
    def is_ready(self) -> bool:
        """Whether a first choice can be made; the same on all ranks."""

    def first(self) -> list[int]:
        """What this rank tells the others before the first choice of this life."""

    def stepped(self) -> None:
        """A step has ended."""

    def forward_ends(self) -> None:
        """The optimizer is about to step."""

    def select(self, index: int, accounting: Accounting, again: Collection[int] = ()) -> Selection:
        """The experts of generation `index`, those at the places `again` before all others; from any thread."""

    def generations_kept(self, accounting: Accounting) -> int:
        """Generations that memory keeps: together they hold every expert, if so many can."""

    @property
    def reserve_nbytes(self) -> int:
        """Bytes of this rank's segment that later generations may need, as far as that is known."""

    @property
    def budget_nbytes(self) -> dict[str, int]:
        """Bytes of a generation of this rank, where that is what counts."""

    @property
    def rates(self) -> dict[str, float]:
        """Bytes per second that were measured for it."""

    def joined(self, remote_rate: Callable[[], float | None]) -> None:
        """How fast bytes leave the node is told by this."""

    def peer_room(self, accounting: Accounting) -> PeerRoom | None:
        """What holders of copies reserve for this rank; `None` for slots as the ring has them."""

    def num_pending(self, accounting: Accounting) -> int:
        """Experts of generations under way that a journal names, at most, or roughly."""

    def after_restart(self, accounting: Accounting, lost_E: Tensor | None) -> Accounting:
        """What to go on with, after a recovery that lost `lost_E` tokens; `None` if it lost nothing."""

    def inputs(self) -> list[int]:
        """What this rank adds to the exchange at window boundaries."""

    def agreed(self, rows: Sequence[Sequence[int]]) -> None:
        """What all ranks have added."""


class CountedChoice(ExpertChoice):
    """So many experts per layer, more of them after faults.

    Args:
        policy: with the least number.
        dynamic_k: how it grows.
        layouts: of the experts.
    """

    def __init__(self, policy: PartialPolicy, dynamic_k: DynamicK, layouts: Sequence[ExpertLayout]) -> None:
        self._policy, self._dynamic_k, self._layouts = policy, dynamic_k, layouts

    is_ready = True

    @property
    @override
    def budget_nbytes(self) -> dict[str, int]:
        return {}

    @property
    @override
    def rates(self) -> dict[str, float]:
        return {}

    @override
    def joined(self, remote_rate: Callable[[], float | None]) -> None:
        """Numbers are known."""

    @property
    @override
    def k(self) -> int:
        return self._policy.k

    @override
    def first(self) -> list[int]:
        return []

    @override
    def stepped(self) -> None:
        """Numbers are known."""

    @override
    def forward_ends(self) -> None:
        """As above."""

    @override
    def select(self, index: int, accounting: Accounting, again: Collection[int] = ()) -> Selection:
        return self._in_force(accounting).select(index, accounting.tables(self._layouts, again), {})

    @override
    def generations_kept(self, accounting: Accounting) -> int:
        age = self._in_force(accounting).max_age(accounting.tables(self._layouts), {})
        return min(age, MAX_GENERATIONS)

    @property
    @override
    def reserve_nbytes(self) -> int:
        return 0

    @override
    def peer_room(self, accounting: Accounting) -> None:
        return None

    @override
    def num_pending(self, accounting: Accounting) -> int:
        taken = self._in_force(accounting).memory_k * len(self._layouts)
        return taken * self.generations_kept(accounting)

    @override
    def after_restart(self, accounting: Accounting, lost_E: Tensor | None) -> Accounting:
        before = max(accounting.k or 0, self._policy.k)
        share = 0.0 if lost_E is None else accounting.share(lost_E.clamp(min=0))
        after = before
        if share:
            largest = max(accounting.num_experts)
            after = self._dynamic_k.after_fault(before, plt=accounting.plt, last_loss=share, num_experts=largest)
        budget = self._dynamic_k.plt_budget
        if share and budget is not None and accounting.plt > budget:
            log.warning(
                "PLT is %.4f after a fault, above `plt_budget=%s`: %d of %d tokens are lost",
                *(accounting.plt, budget, int(accounting.lost.sum()), int(accounting.processed.sum())),
            )
        if after != before:
            log.warning("PLT is %.4f after a fault: %d experts per layer instead of %d", accounting.plt, after, before)
        return accounting.with_k(after)

    @override
    def inputs(self) -> list[int]:
        return []

    @override
    def agreed(self, rows: Sequence[Sequence[int]]) -> None:
        """Numbers are known."""

    def _in_force(self, accounting: Accounting) -> PartialPolicy:
        return self._policy.with_k(accounting.k) if accounting.k is not None else self._policy


class BudgetedChoice(ExpertChoice):
    """As many experts as budgets of bytes allow.

    Args:
        policy: chooses within them.
        budgets: in force.
        layouts: of the experts.
    """

    def __init__(self, policy: SelectivePolicy, budgets: Budgets, layouts: Sequence[ExpertLayout]) -> None:
        self._policy, self.budgets, self._layouts = policy, budgets, layouts
        self._kept: int | None = None

    @property
    @override
    def budget_nbytes(self) -> dict[str, int]:
        return self.budgets.nbytes

    @property
    @override
    def rates(self) -> dict[str, float]:
        return self.budgets.rates

    @override
    def joined(self, remote_rate: Callable[[], float | None]) -> None:
        self.budgets.remote_rate = remote_rate

    @property
    @override
    def k(self) -> None:
        return None

    @property
    @override
    def is_ready(self) -> bool:
        return self.budgets.is_ready

    @override
    def first(self) -> list[int]:
        self.budgets.measure()
        return self.budgets.inputs()

    @override
    def stepped(self) -> None:
        self.budgets.clock.stepped()

    @override
    def forward_ends(self) -> None:
        self.budgets.clock.forward_ends()

    @override
    def select(self, index: int, accounting: Accounting, again: Collection[int] = ()) -> Selection:
        return self._policy.select(index, accounting.tables(self._layouts, again), self.budgets.experts)

    @override
    def generations_kept(self, accounting: Accounting) -> int:
        if not self.budgets.experts:
            return MAX_GENERATIONS  # as long as nothing is known
        if self._kept is None:  # the ring is made for this many: what is forced follows it, however budgets change
            age = self._policy.max_age(accounting.tables(self._layouts), self.budgets.experts)
            self._kept = min(age, MAX_GENERATIONS)
            self._policy = replace(self._policy, age_limit=self._kept)
        return self._kept

    @property
    @override
    def reserve_nbytes(self) -> int:
        return self.budgets.reserve_nbytes

    @override
    def peer_room(self, accounting: Accounting) -> PeerRoom:
        wait = self._policy.max_wait(accounting.tables(self._layouts), self.budgets.experts)
        return PeerRoom(slot_nbytes=self.budgets.peer_nbytes, keep=min(wait, MAX_GENERATIONS))

    @override
    def num_pending(self, accounting: Accounting) -> int:
        return _IN_FLIGHT * sum(each.num_experts for each in self._layouts)

    @override
    def after_restart(self, accounting: Accounting, lost_E: Tensor | None) -> Accounting:
        return accounting.with_k(None)

    @override
    def inputs(self) -> list[int]:
        return self.budgets.inputs()

    @override
    def agreed(self, rows: Sequence[Sequence[int]]) -> None:
        self.budgets.agreed(rows)
