"""A plan says what each slot takes, survives JSON, and has a stable name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_moe_ckpt.errors import Corrupt
from lightning_moe_ckpt.operators import Operator, RecordKind
from lightning_moe_ckpt.policies import DensePolicy, Plan, Policy, SparsePolicy

PLAN = Plan((("a", "b"), ("c",), ("d",)))
plans = st.lists(st.text(min_size=1), unique=True, min_size=1, max_size=8).flatmap(
    lambda names: st.integers(1, len(names)).map(lambda w: Plan(tuple(tuple(names[i::w]) for i in range(w))))
)


def operators(*names: str) -> list[Operator]:
    return [Operator(name=n, kind="dense", slices=()) for n in names]


def test_compute_is_taken_of_what_is_still_frozen() -> None:
    """Slot j: FULL of its own, COMPUTE of later ones, nothing of earlier ones."""
    assert PLAN.window == 3
    assert PLAN.records(0) == {
        "a": RecordKind.FULL,
        "b": RecordKind.FULL,
        "c": RecordKind.COMPUTE,
        "d": RecordKind.COMPUTE,
    }
    assert PLAN.records(1) == {"c": RecordKind.FULL, "d": RecordKind.COMPUTE}
    assert PLAN.records(2) == {"d": RecordKind.FULL}
    assert (PLAN.full(1), PLAN.compute(1), PLAN.slot_of("d")) == (("c",), ("d",), 2)


@given(plans)
def test_json_round_trip(plan: Plan) -> None:
    """Also with names in any script."""
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.hash() == plan.hash()


def test_the_hash_is_stable_and_sees_order() -> None:
    """It is stored, so it must not change between versions."""
    assert PLAN.hash() == "03513facc0bfdc17f896e20dbda431f7"
    others = [Plan((("b", "a"), ("c",), ("d",))), Plan((("a",), ("b", "c"), ("d",))), Plan((("a", "b", "c", "d"),))]
    assert len({p.hash() for p in [PLAN, *others]}) == 4


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "7",
        '{"slots":7}',
        '{"slots":[]}',
        '{"slots":[["a"],["a"]]}',
        '{"slots": [["a"]]}',
        '{"slots":[[7]]}',
    ],
)
def test_what_is_no_plan_is_corrupt(text: str) -> None:
    """Another copy may be whole."""
    with pytest.raises(Corrupt):
        Plan.from_json(text)


@pytest.mark.parametrize("slots", [(), (("a",), ("a",)), (("a", "a"),)])
def test_a_plan_names_every_operator_once(slots: tuple[tuple[str, ...], ...]) -> None:
    """And has a slot."""
    with pytest.raises(ValueError, match="Plan"):
        Plan(slots)


def test_dense_takes_everything_every_so_many_steps() -> None:
    """For each tier there is."""
    policy: Policy = DensePolicy(every_n_steps=3, first_step=1)
    taken = [s for s in range(9) if policy.decide(s, operators("a", "b"), {}, {"host": 1})]
    assert taken == [1, 4, 7]
    assert policy.decide(4, operators("a", "b"), {}, {"host": 1, "object": 1}) == {
        (name, tier): RecordKind.FULL for name in "ab" for tier in ("host", "object")
    }
    with pytest.raises(ValueError, match="every_n_steps=0"):
        DensePolicy(every_n_steps=0)


@pytest.mark.parametrize(("every", "slots"), [(None, [0, 1, 2, 0, 1, 2, 0]), (5, [0, 1, 2, None, None, 0, 1])])
def test_sparse_takes_one_slot_per_step(every: int | None, slots: list[int | None]) -> None:
    """Back to back, or windows that lie apart."""
    policy = SparsePolicy(plan=PLAN, first_step=4, every_n_steps=every)
    assert [policy.slot(step) for step in range(4)] == [None] * 4
    assert [policy.slot(step) for step in range(4, 11)] == slots
    everything = operators(*"abcd")
    for step, slot in zip(range(4, 11), slots, strict=True):
        want = {} if slot is None else {(n, "host"): kind for n, kind in PLAN.records(slot).items()}
        assert policy.decide(step, everything, {}, {"host": 1}) == want


def test_a_plan_for_other_operators_is_refused() -> None:
    """Leaving one out would lose it."""
    policy = SparsePolicy(plan=PLAN, first_step=0)
    with pytest.raises(ValueError, match="plan anew"):
        policy.decide(0, operators(*"abc"), {}, {"host": 1})
    with pytest.raises(ValueError, match="every_n_steps=2"):
        SparsePolicy(plan=PLAN, first_step=0, every_n_steps=2)
