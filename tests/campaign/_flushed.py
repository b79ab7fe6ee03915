"""Lives that find nothing in memory: what the one before had there was brought to storage, and is gone."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from door import DIRECTORY_VARIABLE
from stored._outages import stop_storing_after

from campaign._nodes import Nodes
from campaign._training import Setup, train
from lightning_moe_ckpt.inspection._verify import verify
from lightning_moe_ckpt.inspection.commands import flush
from lightning_moe_ckpt.storage import RunView, open_backend
from lightning_moe_ckpt.storage._open import memory_tag
from lightning_moe_ckpt.testing import Attempt
from lightning_moe_ckpt.tiers import shared_directory

_STATEMENT = re.compile(r"moe-ckpt-\d+-[0-9a-f]+-(\d+)(?:\.\d+)?\.(?:ring|replica)\.(\d+)\.i\d+-[0-9a-f]+\.done")
_PATIENCE_SECONDS = 60.0


@dataclass(frozen=True)
class Elsewhere:
    """A run of which each life but the first goes on from storage, and storage from memory."""

    setup: Setup
    lives: int
    stored_until: int = 0
    """Step after which storage takes nothing in lives before the last."""
    nodes: Nodes | None = None
    lost: int | None = None
    """Node whose memory is gone before it can be flushed."""
    drawn: bool = False
    """Whether lives end anywhere, also before there is a run, and memory may hold what the log has left behind."""

    def fit(self, life: Attempt) -> Mapping[str, Any]:
        """Bring what the life before has left to storage, lose memory, and train."""
        if life.index:
            self._move(life)
        if self.nodes is not None:
            self.nodes.settle(life)
        if life.index < self.lives - 1:
            stop_storing_after(self.stored_until)
        return train(self.setup, life)

    def _move(self, life: Attempt) -> None:
        """On one rank, for which the others wait."""
        done = life.workdir / f"moved{life.index}"
        if life.rank == 0:
            self._flush_and_lose(life)
            done.touch()
        give_up = time.monotonic() + _PATIENCE_SECONDS
        while not done.exists():
            assert time.monotonic() < give_up, "rank 0 has not flushed"
            time.sleep(0.005)

    def _flush_and_lose(self, life: Attempt) -> None:
        """Flush every node, twice, and remove memory; the newest whole generation in it is what a start finds then."""
        url, options = life.url, dict[str, Any]()
        if self.setup.checkpointing is not None and self.setup.checkpointing.url is not None:
            url, options = self.setup.checkpointing.url, dict(self.setup.checkpointing.storage_options)
        memories = [shared_directory()]
        if self.nodes is not None:
            memories = [self.nodes.folder / f"node{node}" for node in sorted({*self.nodes.placed} - {self.lost})]
        backend = open_backend(url, storage_options=options)
        if self.drawn and not backend.list("_log/"):
            return
        history = RunView.open(backend).history
        assert history is not None
        tag = memory_tag(history.key, url)
        files = sorted(path for memory in memories for path in memory.iterdir() if f"-{tag}-" in path.name)
        found = verify(backend).problems if self.drawn else []
        before, held = _newest(backend), _newest_held([path.name for path in files], life.world_size)
        for turn in range(2):
            statuses = []
            for memory in memories:
                os.environ[DIRECTORY_VARIABLE] = str(memory)
                statuses.append(flush(url=url, storage_option=[*options.items()], wait=timedelta()))
            assert statuses[-1] == 0 or self.lost is not None, f"turn {turn} has ended with {statuses}"
            assert self.drawn or _newest(backend) == max(before, held), (
                f"{held} in memory, {before} was stored, {files}"
            )
        del os.environ[DIRECTORY_VARIABLE]
        assert verify(backend).problems == found
        backend.close()
        for path in files:
            path.unlink()
        print(f"flushed {held} over {before}")


def _newest(backend: Any) -> int:
    """The newest step that a start on another node would resume from; -1 without one."""
    return max((each.generation.step for each in RunView.open(backend).generations() if each.usable), default=-1)


def _newest_held(names: Sequence[str], world_size: int) -> int:
    """The newest step of which these files hold every rank's part, by their names alone; -1 without one."""
    steps: dict[int, set[int]] = {rank: set() for rank in range(world_size)}
    for match in filter(None, map(_STATEMENT.fullmatch, names)):
        steps[int(match[1])].add(int(match[2]))
    return max(set.intersection(*steps.values()), default=-1)
