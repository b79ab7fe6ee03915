"""Checkpoints in a bucket: killed runs resume from an S3 server."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from servers._s3 import S3Server

from campaign._campaign import Campaigns
from campaign._training import Checkpointing, Setup
from lightning_moe_ckpt.testing._kill import Kill


@pytest.mark.parametrize(
    ("name", "world_size"), [("moto", 1), ("rclone", 1), pytest.param("moto", 3, marks=pytest.mark.soak)]
)
def test_a_run_in_a_bucket_survives_kills(
    campaigns: Campaigns, s3: Callable[[str], S3Server], name: str, world_size: int
) -> None:
    """At the end of an epoch and in replay; also where the store ignores conditions."""
    server = s3(name)
    options = tuple(server.storage_options.items())
    policy = Checkpointing(policy="sparse", window=3, url=server.url(), storage_options=options)
    kills = [Kill(phase="forward", step=step, settle=10.0) for step in (5, 6)]
    setup = Setup(world_size=world_size, checkpointing=policy)
    first, *others = campaigns.check(setup, *kills, may_complain=name == "rclone")
    assert first.steps()[0] == 1
    assert all(life.steps()[0] > 1 for life in others)
