"""From a policy to bytes: when plans are due, their inputs, and the layout of windows.

The planner measures a policy's inputs, agrees on them with the other ranks (the smallest budget, tokens and popularity
over all ranks, the strictest compute precision), asks the policy and lays the plan out. So every rank has the same
plan.

Each pipeline stage plans for itself, from its own ranks' measurements. Before a plan is put in force, the stages' plans
are joined to one on the training thread, with the same window for all.

A plan holds until popularity asks for another order, or steps can hide so much more or less that windows change their
length: steps, machines and links to other nodes are measured again while training goes on. If tokens are counted, every
window has its own plan: during a window, the next is planned on a thread. The tokens until then are not known yet, and
are taken to equal those since the window before: else no expert would be taken twice in a row.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt._units import size_text
from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.journal import JournalCapacity
from lightning_moe_ckpt.operators import RecordKind
from lightning_moe_ckpt.parallel import ParallelGroups
from lightning_moe_ckpt.planning._background import in_background
from lightning_moe_ckpt.planning._budgets import MEASURED_STEPS, NOISE, Budgets, ExpertBudgets, slot_sizes
from lightning_moe_ckpt.planning._first_steps import CountProof, PrecisionProof
from lightning_moe_ckpt.planning._ledger import LedgerKeeper, LossFigures
from lightning_moe_ckpt.planning._popularity import PopularityMeter
from lightning_moe_ckpt.planning._sizes import OperatorSizes
from lightning_moe_ckpt.planning._stages import StagePlans, require_plans
from lightning_moe_ckpt.policies import (
    MEMORY,
    Audience,
    Deltas,
    Plan,
    PlanInputs,
    Policy,
    Selection,
)
from lightning_moe_ckpt.snapshot import (
    REMEMBERED_PLANS,
    Constants,
    PlanRecord,
    StateView,
    WindowLayout,
    columns_of,
    expert_nbytes,
    lay_out,
    share_written,
    why_no_deltas,
)
from lightning_moe_ckpt.storage import BadCopies, GenerationId, RunStore, SlotClass
from lightning_moe_ckpt.tiers import PEER, STORAGE, Mirroring, PeerRoom, TierWorker

log = rank_logger(__name__)

_IN_FLIGHT = 4
"""Approximate generations under way in a journal, over all tiers."""

_IN_FLIGHT_NBYTES = 64
"""Approximate bytes in a journal per expert of a generation under way, both levels together."""


class Planner:
    """Decide when a new plan is due and make it.

    Args:
        policy: the checkpoint policy.
        view: live state, operators not split.
        groups, exchange: of this rank; between all ranks.
        module: the model, in which the policy's needs are measured.
        autocast_dtype: low precision under autocast, `None` without.
        may_probe: whether the first steps may run under probes that later steps lack. Without probes, parameters are
            stored in their own precision, and token counts are believed unless restores depend on them.
        constants: constants of an earlier planner; found in the view if `None`.

    Raises:
        ConfigurationError: the policy cannot plan over the model's operators.
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
    ) -> None:
        self.constants = Constants(view, groups) if constants is None else constants
        self._anew = partial(
            Planner, policy, view, groups, exchange, module, autocast_dtype=autocast_dtype, may_probe=may_probe
        )
        self._layers = view.operators.layers
        require_plans(policy, view, groups, exchange)
        if exchange.is_coordinator and (remark := policy.remark(view.operators)) is not None:
            log.warning("%s", remark)
        self._policy, self._view, self._groups = policy, view, groups
        self._everyone, self._stages = exchange, StagePlans(view, groups, exchange)
        self._exchange = self._stages.exchange
        self._period = policy.least_steps(len(view.operators))
        low = autocast_dtype if "compute_dtypes" in policy.needs and may_probe else None
        self._probe = PrecisionProof(module, low) if low is not None else None
        config = policy.popularity if "popularity" in policy.needs and view.operators.num_experts else None
        self.order = None if config is None else PopularityMeter(config, view.operators, module)
        self.tokens = LedgerKeeper(policy, view, module) if "tokens" in policy.needs else None
        proves = may_probe and self.order is not None and self.order.counts_tokens
        required = self.tokens is not None
        self._proof = (
            CountProof(view.operators, module, self._exchange, required=required) if proves or required else None
        )
        self._journal = JournalCapacity()
        self._budgets = self._make_budgets()
        self._looks_again = "bandwidths" in policy.needs and self.tokens is None
        self.sizes = OperatorSizes(view, groups)
        self._layouts: OrderedDict[tuple[str, int], WindowLayout] = OrderedDict()
        self._deltas: Deltas | None = None
        self.mirroring = Mirroring()
        self._current: WindowLayout | None = None
        self._next: Future[WindowLayout] | None = None
        self._step: int | None = None
        self._replaying, self._boundaries, self.chains = False, 0, policy.chains
        self._ended = False
        """Whether planning has ended for good."""
        self._kept: int | None = None
        self._made_for, self._reserve_nbytes = dict[str, int](), 0
        self._room: list[int] = []
        """Bytes of each position's experts that fit into ring slots."""

    def settle(
        self, store: RunStore, generation: GenerationId, resumed: Mapping[str, object] | None, *, load: bool
    ) -> Planner:
        """Settle constants, and return the planner to use: a new one if other layers' experts train now. Collective.

        Args:
            store: of the run.
            generation: name for this incarnation's constants.
            resumed: policy of the resumed generation; `None` for a new run.
            load: see `Constants.settle`.
        """
        self.constants.settle(store, generation, resumed, self._everyone, load=load)
        if self._view.operators.layers == self._layers:
            return self
        self._stop_measuring()
        return self._anew(constants=self.constants)

    def thaw(self, *, thoroughly: bool = False) -> bool:
        """Plan anew if constants have changed; return whether any has. Collective, see `Constants.thaw`."""
        if thawed := self.constants.thaw(self._everyone, thoroughly=thoroughly):
            self.forget_layout(regrouped=False)
        return thawed

    # -- what tiers have to know

    @property
    def generations_kept(self) -> int:
        """Generations that other nodes keep; fixed by the first plan, since their memory is made for it."""
        return self._policy.generations_kept(self._inputs()) if self._kept is None else self._kept

    def kept(self, layout: WindowLayout) -> dict[str, Any]:
        """Return what memory keeps beside whole generations, as arguments of `Rings.make`."""
        if (chains := self.chains) is None:
            return {"experts": expert_nbytes(self._view, self._groups) if layout.record.plan.partial else {}}
        return {"links": SlotClass(self.differential(layout).slot_nbytes, chains.links_kept)}

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
        wanted = self._policy.deltas
        if wanted is not None:
            reason = why_no_deltas(self._view, every_n_steps=self._period, exact=wanted.kind == "lossless")
            if not self._everyone.all_agree(reason is None):
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
        self._budgets.copies_leave = PEER in tiers and self.tokens is None
        self.mirroring = taken = remote.mirroring
        self._budgets.local_share = 1 / (1 + len(taken.owners) * share_written(self._view, self._groups, taken.groups))
        self._view.gradient_dtype = self._deltas.dtype if self._deltas is not None and PEER in tiers else None
        if self.tokens is not None:
            self.tokens.joined(tiers)

    # -- the journal

    @property
    def journal_nbytes(self) -> int:
        """Capacity of a journal record in bytes, from the journals so far."""
        return self._journal.nbytes

    def journal_needs(self, nbytes: int) -> None:
        """Note a journal of `nbytes`; records reserve twice that and the entries of generations under way, which it may lack."""
        under_way = 0 if self.tokens is None else _IN_FLIGHT * len(self.tokens.ledger.alive)
        self._journal.needs(nbytes + under_way * _IN_FLIGHT_NBYTES)

    def journal_had(self, nbytes: int) -> None:
        """Note that the incarnation before reserved `nbytes`."""
        self._journal.had(nbytes)

    def state(self) -> dict[str, Any]:
        """Return the planner's journal entries at a boundary; call before the next optimizer step."""
        counted = {} if self.tokens is None else self.tokens.state()
        return {"popularity": None if self.order is None else self.order.state(), **counted}

    def restore(self, outcome: Mapping[str, Any]) -> None:
        """Go on from the journal at the boundary this incarnation starts from; call after `adopt`."""
        if self.tokens is not None:
            self.tokens.restore(outcome)
        state = outcome.get("popularity")
        if self.order is not None and state is not None:
            in_force = None if self._current is None else self._current.record.popularity
            self._replan(self.order.restore(state, in_force))

    @property
    def bad_copies(self) -> BadCopies:
        """Copies in storage that generations no longer name."""
        return {} if self.tokens is None else self.tokens.bad_copies

    # -- training steps

    def begin(self) -> None:
        """Start measuring."""
        if self.order is not None:
            self.order.install()
        if self.tokens is not None:
            self.tokens.begin()

    def forward_begins(self, *, replaying: bool, last_step: int | None = None) -> None:
        """Note that a batch is about to run forward and backward; `last_step` is the planned last step, if any."""
        if self.tokens is not None:
            self.tokens.last_step = last_step
            self.tokens.counts.forward_begins()
        self._replaying = replaying
        if self._proof is not None and not replaying:
            self._proof.batch_begins()
        if self._probe is not None:
            self._probe.enter(self._boundaries < MEASURED_STEPS and self._current is None)

    def forward_ends(self) -> None:
        """Note that the optimizer is about to step, with whole gradients. Collective while counts are checked.

        Raises:
            WrongCounts: restores depend on token counts, and the counts differ from the tokens that experts process.
        """
        if self._probe is not None:
            self._probe.leave()
        if self._proof is not None:
            wrong = self._proof.before_step()
            if self.order is not None:
                self.order.distrust(wrong)
        if self.tokens is not None and (self._step is None or self._policy.due(self._step + 1, None, 1)):
            self.tokens.counts.start()
        self._budgets.clock.forward_ends()

    def stepped(self, step: int) -> None:
        """Note that optimizer step `step` has ended."""
        self._step = step
        if not self._replaying:  # frozen operators make steps shorter
            self._budgets.clock.stepped()
        if self.tokens is not None:
            self.tokens.stepped(step)
        if self.order is not None:
            self.order.stepped(step)

    def collect(self) -> None:
        """Count the tokens since the last window, before a generation outside of windows. Collective."""
        if self.tokens is not None:
            self.tokens.count(self._exchange.gather(self.tokens.counted()), self._step)

    def loss_figures(self) -> LossFigures | None:
        """Return the figures on lost tokens for `Report`; `None` if restarts are exact."""
        budgets = self._budgets
        return None if self.tokens is None else self.tokens.figures(budgets.nbytes, budgets.rates, budgets.capped)

    def close(self) -> None:
        """Stop measuring, and watching constants."""
        self._stop_measuring()
        self.constants.close()

    def _stop_measuring(self) -> None:
        if self._proof is not None:
            self._proof.remove()
        if self._probe is not None:
            self._probe.leave()
        if self.order is not None:
            self.order.remove()
        if self.tokens is not None:
            self.tokens.close()

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
        """Drop all plans, as the optimizer got parameters (`regrouped`), or constants changed; end planning if need be."""
        self.sizes.forget()
        self._layouts.clear()
        if self._policy.exact or not regrouped:
            self._current = self._next = None
        else:
            self._ended = True
            log.error(
                "parameters were added to the optimizer: generations that mix states from before and after that have no "
                "meaning, so none is taken until training ends. Use SparseCheckpoint or DenseCheckpoint, which follow."
            )

    def first_layout(self) -> WindowLayout | None:
        """Return the first plan once its inputs are known, else `None`; call at boundaries outside windows. Collective."""
        self._boundaries += 1
        wait = "bandwidths" in self._policy.needs or self._probe is not None
        if self._ended or self._current is not None or (wait and self._boundaries < MEASURED_STEPS):
            return None
        popularity = None if self.order is None else self.order.first(self._exchange)
        dtypes = {} if self._probe is None else self._probe.agreed(list(self._view.params), self._exchange)
        if self._policy.budgets:
            self._budgets.measure()
            self._budgets.agreed(self._exchange.gather(self._budgets.inputs()))
        inputs = self._inputs(popularity)
        layout = self._joined(made := self._make(inputs, dtypes)) or made
        if self.tokens is not None:
            # One round of turns without any tokens at risk: each position gives most of all once.
            nothing, positions = self.tokens.ledger.blank(), {rank for each in inputs.layouts for rank in each.rank_of}
            turns = [replace(inputs, index=turn, ledger=nothing, coming=None, bad=()) for turn in range(len(positions))]
            layouts = [layout, *(self._make(turn, dtypes) for turn in turns)]
            layout.reserve_nbytes = self._reserve(layouts)
        self._made_for = dict(self._budgets.in_force)
        self._kept = self._policy.generations_kept(self._inputs())
        return layout

    def differential(self, layout: WindowLayout) -> WindowLayout:
        """Return the layout of differences from one boundary to the next, cut like the states of `layout`."""
        plan = Plan.of_everything(layout.record.plan.names, RecordKind.DELTA)
        return self._lay_out(replace(layout.record, plan=plan))

    def relayout(self, layout: WindowLayout, journal_nbytes: int) -> WindowLayout:
        """Return a plan with room for a larger journal, and enlarge the following plan."""
        self._journal.nbytes = journal_nbytes
        self._layouts.clear()
        following, self._next = self._next, None
        if following is not None:
            self._next = in_background(lambda: self._lay_out(following.result().record))
        larger = self._lay_out(layout.record)
        if self._reserve_nbytes:
            self._reserve_nbytes += max(0, larger.slot_nbytes - layout.slot_nbytes)
            larger.reserve_nbytes = self._reserve_nbytes
        return larger

    # -- at window boundaries

    def inputs(self) -> list[int]:
        """Return this rank's inputs to the exchange between all ranks; `agreed` exchanges a stage's own inputs."""
        told: list[int] = []
        if self.tokens is not None:
            told += [*self.tokens.inputs(), *self._budgets.inputs()]
        elif self._looks_again:
            told += self._budgets.look_again()
        return self._stages.riding(told + self.order.inputs() if self.order is not None else told)

    def agreed(self, rows: Sequence[Sequence[int]]) -> None:
        """Take every rank's inputs, by rank. Collective, as is `take_next`."""
        rows = self._stages.exchanged(rows)
        if self.tokens is not None:
            width, levels = self.tokens.width, len(self._policy.budgets)
            self.tokens.agreed([row[:width] for row in rows], self._step)
            self._budgets.agreed([row[width : width + levels] for row in rows])
            rows = [row[width + levels :] for row in rows]
        changed = False
        if self._looks_again:
            levels = len(self._policy.budgets)
            changed = self._budgets_changed([row[:levels] for row in rows])
            rows = [row[levels:] for row in rows]
        popularity = None if self.order is None else self.order.agreed(rows)
        if changed and popularity is None:
            assert self._current is not None
            popularity = list(self._current.record.popularity)
        self._replan(popularity)

    def take_next(self) -> WindowLayout | None:
        """Wait for the next plan and return it; `None` to keep the plan in force. Collective."""
        following, self._next = self._next, None
        layout = None if following is None else following.result()
        if layout is not None and self._current is not None and not layout.record.plan.partial:
            # A new budget with the same window length is not worth a change.
            old, new = self._stages.own(self._current.record), layout.record
            if len(old.plan.steps) == len(new.plan.steps) and old.popularity == new.popularity:
                layout = None
        return self._joined(layout)

    def refused(self) -> None:
        """Note that a plan could not be put in force; its cause may ask again."""
        if self.order is not None and self._current is not None:
            self.order.refused(self._current.record.popularity)

    def started(self, step: int, layout: WindowLayout) -> None:
        """Note that a window begins; if tokens are counted, start to plan the next."""
        if self.tokens is not None:
            self.tokens.took(step, self._selection(layout.record.plan))
            self._next = in_background(partial(self._make, self._inputs(), {}))

    # -- private

    def _joined(self, layout: WindowLayout | None) -> WindowLayout | None:
        """Return the layout of all stages' plans; `None` if no stage has a new plan. Collective with stages."""
        if not self._stages.several:
            return layout
        return None if (record := self._stages.joined(layout, self._current)) is None else self._lay_out(record)

    def _make_budgets(self) -> Budgets:
        config, device = self._policy.budgets, next(iter(self._view.params.values())).device
        if not config or self.tokens is None:
            return Budgets(config, device)
        measured = lru_cache(maxsize=1)(partial(slot_sizes, self._view, self._groups))
        layouts, period = self.tokens.layouts, self._period
        return ExpertBudgets(config, device, layouts, lambda: measured(self._journal.nbytes), every_n_steps=period)

    def _inputs(
        self, popularity: Sequence[float] | None = None, budgets: Mapping[str, int] | None = None
    ) -> PlanInputs:
        """Return the policy's inputs as known now."""
        operators, tokens = self._view.operators, self.tokens
        return PlanInputs(
            operators=operators,
            popularity=[0.0] * operators.num_experts if popularity is None else popularity,
            budgets=self._budgets.in_force if budgets is None else budgets,
            index=0 if tokens is None else tokens.ledger.generations,
            ledger=None if tokens is None else tokens.ledger,
            coming=None if tokens is None else tokens.coming,
            layouts=() if tokens is None else tokens.layouts,
            bad=() if tokens is None else tokens.to_take_again,
            generations_kept=self._kept,
            made_for=self._made_for,
        )

    def _budgets_changed(self, rows: Sequence[Sequence[int]]) -> bool:
        """Take every rank's present budget; return whether it differs from the plan's budget by more than noise."""
        assert self._current is not None
        found, before = [min(column) for column in zip(*rows, strict=True)], self._current.record.budget_nbytes
        if 0 in found:
            return False
        self._budgets.clock.forget()
        if not before or abs(found[0] - before) < NOISE * before:
            return False
        self._budgets.agreed(rows)
        log.info("steps can hide %s by now, %s when windows were planned", size_text(found[0]), size_text(before))
        return True

    def _replan(self, popularity: list[float] | None) -> None:
        """Start to plan another order, or another budget, if `popularity` asks for it."""
        if popularity is None:
            return
        assert self._current is not None
        record = self._current.record
        dtypes = {fqn: getattr(torch, name) for fqn, name in record.compute_dtypes.items()}
        budgets = self._budgets.in_force or ({MEMORY: record.budget_nbytes} if record.budget_nbytes else {})
        self._next = in_background(partial(self._make, self._inputs(popularity, budgets), dtypes))

    def _make(self, inputs: PlanInputs, dtypes: dict[str, torch.dtype]) -> WindowLayout:
        """Ask the policy, and lay its plan out; from any thread."""
        inputs, limit = self.sizes.inputs(self._policy, inputs, dtypes)
        plan = self._policy.plan(inputs)
        if inputs.bad and not self._has_room(plan):
            plan = self._policy.plan(replace(inputs, bad=()))  # bad copies wait for the turn of their position
        if plan.partial:
            return self._lay_out(PlanRecord.over(self._view.operators, plan=plan, config=self._policy.config()))
        return self._lay_out(
            PlanRecord.over(
                self._view.operators,
                plan=plan,
                config=self._policy.config(),
                popularity=tuple(inputs.popularity),
                compute_dtypes={fqn: str(dtype).removeprefix("torch.") for fqn, dtype in dtypes.items()},
                averages_consumed=self._view.averages.consumed,
                budget_nbytes=inputs.budgets.get(MEMORY, 0),
                split_nbytes=limit,
            )
        )

    def _lay_out(self, record: PlanRecord) -> WindowLayout:
        """Return the plan's layout; partial plans, which come round again, are laid out once."""
        key = (record.to_json(), self._journal.nbytes)
        layout = self._layouts.get(key)
        if layout is None:
            layout = lay_out(record, self._view, self._groups, key[1]).mirrored(self.mirroring)
            for step in layout.steps:
                columns_of(step)  # in advance, since plans are mostly made beside the training thread
            if record.plan.partial:
                self._layouts[key] = layout
            while len(self._layouts) > REMEMBERED_PLANS:
                self._layouts.popitem(last=False)
        return layout

    def _reserve(self, turns: Sequence[WindowLayout]) -> int:
        """Return the bytes of slots for the first round, and for later budgets."""
        sizes = [self._nbytes_by_position(self._selection(turn.record.plan)) for turn in turns]
        self._room = [max(column) for column in zip(*sizes, strict=True)]
        later = self._budgets.reserve_nbytes
        self._reserve_nbytes = max(max(turn.slot_nbytes, later + turn.mirrors_nbytes[1]) for turn in turns)
        return self._reserve_nbytes

    def _has_room(self, plan: Plan) -> bool:
        """Return whether every position's experts fit into the slots, which were made for equal turns."""
        sizes = self._nbytes_by_position(self._selection(plan))
        return all(nbytes <= room for nbytes, room in zip(sizes, self._room, strict=False))

    def _nbytes_by_position(self, selection: Selection) -> list[int]:
        """Return the bytes of experts that memory takes from each position; the same on all ranks."""
        layouts = () if self.tokens is None else self.tokens.layouts
        positions = sorted({position for layout in layouts for position in layout.rank_of})
        rows = list(zip(layouts, selection.memory, strict=True))
        return [sum(e.nbytes for e, row in rows for i in row if e.rank_of[i] == position) for position in positions]

    def _selection(self, plan: Plan) -> Selection:
        return Selection.of_plan(plan, self._view.operators)
