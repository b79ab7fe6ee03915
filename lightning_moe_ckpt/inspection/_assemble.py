"""Assemble whole tensors from the shards that ranks wrote.

A record is an interval of a flattened global tensor, or of a box in it, so records of all ranks are put together by their
coordinates alone. Every element must come from exactly one record, or from equal copies, or the tensor is refused.

An operator comes from one generation, weights and optimizer state. So where a record of it is bad and there is an older copy,
all of it has to be taken from there: see `Assembler.take_older`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.errors import ConfigurationError, Corrupt
from lightning_moe_ckpt.journal import decode_journal
from lightning_moe_ckpt.recovery import Assembly, Replicas, Request, Version, Wanted, folded, stored, stored_index
from lightning_moe_ckpt.snapshot import JOURNAL, PARAM, PRESENT, STAGES, is_average
from lightning_moe_ckpt.storage import (
    CONSTANTS,
    Backend,
    Bounds,
    RankMarker,
    RecordEntry,
    SegmentEntry,
    dtype_of,
    lacking_memory,
    read_constants,
)
from lightning_moe_ckpt.tiers import is_differential

log = rank_logger(__name__)

BUFFER = "buffer"


class LazyTensor(NamedTuple):
    """Tensor that is read when it is written elsewhere: a model may be larger than memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    """Function that reads the whole tensor."""


@dataclass(slots=True)
class StoredTensor:
    """A parameter, a buffer, or optimizer state, over all ranks."""

    dtype: str
    """safetensors code, e.g. `BF16`."""
    shape: tuple[int, ...]
    records: list[Replicas] = field(default_factory=list)
    """Intervals of the tensor, each with its copies."""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize


class Assembler:
    """Assembler for the tensors of one generation with, or with references to, the full state of everything. Raises `Corrupt` if
    differences, or the state below them, are damaged.

    Args:
        backend: storage with its segments.
        markers: of all ranks, in order; one segment each, or differences to one.
    """

    def __init__(self, backend: Backend, markers: Sequence[RankMarker]) -> None:
        self._backend, self._generation = backend, markers[0].generation
        self._folded: dict[str, Tensor] = {}
        """Bytes of files after their stored differences, by key."""
        if is_differential(markers[0].policy):
            pairs = [folded(marker, self._read) for marker in markers]
            markers = [marker for marker, _ in pairs]
            self._folded = {marker.segments[0].key: segment_U8 for marker, segment_U8 in pairs}
        self._indexes = [stored_index(marker) for marker in markers]
        version = Version(self._generation, "")
        for file in constants_of(backend, markers[0].policy):
            self._indexes[0].add(version, replace(file, step=self._generation.step), [stored(version, 0)])
        self._lost = ""
        """Operator of the last failed read."""
        self.notes: list[str] = []
        """Remarks on the result for the user."""
        # Ranks keep their own buffers; an export has room for one of each pipeline stage.
        size = len(markers) // int(str(markers[0].policy.get(STAGES, 1)))
        own = [[*index.step(Version(self._generation, ""), self._generation.step).values()] for index in self._indexes]
        self.boundary = own
        """Records of each rank at the generation's own step, of any kind."""
        self._journal = next((each for each in own[0] if each.record.kind == JOURNAL), None)
        self._buffers: dict[str, StoredTensor] = {}
        for first in own[::size]:
            known = set(self._buffers)
            for each in first:
                if each.record.kind == BUFFER and not is_average(each.record.fqn) and each.record.fqn not in known:
                    _add(self._buffers, each.record.fqn, each)
        self._parameters: dict[str, StoredTensor] = {}
        self.full: list[Replicas] = []
        """Records of all operators' full states, each of the newest good generation."""
        self._sources: dict[str, Version] = {}
        self._choose()

    @property
    def older(self) -> dict[str, int]:
        """Older operators' steps, by name."""
        versions = [(name, source.generation) for name, source in self._sources.items()]
        return {name: generation.step for name, generation in versions if generation != self._generation}

    def take_older(self, error: Exception) -> bool:
        """Take the older copy of the operator that an error is about; return whether there is one.

        The whole operator, weights and optimizer state, comes from one generation, so parts read before are read anew.
        """
        operator, self._lost = self._lost, ""
        if (bad := self._sources.get(operator)) is None:
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
        self.full = [
            replicas
            for index in self._indexes
            for name, source in self._sources.items()
            for replicas in index.operator(name, source).values()
        ]
        self._parameters = {}
        for each in self.full:
            if each.record.state_key == PARAM:
                _add(self._parameters, each.record.fqn, each)

    @property
    def stored(self) -> dict[str, StoredTensor]:
        """Return parameters, then buffers, by name; no bytes are read."""
        return self._parameters | self._buffers

    def read(self, name: str) -> Tensor:
        """Read one of `stored`, whole, in its stored precision."""
        return self.whole(name, self._buffers[name] if name in self._buffers else self._parameters[name])

    def lazy(self, name: str) -> LazyTensor:
        """Return one of `stored`, to be read later."""
        tensor = self._buffers[name] if name in self._buffers else self._parameters[name]
        return LazyTensor(dtype_of(tensor.dtype), tensor.shape, partial(self.read, name))

    def journal(self) -> Tensor:
        """Read rank 0's journal record."""
        if self._journal is None:
            raise Corrupt(f"{self._generation}: rank 0 has no journal.")
        return self.record(self._journal)

    def optimizer(self) -> dict[str, LazyTensor]:
        """Return the optimizer state as `fqn/key`: whole tensors, and scalars where the optimizer keeps one per parameter."""
        found: dict[str, StoredTensor] = {}
        absent: set[str] = set()
        for each in self.full:
            record = each.record
            if record.state_key not in {PARAM, PRESENT} and not is_average(record.state_key):
                name = f"{record.fqn}/{record.state_key}"
                if record.present:
                    _add(found, name, each)
                else:
                    absent.add(name)
        if partly := sorted(absent & found.keys()):
            self.notes.append(f"no optimizer state yet in parts of {_few(partly)}: zeros there")
        if absent - found.keys():
            self.notes.append(f"no optimizer state yet: {_few(sorted(absent - found.keys()))} left out")
        scalars = self.shared_scalars()
        states: dict[str, LazyTensor] = {}
        for name, tensor in found.items():
            # Every writer of a shard stores the scalars of its parameter.
            several = all(each.record.numel == math.prod(tensor.shape) for each in tensor.records)
            read = self._common if several else partial(self.whole, partly=name in absent)
            states[name] = LazyTensor(dtype_of(tensor.dtype), tensor.shape, partial(read, name, tensor))
        return states | {name: LazyTensor(each.dtype, (), partial(each.view, ())) for name, each in scalars.items()}

    def shared_scalars(self) -> dict[str, Tensor]:
        """Read the optimizer's scalars for several experts at once, from a partial generation's journal."""
        stored = (decode_journal(self.journal()).get("outcome") or {}).get("scalars") or {}
        return {f"{fqn}/{key}": value for fqn, values in stored.items() for key, value in values.items()}

    def _common(self, name: str, tensor: StoredTensor) -> Tensor:
        """Read a tensor that each of its writers stored whole."""
        first, *others = [self.record(record) for record in tensor.records]
        if different := [each for each in others if not torch.equal(each.view(torch.uint8), first.view(torch.uint8))]:
            place = int(torch.argmax((first != different[0]).byte()))
            raise ConfigurationError(
                f"`{name}` differs between ranks ({first[place].item()}, {different[0][place].item()}), so it is not "
                "one tensor. Export without the optimizer: leave out --optimizer, or give --weights-only."
            )
        return first.view(tensor.shape)

    def whole(self, name: str, tensor: StoredTensor, *, partly: bool = False) -> Tensor:
        """Read a tensor that is called `name`; with `partly`, elements without a record are zero."""
        numel, records = math.prod(tensor.shape), _distinct(tensor.records)
        held = sum(each.record.numel for each in records)
        if held < numel and not partly:
            raise ConfigurationError(
                f"`{name}`: nobody wrote elements of it, {held} of {numel} are stored. Verify the generation."
            )
        if any(each.record.box for each in records):
            return self._pasted(name, replace(tensor, records=records))
        flat = _zeros(name, numel, tensor.dtype)
        end = 0
        chosen: list[tuple[int, Replicas]] = []
        for each in sorted(records, key=lambda each: each.record.global_start):
            record = each.record
            if record.global_start < end:
                raise ConfigurationError(
                    f"`{name}`: element {record.global_start} was written by two ranks. If each rank numbers its own "
                    "experts from zero, names do not tell them apart, and the parts cannot be merged."
                )
            if record.global_start > end and not partly:
                break
            end = record.global_start + record.numel
            chosen.append((record.global_start, each))
        if end != flat.numel() and not partly:
            raise ConfigurationError(f"`{name}`: nobody wrote element {end} of {flat.numel()}. Verify the generation.")
        self._fill(flat, chosen)
        return flat.view(tensor.shape)

    def _pasted(self, name: str, tensor: StoredTensor) -> Tensor:
        """Read a tensor that ranks stored by box; elements without a record are zero."""
        if (twice := shared_element(box for each in tensor.records for box in each.record.boxes())) is not None:
            raise ConfigurationError(f"`{name}`: element {twice} was written by two ranks. Verify the generation.")
        whole = _zeros(name, math.prod(tensor.shape), tensor.dtype).view(tensor.shape)
        for each in tensor.records:
            flat = self.record(each)
            for offset, size in each.record.boxes():
                place = tuple(slice(first, first + length) for first, length in zip(offset, size, strict=True))
                whole[place] = flat[: math.prod(size)].view(size)
                flat = flat[math.prod(size) :]
        return whole

    def record(self, replicas: Replicas) -> Tensor:
        """Read a record, flat."""
        record = replicas.record
        flat = _zeros(record.name, record.numel, record.dtype)
        self._fill(flat, [(0, replicas)])
        return flat

    def _fill(self, out: Tensor, records: Iterable[tuple[int, Replicas]]) -> None:
        """Read records directly to their places: the first element of a record gives its place. Raises `Corrupt` if one of them has no good
        copy; `take_older` may help.
        """
        wanted: dict[str, list[Wanted]] = {}
        for start, each in records:
            name, nbytes, digest = each.record.name, each.record.nbytes, each.record.digest
            record = Wanted(name, start * out.element_size(), nbytes, digest, each.places)
            wanted.setdefault(each.record.operator, []).append(record)
        for operator, of_operator in wanted.items():
            what = f"{operator or 'rank 0'} of {self._sources[operator].generation if operator else self._generation}"
            assembly = Assembly(what, out.view(torch.uint8), of_operator, may_be_lost=True)
            if not assembly.fill(self._read):
                self._lost = operator
                raise Corrupt(assembly.lost)

    def _read(self, request: Request, out: memoryview) -> None:
        if (segment_U8 := self._folded.get(request.entry.key)) is None:
            self._backend.get_range(request.entry.key, request.offset, out)
        else:
            out[:] = memoryview(segment_U8.numpy())[request.offset : request.offset + out.nbytes]  # type: ignore[arg-type]


def identity_of(record: RecordEntry) -> tuple[object, ...]:
    """Return a record's coordinates and digest: records that share all these are copies."""
    return record.global_start, record.numel, record.box, record.digest


def _distinct(records: Iterable[Replicas]) -> list[Replicas]:
    """Return a tensor's records without empty ones, copies by several ranks as one."""
    found: dict[tuple[object, ...], Replicas] = {}
    for each in records:
        if each.record.numel:
            found.setdefault(identity_of(each.record), Replicas(each.record)).places += each.places
    return list(found.values())


def shared_element(boxes: Iterable[Bounds]) -> tuple[int, ...] | None:
    """Return an element that two boxes share; `None` if no two overlap. No box may be empty."""
    ordered = sorted(boxes)
    starts = np.array([offset for offset, _ in ordered], np.int64)
    ends = starts + np.array([size for _, size in ordered], np.int64)
    # A box may overlap those behind it that begin before its end in the first dimension.
    places = np.searchsorted(starts[:, 0], ends[:, 0]).tolist() if ordered else []
    for at, place in enumerate(places):
        near = slice(at + 1, place)
        both = ((starts[near] < ends[at]) & (ends[near] > starts[at])).all(axis=1)
        if both.any():
            return tuple(np.maximum(starts[at], starts[near][both.argmax()]).tolist())
    return None


def constants_of(backend: Backend, policy: Mapping[str, object]) -> list[SegmentEntry]:
    """Return a generation's files with constants, each with the records that its plan takes from there. Raises `Corrupt` if the
    files' description is damaged, `KeyMissing` if it is gone.
    """
    wanted = set(json.loads(str(policy["plan"])).get("constants", ())) if CONSTANTS in policy else set()
    files = read_constants(backend, policy) if wanted else ()
    found = [replace(file, records=tuple(record for record in file.records if record.fqn in wanted)) for file in files]
    return [file for file in found if file.records]


def _zeros(name: str, numel: int, code: str) -> Tensor:
    """Return zeroed memory for a tensor, or raise if there is not enough."""
    dtype = dtype_of(code)
    if (reason := lacking_memory(numel * dtype.itemsize)) is not None:
        raise ConfigurationError(f"`{name}` {reason}. If its shape is right, export on a machine that has them.")
    return torch.zeros(numel, dtype=dtype)


def _add(found: dict[str, StoredTensor], name: str, replicas: Replicas) -> None:
    record = replicas.record
    tensor = found.setdefault(name, StoredTensor(record.dtype, record.global_shape))
    if (tensor.dtype, tensor.shape) != (record.dtype, record.global_shape):
        raise ConfigurationError(f"`{name}`: ranks disagree on its shape or type. Verify the generation.")
    tensor.records.append(replicas)


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
