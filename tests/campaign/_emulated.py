"""Training whose snapshots and restores go through the compiled CUDA engine, on an emulated device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from native.emulator.device import Emulator, install, is_anonymous, load

from lightning_moe_ckpt.native import CompiledCudaEngine, CopyEngine, create_engine
from lightning_moe_ckpt.testing import Seam
from lightning_moe_ckpt.testing._lives import Life

JITTER_US = 100
_CALLS = ("cudaEventRecord", "cudaStreamWaitEvent", "cudaEventSynchronize")


@contextmanager
def emulated_device(life: Life) -> Iterator[Emulator]:
    """For the rest of this process. What training has in memory of its own is a device's; rings and files are the host's."""
    emulator = load()
    install(emulator, setattr)
    emulator.training_memory = is_anonymous
    emulator.set(b"jitter_us", JITTER_US)

    def create(_: torch.device) -> CopyEngine:
        engine = create_engine(torch.device("cuda", life.rank % 2))
        assert type(engine) is CompiledCudaEngine, "the device has failed its check"
        return engine

    Seam(module="lightning_moe_ckpt.session._life", attribute="create_engine", replacement=create).apply()
    yield emulator
    used = {call: emulator.calls(call.encode()) for call in _CALLS}
    assert all(used.values()), f"copies did not go through the device: {used}"
    assert emulator.num_registered() == 0, "memory was not given back"
