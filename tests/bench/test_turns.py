"""Processes take turns, and none outlives its parent's interest."""

from __future__ import annotations

import multiprocessing
import os
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from launcher import run_world
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed

from benchmarks.recovery import host_restore_seconds
from lightning_moe_ckpt.benchmarks._fits import HandOver, TurnFailed, TurnTaker
from lightning_moe_ckpt.errors import CheckpointError, ConfigurationError
from lightning_moe_ckpt.process import compute_alone
from lightning_moe_ckpt.testing import run_attempts


def test_work_goes_on_only_while_it_has_the_turn(tmp_path: Path) -> None:
    """Two counters in one file: each adds a line per turn, in the order in which turns are given."""
    log = tmp_path / "log"

    def count(name: str) -> TurnTaker[int]:
        def work(hand_over: HandOver[int]) -> None:
            for number in range(3):
                with log.open("a") as file:
                    file.write(name)
                hand_over(number)

        return TurnTaker(work)

    with count("a") as a, count("b") as b:
        taken = [each.take() for each in (a, b, b, a, a, b)]
    assert taken == [0, 0, 1, 1, 2, 2]
    assert log.read_text() == "abbaab"


def test_work_cleans_up_when_no_turn_follows(tmp_path: Path) -> None:
    """Its `finally` has run when the context ends."""

    def work(hand_over: HandOver[int]) -> None:
        try:
            hand_over(1)
        finally:
            (tmp_path / "clean").touch()

    with TurnTaker(work) as taker:
        assert taker.take() == 1
        assert not (tmp_path / "clean").exists()
    assert (tmp_path / "clean").exists()


def test_errors_of_this_package_arrive_as_such() -> None:
    """The command line shows them without a traceback."""

    def work(_: HandOver[int]) -> None:
        raise ConfigurationError("`window=0` must be 1 or more.")

    with TurnTaker(work) as taker, pytest.raises(CheckpointError, match=r"^`window=0` must be 1 or more\.$"):
        taker.take()


def test_other_errors_arrive_with_their_traceback() -> None:
    """So that a bug can be found."""

    def work(_: HandOver[int]) -> None:
        raise KeyError("the reason")

    with TurnTaker(work) as taker, pytest.raises(TurnFailed, match=r"(?s)in work.*the reason"):
        taker.take()


@pytest.mark.parametrize("end", [lambda: None, lambda: os._exit(3)], ids=["return", "death"])
def test_an_early_end_is_an_error(end: object) -> None:
    """Nobody waits for a result that cannot come."""

    def work(_: HandOver[int]) -> None:
        assert callable(end)
        end()

    with TurnTaker(work) as taker, pytest.raises(TurnFailed, match="ended before its turn was over"):
        taker.take()


def test_a_turn_that_takes_too_long_is_an_error() -> None:
    """The process that hangs is killed."""

    def work(_: HandOver[int]) -> None:
        threading.Event().wait()

    with (
        TurnTaker(work, timeout=timedelta(seconds=0.2)) as taker,
        pytest.raises(TurnFailed, match=r"not over after 0:00:00\.2"),
    ):
        taker.take()


def _compute(*_: object) -> dict[str, float]:
    """Return the sum of a tensor that is large enough to be split between threads, as a fit by DDP returns what it found."""
    _set_num_threads_if_needed()
    return {"sum": float(torch.ones(2**22).exp_().fill_(1.0).sum())}


def _fork_beside_openmp(folder: str) -> None:
    """Start the threads of OpenMP, then processes in every way in which this package forks; the last one forks twice."""
    del os.environ["OMP_NUM_THREADS"]
    torch.set_num_threads(2)
    wanted = _compute()
    os.environ.pop("OMP_NUM_THREADS", None)  # no fit has set it in this shell yet
    torch.set_num_threads(2)
    with TurnTaker[dict[str, float]](lambda hand_over: hand_over(_compute())) as taker:
        assert taker.take() == wanted
    assert host_restore_seconds(256_000) > 0
    with multiprocessing.get_context("fork").Pool(1, initializer=compute_alone) as pool:
        assert pool.apply(_compute) == wanted
    for world_size in (1, 2):
        place = Path(folder) / str(world_size)
        (result,) = run_attempts(_compute, url=place.as_uri(), workdir=place, world_size=world_size, timeout=60)
        assert result.outcome == "finished"
    assert torch.get_num_threads() == 2, "the process that forks keeps its threads"


def test_forks_beside_threads_of_openmp_compute(tmp_path: Path) -> None:
    """As in a user's shell, where nobody has set `OMP_NUM_THREADS`: forks that count on threads they lack wait for ever."""
    run_world(1, lambda _: _fork_beside_openmp(str(tmp_path)), process_group=False, timeout=timedelta(seconds=80))
