"""Whole tensors from the parts that ranks wrote.

A record is an interval of a flattened global tensor, so parts of all ranks are put together by their coordinates
alone. Every element must come from exactly one record, or the tensor is refused.

An operator comes from one generation, weights and optimizer state. So where a part of it is bad and there is an older copy,
all of it has to be taken from there: see `without`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lightning_moe_ckpt.errors import ConfigurationError, Corrupt, StorageError
from lightning_moe_ckpt.session import is_average
from lightning_moe_ckpt.storage import (
    Backend,
    BadCopies,
    GenerationId,
    RankMarker,
    RecordEntry,
    SegmentEntry,
    carry_forward,
    dtype_of,
    lacking_memory,
    read_record,
)

BUFFER = "buffer"
JOURNAL = "journal"
PARAM = "param"
PRESENT = "present"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A parameter or buffer, over all ranks."""

    dtype: str
    """safetensors code, e.g. `BF16`."""
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the whole tensor."""
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize


@dataclass(slots=True)
class _Tensor:
    """Where the parts of one global tensor are."""

    dtype: str
    shape: tuple[int, ...]
    parts: list[tuple[str, RecordEntry]] = field(default_factory=list)


class BadCopyError(Corrupt):
    """A part of an operator is bad, and an older copy of all of it is named.

    Args:
        operator: its name.
        generation: whose copy is bad.
        spare: whose copy there is.
        reason: what is wrong.
    """

    def __init__(self, operator: str, generation: GenerationId, spare: GenerationId, reason: str) -> None:
        super().__init__(f"{operator}: its copy of {generation} is bad, that of {spare} is taken: {reason}")
        self.operator, self.generation = operator, generation


def without(markers: Sequence[RankMarker], bad: BadCopies) -> list[RankMarker]:
    """The markers of all ranks, of one segment each, with older copies of operators in place of those that are bad."""
    return [
        replace(
            marker,
            segments=tuple(_less(segment, bad) for segment in marker.segments),
            borrowed=(
                *(replace(each, segment=_less(each.segment, bad)) for each in marker.borrowed),
                *carry_forward(marker, bad, bad),
            ),
        )
        for marker in markers
    ]


def _less(segment: SegmentEntry, bad: BadCopies) -> SegmentEntry:
    return replace(segment, records=[record for record in segment.records if record.operator not in bad])


class Assembler:
    """Assembles the tensors of one generation that holds, or borrows, the full state of everything.

    Args:
        backend: where its segments are.
        markers: of all ranks, in order; one segment each.
    """

    def __init__(self, backend: Backend, markers: Sequence[RankMarker]) -> None:
        self._backend = backend
        self._segments: list[SegmentEntry] = [segment for marker in markers for segment in marker.segments]
        borrowed = [each for marker in markers for each in marker.borrowed]
        self._segments += [each.segment for each in borrowed]
        self.borrowed = {record.operator: each.generation for each in borrowed for record in each.segment.records}
        """Operators that are of older generations."""
        self._spares = {r.operator: each.generation for m in markers for each in m.spares for r in each.segment.records}
        self._generations = {segment.key: m.generation for m in markers for segment in m.segments}
        self._generations |= {each.segment.key: each.generation for each in borrowed}
        self.notes: list[str] = []
        """What a user should know about the result."""

        self._parameters: dict[str, _Tensor] = {}
        for segment in self._segments:
            for record in segment.records:
                if record.kind == "full" and record.state_key == PARAM:
                    _add(self._parameters, record.fqn, segment, record)
        first = self._segments[0]
        # Ranks keep their own buffers; an export has room for one.
        self._buffers = {record.fqn: record for record in first.records if _is_buffer(record)}

    @property
    def stored(self) -> dict[str, StoredTensor]:
        """Parameters, then buffers, by name; nothing is read."""
        found = {name: StoredTensor(each.dtype, each.shape) for name, each in self._parameters.items()}
        return found | {name: StoredTensor(each.dtype, each.global_shape) for name, each in self._buffers.items()}

    def read(self, name: str) -> Tensor:
        """One of `stored`, whole, in its stored precision."""
        if name in self._parameters:
            return self._whole(name, self._parameters[name])
        record = self._buffers[name]
        return self._part(self._segments[0].key, record).view(record.global_shape)

    def journal(self) -> Tensor:
        """Rank 0's journal record."""
        segment = self._segments[0]
        record = next((record for record in segment.records if record.kind == JOURNAL), None)
        if record is None:
            raise Corrupt(f"{segment.key}: has no journal.")
        return self._part(segment.key, record)

    def optimizer(self, shared: Mapping[str, Mapping[str, Tensor]] | None = None) -> dict[str, Tensor]:
        """Optimizer state as `fqn/key`: whole tensors, and scalars where the optimizer keeps one per parameter.

        Args:
            shared: scalars by parameter and key that the journal has, as they are of several experts at once.
        """
        found: dict[str, _Tensor] = {}
        absent: set[str] = set()
        for segment in self._segments:
            for record in segment.records:
                if record.kind == "full" and _is_state(record):
                    name = f"{record.fqn}/{record.state_key}"
                    if record.present:
                        _add(found, name, segment, record)
                    else:
                        absent.add(name)
        partly = sorted(absent & found.keys())
        if partly:
            self.notes.append(f"no optimizer state yet in parts of {_few(partly)}: zeros there")
        if absent - found.keys():
            self.notes.append(f"no optimizer state yet: {_few(sorted(absent - found.keys()))} left out")
        told = {f"{fqn}/{key}": value for fqn, scalars in (shared or {}).items() for key, value in scalars.items()}
        states = {
            name: self._state(name, each, partial=name in absent) for name, each in found.items() if name not in told
        }
        return states | {name: value.view(()) for name, value in told.items()}

    def _state(self, name: str, tensor: _Tensor, *, partial: bool) -> Tensor:
        # Every writer of a part stores the scalars of its parameter.
        return self._whole(name, tensor, partial=partial) if tensor.shape else self._scalar(name, tensor)

    def _scalar(self, name: str, tensor: _Tensor) -> Tensor:
        values = [self._part(key, record) for key, record in tensor.parts]
        if len({tuple(value.view(torch.uint8).tolist()) for value in values}) != 1:
            raise ConfigurationError(
                f"`{name}` differs between expert-parallel ranks ({sorted({v.item() for v in values})[:4]}), so it is no "
                "one number. Export without the optimizer: leave out --optimizer, or give --weights-only."
            )
        return values[0].view(())

    def _whole(self, name: str, tensor: _Tensor, *, partial: bool = False) -> Tensor:
        numel, held = math.prod(tensor.shape), sum(record.numel for _, record in tensor.parts)
        if held < numel and not partial:
            raise ConfigurationError(
                f"`{name}`: nobody wrote elements of it, {held} of {numel} are stored. Verify the generation."
            )
        flat = _zeros(name, numel, tensor.dtype)
        end = 0
        for key, record in sorted(tensor.parts, key=lambda part: (part[1].global_start, part[1].numel)):
            if record.global_start < end:
                raise ConfigurationError(
                    f"`{name}`: element {record.global_start} was written by two ranks. If each rank numbers its own "
                    "experts from zero, names do not tell them apart, and the parts cannot be merged."
                )
            if record.global_start > end and not partial:
                break
            end = record.global_start + record.numel
            self._read(key, record, flat[record.global_start : end])
        if end != flat.numel() and not partial:
            raise ConfigurationError(f"`{name}`: nobody wrote element {end} of {flat.numel()}. Verify the generation.")
        return flat.view(tensor.shape)

    def _part(self, key: str, record: RecordEntry) -> Tensor:
        part = _zeros(record.name, record.numel, record.dtype)
        self._read(key, record, part)
        return part

    def _read(self, key: str, record: RecordEntry, out: Tensor) -> None:
        """Read one record straight to its place."""
        if out.numel() * out.element_size() != record.nbytes:
            raise Corrupt(f"{key}: {record.name} has {record.nbytes} bytes for {record.numel} elements.")
        # numpy's stubs do not say that arrays are buffers.
        view = memoryview(out.view(torch.uint8).numpy())  # type: ignore[arg-type]
        try:
            read_record(self._backend, key, record, view)
        except (Corrupt, StorageError) as error:
            generation, spare = self._generations[key], self._spares.get(record.operator)
            if spare is None or spare == generation:
                raise
            raise BadCopyError(record.operator, generation, spare, str(error)) from error


def _zeros(name: str, numel: int, code: str) -> Tensor:
    """Memory for a tensor, if there is so much."""
    dtype = dtype_of(code)
    if (reason := lacking_memory(numel * dtype.itemsize)) is not None:
        raise ConfigurationError(f"`{name}` {reason}. If its shape is right, export on a machine that has them.")
    return torch.zeros(numel, dtype=dtype)


def _add(found: dict[str, _Tensor], name: str, segment: SegmentEntry, record: RecordEntry) -> None:
    tensor = found.setdefault(name, _Tensor(record.dtype, record.global_shape))
    if (tensor.dtype, tensor.shape) != (record.dtype, record.global_shape):
        raise ConfigurationError(f"`{name}`: ranks disagree on its shape or type. Verify the generation.")
    tensor.parts.append((segment.key, record))


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _is_buffer(record: RecordEntry) -> bool:
    return record.kind == BUFFER and not is_average(record.fqn)


def _is_state(record: RecordEntry) -> bool:
    return record.state_key not in {PARAM, PRESENT} and not is_average(record.state_key)
