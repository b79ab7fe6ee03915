"""Digest a batch, to tell whether a restart goes on with the batch of the original run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_64

_WHOLE_NBYTES = 2**18
"""A tensor up to this size counts with all its bytes, so that digesting one takes less than 0.1 ms."""
_BLOCKS, _BLOCK_NBYTES = 64, 2**12
"""Of a larger tensor, this many blocks of this many bytes count, evenly spread."""


def digest_of(batch: Any) -> str:
    """Return the xxh3-64 of a batch's structure and values, the same in every process. Large tensors count in part.

    Values on a device or of unknown type count by their type only: reading them could wait for the device.
    """
    state = xxh3_64()
    _add(state, batch)
    return state.hexdigest()


def _add(state: Any, value: Any) -> None:
    state.update(type(value).__name__.encode())
    if isinstance(value, Tensor):
        state.update(f"{value.dtype}{tuple(value.shape)}".encode())
        if value.device.type == "cpu" and value.layout is torch.strided and not value.is_quantized:
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
        for each in value:
            _add(state, each)
    elif isinstance(value, str | bytes | int | float | complex | None):
        state.update(repr(value).encode())


def _add_bytes(state: Any, array_U8: np.ndarray[Any, Any]) -> None:
    if array_U8.nbytes <= _WHOLE_NBYTES:
        state.update(array_U8)
        return
    for block in range(_BLOCKS):
        start = block * (array_U8.nbytes - _BLOCK_NBYTES) // (_BLOCKS - 1)
        state.update(array_U8[start : start + _BLOCK_NBYTES])
