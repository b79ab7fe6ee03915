"""A fit that looks around when it has ended: what it left behind in its process and on the machine, and when."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from door import Fit
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import optim
from typing_extensions import override

from campaign._campaign import memory_of_run
from campaign._training import Setup, train
from lightning_moe_ckpt.testing import Attempt, AttemptResult, differences
from lightning_moe_ckpt.testing._records import record_differences


def looking_around(setup: Setup) -> Fit:
    """As `setup.fit`, and writes what is left when it returns or raises."""
    return partial(_train_and_look, setup)


def _train_and_look(setup: Setup, life: Attempt) -> Mapping[str, Any]:
    threads, handlers = set(threading.enumerate()), _handlers()
    try:
        return train(setup, life)
    finally:
        ended = time.monotonic()
        left = [f"thread {t.name}" for t in threading.enumerate() if t not in threads and _matters(t)]
        left += [f"handler of {name}" for name, handler in _handlers().items() if handler is not handlers[name]]
        left += [f"shared memory {name}" for name in _rings(life)]
        left += [f"wakeup descriptor {descriptor}"] if (descriptor := signal.set_wakeup_fd(-1)) != -1 else []
        _path(life.workdir, life.index, life.rank).write_text(json.dumps({"left": left, "ended": ended}))


class UserError(Exception):
    """What user code raises."""


def twice(setup: Setup) -> Fit:
    """A fit that is ended by the user's own exception, and another in the same process.

    The exception is raised by a handler of SIGUSR2, so that a scripted signal places it.
    """
    return partial(_fit_twice, setup)


def _fit_twice(setup: Setup, life: Attempt) -> Mapping[str, Any]:
    error = UserError("a mistake in the model")

    def raise_it(*_: object) -> None:
        raise error

    signal.signal(signal.SIGUSR2, raise_it)
    with pytest.raises(UserError) as raised:
        _train_and_look(setup, life)
    assert raised.value is error
    return train(setup, replace(life, kill=None))


class SecondSignal(Callback):
    """Repeats SIGTERM in the step in which it came."""

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: optim.Optimizer
    ) -> None:
        if trainer.global_step == 5:
            os.kill(os.getpid(), signal.SIGTERM)


class Repeating(Setup):
    """A run whose first life gets the signal twice."""

    @override
    def callbacks(self, life: Attempt) -> Sequence[Callback]:
        return [SecondSignal()] if life.kill is not None else []


def require_same_training(
    reference: Sequence[AttemptResult], lives: Sequence[AttemptResult], ignored: Sequence[str] = ("epoch",)
) -> None:
    """Every batch and the end are those of the reference; epochs that were cut by a stop are not compared.

    Args:
        reference: a run in peace.
        lives: to compare with it.
        ignored: kinds of records that may differ, but for the last epoch's.
    """
    for rank in range(lives[-1].world_size):
        found = differences(reference[-1].end(rank), lives[-1].end(rank))
        wanted = [line for line in reference[-1].records(rank) if line["kind"] not in ignored]
        given = [[line for line in life.records(rank) if line["kind"] not in ignored] for life in lives]
        found += record_differences(wanted, given)
        assert not found, "\n".join(found)
        assert lives[-1].records(rank, "epoch")[-1] == reference[-1].records(rank, "epoch")[-1]


def _handlers() -> dict[str, Any]:
    return {each.name: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}


def _matters(thread: threading.Thread) -> bool:
    # The harness's own, and those of torch's queues to persistent workers.
    return not isinstance(thread, threading.Timer) and thread.name != "QueueFeederThread"


def _rings(life: Attempt) -> list[str]:
    """What this rank of this run has in shared memory; others have theirs."""
    names = memory_of_run(Path(life.url.removeprefix("file://")))
    return [name for name in names if fnmatch(name, f"moe-ckpt-*-{life.rank}.*")]


def _path(workdir: Path, index: int, rank: int) -> Path:
    return workdir / f"attempt{index}.rank{rank}.left"


def require_clean(lives: Sequence[AttemptResult]) -> None:
    """No rank of any life left a thread or a handler, nor shared memory without saying so, and nobody a temporary file."""
    for life in lives:
        for rank in range(life.world_size):
            left = json.loads(_path(life.workdir, life.index, rank).read_text())["left"]
            if "stays for the next start of this run" in life.log(rank):
                # What was sealed last is not stored, as far as this rank knows. A boundary that was stored is newer.
                assert "the next start goes on here" not in life.log(rank)
                left = [each for each in left if not each.startswith("shared memory ")]
            assert not left, f"life {life.index}, rank {rank} left {left}\n{life.log(rank)}"
    unfinished = list(lives[0].workdir.parent.rglob("*.tmp"))
    assert not unfinished, f"left {unfinished}"


def seconds_to_end(life: AttemptResult) -> list[float]:
    """From the first signal to the end of fit, by rank."""
    at = min(line["at"] for rank in range(life.world_size) for line in life.records(rank, "killed"))
    return [
        json.loads(_path(life.workdir, life.index, rank).read_text())["ended"] - at for rank in range(life.world_size)
    ]
