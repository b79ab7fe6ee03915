"""Whether the CUDA part does on a device what it should: asked once per process, device and use, before the first use.

Kernels are compiled for some devices and translated by the driver for others, and every driver makes batches of copies
in its own way. What gives other bytes than its twin, or none, is not used there: a slow snapshot is better than a wrong
one. A check takes milliseconds and a few megabytes.
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
class Verdict:
    """What a check came to."""

    failure: str | None
    """Why the part is not used for this; `None` if it is."""
    seconds: float


LONGEST = timedelta(seconds=60)
"""How long training waits for a check, which takes milliseconds."""
_verdicts: dict[tuple[int, Use], Verdict] = {}
_stuck: list[Any] = []
"""Engines: closing one of these, or collecting it, would wait for what does not end."""


def cuda_for(use: Use, device: torch.device) -> Library | None:
    """The CUDA part, if it is there and does on `device` what it should; `None`: the twins have to."""
    library = _library.cuda()
    if library is None:
        return None
    on = TorchDevice(device)
    if (on.index, use) not in _verdicts and on.is_capturing():
        return None  # what the check asks of the device must not become part of a user's graph
    return library if verdict(use, library, torch.device("cuda", on.index)).failure is None else None


def verdict(use: Use, library: Library, device: torch.device) -> Verdict:
    """Check the part on a device, or tell what the check in this process found.

    Args:
        use: what it is wanted for.
        library: the CUDA part.
        device: with its index.
    """
    key = (device.index, use)
    if key not in _verdicts:
        _verdicts[key] = found = _examine(use, library, device)
        if found.failure is not None:
            log.warning(
                "torch does the %s on %s, the compiled CUDA part fails its check: %s", use, device, found.failure
            )
    return _verdicts[key]


def _examine(use: Use, library: Library, device: torch.device) -> Verdict:
    """On a thread that can be left behind: a driver that hangs may do so in any call, with the host waiting in it."""
    said: list[str | None] = []

    def run() -> None:
        try:
            _check(use, library, device)
            said.append(None)
        except Exception as error:  # whatever it is, this part is not what training depends on
            said.append(str(error) or type(error).__name__)
            log.debug("the check of %s on %s failed", use, device, exc_info=error)

    start = time.perf_counter()
    thread = threading.Thread(target=run, name="moe-ckpt-check", daemon=True)
    thread.start()
    thread.join(LONGEST.total_seconds())
    failure = said[0] if said else f"it has not ended after {LONGEST}"
    return Verdict(failure=failure, seconds=time.perf_counter() - start)


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
    """Through memory that torch has page-locked and through memory that the engine has."""
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
