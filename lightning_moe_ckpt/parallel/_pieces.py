"""Shards for optimizers with sharded state (ZeRO-1), and the buckets in which ranks exchange them.

Ranks that share a parameter own a piece each, see `pieces`. The optimizer steps this rank's piece, a flat parameter in the whole
one's memory, so it keeps 1/N of the state. Reduced gradients end with their owners, and behind a step all ranks gather the weights:
together the bytes of an all-reduce. Elements are summed in the order of ranks whatever the layout, so bits do not depend on who
owns what.

A bucket has a row per rank, with columns of several parameters, so every rank owns equally much of it. Buckets of whole
parameters (`plan_buckets`) are cut from one flat vector, also within a parameter. Their layout is a pure function of names and
sizes, so all ranks have the same.

Source: ZeRO (2020), Sec. 5.1; we differ in owning pieces of each parameter rather than of a flat vector.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_moe_ckpt.parallel._collectives import CollectiveQueue, share_first
from lightning_moe_ckpt.parallel._norms import pieces


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketSlot:
    """The interval `[start, stop)` of one parameter in the flat vector, and the buckets it touches."""

    start: int
    stop: int
    buckets: range


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketLayout:
    """A flat vector of `numel` elements cut into `bucket_numel` pieces; only the last may be shorter."""

    slots: dict[str, BucketSlot]
    """Intervals by parameter name, in the order of the vector."""
    numel: int
    bucket_numel: int

    def interval(self, bucket: int) -> tuple[int, int]:
        """Return first and one past the last element of a bucket."""
        start = bucket * self.bucket_numel
        return start, min(start + self.bucket_numel, self.numel)

    @property
    def num_buckets(self) -> int:
        """Number of buckets."""
        return -(-self.numel // self.bucket_numel)


def plan_buckets(numels: Mapping[str, int], *, bucket_numel: int, multiple: int) -> BucketLayout:
    """Lay out parameters, given by their elements in order of registration, in buckets of `bucket_numel` elements
    before rounding; the last comes first, which is about the order in which backward finishes them. Bucket sizes, and
    the padded vector, are multiples of `multiple`, the group's size if chunks have to be equal.
    """
    bucket_numel = _round_up(max(bucket_numel, 1), multiple)
    slots: dict[str, BucketSlot] = {}
    start = 0
    for name, numel in reversed(list(numels.items())):
        stop = start + numel
        slots[name] = BucketSlot(start=start, stop=stop, buckets=range(start // bucket_numel, -(-stop // bucket_numel)))
        start = stop
    return BucketLayout(slots=slots, numel=_round_up(start, multiple), bucket_numel=bucket_numel)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


# Shape suffixes: R ranks of the group, C columns of a bucket.

Gather: TypeAlias = "Callable[[Mapping[str, OptimizerShard]], None]"

_ATTRIBUTE = "_optimizer_shard"
P = TypeVar("P", bound=Tensor)


class OptimizerShard:
    """This rank's piece of a contiguous parameter that `ranks`, global and ascending, share; known to the parameter,
    see `shard_of`. `gather` fills parameters from all owners' pieces, by name; collective. `stepped` is the piece,
    flat, in the memory of `whole`, with a gradient and versions of its own.
    """

    def __init__(self, whole: nn.Parameter, ranks: Sequence[int], rank: int, gather: Gather) -> None:
        self.whole, self.ranks, self.rank, self.gather = whole, tuple(ranks), rank, gather
        cuts = pieces(whole.numel(), len(ranks))
        self.start, self.stop = cuts[ranks.index(rank)]
        self.width = max(stop - start for start, stop in cuts)
        # Each `.data` has versions of its own: what a gather writes is no change of weights.
        self.memory = whole.data.view(-1)
        self.stepped = nn.Parameter(whole.data.view(-1)[self.start : self.stop])
        for each in (whole, self.stepped):
            vars(each)[_ATTRIBUTE] = self

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles of a parameter have no shard."""
        return type(None), ()

    def like(self, other: nn.Parameter) -> OptimizerShard:
        """Return the same piece of a parameter of the same shape."""
        return shard_of(other) or OptimizerShard(other, self.ranks, self.rank, self.gather)

    def refresh(self) -> None:
        """Follow the whole parameter to other memory (`param.data = ...`)."""
        if self.memory.data_ptr() != self.whole.data_ptr():
            self.memory = self.whole.data.view(-1)
            self.stepped.data = self.whole.data.view(-1)[self.start : self.stop]


def shard_of(param: Tensor) -> OptimizerShard | None:
    """Return the shard behind a whole parameter, or an optimizer's piece; `None` if the state is not sharded."""
    found: OptimizerShard | None = getattr(param, _ATTRIBUTE, None)
    return found


def stepped_of(param: P) -> P:
    """Return a parameter as the optimizer has it: this rank's piece if its state is sharded, else the parameter."""
    shard = shard_of(param)
    return param if shard is None else cast("P", shard.stepped)


class ShardBuckets:
    """Memory for all pieces of some parameters of the same type and device, by name in order of registration, in buckets `[R, C]`."""

    def __init__(self, shards: Mapping[str, OptimizerShard], group: dist.ProcessGroup, bucket_nbytes: int) -> None:
        first, ranks = next(iter(shards.values())).whole, group.size()
        self._shards, self.group = shards, group
        widths = {fqn: shard.width for fqn, shard in shards.items()}
        layout = plan_buckets(widths, bucket_numel=bucket_nbytes // first.element_size() // ranks, multiple=1)
        self._layout, self.columns, like = layout, layout.slots, first.detach()
        self.own = like.new_zeros(layout.numel)
        """This rank's row over all buckets, with reduced gradients; padding stays."""
        flat = like.new_zeros(ranks * layout.numel)
        cuts = map(layout.interval, range(layout.num_buckets))
        self.buckets_RC = [flat[ranks * start : ranks * stop].view(ranks, -1) for start, stop in cuts]
        self.scratch = torch.empty_like(self.buckets_RC[0]).view(-1)

    def own_of(self, bucket: int) -> Tensor:
        """Return this rank's row in `own` of one bucket."""
        return self.own[slice(*self._layout.interval(bucket))]

    def own_piece(self, fqn: str) -> Tensor:
        """Return this rank's piece in `own` of one parameter."""
        shard, start = self._shards[fqn], self.columns[fqn].start
        return self.own[start : start + shard.stop - shard.start]

    def pairs(self, fqn: str, whole: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield views into the buckets and into a flat whole tensor for the same elements; one parameter."""
        width = self._shards[fqn].width
        full, rest = divmod(whole.numel(), width)
        for bucket_RC, first, last, at in self._cuts(fqn):
            rows_RC = bucket_RC[:, at : at + last - first]
            if full:
                yield rows_RC[:full], whole[: full * width].view(full, width)[:, first:last]
            if rest > first:
                last = min(rest, last)
                yield rows_RC[full, : last - first], whole[full * width + first : full * width + last]

    def gather(self, lane: CollectiveQueue, own: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> None:
        """Fill the flat `whole` tensors from all ranks' `own` pieces, by the same names. Collective."""
        if not own:
            return
        touched = sorted({bucket for fqn in own for bucket in self.columns[fqn].buckets})
        pending = [lane.submit(partial(self._gather, bucket, own), self.own.device) for bucket in touched]
        for each in pending:
            each.wait()
        with torch.no_grad():
            for fqn, tensor in whole.items():
                for received, place in self.pairs(fqn, tensor):
                    place.copy_(received)

    def _gather(self, bucket: int, own: Mapping[str, Tensor]) -> Tensor:
        bucket_RC = self.buckets_RC[bucket]
        sent_RC = self.scratch[: bucket_RC.numel()].view_as(bucket_RC)
        for fqn, piece in own.items():
            if bucket in self.columns[fqn].buckets:
                for _, first, last, at in self._cuts(fqn, bucket):
                    part = piece[first:last]
                    sent_RC[0, at : at + part.numel()].copy_(part)
        share_first(sent_RC, bucket_RC.view(-1), self.group)
        return bucket_RC

    def _cuts(self, fqn: str, only: int | None = None) -> Iterator[tuple[Tensor, int, int, int]]:
        """Yield each bucket with the parameter's columns: the bucket, first and last element in a piece, first column."""
        place = self.columns[fqn]
        for bucket in place.buckets if only is None else (only,):
            start, stop = self._layout.interval(bucket)
            first, last = max(place.start, start), min(place.stop, stop)
            yield self.buckets_RC[bucket], first - place.start, last - place.start, first - start


class PieceExchange:
    """Exchanges pieces between owners behind a reduction, in `lane`: gradients that the user's code reads or keeps, and weights.

    With `whole_gradients`, all ranks gather gradients behind each reduction.
    """

    def __init__(
        self,
        shards: Mapping[str, OptimizerShard],
        make: Callable[[Mapping[str, OptimizerShard]], list[ShardBuckets]],
        lane: CollectiveQueue,
        *,
        whole_gradients: bool,
    ) -> None:
        self.shards, self._make, self._lane, self._whole_gradients = shards, make, lane, whole_gradients
        self._memories: list[ShardBuckets] = []
        self._owned = False
        """Whether gradients are the owners' pieces, from a reduction on to the next backward pass."""

    def lay_out(self, trained: Collection[str]) -> list[ShardBuckets]:
        """Return new buckets for the shards whose parameters train."""
        self._memories = self._make({fqn: each for fqn, each in self.shards.items() if fqn in trained})
        return self._memories

    def begin_step(self) -> None:
        """Go on from gradients that were not zeroed since the last reduction, which ranks gather. Collective."""
        if not self._owned:
            return
        self._owned = False
        self.drop_cleared()
        kept = dict[str, Tensor]()
        for fqn, shard in self.shards.items():
            grad, shard.stepped.grad = shard.stepped.grad, None
            if grad is not None:
                kept[fqn] = grad
            shard.whole.grad = None
        self._make_whole(kept)

    def take_up_gradients(self) -> None:
        """Go on from the gradients that owners have, reduced or restored. Collective."""
        self._owned = True
        if self._whole_gradients:
            own = {fqn: each.stepped for fqn, each in self.shards.items() if each.stepped.grad is not None}
            self._make_whole({fqn: each.grad for fqn, each in own.items() if each.grad is not None})
            for fqn, stepped in own.items():
                shard = self.shards[fqn]
                grad = shard.whole.grad
                assert grad is not None
                stepped.grad = grad.view(-1)[shard.start : shard.stop]

    def drop_cleared(self) -> None:
        """Take the piece's gradient away where the user has taken the whole one away."""
        for shard in self.shards.values() if self._whole_gradients else ():
            if shard.whole.grad is None:
                shard.stepped.grad = None

    def gather_weights(self, shards: Mapping[str, OptimizerShard]) -> None:
        """Give all ranks the owners' pieces of parameters, or of copies that have their names. Collective."""
        for shard in shards.values():
            shard.refresh()
        whole = {fqn: shard.memory for fqn, shard in shards.items()}
        self._gather(shards, {fqn: shard.stepped.detach() for fqn, shard in shards.items()}, whole)

    def _make_whole(self, own: Mapping[str, Tensor]) -> None:
        """Give parameters whole gradients, from all owners' pieces. Collective."""
        whole = {fqn: torch.empty_like(self.shards[fqn].whole, requires_grad=False) for fqn in own}
        self._gather(self.shards, own, {fqn: each.view(-1) for fqn, each in whole.items()})
        for fqn, each in whole.items():
            self.shards[fqn].whole.grad = each

    def _gather(
        self, shards: Mapping[str, OptimizerShard], own: Mapping[str, Tensor], whole: Mapping[str, Tensor]
    ) -> None:
        """Fill flat `whole` tensors from all owners' pieces, by the same names; without new memory for those that train."""
        rest = dict(own)
        for memory in self._memories:  # averages may be of another type than what trains
            fqns = [fqn for fqn in memory.columns if fqn in own and own[fqn].dtype == memory.own.dtype]
            memory.gather(self._lane, {fqn: rest.pop(fqn) for fqn in fqns}, {fqn: whole[fqn] for fqn in fqns})
        for memory in self._make({fqn: shards[fqn] for fqn in rest}):
            fqns = list(memory.columns)
            memory.gather(self._lane, {fqn: rest[fqn] for fqn in fqns}, {fqn: whole[fqn] for fqn in fqns})
