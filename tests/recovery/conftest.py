"""Worlds whose nodes are directories of shared memory."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from lightning_moe_ckpt.tiers import shared_directory
from recovery._partial_world import TAKEN, PartialWorld, Taken
from recovery._world import World

MakeWorld = Callable[..., World]
MakePartial = Callable[..., PartialWorld]


@pytest.fixture
def make_world() -> Iterator[MakeWorld]:
    """Makes a world from the names of its ranks' nodes; storage is a directory of shared memory too, which syncs fast."""
    with tempfile.TemporaryDirectory(dir=shared_directory()) as shared:

        def make(*names: str) -> World:
            nodes = [Path(shared) / name for name in names]
            for node in nodes:
                node.mkdir(exist_ok=True)
            return World(Path(shared) / "run", nodes)

        yield make


@pytest.fixture
def world(make_world: MakeWorld) -> World:
    """Two ranks, each on a node of its own."""
    return make_world("a", "b")


@pytest.fixture(params=[True, False], ids=["references", "searching"])
def make_partial(request: pytest.FixtureRequest) -> Iterator[MakePartial]:
    """Makes a world from the names of its ranks' nodes."""
    with tempfile.TemporaryDirectory(dir=shared_directory()) as shared:

        def make(*names: str, taken: Mapping[int, Taken] = TAKEN) -> PartialWorld:
            nodes = [Path(shared) / name for name in names]
            for node in nodes:
                node.mkdir(exist_ok=True)
            return PartialWorld(Path(shared) / "run", nodes, taken, uses_references=request.param)

        yield make
