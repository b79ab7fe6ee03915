"""A disk that is full, a real one: a tmpfs of some MiB that only a forked process sees.

That process trains, fills the disk, trains on, and makes room again.
"""

from __future__ import annotations

import ctypes
import json
import logging
import multiprocessing
import os
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from launcher import exit_after
from lightning.pytorch import Callback, Trainer
from torch import nn

from lightning_moe_ckpt.callbacks import DenseCheckpoint
from lightning_moe_ckpt.inspection import verify
from lightning_moe_ckpt.storage import open_backend

FEATURES = 200
DISK_OPTIONS = b"size=4m"
NEW_NAMESPACES = 0x10020000
LIMIT_SECONDS = 120
_FORK = multiprocessing.get_context("fork")
"""A user's and one of mounts, of `sched.h`."""
PRIVATE = 0x44000
"""And all below it, of `mount.h`."""
FULL, FREED, END = 10, 25, 35
"""Steps."""


class Filler(Callback):
    """Fills the disk to its last byte, and makes room later; writes down what is stored at these moments."""

    def __init__(self, disk: Path, checkpoint: DenseCheckpoint) -> None:
        self.ballast, self.checkpoint = disk / "ballast", checkpoint
        self.newest: list[int] = []
        self.good: list[bool] = []

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        step = trainer.global_step
        assert self.checkpoint.wait_committed(60)
        if step in {FULL, FREED, END - 1}:
            self.newest.append(self.checkpoint.report.generations["storage"])
            self.good.append(verify(open_backend(self.checkpoint.url)).sound)
        if step == FULL:
            with self.ballast.open("wb", buffering=0) as file, suppress(OSError):
                while True:
                    file.write(bytes(4096))
        if step == FREED:
            self.ballast.unlink()


def fit(checkpoint: DenseCheckpoint, *others: Callback, steps: int) -> None:
    """Train half a MiB, with its optimizer."""
    module = tiny.ToZero(nn.Linear(FEATURES, FEATURES))
    tiny.fit(module, tiny.rows(torch.ones(6, FEATURES)), *others, checkpoint, max_steps=steps)


class Errors(logging.Handler):
    """Messages of errors."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def train_on_full(disk: Path) -> dict[str, Any]:
    errors = Errors()
    logging.getLogger("lightning_moe_ckpt").addHandler(errors)
    checkpoint = DenseCheckpoint(str(disk / "run"), every_n_steps=1, keep=2, overhead_target=None)
    filler = Filler(disk, checkpoint)
    fit(checkpoint, filler, steps=END)
    resumed = DenseCheckpoint(str(disk / "run"))
    fit(resumed, steps=END)
    leftovers = [str(path) for path in disk.rglob("*.tmp")]
    return {
        "newest": filler.newest, "good": filler.good, "errors": errors.messages, "leftovers": leftovers,
        "steps": checkpoint.report.steps, "resumed": resumed.report.resumed_from,
    }  # fmt: skip


def mount(disk: Path) -> bool:
    """Mount a small tmpfs for this process and its children; whether the machine allows it."""
    libc, user, group = ctypes.CDLL(None, use_errno=True), os.getuid(), os.getgid()
    if libc.unshare(NEW_NAMESPACES):
        return False
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        Path(f"/proc/self/{name}").write_text(text)
    if libc.mount(b"none", b"/", None, ctypes.c_ulong(PRIVATE), None):
        return False
    return bool(libc.mount(b"tmpfs", os.fsencode(disk), b"tmpfs", ctypes.c_ulong(0), DISK_OPTIONS) == 0)


def _train(disk: Path, facts: Path) -> None:
    """In a fork, which has one thread: one with others may not have users of its own."""
    if mount(disk):
        facts.write_text(json.dumps(train_on_full(disk)))


def test_a_full_disk_is_reported_and_recovered_from(tmp_path: Path) -> None:
    """Training goes on, the generations stored before stay whole, and saving goes on when there is room again."""
    facts_path = tmp_path.with_suffix(".facts")
    child = _FORK.Process(target=exit_after, args=(partial(_train, tmp_path, facts_path),))
    child.start()
    child.join(LIMIT_SECONDS)
    child.kill()
    assert child.exitcode == 0, "it took too long, or see its traceback in the captured output"
    if not facts_path.exists():
        pytest.skip("this machine lets no user mount a tmpfs")
    facts = json.loads(facts_path.read_text())
    before, full, after = facts["newest"]
    assert (facts["steps"], facts["resumed"]) == (END, END)
    assert facts["good"] == [True, True, True]
    assert FULL - 2 <= before <= FULL
    assert before <= full <= before + 1  # one may have been captured before the disk was full
    assert after >= FREED
    assert len(facts["errors"]) >= FREED - FULL - 2
    assert all("No space left on device" in error for error in facts["errors"])
    assert facts["leftovers"] == []
