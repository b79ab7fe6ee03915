"""Batches that are logged with the journal, for data that cannot be read twice.

By default a resumed run repositions its loaders: it fetches again what was fetched, and replay sees the same batches. A
pipeline that cannot give the same batches again (a queue, a service, live data) can have the batches of every step
logged instead. Replay then trains on the logged ones, each with the random state that followed its fetch, and is exact up
to the step at which the state is dense. From there on batches are whatever the pipeline gives: the rest of the run is a
valid run, not the same one.

A batch is logged as the loader gave it, before any hook of the module or the strategy has seen it. The logged batches of
a step are part of its journal record, whose size is reserved in every segment from the first steps, twice over. A step
with more than that spoils its window, which is reported, and the next plan reserves twice what that step took.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal

from lightning.pytorch import Trainer

from lightning_moe_ckpt._lightning import BatchTap
from lightning_moe_ckpt._lightning_tuners import resting
from lightning_moe_ckpt.callbacks._digests import digest_of
from lightning_moe_ckpt.callbacks._extras import copied
from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.session import capture_rng, refusals, restore_rng

log = logging.getLogger(__name__)

Batches = Literal["reposition", "log"]

Logged = Sequence[dict[str, Any]]


class BatchLog:
    """Logs the batches of the step under way, and in replay gives those of the original one; digests the others.

    Args:
        trainer: its batches are seen.
        mode: `log`, or `reposition`, which logs nothing.
        keep: whether replay will need batches at all; a snapshot of everything needs none.
        original: the batches that the step under way was trained on, in a replay; `None` outside of one.
        compared: whether the batch that was fetched is compared, now or by a later life.
    """

    def __init__(
        self,
        trainer: Trainer,
        mode: Batches,
        *,
        keep: bool,
        original: Callable[[], Logged | None],
        compared: Callable[[], bool],
    ) -> None:
        self._mode, self._keep, self._original, self._compared = mode, keep, original, compared
        self._digest: str | None = None
        self._step: list[dict[str, Any]] = []
        self._accepted = False
        self._tap = BatchTap(trainer, self._logged if mode == "log" else self._digested, resting(trainer))
        if mode == "log":
            log.info("batches='log': a restart replays logged batches; later batches are whatever the pipeline gives")

    def take(self) -> dict[str, Any]:
        """How this run deals with its data."""
        return {"mode": self._mode}

    def follow(self, state: dict[str, Any]) -> None:
        """Nothing: how a run deals with its data does not change."""

    def restore(self, state: dict[str, Any]) -> None:
        """Say what this resume is worth."""
        if self._mode != state["mode"]:
            raise ConfigurationError(
                f"`batches={self._mode!r}`, but the checkpoint was written with {state['mode']!r}. "
                "Resume with the same, or start anew with resume='never'."
            )
        if self._mode == "log":
            log.warning(
                "batches='log': this restart is exact up to the step at which the state is dense, not beyond: "
                "the data goes on with what the pipeline gives"
            )

    def step_ended(self) -> list[dict[str, Any]]:
        """The batches of the step that just ended, in order, for its journal."""
        batches, self._step = self._step, []
        return batches

    def take_digest(self) -> str | None:
        """Of the batch that was fetched last, if it is compared."""
        digest, self._digest = self._digest, None
        return digest

    def remove(self) -> None:
        """Give the trainer its own method back."""
        self._tap.remove()

    # -- private

    def _digested(self, batch: Any) -> Any:
        self._digest = digest_of(batch) if self._compared() else None
        return batch

    def _logged(self, batch: Any) -> Any:
        logged = self._original()
        if logged is not None:
            entry = logged[len(self._step)]
            batch = copied(entry["batch"])
            restore_rng(entry["random"])
        if self._keep:
            self._require_storable(batch)
            self._step.append({"batch": copied(batch), "random": capture_rng()})
        return batch

    def _require_storable(self, batch: Any) -> None:
        if self._accepted:
            return  # a later batch of another type spoils its window and is reported then
        reasons = refusals(batch)
        if reasons:
            raise ConfigurationError(
                f"`batches='log'`: a batch cannot be stored exactly: {'; '.join(reasons[:3])}. Let the loader give tensors, "
                "numbers and strings in lists, tuples and dicts, or use batches='reposition'."
            )
        self._accepted = True
