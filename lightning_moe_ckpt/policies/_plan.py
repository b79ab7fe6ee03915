"""A plan: which record of which operator goes into which file, step by step of a window.

A plan is data. It names operators of all ranks, is equal on all ranks, and survives JSON; `snapshot` makes it concrete
on one rank. A window is one step for everything at once, or several: then each step takes FULL of some operators and
COMPUTE of those still to come (MoEvement, Sec. 3.2).

Every step writes one file for each audience with records. The *durable* file goes to every tier; the *node* file stays
in memory, if memory takes more than storage does (PEC, Sec. 3.2).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

from lightning_moe_ckpt.errors import Corrupt
from lightning_moe_ckpt.operators import RecordKind

Audience = Literal["durable", "node"]
"""Receivers of a file: every tier, or memory only."""

AUDIENCES: tuple[Audience, ...] = ("durable", "node")
"""Audiences in the order of their files in memory."""

_KINDS = [kind.value for kind in RecordKind]

Records = Mapping[str, RecordKind]
"""Records of a file by operator, in stored order."""


@dataclass(frozen=True)
class WindowStep:
    """Files of one boundary."""

    files: Mapping[Audience, Records]

    def of_kind(self, kind: RecordKind, audience: Audience = "durable") -> tuple[str, ...]:
        """Return the operators with a record of this kind in an audience's file."""
        return tuple(name for name, each in self.files.get(audience, {}).items() if each is kind)

    @property
    def audiences(self) -> tuple[Audience, ...]:
        """Audiences with a file; every step has a durable one."""
        return tuple(audience for audience in AUDIENCES if audience == "durable" or self.files.get(audience))


@dataclass(frozen=True, eq=False)
class Plan:
    """One window, of all ranks. Plans are equal if their JSON is."""

    steps: tuple[WindowStep, ...]
    interval_steps: int = 0
    """Steps from one window's first boundary to the next one's; at least, and by default, the window's length."""
    partial: bool = False
    """Whether generations have some operators only: a restore takes each operator's newest copy, so shards are equal in
    all generations. Else a generation has everything as of one step."""
    names: tuple[str, ...] = field(init=False)
    """All operators, in the order in which they are first taken."""

    def __post_init__(self) -> None:
        if not self.steps:
            raise ValueError("`Plan(steps=())` must have at least one step.")
        object.__setattr__(self, "interval_steps", max(self.interval_steps, len(self.steps)))
        named = (name for step in self.steps for audience in AUDIENCES for name in step.files.get(audience, {}))
        object.__setattr__(self, "names", tuple(dict.fromkeys(named)))

    @classmethod
    def of_slots(cls, slots: Sequence[Sequence[str]], *, interval_steps: int = 0) -> Plan:
        """Return the plan that takes FULL of `slots[j]` in step j, and COMPUTE of later slots' operators. Raises
        `ValueError` if there is no slot, or an operator is named twice.
        """
        names = [name for slot in slots for name in slot]
        if len(set(names)) < len(names):
            raise ValueError("`Plan.of_slots(slots=...)` must name every operator once.")
        steps, taken = [], 0
        for slot in slots:
            taken += len(slot)
            full = dict.fromkeys(slot, RecordKind.FULL)
            steps.append(WindowStep({"durable": full | dict.fromkeys(names[taken:], RecordKind.COMPUTE)}))
        return cls(tuple(steps), interval_steps)

    @classmethod
    def of_everything(cls, names: Sequence[str], kind: RecordKind = RecordKind.FULL) -> Plan:
        """Return the one-step plan with this kind of record for all operators."""
        return cls((WindowStep({"durable": dict.fromkeys(names, kind)}),))

    @classmethod
    def joined(cls, plans: Sequence[Plan]) -> Plan:
        """Return the joint plan of all pipeline stages; a shorter stage's plan takes nothing in the last steps."""
        window = max(plan.window for plan in plans)
        steps = []
        for index in range(window):
            own = [plan.steps[index].files for plan in plans if index < plan.window]
            files = {
                audience: {name: kind for kinds in RecordKind for name, kind in _all(own, audience) if kind is kinds}
                for audience in AUDIENCES
            }
            steps.append(WindowStep({each: records for each, records in files.items() if records or each == "durable"}))
        return cls(tuple(steps), max(plan.interval_steps for plan in plans), any(plan.partial for plan in plans))

    def restricted(self, names: Collection[str]) -> Plan:
        """Return the plan for some operators only, without empty last steps."""
        steps = [
            WindowStep(
                {each: {n: kind for n, kind in records.items() if n in names} for each, records in step.files.items()}
            )
            for step in self.steps
        ]
        while len(steps) > 1 and not any(steps[-1].files.values()):
            steps.pop()
        return Plan(tuple(steps), self.interval_steps, self.partial)

    @property
    def is_differential(self) -> bool:
        """Whether the plan takes differences to the boundary before, and no state."""
        return bool(self.steps[0].of_kind(RecordKind.DELTA))

    @property
    def window(self) -> int:
        """Steps of the window."""
        return len(self.steps)

    def full(self, index: int) -> tuple[str, ...]:
        """Return the operators with FULL in the durable file of step `index`."""
        return self.steps[index].of_kind(RecordKind.FULL)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(self.to_json())

    def to_json(self) -> str:
        """Return the canonical text."""
        return self._json

    def to_value(self) -> dict[str, Any]:
        """Return JSON values: operators by name, and each file's records as runs `[start, stop]` of places among them."""
        place = {name: index for index, name in enumerate(self.names)}
        steps = [
            {
                audience: {
                    kind.value: _runs([place[name] for name in names])
                    for kind in RecordKind
                    if (names := step.of_kind(kind, audience))
                }
                for audience in step.audiences
            }
            for step in self.steps
        ]
        rest = {"interval_steps": self.interval_steps, "partial": self.partial}
        return {"operators": list(self.names), "steps": steps, **rest}

    @classmethod
    def from_value(cls, value: object) -> Plan:
        """Read the value of `to_value`. Raises `Corrupt` for any other value."""
        try:
            return cls._read(value)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise Corrupt(f"This is no plan: {error!r}. Another copy or an older generation may be whole.") from error

    @classmethod
    def _read(cls, value: Any) -> Plan:
        names = [str(name) for name in value["operators"]]
        if len(set(names)) < len(names):
            raise ValueError("an operator is named twice")
        steps = tuple(
            WindowStep({audience: _records(step[audience], names) for audience in _audiences(step)})
            for step in value["steps"]
        )
        interval, partial = value["interval_steps"], value["partial"]
        if type(interval) is not int or interval < 1 or type(partial) is not bool:
            raise TypeError("`interval_steps` or `partial` is not what it should be")
        plan = cls(steps, interval, partial)
        if plan.to_value() != value:
            raise ValueError("its operators are not in the order of its steps, or some are not taken")
        return plan

    @cached_property
    def _json(self) -> str:
        return json.dumps(self.to_value(), separators=(",", ":"), ensure_ascii=True)


def _all(files: Iterable[Mapping[Audience, Records]], audience: Audience) -> Iterator[tuple[str, RecordKind]]:
    return (pair for file in files for pair in file.get(audience, {}).items())


def _audiences(step: Any) -> list[Audience]:
    if not set(step) <= set(AUDIENCES):
        raise ValueError(f"files for {sorted(set(step) - set(AUDIENCES))}")
    return [audience for audience in AUDIENCES if audience in step]


def _runs(places: Sequence[int]) -> list[list[int]]:
    """Return `[start, stop]` of each stretch of neighbours; places may descend."""
    cuts = [index for index, (a, b) in enumerate(pairwise(places), 1) if b != a + 1]
    return [[places[start], places[stop - 1] + 1] for start, stop in pairwise([0, *cuts, len(places)])]


def _records(kinds: Any, names: Sequence[str]) -> Records:
    """Return the records of one file, FULL first."""
    found: dict[str, RecordKind] = {}
    for kind in sorted(kinds, key=_KINDS.index):
        for start, stop in kinds[kind]:
            if not 0 <= start < stop <= len(names):
                raise ValueError(f"a run from {start} to {stop} of {len(names)} operators")
            found |= dict.fromkeys(names[start:stop], RecordKind(kind))
    return found
