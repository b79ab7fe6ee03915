"""What a fit leaves in its process: threads, of Python and of libraries, and open descriptors."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from door import free_port

from campaign._training import Setup, train
from lightning_moe_ckpt.testing import Attempt, AttemptResult

_PATIENCE = 20.0
"""Seconds for threads that were told to end: libraries do not wait for theirs."""


@dataclass(frozen=True)
class Belongings:
    """Of this process, at one moment."""

    threads: Counter[str]
    """By name, those of libraries by the name the kernel knows."""
    descriptors: Counter[str]
    """By what they lead to; a socket is a socket, whatever its number."""

    @classmethod
    def now(cls) -> Belongings:
        gc.collect()
        python = Counter(thread.name for thread in threading.enumerate() if not isinstance(thread, threading.Timer))
        return cls(threads=python + Counter(_natives()), descriptors=Counter(_descriptors()))

    def beyond(self, before: Belongings) -> list[str]:
        """What is there now and was not before."""
        return sorted((self.threads - before.threads).elements()) + sorted(
            (self.descriptors - before.descriptors).elements()
        )


def _natives() -> Iterator[str]:
    own = {thread.native_id for thread in threading.enumerate()}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            if int(task.name) not in own:
                yield f"native {(task / 'comm').read_text().strip()}"


def _descriptors() -> Iterator[str]:
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one of this listing
            name = re.sub(r":\[\d+\]$", "", str(link.readlink()))
            if not name.endswith(".jsonl"):  # the harness's own records
                yield name


def train_and_look(setup: Setup, life: Attempt) -> Mapping[str, Any]:
    """Run `setup`, then write what this process has more than before.

    A fit without checkpoints goes first, and opens what is opened once per process. Process groups are the user's:
    they are destroyed before each look. So is what an exception holds: frames, and in them the trainer.
    """
    _train_in_peace(setup, life)
    before = _without_groups(life)
    error: BaseException | None = None
    try:
        returned = train(setup, life)
    except (Exception, SystemExit) as raised:  # noqa: BLE001  # raised again below
        error = type(raised)(*raised.args)
    _without_groups(life)
    left = _what_stays(before)
    path = _path(life.workdir, life.index, life.rank)
    path.write_text(json.dumps([*json.loads(path.read_text() if path.exists() else "[]"), left]))
    if error is not None:
        raise error
    return returned


def _train_in_peace(setup: Setup, life: Attempt) -> None:
    elsewhere = life.workdir / f"warm{life.index}"
    elsewhere.mkdir(exist_ok=True)
    train(setup.fault_free(), replace(life, kill=None, workdir=elsewhere))


def _without_groups(life: Attempt) -> Belongings:
    """After destroying them on all ranks: the next ones must not meet addresses of the last ones."""
    if dist.is_initialized():
        dist.destroy_process_group()
    _meet(life)
    return Belongings.now()


def _meet(life: Attempt) -> None:
    """Wait until all ranks have come here as often; from then on they find each other at another port."""
    names = [f"met-{life.index}-{rank}-" for rank in range(life.world_size)]
    turn = len(list(life.workdir.glob(f"{names[life.rank]}*")))
    atomic = life.workdir / f"port-{life.index}-{life.rank}"
    atomic.write_text(str(free_port()))
    atomic.rename(life.workdir / f"{names[life.rank]}{turn}")
    deadline = time.monotonic() + _PATIENCE
    while not all((life.workdir / f"{name}{turn}").exists() for name in names):
        assert time.monotonic() < deadline, "the other ranks do not come"
        time.sleep(0.005)
    os.environ["MASTER_PORT"] = (life.workdir / f"{names[0]}{turn}").read_text()


def _what_stays(before: Belongings) -> list[str]:
    deadline = time.monotonic() + _PATIENCE
    while (left := Belongings.now().beyond(before)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def _path(workdir: Path, index: int, rank: int) -> Path:
    return workdir / f"attempt{index}.rank{rank}.belongings"


def looks(life: AttemptResult, rank: int) -> list[list[str]]:
    """What every fit of a rank that ended left, in the order of the fits."""
    found: list[list[str]] = json.loads(_path(life.workdir, life.index, rank).read_text())
    return found
