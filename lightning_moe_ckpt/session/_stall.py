"""Seconds for which training was blocked, by cause: the number this package is judged by.

Used from the training thread only. A measurement costs well under a microsecond, so every wait is measured.
"""

from __future__ import annotations

import time
from types import TracebackType

from typing_extensions import Self


class StallMeter:
    """Sums of seconds per cause, for the current step and since the start.

    Causes in use: `fence`, `exchange`, `buffers`, `ring`, `journal`. A wait inside a measured wait counts in both.
    """

    def __init__(self) -> None:
        self._step: dict[str, float] = {}
        self._total: dict[str, float] = {}

    def measure(self, cause: str) -> _Measurement:
        """Context manager that adds the seconds spent inside to `cause`, also when the body raises."""
        return _Measurement(self, cause)

    def add(self, cause: str, seconds: float) -> None:
        """Add seconds measured elsewhere."""
        self._step[cause] = self._step.get(cause, 0.0) + seconds

    def end_step(self) -> dict[str, float]:
        """Seconds per cause since the last call, which starts the next step."""
        step, self._step = self._step, {}
        for cause, seconds in step.items():
            self._total[cause] = self._total.get(cause, 0.0) + seconds
        return step

    def totals(self) -> dict[str, float]:
        """Seconds per cause since the start, the step under way included."""
        causes = [*self._total, *(cause for cause in self._step if cause not in self._total)]
        return {cause: self._total.get(cause, 0.0) + self._step.get(cause, 0.0) for cause in causes}


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
