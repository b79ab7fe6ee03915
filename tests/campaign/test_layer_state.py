"""Live capacity and plain attributes of layers, on which training depends, survive a kill like weights do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from campaign._campaign import Campaigns
from campaign._layer_state import Kind, LayerStateSetup
from campaign._training import Checkpointing
from lightning_moe_ckpt.testing import Kill, Seam

KILLS = [Kill(phase="after_batch_end", step=5, settle=10.0), Kill(phase="forward", batches=2)]
"""After a window was stored, and while it is replayed."""


def setup_of(kind: Kind, *, world_size: int = 1) -> LayerStateSetup:
    checkpointing = Checkpointing(policy="sparse", window=3)
    return LayerStateSetup(kind=kind, world_size=world_size, expert_parallel=world_size, checkpointing=checkpointing)


@pytest.mark.parametrize("kind", ["load", "capacity"])
def test_layer_state_outside_of_buffers_is_exact_after_kills(campaigns: Campaigns, kind: Kind) -> None:
    """A running load that moves a bias, as NeMo Automodel keeps it; a capacity per expert that shrinks step by step."""
    lives = campaigns.check(setup_of(kind), *KILLS)
    assert [life.steps()[0] > 1 for life in lives] == [False, True, True], "it did not start over"


def test_live_capacity_is_exact_on_two_expert_parallel_ranks(campaigns: Campaigns) -> None:
    """Each rank has its own journal, and all have the same capacities."""
    campaigns.check(setup_of("capacity", world_size=2), Kill(phase="after_batch_end", step=5, rank=1, settle=10.0))


@pytest.mark.parametrize("world_size", [1, pytest.param(3, marks=pytest.mark.soak)])
def test_deepspeed_layers_are_exact_after_kills(campaigns: Campaigns, world_size: int) -> None:
    """They drop tokens over capacity, and draw second experts by lot; experts are held by all ranks."""
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: see the Makefile")
    setup = replace(setup_of("deepspeed"), world_size=world_size)
    lives = campaigns.check(setup, *KILLS)
    assert [life.steps()[0] > 1 for life in lives] == [False, True, True], "it did not start over"


@pytest.mark.tutel
@pytest.mark.parametrize("kind", ["tutel", "tutel_flat", "tutel_list"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_tutel_layers_are_exact_after_kills(campaigns: Campaigns, kind: Kind, world_size: int) -> None:
    """Stacked, flat and listed experts, spread over ranks; capacity and noise that change with every step."""
    require_tutel()
    setup = setup_of(kind, world_size=world_size)
    lives = campaigns.check(setup, *KILLS)
    assert [life.steps()[0] > 1 for life in lives] == [False, True, True], "it did not start over"


def require_tutel() -> None:
    """Its kernels too: a layer without them cannot be imported."""
    pytest.importorskip("tutel.moe", reason="Tutel is not installed: see its own instructions", exc_type=ImportError)


def _keep(*args: object) -> None:
    """Leaves everything as it is."""


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["capacity", pytest.param("tutel", marks=pytest.mark.tutel)])
def test_without_the_hooks_the_end_is_another(campaigns: Campaigns, kind: Kind) -> None:
    """Neither is in a `state_dict`, nor a plain attribute: without what the journal has of it, a resumed run goes another way."""
    if kind == "tutel":
        require_tutel()
    seam = Seam(module="lightning_moe_ckpt.fit._state", attribute="LayerState.restore", replacement=_keep)
    with pytest.raises(AssertionError, match="differ"):
        campaigns.check(setup_of(kind), KILLS[0], seams=[seam])
