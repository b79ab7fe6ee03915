"""Choose the implementation for a device: the compiled part if it is there and passes its check, else its twin."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.native import _adam
from lightning_moe_ckpt.native._adam import AdamState, AdamStep
from lightning_moe_ckpt.native._cpu import CompiledCpuEngine, CpuCopyEngine
from lightning_moe_ckpt.native._cuda import CompiledCudaEngine, CudaCopyEngine
from lightning_moe_ckpt.native._device_check import cuda_for
from lightning_moe_ckpt.native._engine import CopyEngine
from lightning_moe_ckpt.native._gradient import (
    MAX_PART_NUMEL,
    CompressedGradient,
    GradientCompression,
    check_gradient,
    compress_with,
)
from lightning_moe_ckpt.native._library import Library, NativeError, cpu, status

log = rank_logger(__name__)

_REPEATS = 5


def create_engine(device: torch.device) -> CopyEngine:
    """Return the copy engine for parameters on `device`; compiled if the library is there and passes its check.

    Raises:
        ValueError: the device is neither CPU nor CUDA.
    """
    if device.type == "cpu":
        library = cpu()
        return CompiledCpuEngine(library) if library is not None else CpuCopyEngine()
    if device.type == "cuda":
        return _compiled_cuda_engine(device) or CudaCopyEngine(device)
    raise ValueError(f"`create_engine(device={device})`: snapshots are taken from 'cpu' and 'cuda' devices only.")


def compress_gradients(
    gradients: Sequence[Tensor],
    how: GradientCompression | None = None,
    *,
    threads: int | None = None,
    part_numel: int = MAX_PART_NUMEL,
) -> list[CompressedGradient]:
    """Compress many gradients; on CUDA on the current stream, without waiting for the device.

    Args:
        gradients: contiguous tensors of float32, bfloat16 or float16, all on one device.
        how: thresholds and ratios; the paper's by default.
        threads: CPU threads; torch's number by default.
        part_numel: most elements of the gradient per sparse part, a multiple of 2048.

    Returns:
        One compressed gradient for each, on the same device. Sparse ones have unused room until `trimmed()`.

    Raises:
        ValueError: a gradient has another dtype, is not contiguous or is on another device than the first.
    """
    for position, gradient in enumerate(gradients):
        check_gradient(gradient, position)
        if gradient.device != gradients[0].device:
            raise ValueError(
                f"Gradient {position} is on {gradient.device}, the first on {gradients[0].device}; "
                "compress the gradients of one device in one call."
            )
    library = _library_for(gradients[0]) if gradients else None
    return compress_with(
        library, gradients, how or GradientCompression(), threads or torch.get_num_threads(), part_numel
    )


def replay_adam(state: AdamState, steps: Sequence[AdamStep], *, threads: int | None = None) -> None:
    """Replay `steps` on `state`, in place; on CUDA on the current stream.

    Args:
        state: parameter and moments.
        steps: steps in the optimizer's order.
        threads: CPU threads; torch's number by default.

    Raises:
        ValueError: a tensor of the state is not float32, not contiguous, or of another shape or device; a gradient does
            not fit the parameter. Nothing was changed then.
    """
    _adam.check_replay_arguments(state, steps)
    arithmetic = _adam.torch_arithmetic() if state.param.device.type == "cpu" else None
    library = cuda_for("replay", state.param.device) if state.param.is_cuda else None
    if arithmetic is not None:
        _adam.replay_cpu(state, steps, arithmetic, threads or torch.get_num_threads())
    elif library is not None:
        _adam.replay_cuda(library, state, steps)
    else:
        _adam.replay_torch(state, steps)


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


def _compiled_cuda_engine(device: torch.device) -> CopyEngine | None:
    library = cuda_for("copies", device)
    if library is None:
        part = status("cuda")
        if part.library is None and "MOE_CKPT_NATIVE=0" not in part.reason:
            _warn_once(f"torch copies snapshots of {device}, which is slower: the compiled CUDA part {part.reason}")
        return None
    engine = CompiledCudaEngine(library, device)
    try:
        engine.start()
    except NativeError as error:
        log.warning("the compiled engine cannot use %s, snapshots go through torch: %s", device, error)
        return None
    return engine


@functools.cache
def _warn_once(message: str) -> None:
    log.warning(message)


def _library_for(tensor: Tensor) -> Library | None:
    return cuda_for("compression", tensor.device) if tensor.is_cuda else cpu() if tensor.device.type == "cpu" else None
