"""Tables that a choice of experts is made from, a choice with equally many from every position, and its result.

A partial generation takes FULL of some experts. A policy chooses from one table per MoE layer (unsaved tokens, the
boundary of each expert's last copy), equal on all ranks. The result is a `Selection`, a pure function of the tables,
hence equal on all ranks without an exchange.

A *position* is the place in the expert-parallel group that holds an expert: all its copies lie on that position's
ranks, which write the expert's records. A layer whose experts every rank holds has one position.

If each position holds one expert per layer, a layer by itself cannot balance positions without passing urgent experts
by. Over all layers there is a choice: one layer takes its most loaded expert from here, another from there. `balanced`
takes the most urgent experts one after the other as long as layer and position have room. If a layer then finds room at
none of its positions, other experts are moved along a shortest chain. So the choice is not the best in every case, but
every layer has its number, and no position gives two more than another.

Sources: PEC (2024), Sec. 3.1 and Algorithm 1 ("we constrain the equal save capacity of each rank"), which balances each
layer by itself; MOETION (2024), Sec. 4.3.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate

from xxhash import xxh3_64_intdigest

from lightning_moe_ckpt.operators import MoELayerSpec, OperatorSet, RecordKind
from lightning_moe_ckpt.policies._plan import Audience, Plan, WindowStep

MEMORY, STORAGE = "memory", "storage"
"""The two levels of a selection: host memory with its copies on other nodes, and storage."""

LEVELS = (MEMORY, STORAGE)

MAX_GENERATIONS = 16
"""Most generations that other nodes keep, each with the whole dense part."""

STARVED = 4
"""Rounds of a level after which an expert comes before others although storage has its newest copy."""

PEER = "peer"
"""Third level of saved tokens: copies on other nodes, under policies that send them no more than storage gets."""

SortKey = Callable[[int], tuple[int, ...]]
"""Sort key for experts of one layer: the smallest is taken first."""


Urgency = Mapping[int, tuple[int, ...]]
"""Keys of one layer's available experts: the smallest key is the most urgent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLayout:
    """The experts of one MoE layer, constant during a run. Entries are by global expert index."""

    layer: str
    """FQN of the MoE layer."""
    rank_of: tuple[int, ...]
    """Position of each expert."""
    nbytes: int
    """FULL bytes of one expert, all its parts."""

    @property
    def num_experts(self) -> int:
        """Number of experts over all ranks."""
        return len(self.rank_of)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertTable(ExpertLayout):
    """One MoE layer as input of a policy's choice."""

    unsaved: Mapping[str, tuple[int, ...]]
    """Per level: tokens in each expert's live weights that its newest copy there, or in storage, lacks."""
    saved_at: Mapping[str, tuple[int, ...]]
    """Per level: boundary of the newest generation there, or in storage, with each expert; -1 for none."""
    skipped: Mapping[str, tuple[bool, ...]]
    """Per level: whether the level gave up its last settled generation with each expert."""
    age: tuple[int, ...]
    """Generations since each expert was last taken to memory: 1 if the newest has the expert. See `max_age`."""
    waited: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Per level: the level's generations, which may be few of all, since the newest with each expert."""
    stored: Mapping[str, tuple[bool, ...]] = field(default_factory=dict)
    """Per level: whether storage has a copy of each expert as new as the level's, so that the level may drop its own."""
    again: tuple[bool, ...] = ()
    """Whether each expert has a bad stored copy, and so comes before all others; empty if none has."""

    def __post_init__(self) -> None:
        by_level = (self.unsaved, self.saved_at, self.skipped, self.waited, self.stored)
        rows = [self.age, self.again or self.age, *(row for each in by_level for row in each.values())]
        if self.num_experts < 1 or any(len(row) != self.num_experts for row in rows):
            raise ValueError(f"`ExpertTable(layer={self.layer!r})` needs {self.num_experts} entries in every row.")

    def due_age(self, level: str, ages: Sequence[int], expert: int, respite: int) -> int:
        """Return the age by which an expert's turn comes; an expert that a level may drop gets `respite` generations more."""
        rows = self.stored.get(level)
        return ages[expert] - respite if rows is not None and rows[expert] else ages[expert]


Experts = tuple[tuple[int, ...], ...]
"""Global indices of experts, ascending, by MoE layer in the order of the model."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The experts of one generation: global indices by layer, ascending."""

    memory: Experts
    """Experts taken to host memory, and to its copies on other nodes."""
    storage: Experts
    """Experts taken to storage as well: a subset of `memory`."""

    def __post_init__(self) -> None:
        for kept, stored in zip(self.memory, self.storage, strict=True):
            if any(list(row) != sorted(set(row)) for row in (kept, stored)) or not set(stored) <= set(kept):
                raise ValueError(f"`Selection`: {stored} must be part of {kept}, both ascending and without repeats.")

    @classmethod
    def everything(cls, layouts: Sequence[ExpertLayout]) -> Selection:
        """Return all experts for all levels, as in a dense generation."""
        rows = tuple(tuple(range(layout.num_experts)) for layout in layouts)
        return cls(rows, rows)

    def of(self, level: str) -> tuple[tuple[int, ...], ...]:
        """Return the experts of one level. Raises `KeyError`."""
        return {MEMORY: self.memory, STORAGE: self.storage, PEER: self.storage}[level]

    def flat(self, level: str, num_experts: Sequence[int]) -> tuple[int, ...]:
        """Return the experts of one level as places in a vector over all layers, which have `num_experts` each."""
        starts = accumulate(num_experts, initial=0)
        return tuple(start + expert for start, row in zip(starts, self.of(level), strict=False) for expert in row)

    def plan(self, operators: OperatorSet) -> Plan:
        """Return the plan of the whole dense part, and these experts."""
        dense = [operator.name for operator in operators if operator.kind != "expert"]
        durable = [*dense, *self._names(self.storage, operators)]
        kept = set(durable)
        node = [name for name in self._names(self.memory, operators) if name not in kept]
        files: dict[Audience, dict[str, RecordKind]] = {"durable": dict.fromkeys(durable, RecordKind.FULL)}
        if node:
            files["node"] = dict.fromkeys(node, RecordKind.FULL)
        return Plan((WindowStep(files),), partial=True)

    @classmethod
    def of_plan(cls, plan: Plan, operators: OperatorSet) -> Selection:
        """Return the experts that a plan takes."""
        (step,) = plan.steps
        durable = set(step.files["durable"])
        kept = durable | set(step.files.get("node", ()))
        rows = [expert_names(layer) for layer in operators.layers]
        memory, storage = (
            tuple(tuple(i for i, name in enumerate(row) if name in names) for row in rows) for names in (kept, durable)
        )
        return cls(memory, storage)

    @staticmethod
    def _names(rows: Sequence[Sequence[int]], operators: OperatorSet) -> list[str]:
        return [expert_names(layer)[i] for layer, row in zip(operators.layers, rows, strict=True) for i in row]


def expert_names(layer: MoELayerSpec) -> list[str]:
    """Return the operator names of all experts of a layer, on all ranks, by global index."""
    return [f"{layer.prefix}/expert.{expert}" for expert in range(layer.num_experts)]


def expert_layouts(operators: OperatorSet, nbytes: Mapping[str, int]) -> tuple[ExpertLayout, ...]:
    """Return the layers of a model, equal on all ranks, in the order of `OperatorSet.count_offsets`. Operators are of
    this rank, not split; bytes are FULL, by operator name, over all its writers. Experts of one layer are of equal
    size.
    """
    found = []
    for layer in operators.layers:
        positions = operators.ep_size if layer.holders == "expert_data" else 1
        each = layer.num_experts // positions
        size = max(nbytes[op.name] for op in operators if op.layer == layer.fqn and op.expert_idx is not None)
        ranks = layer.owners or tuple(expert // each for expert in range(layer.num_experts))
        found.append(ExpertLayout(layer=layer.fqn, rank_of=ranks, nbytes=size))
    return tuple(found)


def taken_again(table: ExpertTable, experts: Iterable[int]) -> list[int]:
    """Return the experts with a bad stored copy, which come before all others."""
    return [expert for expert in experts if table.again and table.again[expert]]


def positions_of(layout: ExpertLayout) -> dict[int, list[int]]:
    """Return the experts by position, both ascending."""
    found: dict[int, list[int]] = {rank: [] for rank in sorted(set(layout.rank_of))}
    for expert, rank in enumerate(layout.rank_of):
        found[rank].append(expert)
    return found


def sequential_order(table: ExpertTable, level: str, turn: Sequence[int]) -> SortKey:
    """Return a key: least recently saved first; among equals skipped experts first, then by `turn`."""
    saved_at, skipped = table.saved_at[level], table.skipped[level]
    return lambda expert: (saved_at[expert], not skipped[expert], turn[expert])


def unsaved_order(table: ExpertTable, level: str, turn: Sequence[int], *, repeat: Fraction = Fraction(1)) -> SortKey:
    """Return a key: most unsaved tokens times generations since the last copy first, then as `sequential_order`.

    By tokens alone the most popular expert is taken each time, though it has as many again a generation later, and
    other experts' tokens pile up. With `w` tokens per generation `a` generations leave `w a` unsaved, and a place is
    worth `w a (a + 1) / 2` (Whittle's index of weighted age, Kadota et al., IEEE/ACM ToN 2018, Sec. IV; MOETION takes
    `w a`). So an expert with few tokens has its turn, too. A place counts `repeat` times as much for an expert that the
    level's newest generation has: the inverse of its cost, relative to another expert's.
    """
    unsaved, otherwise = table.unsaved[level], sequential_order(table, level, turn)
    waited = table.waited.get(level) or (0,) * table.num_experts
    worth = [int(n * (age + 1) * (repeat if age == 1 else 1)) for n, age in zip(unsaved, waited, strict=True)]
    return lambda expert: (-worth[expert], *otherwise(expert))


def first(experts: Iterable[int], number: int, order: SortKey) -> list[int]:
    """Return the first `number` experts by `order`."""
    return sorted(experts, key=order)[:number]


def overdue(ages: Sequence[int], costs: Sequence[int], *, limit: int, rate: Fraction | int) -> int:
    """Return how many of the oldest experts must be taken now so that none gets older than `limit`, the largest age at
    which experts may be taken. Ages are of experts in competition for the same places, oldest first; costs are each
    expert's part of a generation, and `rate` the capacity of each later generation.
    """
    behind: Fraction | int = 0
    total = 0
    for age, cost in zip(ages, costs, strict=True):
        total += cost
        behind = max(behind, total - rate * max(limit - age, 0))
    number = 0
    while behind > 0 and number < len(costs):
        behind -= costs[number]
        number += 1
    return number


def jitter(index: int, most: int) -> int:
    """Return a number from 0 to `most`, pseudo-random over `index`, the same in every process."""
    return int(xxh3_64_intdigest(str(index).encode())) % (most + 1) if most > 0 else 0


def balanced(layers: Sequence[Urgency], positions: Sequence[Sequence[int]], numbers: Sequence[int]) -> list[list[int]]:
    """Return the chosen experts, by layer: `numbers` of each layer, if as many are available. `positions` has the
    position of each expert, by layer.
    """
    wanted = [min(number, len(layer)) for layer, number in zip(layers, numbers, strict=True)]
    choice = _Choice(layers, positions, sum(wanted))
    everything = sorted((key, i, expert) for i, layer in enumerate(layers) for expert, key in layer.items())
    for _, i, expert in everything:
        if len(choice.taken[i]) < wanted[i] and choice.has_room(positions[i][expert]):
            choice.take(i, expert)
    for i, number in enumerate(wanted):
        while len(choice.taken[i]) < number:
            choice.move_for(i)
    return [sorted(taken) for taken in choice.taken]


class _Choice:
    """The experts taken so far. Of `total` experts, each position gives an equal part, and some give one more."""

    def __init__(self, layers: Sequence[Urgency], positions: Sequence[Sequence[int]], total: int) -> None:
        self._layers, self._positions = layers, positions
        self._all = sorted({place for row in positions for place in row})
        self._least, self._more = divmod(total, len(self._all))
        """Experts given by each position, and number of positions giving one more."""
        self.taken: list[set[int]] = [set() for _ in layers]
        self._given: Counter[int] = Counter()

    def has_room(self, position: int) -> bool:
        """Return whether a position can give another expert."""
        given, least = self._given[position], self._least
        return given < least or (given == least and self._more > sum(n > least for n in self._given.values()))

    def take(self, layer: int, expert: int) -> None:
        """Take an expert."""
        self.taken[layer].add(expert)
        self._given[self._positions[layer][expert]] += 1

    def move_for(self, layer: int) -> None:
        """Take one more expert of `layer`, and move other layers' experts along a shortest chain to make room."""
        came_by: dict[int, tuple[int, int, int | None, int]] = {}
        """Per position: layer and expert to take, expert given up for it, and the position that gave way."""
        waiting = deque[tuple[int, int | None, int]]([(layer, None, -1)])
        while waiting:
            i, leaving, origin = waiting.popleft()
            for expert in self._untaken(i):
                if (position := self._positions[i][expert]) in came_by:
                    continue
                came_by[position] = i, expert, leaving, origin
                if self.has_room(position):
                    self._follow(came_by, position)
                    return
                waiting.extend(self._leaving(position))
        # No position can give way: the layer's number counts for more.
        self.take(layer, self._untaken(layer)[0])

    def _follow(self, came_by: Mapping[int, tuple[int, int, int | None, int]], position: int) -> None:
        while position >= 0:
            i, expert, leaving, origin = came_by[position]
            self.take(i, expert)
            if leaving is not None:
                self.taken[i].remove(leaving)
                self._given[self._positions[i][leaving]] -= 1
            position = origin

    def _leaving(self, position: int) -> Iterator[tuple[int, int | None, int]]:
        """Yield experts that could make room at `position`: its own, or those of positions with one more than an equal part."""
        full = {position}
        if self._given[position] == self._least:
            full |= {each for each in self._all if self._given[each] > self._least}
        taken = [(i, expert) for i, each in enumerate(self.taken) for expert in each]
        found = [(self._layers[i][expert], i, expert) for i, expert in taken if self._positions[i][expert] in full]
        for _, i, expert in sorted(found, reverse=True):  # the least urgent first
            yield i, expert, position

    def _untaken(self, layer: int) -> list[int]:
        left = self._layers[layer].keys() - self.taken[layer]
        return sorted(left, key=lambda expert: (self._layers[layer][expert], expert))
