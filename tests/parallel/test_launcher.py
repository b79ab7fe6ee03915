"""Forked worlds report what their ranks return, and never hang."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from launcher import WorldFailed, run_world


def test_ranks_share_a_process_group_and_return_tensors() -> None:
    """Every rank sees the others; what it returns arrives by rank."""

    def work(rank: int) -> torch.Tensor:
        total = torch.tensor([float(rank)])
        dist.all_reduce(total)
        return total + rank

    assert [result.item() for result in run_world(3, work)] == [3.0, 4.0, 5.0]


def test_an_exception_in_one_rank_ends_the_world_and_says_where() -> None:
    """The other ranks wait for the failed one; they are killed, and the traceback arrives."""

    def work(rank: int) -> None:
        if rank == 1:
            raise KeyError("the reason")
        dist.barrier()

    start = time.monotonic()
    with pytest.raises(WorldFailed, match=r"(?s)rank 1.*the reason"):
        run_world(3, work)
    assert time.monotonic() - start < 30


def test_a_killed_rank_is_reported() -> None:
    """SIGKILL leaves no traceback, only an exit code."""

    def work(rank: int) -> None:
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    with pytest.raises(WorldFailed, match="exit code -9"):
        run_world(2, work, process_group=False)


def test_a_world_that_hangs_is_ended_at_its_time_out() -> None:
    """Nobody waits for ever, and the late ranks are named."""

    def work(rank: int) -> None:
        if rank == 1:
            signal.pause()

    with pytest.raises(WorldFailed, match=r"ranks \[1\] did not finish"):
        run_world(2, work, timeout=timedelta(seconds=0.7), process_group=False)
