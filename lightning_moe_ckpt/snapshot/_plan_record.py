"""Plan with all facts from which a later incarnation lays the same window out again; stored with each generation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from xxhash import xxh3_128_hexdigest

from lightning_moe_ckpt.operators import OperatorSet
from lightning_moe_ckpt.policies import Plan


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
    def is_incomplete(self) -> bool:
        """Whether durable files lack operators of some stage; false without stages."""
        return any(facts["incomplete"] for facts in self.stages)

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
