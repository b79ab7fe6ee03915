"""Nodes die with their memory: what ranks on them had comes back from copies on other nodes, bit for bit.

A node is a directory of shared memory. A life after the one that a node dies with finds another machine in its place,
whose memory is empty.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest

from campaign._campaign import SHARED_MEMORY, Campaigns
from campaign._training import Checkpointing, Setup, train
from lightning_moe_ckpt.testing._lives import Life
from lightning_moe_ckpt.tiers._shm import DIRECTORY_VARIABLE


@dataclass(frozen=True)
class Nodes:
    """Where ranks run."""

    folder: Path
    placed: tuple[int, ...]
    """Node of each rank."""
    dies: int | None = None
    """Node that dies with the first life; another machine takes its place."""

    def shared_memory(self, life: Life) -> Path:
        """Of the machine that a rank runs on."""
        node = self.placed[life.rank]
        return self.folder / f"node{node}{'-replaced' if node == self.dies and life.index else ''}"

    def files(self) -> list[str]:
        """What is left on the machines that live."""
        dead = self.folder / f"node{self.dies}"
        return sorted(path.name for path in self.folder.rglob("*") if path.is_file() and path.parent != dead)


def train_on_nodes(setup: Setup, nodes: Nodes, life: Life) -> Mapping[str, Any]:
    """What `setup` does, on nodes."""
    memory = nodes.shared_memory(life)
    memory.mkdir(parents=True, exist_ok=True)
    os.environ[DIRECTORY_VARIABLE] = str(memory)
    return train(setup, life)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Holds the memory of all nodes of a test."""
    folder = SHARED_MEMORY / f"test-peers-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def two_nodes(policy: Literal["dense", "sparse"]) -> Setup:
    """Four ranks that share 12 experts by twos."""
    return Setup(
        model="stacked",
        options=(("num_experts", 12),),
        world_size=4,
        expert_parallel=2,
        batches=6,
        checkpointing=Checkpointing(policy=policy, window=3, every_n_steps=2),
    )


@pytest.mark.parametrize("policy", ["sparse", "dense"])
def test_a_run_with_copies_ends_the_same_and_leaves_nothing(
    campaigns: Campaigns, folder: Path, policy: Literal["dense", "sparse"]
) -> None:
    """Replication beside expert-parallel training: every rank has generations on the other node, no bit differs."""
    setup, nodes = two_nodes(policy), Nodes(folder, (0, 0, 1, 1))
    lives = campaigns.check(setup, fit=partial(train_on_nodes, setup, nodes))
    for rank in range(4):
        assert "is replicated to ranks" in lives[-1].log(rank), rank
    assert nodes.files() == []
