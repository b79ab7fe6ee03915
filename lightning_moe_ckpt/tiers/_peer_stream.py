"""The sending half of the peer tier: one generation after the other from its owner to every holder of its copies.

All holders get the same chunks at the same time, straight from the memory of the segments. A holder that is lost, or
refuses a generation, is left out and the others get theirs: half the copies are better than none, but the generation
does not count as replicated. One thread uses a stream; it blocks while a holder is slow, and training does not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_moe_ckpt.errors import StorageError
from lightning_moe_ckpt.storage import GenerationId
from lightning_moe_ckpt.tiers._peer_pacing import Pacer
from lightning_moe_ckpt.tiers._peer_wire import Kind, Message, PeerLost, Wire, numbers_of

log = logging.getLogger(__name__)


class NotReplicated(StorageError):
    """Some holder of a generation does not have it; the message says which, and why."""


class ReplicaStream:
    """Sends the segments of this rank.

    Args:
        group: gloo; see `Wire`.
        holders: ranks that keep copies, at least one.
        max_chunk: bytes of one message at most.
        pacer: says when how much may go.
    """

    def __init__(self, group: dist.ProcessGroup, holders: Sequence[int], *, max_chunk: int, pacer: Pacer) -> None:
        self._wires = [Wire(group, holder, to_holder=True, max_chunk=max_chunk) for holder in holders]
        self._max_chunk, self._pacer = max_chunk, pacer
        self._lost: dict[int, str] = {}
        self._missing: dict[int, str] = {}
        self.nbytes_sent = 0
        """Of segments, to all holders together."""

    @property
    def holders(self) -> list[int]:
        """Ranks that keep copies."""
        return [wire.peer for wire in self._wires]

    def begin(
        self, generation: GenerationId, *, keep: GenerationId | None, num_segments: int, slot_nbytes: int
    ) -> None:
        """Announce a generation, and wait until every holder has made room for it or has refused it.

        Args:
            generation: what is coming.
            keep: the generation that is whole on all ranks; holders may give up every other one of this owner.
            num_segments: how many segments it has.
            slot_nbytes: size of the largest.

        Raises:
            NotReplicated: no holder takes it.
        """
        self._missing = dict(self._lost)
        self._tell(Message(Kind.BEGIN, (*numbers_of(generation), *numbers_of(keep), num_segments, slot_nbytes)))
        self._hear(Kind.READY)
        if not self._active:
            raise self._not_replicated()

    def send(self, step: int, view_U8: Tensor, wanted: Callable[[], bool]) -> bool:
        """Send the segment of boundary `step` as fast as the pacer lets it; `False` if that stopped being wanted.

        Raises:
            NotReplicated: no holder is left.
        """
        self._tell(Message(Kind.SEGMENT, (step, view_U8.numel())))
        sent = 0
        while sent < view_U8.numel():
            nbytes = self._pacer.take(min(self._max_chunk, view_U8.numel() - sent), wanted)
            if nbytes == 0:
                return False
            self._tell(Message(Kind.CHUNK, (sent, nbytes)), view_U8[sent : sent + nbytes])
            sent += nbytes
            self.nbytes_sent += nbytes * len(self._active)
            if not self._active:
                raise self._not_replicated()
        return True

    def finish(self, marker: bytes) -> None:
        """Send the marker and wait until every holder has checked its copy against it.

        Raises:
            NotReplicated: some holder has no whole copy.
        """
        payload = torch.frombuffer(bytearray(marker), dtype=torch.uint8)
        self._tell(Message(Kind.MARKER, (len(marker),)), payload)
        self._hear(Kind.WHOLE)
        if self._missing:
            raise self._not_replicated()

    def abandon(self) -> None:
        """Holders forget what they have of the generation under way."""
        self._tell(Message(Kind.ABANDON))

    def bye(self) -> None:
        """The last message."""
        self._missing = dict(self._lost)
        self._tell(Message(Kind.BYE))

    # -- private

    @property
    def _active(self) -> list[Wire]:
        return [wire for wire in self._wires if wire.peer not in self._missing]

    def _tell(self, message: Message, payload: Tensor | None = None) -> None:
        """To all at once, then wait for all: the slowest holder sets the pace, not their sum."""
        under_way = []
        for wire in self._active:
            with self._losing(wire):
                under_way.append((wire, wire.start(message, payload)))
        for wire, sending in under_way:
            with self._losing(wire):
                sending.wait()

    def _hear(self, wanted: Kind) -> None:
        for wire in self._active:
            with self._losing(wire):
                answer = wire.receive()
                if answer.kind is Kind.REFUSED:
                    reason = torch.empty(answer.numbers[0], dtype=torch.uint8)
                    wire.receive_into(reason)
                    self._missing[wire.peer] = f"rank {wire.peer}: {reason.numpy().tobytes().decode(errors='replace')}"
                elif answer.kind is not wanted:
                    raise PeerLost(f"rank {wire.peer} answers {answer.kind.name}, {wanted.name} was due.")

    @contextmanager
    def _losing(self, wire: Wire) -> Iterator[None]:
        """Around what one holder may fail at: it is left out for good, and the others go on."""
        try:
            yield
        except PeerLost as error:
            log.warning("copies of this rank's segments are not sent any more to rank %d: %s", wire.peer, error)
            self._lost[wire.peer] = self._missing[wire.peer] = str(error)

    def _not_replicated(self) -> NotReplicated:
        told = "; ".join(self._missing.values())
        return NotReplicated(f"not every node that should keep a copy has one: {told}")
