"""What is called beside training has ended when it is joined, and its errors are raised there."""

from __future__ import annotations

import threading

import pytest

from lightning_moe_ckpt.process import Beside


def test_calls_are_made_on_a_thread_one_after_another_until_it_is_finished() -> None:
    beside, threads, gate = Beside(), list[threading.Thread](), threading.Event()
    before = set(threading.enumerate())

    def call() -> None:
        gate.wait()
        threads.append(threading.current_thread())

    beside.begin(call)
    busy = [beside.busy]
    assert threads == []
    gate.set()
    beside.join()
    busy.append(beside.busy)
    beside.begin(call)
    busy.append(beside.busy)
    beside.finish()
    assert [*busy, beside.busy] == [True, False, True, False]
    assert len(threads) == 2
    assert threads[0] is threads[1]
    assert threads[0] not in before
    assert set(threading.enumerate()) == before


def test_an_error_is_raised_by_join_and_the_thread_goes_on() -> None:
    beside, made = Beside(), list[int]()

    def fails() -> None:
        raise KeyError("of the call")

    beside.begin(fails)
    with pytest.raises(KeyError, match="of the call"):
        beside.join()
    beside.begin(lambda: made.append(1))
    beside.join()
    assert made == [1]
    beside.begin(fails)
    beside.finish()  # nobody asks any more
    beside.begin(lambda: made.append(2))  # nor is that error taken for this call's
    beside.join()
    assert made == [1, 2]
    beside.finish()
