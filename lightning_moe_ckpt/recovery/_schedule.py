"""Which bytes travel between ranks, in which order: every rank works it out from the same requests.

Requests are cut into chunks, and each pair of ranks works off a queue of its own. Turn `n` of a rank is the `n`-th chunk of
each of its queues: it receives and sends them at once. A turn waits only for turns with smaller numbers elsewhere, so no cycle
can form, and memory is one chunk per queue and turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from lightning_moe_ckpt.recovery._inventory import Version, plain_version, version_of

CHUNK_NBYTES = 8 * 2**20


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """Bytes that one rank wants from a copy that another can read."""

    receiver: int
    reader: int
    version: Version
    tier: str
    key: str
    """Of the file."""
    offset: int
    nbytes: int
    number: int
    """Tells the receiver's requests of one round apart; equal in all chunks of one."""

    def plain(self) -> list[object]:
        """As plain values, without the receiver, who says it."""
        version = plain_version(self.version)
        return [self.reader, self.tier, *version, self.key, self.offset, self.nbytes, self.number]

    @classmethod
    def from_plain(cls, receiver: int, row: Sequence[object]) -> FetchRequest:
        """The inverse of `plain`."""
        reader, tier, *rest = row
        assert isinstance(reader, int)
        offset, nbytes, number = (int(each) for each in rest[5:] if isinstance(each, int))
        return cls(receiver, reader, version_of(rest[:4]), str(tier), str(rest[4]), offset, nbytes, number)


@dataclass(frozen=True, slots=True)
class TransferStep:
    """What a rank receives and sends at once, at most one chunk per other rank and direction."""

    receives: tuple[FetchRequest, ...]
    sends: tuple[FetchRequest, ...]


def turns(asks: Sequence[FetchRequest], rank: int, chunk_nbytes: int = CHUNK_NBYTES) -> list[TransferStep]:
    """The turns of one rank.

    Args:
        asks: of all ranks, in an order that is the same on all.
        rank: whose turns.
        chunk_nbytes: most bytes per chunk.
    """
    incoming: dict[int, list[FetchRequest]] = {}
    outgoing: dict[int, list[FetchRequest]] = {}
    for ask in asks:
        if ask.receiver == rank:
            incoming.setdefault(ask.reader, []).extend(_chunks(ask, chunk_nbytes))
        elif ask.reader == rank:
            outgoing.setdefault(ask.receiver, []).extend(_chunks(ask, chunk_nbytes))
    rows = zip_longest(_columns(incoming), _columns(outgoing), fillvalue=())
    return [TransferStep(receives, sends) for receives, sends in rows]


def _chunks(ask: FetchRequest, chunk_nbytes: int) -> list[FetchRequest]:
    end = ask.offset + ask.nbytes
    return [
        replace(ask, offset=start, nbytes=min(chunk_nbytes, end - start))
        for start in range(ask.offset, end, chunk_nbytes)
    ]


def _columns(queues: dict[int, list[FetchRequest]]) -> list[tuple[FetchRequest, ...]]:
    columns = zip_longest(*queues.values())
    return [tuple(ask for ask in column if ask is not None) for column in columns]
