"""Messages between an owner of segments and a holder of their copies, over point-to-point operations of one gloo group.

Every message is a header of fixed size; those that carry bytes are followed by exactly as many as the header says. gloo
moves a message when both sides have asked for it, so nothing is buffered on the way: a holder receives into the
memory that keeps the bytes, and a slow holder holds up the sender's thread, never somebody's memory.

```text
owner                                                 holder
BEGIN generation, sizes, what to keep  ->
                                           <-  READY, or REFUSED reason
SEGMENT step, nbytes                   ->
or DELTA step, nbytes, recipe          ->             (the segment is rebuilt from what the holder has)
                                           <-  READY, or REFUSED reason: SEGMENT comes next
CHUNK offset, nbytes, bytes            ->             (of the last SEGMENT or DELTA; until it is whole)
MARKER nbytes, how, bytes              ->             (how: 1 after a DELTA, told by its difference)
                                           <-  WHOLE digest, drift; or REFUSED reason
ABANDON                                ->             (instead of whatever would come next; no answer)
BYE                                    ->             (the last one; no answer)
```

A peer that dies closes its connections: operations with it under way, or begun later, raise `PeerLost`. So does a header
that says what no header of this protocol says. No number of a peer's is believed before it was held against a bound:
memory is made for what it announces only within `receive_bytes`, or was made beforehand.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_moe_ckpt.errors import CheckpointError
from lightning_moe_ckpt.storage import GenerationId

_MAGIC = 0x4D6F45_0003
"""Which protocol, in its third version, whose generations name their life; a header that begins otherwise is not read."""
_NUM_FIELDS = 16
"""Integers of 8 bytes in a header."""
MESSAGE_NBYTES = 8 * _NUM_FIELDS
"""Of a header."""
MAX_REASON_NBYTES = 2**16
"""Of the words with which something is refused."""
_TO_HOLDER, _TO_OWNER = 71, 72
"""Tags: two ranks may each hold copies of the other."""
_FOREVER = timedelta(days=3650)
"""gloo takes a timeout for the death of the peer and closes every connection of the group, so a wait has none: the next
generation may be hours away."""
_GLOO_PLACE = re.compile(r"\[/[^\]]*\]")
"""The line of gloo's source with which its messages begin."""
_AT_ONCE = timedelta(milliseconds=1)


class PeerLost(CheckpointError, ConnectionError):
    """A rank that takes part in replication is gone, or does not speak this protocol."""


class Kind(IntEnum):
    """See the module."""

    BEGIN = 1
    SEGMENT = 2
    CHUNK = 3
    MARKER = 4
    ABANDON = 5
    BYE = 6
    READY = 7
    WHOLE = 8
    REFUSED = 9
    DELTA = 10


_LENGTHS = {
    Kind.BEGIN: (11,), Kind.SEGMENT: (2,), Kind.DELTA: (2,), Kind.CHUNK: (2,), Kind.MARKER: (2,), Kind.REFUSED: (1,),
    Kind.WHOLE: (2, 4),
}  # fmt: skip
"""How many numbers messages have; others have none."""
_SIGNED = {Kind.BEGIN, Kind.WHOLE}
"""Those with numbers that may be negative: of no generation, and of a digest."""


@dataclass(frozen=True, slots=True)
class Message:
    """A header, but for what every header has."""

    kind: Kind
    numbers: tuple[int, ...] = ()

    def to_header(self) -> Tensor:
        """int64, shape `[16]`."""
        values = [_MAGIC, int(self.kind), len(self.numbers), *self.numbers]
        return torch.tensor(values + [0] * (_NUM_FIELDS - len(values)), dtype=torch.int64)

    @classmethod
    def from_header(cls, header: Tensor) -> Message:
        """Raises `PeerLost` if it is none of this protocol."""
        magic, kind, length, *numbers = header.tolist()
        if magic != _MAGIC or kind not in set(Kind) or not 0 <= length <= len(numbers):
            raise PeerLost(
                f"a message begins with {magic:#x}, kind {kind}: not what this release sends. Start all ranks with one release."
            )
        message = cls(Kind(kind), tuple(numbers[:length]))
        negative = message.kind not in _SIGNED and min(message.numbers, default=0) < 0
        if length not in _LENGTHS.get(message.kind, (0,)) or negative:
            raise PeerLost(
                f"a message {message.kind.name} says {list(message.numbers)}, which none of this release does."
            )
        return message


NUMBERS = 3
"""Integers of a generation in a header."""


def numbers_of(generation: GenerationId | None) -> tuple[int, int, int]:
    """A generation, or none, in a header."""
    if generation is None:
        return -1, -1, -1
    return generation.step, generation.epoch, int(generation.life, 16) if generation.life else -1


def generation_of(numbers: Sequence[int]) -> GenerationId | None:
    """The way back from `numbers_of`. Raises `PeerLost` if it cannot have been there."""
    step, epoch, life = numbers
    if epoch < -1 or life >= 2**48:
        raise PeerLost(f"a message names generation {list(numbers)}, which none of this release does.")
    return None if step < 0 else GenerationId(step=step, epoch=epoch, life="" if life < 0 else f"{life:012x}")


def numbers_of_copy(digest: str, drift: Sequence[float]) -> tuple[int, ...]:
    """What a holder has, in a header: digest of a segment, and differences that an audit has found."""
    return struct.unpack(f">qq{len(drift)}q", bytes.fromhex(digest) + struct.pack(f">{len(drift)}d", *drift))


def copy_of(numbers: Sequence[int]) -> tuple[str, tuple[float, ...]]:
    """The way back from `numbers_of_copy`."""
    data = struct.pack(f">{len(numbers)}q", *numbers)
    return data[:16].hex(), struct.unpack(f">{len(numbers) - 2}d", data[16:])


class Wire:
    """One direction of talk with one peer, and the answers to it. Used by one thread.

    Args:
        group: gloo, used for point-to-point operations of this kind only.
        peer: rank of the other side.
        to_holder: whether this side owns the segments.
        max_chunk: bytes of one operation at most.
    """

    def __init__(self, group: dist.ProcessGroup, peer: int, *, to_holder: bool, max_chunk: int) -> None:
        self._group, self.peer, self.max_chunk = group, peer, max_chunk
        self._out, self._in = (_TO_HOLDER, _TO_OWNER) if to_holder else (_TO_OWNER, _TO_HOLDER)

    def start(self, message: Message, payload: Tensor | None = None) -> Sending:
        """Begin to send; the payload must stay as it is until `Sending.wait`.

        Args:
            message: what to say.
            payload: uint8, contiguous; the bytes that the message announces.
        """
        header = message.to_header()
        works = [self._operate(header, self._out, receive=False)]
        if payload is not None:
            works += [self._operate(part, self._out, receive=False) for part in torch.split(payload, self.max_chunk)]
        return Sending(self, works, header)

    def send(self, message: Message, payload: Tensor | None = None) -> None:
        """`start` and wait."""
        self.start(message, payload).wait()

    def receive(self) -> Message:
        """The next message; waits for as long as it takes."""
        header = torch.empty(_NUM_FIELDS, dtype=torch.int64)
        self.wait_for(self._operate(header, self._in, receive=True))
        return Message.from_header(header)

    def receive_into(self, out: Tensor) -> None:
        """The bytes that the last message announced; uint8, contiguous."""
        for part in torch.split(out, self.max_chunk):
            self.wait_for(self._operate(part, self._in, receive=True))

    def receive_bytes(self, nbytes: int, most: int) -> bytes:
        """The bytes that the last message announced. Raises `PeerLost`, with nothing allocated, if they are more than `most`."""
        if nbytes > most:
            raise PeerLost(f"rank {self.peer} announces {nbytes} bytes where {most} are the most.")
        out = torch.empty(nbytes, dtype=torch.uint8)
        self.receive_into(out)
        return out.numpy().tobytes()

    def wait_for(self, work: dist.Work) -> None:
        """Raises `PeerLost` if the peer is gone."""
        try:
            work.wait(_FOREVER)
        except RuntimeError as error:
            raise self._lost(error) from error

    def _operate(self, tensor: Tensor, tag: int, *, receive: bool) -> dist.Work:
        operate = self._group.recv if receive else self._group.send
        try:
            work: dist.Work = operate([tensor], self.peer, tag)
        except RuntimeError as error:
            raise self._lost(error) from error
        return work

    def _lost(self, error: RuntimeError) -> PeerLost:
        said = _GLOO_PLACE.sub("", str(error)).partition(". ")[0].strip()
        return PeerLost(f"rank {self.peer} is gone ({said}).")


class Sending:
    """A message on its way."""

    def __init__(self, wire: Wire, works: Sequence[dist.Work], header: Tensor) -> None:
        self._wire, self._works = wire, works
        self._header = header  # gloo reads it until the end

    def wait(self) -> None:
        """Until the peer has all of it. Raises `PeerLost`."""
        for work in self._works:
            self._wire.wait_for(work)


def as_payload(data: bytes) -> Tensor:
    """Bytes to send with a message; a copy."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def cut(group: dist.ProcessGroup, peer: int) -> None:
    """Close this process's connections of `group`: every operation under way raises `PeerLost`, here and at the peers.

    For an end that cannot wait for the others. The group cannot be used afterwards.
    """
    try:
        group.recv([torch.empty(1, dtype=torch.uint8)], peer, _TO_OWNER + 1).wait(_AT_ONCE)
    except RuntimeError:  # the timeout, which is what closes them, or closed already
        return
