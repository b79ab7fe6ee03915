"""As many experts as the bytes that a step can hide allow, those with most unsaved tokens, more from layers at risk.

Algorithm 1 is carried out for each position by itself, with the experts it holds: what limits a generation is the link
of one device to its host, and of one host to the network, and these are there once per position. So no rank copies more
than the budget, however unevenly tokens are spread.

What is due in storage and what memory has not seen for too long is taken before, as in `_partial`.

Source: MOETION (2024), Sec. 4.3, Algorithm 1. We differ in the position-wise budget and in experts of several sizes.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.policies._expert_tables import (
    LEVELS,
    MAX_GENERATIONS,
    MEMORY,
    STORAGE,
    ExpertTable,
    Selection,
    overdue,
    positions_of,
    unsaved_order,
)

_SLACK, _SPARE = 2, 2

Experts = list[list[int]]
"""Global indices by layer, of one position."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectivePolicy:
    """See the module."""

    age_limit: int | None = None
    """Generations within which every expert is taken again, at least as many as take every expert once; `None` for
    twice as many as that, and 2."""

    def __post_init__(self) -> None:
        if self.age_limit is not None and self.age_limit < 1:
            raise ValueError(f"`SelectivePolicy(age_limit={self.age_limit})` must be one or more, or None.")

    def require_budgets(self, tables: Sequence[ExpertTable], budgets: Mapping[str, int]) -> None:
        """Refuse budgets with which some expert could never be taken.

        Raises:
            ConfigurationError: says what is missing.
        """
        largest = max((table.nbytes for table in tables), default=0)
        for level in LEVELS:
            if budgets[level] < largest:
                raise ConfigurationError(
                    f"The budget of {level} is {budgets[level]} bytes per generation, and one expert takes {largest}. "
                    f"Give {largest - budgets[level]} bytes more, or take generations less often."
                )

    def max_age(self, tables: Sequence[ExpertTable], budgets: Mapping[str, int]) -> int:
        """See `ExpertPolicy.max_age`."""
        rounds = [1]
        for position in _positions(tables):
            nbytes = sum(table.nbytes * len(here) for table, here in zip(tables, _held(tables, position), strict=True))
            rounds.append(-(-nbytes // max(_usable(tables, budgets[MEMORY]), 1)))
        if self.age_limit is not None:
            return max(self.age_limit, *rounds)
        age = max(rounds) * _SLACK + _SPARE
        return min(age, MAX_GENERATIONS) if max(rounds) + _SPARE <= MAX_GENERATIONS else age

    def select(self, index: int, tables: Sequence[ExpertTable], budgets: Mapping[str, int]) -> Selection:
        """See `ExpertPolicy.select`; `index` decides only between experts that are alike."""
        limit = self.max_age(tables, budgets)
        memory: Experts = [[] for _ in tables]
        storage: Experts = [[] for _ in tables]
        for position in _positions(tables):
            held = _held(tables, position)
            due = select_experts(tables, held, STORAGE, budgets[STORAGE], index)
            first = _by_urgency(tables, held, due, limit, budgets[MEMORY])
            kept = select_experts(tables, held, MEMORY, budgets[MEMORY], index, first=first)
            stored = select_experts(tables, kept, STORAGE, budgets[STORAGE], index)
            for i in range(len(tables)):
                memory[i] += kept[i]
                storage[i] += stored[i]
        return Selection(*(tuple(tuple(sorted(row)) for row in rows) for rows in (memory, storage)))


def select_experts(
    tables: Sequence[ExpertTable],
    held: Experts,
    level: str,
    budget: int,
    index: int,
    *,
    first: Sequence[tuple[int, int]] = (),
) -> Experts:
    """SelectExperts of Algorithm 1: the `S[i]` experts of each layer with most unsaved tokens.

    Args:
        tables: one per layer.
        held: the experts to choose from.
        level: whose unsaved tokens count.
        budget: bytes.
        index: rotates the order of experts that are alike.
        first: `(layer, expert)` that are taken before all others, as far as they fit.

    Returns:
        Experts by layer. With experts of one size these are `budget // nbytes`, or all that are held.
    """
    costs = [table.nbytes for table in tables]
    taken, left = _take_first(first, costs, budget)
    risks = [sum(table.unsaved[level][e] for e in row) for table, row in zip(tables, held, strict=True)]
    sizes = [len(row) for row in held]
    numbers = compute_s(risks, sizes, costs, budget, least=[len(row) for row in taken], left=left)
    chosen = []
    for table, row, early, number in zip(tables, held, taken, numbers, strict=True):
        order = unsaved_order(table, level, [(e - index) % table.num_experts for e in range(table.num_experts)])
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
    """ComputeS of Algorithm 1: how many experts of each layer.

    Places go one by one to the layer that lacks most of its share `risks[i] / sum(risks) * S_total`, as long as one of
    its experts fits: that is the share rounded down for every layer, and what is over to the largest remainders.

    Args:
        risks: unsaved tokens by layer; if there are none, layers are alike in proportion to their size.
        sizes: experts by layer.
        costs: bytes of one expert by layer.
        budget: bytes; what layers' shares are taken of.
        least: experts by layer that are taken anyhow.
        left: bytes of the budget that these have left.
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
    """Bytes of a budget that experts fill for certain."""
    sizes = {table.nbytes for table in tables}
    if len(sizes) == 1:
        (size,) = sizes
        return budget // size * size
    # A small one may stand where a large one no longer fits.
    return budget - max(sizes) + 1


def _take_first(first: Sequence[tuple[int, int]], costs: Sequence[int], budget: int) -> tuple[Experts, int]:
    taken: Experts = [[] for _ in costs]
    for layer, expert in first:
        if costs[layer] <= budget:
            taken[layer].append(expert)
            budget -= costs[layer]
    return taken, budget


def _by_urgency(
    tables: Sequence[ExpertTable], held: Experts, due: Sequence[Collection[int]], limit: int, budget: int
) -> list[tuple[int, int]]:
    """Experts that would get too old in memory, oldest first, then those that storage wants."""
    oldest = sorted((-tables[i].age[e], i, e) for i, row in enumerate(held) for e in row)
    costs = [tables[i].nbytes for _, i, _ in oldest]
    late = overdue([-age for age, _, _ in oldest], costs, limit=limit, rate=_usable(tables, budget))
    first = [(i, e) for _, i, e in oldest[:late]]
    return first + [(i, e) for i, row in enumerate(due) for e in row if (i, e) not in first]


def _positions(tables: Sequence[ExpertTable]) -> list[int]:
    return sorted({rank for table in tables for rank in table.rank_of})


def _held(tables: Sequence[ExpertTable], position: int) -> Experts:
    return [positions_of(table).get(position, []) for table in tables]
