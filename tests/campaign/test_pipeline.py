"""Pipeline stages: a rank of one dies, the job starts again, and ends the same on every rank of every stage."""

from __future__ import annotations

import pytest

from campaign._campaign import Campaigns
from campaign._pipelined import Pipelined
from campaign._training import Checkpointing
from campaign.test_expert_parallel import random_kills

DENSE = Checkpointing(policy="dense", every_n_steps=2)
SPARSE = Checkpointing(policy="sparse", window=3, order="popularity")
PARTIAL = Checkpointing(policy="partial", k=1)


@pytest.mark.parametrize(
    ("stages", "replicas", "expert_parallel", "checkpointing"),
    [
        (2, 1, 1, DENSE),
        (3, 1, 1, SPARSE),
        (2, 2, 1, SPARSE),
        (2, 2, 2, SPARSE),
    ],
)
def test_killed_on_random_ranks_stages_end_the_same(
    campaigns: Campaigns, stages: int, replicas: int, expert_parallel: int, checkpointing: Checkpointing
) -> None:
    """Several kills in one run, on ranks of several stages; schedulers follow what the last stage alone computes."""
    setup = Pipelined(
        stages=stages,
        micro_batches=4 if stages > 2 else 2,
        world_size=stages * replicas,
        expert_parallel=expert_parallel,
        scheduler="plateau",
        batches=6,
        checkpointing=checkpointing,
    )
    lives = campaigns.check(setup, *random_kills(setup, 3, seed=10 * stages + replicas + expert_parallel))
    assert lives[-1].steps()[0] > 1, "it did not start over"
