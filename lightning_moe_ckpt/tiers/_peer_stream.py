"""Send replicas: one generation after the other from its owner to every holder.

All holders get the same chunks at the same time, directly from the memory of the segments. A holder that is lost or
refuses a generation is left out, and the others get theirs: half the replicas are better than none, but the generation
does not count as replicated. One thread uses a stream. It blocks while a holder is slow; training does not.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor

from lightning_moe_ckpt.errors import StorageError
from lightning_moe_ckpt.storage import GenerationId
from lightning_moe_ckpt.tiers._delta import EncodedDelta
from lightning_moe_ckpt.tiers._header_compression import compress
from lightning_moe_ckpt.tiers._peer_pacing import Pacer
from lightning_moe_ckpt.tiers._peer_wire import (
    MAX_REASON_NBYTES,
    Message,
    MessageKind,
    PeerLost,
    Wire,
    as_payload,
    copy_of,
    numbers_of,
)

log = logging.getLogger(__name__)


class NotReplicated(StorageError):
    """A holder does not have the generation; the message says which one, and why.

    Args:
        message: text for the log.
        refused: whether a holder that is alive has refused it.
    """

    def __init__(self, message: str, *, refused: bool) -> None:
        super().__init__(message)
        self.refused = refused


class ReplicaStream:
    """Send the segments of this rank to its holders.

    Args:
        group: gloo group; see `Wire`.
        holders: ranks that keep replicas, at least one.
        max_chunk: most bytes of one message.
        pacer: grants the bytes that may be sent.
    """

    def __init__(self, group: dist.ProcessGroup, holders: Sequence[int], *, max_chunk: int, pacer: Pacer) -> None:
        self._wires = [Wire(group, holder, to_holder=True, max_chunk=max_chunk) for holder in holders]
        self._max_chunk, self._pacer = max_chunk, pacer
        self._lost: dict[int, str] = {}
        self._missing: dict[int, str] = {}
        self.nbytes_sent = 0
        """Bytes of segments or deltas sent, over all holders."""
        self.seconds_sending = 0.0
        """Seconds spent sending, without waits for the pacer."""

    @property
    def holders(self) -> list[int]:
        """Ranks that keep replicas."""
        return [wire.peer for wire in self._wires]

    def begin(
        self,
        generation: GenerationId,
        *,
        keep: GenerationId | None,
        base: GenerationId | None = None,
        num_segments: int,
        slot_nbytes: int,
    ) -> None:
        """Announce a generation, and wait until every holder has made room for it or has refused it.

        Args:
            generation: the generation to announce.
            keep: the generation that is complete on all ranks; holders may give up the owner's other ones but for `base`.
            base: the generation that deltas may be based on; other ranks may not know yet whether it is complete.
            num_segments: number of its segments.
            slot_nbytes: bytes of the largest segment.

        Raises:
            NotReplicated: no holder takes it.
        """
        self._missing = dict(self._lost)
        names = (*numbers_of(generation), *numbers_of(keep), *numbers_of(base))
        self._tell(Message(MessageKind.BEGIN, (*names, num_segments, slot_nbytes)))
        self._missing |= self._hear(MessageKind.READY)[0]
        self._expect_active()

    def send(self, step: int, view_U8: Tensor, wanted: Callable[[], bool]) -> bool:
        """Send the segment of boundary `step` at the pacer's speed; return `False` if it stopped being wanted.

        Raises:
            NotReplicated: no holder is left.
        """
        self._tell(Message(MessageKind.SEGMENT, (step, view_U8.numel())))
        return self._send_chunks([view_U8], wanted)

    def offer(self, step: int, delta: EncodedDelta) -> str | None:
        """Ask whether every holder can rebuild the segment of boundary `step` from the generation `base`.

        Returns:
            The reason of a refusal, after which the segment must be sent whole; `None` if the payload may be sent.

        Raises:
            NotReplicated: no holder is left.
        """
        self._tell(Message(MessageKind.DELTA, (step, len(delta.recipe))), as_payload(delta.recipe))
        self.nbytes_sent += len(delta.recipe) * len(self._active)
        refused, _ = self._hear(MessageKind.READY)
        self._expect_active()
        return "; ".join(refused.values()) or None

    def send_delta(self, delta: EncodedDelta, wanted: Callable[[], bool]) -> bool:
        """Send the payload of an accepted offer; returns and raises like `send`."""
        return self._send_chunks(delta.payload, wanted)

    def finish(self, marker: bytes, *, like: bytes | None = None) -> tuple[float, ...]:
        """Send the marker and wait until every holder has checked its copy against it.

        Args:
            marker: the marker of the segments that were sent.
            like: the marker of `base`; must be given if and only if a delta was sent.

        Returns:
            After an audit the largest differences of parameters and of moments, over all holders; else empty.

        Raises:
            NotReplicated: a holder has no complete replica, or one that differs from the others'.
        """
        payload = as_payload(marker if like is None else compress(marker, like))
        self._tell(Message(MessageKind.MARKER, (payload.numel(), int(like is not None))), payload)
        self.nbytes_sent += payload.numel() * len(self._active)
        refused, copies = self._hear(MessageKind.WHOLE)
        self._missing |= refused
        found = [copy_of(numbers) for numbers in copies]
        if len({(digest, len(drift)) for digest, drift in found}) > 1:
            self._missing |= {wire.peer: f"rank {wire.peer}: has other bytes than another" for wire in self._active}
        if self._missing:
            raise self._not_replicated()
        return tuple(max(column) for column in zip(*(drift for _, drift in found), strict=True))

    def abandon(self) -> None:
        """Tell holders to give up the generation being sent."""
        self._tell(Message(MessageKind.ABANDON))

    def say_close(self) -> None:
        """Send the last message to all holders."""
        self._missing = dict(self._lost)
        self._tell(Message(MessageKind.CLOSE))

    # -- private

    @property
    def _active(self) -> list[Wire]:
        return [wire for wire in self._wires if wire.peer not in self._missing]

    def _tell(self, message: Message, payload: Tensor | None = None) -> None:
        """Send a message to all holders at once, then wait for the slowest one."""
        under_way = []
        for wire in self._active:
            with self._losing(wire):
                under_way.append((wire, wire.start(message, payload)))
        for wire, sending in under_way:
            with self._losing(wire):
                sending.wait()

    def _send_chunks(self, views: Sequence[Tensor], wanted: Callable[[], bool]) -> bool:
        """Send views in chunks, none of which has bytes of two views."""
        position = 0
        for view_U8 in views:
            sent = 0
            while sent < view_U8.numel():
                nbytes = self._pacer.take(min(self._max_chunk, view_U8.numel() - sent), wanted)
                if nbytes == 0:
                    return False
                started = time.perf_counter()
                self._tell(Message(MessageKind.CHUNK, (position, nbytes)), view_U8[sent : sent + nbytes])
                self.seconds_sending += time.perf_counter() - started
                sent, position = sent + nbytes, position + nbytes
                self.nbytes_sent += nbytes * len(self._active)
                self._expect_active()
        return True

    def _hear(self, wanted: MessageKind) -> tuple[dict[int, str], list[tuple[int, ...]]]:
        """Receive one answer per holder: reasons of refusals by rank, and numbers of the others."""
        refused, answers = {}, []
        for wire in self._active:
            with self._losing(wire):
                answer = wire.receive()
                if answer.kind is MessageKind.REFUSED:
                    reason = wire.receive_bytes(answer.numbers[0], MAX_REASON_NBYTES).decode(errors="replace")
                    refused[wire.peer] = f"rank {wire.peer}: {reason}"
                elif answer.kind is not wanted:
                    raise PeerLost(f"rank {wire.peer} answers {answer.kind.name}, {wanted.name} was due.")
                else:
                    answers.append(answer.numbers)
        return refused, answers

    def _expect_active(self) -> None:
        if not self._active:
            raise self._not_replicated()

    @contextmanager
    def _losing(self, wire: Wire) -> Iterator[None]:
        """Leave a holder out for good if it is lost in this context; the others go on."""
        try:
            yield
        except PeerLost as error:
            log.warning("copies of this rank's segments are not sent any more to rank %d: %s", wire.peer, error)
            self._lost[wire.peer] = self._missing[wire.peer] = str(error)

    def _not_replicated(self) -> NotReplicated:
        told = "; ".join(self._missing.values())
        refused = bool(self._missing.keys() - self._lost.keys())
        return NotReplicated(f"not every node that should keep a copy has one: {told}", refused=refused)
