"""Which experts partial generations take, as tiers keep up or do not, and what is counted."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from snapshot._partial_model import NUM_EXPERTS, rank_of_world
from torch import nn

from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.errors import ConfigurationError, IdentityMismatch
from lightning_moe_ckpt.operators import StateSchema, discover
from lightning_moe_ckpt.parallel import ParallelGroups, set_current_groups
from lightning_moe_ckpt.planning import LossFigures, Planner
from lightning_moe_ckpt.planning._ledger import LedgerKeeper
from lightning_moe_ckpt.policies import DynamicK, PartialPolicy, Selection, SelectivePolicy, expert_names
from lightning_moe_ckpt.policies._expert_tables import MAX_GENERATIONS, STARVED
from lightning_moe_ckpt.snapshot import StateView, WindowLayout
from lightning_moe_ckpt.storage import GenerationId, RingHeader
from lightning_moe_ckpt.tiers import SegmentRing


@pytest.fixture(autouse=True)
def _groups() -> Iterator[None]:
    yield
    set_current_groups(None)


def selective(rank: int = 0, world_size: int = 1, ep_size: int = 1, *, local: int, remote: int) -> Planner:
    """Of one rank, under budgets of bytes."""
    view, groups = rank_of_world(rank, world_size, ep_size)
    policy = SelectivePolicy(local_budget=local, remote_budget=remote)
    return Planner(policy, view, groups, Exchange(ParallelGroups()), view.module)


def planner(
    rank: int = 0, world_size: int = 1, ep_size: int = 1, num_experts: int = NUM_EXPERTS, **options: Any
) -> Planner:
    """Of one rank."""
    view, groups = rank_of_world(rank, world_size, ep_size, num_experts)
    policy = PartialPolicy(dynamic_k=DynamicK(plt_budget=0.05), **options)
    return Planner(policy, view, groups, Exchange(ParallelGroups()), view.module)


def tokens_of(planner: Planner) -> LedgerKeeper:
    """The ledger's keeper."""
    assert planner.tokens is not None
    return planner.tokens


def figures_of(planner: Planner) -> LossFigures:
    """What its report says."""
    figures = planner.loss_figures()
    assert figures is not None
    return figures


_BESIDE = 3
"""Integers that a rank tells before bad copies, besides tokens of experts: drops of two layers, and its last step."""
SOAK = pytest.mark.soak
EXPERT_NBYTES = 15_000
"""Of one expert of the model, with what describes it, roughly."""


class Run:
    """Windows one after the other, with a storage that is busy for as many of them as `draw` says."""

    def __init__(self, planner: Planner, draw: random.Random, longest: int) -> None:
        self._planner, self._draw, self._longest = planner, draw, longest
        self._kept = planner.generations_kept
        header = RingHeader(nonce="", slot_nbytes=4096, num_slots=self._kept + 2, origin="")
        self.ring = SegmentRing(Path("unused"), torch.zeros(header.num_slots * 4096, dtype=torch.uint8), header)
        self.ring.keep = self._kept
        layout = planner.first_layout()
        assert layout is not None
        self._layout = layout
        planner.adopt(layout)
        self._storing: GenerationId | None = None
        self._busy = self.step = 0
        self.found: list[int] = []
        """A bad copy that is told at the next window."""
        self.taken: list[Selection] = []
        self.stored: list[Selection] = []
        self.fresh: list[Selection] = []
        """What the policy would have taken if it were asked when the generation begins."""

    def window(self, tokens_E: list[int]) -> None:
        """One more, in the order in which a capture session does it."""
        self.step += 1
        following = self._planner.take_next()
        told = self._planner.inputs()[2 * NUM_EXPERTS :]
        told[_BESIDE : _BESIDE + len(self.found)], self.found = self.found, []
        self._planner.agreed([[*tokens_E, *told]])
        self._settle()
        self._layout = following if following is not None else self._layout
        keeper, inputs = tokens_of(self._planner), self._planner._inputs()
        tables, policy = keeper.ledger.tables(keeper.layouts), self._planner._policy
        assert isinstance(policy, PartialPolicy | SelectivePolicy)
        self.fresh.append(policy.select(keeper.ledger.generations, tables, inputs.budgets))
        newest = (GenerationId(step=self.step, incarnation=1, nonce="0123456789ab"), self._layout)
        tokens_of(self._planner).given("host", *newest, self._kept)
        self.ring.begin_window(self.step)
        self.ring.seal(self.ring.acquire(self.step, self.step))
        self.ring.finish_window(self.step)
        if self._storing is None:
            self._store(*newest)
        self._planner.started(self.step, self._layout)
        self.taken.append(Selection.of_plan(self._layout.record.plan, self._planner._view.operators))

    def _settle(self) -> None:
        if self.step > 1:
            self.ring.complete_everywhere(self.step - 1)
            tokens_of(self._planner).complete_everywhere(
                "host", GenerationId(step=self.step - 1, incarnation=1, nonce="0123456789ab")
            )
        self._busy -= 1
        if self._storing is not None and self._busy <= 0:
            tokens_of(self._planner).complete_everywhere("storage", self._storing)
            self._storing = None

    def _store(self, generation: GenerationId, layout: WindowLayout) -> None:
        tokens_of(self._planner).given("storage", generation, layout)
        self._storing, self._busy = generation, self._draw.randint(1, self._longest)
        self.stored.append(Selection.of_plan(layout.record.plan, self._planner._view.operators))


@pytest.mark.parametrize(
    ("longest", "order"),
    [
        *((1, "sequential"), (2, "load_aware"), (5, "sequential")),
        *(pytest.param(*each, marks=SOAK) for each in ((1, "load_aware"), (2, "sequential"), (5, "load_aware"))),
    ],
)
def test_storage_that_skips_generations_still_gets_every_expert(order: str, longest: int) -> None:
    """What it skipped comes next: one round of generations that it took has everything, two where it is slower."""
    for seed in range(3):
        run = Run(planner(k=3, order=order), random.Random(seed), longest)
        for _ in range(60):
            run.window([1] * (2 * NUM_EXPERTS))
        # While it is busy memory has to take others, which come in between.
        rounds = NUM_EXPERTS // 3 if longest == 1 else 2 * NUM_EXPERTS // 3
        for start in range(len(run.stored) - rounds):
            recent = run.stored[start : start + rounds]
            for layer in range(2):
                assert {e for each in recent for e in each.storage[layer]} == set(range(NUM_EXPERTS)), (seed, start)


@pytest.mark.parametrize("order", ["sequential", "load_aware"])
@pytest.mark.parametrize("longest", [1, 5])
@pytest.mark.parametrize(("k", "snapshot_k"), [(1, None), (2, 5), (4, None)])
def test_what_memory_keeps_has_every_expert(order: str, longest: int, k: int, snapshot_k: int | None) -> None:
    """However slow storage is and however skewed the router: the newest generations together are the whole model.

    By load they lack experts of which storage has as new a copy, for four rounds at most.
    """
    here = planner(k=k, snapshot_k=snapshot_k, order=order)
    run = Run(here, random.Random(k), longest)
    kept = PartialPolicy(k=k, snapshot_k=snapshot_k, order=order).max_age(  # type: ignore[arg-type]
        tokens_of(here).ledger.tables(tokens_of(here).layouts), {}
    )
    rounds = -(-NUM_EXPERTS // (snapshot_k or k))
    longest_wait = max(kept, 0 if order == "sequential" else STARVED * rounds + 2)
    newest = torch.zeros(2 * NUM_EXPERTS, dtype=torch.int64)
    for step in range(1, 4 * longest_wait):
        run.window([1000 if e % NUM_EXPERTS == 0 else 1 for e in range(2 * NUM_EXPERTS)])
        newest[list(run.taken[-1].flat("memory", tokens_of(here).ledger.num_experts))] = step
        if step > kept:
            in_storage = tokens_of(here).ledger.saved["storage"].step >= newest
            held = newest > step - kept
            assert bool((held if order == "sequential" else held | in_storage).all()), (step, newest)
            assert bool((newest > step - longest_wait).all()), (step, newest)


@pytest.mark.parametrize(
    ("k", "snapshot_k", "order"),
    [
        *((1, None, "sequential"), (1, 2, "load_aware"), (4, None, "sequential")),
        *(pytest.param(*each, marks=SOAK) for each in ((1, None, "load_aware"), (1, 2, "sequential"))),
        pytest.param(4, None, "load_aware", marks=SOAK),
    ],
)
def test_the_book_of_memory_has_what_the_ring_has(order: str, k: int, snapshot_k: int | None) -> None:
    """Forty experts do not fit into as many generations as memory keeps: what the ring has dropped counts no more."""
    here = planner(num_experts=40, k=k, snapshot_k=snapshot_k, order=order)
    run = Run(here, random.Random(k), 2)
    draw, alive = random.Random(1), [0] * 80
    copies: dict[int, dict[int, int]] = {}
    for step in range(1, 91):
        tokens = [draw.randint(0, 9) for _ in alive]
        alive = [before + more for before, more in zip(alive, tokens, strict=True)]
        run.window(tokens)
        copies[step] = {e: alive[e] for e in run.taken[-1].flat("memory", tokens_of(here).ledger.num_experts)}
        book = tokens_of(here).ledger.saved["memory"]
        held = [int(str(generation)) for generation in run.ring.complete if generation != step]
        for expert in range(step % 5, 80, 5):
            having = [each for each in held if expert in copies[each]]
            assert int(book.step[expert]) == max(having, default=-1)
            assert int(book.alive[expert]) == (copies[max(having)][expert] if having else 0)
    assert here.generations_kept == (15 if k == 4 and order == "sequential" else MAX_GENERATIONS)
    newest = torch.tensor([max(step for step in copies if e in copies[step]) for e in range(80)])
    saved = tokens_of(here).ledger.saved
    missing = saved["memory"].step < 0
    # By load, an expert of which storage has as new a copy may be dropped.
    lacked = missing if order == "sequential" else missing & (saved["storage"].step < newest)
    assert bool(missing.any()) if k == 1 else not lacked.any()
    taken = [set(each.memory[0]) for each in run.taken[-80:]]
    assert set().union(*taken) == set(range(40)), "each expert has its turn, whether memory keeps it or not"


@pytest.mark.parametrize("kind", ["load_aware", "selective"])
def test_under_a_steady_load_popular_experts_are_taken_again_and_again(kind: str) -> None:
    """Choices are made a generation ahead, and are what they would be if they were made when it begins.

    Source: MOETION (2024), Sec. 4.3: experts of which most is at risk come in a row, with us from a third of all on. How
    often each comes goes with the root of its load, which is what `unsaved_order` leads to.
    """
    budget = 30_000 + 2 * NUM_EXPERTS * EXPERT_NBYTES // 2
    made = selective(local=budget, remote=budget) if kind == "selective" else planner(order="load_aware", k=4)
    run = Run(made, random.Random(0), longest=1)
    loads = [2 ** (expert % (NUM_EXPERTS // 2)) * 10 for expert in range(2 * NUM_EXPERTS)]
    for _ in range(24):
        run.window(loads)
    assert run.taken[2:] == run.fresh[2:]
    rows = [row for taken in run.taken for row in taken.memory]
    again = [len(set(row) & set(before)) for before, row in zip(rows, rows[2:], strict=False)]
    assert 0.1 < sum(again) / sum(map(len, rows)) < 0.8
    taken = Counter(expert % (NUM_EXPERTS // 2) for row in rows for expert in row)
    by_load = [taken[popularity] for popularity in range(NUM_EXPERTS // 2)]
    assert by_load == sorted(by_load)
    assert 4 < by_load[-1] / by_load[0] < 8, "the root of 32"


def test_all_ranks_choose_alike() -> None:
    """From the same votes, though each holds other experts and counts other tokens."""
    chosen = []
    for rank in range(4):
        run = Run(planner(rank, 4, 2, k=2, snapshot_k=4, order="load_aware"), random.Random(7), 3)
        for step in range(12):
            run.window([(step * e) % 5 for e in range(2 * NUM_EXPERTS)])
        chosen.append(list(run.taken))
    assert all(each == chosen[0] for each in chosen)


@pytest.mark.parametrize(("world_size", "ep_size"), [(1, 1), (4, 2), (3, 3), (4, 4)])
def test_no_generation_needs_more_than_was_reserved(world_size: int, ep_size: int) -> None:
    """The ring is made once, for the largest slot that turns of the ranks give."""
    for rank in {0, world_size - 1}:
        run = Run(planner(rank, world_size, ep_size, k=1, snapshot_k=3), random.Random(3), 4)
        reserved = run._layout.slot_nbytes
        for step in range(NUM_EXPERTS):
            run.window([step % 3] * (2 * NUM_EXPERTS))
            assert run._layout.steps[0].nbytes <= reserved * 1.25


@pytest.mark.parametrize(("world_size", "ep_size"), [(1, 1), (4, 2), (3, 3)])
def test_no_rank_writes_more_than_its_budgets(world_size: int, ep_size: int) -> None:
    """Whatever is at risk: all of a segment counts, and what is to spare would not hold another expert of a position."""
    rest, share = 30_000, 2 * NUM_EXPERTS * EXPERT_NBYTES // world_size
    local, remote = rest + share // 2, rest + share // 4
    for rank in {0, world_size - 1}:
        run = Run(
            selective(rank, world_size, ep_size, local=rest + share // 2, remote=rest + share // 4), random.Random(3), 4
        )
        reserved = run._layout.slot_nbytes
        for step in range(NUM_EXPERTS):
            run.window([step * e % 7 for e in range(2 * NUM_EXPERTS)])
            (step_layout,) = run._layout.steps
            outer, inner = step_layout.files_nbytes, step_layout.durable.segment.nbytes
            # Experts as small as these are not cut evenly, and what describes them counts.
            assert outer - inner >= EXPERT_NBYTES
            assert outer <= 1.04 * local
            assert remote - 2 * EXPERT_NBYTES <= inner <= 1.04 * remote
            assert outer <= 1.25 * reserved


def test_tokens_of_all_ranks_are_counted_and_survive_a_journal() -> None:
    """Sums over ranks; what is unsaved goes down with what tiers complete."""
    here = planner(k=NUM_EXPERTS)
    run = Run(here, random.Random(0), 1)
    for _ in range(3):
        run.window(list(range(2 * NUM_EXPERTS)))
    total = 3 * sum(range(2 * NUM_EXPERTS))
    figures = figures_of(here)
    assert (figures.processed, figures.lost, figures.plt) == (total, 0, 0.0)
    assert figures.unsaved == {"memory": 0, "storage": 0}, "what is under way counts as saved"
    other = planner(k=NUM_EXPERTS)
    other.restore(
        {"step": 3, "accounting": tokens_of(here).ledger.to_journal(), "lost": torch.zeros(24, dtype=torch.int64)}
    )
    assert figures_of(other) == figures


@pytest.mark.parametrize(("world_size", "ep_size"), [(1, 1), (3, 3)])
def test_an_expert_of_which_another_rank_found_a_bad_copy_is_stored_again_and_not_borrowed(
    world_size: int, ep_size: int
) -> None:
    """In the next generation that is planned, or the next turn of its position; then it is in turn again."""
    here = planner(world_size=world_size, ep_size=ep_size, k=1)
    run = Run(here, random.Random(0), 1)
    for _ in range(2 * NUM_EXPERTS + 1):
        run.window([10] * (2 * NUM_EXPERTS))
    place = run.stored[-2].storage[1][0] + NUM_EXPERTS
    step = int(tokens_of(here).ledger.saved["storage"].step[place])
    run.found = [place + 1, step, 1, int("0123456789ab", 16), 1]
    run.window([10] * (2 * NUM_EXPERTS))
    name = [name for layer in here._view.operators.layers for name in expert_names(layer)][place]
    assert here.bad_copies == {name: {GenerationId(step=step, incarnation=1, nonce="0123456789ab")}}
    seen = len(run.stored)
    for _ in range(ep_size):
        run.window([10] * (2 * NUM_EXPERTS))
    assert place - NUM_EXPERTS in {e for each in run.stored[seen:] for e in each.storage[1]}
    run.window([10] * (2 * NUM_EXPERTS))
    assert here.bad_copies == {}


def test_k_doubles_when_a_fault_costs_too_much(caplog: pytest.LogCaptureFixture) -> None:
    """And the next incarnation reserves memory, and keeps generations, for that K. Both are said in warnings."""
    here = planner(k=1)
    run = Run(here, random.Random(0), 1)
    for _ in range(4):
        run.window([10] * (2 * NUM_EXPERTS))
    lost_E = torch.full((2 * NUM_EXPERTS,), 2, dtype=torch.int64)
    lost_E[0] += 1
    before = tokens_of(here).ledger
    after, _ = before.restore(before.alive - lost_E, torch.full_like(lost_E, 4))
    later = planner(k=1)
    kept = later.generations_kept
    later.restore({"step": 4, "accounting": after.to_journal(), "lost": lost_E})
    figures = figures_of(later)
    assert 0.05 < figures.plt < 0.06
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == 2
    assert "above `plt_budget=0.05`: 49 tokens are lost, of 960 so far" in warned[0]
    assert "2 experts per layer instead of 1" in warned[1]
    assert figures.k == 2
    assert later.generations_kept < kept
    first = later.first_layout()
    assert first is not None
    assert [len(row) for row in Selection.of_plan(first.record.plan, later._view.operators).storage] == [2, 2]


def test_the_journal_that_grows_makes_room_in_the_plan_that_follows() -> None:
    """Also in the one that is being planned on a thread."""
    here = planner(k=2)
    run = Run(here, random.Random(0), 1)
    run.window([0] * (2 * NUM_EXPERTS))
    larger = here.maker.enlarged(run._layout, 64 * 4096)
    assert larger.record == run._layout.record
    assert larger.steps[0].durable.segment.spans["journal"].nbytes == 64 * 4096
    following = here.take_next()
    assert following is not None
    assert following.steps[0].durable.segment.spans["journal"].nbytes == 64 * 4096
    assert following.steps[0].nbytes <= larger.slot_nbytes * 1.25


def test_a_model_without_experts_is_refused() -> None:
    """With what to do instead."""
    model = nn.Linear(3, 3)
    view = StateView(model, discover(model), StateSchema.of(torch.optim.SGD(model.parameters())), {})
    policy = PartialPolicy()
    with pytest.raises(ConfigurationError, match=r"no Mixture-of-Experts layer was found.*DenseCheckpoint"):
        Planner(policy, view, ParallelGroups(), Exchange(ParallelGroups()), model)


def test_counts_of_another_model_are_refused() -> None:
    """They are of other experts."""
    here = planner(k=1)
    stored = {**tokens_of(here).ledger.to_journal(), "num_experts": [2 * NUM_EXPERTS], "dropped": torch.tensor([0])}
    with pytest.raises(IdentityMismatch, match="counted tokens of"):
        here.restore({"step": 1, "accounting": stored})
