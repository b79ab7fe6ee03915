"""A plan says what each step takes, survives JSON, and has a stable text."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_128_hexdigest

from lightning_moe_ckpt.errors import Corrupt
from lightning_moe_ckpt.operators import RecordKind
from lightning_moe_ckpt.policies import Plan, WindowStep

PLAN = Plan.of_slots([["a", "b"], ["c"], ["d"]])
FULL, COMPUTE = RecordKind.FULL, RecordKind.COMPUTE
names_of_operators = st.lists(st.text(min_size=1), unique=True, min_size=1, max_size=8)
windows = names_of_operators.flatmap(
    lambda names: st.integers(1, len(names)).map(
        lambda w: Plan.of_slots([names[i::w] for i in range(w)], interval_steps=9)
    )
)


@st.composite
def partial_plans(draw: st.DrawFn) -> Plan:
    """Steps of any two files, in any order of kinds."""
    names = draw(names_of_operators)
    files = st.dictionaries(st.sampled_from(names), st.sampled_from([FULL, COMPUTE]))
    steps = draw(st.lists(st.tuples(files, files), min_size=1, max_size=3))
    return Plan(tuple(_step(durable, node) for durable, node in steps), partial=draw(st.booleans()))


def _step(durable: dict[str, RecordKind], node: dict[str, RecordKind]) -> WindowStep:
    ordered = [dict(sorted(each.items(), key=lambda item: item[1] is COMPUTE)) for each in (durable, node)]
    return WindowStep({"durable": ordered[0], **({"node": ordered[1]} if node else {})})


def test_compute_is_taken_of_what_is_still_frozen() -> None:
    """Step j: FULL of its own, COMPUTE of later ones, nothing of earlier ones."""
    assert PLAN.window == 3
    assert PLAN.steps[0].files == {"durable": {"a": FULL, "b": FULL, "c": COMPUTE, "d": COMPUTE}}
    assert PLAN.steps[1].files == {"durable": {"c": FULL, "d": COMPUTE}}
    assert PLAN.steps[2].files == {"durable": {"d": FULL}}
    assert (PLAN.full(1), PLAN.steps[1].of_kind(COMPUTE), PLAN.names) == (("c",), ("d",), ("a", "b", "c", "d"))
    assert PLAN.steps[0].audiences == ("durable",)


@given(windows | partial_plans())
def test_json_round_trip(plan: Plan) -> None:
    """Also with names in any script."""
    again = Plan.from_value(json.loads(plan.to_json()))
    assert again == plan
    assert (again.to_json(), hash(again)) == (plan.to_json(), hash(plan))
    assert [{each: list(records.items()) for each, records in step.files.items()} for step in again.steps] == [
        {each: list(records.items()) for each, records in step.files.items()} for step in plan.steps
    ]


def test_the_text_is_stable_and_sees_order() -> None:
    """It is stored, so it must not change between versions."""
    assert xxh3_128_hexdigest(PLAN.to_json().encode()) == "1d0996957309f9580dc4d177c78caf91"
    slots = [[["b", "a"], ["c"], ["d"]], [["a"], ["b", "c"], ["d"]], [["a", "b", "c", "d"]]]
    others = [*map(Plan.of_slots, slots), replace(PLAN, partial=True), replace(PLAN, interval_steps=4)]
    assert len({p.to_json() for p in [PLAN, *others]}) == 6


ONE = '{"operators":["a"],"steps":[{"durable":{"full":[[0,1]]}}],"interval_steps":1,"partial":false}'


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[]",
        "7",
        ONE.replace('["a"]', "7"),
        ONE.replace('["a"]', "[7]"),
        ONE.replace('["a"]', '["a","a"]'),
        ONE.replace('["a"]', '["a","b"]'),
        ONE.replace("[0,1]", "[0,2]"),
        ONE.replace("[0,1]", "[0,0]"),
        ONE.replace("[0,1]", "[0]"),
        ONE.replace("full", "delta-less"),
        ONE.replace("durable", "peer"),
        ONE.replace('steps":[', 'steps":7,"x":['),
        ONE.replace('"interval_steps":1', '"interval_steps":"1"'),
        ONE.replace('"interval_steps":1', '"interval_steps":0'),
        ONE.replace("false", "0"),
    ],
)
def test_what_is_no_plan_is_corrupt(text: str) -> None:
    """Another copy may be whole."""
    with pytest.raises(Corrupt):
        Plan.from_value(json.loads(text))


def test_the_texts_above_are_changes_of_a_good_one() -> None:
    """Else they would be refused for another reason."""
    assert Plan.from_value(json.loads(ONE)) == Plan.of_slots([["a"]])


@pytest.mark.parametrize("slots", [(), (("a",), ("a",)), (("a", "a"),)])
def test_a_plan_names_every_operator_once(slots: tuple[tuple[str, ...], ...]) -> None:
    """And has a step."""
    with pytest.raises(ValueError, match="Plan"):
        Plan.of_slots(slots)
