"""Say where a start asks for another learning rate, seed, batch size or number of threads than the run that it goes on with.

A resumed run goes on as it was: rates and random numbers are the stored ones, whatever the script sets by now. Batches are
those of the loader that the script makes. Either would be a surprise to somebody who changed a number and started again.
Threads differ without anybody's doing: torchrun gives each rank one, Lightning's launcher its share of the cores.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from torch.utils import _pytree as pytree

from lightning_moe_ckpt._lightning import callbacks_of
from lightning_moe_ckpt._logging import rank_logger

log = rank_logger(__name__)

_SEED = "PL_GLOBAL_SEED"
"""Where `seed_everything` notes the seed."""


class Asked:
    """What this start asks for; a part of every boundary. Made in `on_fit_start`, before anything is restored."""

    def __init__(self, trainer: Trainer) -> None:
        groups: Sequence[Mapping[str, Any]] = trainer.optimizers[0].param_groups
        self._taken: dict[str, Any] = {
            "rates": [float(group.get("initial_lr", group["lr"])) for group in groups if "lr" in group],
            "seed": os.environ.get(_SEED),
            "batch_sizes": [],
            "threads": torch.get_num_threads() if trainer.strategy.root_device.type == "cpu" else None,
        }
        # Tuners look for a value, whatever was asked for.
        self._tuned = any(isinstance(each, BatchSizeFinder | LearningRateFinder) for each in callbacks_of(trainer))
        self._stored_sizes: list[int] | None = None

    def take(self) -> dict[str, Any]:
        """Return what was asked for."""
        return self._taken

    def restore(self, state: Mapping[str, Any]) -> None:
        """Compare it with what the stored run was asked for when it began, which stays."""
        rates, seed = self._taken["rates"], self._taken["seed"]
        if not self._tuned and rates != state["rates"] and len(rates) == len(state["rates"]):
            log.warning(
                "this start sets a learning rate of %s, and the stored run began with %s: it goes on with its own. Begin a "
                "new run for another rate, or set it in a hook while training",
                *(_numbers(rates), _numbers(state["rates"])),
                alike=True,
            )
        if seed is not None and seed != state["seed"]:
            log.warning(
                "this start sets the seed %s, and the stored run %s: it goes on with its own random numbers. Begin a new run "
                "for another seed",
                *(seed, "has " + state["seed"] if state["seed"] is not None else "was started without one"),
                alike=True,
            )
        threads, stored = self._taken["threads"], state.get("threads")
        if threads and stored and threads != stored:
            log.warning(
                "torch has %d threads on each rank, and had %d in the stored run: a CPU then adds in another order, and the run is "
                "not exact. Call `torch.set_num_threads(%d)` before `fit`, or start with OMP_NUM_THREADS=%d",
                *(threads, stored, stored, stored),
                alike=True,
            )
        self._stored_sizes = list(state["batch_sizes"])
        self._taken = {**self._taken, "rates": state["rates"], "seed": state["seed"]}

    def follow(self, state: Mapping[str, Any]) -> None:
        """Do nothing: in replay as before."""

    def first_batch(self, trainer: Trainer) -> None:
        """Compare batch sizes; call as the first batch begins, when loaders are there."""
        sizes = [_batch_size(loader) for loader in pytree.tree_leaves(trainer.train_dataloader)]
        known = [size for size in sizes if size is not None]
        stored, self._stored_sizes = self._stored_sizes, None
        self._taken = {**self._taken, "batch_sizes": known}
        if not self._tuned and stored and known and stored != known:
            log.warning(
                "batches have %s items on each rank, and those of the stored run had %s: it goes on with the new ones. The place "
                "in the epoch counts batches, so items may come again or be left out, and the run is not exact",
                *(_numbers(known), _numbers(stored)),
                alike=True,
            )


def _batch_size(loader: object) -> int | None:
    size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None


def _numbers(values: Sequence[float]) -> str:
    return " and ".join(f"{each:g}" for each in dict.fromkeys(values))
