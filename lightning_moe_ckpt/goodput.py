"""Divide a run's wall time into time of use and losses, by one definition for metrics, reports and simulations.

A run's wall time begins with the first process's start and ends with the newest step that is known, over all restarts. Every second of it is in one
part. Effective Training Time Ratio of MoEvement (2026), Sec. 2.4, and goodput are the same: `share`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from typing_extensions import Self

from lightning_moe_ckpt.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True, slots=True)
class Goodput:
    """Seconds of a run's wall time, by what they went to."""

    productive: float = 0.0
    """Steps that count, as long as they would take without checkpoints; the user's own work beside them, as validation, belongs here."""
    hooks: float = 0.0
    """Training thread in this package's hooks, waits of it for copies included."""
    slowed: float = 0.0
    """Time by which steps were longer because copies and tiers worked beside them."""
    detection: float = 0.0
    """Time from a failure, or the last sign of life before it, until somebody acted on it."""
    startup: float = 0.0
    """Processes, imports, launcher, rendezvous and the user's set-up, until restoring begins, or, in the first start, until training."""
    restore: float = 0.0
    """Finding, reading and loading a generation, until the first step."""
    repeated: float = 0.0
    """Steps taken again that the restored generation covers: replay that makes it dense."""
    lost: float = 0.0
    """Steps taken again of which no tier had a copy."""
    idle: float = 0.0
    """No launcher lived: waiting for a node, a queue or a person."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0 <= value < float("inf"):
                raise ConfigurationError(f"`Goodput({name}={value})`: seconds must be 0 or more, and finite.")

    @property
    def wall(self) -> float:
        """Seconds of all parts."""
        return float(sum(asdict(self).values()))

    @property
    def share(self) -> float:
        """Productive part of the wall time, 0 to 1; 0 for none."""
        return self.productive / self.wall if self.wall else 0.0

    def shares(self) -> dict[str, float]:
        """Return every part's share of the wall time, in the order of `PARTS`."""
        return {name: value / self.wall if self.wall else 0.0 for name, value in asdict(self).items()}

    def __add__(self, other: Goodput) -> Goodput:
        """Return the parts of both, one after the other."""
        mine, theirs = asdict(self), asdict(other)
        return Goodput(**{name: mine[name] + theirs[name] for name in mine})

    @classmethod
    def read(cls, said: Mapping[str, object]) -> Self:
        """Return the parts of a document; those that are missing, or no numbers, are 0."""
        return cls(**{name: float(v) for name in PARTS if isinstance(v := said.get(name), int | float)})


PARTS = tuple(field.name for field in fields(Goodput))
"""Names of the parts."""
