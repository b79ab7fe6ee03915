"""From a policy to bytes: what windows look like, when they start, and when they are planned anew.

All inputs of a plan are agreed on first (the smallest budget, popularity over all ranks, the strictest compute
precision), so every rank computes the same plan. The plan is over positions (`policies`), so that expert-parallel
ranks may order their experts differently; each rank then names the operators that take them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lightning_moe_ckpt.native import measure_bandwidth
from lightning_moe_ckpt.operators import ComputeDtypeProbe
from lightning_moe_ckpt.parallel import ParallelGroups
from lightning_moe_ckpt.policies import (
    AUDIENCES,
    Audience,
    Order,
    PlanItem,
    assign_positions,
    positions,
    split_nbytes,
)
from lightning_moe_ckpt.session._count_proof import CountProof
from lightning_moe_ckpt.session._exchange import Exchange
from lightning_moe_ckpt.session._journal import JournalCapacity
from lightning_moe_ckpt.session._lay_out import lay_out, record_nbytes, split_operators
from lightning_moe_ckpt.session._layout import StateView, WindowLayout
from lightning_moe_ckpt.session._plan_record import PlanRecord
from lightning_moe_ckpt.session._popularity import PopularityMeter, sum_in_order
from lightning_moe_ckpt.session._reordering import Reordering
from lightning_moe_ckpt.session._windows import DenseWindows, PlannedWindows, SparseWindows
from lightning_moe_ckpt.session._worker import TierWorker
from lightning_moe_ckpt.storage import BadCopies, GenerationId

log = logging.getLogger(__name__)

MEASURED_STEPS = 3
"""Steps of a life before budgets and compute precisions are known."""

BUDGET_SHARE = 0.8
"""Part of the measured bandwidth that a plan may use; the rest absorbs noise."""

_BANDWIDTH_NBYTES = 16 * 2**20


def dense_layout(view: StateView, groups: ParallelGroups, journal_nbytes: int) -> WindowLayout:
    """One slot of everything, whatever the policy: the first and the last generation of a run."""
    popularity = [0.0] * view.operators.num_experts
    items = _items(view, groups, popularity, "fixed")
    plan = DenseWindows(every_n_steps=1).plan(items, 0)
    record = PlanRecord(
        plan=assign_positions(plan.plan, view.operators, popularity, by="fixed"), config={"kind": "dense"}
    )
    return lay_out(record, view, groups, journal_nbytes)


def dense_nbytes(view: StateView, groups: ParallelGroups) -> int:
    """Bytes that this rank would write of a snapshot of everything, without alignment and journal."""
    return sum(full for full, _ in record_nbytes(view, groups).values())


def log_plan(layout: WindowLayout, dense_nbytes: int, *, again: bool) -> None:
    """Say what a plan comes to.

    Args:
        layout: in force from here on.
        dense_nbytes: bytes of a snapshot of everything.
        again: whether there is such a plan at each generation.
    """
    log.log(
        logging.DEBUG if again else logging.INFO,
        "plan %s: %d segments of at most %.1f MiB (everything: %.1f MiB)",
        layout.record.plan_hash[:8],
        len(layout.steps),
        layout.slot_nbytes / 2**20,
        dense_nbytes / 2**20,
    )


class Planner:
    """Decides when a new plan is due and makes it.

    Args:
        policy: the kind of windows.
        view: live state, operators not split.
        groups: this rank's place.
        exchange: control exchange.
        autocast_dtype: low precision under autocast, `None` without.
        module: probed for the precision in which parameters are consumed.
        may_probe: whether the first steps may be watched by what later ones are not. If not, parameters are stored in
            the precision that they have, and counts of tokens are believed.
    """

    def __init__(
        self,
        policy: PlannedWindows,
        *,
        view: StateView,
        groups: ParallelGroups,
        exchange: Exchange,
        autocast_dtype: torch.dtype | None,
        module: torch.nn.Module,
        may_probe: bool = True,
    ) -> None:
        self._policy, self._view, self._groups = policy, view, groups
        self._exchange = exchange
        low = autocast_dtype if policy.kind == "sparse" and may_probe else None
        self._probe = Probe(module, low) if low is not None else None
        self._current: WindowLayout | None = None
        self._meter, self.reordering = self._popularity(module)
        proves = may_probe and self._meter is not None and self._meter.counts_tokens
        self._proof = CountProof(view.operators, module, exchange, required=False) if proves else None
        self._journal = JournalCapacity()
        self._steps = 0
        self._step_seconds: list[float] = []
        self._boundary_at: float | None = None

    generations_kept = 1
    """Generations that memory keeps."""
    peer_audiences: frozenset[Audience] = frozenset(AUDIENCES)
    """Files that copies on other nodes have."""

    def peer_room(self) -> None:
        """Holders of copies reserve slots as the ring has them."""

    def deltas(self) -> None:
        """Generations are sent to other nodes as they are."""

    def joined(self, workers: Sequence[TierWorker]) -> None:
        """Plans do not depend on them."""

    @property
    def interval_steps(self) -> int:
        """Steps from one window's start to the next."""
        return self._current.record.plan.interval_steps if self._current is not None else 1

    def adopt(self, layout: WindowLayout) -> None:
        """`layout` is in force."""
        self._current = layout

    def forget_layout(self) -> None:
        """Records hold more than they did: a plan is due as in the first steps."""
        self._current = None
        if self.reordering is not None:
            self.reordering.forget_next()

    def begin(self) -> None:
        """Start measuring popularity."""
        if self._meter is not None:
            self._meter.install()

    def stepped(self, step: int) -> None:
        """Optimizer step `step` has ended."""
        if self._meter is not None:
            self._meter.stepped(step)

    def state(self) -> dict[str, Any]:
        """What the journal keeps at a boundary."""
        return {"popularity": None if self.reordering is None else self.reordering.state()}

    def restore(self, outcome: Mapping[str, Any]) -> None:
        """Go on from the state of the boundary that this life starts from; call after `adopt`."""
        state = outcome.get("popularity")
        if self.reordering is not None and state is not None:
            in_force = None if self._current is None else self._current.record.popularity
            self.reordering.restore(state, in_force)

    def accepts(self, layout: WindowLayout) -> bool:
        """Whether a restored plan is what this policy would go on with."""
        return bool(layout.record.config == self._policy.config())

    @property
    def journal_nbytes(self) -> int:
        """Capacity of a journal record, from the journals seen so far."""
        return self._journal.nbytes

    def journal_needs(self, nbytes: int) -> None:
        """A journal of `nbytes` was seen; records reserve twice that."""
        self._journal.needs(nbytes)

    def journal_had(self, nbytes: int) -> None:
        """The life before reserved `nbytes`."""
        self._journal.had(nbytes)

    def forward_begins(self, *, replaying: bool) -> None:
        """A batch is about to run forward and backward."""
        if self._proof is not None and not replaying:
            self._proof.batch_begins()
        if self._probe is not None:
            self._probe.enter(self._steps < MEASURED_STEPS and self._current is None)

    def forward_ends(self) -> None:
        """The optimizer is about to step, with whole gradients."""
        if self._probe is not None:
            self._probe.leave()
        if self._proof is not None and self._meter is not None:
            self._meter.distrust(self._proof.before_step())
        if self._boundary_at is not None:
            self._step_seconds.append(time.perf_counter() - self._boundary_at)
            self._boundary_at = None

    def first_layout(self) -> WindowLayout | None:
        """At every boundary outside a window: the first plan of this life, once what it needs is known."""
        self._steps += 1
        self._boundary_at = time.perf_counter()
        wait = self._policy.measures or self._probe is not None
        if self._current is not None or (wait and self._steps < MEASURED_STEPS):
            return None
        popularity = self._global_popularity()
        if self.reordering is not None:
            popularity = self.reordering.first(popularity)
        return self._make(popularity, self._compute_dtypes(), self._budget())

    def relayout(self, layout: WindowLayout, journal_nbytes: int) -> WindowLayout:
        """A plan with room for a larger journal."""
        self._journal.nbytes = journal_nbytes
        return lay_out(layout.record, self._view, self._groups, journal_nbytes)

    def collect(self, exchange: Exchange) -> None:
        """Nothing has to be agreed on before a generation outside of windows."""

    def loss_figures(self) -> None:
        """Restarts are exact."""

    def given(
        self, tier: str, generation: GenerationId, layout: WindowLayout, generations_kept: int | None = None
    ) -> None:
        """Plans do not depend on it."""

    def given_everything(self, tier: str, generation: GenerationId) -> None:
        """Plans do not depend on it."""

    def complete_everywhere(self, tier: str, generation: GenerationId) -> None:
        """Plans do not depend on it."""

    def given_up(self, tier: str, generation: GenerationId) -> None:
        """Plans do not depend on it."""

    def lost(self, tier: str) -> None:
        """Plans do not depend on it."""

    @property
    def all_have_copies(self) -> bool:
        """Nothing is borrowed."""
        return True

    @property
    def bad_copies(self) -> BadCopies:
        """None: nothing is borrowed."""
        return {}

    def close(self) -> None:
        """Stop probing and measuring."""
        if self._proof is not None:
            self._proof.remove()
        if self._probe is not None:
            self._probe.leave()
        if self._meter is not None:
            self._meter.remove()

    # -- private

    def _popularity(self, module: torch.nn.Module) -> tuple[PopularityMeter | None, Reordering | None]:
        policy, operators = self._policy, self._view.operators
        config = policy.popularity if isinstance(policy, SparseWindows) else None
        if config is None or not operators.num_experts:
            return None, None
        meter = PopularityMeter(config, operators, module)
        return meter, Reordering(config, meter, self._replan)

    def _replan(self, popularity: list[float]) -> Callable[[], WindowLayout]:
        """Makes the plan in force in another order; what was measured for it is not measured again."""
        assert self._current is not None
        record = self._current.record
        dtypes = {fqn: getattr(torch, name) for fqn, name in record.compute_dtypes.items()}
        return lambda: self._make(popularity, dtypes, record.budget_nbytes)

    def _make(self, popularity: Sequence[float], dtypes: dict[str, torch.dtype], budget: int) -> WindowLayout:
        order: Order = self._policy.order if isinstance(self._policy, SparseWindows) else "fixed"
        view, limit = self._view.replanned(self._view.operators, dtypes), 0
        if budget:
            limit = split_nbytes(_items(view, self._groups, popularity, order), budget)
            view = view.replanned(split_operators(view, self._groups, limit), dtypes)
        named = isinstance(self._policy, SparseWindows) and self._policy.schedule is not None
        items = _named_items(view, self._groups) if named else _items(view, self._groups, popularity, order)
        plan = self._policy.plan(items, budget).plan
        record = PlanRecord(
            plan=plan if named else assign_positions(plan, view.operators, popularity, by=order),
            config=self._policy.config(),
            popularity=tuple(popularity),
            compute_dtypes={fqn: str(dtype).removeprefix("torch.") for fqn, dtype in dtypes.items()},
            averages_consumed=self._view.averages.consumed,
            budget_nbytes=budget,
            split_nbytes=limit,
        )
        return lay_out(record, self._view, self._groups, self._journal.nbytes)

    def _global_popularity(self) -> list[float]:
        """Over all ranks, for the first plan of this life; zeros where nothing is measured."""
        if self._meter is None:
            return [0.0] * self._view.operators.num_experts
        total: list[float] = sum_in_order(self._exchange.gather_tensor(self._meter.newest().cpu())).tolist()
        return total

    def _budget(self) -> int:
        """Bytes per step and rank, the smallest over all ranks; 0 where the policy needs none."""
        if not isinstance(self._policy, SparseWindows) or self._policy.window or self._policy.schedule:
            return 0
        if self._policy.budget_nbytes is not None:
            return self._policy.budget_nbytes
        seconds = sorted(self._step_seconds)[len(self._step_seconds) // 2]
        own = int(
            seconds * measure_bandwidth(_BANDWIDTH_NBYTES, next(iter(self._view.params.values())).device) * BUDGET_SHARE
        )
        return max(1, min(row[0] for row in self._exchange.gather([own])))

    def _compute_dtypes(self) -> dict[str, torch.dtype]:
        """Low precision where every rank found it exact."""
        if self._probe is None:
            return {}
        verdict = self._probe.verdict()
        names = list(self._view.params)
        rows = self._exchange.gather([int(name in verdict) for name in names])
        return {name: self._probe.dtype for i, name in enumerate(names) if all(row[i] for row in rows)}


class Probe:
    """Runs the precision probe around forward and backward of the first iterations."""

    def __init__(self, module: torch.nn.Module, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._probe = ComputeDtypeProbe(module, dtype)
        self._entered = False

    def enter(self, wanted: bool) -> None:
        if wanted and not self._entered:
            self._probe.__enter__()
            self._entered = True

    def leave(self) -> None:
        if self._entered:
            self._entered = False
            self._probe.__exit__(None, None, None)

    def verdict(self) -> set[str]:
        """Parameters that may be stored in the low precision."""
        return {fqn for fqn, dtype in self._probe.verdict().items() if dtype == self.dtype}


def _items(view: StateView, groups: ParallelGroups, popularity: Sequence[float], order: Order) -> list[PlanItem]:
    return positions(view.operators, popularity, sizes=record_nbytes(view, groups), by=order)


def _named_items(view: StateView, groups: ParallelGroups) -> list[PlanItem]:
    return [PlanItem(name, *nbytes) for name, nbytes in record_nbytes(view, groups).items()]
