"""Which ranks are called slow, for ranks whose own work is recorded noise, with and without a rank that is slower."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_moe_ckpt.process import HookClock, OwnWork, Stragglers, _stragglers, clocked

RECORDED = (Path(__file__).parent / "own_work.csv").read_text()
NOISE = [tuple(int(cell) / 1e6 for cell in row.split(",")) for row in RECORDED.split()]
"""Seconds of own work of four ranks on two cores that other work shares, in 1,024 steps of `MoEStrategy`."""
CPU = torch.device("cpu")
LOOK = 64


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def follow(
    now: list[float], steps: Sequence[Sequence[float]], *, every: int = 2, stage_size: int = 4
) -> list[dict[int, float]]:
    """Return the slow ranks after each exchange; ranks vote after every so many steps, each of which takes 0.2 s."""
    ranks = [Stragglers(OwnWork(HookClock().outside, CPU), stage_size) for _ in steps[0]]
    found = list[dict[int, float]]()
    for rank in ranks:
        rank.hosts = tuple(f"node{each}" for each in range(len(ranks)))
        rank.work._left_out = 0
    for number, seconds in enumerate(steps, 1):
        began = now[0]
        for rank, own in zip(ranks, seconds, strict=True):  # as if at once
            now[0] = began
            rank.work.begin()
            now[0] += own
            OwnWork.ends()
            rank.work.stepped(counts=True)
        now[0] = began + 0.2
        if number % every == 0:
            votes = [rank.vote() for rank in ranks]
            for rank in ranks:
                rank.agreed(votes)
            assert all(rank.figures == ranks[0].figures for rank in ranks)
            found.append(ranks[0].figures.slow)
    return found


def slower(factor: float, rank: int, at: range) -> list[list[float]]:
    return [
        [own * (factor if each == rank and number in at else 1.0) for each, own in enumerate(row)]
        for number, row in enumerate(NOISE)
    ]


def test_nothing_is_seen_in_a_thousand_steps_of_noise(now: list[float], caplog: pytest.LogCaptureFixture) -> None:
    """Of any four, three or two of the ranks."""
    for ranks in (range(4), range(3), range(1, 4), range(2)):
        found = follow(now, [[row[rank] for rank in ranks] for row in NOISE], stage_size=len(ranks))
        assert not any(found)
    assert caplog.messages == []


@pytest.mark.parametrize("factor", [1.6, 3.0])
def test_a_slow_rank_is_named_once_when_it_begins_and_once_when_it_ends(
    factor: float, now: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    """Three looks after it began, one of which was under way."""
    found = follow(now, slower(factor, 2, range(256, 576)))
    named = [2 * number for number, slow in enumerate(found, 1) if slow]
    assert {rank for slow in found for rank in slow} == {2}
    assert 256 + 3 * LOOK <= named[0] <= 256 + 4 * LOOK
    assert 576 + 2 * LOOK <= named[-1] <= 576 + 6 * LOOK
    assert len(named) == (named[-1] - named[0]) // 2 + 1, "without a gap"
    begins, ends = [line for line in caplog.messages if "rank 2" in line][::4]
    assert begins.startswith("rank 2 on node2 is slow, and the others wait for it: it takes ")
    assert "times the median of 4 ranks" in begins
    assert ends.startswith("rank 2 on node2 is no longer slow, after ")


def test_one_long_step_names_nobody(now: list[float]) -> None:
    """A pause of seconds is in one look."""
    rows = [list(row) for row in NOISE]
    rows[100][1] = rows[500][0] = 9.0
    assert not any(follow(now, rows))


def test_ranks_are_compared_with_those_of_equal_work(now: list[float]) -> None:
    """Of two stages one has three times the work of the other."""
    rows = [[0.01, 0.01, 0.03, 0.03 + 0.02 * (number >= 512)] for number in range(1024)]
    found = follow(now, rows, stage_size=2)
    assert not any(found[:256])
    assert list(found[-1]) == [3]
    assert found[-1][3] == pytest.approx(5 / 3, rel=1e-3)


def test_votes_far_apart_are_few_looks_and_the_same_answer(now: list[float]) -> None:
    """Windows every 200 steps: three of them."""
    found = follow(now, slower(2.0, 0, range(200, 1024)), every=200)
    assert [list(slow) for slow in found] == [[], [], [], [0], [0]]


def test_hooks_do_not_count(now: list[float]) -> None:
    """Those between begin and end, and the one in which it begins."""

    class Hooks:
        def __init__(self) -> None:
            self.clock = HookClock()
            self.work = self.clock.own = OwnWork(self.clock.outside, CPU)

        @clocked
        def run(self, then: Callable[[], None]) -> None:
            now[0] += 1.0
            then()
            now[0] += 1.0

    hooks = Hooks()
    for _ in range(6):
        hooks.run(hooks.work.begin)
        now[0] += 0.25
        hooks.run(lambda: None)
        now[0] += 0.5
        hooks.run(hooks.work.end)
        now[0] += 7.0
        hooks.work.end()  # without a begin
        hooks.work.stepped(counts=True)
    assert hooks.work.steps == pytest.approx([0.75])


def test_a_device_is_asked_when_it_has_come_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events are read once they have passed: nobody waits for them."""
    reached, marks = [0], list["Event"]()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.number = len(marks) + 1
            marks.append(self)

        def record(self, stream: object) -> None:
            assert stream == "training"

        def query(self) -> bool:
            return self.number <= reached[0]

        def elapsed_time(self, later: Event) -> float:
            return 10.0 * (later.number - self.number)

    device: Any = SimpleNamespace(type="cuda")
    monkeypatch.setattr(_stragglers, "_cuda", SimpleNamespace(Event=Event, current_stream=lambda _: "training"))
    work = OwnWork(HookClock().outside, device)
    work._left_out = 0
    for _ in range(2):
        work.begin()
        work.end()
        work.begin()
        work.end()
        work.stepped(counts=True)
    assert not work.steps
    reached[0] = 7
    work.stepped(counts=True)
    assert list(work.steps) == [0.02]
    reached[0] = 8
    work.stepped(counts=False)
    assert list(work.steps) == [0.02, 0.02]


def test_a_replay_does_not_count(now: list[float]) -> None:
    """Nor do the first steps: what is frozen takes no time, and what is new takes more."""
    work = OwnWork(HookClock().outside, CPU)
    for counts in [True] * 5 + [False, True, False]:
        work.begin()
        now[0] += 1.0
        work.end()
        work.stepped(counts=counts)
    assert list(work.steps) == [1.0]
