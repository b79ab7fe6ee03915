"""Waits are summed by cause."""

from __future__ import annotations

import time

import pytest
import torch

from lightning_moe_ckpt.process import HookClock, StallMeter, clocked


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_waits_add_up_by_cause(clock: list[float]) -> None:
    """A wait inside another counts in both."""
    meter = StallMeter()
    for seconds in (1.0, 2.0):
        with meter.measure("fence"):
            clock[0] += seconds
    assert meter.totals() == {"fence": 3.0}
    with meter.measure("flush"), meter.measure("fence"):
        clock[0] += 4.0
    assert meter.totals() == {"fence": 7.0, "flush": 4.0}


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


class Device:
    """A stream whose clock only this test moves: events take the time when the device passes them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.queue: list[Event] = []
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: self)
        monkeypatch.setattr(torch.cuda, "Event", lambda **_: Event())

    def passes(self, *milliseconds: float) -> None:
        """The oldest events, each at its time."""
        for each in milliseconds:
            self.queue.pop(0).at = each


class Event:
    """On the stream of a `Device`."""

    at: float | None = None

    def record(self, device: Device) -> None:
        device.queue.append(self)

    def query(self) -> bool:
        return self.at is not None

    def elapsed_time(self, end: Event) -> float:
        assert self.at is not None
        assert end.at is not None
        return end.at - self.at


def test_waits_of_the_device_are_apart_and_nobody_waits_for_them(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread may wait long while the device has work, and a device while the thread has gone on."""
    device, meter = Device(monkeypatch), StallMeter(torch.device("cuda", 0))
    for seconds in (5.0, 0.0):
        with meter.measure_both("fence"):
            clock[0] += seconds
    assert meter.device_totals() == {}
    device.passes(100, 100)
    assert meter.device_totals() == {"fence": 0.0}
    device.passes(200)
    assert meter.device_totals() == {"fence": 0.0}
    device.passes(2200)
    assert meter.device_totals() == {"fence": 2.0}
    assert meter.totals() == {"fence": 5.0}


def test_without_a_device_there_are_waits_of_the_thread_only(clock: list[float]) -> None:
    """No event is made."""
    meter = StallMeter(torch.device("cpu"))
    with meter.measure_both("fence"):
        clock[0] += 3.0
    assert (meter.totals(), meter.device_totals()) == ({"fence": 3.0}, {})
