"""A fit that looks around when it has ended: what it left behind in its process and on the machine, and when."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from campaign._training import Setup, train
from lightning_moe_ckpt.testing._lives import Fit, Life, LifeResult

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # where rings live


def looking_around(setup: Setup) -> Fit:
    """As `setup.fit`, and writes what is left when it returns or raises."""
    return partial(_train_and_look, setup)


def _train_and_look(setup: Setup, life: Life) -> Mapping[str, Any]:
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


def _handlers() -> dict[str, Any]:
    return {each.name: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}


def _matters(thread: threading.Thread) -> bool:
    return not isinstance(thread, threading.Timer)  # the harness's own


def _rings(life: Life) -> list[str]:
    """What this rank of this run has in shared memory; others have theirs."""
    folder = Path(life.url.removeprefix("file://"))
    logged = "".join(path.read_text() for path in folder.glob("_log/*.json"))
    rings = [path.name for path in SHARED_MEMORY.glob(f"moe-ckpt-*-{life.rank}.ring")]
    return [name for name in rings if name.split("-")[3] in logged]


def _path(workdir: Path, index: int, rank: int) -> Path:
    return workdir / f"life{index}.rank{rank}.left"


def require_clean(lives: Sequence[LifeResult]) -> None:
    """No rank of any life left a thread, a handler or shared memory, and nobody a temporary file."""
    for life in lives:
        for rank in range(life.world_size):
            left = json.loads(_path(life.workdir, life.index, rank).read_text())["left"]
            assert not left, f"life {life.index}, rank {rank} left {left}\n{life.log(rank)}"


def seconds_to_end(life: LifeResult) -> list[float]:
    """From the first signal to the end of fit, by rank."""
    at = min(line["at"] for rank in range(life.world_size) for line in life.records(rank, "killed"))
    return [
        json.loads(_path(life.workdir, life.index, rank).read_text())["ended"] - at for rank in range(life.world_size)
    ]
