"""Measure the gain of compiled copies on this machine, beside torch's.

For many small slices calls cost more than bytes; for large slices only memory bandwidth counts. With a CUDA device copies
from there are measured too. Tests show that compiled code and torch give the same bits.
"""

from __future__ import annotations

import statistics
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch
from rich.table import Table

from benchmarks.costs import Cost
from lightning_moe_ckpt.benchmarks._benchmark import Progress, table_of
from lightning_moe_ckpt.native import Copy, CopyEngine, create_engine, explain
from lightning_moe_ckpt.native._cpu import CpuCopyEngine
from lightning_moe_ckpt.native._cuda import CudaCopyEngine, TorchDevice

Action = Callable[[], object]
MIB = 2**20
_SLICE_NBYTES = (256, 16 * 2**10)
_DEVICE_SLICE_NBYTES = (4 * 2**10, 64 * 2**10, MIB)


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
    """Return seconds; the first run also meets untouched memory, and does not count."""
    return in_turns({"": action}, repeats)[""].wall


def measure(options: SimpleNamespace, progress: Progress) -> list[NativeFigure]:
    """Run the benchmark."""
    has_device = all(part.active for part in explain())
    progress("copies on the host", 0, 1 + has_device)
    figures = [*_copies(options)]
    if has_device:
        progress("copies from the device", 1, 2)
        device = torch.device("cuda", torch.cuda.current_device())
        figures += device_copies(device, options.slices, options.megabytes, options.repeats)
    return figures


def table(figures: Sequence[NativeFigure]) -> Table:
    """Return the figures for people."""
    rows = [
        [figure.what, figure.how, "-" if figure.value is None else f"{figure.value:,.4g} {figure.unit}", figure.note]
        for figure in figures
    ]
    return table_of("Compiled code, medians of wall time", ["what", "how", "", ""], rows)


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
