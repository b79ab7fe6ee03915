"""Figures of a paper, and claims on what was measured: a claim is on order, sign or a band, and is checked, never looked at."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from benchmarks.papers_plans import Rows, Way


@dataclass(frozen=True)
class Claim:
    """What has to hold of rows for the shape to be the paper's."""

    text: str
    rows: tuple[str, ...]
    """Those that it is on."""
    check: Callable[[Sequence[float]], bool] = field(repr=False)

    def holds(self, ours: Mapping[str, float]) -> bool:
        """Return whether it does. Raises `KeyError` if a row was not measured; NaN meets nothing."""
        return self.check([ours[row] for row in self.rows])


def ascending(text: str, *rows: str) -> Claim:
    """None of the rows is smaller than the one before, and the last one is larger than the first."""
    return Claim(text, rows, lambda x: x[0] < x[-1] and all(a <= b for a, b in pairwise(x)))


def at_most(text: str, row: str, limit: float) -> Claim:
    """The row is no larger than a number."""
    return Claim(text, (row,), lambda x: x[0] <= limit)


def at_least(text: str, row: str, limit: float) -> Claim:
    """The row is no smaller than a number."""
    return Claim(text, (row,), lambda x: x[0] >= limit)


def no_more(text: str, row: str, other: str) -> Claim:
    """One row is no larger than another one."""
    return Claim(text, (row, other), lambda x: x[0] <= x[1])


def near(text: str, row: str, number: float, by: float) -> Claim:
    """The row is no further from a number than `by`."""
    return Claim(text, (row,), lambda x: abs(x[0] - number) <= by)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure or table of a paper."""

    key: str
    source: str
    title: str
    takes_seconds: int
    """About, on two cores."""
    paper: Mapping[str, float] = field(default_factory=dict)
    """Numbers of its text: by row, or, where nothing here is of the same, by what they are of."""
    units: Mapping[str, str] = field(default_factory=dict)
    """By how the names of rows begin; the first that fits."""
    measure: Callable[[Way], Rows]
    claims: Sequence[Claim]
    note: str
    is_drawn: bool = True
    """Whether another seed measures anything else."""
    is_long: bool = False
    """Whether it is measured only if its key is given, so that all others together take a quarter of an hour."""
    says: str = ""
    """What the paper shows, where it has no number for it."""
    shown: Sequence[str] = ()
    """Rows for the page; empty for those that the paper has too."""

    @property
    def rows_of_page(self) -> tuple[str, ...]:
        """Rows for the page: `shown`, else those of the paper's numbers, else those of the claims."""
        claimed = dict.fromkeys(row for claim in self.claims for row in claim.rows)
        return tuple(self.shown) or tuple(self.paper) or tuple(claimed)

    def unit_of(self, row: str) -> str:
        """Return the unit of a row, if it has one."""
        return next((unit for begin, unit in self.units.items() if row.startswith(begin)), "")


def number(value: float, unit: str) -> str:
    """Return text of about three digits, with its unit."""
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2 if abs(value) >= 1 else 3
    text = f"{value:.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} {unit}".rstrip()


PEC, MOETION, TIERCHECK, MOEVEMENT = "PEC (2024)", "MOETION (2024)", "TierCheck (2026)", "MoEvement (2026)"
