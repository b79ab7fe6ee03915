"""Load a restored generation: at once, or step by step while ordinary training re-runs the steps between.

At the window's first boundary the operators of its first step get their full state and are active; all others get their
compute weights and stay frozen. After every replayed step the window's next step is loaded, until every operator is
active and the state is dense. Forward runs through frozen operators with exact compute weights, so activations, and
with them the gradients of active operators, are the original run's.

An optimizer's values shared by several experts, as the step count of a stacked tensor, belong to no single expert: if
experts may be of different ages, the journal has these values, as of the generation.

Source: MoEvement (2026), Sec. 3.3; we differ in replaying inside the user's own training loop, bit for bit.
"""

from __future__ import annotations

import ctypes
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain, islice
from operator import is_
from typing import NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.errors import Corrupt
from lightning_moe_ckpt.journal import Journal, decode_journal
from lightning_moe_ckpt.native import Column, Copy, CopyEngine, copy_through, host_buffer
from lightning_moe_ckpt.operators import RecordKind, Region, complete, follow, memory_of, with_memory
from lightning_moe_ckpt.parallel import ParallelGroups
from lightning_moe_ckpt.recovery._cut import UNITS
from lightning_moe_ckpt.recovery._frozen import Frozen
from lightning_moe_ckpt.snapshot import (
    JOURNAL,
    PRESENT,
    FileLayout,
    ParameterShards,
    ShardTable,
    WindowLayout,
    digests_of,
    versions,
)
from lightning_moe_ckpt.storage import Backend, RecordColumns, SegmentEntry, SegmentLayout, digest_of

log = rank_logger(__name__)

Scalars = Mapping[str, Mapping[str, Tensor]]
"""Optimizer state shared by several experts, by parameter and key."""


class _Sent(NamedTuple):
    """A writer's part on its way to all ranks in its region."""

    table: ShardTable
    source: Tensor
    is_own: bool
    """Whether this rank is the writer."""
    wait: Callable[[], Tensor]
    """Waits for the bytes, and returns them on the host."""


class _Loaded:
    """Tensors as loaded, to tell whether they still are; digests tell for tensors of the host."""

    def __init__(self, tensors: Sequence[Tensor], *, with_digests: bool = False) -> None:
        self._tensors, self._places = tensors, [each.data_ptr() for each in map(memory_of, tensors)]
        self._versions = versions(tensors)
        by_digests = with_digests and not any(each.device.type != "cpu" for each in tensors)
        self._digests = digests_of(tensors) if by_digests else None

    def is_still(self, now: Sequence[Tensor], *, by_digests: bool) -> bool:
        """Return whether `now` are the same tensors with the same contents, by digests or by version counters."""
        if len(now) != len(self._tensors) or not all(map(is_, now, self._tensors)):
            return False
        if [each.data_ptr() for each in map(memory_of, now)] != self._places:
            return False
        if not by_digests:
            return versions(now) == self._versions
        return self._digests is not None and digests_of(now) == self._digests


class Replay:
    """Rebuild the dense state from one generation, laid out as `window` over the live state to write to.

    `segments` are this rank's, of every step from `first_step` on, verified, with the steps' `journals`; segments are
    released step by step. `frozen` makes `Frozen`, but for `as_user`, which gives every parameter the user's own
    `requires_grad` of a boundary, and the optimizer its groups, from the journal's start half. The engine copies host
    memory into live tensors. Operators in `missing`, without any copy, keep their present weights and get no optimizer
    state.
    """

    def __init__(
        self,
        *,
        window: WindowLayout,
        groups: ParallelGroups,
        segments: Sequence[Tensor],
        journals: Sequence[Journal],
        first_step: int,
        frozen: Callable[..., Frozen],
        engine: CopyEngine,
        as_user: Callable[[Journal], None],
        missing: Collection[str],
    ) -> None:
        self._view, self._as_user = window.steps[0].view, as_user
        self.groups, self.engine = groups, engine
        self._layouts = [step.durable for step in window.steps]
        plan, everything = window.record.plan, self._view.operators.names
        full = [
            {name for name, kind in step.files["durable"].items() if kind is RecordKind.FULL} for step in plan.steps
        ]
        self._full = [everything if plan.partial else names.intersection(everything) for names in full]
        """Operators with their full state, by step; of one in shards this rank may have nothing."""
        self._segments: list[Tensor | None] = list(segments)
        self._first = first_step
        self.journals = list(journals)
        self._missing = {name for name in missing if name in self._view.operators}
        self._active = set(self._missing)
        self._newest = -1
        """Index of the newest loaded step."""
        as_then = lambda: self._as_user(self.start(self._first + self._newest))  # noqa: E731
        self.frozen = frozen(self._view.module, self._view.operators, as_user=as_then)
        """Operators without a step until active."""
        self._seen: list[list[str] | None] = [each["outcome"].get("seen") for each in self.journals]
        """Parameters at whose gradients hooks look, by the window's steps; `None` where that is not known."""
        self._named = False
        """Whether the known cause of other losses was logged."""
        self._loaded = _Loaded([])
        self.fetched: dict[int, tuple[list[_Sent], Iterator[_Sent]]] = {}
        """Parts on their way, and those that follow, by the window's step; at most two are under way at once."""

    @property
    def dense(self) -> bool:
        """Whether every operator is active and the window is over; other pipeline stages may need more of the window."""
        return (self._newest == len(self._layouts) - 1) and len(self._active) == len(self._view.operators.operators)

    def outcome(self, step: int) -> Journal:
        """Return the original run's outcome of the optimizer step that ends at boundary `step`."""
        outcome: Journal = self.journals[step - self._first]["outcome"]
        return outcome

    def start(self, step: int) -> Journal:
        """Return the original run's start half of boundary `step`."""
        start: Journal = self.journals[step - self._first]["start"]
        return start

    def matches(self, step: int, losses: list[Tensor], known: str = "") -> bool:
        """Return whether the step that ended at boundary `step` gave the original run's losses; log a difference.

        A `known` cause of other losses is logged once, and no other cause is looked for. Where other ranks repeat
        a step, which sum in another order, there is no loss to compare with.
        """
        if (expected := self.outcome(step)["losses"]) is None:
            return False
        same = same_bits(losses, expected)
        if not same and known:
            if not self._named:
                log.warning(
                    "replay gives other losses than the original run, from step %d on: %s", step, known, alike=True
                )
            self._named = True
        elif not same:
            log.error(
                "replay of step %d gave another loss than the original run (%s, was %s): this restart is not bit-exact. "
                "Look for kernels that are not deterministic, or data that cannot be repositioned.",
                *(step, _shown(losses), _shown(expected)),
            )
        return same

    def fetch(self, step: int) -> None:
        """Begin to send the first records of boundary `step`, beside whatever comes before `load`; every rank must call it."""
        index, group = step - self._first, self.groups.group("stage")
        at_once = group is not None and dist.get_backend(group) == "nccl"  # which would wait for them here
        if index < len(self._layouts) and not at_once:
            parts = self._parts(index)
            self.fetched[index] = [*islice(parts, 2)], parts

    def load(self, step: int) -> None:
        """Load the state of boundary `step`, without buffers; every rank must call it.

        Validation and the end of an epoch may still follow. Their changes, and those by user hooks, were recorded at
        the next batch start: see `reconcile`. Buffers come from the replayed step.
        """
        self._newest = step - self._first
        self._as_user(self.start(step))
        self._load_records()
        self._active.update(self._full[self._newest])
        self._give_state()
        self.freeze()
        self.fetch(step + 1)
        # Hooks at the begin of a fit and of an epoch follow the first load; behind others nobody comes unseen, or a validation.
        self._loaded = _Loaded(self._live(), with_digests=self._newest == 0 and not self._view.schema.has_rest)

    @torch.no_grad()
    def load_buffers(self) -> None:
        """Set the buffers to those of the newest loaded step."""
        layout, segment = self._newest_step()
        for name in self._view.buffer_names:
            if (buffer := self._view.buffer(name)) is not None:
                if any(stride == 0 and size > 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True)):
                    buffer.data = buffer.data.contiguous()  # elements of an expanded tensor share memory
                buffer.copy_(layout.segment.view(segment, f"buffer/{name}"))

    def reconcile(self, agree: Callable[[bool], bool], *, disturbed: bool) -> None:
        """Restore the state as sealed for the newest loaded step, unless all ranks say that the state is still there;
        every rank must call this. `disturbed`: parameters and state may have changed unseen by their version counters.
        """
        if not agree(not self._missing and self._loaded.is_still(self._live(), by_digests=disturbed)):
            self._load_records()
            self._give_state()
        self.load_buffers()
        self._segments[self._newest] = None
        self._loaded = _Loaded([])

    def freeze(self) -> None:
        """Freeze all operators that are not active; parameters frozen by the user stay frozen."""
        self.frozen.freeze(self._active, self._seen[min(self._newest + 1, len(self._seen) - 1)])

    def share_seen(self, exchange: Exchange) -> None:
        """Let hooks of all ranks find whole gradients: reduced ones have a part of every rank. Collective."""
        told = cast("list[list[list[str] | None]]", exchange.gather_values(self._seen))
        steps = zip(*filter(None, told), strict=True)
        found = [[names for names in step if names is not None] for step in steps]
        self._seen = [sorted(set(chain.from_iterable(names))) if names else None for names in found]

    # -- private

    def _give_state(self) -> None:
        """Give zero state to parameters whose state the window loads later, for hooks that read the optimizer's state."""
        active = {piece.fqn for name in self._active for piece in self._view.operators[name].slices}
        waiting = {piece.fqn for operator in self._view.operators for piece in operator.slices} - active
        for fqn, param in self._view.params.items():
            if fqn in waiting:
                self._view.schema.ensure_state(param)

    def _newest_step(self) -> tuple[FileLayout, Tensor]:
        segment = self._segments[self._newest]
        assert segment is not None
        return self._layouts[self._newest], segment

    @torch.no_grad()
    def _load_records(self) -> None:
        for each in (self._view.params, *self._view.averages.all()):
            follow(each.values())
        scalars: Scalars | None = self.journals[self._newest]["outcome"].get("scalars")
        shared = frozenset[str]() if scalars is None else self._shared()
        self._reset(shared, scalars or {})
        under_way, parts = self.fetched.pop(self._newest, ([], self._parts(self._newest)))
        while under_way := [*under_way, *islice(parts, 2 - len(under_way))]:
            # This rank's own part, which is here, is loaded while another one comes.
            self._load_part(under_way.pop(next((i for i, part in enumerate(under_way) if part.is_own), 0)), shared)
        for fqn, values in (scalars or {}).items():
            for key, value in values.items():
                live = self._view.schema.get_state(self._view.params[fqn], key)
                assert live is not None
                live.copy_(value)
        self._view.schema.load_rest(self.journals[self._newest]["start"].get("optimizer", {}), self._view.params)
        for each in (self._view.params, *self._view.averages.all()):
            complete(each)

    def _live(self) -> list[Tensor]:
        """Return all live tensors with parts in the newest loaded step."""
        layout, _ = self._newest_step()
        fqns = dict.fromkeys(shard.slice.fqn for region in layout.shards.values() for shard in region)
        return with_memory([*(self._view.params[fqn] for fqn in fqns), *self._view.states(fqns)])

    def _shared(self) -> frozenset[str]:
        """Return the parameters with slices of several experts."""
        experts = [op for op in self._view.operators if op.kind == "expert"]
        number = Counter(fqn for op in experts for fqn in {piece.fqn for piece in op.slices})
        return frozenset(fqn for fqn, count in number.items() if count > 1)

    def _reset(self, shared: Collection[str], scalars: Scalars) -> None:
        """Drop the optimizer's state that records do not overwrite as a whole, and create the state that `scalars` name.

        Experts that `shared` a parameter share its state too: an expert captured before it had state is left with zeros.
        """
        schema, params = self._view.schema, self._view.params
        missing = {piece.fqn for name in self._missing for piece in self._view.operators[name].slices}
        for fqn in {*shared, *missing}:
            schema.drop_state(params[fqn])
        for fqn in scalars:
            schema.ensure_state(params[fqn])

    def _parts(self, index: int) -> Iterator[_Sent]:
        """Begin to send each part of one of the window's steps, as the caller asks for it."""
        layout, segment = self._layouts[index], self._segments[index]
        assert segment is not None
        for region in layout.shards:
            for writer in region:
                if layout.written(region, writer).shards:
                    yield self._sent(layout, segment, region, writer)

    def _sent(self, layout: FileLayout, segment: Tensor, region: Region, writer: int) -> _Sent:
        """Begin to give the region a writer's part."""
        table = layout.written(region, writer)
        offsets, sizes = SegmentLayout.placed(table.kinds)
        nbytes, is_own = int(offsets[-1] + sizes[-1]), writer == self.groups.rank
        start = layout.first_byte(region) if is_own else 0
        source = segment[start : start + nbytes] if is_own else host_buffer(nbytes)
        if len(region) == 1:
            return _Sent(table, source, is_own, lambda: source)
        group = self.groups.among(region)
        if dist.get_backend(group) == "nccl":  # which may not run on two communicators at once
            dist.broadcast(on_device := source.cuda(), src=writer, group=group)
            return _Sent(table, source, is_own, on_device.cpu)
        work = dist.broadcast(source, src=writer, group=group, async_op=True)

        def wait() -> Tensor:
            work.wait()
            return source

        return _Sent(table, source, is_own, wait)

    def _load_part(self, part: _Sent, shared: Collection[str]) -> None:
        source = part.source if part.is_own else part.wait()
        offsets, _ = SegmentLayout.placed(part.table.kinds)
        copies: list[Copy] = []
        for group in part.table.by_parameter():
            copies += self._copies_of(group, offsets, source, shared)
        copy_through(self.engine, copies)
        if part.is_own:
            part.wait()

    def _copies_of(
        self, shards: ParameterShards, offsets: Column, source: Tensor, shared: Collection[str]
    ) -> Iterator[Copy]:
        """Yield copies of one parameter's shards in a region, whose tensors lie at `offsets`; create missing state."""
        fqn, forms = shards.fqn, shards.forms
        view, param, with_state = self._view, self._view.params[fqn], np.ones(len(shards.first), np.bool_)
        if forms[0][0] == PRESENT:
            with_state = source.numpy()[offsets[shards.first]] != 0
            if with_state.any():
                view.schema.ensure_state(param)
            elif fqn not in shared:  # another expert may have state
                view.schema.drop_state(param)
        for number, (key, dtype, shape) in enumerate(forms):
            is_state = view.is_state(key)
            # Shared single values of the optimizer come from the journal.
            if key == PRESENT or (is_state and not (with_state.any() and (shape is None or fqn not in shared))):
                continue
            if (live := view.tensor(fqn, key)) is None:
                continue
            rows = np.flatnonzero(with_state) if is_state else np.arange(len(with_state))
            at, flat = offsets[shards.first[rows] + number], live.detach().view(-1)
            if shape is None:
                yield from _copies(source, at, dtype, flat, (shards.start[rows], shards.numel[rows]))
            else:  # every part has the same value
                yield _typed(source[at[-1] : at[-1] + dtype.itemsize * math.prod(shape)], dtype), flat


class Repeats:
    """An incarnation's repeated steps, from the first boundary it resumes at until every operator is active again."""

    def __init__(self) -> None:
        self.replay: Replay | None = None
        """Replay with frozen operators, loaded step by step; `None` if all operators are active."""
        self.frozen: Frozen | None = None
        """The replay's operators that do not train yet; `None` if all operators are active."""
        self.layout: WindowLayout | None = None
        """Layout of the replayed generation."""
        self.unsettled: Replay | None = None
        """Replay whose newest loaded slot may have been changed by hooks since."""
        self.steps = self.mismatches = 0

    def begin(self, replay: Replay, layout: WindowLayout) -> None:
        """Follow a replay whose first slot was just loaded."""
        self.unsettled = replay
        if not replay.dense:
            self.replay, self.frozen, self.layout = replay, replay.frozen, layout

    def go_on(self, layout: WindowLayout, groups: ParallelGroups, engine: CopyEngine) -> None:
        """Go on with a replay in another session, with that session's plan, groups and engine."""
        for each in (self.replay, self.unsettled):
            if each is not None:
                each.groups, each.engine = groups, engine
                each.fetched.clear()  # what is under way in the groups of before does not come
        if self.replay is not None:
            self.layout = layout

    def outcome(self, step: int) -> Journal | None:
        """Return the original run's outcome of the step that ends at boundary `step`, or `None` after the replay."""
        return self.replay.outcome(step) if self.replay is not None else None

    def freeze(self) -> None:
        """Freeze operators again, since user hooks may have set parameters to train."""
        if self.replay is not None:
            self.replay.freeze()

    def stepped(self, step: int, losses: list[Tensor], known: str) -> Journal:
        """Compare a replayed step with its journal, then load the slot of its boundary. Return the start half of the
        boundary's journal, from the original run. `known` are known reasons for other losses, in words.
        """
        replay = self.replay
        assert replay is not None
        self.steps += 1
        self.mismatches += not replay.matches(step, losses, known)
        replay.load(step)
        self.unsettled = replay
        if replay.dense:
            replay.frozen.thaw()
            self.replay = self.frozen = self.layout = None
            log.info("dense again at step %d after %d replayed steps", step, self.steps)
        return replay.start(step)

    def reconcile(self, all_agree: Callable[[bool], bool], *, disturbed: bool) -> None:
        """Undo changes by hooks since the newest slot was loaded; call as the next batch begins, when the slot was
        sealed. All replaying ranks have to agree. `disturbed`: the loaded state may have changed without a trace.
        """
        assert self.unsettled is not None
        self.unsettled.reconcile(all_agree, disturbed=disturbed)
        self.unsettled = None

    def waive_reconciling(self) -> None:
        """Keep changes by hooks to the newest slot, since it was taken right after its step."""
        self.unsettled = None

    def close(self) -> None:
        """Let all operators train again."""
        if self.replay is not None:
            self.replay.frozen.thaw()
            self.replay = self.frozen = None


def same_bits(found: list[Tensor], expected: list[Tensor]) -> bool:
    """Return whether scalars have the same types and bits."""
    return len(found) == len(expected) and all(
        a.dtype == b.dtype and torch.equal(a.cpu().reshape(1).view(torch.uint8), b.reshape(1).view(torch.uint8))
        for a, b in zip(found, expected, strict=True)
    )


def stored_losses(backend: Backend, file: SegmentEntry) -> list[Tensor]:
    """Read the losses of a file's step from its journal. Raises `Corrupt` if that is damaged."""
    columns = RecordColumns.of(file.records)
    row = list(columns.name).index(JOURNAL)
    record = bytearray(columns.nbytes[row])
    backend.get_range(file.key, columns.offset[row], memoryview(record))
    if digest_of(memoryview(record)) != columns.digest[row]:
        raise Corrupt(f"{file.key}: its journal is damaged.")
    return decode_journal(torch.frombuffer(record, dtype=torch.uint8))["outcome"]["losses"] or []


def _shown(losses: list[Tensor]) -> str:
    return ", ".join(f"{loss.item():.9g}" for loss in losses)


_LARGE_ROW_NBYTES = 2**15


def _copies(
    source: Tensor, at: Column, dtype: torch.dtype, flat: Tensor, slices: tuple[Column, Column]
) -> Iterator[Copy]:
    """Bring slices of a parameter, from offsets `at` of uint8 bytes, to their places: first element in the live tensor
    `flat`, and number of elements. In any stored order: rows scattered over it are copied at once, others yielded.
    """
    start, numel = slices
    large = len(numel) == 1 or numel.min() * dtype.itemsize >= _LARGE_ROW_NBYTES
    if large and flat.is_cpu and flat.dtype is dtype and type(flat) is Tensor:
        # By their addresses: a tensor per slice takes longer than the copy.
        assert (start + numel).max() <= len(flat)
        assert (at + dtype.itemsize * numel).max() <= len(source)
        places = flat.data_ptr() + dtype.itemsize * start, source.data_ptr() + at, dtype.itemsize * numel
        for place in zip(*(each.tolist() for each in places), strict=True):
            ctypes.memmove(*place)
        torch.autograd.graph.increment_version(flat)
        return
    if len(numel) == 1:
        first, size = int(at[0]), int(numel[0])
        yield _typed(source[first : first + size * dtype.itemsize], dtype), flat[int(start[0]) : int(start[0]) + size]
        return
    for size in np.unique(numel[numel > 0]).tolist():
        of = numel == size
        first, begin = int(at[of].min()), int(start[of].min())
        from_row, from_unit = _in_units((at[of] - first) // dtype.itemsize, size)
        to_row, to_unit = _in_units(start[of] - begin, size)
        value = _typed(source[first : int(at[of].max()) + size * dtype.itemsize], dtype)
        rows = value.as_strided((int(from_row.max()) + 1, size), (from_unit, 1))
        into = flat.as_strided((int(to_row.max()) + 1, size), (to_unit, 1), flat.storage_offset() + begin)
        if len(rows) == len(into) == len(from_row) and (np.diff(from_row) == 1).all() and (np.diff(to_row) == 1).all():
            yield rows, into
        elif (
            to_unit < size or size * dtype.itemsize >= _LARGE_ROW_NBYTES
        ):  # not rows of a matrix, or worth copies of their own
            yield from ((rows[i], into[j]) for i, j in zip(from_row.tolist(), to_row.tolist(), strict=True))
        else:
            found = rows.view(UNITS[dtype.itemsize]).index_select(0, torch.from_numpy(from_row)).view(dtype)
            found = found.to(into.device, into.dtype).view(UNITS[into.dtype.itemsize])
            into.view(found.dtype).index_copy_(0, torch.from_numpy(to_row).to(into.device), found)


def _in_units(places: Column, size: int) -> tuple[Column, int]:
    """Return places as multiples of their largest common divisor, and the divisor."""
    unit = int(np.gcd.reduce(places)) or size
    return places // unit, unit


def _typed(slice_U8: Tensor, dtype: torch.dtype) -> Tensor:
    """Return bytes as elements; copied if the slice is misaligned for the type."""
    aligned = slice_U8.data_ptr() % dtype.itemsize == 0 and slice_U8.storage_offset() % dtype.itemsize == 0
    return (slice_U8 if aligned else slice_U8.clone()).view(dtype)
