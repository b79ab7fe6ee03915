"""Fill one segment's memory from live state, step after step, at little cost to the training thread.

Sources change only when a tensor is replaced or the optimizer begins to keep a parameter's state. So the copies and the
marker's entries are made once per step of the plan, for all slots of the ring. They are checked for being up to date by
comparing identities and addresses of tensors, without bytecode per tensor.

The copies of one boundary are columns of numbers. Records are slices of *bases*: a parameter, an average, or a tensor
of the optimizer's state. A base's address can change from step to step, and some bases do not exist yet. Everything
else is known from the layout. Constant bytes are copied like the rest, whatever lay in the slot before: headers, gaps,
and the flags for existing state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import compress, cycle
from operator import attrgetter, ne
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_moe_ckpt.journal import Arrival, Arrivals, Journal, encode_journal, held
from lightning_moe_ckpt.native import Column, Copy, CopyEngine, CopyTable, PreparedTable, Ticket
from lightning_moe_ckpt.operators import StateWatch, follow, memory_of, whole_of
from lightning_moe_ckpt.snapshot._layout import GRADIENT, JOURNAL, PRESENT, FileLayout, StepLayout, WindowLayout
from lightning_moe_ckpt.snapshot._shards import PACKED, as_memoryview, numel_of
from lightning_moe_ckpt.storage import GenerationId, RecordRows
from lightning_moe_ckpt.tiers import SealedFile, SealedSegment, StepRecord

_ZEROS_U8 = torch.zeros(2**20, dtype=torch.uint8)
_STATE_U8 = torch.zeros(4096, dtype=torch.uint8)
"""Flag for existing state, and the gap behind it."""
_STATE_U8[0] = 1

_known: WeakKeyDictionary[StepLayout, StepColumns] = WeakKeyDictionary()

_version_of = attrgetter("_version")  # torch has no public name for it

REMEMBERED_PLANS = 64
"""Partial plans whose layouts and copies are kept, in case the same plan returns."""


def columns_of(layout: StepLayout) -> StepColumns:
    """Return a boundary's columns, made once while its layout is in use; from any thread."""
    if (found := _known.get(layout)) is None:
        found = _known[layout] = StepColumns([*layout.files, *layout.mirrors.values()])
    return found


class StepColumns:
    """Tensors of one boundary's files, mirrors of other ranks' files among them, by column, one row per field."""

    def __init__(self, files: Sequence[FileLayout]) -> None:
        self._view, tables = files[0].view, [file.table for file in files]
        rows = [row for table in tables for row in table.rows]
        first = np.cumsum([0, *(len(table.rows) for table in tables)])
        row = np.concatenate([table.row + begin for table, begin in zip(tables, first, strict=False)])
        of_rows = [(shard.slice.fqn, key) for shard, _, (key, *_) in rows]
        self._bases = list(dict.fromkeys(of_rows))
        """Parameter and tensor key, by base."""
        self._dtypes = list(dict.fromkeys([torch.uint8, *(dtype for *_, (_, dtype, _) in rows)]))
        self.fqns = tuple(dict.fromkeys(fqn for fqn, _ in of_rows))
        """Parameters with at least one record."""
        self.gradients = tuple(fqn for fqn, key in self._bases if key in (GRADIENT, PACKED))
        """Parameters whose record is the gradient."""
        # From here on by tensor, in C.
        bases, dtypes = ({each: at for at, each in enumerate(column)} for column in (self._bases, self._dtypes))
        self._base = _column(map(bases.__getitem__, of_rows))[row]
        self._dtype = _column(dtypes[dtype] for *_, (_, dtype, _) in rows)[row]
        self._start = np.concatenate([table.start[table.shard] for table in tables])
        self._start *= _column(shape is None for *_, (_, _, shape) in rows)[row]
        self._numel = _column(numel_of(form, numel) for _, numel, form in rows)[row]
        flags, packed = (_column(key == of for _, key in of_rows)[row].astype(bool) for of in (PRESENT, PACKED))
        self._pack(packed)
        self._itemsize = _column(dtype.itemsize for dtype in self._dtypes)[self._dtype]
        headed = [file for file in files if not file.is_mirror]
        self._headers = [torch.frombuffer(bytearray(file.segment.header), dtype=torch.uint8) for file in headed]
        self._header_offset = _column(file.start for file in headed)
        places = [_places(file) for file in files]
        own = [place[:, : len(file.table.row)] for place, file in zip(places, files, strict=True)]
        self._offset, _, own_gap = np.concatenate(own, axis=1)
        self._numel[flags] += own_gap[flags]
        offset, nbytes, gap = np.concatenate(places, axis=1)
        has_gap = (gap > 0) & ~np.isin(offset, self._offset[flags])
        self._gap_offset, self._gap = (offset + nbytes)[has_gap], gap[has_gap]

    def _pack(self, packed: Column) -> None:
        """Let a parameter's compressed shards follow each other in its base, in stored order."""
        ends: dict[int, int] = {}
        for i in np.flatnonzero(packed).tolist():
            base = int(self._base[i])
            self._start[i] = ends.get(base, 0)
            ends[base] = int(self._start[i] + self._numel[i])

    def has_state(self) -> dict[str, bool]:
        """Return whether the optimizer has state yet, by parameter."""
        return {fqn: self._view.schema.has_state(self._view.params[fqn]) for fqn in self.fqns}

    def table(self, has_state: dict[str, bool]) -> CopyTable:
        """Return the copies from the current live tensors.

        Missing tensors are stored as zeros: a slot's old bytes would differ from the bytes in a copy on another node.
        """
        bases: list[Tensor | None] = [
            (_STATE_U8 if has_state[fqn] else _ZEROS_U8) if key == PRESENT else self._view.tensor(fqn, key)
            for fqn, key in self._bases
        ]
        there = np.array([base is not None for base in bases], bool)[self._base]
        absent = ~there
        zero_offset, zero_nbytes = _in_pieces(
            np.concatenate([self._gap_offset, self._offset[absent]]),
            np.concatenate([self._gap, (self._numel * self._itemsize)[absent]]),
        )
        zeros, headers = len(bases), _column(map(len, self._headers))
        source = [self._base[there], np.full(len(zero_offset), zeros), zeros + 1 + np.arange(len(headers))]
        begin = [self._start[there], np.zeros(len(zero_offset) + len(headers), np.int64)]
        dtype = [self._dtype[there], np.zeros(len(zero_offset) + len(headers), np.int64)]
        offset = np.concatenate([self._offset[there], zero_offset, self._header_offset])
        order = np.argsort(offset, kind="stable")
        return CopyTable(
            sources=[*(_ZEROS_U8 if base is None else base for base in bases), _ZEROS_U8, *self._headers],
            source=np.concatenate(source)[order],
            start=np.concatenate(begin)[order],
            numel=np.concatenate([self._numel[there], zero_nbytes, headers])[order],
            dtypes=self._dtypes,
            dtype=np.concatenate(dtype)[order],
            offset=offset[order],
        )


def _column(numbers: Iterable[int]) -> Column:
    return np.fromiter(numbers, np.int64)


def _places(file: FileLayout) -> Column:
    """Return offset and bytes of each tensor in the boundary's memory, and the bytes of the gap behind it."""
    segment = file.segment
    return np.stack([segment.offsets + file.start, segment.sizes, -segment.sizes % segment.align])


def _in_pieces(offset: Column, nbytes: Column) -> tuple[Column, Column]:
    """Cut ranges to the size of `_ZEROS_U8`, their source."""
    most = len(_ZEROS_U8)
    number = -(-nbytes // most)
    done = most * (np.arange(number.sum()) - np.repeat(np.cumsum(number) - number, number))
    return np.repeat(offset, number) + done, np.minimum(np.repeat(nbytes, number) - done, most)


class BufferChanged(Exception):
    """A buffer does not fit its record any more. The session catches this error and reports it."""


class _Tickets(Ticket):
    def __init__(self, *tickets: Ticket) -> None:
        self._tickets = tickets

    @property
    @override
    def done(self) -> bool:
        return all(ticket.done for ticket in self._tickets)

    @override
    def fence(self) -> float:
        return sum(ticket.fence() for ticket in self._tickets)

    @override
    def wait(self, timeout: timedelta | None = None) -> None:
        for ticket in self._tickets:
            ticket.wait(timeout)


@dataclass(frozen=True, slots=True)
class LocalState:
    """Buffers and journal of a segment, on their way to the host."""

    journal: Journal
    values: Arrival | None
    """Values of all tensors in the journal, if some may be on a device."""
    buffers: Ticket | None
    """Copies of buffers that are on a device."""


class StepCopies:
    """Copies of one boundary, made once for all of its steps and slots."""

    def __init__(self, layout: StepLayout, engine: CopyEngine) -> None:
        self.layout, self._engine, self._columns = layout, engine, columns_of(layout)
        view, gradients = layout.view, set(self._columns.gradients)
        self._whole = [fqn for fqn in self._columns.fqns if fqn not in gradients]
        self._params = [view.params[fqn] for fqn in self._whole]
        self._averages = [average for fqn in gradients for average in view.averages.of(fqn).values()]
        self.may_wait = any(param.is_cuda for param in view.params.values())
        """Whether values may have to come from a device."""
        self._watch: StateWatch | None = None
        self._has_state: dict[str, bool] = {}
        self._prepared: PreparedTable | None = None
        self._addresses: list[int] = []
        self.bases: list[Tensor] = []
        """Live tensors that are copied, except gradients, which may change after their step."""
        self.watched: list[Tensor] = []
        """The bases, whose versions tell of changes, and then the DTensors around them, if any, with versions of their own."""
        self.records: list[RecordRows] = []
        """Marker's entries, by file."""
        self._places: dict[int, tuple[Tensor, memoryview]] = {}

    def place(self, view_U8: Tensor) -> tuple[Tensor, memoryview]:
        """Return the durable file's memory in a slot, and all files' memory."""
        if (found := self._places.get(view_U8.data_ptr())) is None:
            memory = as_memoryview(view_U8)[: self.layout.files_nbytes]
            found = self._places[view_U8.data_ptr()] = self.layout.durable.bytes_in(view_U8), memory
        return found

    def current(self, block_U8: Tensor) -> PreparedTable:
        """Return the copies of the current tensors, for this slot and all others."""
        # A tensor keeps its identity when its memory is swapped (`param.data = ...`), and copies hold addresses.
        if self.layout.view.boxes:
            follow((*self._params, *self._averages))
        stale = self._prepared is None or self._watch is None or not self._watch.holds
        if stale or self._addresses != _addresses(self.bases):
            self._rebuild(block_U8)
        assert self._prepared is not None
        return self._prepared

    def some(self, wanted: Sequence[bool], block_U8: Tensor) -> PreparedTable:
        """Return the copies from the bases with a wanted version; versions are those of `watched`."""
        assert self._prepared is not None
        table, ids = self._prepared.table, set(map(id, compress(cycle(self.bases), wanted)))
        some = table.of_sources(np.fromiter(map(ids.__contains__, map(id, table.sources)), bool))
        return self._engine.prepare_table(some, block_U8)

    def let_go(self) -> None:
        """Let go of gradients; the next step has others."""
        if self._columns.gradients:
            self._prepared = None

    def _rebuild(self, block_U8: Tensor) -> None:
        view, has_state = self.layout.view, self._columns.has_state()
        self._watch = view.schema.watch(self._params)
        self.bases = [*self._params, *view.states(self._whole), *self._averages]
        self.watched = self.bases
        if view.boxes:
            whole, self.bases = self.bases, list(map(memory_of, self.bases))
            self.watched = self.bases + list(map(whole_of, whole))
        self._addresses = _addresses(self.bases)
        self._prepared = self._engine.prepare_table(self._columns.table(has_state), block_U8)
        if not self.records or has_state != self._has_state:
            self._has_state = has_state
            self.records = [RecordRows(partial(file.records, has_state)) for file in self.layout.files]


class WindowCopies:
    """Copies of the boundaries of the plan in use, and of partial plans, which return."""

    def __init__(self, engine: CopyEngine) -> None:
        self._engine = engine
        self._known: dict[int, StepCopies] = {}
        """Copies by identity of their layout, which they keep alive; oldest first."""

    def of(self, layout: StepLayout, window: WindowLayout) -> StepCopies:
        """Return the copies for this step of a plan."""
        if (found := self._known.get(id(layout))) is None:
            in_use, others = set(map(id, window.steps)), [*self._known]
            for old in others[: -REMEMBERED_PLANS if window.record.plan.partial else None]:
                if old not in in_use:
                    del self._known[old]
            found = self._known[id(layout)] = StepCopies(layout, self._engine)
        return found

    def let_go(self) -> None:
        """Let go of gradients, see `StepCopies.let_go`."""
        for copies in self._known.values():
            copies.let_go()

    def clear(self) -> None:
        """Forget all copies, to make them anew."""
        self._known.clear()


class SegmentWriter:
    """Fill one slot, `view_U8`, with one boundary; `copies` are this boundary's, if they were made before."""

    def __init__(
        self,
        layout: StepLayout,
        view_U8: Tensor,
        engine: CopyEngine,
        arrivals: Arrivals | None = None,
        copies: StepCopies | None = None,
    ) -> None:
        self.layout, self.view, self._engine = layout, view_U8, engine
        self._copies = copies if copies is not None else StepCopies(layout, engine)
        self._arrivals = arrivals if arrivals is not None else Arrivals()
        self._durable_U8, self._memory = self._copies.place(view_U8)
        self._versions: list[int] = []

    def start(self) -> Ticket:
        """Begin to copy every record; the sources must not change before the ticket's fence."""
        ticket = self._engine.submit_table(self._copies.current(self.view), self.view)
        self._versions = versions(self._copies.watched)
        return ticket

    def recopy_changed(self, ticket: Ticket, *, everything: bool = False) -> Ticket:
        """Copy the sources changed in place since `start` again, all if `everything`, and return the ticket of all
        copies. Raises `CheckpointError` if a copy failed.
        """
        if everything:
            # There may be other tensors now, or none: `param.data = ...`, `optimizer.state.clear()`.
            changed = self._copies.current(self.view)
            now = versions(self._copies.watched)
        else:
            if (now := versions(self._copies.watched)) == self._versions:
                return ticket
            changed = self._copies.some(list(map(ne, now, self._versions)), self.view)
        self._versions = now
        again = self._engine.submit_table(changed, self.view)
        self._engine.fence(again)
        return _Tickets(ticket, again)

    @property
    def is_overtaken(self) -> bool:
        """Whether sources were changed in place since `start` or `recopy_changed`."""
        return versions(self._copies.watched) != self._versions

    def take_local(self, journal: Journal) -> LocalState:
        """Begin to bring this rank's buffers and the journal to the host; both may change, and be freed, after the call. Raises
        `BufferChanged` if a buffer has another shape or dtype than when the plan was made.
        """
        on_device: list[Copy] = []
        for name in self.layout.view.buffer_names:
            place, buffer = self._local(f"buffer/{name}"), self.layout.view.buffer(name)
            if buffer is None or buffer.shape != place.shape or buffer.dtype != place.dtype:
                found = "gone" if buffer is None else f"{buffer.dtype} {tuple(buffer.shape)}"
                raise BufferChanged(
                    f"buffer `{name}` is {found}, was {place.dtype} {tuple(place.shape)} when this plan was made. "
                    "The next plan is made for that; what grows in every step is better a plain attribute"
                )
            if buffer.is_cuda:
                on_device.append((buffer.detach().clone(), place))  # the next forward changes the buffer
            else:
                place.copy_(buffer)
        ticket = self._engine.submit(on_device) if on_device else None
        if not self._copies.may_wait:
            return LocalState(journal, None, ticket)
        values: list[Tensor] = []
        journal = held(journal, values)  # until it is written, training may change the objects that it is made of
        return LocalState(journal, self._arrivals.start(values), ticket)

    def write_local(self, local: LocalState) -> tuple[int, int]:
        """Put the journal into its record; waits until its values have arrived on the host. Returns bytes of the
        journal, and bytes of its record. Raises like `encode_journal`.
        """
        record = as_memoryview(self._local(JOURNAL))
        values = None if local.values is None else local.values.by_identity()
        payload = encode_journal(local.journal, len(record), values)
        record[:] = payload + bytes(len(record) - len(payload))  # nothing of a longer one stays behind it
        return len(payload), len(record)

    def sealed(
        self, generation: GenerationId, step: int, ticket: Ticket, step_record: StepRecord | None = None
    ) -> SealedSegment:
        """Return the segment for the tiers; `step_record` has gradients for experts with copies on other nodes."""
        files = [
            SealedFile(
                generation=generation,
                rank=self.layout.groups.rank,
                step=step,
                audience=file.audience,
                view=self._memory[file.start : file.stop],
                records=records,
                ticket=ticket,
            )
            for file, records in zip(self.layout.files, self._copies.records, strict=True)
        ]
        mirrors = self.layout.mirrors_in(as_memoryview(self.view))
        return SealedSegment(
            files=files, view=self._memory, step_record=step_record, mirrors=mirrors, mirrored=self.layout.mirrored
        )

    def _local(self, name: str) -> Tensor:
        return self.layout.durable.segment.view(self._durable_U8, name)


class BoundaryCapture:
    """Boundary on its way into its segment; begins to copy."""

    def __init__(
        self, writer: SegmentWriter, step: int, outcome: Journal, step_record: StepRecord | None = None
    ) -> None:
        self._writer, self.step, self._outcome, self._step_record = writer, step, outcome, step_record
        self.ticket = writer.start()
        """Ticket of all copies so far."""
        self.had_arrived = False
        """Whether all was copied when the sources were last found unchanged."""
        self._local: LocalState | None = None
        self.journal_nbytes = self.journal_capacity = 0

    def again(self, writer: SegmentWriter) -> BoundaryCapture:
        """Begin to copy the boundary anew, into other records in the same slot."""
        return BoundaryCapture(writer, self.step, self._outcome, self._step_record)

    def take_rest(self, start: Journal, *, disturbed: bool) -> None:
        """Copy changed sources again, all if `disturbed` unseen, and take buffers and journal; call when the next batch
        begins. Raises `BufferChanged`, see `SegmentWriter.take_local`; `CheckpointError` if a copy failed.
        """
        self.ticket = self._writer.recopy_changed(self.ticket, everything=disturbed)
        self._local = self._writer.take_local({"outcome": self._outcome, "start": start})
        if self._local.buffers is not None:
            self.ticket = _Tickets(self.ticket, self._local.buffers)

    @property
    def is_overtaken(self) -> bool:
        """Whether sources were changed in place since `take_rest`; copies under way may have half a change."""
        return self._writer.is_overtaken

    @property
    def waits_for_device(self) -> bool:
        """Whether `arrive` has something to wait for."""
        return self._local is not None and self._local.values is not None and self._local.values.is_under_way

    def arrive(self) -> None:
        """Wait until the device has reached the point at which `take_rest` was called."""
        assert self._local is not None
        assert self._local.values is not None
        self._local.values.wait()

    def add(self, more: Journal) -> None:
        """Add entries to the journal's start half, with values on the host; call after `take_rest`. Raises like
        `encode_journal`; the journal then stays as it was.
        """
        assert self._local is not None
        local = replace(self._local, journal={**self._local.journal, "start": {**self._local.journal["start"], **more}})
        self._writer.write_local(local)
        self._local = local

    def sealed(self, generation: GenerationId) -> SealedSegment:
        """Write the journal and return the segment, once its values have arrived; call after `take_rest`. Raises like `encode_journal`."""
        assert self._local is not None
        self.journal_nbytes, self.journal_capacity = self._writer.write_local(self._local)
        return self._writer.sealed(generation, self.step, self.ticket, self._step_record)


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, tensors))


def versions(tensors: Sequence[Tensor]) -> list[int]:
    """Return the counts of in-place changes, also by tensors in the same memory, but not through `.data`."""
    return list(map(_version_of, tensors))
