"""Sum over ranks with bits that depend on the ranks' values only.

A ring all-reduce adds an element's contributions in an order that depends on where the element lies in the buffer,
so the bits of a gradient change with the bucket it travels in: with three or more ranks a restarted DDP differs from
one that has run for a while. Here every element is summed from rank 0 upwards: all-to-all of equal chunks, the sum,
all-gather. The bytes on the wire are those of a ring all-reduce.

Invariant: for every element the result is `round(((x_0 + x_1) + x_2 + ...) / divisor)`, with 16-bit floats added and
divided in fp32 and rounded once; all ranks hold the same bits because one rank computed them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

# Shape suffixes: R ranks of the group, C elements of one rank's chunk.

_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def ordered_all_reduce(
    flat: Tensor, group: dist.ProcessGroup, *, divisor: int = 1, scratch: Tensor | None = None
) -> Tensor:
    """Sum `flat` over `group` in rank order and divide, in place. Collective.

    Args:
        flat: contiguous, one-dimensional; the same length on every rank. A multiple of the group size saves a copy.
        group: the ranks to sum over; not `None`, which torch takes for the whole world.
        divisor: applied to the sum before it is rounded to the dtype of `flat`.
        scratch: memory of the dtype of `flat`, at least as long rounded up to a multiple of the group size; saves
            fresh pages for every call, which cost as much as the transfer on CPU.

    Returns:
        `flat`, equal in bits on all ranks.
    """
    ranks = group.size()
    padded = -(-flat.numel() // ranks) * ranks
    sent = flat if flat.numel() == padded else F.pad(flat, (0, padded - flat.numel()))
    received = torch.empty_like(sent) if scratch is None else scratch[:padded]
    dist.all_to_all_single(_as_bytes(received), _as_bytes(sent), group=group)
    received_RC = received.view(ranks, -1)
    _sum_into_first(received_RC, divisor)
    _share_first(received_RC, sent, group)
    return flat if sent is flat else flat.copy_(sent[: flat.numel()])


def plain_all_reduce(
    flat: Tensor, group: dist.ProcessGroup, *, divisor: int = 1, scratch: Tensor | None = None
) -> Tensor:
    """Sum like `ordered_all_reduce`, by the backend's all-reduce: faster, but bits depend on the layout of `flat`."""
    dist.all_reduce(flat, group=group)
    return flat.div_(divisor) if divisor != 1 else flat


def all_gather_flat(out: Tensor, part: Tensor, group: dist.ProcessGroup) -> None:
    """Fill `out` with the ranks' `part`s, by rank."""
    # The name changed in torch 2.13; the older one warns there.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(_as_bytes(out), _as_bytes(part), group=group)


def _sum_into_first(parts_RC: Tensor, divisor: int) -> None:
    total_C = parts_RC[0].to(_WIDER.get(parts_RC.dtype, parts_RC.dtype))
    for part_C in parts_RC[1:]:
        total_C.add_(part_C)
    if divisor != 1:
        total_C.div_(divisor)
    parts_RC[0].copy_(total_C)


def _share_first(parts_RC: Tensor, out: Tensor, group: dist.ProcessGroup) -> None:
    if out.is_cuda:
        all_gather_flat(out, parts_RC[0], group)
        return
    # Measured on gloo: its all-gather takes twice as long as this, since it gathers into memory of its own first.
    parts_RC[1:] = parts_RC[0]
    dist.all_to_all_single(_as_bytes(out), _as_bytes(parts_RC.view(-1)), group=group)


def _as_bytes(tensor: Tensor) -> Tensor:
    # Every backend can move bytes, whatever other dtypes it supports.
    return tensor.view(torch.uint8)
