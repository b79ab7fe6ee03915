"""Several ranks of a pipeline die at once, or while others repeat steps."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest

from campaign._campaign import Campaigns
from campaign._in_place import Death, Shot
from campaign.test_stages_alone import (
    DENSE,
    ELSEWHERE,
    FOUR,
    IN_ATTEMPT,
    OFTEN,
    PLACES,
    THREE,
    TOPOLOGIES,
    VALIDATED,
    Counted,
    check,
    death,
    decisions,
    drawn_setup,
    places_of,
    said,
)

AT_ONCE = {
    "apart": ((0, 2), "[0, 2]"),
    "ends": ((3, 0), "[0, 3]"),
    "neighbours": ((1, 2), "[1, 2]"),
    "first two": ((1, 0), "[0, 1]"),
    "last three": ((2, 3, 1), "[1, 2, 3]"),
    "first three": ((0, 1, 2), "[0, 1, 2]"),
    "all": ((0, 1, 2, 3), "all stages failed together"),
}
"""Stages of four that fail one after another, and what follows in the end."""


@pytest.mark.parametrize(
    "which", [pytest.param(each, marks=[] if each == "neighbours" else [pytest.mark.soak]) for each in AT_ONCE]
)
def test_several_stages_of_four(campaigns: Campaigns, which: str) -> None:
    """Each but the first dies as the one before has been replaced; neighbours, between which the log is gone, are one segment."""
    (first, *others), found = AT_ONCE[which]
    lives = check(campaigns, FOUR, [death("forward", first, nth=8), *(death("open", each, nth=1) for each in others)])
    assert decisions(lives)[0] == f"[{first}]"
    assert decisions(lives)[-1] == found


MEANWHILE = {
    "apart": ("4x1x1", [0], 3, "[3]", [0]),
    "two ranks": ("3x2x1", [1], 4, "[2]", [0]),
    "experts": ("3x1x2", [1], 4, "[2]", [0]),
    "a segment": ("4x1x1", [0, 1], 3, "[3]", [0, 1]),
    "new again": ("3x2x1", [1], 1, "[0]", []),
    "next to it": ("4x1x1", [1], 2, "[1, 2]", []),
}
"""Ranks that die one after another, one that dies while the first one's stage repeats steps, stages that begin then and that go on."""
SEEN = ["forward", "in_backward", "commit", "commit>", "in_optimizer", "boundary", "reconcile"]


@pytest.mark.parametrize(
    "place", [pytest.param(each, marks=[] if each == "in_backward" else pytest.mark.soak) for each in SEEN]
)
@pytest.mark.parametrize(
    "which", [pytest.param(each, marks=[] if each == "apart" else pytest.mark.soak) for each in MEANWHILE]
)
def test_another_stage_fails_meanwhile(campaigns: Campaigns, which: str, place: str) -> None:
    """A stage apart does not begin again: it goes on with the step that it was in."""
    name, (first, *others), last, begin, going = MEANWHILE[which]
    setup = {**TOPOLOGIES, **THREE}[name]
    deaths = [death("forward", first, nth=8), *(death("open", each, nth=1) for each in others)]
    seen = death(place, first, nth=2 * OFTEN.get(place, 1))
    deaths.append(seen if last == first else replace(seen, survives=True, shots=(Shot(rank=last),)))
    lives = check(campaigns, setup, deaths, timeout=30.0 * setup.world_size)
    size = setup.world_size // setup.stages
    assert decisions(lives)[-1] == begin
    for rank in (rank for rank in range(setup.world_size) if rank // size in going):
        assert len(re.findall(r"stage \d+ goes from step", said(lives, rank))) == 1
        if place in IN_ATTEMPT:
            assert re.search(r"stage \d+ goes on with step \d+ of those that it repeats", said(lives, rank))


@pytest.mark.parametrize("nth", [1, pytest.param(2, marks=pytest.mark.soak), pytest.param(3, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    ("place", "then"),
    [("after_backward", "[1]"), pytest.param("forward", "[1]", marks=pytest.mark.soak), ("commit>", ELSEWHERE)],
)
def test_a_stage_fails_while_all_repeat(campaigns: Campaigns, place: str, then: str, nth: int) -> None:
    """What is frozen on those that wait stays so, and becomes active as planned; what a step loads behind it, all ask each other for."""
    lives = check(campaigns, VALIDATED, [death("validation", 1, nth=2), death(place, 1, nth=nth)])
    assert decisions(lives) == [ELSEWHERE, then]


def test_a_second_failure_finds_ranks_at_a_commit(campaigns: Campaigns) -> None:
    """One of a stage that waits there dies, so that the other of it has to go back from inside its step."""
    lives = check(campaigns, TOPOLOGIES["2x2x1"], [death("commit", 0, nth=9), death("open", 2, nth=1)])
    assert decisions(lives) == ["[0]", "all stages failed together"]


@pytest.mark.soak
@pytest.mark.parametrize(
    "setup",
    [
        *THREE.values(),
        replace(VALIDATED, world_size=3, stages=3, micro_batches=4, precision="16-mixed", overflow_steps=(5, 9)),
        replace(VALIDATED, world_size=3, stages=3, micro_batches=4, precision="bf16-mixed", checkpointing=DENSE),
    ],
    ids=[*THREE, "fp16", "dense"],
)
def test_neighbours_of_three(campaigns: Campaigns, setup: Counted) -> None:
    """Stages of several ranks, validations and scales within what a segment repeats."""
    size = setup.world_size // 3
    deaths = [death("after_backward", size, nth=9), death("open", setup.world_size - 1, nth=1)]
    assert decisions(check(campaigns, setup, deaths)) == ["[1]", "[1, 2]"]


SOON = 0.05
"""Seconds within which several ranks end, at most."""


def draw_shot(draw: random.Random, ranks: Sequence[int]) -> Shot:
    """Of one of these ranks: at the same moment or soon after; a quarter stop and do not die."""
    return Shot(
        rank=draw.choice(ranks), seconds=draw.choice([0.0, draw.uniform(0.0, SOON)]), stops=draw.random() < 0.25
    )


def draw_at_once(draw: random.Random, setup: Counted) -> Death:
    """One dies anywhere, and one or two others soon after it: of the same stage, of the next, or of one further away."""
    first = death(draw.choice(places_of(setup, PLACES)), draw.randrange(setup.world_size), nth=draw.randint(1, 9))
    others = [rank for rank in range(setup.world_size) if rank != first.rank]
    chosen = draw.sample(others, min(len(others), draw.choice([1, 1, 2])))
    return replace(first, stops=draw.random() < 0.25, shots=tuple(draw_shot(draw, [each]) for each in chosen))


def draw_second(draw: random.Random, setup: Counted, before: Death) -> Death:
    """When a rank of a stage that has failed comes to a place as it repeats steps, it dies again, or one that is elsewhere, or both."""
    size = setup.world_size // setup.stages
    failed = draw.choice(before.ends)[0] // size
    at = death(draw.choice(places_of(setup, PLACES)), failed * size + draw.randrange(size), nth=draw.randint(1, 3))
    distances = sorted({abs(stage - failed) for stage in range(setup.stages)} - {0})
    distance = draw.choice(distances)  # 1 is next to it
    ranks = [rank for rank in range(setup.world_size) if abs(rank // size - failed) == distance]
    shots = (draw_shot(draw, ranks),)
    dies, another = draw.choice([(True, False), (False, True), (False, True), (True, True)])
    return replace(at, stops=draw.random() < 0.25, survives=not dies, shots=shots if another else ())


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(60))
def test_ranks_die_at_once_and_while_others_repeat_steps(campaigns: Campaigns, seed: int) -> None:
    """Whoever recovers from it, and how: the end is the same, and nobody waits for ever."""
    draw = random.Random(f"together {seed}")
    setup = drawn_setup(draw)
    deaths = [draw_at_once(draw, setup)]
    if draw.random() < 0.6:
        deaths = [replace(deaths[0], shots=())]
    if not deaths[0].shots or draw.random() < 0.5:
        deaths.append(draw_second(draw, setup, deaths[-1]))
    if draw.random() < 0.4:
        deaths.append(draw.choice([draw_at_once(draw, setup), draw_second(draw, setup, deaths[-1])]))
    try:
        lives = check(campaigns, setup, deaths)
    finally:
        print(f"{seed}: {setup}\n", *deaths, sep="\n    ")
    print(f"{seed}: {[each.ends for each in deaths]}: {decisions(lives)}")
