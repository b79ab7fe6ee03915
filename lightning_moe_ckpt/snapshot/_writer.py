"""Fill one segment's memory from live state, step after step, at little cost to the training thread.

Sources and destinations change only when a tensor is replaced or the optimizer begins to keep state of a parameter. So
the list of copies, the header and the marker's entries are made once per step of the plan and slot of the ring, and
checked for being up to date by comparing the identity of a few tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from operator import attrgetter, is_

from torch import Tensor
from typing_extensions import override

from lightning_moe_ckpt.journal import Arrival, Arrivals, Journal, encode_journal, held
from lightning_moe_ckpt.native import Copy, CopyEngine, CopyList, Ticket
from lightning_moe_ckpt.snapshot._layout import JOURNAL, PRESENT, StepLayout, as_memoryview
from lightning_moe_ckpt.storage import GenerationId, RecordRows
from lightning_moe_ckpt.tiers import SealedFile, SealedSegment, StepRecord

_version_of = attrgetter("_version")  # torch has no public name for it


class BufferChanged(Exception):
    """A buffer does not fit its record any more. The session catches this error and reports it."""


class _Tickets(Ticket):
    """Ticket of several lists of copies."""

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
    """Copies of buffers on a device."""


class SegmentWriter:
    """Fill memory with one step of a plan, again and again. Headers of its files are written at once."""

    def __init__(
        self, layout: StepLayout, view_U8: Tensor, engine: CopyEngine, arrivals: Arrivals | None = None
    ) -> None:
        self.layout, self.view, self._engine = layout, view_U8, engine
        self._arrivals = arrivals if arrivals is not None else Arrivals()
        self._may_wait = any(param.is_cuda for param in layout.view.params.values())
        self._views = [file.bytes_in(view_U8) for file in layout.files]
        """Memory of each file."""
        for file, each_U8 in zip(layout.files, self._views, strict=True):
            file.segment.write_header(each_U8)
        self._memories = [as_memoryview(each_U8) for each_U8 in self._views]
        """The same as the tiers take it."""
        self._memory = as_memoryview(view_U8)[: layout.files_nbytes]
        self._journal = as_memoryview(self._local(JOURNAL))
        self._fqns = tuple(dict.fromkeys(f.part.piece.fqn for file in layout.files for f in file.own))
        self._params = [layout.view.params[fqn] for fqn in self._fqns]
        self._bases: list[Tensor] = []
        self._addresses: list[int] = []
        self._owners: list[int] = []
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._copies: CopyList | None = None
        self._records: list[RecordRows] = []
        """Marker's entries of each file."""
        self._versions: list[int] = []

    def start(self) -> Ticket:
        """Begin to copy every record; the sources must not change before the ticket's fence."""
        self._refresh()
        assert self._copies is not None
        self._versions = versions(self._bases)
        return self._engine.submit(self._copies)

    def recopy_changed(self, ticket: Ticket, *, everything: bool = False) -> Ticket:
        """Copy again what was changed in place since `start`, and return the ticket of all copies.

        Args:
            ticket: result of `start`.
            everything: whether changes may have left no trace: nothing of the first copy is kept.

        Raises:
            CheckpointError: a copy failed.
        """
        now = versions(self._bases)
        if now == self._versions and not everything:
            return ticket
        changed = {i for i, version in enumerate(self._versions) if version != now[i]}
        if everything:
            # There may be other tensors now, or none: `param.data = ...`, `optimizer.state.clear()`.
            self._refresh(under_way=ticket)
            changed = set(range(len(self._bases)))
        again = self._engine.submit([pair for pair, i in zip(self._pairs, self._owners, strict=True) if i in changed])
        self._engine.fence(again)
        return _Tickets(ticket, again)

    def take_local(self, journal: Journal) -> LocalState:
        """Begin to bring this rank's buffers and the journal to the host; they may change, and be let go of, after it.

        Raises:
            BufferChanged: a buffer has another shape or dtype than when training started.
        """
        on_device: list[Copy] = []
        for name in self.layout.view.buffer_names:
            place, buffer = self._local(f"buffer/{name}"), self.layout.view.buffer(name)
            if buffer is None or buffer.shape != place.shape or buffer.dtype != place.dtype:
                found = "gone" if buffer is None else f"{buffer.dtype} {tuple(buffer.shape)}"
                raise BufferChanged(
                    f"buffer `{name}` is {found}, was {place.dtype} {tuple(place.shape)} when this plan was made. "
                    "Keep the shape of buffers, or register what grows as a plain attribute that is rebuilt at start"
                )
            if buffer.is_cuda:
                on_device.append((buffer.detach().clone(), place))  # the next forward changes the buffer
            else:
                place.copy_(buffer)
        ticket = self._engine.submit(on_device) if on_device else None
        if not self._may_wait:
            return LocalState(journal, None, ticket)
        values: list[Tensor] = []
        journal = held(journal, values)  # by the time it is written, training may have changed what it is made of
        return LocalState(journal, self._arrivals.start(values), ticket)

    def write_local(self, local: LocalState) -> None:
        """Put the journal into its record; waits until its values have arrived on the host.

        Raises:
            JournalOverflow: the record is too small.
            CodecError: a value in the journal cannot be stored exactly.
        """
        values = None if local.values is None else local.values.by_identity()
        payload = encode_journal(local.journal, len(self._journal), values)
        self._journal[: len(payload)] = payload

    def sealed(
        self, generation: GenerationId, step: int, ticket: Ticket, step_record: StepRecord | None = None
    ) -> SealedSegment:
        """Return the segment for the tiers.

        Args:
            generation: the generation it is part of.
            step: its boundary.
            ticket: ticket of all copies.
            step_record: gradients that led to the boundary, of the experts that leave the node.
        """
        files = [
            SealedFile(
                generation=generation,
                rank=self.layout.groups.rank,
                step=step,
                audience=file.audience,
                view=memory,
                records=records,
                ticket=ticket,
            )
            for file, memory, records in zip(self.layout.files, self._memories, self._records, strict=True)
        ]
        return SealedSegment(files=files, view=self._memory, step_record=step_record)

    def _local(self, name: str) -> Tensor:
        return self.layout.durable.segment.view(self._views[0], name)

    def _refresh(self, under_way: Ticket | None = None) -> None:
        """Make the list of copies anew if it is out of date, once nothing writes to the segment any more."""
        bases = [*self._params, *self.layout.view.states(self._fqns)]
        # A tensor keeps its identity when its memory is swapped (`param.data = ...`), and copies hold addresses.
        addresses = list(map(Tensor.data_ptr, bases))
        same = len(bases) == len(self._bases) and all(map(is_, bases, self._bases))
        if self._copies is None or not same or addresses != self._addresses:
            if under_way is not None:
                under_way.wait()
            self._bases, self._addresses = bases, addresses
            self._rebuild()

    def _rebuild(self) -> None:
        layout, index = self.layout, {id(base): i for i, base in enumerate(self._bases)}
        self._pairs, self._owners = [], []
        for file, view_U8 in zip(layout.files, self._views, strict=True):
            for field in file.own:
                place = file.segment.view(view_U8, field.name)
                if field.key == PRESENT:
                    place.fill_(int(layout.view.schema.has_state(layout.view.params[field.part.piece.fqn])))
                    continue
                base = layout.view.base(field)
                if base is not None:
                    self._pairs.append((layout.view.part_of(base, field), place))
                    self._owners.append(index[id(base)])
                else:
                    place.zero_()  # else what lay here before would differ from what a copy on another node has here
        self._copies = self._engine.prepare(self._pairs)
        views = zip(layout.files, self._views, strict=True)
        self._records = [RecordRows(file.entries(view_U8)) for file, view_U8 in views]


class BoundaryCapture:
    """One boundary on its way into its segment; begins to copy."""

    def __init__(
        self, writer: SegmentWriter, step: int, outcome: Journal, step_record: StepRecord | None = None
    ) -> None:
        self._writer, self._step, self._outcome, self._step_record = writer, step, outcome, step_record
        self.ticket = writer.start()
        """Ticket of all copies so far."""
        self._local: LocalState | None = None

    def take_rest(self, start: Journal, *, disturbed: bool) -> None:
        """Copy again what has changed, and take buffers and journal; call when the next batch begins.

        Args:
            start: the journal's start half.
            disturbed: whether sources may have changed unseen: all of them are copied again.

        Raises:
            BufferChanged: see `SegmentWriter.take_local`.
            CheckpointError: a copy failed.
        """
        self.ticket = self._writer.recopy_changed(self.ticket, everything=disturbed)
        self._local = self._writer.take_local({"outcome": self._outcome, "start": start})
        if self._local.buffers is not None:
            self.ticket = _Tickets(self.ticket, self._local.buffers)

    @property
    def waits_for_device(self) -> bool:
        """Whether `arrive` has something to wait for."""
        return self._local is not None and self._local.values is not None and self._local.values.is_under_way

    def arrive(self) -> None:
        """Wait until the device has come to where `take_rest` was called."""
        assert self._local is not None
        assert self._local.values is not None
        self._local.values.wait()

    def sealed(self, generation: GenerationId) -> SealedSegment:
        """Write the journal and return the segment, once its values have arrived; call after `take_rest`.

        Raises:
            JournalOverflow: its journal record is too small.
            CodecError: a value in the journal cannot be stored exactly.
        """
        assert self._local is not None
        self._writer.write_local(self._local)
        return self._writer.sealed(generation, self._step, self.ticket, self._step_record)


def versions(tensors: Sequence[Tensor]) -> list[int]:
    """Count in-place changes of tensors and of all that share their memory; changes through `.data` stay unseen."""
    return list(map(_version_of, tensors))
