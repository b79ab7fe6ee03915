"""Without any one of the mechanisms a resumed run is not exact. This shows that the campaigns can see.

Every ablation has its control, the same run with the mechanism in place, which is exact. Tests of precisions and of
sparse runs have most of them already, and `make soak` has all. An ablation says what tests can see, and changes with them:
an ordinary run has one of replay, one of random state, and one of what a rank gets from others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch

from campaign._campaign import Campaigns
from campaign._training import Checkpointing, Setup
from lightning_moe_ckpt.testing import Kill, Seam

SPARSE = Setup(checkpointing=Checkpointing(policy="sparse", window=3))
KILL = Kill(phase="after_batch_end", step=6, settle=10.0)
SHARED = Setup(world_size=3, bucket_nbytes=(2048, 4096), checkpointing=Checkpointing(policy="dense"))


def _no_norm(life: Any, step: int) -> Any:
    return _outcome_without(life, step, "grad_norm")


def _no_found_inf(life: Any, step: int) -> Any:
    return _outcome_without(life, step, "found_inf")


def _outcome_without(life: Any, step: int, name: str) -> Any:
    outcome = life.replay.outcome(step) if life.replay is not None else None
    return None if outcome is None else {**outcome, name: None}


def _no_random_state(*args: Any) -> list[str]:
    """Restores nothing, and misses nothing."""
    return []


def _everything_low(probe: Any) -> dict[str, torch.dtype]:
    return dict.fromkeys(probe._params, torch.bfloat16)


def _no_weights_of_others(_params: Any) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """A run in which one mechanism matters, and that mechanism taken away."""

    setup: Setup
    seams: Sequence[Seam] = ()
    without: Setup | None = None
    """The run without the mechanism, where no seam but an option takes it away."""


OUTCOME = partial(Seam, module="lightning_moe_ckpt.recovery._replay", attribute="Repeats.outcome")
ABLATIONS = {
    "norm": Ablation(
        setup=replace(SPARSE, clip=0.1),
        seams=[OUTCOME(replacement=_no_norm)],
    ),
    "found_inf": Ablation(
        setup=replace(SPARSE, precision="16-mixed", overflow_steps=(3, 4, 5, 6, 7)),
        seams=[OUTCOME(replacement=_no_found_inf)],
    ),
    "random_state": Ablation(
        setup=SPARSE,
        seams=[
            Seam(
                module="lightning_moe_ckpt.fit._data",
                attribute="restore_rng",
                replacement=_no_random_state,
            )
        ],
    ),
    "compute_precision": Ablation(
        setup=replace(SPARSE, precision="bf16-mixed").with_options(gate_fp32=True),
        seams=[
            Seam(
                module="lightning_moe_ckpt.operators._parameters",
                attribute="ComputeDtypeProbe.verdict",
                replacement=_everything_low,
            )
        ],
    ),
    # Each rank has its own pieces of what was loaded, and of other ranks' what the module was made with.
    "weights_of_owners": Ablation(
        setup=replace(SHARED, shard_optimizer=True),
        seams=[
            Seam(module="lightning_moe_ckpt.recovery._replay", attribute="complete", replacement=_no_weights_of_others)
        ],
    ),
    # The buckets of a life are larger than those of the one before, as those of a DDP that restarts are smaller.
    "ordered_reduction": Ablation(setup=SHARED, without=replace(SHARED, strategy="moe_fast")),
}
SHORT = {"norm", "random_state", "weights_of_owners"}


@pytest.mark.soak
@pytest.mark.parametrize("name", ABLATIONS)
def test_with_the_mechanism_the_run_is_exact(campaigns: Campaigns, name: str) -> None:
    """The control; others have the same in every run, `tests/parallel/test_reducer.py` the sizes of buckets."""
    campaigns.check(ABLATIONS[name].setup, KILL)


@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.soak) for name in ABLATIONS]
)
def test_without_the_mechanism_the_run_is_not_exact(campaigns: Campaigns, name: str) -> None:
    """Some parameter ends with other bits, or would if the restart trained on other data."""
    ablation = ABLATIONS[name]
    with pytest.raises(AssertionError, match=r"differences from the fault-free run(.|\n)*param/|OtherData"):
        campaigns.check(ablation.without or ablation.setup, KILL, seams=ablation.seams)
