"""Lives of a torchrun job share the agent's store and still never meet the ranks of an earlier life."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from launcher import run_world

from lightning_moe_ckpt.errors import CheckpointError
from lightning_moe_ckpt.parallel import init_fresh_process_group, restart_is_likely, shares_agent_store

TIMEOUT = timedelta(seconds=30)


def one_life(rank: int, world_size: int, port: int) -> float:
    """Join, add up all ranks, and leave without a goodbye, as a killed process does."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    assert shares_agent_store()
    init_fresh_process_group("gloo", rank=rank, world_size=world_size, timeout=TIMEOUT)
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total)
    return float(total)


def test_every_life_forms_a_world_of_its_own(agent_port: int) -> None:
    """Three lives over one store, the last with fewer ranks."""
    for world_size in (3, 3, 2):
        totals = run_world(world_size, lambda rank, n=world_size: one_life(rank, n, agent_port), process_group=False)  # type: ignore[misc]
        assert totals == [world_size * (world_size + 1) / 2] * world_size


def test_a_world_that_does_not_come_together_says_how_many_are_missing(agent_port: int) -> None:
    """Rank 0 alone waits for its time-out, not for ever."""

    def alone(rank: int) -> str:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(agent_port))
        with pytest.raises(CheckpointError, match="0 of 2 other ranks joined") as caught:
            init_fresh_process_group("gloo", rank=0, world_size=3, timeout=timedelta(seconds=1))
        return str(caught.value)

    (message,) = run_world(1, alone, process_group=False)
    assert "all processes" in message


def test_a_failed_collective_or_a_restart_left_means_that_the_job_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that is gone, also as the cause of another error; the user's own errors only where torchrun tries again."""

    def lonely(rank: int) -> list[bool]:
        dist.barrier()  # until both have connected
        if rank == 1:
            dist.destroy_process_group()
            return []
        with pytest.raises(RuntimeError) as failed:
            dist.barrier()
        wrapped = ValueError("after that")
        wrapped.__context__ = failed.value
        return [restart_is_likely(failed.value), restart_is_likely(wrapped)]

    assert run_world(2, lonely, timeout=TIMEOUT) == [[True, True], []]
    assert not restart_is_likely(ValueError("the user's"))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    for restarts, likely in ((0, True), (2, True), (3, False)):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
        assert restart_is_likely(ValueError("the user's")) is likely
