"""Draws runs whose lives are in other layouts each, and where these end."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from door import Phase

from campaign._campaign import lose_memory
from campaign._topologies import NUM_EXPERTS, Layout, Leg, Trip
from campaign._training import Checkpointing
from lightning_moe_ckpt.testing import Kill

LAYOUTS = (
    *(Layout(ranks=ranks) for ranks in (1, 2, 3, 4)),
    *(Layout(ranks=ranks, experts=experts) for ranks, experts in ((2, 2), (4, 2), (4, 4))),
    *(Layout(ranks=ranks, stages=stages) for ranks, stages in ((2, 2), (3, 3), (4, 2))),
    Layout(ranks=4, experts=2, stages=2),
    *(Layout(ranks=ranks, zero=True) for ranks in (2, 3, 4)),
    Layout(ranks=4, experts=2, zero=True),
    *(Layout(ranks=ranks, sharding="fsdp2") for ranks in (2, 3, 4)),
)
PHASES: tuple[Phase, ...] = ("batch_start", "forward", "after_backward", "before_optimizer_step", "batch_end")


@dataclass(frozen=True)
class Journeys:
    """A drawn run, its lives, and those before which the memory of all nodes is lost."""

    trip: Trip
    legs: tuple[Leg, ...]
    lost: tuple[int, ...]

    def between(self, workdir: Path, index: int) -> None:
        """What happens between two lives."""
        if index in self.lost:
            lose_memory(workdir)


def draw_journey(seed: int) -> Journeys:
    """Return the case of a number, the same every time: each layout is left, and gone to, in turn."""
    rng = random.Random(f"topologies {seed}")
    number = rng.choice([2, 3, 3, 4])
    layouts = [LAYOUTS[seed % len(LAYOUTS)], *(rng.choice(LAYOUTS) for _ in range(number - 1))]
    accumulate = 1 if any(layout.stages > 1 for layout in layouts) else rng.choice([1, 1, 2])
    trip = Trip(
        checkpointing=_policy(rng),
        samples=60 * accumulate,
        global_batch=12 * accumulate,
        accumulate=accumulate,
        precision=rng.choice(["32-true", "32-true", "bf16-mixed"]),
        clip=rng.choice([0.5, 0.5, None]),
        clip_algorithm=rng.choice(["norm", "norm", "value"]),
        optimizer=rng.choice(["adamw", "adamw", "adamw_foreach", "adamw_amsgrad", "adam"]),
        top_k=rng.choice([1, 2]),
        frozen=rng.random() < 0.15,
    )
    steps = sorted(rng.sample(range(1, trip.steps), number - 1))
    kills = [_kill(rng, step, layout) for step, layout in zip(steps, layouts, strict=False)]
    legs = [Leg(layout=layout, kill=kill) for layout, kill in zip(layouts, [*kills, None], strict=True)]
    return Journeys(trip, tuple(legs), tuple(i for i in range(1, number) if rng.random() < 0.5))


def _policy(rng: random.Random) -> Checkpointing:
    """One whose generations are whole, wherever a life begins."""
    options: list[dict[str, Any]] = [
        {"policy": "dense", "every_n_steps": rng.randint(1, 3)},
        {"policy": "differential", "every_n_steps": rng.randint(2, 6), "batch": rng.randint(1, 3)},
        {"policy": "partial", "k": NUM_EXPERTS},
        {"policy": "selective", "local_budget": 10**8, "remote_budget": 10**8},
        {"policy": "sparse", "window": 1},
    ]
    return Checkpointing(**rng.choice([options[0], *options]))


def _kill(rng: random.Random, step: int, layout: Layout) -> Kill:
    phase = rng.choice(PHASES)
    settle = 0.0 if phase == "batch_start" else rng.choice([0.0, 10.0])
    return Kill(phase=phase, step=step, rank=rng.randrange(layout.ranks), settle=settle)
