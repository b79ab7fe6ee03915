"""Long random campaigns over all kinds of faults and all tiers: run by `make soak`, not by `make test`."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from campaign._campaign import Campaigns
from campaign._faults import Breaking, lines_of, record_of
from campaign._training import Checkpointing
from lightning_moe_ckpt.testing import Fault, RandomFaults, summarize_faults

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

FAULTS = 50
KINDS = [
    Fault(),
    Fault(),
    Fault(kind="node_loss"),
    Fault(kind="node_loss"),
    Fault(kind="rack_loss"),
    Fault(kind="sigstop", seconds=0.2),
    Fault(kind="slow_storage", latency=0.02, bandwidth=5e7, steps=3),
    Fault(kind="storage_errors", probability=0.1, steps=3),
    Fault(kind="full_disk", steps=3),
    Fault(kind="full_shared_memory", nbytes=2**24, steps=3),
    Fault(kind="bit_flip", settle=20.0),
    Fault(kind="bit_flip", at_rest="ring"),
    Fault(kind="bit_flip", at_rest="replica"),
]


@pytest.mark.parametrize("policy", ["sparse", "dense"])
def test_fifty_faults_of_all_kinds(campaigns: Campaigns, capsys: pytest.CaptureFixture[str], policy: str) -> None:
    """Four processes on two nodes in two racks; what they end with is what they would have ended with in peace."""
    checkpointing = Checkpointing(policy="sparse", window=3, keep=6)
    if policy == "dense":
        checkpointing = Checkpointing(policy="dense", every_n_steps=2, keep=6)
    setup = Breaking(
        world_size=4,
        epochs=80,
        checkpointing=checkpointing,
        nodes=(0, 0, 1, 1),
        racks=("a", "a", "b", "b"),
        random=RandomFaults(mtbf=7.0, unit="steps", seed=11, kinds=KINDS, most=FAULTS),
    )
    lives = campaigns.check_faults(setup, timeout=300.0, patience=3000.0)
    summary = summarize_faults(record_of(lives[0].workdir))
    with capsys.disabled():
        print()
        Console().print(summary.table())
    assert summary.injected >= FAULTS
    assert summary.finished
    assert sum(tally.survived for tally in summary.kinds) == summary.lives - 1
    assert sorted({line["name"] for line in lines_of(lives[0].workdir, "fault")}) == sorted(
        f"random 11:{index}" for index in range(FAULTS)
    )


def test_fifty_kills_at_random_moments(campaigns: Campaigns, capsys: pytest.CaptureFixture[str]) -> None:
    """Processes and nodes die whenever it happens to be, of three processes on as many nodes."""
    random = RandomFaults(mtbf=0.2, seed=5, kinds=[Fault(), Fault(kind="node_loss")], most=FAULTS)
    setup = replace(
        Breaking(world_size=3, epochs=300, nodes=(0, 1, 2), random=random),
        checkpointing=Checkpointing(policy="sparse", window=3),
    )
    lives = campaigns.check_faults(setup, timeout=600.0, patience=3000.0)
    summary = summarize_faults(record_of(lives[0].workdir))
    with capsys.disabled():
        print()
        Console().print(summary.table())
    assert summary.injected == FAULTS
