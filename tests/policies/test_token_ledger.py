"""Tokens counted by vectors equal tokens counted one by one, through saves, skips and faults."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_moe_ckpt.errors import Corrupt
from lightning_moe_ckpt.journal import decode, encode
from lightning_moe_ckpt.metrics import moementary_lost_tokens, portion_of_lost_tokens
from lightning_moe_ckpt.policies import (
    MEMORY,
    NEVER,
    STORAGE,
    DynamicK,
    ExpertLayout,
    PartialPolicy,
    Selection,
    TokenLedger,
)
from lightning_moe_ckpt.policies._expert_tables import LEVELS
from lightning_moe_ckpt.policies._partial import next_k

LAYERS = (3, 4)
SHAPES = [ExpertLayout(layer=f"moe{i}", rank_of=(0,) * n, nbytes=1) for i, n in enumerate(LAYERS)]

Tokens = list[set[tuple[int, int]]]
"""By expert: each token as (step, number)."""


class TokenLog:
    """The brute force: which tokens the weights of each expert have learned from, as sets, and copies of such sets."""

    def __init__(self) -> None:
        self.alive: Tokens = [set() for _ in range(sum(LAYERS))]
        self.processed: Tokens = [set() for _ in range(sum(LAYERS))]
        self.copies: dict[str, dict[int, dict[int, set[tuple[int, int]]]]] = {level: {} for level in LEVELS}
        self.states: dict[int, tuple[Tokens, Tokens]] = {}
        self._number = 0

    def step(self, step: int, counts: list[int]) -> None:
        for expert, number in enumerate(counts):
            fresh = {(step, self._number + i) for i in range(number)}
            self._number += number
            self.alive[expert] |= fresh
            self.processed[expert] |= fresh

    def save(self, step: int, level: str, experts: tuple[int, ...]) -> None:
        self.copies[level][step] = {e: set(self.alive[e]) for e in experts}

    def boundary(self, step: int) -> None:
        self.states[step] = ([set(s) for s in self.alive], [set(s) for s in self.processed])

    def newest(self, level: str, expert: int, until: int, complete: set[int]) -> int:
        return max((g for g in complete if g <= until and expert in self.copies[level].get(g, {})), default=NEVER)

    def restore(self, step: int, sources: list[tuple[str, int]]) -> None:
        _, processed = self.states[step]
        self.processed = [set(s) for s in processed]
        self.alive = [set(self.copies[level][g][e]) for e, (level, g) in enumerate(sources)]
        for level in LEVELS:
            self.copies[level] = {g: c for g, c in self.copies[level].items() if g <= step}


class Run:
    """Training, generations and faults, by chance, with both ways of counting."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.log, self.accounting = TokenLog(), TokenLedger.start(LAYERS, k=1)
        self.step, self.faults = 0, 0
        self.complete: dict[str, set[int]] = {level: set() for level in LEVELS}
        self.journals: dict[int, Any] = {}
        self.take(Selection.everything(SHAPES))
        for level in LEVELS:
            self.finish(level, 0)

    def take(self, selection: Selection) -> None:
        self.accounting = self.accounting.take(self.step, selection)
        for level in LEVELS:
            self.log.save(self.step, level, selection.flat(level, LAYERS))
        self.log.boundary(self.step)
        self.journals[self.step] = decode(encode(self.accounting.to_journal()))

    def finish(self, level: str, step: int) -> None:
        self.accounting = self.accounting.complete(level, step)
        self.complete[level].add(step)

    def train(self) -> None:
        self.step += 1
        counts = [self.chance.choice([0, 0, 1, 3, 10]) for _ in range(sum(LAYERS))]
        self.log.step(self.step, counts)
        self.accounting = self.accounting.add(torch.tensor(counts))
        if self.chance.random() < 0.7:
            k = self.chance.randint(1, 2)
            policy = PartialPolicy(k=k, snapshot_k=k + self.chance.randint(0, 2))
            self.take(policy.select(self.accounting.generations, self.accounting.tables(SHAPES), {}))
        for level in LEVELS:
            book = self.accounting.saved[level]
            if book.pending and self.chance.random() < 0.6:
                self.finish(level, self.chance.choice(book.pending).step)

    def fault(self) -> None:
        usable = sorted(set().union(*self.complete.values()))
        until = self.chance.choice(usable[-3:])
        newest = [
            max((self.log.newest(level, e, until, self.complete[level]), level) for level in LEVELS)
            for e in range(sum(LAYERS))
        ]
        stored = TokenLedger.from_journal(self.journals[until])
        tokens = [
            known if (known := stored.tokens_at(e, g)) is not None else int(self.journals[g]["alive"][e])
            for e, (g, _) in enumerate(newest)
        ]
        read_from = {level: torch.tensor([source == level for _, source in newest]) for level in LEVELS}
        before = [set(s) for s in self.log.states[until][0]]
        self.log.restore(until, [(level, g) for g, level in newest])
        self.accounting, lost = stored.restore(torch.tensor(tokens), torch.tensor([g for g, _ in newest]), read_from)
        assert lost.tolist() == [len(a) - len(b) for a, b in zip(before, self.log.alive, strict=True)]
        self.step = until
        self.complete = {level: {g for g in found if g <= until} for level, found in self.complete.items()}
        self.journals = {g: journal for g, journal in self.journals.items() if g <= until}

    def check(self) -> None:
        log, found = self.log, self.accounting
        assert found.alive.tolist() == [len(s) for s in log.alive]
        assert found.processed.tolist() == [len(s) for s in log.processed]
        lost = [len(p - a) for p, a in zip(log.processed, log.alive, strict=True)]
        assert found.lost.tolist() == lost
        assert torch.equal(found.processed, found.alive + found.lost)
        total = sum(len(s) for s in log.processed)
        assert found.plt == (sum(lost) / total if total else 0.0)
        split = LAYERS[0]
        parts = [(lost[:split], log.processed[:split]), (lost[split:], log.processed[split:])]
        sums = [(sum(row), sum(len(s) for s in done)) for row, done in parts]
        assert found.mlt == pytest.approx(sum(a / b for a, b in sums if b), abs=1e-15)
        for level in LEVELS:
            book = found.saved[level]
            for e, step in enumerate(book.step.tolist()):
                assert step == NEVER or int(book.alive[e]) == len(log.copies[level][step][e])
            assert bool((found.unsaved(level) >= 0).all())


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**32))
def test_counts_equal_a_token_log(seed: int) -> None:
    """Random routing, two levels that skip and finish out of step, and six faults that restore what each level has."""
    run = Run(seed)
    for _ in range(6):
        for _ in range(run.chance.randint(1, 8)):
            run.train()
            run.check()
        run.fault()
        run.check()


def accounting() -> TokenLedger:
    return TokenLedger.start((2, 2), k=1).add(torch.tensor([10, 20, 30, 40]))


def test_restoring_counts_no_token_twice() -> None:
    """What one fault has lost is not lost again by the next, though its copy is still the newest."""
    everything = Selection(((0, 1), (0, 1)), ((0, 1), (0, 1)))
    start = accounting().take(1, everything).complete(STORAGE, 1)
    later = start.add(torch.tensor([1, 2, 3, 4])).take(2, Selection(((0,), (0,)), ((0,), (0,))))
    alive, step = torch.tensor([11, 20, 33, 40]), torch.tensor([2, 1, 2, 1])
    once, lost = later.restore(alive, step)
    assert (lost.tolist(), once.faults) == ([0, 2, 0, 4], 1)
    twice, lost = once.restore(alive, step)
    assert (lost.tolist(), twice.faults) == ([0, 0, 0, 0], 1)
    assert twice.plt == 6 / 110
    assert twice.mlt == pytest.approx(2 / 33 + 4 / 77)


def test_what_is_under_way_counts_until_the_level_is_past_it() -> None:
    """Then it was skipped; and from then on only what is complete counts for it."""
    one, two = Selection(((0,), ()), ((0,), ())), Selection(((1,), ()), ((1,), ()))
    found = accounting().take(1, one)
    assert found.unsaved(STORAGE).tolist() == [0, 20, 30, 40]
    found = found.take(2, two)
    assert found.unsaved(STORAGE).tolist() == [0, 0, 30, 40]
    found = found.complete(STORAGE, 2)
    assert found.unsaved(STORAGE).tolist() == [10, 0, 30, 40]
    assert found.saved[STORAGE].step.tolist() == [NEVER, 2, NEVER, NEVER]
    found = found.take(3, one)
    assert found.unsaved(STORAGE).tolist() == [10, 0, 30, 40]
    assert found.unsaved(MEMORY).tolist() == [0, 0, 30, 40]
    assert found.complete(STORAGE, 3).unsaved(STORAGE).tolist() == [0, 0, 30, 40]


def test_ages_count_generations_in_memory() -> None:
    """1 for what the newest has; what memory lost with a fault is older than everything."""
    found = accounting().take(1, Selection(((0, 1), (0, 1)), ((), ())))
    found = found.take(2, Selection(((1,), ()), ((), ())))
    assert [table.age for table in found.tables(SHAPES_OF_TWO)] == [(2, 1), (2, 2)]
    kept = torch.tensor([True, False, True, True])
    lost, _ = found.restore(found.alive, torch.tensor([1, 2, 1, 1]), {MEMORY: kept})
    assert [table.age for table in lost.tables(SHAPES_OF_TWO)] == [(2, 3), (2, 2)]


SHAPES_OF_TWO = [ExpertLayout(layer=name, rank_of=(0, 0), nbytes=1) for name in "ab"]


@pytest.mark.parametrize("wrong", ["alive", "faults", "saved", "num_experts"])
def test_a_journal_without_its_parts_is_corrupt(wrong: str) -> None:
    """Named, so that an older generation is tried."""
    stored = accounting().take(1, Selection(((0,), ()), ((), ()))).to_journal()
    assert TokenLedger.from_journal(stored).alive.tolist() == [10, 20, 30, 40]
    with pytest.raises(Corrupt, match="token accounting"):
        TokenLedger.from_journal({key: value for key, value in stored.items() if key != wrong})
    with pytest.raises(Corrupt, match="token accounting"):
        TokenLedger.from_journal({**stored, wrong: torch.zeros(3, dtype=torch.float32)})


def test_nothing_processed_is_nothing_lost() -> None:
    """Zero, not an error: a fault may come before the first step."""
    zeros = torch.zeros(4, dtype=torch.int64)
    assert portion_of_lost_tokens(zeros, zeros) == 0.0
    assert moementary_lost_tokens(zeros, zeros, (2, 2)) == 0.0


# -- Dynamic-K


@settings(deadline=None, max_examples=8)
@given(st.integers(0, 2**32), st.sampled_from([0.01, 0.05, 0.1]), st.sampled_from(["sequential", "load_aware"]))
def test_dynamic_k_keeps_plt_within_its_budget(seed: int, budget: float, order: Any) -> None:
    """20 faults: PLT exceeds it by what they lose until K is E, after which no fault loses anything; K doubles once for each.

    Between faults K falls, as soon as another one would be within the budget.
    """
    chance, num_experts = random.Random(seed), 16
    shapes = [ExpertLayout(layer=f"moe{i}", rank_of=(0,) * num_experts, nbytes=1) for i in range(2)]
    weights = [chance.expovariate(1) ** 2 for _ in range(2 * num_experts)]
    found = TokenLedger.start((num_experts,) * 2, k=1).take(0, Selection.everything(shapes)).complete(STORAGE, 0)
    asked = policy = PartialPolicy(k=1, order=order, dynamic_k=DynamicK(plt_budget=budget))
    step, above = 0, list[float]()
    for _ in range(20):
        for _ in range(chance.randint(1, 30)):
            step += 1
            found = asked.after_count(found.add(torch.tensor([int(w * chance.uniform(0, 40)) for w in weights])))
            assert found.k is not None
            assert found.k <= policy.k
            policy = replace(asked, k=found.k)
            chosen = policy.select(found.generations, found.tables(shapes), {})
            found = found.take(step, chosen).complete(STORAGE, step).complete(MEMORY, step)
        was_all = policy.k == num_experts
        book = found.saved[STORAGE]
        found, lost = found.restore(book.alive, book.step, {STORAGE: torch.ones(2 * num_experts, dtype=torch.bool)})
        assert not was_all or not lost.any()
        above = [*above, found.share(lost)] if found.plt > budget else []
        assert found.plt <= budget + sum(above)
        before, found = policy.k, asked.after_restart(found, lost)
        assert found.k is not None
        assert found.k <= min(2 * before, num_experts)
        assert found.plt <= budget or found.k == min(2 * before, num_experts) or not lost.any()
        policy = replace(asked, k=found.k)


@pytest.mark.parametrize(
    ("k", "last_k", "plt", "last_loss", "wanted"),
    [
        (1, 1, 0.01, 0.01, 1),
        (1, 1, 0.03, 0.03, 2),
        (1, 1, 0.9, 0.5, 2),
        (1, 4, 0.9, 0.5, 8),
        (1, 4, 0.03, 0.01, 2),
        (1, 4, 0.03, 0.004, 1),
        (3, 3, 0.06, 0.001, 6),
        (3, 6, 0.06, 0.001, 8),
        (64, 64, 0.0, 0.0, 8),
    ],
)
def test_k_doubles_once_for_a_fault_and_goes_back_when_another_such_fault_fits(
    k: int, last_k: int, plt: float, last_loss: float, wanted: int
) -> None:
    """The next fault's loss goes down as K goes up."""
    assert next_k(k, last_k=last_k, plt=plt, last_loss=last_loss, plt_budget=0.05, num_experts=8) == wanted


def test_one_early_fault_of_a_long_training_does_not_raise_k() -> None:
    """Its tokens are few of those that are planned; where no end is planned, K falls again as more is trained."""
    policy, tokens = PartialPolicy(k=1), torch.full((8,), 100)
    start = TokenLedger.start((8,), k=1).add(20 * tokens, torch.tensor([400]), steps=20)
    for left, ks in ((1180, [1, 1, 1, 1]), (0, [2, 2, 2, 1])):
        # Experts were taken one after the other: 0 to 7 steps of each are lost.
        now = replace(start, steps_left=left)
        now, lost = now.restore(now.alive - 100 * torch.arange(8), torch.arange(8))
        now, found = policy.after_restart(now, lost), list[int | None]()
        for more in (0, 10, 30, 100):
            now = policy.after_count(now.add(more * tokens, torch.tensor([20 * more]), steps=more, steps_left=left))
            found.append(now.k)
        assert found == ks
        assert now.memory_k == ks[0], "what memory was made for"
    assert DynamicK(plt_budget=None).in_force(1, now) == 1


@pytest.mark.parametrize(
    "wrong", [{"k": 0}, {"last_k": 0}, {"plt": -0.1}, {"plt_budget": float("nan")}, {"num_experts": 0}]
)
def test_numbers_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    """They come from accounting, so they would be our mistake."""
    usual = {"k": 1, "last_k": 1, "plt": 0.0, "last_loss": 0.0, "plt_budget": 0.05, "num_experts": 8}
    with pytest.raises(ValueError, match="out of range"):
        next_k(**usual | wrong)
    with pytest.raises(ValueError, match="plt_budget=2"):
        DynamicK(plt_budget=2)
