"""Measure how fast this process moves bytes from training memory to host memory; the window planner uses the rate."""

from __future__ import annotations

import statistics
import time

import torch

from lightning_moe_ckpt.native._choice import create_engine

_REPEATS = 5


def measure_bandwidth(nbytes: int, device: torch.device | None = None) -> float:
    """Return the median rate of a few copies of `nbytes` by the engine of `device` (default: CPU) into mapped memory.

    Returns:
        Bytes per second.

    Raises:
        ValueError: `nbytes` is not positive.
    """
    if nbytes <= 0:
        raise ValueError(f"`measure_bandwidth(nbytes={nbytes})` must be positive.")
    device = device if device is not None else torch.device("cpu")
    src = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    dst = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    engine = create_engine(device)
    try:
        seconds = []
        for _ in range(_REPEATS + 1):
            start = time.perf_counter()
            engine.wait(engine.submit([(src, dst)]))
            seconds.append(time.perf_counter() - start)
    finally:
        engine.close()
    return nbytes / statistics.median(seconds[1:])  # the first copy also pays for the thread or the stream
