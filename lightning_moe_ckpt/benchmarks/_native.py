"""What compiled copies gain on this machine, each beside what torch or Python does in its place.

Many small slices are where calls cost more than bytes; of large ones only memory bandwidth is left. With a CUDA device
the goals for its engine are measured too; without one they are listed as not run. `--first-run` is told in `_first_run`.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import xxhash
from rich.table import Table
from typing_extensions import override

from lightning_moe_ckpt.benchmarks._benchmark import Benchmark, Progress, positive, table_of
from lightning_moe_ckpt.benchmarks._first_run import SECTIONS, first_run
from lightning_moe_ckpt.benchmarks._goals import judge
from lightning_moe_ckpt.benchmarks._goals_measured import DeviceCopies, DeviceKernels, Scale, host_measurements, median
from lightning_moe_ckpt.benchmarks._machine import Machine
from lightning_moe_ckpt.benchmarks._native_compute import compression, replay
from lightning_moe_ckpt.benchmarks._native_figure import NativeFigure
from lightning_moe_ckpt.native import Copy, CopyEngine, CpuCopyEngine, create_engine, explain

SLICE_NBYTES = (256, 16 * 2**10)
_QUICK_NUMEL = 2**18
_WRITE_NBYTES = 16 * 2**20


class NativeBench(Benchmark[NativeFigure]):
    """See the module."""

    name = "native"
    summary = "compiled copies beside those of torch: small slices, strided and converted ones, files, checksums"

    @override
    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--slices", type=positive, default=10_000, help="of one list (default: %(default)s)")
        parser.add_argument("--repeats", type=positive, default=7, help="of every measurement (default: %(default)s)")
        parser.add_argument("--megabytes", type=positive, default=256, help="of large copies (default: %(default)s)")
        parser.add_argument("--elements", type=positive, default=32 * 2**20, help="of gradients (default: %(default)s)")
        parser.add_argument("--device-elements", type=positive, default=10**9, help="on a GPU (default: %(default)s)")
        parser.add_argument("--quick", action="store_true", help=f"gradients of at most {_QUICK_NUMEL} elements")
        parser.add_argument("--out", type=Path, help="folder that gets native.json, with the machine and every figure")
        parser.add_argument(
            "--first-run", action="store_true", help="all that a first run on a GPU should tell, instead"
        )
        parser.add_argument("--only", metavar="A,B", help=f"sections of the first run: {', '.join(SECTIONS)}")

    @override
    def measure(self, options: argparse.Namespace, progress: Progress) -> list[NativeFigure]:
        if options.first_run:
            return first_run(options, progress)
        if options.quick:
            options.elements = min(options.elements, _QUICK_NUMEL)
            options.device_elements = min(options.device_elements, _QUICK_NUMEL)
        parts: list[tuple[str, Callable[[argparse.Namespace], list[NativeFigure]]]] = [
            ("small slices", _small_slices),
            ("strided and converted copies", _forms),
            ("files and checksums", _storage),
            ("compression", lambda chosen: compression(chosen.elements, chosen.repeats)),
            ("replay of Adam", lambda chosen: replay(chosen.elements, chosen.repeats)),
            ("goals", _goals),
        ]
        figures = []
        for done, (what, part) in enumerate(parts):
            progress(what, done, len(parts))
            figures += part(options)
            if options.out is not None:  # after every part: what ends the run early costs only the rest
                write_figures(options.out, figures)
        return figures

    @override
    def table(self, figures: Sequence[NativeFigure]) -> Table:
        rows = [
            [each.what, each.how, "-" if each.value is None else f"{each.value:,.4g} {each.unit}", each.note]
            for each in figures
        ]
        return table_of("Compiled code, medians of wall time", ["what", "how", "", ""], rows)


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
        ("torch, loop of copy_", median(loop, repeats)),
        ("torch, _foreach_copy_", median(lambda: torch._foreach_copy_(destinations, sources), repeats)),
    ]
    engine = create_engine(torch.device("cpu"))
    compiled = not isinstance(engine, CpuCopyEngine)
    found.append(("compiled engine", _engine_seconds(engine, copies, repeats) if compiled else None))
    engine.close()
    return found


def _engine_seconds(engine: CopyEngine, copies: list[Copy], repeats: int) -> float:
    prepared = engine.prepare(copies)
    return median(lambda: engine.wait(engine.submit(prepared)), repeats)


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
    seconds = median(lambda: xxhash.xxh3_128_hexdigest(data), options.repeats)
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
        _direct_write(options),
    ]


def _direct_write(options: argparse.Namespace) -> NativeFigure:
    nbytes = options.megabytes * 2**20
    with mmap.mmap(-1, nbytes) as pages:  # O_DIRECT wants whole, aligned pages
        pages[::4096] = bytes(len(range(0, nbytes, 4096)))
        value, note = None, tempfile.gettempdir()
        try:
            seconds = [_write_direct(pages) for _ in range(min(options.repeats, 3))]
            value = nbytes / statistics.median(seconds) / 1e9
        except OSError as error:
            note = f"{note} refuses it: {error}"
    return NativeFigure(what="file, written past the page cache", how="O_DIRECT", value=value, unit="GB/s", note=note)


def _write_direct(pages: mmap.mmap) -> float:
    with memoryview(pages) as data:
        return _write_seconds(data, os.O_DIRECT)


def _write_seconds(data: memoryview, flags: int = 0) -> float:
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        descriptor = os.open(Path(folder) / "file", os.O_CREAT | os.O_WRONLY | flags, 0o600)
        try:
            done = 0
            while done < len(data):
                with data[done : done + _WRITE_NBYTES] as piece:
                    done += os.write(descriptor, piece)
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
        return time.perf_counter() - started


def write_figures(folder: Path, figures: Sequence[NativeFigure]) -> None:
    """Put `native.json` into `folder`, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    document = {"machine": asdict(Machine.read()), "native": [asdict(figure) for figure in figures]}
    staged = folder / ".native.json"
    staged.write_text(json.dumps(document, indent=2) + "\n")
    staged.replace(folder / "native.json")


def _goals(options: argparse.Namespace) -> list[NativeFigure]:
    on_host = host_measurements(options.megabytes, options.repeats)
    reason = next((f"{part.part} part: {part.reason}" for part in explain() if not part.active), "")
    if reason:
        return judge(on_host, reason)
    device, scale = torch.device("cuda", torch.cuda.current_device()), device_scale(options)
    copies, kernels = DeviceCopies(device, scale), DeviceKernels(device, scale)
    return [*judge({**copies.goals(), **kernels.goals(), **on_host}, ""), *copies.rates(), *kernels.rates()]


def device_scale(options: argparse.Namespace) -> Scale:
    """What the options ask of a device."""
    return Scale(megabytes=options.megabytes, repeats=options.repeats, numel=options.device_elements)
