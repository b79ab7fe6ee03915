"""What `bench native` measures on a GPU, executed with the compiled engine on the emulated device."""

from __future__ import annotations

import pytest
import torch

from lightning_moe_ckpt.benchmarks import _native_device
from lightning_moe_ckpt.benchmarks._native_device import CopyScale, DeviceCopies, judge
from native.emulator.device import Emulator


def test_every_measurement_of_copies_runs_on_the_compiled_engine(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Registered memory, packed and batched slices, copies beside other work: each row has a figure, none a traceback."""
    monkeypatch.setattr(_native_device, "CHUNKS_MIB", (4, 64))
    monkeypatch.setattr(_native_device, "_NUM_DELAYS", 20)
    scale = CopyScale(megabytes=1, repeats=1, matrix=16, loop_seconds=0.005)
    copies = DeviceCopies(torch.device("cuda", 0), scale)
    rows = [row for row in judge(copies.goals(), "elsewhere") if "elsewhere" not in row.note] + [*copies.rates()]
    assert [f"{row.what}: {row.traceback}" for row in rows if row.value is None] == []
    assert emulator.calls(b"launch") > 0
    assert emulator.calls(b"cudaMemcpyBatchAsync") > 0
