"""What a policy decides, and the plan of a window.

A policy is a pure function of step, operators, loads and budgets: no torch.distributed, no I/O, no clock. The engine
carries out what it says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from xxhash import xxh3_128_hexdigest

from lightning_moe_ckpt.errors import Corrupt
from lightning_moe_ckpt.operators import Operator, RecordKind

Decision = dict[tuple[str, str], RecordKind]
"""`(operator, tier) -> kind`; what is not named is not taken."""


class Policy(Protocol):
    """Decides at every step boundary which record to take of which operator for which tier."""

    def decide(
        self, step: int, operators: Sequence[Operator], loads: Mapping[str, int], budgets: Mapping[str, int]
    ) -> Decision:
        """Records to take at boundary `step`.

        Args:
            step: optimizer steps done.
            operators: all operators of this rank.
            loads: tokens since the last boundary, by expert operator.
            budgets: bytes per step that each tier can take, by tier; its keys are the tiers there are.
        """


@dataclass(frozen=True)
class Plan:
    """One window: which operators are FULL in which slot. COMPUTE is taken of those whose slot is still to come.

    Invariant: every operator is FULL in exactly one slot.
    """

    slots: tuple[tuple[str, ...], ...]
    """Names of the operators, by slot; slot j is taken j boundaries after the first."""

    def __post_init__(self) -> None:
        if not self.slots:
            raise ValueError("`Plan(slots=())` must have at least one slot.")
        if len(self._slot_of) < sum(len(slot) for slot in self.slots):
            raise ValueError("`Plan(slots=...)` must name every operator once.")

    @property
    def window(self) -> int:
        """Slots, hence steps from the first boundary to the last, plus one."""
        return len(self.slots)

    @property
    def names(self) -> tuple[str, ...]:
        """All operators in the order of capture."""
        return tuple(name for slot in self.slots for name in slot)

    def slot_of(self, name: str) -> int:
        """The slot in which an operator is FULL. Raises `KeyError`."""
        return self._slot_of[name]

    def full(self, slot: int) -> tuple[str, ...]:
        """Operators of which `slot` takes FULL."""
        return self.slots[slot]

    def compute(self, slot: int) -> tuple[str, ...]:
        """Operators of which `slot` takes COMPUTE: those still frozen when replay starts from it."""
        return tuple(name for later in self.slots[slot + 1 :] for name in later)

    def records(self, slot: int) -> dict[str, RecordKind]:
        """What `slot` takes, by operator; operators captured before are left out."""
        full = dict.fromkeys(self.full(slot), RecordKind.FULL)
        return full | dict.fromkeys(self.compute(slot), RecordKind.COMPUTE)

    def hash(self) -> str:
        """Identifies the plan, in every process and version: a digest of `to_json`."""
        return xxh3_128_hexdigest(self.to_json().encode())

    def to_json(self) -> str:
        """Canonical text."""
        return json.dumps({"slots": self.slots}, separators=(",", ":"), ensure_ascii=True)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what `to_json` wrote.

        Raises:
            Corrupt: it is no plan.
        """
        try:
            plan = cls(tuple(tuple(str(name) for name in slot) for slot in json.loads(text)["slots"]))
        except (ValueError, KeyError, TypeError) as error:
            raise Corrupt(f"This is no plan: {error}. Another copy or an older generation may be whole.") from error
        if plan.to_json() != text:
            raise Corrupt("This plan is not in canonical form. Another copy or an older generation may be whole.")
        return plan

    @cached_property
    def _slot_of(self) -> dict[str, int]:
        return {name: i for i, slot in enumerate(self.slots) for name in slot}
