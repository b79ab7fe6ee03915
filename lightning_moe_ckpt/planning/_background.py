"""Ask a policy for plans over operators of known sizes, and lay them out; beside training, if there is time until the next window.

Each pipeline stage plans for itself, and all take the same windows (`StagePlans`). A stage's ranks measure and agree among
themselves; other stages' budgets and counts do not concern them. A common window is as long as the longest of a stage. A stage
with a shorter plan is dense sooner, and trains on beside replays.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch

from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.journal import JournalCapacity
from lightning_moe_ckpt.operators import RecordKind
from lightning_moe_ckpt.parallel import ParallelGroups, beside
from lightning_moe_ckpt.policies import MEMORY, ExpertLayout, Plan, PlanInputs, Policy, Selection, all_names
from lightning_moe_ckpt.snapshot import (
    REMEMBERED_PLANS,
    PlanRecord,
    StateView,
    WindowLayout,
    columns_of,
    dense_nbytes,
    dense_plan_of_stages,
    expert_nbytes,
    lay_out,
    record_nbytes,
    share_written,
    split_operators,
)
from lightning_moe_ckpt.storage import SlotClass
from lightning_moe_ckpt.tiers import Mirroring, RingRoom


class OperatorSizes:
    """Bytes that this rank writes of the view's operators: measured once for a plan's precisions."""

    def __init__(self, view: StateView, groups: ParallelGroups) -> None:
        self._view, self._groups = view, groups
        self._whole: tuple[dict[str, torch.dtype], dict[str, tuple[int, int]]] | None = None
        self._dense: int | None = None

    def forget(self) -> None:
        """Let the next reading measure anew: the view's operators or the optimizer's state have changed."""
        self._whole = self._dense = None

    @property
    def dense_nbytes(self) -> int:
        """Bytes of a full snapshot, without alignment and journal."""
        if self._dense is None:
            self._dense = dense_nbytes(self._view, self._groups)
        return self._dense

    def inputs(self, policy: Policy, inputs: PlanInputs, dtypes: dict[str, torch.dtype]) -> tuple[PlanInputs, int]:
        """Return the inputs with sizes, and the policy's limit in bytes for pieces of operators; 0 for no limit."""
        if self._whole is None or self._whole[0] != dtypes:
            self._whole = dtypes, record_nbytes(self._view.replanned(self._view.operators, dtypes), self._groups)
        inputs = replace(inputs, sizes=self._whole[1])
        if not (limit := policy.split_nbytes(inputs)):
            return inputs, limit
        whole = self._view.replanned(self._view.operators, dtypes)
        view = whole.replanned(split_operators(whole, self._groups, limit), dtypes)
        return replace(inputs, operators=view.operators, sizes=record_nbytes(view, self._groups)), limit


class PlanMaker:
    """Maker of plans, from a policy's inputs to every byte's place; one plan at a time is made beside training.

    The view's operators are not split. `experts` are layouts of the experts whose tokens are counted, by layer; empty
    if none are.
    """

    def __init__(
        self, policy: Policy, view: StateView, groups: ParallelGroups, experts: Sequence[ExpertLayout]
    ) -> None:
        self._policy, self._view, self._groups, self._experts = policy, view, groups, experts
        self.sizes = OperatorSizes(view, groups)
        self.journal = JournalCapacity()
        self.mirroring = Mirroring()
        self._layouts: OrderedDict[tuple[str, int], WindowLayout] = OrderedDict()
        """Layouts of partial plans, by record and journal capacity."""
        self._following: Future[WindowLayout] | None = None
        """Plan under way."""
        self._reserve_nbytes = 0
        self._room: list[int] = []
        """Bytes of each position's experts that fit into ring slots."""

    def forget(self) -> None:
        """Forget all sizes and layouts, and the plan under way: operators or the optimizer's state have changed."""
        self._following = None
        self.sizes.forget()
        self._layouts.clear()

    def begin(self, inputs: PlanInputs, dtypes: dict[str, torch.dtype]) -> None:
        """Start to make the next plan."""
        self._following = beside(partial(self.make, inputs, dtypes), "moe-ckpt-plan")

    def take(self) -> WindowLayout | None:
        """Wait for the next plan and return it; `None` if none was begun."""
        following, self._following = self._following, None
        return None if following is None else following.result()

    def make(self, inputs: PlanInputs, dtypes: dict[str, torch.dtype]) -> WindowLayout:
        """Ask the policy, and lay its plan out; from any thread."""
        inputs, limit = self.sizes.inputs(self._policy, inputs, dtypes)
        plan = self._policy.plan(inputs)
        if inputs.bad and not self._has_room(plan):
            plan = self._policy.plan(replace(inputs, bad=()))  # bad copies wait for the turn of their position
        whole: dict[str, Any] = {
            "popularity": tuple(inputs.popularity),
            "compute_dtypes": {fqn: str(dtype).removeprefix("torch.") for fqn, dtype in dtypes.items()},
            "averages_consumed": self._view.averages.consumed,
            "budget_nbytes": inputs.budgets.get(MEMORY, 0),
            "split_nbytes": limit,
        }
        shared = {"fixed": self._view.gradient_dtype is not None} if plan.partial else whole
        return self.lay_out(PlanRecord.over(self._view.operators, plan=plan, config=self._policy.config(), **shared))

    def lay_out(self, record: PlanRecord) -> WindowLayout:
        """Return the plan's layout; partial plans, which come round again, are laid out once."""
        key = (record.to_json(), self.journal.nbytes)
        if (layout := self._layouts.get(key)) is None:
            layout = lay_out(record, self._view, self._groups, key[1]).mirrored(self.mirroring)
            for step in layout.steps:
                columns_of(step)  # in advance, since plans are mostly made beside the training thread
            if record.plan.partial:
                self._layouts[key] = layout
            while len(self._layouts) > REMEMBERED_PLANS:
                self._layouts.popitem(last=False)
        return layout

    def differential(self, layout: WindowLayout) -> WindowLayout:
        """Return the layout of differences from one boundary to the next, cut like the states of `layout`."""
        return self.lay_out(replace(layout.record, plan=Plan.of_everything(layout.record.plan.names, RecordKind.DELTA)))

    def enlarged(self, layout: WindowLayout, journal_nbytes: int) -> WindowLayout:
        """Return a plan with room for a larger journal, and enlarge the following plan."""
        self.journal.nbytes = journal_nbytes
        self._layouts.clear()
        following, self._following = self._following, None
        if following is not None:
            self._following = beside(lambda: self.lay_out(following.result().record), "moe-ckpt-plan")
        larger = self.lay_out(layout.record)
        if self._reserve_nbytes:
            self._reserve_nbytes += max(0, larger.slot_nbytes - layout.slot_nbytes)
            larger.reserve_nbytes = self._reserve_nbytes
        return larger

    def room(self, layout: WindowLayout, generations: int) -> RingRoom:
        """Return the room for so many generations, and for what memory keeps beside them."""
        experts = expert_nbytes(self._view, self._groups) if layout.record.plan.partial else {}
        room = RingRoom(steps=layout.room, generations=generations, experts=experts)
        if (chains := self._policy.chains) is None:
            return room
        return replace(room, links=SlotClass(self.differential(layout).slot_nbytes, chains.links_kept(generations)))

    def mirror(self, mirroring: Mirroring) -> float:
        """Capture state for other ranks too; return this rank's own share of the bytes to memory."""
        self.mirroring = mirroring
        return 1 / (1 + len(mirroring.owners) * share_written(self._view, self._groups, mirroring.among))

    def reserve(self, turns: Sequence[WindowLayout], later: int) -> int:
        """Return the bytes that a slot needs for every turn of the first round, and for later budgets of up to `later` bytes.

        Later plans are held against the room that each position's experts have here, see `_has_room`.
        """
        sizes = [self._nbytes_by_position(self.selection(turn.record.plan)) for turn in turns]
        self._room = [max(column) for column in zip(*sizes, strict=True)]
        self._reserve_nbytes = max(max(turn.slot_nbytes, later + turn.steps[0].mirrors_nbytes) for turn in turns)
        return self._reserve_nbytes

    def _has_room(self, plan: Plan) -> bool:
        """Return whether every position's experts fit into the room for which `reserve` made the slots."""
        sizes = self._nbytes_by_position(self.selection(plan))
        return all(nbytes <= room for nbytes, room in zip(sizes, self._room, strict=False))

    def _nbytes_by_position(self, selection: Selection) -> list[int]:
        """Return the bytes of experts that memory takes from each position; the same on all ranks."""
        positions = sorted({position for layout in self._experts for position in layout.rank_of})
        rows = list(zip(self._experts, selection.memory, strict=True))
        return [sum(e.nbytes for e, row in rows for i in row if e.rank_of[i] == position) for position in positions]

    def selection(self, plan: Plan) -> Selection:
        return Selection.of_plan(plan, self._view.operators)


class StagePlans:
    """Plan of this rank's stage among all stages' plans. Construction is collective. The view's operators are not split."""

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
