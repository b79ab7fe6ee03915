"""Records of all writers, each record's reader, and memory with the records that this rank has read.

Those of another tool's checkpoint have names, shapes and types only, and are fitted to the model: it knows its buffers by name,
and each tensor's precision. Running averages that the file lacks begin with the weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor, nn

from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.errors import Corrupt, IdentityMismatch
from lightning_moe_ckpt.journal import Journal, decode_journal
from lightning_moe_ckpt.native import host_buffer
from lightning_moe_ckpt.recovery._cut import BUFFER, FULL, HeldByTensor, HeldRecord
from lightning_moe_ckpt.recovery._index import LinkSource, Replicas
from lightning_moe_ckpt.recovery._inventory import Replica, Version
from lightning_moe_ckpt.snapshot import JOURNAL, PARAM, PRESENT, SEGMENT_METADATA, is_average
from lightning_moe_ckpt.storage import KindColumns, NameColumns, RecordEntry, SegmentLayout, dtype_of

_NAMED = 6


@dataclass(frozen=True, slots=True)
class WrittenRecord:
    """A record of one writer at one boundary."""

    owner: int
    at: int
    """Number of the boundary in its window."""
    replicas: Replicas

    @property
    def record(self) -> RecordEntry:
        """The record's coordinates."""
        return self.replicas.record

    @property
    def unit(self) -> tuple[int, str]:
        """Records that one rank reads together: a shard's, at all boundaries."""
        return self.owner, part_of(self.record.name)


def part_of(name: str) -> str:
    """Return a record's name without its kind and key, the same in all files; the whole name where it is of no shard."""
    return name if name == JOURNAL or name.startswith(f"{BUFFER}/") else name.partition("/")[2].rpartition("/")[0]


@dataclass(slots=True)
class BroughtRecords:
    """Records of all writers, and the memory of those that this rank has read."""

    reached: int = 0
    """Boundary of the state."""
    chosen: Mapping[str, Version] = field(default_factory=dict)
    """A partial generation's experts, each with its version."""
    records: list[WrittenRecord] = field(default_factory=list)
    reader_of: dict[tuple[int, str], int] = field(default_factory=dict)
    """Reading rank of each unit."""
    buffers: list[Tensor] = field(default_factory=list)
    places: dict[tuple[int, int], tuple[int, SegmentLayout]] = field(default_factory=dict)
    """Number of this rank's buffer, and its layout, by writer and boundary."""
    supplied: Counter[Replica] = field(default_factory=Counter)
    """Bytes read here, by copy."""

    def share_out(self, records: Sequence[WrittenRecord], num_ranks: int) -> None:
        """Add records, and give each unit to a rank: equally many bytes to each, neighbours together."""
        sizes: dict[tuple[int, str], int] = {}
        for each in records:
            sizes[each.unit] = sizes.get(each.unit, 0) + each.record.nbytes
        total, before = max(1, sum(sizes.values())), 0
        for unit, nbytes in sizes.items():
            self.reader_of[unit] = min(num_ranks - 1, (2 * before + nbytes) * num_ranks // (2 * total))
            before += nbytes
        self.records += records

    def read_by(self, rank: int) -> Iterator[WrittenRecord]:
        """Yield the records that a rank reads."""
        return (each for each in self.records if self.reader_of[each.unit] == rank)

    def add(self, owner: int, at: int, buffer_U8: Tensor, layout: SegmentLayout) -> None:
        """Take memory with records of a writer at a boundary."""
        self.places[owner, at] = len(self.buffers), layout
        self.buffers.append(buffer_U8)

    def bytes_of(self, each: WrittenRecord) -> bytes:
        """Return a record that this rank has read."""
        number, layout = self.places[each.owner, each.at]
        return layout.view(self.buffers[number], each.record.name).view(torch.uint8).numpy().tobytes()


def _digests_of_buffers(brought: BroughtRecords) -> dict[str, dict[int, list[str]]]:
    found: dict[str, dict[int, list[str]]] = {}
    for each in brought.records:
        if each.record.kind == BUFFER:
            found.setdefault(each.record.fqn, {}).setdefault(each.owner, []).append(each.record.digest)
    return found


def differing_buffers(brought: BroughtRecords) -> Iterator[str]:
    """Yield a note about buffers with other values on other writers, if there are any."""
    found = _digests_of_buffers(brought)
    if names := [name for name, own in found.items() if len({*map(tuple, own.values())}) > 1]:
        yield f"buffers that differed between ranks ({', '.join(names[:_NAMED])}): each rank has those of one of the former ranks"


def buffer_owners(brought: BroughtRecords, num_ranks: int) -> dict[tuple[str, int], int]:
    """Return the writer whose buffer each rank takes, by name and rank: in turn among those that have it."""
    found = _digests_of_buffers(brought)
    return {(name, rank): sorted(own)[rank % len(own)] for name, own in found.items() for rank in range(num_ranks)}


def filtered(sources: Sequence[LinkSource], parts: Collection[str]) -> list[LinkSource]:
    """Return files of a chain with the records of some shards only."""
    return [
        replace(each, entry=replace(each.entry, records=[r for r in each.entry.records if part_of(r.name) in parts]))
        for each in sources
    ]


def decoded(record: bytes) -> Journal | str:
    """Return a journal, or why it cannot be read."""
    try:
        return decode_journal(torch.frombuffer(bytearray(record), dtype=torch.uint8))
    except Corrupt as error:
        return str(error)


_Field = tuple[str, str]
"""A tensor's name, and its state's key."""


def fit_imported(brought: BroughtRecords, tensors: Sequence[HeldRecord], module: nn.Module, exchange: Exchange) -> None:
    """Convert records to the model's precision; `tensors` are wanted by all ranks. Collective. Raises `IdentityMismatch` if names, shapes,
    or the keys of the optimizer's state are not those of the model.
    """
    wanted = {_stored_as(each.record.kind, each.record.fqn, each.record.state_key): each.record for each in tensors}
    records = [each.record for each in brought.records if each.record.fqn]
    stored = {(record.fqn, record.state_key): record for record in records}
    wrong = [*_differences(stored, wanted)]
    unknown = {fqn for fqn, _ in stored} - {fqn for fqn, _ in wanted} - module.state_dict(keep_vars=True).keys()
    said = cast("list[list[str]]", exchange.gather_values(sorted(unknown)))  # of a stage's module only
    wrong += [f"`{name}` is not in the model" for name in said[0] if all(name in each for each in said)]
    if wrong:
        raise IdentityMismatch(
            f"The imported checkpoint is not of this model: {'; '.join(wrong[:_NAMED])}{' ...' if len(wrong) > _NAMED else ''}. Import it "
            "again for this model, with --prefix if names lack their begin, or with --weights-only if the optimizer is another."
        )
    dtypes = {field: each.dtype for field, each in wanted.items() if field in stored}
    names = {record.name: dtype for record in records if (dtype := dtypes.get((record.fqn, record.state_key)))}
    for number, each in enumerate(brought.records):
        record, dtype = each.record, names.get(each.record.name, each.record.dtype)
        fitted = replace(record, dtype=dtype, nbytes=record.numel * dtype_of(dtype).itemsize)
        brought.records[number] = replace(each, replicas=Replicas(fitted))
    for place, (number, layout) in brought.places.items():
        rows = zip(layout.names, layout.kinds, strict=True)
        kinds = [(dtype_of(names[name]) if name in names else dtype, shape) for name, (dtype, shape) in rows]
        if kinds != [*layout.kinds]:
            other = SegmentLayout.of_columns(
                [NameColumns.of(layout.names)], KindColumns.of(kinds), metadata=SEGMENT_METADATA, header_nbytes=0
            )
            buffer_U8 = host_buffer(other.nbytes)
            for name in layout.names:
                other.view(buffer_U8, name).copy_(layout.view(brought.buffers[number], name))
            brought.places[place], brought.buffers[number] = (number, other), buffer_U8


def _stored_as(kind: str, fqn: str, key: str) -> _Field:
    """Return name and key, in an imported generation, for a tensor in a model's record."""
    own = fqn.partition("/")[2] if is_average(fqn) else fqn
    return own, PARAM if kind == BUFFER or is_average(key) else key


def _differences(stored: Mapping[_Field, RecordEntry], wanted: Mapping[_Field, RecordEntry]) -> Iterator[str]:
    with_state = {fqn for fqn, key in stored if key not in {PARAM, PRESENT}}
    for (fqn, key), record in wanted.items():
        if (found := stored.get((fqn, key))) is None and (key == PARAM or fqn in with_state):
            yield f"`{fqn}` has no {'values' if key == PARAM else key}"
        elif found is not None and (found.global_shape or (1,)) != (record.global_shape or (1,)):
            yield f"`{fqn}` has {list(found.global_shape)} {key}, the model {list(record.global_shape)}"


def by_imported_names(sources: HeldByTensor, targets: HeldByTensor) -> HeldByTensor:
    """Return the sources with buffers, and averages, under the names that the model has for them."""
    own = {key: sources.get((key[0], FULL, *_stored_as(*key[1:])), ()) for key in targets if key not in sources}
    return {**sources, **{key: pieces for key, pieces in own.items() if pieces}}
