"""Hugging Face's Mixtral, as it is, inside a LightningModule."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

from campaign._campaign import Campaigns, one_kill_per_step
from campaign._models import build
from campaign._training import Checkpointing, Setup
from lightning_moe_ckpt.operators import discover
from lightning_moe_ckpt.testing._kill import Kill

MIXTRAL = Setup(model="mixtral", checkpointing=Checkpointing(policy="sparse", window=3, order="popularity"))


def test_an_expert_that_never_gets_a_token_survives(campaigns: Campaigns) -> None:
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
