"""Save and load the options of an optimizer's parameter groups: learning rates, betas and what else hooks change."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_moe_ckpt.errors import IdentityMismatch

_IDENTITY = ("params", "param_names")


def groups_state(optimizer: Optimizer) -> list[dict[str, object]]:
    """Return all fields except the parameters, one mapping per group; tensors are copied."""
    return [{k: _copy(v) for k, v in group.items() if k not in _IDENTITY} for group in optimizer.param_groups]


def load_groups_state(optimizer: Optimizer, state: Sequence[dict[str, object]]) -> None:
    """Set the fields that `groups_state` returned. Live tensors are written in place.

    Raises:
        IdentityMismatch: the optimizer has another number of groups.
    """
    groups = optimizer.param_groups
    if len(groups) != len(state):
        raise IdentityMismatch(f"The optimizer has {len(groups)} parameter groups, the checkpoint {len(state)}.")
    for group, fields in zip(groups, state, strict=True):
        for key, value in fields.items():
            group[key] = _restore(group.get(key), value)


def _copy(value: object) -> object:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) is tuple:
        return tuple(_copy(each) for each in value)
    return [_copy(each) for each in value] if type(value) is list else value


def _restore(live: object, value: object) -> object:
    if (
        isinstance(live, Tensor)
        and isinstance(value, Tensor)
        and live.shape == value.shape
        and live.dtype == value.dtype
    ):
        with torch.no_grad():
            live.copy_(value)
        return live
    return _copy(value)
