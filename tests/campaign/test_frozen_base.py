"""A base that does not train, that begins to, or that is edited after all: killed anywhere, the run ends as if nothing had happened."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from campaign._campaign import Campaigns
from campaign._draw import Case, draw
from campaign._drawn_hooks import Hook
from campaign._training import Checkpointing
from campaign.test_configurations import failure

KINDS: tuple[Hook, ...] = ("freezes", "unfreezes", "edits_frozen")
POLICIES = (
    Checkpointing(policy="sparse", window=3),
    Checkpointing(policy="dense", every_n_steps=2),
    Checkpointing(policy="differential", every_n_steps=4, batch=2),
)
QUICK = range(int(os.environ.get("MOE_CKPT_FIRST", "0")), int(os.environ.get("MOE_CKPT_ROWS", "2")))
SOAK = range(300)


def frozen_base(seed: int) -> Case:
    """The drawn case of a number, with a frozen base: each kind under each policy, every fourth on three ranks."""
    case, kind, checkpointing = draw(seed), KINDS[seed % 3], POLICIES[seed // 3 % 3]
    setup = replace(
        case.setup, checkpointing=checkpointing, averaged=None, strategy="moe", toggled=False, compiled=False
    )
    if seed % 4 == 3 and setup.data == "map" and setup.ragged == 0:
        setup = replace(setup, world_size=3, expert_parallel=1)
    left_out = {"reads_state", *({"skips_rest", "stops", "no_loss", "odd_buffers"} if setup.world_size > 1 else ())}
    hooks = {*setup.hooks, kind} - left_out
    return replace(case, setup=replace(setup, hooks=tuple(sorted(hooks))))


@pytest.mark.parametrize("seed", [*QUICK, *(pytest.param(seed, marks=pytest.mark.soak) for seed in SOAK)])
def test_a_frozen_base_ends_as_if_nothing_had_happened(campaigns: Campaigns, seed: int) -> None:
    found = failure(campaigns, frozen_base(seed))
    assert found is None, found
