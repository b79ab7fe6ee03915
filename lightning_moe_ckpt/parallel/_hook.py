"""The ordered reduction for plain DistributedDataParallel.

DDP rebuilds its buckets after its first backward pass, so its bits depend on how long the process has run. With this
hook they depend on the ranks' values only.
"""

# No `from __future__ import annotations`: DDP compares the annotations of a hook with the classes themselves.
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # exported at run time only
from torch.futures import Future

from lightning_moe_ckpt.parallel._lane import Lane
from lightning_moe_ckpt.parallel._ordered import ordered_all_reduce


class OrderedHookState:
    """State of `ordered_hook`: a process group of its own and the lane that runs beside the backward pass.

    Args:
        group: all ranks of the DDP module, used by nothing else: DDP has collectives of its own in flight. By default
            a new group over all ranks, so every rank must construct the state.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group if group is not None else dist.new_group()
        self.lane = Lane()


def ordered_hook(state: OrderedHookState, bucket: GradBucket) -> Future[Tensor]:
    """Reduce a bucket to its mean over ranks by `ordered_all_reduce`; a communication hook of DDP.

    Use: `ddp.register_comm_hook(OrderedHookState(), ordered_hook)`.
    """
    flat = bucket.buffer()
    divisor = state.group.size()
    return state.lane.submit(lambda: ordered_all_reduce(flat, state.group, divisor=divisor), flat.device)
