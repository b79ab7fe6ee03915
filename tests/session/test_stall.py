"""Waits are summed by cause, per step and in total."""

from __future__ import annotations

import time

import pytest

from lightning_moe_ckpt.session._stall import HookClock, StallMeter, clocked


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


class Hooks:
    """Two hooks, one of which calls the other."""

    def __init__(self, now: list[float]) -> None:
        self.clock, self._now = HookClock(), now

    @clocked
    def inner(self, seconds: float) -> float:
        self._now[0] += seconds
        return self.clock.seconds

    @clocked
    def outer(self) -> None:
        self._now[0] += 1
        self.inner(2)
        raise KeyError


def test_time_in_hooks_counts_once_also_if_they_nest_or_raise(clock: list[float]) -> None:
    """A hook inside a hook is part of it; what runs between hooks is not ours."""
    hooks = Hooks(clock)
    assert hooks.inner(4) == hooks.clock.seconds == 4
    clock[0] += 100
    with pytest.raises(KeyError):
        hooks.outer()
    assert hooks.clock.seconds == 7
