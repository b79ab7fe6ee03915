"""What benchmarks measure on a GPU, executed with the compiled engine on the emulated device."""

from __future__ import annotations

import pytest
import torch

from benchmarks import native_goals
from benchmarks.native import device_copies
from benchmarks.native_goals import CopyScale, DeviceCopies, judge
from native.emulator.device import Emulator


def test_every_measurement_of_copies_runs_on_the_compiled_engine(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Registered memory, packed and batched slices, copies beside other work: each row has a figure, none a traceback."""
    monkeypatch.setattr(native_goals, "CHUNKS_MIB", (4, 64))
    monkeypatch.setattr(native_goals, "_NUM_DELAYS", 20)
    scale = CopyScale(megabytes=1, repeats=1, matrix=16, loop_seconds=0.005)
    copies = DeviceCopies(torch.device("cuda", 0), scale)
    rows = [row for row in judge(copies.goals(), "elsewhere") if "elsewhere" not in row.note] + [*copies.rates()]
    assert [f"{row.what}: {row.traceback}" for row in rows if row.value is None] == []
    assert emulator.calls(b"launch") > 0
    assert emulator.calls(b"cudaMemcpyBatchAsync") > 0


def test_rates_of_users_run_on_the_compiled_engine(emulator: Emulator) -> None:
    """Whole memory and slices, by torch and by the engine of trainings: each row has a figure."""
    rows = [*device_copies(torch.device("cuda", 0), 50, 8, 1)]
    assert [f"{row.what}: {row.traceback}" for row in rows if not row.value] == []
    assert [row.what for row in rows[::2]] == [
        f"device to host, {amount}" for amount in ("1 x 4096 KiB", "50 x 4 KiB", "50 x 64 KiB", "4 x 1024 KiB")
    ]
    assert [row.how for row in rows] == ["torch's streams", "compiled engine"] * 4
    assert emulator.calls(b"launch") > 0
