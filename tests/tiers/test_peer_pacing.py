"""A transfer gets the steps it has: no step sends more than its part, and the last one sends the rest."""

from __future__ import annotations

import threading

import pytest
from door import Pacer
from hypothesis import given
from hypothesis import strategies as st


def take_all(pacer: Pacer, nbytes: int, chunk: int) -> int:
    """Bytes that can be had in this step, of `nbytes` that there are."""
    taken = pacer.take(min(chunk, nbytes), lambda: True) if nbytes else 0
    while taken < min(nbytes, pacer._allowance):
        taken += pacer.take(min(chunk, nbytes - taken), lambda: True)
    return taken


def test_a_transfer_is_spread_evenly_over_its_steps() -> None:
    """1000 bytes over 8 steps: 125 in each."""
    pacer = Pacer()
    pacer.begin(num_segments=1, num_steps=8)
    pacer.expect(1000)
    left, sent = 1000, []
    while left:
        sent.append(take_all(pacer, left, chunk=50))
        left -= sent[-1]
        pacer.step()
    assert sent == [125] * 8


def test_segments_to_come_count_as_the_mean_of_those_that_came() -> None:
    """A generation that travels while its window is open sends one segment per step, not all of it in the first."""
    pacer = Pacer()
    pacer.begin(num_segments=4, num_steps=4)
    sent = []
    for _ in range(4):
        pacer.expect(100)
        sent.append(take_all(pacer, 100, chunk=1000))
        pacer.step()
    assert sent == [100] * 4


def test_what_slow_steps_left_over_goes_to_the_steps_after_them() -> None:
    """Nothing was sent in the first half: each step of the second half sends twice as much."""
    pacer = Pacer()
    pacer.begin(num_segments=1, num_steps=8)
    pacer.expect(800)
    for _ in range(4):
        pacer.step()
    assert take_all(pacer, 800, chunk=800) == 200


def test_after_the_last_step_the_rest_goes_at_once() -> None:
    """The next generation wants the slots now."""
    pacer = Pacer()
    pacer.begin(num_segments=1, num_steps=2)
    pacer.expect(1000)
    for _ in range(5):
        pacer.step()
    assert pacer.take(1000, lambda: True) == 1000


def test_a_hurried_transfer_goes_at_once_and_the_next_one_is_paced_again() -> None:
    """`hurry` is for one transfer."""
    pacer = Pacer()
    pacer.begin(num_segments=1, num_steps=10)
    pacer.expect(1000)
    pacer.hurry()
    assert pacer.take(1000, lambda: True) == 1000
    pacer.begin(num_segments=1, num_steps=10)
    pacer.expect(1000)
    assert pacer.take(1000, lambda: True) == 100


@pytest.mark.parametrize("event", ["step", "hurry", "unwanted"])
def test_a_sender_that_has_used_its_part_up_sleeps_until(event: str) -> None:
    """... the next step, somebody who waits for it, or until nobody wants it any more."""
    pacer, unwanted = Pacer(), threading.Event()
    pacer.begin(num_segments=1, num_steps=2)
    pacer.expect(100)
    assert pacer.take(100, lambda: True) == 50
    got: list[int] = []
    asked = threading.Event()

    def wanted() -> bool:
        asked.set()
        return not unwanted.is_set()

    sender = threading.Thread(target=lambda: got.append(pacer.take(100, wanted)), daemon=True)
    sender.start()
    assert asked.wait(10)
    assert got == []
    if event == "unwanted":
        unwanted.set()
    {"step": pacer.step, "hurry": pacer.hurry, "unwanted": pacer.wake}[event]()
    sender.join(10)
    assert got == [{"step": 50, "hurry": 100, "unwanted": 0}[event]]


@given(
    sizes=st.lists(st.integers(1, 10_000), min_size=1, max_size=6),
    num_steps=st.integers(1, 12),
    chunk=st.integers(1, 5_000),
)
def test_every_transfer_is_through_by_its_last_step(sizes: list[int], num_steps: int, chunk: int) -> None:
    """Whatever the sizes, a network that keeps up sends each step's part and has sent all when the steps are over."""
    pacer = Pacer()
    pacer.begin(num_segments=len(sizes), num_steps=num_steps)
    for size in sizes:
        pacer.expect(size)
    left = sum(sizes)
    for step in range(num_steps):
        part = -(-left // (num_steps - step))
        assert take_all(pacer, left, chunk) == part
        left -= part
        pacer.step()
    assert left == 0
