"""The token ledger of one incarnation: counted tokens, the experts that tiers hold, bad copies.

The exchange that opens a window carries each rank's tokens since the last window, so all ranks have the same ledger.
The same exchange agrees on the generations that tiers were given and have completed, see `Tiers`.

The ledger is as of a boundary, so counts cannot come a window late: that boundary's journal has them. But nothing is
counted between the end of backward and the boundary, so the copy of counts to the host begins there, on its own stream.
A reader waits for backward at most, never for the optimizer or for copies of snapshots.

*Bad copies* of experts in storage ride along, so that all ranks plan and reference alike. A few integers carry a rank's newest
findings; more wait for the next exchange. An expert with a bad copy is taken again, and the bad copy is not referenced until a
newer copy is complete whose generation began after the finding: a generation already under way may name the bad copy as its second.

Source: PEC/MoC (2024), Sec. 3.1 and Algorithm 1; we differ in the exchange: one per window, not one per step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.errors import IdentityMismatch
from lightning_moe_ckpt.journal import Arrival, Arrivals
from lightning_moe_ckpt.operators import LoadCounter, OperatorSet, RecordKind
from lightning_moe_ckpt.planning._budgets import Budgets
from lightning_moe_ckpt.planning._measures import StepFollower, sum_in_order
from lightning_moe_ckpt.policies import (
    MEMORY,
    NEVER,
    PEER,
    STORAGE,
    ExpertLayout,
    PlanInputs,
    Policy,
    Selection,
    TierLedger,
    TokenLedger,
    expert_layouts,
    expert_names,
)
from lightning_moe_ckpt.snapshot import StateView, WindowLayout
from lightning_moe_ckpt.storage import BadCopies, GenerationId
from lightning_moe_ckpt.tiers import HOST, BadCopy, PersistWorker, Scrubber, TierWorker
from lightning_moe_ckpt.tiers import PEER as PEER_TIER
from lightning_moe_ckpt.tiers import STORAGE as STORAGE_TIER

_AT_ONCE = 4
"""Most copies that a rank reports before one window."""
_INTEGERS = 5
"""Integers per copy: the expert's place, counted from 1; step, incarnation and nonce; whether another copy exists."""

BAD_COPIES_WIDTH = _AT_ONCE * _INTEGERS
"""Integers that each rank adds to an exchange."""


class BadCopyList:
    """Bad copies known to one incarnation; the same on all ranks, except unsent findings.

    `names` are the names of all experts' operators, by place over all layers.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names, self._places = names, {name: place for place, name in enumerate(names)}
        self._known: dict[int, set[GenerationId]] = {}
        self._newest: set[int] = set()
        """Experts whose newest copy is bad."""
        self._alone: set[int] = set()
        """Experts among `_newest` without another copy, as far as the finding rank knew."""
        self._begun: dict[int, int] = {}
        """Newest boundary that storage had begun at an expert's finding: markers up to there may name the bad copy."""
        self.scrubber: Scrubber | None = None
        """Reader of stored copies on this rank, which finds bad ones."""

    @property
    def not_referenced(self) -> BadCopies:
        """Bad copies of experts whose newest copy is bad, by name."""
        return {self._names[place]: frozenset(self._known[place]) for place in sorted(self._newest)}

    @property
    def all_have_copies(self) -> bool:
        """Whether each of these experts has another copy; else no generation is complete without the expert."""
        return not any(place in self._alone or len(self._known[place]) > 1 for place in self._newest)

    def restored(self, bad: Mapping[str, Collection[GenerationId]]) -> None:
        """Note the bad copies that this incarnation's restore found, by expert; the newest copy is among them."""
        for name, generations in bad.items():
            if generations:
                self._newest.add(self._places[name])
                self._known.setdefault(self._places[name], set()).update(generations)

    def again(self, storage: TierLedger) -> list[int]:
        """Return the places of experts with bad copies that no generation under way to storage takes."""
        under_way = {expert for each in storage.pending for expert in each.experts.tolist()}
        return sorted(self._known.keys() - under_way)

    def completed(self, storage: TierLedger, step: int) -> None:
        """Note that storage has all of generation `step`; call before the ledger completes it."""
        for each in storage.pending:
            for expert in each.experts.tolist() if each.step == step else ():
                self._newest.discard(expert)
                self._alone.discard(expert)
                if step > self._begun.get(expert, NEVER):
                    self._known.pop(expert, None)
                    self._begun.pop(expert, None)

    def close(self) -> None:
        """Stop reading stored copies."""
        if self.scrubber is not None:
            self.scrubber.close()

    def inputs(self) -> list[int]:
        """Return this rank's new findings as `BAD_COPIES_WIDTH` integers."""
        found = [] if self.scrubber is None else self.scrubber.take_found(_AT_ONCE)
        told = [number for copy in found if copy.operator in self._places for number in self._numbers(copy)]
        return told + [0] * (BAD_COPIES_WIDTH - len(told))

    def agreed(self, rows: Sequence[Sequence[int]], storage: TierLedger) -> None:
        """Take all ranks' findings."""
        for row in rows:
            for i in range(0, BAD_COPIES_WIDTH, _INTEGERS):
                place, step, incarnation, nonce, spared = row[i] - 1, *row[i + 1 : i + _INTEGERS]
                if place < 0:
                    continue
                generation = GenerationId(step=step, incarnation=incarnation, nonce=f"{nonce:012x}")
                self._known.setdefault(place, set()).add(generation)
                self._begun[place] = max((each.step for each in storage.pending), default=NEVER)
                if int(storage.step[place]) == step:
                    self._newest.add(place)
                    self._alone |= set() if spared else {place}

    def _numbers(self, copy: BadCopy) -> list[int]:
        at = copy.generation
        return [self._places[copy.operator] + 1, at.step, at.incarnation, int(at.nonce, 16), int(copy.spared)]


log = rank_logger(__name__)

LEVEL_OF_TIER: dict[str, str] = {HOST: MEMORY, STORAGE_TIER: STORAGE}
"""Level of each tier that the ledger follows; copies on other nodes come and go with memory's if they hold the same."""

_IN_FLIGHT = 4
"""Approximate generations under way in a journal, over all tiers."""

_IN_FLIGHT_NBYTES = 64
"""Approximate bytes in a journal per expert of a generation under way, both levels together."""


@dataclass(frozen=True, kw_only=True)
class LossFigures:
    """Experts' tokens in a run whose restarts are not exact, over all ranks and faults."""

    k: int | None
    """Experts per layer that each generation now takes to storage; `None` if the policy does not count experts."""
    plt: float
    """Portion of lost tokens (PEC, eq. 4)."""
    mlt: float
    """Lost tokens, summed over layers (MOETION, eq. 6)."""
    faults: int
    """Recoveries that lost updates."""
    processed: int
    """Tokens that experts processed, counted once per routing."""
    lost: int
    """Processed tokens whose updates are in no weights any more."""
    unsaved: dict[str, int]
    """Tokens by level, `memory` and `storage`, whose updates would be lost if only that level were left."""
    accounting: TokenLedger = field(repr=False, compare=False)
    """Ledger of tokens by expert, the source of these figures."""
    budgets: dict[str, int] = field(default_factory=dict, compare=False)
    """Bytes per generation of this rank in force, `local_budget` and `remote_budget`; empty without budgets."""
    bandwidths: dict[str, float] = field(default_factory=dict, compare=False)
    """Measured bytes per second of this rank behind the budgets."""
    capped: dict[str, int] = field(default_factory=dict, compare=False)
    """Bytes by which the size of memory keeps a measured budget below the hidden bytes of steps, if it ever did."""
    taken: dict[str, tuple[int, ...]] = field(default_factory=dict, compare=False)
    """Experts of each layer in the newest generation, to `memory` and to `storage`."""


class RoutedCounter:
    """Counter of tokens that experts process, and of tokens dropped over capacity in layers that show them."""

    def __init__(self, operators: OperatorSet, module: torch.nn.Module) -> None:
        layers = operators.layers
        showing = tuple(replace(layer, count=layer.dropped) for layer in layers if layer.dropped is not None)
        self._processed = LoadCounter(operators, module)
        self._dropped = LoadCounter(replace(operators, layers=showing), module)
        places = [i for i, layer in enumerate(layers) if layer.dropped is not None for _ in range(layer.num_experts)]
        self._layer_of, self._num_layers = torch.tensor(places, dtype=torch.int64), len(layers)

    def install(self) -> None:
        """Start counting."""
        self._processed.install()
        self._dropped.install()

    def remove(self) -> None:
        """Stop counting."""
        self._processed.remove()
        self._dropped.remove()

    def read_and_reset(self) -> Tensor:
        """Return the counts since the last call: int64 `[E + L]`, without waiting for the device."""
        processed_E, dropped_E = self._processed.read_and_reset(), self._dropped.read_and_reset().to(torch.int64)
        dropped_E = dropped_E.to(processed_E.device)
        self._layer_of = self._layer_of.to(dropped_E.device)
        dropped_L = torch.zeros(self._num_layers, dtype=torch.int64, device=dropped_E.device)
        return torch.cat([processed_E, dropped_L.index_add_(0, self._layer_of, dropped_E)])


class CountCopies:
    """Early copies of a counter, made while the optimizer steps; the counter has no other reader."""

    def __init__(self, counter: LoadCounter | RoutedCounter) -> None:
        self._counter = counter
        self._arrivals = Arrivals()
        self._under_way: list[Arrival] = []
        self._is_new = False
        """Whether nothing was counted since the newest copy began."""

    def forward_begins(self) -> None:
        """Note that more tokens are about to be counted."""
        self._is_new = False

    def start(self) -> None:
        """Copy the counts, which stay until the next batch. Does not wait for the device."""
        self._under_way.append(self._arrivals.start([self._counter.read_and_reset()]))
        self._is_new = True

    def take(self) -> list[int]:
        """Return the counts since the last call: tokens processed by each expert, then tokens dropped by each layer.

        Begins a copy if none has the newest counts, then waits for all.
        """
        if not (self._is_new and self._under_way):
            self.start()
        under_way, self._under_way = self._under_way, []
        total: list[int] = torch.cat([torch.stack(each.wait()) for each in under_way]).sum(0).tolist()
        return total


class Counting(StepFollower):
    """What planning takes from counted tokens; here nothing: no tokens are counted, since restarts are exact."""

    counts_tokens = False
    """Whether tokens are counted, and every window has its own plan."""
    layouts: Sequence[ExpertLayout] = ()
    """Layouts of the experts whose tokens are counted, by layer."""
    width = 0
    """Integers in `inputs`."""
    in_flight_nbytes = 0
    """Approximate bytes in a journal for generations under way."""

    @property
    def bad_copies(self) -> BadCopies:
        """Copies of experts in storage that are no longer referenced."""
        return {}

    def joined(self, tiers: Mapping[str, TierWorker]) -> None:
        """Take the tiers of this incarnation, by name."""

    def completed(self, inputs: PlanInputs) -> PlanInputs:
        """Return a plan's inputs with all that is known of tokens."""
        return inputs

    def took(self, step: int, selection: Selection) -> None:
        """Note the experts in the generation of boundary `step`; `given` says which tiers get it."""

    def figures(self, budgets: Budgets) -> LossFigures | None:
        """Return the figures on lost tokens for `Report`; `None` if restarts are exact."""
        return None

    def inputs(self) -> list[int]:
        """Return this rank's inputs to the exchange that opens a window."""
        return []

    def agreed(self, rows: Sequence[Sequence[int]]) -> None:
        """Take every rank's inputs, by rank."""

    def collect(self, exchange: Exchange) -> None:
        """Count the tokens since the last window, before a generation outside of windows. Collective."""

    def state(self) -> dict[str, Any]:
        """Return the journal's entries at a boundary; call before the next optimizer step."""
        return {}

    def restore(self, outcome: Mapping[str, Any]) -> None:
        """Go on from the ledger at the boundary this incarnation starts from. Raises `IdentityMismatch` if it counts other experts."""


class LedgerKeeper(Counting):
    """Keeper of the token ledger of `module`. `Tiers` reports generations, the policy changes it after a restart."""

    counts_tokens = True

    def __init__(self, policy: Policy, view: StateView, module: torch.nn.Module) -> None:
        self._policy, self._view = policy, view
        nbytes = {op.name: view.record_nbytes(op, RecordKind.FULL) for op in view.operators}
        self.layouts = layouts = expert_layouts(view.operators, nbytes)
        self._counter = RoutedCounter(view.operators, module)
        self.counts = CountCopies(self._counter)
        self.ledger = policy.after_restart(TokenLedger.start([layout.num_experts for layout in layouts]), None)
        self._levels = LEVEL_OF_TIER
        self._taken: dict[str, tuple[int, ...]] = {}
        self.coming = torch.zeros_like(self.ledger.alive)
        """int64 `[E]`: tokens between the newest two generations, an estimate for the time until the next."""
        self._processed_E = self.ledger.processed
        """int64 `[E]`: processed tokens as of the newest generation."""
        self._counted_at: int | None = None
        """Step up to which tokens are counted."""
        self._step: int | None = None
        """Newest step of this incarnation."""
        self._last_step: int | None = None
        """Planned last step of training, if any."""
        self._bad = BadCopyList([name for layer in view.operators.layers for name in expert_names(layer)])

    @override
    def begin(self) -> None:
        self._counter.install()

    @override
    def batch_begins(self, *, replaying: bool, planned: bool, last_step: int | None) -> None:
        self._last_step = last_step
        self.counts.forward_begins()

    @override
    def before_step(self) -> None:
        """Copy the counts if the next boundary may begin a generation."""
        if self._step is None or self._policy.due(self._step + 1, None, 1):
            self.counts.start()

    @override
    def stepped(self, step: int) -> None:
        self._step = step
        if self._counted_at is None:  # nothing was counted before the first step
            self._counted_at = step - 1

    @override
    def joined(self, tiers: Mapping[str, TierWorker]) -> None:
        storage = tiers[STORAGE_TIER]
        self._bad.scrubber = storage.scrub() if isinstance(storage, PersistWorker) else None
        if PEER_TIER in tiers and "node" not in self._policy.peer_audiences:
            self._levels = {**LEVEL_OF_TIER, PEER_TIER: PEER}
            self.ledger = self.ledger.with_peers(kept=True)

    @override
    def completed(self, inputs: PlanInputs) -> PlanInputs:
        return replace(
            inputs,
            index=self.ledger.generations,
            ledger=self.ledger,
            coming=self.coming,
            layouts=self.layouts,
            bad=self._bad.again(self.ledger.saved[STORAGE]),
        )

    @override
    def took(self, step: int, selection: Selection) -> None:
        self._taken = {level: tuple(map(len, selection.of(level))) for level in (MEMORY, STORAGE)}
        self.ledger = self.ledger.take(step, selection, levels=())
        self.coming, self._processed_E = self.ledger.processed - self._processed_E, self.ledger.processed

    @override
    def figures(self, budgets: Budgets) -> LossFigures:
        now = self.ledger
        return LossFigures(
            k=now.k,
            plt=now.plt,
            mlt=now.mlt,
            faults=now.faults,
            processed=int(now.processed.sum()),
            lost=int(now.lost.sum()),
            unsaved={level: int(now.unsaved(level).sum()) for level in now.saved},
            accounting=now,
            budgets=budgets.nbytes,
            bandwidths=budgets.rates,
            capped=dict(budgets.capped),
            taken=self._taken,
        )

    @override
    def remove(self) -> None:
        self._bad.close()
        self._counter.remove()

    # -- the exchange that opens a window

    @property
    def width(self) -> int:  # type: ignore[override]  # follows the ledger
        return self._width + BAD_COPIES_WIDTH

    @override
    def inputs(self) -> list[int]:
        """Return this rank's tokens since the last window, by expert and layer, its last step, and bad copies."""
        return [*self.counted(), *self._bad.inputs()]

    def counted(self) -> list[int]:
        """Return the tokens and the last step, the first part of `inputs`."""
        return [*self.counts.take(), self._last_step or 0]

    @override
    def agreed(self, rows: Sequence[Sequence[int]]) -> None:
        self._count([row[: self._width] for row in rows])
        self._bad.agreed([row[self._width :] for row in rows], self.ledger.saved[STORAGE])

    @override
    def collect(self, exchange: Exchange) -> None:
        self._count(exchange.gather(self.counted()))

    def _count(self, rows: Sequence[Sequence[int]]) -> None:
        """Count the tokens of every rank up to the newest step, by rank."""
        tokens = sum_in_order([torch.tensor(list(row[:-1]), dtype=torch.int64) for row in rows])
        tokens_E, dropped_L = torch.split(tokens, [len(self.ledger.alive), len(self.ledger.num_experts)])
        last_step, step = min(row[-1] for row in rows), self._step
        steps = 0 if step is None or self._counted_at is None else step - self._counted_at
        left = 0 if step is None else max(0, last_step - step)
        self._counted_at = step
        self.ledger = self._policy.after_count(self.ledger.add(tokens_E, dropped_L, steps=steps, steps_left=left))

    @property
    def _width(self) -> int:
        """Integers in `counted`."""
        return len(self.ledger.alive) + len(self.ledger.num_experts) + 1

    # -- the journal

    @property
    def in_flight_nbytes(self) -> int:  # type: ignore[override]  # follows the ledger
        return _IN_FLIGHT * len(self.ledger.alive) * _IN_FLIGHT_NBYTES

    @override
    def state(self) -> dict[str, Any]:
        return {"accounting": self.ledger.to_journal(), "scalars": _shared_scalars(self._view)}

    @override
    def restore(self, outcome: Mapping[str, Any]) -> None:
        stored = outcome.get("accounting")
        self._bad.restored(outcome.get("bad", {}))
        if stored is None:
            log.info("the generation that is resumed from was not counted: tokens are counted from here on")
            return
        # Older versions counted no steps: their counts cover the whole run.
        ledger = TokenLedger.from_journal({"steps": outcome["step"], **stored})
        if ledger.num_experts != self.ledger.num_experts:
            raise IdentityMismatch(
                f"The generation counted tokens of {ledger.num_experts} experts by layer, the model has "
                f"{self.ledger.num_experts}. Resume with the code that wrote it."
            )
        lost_E: Tensor | None = outcome.get("lost")
        if lost_E is None:  # a whole generation, in storage
            whole = torch.ones_like(ledger.alive, dtype=torch.bool)
            ledger, _ = ledger.restore(ledger.alive, torch.full_like(ledger.alive, outcome["step"]), {STORAGE: whole})
        # Copies on other nodes of an earlier incarnation are not looked at, and count as none.
        ledger = ledger.with_peers(kept=PEER in self._levels.values())
        self.ledger = self._policy.after_restart(ledger, lost_E)
        self._processed_E, self._counted_at = ledger.processed, outcome["step"]

    # -- generations in tiers, on all ranks alike

    @property
    @override
    def bad_copies(self) -> BadCopies:
        return self._bad.not_referenced

    @property
    def all_have_copies(self) -> bool:
        """Whether each of these experts has another copy."""
        return self._bad.all_have_copies

    def given(
        self, tier: str, generation: GenerationId, layout: WindowLayout, generations_kept: int | None = None
    ) -> None:
        """Note that a tier begins to take this boundary's generation, and keeps the newest `generations_kept`."""
        if tier in self._levels:
            selection = Selection.of_plan(layout.record.plan, self._view.operators)
            self.ledger = self.ledger.give(self._levels[tier], generation.step, selection, generations_kept)

    def given_everything(self, tier: str, generation: GenerationId) -> None:
        """Note that a tier gets this whole boundary, in a generation of its own."""
        self.ledger = self.ledger.give(self._levels[tier], generation.step, Selection.everything(self.layouts))

    def complete_everywhere(self, tier: str, generation: GenerationId) -> None:
        """Note that a tier has all of a generation on every rank."""
        if tier not in self._levels:
            return
        if (level := self._levels[tier]) == STORAGE:
            self._bad.completed(self.ledger.saved[level], generation.step)
        self.ledger = self.ledger.complete(level, generation.step)

    def given_up(self, tier: str, generation: GenerationId) -> None:
        """Note that a tier will never have all of a given generation."""
        if tier in self._levels:
            # A holder of copies keeps the slot of a generation that others lack: it only knows its own part.
            self.ledger = self.ledger.give_up(self._levels[tier], generation.step, place_is_free=tier == HOST)

    def lost(self, tier: str) -> None:
        """Note that some rank has lost everything a tier held."""
        if tier in self._levels:
            self.ledger = self.ledger.forget(self._levels[tier])


def _shared_scalars(view: StateView) -> dict[str, dict[str, Tensor]]:
    """Return optimizer state shared by several experts as one value, as of now: no single expert's record can have it."""
    experts = [op for op in view.operators if op.expert_idx is not None]
    sharing = Counter(fqn for op in experts for fqn in {piece.fqn for piece in op.slices})
    found: dict[str, dict[str, Tensor]] = {}
    for fqn in sorted(fqn for fqn, number in sharing.items() if number > 1):
        param = view.params[fqn]
        for entry in view.schema.entries(param):
            value = None if entry.per_element else view.schema.get_state(param, entry.key)
            if value is not None:
                found.setdefault(fqn, {})[entry.key] = value
    return found
