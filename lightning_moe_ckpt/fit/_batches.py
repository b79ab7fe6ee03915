"""Log batches with the journal, for data that cannot be read twice.

By default a resumed run repositions its loaders, fetches the same batches again, and replays with these. Some pipelines
cannot give the same batches again (a queue, a service, live data). Their batches can be logged instead. Replay then
trains on the logged batches, each with the random state that followed its fetch, exact up to the step at which the
state is dense. Later batches come from the pipeline: the run is valid, but not the same.

A batch is logged as the loader gave it, before any hook of the module or the strategy. A step's batches are part of its
journal record. Every segment reserves twice the size that the first steps needed. A step that needs more makes its
window useless. This is reported, and the next plan reserves twice that step's size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import Tensor
from xxhash import xxh3_64

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.fit._callbacks import resting
from lightning_moe_ckpt.fit._state import copied
from lightning_moe_ckpt.fit.loops._taps import BatchTap
from lightning_moe_ckpt.journal import capture_rng, refusals, restore_rng

log = rank_logger(__name__)

Batches = Literal["reposition", "log"]

Logged = Sequence[dict[str, Any]]


class BatchLog:
    """Log or digest the batches of the current step; in replay, give the batches of the original step.

    Args:
        trainer: the trainer whose batches are logged.
        mode: `log` logs every batch, `reposition` none.
        keep: whether replay needs batches; false where every snapshot is complete.
        original: in replay, returns the original batches of the current step; else `None`.
        compared: returns whether the fetched batch is compared, now or by a later process.
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
        """Return the mode."""
        return {"mode": self._mode}

    def follow(self, state: dict[str, Any]) -> None:
        """Do nothing: the mode does not change during a run."""

    def restore(self, state: dict[str, Any]) -> None:
        """Log how exact this resume is. Raises `ConfigurationError` if the checkpoint has the other mode."""
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
        """Return the logged batches of the step that just ended, in order, for its journal."""
        batches, self._step = self._step, []
        return batches

    def take_digest(self) -> str | None:
        """Return the digest of the last fetched batch; `None` if the batch is not compared."""
        digest, self._digest = self._digest, None
        return digest

    def remove(self) -> None:
        """Undo the change to the trainer's method."""
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
            return  # a later batch of another type makes its window useless, which is reported then
        reasons = refusals(batch)
        if reasons:
            raise ConfigurationError(
                f"`batches='log'`: a batch cannot be stored exactly: {'; '.join(reasons[:3])}. Let the loader give tensors, "
                "numbers and strings in lists, tuples and dicts, or use batches='reposition'."
            )
        self._accepted = True


_WHOLE_NBYTES = 2**18
"""Largest tensor, in bytes, that is digested whole, in less than 0.1 ms."""
_OF_NUMPY = {torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool}
"""The commonest types known to numpy as well, with the same bytes."""
_BLOCKS, _BLOCK_NBYTES = 64, 2**12
"""Number and bytes of the blocks, evenly spread, by which a larger tensor is digested."""


def digest_of(batch: Any) -> str:
    """Return the xxh3-64 of a batch's structure and values, the same in every process. Large tensors count in part.

    Values on a device or of unknown type count by type only: reading them could wait for the device.
    """
    state = xxh3_64()
    _add(state, batch)
    return state.hexdigest()


def _add(state: Any, value: Any) -> None:
    state.update(type(value).__name__.encode())
    if isinstance(value, Tensor):
        state.update(f"{value.dtype}{tuple(value.shape)}".encode())
        if value.is_cpu and value.dtype in _OF_NUMPY and value.is_contiguous() and not value.is_neg():
            _add_bytes(state, value.detach().numpy())  # usually; the calls below take four times as long
        elif value.device.type == "cpu" and value.layout is torch.strided and not value.is_quantized:
            _add_bytes(
                state, value.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy()
            )
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        state.update(f"{value.dtype}{value.shape}".encode())
        _add_bytes(state, np.ascontiguousarray(value).reshape(-1).view(np.uint8))
    elif isinstance(value, Mapping):
        for key in value:
            _add(state, key)  # not its `repr`, which may hold an address
            _add(state, value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            _add(state, item)
    elif isinstance(value, str | bytes | int | float | complex | None):
        state.update(repr(value).encode())


def _add_bytes(state: Any, array: np.ndarray[Any, Any]) -> None:
    if array.nbytes <= _WHOLE_NBYTES:
        state.update(array)
        return
    array_U8 = array.reshape(-1).view(np.uint8)
    for block in range(_BLOCKS):
        start = block * (array_U8.nbytes - _BLOCK_NBYTES) // (_BLOCKS - 1)
        state.update(array_U8[start : start + _BLOCK_NBYTES])
