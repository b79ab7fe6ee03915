"""A plan: which record of which operator goes into which file, step by step of a window.

A plan is data. It names operators of all ranks, is equal on all ranks, and survives JSON; `snapshot` makes it concrete
on one rank. A window is one step for everything at once, or several: then each step takes FULL of some operators and
COMPUTE of those still to come (MoEvement, Sec. 3.2).

Every step writes one file for each audience with records. The *durable* file goes to every tier; the *node* file stays
in memory, if memory takes more than storage does (PEC, Sec. 3.2).

Each generation stores its plan with all facts from which a later incarnation lays the same window out again.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, Literal

from xxhash import xxh3_128_hexdigest

from lightning_moe_ckpt.errors import Corrupt
from lightning_moe_ckpt.operators import OperatorSet, RecordKind

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


@dataclass(frozen=True, kw_only=True)
class PlanRecord:
    """Plan and the facts that its layout depends on; equal on all ranks.

    With pipeline stages the plan is joined from one plan per stage. Each stage's facts are kept in `stages`, and the
    fields are one stage's, see `of_stage`; text and hash cover all stages and do not depend on that choice.
    """

    plan: Plan
    config: Mapping[str, Any]
    """Configuration of the policy; a policy goes on with a restored plan only under an equal configuration."""
    popularity: tuple[float, ...] = ()
    """Popularity by expert, from which the plan was made."""
    compute_dtypes: Mapping[str, str] = field(default_factory=dict)
    """Precision of COMPUTE by parameter, if it differs from the parameter's own."""
    averages_consumed: bool = False
    """Whether validation ran on averages of parameters between steps; COMPUTE records then hold the averages too."""
    budget_nbytes: int = 0
    """Bytes per step and rank; 0 for no budget."""
    split_nbytes: int = 0
    """Bytes above which operators were cut into pieces; 0 for none."""
    constants: tuple[str, ...] = ()
    """Parameters without records, as training does not change them."""
    thawed: tuple[str, ...] = ()
    """Former constants that have changed, each an operator by itself."""
    fixed: bool = False
    """Whether partial generations cut the dense part alike, whichever experts they take, so that gradients can stand for it."""
    stages: tuple[Mapping[str, Any], ...] = ()
    """Facts that differ between pipeline stages, by stage; empty without stages."""

    @classmethod
    def over(cls, operators: OperatorSet, **fields: Any) -> PlanRecord:
        """Return the record of a plan over these operators."""
        return cls(constants=operators.constants, thawed=operators.thawed, **fields)

    @classmethod
    def joined(cls, records: Sequence[PlanRecord], incomplete: Sequence[bool], stage: int) -> PlanRecord:
        """Return the record of all stages, from that of each by itself, with the fields of `stage`. `incomplete`, by
        stage: the stage's durable files lack some of its operators.
        """
        dtypes = {name: dtype for record in records for name, dtype in record.compute_dtypes.items()}
        facts = tuple(
            {
                "popularity": list(record.popularity),
                "budget_nbytes": record.budget_nbytes,
                "split_nbytes": record.split_nbytes,
                "incomplete": lacks,
            }
            for record, lacks in zip(records, incomplete, strict=True)
        )
        plan = Plan.joined([record.plan for record in records])
        return replace(records[stage], plan=plan, compute_dtypes=dtypes, stages=facts).of_stage(stage)

    def of_stage(self, stage: int) -> PlanRecord:
        """Return the same record with another stage's fields."""
        if not self.stages:
            return self
        facts = self.stages[stage]
        return replace(
            self,
            popularity=tuple(facts["popularity"]),
            budget_nbytes=facts["budget_nbytes"],
            split_nbytes=facts["split_nbytes"],
        )

    @property
    def plan_hash(self) -> str:
        """Digest of the record; equal on all ranks and in all tiers."""
        return xxh3_128_hexdigest(self.to_json().encode())

    def to_json(self) -> str:
        """Return the canonical text."""
        return self._json

    @classmethod
    @lru_cache(maxsize=2)  # a restore reads one plan several times
    def from_json(cls, text: str) -> PlanRecord:
        """Return the record with the text of `to_json`. Raises `Corrupt` if the text holds no plan; `LookupError`,
        `TypeError` or `ValueError` if another entry is missing or of another type.
        """
        value = json.loads(text)
        stages = tuple(_facts(each) for each in value.get("stages", ()))
        record = cls(
            plan=Plan.from_value(value["plan"]),
            config=dict(value["config"]),
            popularity=tuple(float(each) for each in value["popularity"]),
            compute_dtypes=dict(value["compute_dtypes"]),
            averages_consumed=value["averages_consumed"],
            budget_nbytes=value["budget_nbytes"],
            split_nbytes=value["split_nbytes"],
            constants=tuple(map(str, value.get("constants", ()))),
            thawed=tuple(map(str, value.get("thawed", ()))),
            fixed=bool(value.get("fixed", False)),
            stages=stages,
        )
        return record.of_stage(0)

    @cached_property
    def _json(self) -> str:
        value = {
            "plan": self.plan.to_value(),
            "config": dict(self.config),
            "popularity": [] if self.stages else list(self.popularity),
            "compute_dtypes": dict(self.compute_dtypes),
            "averages_consumed": self.averages_consumed,
            "budget_nbytes": 0 if self.stages else self.budget_nbytes,
            "split_nbytes": 0 if self.stages else self.split_nbytes,
        }
        value |= {name: list(each) for name in ("constants", "thawed") if (each := getattr(self, name))}
        value |= {"fixed": True} if self.fixed else {}
        if self.stages:
            value["stages"] = [dict(stage) for stage in self.stages]
        return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _facts(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return one stage's facts. Raises like `PlanRecord.from_json`."""
    found = {"popularity": [float(each) for each in value["popularity"]], "incomplete": bool(value["incomplete"])}
    return {**found, **{name: int(value[name]) for name in ("budget_nbytes", "split_nbytes")}}
