"""What ranks find out of an optimizer each by itself holds for all of them, and a copy asks no other rank for anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from campaign._optimizers import ByHand, Lamb
from launcher import run_world
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim import Adagrad, AdamW

from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.errors import UnsupportedOptimizer
from lightning_moe_ckpt.operators import StateSchema, agreed_schema, register_optimizer
from lightning_moe_ckpt.parallel import build_groups

WORLD = 3


def _into(update: Tensor) -> None:
    dist.all_gather_into_tensor(torch.empty(WORLD * update.numel()), update.view(-1))


ASKS: dict[str, Callable[[Tensor], Any]] = {
    "all_reduce": dist.all_reduce,
    "asynchronous": lambda update: dist.all_reduce(update, async_op=True).wait(),
    "all_gather": lambda update: dist.all_gather([torch.empty_like(update) for _ in range(WORLD)], update),
    "all_gather_into_tensor": _into,
    "broadcast": lambda update: dist.broadcast(update, 0),
    "point to point": lambda update: dist.isend(update, (dist.get_rank() + 1) % WORLD),
    "functional": lambda update: functional.all_reduce(update, "sum", dist.group.WORLD),  # type: ignore[arg-type]
    "objects": lambda _: dist.all_gather_object([None] * WORLD, {}),
    "barrier": lambda _: dist.barrier(),
}


class Sharing(ByHand):
    """Asks other ranks in its step, as Muon does where it is distributed."""

    def __init__(self, params: Any, ask: str, *, catches: bool) -> None:
        super().__init__(params)
        self.ask, self.catches = ask, catches

    def scaled(self, param: Tensor, update: Tensor) -> Tensor:
        try:
            ASKS[self.ask](update)
        except RuntimeError:
            if not self.catches:
                raise
        return update


class Layer(nn.Module):
    """A stack of matrices, and one."""

    def __init__(self) -> None:
        super().__init__()
        self.stack, self.matrix = nn.Parameter(torch.ones(3, 4, 5)), nn.Parameter(torch.ones(4, 5))


def refused(make: Callable[[nn.Module], StateSchema], module: nn.Module | None = None) -> tuple[str, str]:
    """The coupling that ranks agree on, and why they refuse."""
    module = Layer() if module is None else module
    try:
        return agreed_schema(lambda: make(module), module, Exchange(build_groups())).reach.coupling, ""
    except UnsupportedOptimizer as error:
        return "", str(error)


@pytest.mark.filterwarnings("ignore:.*all_gather_into_tensor.*")
def test_an_optimizer_that_asks_other_ranks_is_refused_and_none_waits() -> None:
    """Also if one rank alone would ask, and if the class takes the failure for something else."""

    def work(rank: int) -> list[str]:
        told = [
            refused(lambda module, ask=ask: StateSchema.of(Sharing(module.parameters(), ask, catches=False)))[1]  # type: ignore[misc]
            for ask in ASKS
        ]
        alone = Sharing if rank == 1 else lambda params, *_, **__: ByHand(params)
        told.append(refused(lambda module: StateSchema.of(alone(module.parameters(), "barrier", catches=True)))[1])
        register_optimizer(Sharing, like=AdamW)
        in_parts = refused(
            lambda module: StateSchema.of(Sharing(module.parameters(), "all_gather", catches=True), in_parts=True)
        )
        assert refused(lambda module: StateSchema.of(Sharing(module.parameters(), "barrier", catches=True)))[1] == ""
        return [*told, in_parts[1]]

    for told in run_world(WORLD, work):
        assert all("`Sharing` communicates in its step (`" in each for each in told), told
        assert all("DenseCheckpoint" in each for each in told)


def test_the_widest_coupling_of_all_ranks_holds() -> None:
    """As if each had found it."""

    def work(rank: int) -> tuple[str, str]:
        cls = type("Made", (Lamb if rank == 2 else ByHand,), {})
        return refused(lambda module: StateSchema.of(cls(module.parameters()), in_parts=True))

    assert run_world(WORLD, work) == [("parameter", "")] * WORLD


class Keeps(ByHand):
    """Keeps a third average where it is told to."""

    def scaled(self, param: Tensor, update: Tensor) -> Tensor:
        if param.ndim == 2 and self.param_groups[0]["more"]:
            self.state[param]["third"] = update.clone()
        return update


def test_ranks_that_keep_other_states_of_a_parameter_are_refused_by_name() -> None:
    """On every rank, with the parameter and what it keeps."""

    def work(rank: int) -> tuple[str, str]:
        def make(module: nn.Module) -> StateSchema:
            optimizer = Keeps(module.parameters())
            optimizer.param_groups[0]["more"] = rank == 1
            return StateSchema.of(optimizer)

        return refused(make)

    for _, told in run_world(WORLD, work):
        assert "`matrix` [4, 5] on rank 0" in told
        assert "`third` (float32 as the parameter)" in told
        assert "rank 1" in told


def test_state_that_a_constructor_makes_in_shards_is_tried() -> None:
    """Also on a rank without rows."""

    def work(_: int) -> tuple[str, str]:
        def make(module: nn.Module) -> StateSchema:
            fully_shard(module)
            return StateSchema.of(Adagrad(module.parameters(), initial_accumulator_value=0.1), in_parts=True)

        return refused(make, nn.Linear(5, 2, bias=False))

    assert run_world(WORLD, work) == [("element", "")] * WORLD


def test_a_rank_that_refuses_ends_all() -> None:
    """With its own words."""

    def work(rank: int) -> tuple[str, str]:
        more = {"capturable": True} if rank == 1 else {}
        return refused(lambda module: StateSchema.of(torch.optim.RMSprop(module.parameters(), **more)))

    assert all(told.startswith("rank 1: `RMSprop`, group 0, cannot") for _, told in run_world(WORLD, work))
