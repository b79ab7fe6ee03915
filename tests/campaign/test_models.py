"""Models and precisions that train otherwise than most: recomputed activations, no expert at all, experts without tokens,
Hugging Face's Mixtral as it is, overflows inside frozen experts, fp32 islands, and noise drawn in the forward.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from campaign._campaign import Campaigns, one_kill_per_step, require_resumed
from campaign._models import build
from campaign._training import Checkpointing, Setup
from lightning_moe_ckpt.operators import discover
from lightning_moe_ckpt.testing import Kill

SPARSE = Checkpointing(policy="sparse", window=3)
PLAIN = Setup(checkpointing=SPARSE)
FIRST_GENERATION = 7


@pytest.mark.parametrize(
    ("model", "precision", "recompute"),
    [
        ("lists", "bf16-mixed", "reentrant"),
        ("stacked", "32-true", "not_reentrant"),
        pytest.param("lists", "bf16-mixed", "not_reentrant", marks=pytest.mark.soak),
        pytest.param("stacked", "32-true", "reentrant", marks=pytest.mark.soak),
    ],
)
def test_recomputed_experts_are_replayed(campaigns: Campaigns, model: Any, precision: Any, recompute: str) -> None:
    """Forward runs twice, frozen or not, with the same dropout; the probe of dtypes sees both."""
    setup = replace(PLAIN, model=model, precision=precision).with_options(recompute=recompute)
    scripts = [[Kill(phase="forward", step=8, settle=10.0)]]
    require_resumed(campaigns.check_all(setup, scripts), scripts, after=FIRST_GENERATION)


def test_a_model_without_experts_is_replayed_block_by_block(campaigns: Campaigns) -> None:
    """Tied weights, and windows over the blocks of a dense model."""
    checkpointing = Checkpointing(policy="sparse", window=4, order="popularity")
    setup = replace(PLAIN, model="dense", precision="bf16-mixed", checkpointing=checkpointing)
    scripts = [[Kill(phase="forward", step=9, settle=10.0)]]
    require_resumed(campaigns.check_all(setup, scripts), scripts, after=FIRST_GENERATION + 1)


def test_experts_that_some_ranks_and_one_that_all_avoid_are_restored(campaigns: Campaigns) -> None:
    """Two expert-parallel groups of two; each rank avoids an expert of its own, and all avoid a fifth."""
    setup = replace(PLAIN, model="stacked", world_size=4, expert_parallel=2)
    setup = setup.with_options(num_experts=12, never_routed=True)
    campaigns.check(setup, *[Kill(phase="forward", step=step, rank=step % 4, settle=10.0) for step in (7,)])


@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["moe", "ddp_ordered"])
def test_an_overflow_in_one_expert_skips_the_same_steps_on_three_ranks(campaigns: Campaigns, strategy: Any) -> None:
    """Whether that expert is frozen or active in replay; with the ordered reduction as strategy or as hook of DDP."""
    setup = replace(PLAIN, precision="16-mixed", overflow_steps=(4, 5, 8), world_size=3, strategy=strategy)
    lives = campaigns.check(setup, Kill(phase="batch_end", step=7, rank=1, settle=10.0))
    assert lives[-1].end()["precision/scale"] < 2.0**14, "steps were skipped"


@pytest.mark.parametrize(("strategy", "words"), [("ddp", "ordered_hook"), ("moe_fast", "use 'ordered'")])
def test_a_reduction_without_order_is_named_once(campaigns: Campaigns, strategy: Any, words: str) -> None:
    """By rank 0, with the remedy; the tests above would fail if the ordered ones were named."""
    (life,) = campaigns.run(replace(PLAIN, world_size=3, strategy=strategy, epochs=1))
    assert [life.log(rank).count(words) for rank in range(3)] == [1, 0, 0]


MIXTRAL = Setup(model="mixtral", checkpointing=Checkpointing(policy="sparse", window=3, order="popularity"))


def test_a_slice_that_never_gets_a_token_survives(campaigns: Campaigns) -> None:
    """Its slice of the stacked tensors has moments of zero and decays like the rest."""
    setup = MIXTRAL.with_options(never_routed=True)
    campaigns.check_all(setup, one_kill_per_step(setup, offset=3, every=5))


@pytest.mark.parametrize(("model", "steps"), [("lists", (4, 7)), ("mixtral", (5,)), ("stacked", (6,))])
def test_a_first_slot_that_holds_only_the_expert_without_tokens(
    campaigns: Campaigns, model: str, steps: tuple[int, ...]
) -> None:
    """Nothing that is active in the first replayed step takes part in the loss; the step still has to run."""
    names = operator_names(model)
    idle = [name for name in names if name.endswith("/expert.3")]
    others = [name for name in names if name not in idle]
    schedule = (tuple(idle), tuple(others[::2]), tuple(others[1::2]))
    checkpointing = Checkpointing(policy="sparse", schedule=schedule)
    setup = replace(MIXTRAL, model=model, options=(("never_routed", True),), checkpointing=checkpointing)  # type: ignore[arg-type]
    campaigns.check_all(setup, [[Kill(phase="after_batch_end", step=step, settle=10.0)] for step in steps])


def operator_names(model: str) -> list[str]:
    """What the operators of a model are called inside the LightningModule of these tests."""
    holder = nn.Module()
    holder.model = build(model)
    return [operator.name for operator in discover(holder, ep_size=1).operators]


PRECISIONS = ["32-true", "bf16-mixed", "bf16-true", "16-mixed"]


def by_precision(*steps: int) -> list[Any]:
    """A step to be killed at for each; of the true ones runs are drawn in `test_configurations.py` too."""
    return [
        pytest.param(precision, step, marks=[pytest.mark.soak] if precision.endswith("true") else [])
        for precision, step in zip(PRECISIONS, steps, strict=True)
    ]


@pytest.mark.parametrize("model", ["lists", pytest.param("stacked", marks=pytest.mark.soak)])
def test_an_overflow_inside_a_frozen_expert_skips_the_same_steps(campaigns: Campaigns, model: Any) -> None:
    """A frozen expert computes no gradient, so the journal has to say that its overflow skipped the step.

    The one model is killed at steps 5 and 7, the other at 6 and 8.
    """
    setup = Setup(model=model, precision="16-mixed", overflow_steps=(4, 5, 8), checkpointing=SPARSE)
    scripts = one_kill_per_step(setup, offset=int(model == "stacked"), every=2)[2:4]
    lives = campaigns.check_all(setup, scripts)
    assert lives[0][-1].end()["precision/scale"] < 2.0**14, "steps were skipped"


@pytest.mark.parametrize(("precision", "step"), by_precision(3, 8, 6, 7))
def test_an_fp32_gate_with_noise_survives(campaigns: Campaigns, precision: Any, step: int) -> None:
    """A router that runs in fp32 under autocast needs its weights in fp32, and its noise from the restored generator."""
    setup = Setup(precision=precision, checkpointing=SPARSE).with_options(gate_fp32=True, noisy=True)
    campaigns.check(setup, Kill(phase="after_batch_end", step=step))


@pytest.mark.parametrize(("precision", "step"), by_precision(4, 5, 6, 9))
def test_an_expert_that_never_gets_a_token_survives(campaigns: Campaigns, precision: Any, step: int) -> None:
    """It has no optimizer state, which is a state of its own, and no weight seen by the probe of dtypes."""
    setup = Setup(precision=precision, checkpointing=SPARSE).with_options(never_routed=True)
    lives = campaigns.check(setup, Kill(phase="forward", step=step))
    state = [key for key in lives[-1].end() if key.startswith("optimizer/0/state/model.moe.experts.3.")]
    assert state == [], "no expert without tokens has optimizer state"
