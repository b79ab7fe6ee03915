"""Experts in shards, some of which a generation leaves out: each comes back as it was at one step, with all that ranks hold of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from launcher import run_world
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from typing_extensions import override

from lightning_moe_ckpt.callbacks import PartialExpertCheckpoint, SelectiveExpertCheckpoint
from lightning_moe_ckpt.operators import boxes_of, memory_of

STOP = 9

State = dict[tuple[str, int | None], dict[str, Tensor]]
"""Tensors of a rank by layer part and expert, `None` for the dense part."""


def held(trainer: Trainer) -> State:
    """What this rank holds now, its rows by global expert."""
    params = dict(trainer.lightning_module.named_parameters())
    boxes, found = boxes_of(params), State()
    for fqn, param in params.items():
        tensors = {"param": param, **trainer.optimizers[0].state.get(param, {})}
        for key, tensor in tensors.items():
            own = memory_of(tensor.detach()).clone()
            is_stack = fqn.rpartition(".")[2] in {"w1", "w2", "b1", "b2"} and own.ndim > 0
            first = boxes[fqn].offset[0] if is_stack else 0
            for row, part in enumerate(own) if is_stack else [(None, own)]:
                expert = None if row is None else first + row
                found.setdefault(("", expert), {})[f"{fqn}/{key}"] = part
    return found


SEEN: dict[int, State] = {}
"""By step, in one process; what a callback keeps would be restored with it."""


class Stopped(Exception):
    pass


class Witness(Callback):
    """Looks at the state before each step, and ends the fit in an error."""

    def __init__(self, stop: int) -> None:
        self._stop = stop

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        SEEN[trainer.global_step] = held(trainer)
        if trainer.global_step == self._stop:
            raise Stopped


class Sharded(tiny.ToZero):
    """Five experts in shards, over two groups of ranks that are copies of each other if `copies` is 2."""

    def __init__(self, copies: int) -> None:
        torch.manual_seed(0)
        super().__init__(*tiny.with_experts(num_experts=5).net)
        self._copies, self._is_sharded = copies, False

    @override
    def configure_model(self) -> None:
        if not self._is_sharded:
            self._is_sharded = True
            assert self.device_mesh is not None
            shape = (self._copies, self.device_mesh.size() // self._copies)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
            fully_shard(self.net, mesh=mesh if self._copies > 1 else mesh["shard"])


def fit(callback: Callback, copies: int, ranks: int, stop: int) -> dict[int, State]:
    trainer = tiny.quiet_trainer(
        *(callback, Witness(stop)), strategy=ModelParallelStrategy(ranks, 1), devices=ranks, max_steps=STOP + 2
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with suppress(Stopped):
            trainer.fit(Sharded(copies), tiny.rows(tiny.waves(120, 8), 4, num_workers=0))
    return SEEN


MAKE: dict[str, Callable[[Path], Callback]] = {
    "partial": partial(PartialExpertCheckpoint, k=2, every_n_steps=2, overhead_target=None),
    "selective": partial(
        SelectiveExpertCheckpoint, every_n_steps=2, local_budget=9000, remote_budget=6000, overhead_target=None
    ),
}


@pytest.mark.parametrize(
    ("policy", "ranks", "copies"),
    [("partial", 4, 2), *(pytest.param(each, 3, 1, marks=pytest.mark.soak) for each in ("partial", "selective"))],
)
def test_an_expert_comes_back_as_of_one_step(policy: str, ranks: int, copies: int, tmp_path: Path) -> None:
    """On every rank that has rows of it; the dense part is as of the generation. With copies all ranks of a group agree."""

    def work(stop: int) -> dict[int, State]:
        return fit(MAKE[policy](tmp_path / "run"), copies, ranks, stop)

    through = run_world(ranks, lambda _: work(STOP), process_group=False)
    resumed = run_world(ranks, lambda _: work(0), process_group=False)
    ages: dict[int | None, set[int]] = {}
    for rank, states in enumerate(resumed):
        for (_, expert), tensors in states[min(states)].items():
            same = {
                at
                for at, then in through[rank].items()
                if all(
                    torch.equal(tensor, then["", expert].get(name, torch.empty(0))) for name, tensor in tensors.items()
                )
            }
            ages[expert] = ages.get(expert, same) & same
    assert all(len(steps) == 1 for steps in ages.values()), ages
    assert ages[None] == {8}
    assert len({*map(min, ages.values())}) > 1, f"no experts of several steps: {ages}"
