"""What compiled copies and kernels gain on this machine, each beside what torch or Python does in its place.

Many small slices are where calls cost more than bytes; of large ones only memory bandwidth is left. With a CUDA device
the goals for its engine are measured too; without one they are listed as not run. `--first-run` is told in `_first_run`.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import torch
import xxhash
from rich.table import Table

from lightning_moe_ckpt.benchmarks._benchmark import Machine, Progress, table_of, write_document
from lightning_moe_ckpt.benchmarks._first_run import first_run
from lightning_moe_ckpt.benchmarks._native_copies import MIB, CopyScale, DeviceCopies
from lightning_moe_ckpt.benchmarks._native_goals import Action, GoalMeasurement, NativeFigure, in_turns, judge, median
from lightning_moe_ckpt.benchmarks._native_kernels import Kernels
from lightning_moe_ckpt.native import Copy, CpuCopyEngine, create_engine, explain

_SLICE_NBYTES = (256, 16 * 2**10)
_QUICK_NUMEL = 2**18
_LOADS = """
import time
import lightning_moe_ckpt
start = time.perf_counter()
import lightning_moe_ckpt.native as native
native.explain()
print(time.perf_counter() - start)
"""
"""Timed inside one process: the difference of two processes would be noise of the seconds that torch takes."""


def measure(options: SimpleNamespace, progress: Progress) -> list[NativeFigure]:
    """Run the benchmark."""
    if options.first_run:
        return first_run(options, progress)
    if options.quick:
        options.elements = min(options.elements, _QUICK_NUMEL)
        options.device_elements = min(options.device_elements, _QUICK_NUMEL)
    parts: list[tuple[str, Callable[[SimpleNamespace], Iterator[NativeFigure]]]] = [
        ("copies", _copies),
        ("compression and replay", _kernels),
        ("goals", _goals),
    ]
    figures = list[NativeFigure]()
    for done, (what, part) in enumerate(parts):
        progress(what, done, len(parts))
        figures += part(options)
        if options.out is not None:  # after every part: what ends the run early costs only the rest
            write_figures(options.out, figures)
    return figures


def table(figures: Sequence[NativeFigure]) -> Table:
    """Return the figures for people."""
    rows = [
        [each.what, each.how, "-" if each.value is None else f"{each.value:,.4g} {each.unit}", each.note]
        for each in figures
    ]
    return table_of("Compiled code, medians of wall time", ["what", "how", "", ""], rows)


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
    """Lists of copies with what they amount to, and of what: a rate is this by seconds."""
    for nbytes in _SLICE_NBYTES:
        memory = torch.ones(num_slices, 2 * nbytes, dtype=torch.uint8)[:, :nbytes]
        copies = list(zip(memory, torch.zeros(num_slices, nbytes, dtype=torch.uint8), strict=True))
        yield f"{num_slices} slices of {nbytes} bytes", copies, num_slices, "slices/s"
    flat, stack = torch.ones(numel), torch.zeros(numel // 1024, 4, 1024)
    rows = flat[: stack.shape[0] * 1024].view(-1, 1024)
    for (
        what,
        src,
        dst,
    ) in (  # one expert of a stack that is sharded inside, and 16-bit weights, are no plain run of bytes
        ("contiguous to every fourth row", rows, stack[:, 1]),
        ("float32 to bfloat16", flat, torch.zeros(numel, dtype=torch.bfloat16)),
        ("float32 to float16", flat, torch.zeros(numel, dtype=torch.float16)),
        ("contiguous", flat, torch.zeros(numel)),
    ):
        yield f"{what}, one copy", [(src, dst)], src.nbytes / 1e9, "GB/s read"


def _kernels(options: SimpleNamespace) -> Iterator[NativeFigure]:
    return Kernels(torch.device("cpu"), options.elements, options.repeats).rates()


def _goals(options: SimpleNamespace) -> Iterator[NativeFigure]:
    on_host = _host_goals(options.megabytes, options.repeats)
    reason = next((f"{part.part} part: {part.reason}" for part in explain() if not part.active), "")
    if reason:
        yield from judge(on_host, reason)
        return
    device = torch.device("cuda", torch.cuda.current_device())
    copies = DeviceCopies(device, CopyScale(megabytes=options.megabytes, repeats=options.repeats))
    kernels = Kernels(device, options.device_elements, options.repeats)
    yield from judge({**copies.goals(), **kernels.goals(), **on_host}, "")
    yield from copies.rates()
    yield from kernels.rates()


def _host_goals(megabytes: int, repeats: int) -> dict[str, GoalMeasurement]:
    """Those goals that need no device."""
    return {"G11": lambda: _checksum_rate(megabytes, repeats), "G13": lambda: _load_milliseconds(repeats)}


def _checksum_rate(megabytes: int, repeats: int) -> float:
    data = memoryview(torch.ones(megabytes * MIB, dtype=torch.uint8).numpy())  # type: ignore[arg-type]
    return data.nbytes / median(lambda: xxhash.xxh3_128_hexdigest(data), repeats) / 1e9


def _load_milliseconds(repeats: int) -> float:
    command = [sys.executable, "-c", _LOADS]
    runs = [subprocess.run(command, check=True, capture_output=True) for _ in range(min(repeats, 3))]  # noqa: S603
    return statistics.median(float(run.stdout) for run in runs) * 1e3


def write_figures(folder: Path, figures: Sequence[NativeFigure]) -> None:
    """Put `native.json` into `folder`, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    write_document(folder / "native.json", {"machine": Machine.read(), "native": figures})
