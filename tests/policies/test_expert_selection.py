"""Which experts a partial generation takes: as many as were asked for, the same on all ranks, and none forgotten."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_moe_ckpt.operators import OperatorSet
from lightning_moe_ckpt.policies import (
    MEMORY,
    PEER,
    STORAGE,
    Deltas,
    ExpertLayout,
    Experts,
    PartialPolicy,
    PlanInputs,
    Selection,
    SelectivePolicy,
    TokenLedger,
)
from lightning_moe_ckpt.policies._expert_tables import LEVELS, STARVED, ExpertTable, balanced
from lightning_moe_ckpt.policies._partial import largest_k, spread
from lightning_moe_ckpt.policies._policy import ExpertPolicy
from lightning_moe_ckpt.policies._selective import _rounds, compute_s

ORDERS = ("sequential", "load_aware")


def table(
    unsaved: Sequence[int], *, positions: int = 1, nbytes: int = 10, saved_at: Sequence[int] | None = None
) -> ExpertTable:
    num_experts = len(unsaved)
    saved = tuple(saved_at or [0] * num_experts)
    return ExpertTable(
        layer="moe",
        rank_of=tuple(e * positions // num_experts for e in range(num_experts)),
        nbytes=nbytes,
        unsaved=dict.fromkeys(LEVELS, tuple(unsaved)),
        saved_at=dict.fromkeys(LEVELS, saved),
        skipped=dict.fromkeys(LEVELS, (False,) * num_experts),
        age=(1,) * num_experts,
    )


@st.composite
def table_lists(draw: st.DrawFn) -> list[ExpertTable]:
    positions = draw(st.integers(1, 4))
    found = []
    for _ in range(draw(st.integers(1, 4))):
        num_experts = positions * draw(st.integers(1, 6))
        rows = st.lists(st.integers(0, 50), min_size=num_experts, max_size=num_experts).map(tuple)
        flags = st.lists(st.booleans(), min_size=num_experts, max_size=num_experts).map(tuple)
        ages = st.lists(st.integers(1, 12), min_size=num_experts, max_size=num_experts).map(tuple)
        found.append(
            ExpertTable(
                layer="moe",
                rank_of=tuple(e * positions // num_experts for e in range(num_experts)),
                nbytes=draw(st.sampled_from([10, 10, 10, 7])),
                unsaved={level: draw(rows) for level in LEVELS},
                saved_at={level: draw(rows) for level in LEVELS},
                skipped={level: draw(flags) for level in LEVELS},
                age=draw(ages),
            )
        )
    return found


@st.composite
def partial_policies(draw: st.DrawFn) -> PartialPolicy:
    k = draw(st.integers(1, 6))
    more = draw(st.none() | st.integers(0, 6))
    return PartialPolicy(
        k=k,
        snapshot_k=None if more is None else k + more,
        order=draw(st.sampled_from(ORDERS)),
    )


BUDGETS = st.fixed_dictionaries({level: st.integers(0, 150) for level in LEVELS})


def per_position(rows: Sequence[Sequence[int]], tables: Sequence[ExpertTable]) -> list[int]:
    ranks = [t.rank_of[e] for row, t in zip(rows, tables, strict=True) for e in row]
    return [ranks.count(r) for r in sorted({r for t in tables for r in t.rank_of})]


@settings(max_examples=40)
@given(partial_policies(), table_lists(), st.integers(0, 40))
def test_partial_takes_k_per_layer_and_equally_many_from_every_rank(
    policy: PartialPolicy, tables: list[ExpertTable], index: int
) -> None:
    """To memory and to storage, in each layer and over all layers, whatever the loads."""
    chosen = policy.select(index, tables, {})
    for level, k in ((MEMORY, policy.memory_k), (STORAGE, policy.k)):
        for row, each in zip(chosen.of(level), tables, strict=True):
            assert len(row) == min(k, each.num_experts)
            counts = per_position([row], [each])
            assert max(counts) - min(counts) <= 1 or policy.order == "load_aware"
    # Experts of another size are balanced by themselves, where load decides.
    sizes = {each.nbytes for each in tables}
    groups = [[i for i, each in enumerate(tables) if each.nbytes == nbytes] for nbytes in sizes]
    for group in groups if policy.order == "load_aware" else [list(range(len(tables)))]:
        counts = per_position([chosen.memory[i] for i in group], [tables[i] for i in group])
        if all(policy.memory_k <= each.num_experts for each in tables):
            assert max(counts) - min(counts) <= 1


@settings(max_examples=40)
@given(partial_policies() | st.just(SelectivePolicy()), table_lists(), st.integers(0, 40), st.data())
def test_an_expert_whose_copy_is_bad_is_taken_next(
    policy: PartialPolicy | SelectivePolicy, tables: list[ExpertTable], index: int, data: st.DataObject
) -> None:
    """To memory and to storage, whoever else is late, where one expert of its position has room."""
    layer = data.draw(st.integers(0, len(tables) - 1))
    expert = data.draw(st.integers(0, tables[layer].num_experts - 1))
    flags = tuple(e == expert for e in range(tables[layer].num_experts))
    marked = [replace(each, again=flags) if i == layer else each for i, each in enumerate(tables)]
    chosen = policy.select(index, marked, {MEMORY: 20, STORAGE: 10})
    assert expert in chosen.storage[layer]
    number = [len(row) for row in chosen.storage]
    assert isinstance(policy, SelectivePolicy) or number == [
        len(row) for row in policy.select(index, tables, {}).storage
    ]


@settings(max_examples=40)
@given(partial_policies() | st.just(SelectivePolicy()), table_lists(), st.integers(0, 40), BUDGETS)
def test_every_rank_chooses_the_same(
    policy: PartialPolicy | SelectivePolicy, tables: list[ExpertTable], index: int, budgets: dict[str, int]
) -> None:
    """There is no exchange: a selection is a pure function."""
    chosen = policy.select(index, tables, budgets)
    assert chosen == policy.select(index, [replace(each) for each in tables], dict(budgets))


@given(st.integers(1, 3), st.integers(1, 4), st.data())
def test_experts_have_no_names(num_local: int, positions: int, data: st.DataObject) -> None:
    """Where loads decide, renaming the experts of a position, and the positions, renames the choice and nothing else."""
    total = num_local * positions
    loads = data.draw(st.permutations(range(1, total + 1)))
    order = list(data.draw(st.permutations(range(positions))))
    within = [list(data.draw(st.permutations(range(num_local)))) for _ in range(positions)]
    renamed = [order[r] * num_local + within[r][i] for r in range(positions) for i in range(num_local)]
    k = data.draw(st.integers(1, num_local)) * positions
    budget = data.draw(st.integers(0, 10 * num_local))
    other = [0] * total
    for old, new in enumerate(renamed):
        other[new] = loads[old]
    policies: list[ExpertPolicy] = [PartialPolicy(k=k, order="load_aware"), SelectivePolicy()]
    for policy in policies:
        before, after = (
            policy.select(0, [table(row, positions=positions)], dict.fromkeys(LEVELS, budget)) for row in (loads, other)
        )
        assert after.memory[0] == tuple(sorted(renamed[e] for e in before.memory[0]))


# -- over a run


def run(
    policy: ExpertPolicy,
    layouts: Sequence[ExpertLayout],
    generations: int,
    *,
    budgets: dict[str, int] | None = None,
    loads: Sequence[int] | None = None,
    skips: Any = lambda _: False,
) -> tuple[list[Selection], int]:
    """Generations and the limit of age, with storage that is whole at once but for those it skips."""
    accounting = TokenLedger.start([layout.num_experts for layout in layouts])
    accounting = accounting.take(0, Selection.everything(layouts))
    for level in LEVELS:
        accounting = accounting.complete(level, 0)
    found, limit = [], 0
    for step in range(1, generations + 1):
        accounting = accounting.add(torch.tensor(loads or [1] * sum(layout.num_experts for layout in layouts)))
        tables = accounting.tables(layouts)
        limit = policy.max_age(tables, budgets or {})
        chosen = policy.select(accounting.generations, tables, budgets or {})
        accounting = accounting.take(step, chosen).complete(MEMORY, step)
        if not skips(step):
            accounting = accounting.complete(STORAGE, step)
            found.append(chosen)
        else:
            found.append(Selection(chosen.memory, tuple(() for _ in layouts)))
    return found, limit


def layouts(num_layers: int, num_experts: int, positions: int) -> list[ExpertLayout]:
    ranks = tuple(e * positions // num_experts for e in range(num_experts))
    return [ExpertLayout(layer=f"moe{i}", rank_of=ranks, nbytes=10) for i in range(num_layers)]


def longest_wait(rows: Sequence[Sequence[int]], num_experts: int) -> int:
    """Most generations from one that has an expert (the start has all) to the next that has it, or to the end."""
    longest = 0
    for expert in range(num_experts):
        seen = [-1, *(i for i, row in enumerate(rows) if expert in row), len(rows)]
        longest = max(longest, *(b - a for a, b in pairwise(seen)))
    return longest


def dropped(found: Sequence[Selection], layer: int, num_experts: int, kept: int) -> list[tuple[int, int]]:
    """Generation and expert of which memory, which keeps so many, has dropped a copy that is newer than that of storage."""
    lost = []
    for now, expert in product(range(len(found)), range(num_experts)):
        taken = [i for i in range(now + 1) if expert in found[i].memory[layer]]
        stored = [i for i in range(now + 1) if expert in found[i].storage[layer]]
        newest = max(taken, default=-1)
        if newest <= now - kept and newest > max(stored, default=-1):
            lost.append((now, expert))
    return lost


def test_sequential_is_the_interleaved_schedule() -> None:
    """From rank to rank, the next layer one expert ahead: every rank writes one expert per generation (PEC, Figure 1)."""
    found, _ = run(PartialPolicy(k=1), layouts(2, 4, 2), 4)
    assert [each.memory for each in found] == [((2,), (1,)), ((1,), (3,)), ((3,), (0,)), ((0,), (2,))]
    assert all(sorted(e // 2 for (e,) in each.memory) == [0, 1] for each in found)


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 12))
def test_sequential_takes_every_expert_within_one_round(positions: int, each: int, num_layers: int, k: int) -> None:
    """ceil(E / K) generations without skips, whatever K and the number of ranks."""
    num_experts = positions * each
    found, _ = run(PartialPolicy(k=k), layouts(num_layers, num_experts, positions), 3 * num_experts)
    for layer in range(num_layers):
        for level in LEVELS:
            wait = longest_wait([chosen.of(level)[layer] for chosen in found], num_experts)
            assert wait <= -(-num_experts // min(k, num_experts))


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(0, 6), st.sampled_from(ORDERS), st.data())
def test_memory_holds_every_expert(  # noqa: PLR0917  # one argument per dimension
    positions: int, each: int, k: int, more: int, order: Any, data: st.DataObject
) -> None:
    """Whatever loads and storage do: what memory drops, which keeps `max_age` generations, storage has as new."""
    num_experts = positions * each
    loads = data.draw(st.lists(st.integers(0, 1000), min_size=2 * num_experts, max_size=2 * num_experts))
    skipped = data.draw(st.sets(st.integers(1, 40)))
    policy = PartialPolicy(k=k, snapshot_k=k + more, order=order)
    found, limit = run(policy, layouts(2, num_experts, positions), 40, loads=loads, skips=skipped.__contains__)
    lost = [dropped(found, layer, num_experts, limit) for layer in range(2)]
    assert lost == [[], []]
    longest = max(limit, STARVED * (-(-num_experts // min(k + more, num_experts)) + positions) + 2)
    for layer in range(2):
        assert longest_wait([chosen.memory[layer] for chosen in found], num_experts) <= longest


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(10, 60), st.integers(10, 60), st.data())
def test_selective_forgets_no_expert_either(
    positions: int, each: int, memory: int, storage: int, data: st.DataObject
) -> None:
    """Though layers without risk and experts without tokens would never have a turn."""
    num_experts = positions * each
    loads = data.draw(st.lists(st.integers(0, 1000), min_size=2 * num_experts, max_size=2 * num_experts))
    budgets, skipped = {MEMORY: memory, STORAGE: storage}, data.draw(st.sets(st.integers(1, 60)))
    shapes = layouts(2, num_experts, positions)
    found, limit = run(SelectivePolicy(), shapes, 60, loads=loads, budgets=budgets, skips=skipped.__contains__)
    longest = max(limit, STARVED * -(-2 * each // (memory // 10)) + 2)
    for layer in range(2):
        assert dropped(found, layer, num_experts, limit) == []
        assert longest_wait([chosen.memory[layer] for chosen in found], num_experts) <= longest


def test_what_storage_skipped_comes_next() -> None:
    """Once a newer generation is known to be whole without it, and although memory has it."""
    found, _ = run(PartialPolicy(k=1, snapshot_k=2), layouts(1, 6, 1), 4, skips=(2).__eq__)
    assert [each.storage[0] for each in found] == [(1,), (), (3,), (2,)]
    assert 2 in found[1].memory[0]


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("every", [2, 3, 4, 8])
def test_storage_that_skips_in_step_with_the_round_still_gets_every_expert(every: int, k: int) -> None:
    """Taking each second generation of an even round, it would get the same half of the experts for ever."""
    found, _ = run(PartialPolicy(k=k), layouts(1, 16, 2), 60 * every, skips=lambda step: step % every)
    stored = [each.storage[0] for i, each in enumerate(found) if (i + 1) % every == 0]
    assert longest_wait(stored, 16) <= 3 * 16 // k


@pytest.mark.parametrize(
    ("policy", "budgets"),
    [
        (PartialPolicy(k=1), {}),
        (PartialPolicy(k=1, snapshot_k=3), {}),
        (PartialPolicy(k=1, order="load_aware"), {}),
        (SelectivePolicy(), {MEMORY: 30, STORAGE: 10}),
    ],
)
@pytest.mark.parametrize("positions", [1, 2])
def test_no_expert_is_kept_from_storage_by_losing_all_memory_again_and_again(
    policy: ExpertPolicy, budgets: dict[str, int], positions: int
) -> None:
    """Memory lacks all of them alike then: who was saved longest ago comes first, and not the same few each time."""
    where = layouts(1, 8, positions)
    accounting = TokenLedger.start([8]).take(0, Selection.everything(where))
    stored = []
    for step in range(1, 61):
        for level in LEVELS:
            accounting = accounting.complete(level, step - 1)
        if step % 3 == 0:
            book = accounting.saved[STORAGE]
            accounting, _ = accounting.restore(book.alive, book.step, {STORAGE: torch.ones(8, dtype=torch.bool)})
        accounting = accounting.add(torch.ones(8, dtype=torch.int64))
        chosen = policy.select(accounting.generations, accounting.tables(where), budgets)
        accounting = accounting.take(step, chosen)
        stored.append(chosen.storage[0])
    assert longest_wait(stored, 8) <= 16


def test_two_levels_go_round_at_their_own_pace() -> None:
    """Storage in E / k generations, memory in about E / snapshot_k."""
    found, _ = run(PartialPolicy(k=1, snapshot_k=4), layouts(2, 8, 2), 40)
    for layer in range(2):
        assert longest_wait([each.storage[layer] for each in found], 8) == 8
        assert longest_wait([each.memory[layer] for each in found], 8) <= 4


def test_load_aware_takes_the_most_loaded_of_each_rank() -> None:
    """PEC, Algorithm 1: equal save capacity, although rank 1 has all the load."""
    chosen = PartialPolicy(k=2, order="load_aware").select(0, [table([1, 2, 900, 800], positions=2)], {})
    assert chosen.memory == ((1, 2),)


def test_turns_are_shared_where_k_does_not_divide() -> None:
    """A rank that gives one more now gives one less at another time, unless loads decide."""
    found, _ = run(PartialPolicy(k=1), layouts(1, 8, 4), 40)
    ranks = [each.memory[0][0] // 2 for each in found]
    assert [ranks.count(r) for r in range(4)] == [10, 10, 10, 10]


def test_load_decides_though_each_rank_holds_one_expert_of_a_layer() -> None:
    """PEC's own placement: where turns of ranks decided, the choice would be that of the sequential order."""
    loads = [*[900, 1, 1, 1], *[1, 900, 1, 1], *[1, 1, 900, 1], *[900, 800, 1, 1]]
    shapes = layouts(4, 4, 4)
    for k in (1, 2, 3):
        found, _ = run(PartialPolicy(k=k, order="load_aware"), shapes, 24, loads=loads)
        in_turns, _ = run(PartialPolicy(k=k), shapes, 24, loads=loads)
        assert found != in_turns
        for chosen in found:
            assert [len(row) for row in chosen.memory] == [k] * 4
            assert per_position(chosen.memory, TokenLedger.start([4] * 4).tables(shapes)) == [k] * 4
        popular = [expert in each.memory[layer] for each in found for layer, expert in enumerate([0, 1, 2])]
        assert sum(popular) / len(popular) > min(0.9, 1.4 * k / 4)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 5), st.integers(1, 7), st.data())
def test_a_balanced_choice_has_its_numbers_and_is_no_worse_than_turns(
    positions: int, each: int, num_layers: int, k: int, data: st.DataObject
) -> None:
    """Every layer has its number, no position gives two more than another, and at least half of the best is taken."""
    num_experts = positions * each
    k = min(k, num_experts)
    load = st.lists(st.integers(0, 9), min_size=num_experts, max_size=num_experts)
    loads = [data.draw(load) for _ in range(num_layers)]
    where = [tuple(e * positions // num_experts for e in range(num_experts))] * num_layers
    urgent = [{e: (-row[e], e) for e in range(num_experts)} for row in loads]
    found = balanced(urgent, where, [k] * num_layers)
    assert [len(set(row)) for row in found] == [k] * num_layers
    given_ = [sum(where[0][e] == p for row in found for e in row) for p in range(positions)]
    assert max(given_) - min(given_) <= 1
    taken = sum(row[e] for row, chosen in zip(loads, found, strict=True) for e in chosen)
    for start in range(positions):
        turn = [[(start + i + j) % positions * each + j // positions for j in range(k)] for i in range(num_layers)]
        assert 2 * taken >= sum(row[e] for row, chosen in zip(loads, turn, strict=True) for e in chosen)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(0, 30), st.integers(0, 20))
def test_spread_fills_rooms_evenly(rooms: list[int], number: int, start: int) -> None:
    """No position gives two more than another that has room left."""
    given_ = spread(number, rooms, start=start)
    assert sum(given_) == min(number, sum(rooms))
    for here, room in zip(given_, rooms, strict=True):
        assert here <= room
        assert here == room or here >= max(given_) - 1


# -- selective


@settings(max_examples=40)
@given(table_lists(), st.integers(0, 20), BUDGETS)
def test_selective_keeps_the_budget_of_every_rank(
    tables: list[ExpertTable], index: int, budgets: dict[str, int]
) -> None:
    """And leaves no room in which another expert would fit."""
    chosen = SelectivePolicy().select(index, tables, budgets)
    for position in {r for t in tables for r in t.rank_of}:
        for level in LEVELS:
            rows = list(zip(chosen.of(level), tables, strict=True))
            used = sum(t.nbytes for row, t in rows for e in row if t.rank_of[e] == position)
            assert used <= budgets[level]
        rest = [t.nbytes for row, t in zip(chosen.memory, tables, strict=True) for e in range(t.num_experts)
                if t.rank_of[e] == position and e not in row]  # fmt: skip
        kept = zip(chosen.memory, tables, strict=True)
        used = sum(t.nbytes for row, t in kept for e in row if t.rank_of[e] == position)
        assert not rest or used + min(rest) > budgets[MEMORY]


def test_selective_follows_algorithm_1() -> None:
    """S in proportion to risk: 8 places for risks 30, 10 and 0 are 6, 2 and 0, and the top ones of each layer."""
    tables = [table([9, 1, 8, 2, 7, 1, 1, 1]), table([0, 3, 4, 3]), table([0, 0])]
    chosen = SelectivePolicy().select(0, tables, {MEMORY: 80, STORAGE: 40})
    assert [len(row) for row in chosen.memory] == [6, 2, 0]
    assert {0, 2, 3, 4} <= set(chosen.memory[0])
    assert 2 in chosen.memory[1]
    assert chosen.storage == ((0, 2, 4), (2,), ())


def priced(tokens: Sequence[torch.Tensor], deltas: Deltas | None) -> tuple[float, float]:
    """Tokens at risk, and bytes to other nodes relative to states, with a policy that knows, or not, what a gradient costs."""
    shapes, policy = (
        [ExpertLayout(layer=f"moe{i}", rank_of=(0,) * 16, nbytes=1) for i in range(4)],
        SelectivePolicy(deltas=deltas),
    )
    accounting = TokenLedger.start([16] * 4, levels=[*LEVELS, PEER]).take(
        0, Selection.everything(shapes), [*LEVELS, PEER]
    )
    risk, sent, whole, before = 0, 0.0, 0, set[int]()
    for step, tokens_E in enumerate(tokens, start=1):
        accounting = accounting.add(tokens_E)
        chosen = policy.select(step, accounting.tables(shapes), dict.fromkeys(LEVELS, 20))
        accounting = accounting.take(step, chosen, [*LEVELS, PEER])
        for level in (*LEVELS, PEER):
            accounting = accounting.complete(level, step)
        taken = set(chosen.flat(PEER, [16] * 4))
        risk += int(accounting.unsaved(PEER).sum())
        sent, whole = sent + len(taken - before) + len(taken & before) / 3, whole + len(taken)
        before = taken
    return risk, sent / whole


@pytest.mark.parametrize("alpha", [0.3, 0.1])
def test_an_expert_that_costs_a_gradient_stays_chosen_where_tokens_at_risk_allow_it(alpha: float) -> None:
    """Fewer bytes for as many tokens at risk, to three per cent; no expert waits longer than without."""
    tokens = routed(alpha)
    (risk, share), (priced_risk, priced_share) = priced(tokens, None), priced(tokens, Deltas())
    assert priced_share < share - 0.02
    assert priced_risk < 1.03 * risk


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 9)), min_size=1, max_size=8), st.integers(0, 60))
def test_s_adds_up_to_s_total(layers: list[tuple[int, int]], s_total: int) -> None:
    """Line 5 of the algorithm: exactly, or all experts; and no layer with room gets less than its share rounded down."""
    risks, sizes = [risk for risk, _ in layers], [size for _, size in layers]
    numbers = compute_s(risks, sizes, [7] * len(layers), 7 * s_total + 3)
    assert sum(numbers) == min(s_total, sum(sizes))
    for risk, size, number in zip(risks, sizes, numbers, strict=True):
        assert number <= size
        assert number == size or not sum(risks) or number >= risk * s_total // sum(risks)


def run_remotely(
    shapes: Sequence[ExpertLayout],
    generations: int,
    *,
    budgets: dict[str, int],
    loads: Sequence[int],
    every: dict[str, int],
) -> tuple[list[Selection], dict[str, list[Selection]]]:
    """All generations, and those that each level outside the node took: every so many, whole at once."""
    accounting = TokenLedger.start([shape.num_experts for shape in shapes], levels=[MEMORY, *every])
    accounting = accounting.take(0, Selection.everything(shapes), accounting.saved)
    for level in accounting.saved:
        accounting = accounting.complete(level, 0)
    policy, found, taken = SelectivePolicy(), [], {level: list[Selection]() for level in every}
    for step in range(1, generations + 1):
        accounting = accounting.add(torch.tensor(loads))
        chosen = policy.select(accounting.generations, accounting.tables(shapes), budgets)
        levels = [MEMORY, *(level for level, each in every.items() if step % each == 0)]
        accounting = accounting.take(step, chosen, levels)
        for level in levels:
            accounting = accounting.complete(level, step)
            if level != MEMORY:
                taken[level].append(chosen)
        found.append(chosen)
    return found, taken


SKEWED, EVEN, NONE = [1000, 300, *[1] * 13, 0], [1] * 16, [0] * 16


@pytest.mark.parametrize("every", [1, 2, 3, 8, *(pytest.param(each, marks=pytest.mark.soak) for each in (4, 5, 6, 7))])
@pytest.mark.parametrize(
    ("local", "remote", "peers", "loads"),
    [
        (40, 40, None, SKEWED),
        (80, 20, 3, SKEWED),
        (10, 10, 1, SKEWED),
        *(
            pytest.param(local, remote, peers, loads, marks=pytest.mark.soak)
            for local, remote in [(40, 40), (80, 20), (10, 10)]
            for peers in [None, 1, 3]
            for loads in [EVEN, NONE]
        ),
    ],
)
def test_every_expert_reaches_a_level_that_takes_each_so_many_generations(  # one argument per dimension
    every: int, local: int, remote: int, peers: int | None, loads: list[int]
) -> None:
    """Within a number of the generations that it took, whatever the router likes, and memory has its own turns besides."""
    shapes, policy = layouts(2, 8, 2), SelectivePolicy()
    budgets, levels = {MEMORY: local, STORAGE: remote}, {STORAGE: every, **({} if peers is None else {PEER: peers})}
    found, taken = run_remotely(shapes, 40 * every, budgets=budgets, loads=loads, every=levels)
    tables = [table([0] * 8, positions=2)] * 2
    for layer in range(2):
        # Where a generation has one place, what storage waits for takes it now and then.
        longest = max(policy.max_age(tables, budgets), STARVED * _rounds(tables, local) + 2 + every)
        assert longest_wait([each.memory[layer] for each in found], 8) <= longest
        for got in taken.values():
            wait = longest_wait([each.storage[layer] for each in got], 8)
            assert wait <= 2 * max(policy.max_wait(tables, budgets), STARVED * _rounds(tables, remote) + 2)


# -- what is refused


@pytest.mark.parametrize(
    "wrong", [{"k": 0}, {"k": 3, "snapshot_k": 2}, {"order": "random"}], ids=lambda w: next(iter(w))
)
def test_wrong_arguments_are_named(wrong: dict[str, Any]) -> None:
    """As the caller wrote them."""
    with pytest.raises(ValueError, match=rf"PartialPolicy\(.*{next(reversed(wrong))}"):
        PartialPolicy(**wrong)


@pytest.mark.parametrize("rows", [(((0,),), ((1,),)), (((1, 0),), ((),)), (((0, 0),), ((),))])
def test_what_is_no_selection_is_refused(rows: tuple[Experts, Experts]) -> None:
    """Storage takes a part of what memory takes, each expert once, in order."""
    with pytest.raises(ValueError, match="Selection"):
        Selection(*rows)


def test_k_grows_for_both_levels_and_falls_for_storage() -> None:
    """Memory goes on with what it was made for."""
    operators, ledger = OperatorSet((), (), {}), TokenLedger.start([8])
    for snapshot_k, k, memory_k, wanted in ((4, 8, 8, (8, 8)), (None, 2, 2, (2, 2)), (None, 1, 4, (1, 4))):
        inputs = PlanInputs(operators=operators, ledger=ledger.with_k(k, memory_k=memory_k))
        grown = PartialPolicy(k=1, snapshot_k=snapshot_k).in_force(inputs)
        assert (grown.k, grown.memory_k) == wanted


def test_the_largest_k_is_that_which_fits_in_what_the_busiest_position_can_hide() -> None:
    """Experts of ten bytes, in three layers on two positions: with K = 3 one gives five of them."""
    shapes = layouts(3, 8, 2)
    found = [largest_k(shapes, nbytes, least=1) for nbytes in (0, 19, 20, 29, 30, 49, 50, 119, 120, 10**9)]
    assert found == [1, 1, 1, 1, 2, 2, 3, 7, 8, 8]
    assert largest_k(shapes, 0, least=4) == 4


def test_places_over_all_layers() -> None:
    """As counts are laid out."""
    chosen = Selection(((1,), (0, 2)), ((), (2,)))
    shapes = layouts(2, 3, 1)
    assert chosen.flat(MEMORY, [shape.num_experts for shape in shapes]) == (1, 3, 5)
    assert chosen.flat(STORAGE, [shape.num_experts for shape in shapes]) == (5,)


def test_random_runs_balance_bytes_over_ranks() -> None:
    """Over a long run with random loads, every rank has written as many experts as any other, to one."""
    chooser = random.Random(0)
    shapes = layouts(3, 12, 3)
    loads = [chooser.randrange(1000) for _ in range(36)]
    for policy in (PartialPolicy(k=2), PartialPolicy(k=2, order="load_aware")):
        found, _ = run(policy, shapes, 30, loads=loads)
        tables = TokenLedger.start([12] * 3).tables(shapes)
        totals = [0, 0, 0]
        for chosen in found:
            counts = per_position(chosen.memory, tables)
            assert max(counts) - min(counts) <= 1
            totals = [a + b for a, b in zip(totals, counts, strict=True)]
        assert max(totals) - min(totals) <= 1


def routed(alpha: float, num_layers: int = 4, num_experts: int = 16, steps: int = 120) -> list[torch.Tensor]:
    """Tokens of each step over all experts: shares drawn from Dirichlet(alpha) (MoEvement, Appendix D), which drift."""
    torch.manual_seed(0)
    dirichlet = torch.distributions.Dirichlet(torch.full((num_layers, num_experts), alpha, dtype=torch.float64))
    one, other = dirichlet.sample(), dirichlet.sample()
    shares = [torch.lerp(one, other, step / steps) for step in range(steps)]
    drawn = [torch.multinomial(share_LE, 4096, replacement=True) for share_LE in shares]
    return [torch.nn.functional.one_hot(each_LT, num_experts).sum(dim=1).flatten() for each_LT in drawn]


def mean_at_risk(policy: ExpertPolicy, tokens: Sequence[torch.Tensor], k: int = 4) -> float:
    """Tokens that a fault behind a generation would lose, mean over the later steps; storage has each generation."""
    layouts = [ExpertLayout(layer=f"moe{i}", rank_of=(0,) * 16, nbytes=1) for i in range(4)]
    accounting, found = TokenLedger.start([16] * 4).take(0, Selection.everything(layouts)), []
    for step, tokens_E in enumerate(tokens, start=1):
        accounting = accounting.add(tokens_E)
        chosen = policy.select(step, accounting.tables(layouts), dict.fromkeys(LEVELS, 4 * k))
        accounting = accounting.take(step, chosen)
        for level in LEVELS:
            accounting = accounting.complete(level, step)
        found.append(int(accounting.unsaved(STORAGE).sum()))
    return sum(found[20:]) / len(found[20:])


@pytest.mark.parametrize(
    ("alpha", "most"), [(10.0, 1.1), (0.3, 0.8), (0.1, 0.55)], ids=["even", "skewed", "very skewed"]
)
def test_popular_experts_first_lose_half_of_what_turns_lose(alpha: float, most: float) -> None:
    """With the same bytes, on a very skewed router (MOETION, Figure 11); an even one gains nothing and loses little."""
    tokens = routed(alpha)
    in_turns = mean_at_risk(PartialPolicy(k=4), tokens)
    assert mean_at_risk(PartialPolicy(k=4, order="load_aware"), tokens) < most * in_turns
    assert mean_at_risk(SelectivePolicy(), tokens) < most * in_turns
