"""Assemble whole tensors from the parts that ranks wrote.

A record is an interval of a flattened global tensor, so parts of all ranks are put together by their coordinates
alone. Every element must come from exactly one record, or the tensor is refused.

An operator comes from one generation, weights and optimizer state. So where a part of it is bad and there is an older copy,
all of it has to be taken from there: see `Assembler.take_older`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_moe_ckpt.errors import ConfigurationError, Corrupt
from lightning_moe_ckpt.recovery import Assembly, Replicas, Request, Version, Wanted, stored_index
from lightning_moe_ckpt.snapshot import is_average
from lightning_moe_ckpt.storage import Backend, GenerationId, RankMarker, RecordEntry, dtype_of, lacking_memory

log = logging.getLogger(__name__)

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
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize


@dataclass(slots=True)
class _Tensor:
    """Places of the parts of one global tensor."""

    dtype: str
    shape: tuple[int, ...]
    parts: list[Replicas] = field(default_factory=list)


class Assembler:
    """Assembles the tensors of one generation that holds, or references, the full state of everything.

    Args:
        backend: where its segments are.
        markers: of all ranks, in order; one segment each.
    """

    def __init__(self, backend: Backend, markers: Sequence[RankMarker]) -> None:
        self._backend, self._generation = backend, markers[0].generation
        self._indexes = [stored_index(marker) for marker in markers]
        self._lost = ""
        """Operator of which the last failed read was."""
        self.notes: list[str] = []
        """Remarks on the result for the user."""
        # Ranks keep their own buffers; an export has room for one.
        first = self._indexes[0].step(Version(self._generation, ""), self._generation.step)
        self._local = {name: each for name, each in first.items() if each.record.kind in {BUFFER, JOURNAL}}
        self._buffers = {each.record.fqn: each for each in self._local.values() if _is_buffer(each.record)}
        self._parameters: dict[str, _Tensor] = {}
        self._full: list[Replicas] = []
        self._sources: dict[str, Version] = {}
        self._choose()

    @property
    def referenced(self) -> dict[str, GenerationId]:
        """Operators that are of older generations."""
        sources = {name: each.generation for name, each in self._sources.items()}
        return {name: generation for name, generation in sources.items() if generation != self._generation}

    def take_older(self, error: Exception) -> bool:
        """Take the copy before of the operator of which something could not be read; whether there is one.

        All of it, weights and optimizer state: what was read of it so far is of the bad copy, so everything is read anew.

        Args:
            error: why it could not be read.
        """
        operator, self._lost = self._lost, ""
        bad = self._sources.get(operator)
        if bad is None:
            return False
        for index in self._indexes:
            index.exclude(operator, bad)
        if not any(index.offered([operator])[operator] for index in self._indexes):
            return False
        self.notes = []
        self._choose()
        older = self._sources[operator].generation
        log.warning("%s: its copy of %s is bad, that of %s is taken: %s", operator, bad.generation, older, error)
        return True

    def _choose(self) -> None:
        """Choose the newest generation for every operator."""
        offered = [index.offered(index.operators) for index in self._indexes]
        self._sources = {}
        for name, source in ((name, each) for found in offered for name, row in found.items() for each, _ in row):
            self._sources[name] = max(source, self._sources.get(name, source))
        self._full = [
            replicas
            for index in self._indexes
            for name, source in self._sources.items()
            for replicas in index.operator(name, source).values()
        ]
        self._parameters = {}
        for each in self._full:
            if each.record.state_key == PARAM:
                _add(self._parameters, each.record.fqn, each)

    @property
    def stored(self) -> dict[str, StoredTensor]:
        """Return parameters, then buffers, by name; no bytes are read."""
        found = {name: StoredTensor(each.dtype, each.shape) for name, each in self._parameters.items()}
        buffers = {name: each.record for name, each in self._buffers.items()}
        return found | {name: StoredTensor(each.dtype, each.global_shape) for name, each in buffers.items()}

    def read(self, name: str) -> Tensor:
        """Read one of `stored`, whole, in its stored precision."""
        if name in self._parameters:
            return self._whole(name, self._parameters[name])
        buffer = self._buffers[name]
        return self._part(buffer).view(buffer.record.global_shape)

    def journal(self) -> Tensor:
        """Read rank 0's journal record."""
        found = next((each for each in self._local.values() if each.record.kind == JOURNAL), None)
        if found is None:
            raise Corrupt(f"{self._generation}: rank 0 has no journal.")
        return self._part(found)

    def optimizer(self, shared: Mapping[str, Mapping[str, Tensor]] | None = None) -> dict[str, Tensor]:
        """Read the optimizer state as `fqn/key`: whole tensors, and scalars where the optimizer keeps one per parameter.

        Args:
            shared: scalars by parameter and key that the journal has, as they are of several experts at once.
        """
        found: dict[str, _Tensor] = {}
        absent: set[str] = set()
        for each in self._full:
            if _is_state(each.record):
                name = f"{each.record.fqn}/{each.record.state_key}"
                if each.record.present:
                    _add(found, name, each)
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
        values = [self._part(each) for each in tensor.parts]
        if len({tuple(value.view(torch.uint8).tolist()) for value in values}) != 1:
            raise ConfigurationError(
                f"`{name}` differs between expert-parallel ranks ({sorted({v.item() for v in values})[:4]}), so it is no "
                "one number. Export without the optimizer: leave out --optimizer, or give --weights-only."
            )
        return values[0].view(())

    def _whole(self, name: str, tensor: _Tensor, *, partial: bool = False) -> Tensor:
        numel, held = math.prod(tensor.shape), sum(each.record.numel for each in tensor.parts)
        if held < numel and not partial:
            raise ConfigurationError(
                f"`{name}`: nobody wrote elements of it, {held} of {numel} are stored. Verify the generation."
            )
        flat = _zeros(name, numel, tensor.dtype)
        end = 0
        chosen: list[tuple[int, Replicas]] = []
        for each in sorted(tensor.parts, key=lambda part: (part.record.global_start, part.record.numel)):
            record = each.record
            if record.global_start < end:
                raise ConfigurationError(
                    f"`{name}`: element {record.global_start} was written by two ranks. If each rank numbers its own "
                    "experts from zero, names do not tell them apart, and the parts cannot be merged."
                )
            if record.global_start > end and not partial:
                break
            end = record.global_start + record.numel
            chosen.append((record.global_start, each))
        if end != flat.numel() and not partial:
            raise ConfigurationError(f"`{name}`: nobody wrote element {end} of {flat.numel()}. Verify the generation.")
        self._fill(flat, chosen)
        return flat.view(tensor.shape)

    def _part(self, replicas: Replicas) -> Tensor:
        record = replicas.record
        part = _zeros(record.name, record.numel, record.dtype)
        self._fill(part, [(0, replicas)])
        return part

    def _fill(self, out: Tensor, parts: Iterable[tuple[int, Replicas]]) -> None:
        """Read records directly to their places, which the first element of each gives.

        Raises:
            Corrupt: one of them has no good copy; `take_older` may help.
        """
        wanted: dict[str, list[Wanted]] = {}
        for start, each in parts:
            name, nbytes, digest = each.record.name, each.record.nbytes, each.record.digest
            record = Wanted(name, start * out.element_size(), nbytes, digest, each.places)
            wanted.setdefault(each.record.operator, []).append(record)
        for operator, records in wanted.items():
            what = f"{operator or 'rank 0'} of {self._sources[operator].generation if operator else self._generation}"
            assembly = Assembly(what, out.view(torch.uint8), records, may_be_lost=True)
            if not assembly.fill(self._read):
                self._lost = operator
                raise Corrupt(assembly.lost)

    def _read(self, request: Request, out: memoryview) -> None:
        self._backend.get_range(request.entry.key, request.offset, out)


def _zeros(name: str, numel: int, code: str) -> Tensor:
    """Return zeroed memory for a tensor, or raise if there is not enough."""
    dtype = dtype_of(code)
    if (reason := lacking_memory(numel * dtype.itemsize)) is not None:
        raise ConfigurationError(f"`{name}` {reason}. If its shape is right, export on a machine that has them.")
    return torch.zeros(numel, dtype=dtype)


def _add(found: dict[str, _Tensor], name: str, replicas: Replicas) -> None:
    record = replicas.record
    tensor = found.setdefault(name, _Tensor(record.dtype, record.global_shape))
    if (tensor.dtype, tensor.shape) != (record.dtype, record.global_shape):
        raise ConfigurationError(f"`{name}`: ranks disagree on its shape or type. Verify the generation.")
    tensor.parts.append(replicas)


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _is_buffer(record: RecordEntry) -> bool:
    return record.kind == BUFFER and not is_average(record.fqn)


def _is_state(record: RecordEntry) -> bool:
    return record.state_key not in {PARAM, PRESENT} and not is_average(record.state_key)
