"""Check whether the CUDA part works on a device, once per process, device and use, before the first use.

Kernels are compiled for some devices and translated by the driver for others, and drivers batch copies in different
ways. A part whose bytes differ from its twin's, or that hangs, is not used: a slow snapshot is better than a wrong one.
A check takes milliseconds and a few megabytes.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Literal, get_args

import torch

from lightning_moe_ckpt.native import _adam, _check_kernels, _compress, _library
from lightning_moe_ckpt.native._check_copies import CHECKED_NBYTES, check_copies
from lightning_moe_ckpt.native._compiled_cuda import CompiledCudaEngine
from lightning_moe_ckpt.native._library import Library
from lightning_moe_ckpt.native._torch_device import TorchDevice

log = logging.getLogger(__name__)

Use = Literal["copies", "compression", "replay"]
USES: tuple[Use, ...] = get_args(Use)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceVerdict:
    """Result of a check."""

    failure: str | None
    """Why the part is not used for this purpose; `None` if it is used."""
    seconds: float


LONGEST = timedelta(seconds=60)
"""How long training waits for a check, which takes milliseconds."""
_verdicts: dict[tuple[int, Use], DeviceVerdict] = {}
_stuck: list[Any] = []
"""Engines whose device hangs; kept, because closing or collecting one would never return."""


def cuda_for(use: Use, device: torch.device) -> Library | None:
    """Return the CUDA part if it is there and passes its check on `device`; `None` means that the twins are used."""
    library = _library.cuda()
    if library is None:
        return None
    on = TorchDevice(device)
    if (on.index, use) not in _verdicts and on.is_capturing():
        return None  # the work of the check must not become part of a user's graph
    return library if verdict(use, library, torch.device("cuda", on.index)).failure is None else None


def verdict(use: Use, library: Library, device: torch.device) -> DeviceVerdict:
    """Check the part on a device, or return the earlier result in this process.

    Args:
        use: purpose of the part.
        library: the CUDA part.
        device: CUDA device with an index.
    """
    key = (device.index, use)
    if key not in _verdicts:
        _verdicts[key] = found = _examine(use, library, device)
        if found.failure is not None:
            log.warning(
                "torch does the %s on %s, the compiled CUDA part fails its check: %s", use, device, found.failure
            )
    return _verdicts[key]


def _examine(use: Use, library: Library, device: torch.device) -> DeviceVerdict:
    """Run the check on a thread that can be abandoned, because any call into a driver may hang."""
    said: list[str | None] = []

    def run() -> None:
        try:
            _check(use, library, device)
            said.append(None)
        except Exception as error:  # any failure: training does not depend on this part
            said.append(str(error) or type(error).__name__)
            log.debug("the check of %s on %s failed", use, device, exc_info=error)

    start = time.perf_counter()
    thread = threading.Thread(target=run, name="moe-ckpt-check", daemon=True)
    thread.start()
    thread.join(LONGEST.total_seconds())
    failure = said[0] if said else f"it has not ended after {LONGEST}"
    return DeviceVerdict(failure=failure, seconds=time.perf_counter() - start)


def _check(use: Use, library: Library, device: torch.device) -> None:
    on = TorchDevice(device)
    on.take_thread()
    if use == "copies":
        _check_engine(library, on)
    elif use == "compression":
        _check_kernels.check_compression(partial(_compress.compress_with, library), on.device, on.settle)
    else:
        _check_kernels.check_replay(partial(_adam.replay_cuda, library), on.device, on.settle)


def _check_engine(library: Library, on: TorchDevice) -> None:
    """Check copies with memory that torch has page-locked, and with memory that the engine has."""
    engine = CompiledCudaEngine(library, torch.device("cuda", on.index))
    registered = torch.frombuffer(mmap.mmap(-1, CHECKED_NBYTES), dtype=torch.uint8)
    try:
        engine.register(registered)
        check_copies(engine, on.memory, on.page_locked)
        engine.finish_registering()
        check_copies(engine, on.memory, lambda _: registered)
    except TimeoutError:
        _stuck.append(engine)
        raise
    finally:
        if engine not in _stuck:
            engine.close()
