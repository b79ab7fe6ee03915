"""Any optimizer: what it keeps is found out by trying, and restored bit for bit after kills."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
import torch

from campaign._campaign import Campaigns
from campaign._draw import draw, others_of
from campaign._optimizers import BLOCKS, ELEMENT, MATRIX, OTHERS, PARAMETER, TABLELESS
from campaign._training import Checkpointing, Module, Setup
from campaign.test_configurations import failure
from lightning_moe_ckpt.testing._attempts import Attempt
from lightning_moe_ckpt.testing._kill import Kill

DENSE = Setup(scheduler="none", checkpointing=Checkpointing(policy="dense"))
KILLS = [Kill(phase="batch_end", step=4), Kill(phase="forward", step=7)]


KINDS = (ELEMENT, MATRIX, PARAMETER)
FIRST = {next(iter(kind)) for kind in KINDS}
"""An optimizer for each kind of coupling that leaves parts."""


ALIKE = {*TABLELESS, "adagrad_fused"} - {"rmsprop_foreach", "asgd"}
"""Classes of torch that update elements alone, as `operators/test_optimizer_probe.py` finds of each; two others stand for them."""


def once(optimizers: Iterable[str]) -> list[Any]:
    """All of them, of which an ordinary run has one of each kind, and those whose state is one part."""
    parts = {name for kind in KINDS for name in kind} - FIRST
    return [pytest.param(name, marks=[pytest.mark.soak] * (name in parts)) for name in optimizers]


@pytest.mark.parametrize("optimizer", once(OTHERS))
def test_everything_at_once_is_exact_for_any_coupling(campaigns: Campaigns, optimizer: str) -> None:
    """Tensors of any shape, numbers and `None`, in the optimizer's own order. The test below has the other optimizers, in parts."""
    clip = None if optimizer == "lbfgs" else DENSE.clip
    campaigns.check(replace(DENSE, optimizer=optimizer, clip=clip), *KILLS)


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [
        *(pytest.param("stacked", each, marks=[pytest.mark.soak] * (each in ALIKE)) for kind in KINDS for each in kind),
        *(
            pytest.param("lists", each, marks=[pytest.mark.soak] * (each not in FIRST))
            for kind in KINDS
            for each in kind
        ),
    ],
)
def test_parts_are_exact_if_what_is_updated_together_is_restored_together(
    campaigns: Campaigns, optimizer: str, model: Literal["lists", "stacked"]
) -> None:
    """Experts restored from different steps of a window, in tensors of their own and stacked in one."""
    sparse = replace(DENSE, checkpointing=Checkpointing(policy="sparse", window=3))
    campaigns.check(replace(sparse, optimizer=optimizer, model=model), *KILLS)


@pytest.mark.parametrize("optimizer", ["rmsprop", "by_hand", "adafactor"])
def test_differences_between_full_copies_are_exact_too(campaigns: Campaigns, optimizer: str) -> None:
    """Of a class that is not Adam each difference is the whole state."""
    differential = Checkpointing(policy="differential", every_n_steps=4, batch=2)
    campaigns.check(replace(DENSE, optimizer=optimizer, checkpointing=differential), *KILLS)


@pytest.mark.parametrize("optimizer", BLOCKS)
@pytest.mark.parametrize("policy", ["dense", "differential", "sparse"])
def test_tensors_made_of_others_come_back(
    campaigns: Campaigns, optimizer: str, policy: Literal["dense", "differential", "sparse"]
) -> None:
    """As the same class: elements of few bits with scales of blocks, which straddle experts."""
    large = replace(DENSE, optimizer=optimizer, model="stacked", options=(("expansion", 8),))
    every = 1 if policy == "sparse" else 2
    campaigns.check(replace(large, checkpointing=Checkpointing(policy=policy, every_n_steps=every)), *KILLS)


SPARSE = Checkpointing(policy="sparse", window=2)
ELSEWHERE = {
    "three ranks, number of steps": Setup(world_size=3, optimizer="by_hand", checkpointing=SPARSE),
    "three ranks, statistics of rows": Setup(world_size=3, optimizer="adafactor", checkpointing=DENSE.checkpointing),
    "experts of other ranks": Setup(
        model="stacked",
        options=(("num_experts", 6),),
        world_size=3,
        expert_parallel=3,
        optimizer="by_hand",
        checkpointing=SPARSE,
    ),
    "stacks of other ranks, taken whole": Setup(
        model="stacked",
        options=(("num_experts", 6),),
        world_size=3,
        expert_parallel=3,
        optimizer="row_by_row",
        checkpointing=SPARSE,
    ),
    "an operator cut between matrices": Setup(
        model="stacked",
        optimizer="per_matrix",
        checkpointing=Checkpointing(policy="sparse", window="auto", budget_nbytes=20_000),
    ),
    "an fp16 scaler": Setup(precision="16-mixed", optimizer="radam", overflow_steps=(3,), checkpointing=SPARSE),
    "accumulation": Setup(accumulate=2, batches=8, optimizer="by_hand", checkpointing=SPARSE),
    "averages": Setup(averaged="ema", optimizer="rmsprop", checkpointing=SPARSE),
}


@pytest.mark.parametrize("setup", ELSEWHERE.values(), ids=ELSEWHERE)
def test_what_else_varies_makes_no_difference(campaigns: Campaigns, setup: Setup) -> None:
    """Ranks, experts among ranks, skipped steps, accumulation and averages."""
    campaigns.check(setup, *KILLS)


class Switching(Module):
    """Validates with the weights that its optimizer has for that."""

    def on_validation_start(self) -> None:
        optimizer: Any = self.trainer.optimizers[0]
        optimizer.eval()

    def on_validation_end(self) -> None:
        optimizer: Any = self.trainer.optimizers[0]
        optimizer.train()


class Rare(Module):
    """Trains an embedding by sparse gradients."""

    def configure_model(self) -> None:
        super().configure_model()
        self.table = next(each for each in self.modules() if isinstance(each, torch.nn.Embedding))
        self.table.sparse = True

    def configure_optimizers(self) -> Any:
        return torch.optim.SparseAdam([self.table.weight], lr=1e-2)


@dataclass(frozen=True, kw_only=True)
class Trained(Setup):
    """Another module trains."""

    module: type[Module] = Module

    def make_module(self, life: Attempt) -> Module:
        return self.module(self, life)


@pytest.mark.parametrize(
    ("optimizer", "model", "policy"),
    [
        ("nadam", "stacked", "partial"),
        ("muon", "lists", "selective"),
        ("adafactor", "lists", "partial"),
        pytest.param("nadam", "stacked", "selective", marks=pytest.mark.soak),
        pytest.param("muon", "lists", "partial", marks=pytest.mark.soak),
        pytest.param("adafactor", "lists", "selective", marks=pytest.mark.soak),
    ],
)
def test_experts_of_different_steps_go_on(
    campaigns: Campaigns,
    policy: Literal["partial", "selective"],
    optimizer: str,
    model: Literal["lists", "stacked"],
) -> None:
    """With the state that each had, statistics of rows too."""
    checkpointing = Checkpointing(policy=policy, every_n_steps=2)
    setup = replace(DENSE, optimizer=optimizer, model=model, checkpointing=checkpointing)
    *_, last = campaigns.run(setup, *KILLS)
    assert last.steps()[-1] == DENSE.steps


@pytest.mark.parametrize("optimizer", ["modes", *(["schedule_free"] if "schedule_free" in OTHERS else [])])
def test_modes_of_an_optimizer_give_validation_its_weights(campaigns: Campaigns, optimizer: str) -> None:
    """Each validation of a resumed run too."""
    setup = Trained(module=Switching, optimizer=optimizer, scheduler="none", checkpointing=DENSE.checkpointing)
    campaigns.check(setup, *KILLS)


def test_sparse_gradients_are_tried_where_dense_ones_are_refused(campaigns: Campaigns) -> None:
    """As `SparseAdam` does."""
    campaigns.check(Trained(module=Rare, scheduler="none", clip=None, checkpointing=DENSE.checkpointing), *KILLS)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(200))
def test_drawn_runs_are_exact_with_others(campaigns: Campaigns, seed: int) -> None:
    """With all that a user may vary; at most every eighth run is of a kind that takes no other."""
    case = draw(seed)
    can = others_of(case.setup) or [case.setup.other]
    setup = replace(case.setup, other=can[-1 - seed % min(5, len(can))])
    found = failure(campaigns, replace(case, setup=setup))
    assert found is None, found
