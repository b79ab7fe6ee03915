"""Where the newest generation is in slow storage alone, an older one in memory that brings training back sooner is taken."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from stored._outages import stop_storing_after

from campaign._campaign import Campaigns
from campaign._nodes import Nodes
from campaign._training import Checkpointing, Setup, train
from lightning_moe_ckpt.storage import RunStore, SegmentEntry
from lightning_moe_ckpt.testing import Attempt, Kill, Seam
from lightning_moe_ckpt.tiers._peer_writer import PeerWorker

SETUP = Setup(model="stacked", world_size=2, expert_parallel=2, batches=6, validate_every=None)
READ_SECONDS = 12.0
"""Seconds that slow storage takes for one rank's part."""


def read_slowly() -> None:
    """In this process a whole file takes `READ_SECONDS`, a part of it less accordingly."""
    read = RunStore.read_range

    def slowly(store: RunStore, entry: SegmentEntry, start: int, out: memoryview) -> None:
        time.sleep(READ_SECONDS * out.nbytes / entry.nbytes)
        read(store, entry, start, out)

    Seam(module="lightning_moe_ckpt.storage._run_store", attribute="RunStore.read_range", replacement=slowly).apply()


def train_with_old_copies(nodes: Nodes, setup: Setup, life: Attempt, *, slow: bool) -> Mapping[str, Any]:
    """The first life's copies end with step 4; where storage is slow, it is in the second."""
    if life.index == 0:
        stop_storing_after(4, PeerWorker)
    elif slow:
        read_slowly()
    nodes.settle(life)
    return train(setup, life)


@pytest.mark.parametrize(
    ("slow", "every", "begins"), [(True, 4, 4), (False, 4, 8), pytest.param(True, 2, 8, marks=pytest.mark.soak)]
)
def test_an_older_generation_is_taken_where_it_brings_training_back_sooner(
    campaigns: Campaigns, folder: Path, slow: bool, every: int, begins: int
) -> None:
    """Storage alone has 8 whole, memory 4. Beyond the user's number of steps no older one is taken, however slow storage is."""
    nodes = Nodes(folder, (0, 1), dies=1)
    setup = replace(SETUP, checkpointing=Checkpointing(policy="dense", every_n_steps=every))
    kill = Kill(phase="forward", step=9, rank=1, settle=20.0)
    fit = partial(train_with_old_copies, nodes, setup, slow=slow)
    _, last = campaigns.check(setup, kill, may_complain=True, fit=fit)
    assert last.steps()[0] == begins + 1
    assert ("comes before" in last.log()) == (begins == 4)
    print(f"from step {begins}: {last.seconds:.1f} s")
    assert (last.seconds < READ_SECONDS) == (begins == 4 or not slow), "a part of the newest takes that long"
