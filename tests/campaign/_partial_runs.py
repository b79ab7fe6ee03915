"""A partial run whose lives write down what they begin with, the state at every boundary, and every token."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from door import DIRECTORY_VARIABLE, CheckpointCallback, Fit
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from campaign._campaign import Campaigns
from campaign._models import ListMoE
from campaign._partial_damage import Damage, damage, list_memory
from campaign._promises import Restarts
from campaign._states import state_of
from campaign._training import Checkpointing, Setup, quiet
from lightning_moe_ckpt.moe._dispatch import Dispatch, plan_dispatch
from lightning_moe_ckpt.operators import OperatorSet, discover
from lightning_moe_ckpt.testing import Attempt, Kill, Seam

KILL = Kill(phase="forward", step=9)
NUM_EXPERTS = 6


def partial_setup(world_size: int = 1, expert_parallel: int = 1, **options: object) -> Setup:
    """Twelve steps with a generation after each, all of which stay; six or eight experts."""
    return Setup(
        model="stacked",
        options=(("num_experts", 8 if world_size == 4 else NUM_EXPERTS),),
        world_size=world_size,
        expert_parallel=expert_parallel,
        batches=12,
        epochs=1,
        validate_every=None,
        checkpointing=replace(Checkpointing(policy="partial", keep=100), **options),  # type: ignore[arg-type]
    )


def two_level_setup(world_size: int, expert_parallel: int, **options: object) -> Setup:
    """Two experts to memory, one of them to storage."""
    return partial_setup(world_size, expert_parallel, **{"k": 1, "snapshot_k": 2, **options})


def restarts(
    campaigns: Campaigns, setup: Setup, machines: Machines, *kills: Kill, fit: Fit | None = None, **options: Any
) -> Restarts:
    """Run and kill; the last attempt finishes."""
    lives = campaigns.run(setup, *kills, fit=fit or partial(train_partial, setup, machines), **options)
    assert [life.outcome for life in lives] == [*["killed"] * len(kills), "finished"], lives[-1].log()
    return Restarts(lives)


@dataclass(frozen=True)
class Machines:
    """Where ranks run, and which nodes are lost with each life."""

    folder: Path
    placed: tuple[int, ...]
    """Node of each rank."""
    lost: tuple[tuple[int, ...], ...] = ()
    """Nodes that are lost with the first life, the second and so on; others take their places."""
    replicas: int | Literal["auto"] = "auto"
    damaged: Damage | None = None
    """Where a bit of an expert turns before the second life."""

    def memory(self, life: Attempt) -> Path:
        """Shared memory of the machine that a rank runs on."""
        return self.folder / self._name(self.placed[life.rank], life.index)

    def memories(self, life: Attempt) -> list[Path]:
        """Shared memory of all machines."""
        return [self.folder / self._name(node, life.index) for node in sorted(set(self.placed))]

    def _name(self, node: int, life: int) -> str:
        return f"node{node}.{sum(node in lost for lost in self.lost[:life])}"


class TokenLog:
    """Every token that is routed to an expert of one of the package's layers, or of a `ListMoE`, as the place of the expert."""

    def __init__(self) -> None:
        self.places: list[int] = []
        """Of tokens that reach it, over all layers, since the last step."""
        self.routed: list[int] = []
        """The same with those that are dropped over capacity."""
        self._offset = 0

    def attach(self, found: OperatorSet, module: torch.nn.Module) -> None:
        """Tell the layers of a model apart."""
        for fqn, offset in found.count_offsets.items():
            module.get_submodule(fqn).register_forward_pre_hook(lambda *_, at=offset: self._enter(at))

    def _enter(self, offset: int) -> None:
        self._offset = offset

    def install(self) -> None:
        """For the rest of this process."""
        plan, choose = plan_dispatch, ListMoE._choose

        def plan_logged(topk_idx_TK: Tensor, *args: Any) -> Dispatch:
            dispatch, chosen = plan(topk_idx_TK, *args), topk_idx_TK.t().reshape(-1)
            self._add(chosen[dispatch.slots], chosen)
            return dispatch

        def choose_logged(layer: ListMoE, probs_TE: Tensor) -> tuple[Tensor, Tensor]:
            weight_T, expert_T = choose(layer, probs_TE)
            self._add(expert_T, expert_T)
            return weight_T, expert_T

        Seam(module="lightning_moe_ckpt.moe._layer", attribute="plan_dispatch", replacement=plan_logged).apply()
        Seam(module="campaign._models", attribute="ListMoE._choose", replacement=choose_logged).apply()

    def _add(self, reached: Tensor, routed: Tensor) -> None:
        self.places.extend((reached + self._offset).tolist())
        self.routed.extend((routed + self._offset).tolist())


class RecordsPartial(Callback):
    """Writes down the state at every boundary and when training begins, live capacities, and every token.

    Args:
        own: the checkpoint callback.
        life: this one.
        ep_size: expert parallelism.
        tokens: where they are logged.
    """

    def __init__(self, own: CheckpointCallback, life: Attempt, ep_size: int, tokens: TokenLog) -> None:
        self._own, self._life, self._ep_size, self._tokens = own, life, ep_size, tokens
        self._found: OperatorSet | None = None

    def file(self, what: str) -> Path:
        """Of this rank in this life."""
        return self._life.workdir / f"partial.{self._life.index}.{self._life.rank}.{what}"

    def _keep(self, what: str, trainer: Trainer, pl_module: LightningModule) -> None:
        torch.save(state_of(pl_module, trainer.optimizers[0], self._ep_size), self.file(what))

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        if self._found is None:
            self._found = discover(pl_module, ep_size=self._ep_size)
            self._tokens.attach(self._found, pl_module)
            self._keep("restored", trainer, pl_module)
            self._keep(f"state.{trainer.global_step}", trainer, pl_module)
            sizes = {op.name: op.numel for op in self._found if op.kind == "expert"}
            layers = [[layer.prefix, layer.num_experts] for layer in self._found.layers]
            self.file("experts").write_text(json.dumps({"sizes": sizes, "layers": layers}))
        views = {layer.prefix: layer.live_capacity for layer in self._found.layers}
        live = {prefix: view.get(pl_module) for prefix, view in views.items() if view is not None}
        self.file(f"capacity.{trainer.global_step}").write_text(json.dumps(live))
        self._tokens.places.clear()
        self._tokens.routed.clear()

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        assert self._own.wait_committed()
        self.file(f"tokens.{trainer.global_step}").write_text(json.dumps(self._tokens.places))
        self.file(f"routed.{trainer.global_step}").write_text(json.dumps(self._tokens.routed))
        self._keep(f"state.{trainer.global_step}", trainer, pl_module)


def train_partial(setup: Setup, machines: Machines, life: Attempt, *others: Callback) -> Mapping[str, Any]:
    """Train on machines, with everything written down; `others` come before what writes it down."""
    quiet()
    torch.manual_seed(life.seed)
    memory = machines.memory(life)
    memory.mkdir(parents=True, exist_ok=True)
    os.environ[DIRECTORY_VARIABLE] = str(memory)
    assert setup.checkpointing is not None
    own = setup.checkpointing.make(life.url)
    assert isinstance(own, CheckpointCallback)
    own.replicas = machines.replicas
    tokens = TokenLog()
    recorder = RecordsPartial(own, life, setup.expert_parallel, tokens)
    list_memory(memory, recorder.file("held"))
    if machines.damaged is not None and life.index == 1 and life.rank == 0:
        damage(machines.damaged, machines.memories(life), life.workdir)
    tokens.install()
    callbacks = life.callbacks(*others, recorder, *setup.callbacks(life), own)
    trainer = Trainer(callbacks=callbacks, **setup.trainer_options(life))
    trainer.fit(setup.make_module(life), *setup.loaders(life))
    return {}
