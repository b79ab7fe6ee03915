"""Storage that is slower than training costs generations, newest first kept, and is said once."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from door import parse_snap_key
from lightning.pytorch import Callback, Trainer
from torch import nn

from lightning_moe_ckpt.callbacks import DenseCheckpoint, DifferentialCheckpoint
from lightning_moe_ckpt.storage import GenerationId, PosixBackend


def fit(checkpoint: DenseCheckpoint | DifferentialCheckpoint, *others: Callback, steps: int, features: int = 4) -> None:
    module = tiny.ToZero(nn.Linear(features, features))
    tiny.fit(module, tiny.rows(torch.ones(6, features)), *others, checkpoint, max_steps=steps)


class Gate:
    """Lets segments through, or not, and writes down which came."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.reached = threading.Event()
        self.taken: list[int] = []

    @contextmanager
    def before_every_put(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        put = PosixBackend.put

        def gated(backend: PosixBackend, key: str, *views: Any) -> None:
            place = parse_snap_key(key)
            if place is not None and key.endswith(".safetensors"):
                self.taken.append(place[0].step)
                self.reached.set()
                assert self.open.wait(60)
            put(backend, key, *views)

        monkeypatch.setattr(PosixBackend, "put", gated)
        try:
            yield
        finally:
            self.open.set()


class Outage(Callback):
    """Storage stands still from step 3 to step 8, and from step 20 to step 24."""

    def __init__(self, gate: Gate, checkpoint: DenseCheckpoint) -> None:
        self.gate, self.checkpoint = gate, checkpoint

    def on_train_batch_start(self, trainer: Trainer, *args: object) -> None:
        step = trainer.global_step
        if step not in {4, 5, 6, 7, 8, 21, 22, 23, 24}:
            assert self.checkpoint.wait_committed(60)
        if step in {3, 20}:
            self.gate.reached.clear()
            self.gate.open.clear()
        if step in {8, 24}:
            assert self.gate.reached.wait(60)
            self.gate.open.set()
            assert self.checkpoint.wait_committed(60)


def test_the_newest_goes_first_and_the_rest_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While storage stands still training goes on; then storage takes the newest complete one and leaves out the rest."""
    gate = Gate()
    checkpoint = DenseCheckpoint(
        str(tmp_path), every_n_steps=1, keep=100, overhead_target=None, untouched=["callback.Outage.*"]
    )
    with gate.before_every_put(monkeypatch), caplog.at_level(logging.INFO, "lightning_moe_ckpt"):
        fit(checkpoint, Outage(gate, checkpoint), steps=26)
    report = checkpoint.report
    skipped = sorted(set(range(27)) - set(gate.taken))
    assert gate.taken == sorted(gate.taken)
    assert len(skipped) >= 4
    said = [record.message for record in caplog.records if "slower than training" in record.message]
    assert [line.split(":")[0] for line in said] == [
        "storage is slower than training",
        "storage was slower than training",
    ] * 2
    passed_over: list[int] = []
    for start, end in zip(said[::2], said[1::2], strict=True):
        number, first, last = map(
            int, re.findall(r"(\d+) generations were skipped, from step (\d+) .* to step (\d+) ", end)[0]
        )
        assert f"generations from {GenerationId(step=first, incarnation=1)} on are skipped" in start
        assert number == last + 1 - first
        passed_over += range(first, last + 1)
    assert set(passed_over) <= set(skipped)
    assert len(skipped) - len(passed_over) <= len(said) // 2, "as an outage ends, memory may have no room for one"
    assert report.generations_skipped == {"storage": len(passed_over)}
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING], "it is routine"


class Slow(Callback):
    """Storage stands still with what it takes from step 5 on, for some seconds."""

    def __init__(self, gate: Gate, seconds: float) -> None:
        self.gate, self.seconds = gate, seconds

    def on_train_batch_start(self, trainer: Trainer, *args: object) -> None:
        if trainer.global_step == 5:
            self.gate.reached.clear()
            self.gate.open.clear()
            threading.Thread(target=self.opens, daemon=True).start()

    def opens(self) -> None:
        self.gate.reached.wait(60)  # storage may rest first, for a wait on a busy machine
        time.sleep(self.seconds)
        self.gate.open.set()


@pytest.mark.parametrize(("seconds", "most"), [(1.3, 30.0), (2.0, 0.2)], ids=["in time", "too late"])
def test_a_number_of_steps_waits_for_storage_where_memory_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, seconds: float, most: float
) -> None:
    """With two generations storage reads the memory that the next needs: training waits for it, once, and says so. Where it does not
    answer, windows are missed, the newest whole generation stays, and training goes on.
    """
    gate = Gate()
    monkeypatch.setattr("lightning_moe_ckpt.session._capture.FLUSH_TIMEOUT", timedelta(seconds=most))
    checkpoint = DenseCheckpoint(
        tmp_path, every_n_steps=1, memory_generations=2, overhead_target=None, untouched=["callback.Slow.*"]
    )
    with gate.before_every_put(monkeypatch), caplog.at_level(logging.INFO, "lightning_moe_ckpt"):
        fit(checkpoint, Slow(gate, seconds), Paces(), steps=180)
    report, said = checkpoint.report, [record.message for record in caplog.records]
    assert report.resumed_from is None
    if most > seconds:
        assert (report.windows_skipped, report.generations_complete) == (0, 179)
        assert report.stall_seconds["flush"] > 1.0
        assert sum("for storage, which reads memory that a generation was due in" in line for line in said) == 1
    else:
        assert report.windows_skipped > 2
        assert 0.15 < report.stall_seconds["flush"] < 1.0
        assert "checkpoints are taken again" in "".join(said)


class StandsStill(Callback):
    """Storage takes nothing from step 5 to step 40; what memory has at each of these steps is written down."""

    def __init__(self, gate: Gate, checkpoint: DifferentialCheckpoint) -> None:
        self.gate, self.checkpoint, self.behind = gate, checkpoint, list[int]()

    def on_train_batch_start(self, trainer: Trainer, *args: object) -> None:
        step = trainer.global_step
        if step == 5:
            assert self.checkpoint.wait_committed(60)
            self.gate.open.clear()
        if 5 < step < 40:
            self.behind.append(step - self.checkpoint.report.generations["host"])
        if step == 40:
            self.gate.open.set()
            assert self.checkpoint.wait_committed(60)


def test_training_does_not_wait_for_storage_with_its_differences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Differences wait in memory for storage. Where their room is full, whole states follow instead: no step waits, and none is missed."""
    gate = Gate()
    checkpoint = DifferentialCheckpoint(
        tmp_path, batch=4, memory_generations=3, overhead_target=None, untouched=["callback.StandsStill.*"]
    )
    still = StandsStill(gate, checkpoint)
    with gate.before_every_put(monkeypatch):
        fit(checkpoint, still, Paces(), steps=60)
    report = checkpoint.report
    assert report.stall_seconds.get("flush", 0.0) < 0.5
    assert (report.windows_skipped, report.generations_complete) == (0, 59)
    assert max(still.behind) <= 4, still.behind
    assert report.generations["storage"] == 60
    assert any(40 < step < 60 for step in gate.taken), "storage goes on once it answers"


class Paces(Callback):
    """Steps of 20 ms."""

    def on_train_batch_start(self, *args: object) -> None:
        time.sleep(0.02)


def test_a_bandwidth_below_what_training_makes_skips_and_never_stops_it(tmp_path: Path) -> None:
    """The cap holds at the only place that can wait, the persist thread; the last step is stored all the same."""
    checkpoint = DenseCheckpoint(str(tmp_path), every_n_steps=1, bandwidth=400_000, overhead_target=None)
    fit(checkpoint, steps=40, features=64)
    report = checkpoint.report
    assert report.generations_skipped["storage"] > 0
    assert report.generations["storage"] == 40
    assert report.nbytes_persisted <= 400_000 * (report.seconds + 5)
    resumed = DenseCheckpoint(str(tmp_path), every_n_steps=1, overhead_target=None)
    fit(resumed, steps=41, features=64)
    assert resumed.report.resumed_from == 40
