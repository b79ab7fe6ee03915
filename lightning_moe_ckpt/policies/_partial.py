"""K experts of every layer at each generation, in turns or by load, the same number on every rank.

*Sequential*: the least recently saved expert comes first, so the next generation makes up for one that a level skipped.
Among experts saved at once the order goes round: from position to position, and each layer is one generation ahead of
the layer before it. Without skips that is PEC's interleaved schedule, in which ranks write equally much.

*Load-aware*: experts with most unsaved tokens first, weighted by waiting time (`unsaved_order`), as many from every
position as from any other (to one) over all layers.

Two levels: storage gets `k` experts, memory `snapshot_k`. Memory takes storage's due experts first, so that storage
goes round in E / k generations whatever memory does; memory's other places go by its own needs. Before both come
experts with a bad stored copy, and those that would get older than `max_age` generations. Memory keeps each expert's
newest copy; other nodes keep as many generations, and so a copy of every expert. Load-aware, an expert whose newest
copy storage has may wait for `STARVED` rounds: other nodes may drop it without loss, and places go to experts at risk.
If a round takes more generations than other nodes can keep, they lack some experts: a lost node's are restored from
storage.

If storage skips generations, turns have an element of chance (a function of the index): regular turns and regular skips
can be in step, and then the same experts would never reach storage.

Source: PEC (2024), Sec. 3.1 and Algorithm 1, Sec. 3.2 (two-level PEC); we differ in going by generations that levels
have in fact completed, and in the limit of age. Dynamic-K (Sec. 3.1) doubles K after a fault once lost tokens exceed
the limit; we differ in doubling before that, if another such fault would exceed the limit, and in going back when it
would not.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.operators import OperatorSet
from lightning_moe_ckpt.policies._expert_tables import (
    LEVELS,
    MAX_GENERATIONS,
    MEMORY,
    STARVED,
    STORAGE,
    ExpertLayout,
    ExpertTable,
    Selection,
    SortKey,
    Urgency,
    balanced,
    first,
    jitter,
    overdue,
    positions_of,
    sequential_order,
    taken_again,
    unsaved_order,
)
from lightning_moe_ckpt.policies._policy import Budget, ExpertPolicy, PlanInputs
from lightning_moe_ckpt.policies._token_ledger import TokenLedger

log = rank_logger(__name__)

ExpertOrder = Literal["sequential", "load_aware"]

_SLACK = {"sequential": 0.5, "load_aware": 1.0}
"""Rounds of E / K generations that an expert may wait beyond one round. Half a round leaves a third of the places for
making up for storage's skips; a whole one leaves half of them to load."""
_SPARE = 2


def next_k(k: int, *, last_k: int, plt: float, last_loss: float, plt_budget: float, num_experts: int) -> int:
    """Return K, the experts per layer, after a recovery, and from then on as training goes on.

    K is the smallest of `k` (as requested), `2 k`, `4 k` and so on with which another fault as costly as the last (less
    in proportion, as K grows, and free with all experts) would leave PLT within the budget, which PEC proposes as 0.05.
    A fault doubles K once at most. At the last fault K was `last_k`, and `last_loss` its part of `plt`, the portion of
    lost tokens. Raises `ValueError` if a number is out of range.
    """
    if min(k, last_k, num_experts) < 1 or plt < 0 or last_loss < 0 or not plt_budget >= 0:
        raise ValueError(
            f"`next_k(k={k}, last_k={last_k}, plt={plt}, last_loss={last_loss}, plt_budget={plt_budget}, "
            f"num_experts={num_experts})`: a number is out of range."
        )
    most, grown = min(2 * last_k, num_experts), min(k, num_experts)
    while grown < most and plt + last_loss * last_k / grown > plt_budget:
        grown = min(2 * grown, most)
    return grown


def largest_k(layouts: Sequence[ExpertLayout], nbytes: int, *, least: int) -> int:
    """Return the most experts per layer, at least `least`, of which no position gives more than `nbytes`.

    Source: PEC (2024), Sec. 4.2: snapshots as large as the time before the next optimizer step allows.
    """
    most = max((layout.num_experts for layout in layouts), default=least)
    found = least
    while found < most and _nbytes_of_position(layouts, found + 1) <= nbytes:
        found += 1
    return found


def _nbytes_of_position(layouts: Sequence[ExpertLayout], k: int) -> int:
    """Return the largest position's bytes, for K experts per layer."""
    taken: defaultdict[tuple[int, int], int] = defaultdict(int)
    for layout in layouts:
        taken[layout.nbytes, len(set(layout.rank_of))] += min(k, layout.num_experts)
    return sum(nbytes * -(-number // positions) for (nbytes, positions), number in taken.items())


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicK:
    """Rule by which K follows the cost of faults."""

    plt_budget: float | None = 0.05
    """Limit of PLT; `None` keeps K as requested."""

    def __post_init__(self) -> None:
        if self.plt_budget is not None and not 0 <= self.plt_budget <= 1:
            raise ValueError(f"`DynamicK(plt_budget={self.plt_budget})` must be between 0 and 1, or None.")

    def in_force(self, k: int, ledger: TokenLedger) -> int:
        """Return the K to take now for a requested `k`, see `next_k`."""
        if self.plt_budget is None or not ledger.last_lost:
            return k
        return next_k(
            k,
            last_k=ledger.last_k or k,
            plt=ledger.plt,
            last_loss=ledger.share(torch.tensor(ledger.last_lost)),
            plt_budget=self.plt_budget,
            num_experts=max(ledger.num_experts),
        )


@dataclass(frozen=True, kw_only=True)
class PartialPolicy(ExpertPolicy):
    """K experts of every layer in each generation."""

    k: int = 1
    """Experts per layer that go to storage; a smaller layer gives all."""
    snapshot_k: int | Literal["auto"] | None = None
    """Experts per layer that go to memory, `k` or more; `None` for `k`, `auto` for as many as steps can hide."""
    order: ExpertOrder = "sequential"
    """Order of experts: `sequential` or `load_aware`."""
    dynamic_k: DynamicK = field(default_factory=DynamicK)
    """Rule for taking more experts after faults."""

    kind = "partial"
    callback = "PartialExpertCheckpoint"

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"`PartialPolicy(k={self.k})` must be one or more.")
        if isinstance(self.snapshot_k, int) and self.snapshot_k < self.k:
            raise ValueError(
                f"`PartialPolicy(k={self.k}, snapshot_k={self.snapshot_k})`: what goes to storage goes to memory first, "
                "so `snapshot_k` must be `k` or more."
            )
        if self.order not in _SLACK:
            raise ValueError(f"`PartialPolicy(order={self.order!r})` must be one of {sorted(_SLACK)}.")

    @override
    def in_force(self, inputs: PlanInputs) -> PartialPolicy:
        """Return the policy with the K in force after faults; memory keeps the K that its ring was made for."""
        ledger, snapshot_k = inputs.ledger, self.snapshot_k
        if snapshot_k == "auto":
            snapshot_k = largest_k(inputs.layouts, (inputs.made_for or inputs.budgets).get(MEMORY, 0), least=self.k)
        if ledger is None or ledger.k is None:
            return replace(self, snapshot_k=snapshot_k)
        return replace(self, k=ledger.k, snapshot_k=max(snapshot_k or 0, ledger.k, ledger.memory_k or 0))

    @property
    @override
    def budgets(self) -> Mapping[str, Budget]:
        return {MEMORY: "auto"} if self.snapshot_k == "auto" else {}

    @override
    def remark(self, operators: OperatorSet) -> str | None:
        if not operators.layers:
            return f"`{self.callback}`: the experts of no layer train, so each generation has all that does, and no token can be lost"
        most = max(layer.num_experts for layer in operators.layers)
        for name, value in (("k", self.k), ("snapshot_k", self.snapshot_k)):
            if isinstance(value, int) and value > most:
                return (
                    f"`{self.callback}({name}={value})`: layers have {most} experts at most, so all of them are taken each "
                    f"time. Give fewer, or use DenseCheckpoint, whose restarts are exact"
                )
        return None

    @property
    def memory_k(self) -> int:
        """Experts per layer that go to memory."""
        return self.snapshot_k if isinstance(self.snapshot_k, int) else self.k

    @override
    def config(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("kind", "k", "snapshot_k", "order")}

    @override
    def after_restart(self, ledger: TokenLedger, lost_E: Tensor | None) -> TokenLedger:
        """Return the ledger with a larger K if another fault like this would lose too much, or a smaller one if not."""
        before, after = ledger.k or self.k, self.dynamic_k.in_force(self.k, ledger)
        budget, lost = self.dynamic_k.plt_budget, lost_E is not None and bool((lost_E > 0).any())
        if lost and budget is not None and ledger.plt > budget:
            log.warning(
                "PLT is %.4f after a fault, above `plt_budget=%s`: %d tokens are lost, of %d so far",
                *(ledger.plt, budget, int(ledger.lost.sum()), int(ledger.processed.sum() + ledger.dropped.sum())),
            )
        if after != before:
            level = logging.WARNING if after > before else logging.INFO
            log.log(level, "PLT is %.4f after a fault: %d experts per layer instead of %d", ledger.plt, after, before)
        return ledger.with_k(after, memory_k=after)

    @override
    def after_count(self, ledger: TokenLedger) -> TokenLedger:
        """Return the ledger with a smaller K, once a fault like the last one would leave PLT within the budget."""
        after = min(ledger.k or self.k, self.dynamic_k.in_force(self.k, ledger))
        if ledger.k is not None and after < ledger.k:
            log.info("PLT is %.4f: %d experts per layer to storage instead of %d", ledger.plt, after, ledger.k)
        return ledger.with_k(after)

    @override
    def max_age(self, tables: Sequence[ExpertTable], budgets: Mapping[str, int]) -> int:
        # All experts and the turns of ranks one and a half times, load-aware twice; no more than memory keeps, if it can hold all.
        rounds = max((self._round(table) for table in tables), default=1)
        waits = max((self._wait(table) for table in tables), default=0)
        age = rounds + max(_SPARE, int(_SLACK[self.order] * rounds)) + waits
        least = rounds + _SPARE + waits
        return min(age, MAX_GENERATIONS) if least <= MAX_GENERATIONS else age

    @override
    def select(self, index: int, tables: Sequence[ExpertTable], budgets: Mapping[str, int]) -> Selection:
        limit = self.max_age(tables, budgets)
        behind = any(any(table.skipped[STORAGE]) for table in tables)
        turns = [_Turn(index, i, behind) for i in range(len(tables))]
        if self.order == "sequential":
            chosen = [self._of_layer(turn, table, limit) for turn, table in zip(turns, tables, strict=True)]
            return Selection(tuple(memory for memory, _ in chosen), tuple(storage for _, storage in chosen))
        rows: list[list[tuple[int, ...]]] = [[()] * len(tables) for _ in LEVELS]
        # Experts of unequal bytes are balanced separately.
        for alike in _alike(tables):
            memory, storage = self._by_load([turns[i] for i in alike], [tables[i] for i in alike], limit)
            for i, kept, stored in zip(alike, memory, storage, strict=True):
                rows[0][i], rows[1][i] = tuple(kept), tuple(stored)
        return Selection(tuple(rows[0]), tuple(rows[1]))

    def _by_load(
        self, turns: Sequence[_Turn], tables: Sequence[ExpertTable], limit: int
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Return the experts of each layer that go to memory, and to storage."""
        to_memory, to_storage = ([min(k, each.num_experts) for each in tables] for k in (self.memory_k, self.k))
        positions = [table.rank_of for table in tables]
        orders = [
            [unsaved_order(table, level, _turn(table, turn.phase * k)) for level, k in ((MEMORY, m), (STORAGE, s))]
            for turn, table, m, s in zip(turns, tables, to_memory, to_storage, strict=True)
        ]
        again = [set(taken_again(table, range(table.num_experts))) for table in tables]
        late = self._late_of_all(turns[0], tables, limit)

        def ranked(i: int, level: int, due: Collection[int], among: Iterable[int]) -> Urgency:
            age = {e: -tables[i].age[e] if (i, e) in late else 0 for e in among}
            return {e: (e not in again[i], age[e], e not in due, *orders[i][level](e)) for e in age}

        layers = range(len(tables))
        everyone = [range(table.num_experts) for table in tables]
        due = balanced([ranked(i, 1, (), everyone[i]) for i in layers], positions, to_storage)
        memory = balanced([ranked(i, 0, due[i], everyone[i]) for i in layers], positions, to_memory)
        return memory, balanced([ranked(i, 1, (), memory[i]) for i in layers], positions, to_storage)

    def _late_of_all(self, now: _Turn, tables: Sequence[ExpertTable], limit: int) -> set[tuple[int, int]]:
        """Return the `(layer, expert)` about to get too old, as far as layer or position has room."""
        wait, rounds = max(map(self._wait, tables)), max(map(self._round, tables))
        respite = max(0, STARVED * rounds + _SPARE + wait - limit)
        places = [(i, e) for i, table in enumerate(tables) for e in range(table.num_experts)]
        ages = [(tables[i].due_age(MEMORY, tables[i].age, e, respite), i, e) for i, e in places]
        groups = defaultdict[tuple[str, int], list[tuple[int, int, int]]](list)
        for age, i, e in sorted(ages, reverse=True):
            groups["layer", i].append((age, i, e))
            groups["position", tables[i].rank_of[e]].append((age, i, e))
        rates = [Fraction(min(self.memory_k, table.num_experts)) for table in tables]
        everywhere = sum(rates, start=Fraction(0)) / len(set(tables[0].rank_of))
        limit -= wait
        if now.behind:
            limit -= jitter(now.phase, limit - rounds)
        found = set[tuple[int, int]]()
        for (kind, number), oldest in groups.items():
            rate = rates[number] if kind == "layer" else everywhere
            late = overdue([age for age, *_ in oldest], [1] * len(oldest), limit=limit, rate=rate)
            found |= {(i, e) for _, i, e in oldest[:late]}
        return found

    def _of_layer(self, now: _Turn, table: ExpertTable, limit: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return one layer's experts in turn, to memory and to storage."""
        here = positions_of(table)
        ours = [bool(taken_again(table, experts)) for experts in here.values()]
        to_memory, to_storage = self._places(
            now, [len(experts) for experts in here.values()], ours.index(True) if any(ours) else None
        )
        turns = {MEMORY: min(self.memory_k, table.num_experts), STORAGE: min(self.k, table.num_experts)}
        orders = {level: sequential_order(table, level, _turn(table, now.phase * k)) for level, k in turns.items()}
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
        # After a loss of memory all ages are equal: `experts` are in storage's order, which goes on.
        oldest = sorted(experts, key=lambda e: -table.age[e])
        rate = Fraction(min(self.memory_k, table.num_experts), num_positions)
        ages = [table.age[e] for e in oldest]
        limit -= self._wait(table)
        if now.behind:
            # Earlier by chance: storage that takes every n-th generation must not meet the late experts every time.
            limit -= jitter(now.phase, limit - self._round(table))
        return oldest[: overdue(ages, [1] * len(ages), limit=limit, rate=rate)]

    def _round(self, table: ExpertTable) -> int:
        """Return the number of generations that take every expert once."""
        return -(-table.num_experts // min(self.memory_k, table.num_experts))

    def _wait(self, table: ExpertTable) -> int:
        """Return the most generations in a row without an expert of some position, if there are more positions than K."""
        turns = -(-len(set(table.rank_of)) // min(self.memory_k, table.num_experts))
        return 2 * (turns - 1)

    def _places(self, now: _Turn, sizes: Sequence[int], ahead: int | None) -> tuple[list[int], list[int]]:
        """Return how many experts each position gives to memory, and how many to storage.

        Positions take turns at an uneven share. Position `ahead` has the first turn; with `None` the generation's number decides.
        """
        turns = [now.phase * k + now.shift(len(sizes)) if ahead is None else ahead for k in (self.memory_k, self.k)]
        memory = spread(self.memory_k, sizes, start=turns[0])
        return memory, spread(self.k, memory, start=turns[1])


@dataclass(frozen=True, slots=True)
class _Turn:
    """One generation of one layer."""

    index: int
    layer: int
    behind: bool
    """Whether storage skips generations."""

    @property
    def phase(self) -> int:
        """Sum of index and layer: a layer now takes the places that the next layer took a generation before."""
        return self.index + self.layer

    def shift(self, num_positions: int) -> int:
        """Return the shift of the round of positions: random after each round if storage skips, else 0.

        Storage that takes every second generation would otherwise only ever see one of two positions.
        """
        return jitter(self.index // num_positions, num_positions - 1) if self.behind else 0


def spread(number: int, rooms: Sequence[int], *, start: int) -> list[int]:
    """Return the number of experts from each position: equally many, give or take one, as far as positions have
    `rooms`; `number` in all, if there are as many. Positions give one more from position `start`, modulo their number,
    on.
    """
    given = [0] * len(rooms)
    left, turn = min(number, sum(rooms)), start % len(rooms)
    while left:
        if given[turn] < rooms[turn]:
            given[turn] += 1
            left -= 1
        turn = (turn + 1) % len(rooms)
    return given


def _alike(tables: Sequence[ExpertTable]) -> list[list[int]]:
    """Return groups of layers with equal expert sizes and equally many positions."""
    found = defaultdict[tuple[int, int], list[int]](list)
    for i, table in enumerate(tables):
        found[table.nbytes, len(set(table.rank_of))].append(i)
    return list(found.values())


def _urgency(late: Sequence[int], due: Collection[int], then: SortKey) -> SortKey:
    """Return a sort key: experts that are too old, oldest first; then experts due in storage; then the rest by `then`."""
    place = {expert: i - len(late) for i, expert in enumerate(late)}
    return lambda expert: (place.get(expert, 0), expert not in due, *then(expert))


def _turn(table: ExpertTable, start: int) -> list[int]:
    """Return each expert's place in the round from `start` on: first all positions' first experts, then the second."""
    here = list(positions_of(table).values())
    rows = [(local, position) for position, experts in enumerate(here) for local in range(len(experts))]
    turn = [0] * table.num_experts
    for place, (local, position) in enumerate(sorted(rows)):
        turn[here[position][local]] = (place - start) % table.num_experts
    return turn
