"""Measure the gain of compiled copies and kernels on this machine, each beside torch or Python.

For many small slices calls cost more than bytes; for large slices only memory bandwidth counts. With a CUDA device its
copies and kernels are measured too. Tests show that compiled code and torch give the same bits.
"""

from __future__ import annotations

import statistics
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import product
from types import SimpleNamespace

import torch
from rich.table import Table
from torch import Tensor

from lightning_moe_ckpt.benchmarks._benchmark import Cost, Progress, table_of
from lightning_moe_ckpt.native import (
    AdamState,
    AdamStep,
    CompressedGradient,
    Copy,
    CopyEngine,
    CpuCopyEngine,
    CudaCopyEngine,
    compress_gradients,
    create_engine,
    decompress_gradient,
    explain,
    replay_adam,
)
from lightning_moe_ckpt.native._cuda import TorchDevice

Action = Callable[[], object]
MIB = 2**20
_SLICE_NBYTES = (256, 16 * 2**10)
_DEVICE_SLICE_NBYTES = (4 * 2**10, 64 * 2**10, MIB)
SMALL_NUMEL = 99_999
"""The largest tensor that becomes INT8."""
NUM_STEPS = (1, 4, 8)
_KEPT, _NUM_SAMPLES = 0.01, 32_768
_LR, _WEIGHT_DECAY = 1e-3, 0.01
_QUEUED = 4
"""Calls queued on a device at a time: they hide the host's work in between, as in training."""
OURS, SAMPLED, FUSED = "compiled", "torch, sampled threshold", "torch, fused=True"


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeFigure:
    """One way to do one thing."""

    what: str
    how: str
    value: float | None
    """Median over runs; `None` if it could not be run here."""
    unit: str
    note: str = ""
    traceback: str = ""
    """Traceback of the error that left it without a value."""


def figure_of(what: str, how: str, measure: Callable[[], float], *, unit: str, note: str = "") -> NativeFigure:
    """Return a row with the result of `measure`; a failure must not cost the other rows, and has its traceback in the row."""
    try:
        return NativeFigure(what=what, how=how, value=measure(), unit=unit, note=note)
    except Exception as error:  # noqa: BLE001  # kept whole, in the row
        said, where = f"FAILED: {type(error).__name__}: {error}", traceback.format_exc()
        note = f"{note}: {said}" if note else said
        return NativeFigure(what=what, how=how, value=None, unit=unit, note=note, traceback=where)


def in_turns(ways: Mapping[str, Action], repeats: int) -> dict[str, Cost]:
    """Run each way once per round, so that other load of the machine hits all ways alike; the first round does not count."""
    costs: dict[str, list[Cost]] = {how: [] for how in ways}
    for _ in range(repeats + 1):
        for how, action in ways.items():
            costs[how].append(Cost.of(action))
    return {how: Cost(*map(statistics.median, zip(*found[1:], strict=True))) for how, found in costs.items()}


def median(action: Action, repeats: int) -> float:
    """Return seconds; the first run, which also meets untouched memory, does not count."""
    return in_turns({"": action}, repeats)[""].wall


def measure(options: SimpleNamespace, progress: Progress) -> list[NativeFigure]:
    """Run the benchmark."""
    parts: list[tuple[str, Callable[[SimpleNamespace], Iterator[NativeFigure]]]] = [
        ("copies", _copies),
        ("compression and replay", lambda _: Kernels(torch.device("cpu"), options.elements, options.repeats).rates()),
    ]
    if all(part.active for part in explain()):
        parts.append(("device", _device))
    figures = list[NativeFigure]()
    for done, (what, part) in enumerate(parts):
        progress(what, done, len(parts))
        figures += part(options)
    return figures


def table(figures: Sequence[NativeFigure]) -> Table:
    """Return the figures for people."""
    rows = [
        [figure.what, figure.how, "-" if figure.value is None else f"{figure.value:,.4g} {figure.unit}", figure.note]
        for figure in figures
    ]
    return table_of("Compiled code, medians of wall time", ["what", "how", "", ""], rows)


def _device(options: SimpleNamespace) -> Iterator[NativeFigure]:
    device = torch.device("cuda", torch.cuda.current_device())
    yield from device_copies(device, options.slices, options.megabytes, options.repeats)
    yield from Kernels(device, options.device_elements, options.repeats).rates()


def device_copies(device: torch.device, num_slices: int, megabytes: int, repeats: int) -> Iterator[NativeFigure]:
    """Yield GB/s from a device into page-locked memory, in one copy and in slices, at most `num_slices` of a size."""
    runtime, nbytes = TorchDevice(device), megabytes * MIB
    memories = runtime.memory(nbytes), runtime.page_locked(nbytes)
    with closing(CudaCopyEngine(runtime.device)) as torchs, closing(create_engine(device)) as ours:
        for size in (nbytes // 2, *_DEVICE_SLICE_NBYTES):
            # Only every other one: a plan joins neighbours.
            slices = [memory.view(-1, 2 * size)[:num_slices, :size] for memory in memories]
            copies = list(zip(*slices, strict=True))
            for how, engine in (("torch's streams", torchs), ("compiled engine", ours)):
                rate = partial(_rate, engine, copies, repeats)
                yield figure_of(f"device to host, {len(copies)} x {size // 2**10} KiB", how, rate, unit="GB/s")


def _rate(engine: CopyEngine, copies: Sequence[Copy], repeats: int) -> float:
    prepared = engine.prepare(copies)
    seconds = median(lambda: engine.wait(engine.submit(prepared)), repeats)
    return sum(src.nbytes for src, _ in copies) / seconds / 1e9


def _copies(options: SimpleNamespace) -> Iterator[NativeFigure]:
    ours = "compiled engine"
    with closing(create_engine(torch.device("cpu"))) as engine:
        for what, copies, amount, unit in _lists(options.slices, options.megabytes * MIB // 4):
            ways = _torch_ways(copies)
            if not isinstance(engine, CpuCopyEngine):
                prepared = engine.prepare(copies)
                ways[ours] = lambda prepared=prepared: engine.wait(engine.submit(prepared))  # type: ignore[misc]
            costs = in_turns(ways, options.repeats)
            for how in dict.fromkeys([*ways, ours]):
                value = amount / costs[how].wall if how in costs else None
                yield NativeFigure(what=what, how=how, value=value, unit=unit)


def _torch_ways(copies: Sequence[Copy]) -> dict[str, Action]:
    sources, destinations = [src for src, _ in copies], [dst for _, dst in copies]

    def loop() -> None:
        for src, dst in copies:
            dst.copy_(src)

    return {
        "torch, loop of copy_": loop,
        "torch, _foreach_copy_": lambda: torch._foreach_copy_(destinations, sources),  # the optimizers' own
    }


def _lists(num_slices: int, numel: int) -> Iterator[tuple[str, list[Copy], float, str]]:
    """Yield name, copies, amount and unit of each list; a rate is the amount by seconds."""
    for nbytes in _SLICE_NBYTES:
        memory = torch.ones(num_slices, 2 * nbytes, dtype=torch.uint8)[:, :nbytes]
        copies = list(zip(memory, torch.zeros(num_slices, nbytes, dtype=torch.uint8), strict=True))
        yield f"{num_slices} slices of {nbytes} bytes", copies, num_slices, "slices/s"
    flat, stack = torch.ones(numel), torch.zeros(numel // 1024, 4, 1024)
    rows = flat[: stack.shape[0] * 1024].view(-1, 1024)
    # One expert of a stack that is sharded inside, and 16-bit weights, are no plain run of bytes.
    ways = (
        ("contiguous to every fourth row", rows, stack[:, 1]),
        ("float32 to bfloat16", flat, torch.zeros(numel, dtype=torch.bfloat16)),
        ("float32 to float16", flat, torch.zeros(numel, dtype=torch.float16)),
        ("contiguous", flat, torch.zeros(numel)),
    )
    for what, src, dst in ways:
        yield f"{what}, one copy", [(src, dst)], src.nbytes / 1e9, "GB/s read"


# -- kernels


class Kernels:
    """Time of kernels on one device.

    Args:
        device: where gradients are.
        numel: elements of the largest gradient that is compressed; on a device a fifth of it is replayed.
        repeats: runs of each measurement.
    """

    def __init__(self, device: torch.device, numel: int, repeats: int) -> None:
        self._device, self._repeats, self._on_cpu = device, repeats, device.type == "cpu"
        self._numel = numel if self._on_cpu else min(numel, torch.cuda.mem_get_info(device)[0] // 32)
        self._replayed = numel if self._on_cpu else self._numel // 5

    def rates(self) -> Iterator[NativeFigure]:
        """Yield milliseconds, with the processor's time or, of a device, the rate at which memory must be read and written."""
        for numel in [self._numel] if self._on_cpu else sorted({10**6, 10**7, self._numel}):
            for dtype in (torch.float32, torch.bfloat16):
                ways = self.compressions(numel, dtype)
                yield from self._rows(f"1% of {numel} {str(dtype)[6:]}", ways, numel * dtype.itemsize)
        gradient = self._randn(SMALL_NUMEL)
        ways = {OURS: lambda: compress_gradients([gradient]), "torch": lambda: _int8(gradient)}
        yield from self._rows(f"INT8 of {SMALL_NUMEL} float32", ways, 4 * SMALL_NUMEL)
        for kind, num_steps in product(("plain", "compressed"), NUM_STEPS):
            what = f"AdamW, {num_steps} steps, {kind}, {self._replayed}"
            yield from self._rows(what, self.replays(kind, num_steps), 24 * self._replayed)

    def _rows(self, what: str, ways: Mapping[str, Action], nbytes: int) -> Iterator[NativeFigure]:
        costs = dict[str, Cost]()
        first = figure_of(what, OURS, lambda: costs.update(self.costs(ways)) or 0.0, unit="ms")
        if not costs:
            yield first
        for how, cost in costs.items():
            note = f"CPU {cost.cpu * 1e3:,.4g} ms" if self._on_cpu else f"{nbytes / cost.wall / 1e12:.3g} TB/s"
            yield NativeFigure(what=what, how=how, value=cost.wall * 1e3, unit="ms", note=note)

    def costs(self, ways: Mapping[str, Action]) -> dict[str, Cost]:
        if self._on_cpu:
            return in_turns(ways, self._repeats)
        queued = {how: lambda action=action: self._queue(action) for how, action in ways.items()}
        costs = in_turns(queued, self._repeats)
        return {how: Cost(cost.wall / _QUEUED, cost.cpu / _QUEUED) for how, cost in costs.items()}

    def _queue(self, action: Action) -> None:
        for _ in range(_QUEUED):
            action()
        torch.cuda.synchronize(self._device)

    def compressions(self, numel: int, dtype: torch.dtype) -> dict[str, Action]:
        gradient = self._randn(numel).to(dtype)
        ways: dict[str, Action] = {OURS: lambda: compress_gradients([gradient]), SAMPLED: lambda: _sampled(gradient)}
        return ways | ({"torch, exact topk": lambda: _topk(gradient)} if self._on_cpu else {})

    def replays(self, kind: str, num_steps: int) -> dict[str, Action]:
        gradient: Tensor | CompressedGradient = self._randn(self._replayed)
        if kind == "compressed" and isinstance(gradient, Tensor):
            (gradient,) = compress_gradients([gradient])
        chosen = (self._randn(self._replayed), gradient, num_steps)
        return {
            OURS: _replay(*chosen),
            "torch, foreach=False": _torch_steps(*chosen),
            FUSED: _torch_steps(*chosen, fused=True),
        }

    def _randn(self, numel: int) -> Tensor:
        return torch.randn(numel, device=self._device, generator=torch.Generator(self._device).manual_seed(1))


def _replay(weights: Tensor, gradient: Tensor | CompressedGradient, num_steps: int) -> Action:
    """Return a function that takes a state through the steps with `replay_adam`."""
    state = AdamState(weights.clone(), torch.zeros_like(weights), torch.zeros_like(weights))
    steps = [AdamStep(gradient=gradient, step=1 + n, lr=_LR, weight_decay=_WEIGHT_DECAY) for n in range(num_steps)]
    return lambda: replay_adam(state, steps)


def _torch_steps(
    weights: Tensor, gradient: Tensor | CompressedGradient, num_steps: int, *, fused: bool = False
) -> Action:
    """Return a function that takes torch's optimizer through the steps, each from a decompressed gradient."""
    param = torch.nn.Parameter(weights.clone())
    optimizer = torch.optim.AdamW([param], lr=_LR, weight_decay=_WEIGHT_DECAY, foreach=False, fused=fused)

    def take() -> None:
        for _ in range(num_steps):
            whole = gradient if isinstance(gradient, Tensor) else decompress_gradient(gradient)
            param.grad = whole.to(torch.float32).view_as(param)
            optimizer.step()

    return take


def _int8(gradient: Tensor) -> tuple[Tensor, Tensor]:
    scale = gradient.abs().max() / 127
    return (gradient / scale).round_().clamp_(-127, 127).to(torch.int8), scale.view(1)


def _sampled(gradient: Tensor) -> tuple[Tensor, Tensor]:
    magnitudes = gradient.abs()
    sample = magnitudes[:: max(gradient.numel() // _NUM_SAMPLES, 1)].float()
    threshold = sample.kthvalue(max(int(sample.numel() * (1 - _KEPT)), 1)).values
    indices = (magnitudes >= threshold).nonzero().flatten()
    return gradient[indices].half(), indices.int()


def _topk(gradient: Tensor) -> tuple[Tensor, Tensor]:
    indices = gradient.abs().topk(max(int(gradient.numel() * _KEPT), 1)).indices
    return gradient[indices].half(), indices.int()
