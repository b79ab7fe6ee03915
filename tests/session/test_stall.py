"""Waits are summed by cause, per step and in total."""

from __future__ import annotations

import time

import pytest

from lightning_moe_ckpt.session._stall import StallMeter


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_waits_add_up_by_cause_and_step(clock: list[float]) -> None:
    """A step's sums are handed out once; totals hold both ended and running steps."""
    meter = StallMeter()
    for seconds in (1.0, 2.0):
        with meter.measure("fence"):
            clock[0] += seconds
    meter.add("journal", 0.5)
    assert meter.end_step() == {"fence": 3.0, "journal": 0.5}
    assert meter.end_step() == {}
    meter.add("fence", 4.0)
    assert meter.totals() == {"fence": 7.0, "journal": 0.5}


def test_a_wait_that_raises_is_counted(clock: list[float]) -> None:
    """The time was lost all the same."""
    meter = StallMeter()

    def lose_two_seconds() -> None:
        with meter.measure("exchange"):
            clock[0] += 2.0
            raise KeyError

    with pytest.raises(KeyError):
        lose_two_seconds()
    assert meter.totals() == {"exchange": 2.0}
