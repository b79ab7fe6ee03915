"""Machines that ranks run on: each is a directory of shared memory. And storage that is gone, so that copies are all there is."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from lightning.pytorch import Callback
from stored._outages import stop_storing_after

from lightning_moe_ckpt.testing import Seam
from lightning_moe_ckpt.testing._attempts import Attempt
from lightning_moe_ckpt.tiers._shm import DIRECTORY_VARIABLE


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


def leave_only_copies(after: int, pace: Callback) -> None:
    """In this process storage fails after a generation, and `pace` decides how far training gets ahead of copies.

    Args:
        after: boundary of the last generation that is stored.
        pace: goes into the Trainer.
    """
    stop_storing_after(after)
    Seam(module="campaign._training", attribute="Setup.callbacks", replacement=lambda *_: [pace]).apply()
