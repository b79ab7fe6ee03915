"""Killed runs of partial policies, drawn: what each life begins with, and the tokens that were lost, are worked out apart."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from door import Phase
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from typing_extensions import override

from campaign._campaign import Campaigns
from campaign._models import build
from campaign._partial_runs import NUM_EXPERTS, Machines, restarts, train_partial, two_level_setup
from campaign._training import Optimizer, Setup, make_optimizer
from campaign.test_selective import selective_setup
from lightning_moe_ckpt.testing import Attempt, Kill, Seam

PHASES: list[Phase] = [
    "batch_start",
    "forward",
    "after_backward",
    "before_optimizer_step",
    "batch_end",
    "after_batch_end",
]
TOGETHER: list[Phase] = ["after_backward", "before_optimizer_step"]
"""Those in which all ranks have written down the step before."""
LATE, BASE = "dense.bias", "dense.weight"
"""Parameter that joins the optimizer late, if one does."""


@dataclass(frozen=True)
class Case:
    """A training, its machines, and where its lives end."""

    setup: Setup
    lost: tuple[tuple[int, ...], ...]
    """Nodes that are lost with each life."""
    replicas: int
    kills: tuple[Kill, ...]
    frozen: tuple[int, ...] = ()
    """Experts that do not train."""
    joins: int | None = None
    """Step in which a parameter joins the optimizer."""
    frozen_base: bool = False
    """Whether what is no expert has a weight that does not train."""


def draw(seed: int) -> Case:
    """One of any policy whose generations hold some experts."""
    draw = random.Random(seed)
    world, experts = draw.choice([(1, 1), (1, 1), (3, 1), (3, 3), (4, 2)])
    models: list[Literal["stacked", "lists", "layers"]] = ["stacked", "lists", "layers"]
    model = draw.choice(models if experts == 1 else models[:1])
    if model == "stacked" and draw.random() < 0.5:
        setup = selective_setup(world, experts, local=draw.randint(2, 4), remote=draw.randint(1, 2))
    else:
        k = draw.randint(1, 2)
        select = draw.choice(["sequential", "load_aware"])
        setup = two_level_setup(world, experts, k=k, snapshot_k=k + draw.randint(0, 2), select=select)
        setup = replace(setup, model=model, options=(("num_experts", 4),) if model == "layers" else setup.options)
    joins = draw.randint(0, 8) if draw.random() < 0.2 else None
    if joins is not None:
        setup = replace(setup, scheduler="none")  # one of torch's keeps a rate for each group that it was made with
    kills = sorted(draw.sample(range(1, 12), draw.randint(1, 3)))
    nodes = range(world)
    return Case(
        setup=setup,
        lost=tuple(tuple(draw.sample(nodes, draw.choice([0, 1, world]))) for _ in kills),
        replicas=draw.choice([0, 1]) if world > 1 else 0,
        kills=tuple(
            Kill(
                phase=draw.choice(PHASES if world == 1 else TOGETHER),
                step=step,
                settle=draw.choice([0.0, 20.0]),
                rank=draw.randrange(world),
            )
            for step in kills
        ),
        frozen=tuple(draw.sample(range(NUM_EXPERTS), draw.randint(1, 3)))
        if model == "lists" and draw.random() < 0.7
        else (),
        joins=joins,
        frozen_base=random.Random(-1 - seed).random() < 0.4,
    )


class Joins(Callback):
    """Adds a parameter to the optimizer in a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        if trainer.global_step == self._step:
            trainer.optimizers[0].add_param_group({"params": [pl_module.get_parameter(f"model.{LATE}")]})


def train_drawn(case: Case, machines: Machines, life: Attempt) -> Mapping[str, Any]:
    """Train with what is frozen, and what joins."""

    def build_frozen(name: str, **options: Any) -> nn.Module:
        model = build(name, **options)
        for index in case.frozen:
            model.moe.experts[index].requires_grad_(False)  # type: ignore[union-attr, index]
        if case.frozen_base:
            dict(model.named_parameters()).get(BASE, next(model.parameters())).requires_grad_(False)
        return model

    def optimize(name: Optimizer, module: LightningModule) -> torch.optim.Optimizer:
        if case.joins is None:
            return make_optimizer(name, module)
        return torch.optim.AdamW(
            [parameter for name, parameter in module.named_parameters() if not name.endswith(LATE)], lr=3e-3
        )

    Seam(module="campaign._training", attribute="build", replacement=build_frozen).apply()
    Seam(module="campaign._training", attribute="make_optimizer", replacement=optimize).apply()
    return train_partial(case.setup, machines, life, *([] if case.joins is None else [Joins(case.joins)]))


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 100))])
def test_drawn_runs_begin_again_as_promised(campaigns: Campaigns, folder: Path, seed: int) -> None:
    """Every operator of every life has the bits that it had when it was taken, and lost tokens add up."""
    case = draw(seed)
    machines = Machines(folder, tuple(range(case.setup.world_size)), lost=case.lost, replicas=case.replicas)
    found = restarts(campaigns, case.setup, machines, *case.kills, fit=partial(train_drawn, case, machines))
    for life in range(1, len(case.kills) + 1):
        found.require(life)
    if case.joins is None:
        found.require_accounting()
