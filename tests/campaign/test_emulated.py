"""Killed and resumed runs whose snapshots and restores go through the compiled CUDA engine, on an emulated device."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from native.emulator.build import unavailable
from native.emulator.device import install, is_anonymous, load

from campaign._campaign import Campaigns, two_chains
from campaign._training import Checkpointing, Setup, train
from lightning_moe_ckpt.native import CompiledCudaEngine, CopyEngine, create_engine
from lightning_moe_ckpt.testing import Seam
from lightning_moe_ckpt.testing._lives import Life

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))


def train_on_an_emulated_device(setup: Setup, life: Life) -> Mapping[str, Any]:
    """What training has in memory of its own is a device's; rings and files are the host's."""
    emulator = load()
    install(emulator, setattr)
    emulator.training_memory = is_anonymous
    emulator.set(b"jitter_us", 100)

    def create(_: torch.device) -> CopyEngine:
        engine = create_engine(torch.device("cuda", life.rank % 2))
        assert type(engine) is CompiledCudaEngine, "the device has failed its check"
        return engine

    Seam(module="lightning_moe_ckpt.session._life", attribute="create_engine", replacement=create).apply()
    end = train(setup, life)
    used = {
        call: emulator.calls(call.encode())
        for call in ("cudaHostRegister", "cudaEventRecord", "cudaMemcpyAsync", "launch")
    }
    assert all(used.values()), f"copies did not go through the device: {used}"
    assert emulator.num_registered() == 0, "memory was not given back"
    return end


@pytest.mark.parametrize(
    "setup",
    [
        Setup(checkpointing=Checkpointing(policy="sparse", window=3)),
        Setup(checkpointing=Checkpointing(policy="dense")),
        pytest.param(
            Setup(world_size=3, checkpointing=Checkpointing(policy="sparse", window=3)), marks=pytest.mark.soak
        ),
    ],
    ids=["sparse", "dense", "3 ranks"],
)
def test_killed_runs_end_as_if_nothing_had_happened(campaigns: Campaigns, setup: Setup) -> None:
    """Snapshots arrive as they were at their step, and restored parameters as they were stored."""
    fit = partial(train_on_an_emulated_device, setup)
    (chain, _) = two_chains(setup)
    (lives,) = campaigns.check_all(setup, [chain[1:3]], fit=fit)
    assert [life.outcome for life in lives] == ["killed", "killed", "finished"]
    assert lives[2].steps()[0] > 1, "nothing was restored"
