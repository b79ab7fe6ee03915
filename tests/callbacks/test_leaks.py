"""Nothing outlives a fit in its process or on its machine, and memory is what was announced, at every step."""

from __future__ import annotations

import contextlib
import gc
import threading
from pathlib import Path

import pytest
import tiny
import torch
from door import size_text
from lightning.pytorch import Callback, Trainer
from torch import nn
from typing_extensions import override

from lightning_moe_ckpt.callbacks import DenseCheckpoint, SparseCheckpoint
from lightning_moe_ckpt.storage import GenerationId

FEATURES = 128


class UserError(Exception):
    """What user code raises."""


def nbytes_of(path: Path) -> int:
    """Memory of a file; statements come and go meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_blocks * 512
    return 0


class Watch(Callback):
    """Measures shared memory at every step, and fails at one."""

    def __init__(self, memory: Path, fails_at: int | None = None) -> None:
        self.memory, self.fails_at, self.peak = memory, fails_at, 0

    @override
    def on_train_batch_start(self, trainer: Trainer, *_: object) -> None:
        self.peak = max(self.peak, sum(map(nbytes_of, self.memory.iterdir())))
        if trainer.global_step == self.fails_at:
            raise UserError


def fit(checkpoint: DenseCheckpoint | SparseCheckpoint, watch: Callback, steps: int) -> None:
    """Train a few layers, so that a window has something to spread."""
    module = tiny.ToZero(*[nn.Linear(FEATURES, FEATURES) for _ in range(6)])
    tiny.fit(module, tiny.rows(torch.ones(20, FEATURES)), watch, checkpoint, max_steps=steps)


def belongings() -> tuple[set[threading.Thread], list[str]]:
    """Threads of this process, and what its descriptors lead to."""
    gc.collect()
    links = list(Path("/proc/self/fd").iterdir())
    return set(threading.enumerate()), sorted(str(link.readlink()) for link in links if link.is_symlink())


def make(policy: str, url: Path) -> DenseCheckpoint | SparseCheckpoint:
    return SparseCheckpoint(url, window=3) if policy == "sparse" else DenseCheckpoint(url, every_n_steps=2)


@pytest.mark.parametrize("policy", ["sparse", "dense"])
def test_ends_of_a_fit_leave_no_thread_descriptor_or_memory(tmp_path: Path, shared_memory: Path, policy: str) -> None:
    """An exception whose newest generation is not stored leaves that in memory; the next end leaves nothing."""
    fit(make(policy, tmp_path / "first"), Watch(shared_memory), steps=4)  # whatever is opened once per process
    assert list(shared_memory.iterdir()) == []
    before = belongings()
    url = tmp_path / "run"
    with pytest.raises(UserError):
        fit(make(policy, url), Watch(shared_memory, fails_at=9), steps=12)
    assert belongings() == before
    fit(make(policy, url), Watch(shared_memory), steps=12)
    assert belongings() == before
    assert list(shared_memory.iterdir()) == []


@pytest.mark.parametrize("steps", [60, pytest.param(500, marks=pytest.mark.soak)])
@pytest.mark.parametrize("policy", ["sparse", "dense"])
def test_peak_memory_is_what_was_reserved(
    tmp_path: Path, shared_memory: Path, caplog: pytest.LogCaptureFixture, policy: str, steps: int
) -> None:
    """Within 5 percent; statements beside the ring are the rest."""
    checkpoint, watch = make(policy, tmp_path), Watch(shared_memory)
    with caplog.at_level("INFO"):
        fit(checkpoint, watch, steps)
    reserved = checkpoint.report.reserved_nbytes
    assert set(reserved) == {"host"}
    assert 1 <= watch.peak / reserved["host"] <= 1.05
    said = [record.message for record in caplog.records if record.message.startswith("shared memory: ")]
    assert f"host {size_text(reserved['host'])}" in said[-1]
    print(f"{policy}, {steps} steps: peak {watch.peak} bytes, reserved {reserved['host']}")


class CountNames(Callback):
    """Counts the names of generations that are alive, at some steps."""

    def __init__(self, *steps: int) -> None:
        self.steps, self.counts = steps, list[int]()

    @override
    def on_train_batch_start(self, trainer: Trainer, *_: object) -> None:
        if trainer.global_step in self.steps:
            gc.collect()
            self.counts.append(sum(type(each) is GenerationId for each in gc.get_objects()))


def test_generations_that_are_gone_leave_no_object(tmp_path: Path) -> None:
    """A run of a million steps holds as much as one of a hundred. Of the latest ones it is known where they are."""
    names = CountNames(60, 200)
    fit(DenseCheckpoint(tmp_path, every_n_steps=1, freeze_heap=False, overhead_target=None), names, steps=201)
    assert names.counts[1] < names.counts[0] + 100, names.counts
