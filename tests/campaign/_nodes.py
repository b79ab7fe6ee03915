"""Machines that ranks run on: each is a directory of shared memory. And storage that is gone, so that copies are all there is."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from door import DIRECTORY_VARIABLE, CheckpointCallback
from lightning.pytorch import Callback, LightningModule, Trainer
from stored._outages import stop_storing_after
from typing_extensions import override

from lightning_moe_ckpt.session import Report
from lightning_moe_ckpt.testing import Attempt, Seam


@dataclass(frozen=True)
class Nodes:
    """Where ranks run."""

    folder: Path
    placed: tuple[int, ...]
    """Node of each rank."""
    dies: int | None = None
    """Node that dies with the first life; another machine takes its place."""

    def shared_memory(self, life: Attempt) -> Path:
        """Of the machine that a rank runs on."""
        node = self.placed[life.rank]
        return self.folder / f"node{node}{'-replaced' if node == self.dies and life.index else ''}"

    def settle(self, life: Attempt) -> None:
        """Give this process the memory of its machine."""
        memory = self.shared_memory(life)
        memory.mkdir(parents=True, exist_ok=True)
        os.environ[DIRECTORY_VARIABLE] = str(memory)

    def files(self) -> list[str]:
        """What is left on the machines that live."""
        dead = self.folder / f"node{self.dies}"
        return sorted(path.name for path in self.folder.rglob("*") if path.is_file() and path.parent != dead)


class AwaitsCopies(Callback):
    """Holds a step up until what this rank has on another node is new enough, which what training began from always is.

    Args:
        due: the step of the newest generation with a copy that a step waits for; `None` if it does not wait.
        tell: gets the report when a step begins, as to write down what copies took until then.
        hands_over: whether a boundary goes to the tiers here already, and not beside the next backward.
    """

    def __init__(
        self,
        due: Callable[[int], int | None],
        tell: Callable[[Report], object] = lambda _: None,
        *,
        hands_over: bool = False,
    ) -> None:
        self._due, self._tell, self._hands_over = due, tell, hands_over
        self._began = 0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began = trainer.global_step

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        (callback,) = (each for each in trainer.callbacks if isinstance(each, CheckpointCallback))  # type: ignore[attr-defined]
        due, deadline = self._due(trainer.global_step), time.monotonic() + 60
        if self._hands_over:
            callback.wait_committed(0.0)
        while due is not None and max(callback.report.generations.get("peer", -1), self._began or -1) < due:
            assert time.monotonic() < deadline, f"no copy of generation {due} or a newer one"
            time.sleep(0.002)
        self._tell(callback.report)


def leave_only_copies(after: int, pace: Callback) -> None:
    """In this process storage fails after a generation, and `pace` decides how far training gets ahead of copies.

    Args:
        after: boundary of the last generation that is stored.
        pace: goes into the Trainer.
    """
    stop_storing_after(after)
    Seam(module="campaign._training", attribute="Setup.callbacks", replacement=lambda *_: [pace]).apply()
