"""A plan with all that a later incarnation needs to lay the same window out again; stored with each generation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from xxhash import xxh3_128_hexdigest

from lightning_moe_ckpt.policies import Plan


@dataclass(frozen=True, kw_only=True)
class PlanRecord:
    """A plan and the facts that its layout depends on; equal on all ranks."""

    plan: Plan
    config: Mapping[str, Any]
    """Configuration of the policy, which goes on with a restored plan only if that was made under an equal one."""
    popularity: tuple[float, ...] = ()
    """Popularity by expert, from which the plan was made."""
    compute_dtypes: Mapping[str, str] = field(default_factory=dict)
    """Precision of COMPUTE by parameter, where that is not its own."""
    averages_consumed: bool = False
    """Whether forward ran on averages of parameters."""
    budget_nbytes: int = 0
    """Bytes per step and rank; 0 for no budget."""
    split_nbytes: int = 0
    """Bytes above which operators were cut into pieces; 0 for none."""

    @property
    def plan_hash(self) -> str:
        """Digest of the record; equal on all ranks and in all tiers."""
        return xxh3_128_hexdigest(self.to_json().encode())

    def to_json(self) -> str:
        """Return the canonical text."""
        return self._json

    @classmethod
    def from_json(cls, text: str) -> PlanRecord:
        """Read what `to_json` wrote.

        Raises:
            Corrupt: the text holds no plan.
            LookupError, TypeError, ValueError: another entry is missing or of another type.
        """
        value = json.loads(text)
        return cls(
            plan=Plan.from_value(value["plan"]),
            config=dict(value["config"]),
            popularity=tuple(float(each) for each in value["popularity"]),
            compute_dtypes=dict(value["compute_dtypes"]),
            averages_consumed=value["averages_consumed"],
            budget_nbytes=value["budget_nbytes"],
            split_nbytes=value["split_nbytes"],
        )

    @cached_property
    def _json(self) -> str:
        value = {
            "plan": self.plan.to_value(),
            "config": dict(self.config),
            "popularity": list(self.popularity),
            "compute_dtypes": dict(self.compute_dtypes),
            "averages_consumed": self.averages_consumed,
            "budget_nbytes": self.budget_nbytes,
            "split_nbytes": self.split_nbytes,
        }
        return json.dumps(value, sort_keys=True, separators=(",", ":"))
