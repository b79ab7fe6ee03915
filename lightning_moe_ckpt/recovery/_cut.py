"""Cut records by box, and send each part to the ranks that want it.

Every rank knows the coordinates of all records that were read and of all that are wanted, by the reading and the wanting
rank. So both sides compute a transfer's parts in the same order, and no message describes itself. Memory is one
message per pair of ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, zip_longest
from operator import add

import torch
from torch import Tensor

from lightning_moe_ckpt.errors import IdentityMismatch
from lightning_moe_ckpt.recovery._transfer import MESSAGE_NBYTES, Transport
from lightning_moe_ckpt.snapshot import JOURNAL, PARAM, PRESENT, is_average
from lightning_moe_ckpt.storage import Bounds, RecordEntry, dtype_of

Key = tuple[int, str, str, str]
"""Step, record kind, parameter or buffer, and state key: records with the same key are parts of one tensor."""

ShardScalars = Mapping[tuple[int, int, str], bytes]
"""Shards' single values, by writer, boundary and record name."""

BUFFER, FULL = "buffer", "full"
_ABSENT = (b"", b"\0")

UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by their bytes: elements are moved bit by bit."""


@dataclass(frozen=True, slots=True)
class HeldRecord:
    """A record in the memory of a rank that has read it, or wants it."""

    rank: int
    at: int
    """Number of the boundary in its window."""
    owner: int
    """Writer; of a wanted buffer the writer whose buffer is wanted."""
    place: int
    """Number of the buffer among the rank's."""
    record: RecordEntry
    """The record, with its offset in that buffer."""

    @classmethod
    def of(cls, record: RecordEntry, rank: int, at: int, owner: int, *, place: int | None = None) -> HeldRecord:
        """Return a record in a rank's memory; a parameter or buffer without dimensions counts as a vector."""
        shape = record.global_shape
        if not shape and not is_scalar(record):
            record = replace(record, global_shape=(1,))
        return cls(rank, at, owner, at if place is None else place, record)

    def scalar(self, key: str, values: ShardScalars) -> bytes:
        """Return one of the shard's scalars; empty if it has none."""
        return values.get((self.owner, self.at, f"{self.record.name.rpartition('/')[0]}/{key}"), b"")

    @property
    def boxes(self) -> Iterator[tuple[int, Bounds]]:
        """Boxes of the record, each with its first element in the record."""
        boxes = list(self.record.boxes())
        return zip(accumulate((math.prod(size) for _, size in boxes), initial=0), boxes, strict=False)

    def view(self, buffers: Sequence[Tensor], start: int, size: Sequence[int]) -> Tensor:
        """Return a box's elements, as integers, without a copy."""
        itemsize = dtype_of(self.record.dtype).itemsize
        first = self.record.offset + start * itemsize
        return buffers[self.place][first : first + math.prod(size) * itemsize].view(UNITS[itemsize]).view(tuple(size))


@dataclass(frozen=True, slots=True)
class Move:
    """A part of a record that one rank has read and another wants."""

    source: HeldRecord
    target: HeldRecord
    size: tuple[int, ...]
    first: tuple[int, int]
    """First element of the box with the part, in the source's record and in the target's."""
    boxes: tuple[Bounds, Bounds]
    """These two boxes."""
    offset: tuple[int, ...]
    """Global offset of the part."""

    @property
    def numel(self) -> int:
        """Elements in the part."""
        return math.prod(self.size)

    @property
    def nbytes(self) -> int:
        """Bytes of the part."""
        return self.numel * dtype_of(self.source.record.dtype).itemsize

    def sent(self, buffers: Sequence[Tensor]) -> Tensor:
        """Return the part in the source's memory."""
        return self._of(self.source, 0, buffers)

    def received(self, buffers: Sequence[Tensor]) -> Tensor:
        """Return the part in the target's memory."""
        return self._of(self.target, 1, buffers)

    def _of(self, piece: HeldRecord, side: int, buffers: Sequence[Tensor]) -> Tensor:
        offset, size = self.boxes[side]
        whole = piece.view(buffers, self.first[side], size)
        places = zip(self.offset, offset, self.size, strict=True)
        return whole[tuple(slice(at - begin, at - begin + length) for at, begin, length in places)]


HeldByTensor = Mapping[Key, Sequence[HeldRecord]]
"""Records by tensor."""


def overlaps(source: HeldRecord, target: HeldRecord) -> Iterator[Move]:
    """Yield the parts that two records share, ordered by the target's boxes, then by the source's."""
    for to, (at, size) in target.boxes:
        for start, (begin, length) in source.boxes:
            offset = tuple(map(max, at, begin))
            end = map(min, map(add, at, size), map(add, begin, length))
            both = tuple(stop - first for stop, first in zip(end, offset, strict=True))
            if min(both, default=1) > 0:
                yield Move(source, target, both, (start, to), ((begin, length), (at, size)), offset)


def by_tensor(read: Iterable[HeldRecord], wanted: Iterable[HeldRecord]) -> tuple[HeldByTensor, HeldByTensor]:
    """Return the pieces of each tensor, equal copies that were read as one.

    Experts may be modules that each rank numbers from zero. Where one name stands for several experts, their operators tell them apart.
    """
    sides, experts, local = (list(read), list(wanted)), dict[tuple[object, ...], str](), set[str]()
    for side, pieces in enumerate(sides):
        for record, piece in ((each.record, each) for each in pieces if each.record.state_key == PARAM):
            expert, name = _expert(record)
            place = side, piece.at, record.kind, record.fqn, record.global_start, record.numel, record.box
            if expert and experts.setdefault(place, expert) != expert:
                local.add(name)

    def key_of(piece: HeldRecord) -> Key:
        record, (expert, name) = piece.record, _expert(piece.record)
        key = str(piece.owner) if record.kind == BUFFER else record.state_key
        return piece.at, record.kind, f"{expert}: {name}" if expert and name in local else record.fqn, key

    sources: dict[Key, dict[tuple[object, ...], HeldRecord]] = {}
    targets: dict[Key, list[HeldRecord]] = {}
    for piece in sides[0]:
        record = piece.record
        sources.setdefault(key_of(piece), {}).setdefault((record.global_start, record.numel, record.box), piece)
    for piece in sides[1]:
        targets.setdefault(key_of(piece), []).append(piece)
    return {key: list(pieces.values()) for key, pieces in sources.items()}, targets


def _expert(record: RecordEntry) -> tuple[str, str]:
    """Return a record's operator, empty if that is no expert, and its parameter's name in the layer without the expert's number."""
    operator = record.operator.partition("#")[0]
    layer, is_expert, _ = operator.partition("/expert.")
    parts = record.fqn.removeprefix(f"{layer}.").split(".")
    number = next((at for at, part in enumerate(parts) if part.isdigit()), len(parts))
    return operator if is_expert else "", ".".join([layer, *parts[:number], *parts[number + 1 :]])


def is_scalar(record: RecordEntry) -> bool:
    """Return whether a record is a single value of a shard, such as its optimizer's step count."""
    return not record.global_shape and record.state_key != PARAM and record.kind not in (BUFFER, JOURNAL)


def _is_state(record: RecordEntry) -> bool:
    return record.kind == FULL and record.state_key != PARAM and not is_average(record.state_key)


def moves(sources: HeldByTensor, targets: HeldByTensor, values: ShardScalars, rank: int) -> Iterator[Move]:
    """Yield all moves from or to a rank, in one order on all ranks; state that does not exist yet is not moved."""
    for key in sorted(targets):
        known = sources.get(key, ())
        there = [each for each in known if not (_is_state(each.record) and each.scalar(PRESENT, values) in _ABSENT)]
        own = [each for each in there if each.rank == rank]
        for target in targets[key]:
            for source in there if target.rank == rank else own:
                yield from overlaps(source, target)


def expect_all(rank: int, targets: HeldByTensor, sources: HeldByTensor) -> None:
    """Raise `IdentityMismatch` if elements that this rank wants are nowhere, or twice."""
    for key, pieces in targets.items():
        for piece in (each for each in pieces if each.rank == rank):
            found = sum(move.numel for source in sources.get(key, ()) for move in overlaps(source, piece))
            if found != piece.record.numel and (key in sources or not _is_state(piece.record)):
                raise IdentityMismatch(
                    f"`{piece.record.fqn}`: of the {piece.record.numel} elements of its {piece.record.state_key or 'buffer'} that this rank "
                    f"has, {found} are stored. Resume with the model and the callbacks that wrote the run, or start anew with resume='never'."
                )


def fill_scalars(
    wanted: Sequence[HeldRecord],
    targets: HeldByTensor,
    sources: HeldByTensor,
    values: ShardScalars,
    segments: Sequence[Tensor],
) -> None:
    """Give a rank's shards the scalars from stored shards that they overlap: the first with state."""
    rank = wanted[0].rank if wanted else -1
    own = [(key, each) for key, pieces in targets.items() for each in pieces if each.rank == rank]
    params = {(each.at, each.record.name): (each, sources.get(key, ())) for key, each in own}
    for piece in wanted:
        record = piece.record
        param, stored = params[piece.at, f"{record.name.rpartition('/')[0]}/{PARAM}"]
        near = [each for each in stored if param.record.numel == 0 or any(overlaps(each, param))]
        having = [each for each in near if each.scalar(PRESENT, values) not in _ABSENT]
        if record.state_key == PRESENT:
            value = bytes([bool(having)])
        else:
            found = (each.scalar(record.state_key, values) for each in (having if _is_state(record) else near))
            if (value := next((each for each in found if each), b"")) and len(value) != record.nbytes:
                raise IdentityMismatch(
                    f"`{record.fqn}`: its {record.state_key} has {len(value)} bytes in the run, and {record.nbytes} here. Resume with the "
                    "optimizer that wrote it, or begin with weights alone."
                )
        if value:
            segments[piece.place][record.offset : record.offset + record.nbytes] = torch.frombuffer(
                bytearray(value), dtype=torch.uint8
            )


def deliver(
    transport: Transport,
    all_moves: Iterable[Move],
    read: Sequence[Tensor],
    wanted: Sequence[Tensor],
    message_nbytes: int = MESSAGE_NBYTES,
) -> None:
    """Copy every part, by this rank's `moves`, from its buffers of records read to its place on every rank. Collective.

    Buffers are uint8; a message ends after `message_nbytes`.
    """
    rank = transport.rank
    outgoing: dict[int, list[list[Move]]] = {}
    incoming: dict[int, list[list[Move]]] = {}
    nbytes = Counter[tuple[int, int]]()
    for move in all_moves:
        if move.source.rank == move.target.rank:
            move.received(wanted).copy_(move.sent(read))
            continue
        is_sent = move.source.rank == rank
        queue = (outgoing if is_sent else incoming).setdefault(move.target.rank if is_sent else move.source.rank, [[]])
        pair = move.source.rank, move.target.rank
        if nbytes[pair] >= message_nbytes:
            queue.append([])
            nbytes[pair] = 0
        queue[-1].append(move)
        nbytes[pair] += move.nbytes
    for sends, receives in zip_longest(_heads(outgoing), _heads(incoming), fillvalue=()):
        packed = [(to, _packed(message, read)) for to, message in sends]
        empty = [(of, bytearray(sum(each.nbytes for each in message))) for of, message in receives]
        wait: Callable[[], None] = transport.transfer(
            [(to, memoryview(each)) for to, each in packed], [(of, memoryview(each)) for of, each in empty]
        )
        wait()
        for (_, message), (_, payload) in zip(receives, empty, strict=True):
            _unpack(payload, message, wanted)


def _heads(queues: Mapping[int, list[list[Move]]]) -> Iterator[list[tuple[int, list[Move]]]]:
    """Yield the first messages of all queues, then the second ones, and so on."""
    for row in zip_longest(*queues.values()):
        yield [(other, message) for other, message in zip(queues, row, strict=True) if message is not None]


def _packed(message: Sequence[Move], buffers: Sequence[Tensor]) -> bytearray:
    payload = bytearray(sum(move.nbytes for move in message))
    flat, at = torch.frombuffer(payload, dtype=torch.uint8), 0
    for move in message:
        flat[at : at + move.nbytes] = move.sent(buffers).contiguous().view(-1).view(torch.uint8)
        at += move.nbytes
    return payload


def _unpack(payload: bytearray, message: Sequence[Move], buffers: Sequence[Tensor]) -> None:
    flat, at = torch.frombuffer(payload, dtype=torch.uint8), 0
    for move in message:
        to = move.received(buffers)
        # a part may begin at any byte of the message
        to.copy_(flat[at : at + move.nbytes].clone().view(to.dtype).view(move.size))
        at += move.nbytes
