"""Measure the time that checkpoints take from training: seconds blocked, by cause, and seconds in our hooks.

Waits alone would be too little: recording state, starting copies and encoding journals takes the training thread's time
too. Used from the training thread only. A measurement costs well under a microsecond, so everything is measured.

With a device there are two kinds of waits. The thread runs ahead of the device. While it waits for the device, the
device has work, and nothing is lost. Only time in which the training stream stands still is lost. Events on both sides
of a fence measure it once the device has passed them; no thread waits for them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Concatenate, Protocol, TypeVar

import torch
from typing_extensions import ParamSpec

from lightning_moe_ckpt.process._stragglers import OwnWork

_cuda: Any = torch.cuda
"""Events are partly untyped in torch."""

P = ParamSpec("P")
R = TypeVar("R")


class StallMeter:
    """Sums of seconds per cause since the start; waits of a CUDA device are measured too.

    Causes in use: `arrival`, `dense`, `exchange`, `fence`, `flush`, `gradients`, `heap`, `journal`, `plan`. A wait inside a
    measured wait counts in both.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device if device is not None and device.type == "cuda" else None
        self._seconds: dict[str, float] = {}
        self._on_device: dict[str, float] = {}
        self._passing: deque[tuple[str, Any, Any]] = deque()
        """Waits that the device may not have reached yet: cause, and the events around them."""

    def measure(self, cause: str) -> AbstractContextManager[object]:
        """Return a context manager that adds the seconds spent inside to `cause`, also when the body raises."""
        return _Measurement(self._seconds, cause)

    def measure_both(self, cause: str) -> AbstractContextManager[object]:
        """Measure like `measure`, and also the time for which training's stream waits."""
        return _Measurement(self._seconds, cause) if self._device is None else self._measure_both(cause)

    @contextmanager
    def _measure_both(self, cause: str) -> Iterator[None]:
        begin = self._mark()
        try:
            with self.measure(cause):
                yield
        finally:
            self._passing.append((cause, begin, self._mark()))
            self._collect()

    def totals(self) -> dict[str, float]:
        """Return the seconds per cause since the start."""
        return dict(self._seconds)

    def device_totals(self) -> dict[str, float]:
        """Seconds per cause that training's stream stood still since the start, as far as the device has come."""
        self._collect()
        return dict(self._on_device)

    def _mark(self) -> Any:
        event = _cuda.Event(enable_timing=True)
        event.record(_cuda.current_stream(self._device))
        return event

    def _collect(self) -> None:
        while self._passing and self._passing[0][2].query():
            cause, begin, end = self._passing.popleft()
            self._on_device[cause] = self._on_device.get(cause, 0.0) + begin.elapsed_time(end) / 1e3


class _Measurement:
    __slots__ = ("_cause", "_seconds", "_start")

    def __init__(self, seconds: dict[str, float], cause: str) -> None:
        self._seconds, self._cause = seconds, cause

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._seconds[self._cause] = self._seconds.get(self._cause, 0.0) + time.perf_counter() - self._start


class HookClock:
    """Seconds of the training thread inside our hooks, waits included. A hook that runs inside another counts once."""

    def __init__(self) -> None:
        self.ended = 0.0
        """Seconds of the hooks that have ended."""
        self.start: float | None = None
        """Begin of the hook under way."""
        self.validated = 0.0
        """Seconds of validation, which count for no step of training."""
        self.own: OwnWork | None = None
        """Measures this rank's own work; `None` if no other rank has equal work."""

    @property
    def seconds(self) -> float:
        """Seconds up to now, including a hook under way."""
        return self.ended + (0.0 if self.start is None else time.perf_counter() - self.start)

    def outside(self) -> float:
        """Return a reading of a clock that stands still inside our hooks, in seconds."""
        return (time.perf_counter() if self.start is None else self.start) - self.ended


class Clocked(Protocol):
    """Object whose hooks are timed."""

    clock: HookClock
    """Clock that adds up the time of the hooks."""


C = TypeVar("C", bound=Clocked)


def clocked(hook: Callable[Concatenate[C, P], R]) -> Callable[Concatenate[C, P], R]:
    """Count the time a method takes on its object's clock."""

    @wraps(hook)
    def timed(self: C, /, *args: P.args, **kwargs: P.kwargs) -> R:
        clock = self.clock
        if clock.start is not None:
            return hook(self, *args, **kwargs)
        clock.start = time.perf_counter()
        try:
            return hook(self, *args, **kwargs)
        finally:
            clock.ended += time.perf_counter() - clock.start
            clock.start = None

    return timed


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """Cost of checkpoints on this rank, as shares of training's time; steps of a replay do not count."""

    target: float | None = None
    """`overhead_target`."""
    hooks: float = 0.0
    """Share of the training thread in hooks, from the first step on."""
    tiers: dict[str, float] = field(default_factory=dict)
    """Measured share by which steps were longer while each tier worked; `host` stands for copies to memory."""
    recent: float = 0.0
    """Share of hooks and tiers in the second half of training so far."""
    gap_steps: int = 0
    """Least steps from one window's start to the next now; 0 for no limit."""
    rest_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds that each tier now rests between generations."""
    start_seconds: float = 0.0
    """Seconds in hooks from the start of the fit to the first batch."""
    end_seconds: float = 0.0
    """Seconds that the end of the fit waited until everything was durable."""
    advice: str = ""
    """Steps between windows that would meet the target, where those that the user gave cost more; else empty."""

    @property
    def share(self) -> float:
        """Share of hooks and tiers in training's time, from the first step on."""
        return self.hooks + sum(self.tiers.values())

    def __str__(self) -> str:
        tiers = "".join(f", {share:.1%} by {tier} at work" for tier, share in self.tiers.items() if share >= 5e-4)
        target = "no target" if self.target is None else f"overhead_target={self.target:g}"
        return (
            f"checkpoints cost {self.share:.1%} of training's time ({target}), {self.recent:.1%} in its second half: "
            f"{self.hooks:.1%} in hooks{tiers}; besides, the start took {self.start_seconds:.2f} s and the end "
            f"{self.end_seconds:.2f} s{self.advice and f'; {self.advice}'}"
        )
