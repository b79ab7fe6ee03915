"""K experts of every layer at each generation, in turns or by load, the same number on every rank.

*Sequential*: who was saved longest ago comes first, so a generation that a level skipped is made up for by the next.
Among experts saved at once the order goes round: from position to position, and each layer is one generation ahead of
the layer before it. Without skips that is PEC's interleaved schedule, in which ranks write equally much.

*Load-aware*: those with most unsaved tokens first, as many from every position as from any other (to one).

Two levels: storage gets `k` experts, memory `snapshot_k`. What is due in storage is taken to memory first of all, so that
storage goes round in E / k generations whatever memory does; the rest of memory's places go by what memory lacks. Before
both come experts of which a stored copy turned out bad, and those that would get older than `max_age` generations:
memory keeps that many, and so has a copy of every expert. Where a round takes more generations than memory keeps at
most, it lacks some: these are restored from storage.

Where storage skips generations, whose turn it is has an element of chance (a function of the index): regular turns and
regular skips can be in step, and then the same experts would never reach storage.

Source: PEC (2024), Sec. 3.1 and Algorithm 1, Sec. 3.2 (two-level PEC); we differ in going by what levels have in fact
completed, and in the limit of age. Dynamic-K (Sec. 3.1) doubles K once lost tokens exceed the limit; we differ in
doubling before that, as soon as another fault like the last one would exceed it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Literal

from torch import Tensor
from typing_extensions import override

from lightning_moe_ckpt.policies._expert_tables import (
    MAX_GENERATIONS,
    MEMORY,
    STORAGE,
    ExpertTable,
    Selection,
    SortKey,
    first,
    jitter,
    overdue,
    positions_of,
    sequential_order,
    taken_again,
    unsaved_order,
)
from lightning_moe_ckpt.policies._policy import ExpertPolicy, PlanInputs
from lightning_moe_ckpt.policies._token_ledger import TokenLedger

log = logging.getLogger(__name__)

ExpertOrder = Literal["sequential", "load_aware"]

_ORDERS = {"sequential": sequential_order, "load_aware": unsaved_order}
_SLACK = {"sequential": 0.5, "load_aware": 1.0}
"""How much longer than a round of E / K generations an expert may wait, in rounds. Half a round leaves a third of the
places to what storage needs in order to make up for skips; a whole one leaves half of them to load."""
_SPARE = 2


def next_k(k: int, *, plt: float, last_loss: float, plt_budget: float, num_experts: int) -> int:
    """Return K after a recovery.

    K is doubled until another fault that costs as much as the last one (less in proportion, as K grows) would leave PLT
    within the budget, or until every generation takes all experts. PLT never exceeds the budget by more than one
    fault's loss: once it does, K is E, and no further fault loses a token.

    Args:
        k: experts per layer until now.
        plt: portion of lost tokens, the last fault included.
        last_loss: part of it that the last fault has cost.
        plt_budget: the limit, PEC proposes 0.05.
        num_experts: E of the largest layer.

    Raises:
        ValueError: a number is out of range.
    """
    if k < 1 or plt < 0 or last_loss < 0 or not plt_budget >= 0 or num_experts < 1:
        raise ValueError(
            f"`next_k(k={k}, plt={plt}, last_loss={last_loss}, plt_budget={plt_budget}, num_experts={num_experts})`: "
            "a number is out of range."
        )
    grown = min(k, num_experts)
    while grown < num_experts and plt + last_loss * k / grown > plt_budget:
        grown = min(2 * grown, num_experts)
    return grown


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicK:
    """Whether and when faults raise K."""

    plt_budget: float | None = 0.05
    """Limit of PLT; `None` keeps K as it is."""

    def __post_init__(self) -> None:
        if self.plt_budget is not None and not 0 <= self.plt_budget <= 1:
            raise ValueError(f"`DynamicK(plt_budget={self.plt_budget})` must be between 0 and 1, or None.")

    def after_fault(self, k: int, *, plt: float, last_loss: float, num_experts: int) -> int:
        """Return K after a fault, see `next_k`."""
        if self.plt_budget is None:
            return k
        return next_k(k, plt=plt, last_loss=last_loss, plt_budget=self.plt_budget, num_experts=num_experts)


@dataclass(frozen=True, kw_only=True)
class PartialPolicy(ExpertPolicy):
    """K experts of every layer in each generation."""

    k: int = 1
    """Experts per layer that go to storage; a layer with fewer gives all."""
    snapshot_k: int | None = None
    """Experts per layer that go to memory, `k` or more; `None` for `k`."""
    order: ExpertOrder = "sequential"
    """Which come first."""
    age_limit: int | None = None
    """Generations within which every expert is taken again, at least `ceil(E / K)` and the turns of ranks; `None` for
    one and a half times that, load-aware twice, and at least 2 more; and no more than memory keeps, if it can hold all."""
    dynamic_k: DynamicK = field(default_factory=DynamicK)
    """Whether more experts are taken after faults."""

    kind = "partial"
    callback = "PartialExpertCheckpoint"

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"`PartialPolicy(k={self.k})` must be one or more.")
        if self.snapshot_k is not None and self.snapshot_k < self.k:
            raise ValueError(
                f"`PartialPolicy(k={self.k}, snapshot_k={self.snapshot_k})`: what goes to storage goes to memory first, "
                "so `snapshot_k` must be `k` or more."
            )
        if self.order not in _ORDERS:
            raise ValueError(f"`PartialPolicy(order={self.order!r})` must be one of {sorted(_ORDERS)}.")
        if self.age_limit is not None and self.age_limit < 1:
            raise ValueError(f"`PartialPolicy(age_limit={self.age_limit})` must be one or more, or None.")

    @override
    def in_force(self, inputs: PlanInputs) -> PartialPolicy:
        """Return the policy with the K that faults have led to."""
        k = None if inputs.ledger is None else inputs.ledger.k
        return self if k is None else self.with_k(k)

    @property
    def memory_k(self) -> int:
        """Experts per layer that go to memory."""
        return self.snapshot_k or self.k

    def with_k(self, k: int) -> PartialPolicy:
        """Return the same with `k` experts to storage, and at least as many to memory."""
        snapshot_k = None if self.snapshot_k is None else max(self.snapshot_k, k)
        return replace(self, k=k, snapshot_k=snapshot_k)

    @override
    def config(self) -> dict[str, Any]:
        """The period does not change what a generation looks like."""
        names = ("kind", "k", "snapshot_k", "order", "age_limit")
        return {name: getattr(self, name) for name in names}

    @override
    def after_restart(self, ledger: TokenLedger, lost_E: Tensor | None) -> TokenLedger:
        """With a larger K, if another fault like this one would lose too much."""
        before = max(ledger.k or 0, self.k)
        share = 0.0 if lost_E is None else ledger.share(lost_E.clamp(min=0))
        after = before
        if share:
            largest = max(ledger.num_experts)
            after = self.dynamic_k.after_fault(before, plt=ledger.plt, last_loss=share, num_experts=largest)
        budget = self.dynamic_k.plt_budget
        if share and budget is not None and ledger.plt > budget:
            log.warning(
                "PLT is %.4f after a fault, above `plt_budget=%s`: %d of %d tokens are lost",
                *(ledger.plt, budget, int(ledger.lost.sum()), int(ledger.processed.sum())),
            )
        if after != before:
            log.warning("PLT is %.4f after a fault: %d experts per layer instead of %d", ledger.plt, after, before)
        return ledger.with_k(after)

    @override
    def max_age(self, tables: Sequence[ExpertTable], budgets: Mapping[str, int]) -> int:
        rounds = max((self._round(table) for table in tables), default=1)
        waits = max((self._wait(table) for table in tables), default=0)
        if self.age_limit is not None:
            return max(self.age_limit, rounds + waits)
        age = rounds + max(_SPARE, int(_SLACK[self.order] * rounds)) + waits
        least = rounds + _SPARE + waits
        return min(age, MAX_GENERATIONS) if least <= MAX_GENERATIONS else age

    @override
    def select(self, index: int, tables: Sequence[ExpertTable], budgets: Mapping[str, int]) -> Selection:
        limit = self.max_age(tables, budgets)
        behind = any(any(table.skipped[STORAGE]) for table in tables)
        chosen = [self._of_layer(_Turn(index, i, behind), table, limit) for i, table in enumerate(tables)]
        return Selection(tuple(memory for memory, _ in chosen), tuple(storage for _, storage in chosen))

    def _of_layer(self, now: _Turn, table: ExpertTable, limit: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        order = _ORDERS[self.order]
        here = positions_of(table)
        ours = [bool(taken_again(table, experts)) for experts in here.values()]
        to_memory, to_storage = self._places(
            now, [len(experts) for experts in here.values()], ours.index(True) if any(ours) else None
        )
        turns = {MEMORY: min(self.memory_k, table.num_experts), STORAGE: min(self.k, table.num_experts)}
        orders = {level: order(table, level, _turn(table, now.phase * k)) for level, k in turns.items()}
        memory: list[int] = []
        storage: list[int] = []
        for experts, num_memory, num_storage in zip(here.values(), to_memory, to_storage, strict=True):
            again = taken_again(table, experts)
            due = set(first(experts, num_storage, orders[STORAGE]))
            late = self._late(now, table, first(experts, len(experts), orders[STORAGE]), limit, len(here))
            late = list(dict.fromkeys([*again, *late]))
            kept = first(experts, num_memory, _urgency(late, due, orders[MEMORY]))
            memory += kept
            storage += first(kept, num_storage, _urgency(again, (), orders[STORAGE]))
        return tuple(sorted(memory)), tuple(sorted(storage))

    def _late(
        self, now: _Turn, table: ExpertTable, experts: Sequence[int], limit: int, num_positions: int
    ) -> list[int]:
        # Of equal age is what memory has lost as a whole: then storage's order, in which `experts` are, goes on.
        oldest = sorted(experts, key=lambda e: -table.age[e])
        rate = Fraction(min(self.memory_k, table.num_experts), num_positions)
        ages = [table.age[e] for e in oldest]
        limit -= self._wait(table)
        if now.behind:
            # Earlier by chance: storage that takes each so many generations must not meet the late ones every time.
            limit -= jitter(now.phase, limit - self._round(table))
        return oldest[: overdue(ages, [1] * len(ages), limit=limit, rate=rate)]

    def _round(self, table: ExpertTable) -> int:
        """Return how many generations take every expert once."""
        return -(-table.num_experts // min(self.memory_k, table.num_experts))

    def _wait(self, table: ExpertTable) -> int:
        """Return the most generations in which a position gives nothing, where there are more of them than K."""
        turns = -(-len(set(table.rank_of)) // min(self.memory_k, table.num_experts))
        return 2 * (turns - 1)

    def _places(self, now: _Turn, sizes: Sequence[int], ahead: int | None) -> tuple[list[int], list[int]]:
        """Return how many each position gives; `ahead` is one whose turn it is, whoever would be next."""
        if ahead is not None:
            memory = spread(self.memory_k, sizes, start=ahead)
            return memory, spread(self.k, memory, start=ahead)
        shift = now.shift(len(sizes))
        memory = spread(self.memory_k, sizes, start=now.phase * self.memory_k + shift)
        return memory, spread(self.k, memory, start=now.phase * self.k + shift)


@dataclass(frozen=True, slots=True)
class _Turn:
    """One generation of one layer."""

    index: int
    layer: int
    behind: bool
    """Whether storage skips generations."""

    @property
    def phase(self) -> int:
        """Counts generations and layers alike: what one layer takes now, the next one took a generation before."""
        return self.index + self.layer

    def shift(self, num_positions: int) -> int:
        """Return by how much the round of positions is moved: by chance after each, where storage skips.

        Storage that takes each second generation would otherwise only ever see one of two positions.
        """
        return jitter(self.index // num_positions, num_positions - 1) if self.behind else 0


def spread(number: int, rooms: Sequence[int], *, start: int) -> list[int]:
    """Return how many each position gives: equally many, to one, as far as they have room.

    Args:
        number: of experts to take in all, or as many as there are.
        rooms: most that each position can give.
        start: the position (modulo how many there are) that gives one more first.
    """
    given = [0] * len(rooms)
    left, turn = min(number, sum(rooms)), start % len(rooms)
    while left:
        if given[turn] < rooms[turn]:
            given[turn] += 1
            left -= 1
        turn = (turn + 1) % len(rooms)
    return given


def _urgency(late: Sequence[int], due: Collection[int], then: SortKey) -> SortKey:
    """Return a key: those that are too old, oldest first; those that storage wants; the others."""
    place = {expert: i - len(late) for i, expert in enumerate(late)}
    return lambda expert: (place.get(expert, 0), expert not in due, *then(expert))


def _turn(table: ExpertTable, start: int) -> list[int]:
    """Return each expert's place in the round that begins at `start`: position by position, then the next of each."""
    here = list(positions_of(table).values())
    rows = [(local, position) for position, experts in enumerate(here) for local in range(len(experts))]
    turn = [0] * table.num_experts
    for place, (local, position) in enumerate(sorted(rows)):
        turn[here[position][local]] = (place - start) % table.num_experts
    return turn
