"""When nobody starts again on a node: everybody is killed, memory is flushed and gone, and another place goes on with the same bits."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from servers._s3 import S3Server

from campaign._campaign import Campaigns, two_chains
from campaign._draw import draw
from campaign._flushed import Elsewhere
from campaign._nodes import Nodes
from campaign._partial_runs import partial_setup
from campaign._training import Checkpointing, Setup
from lightning_moe_ckpt.testing import AttemptResult, Kill

SPARSE = Setup(model="stacked", batches=6, checkpointing=Checkpointing(policy="sparse", window=3))
DENSE = replace(SPARSE, checkpointing=Checkpointing(policy="dense"))
EVERY_OTHER = replace(SPARSE, checkpointing=Checkpointing(policy="dense", every_n_steps=2))
DIFFERENTIAL = replace(SPARSE, clip=None, checkpointing=Checkpointing(policy="differential", every_n_steps=4, batch=2))
EXPERTS: dict[str, Any] = {"world_size": 3, "options": (("num_experts", 6),), "expert_parallel": 3}
KILLS = (Kill(phase="forward", step=7), Kill(phase="before_optimizer_step", step=10))


def check(campaigns: Campaigns, elsewhere: Elsewhere, kills: Sequence[Kill] = KILLS) -> list[AttemptResult]:
    """The run ends as if nobody had been killed; returns its lives."""
    kills = [replace(kill, everyone=True, settle=0.0) for kill in kills]
    return campaigns.check(elsewhere.setup, *kills, fit=elsewhere.fit, may_complain=True)


def flushed(lives: Sequence[AttemptResult]) -> list[tuple[int, int]]:
    """What each life but the first has found in memory and in storage."""
    found = [re.search(r"^flushed (-?\d+) over (-?\d+)$", life.log(), re.MULTILINE) for life in lives[1:]]
    return [(int(each[1]), int(each[2])) for each in found if each is not None]


@pytest.mark.parametrize(
    ("setup", "ranks"),
    [
        (SPARSE, {}),
        (DIFFERENTIAL, {}),
        (SPARSE, EXPERTS),
        *(pytest.param(*each, marks=pytest.mark.soak) for each in ((DENSE, {}), (EVERY_OTHER, {}), (DENSE, EXPERTS))),
        pytest.param(DIFFERENTIAL, {"world_size": 3}, marks=pytest.mark.soak),
    ],
    ids=["sparse", "differential", "sparse-3", "dense", "every-other", "dense-3", "differential-3"],
)
def test_where_memory_was_flushed_another_node_goes_on(
    campaigns: Campaigns, setup: Setup, ranks: dict[str, Any]
) -> None:
    """Storage had the first generation, and then what was flushed; twice in a row."""
    lives = check(campaigns, Elsewhere(replace(setup, **ranks), 3))
    (first, start), (second, stored) = flushed(lives)
    assert (start, stored) == (0, first)
    assert 3 <= first < second
    assert [life.steps()[0] - 1 for life in lives[1:]] >= [first - 2, second - 2]


@pytest.mark.soak
@pytest.mark.parametrize(
    "setup",
    [SPARSE, replace(SPARSE, **EXPERTS), DENSE, DIFFERENTIAL, replace(DIFFERENTIAL, world_size=3)],
    ids=["sparse", "sparse-3", "dense", "differential", "differential-3"],
)
@pytest.mark.parametrize("stored_until", [0, 100])
def test_killed_in_every_place(campaigns: Campaigns, setup: Setup, stored_until: int) -> None:
    """Of a step and of a window, and while storage is at work, with whatever that leaves."""
    for kills in two_chains(setup):
        check(campaigns, Elsewhere(setup, len(kills) + 1, stored_until), kills)


@pytest.mark.parametrize("lost", [None, pytest.param(1, marks=pytest.mark.soak)])
def test_two_nodes_bring_what_each_has(campaigns: Campaigns, folder: Path, lost: int | None) -> None:
    """Without copies each brings its rank; where a node is gone, copies on the other one take its place."""
    setup = replace(SPARSE, world_size=2, options=(("num_experts", 4),))
    setup = replace(
        setup, checkpointing=Checkpointing(policy="sparse", arguments=(("replicas", int(lost is not None)),))
    )
    lives = check(campaigns, Elsewhere(setup, 2, nodes=Nodes(folder, (0, 1), dies=lost), lost=lost), KILLS[1:])
    ((held, before),) = flushed(lives)
    assert before == 0
    assert held >= (3 if lost is None else 0)


@pytest.mark.parametrize("world_size", [1, pytest.param(3, marks=pytest.mark.soak)])
def test_a_partial_generation_is_completed_by_what_storage_has(campaigns: Campaigns, world_size: int) -> None:
    """All experts that storage lacks of it come from older ones there; what is read is whole, and training goes on from it."""
    setup = partial_setup(world_size, k=1, snapshot_k=2)
    elsewhere = Elsewhere(setup, 2, stored_until=4)
    kill = replace(KILLS[1], everyone=True)
    lives = campaigns.run(setup, kill, fit=elsewhere.fit)
    ((held, before),) = flushed(lives)
    assert 0 <= before <= 4
    assert held > 6
    assert lives[1].steps() == [*range(held + 1, setup.steps + 1)]


@pytest.mark.soak
@pytest.mark.parametrize("first", [2000, 2010])
def test_drawn_runs_go_on_from_what_was_flushed(campaigns: Campaigns, first: int) -> None:
    """Over everything that a user may vary, wherever their lives end; each finds an empty memory."""
    for seed in range(first, first + 10):
        case = draw(seed)
        assert case.setup.checkpointing is not None
        if case.named is None and not case.setup.checkpointing.stutters:
            elsewhere = Elsewhere(case.setup, 100, stored_until=10**9, drawn=True)
            campaigns.check(case.setup, *case.kills, fit=elsewhere.fit, must_strike=False, may_complain=True)


@pytest.mark.soak
def test_a_bucket_gets_what_memory_has(campaigns: Campaigns, s3: Callable[[str], S3Server]) -> None:
    """With options of storage, on three ranks."""
    server = s3("moto")
    options = tuple(server.storage_options.items())
    policy = Checkpointing(policy="sparse", window=3, url=server.url(), storage_options=options)
    lives = check(campaigns, Elsewhere(replace(SPARSE, checkpointing=policy, **EXPERTS), 3))
    assert all(held > before for held, before in flushed(lives))
