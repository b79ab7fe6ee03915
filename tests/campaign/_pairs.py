"""Few rows that hold every pair of values of every two factors."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
_Pairs = dict[tuple[tuple[str, Any], tuple[str, Any]], None]

CANDIDATES = 30
"""Rows tried for each row taken."""


def pairwise(factors: Mapping[str, Sequence[Any]], *, allowed: Callable[[Row], bool] | None = None) -> list[Row]:
    """Rows, one value per factor, such that every two values of two factors occur together in at least one.

    Greedy: of a few rows grown around a pair that is still missing, the one that covers most missing pairs is taken.
    The same every time.

    Args:
        factors: values by factor.
        allowed: says which rows make sense; pairs for which no such row is found are left out. `None` allows all.
    """
    draw = random.Random(0)
    missing: _Pairs = {}
    for one, other in itertools.combinations(factors, 2):
        missing.update({((one, a), (other, b)): None for a in factors[one] for b in factors[other]})
    rows: list[Row] = []
    while missing:
        wanted = next(iter(missing))
        grown = [_grow(dict(wanted), factors, missing, draw) for _ in range(CANDIDATES)]
        candidates = [row for row in grown if allowed is None or allowed(row)]
        if candidates:
            rows.append(max(candidates, key=lambda row: _gain(row, missing)))
            for pair in _pairs(rows[-1]):
                missing.pop(pair, None)
        missing.pop(wanted, None)
    return rows


def product(factors: Mapping[str, Sequence[Any]]) -> list[Row]:
    """All rows."""
    return [dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())]


def name(row: Row) -> str:
    """A test id."""
    return "-".join(str(value).replace(" ", "") for value in row.values())


def _grow(row: Row, factors: Mapping[str, Sequence[Any]], missing: _Pairs, draw: random.Random) -> Row:
    """Choose the factors that `row` lacks, in random order, each as the value that covers most."""
    order = {factor: index for index, factor in enumerate(factors)}
    for factor in draw.sample(list(factors), len(factors)):
        if factor not in row:
            values = draw.sample(list(factors[factor]), len(factors[factor]))
            grown = [dict(sorted({**row, factor: value}.items(), key=lambda item: order[item[0]])) for value in values]
            row = max(grown, key=lambda each: _gain(each, missing))
    return row


def _pairs(row: Row) -> _Pairs:
    return dict.fromkeys(itertools.combinations(row.items(), 2))


def _gain(row: Row, missing: _Pairs) -> int:
    return sum(pair in missing for pair in _pairs(row))
