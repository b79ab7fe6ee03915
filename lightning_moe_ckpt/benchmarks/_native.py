"""What compiled copies gain on this machine, each beside what torch or Python does in its place.

Many small slices are where calls cost more than bytes; of large ones only memory bandwidth is left. With a CUDA device
the goals for its engine that need no other load are measured too; without one they are listed as not run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from rich.table import Table
from torch import Tensor
from typing_extensions import override

from lightning_moe_ckpt.benchmarks._benchmark import Benchmark, Progress, positive, table_of
from lightning_moe_ckpt.native import Copy, CopyEngine, CpuCopyEngine, create_engine, explain

SLICE_NBYTES = (256, 16 * 2**10)
_GOALS = ("G1 copy rate of large slices", "G6 rate of 8192 slices of 4 KiB", "G7 time of a submit")


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeFigure:
    """One way to do one thing."""

    what: str
    how: str
    value: float | None
    """Median over runs; `None` if it could not be run here."""
    unit: str
    note: str = ""


class NativeBench(Benchmark[NativeFigure]):
    """See the module."""

    name = "native"
    summary = "compiled copies beside those of torch: small slices, strided and converted ones, files, checksums"

    @override
    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--slices", type=positive, default=10_000, help="of one list (default: %(default)s)")
        parser.add_argument("--repeats", type=positive, default=7, help="of every measurement (default: %(default)s)")
        parser.add_argument("--megabytes", type=positive, default=256, help="of large copies (default: %(default)s)")

    @override
    def measure(self, options: argparse.Namespace, progress: Progress) -> list[NativeFigure]:
        parts: list[tuple[str, Callable[[argparse.Namespace], list[NativeFigure]]]] = [
            ("small slices", _small_slices),
            ("strided and converted copies", _forms),
            ("files and checksums", _storage),
            ("goals of the CUDA engine", _cuda_goals),
        ]
        figures = []
        for done, (what, part) in enumerate(parts):
            progress(what, done, len(parts))
            figures += part(options)
        return figures

    @override
    def table(self, figures: Sequence[NativeFigure]) -> Table:
        rows = [
            [each.what, each.how, "-" if each.value is None else f"{each.value:,.4g} {each.unit}", each.note]
            for each in figures
        ]
        return table_of("Copies, medians of wall time", ["what", "how", "", ""], rows)


def _small_slices(options: argparse.Namespace) -> list[NativeFigure]:
    figures = []
    for nbytes in SLICE_NBYTES:
        memory = torch.ones(options.slices, 2 * nbytes, dtype=torch.uint8)[:, :nbytes]
        slot = torch.zeros(options.slices, nbytes, dtype=torch.uint8)
        copies = list(zip(memory, slot, strict=True))
        what = f"{options.slices} slices of {nbytes} bytes"
        for how, seconds in _ways_to_copy(copies, options.repeats):
            value = options.slices / seconds if seconds is not None else None
            figures.append(NativeFigure(what=what, how=how, value=value, unit="slices/s"))
    return figures


def _ways_to_copy(copies: list[Copy], repeats: int) -> list[tuple[str, float | None]]:
    sources, destinations = [src for src, _ in copies], [dst for _, dst in copies]

    def loop() -> None:
        for src, dst in copies:
            dst.copy_(src)

    found: list[tuple[str, float | None]] = [
        ("torch, loop of copy_", _median(loop, repeats)),
        ("torch, _foreach_copy_", _median(lambda: torch._foreach_copy_(destinations, sources), repeats)),
    ]
    engine = create_engine(torch.device("cpu"))
    compiled = not isinstance(engine, CpuCopyEngine)
    found.append(("compiled engine", _engine_seconds(engine, copies, repeats) if compiled else None))
    engine.close()
    return found


def _engine_seconds(engine: CopyEngine, copies: list[Copy], repeats: int) -> float:
    prepared = engine.prepare(copies)
    return _median(lambda: engine.wait(engine.submit(prepared)), repeats)


def _forms(options: argparse.Namespace) -> list[NativeFigure]:
    """Copies that are no plain run of bytes: one expert of a stack that is sharded inside, and 16-bit weights."""
    numel = options.megabytes * 2**20 // 4
    flat = torch.ones(numel)
    stack = torch.zeros(numel // 1024, 4, 1024)
    forms: list[tuple[str, Copy]] = [
        ("contiguous to every fourth row", (flat[: stack.shape[0] * 1024].view(-1, 1024), stack[:, 1])),
        ("float32 to bfloat16", (flat, torch.zeros(numel, dtype=torch.bfloat16))),
        ("float32 to float16", (flat, torch.zeros(numel, dtype=torch.float16))),
        ("contiguous", (flat, torch.zeros(numel))),
    ]
    figures = []
    for what, (src, dst) in forms:
        for how, seconds in _ways_to_copy([(src, dst)], options.repeats):
            value = src.nbytes / seconds / 1e9 if seconds is not None and "loop" not in how else None
            if "loop" not in how:
                figures.append(NativeFigure(what=f"{what}, one copy", how=how, value=value, unit="GB/s read"))
    return figures


def _storage(options: argparse.Namespace) -> list[NativeFigure]:
    data = memoryview(torch.ones(options.megabytes * 2**20, dtype=torch.uint8).numpy())  # type: ignore[arg-type]
    seconds = _median(lambda: xxhash.xxh3_128_hexdigest(data), options.repeats)
    written = [_write_seconds(data) for _ in range(min(options.repeats, 3))]
    unit = "GB/s"
    return [
        NativeFigure(what="checksum", how="xxh3-128", value=len(data) / seconds / 1e9, unit=unit),
        NativeFigure(
            what="file, written and synced",
            how="write, fdatasync",
            value=len(data) / statistics.median(written) / 1e9,
            unit=unit,
            note=tempfile.gettempdir(),
        ),
    ]


def _write_seconds(data: memoryview) -> float:
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        with (Path(folder) / "file").open("wb", buffering=0) as file:
            done = 0
            while done < len(data):
                done += file.write(data[done:])
            os.fdatasync(file.fileno())
        return time.perf_counter() - started


def _cuda_goals(options: argparse.Namespace) -> list[NativeFigure]:
    """Goals that need no other load on the device; those under load are measured by the `gpu` tests of a session."""
    reason = (
        next(part.reason for part in explain() if part.part == "cuda" and not part.active) if not _has_cuda() else ""
    )
    if reason:
        return [
            NativeFigure(what=goal, how="compiled engine", value=None, unit="", note=f"not run on a GPU: {reason}")
            for goal in _GOALS
        ]
    device = torch.device("cuda", torch.cuda.current_device())
    engine = create_engine(device)
    try:
        return [*_large_goal(engine, device, options), *_small_goals(engine, device, options)]
    finally:
        engine.close()


def _has_cuda() -> bool:
    return all(part.active for part in explain())


def _large_goal(engine: CopyEngine, device: torch.device, options: argparse.Namespace) -> list[NativeFigure]:
    numel = options.megabytes * 2**20
    src, dst = torch.ones(numel, dtype=torch.uint8, device=device), _pinned(numel)

    def alone() -> None:
        dst.copy_(src, non_blocking=True)
        torch.cuda.synchronize(device)

    pairs = list(zip(src.view(-1, 2**20), dst.view(-1, 2**20), strict=True))
    base, ours = _median(alone, options.repeats), _engine_seconds(engine, pairs, options.repeats)
    note = f"goal 95% of one copy: {base / ours:.0%}"
    return [NativeFigure(what=_GOALS[0], how="compiled engine", value=numel / ours / 1e9, unit="GB/s", note=note)]


def _small_goals(engine: CopyEngine, device: torch.device, options: argparse.Namespace) -> list[NativeFigure]:
    src = torch.ones(8192, 8192, dtype=torch.uint8, device=device)[:, :4096]
    copies = list(zip(src, _pinned(8192 * 4096).view(8192, 4096), strict=True))

    def loop() -> None:
        for source, destination in copies:
            destination.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)

    base, ours = _median(loop, options.repeats), _engine_seconds(engine, copies, options.repeats)
    prepared = engine.prepare(copies)
    submits = []
    for _ in range(options.repeats):
        started = time.perf_counter()
        ticket = engine.submit(prepared)
        submits.append(time.perf_counter() - started)
        engine.wait(ticket)
    rate, note = 8192 * 4096 / ours / 1e9, f"goal 5 times torch's loop: {base / ours:.1f}"
    return [
        NativeFigure(what=_GOALS[1], how="compiled engine", value=rate, unit="GB/s", note=note),
        NativeFigure(
            what=_GOALS[2],
            how="compiled engine",
            value=statistics.median(submits) * 1e6,
            unit="us",
            note="goal 50 us or less",
        ),
    ]


def _pinned(nbytes: int) -> Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)


def _median(action: Callable[[], object], repeats: int) -> float:
    """Seconds; the first run, which also meets untouched memory, does not count."""
    seconds = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])
