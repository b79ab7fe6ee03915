"""From a policy to bytes: when plans are due, their inputs, and the layout of windows.

The planner measures a policy's inputs, agrees on them with the other ranks (the smallest budget, tokens and popularity
over all ranks, the strictest compute precision), asks the policy and lays the plan out, the same on every rank.

A plan holds until popularity asks for another order, or steps can hide so much more or less that windows change their
length: steps, machines and links to other nodes are measured again while training goes on. If tokens are counted, every
window has its own plan: during a window, the next is planned on a thread. The tokens until then are not known yet, and
are taken to equal those since the window before: else no expert would be taken twice in a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import torch

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.parallel import ParallelGroups
from lightning_moe_ckpt.planning._background import PlanMaker, StagePlans, require_plans
from lightning_moe_ckpt.planning._budgets import MEASURED_STEPS, Budgets, ExpertBudgets, slot_sizes
from lightning_moe_ckpt.planning._ledger import Counting, LedgerKeeper, LossFigures
from lightning_moe_ckpt.planning._measures import (
    CaptureOrder,
    ConsumedPrecision,
    CountProof,
    PopularityMeter,
    PrecisionProof,
    StepFollower,
)
from lightning_moe_ckpt.policies import MEMORY, Audience, Chains, Deltas, PlanInputs, Policy
from lightning_moe_ckpt.snapshot import Constants, StateView, WindowLayout, why_no_deltas
from lightning_moe_ckpt.storage import BadCopies, GenerationId, RunStore
from lightning_moe_ckpt.tiers import PEER, STORAGE, Mirroring, PeerRoom, TierWorker

log = rank_logger(__name__)


@dataclass(frozen=True)
class FirstPlan:
    """Facts of an incarnation's first plan, for which memory is made."""

    budgets: Mapping[str, int] = field(default_factory=dict)
    """Bytes in force, by level; empty before the plan."""
    generations_kept: int | None = None
    """Generations that other nodes keep; `None` before the plan."""


class Planner:
    """Decide when a new plan is due and make it. Raises `ConfigurationError` if the policy cannot plan over the model's
    operators.

    The view's operators are not split; `exchange` is between all ranks. `may_probe` says whether the first steps may
    run under probes that later steps lack; without, parameters are stored in their own precision, and token counts are
    believed unless restores depend on them. `constants` are those of an earlier planner, found in the view if `None`;
    `consumed` are precisions of parameters where no step will show them.
    """

    def __init__(
        self,
        policy: Policy,
        view: StateView,
        groups: ParallelGroups,
        exchange: Exchange,
        module: torch.nn.Module,
        *,
        autocast_dtype: torch.dtype | None = None,
        may_probe: bool = True,
        constants: Constants | None = None,
        consumed: dict[str, torch.dtype] | None = None,
    ) -> None:
        self.constants = Constants(view, groups) if constants is None else constants
        self._anew = partial(
            Planner, policy, view, groups, exchange, module, autocast_dtype=autocast_dtype, may_probe=may_probe
        )
        self._layers = view.operators.layers
        require_plans(policy, view, groups, exchange)
        if exchange.is_coordinator and (remark := policy.remark(view.operators)) is not None:
            log.warning("%s", remark)
        self._policy, self._view = policy, view
        self._stages = StagePlans(view, groups, exchange)
        self._period = policy.least_steps(len(view.operators))
        low = autocast_dtype if "compute_dtypes" in policy.needs and may_probe else None
        self._precision = ConsumedPrecision(consumed) if low is None else PrecisionProof(module, low)
        config = policy.popularity if "popularity" in policy.needs and view.operators.num_experts else None
        self.order = CaptureOrder() if config is None else PopularityMeter(config, view.operators, module)
        self._ledger = LedgerKeeper(policy, view, module) if "tokens" in policy.needs else Counting()
        self._measures: list[StepFollower] = [self._precision] if self._precision.is_watched else []
        if (required := self._ledger.counts_tokens) or (may_probe and self.order.counts_tokens):
            distrust, stage = self.order.distrust, self._stages.exchange
            self._measures.append(CountProof(view.operators, module, stage, required=required, distrust=distrust))
        self._measures += [each for each in (self._ledger, self.order) if type(each) not in {Counting, CaptureOrder}]
        self.maker = PlanMaker(policy, view, groups, self._ledger.layouts)
        self.sizes = self.maker.sizes
        self._budgets = self._make_budgets(groups)
        self._deltas: Deltas | None = None
        self._current: WindowLayout | None = None
        self._replaying, self._boundaries = False, 0
        self._ended = False
        """Whether planning has ended for good."""
        self._first = FirstPlan()

    @property
    def tokens(self) -> LedgerKeeper | None:
        """Keeper of the token ledger; `None` if no tokens are counted."""
        return self._ledger if isinstance(self._ledger, LedgerKeeper) else None

    def settle(
        self, store: RunStore, generation: GenerationId, resumed: Mapping[str, object] | None, *, load: bool
    ) -> Planner:
        """Settle constants, and return the planner to use: a new one if other layers' experts train now. Collective.

        `generation` is the name for this incarnation's constants, `resumed` the policy of the resumed generation;
        `None` for a new run. For `load` see `Constants.settle`.
        """
        self.constants.settle(store, generation, resumed, self._stages.everyone, load=load)
        if self._view.operators.layers == self._layers:
            return self
        self._stop_measuring()
        return self._anew(constants=self.constants)

    def thaw(self, *, thoroughly: bool = False) -> bool:
        """Plan anew if constants have changed; return whether any has. Collective, see `Constants.thaw`."""
        if thawed := self.constants.thaw(self._stages.everyone, thoroughly=thoroughly):
            self.forget_layout(regrouped=False)
        return thawed

    # -- what tiers have to know

    @property
    def chains(self) -> Chains | None:
        """Settings of differences between generations; `None` takes none."""
        return self._policy.chains

    @property
    def mirroring(self) -> Mirroring:
        """State captured for other ranks."""
        return self.maker.mirroring

    @property
    def generations_kept(self) -> int:
        """Generations that other nodes keep; fixed by the first plan, since their memory is made for it."""
        kept = self._first.generations_kept
        return self._policy.generations_kept(self._inputs()) if kept is None else kept

    @property
    def peer_audiences(self) -> frozenset[Audience]:
        """Files in copies on other nodes."""
        return self._policy.peer_audiences

    def peer_room(self) -> PeerRoom | None:
        """Return the room that holders of copies reserve for this rank; `None` for slots like the ring's."""
        keep, nbytes = self._policy.copies_kept(self._inputs()), self._budgets.peer_nbytes
        return None if keep is None or nbytes is None else PeerRoom(slot_nbytes=nbytes, keep=keep)

    def deltas(self) -> Deltas | None:
        """Return how gradients replace states sent to other nodes, if at all; the same on all ranks. Collective."""
        if (wanted := self._policy.deltas) is not None:
            reason = why_no_deltas(self._view, every_n_steps=self._period, exact=wanted.kind == "lossless")
            if not self._stages.everyone.all_agree(reason is None):
                log.info(
                    "generations are sent to other nodes as they are: %s", reason or "another rank has no gradients"
                )
                wanted = None
        self._deltas = wanted
        return wanted

    def joined(self, workers: Sequence[TierWorker]) -> None:
        """Take the tiers of this incarnation."""
        tiers = {worker.name: worker for worker in workers}
        remote = tiers.get(PEER) or tiers[STORAGE]
        self._budgets.remote_rate = lambda: remote.rate
        self._budgets.copies_leave = PEER in tiers and not self._ledger.counts_tokens
        self._budgets.local_share = self.maker.mirror(remote.mirroring)
        self._view.gradient_dtype = self._deltas.dtype if self._deltas is not None and PEER in tiers else None
        self._ledger.joined(tiers)

    # -- the journal

    @property
    def journal_nbytes(self) -> int:
        """Capacity of a journal record in bytes, from the journals so far."""
        return self.maker.journal.nbytes

    def journal_needs(self, nbytes: int) -> None:
        """Note a journal of `nbytes`; records reserve twice that and the entries of generations under way, which it may lack."""
        self.maker.journal.needs(nbytes + self._ledger.in_flight_nbytes)

    def journal_had(self, nbytes: int) -> None:
        """Note that the incarnation before reserved `nbytes`."""
        self.maker.journal.had(nbytes)

    def state(self) -> dict[str, Any]:
        """Return the planner's journal entries at a boundary; call before the next optimizer step."""
        if not self._measures:
            return {"popularity": None}
        return {"popularity": self.order.state(), **self._ledger.state()}

    def restore(self, outcome: Mapping[str, Any]) -> None:
        """Go on from the journal at the boundary this incarnation starts from; call after `adopt`."""
        self._ledger.restore(outcome)
        if (state := outcome.get("popularity")) is not None:
            self._replan(self.order.restore(state, None if self._current is None else self._current.record.popularity))

    @property
    def bad_copies(self) -> BadCopies:
        """Copies in storage that generations no longer name."""
        return self._ledger.bad_copies

    # -- training steps

    def begin(self) -> None:
        """Start measuring."""
        for measure in self._measures:
            measure.begin()

    def forward_begins(self, *, replaying: bool, last_step: int | None = None) -> None:
        """Note that a batch is about to run forward and backward; `last_step` is the planned last step, if any."""
        self._replaying = replaying
        planned = self._boundaries >= MEASURED_STEPS or self._current is not None
        for measure in self._measures:
            measure.batch_begins(replaying=replaying, planned=planned, last_step=last_step)

    def forward_ends(self) -> None:
        """Note that the optimizer is about to step, with whole gradients. Collective while counts are checked. Raises
        `WrongCounts` if restores depend on token counts, and the counts differ from the tokens that experts process.
        """
        for measure in self._measures:
            measure.before_step()
        self._measures = [measure for measure in self._measures if not measure.is_over]
        self._budgets.clock.forward_ends()

    def stepped(self, step: int) -> None:
        """Note that optimizer step `step` has ended."""
        if not self._replaying:  # frozen operators make steps shorter
            self._budgets.clock.stepped()
        for measure in self._measures:
            measure.stepped(step)

    def collect(self) -> None:
        """Count the tokens since the last window, before a generation outside of windows. Collective."""
        self._ledger.collect(self._stages.exchange)

    def loss_figures(self) -> LossFigures | None:
        """Return the figures on lost tokens for `Report`; `None` if restarts are exact."""
        return self._ledger.figures(self._budgets)

    def close(self) -> None:
        """Stop measuring, and watching constants."""
        self._stop_measuring()
        self.constants.close()

    def _stop_measuring(self) -> None:
        for measure in self._measures:
            measure.remove()

    # -- plans

    @property
    def interval_steps(self) -> int:
        """Steps from one window's start to the next."""
        return self._current.record.plan.interval_steps if self._current is not None else 1

    def accepts(self, layout: WindowLayout) -> bool:
        """Return whether this policy goes on with a restored plan; not if partial, as its experts were just taken."""
        return not layout.record.plan.partial and bool(layout.record.config == self._policy.config())

    def adopt(self, layout: WindowLayout) -> None:
        """Put `layout` in force."""
        self._current = layout

    def forget_layout(self, *, regrouped: bool = True) -> None:
        """Drop all plans, since the optimizer got other parameters (`regrouped`), or constants changed.

        A policy that is not exact takes no generation after the former, until training ends; an ERROR in the log says so.
        """
        self.maker.forget()
        if self._policy.exact or not regrouped:
            self._current = None
        else:
            self._ended = True
            log.error(
                "parameters were added to the optimizer: generations that mix states from before and after that have no "
                "meaning, so none is taken until training ends. Use SparseCheckpoint or DenseCheckpoint, which follow."
            )

    def first_layout(self) -> WindowLayout | None:
        """Return the first plan once its inputs are known, else `None`; call at boundaries outside windows. Collective."""
        self._boundaries += 1
        if self._ended or self._current is not None:
            return None
        if self._boundaries < MEASURED_STEPS and ("bandwidths" in self._policy.needs or self._precision.is_watched):
            return None
        popularity = self.order.first(self._stages.exchange)
        dtypes = self._precision.agreed(list(self._view.params), self._stages.exchange)
        if self._policy.budgets:
            self._budgets.measure()
            self._budgets.agreed(self._stages.exchange.gather(self._budgets.inputs()))
        inputs = self._inputs(popularity)
        layout = self._joined(made := self.maker.make(inputs, dtypes)) or made
        if self.tokens is not None:
            # One round of turns without any tokens at risk: each position gives most of all once.
            nothing, positions = self.tokens.ledger.blank(), {rank for each in inputs.layouts for rank in each.rank_of}
            turns = [replace(inputs, index=turn, ledger=nothing, coming=None, bad=()) for turn in range(len(positions))]
            layouts = [layout, *(self.maker.make(turn, dtypes) for turn in turns)]
            layout.reserve_nbytes = self.maker.reserve(layouts, self._budgets.reserve_nbytes)
        self._first = FirstPlan(dict(self._budgets.in_force))
        self._first = replace(self._first, generations_kept=self._policy.generations_kept(self._inputs()))
        return layout

    # -- at window boundaries

    def inputs(self) -> list[int]:
        """Return this rank's inputs to the exchange between all ranks; `agreed` exchanges a stage's own inputs."""
        if not self._measures and not self._budgets.width:
            return self._stages.riding([])
        counted = self._ledger.inputs() if self._ledger.counts_tokens else []
        budgeted = self._budgets.window_inputs() if self._budgets.width else []
        return self._stages.riding([*counted, *budgeted, *self.order.inputs()])

    def agreed(self, rows: Sequence[Sequence[int]]) -> None:
        """Take every rank's inputs, by rank. Collective, as is `take_next`."""
        rows = self._stages.exchanged(rows)
        if not self._measures and not self._budgets.width:
            return
        changed = False
        if self._ledger.counts_tokens:
            width = self._ledger.width
            self._ledger.agreed([row[:width] for row in rows])
            rows = [row[width:] for row in rows]
        if self._budgets.width:
            width, before = self._budgets.width, 0 if self._current is None else self._current.record.budget_nbytes
            changed = self._budgets.renewed([row[:width] for row in rows], before)
            rows = [row[width:] for row in rows]
        popularity = self.order.agreed(rows)
        if changed and popularity is None:
            assert self._current is not None
            popularity = list(self._current.record.popularity)
        self._replan(popularity)

    def take_next(self) -> WindowLayout | None:
        """Wait for the next plan and return it; `None` to keep the plan in force. Collective."""
        layout = self.maker.take()
        if layout is not None and self._current is not None and not layout.record.plan.partial:
            # A new budget with the same window length is not worth a change.
            old, new = self._stages.own(self._current.record), layout.record
            if len(old.plan.steps) == len(new.plan.steps) and old.popularity == new.popularity:
                layout = None
        return self._joined(layout)

    def refused(self) -> None:
        """Note that a plan could not be put in force; its cause may ask again."""
        if self._current is not None:
            self.order.refused(self._current.record.popularity)

    def started(self, step: int, layout: WindowLayout) -> None:
        """Note that a window begins; if tokens are counted, start to plan the next."""
        if self._ledger.counts_tokens:
            self._ledger.took(step, self.maker.selection(layout.record.plan))
            self.maker.begin(self._inputs(), {})

    # -- private

    def _joined(self, layout: WindowLayout | None) -> WindowLayout | None:
        """Return the layout of all stages' plans; `None` if no stage has a new plan. Collective with stages."""
        if not self._stages.several:
            return layout
        return None if (record := self._stages.joined(layout, self._current)) is None else self.maker.lay_out(record)

    def _make_budgets(self, groups: ParallelGroups) -> Budgets:
        config, device = self._policy.budgets, next(iter(self._view.params.values())).device
        if not (config and self._ledger.counts_tokens):
            return Budgets(config, device)
        measured = lru_cache(maxsize=1)(lambda nbytes: slot_sizes(self._view, groups, nbytes, self.mirroring))
        layouts, period = self._ledger.layouts, self._period
        return ExpertBudgets(config, device, layouts, lambda: measured(self.journal_nbytes), every_n_steps=period)

    def _inputs(
        self, popularity: Sequence[float] | None = None, budgets: Mapping[str, int] | None = None
    ) -> PlanInputs:
        """Return the policy's inputs as known now."""
        operators = self._view.operators
        inputs = PlanInputs(
            operators=operators,
            popularity=[0.0] * operators.num_experts if popularity is None else popularity,
            budgets=self._budgets.in_force if budgets is None else budgets,
            deltas=self._deltas,
            made_for=self._first.budgets,
        )
        return self._ledger.completed(inputs)

    def _replan(self, popularity: list[float] | None) -> None:
        """Start to plan another order, or another budget, if `popularity` asks for it."""
        if popularity is None:
            return
        assert self._current is not None
        record = self._current.record
        dtypes = {fqn: getattr(torch, name) for fqn, name in record.compute_dtypes.items()}
        budgets = self._budgets.in_force or ({MEMORY: record.budget_nbytes} if record.budget_nbytes else {})
        self.maker.begin(self._inputs(popularity, budgets), dtypes)
