"""Random state of a process: torch on CPU and on every CUDA device, Python, numpy, and generators named by the caller.

`capture_rng` gives values the journal's codec takes. `restore_rng` puts them back so that every generator continues
with the same draws. Generators of data loader workers are not here; they follow from the state at the epoch's start.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lightning_moe_ckpt.errors import IdentityMismatch

RngState: TypeAlias = dict[str, Any]


def capture_rng(generators: Mapping[str, torch.Generator] | None = None) -> RngState:
    """State of all generators of this process, as copies.

    Args:
        generators: those the user made, by a name that is the same in every life of the run.
    """
    state: RngState = {
        "torch": torch.get_rng_state(),
        "python": _python_state(*random.getstate()),
        "numpy": np.random.get_state(legacy=False),  # noqa: NPY002  # the global state is what user code draws from
        "generators": {name: generator.get_state() for name, generator in (generators or {}).items()},
    }
    # A process that has not touched CUDA has drawn nothing there; asking would create contexts on every device.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
        state["cuda_current"] = torch.cuda.current_device()
    return state


@lru_cache(maxsize=1)
def _python_state(version: int, words: tuple[int, ...], gauss: float | None) -> tuple[Any, ...]:
    """As one array: 625 integers would cost the journal more than everything else in it.

    Most programs draw nothing from Python's generator between two moments; the array is shared then, so nobody may write to it.
    """
    array = np.array(words, dtype=np.uint32)
    array.flags.writeable = False
    return (version, array, gauss)


def restore_rng(state: RngState, generators: Mapping[str, torch.Generator] | None = None) -> None:
    """Continue every generator from where `capture_rng` saw it.

    A rank that moved to another local device takes the state of its old device along.

    Raises:
        IdentityMismatch: the named generators are not those that were captured.
    """
    generators = generators or {}
    if set(generators) != set(state["generators"]):
        raise IdentityMismatch(
            f"The checkpoint holds generators {sorted(state['generators'])}, this run registered {sorted(generators)}. "
            "Register the same names as the run that wrote it."
        )
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    np.random.set_state(state["numpy"])  # noqa: NPY002  # as in `capture_rng`
    torch.set_rng_state(state["torch"])
    for name, generator in generators.items():
        generator.set_state(state["generators"][name])
    if "cuda" in state and torch.cuda.is_available():
        _restore_cuda(state["cuda"], state["cuda_current"])


def _restore_cuda(states: list[Tensor], current: int) -> None:
    for device, state in enumerate(states[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state, device)
    torch.cuda.set_rng_state(states[current], torch.cuda.current_device())
