"""A policy that the package does not have, in one file: every other expert in each generation, in turns.

It is all that a new policy takes: what is chosen, and a callback that names it. Restarts give the dense part as of the
newest generation, and each expert as of that one or the one before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from door import CheckpointCallback
from typing_extensions import override

from lightning_moe_ckpt.policies import Policy, Selection
from lightning_moe_ckpt.policies._expert_tables import ExpertTable
from lightning_moe_ckpt.policies._policy import ExpertPolicy


@dataclass(frozen=True, kw_only=True)
class AlternatingPolicy(ExpertPolicy):
    """See the module."""

    kind = "alternating"
    callback = "AlternatingCheckpoint"

    @override
    def config(self) -> dict[str, Any]:
        return {"kind": self.kind}

    @override
    def select(self, index: int, tables: Sequence[ExpertTable], budgets: Mapping[str, int]) -> Selection:
        rows = tuple(tuple(range(index % 2, table.num_experts, 2)) for table in tables)
        return Selection(memory=rows, storage=rows)

    @override
    def max_age(self, tables: Sequence[ExpertTable], budgets: Mapping[str, int]) -> int:
        return 2


class AlternatingCheckpoint(CheckpointCallback):
    """A generation after every step, with every other expert; arguments are those that all callbacks share."""

    @override
    def _policy(self) -> Policy:
        return AlternatingPolicy(every_n_steps=1)
