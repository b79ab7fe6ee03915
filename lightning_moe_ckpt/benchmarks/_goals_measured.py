"""Measurements of the goals. Those that need a device have never run on one; each returns what its goal is stated in."""

from __future__ import annotations

import mmap
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import xxhash
from torch import Tensor

from lightning_moe_ckpt.benchmarks._goals import Measurement
from lightning_moe_ckpt.native import (
    AdamState,
    AdamStep,
    Copy,
    CopyEngine,
    compress_gradients,
    decompress_gradient,
    replay_adam,
)

_MATRIX = 8192
_LOOP_SECONDS = 1.5
_NUM_DELAYS = 400
_LOADS = """
import time
import lightning_moe_ckpt
start = time.perf_counter()
import lightning_moe_ckpt.native as native
native.explain()
print(time.perf_counter() - start)
"""
"""Timed inside one process: the difference of two processes would be noise of the seconds that torch takes."""


def host_measurements(megabytes: int, repeats: int) -> dict[str, Measurement]:
    """Those that need no device."""
    return {"G11": lambda: _checksum_rate(megabytes, repeats), "G13": lambda: _load_milliseconds(repeats)}


def _checksum_rate(megabytes: int, repeats: int) -> float:
    data = memoryview(torch.ones(megabytes * 2**20, dtype=torch.uint8).numpy())  # type: ignore[arg-type]
    return data.nbytes / _median(lambda: xxhash.xxh3_128_hexdigest(data), repeats) / 1e9


def _load_milliseconds(repeats: int) -> float:
    command = [sys.executable, "-c", _LOADS]
    runs = [subprocess.run(command, check=True, capture_output=True) for _ in range(min(repeats, 3))]  # noqa: S603
    return statistics.median(float(run.stdout) for run in runs) * 1e3


class CudaMeasurements:
    """Of one engine on one device.

    Args:
        engine: to be measured; stays the caller's.
        device: its device.
        megabytes: of large copies, in units of 2^20 bytes.
        repeats: of every measurement.
        numel: of compressed gradients and replayed parameters.
    """

    def __init__(self, engine: CopyEngine, device: torch.device, megabytes: int, repeats: int, numel: int) -> None:
        self._engine, self._device, self._repeats, self._numel = engine, device, repeats, numel
        self._src = torch.ones(megabytes * 2**20, dtype=torch.uint8, device=device)
        self._dst = torch.zeros(megabytes * 2**20, dtype=torch.uint8, pin_memory=True)
        self._large = engine.prepare(list(zip(self._src.view(-1, 2**20), self._dst.view(-1, 2**20), strict=True)))

    def all(self) -> dict[str, Measurement]:
        """By name of the goal."""
        return {
            "G1": self.large_copies,
            "G2": self.large_copies_beside_matrices,
            "G3": lambda: self._slowdown(self._matrices()),
            "G4": lambda: self._slowdown(self._additions()),
            "G5": self.delay,
            "G6": self.small_copies,
            "G7": self.submit,
            "G8": self.processor,
            "G9": self.compression,
            "G10": self.replay,
            "G12": self.registration,
        }

    def large_copies(self) -> float:
        """Percent of the rate of one copy."""

        def one() -> None:
            self._dst.copy_(self._src, non_blocking=True)
            torch.cuda.synchronize(self._device)

        return 100 * _median(one, self._repeats) / _median(self._copy, self._repeats)

    def large_copies_beside_matrices(self) -> float:
        """Percent of the rate on an idle device."""
        idle, work, copied = _median(self._copy, self._repeats), self._matrices(), list[float]()
        with _in_background(lambda: copied.append(_seconds(self._copy))):
            self._loop_milliseconds(work)
        return 100 * idle / statistics.median(copied)

    def delay(self) -> float:
        """Milliseconds that the 99th percentile rises by."""
        small, host = torch.zeros(1024, device=self._device), torch.empty(1024, pin_memory=True)

        def one() -> None:
            host.copy_(small, non_blocking=True)
            torch.cuda.current_stream(self._device).synchronize()

        idle = self._percentile(one)
        with _in_background(self._copy):
            busy = self._percentile(one)
        return (busy - idle) * 1e3

    def small_copies(self) -> float:
        """Times as fast as a loop of torch's copies."""
        copies = self._rows(8192, 4096)
        prepared = self._engine.prepare(copies)

        def loop() -> None:
            for src, dst in copies:
                dst.copy_(src, non_blocking=True)
            torch.cuda.synchronize(self._device)

        ours = _median(lambda: self._engine.wait(self._engine.submit(prepared)), self._repeats)
        return _median(loop, self._repeats) / ours

    def submit(self) -> float:
        """Microseconds of the calling thread, an upper bound of the time that it holds the interpreter lock."""
        prepared, seconds = self._engine.prepare(self._rows(10_000, 256)), list[float]()
        for _ in range(self._repeats):
            start = time.perf_counter()
            ticket = self._engine.submit(prepared)
            seconds.append(time.perf_counter() - start)
            self._engine.wait(ticket)
        return statistics.median(seconds) * 1e6

    def processor(self) -> float:
        """Percent of a core."""
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(10 * self._repeats):
            self._copy()
        return 100 * (time.process_time() - cpu) / (time.perf_counter() - wall)

    def compression(self) -> float:
        """Times as fast as torch with a sampled threshold."""
        gradient = torch.randn(self._numel, device=self._device)

        def torch_way() -> tuple[Tensor, Tensor]:
            magnitudes = gradient.abs()
            sample = magnitudes[:: max(self._numel // 32_768, 1)]
            threshold = sample.kthvalue(max(int(sample.numel() * 0.99), 1)).values
            indices = (magnitudes >= threshold).nonzero().flatten()
            return gradient[indices].half(), indices.int()

        return self._device_median(torch_way) / self._device_median(lambda: compress_gradients([gradient]))

    def replay(self) -> float:
        """Times as fast as torch's fused AdamW with a decompression per step."""
        (gradient,) = compress_gradients([torch.randn(self._numel, device=self._device)])
        state = AdamState(*(torch.zeros(self._numel, device=self._device) for _ in range(3)))
        steps = [AdamStep(gradient=gradient, step=1 + index, lr=1e-3) for index in range(8)]
        param = torch.nn.Parameter(torch.zeros(self._numel, device=self._device))
        optimizer = torch.optim.AdamW([param], lr=1e-3, fused=True)

        def torch_way() -> None:
            for _ in steps:
                param.grad = decompress_gradient(gradient).view_as(param)
                optimizer.step()

        return self._device_median(torch_way) / self._device_median(lambda: replay_adam(state, steps))

    def registration(self) -> float:
        """Gigabytes per second until a fresh mapping is registered, which copies into it then need not wait for."""
        memory = torch.frombuffer(mmap.mmap(-1, self._src.nbytes), dtype=torch.uint8)
        start = time.perf_counter()
        self._engine.register(memory)
        try:
            while not memory.is_pinned():
                if time.perf_counter() - start > 60:  # seconds
                    raise TimeoutError("the memory is not registered after 60 s; the log says why")
                time.sleep(1e-3)
            seconds = time.perf_counter() - start
        finally:
            self._engine.unregister(memory)
        return memory.nbytes / seconds / 1e9

    def _copy(self) -> None:
        self._engine.wait(self._engine.submit(self._large))

    def _rows(self, num: int, nbytes: int) -> list[Copy]:
        src = torch.ones(num, 2 * nbytes, dtype=torch.uint8, device=self._device)[:, :nbytes]
        return list(zip(src, torch.zeros(num, nbytes, dtype=torch.uint8, pin_memory=True), strict=True))

    def _matrices(self) -> Callable[[], object]:
        matrix = torch.randn(_MATRIX, _MATRIX, device=self._device, dtype=torch.bfloat16)
        return lambda: torch.mm(matrix, matrix)

    def _additions(self) -> Callable[[], object]:
        values = torch.zeros(self._numel, device=self._device)
        return lambda: values.add_(1.0)

    def _slowdown(self, work: Callable[[], object]) -> float:
        self._loop_milliseconds(work)
        alone = self._loop_milliseconds(work)
        with _in_background(self._copy):
            together = self._loop_milliseconds(work)
        return 100 * (together / alone - 1)

    def _loop_milliseconds(self, work: Callable[[], object]) -> float:
        torch.cuda.synchronize(self._device)
        start, num = time.perf_counter(), 0
        while time.perf_counter() - start < _LOOP_SECONDS:
            for _ in range(8):
                work()
            num += 8
            torch.cuda.current_stream(self._device).synchronize()
        return (time.perf_counter() - start) / num * 1e3

    def _percentile(self, action: Callable[[], object]) -> float:
        return sorted(_seconds(action) for _ in range(_NUM_DELAYS))[int(0.99 * _NUM_DELAYS)]

    def _device_median(self, action: Callable[[], object]) -> float:
        def finished() -> None:
            action()
            torch.cuda.synchronize(self._device)

        return _median(finished, self._repeats)


@contextmanager
def _in_background(action: Callable[[], object]) -> Iterator[None]:
    """Run `action` again and again on a thread while the block runs; an error of it ends the block with that error."""
    stop, errors = threading.Event(), list[Exception]()

    def run() -> None:
        try:
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


def _median(action: Callable[[], object], repeats: int) -> float:
    """Seconds; the first run, which also meets untouched memory, does not count."""
    seconds: Sequence[float] = [_seconds(action) for _ in range(repeats + 1)]
    return statistics.median(seconds[1:])


def _seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start
