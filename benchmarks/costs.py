"""Costs of an action, and goals that figures are judged by."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Goal:
    """A number to reach, or to stay below."""

    name: str
    what: str
    wanted: float
    unit: str
    at_least: bool = True

    def outcome(self, measured: float) -> str:
        """`met` or `NOT met`; NaN meets nothing."""
        return "met" if (measured >= self.wanted if self.at_least else measured <= self.wanted) else "NOT met"

    def __str__(self) -> str:
        return f"at {'least' if self.at_least else 'most'} {self.wanted:g} {self.unit}"


class Cost(NamedTuple):
    """Seconds of an action; CPU time counts all threads, for a hook the training thread only."""

    wall: float
    cpu: float

    @classmethod
    def of(cls, action: Callable[[], object]) -> Cost:
        """Run `action` once."""
        wall, cpu = time.perf_counter(), time.process_time()
        action()
        return cls(time.perf_counter() - wall, time.process_time() - cpu)
