"""Training whose snapshots and restores go through the compiled CUDA engine, on an emulated device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from door import PlannedCopies, PlannedTable
from native.emulator.device import Emulator, install, is_anonymous, load, mappings_changed
from torch import Tensor

from lightning_moe_ckpt.native import Copy, CopyEngine, CopyTable, create_engine
from lightning_moe_ckpt.native._cuda import CompiledCudaEngine
from lightning_moe_ckpt.native._worker import CompiledTicket
from lightning_moe_ckpt.testing import Attempt, Seam

JITTER_US = 100
_CALLS = ("cudaEventRecord", "cudaStreamWaitEvent", "cudaEventSynchronize")


@contextmanager
def emulated_device(life: Attempt) -> Iterator[Emulator]:
    """For the rest of this process. What training has in memory of its own is a device's; rings and files are the host's.

    In a world of one so are the values of journals, and buffers: they come to the host by copies for which no hook waits.
    (torch.distributed would ask CUDA about tensors that say they are there.)
    """
    emulator = load()
    install(emulator, setattr)
    if life.world_size == 1:
        is_cuda: Any = property(is_anonymous)
        torch.Tensor.is_cuda = is_cuda
    emulator.training_memory = is_anonymous
    emulator.set(b"jitter_us", JITTER_US)

    def create(_: torch.device) -> CopyEngine:
        engine = create_engine(torch.device("cuda", life.rank % 2))
        assert type(engine) is CompiledCudaEngine, "the device has failed its check"
        prepare = engine.prepare

        def prepare_anew(copies: Sequence[Copy]) -> PlannedCopies:
            mappings_changed()
            return prepare(copies)

        prepare_table = engine.prepare_table

        def prepare_table_anew(table: CopyTable, block_U8: Tensor) -> PlannedTable:
            mappings_changed()
            return prepare_table(table, block_U8)

        engine.prepare = prepare_anew  # type: ignore[method-assign]
        engine.prepare_table = prepare_table_anew  # type: ignore[method-assign]
        return engine

    # A device's allocator follows the stream, which waits for the copies; the host's gives memory to the next who asks.
    CompiledTicket.release_sources = lambda self: None  # type: ignore[method-assign]  # noqa: ARG005  # its name is part of the type
    values: list[int] = []

    def page_locked(nbytes: int) -> Tensor:
        values.append(nbytes)
        return emulator.page_locked(nbytes)

    Seam(module="lightning_moe_ckpt.session._job", attribute="create_engine", replacement=create).apply()
    Seam(module="lightning_moe_ckpt.journal._journal", attribute="_page_locked", replacement=page_locked).apply()
    yield emulator
    # Later lives may find that training is finished.
    used = {call: emulator.calls(call.encode()) for call in _CALLS}
    assert values or life.world_size > 1 or life.index, "no value of a journal came to the host by a copy"
    assert all(used.values()) or life.index, f"copies did not go through the device: {used}"
    assert emulator.num_registered() == 0, "memory was not given back"
