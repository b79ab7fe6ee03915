"""Measure the time that checkpoints take from training: seconds blocked, by cause, and seconds in our hooks.

Waits alone would be too little: recording state, starting copies and encoding journals takes the training thread's time too.
Used from the training thread only. A measurement costs well under a microsecond, so everything is measured.

With a device there are two kinds of waits. The thread runs ahead of the device. While it waits for the device, the device
has work, and nothing is lost. Only time in which the training stream stands still is lost. Events on both sides of a
fence measure it once the device has passed them; no thread waits for them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, Protocol, TypeVar

import torch
from typing_extensions import ParamSpec, Self

_cuda: Any = torch.cuda
"""Events are partly untyped in torch."""

P = ParamSpec("P")
R = TypeVar("R")


class StallMeter:
    """Sums of seconds per cause, for the current step and since the start.

    Causes in use: `arrival`, `dense`, `exchange`, `fence`, `flush`, `gradients`, `heap`, `journal`, `plan`. A wait inside a
    measured wait counts in both.

    Args:
        device: device of training; waits of a CUDA device are measured too.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device if device is not None and device.type == "cuda" else None
        self._step: dict[str, float] = {}
        self._total: dict[str, float] = {}
        self._on_device: dict[str, float] = {}
        self._passing: deque[tuple[str, Any, Any]] = deque()
        """Waits that the device may not have reached yet: cause, and the events around them."""

    def measure(self, cause: str) -> _Measurement:
        """Return a context manager that adds the seconds spent inside to `cause`, also when the body raises."""
        return _Measurement(self, cause)

    @contextmanager
    def measure_both(self, cause: str) -> Iterator[None]:
        """Measure like `measure`, and also the time for which training's stream waits."""
        begin = self._mark()
        try:
            with self.measure(cause):
                yield
        finally:
            if begin is not None:
                self._passing.append((cause, begin, self._mark()))
                self._collect()

    def add(self, cause: str, seconds: float) -> None:
        """Add seconds measured elsewhere."""
        self._step[cause] = self._step.get(cause, 0.0) + seconds

    def end_step(self) -> dict[str, float]:
        """Return the seconds per cause since the last call, and start the next step."""
        step, self._step = self._step, {}
        for cause, seconds in step.items():
            self._total[cause] = self._total.get(cause, 0.0) + seconds
        return step

    def totals(self) -> dict[str, float]:
        """Seconds per cause since the start, including the current step."""
        causes = [*self._total, *(cause for cause in self._step if cause not in self._total)]
        return {cause: self._total.get(cause, 0.0) + self._step.get(cause, 0.0) for cause in causes}

    def device_totals(self) -> dict[str, float]:
        """Seconds per cause that training's stream stood still since the start, as far as the device has come."""
        self._collect()
        return dict(self._on_device)

    def _mark(self) -> Any:
        if self._device is None:
            return None
        event = _cuda.Event(enable_timing=True)
        event.record(_cuda.current_stream(self._device))
        return event

    def _collect(self) -> None:
        while self._passing and self._passing[0][2].query():
            cause, begin, end = self._passing.popleft()
            self._on_device[cause] = self._on_device.get(cause, 0.0) + begin.elapsed_time(end) / 1e3


class _Measurement:
    __slots__ = ("_cause", "_meter", "_start")

    def __init__(self, meter: StallMeter, cause: str) -> None:
        self._meter = meter
        self._cause = cause

    def __enter__(self) -> Self:
        self._start = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._meter.add(self._cause, time.perf_counter() - self._start)


class HookClock:
    """Seconds of the training thread inside our hooks, waits included. A hook that runs inside another counts once."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._start = 0.0
        self._depth = 0

    @property
    def seconds(self) -> float:
        """Seconds up to now, including a hook under way."""
        return self._seconds + (time.perf_counter() - self._start if self._depth else 0.0)

    def __enter__(self) -> Self:
        if self._depth == 0:
            self._start = time.perf_counter()
        self._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._seconds += time.perf_counter() - self._start


class Clocked(Protocol):
    """Object whose hooks are timed."""

    @property
    def clock(self) -> HookClock:
        """Clock that adds up the time of the hooks."""


C = TypeVar("C", bound=Clocked)


def clocked(hook: Callable[Concatenate[C, P], R]) -> Callable[Concatenate[C, P], R]:
    """Count the time a method takes on its object's clock."""

    @wraps(hook)
    def timed(self: C, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.clock:
            return hook(self, *args, **kwargs)

    return timed
