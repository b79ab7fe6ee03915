"""Partial runs beside `CapacityBoost` and a logger, and what capacity and debts have to be, from the log of tokens."""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from typing_extensions import override

from campaign._data import SEQUENCE
from campaign._promises import Restarts
from campaign._training import Setup
from lightning_moe_ckpt.boosting import WATCHED_STEPS
from lightning_moe_ckpt.callbacks import CapacityBoost, ExpertLoadMonitor
from lightning_moe_ckpt.testing import Attempt

# Shape suffix: E experts of the layer.

BOOST = 0.1
TOP_K = 2


@dataclass(frozen=True, kw_only=True)
class BoostedSetup(Setup):
    """A run with `CapacityBoost`, logged at every step by Lightning's own CSV logger."""

    @override
    def callbacks(self, life: Attempt) -> Sequence[Callback]:
        return [CapacityBoost(BOOST), ExpertLoadMonitor(every_n_steps=1)]

    @override
    def trainer_options(self, life: Attempt) -> dict[str, Any]:
        logger = CSVLogger(str(life.workdir), "csv", f"attempt{life.index}", flush_logs_every_n_steps=1)
        return {**super().trainer_options(life), "logger": logger, "log_every_n_steps": 1}


def logged(found: Restarts) -> dict[int, dict[str, float]]:
    """What the logger of a run has, by the boundary that a step led to; resumed lives go on in the first one's file."""
    rows = defaultdict[int, dict[str, float]](dict)
    (path,) = (found.lives[0].workdir / "csv").glob("*/metrics.csv")
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            values = {name: float(value) for name, value in row.items() if value and name != "step"}
            rows[int(row["step"]) + 1] |= values
    return dict(rows)


@dataclass
class Ledger:
    """TokenDeficits as they have to be, and the factors of capacity that follow from them."""

    lost: list[int]
    repaid: list[int]
    factors: list[float]
    use: list[float]
    """Largest part of its slots that tokens have wanted of each expert, on any rank; older ones count for less."""
    watched: int = 0
    """Steps of which that is."""
    displaced: int = 0
    """Tokens that were dropped because experts had given slots away."""

    @property
    def debts(self) -> list[int]:
        """Tokens still to make up for."""
        return [max(lost - repaid, 0) for lost, repaid in zip(self.lost, self.repaid, strict=True)]


@dataclass(frozen=True)
class BoostedStep:
    """One step of one life."""

    life: int
    step: int
    """The boundary that it led to."""
    before: Ledger
    """Whose factors are in force in it."""
    after: Ledger


class Boosting:
    """Works out, step by step, who gets how much capacity.

    Args:
        found: the run; one layer.
        base: capacity factor without boost.
        batch_size: sequences of one rank and step.
        scope: whether the layer has one capacity per expert or one for all.
    """

    def __init__(self, found: Restarts, base: float, batch_size: int, scope: str) -> None:
        self._found, self._base, self._scope = found, base, scope
        self._num_experts = len(found.sizes)
        self._room = math.ceil(TOP_K * base * batch_size * SEQUENCE / self._num_experts)
        """Slots of an expert of one rank in one step, without boost."""

    def steps(self) -> Iterator[BoostedStep]:
        """Every step of every life."""
        none = [0] * self._num_experts
        at: dict[int, Ledger] = {0: Ledger(none, none, [1.0] * self._num_experts, [])}
        for index, life in enumerate(self._found.lives):
            before = at[self._found.began_at(index)]
            lost = self._found.tally(restarts=index).lost.tolist() if index else none
            now = replace(before, lost=lost)
            for step in life.steps():
                at[step] = self._after(now, index, step)
                yield BoostedStep(index, step, now, at[step])
                now = at[step]

    def _after(self, now: Ledger, life: int, step: int) -> Ledger:
        if not any(now.debts):
            return now
        kept_RE, routed_RE = (
            torch.stack([self._found.counted(life, step, rank, what) for rank in self._found.ranks])
            for what in ("tokens", "routed")
        )
        changed_RE = kept_RE - routed_RE.clamp(max=self._room)
        extra_E, displaced = changed_RE.clamp(min=0).sum(0), int((-changed_RE).clamp(min=0).sum())
        paid = zip(now.repaid, extra_E.tolist(), now.debts, strict=True)
        repaid = [repaid + extra * bool(debt) for repaid, extra, debt in paid]
        wanted_E = (routed_RE.amax(0).double() / self._room).tolist()
        use = [max(0.99 * a, b) for a, b in zip(now.use, wanted_E, strict=True)] if now.use else wanted_E
        after = replace(now, repaid=repaid, use=use, watched=now.watched + 1, displaced=now.displaced + displaced)
        if not any(after.debts):
            return replace(after, factors=[1.0] * self._num_experts, use=[], watched=0)
        return replace(after, factors=self._factors(after))

    def _factors(self, now: Ledger) -> list[float]:
        """A tenth more for experts in debt; the others give it, in proportion to the slots that they never need."""
        debts = now.debts
        if self._scope == "layer":
            return [1 + BOOST] * self._num_experts
        if now.watched < WATCHED_STEPS:
            return [1 + BOOST if debt else 1.0 for debt in debts]
        empty = [0 if debt else max(1 - use, 0) for debt, use in zip(debts, now.use, strict=True)]
        given = min(1.0, BOOST * sum(map(bool, debts)) / sum(empty)) if any(empty) else 0.0
        return [1 + BOOST if debt else 1 - given * part for debt, part in zip(debts, empty, strict=True)]

    def capacity(self, life: int, step: int, rank: int) -> list[float]:
        """The live capacity of the layer in a step, as factors per expert of what it is without boost."""
        (value,) = self._found.read(life, rank, f"capacity.{step - 1}").values()
        flat = value if isinstance(value, list) else [value]
        return [each / self._base for each in (flat if len(flat) > 1 else flat * self._num_experts)]
