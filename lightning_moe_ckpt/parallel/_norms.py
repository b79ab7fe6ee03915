"""The norm of all gradients, experts counted once, equal in bits on every rank.

Expert-parallel ranks hold different experts, so each contributes the norms of its own. Every rank combines the same
numbers in the same order, then all take rank 0's result. So replicas cannot diverge even if processors of two kinds add
differently.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_moe_ckpt.parallel._groups import ParallelGroups
from lightning_moe_ckpt.parallel._ordered import all_gather_flat


def global_grad_norm(
    named_gradients: Iterable[tuple[str, Tensor | None]],
    *,
    expert_parallel: Collection[str],
    groups: ParallelGroups,
    norm_type: float = 2.0,
    device: torch.device | None = None,
) -> Tensor:
    """Return the norm of the whole model's gradients, after their reduction. Collective.

    Args:
        named_gradients: gradients in the same order of names on all ranks; `None` means no gradient.
        expert_parallel: names that stand for different experts on each expert-parallel rank. Equal on all ranks; a name
            without a gradient on this rank counts as zero.
        groups: this rank's groups.
        norm_type: as in `torch.nn.utils.clip_grad_norm_`, infinity included.
        device: device of the result if there is no gradient at all.

    Returns:
        A scalar, on the device of the gradients. Without expert-parallel names, the bits (and dtype) of
        `torch.nn.utils.get_total_norm`; with them fp32.
    """
    present = [(name, grad) for name, grad in named_gradients if grad is not None]
    device = present[0][1].device if present else device or torch.device("cpu")
    if not expert_parallel:
        total = torch.nn.utils.get_total_norm([grad for _, grad in present], norm_type).to(device)
    else:
        dense = [_norm(grad, norm_type) for name, grad in present if name not in expert_parallel]
        own = {name: _norm(grad, norm_type) for name, grad in present if name in expert_parallel}
        zero = torch.zeros((), device=device)
        experts = _gather(torch.stack([own.get(name, zero) for name in sorted(expert_parallel)]), groups)
        total = torch.linalg.vector_norm(torch.cat([*(norm.view(1) for norm in dense), experts]), norm_type)
    world = groups.group("world")
    if world is not None:
        dist.broadcast(total, 0, group=world)
    return total


def _norm(grad: Tensor, norm_type: float) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(grad, norm_type, dtype=torch.float32)
    return norm


def _gather(own: Tensor, groups: ParallelGroups) -> Tensor:
    """Gather the norms of every expert-parallel rank's parameters, by rank."""
    group = groups.group("expert")
    if group is None or group.size() == 1:
        return own
    everyone = own.new_empty(group.size() * own.numel())
    all_gather_flat(everyone, own, group)
    return everyone
