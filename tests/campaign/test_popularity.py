"""The order of capture follows popularity, and a resumed run follows the same orders as one that is never killed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from campaign._campaign import Campaigns, checkpoints
from campaign._training import Checkpointing, Setup
from lightning_moe_ckpt.policies import Popularity
from lightning_moe_ckpt.storage import Commit, RunView, open_backend
from lightning_moe_ckpt.testing import AttemptResult, Kill, Seam

WINDOW = 3
EVERYTHING = 1000
"""Generations to keep: every one that was committed can still be looked at."""


def shifting(popularity: Popularity, **options: Any) -> Setup:
    """A run in which the router's favourite experts change every 5 forwards."""
    checkpointing = Checkpointing(
        policy="sparse", window=WINDOW, order="popularity", popularity=popularity, keep=EVERYTHING
    )
    model = (("num_experts", 6), ("shift_every", 5))
    return Setup(**{"options": model, "batches": 8, "epochs": 3, "checkpointing": checkpointing, **options})


VARIANTS: dict[str, Setup] = {
    "hard": shifting(Popularity(reorder_every_n_steps=5)),
    "soft, decayed": shifting(Popularity(counts="soft", half_life_steps=3, reorder_every_n_steps=5), model="tied"),
    "decayed, per capacity, accumulated": shifting(
        Popularity(half_life_steps=2, per_capacity=True, reorder_every_n_steps=5),
        model="stacked",
        accumulate=2,
        epochs=5,
    ),
    "soft, decayed, per capacity, sharded over three ranks": shifting(
        Popularity(counts="soft", half_life_steps=3, per_capacity=True, reorder_every_n_steps=5),
        model="stacked",
        options=(("num_experts", 12), ("shift_every", 5)),
        world_size=3,
        expert_parallel=3,
    ),
}

SHORT = {"soft, decayed"}


def kill(step: int, **where: Any) -> Kill:
    return Kill(phase="after_batch_end", step=step, settle=10.0, **where)


def plans(life: AttemptResult, rank: int = 0) -> list[str]:
    """Hashes of the plans that a life followed, in order: of plan and popularity, so that they are equal only if both are."""
    said = re.findall(r"(?:INFO:\S+?plan |, plan )([0-9a-f]{8})\b(?!.*dense after 0)", life.log(rank))
    return [each for i, each in enumerate(said) if i == 0 or said[i - 1] != each]


def follows(lives: Sequence[AttemptResult], undisturbed: list[str]) -> bool:
    """Whether every life followed a stretch of the plans of the undisturbed run."""
    for life in lives:
        followed = plans(life)
        start = undisturbed.index(followed[0]) if followed[0] in undisturbed else 0
        if followed != undisturbed[start : start + len(followed)]:
            return False
    return True


def alone(campaigns: Campaigns, setup: Setup) -> AttemptResult:
    """A run without kills, an epoch longer: windows start at other steps after a restart, so a plan may start later."""
    (life,) = campaigns.run(replace(setup, epochs=setup.epochs + 1))
    return life


def orders(life: AttemptResult) -> set[tuple[frozenset[str], ...]]:
    """Operators that committed windows took in full, slot by slot."""
    view = RunView.open(open_backend(checkpoints(life.workdir).as_uri()))
    commits = [generation.commit for generation in view.generations() if generation.commit is not None]
    return {_order(view, commit) for commit in commits if len(commit.steps) > 1}


def _order(view: RunView, commit: Commit) -> tuple[frozenset[str], ...]:
    ranks = [view.read_marker(commit, rank).segments for rank in range(commit.world_size)]
    slots = [[record for segment in slot for record in segment.records] for slot in zip(*ranks, strict=True)]
    return tuple(frozenset(record.operator for record in slot if record.kind == "full") for slot in slots)


@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.soak) for name in VARIANTS]
)
def test_a_resumed_run_follows_the_plans_of_the_undisturbed_run(campaigns: Campaigns, name: str) -> None:
    """The order changes again and again; killed before, in and after windows with a changed order, also in replay.

    The runs end with the same bits, and each plan is made of the same popularity, to the last bit: every step's
    tokens were counted once, whether they were seen once, twice, or again in replay.
    """
    setup = VARIANTS[name]
    longer = alone(campaigns, setup)
    assert len(orders(longer)) >= 2, "it is not only the counts that change"
    lives = campaigns.check(setup, kill(11), Kill(phase="batch_end", batches=2))
    assert follows(lives, plans(longer)), [plans(longer), *map(plans, lives)]
    assert len({plan for life in lives for plan in plans(life)}) >= 3, "the order changes in mid-run"
    assert all(plans(life, rank) == plans(life) for life in lives for rank in range(setup.world_size))


def _restore_nothing(meter: Any, state: Any) -> bool:
    return True


@pytest.mark.soak
def test_without_the_journal_other_plans_are_followed(campaigns: Campaigns) -> None:
    """The ablation: the comparison of plans can fail."""
    setup = VARIANTS["soft, decayed"]
    forgetful = Seam(
        module="lightning_moe_ckpt.planning._measures",
        attribute="PopularityMeter.restore_measure",
        replacement=_restore_nothing,
    )
    lives = campaigns.run(setup, kill(11), seams=[forgetful])
    assert not follows(lives, plans(alone(campaigns, setup)))


def test_thresholds_that_nothing_exceeds_keep_the_first_order(campaigns: Campaigns) -> None:
    """The user's, not the paper's."""
    setup = shifting(Popularity(reorder_every_n_steps=5, reorder_threshold=1e9, reorder_fraction=1.0), epochs=1)
    (life,) = campaigns.run(setup)
    assert len(plans(life)) == 1


def test_another_measure_starts_anew(campaigns: Campaigns) -> None:
    """A run that goes on with other settings stays exact; what was measured otherwise is not mixed in."""
    hard = VARIANTS["hard"]
    assert hard.checkpointing is not None
    soft = replace(hard.checkpointing, popularity=Popularity(counts="soft", reorder_every_n_steps=5))
    lives = campaigns.check_stages(replace(hard, epochs=1), replace(hard, checkpointing=soft))
    assert "popularity is measured otherwise than by the run before" in lives[-1].log()
    assert len(plans(lives[-1])) >= 2
