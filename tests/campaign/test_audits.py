"""Audits find devices that compute or hold wrong bits, name them, and raise no false alarm."""

from __future__ import annotations

from dataclasses import replace

import pytest

from campaign._audits import ALONE, PLACES, SEVERAL, audits_of, changes, draw, draw_setup, inject, table
from campaign._campaign import Campaigns


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_injected_faults_are_found_and_named(campaigns: Campaigns, capsys: pytest.CaptureFixture[str]) -> None:
    """Five kinds in nine places; what is not found has changed no bit, or there is nobody to compare with."""
    answers = inject(campaigns, [*PLACES], range(5))
    missed = [each for each in answers if not each.findings]
    can_be = [each for each in missed if each.place not in ALONE or each.fault.kind == "flip_gradient"]
    seen = [each for each, changed in zip(can_be, changes(campaigns, can_be), strict=True) if changed]
    others = [each for each in answers if each.findings and not (each.among and each.in_time)]
    unsure = [each for each in answers if each.findings and each.place in SEVERAL and not each.exact]
    with capsys.disabled():
        print(
            f"\n{table(answers)}\n{len(missed)} not found:",
            *missed,
            f"{len(can_be) - len(seen)} of them changed no bit",
            sep="\n",
        )
    assert not seen, f"not found: {[*map(str, seen)]}"
    assert not others, f"named late, or another rank: {[*map(str, others)]}"
    assert not unsure, f"not named alone: {[*map(str, unsure)]}"


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_audits_without_faults_raise_no_alarm(campaigns: Campaigns, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever is trained in whatever place, and each training ends in the bits of one without audits."""
    setups = [draw_setup(place, number, batches=200) for place in PLACES for number in range(3)]
    lives = campaigns.run_each(setups, timeout=300.0)
    figures = [audits_of(life) for life in lives]
    for setup, life in zip(setups, lives, strict=True):
        campaigns.require_same_end(setup, [life], timeout=300.0)
    with capsys.disabled():
        print(f"\n{sum(each['audits'] for each in figures)} audits")
        for setup, each in zip(setups, figures, strict=True):
            if each["left_out"]:
                print(setup, each["left_out"])
    assert not [each["findings"] for each in figures if each["findings"]]
    assert all(each["audits"] == setup.steps - 1 for setup, each in zip(setups, figures, strict=True))
    assert not [each["left_out"] for each in figures if each["left_out"]]


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
