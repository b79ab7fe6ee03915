"""As many experts as fit into the bytes that a step can hide, those with most unsaved tokens, more from layers at risk.

Algorithm 1 is carried out for each position by itself, with the experts it holds: a generation is limited by the link
of one device to its host, and of one host to the network, and each position has its own. So no rank copies more than
the budget, however unevenly tokens are spread.

Experts that memory has not had for too long come before, and so do experts missing from too many generations of a level
outside the node (storage, copies on other nodes). Chance decides which level's turn is first, so that a level that
takes every n-th generation does not meet other levels' turns every time. Experts whose newest copy storage has wait
longer (`STARVED` rounds): MOETION knows no limit of age, and forced turns took half of the places of a budget of a
quarter.

Where gradients stand for states on the way to other nodes, tokens count per byte that leaves the node: an expert that
other nodes got with the generation before costs a state to storage, and a gradient; any other expert costs two states.

Source: MOETION (2024), Sec. 4.3, Algorithm 1, and 5.2. We differ in the position-wise budget, in experts of several
sizes, and in the price of an expert that stays chosen.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain

from torch import Tensor
from typing_extensions import override

from lightning_moe_ckpt.policies._expert_tables import (
    MAX_GENERATIONS,
    MEMORY,
    PEER,
    STARVED,
    STORAGE,
    ExpertTable,
    Selection,
    jitter,
    overdue,
    positions_of,
    taken_again,
    unsaved_order,
)
from lightning_moe_ckpt.policies._plan import Audience
from lightning_moe_ckpt.policies._policy import Budget, Deltas, ExpertPolicy, PlanInputs
from lightning_moe_ckpt.policies._token_ledger import TokenLedger

_SLACK, _SPARE = 2, 2
_STATE_NBYTES = 12
"""Bytes per element of a weight in float32 and two moments, which a gradient stands for."""

ExpertRows = list[list[int]]
"""Global indices of one position's experts, by layer."""


@dataclass(frozen=True, kw_only=True)
class SelectivePolicy(ExpertPolicy):
    """As many experts as byte budgets allow, those with most unsaved tokens first."""

    local_budget: Budget = "auto"
    """Bytes of a generation that each rank may copy to host memory."""
    remote_budget: Budget = "auto"
    """Bytes of a generation that may leave the node."""
    deltas: Deltas | None = None

    kind = "selective"
    callback = "SelectiveExpertCheckpoint"
    peer_audiences = frozenset[Audience]({"durable"})

    @property
    @override
    def budgets(self) -> Mapping[str, Budget]:
        return {MEMORY: self.local_budget, STORAGE: self.remote_budget}

    @override
    def generations_kept(self, inputs: PlanInputs) -> int:
        return super().generations_kept(inputs) if inputs.budgets else MAX_GENERATIONS

    @override
    def copies_kept(self, inputs: PlanInputs) -> int:
        return min(self.max_wait(inputs.tables, inputs.budgets), MAX_GENERATIONS)

    @override
    def in_force(self, inputs: PlanInputs) -> SelectivePolicy:
        """Return the policy as it chooses while other nodes get gradients, or do not."""
        return replace(self, deltas=inputs.deltas)

    @override
    def after_restart(self, ledger: TokenLedger, lost_E: Tensor | None) -> TokenLedger:
        return ledger.with_k(None)

    @override
    def max_age(self, tables: Sequence[ExpertTable], budgets: Mapping[str, int]) -> int:
        return _limit(tables, budgets[MEMORY])

    def max_wait(self, tables: Sequence[ExpertTable], budgets: Mapping[str, int]) -> int:
        """Return the generations of a level outside the node after which a missing expert comes first."""
        return _limit(tables, budgets[STORAGE])

    @override
    def select(self, index: int, tables: Sequence[ExpertTable], budgets: Mapping[str, int]) -> Selection:
        """Return the experts by position; `index` decides only between equal experts, and turns."""
        places = (_held(tables, position) for position in _positions(tables))
        levels = zip(*(self._of_position(index, tables, held, budgets) for held in places), strict=True)
        return Selection(*(tuple(tuple(sorted(chain(*rows))) for rows in zip(*each, strict=True)) for each in levels))

    def _of_position(
        self, index: int, tables: Sequence[ExpertTable], held: ExpertRows, budgets: Mapping[str, int]
    ) -> tuple[ExpertRows, ExpertRows]:
        # Those outside the node, in the order of their turns.
        levels = [level for level in (STORAGE, PEER) if level in tables[0].unsaved]
        turn = jitter(index, len(levels) - 1)
        remote = levels[turn:] + levels[:turn]
        at_risk = PEER if PEER in remote else STORAGE
        again = [(i, e) for i, row in enumerate(held) for e in taken_again(tables[i], row)]
        waiting = list(dict.fromkeys([*again, *self._waiting(tables, held, remote, budgets)]))
        repeat = Fraction(1)
        if self.deltas is not None and at_risk == PEER:
            repeat = Fraction(2 * _STATE_NBYTES, _STATE_NBYTES + self.deltas.dtype.itemsize)
        due = select_experts(tables, held, at_risk, budgets[STORAGE], index, first=waiting, repeat=repeat)
        late = self._late(index, tables, held, budgets, behind=bool(waiting))
        first = dict.fromkeys([*again, *late, *waiting, *((i, e) for i, row in enumerate(due) for e in row)])
        kept = select_experts(tables, held, MEMORY, budgets[MEMORY], index, first=list(first))
        waiting = [(i, e) for i, e in waiting if e in kept[i]]
        return kept, select_experts(tables, kept, at_risk, budgets[STORAGE], index, first=waiting, repeat=repeat)

    def _late(
        self, index: int, tables: Sequence[ExpertTable], held: ExpertRows, budgets: Mapping[str, int], *, behind: bool
    ) -> list[tuple[int, int]]:
        """Return the experts that would get too old in memory, oldest first."""
        limit, rounds = self.max_age(tables, budgets), _rounds(tables, budgets[MEMORY])
        if behind:
            # Earlier by chance: a level that takes every n-th generation must not meet the late experts every time.
            limit -= jitter(index, limit - rounds)
        respite = self._respite(tables, budgets[MEMORY], limit)
        ages = [
            ((i, e), tables[i].due_age(MEMORY, tables[i].age, e, respite)) for i, row in enumerate(held) for e in row
        ]
        return _overdue(tables, ages, limit, _usable(tables, budgets[MEMORY]))

    def _respite(self, tables: Sequence[ExpertTable], budget: int, limit: int) -> int:
        """Return the delay in generations of experts whose newest copy storage has."""
        return max(0, STARVED * _rounds(tables, budget) + _SPARE - limit)

    def _waiting(
        self, tables: Sequence[ExpertTable], held: ExpertRows, levels: Sequence[str], budgets: Mapping[str, int]
    ) -> list[tuple[int, int]]:
        """Return experts that levels outside the node have lacked for too long, level by level, the longest first."""
        limit, found = self.max_wait(tables, budgets), dict[tuple[int, int], None]()
        respite = self._respite(tables, budgets[STORAGE], limit)
        for level in levels:
            places = [(i, e) for i, row in enumerate(held) for e in row if tables[i].waited]
            waited = [((i, e), tables[i].due_age(level, tables[i].waited[level], e, respite)) for i, e in places]
            found |= dict.fromkeys(_overdue(tables, waited, limit, _usable(tables, budgets[STORAGE])))
        return list(found)


def select_experts(
    tables: Sequence[ExpertTable],
    held: ExpertRows,
    level: str,
    budget: int,
    index: int,
    *,
    first: Sequence[tuple[int, int]] = (),
    repeat: Fraction = Fraction(1),
) -> ExpertRows:
    """Return, by layer, the `S[i]` held experts with most unsaved tokens of a level (SelectExperts of Algorithm 1).
    With experts of one size these are `budget // nbytes`, or all held experts.

    `index` rotates the order of equal experts. The `(layer, expert)` in `first` are taken before all others, as far as
    they fit. For `repeat` see `unsaved_order`.
    """
    costs = [table.nbytes for table in tables]
    taken, left = _take_first(first, costs, budget)
    risks = [sum(table.unsaved[level][e] for e in row) for table, row in zip(tables, held, strict=True)]
    sizes = [len(row) for row in held]
    numbers = compute_s(risks, sizes, costs, budget, least=[len(row) for row in taken], left=left)
    chosen = []
    for table, row, early, number in zip(tables, held, taken, numbers, strict=True):
        turn = [(e - index) % table.num_experts for e in range(table.num_experts)]
        order = unsaved_order(table, level, turn, repeat=repeat)
        rest = sorted((e for e in row if e not in early), key=order)
        chosen.append([*early, *rest[: number - len(early)]])
    return chosen


def compute_s(
    risks: Sequence[int],
    sizes: Sequence[int],
    costs: Sequence[int],
    budget: int,
    *,
    least: Sequence[int] | None = None,
    left: int | None = None,
) -> list[int]:
    """Return the number of experts of each layer (ComputeS of Algorithm 1), given unsaved tokens, experts, and bytes of
    an expert by layer. Without unsaved tokens layers share by size.

    Places go one by one to the layer that lacks most of its share `risks[i] / sum(risks) * S_total`, as long as its
    expert fits: the share rounded down for every layer, and the rest to the largest remainders. The budget of bytes is
    the base of layers' shares; `least` experts are taken anyhow, and `left` bytes are left after these.
    """
    numbers = list(least or [0] * len(sizes))
    room = budget if left is None else left
    weights = list(risks) if sum(risks) else [max(size, 1) for size in sizes]
    shares = [Fraction(weight * budget, sum(weights) * cost) for weight, cost in zip(weights, costs, strict=True)]
    waiting = [(numbers[i] - shares[i], i) for i in range(len(sizes)) if numbers[i] < sizes[i]]
    heapq.heapify(waiting)
    while waiting:
        _, i = heapq.heappop(waiting)
        if costs[i] > room:
            continue
        numbers[i], room = numbers[i] + 1, room - costs[i]
        if numbers[i] < sizes[i]:
            heapq.heappush(waiting, (numbers[i] - shares[i], i))
    return numbers


def _usable(tables: Sequence[ExpertTable], budget: int) -> int:
    """Return the bytes of a budget that are certainly used, however experts of these sizes fall into it."""
    sizes = {table.nbytes for table in tables}
    if len(sizes) == 1:
        (size,) = sizes
        return budget // size * size
    # A small expert may take the last place where a large one no longer fits.
    return budget - max(sizes) + 1


def _take_first(first: Sequence[tuple[int, int]], costs: Sequence[int], budget: int) -> tuple[ExpertRows, int]:
    taken: ExpertRows = [[] for _ in costs]
    for layer, expert in first:
        if costs[layer] <= budget:
            taken[layer].append(expert)
            budget -= costs[layer]
    return taken, budget


def _overdue(
    tables: Sequence[ExpertTable], ages: Sequence[tuple[tuple[int, int], int]], limit: int, rate: int
) -> list[tuple[int, int]]:
    """Return the `(layer, expert)` that must come now so that none gets older than `limit`, oldest first."""
    # After a level's loss all ages are equal: the longest without a copy in storage comes first.
    oldest = sorted(ages, key=lambda each: (-each[1], tables[each[0][0]].saved_at[STORAGE][each[0][1]], each[0]))
    costs = [tables[i].nbytes for (i, _), _ in oldest]
    late = overdue([age for _, age in oldest], costs, limit=limit, rate=rate)
    return [place for place, _ in oldest[:late]]


def _rounds(tables: Sequence[ExpertTable], budget: int) -> int:
    """Return the number of generations that take every expert once."""
    usable = max(_usable(tables, budget), 1)
    held = [_held(tables, position) for position in _positions(tables)]
    sizes = [sum(table.nbytes * len(here) for table, here in zip(tables, rows, strict=True)) for rows in held]
    return max(-(-nbytes // usable) for nbytes in sizes)


def _limit(tables: Sequence[ExpertTable], budget: int) -> int:
    """Return the most generations of a budget until every expert is taken again."""
    rounds = _rounds(tables, budget)
    limit = rounds * _SLACK + _SPARE
    return min(limit, MAX_GENERATIONS) if rounds + _SPARE <= MAX_GENERATIONS else limit


def _positions(tables: Sequence[ExpertTable]) -> list[int]:
    return sorted({rank for table in tables for rank in table.rank_of})


def _held(tables: Sequence[ExpertTable], position: int) -> ExpertRows:
    return [positions_of(table).get(position, []) for table in tables]
