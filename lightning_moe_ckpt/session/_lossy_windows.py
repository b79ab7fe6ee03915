"""What lossy policies take when: one boundary every so many steps, all of the dense part and some experts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from lightning_moe_ckpt.policies import DynamicK, PartialPolicy

MAX_GENERATIONS = 16
"""Most generations that memory keeps."""


@dataclass(frozen=True, kw_only=True)
class LossyWindows:
    """A generation of one boundary every so many steps, with some experts of each layer."""

    every_n_steps: int
    experts: PartialPolicy
    """Chooses them."""
    dynamic_k: DynamicK = field(default_factory=DynamicK)
    """Whether more of them are chosen after faults."""
    callback: str = "PartialExpertCheckpoint"
    """What the user calls it."""

    kind: Literal["partial"] = "partial"
    measures: bool = False

    def least_steps(self, num_operators: int) -> int:
        """One cadence."""
        return self.every_n_steps

    def config(self) -> dict[str, Any]:
        """What a stored plan says of the policy; the cadence does not change what a generation looks like."""
        config: dict[str, Any] = json.loads(json.dumps(asdict(self.experts)))
        return {"kind": self.kind, **config}

    def check(self, names: Sequence[str]) -> None:
        """Anything goes that has experts, which the planner sees."""

    def due(self, step: int, last: int | None, interval_steps: int) -> bool:
        """At multiples of `every_n_steps`, whatever life this is."""
        return step % self.every_n_steps == 0
