"""Make tensors equal on all ranks of a group, many small ones in one message.

One collective per tensor would pay the latency every time: 1,500 tensors of 8 KB take seconds over gloo.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor


def broadcast_tensors(
    tensors: Iterable[Tensor], group: dist.ProcessGroup, src: int, *, message_nbytes: int = 64 * 2**20
) -> None:
    """Overwrite `tensors` with those of global rank `src`, in place. Collective; same shapes and order on all ranks.

    Args:
        tensors: tensors of any dtypes and devices.
        group: the ranks that take part.
        src: global rank of the source, a member of `group`.
        message_nbytes: most bytes that are gathered into one message; a larger tensor is sent alone.
    """
    is_source = dist.get_rank() == src
    with torch.no_grad():
        for chunk in _chunks(tensors, message_nbytes):
            flat = torch.cat([tensor.detach().reshape(-1).view(torch.uint8) for tensor in chunk])
            dist.broadcast(flat, src, group=group)
            if not is_source:  # the source does not change, so it keeps its version counters
                _scatter(flat, chunk)


def _chunks(tensors: Iterable[Tensor], message_nbytes: int) -> Iterator[list[Tensor]]:
    chunk: list[Tensor] = []
    total = 0
    for tensor in tensors:
        full = total + tensor.nbytes > message_nbytes
        if chunk and (full or tensor.device != chunk[0].device):
            yield chunk
            chunk, total = [], 0
        chunk.append(tensor)
        total += tensor.nbytes
    if chunk:
        yield chunk


def _scatter(flat: Tensor, chunk: list[Tensor]) -> None:
    for tensor, part in zip(chunk, torch.split(flat, [tensor.nbytes for tensor in chunk]), strict=True):
        # A byte offset need not be a multiple of the item size, as a view of the dtype would demand.
        tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))
