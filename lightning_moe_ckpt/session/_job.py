"""Hold what a session is given, and what it makes from that before it opens a run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, cast

import torch

from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.errors import UnsupportedOptimizer
from lightning_moe_ckpt.native import create_engine
from lightning_moe_ckpt.operators import OperatorSet, StateSchema, discover, marks_of, regions_of
from lightning_moe_ckpt.parallel import ParallelGroups
from lightning_moe_ckpt.policies import Policy
from lightning_moe_ckpt.process import StallMeter, collections_paused
from lightning_moe_ckpt.recovery import JournalReader, Omits
from lightning_moe_ckpt.snapshot import Averages, StateView, owners_of
from lightning_moe_ckpt.tiers import SessionConfig


@dataclass(kw_only=True, eq=False)
class SessionJob:
    """What one session checkpoints, for whom and with what; the same until the session ends."""

    config: SessionConfig
    policy: Policy
    module: torch.nn.Module
    schema: StateSchema
    groups: ParallelGroups
    autocast_dtype: torch.dtype | None
    compiled: Collection[torch.nn.Module]
    """Modules of which a compiler makes other programs, with other rounding, if they are watched or frozen."""
    omits: Omits
    may_edit_unseen: bool
    """Whether the user's code may change parameters beside copies without a trace."""
    may_edit_steps: bool
    """Whether it may do so beside a step, anywhere but in the hooks of epochs and of validation."""
    extra: Mapping[str, object]
    """The trainer's entries for exports; entries that cannot be stored are left out."""
    averages: Averages | None
    """The module's averages kept by callbacks."""
    journals: JournalReader

    @collections_paused()
    def __post_init__(self) -> None:
        policy, groups = self.policy, self.groups
        unknown: Literal["dense", "refuse"] = "dense" if policy.exact else "refuse"  # exact: everything, whatever it is
        self.operators = discover(self.module, ep_size=groups.ep_size, unknown=unknown)
        self.view = StateView(self.module, self._operators_cut(), self.schema, {}, self.averages)
        self.exchange = Exchange(groups)
        if self.view.boxes:
            self._refuse_state_of_wholes()
            said = self.exchange.gather_values([marks_of(self.view.boxes), self.view.own_experts()])
            rows = cast("list[tuple[dict[str, str], dict[str, list[int]]]]", said)
            regions = regions_of([marks for marks, _ in rows])
            groups.join([sorted(set(own.values())) for own in regions])
            self.view.share(regions[groups.rank], owners_of([own for _, own in rows]))
        self.device = next(iter(self.view.params.values())).device
        self.engine, self.stalls = create_engine(self.device), StallMeter(self.device)
        self.least_steps = policy.least_steps(len(self.view.operators))
        """Fewest steps from one window's start to the next, under any plan of the policy."""

    def _refuse_state_of_wholes(self) -> None:
        """Raise `UnsupportedOptimizer` if the optimizer keeps more than scalars for a parameter in shards as a whole."""
        for fqn in self.view.boxes:
            for entry in self.schema.entries(self.view.params[fqn]):
                if entry.shape:
                    raise UnsupportedOptimizer(
                        f"`{type(self.schema.optimizer).__qualname__}` keeps `{entry.key}`, {list(entry.shape)}, for `{fqn}` as a whole, which "
                        "is in shards. Use an optimizer whose state has the shape of the parameter, such as AdamW."
                    )

    def _operators_cut(self) -> OperatorSet:
        """Return the operators that can be restored apart from each other. Raises `UnsupportedOptimizer` if the policy would take a part
        of a tensor that is updated together.
        """
        reach = self.schema.reach
        operators = self.operators.joined(reach.coupling)
        if not self.policy.exact and len(operators) < len(self.operators):
            (whole, *_) = [op for op in operators if op.name not in self.operators]
            raise UnsupportedOptimizer(
                f"`{type(self.schema.optimizer).__qualname__}` updates elements of a {reach.coupling} together: {reach.shown}. The experts "
                f"in `{whole.slices[0].fqn}` cannot be saved apart. Use experts with parameters of their own, `SparseCheckpoint` or "
                "`DenseCheckpoint`."
            )
        return operators
