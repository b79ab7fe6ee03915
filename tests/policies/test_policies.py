"""What every policy promises: plans are pure, whole and data; and what planners ask is answered by data."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from campaign._alternating import AlternatingPolicy
from snapshot._partial_model import NUM_EXPERTS, rank_of_world

from lightning_moe_ckpt.operators import OperatorSet, RecordKind
from lightning_moe_ckpt.parallel import set_current_groups
from lightning_moe_ckpt.policies import (
    MEMORY,
    STORAGE,
    Deltas,
    DensePolicy,
    DynamicK,
    PartialPolicy,
    Plan,
    PlanInputs,
    Policy,
    Popularity,
    SelectivePolicy,
    SparsePolicy,
    TokenLedger,
    expert_layouts,
)
from lightning_moe_ckpt.policies._expert_tables import LEVELS

POLICIES: dict[str, Policy] = {
    "dense": DensePolicy(every_n_steps=3),
    "window": SparsePolicy(window=3, popularity=Popularity()),
    "budget": SparsePolicy(budget_nbytes=10_000, order="fixed"),
    "auto": SparsePolicy(popularity=Popularity()),
    "partial": PartialPolicy(k=2, snapshot_k=3, every_n_steps=3),
    "selective": SelectivePolicy(local_budget=30_000, remote_budget=20_000, deltas=Deltas()),
    "selective auto": SelectivePolicy(),
    "alternating": AlternatingPolicy(),
}
PARTIAL = ("partial", "selective", "selective auto", "alternating")


@pytest.fixture(autouse=True)
def _groups() -> Iterator[None]:
    yield
    set_current_groups(None)


def inputs(policy: Policy, rank: int = 0, **options: Any) -> PlanInputs:
    """As one rank of four has them, of which two and two hold the same experts."""
    view, _ = rank_of_world(rank, 4, 2)
    operators = view.operators
    sizes = {op.name: (view.record_nbytes(op, RecordKind.FULL), op.numel) for op in operators}
    layouts = expert_layouts(operators, {name: full for name, (full, _) in sizes.items()})
    ledger = TokenLedger.start([layout.num_experts for layout in layouts])
    given = PlanInputs(
        operators=operators,
        sizes=sizes,
        popularity=[float(e % 5) for e in range(operators.num_experts)],
        budgets=dict.fromkeys(policy.budgets, 90_000),
        ledger=policy.after_restart(ledger, None),
        layouts=layouts,
    )
    return PlanInputs(**{**vars(given), **options})


@pytest.mark.parametrize("name", POLICIES)
def test_plans_are_data_equal_on_all_ranks(name: str) -> None:
    """Every call and every rank gives the same, in the same words; windows hold everything, partial plans the dense part."""
    policy = POLICIES[name]
    plans = [policy.plan(inputs(policy, rank)) for rank in (0, 0, 1, 3)]
    assert all(plan == plans[0] for plan in plans)
    assert Plan.from_value(json.loads(plans[0].to_json())) == plans[0]
    assert plans[0].partial is (not policy.exact) is (name in PARTIAL)
    every = {f"{layer.prefix}/expert.{e}" for layer in _operators().layers for e in range(NUM_EXPERTS)}
    dense = {op.name for op in _operators() if op.kind != "expert"}
    assert dense <= set(plans[0].names)
    assert policy.exact is (every <= set(plans[0].names))


def _operators() -> OperatorSet:
    return rank_of_world(0, 4, 2)[0].operators


@pytest.mark.parametrize("name", PARTIAL)
def test_rounds_of_partial_plans_hold_every_expert(name: str) -> None:
    """Within as many generations as memory keeps."""
    policy = POLICIES[name]
    now = inputs(policy)
    kept = policy.generations_kept(now)
    assert now.ledger is not None
    ledger, taken = now.ledger, set[str]()
    for step in range(kept):
        plan = policy.plan(inputs(policy, index=step, ledger=ledger))
        taken |= {name for name in plan.names if "/expert." in name}
        rows = [
            tuple(e for e in range(NUM_EXPERTS) if f"{layer.prefix}/expert.{e}" in plan.names)
            for layer in _operators().layers
        ]
        assert all(rows)
        ledger = ledger.add(ledger.alive + 1)
        ledger = _take(ledger, step, plan)
    assert len(taken) == 2 * NUM_EXPERTS


def _take(ledger: TokenLedger, step: int, plan: Plan) -> TokenLedger:
    from lightning_moe_ckpt.policies import Selection

    ledger = ledger.take(step, Selection.of_plan(plan, _operators()))
    for level in LEVELS:
        ledger = ledger.complete(level, step)
    return ledger


def test_needs_and_budgets_say_what_is_measured() -> None:
    """Nothing is measured for what is given."""
    assert {name: set(policy.needs) for name, policy in POLICIES.items()} == {
        "dense": set(),
        "window": {"compute_dtypes", "popularity"},
        "budget": {"compute_dtypes"},
        "auto": {"compute_dtypes", "popularity", "bandwidths"},
        "partial": {"tokens"},
        "selective": {"tokens"},
        "selective auto": {"tokens", "bandwidths"},
        "alternating": {"tokens"},
    }
    assert POLICIES["window"].budgets == POLICIES["partial"].budgets == {}
    assert POLICIES["budget"].budgets == {MEMORY: 10_000}
    assert POLICIES["selective"].budgets == {MEMORY: 30_000, STORAGE: 20_000}


def test_a_budget_cuts_operators_that_are_too_large() -> None:
    """Only where there is one."""
    given = POLICIES["budget"]
    assert given.split_nbytes(inputs(given, budgets={MEMORY: 10_000})) == max(
        1, (10_000 - _compute(given)) // 2, 10_000 // 64
    )
    assert all(
        policy.split_nbytes(inputs(policy)) == 0 for name, policy in POLICIES.items() if name in ("window", *PARTIAL)
    )


def _compute(policy: Policy) -> int:
    return sum(compute for _, compute in inputs(policy).sizes.values())


def test_periods_count_from_the_first_step() -> None:
    """Whatever incarnation this is; windows follow each other."""
    for name in ("dense", "partial"):
        assert [step for step in range(1, 10) if POLICIES[name].due(step, None, 1)] == [3, 6, 9]
    window = POLICIES["window"]
    assert [window.due(5, last, 3) for last in (None, 2, 3)] == [True, True, False]


@pytest.mark.parametrize("policy", [DensePolicy, PartialPolicy, SelectivePolicy])
def test_a_period_of_the_users_is_a_bound(policy: type[DensePolicy]) -> None:
    """A generation that memory had no room for at its turn is due at the next step. A default is no bound, whatever its number."""
    own, default = policy(every_n_steps=3), policy()
    assert (own.bound, default.bound) == ("every_n_steps=3", "")
    assert own.config() == default.config()
    assert [step for step in range(7, 12) if own.due(step, 3, 1)] == [7, 8, 9, 10, 11]
    assert [step for step in range(7, 12) if own.due(step, 6, 1)] == [9, 10, 11]
    assert [step for step in range(1, 250) if default.due(step, 3, 1)] == [*range(default.period, 250, default.period)]


def test_steps_of_sparse_windows_that_are_the_users_are_a_bound() -> None:
    """Of a window, of a schedule, and from one window's start to the next, which does not change stored plans."""
    window, apart = SparsePolicy(window=3), SparsePolicy(window=3, every_n_steps=5)
    bounds = [each.bound for each in (window, apart, SparsePolicy(schedule=(("a",), ("b",))), SparsePolicy())]
    assert bounds == ["window=3", "every_n_steps=5", "steps of the schedule=2", ""]
    assert window.config() == apart.config()
    assert (window.least_steps(9), apart.least_steps(9)) == (3, 5)
    assert [step for step in range(9) if apart.due(step, 2, 3)] == [7, 8]


def test_what_a_restart_changes() -> None:
    """K of policies that count, and nothing else."""
    start = TokenLedger.start((4,), k=7)
    assert POLICIES["selective"].after_restart(start, None).k is None
    assert POLICIES["alternating"].after_restart(start, None) is start
    assert PartialPolicy(k=2, dynamic_k=DynamicK(plt_budget=None)).after_restart(start, None).k == 2
