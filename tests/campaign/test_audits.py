"""Audits find devices that compute or hold wrong bits, name them, and raise no false alarm."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from campaign._audit_habits import HABITS, IN_STAGES, draw_habit
from campaign._audits import (
    ALONE,
    PLACES,
    SEVERAL,
    Answer,
    Audited,
    audits_of,
    changes,
    draw,
    draw_setup,
    inject,
    table,
)
from campaign._campaign import Campaigns


@pytest.fixture(scope="module")
def everything() -> Iterator[list[Answer]]:
    """Answers of all trainings, whose table is printed at the end."""
    answers: list[Answer] = []
    yield answers
    print(f"\n{table(answers)}")


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", range(5))
def test_injected_faults_are_found_and_named(campaigns: Campaigns, everything: list[Answer], number: int) -> None:
    """Five kinds in nine places; what is not found has changed no bit, or there is nobody to compare with."""
    answers = inject(campaigns, [*PLACES], [number])
    everything += answers
    _require_found(campaigns, answers)


def _require_found(campaigns: Campaigns, answers: list[Answer]) -> None:
    """Require of every fault to be found and named, unless it changed no bit or nobody can compare."""
    missed = [each for each in answers if not each.findings]
    can_be = [each for each in missed if each.place not in ALONE or each.fault.kind == "flip_gradient"]
    seen = [each for each, changed in zip(can_be, changes(campaigns, can_be), strict=True) if changed]
    others = [each for each in answers if each.findings and not (each.among and each.in_time)]
    unsure = [each for each in answers if each.findings and each.place in SEVERAL and not each.exact]
    print(f"\n{len(missed)} not found, {len(can_be) - len(seen)} of which changed no bit:", *missed, sep="\n")
    assert not seen, f"not found: {[*map(str, seen)]}"
    assert not others, f"named late, or another rank: {[*map(str, others)]}"
    assert not unsure, f"not named alone: {[*map(str, unsure)]}"


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("place", PLACES)
def test_audits_without_faults_raise_no_alarm(campaigns: Campaigns, place: str) -> None:
    """Whatever is trained, and each training ends in the bits of one without audits."""
    setups = [draw_setup(place, number, batches=200) for number in range(3)]
    lives = campaigns.run_each(setups, timeout=300.0)
    for setup, life in zip(setups, lives, strict=True):
        found = audits_of(life)
        print(f"\n{place}: {found['audits']} audits, left out: {found['left_out']}")
        assert (found["audits"], found["findings"], found["left_out"]) == (setup.steps - 1, [], [])
        campaigns.require_same_end(setup, [life], timeout=300.0)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("place", PLACES)
def test_steps_whose_gradients_overflow(campaigns: Campaigns, place: str) -> None:
    """Gradients that are infinite, or no numbers, are the same bits in a play; a fault is found between them.

    Backward overflows in the first steps, and whenever the scale has grown; one expert's gradient behind backward, too.
    """
    fp16: dict[str, Any] = {"precision": "16-mixed", "loss_scale": 2.0**24, "overflow_steps": (6, 10, 25)}
    setup = replace(draw_setup(place, 1, batches=60), **fp16)
    (life,) = campaigns.run_each([setup], timeout=300.0)
    found = audits_of(life)
    assert (found["audits"], found["findings"], found["left_out"]) == (setup.steps - 1, [], [])
    assert life.end()["precision/scale"] < fp16["loss_scale"], "backward has not overflowed: the scale has only grown"
    campaigns.require_same_end(setup, [life], timeout=300.0)
    _require_found(campaigns, inject(campaigns, [place], [0], **fp16))


def _require_silence(campaigns: Campaigns, setups: list[Audited]) -> None:
    """Require no alarm, the bits of trainings without audits, and audits of all steps or a reason why there are none."""
    lives = campaigns.run_each(setups, timeout=120.0)
    for setup, life in zip(setups, lives, strict=True):
        found, what = audits_of(life), getattr(setup, "habit", "")
        print(f"\n{what} on {setup.world_size}: {found['audits']} audits, left out: {found['left_out']}")
        assert found["findings"] == [], f"{what}: {found}\n{life.log()}"
        assert found["left_out"] or (found["audits"], found["audited"]) == (setup.steps - 1,) * 2, f"{what}: {found}"
        campaigns.require_same_end(setup, [life])


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("habit", [*HABITS, "skipped"])
def test_habits_of_user_code_are_no_faults(campaigns: Campaigns, habit: str) -> None:
    """Whatever a step writes, reads, asks or refuses."""
    places = ["1 replica"] if habit == "skipped" else ["3 ranks", "2 replicas", "3 ranks, DDP", "1 replica"]
    places += ["2 stages, 2 replicas"] * (habit in IN_STAGES)
    _require_silence(campaigns, [draw_habit(place, 0, habit) for place in places])


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", range(10))
def test_drawn_habits_are_no_faults(campaigns: Campaigns, number: int) -> None:
    """In all places."""
    _require_silence(campaigns, [draw_habit(place, number) for place in PLACES])


@pytest.mark.parametrize("habit", ["clamp", "only_one_rank"])
def test_a_habit_is_no_fault(campaigns: Campaigns, habit: str) -> None:
    """Steps that edit weights are audited; such as depend on what is nowhere else are not."""
    _require_silence(campaigns, [draw_habit("2 replicas", 0, habit)])


def test_a_device_that_multiplies_wrong_is_named(campaigns: Campaigns) -> None:
    """Of three, in the audit of the step in which it begins; before that, and in the bits of the training, audits leave no trace."""
    drawn = draw("3 ranks", 1)
    answers = inject(campaigns, ["3 ranks"], [1])
    assert [each.fault for each in answers] == [*drawn.faults]
    assert all(each.exact and each.in_time for each in answers), [*map(str, answers)]
    (clean,) = campaigns.run_each([replace(drawn, faults=())])
    found = audits_of(clean)
    assert (found["audits"], found["findings"], found["left_out"]) == (drawn.steps - 1, [], [])
    campaigns.require_same_end(drawn, [clean])
