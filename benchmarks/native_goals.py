"""Judge compiled parts by the goals that were set for them, beside rates of kernels, and of copies from a device by arrangement.

Goals are relative to a baseline of the same run where there is one: absolute rates depend on the host. Without a CUDA device
its goals are listed as not run.

Slices lie apart, because a plan joins neighbours: without gaps whole chunks would be measured, whatever a slice's size.
Copies and the work beside them have streams of their own: on one stream each would wait for the other.
All of it runs on a CPU too, where the figures say nothing, so that tests can execute it.
"""

from __future__ import annotations

import mmap
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
import xxhash
from torch import Tensor

from benchmarks import native
from benchmarks.costs import Cost, Goal
from benchmarks.native import MIB, Action, NativeFigure, figure_of, median
from benchmarks.native_kernels import GoalMeasurement, Kernels
from lightning_moe_ckpt.benchmarks._benchmark import Progress
from lightning_moe_ckpt.native import Copy, CopyEngine, _cuda, _library, explain
from lightning_moe_ckpt.native._cpu import CompiledCpuEngine, CpuCopyEngine
from lightning_moe_ckpt.native._cuda import CompiledCudaEngine, CudaCopyEngine, TorchDevice
from lightning_moe_ckpt.native._library import NativeError
from lightning_moe_ckpt.native._plan import Arrangement, Space

table = native.table
CHUNKS_MIB, DEPTHS = (4, 16, 24, 32, 64), (1, 2)
_SMALL_NBYTES = (4 * 2**10, 16 * 2**10, 64 * 2**10, 256 * 2**10)
_GAP = 256  # bytes between slices, which keep their alignment
_MAX_SLICES = 10_000
_NUM_DELAYS = 300
_LOADS = """
import time
import lightning_moe_ckpt
start = time.perf_counter()
import lightning_moe_ckpt.native as native
native.explain()
print(time.perf_counter() - start)
"""
"""Timed inside one process: the difference of two processes would be noise of the seconds that torch takes."""

GOALS = (
    Goal("G1", "device to host, slices of 1 MiB, of one pinned copy", 95, "%"),
    Goal("G2", "the same while matrices are multiplied, of G1's rate", 90, "%"),
    Goal("G3", "slowdown of those multiplications", 1.5, "%", at_least=False),
    Goal("G4", "slowdown of a loop bound by memory", 3, "%", at_least=False),
    Goal("G5", "delay added to a 4 KiB copy of training, p99", 0.8, "ms", at_least=False),
    Goal("G6", "8192 slices of 4 KiB, of torch's loop", 5, "times"),
    Goal("G7", "time of a submit of 10,000 slices", 50, "us", at_least=False),
    Goal("G8", "CPU of the process while copying", 5, "% of a core", at_least=False),
    Goal("G9", "compression, of torch", 4, "times"),
    Goal("G10", "replay of 8 steps, of torch fused", 4, "times"),
    Goal("G11", "checksum", 8, "GB/s"),
    Goal("G12", "mapping and registering host memory", 4, "GB/s"),
    Goal("G13", "loading both libraries, beyond importing the package", 50, "ms", at_least=False),
)


def measure(options: SimpleNamespace, progress: Progress) -> list[NativeFigure]:
    """Run the benchmark."""
    megabytes, repeats = options.goal_megabytes, options.goal_repeats
    measurements: dict[str, GoalMeasurement] = {
        "G11": lambda: _checksum_rate(megabytes, repeats),
        "G13": lambda: _load_milliseconds(repeats),
    }
    reason = next((f"{part.part} part: {part.reason}" for part in explain() if not part.active), "")
    progress("kernels on the host", 0, 2 if reason else 3)
    figures = [*Kernels(torch.device("cpu"), options.elements, repeats).rates()]
    progress("goals", 1, 2 if reason else 3)
    if reason:
        return [*judge(measurements, reason), *figures]
    device = torch.device("cuda", torch.cuda.current_device())
    copies = DeviceCopies(device, CopyScale(megabytes=megabytes, repeats=repeats))
    kernels = Kernels(device, options.device_elements, repeats)
    figures = [*judge({**copies.goals(), **kernels.goals(), **measurements}, ""), *figures]
    progress("arrangements of copies, and kernels on the device", 2, 3)
    return [*figures, *copies.rates(), *kernels.rates()]


def judge(measurements: Mapping[str, GoalMeasurement], reason: str) -> list[NativeFigure]:
    """Measure a row per goal; a goal without a measurement was not run, for the given reason."""
    rows, how = list[NativeFigure](), "compiled engine"
    for goal in GOALS:
        what, note, measure = f"{goal.name} {goal.what}", f"goal {goal}", measurements.get(goal.name)
        if measure is None:
            note = f"{note}: not run on a GPU: {reason}"
            row = NativeFigure(what=what, how=how, value=None, unit=goal.unit, note=note)
        else:
            row = figure_of(what, how, measure, unit=goal.unit, note=note)
        if row.value is not None:
            row = replace(row, note=f"{note}: {goal.outcome(row.value)}")
        rows.append(row)
    return rows


# -- copies


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyScale:
    """Amount of measuring."""

    megabytes: int = 256
    """Size of a list of copies, in MiB."""
    repeats: int = 7
    matrix: int = 8192
    """Rows and columns of matrices that are multiplied beside copies."""
    loop_seconds: float = 0.5
    """Seconds of each loop of work beside copies."""


class DeviceCopies:
    """Copies from a device into memory that an engine has registered, as a ring is."""

    def __init__(self, device: torch.device, scale: CopyScale) -> None:
        self._device, self._scale, self._module = device, scale, torch.get_device_module(device)
        self._cuda = TorchDevice(device) if device.type == "cuda" else None
        self._of_tensors = self._cuda.device if self._cuda is not None else device
        self._arrangement = partial(Arrangement, has_device=self._cuda is not None)
        self._nbytes = scale.megabytes * MIB
        room = self._nbytes + _MAX_SLICES * _GAP
        self._src = self._cuda.memory(room) if self._cuda is not None else torch.empty(room, dtype=torch.uint8)
        self._src.fill_(1)
        self._ring = torch.frombuffer(mmap.mmap(-1, room), dtype=torch.uint8)
        self._pinned = self._page_locked(self._nbytes)

    def goals(self) -> dict[str, GoalMeasurement]:
        """Return measurements by name of the goal."""
        return {
            "G1": lambda: 100 * self._rate() / self._baseline(),
            "G2": lambda: 100 * self._rate_beside_matrices() / self._rate(),
            "G3": lambda: self._slowdown(self._matrices()),
            "G4": lambda: self._slowdown(self._additions()),
            "G5": self._added_delay,
            "G6": self._small_against_loop,
            "G7": self._submit_microseconds,
            "G8": self._processor_share,
            "G12": self._registration_rate,
        }

    def rates(self) -> Iterator[NativeFigure]:
        """Yield GB/s for every arrangement, and its effect on matrices and on a small training copy."""
        gigabytes = partial(figure_of, unit="GB/s")
        yield gigabytes("device to host", "torch, one pinned copy", self._baseline)
        yield gigabytes("64 KiB slices", "torch's streams, slice by slice", self._rate_of_twin)
        for size, pack in product(_SMALL_NBYTES, (0, 2**30)):
            how = "packed by a kernel" if pack else "copied one by one"
            arrangement = self._arrangement(pack_below=pack)
            yield gigabytes(f"{size // 2**10} KiB slices", how, partial(self._rate, size, arrangement))
        for chunk, depth in product(CHUNKS_MIB, DEPTHS):
            chosen = (self._arrangement(chunk_nbytes=chunk * MIB), depth)
            what = f"1 MiB slices, chunks of {chunk} MiB, {depth} queued"
            yield gigabytes(what, "idle device", partial(self._rate, MIB, *chosen))
            slowdown = lambda chosen=chosen: self._slowdown(self._matrices(), *chosen)  # noqa: E731
            yield figure_of(what, "slowdown of matrices", slowdown, unit="%")
            yield figure_of(what, "added to a 4 KiB copy, p99", partial(self._added_delay, *chosen), unit="ms")

    def slices(self, size: int) -> list[Copy]:
        """Return as many copies of `size` bytes as there is memory for."""
        num = max(1, min(self._nbytes // size, _MAX_SLICES))
        apart = ((num, size), (size + _GAP, 1))
        return list(zip(self._src.as_strided(*apart), self._ring.as_strided(*apart), strict=True))

    def _baseline(self) -> float:
        """Return GB/s of one copy into page-locked memory."""

        def one() -> None:
            self._pinned.copy_(self._src[: self._nbytes], non_blocking=True)
            self._synchronize()

        return self._nbytes / median(one, self._scale.repeats) / 1e9

    def _rate(self, size: int = MIB, arrangement: Arrangement | None = None, depth: int = 1) -> float:
        """Return GB/s with slices of `size` bytes."""
        with self._copying(size, arrangement, depth) as (copy, nbytes):
            return nbytes / median(copy, self._scale.repeats) / 1e9

    @contextmanager
    def _copying(
        self, size: int = MIB, arrangement: Arrangement | None = None, depth: int = 1, most: int = _MAX_SLICES
    ) -> Iterator[tuple[Callable[[], None], int]]:
        """Yield a function that copies a list of slices and waits for them, and their bytes."""
        with self._engine(arrangement, depth) as engine:
            self._register(engine, self._ring)
            copies = self.slices(size)[:most]
            prepared = engine.prepare(copies)
            yield lambda: engine.wait(engine.submit(prepared)), size * len(copies)

    def _engine(self, arrangement: Arrangement | None = None, depth: int = 1) -> closing[CopyEngine]:
        return closing(make_engine(self._device, arrangement or self._arrangement(), depth))

    def _register(self, engine: CopyEngine, memory: Tensor) -> None:
        engine.register(memory)
        if isinstance(engine, CompiledCudaEngine):
            engine.finish_registering()
            if self._cuda is not None and self._cuda.space(memory) != Space.PINNED:
                raise NativeError("The engine could not register host memory; the log says why.")

    def _page_locked(self, nbytes: int) -> Tensor:
        return self._cuda.page_locked(nbytes) if self._cuda is not None else torch.empty(nbytes, dtype=torch.uint8)

    def _rate_of_twin(self) -> float:
        copies = self.slices(64 * 2**10)
        with closing(CudaCopyEngine(self._device) if self._cuda is not None else CpuCopyEngine()) as engine:
            seconds = median(lambda: engine.wait(engine.submit(copies)), self._scale.repeats)
        return 64 * 2**10 * len(copies) / seconds / 1e9

    def _rate_beside_matrices(self) -> float:
        work, rates = self._matrices(), list[float]()
        with self._copying() as (copy, nbytes), self._beside(lambda: rates.append(nbytes / Cost.of(copy).wall / 1e9)):
            self._loop_seconds(work)
        return statistics.median(rates)

    def _slowdown(self, work: Action, arrangement: Arrangement | None = None, depth: int = 1) -> float:
        """Return the percent that `work` takes longer beside copies."""
        self._loop_seconds(work)
        with self._copying(MIB, arrangement, depth) as (copy, _):
            alone = self._loop_seconds(work)
            with self._beside(copy):
                return 100 * (self._loop_seconds(work) / alone - 1)

    def _added_delay(self, arrangement: Arrangement | None = None, depth: int = 1) -> float:
        """Return the milliseconds that the 99th percentile of a small copy to the host rises by."""
        small, host = torch.zeros(1024, device=self._of_tensors), self._page_locked(4096).view(torch.float32)

        def one() -> None:
            host.copy_(small, non_blocking=True)
            self._synchronize()

        def percentile() -> float:
            return sorted(Cost.of(one).wall for _ in range(_NUM_DELAYS))[int(0.99 * _NUM_DELAYS)]

        with self._copying(MIB, arrangement, depth) as (copy, _):
            copy()
            idle = percentile()
            with self._beside(copy):
                return (percentile() - idle) * 1e3

    def _small_against_loop(self) -> float:
        """Return the speed of copies of 4 KiB slices, as a multiple of the speed of torch's copies, slice by slice."""
        num = min(8192, self._nbytes // 4096)
        sources = self._src[: num * 4096].view(num, 4096)
        pairs = list(zip(sources, self._pinned[: num * 4096].view(num, 4096), strict=True))

        def loop() -> None:
            for src, dst in pairs:
                dst.copy_(src, non_blocking=True)
            self._synchronize()

        with self._copying(4096, most=num) as (copy, _):
            return median(loop, self._scale.repeats) / median(copy, self._scale.repeats)

    def _submit_microseconds(self) -> float:
        """Return the calling thread's time, an upper bound on the time under the interpreter lock."""
        seconds = list[float]()
        with self._engine() as engine:
            self._register(engine, self._ring)
            prepared = engine.prepare(self.slices(256))
            for _ in range(self._scale.repeats):
                start = time.perf_counter()
                ticket = engine.submit(prepared)
                seconds.append(time.perf_counter() - start)
                engine.wait(ticket)
        return statistics.median(seconds) * 1e6

    def _processor_share(self) -> float:
        """Return the percent of a core that copying takes."""
        with self._copying() as (copy, _):
            copy()
            cost = Cost.of(lambda: [copy() for _ in range(10 * self._scale.repeats)])
            return 100 * cost.cpu / cost.wall

    def _registration_rate(self) -> float:
        """Return GB/s until a fresh mapping is registered, which copies into it then need not wait for."""
        memory = torch.frombuffer(mmap.mmap(-1, self._nbytes), dtype=torch.uint8)
        with self._engine() as engine:
            return memory.nbytes / Cost.of(lambda: self._register(engine, memory)).wall / 1e9

    def _matrices(self) -> Action:
        shape = (self._scale.matrix, self._scale.matrix)
        matrix, out = (torch.randn(shape, device=self._of_tensors).to(torch.bfloat16) for _ in range(2))
        return lambda: torch.mm(matrix, matrix, out=out)

    def _additions(self) -> Action:
        values = torch.zeros(self._nbytes, device=self._of_tensors)  # 1 GiB where 256 MiB are copied: no cache holds it
        return lambda: values.add_(1.0)

    def _loop_seconds(self, work: Action) -> float:
        """Return the seconds of one call."""
        self._synchronize()
        start, num = time.perf_counter(), 0
        while time.perf_counter() - start < self._scale.loop_seconds:
            for _ in range(8):
                work()
            num += 8
            self._synchronize()
        return (time.perf_counter() - start) / num

    def _synchronize(self) -> None:
        """Wait for this thread's stream only: copies on another stream go on."""
        event: Any = self._module.Event()
        event.record(self._module.current_stream())
        event.synchronize()

    @contextmanager
    def _beside(self, action: Action) -> Iterator[None]:
        """Run `action` again and again, on a thread and a stream, while the block runs; its error ends the block."""
        stop, errors = threading.Event(), list[Exception]()

        def run() -> None:
            try:
                if self._of_tensors.type == "cuda":
                    torch.cuda.set_device(self._of_tensors)
                with self._module.stream(self._module.Stream()):
                    while not stop.is_set():
                        action()
            except Exception as error:  # noqa: BLE001  # thread entry: raised below
                errors.append(error)

        thread = threading.Thread(target=run, name="moe-ckpt-bench", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
        if errors:
            raise errors[0]


def make_engine(device: torch.device, arrangement: Arrangement, depth: int) -> CopyEngine:
    """Return the compiled engine of a device, started, with `depth` chunks queued at a time; that of the CPU queues none.

    Raises:
        NativeError: there is no compiled part for the device.
    """
    if device.type == "cpu":
        cpu = _library.cpu()
        return CompiledCpuEngine(cpu, arrangement) if cpu is not None else CpuCopyEngine()
    library = _library.cuda()
    if library is None:
        raise NativeError(f"The compiled CUDA part is not in use: {_library.status('cuda').reason}.")
    engine = CompiledCudaEngine(library, device, arrangement)
    usual, _cuda._DEPTH = _cuda._DEPTH, depth  # noqa: SLF001  # no argument: users have no use for one
    try:
        engine.start()
    finally:
        _cuda._DEPTH = usual  # noqa: SLF001
    return engine


# -- the host


def _checksum_rate(megabytes: int, repeats: int) -> float:
    data = memoryview(torch.ones(megabytes * MIB, dtype=torch.uint8).numpy())  # type: ignore[arg-type]
    return data.nbytes / median(lambda: xxhash.xxh3_128_hexdigest(data), repeats) / 1e9


def _load_milliseconds(repeats: int) -> float:
    command = [sys.executable, "-c", _LOADS]
    runs = [subprocess.run(command, check=True, capture_output=True) for _ in range(min(repeats, 3))]  # noqa: S603
    return statistics.median(float(run.stdout) for run in runs) * 1e3
