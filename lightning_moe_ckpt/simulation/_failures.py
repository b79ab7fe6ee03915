"""Failures of a run: at random from a mean time between them, or from a trace."""

from __future__ import annotations

import csv
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from lightning_moe_ckpt.errors import ConfigurationError

Scope = Literal["process", "node", "cluster"]
"""Reach of a failure: processes, whose node keeps its memory; a node with its memory; or every node's memory."""
SCOPES: tuple[Scope, ...] = get_args(Scope)
"""Scopes, smallest loss first."""


@dataclass(frozen=True, kw_only=True)
class Failures:
    """Times and scopes of failures: of a Poisson process, or of a trace."""

    mtbf: float = float("inf")
    """Mean seconds between failures; infinite for none. Unused with a trace."""
    scope: Scope = "node"
    """Scope of failures without a trace."""
    trace: tuple[tuple[float, Scope], ...] | None = None
    """Seconds from the run's start, and scopes."""

    def __post_init__(self) -> None:
        if not self.mtbf > 0:
            raise ConfigurationError(f"`Failures(mtbf={self.mtbf})` must be seconds above 0.")
        if self.scope not in SCOPES:
            raise ConfigurationError(f"`Failures(scope={self.scope!r})` must be one of {', '.join(SCOPES)}.")

    def times(self, seed: int) -> Iterator[tuple[float, Scope]]:
        """Yield seconds from the run's start with the scope, in order; `seed` changes all but a trace."""
        if self.trace is not None:
            yield from sorted(self.trace)
            return
        draw, now = random.Random(f"failures {seed}"), 0.0
        while self.mtbf < float("inf"):
            now += draw.expovariate(1 / self.mtbf)
            yield now, self.scope

    @classmethod
    def read(cls, path: str | Path) -> Failures:
        """Return the failures in a CSV with a heading `seconds,scope`; without a scope it is a node.

        Raises:
            ConfigurationError: there is no such file, or a line is no failure; the message has its number.
        """
        try:
            with Path(path).open(encoding="utf-8-sig", newline="") as file:
                rows = csv.DictReader(file)
                rows.fieldnames = names = [name.strip() for name in rows.fieldnames or ()]
                if sorted(names) not in (["seconds"], ["scope", "seconds"]):
                    raise ConfigurationError(
                        f"{path}: its first line must be `seconds,scope`, or `seconds`; found `{','.join(names)}`."
                    )
                found = tuple(_failure(path, rows.line_num, row) for row in rows)
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise ConfigurationError(f"{path}: no trace can be read from it. {error}") from error
        return cls(trace=found)

    def mean_seconds(self, wall: float) -> float:
        """Return the mean seconds between failures; of a trace over `wall` seconds."""
        number = sum(1 for seconds, _ in self.trace or () if seconds <= wall)
        return self.mtbf if self.trace is None else wall / number if number else float("inf")


def _failure(path: str | Path, line: int, row: dict[str, str | None]) -> tuple[float, Scope]:
    scope = (row.get("scope") or "node").strip()
    try:
        seconds = float(row["seconds"] or "")
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf") or scope not in SCOPES or None in row:
        found = ",".join(map(str, row.values()))
        raise ConfigurationError(
            f"{path}, line {line}: must be seconds of 0 or more, and one of {', '.join(SCOPES)}; found `{found}`."
        )
    return seconds, scope
