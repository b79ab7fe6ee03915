"""Choose the implementation for a device: the compiled part if it is there and passes its check, else its twin.

The CUDA part is checked once per process, device and use, before the first use. Kernels are compiled for some devices
and translated by the driver for others, and drivers batch copies in different ways. A part that hangs, or whose bytes
differ from its twin's, is not used: a slow snapshot is better than a wrong one. A check takes milliseconds and a few
megabytes. The checked engines and functions are arguments and run on any device, so that tests can check the checks.
"""

from __future__ import annotations

import functools
import mmap
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.errors import CheckpointError
from lightning_moe_ckpt.native import _adam, _library
from lightning_moe_ckpt.native._adam import AdamState, AdamStep
from lightning_moe_ckpt.native._cpu import CompiledCpuEngine, CpuCopyEngine
from lightning_moe_ckpt.native._cuda import CompiledCudaEngine, CudaCopyEngine, TorchDevice
from lightning_moe_ckpt.native._engine import CopyEngine
from lightning_moe_ckpt.native._gradient import (
    MAX_PART_NUMEL,
    CompressedGradient,
    GradientCompression,
    QuantizedGradient,
    SparseGradient,
    check_gradient,
    compress_with,
)
from lightning_moe_ckpt.native._library import Library, NativeError, cpu, status

log = rank_logger(__name__)

_REPEATS = 5
_warn_once = functools.cache(log.warning)


def create_engine(device: torch.device) -> CopyEngine:
    """Return the copy engine for parameters on `device`; compiled if the library is there and passes its check. Raises
    `ValueError` if the device is neither CPU nor CUDA.
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
    """Compress contiguous gradients of float32, bfloat16 or float16 on one device; on CUDA on the current stream,
    without waiting for the device. Raises `ValueError` for any other gradient.

    `how` has thresholds and ratios, the paper's by default; a sparse part covers at most `part_numel` elements, a
    multiple of 2048. On a CPU torch's number of threads is the default. Sparse results have unused room until
    `trimmed()`.
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
    """Replay steps, in the optimizer's order, on parameter and moments, in place; on CUDA on the current stream. All
    steps are by compiled code, or all by one kernel of torch. On a CPU torch's number of threads is the default.

    Raises `ValueError` if a tensor of the state is not float32, not contiguous, or of another shape or device, or a
    gradient does not fit the parameter. Nothing was changed then.
    """
    if steps[0].kernel:
        _adam.replay_kernel(state, steps)
        return
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
    """Return the median rate of a few copies of `nbytes` by the engine of `device` (default: CPU) into mapped memory,
    in bytes per second. Raises `ValueError` if `nbytes` is not positive.
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
    if (library := cuda_for("copies", device)) is None:
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


def _library_for(tensor: Tensor) -> Library | None:
    return cuda_for("compression", tensor.device) if tensor.is_cuda else cpu() if tensor.device.type == "cpu" else None


Use = Literal["copies", "compression", "replay"]
USES: tuple[Use, ...] = get_args(Use)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceVerdict:
    """Result of a check."""

    failure: str | None
    """Reason why the part is not used for this purpose; `None` if it is used."""
    seconds: float


LONGEST = timedelta(seconds=60)
"""Longest wait of training for a check, which takes milliseconds."""
_verdicts: dict[tuple[int, Use], DeviceVerdict] = {}
_stuck: list[Any] = []
"""Engines whose device hangs; kept, because closing or collecting one would never return."""


def cuda_for(use: Use, device: torch.device) -> Library | None:
    """Return the CUDA part if it is there and passes its check on `device`; `None` means that the twins are used."""
    if (library := _library.cuda()) is None:
        return None
    on = TorchDevice(device)
    if (on.index, use) not in _verdicts and on.is_capturing():
        return None  # the work of the check must not become part of a user's graph
    return library if verdict(use, library, torch.device("cuda", on.index)).failure is None else None


def verdict(use: Use, library: Library, device: torch.device) -> DeviceVerdict:
    """Check the part on a CUDA device with an index, or return the earlier result in this process."""
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
        check_compression(partial(compress_with, library), on.device, on.settle)
    else:
        check_replay(partial(_adam.replay_cuda, library), on.device, on.settle)


def _check_engine(library: Library, on: TorchDevice) -> None:
    """Check copies with memory page-locked by torch, and with memory page-locked by the engine."""
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


# -- copies

Memory: TypeAlias = Callable[[int], Tensor]
"""Function that allocates so many bytes as a uint8 tensor."""

PATIENCE = timedelta(seconds=20)
"""Limit for copies that take milliseconds; a longer wait means that the device hangs."""
_UNTOUCHED = 0xA5


class CheckFailed(CheckpointError, RuntimeError):
    """A function gave other bytes than its twin. The device check catches and reports this error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Form:
    """Rows of elements with a gap after each, on both sides."""

    src: torch.dtype = torch.uint8
    dst: torch.dtype = torch.uint8
    rows: int = 1
    count: int
    gap: int = 3

    @property
    def numel(self) -> int:
        """Elements with the gaps."""
        return self.rows * (self.count + self.gap)


_FORMS = (
    *(_Form(count=count) for count in (1, 7, 333)),
    _Form(src=torch.float32, dst=torch.float32, count=257),
    _Form(src=torch.float32, dst=torch.float32, rows=9, count=14),
    *(_Form(src=torch.float32, dst=half, rows=3, count=301) for half in (torch.bfloat16, torch.float16)),
    *(_Form(src=half, dst=torch.float32, rows=3, count=301) for half in (torch.bfloat16, torch.float16)),
    *(_Form(count=count) for count in (100_003, 70_000, 131_072)),  # not packed: several copies of one batch
)
CHECKED_NBYTES = sum(4 * form.numel + 4 for form in _FORMS)


def check_copies(engine: CopyEngine, on_device: Memory, host: Memory) -> None:
    """Check that small, strided, converted and large slices arrive as at the fence, and no other byte changes. Raises
    `CheckFailed` if bytes differ from torch's, `TimeoutError` if the copies did not end.
    """
    _check_direction(engine, "to the host", on_device, host)
    _check_direction(engine, "to the device", host, on_device)


def _check_direction(engine: CopyEngine, where: str, source: Memory, target: Memory) -> None:
    source_U8 = source(CHECKED_NBYTES)
    target_U8 = target(CHECKED_NBYTES)
    given_U8 = torch.zeros(CHECKED_NBYTES, dtype=torch.uint8)
    expected_U8 = torch.full_like(given_U8, _UNTOUCHED)
    for index, (given, expected) in enumerate(zip(_views(given_U8, "src"), _views(expected_U8, "dst"), strict=True)):
        expected.copy_(given.copy_(_values(index, given.numel(), given.dtype).view_as(given)))
    source_U8.copy_(given_U8)
    target_U8.fill_(_UNTOUCHED)
    count, counted = torch.full((1,), 7.0), torch.zeros(1)  # copies of steps, which optimizers keep on the host
    pairs = zip(_views(source_U8, "src"), _views(target_U8, "dst"), strict=True)
    ticket = engine.submit(engine.prepare([*pairs, (count, counted)]))
    engine.fence(ticket)
    source_U8.zero_()
    count.zero_()
    ticket.wait(PATIENCE)
    wrong = (target_U8.cpu() != expected_U8).nonzero()
    if wrong.numel():
        form = [form for start, form in _starts("dst") if start <= int(wrong[0])][-1]
        raise CheckFailed(f"{wrong.numel()} of {CHECKED_NBYTES} bytes copied {where} differ, the first in {form}")
    if float(counted) != 7:
        raise CheckFailed(f"a number on the host arrived as {float(counted)}; it was 7 until after the fence")


def _views(memory_U8: Tensor, side: Literal["src", "dst"]) -> Iterator[Tensor]:
    for start, form in _starts(side):
        dtype: torch.dtype = getattr(form, side)
        flat = memory_U8[start : start + form.numel * dtype.itemsize].view(dtype)
        yield flat.view(form.rows, -1)[:, : form.count]


def _starts(side: Literal["src", "dst"]) -> Iterator[tuple[int, _Form]]:
    """Yield start offsets that are aligned to elements only."""
    at = 0
    for form in _FORMS:
        itemsize = getattr(form, side).itemsize
        at += -at % itemsize
        yield at, form
        at += form.numel * itemsize


def _values(seed: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Return values of every magnitude, without NaN: its bits after a conversion depend on the device."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.uint8:
        return torch.randint(0, 256, (numel,), generator=generator, dtype=dtype)
    return (torch.randn(numel, generator=generator) * torch.logspace(-30, 38, numel)).to(dtype)


# -- compression and replay

Compress: TypeAlias = Callable[[Sequence[Tensor], GradientCompression], list[CompressedGradient]]
KernelReplay: TypeAlias = Callable[[AdamState, Sequence[AdamStep]], None]
Settle: TypeAlias = Callable[[timedelta], None]
"""Function to wait for the work queued on a device, up to a limit."""

_COMPRESSION = GradientCompression(small_numel=2000, num_samples=1024)
_MOMENTS = ("param", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_STATE_NUMEL = 4196


def check_compression(compress: Compress, device: torch.device, settle: Settle = lambda _: None) -> None:
    """Check that compressed gradients of every dtype on `device`, with NaN, infinity and ties, equal the twins' bytes.
    Raises `CheckFailed` if they differ, `TimeoutError` if the device, for which `settle` waits, did not finish.
    """
    gradients = list(_gradients())
    wanted = compress_with(None, gradients, _COMPRESSION)
    found = compress([gradient.to(device) for gradient in gradients], _COMPRESSION)
    settle(PATIENCE)
    for gradient, one, other in zip(gradients, found, wanted, strict=True):
        if type(one) is not type(other) or not _same(one, other):
            what = f"{gradient.numel()} elements of {gradient.dtype}"
            raise CheckFailed(f"{what} were not compressed to the bytes of {type(other).__name__} that torch writes")


def _gradients() -> Iterator[Tensor]:
    for index, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16)):
        for numel in (1, 1000, 5003):
            yield _noise(index, numel).to(dtype)
        odd = _noise(index, 3001)
        odd[100:200], odd[300], odd[1500], odd[3000] = 0.25, torch.nan, -torch.inf, 1e6
        yield odd.to(dtype)
    yield _noise(3, 70_001)  # more tiles than lanes of a warp


def _noise(seed: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def _tensors(compressed: CompressedGradient) -> list[Tensor]:
    if isinstance(compressed, QuantizedGradient):
        return [compressed.values, compressed.scale, compressed.not_finite]
    parts = compressed.trimmed().parts
    return [tensor for part in parts for tensor in (part.values, part.indices, part.tiles, part.counts)]


def _same(one: CompressedGradient, other: CompressedGradient) -> bool:
    pairs = zip(_tensors(one), _tensors(other), strict=True)
    return all(torch.equal(left.cpu().view(torch.uint8), right.cpu().view(torch.uint8)) for left, right in pairs)


def check_replay(replay: KernelReplay, device: torch.device, settle: Settle = lambda _: None) -> None:
    """Check that steps of Adam and AdamW from gradients of every form give the same bits on `device` as on the CPU.
    Raises `CheckFailed` if they differ, `TimeoutError` if the device, for which `settle` waits, did not finish.
    """
    steps = _steps()
    for amsgrad in (False, True):
        wanted = AdamState(*(_noise(index, _STATE_NUMEL).abs() for index in range(4 if amsgrad else 3)))
        state = AdamState(*(tensor.to(device, copy=True) for tensor in wanted.tensors()))
        replay(state, [replace(step, gradient=_moved(step.gradient, device)) for step in steps])
        settle(PATIENCE)
        same = _replay_on_cpu(wanted, steps)
        for name, found, want in zip(_MOMENTS, state.tensors(), wanted.tensors(), strict=False):
            if not same(found.cpu(), want):
                raise CheckFailed(f"`{name}` after {len(steps)} steps, amsgrad={amsgrad}, is not that of the CPU")


def _steps() -> list[AdamStep]:
    draw = partial(_noise, numel=_STATE_NUMEL)
    sparse, small = (
        compress_with(None, [draw(seed)], GradientCompression(small_numel=limit, num_samples=256))[0]
        for seed, limit in ((1, 0), (2, 10**6))
    )
    gradients: list[Any] = [draw(3), draw(4).bfloat16(), draw(5).half(), sparse, small]
    return [
        AdamStep(
            gradient=gradient, step=3 + index, lr=1e-2, weight_decay=0.1, decoupled=index % 2 == 0, maximize=index == 1
        )
        for index, gradient in enumerate(gradients)
    ]


def _moved(gradient: Tensor | CompressedGradient, device: torch.device) -> Any:
    if isinstance(gradient, Tensor):
        return gradient.to(device)
    if isinstance(gradient, QuantizedGradient):
        values, scale, not_finite = (tensor.to(device) for tensor in _tensors(gradient))
        return QuantizedGradient(values, scale, not_finite, gradient.shape)
    names = ("values", "indices", "tiles", "counts")
    parts = (replace(part, **{name: getattr(part, name).to(device) for name in names}) for part in gradient.parts)
    return SparseGradient(tuple(parts), gradient.shape)


def _replay_on_cpu(state: AdamState, steps: Sequence[AdamStep]) -> Callable[[Tensor, Tensor], bool]:
    """Replay the steps on the CPU; return how to compare: the library rounds like the kernel, torch does not."""
    if _library.cpu() is not None:
        _adam.replay_cpu(state, steps, _adam.Arithmetic(fused=True, mkl_root=0))
        return torch.equal
    _adam.replay_torch(state, steps)
    return partial(torch.allclose, rtol=1e-4, atol=1e-6)
