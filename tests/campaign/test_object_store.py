"""Checkpoints in a bucket: killed runs resume from an S3 server."""

from __future__ import annotations

from pathlib import Path

import pytest
from servers._s3 import running

from campaign._campaign import Campaigns
from campaign._training import Checkpointing, Setup
from lightning_moe_ckpt.testing._kill import Kill


@pytest.mark.parametrize(
    ("name", "world_size"), [("moto", 1), ("rclone", 1), pytest.param("moto", 3, marks=pytest.mark.soak)]
)
def test_a_run_in_a_bucket_survives_kills(campaigns: Campaigns, name: str, world_size: int, tmp_path: Path) -> None:
    """At the end of an epoch and in replay; also where the store ignores conditions."""
    with running(name, tmp_path) as server:
        options = tuple(server.storage_options.items())
        policy = Checkpointing(policy="sparse", window=3, url=server.url(), storage_options=options)
        kills = [Kill(phase="forward", step=step, settle=10.0) for step in (5, 6)]
        setup = Setup(world_size=world_size, checkpointing=policy)
        first, *others = campaigns.check(setup, *kills, may_complain=name == "rclone")
    assert first.steps()[0] == 1
    assert all(life.steps()[0] > 1 for life in others)
