"""Collectives over tensors whose result depends on the ranks' values only, and the queue that runs them beside training.

*Reduction.* A ring all-reduce adds an element's contributions in an order that depends on where the element lies in the
buffer, so the bits of a gradient change with the bucket it travels in: with three or more ranks a restarted DDP differs
from one that has run for a while. Here every element is summed from rank 0 upwards: all-to-all of equal chunks, the
sum, all-gather. The bytes on the wire are those of a ring all-reduce. Invariant: for every element the result is
`round(((x_0 + x_1) + x_2 + ...) / divisor)`, with 16-bit floats added and divided in fp32 and rounded once; all ranks
hold the same bits because one rank computed them. `ordered_hook` brings it to plain DistributedDataParallel, which
rebuilds its buckets after its first backward pass.

*Broadcast* of many small tensors in one message. One collective per tensor would pay the latency every time: 1,500
tensors of 8 KB take seconds over gloo.

*Order.* Ranks must enter the collectives of a group in the same order. `CollectiveQueue` has a single worker, which keeps the
order of submission. On CPU the worker is a thread (gloo waits without the GIL); on CUDA it is a side stream, so the host
does not wait.
"""

# No `from __future__ import annotations`: DDP compares the annotations of a hook with the classes themselves.
import queue
import threading
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # exported at run time only
from torch.futures import Future
from typing_extensions import Self

# Shape suffixes: R ranks of the group, C elements of one rank's chunk.

_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def ordered_all_reduce(
    flat: Tensor, group: dist.ProcessGroup, *, divisor: int = 1, scratch: Tensor | None = None
) -> Tensor:
    """Sum contiguous, one-dimensional `flat`, of the same length on every rank, over `group` in rank order and divide,
    in place. Collective. Return `flat`, equal in bits on all ranks. The sum is divided before it is rounded to the
    dtype of `flat`. `None` as the group is not allowed: torch takes it for the whole world.

    A length that is a multiple of the group size saves a copy. `scratch`, memory of the same dtype, at least as long as
    `flat` rounded up to such a multiple, saves fresh pages for every call, which cost as much as the transfer on CPU.
    """
    ranks = group.size()
    if is_same_sum(flat.dtype, group):
        return plain_all_reduce(flat, group, divisor=divisor)
    padded = -(-flat.numel() // ranks) * ranks
    sent = flat if flat.numel() == padded else F.pad(flat, (0, padded - flat.numel()))
    received = torch.empty_like(sent) if scratch is None else scratch[:padded]
    dist.all_to_all_single(_as_bytes(received), _as_bytes(sent), group=group)
    received_RC = received.view(ranks, -1)
    _sum_into_first(received_RC, divisor)
    share_first(received_RC, sent, group)
    return flat if sent is flat else flat.copy_(sent[: flat.numel()])


def is_same_sum(dtype: torch.dtype, group: dist.ProcessGroup) -> bool:
    """Return whether any all-reduce gives the bits of `ordered_all_reduce`: two numbers have one sum."""
    return group.size() == 2 and dtype not in _WIDER


def ordered_reduce_scatter(
    flat: Tensor, own_C: Tensor, group: dist.ProcessGroup, *, divisor: int, scratch: Tensor
) -> Tensor:
    """Sum like `ordered_all_reduce`, but give each rank its row of `flat` only: `own_C`, which is returned. Collective.
    `flat` has a row of C elements per rank, and `scratch`, of the same dtype, is at least as long.
    """
    received = scratch[: flat.numel()]
    dist.all_to_all_single(_as_bytes(received), _as_bytes(flat), group=group)
    received_RC = received.view(group.size(), -1)
    _sum_into_first(received_RC, divisor)
    return own_C.copy_(received_RC[0])


def plain_reduce_scatter(
    flat: Tensor, own_C: Tensor, group: dist.ProcessGroup, *, divisor: int, scratch: Tensor
) -> Tensor:
    """Sum like `ordered_reduce_scatter`, by the backend's reduce-scatter, with bits as of `plain_all_reduce`. Collective."""
    del scratch
    # The name changed in torch 2.13; the older one warns there.
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(own_C, flat, group=group)
    return own_C.div_(divisor) if divisor != 1 else own_C


def plain_all_reduce(
    flat: Tensor, group: dist.ProcessGroup, *, divisor: int = 1, scratch: Tensor | None = None
) -> Tensor:
    """Sum like `ordered_all_reduce`, by the backend's all-reduce: faster, but bits depend on the layout of `flat`. Collective."""
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


def share_first(parts_RC: Tensor, out: Tensor, group: dist.ProcessGroup) -> None:
    """Fill `out` with the first rows of all ranks, by rank; the other rows are overwritten. Collective."""
    if out.is_cuda:
        all_gather_flat(out, parts_RC[0], group)
        return
    # Measured on gloo: its all-gather takes twice as long as this, since it gathers into memory of its own first.
    parts_RC[1:] = parts_RC[0]
    dist.all_to_all_single(_as_bytes(out), _as_bytes(parts_RC.view(-1)), group=group)


def _as_bytes(tensor: Tensor) -> Tensor:
    # Every backend can move bytes, whatever other dtypes it supports.
    return tensor.view(torch.uint8)


class OrderedHookState:
    """State of `ordered_hook`: its own process group, and the lane beside the backward pass.

    Args:
        group: all ranks of the DDP module, used by nothing else, since DDP has collectives under way. By default a new group
            over all ranks, so every rank must construct the state.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group if group is not None else dist.new_group()
        self.lane = CollectiveQueue()


def ordered_hook(state: OrderedHookState, bucket: GradBucket) -> Future[Tensor]:
    """Reduce a bucket to its mean over ranks by `ordered_all_reduce`; a communication hook of DDP.

    Use: `ddp.register_comm_hook(OrderedHookState(), ordered_hook)`.
    """
    flat = bucket.buffer()
    divisor = state.group.size()
    return state.lane.submit(lambda: ordered_all_reduce(flat, state.group, divisor=divisor), flat.device)


def broadcast_tensors(
    tensors: Iterable[Tensor], group: dist.ProcessGroup, src: int, *, message_nbytes: int = 2**20
) -> None:
    """Overwrite `tensors`, of any dtypes and devices, with those of global rank `src`, in place. Collective; same
    shapes and order on all ranks. At most `message_nbytes` are gathered into one message; a larger tensor is sent
    alone, and uncopied where it is contiguous.
    """
    is_source = dist.get_rank() == src
    with torch.no_grad():
        for chunk in _chunks(tensors, message_nbytes):
            parts = [_flat(tensor.detach()).view(torch.uint8) for tensor in chunk]
            flat = parts[0] if len(parts) == 1 else torch.cat(parts)
            dist.broadcast(flat, src, group=group)
            if is_source:  # it does not change, so it keeps its version counters
                continue
            if flat.data_ptr() == chunk[0].data_ptr():
                torch.autograd.graph.increment_version(chunk[0])
            else:
                _scatter(flat, chunk)


def _flat(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(-1)
    return flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)


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
        value = part.clone().view(tensor.dtype).view(tensor.shape)
        for dim in reversed(range(tensor.ndim)):
            if tensor.stride(dim) == 0 and tensor.shape[dim] > 1:  # expanded: torch writes no element twice
                tensor, value = tensor.select(dim, 0), value.select(dim, 0)
        tensor.copy_(value)


Work = Callable[[], Tensor]


class CollectiveQueue:
    """Runs submitted work in order; starts its worker with the first `submit`."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Work, Future[Tensor]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stream: torch.cuda.Stream | None = None

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        """Copy and pickle as a new lane without work, because a Trainer or callback with a lane may be copied."""
        return type(self), ()

    def submit(self, work: Work, device: torch.device, after: Iterable[torch.cuda.Stream] = ()) -> Future[Tensor]:
        """Queue `work`; return a future of its result, whose `wait` raises its exception. The caller leaves the memory
        that `work` reads and writes, on `device`, alone until the future is done. `after` are streams that have written
        there, besides the current one.
        """
        if device.type == "cuda":
            return self._enqueue_on_stream(work, device, after)
        if self._thread is None:
            # Daemon: a collective whose peer died must not keep this process from ending.
            self._thread = threading.Thread(target=self._drain, name="gradient-reduction", daemon=True)
            self._thread.start()
        future: Future[Tensor] = Future()
        self._jobs.put((work, future))
        return future

    def close(self) -> None:
        """End the worker after its queued work; abandon a worker that hangs."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(timeout=5)
            self._thread = None

    def _enqueue_on_stream(
        self, work: Work, device: torch.device, after: Iterable[torch.cuda.Stream]
    ) -> Future[Tensor]:
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        for stream in {torch.cuda.current_stream(device), *after}:
            self._stream.wait_stream(stream)
        future: Future[Tensor] = Future(devices=[device])
        with torch.cuda.stream(self._stream), torch.no_grad():
            future.set_result(work())  # remembers this stream; `wait` makes the waiting stream wait for it
        return future

    def _drain(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, future = job
            try:
                with torch.no_grad():
                    future.set_result(work())
            except Exception as error:  # noqa: BLE001  # thread entry: the waiter raises it
                future.set_exception(error)  # type: ignore[arg-type]  # its stub says the result type
            # The error has this frame, the future has the error, and the collector does not look into futures.
            del job, work, future


def stream_writing(tensor: Tensor) -> torch.cuda.Stream | None:
    """Return the stream on which the caller now writes to a tensor; `None` on the CPU.

    Backward runs every hook on the stream of its forward, and a model may have several.
    """
    return torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None
