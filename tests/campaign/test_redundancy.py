"""What nodes have in common is not sent to copies, and a node that is lost comes back from them with its owners' bits."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest

from campaign._campaign import Campaigns
from campaign._nodes import AwaitsCopies, Nodes, leave_only_copies
from campaign._partial_runs import KILL, Machines, train_partial, two_level_setup
from campaign._promises import Restarts
from campaign._training import Checkpointing, Setup, train
from lightning_moe_ckpt.session import Report
from lightning_moe_ckpt.testing import Attempt, AttemptResult, Kill

AWAITED = 9
"""Step that begins when a generation has copies."""


def tells_redundancy(life: Attempt) -> AwaitsCopies:
    """A step waits until this rank has a generation on another node; what copies took until then is written down."""

    def tell(report: Report) -> None:
        if (found := report.redundancy) is not None:
            told = [found.nbytes_sent, found.nbytes_mirrored]
            (life.workdir / f"redundancy.{life.index}.{life.rank}").write_text(json.dumps(told))

    return AwaitsCopies(lambda step: 0 if step == AWAITED else None, tell)


def taken(lives: list[AttemptResult]) -> tuple[int, int]:
    """Bytes that the ranks of the first life have sent, and those that they had not to."""
    life = lives[0]
    found = [json.loads((life.workdir / f"redundancy.0.{rank}").read_text()) for rank in range(life.world_size)]
    return sum(sent for sent, _ in found), sum(mirrored for _, mirrored in found)


def train_told(setup: Setup, nodes: Nodes, life: Attempt) -> Mapping[str, Any]:
    """In the first life storage has the start alone."""
    nodes.settle(life)
    if life.index == 0:
        leave_only_copies(0, tells_redundancy(life))
    return train(setup, life)


@dataclass(frozen=True)
class Case:
    """A run of which a node dies."""

    placed: tuple[int, ...]
    expert_parallel: int
    share: float
    """Of the bytes of copies, that are not sent at least."""
    policy: Any = "dense"
    replicas: int = 1
    model: str = "stacked"

    def setup(self, *, redundancy: bool | Literal["auto"]) -> Setup:
        """A generation at every second step."""
        arguments = (("redundancy", redundancy), ("replicas", self.replicas))
        return Setup(
            model=self.model,  # type: ignore[arg-type]
            options=(("num_experts", 12), ("expansion", 36)),
            world_size=len(self.placed),
            expert_parallel=self.expert_parallel,
            batches=6,
            checkpointing=Checkpointing(policy=self.policy, window=3, every_n_steps=2, arguments=arguments),
        )

    @property
    def dies(self) -> int:
        """Rank on the node that dies."""
        return self.placed.index(1)


CASES = {
    "a group on both nodes": Case((0, 0, 1, 1), 2, 0.8),
    "windows": Case((0, 0, 1, 1), 2, 0.7, policy="sparse"),
    "experts once": Case((0, 0, 1, 1), 4, 0.005),
    "every expert everywhere": Case((0, 0, 1, 1), 1, 0.7, policy="sparse"),
    "unequal nodes": Case((0, 1, 1), 1, 0.8),
    "three unequal nodes, experts by twos": Case((0, 0, 1, 2), 2, 0.01),
    "two copies": Case((0, 1, 2), 1, 0.8, replicas=2),
    "differences": Case((0, 0, 1, 1), 2, 0.5, policy="differential"),
}
ORDINARY = {"unequal nodes"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in ORDINARY else [pytest.mark.soak]) for n in CASES])
def test_a_node_that_dies_comes_back_from_copies_that_were_not_sent(
    campaigns: Campaigns, folder: Path, name: str
) -> None:
    """Rank 2's node dies with its memory; of the generation that is restored, storage has nothing."""
    case = CASES[name]
    nodes = Nodes(folder, case.placed, dies=1)
    setup = case.setup(redundancy=True)
    kill = Kill(phase="forward", step=AWAITED + 1, rank=case.dies)
    lives = campaigns.check(setup, kill, may_complain=True, fit=partial(train_told, setup, nodes))
    sent, mirrored = taken(lives)
    print(f"{name}: {sent} bytes sent, {mirrored} taken from own state: {mirrored / (sent + mirrored):.1%}")
    assert mirrored / (sent + mirrored) >= case.share
    said = lives[-1].log()
    assert re.search(rf"ranks? [^\n]*\b{case.dies}\b[^\n]*: [^\n]*from peer", said), said
    assert "has other bytes" not in "".join(lives[0].log(rank) for rank in range(lives[0].world_size))
    assert nodes.files() == []


def test_only_the_first_start_measures_whether_it_pays(campaigns: Campaigns, folder: Path) -> None:
    """The run's log has what it found, for a restart that has better things to do."""
    case = CASES["unequal nodes"]
    nodes, setup = Nodes(folder, case.placed, dies=1), case.setup(redundancy="auto")
    kill = Kill(phase="forward", step=AWAITED + 1, rank=case.dies)
    lives = campaigns.check(setup, kill, may_complain=True, fit=partial(train_told, setup, nodes))
    measured = ["copies from own state run at" in life.log() for life in lives]
    assert measured == [True, False]


@pytest.mark.soak
def test_without_it_all_of_that_is_sent(campaigns: Campaigns, folder: Path) -> None:
    """The same run, before and after."""
    case, found = CASES["a group on both nodes"], {}
    for redundancy in (False, True):
        setup = case.setup(redundancy=redundancy)
        nodes = Nodes(folder / str(redundancy), case.placed)
        lives = campaigns.check(setup, fit=partial(train_told, setup, nodes), may_complain=True)
        found[redundancy] = taken(lives)
    (sent, nothing), (less, mirrored) = found[False], found[True]
    assert nothing == 0
    assert mirrored > 0.8 * (less + mirrored)
    print(f"sent {sent} bytes without, {less} with, which takes {mirrored} from own state")


@pytest.mark.parametrize(
    ("expert_parallel", "placed", "select"),
    [
        (1, (0, 1, 1), "sequential"),
        pytest.param(2, (0, 0, 1, 1), "load_aware", marks=pytest.mark.soak),
        pytest.param(4, (0, 0, 1, 1), "load_aware", marks=pytest.mark.soak),
        pytest.param(3, (0, 1, 2), "load_aware", marks=pytest.mark.soak),
    ],
)
def test_partial_generations_are_as_new_as_promised_where_the_dense_part_is_not_sent(
    campaigns: Campaigns, folder: Path, expert_parallel: int, placed: tuple[int, ...], select: str
) -> None:
    """What copies are made of is told by what is found on nodes, record by record; every bit is compared."""
    setup = two_level_setup(len(placed), expert_parallel, select=select, arguments=(("redundancy", True),))
    machines = Machines(folder, placed, lost=((1,),))
    kill = replace(KILL, rank=placed.index(1))
    lives = campaigns.run(setup, kill, fit=partial(train_followed, setup, machines))
    assert [life.outcome for life in lives] == ["killed", "finished"], lives[-1].log()
    found = Restarts(lives)
    found.require(1)
    found.require_accounting()
    sent, mirrored = taken(lives)
    print(f"{sent} bytes sent, {mirrored} taken from own state: {mirrored / (sent + mirrored):.1%}")
    # Experts once, and journals take most; with experts of four ranks, more so.
    assert mirrored / (sent + mirrored) > (0.02 if expert_parallel == 4 else 0.03)


def train_followed(setup: Setup, machines: Machines, life: Attempt) -> Mapping[str, Any]:
    """Copies are on other nodes when the first life is killed."""
    return train_partial(setup, machines, life, *([tells_redundancy(life)] if life.index == 0 else []))
