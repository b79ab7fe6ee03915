"""From one lossy generation to the next: which experts it takes, what is known of their tokens, where its bytes lie.

Every window is of one boundary and has a plan of its own. The exchange that opens a window carries the tokens that
each rank has counted since the last one, so all ranks have the same accounting and choose alike. While a window is
being taken, the next one is planned on a thread from what is known then: a choice is one generation old when it is
carried out.

Source: PEC/MoC (2024), Sec. 3.1 and Algorithm 1; we differ in the exchange, which is that of the windows and not one per step.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_moe_ckpt.errors import ConfigurationError, IdentityMismatch
from lightning_moe_ckpt.operators import LoadCounter, RecordKind
from lightning_moe_ckpt.parallel import ParallelGroups
from lightning_moe_ckpt.policies import (
    AUDIENCES,
    MEMORY,
    PEER,
    STORAGE,
    Accounting,
    Audience,
    Selection,
    expert_layouts,
)
from lightning_moe_ckpt.session._bad_copies import WIDTH as BAD_COPIES_WIDTH
from lightning_moe_ckpt.session._bad_copies import BadCopyList
from lightning_moe_ckpt.session._count_copies import CountCopies
from lightning_moe_ckpt.session._count_proof import CountProof
from lightning_moe_ckpt.session._deltas import Deltas
from lightning_moe_ckpt.session._exchange import Exchange
from lightning_moe_ckpt.session._gradients import why_no_deltas
from lightning_moe_ckpt.session._host import HOST
from lightning_moe_ckpt.session._journal import JournalCapacity
from lightning_moe_ckpt.session._lay_out import lay_out
from lightning_moe_ckpt.session._layout import StateView, WindowLayout
from lightning_moe_ckpt.session._loss_figures import LossFigures
from lightning_moe_ckpt.session._lossy_budgets import SlotMeasure
from lightning_moe_ckpt.session._lossy_restore import expert_names
from lightning_moe_ckpt.session._lossy_windows import LossyWindows
from lightning_moe_ckpt.session._peers import PEER as PEER_TIER
from lightning_moe_ckpt.session._peers import PeerRoom
from lightning_moe_ckpt.session._persist import STORAGE as STORAGE_TIER
from lightning_moe_ckpt.session._persist import PersistWorker
from lightning_moe_ckpt.session._plan_record import PlanRecord
from lightning_moe_ckpt.session._popularity import sum_in_order
from lightning_moe_ckpt.session._reordering import Background
from lightning_moe_ckpt.session._worker import TierWorker
from lightning_moe_ckpt.storage import BadCopies, GenerationId

log = logging.getLogger(__name__)

LEVEL_OF_TIER = {HOST: MEMORY, STORAGE_TIER: STORAGE}
"""Whose completion the book follows; copies on other nodes of all that memory has come and go with it."""

_REMEMBERED_LAYOUTS = 64

_PENDING_NBYTES = 64
"""In a journal, per expert of a generation that is under way, both levels together, roughly."""


class LossyPlanner:
    """Plans lossy windows, and keeps the accounting of tokens.

    Args:
        policy: what is taken when.
        view: live state, operators not split.
        groups: this rank's place.
        exchange: control exchange.
        module: the model, whose tokens are counted.

    Raises:
        ConfigurationError: the model has no experts, or more are asked for than the policy allows.
    """

    def __init__(
        self,
        policy: LossyWindows,
        *,
        view: StateView,
        groups: ParallelGroups,
        exchange: Exchange,
        module: torch.nn.Module,
    ) -> None:
        if not view.operators.layers:
            raise ConfigurationError(
                f"`{policy.callback}` takes some experts of every layer, and no Mixture-of-Experts layer was found in the "
                "model. Use DenseCheckpoint, or `register_adapter` if it has layers of a class of its own."
            )
        self._policy, self._view, self._groups, self._exchange = policy, view, groups, exchange
        nbytes = {op.name: view.record_nbytes(op, RecordKind.FULL) for op in view.operators}
        self._experts = expert_layouts(view.operators, nbytes)
        self._counter = LoadCounter(view.operators, module)
        self._counts = CountCopies(self._counter)
        self._step: int | None = None
        self._proof = CountProof(view.operators, module, exchange, required=True)
        self._journal = JournalCapacity()
        measure, device = SlotMeasure(view, groups), next(iter(view.params.values())).device
        self._choice = policy.choice(self._experts, lambda: measure.sizes(self._journal.nbytes), device)
        self.accounting = Accounting.start([each.num_experts for each in self._experts], k=self._choice.k)
        self._layouts: OrderedDict[tuple[Selection, int], WindowLayout] = OrderedDict()
        self._reserve_nbytes = 0
        self._room: list[int] = []
        """Bytes of experts of each position that slots are made for."""
        self._levels = LEVEL_OF_TIER
        self._taken: dict[str, tuple[int, ...]] = {}
        self._bad = BadCopyList(expert_names(view.operators))
        self._deltas: Deltas | None = None
        self._current: WindowLayout | None = None
        self._next: Background | None = None

    # -- as Planner has it

    @property
    def reordering(self) -> LossyPlanner:
        """What the exchange at window boundaries carries."""
        return self

    @property
    def interval_steps(self) -> int:
        """Steps from one window to the next."""
        return self._policy.every_n_steps

    @property
    def generations_kept(self) -> int:
        """Generations that memory keeps: together they hold every expert, if so many can."""
        return self._choice.generations_kept(self.accounting)

    @property
    def peer_audiences(self) -> frozenset[Audience]:
        """Files that copies on other nodes have: all that memory has, or what storage gets."""
        return frozenset(AUDIENCES) if self._policy.kind == "partial" else frozenset({"durable"})

    def peer_room(self) -> PeerRoom | None:
        """What holders of copies reserve for this rank; `None` for slots as the ring has them."""
        return self._choice.peer_room(self.accounting)

    def deltas(self) -> Deltas | None:
        """Whether gradients may be sent to other nodes where they lead to what is sent; the same on all ranks. Collective."""
        wanted = self._policy.deltas
        if wanted is not None:
            reason = why_no_deltas(self._view, every_n_steps=self.interval_steps, exact=wanted.kind == "lossless")
            if not self._exchange.all_agree(reason is None):
                log.info(
                    "generations are sent to other nodes as they are: %s", reason or "another rank has no gradients"
                )
                wanted = None
        self._deltas = wanted
        return wanted

    def joined(self, workers: Sequence[TierWorker]) -> None:
        """The tiers of this life are these."""
        tiers = {worker.name: worker for worker in workers}
        storage = tiers[STORAGE_TIER]
        self._bad.scrubber = storage.scrub() if isinstance(storage, PersistWorker) else None
        remote = tiers.get(PEER_TIER) or storage
        self._choice.joined(lambda: remote.rate)
        self._view.gradient_dtype = self._deltas.dtype if self._deltas is not None and PEER_TIER in tiers else None
        if "node" not in self.peer_audiences and PEER_TIER in tiers:
            self._levels = {**LEVEL_OF_TIER, PEER_TIER: PEER}
            self.accounting = self.accounting.with_peers(kept=True)

    @property
    def journal_nbytes(self) -> int:
        """Capacity of a journal record."""
        return self._journal.nbytes

    def journal_needs(self, nbytes: int) -> None:
        """A journal of `nbytes` was seen, maybe before there was a generation under way."""
        self._journal.needs(nbytes + self._choice.num_pending(self.accounting) * _PENDING_NBYTES)

    def journal_had(self, nbytes: int) -> None:
        """The life before reserved `nbytes`, with room for generations under way."""
        self._journal.had(nbytes)

    def adopt(self, layout: WindowLayout) -> None:
        """`layout` is in force."""
        self._current = layout

    def accepts(self, layout: WindowLayout) -> bool:
        """A restored plan is never gone on with: its experts have just been taken."""
        return False

    def begin(self) -> None:
        """Start counting tokens."""
        self._counter.install()

    def stepped(self, step: int) -> None:
        """Counts pile up until a window needs them."""
        self._step = step
        self._choice.stepped()

    def forward_begins(self, *, replaying: bool) -> None:
        """A batch is about to run forward and backward."""
        self._counts.forward_begins()
        self._proof.batch_begins()

    def forward_ends(self) -> None:
        """The optimizer is about to step, with whole gradients.

        Raises:
            WrongCounts: tokens are not counted as experts process them.
        """
        self._proof.before_step()
        if self._step is None or self._policy.due(self._step + 1, None, self.interval_steps):
            self._counts.start()
        self._choice.forward_ends()

    def first_layout(self) -> WindowLayout | None:
        """The first plan of this life, once. Collective where ranks have to agree on what it may take."""
        if self._current is not None or not self._choice.is_ready:
            return None
        told = self._choice.first()
        if told:
            self._choice.agreed(self._exchange.gather(told))
        # One round of turns: ranks give equally many then, and each has given most of all once.
        turns = len({rank for each in self._experts for rank in each.rank_of})
        first = self.accounting.generations
        again = self._bad.again(self.accounting.saved[STORAGE])
        layouts = [self._plan(self.accounting, index, again) for index in range(first, first + turns)]
        sizes = [self._nbytes_by_position(self._selection(layout)) for layout in layouts]
        self._room = [max(column) for column in zip(*sizes, strict=True)]
        self._reserve_nbytes = max(self._choice.reserve_nbytes, *(layout.slot_nbytes for layout in layouts))
        layouts[0].reserve_nbytes = self._reserve_nbytes
        return layouts[0]

    def forget_layout(self) -> None:
        """Parameters were added to the optimizer: nothing is planned any more."""
        log.error(
            "parameters were added to the optimizer: generations that mix states from before and after that have no "
            "meaning, so none is taken until training ends. Use SparseCheckpoint or DenseCheckpoint, which follow."
        )

    def relayout(self, layout: WindowLayout, journal_nbytes: int) -> WindowLayout:
        """A plan with room for a larger journal."""
        self._journal.nbytes = journal_nbytes
        self._layouts.clear()
        following, self._next = self._next, None
        if following is not None:
            self._next = Background(lambda: self._lay_out(self._selection(following.result())))
        larger = self._lay_out(self._selection(layout))
        self._reserve_nbytes += max(0, larger.slot_nbytes - layout.slot_nbytes)
        larger.reserve_nbytes = self._reserve_nbytes
        return larger

    def state(self) -> dict[str, Any]:
        """What the journal keeps at a boundary; call before the next optimizer step."""
        return {"popularity": None, "accounting": self.accounting.to_journal(), "scalars": self._scalars()}

    def restore(self, outcome: Mapping[str, Any]) -> None:
        """Go on from the accounting of the boundary that this life starts from."""
        stored = outcome.get("accounting")
        self._bad.restored(outcome.get("bad", {}))
        if stored is None:
            log.info("the generation that is resumed from was not counted: tokens are counted from here on")
            return
        accounting = Accounting.from_journal(stored)
        if accounting.num_experts != tuple(each.num_experts for each in self._experts):
            raise IdentityMismatch(
                f"The generation counted tokens of {accounting.num_experts} experts by layer, the model has "
                f"{tuple(each.num_experts for each in self._experts)}. Resume with the code that wrote it."
            )
        lost_E: Tensor | None = outcome.get("lost")
        if lost_E is None:  # it has everything, and is in storage
            whole = torch.ones_like(accounting.alive, dtype=torch.bool)
            at = torch.full_like(accounting.alive, outcome["step"])
            accounting, _ = accounting.restore(accounting.alive, at, {STORAGE: whole})
        # What others still hold of an earlier life is not gone through: they count as having nothing.
        accounting = accounting.with_peers(kept=PEER in self._levels.values())
        self.accounting = self._choice.after_restart(accounting, lost_E)

    def loss_figures(self) -> LossFigures:
        """See `Report`."""
        now = self.accounting
        return LossFigures(
            k=now.k,
            plt=now.plt,
            mlt=now.mlt,
            faults=now.faults,
            processed=int(now.processed.sum()),
            lost=int(now.lost.sum()),
            unsaved={level: int(now.unsaved(level).sum()) for level in now.saved},
            accounting=now,
            budgets=self._choice.budget_nbytes,
            bandwidths=self._choice.rates,
            taken=self._taken,
        )

    def collect(self, exchange: Exchange) -> None:
        """Take in what was counted since the last window. Collective."""
        self._count(exchange.gather(self._counts.take()))

    def close(self) -> None:
        """Stop counting, and reading what is stored."""
        self._bad.close()
        self._counter.remove()
        self._proof.remove()

    # -- at window boundaries

    @property
    def bad_copies(self) -> BadCopies:
        """Copies of experts in storage that are not borrowed any more."""
        return self._bad.not_borrowed

    @property
    def all_have_copies(self) -> bool:
        """Whether there is another one of each of these experts."""
        return self._bad.all_have_copies

    def inputs(self) -> list[int]:
        """Tokens of this rank since the last window, by expert, and what a choice needs to know of it."""
        return [*self._counts.take(), *self._bad.inputs(), *self._choice.inputs()]

    def agreed(self, rows: Sequence[Sequence[int]]) -> None:
        """What every rank added, by rank."""
        number = sum(self.accounting.num_experts)
        self._count([row[:number] for row in rows])
        self._bad.agreed([row[number : number + BAD_COPIES_WIDTH] for row in rows], self.accounting.saved[STORAGE])
        self._choice.agreed([row[number + BAD_COPIES_WIDTH :] for row in rows])

    def take_next(self) -> WindowLayout | None:
        """The plan of the window that may begin now; waits for it. `None` for the first one, and after one that did not begin."""
        following, self._next = self._next, None
        return None if following is None else following.result()

    def started(self, step: int, layout: WindowLayout) -> None:
        """A window begins; the one after it is planned from what is known now."""
        selection = self._selection(layout)
        self._taken = {level: tuple(map(len, selection.of(level))) for level in (MEMORY, STORAGE)}
        self.accounting = now = self.accounting.take(step, selection, levels=())  # what levels get, they are told of
        again = self._bad.again(now.saved[STORAGE])
        self._next = Background(lambda: self._plan(now, now.generations, again))

    def given(
        self, tier: str, generation: GenerationId, layout: WindowLayout, generations_kept: int | None = None
    ) -> None:
        """A tier begins to take the generation of the boundary at hand."""
        level = self._levels.get(tier)
        if level is not None:
            experts = self._selection(layout).flat(level, self._experts)
            book = self.accounting.saved[level].take(
                generation.step, experts, self.accounting.alive, kept=generations_kept
            )
            self.accounting = replace(self.accounting, saved={**self.accounting.saved, level: book})

    def given_everything(self, tier: str, generation: GenerationId) -> None:
        """A tier is to get all of the boundary at hand, in a generation of its own."""
        level = LEVEL_OF_TIER[tier]
        experts = Selection.everything(self._experts).flat(level, self._experts)
        book = self.accounting.saved[level].take(generation.step, experts, self.accounting.alive)
        self.accounting = replace(self.accounting, saved={**self.accounting.saved, level: book})

    def complete_everywhere(self, tier: str, generation: GenerationId) -> None:
        """On every rank a tier has all of a generation."""
        if tier not in self._levels:
            return
        level = self._levels[tier]
        if level == STORAGE:
            self._bad.completed(self.accounting.saved[level], generation.step)
        self.accounting = self.accounting.complete(level, generation.step)

    def given_up(self, tier: str, generation: GenerationId) -> None:
        """A tier will never have all of a generation that it was given."""
        if tier in self._levels:
            # Holders of copies know of a generation that others lack only what they have themselves: it keeps its place there.
            self.accounting = self.accounting.give_up(self._levels[tier], generation.step, place_is_free=tier == HOST)

    def lost(self, tier: str) -> None:
        """Some rank has lost all that a tier held."""
        if tier in self._levels:
            self.accounting = self.accounting.forget(self._levels[tier])

    # -- private

    def _count(self, rows: Sequence[Sequence[int]]) -> None:
        """Tokens of every rank, by rank."""
        tokens_E = sum_in_order([torch.tensor(list(row), dtype=torch.int64) for row in rows])
        self.accounting = self.accounting.add(tokens_E)

    def _plan(self, accounting: Accounting, index: int, again: Collection[int] = ()) -> WindowLayout:
        selection = self._choice.select(index, accounting, again)
        if again and any(n > room for n, room in zip(self._nbytes_by_position(selection), self._room, strict=False)):
            # Slots are made for equal turns of positions: it has to wait for its own.
            selection = self._choice.select(index, accounting)
        return self._lay_out(selection)

    def _nbytes_by_position(self, selection: Selection) -> list[int]:
        """Bytes of the experts that memory takes from each position; the same on all ranks."""
        positions = sorted({position for each in self._experts for position in each.rank_of})
        rows = list(zip(self._experts, selection.memory, strict=True))
        return [sum(e.nbytes for e, row in rows for i in row if e.rank_of[i] == position) for position in positions]

    def _lay_out(self, selection: Selection) -> WindowLayout:
        """A layout of the plan, made once while plans come round again."""
        key = (selection, self._journal.nbytes)
        layout = self._layouts.get(key)
        if layout is None:
            record = PlanRecord(plan=selection.plan(self._view.operators), config=self._policy.config())
            layout = lay_out(record, self._view, self._groups, self._journal.nbytes)
            self._layouts[key] = layout
            while len(self._layouts) > _REMEMBERED_LAYOUTS:
                self._layouts.popitem(last=False)
        return layout

    def _selection(self, layout: WindowLayout) -> Selection:
        """The experts that a plan takes."""
        return Selection.of_plan(layout.record.plan, self._view.operators)

    def _scalars(self) -> dict[str, dict[str, Tensor]]:
        """Optimizer state that is one value for several experts, as of now: no record of one of them can have it."""
        shared = {fqn for fqn, number in self._experts_of().items() if number > 1}
        found: dict[str, dict[str, Tensor]] = {}
        for fqn in sorted(shared):
            param, schema = self._view.params[fqn], self._view.schema
            for entry in schema.entries(param):
                value = None if entry.per_element else schema.get_state(param, entry.key)
                if value is not None:
                    found.setdefault(fqn, {})[entry.key] = value
        return found

    def _experts_of(self) -> dict[str, int]:
        """How many experts share each parameter."""
        numbers: dict[str, int] = {}
        for op in (each for each in self._view.operators if each.expert_idx is not None):
            for fqn in {piece.fqn for piece in op.slices}:
                numbers[fqn] = numbers.get(fqn, 0) + 1
        return numbers
