"""Exchange messages between an owner of segments and a holder of replicas, by gloo's point-to-point operations.

Every message is a header of fixed size, followed by exactly as many bytes as the header says. gloo moves a message when
both sides have asked for it, so nothing is buffered on the way: a holder receives into the memory that keeps the bytes,
and a slow holder holds up the sender's thread without using more memory.

```text
owner                                                 holder
BEGIN generation, what to keep, sizes  ->             (and whether it is a difference)
                                           <-  READY, or REFUSED reason
MIRROR step, start, stop               ->             (the holder fills this run of the segment from its own state)
                                           <-  READY, or REFUSED reason: the run is sent
SEGMENT step, nbytes, start, stop      ->             (all but the run from start to stop, which is empty without MIRROR)
or DELTA step, nbytes, start, stop, recipe ->         (the rest is rebuilt from what the holder has)
                                           <-  READY, or REFUSED reason: SEGMENT comes next
CHUNK offset, nbytes, bytes            ->             (of the last SEGMENT or DELTA; until it is whole)
MARKER nbytes, how, bytes              ->             (how: 1 after a DELTA, encoded as a difference)
                                           <-  WHOLE digest, drift; or REFUSED reason
ABANDON                                ->             (instead of any other message; no answer)
CLOSE                                  ->             (the last one; no answer)
```

Segment headers and markers of consecutive generations have the same names, sizes and offsets. Only digests, a few
numbers and, after a change of experts, some rows differ. So they are sent as differences from the holder's version
(`compress`), line by line: an equal line takes a few bytes, a line of equal length is sent as its changes in place, and
any other line is compressed with the older line as dictionary.

A peer that dies closes its connections: current and later operations with the peer raise `PeerLost`. So does a header
that is not valid in this protocol. Every number from a peer is checked against a bound before use: only `receive_bytes`
allocates memory by such a number; all other memory exists before.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from functools import partial
from itertools import chain, repeat

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_moe_ckpt.errors import CheckpointError, Corrupt
from lightning_moe_ckpt.parallel import begin
from lightning_moe_ckpt.storage import GenerationId

_MAGIC = 0x4D6F45_0006
"""First number of every header: the protocol and its version, 6, in which generations say the size of each segment."""
_NUM_FIELDS = 16
"""Integers of 8 bytes in a header."""
MAX_REASON_NBYTES, MAX_SIZES_NBYTES = 2**16, 2**16
"""Most bytes of a refusal's reason, and of a generation's sizes."""
_TO_HOLDER, _TO_OWNER = 71, 72
"""Tags by direction: two ranks may each hold replicas of the other."""
_FOREVER = timedelta(days=3650)
"""Timeout that never passes: after a real timeout gloo takes the peer for dead and closes all connections of the group,
and the next generation may be hours away."""
_GLOO_PLACE = re.compile(r"\[/[^\]]*\]")
"""Place in gloo's source, at the beginning of gloo's messages."""
_AT_ONCE = timedelta(milliseconds=1)
_SAME, _IN_PLACE, _ANEW = range(3)
"""Encodings of a line relative to the older line."""
_LINE = struct.Struct("<BII")
"""Encoding of a line, the line's bytes, and the encoded bytes."""
_DICTIONARY_NBYTES = 2**15
"""Bytes of a dictionary that zlib can use."""


class PeerLost(CheckpointError, ConnectionError):
    """A rank that takes part in replication is gone, or does not speak this protocol."""


class MessageKind(IntEnum):
    """Kinds of messages; the module's docstring shows their order."""

    BEGIN = 1
    SEGMENT = 2
    CHUNK = 3
    MARKER = 4
    ABANDON = 5
    CLOSE = 6
    READY = 7
    WHOLE = 8
    REFUSED = 9
    DELTA = 10
    MIRROR = 11


_LENGTHS = {
    MessageKind.BEGIN: (11,), MessageKind.SEGMENT: (4,), MessageKind.DELTA: (4,), MessageKind.MIRROR: (3,), MessageKind.CHUNK: (2,), MessageKind.MARKER: (2,), MessageKind.REFUSED: (1,),
    MessageKind.WHOLE: (2, 4),
}  # fmt: skip
"""Allowed counts of numbers by kind; all other kinds have no number."""
_SIGNED = {MessageKind.BEGIN, MessageKind.WHOLE}
"""Kinds with possibly negative numbers: in place of a generation, or in a digest."""


@dataclass(frozen=True, slots=True)
class Message:
    """Variable contents of a header."""

    kind: MessageKind
    numbers: tuple[int, ...] = ()

    def to_header(self) -> Tensor:
        """Return the header, int64 `[16]`."""
        values = [_MAGIC, int(self.kind), len(self.numbers), *self.numbers]
        return torch.tensor(values + [0] * (_NUM_FIELDS - len(values)), dtype=torch.int64)

    @classmethod
    def from_header(cls, header: Tensor) -> Message:
        """Parse a header. Raises `PeerLost` if the header is not valid in this protocol."""
        magic, kind, length, *numbers = header.tolist()
        if magic != _MAGIC or kind not in set(MessageKind) or not 0 <= length <= len(numbers):
            raise PeerLost(
                f"a message begins with {magic:#x}, kind {kind}: not what this release sends. Start all ranks with one release."
            )
        message = cls(MessageKind(kind), tuple(numbers[:length]))
        negative = message.kind not in _SIGNED and min(message.numbers, default=0) < 0
        if length not in _LENGTHS.get(message.kind, (0,)) or negative:
            raise PeerLost(
                f"a message {message.kind.name} says {list(message.numbers)}, which none of this release does."
            )
        return message


NUMBERS = 3
"""Integers per generation in a header."""


def numbers_of(generation: GenerationId | None) -> tuple[int, int, int]:
    """Return the integers for a generation; three times -1 for `None`."""
    if generation is None:
        return -1, -1, -1
    return generation.step, generation.incarnation, int(generation.nonce, 16)


def generation_of(numbers: Sequence[int]) -> GenerationId | None:
    """Return the generation encoded by `numbers_of`. Raises `PeerLost` if the integers are not valid."""
    step, incarnation, nonce = numbers
    if max(numbers) < 0:
        return None
    if min(numbers) < 0 or nonce >= 2**48:
        raise PeerLost(f"a message names generation {list(numbers)}, which none of this release does.")
    return GenerationId(step=step, incarnation=incarnation, nonce=f"{nonce:012x}")


def numbers_of_copy(digest: str, drift: Sequence[float]) -> tuple[int, ...]:
    """Return the integers for a segment's digest and the differences found by an audit."""
    return struct.unpack(f">qq{len(drift)}q", bytes.fromhex(digest) + struct.pack(f">{len(drift)}d", *drift))


def copy_of(numbers: Sequence[int]) -> tuple[str, tuple[float, ...]]:
    """Return digest and differences encoded by `numbers_of_copy`."""
    data = struct.pack(f">{len(numbers)}q", *numbers)
    return data[:16].hex(), struct.unpack(f">{len(numbers) - 2}d", data[16:])


class Wire:
    """Send messages to one peer and receive its answers, or the reverse (`to_holder`: this side owns the segments). One
    thread uses it, and nothing else its gloo group. One operation has at most `max_chunk` bytes.
    """

    def __init__(self, group: dist.ProcessGroup, peer: int, *, to_holder: bool, max_chunk: int) -> None:
        self._group, self.peer, self.max_chunk = group, peer, max_chunk
        self._out, self._in = (_TO_HOLDER, _TO_OWNER) if to_holder else (_TO_OWNER, _TO_HOLDER)

    def start(self, message: Message, payload: Tensor | None = None) -> Callable[[], None]:
        """Begin to send a header and the bytes that it announces: uint8, contiguous, unchanged until the peer has them. Return a
        function that waits for that; it raises `PeerLost`.
        """
        header = message.to_header()
        works = [self._operate(header, self._out, receive=False)]
        if payload is not None:
            works += [self._operate(part, self._out, receive=False) for part in torch.split(payload, self.max_chunk)]
        return partial(self._wait_for_all, works, header)  # gloo reads the header until the end

    def send(self, message: Message, payload: Tensor | None = None) -> None:
        """Send a message and wait until the peer has received all."""
        self.start(message, payload)()

    def receive(self) -> Message:
        """Return the next message; waits without limit."""
        header = torch.empty(_NUM_FIELDS, dtype=torch.int64)
        self.wait_for(self._operate(header, self._in, receive=True))
        return Message.from_header(header)

    def receive_into(self, out: Tensor) -> None:
        """Fill `out`, uint8 and contiguous, with the bytes announced by the last message."""
        for part in torch.split(out, self.max_chunk):
            self.wait_for(self._operate(part, self._in, receive=True))

    def receive_bytes(self, nbytes: int, most: int) -> bytes:
        """Return the bytes announced by the last message. Raises `PeerLost`, and allocates nothing, over `most`."""
        if nbytes > most:
            raise PeerLost(f"rank {self.peer} announces {nbytes} bytes where {most} are the most.")
        out = torch.empty(nbytes, dtype=torch.uint8)
        self.receive_into(out)
        return out.numpy().tobytes()

    def wait_for(self, work: dist.Work) -> None:
        """Wait for an operation. Raises `PeerLost` if the peer is gone."""
        try:
            work.wait(_FOREVER)
        except RuntimeError as error:
            raise self._lost(error) from error

    def _wait_for_all(self, works: Sequence[dist.Work], _header: Tensor) -> None:
        for work in works:
            self.wait_for(work)

    def _operate(self, tensor: Tensor, tag: int, *, receive: bool) -> dist.Work:
        operate = self._group.recv if receive else self._group.send
        try:
            work: dist.Work = begin(partial(operate, [tensor], self.peer, tag), self.peer, self._group)
        except RuntimeError as error:
            raise self._lost(error) from error
        return work

    def _lost(self, error: RuntimeError) -> PeerLost:
        said = _GLOO_PLACE.sub("", str(error)).partition(". ")[0].strip()
        return PeerLost(f"rank {self.peer} is gone ({said}).")


def as_payload(data: bytes) -> Tensor:
    """Return a uint8 tensor with a copy of `data`, to send with a message."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def cut(group: dist.ProcessGroup, peer: int) -> None:
    """Close this process's connections of `group`, so that all current operations raise `PeerLost`, here and at peers.

    For a process that ends and cannot wait for other ranks. The group cannot be used afterwards.
    """
    try:
        group.recv([torch.empty(1, dtype=torch.uint8)], peer, _TO_OWNER + 1).wait(_AT_ONCE)
    except RuntimeError:  # the timeout, which closes the connections; or they were closed already
        return


# -- differences from what the other side has


def compress(data: bytes, like: bytes) -> bytes:
    """Encode `data` for a receiver that has `like`."""
    parts = []
    for line, older in zip(data.split(b"\n"), _older_lines(like), strict=False):
        kind, encoded = _encode(line, older)
        parts += [_LINE.pack(kind, len(line), len(encoded)), encoded]
    return b"".join(parts)


def decompress(encoded: bytes, like: bytes, most: int) -> bytes:
    """Return the bytes that `compress` encoded relative to `like`. Raises `Corrupt` if the bytes are damaged, belong to
    another `like`, or encode more than `most` bytes; no more are decoded.
    """
    older, lines, position = _older_lines(like), list[bytes](), 0
    while position < len(encoded):
        try:
            kind, nbytes, encoded_nbytes = _LINE.unpack_from(encoded, position)
        except struct.error as error:
            raise _wrong_base() from error
        most -= nbytes + 1
        if most < -1:
            raise Corrupt("what was sent as a difference from an earlier version is larger than any version may be.")
        position += _LINE.size + encoded_nbytes
        lines.append(_decode(kind, encoded[position - encoded_nbytes : position], next(older), nbytes))
    return b"\n".join(lines)


def inflate(data: bytes, most: int, *, dictionary: bytes = b"") -> bytes:
    """Decompress `data`. Raises `Corrupt` if it is damaged or has more than `most` bytes; no more are made."""
    stream = zlib.decompressobj(zdict=dictionary)
    try:
        found = stream.decompress(data, most + 1)
    except zlib.error as error:
        raise _wrong_base() from error
    if len(found) > most or not stream.eof:
        raise _wrong_base()
    return found


def _older_lines(like: bytes) -> Iterator[bytes]:
    """Yield the lines of `like`, then empty lines without end."""
    return chain(like.split(b"\n"), repeat(b""))


def _encode(line: bytes, older: bytes) -> tuple[int, bytes]:
    if line == older:
        return _SAME, b""
    stream = zlib.compressobj(zdict=older[-_DICTIONARY_NBYTES:])
    anew = stream.compress(line) + stream.flush()
    if len(line) != len(older):
        return _ANEW, anew
    in_place = zlib.compress(_difference(line, older))
    return (_IN_PLACE, in_place) if len(in_place) < len(anew) else (_ANEW, anew)


def _decode(kind: int, encoded: bytes, older: bytes, nbytes: int) -> bytes:
    if kind == _SAME:
        line = older
    elif kind == _IN_PLACE:
        difference = inflate(encoded, nbytes)
        line = _difference(difference, older) if len(difference) == len(older) else b""
    elif kind == _ANEW:
        line = inflate(encoded, nbytes, dictionary=older[-_DICTIONARY_NBYTES:])
    else:
        raise _wrong_base()
    if len(line) != nbytes:
        raise _wrong_base()
    return line


def _difference(one: bytes, other: bytes) -> bytes:
    return np.bitwise_xor(np.frombuffer(one, np.uint8), np.frombuffer(other, np.uint8)).tobytes()


def _wrong_base() -> Corrupt:
    return Corrupt(
        "what was sent as a difference is damaged, or differs from another version. The next one comes whole."
    )
