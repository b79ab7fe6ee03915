"""Reduce gradients over the ranks that share a parameter, with bits that no bucket, freeze or restart can change.

Hooks copy each finished gradient into a static flat buffer. Full buckets are reduced during the rest of the backward pass, in
the same order on all ranks; then `.grad` becomes its place there, and what later hooks made of it is lost. A missing gradient
(frozen or unused, perhaps on this rank only) counts as zero, and stays `None` only if no replica has one. A gradient that was
there before backward keeps its memory. Gradients that somebody keeps from an earlier step are never overwritten: the buffer leaves its memory to them.

* Replicated parameters: the mean over all the stage's ranks, which is the world without pipelining.
* Expert-parallel parameters: the sum over the ranks that hold the same experts, divided by the count of the stage's ranks,
  because the tokens of all of them have reached the expert already.

All gradients of one kind (same group, dtype, device) form one flat vector, in reverse order of registration, which is
about the order in which backward finishes them. The vector is cut every `bucket_numel` elements, also within a
parameter, so a bucket never exceeds its size however large a stacked expert tensor is.

If a parameter has a shard, its gradient ends as the shard's, on the rank that owns the piece, see `ShardBuckets`.

Invariant: the layout is a pure function of what all ranks have alike: names, shapes, sizes and strides. Messages and their
order depend on the layout alone, not on which gradients exist.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.parallel._collectives import (
    CollectiveQueue,
    is_same_sum,
    ordered_all_reduce,
    ordered_reduce_scatter,
    plain_all_reduce,
    plain_reduce_scatter,
    stream_writing,
)
from lightning_moe_ckpt.parallel._groups import ParallelGroups
from lightning_moe_ckpt.parallel._pieces import BucketLayout, OptimizerShard, PieceExchange, ShardBuckets, plan_buckets

log = rank_logger(__name__)

_WAITS = 5
"""Milliseconds until whoever still has gradients of an earlier step is taken to keep them."""

ReductionMode = Literal["ordered", "allreduce"]
_REDUCE: dict[ReductionMode, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "ordered": (ordered_all_reduce, ordered_reduce_scatter),
    "allreduce": (plain_all_reduce, plain_reduce_scatter),
}
"""Reductions by mode: to all ranks, and to each rank its row."""


@dataclass(kw_only=True, eq=False)
class _Bucket:
    flat: Tensor
    own: Tensor | None = None
    """Receives this rank's row, if gradients end with the owners of pieces."""
    scratch: Tensor
    """Memory as long as the bucket, shared by all buckets: one is reduced at a time."""
    group: dist.ProcessGroup
    direct: bool = False
    """Whether the backend's all-reduce does, which is then begun at once; several may be under way."""
    complete_at: int
    """Position, in reverse order of registration, of the last parameter that the bucket waits for."""
    num_slots: int = 0
    pending: int = 0
    writers: set[torch.cuda.Stream] = field(default_factory=set)
    """Streams on which gradients were copied in."""


@dataclass(kw_only=True, eq=False)
class _Gradient:
    """A parameter, its gradient's place in the flat vector, and the buckets that wait for it."""

    fqn: str
    parameter: nn.Parameter
    buckets: list[_Bucket]
    ready: bool = False
    fresh: bool = True
    """Whether there was no gradient before this backward."""
    hook: RemovableHandle | None = field(default=None, repr=False)

    def fill(self) -> None:
        """Copy the gradient into its buckets, or zeros; call before these are launched. Raises `ConfigurationError` if sparse."""
        if (grad := self.parameter.grad) is not None and grad.layout is not torch.strided:
            raise ConfigurationError(
                f"`{self.fqn}` has a sparse gradient, which cannot be reduced in a static bucket. "
                "Build its module with `sparse=False`."
            )
        self.send(None if grad is None else grad.detach())

    def send(self, grad: Tensor | None) -> None:
        """Copy a gradient into the buckets, or zeros."""
        raise NotImplementedError

    def write_back(self, *, present: bool) -> None:
        """Set the reduced gradient, if any rank has one."""
        raise NotImplementedError


@dataclass(kw_only=True, eq=False)
class WholeGradient(_Gradient):
    """A gradient that all ranks get, in its place of the flat vector."""

    flat: Tensor
    """Place in the flat vector, in the parameter's shape."""
    strides: tuple[int, ...]
    """Strides there: the parameter's if all ranks had the same as it was laid out, or contiguous."""
    lends: bool = True
    """Whether `.grad` may become that place, and not a copy."""
    version: int = 0
    """Version of a gradient that was there already, as it was sent; reductions do not change it."""

    @override
    def send(self, grad: Tensor | None) -> None:
        if grad is None:
            self.flat.zero_()
        elif grad.data_ptr() != self.flat.data_ptr():
            self.flat.copy_(grad)
        else:
            self.version = grad._version  # noqa: SLF001  # torch has no public one

    @override
    def write_back(self, *, present: bool) -> None:
        if not present:
            return
        grad = self.parameter.grad
        lends = self.lends and self.flat.stride() == self.parameter.stride()  # which fused optimizers want
        # A gradient with a graph keeps it.
        if grad is None or (lends and self.fresh and grad.dtype is self.flat.dtype and not grad.requires_grad):
            self.parameter.grad = self.flat.data if lends else torch.empty_like(self.parameter).copy_(self.flat)
        elif self.fresh or grad.data_ptr() != self.flat.data_ptr():
            grad.copy_(self.flat)
        elif grad._version != self.version:  # noqa: SLF001
            raise ConfigurationError(
                f"The gradient of `{self.fqn}` was edited while it was being reduced. Edit it in `on_before_optimizer_step`, "
                "or in a hook of the parameter that is registered before the strategy is set up."
            )


class _FlatVector:
    """Memory for one kind's whole gradients, new if somebody keeps one; if so twice in a row, gradients are copies."""

    def __init__(
        self, layout: BucketLayout, flat: Tensor, gradients: list[WholeGradient], buckets: list[_Bucket]
    ) -> None:
        self._layout, self._gradients, self._buckets, self._times_kept = layout, gradients, buckets, 0
        self._take(flat)

    def begin_step(self) -> None:
        """Look for gradients from earlier steps; call before each backward."""
        users = self._own_users
        for gradient in self._gradients:
            grad = gradient.parameter.grad
            gradient.fresh = grad is None
            if grad is not None and grad.layout is torch.strided:  # without elements: address 0, and never lent
                users += 0 != grad.data_ptr() == gradient.flat.data_ptr()
        waits = 0  # gloo's threads let go at their leisure
        while (is_kept := _users_of(self._flat) > users) and waits < _WAITS:
            waits += 1
            time.sleep(0.001)
        self._times_kept = self._times_kept + 1 if is_kept else 0
        if self._times_kept:
            self._take(torch.zeros_like(self._flat))
        if self._times_kept == 2:  # then nobody can keep any more
            log.info("something keeps gradients from step to step: their %d bytes are now copied", self._flat.nbytes)

    def _take(self, flat: Tensor) -> None:
        self._flat = flat
        for at, bucket in enumerate(self._buckets):
            bucket.flat = flat[slice(*self._layout.interval(at))]
        for gradient, slot in zip(self._gradients, self._layout.slots.values(), strict=True):
            gradient.flat = flat[slot.start : slot.stop].as_strided(gradient.parameter.shape, gradient.strides)
            gradient.lends = slot.start < slot.stop and self._times_kept < 2
        self._own_users = _users_of(flat)


def _users_of(flat: Tensor) -> int:
    """Return how many tensors use this memory."""
    return int(torch._C._storage_Use_Count(flat.untyped_storage()._cdata))  # noqa: SLF001  # torch has no public way


@dataclass(kw_only=True, eq=False)
class _PieceGradient(_Gradient):
    shard: OptimizerShard
    memory: ShardBuckets

    @override
    def send(self, grad: Tensor | None) -> None:
        like = self.shard.memory if grad is None else grad.reshape(-1)
        for place, part in self.memory.pairs(self.fqn, like):
            _ = place.zero_() if grad is None else place.copy_(part)

    @override
    def write_back(self, *, present: bool) -> None:
        self.parameter.grad = None
        self.shard.refresh()  # before the step, which writes there
        self.shard.stepped.grad = self.memory.own_piece(self.fqn) if present else None


def _keep_heap(nbytes: int) -> None:
    """Let freed gradients stay in the process, which would else fetch their pages anew in each step.

    glibc gives the free end of its heap back if longer than twice the largest block below 32 MiB that was mapped alone and freed.
    """
    torch.empty(min(nbytes, 2**25 - 2**16), dtype=torch.uint8)


def _ended(begun: dist.Work, flat: Tensor, divisor: int) -> Tensor:
    begun.wait()
    return flat.div_(divisor) if divisor != 1 else flat


class GradientReducer:
    """Average of gradients over ranks during backward; in a world of one nothing is reduced.

    Call `prepare(sync=...)` before each backward and `finish()` after it. Gradients are reduced once `finish` returns.
    The reducer holds the memory of gradients, also between steps, and of one bucket of `bucket_nbytes`, a message.

    All parameters are given, in the same order on every rank of the stage. A parameter is reduced if it requires a
    gradient on some rank; if it requires one later, on all ranks, it is reduced from then on. Names in
    `is_expert_parallel` have different experts on the ranks of an `expert` group. The gradients of `shards`, by name,
    end with the owners of pieces; their own gradients are then `None`. With `whole_gradients` all ranks gather these,
    because the user's code reads them; a shard's gradient is then a part of the whole one.

    In mode `"ordered"` bits depend on the ranks' values only. `"allreduce"` is the backend's own all-reduce over the
    same static, zero-filled buckets; faster on some networks, with bits that change with `bucket_nbytes`, the set of
    parameters and the backend's choice of algorithm.

    Each reduction exchanges the maximum of each integer in `flags` over all ranks; with pipeline stages over the stage,
    and `exchange_flags` over all. That of `stage_flags` is over the stage's ranks only.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        groups: ParallelGroups,
        is_expert_parallel: Collection[str] = (),
        shards: Mapping[str, OptimizerShard] = MappingProxyType({}),
        whole_gradients: bool = False,
        bucket_nbytes: int = 32 * 2**20,
        mode: ReductionMode = "ordered",
        flags: Iterable[str] = ("stop",),
        stage_flags: Iterable[str] = (),
    ) -> None:
        if mode not in _REDUCE:
            raise ConfigurationError(f"`gradient_reduction={mode!r}` must be one of {sorted(_REDUCE)}.")
        if bucket_nbytes < 1:
            raise ConfigurationError(f"`bucket_nbytes={bucket_nbytes}` must be positive.")
        self._parameters = dict(named_parameters)
        self._groups = groups
        self._sharded = frozenset(is_expert_parallel)
        self._bucket_nbytes = bucket_nbytes
        self._mode = mode
        self._world_flags = tuple(flags)
        self.flags: dict[str, int] = dict.fromkeys((*self._world_flags, *stage_flags), 0)
        """This rank's values. The owner of a flag sets and clears it; a signal handler may do so at any time."""
        self.agreed: dict[str, int] = dict(self.flags)
        """Maximum of each flag over all ranks, from the last reduction."""
        self._lane = CollectiveQueue()
        self.pieces = PieceExchange(shards, self._lay_out_pieces, self._lane, whole_gradients=whole_gradients)
        self._sync = False
        self.armed = False
        """Whether `finish` will exchange anything with other ranks."""
        self._gradients: dict[str, _Gradient] = {}
        self._queue: list[_Bucket] = []
        self._vectors: list[_FlatVector] = []
        self._launched: list[Future[Tensor]] = []
        self._unshared: list[str] = []
        self._build()

    def prepare(self, *, sync: bool) -> None:
        """Prepare for a backward. With `sync=False`, while gradients accumulate, nothing is reduced.

        Micro-batches of a pipeline accumulate too: only the backward of the last one is prepared with `sync=True`.
        """
        self._sync = sync
        self.armed = sync and self._groups.world_size > 1
        self.pieces.begin_step()
        if not self.armed:
            return
        if any(p.requires_grad and fqn not in self._known for fqn, p in self._parameters.items()):
            self._build()
        self._launched.clear()
        for vector in self._vectors:
            vector.begin_step()
        for bucket in self._queue:
            bucket.pending = bucket.num_slots
            bucket.writers.clear()
        for gradient in self._gradients.values():
            gradient.ready = False
            self._watch(gradient)
        for gradient in self._gradients.values():
            if not gradient.parameter.requires_grad:
                self._contribute(gradient)  # its hook will not run, so its bucket must not wait

    def finish(self) -> None:
        """Wait for the reduction after backward, then set `.grad` and `agreed`. Raises `RuntimeError` if a collective failed or timed out;
        the gradients are not usable.
        """
        if self._sync and not self.armed:
            self.agreed = dict(self.flags)
        if not self.armed:
            return
        self.armed = False
        present = {fqn: self._parameters[fqn].grad is not None for fqn in self._known}
        for gradient in self._gradients.values():
            if not gradient.ready:
                self._contribute(gradient)
        self._write_back(self._agree(present))  # agrees while the last buckets are reduced

    def exchange_flags(self) -> dict[str, int]:
        """Return the maximum over all ranks of the flags that concern more than one stage. Collective."""
        own = torch.tensor([self.flags[name] for name in self._world_flags], dtype=torch.int32)
        dist.all_reduce(own, dist.ReduceOp.MAX, group=self._groups.groups["control"])
        return dict(zip(self._world_flags, own.tolist(), strict=True))

    def close(self) -> None:
        """Remove the hooks and end the worker."""
        for gradient in self._gradients.values():
            if gradient.hook is not None:
                gradient.hook.remove()
                gradient.hook = None
        self._lane.close()
        self._launched.clear()  # an error in there has frames with this object

    # -- layout ------------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        """Lay out the parameters that require a gradient on any rank of the stage. Collective."""
        self.close()
        self._known = self._agree_on_names() if self._groups.world_size > 1 else frozenset(self._parameters)
        self._gradients, self._queue, self._vectors, self._unshared, shards = {}, [], [], [], self.pieces.shards
        _keep_heap(sum(parameter.nbytes for parameter in self._parameters.values() if parameter.is_cpu))
        if self._groups.world_size == 1:
            return
        order = {fqn: position for position, fqn in enumerate(reversed(self._parameters))}
        for memory in self.pieces.lay_out(self._known):
            self._watch_pieces(memory, order)
        for (is_sharded, dtype, device), fqns in self._kinds(self._known - shards.keys()).items():
            group = self._group(is_sharded)
            if group.size() == 1:
                self._unshared += fqns
                continue
            layout = plan_buckets(
                {fqn: self._parameters[fqn].numel() for fqn in fqns},
                bucket_numel=self._bucket_nbytes // dtype.itemsize,
                multiple=group.size(),
            )
            self._lay_out(layout, torch.zeros(layout.numel, dtype=dtype, device=device), group, order)
        # All of a group's or none: ranks have to agree on the order, and the lane's thread begins the others.
        apart = {each.group for each in self._queue if not self._is_plain(each)}
        for bucket in self._queue:
            bucket.direct = bucket.group not in apart
        self._queue.sort(key=lambda bucket: bucket.complete_at)
        replicated = [fqn for fqn in self._parameters if fqn in self._known - self._sharded]
        self._voted = replicated, [fqn for fqn in self._parameters if fqn in self._known & self._sharded]
        log.debug("gradient reduction %s: %d gradients in %d buckets", self._mode, len(self._known), len(self._queue))

    def _is_plain(self, bucket: _Bucket) -> bool:
        same = self._mode == "allreduce" or is_same_sum(bucket.flat.dtype, bucket.group)
        return same and bucket.own is None and bucket.flat.is_cpu

    def _agree_on_names(self) -> frozenset[str]:
        # Strides that differ, perhaps since a rank has it frozen, are as good as none: ranks have to agree on the order.
        like = {fqn: parameter for fqn, parameter in self._parameters.items() if parameter.requires_grad}
        own = {fqn: torch.empty_like(parameter, device="meta").stride() for fqn, parameter in like.items()}
        everyone = [own] * self._groups.stage_size
        dist.all_gather_object(everyone, own, group=self._groups.group("stage_control"))
        self._strides = {fqn: each for fqn, each in own.items() if all(each == other.get(fqn) for other in everyone)}
        return frozenset(name for names in everyone for name in names)

    def _group(self, is_sharded: bool) -> dist.ProcessGroup:
        return self._groups.groups["expert_data" if is_sharded else "reduce"]

    def _kinds(self, fqns: Collection[str]) -> Mapping[tuple[bool, torch.dtype, torch.device], list[str]]:
        kinds: dict[tuple[bool, torch.dtype, torch.device], list[str]] = {}
        for fqn, parameter in self._parameters.items():
            if fqn in fqns:
                kinds.setdefault((fqn in self._sharded, parameter.dtype, parameter.device), []).append(fqn)
        return kinds

    def _lay_out(self, layout: BucketLayout, flat: Tensor, group: dist.ProcessGroup, order: Mapping[str, int]) -> None:
        scratch = torch.empty_like(flat[: layout.bucket_numel])
        buckets = [_Bucket(flat=flat, scratch=scratch, group=group, complete_at=-1) for _ in range(layout.num_buckets)]
        gradients = [
            WholeGradient(
                fqn=fqn,
                parameter=self._parameters[fqn],
                flat=flat,
                strides=self._strides.get(fqn) or torch.empty(self._parameters[fqn].shape, device="meta").stride(),
                buckets=[buckets[at] for at in slot.buckets],
            )
            for fqn, slot in layout.slots.items()
        ]
        self._vectors.append(_FlatVector(layout, flat, gradients, buckets))
        self._gradients.update((gradient.fqn, gradient) for gradient in gradients)
        self._enqueue(buckets, layout.slots, order)

    def _lay_out_pieces(self, shards: Mapping[str, OptimizerShard]) -> list[ShardBuckets]:
        return [
            ShardBuckets({fqn: shards[fqn] for fqn in names}, self._group(is_sharded), self._bucket_nbytes)
            for (is_sharded, _, _), names in self._kinds(shards.keys()).items()
        ]

    def _watch_pieces(self, memory: ShardBuckets, order: Mapping[str, int]) -> None:
        buckets = [
            _Bucket(
                flat=each.view(-1), own=memory.own_of(at), scratch=memory.scratch, group=memory.group, complete_at=-1
            )
            for at, each in enumerate(memory.buckets_RC)
        ]
        for fqn, columns in memory.columns.items():
            self._gradients[fqn] = _PieceGradient(
                fqn=fqn,
                parameter=self._parameters[fqn],
                buckets=[buckets[bucket] for bucket in columns.buckets],
                shard=self.pieces.shards[fqn],
                memory=memory,
            )
        self._enqueue(buckets, memory.columns, order)

    def _enqueue(self, buckets: list[_Bucket], fqns: Iterable[str], order: Mapping[str, int]) -> None:
        for fqn in fqns:
            for bucket in self._gradients[fqn].buckets:
                bucket.num_slots += 1
                bucket.complete_at = max(bucket.complete_at, order[fqn])
        self._queue += buckets

    # -- one reduction -----------------------------------------------------------------------------------------------

    def _watch(self, gradient: _Gradient) -> None:
        """Hook a parameter once; a frozen parameter cannot be hooked before its thaw."""
        if gradient.hook is None and gradient.parameter.requires_grad:
            gradient.hook = gradient.parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda _: self._on_gradient(gradient) if self.armed else None
            )

    def _on_gradient(self, gradient: _Gradient) -> None:
        if gradient.ready:
            raise ConfigurationError(
                f"`{gradient.fqn}` got a gradient twice in one backward pass, after the first may have been sent. "
                "Pass `use_reentrant=False` to `torch.utils.checkpoint.checkpoint`, and call backward once per step."
            )
        self._contribute(gradient)

    def _contribute(self, gradient: _Gradient) -> None:
        gradient.fill()
        gradient.ready = True
        stream = stream_writing(gradient.parameter)
        for bucket in gradient.buckets:
            bucket.pending -= 1
            if stream is not None:
                bucket.writers.add(stream)
        while (position := len(self._launched)) < len(self._queue) and self._queue[position].pending == 0:
            self._launched.append(self._launch(self._queue[position]))

    def _launch(self, bucket: _Bucket) -> Future[Tensor]:
        divisor = self._groups.stage_size
        if bucket.direct:
            begun = dist.all_reduce(bucket.flat, group=bucket.group, async_op=True)
            return self._lane.submit(lambda: _ended(begun, bucket.flat, divisor), bucket.flat.device, bucket.writers)
        own = () if bucket.own is None else (bucket.own,)
        reduce = _REDUCE[self._mode][len(own)]
        return self._lane.submit(
            lambda: reduce(bucket.flat, *own, bucket.group, divisor=divisor, scratch=bucket.scratch),
            device=bucket.flat.device,
            after=bucket.writers,
        )

    def _agree(self, present: Mapping[str, bool]) -> dict[str, bool]:
        """Return which gradients exist on any rank that shares the parameter, and set `agreed`. Collective.

        The exchange is a maximum over the stage's ranks of a vector of integers, with an element per replicated parameter,
        per flag, and per sharded parameter and expert-parallel rank (the same name means different experts there). Stages
        then exchange the flags shared by all ranks. The exchange runs on the host, which needs the result: a gradient is
        `None` or not.
        """
        replicated, experts = self._voted
        first, num_own = len(replicated), len(experts)
        own = slice(first + self._groups.ep_rank * num_own, first + (self._groups.ep_rank + 1) * num_own)
        votes = [int(present[fqn]) for fqn in replicated] + [0] * (self._groups.ep_size * num_own)
        votes[own] = [int(present[fqn]) for fqn in experts]
        exchanged = torch.tensor([*votes, *(self.flags[name] for name in self.flags)], dtype=torch.int32)
        dist.all_reduce(exchanged, dist.ReduceOp.MAX, group=self._groups.groups["stage_control"])
        found: list[int] = exchanged.tolist()
        self.agreed = dict(zip(self.flags, found[len(votes) :], strict=True))
        return {
            **dict(zip(replicated, map(bool, found[:first]), strict=True)),
            **dict(zip(experts, map(bool, found[own]), strict=True)),
        }

    def _write_back(self, present: Mapping[str, bool]) -> None:
        for reduced in self._launched:
            reduced.wait()
        with torch.no_grad():
            for fqn, gradient in self._gradients.items():
                gradient.write_back(present=present[fqn])
            for fqn in self._unshared:
                if (grad := self._parameters[fqn].grad) is not None:
                    grad.div_(self._groups.stage_size)
        self.pieces.take_up_gradients()
