"""Lives that find nothing in memory: what the one before had there was brought to storage, and is gone."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from stored._outages import stop_storing_after

from campaign._campaign import memory_of_run
from campaign._training import Setup, train
from lightning_moe_ckpt.inspection.commands import flush
from lightning_moe_ckpt.storage import RunView, open_backend
from lightning_moe_ckpt.testing import Attempt
from lightning_moe_ckpt.tiers import shared_directory

_STATEMENT = re.compile(r"moe-ckpt-\d+-[0-9a-f]+-(\d+)(?:\.\d+)?\.(?:ring|replica)\.(\d+)\.i\d+-[0-9a-f]+\.done")


def newest_in_memory(names: list[str], world_size: int) -> int:
    """The newest step of which these files hold every rank's part, by their names alone; -1 without one."""
    steps: dict[int, set[int]] = {rank: set() for rank in range(world_size)}
    for match in filter(None, map(_STATEMENT.fullmatch, names)):
        steps[int(match[1])].add(int(match[2]))
    return max(set.intersection(*steps.values()), default=-1)


def newest_stored(url: str) -> int:
    """The newest step that a start on another node would resume from; -1 without one."""
    backend = open_backend(url)
    try:
        return max((each.generation.step for each in RunView.open(backend).generations() if each.usable), default=-1)
    finally:
        backend.close()


def flush_and_lose(life: Attempt, *, expect: bool = True) -> None:
    """Bring what the life before has in memory to storage, twice, and remove it; on one rank, for which the others wait."""
    done = life.workdir / f"flushed{life.index}"
    if life.rank == 0:
        names = memory_of_run(Path(life.url.removeprefix("file://")))
        wanted = max(newest_stored(life.url), newest_in_memory(names, life.world_size))
        for turn in range(2):
            status = flush(url=life.url, storage_option=(), wait=timedelta())
            assert status == 0, f"turn {turn} has ended with {status}"
            assert not expect or newest_stored(life.url) == wanted, f"{newest_stored(life.url)}, not {wanted}: {names}"
        assert memory_of_run(Path(life.url.removeprefix("file://"))) == names, "memory stays as it was"
        for name in names:
            (shared_directory() / name).unlink()
        done.touch()
    give_up = time.monotonic() + 60.0
    while not done.exists():
        assert time.monotonic() < give_up, "rank 0 has not flushed"
        time.sleep(0.005)


def train_elsewhere(setup: Setup, stored_until: int, lives: int, life: Attempt) -> Mapping[str, Any]:
    """Train where only what was flushed is left; in lives before the last, storage takes nothing after a step."""
    if life.index:
        flush_and_lose(life)
    if life.index < lives - 1:
        stop_storing_after(stored_until)
    return train(setup, life)
