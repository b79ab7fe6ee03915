"""A call on another thread has ended when it is joined, and `join` raises its error."""

from __future__ import annotations

import threading

import pytest

from lightning_moe_ckpt.process import CallThread


def test_calls_are_made_on_a_thread_one_after_another_until_it_is_finished() -> None:
    thread, threads, gate = CallThread(), list[threading.Thread](), threading.Event()
    before = set(threading.enumerate())

    def call() -> None:
        gate.wait()
        threads.append(threading.current_thread())

    thread.begin(call)
    busy = [thread.busy]
    assert threads == []
    gate.set()
    thread.join()
    busy.append(thread.busy)
    thread.begin(call)
    busy.append(thread.busy)
    thread.finish()
    assert [*busy, thread.busy] == [True, False, True, False]
    assert len(threads) == 2
    assert threads[0] is threads[1]
    assert threads[0] not in before
    assert set(threading.enumerate()) == before


def test_an_error_is_raised_by_join_and_the_thread_goes_on() -> None:
    thread, made = CallThread(), list[int]()

    def fails() -> None:
        raise KeyError("of the call")

    thread.begin(fails)
    with pytest.raises(KeyError, match="of the call"):
        thread.join()
    thread.begin(lambda: made.append(1))
    thread.join()
    assert made == [1]
    thread.begin(fails)
    thread.finish()  # nobody asks any more
    thread.begin(lambda: made.append(2))  # nor is that error taken for this call's
    thread.join()
    assert made == [1, 2]
    thread.finish()
