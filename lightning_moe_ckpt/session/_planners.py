"""Which planner a policy has."""

from __future__ import annotations

import torch

from lightning_moe_ckpt.parallel import ParallelGroups
from lightning_moe_ckpt.session._exchange import Exchange
from lightning_moe_ckpt.session._layout import StateView
from lightning_moe_ckpt.session._lossy import LossyPlanner
from lightning_moe_ckpt.session._lossy_windows import LossyWindows
from lightning_moe_ckpt.session._planning import Planner
from lightning_moe_ckpt.session._windows import DenseWindows, SparseWindows

WindowPolicy = DenseWindows | SparseWindows | LossyWindows
"""What is taken when, as far as whole windows go."""


def make_planner(
    policy: WindowPolicy,
    view: StateView,
    groups: ParallelGroups,
    exchange: Exchange,
    module: torch.nn.Module,
    *,
    autocast_dtype: torch.dtype | None,
    may_probe: bool = True,
) -> Planner | LossyPlanner:
    """The planner of a policy; arguments as `Planner` has them."""
    if isinstance(policy, LossyWindows):
        return LossyPlanner(policy, view=view, groups=groups, exchange=exchange, module=module)
    return Planner(
        policy,
        view=view,
        groups=groups,
        exchange=exchange,
        autocast_dtype=autocast_dtype,
        module=module,
        may_probe=may_probe,
    )
