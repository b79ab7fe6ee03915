"""Receive replicas: one thread per owner takes that rank's segments into memory of this node.

Bytes arrive where they stay, in slots of the owner's replica ring. A generation is published, so that a later process
finds it, only when every segment has the digest in the owner's marker; then its owner is told. A replica that is
incomplete, because its owner died or gave it up, is therefore never taken for a complete one. Neither is one that was
rebuilt from gradients to other bytes than the owner's, except from rounded gradients, which the owner asks for.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from lightning_moe_ckpt.errors import CheckpointError, ConfigurationError, Corrupt
from lightning_moe_ckpt.storage import MAX_MARKER_NBYTES, GenerationId, RankMarker, digest_of
from lightning_moe_ckpt.tiers._delta import DeltaDecoder
from lightning_moe_ckpt.tiers._delta_drift import rounded_marker
from lightning_moe_ckpt.tiers._header_compression import decompress
from lightning_moe_ckpt.tiers._peer_store import ReplicaStore
from lightning_moe_ckpt.tiers._peer_wire import (
    MAX_REASON_NBYTES,
    NUMBERS,
    Message,
    MessageKind,
    PeerLost,
    Wire,
    as_payload,
    cut,
    generation_of,
    numbers_of_copy,
)

log = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False, slots=True)
class _Incoming:
    """State of the generation that is being received."""

    generation: GenerationId
    num_segments: int
    base: GenerationId | None
    """Generation that deltas are based on."""
    segments: dict[int, tuple[torch.Tensor, str]] = field(default_factory=dict)
    """Bytes and digest of segments that have arrived, by step."""
    step: int = -1
    out: torch.Tensor | None = None
    """Memory of the current segment."""
    decoder: DeltaDecoder | None = None
    """Rebuilds the current segment if it is delta-encoded."""

    def place(self, offset: int, nbytes: int) -> torch.Tensor | None:
        """Return the memory for the next bytes; `None` if none are due."""
        if self.decoder is not None:
            return self.decoder.place(offset, nbytes)
        fits = self.out is not None and offset + nbytes <= self.out.numel()
        return self.out[offset : offset + nbytes] if self.out is not None and fits else None

    def arrived(self, end: int, nbytes: int) -> bool:
        """Note that the bytes up to `end` have arrived; return whether the segment is complete."""
        if self.decoder is not None:
            self.decoder.arrived(nbytes)
            return self.decoder.whole
        return self.out is not None and end == self.out.numel()

    @property
    def drift(self) -> tuple[float, ...]:
        """Return the differences that an audit has found."""
        found = None if self.decoder is None else self.decoder.drift
        return () if found is None else (found.params, found.moments)

    def as_kept(self, marker: RankMarker) -> RankMarker:
        """Return the marker for the replica. Raises `Corrupt` if its bytes are not those that were sent."""
        if self.decoder is None:
            return marker
        self.decoder.expect_gradients()
        return (
            marker
            if self.decoder.exact
            else rounded_marker(marker, self.decoder.segment, self.decoder.plan.literal_names)
        )


class ReplicaReceiver:
    """Receive and keep the replicas of one owner.

    Args:
        group: gloo group; see `Wire`.
        owner: rank whose segments are received.
        run_id: name of the run.
        store: memory in which they are kept.
        max_chunk: bytes of one message, as on the owner.
    """

    def __init__(
        self, group: dist.ProcessGroup, owner: int, *, run_id: str, store: ReplicaStore, max_chunk: int
    ) -> None:
        self.owner = owner
        self._group, self._run_id, self._store = group, run_id, store
        self._wire = Wire(group, owner, to_holder=False, max_chunk=max_chunk)
        self._incoming: _Incoming | None = None
        self._newest: tuple[GenerationId, bytes] | None = None
        """Newest complete replica, and its marker as received."""
        self._thread = threading.Thread(target=self._serve, name=f"moe-ckpt-replica-{owner}", daemon=True)

    def start(self) -> None:
        """Start the receiving thread; memory must have been allocated."""
        self._thread.start()

    def join(self, timeout: float) -> bool:
        """Wait for the owner's last message or death; return `False` after `timeout` seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    # -- the thread

    def _serve(self) -> None:
        try:
            self._receive_until_close()
        except PeerLost as error:
            log.warning("no more copies of the segments of rank %d come: %s", self.owner, error)
        except BaseException:  # thread entry: nothing above would see it
            log.exception("copies of the segments of rank %d are not kept any more; training goes on", self.owner)
            cut(self._group, self.owner)  # otherwise the owner would wait for ever until its next message is received
        finally:
            self._drop()

    def _receive_until_close(self) -> None:
        while (message := self._wire.receive()).kind is not MessageKind.CLOSE:
            if message.kind is MessageKind.BEGIN:
                self._begin(message)
            elif message.kind is MessageKind.ABANDON:
                self._drop()
            elif message.kind is MessageKind.SEGMENT:
                self._begin_segment(*message.numbers)
            elif message.kind is MessageKind.DELTA:
                self._begin_delta(*message.numbers)
            elif message.kind is MessageKind.CHUNK:
                self._take_chunk(*message.numbers)
            elif message.kind is MessageKind.MARKER:
                self._finish(message)
            else:
                raise self._unexpected(message.kind)

    def _begin(self, message: Message) -> None:
        *names, num_segments, slot_nbytes = message.numbers
        self._drop()
        generation, keep, base = (generation_of(names[at : at + NUMBERS]) for at in range(0, 3 * NUMBERS, NUMBERS))
        if generation is None or num_segments < 1 or slot_nbytes < 1:
            raise self._unexpected(MessageKind.BEGIN)
        try:
            self._store.begin(generation, keep=keep, base=base, num_segments=num_segments, slot_nbytes=slot_nbytes)
        except (ConfigurationError, OSError) as error:
            self._refuse(str(error))
            return
        self._incoming = _Incoming(generation=generation, num_segments=num_segments, base=base)
        self._wire.send(Message(MessageKind.READY))

    def _begin_segment(self, step: int, nbytes: int) -> None:
        incoming = self._expect(MessageKind.SEGMENT)
        slot = self._slot(incoming, step, MessageKind.SEGMENT)
        if not 0 < nbytes <= slot.numel():
            raise self._unexpected(MessageKind.SEGMENT)
        incoming.step, incoming.out, incoming.decoder = step, slot[:nbytes], None

    def _begin_delta(self, step: int, nbytes: int) -> None:
        incoming = self._expect(MessageKind.DELTA)
        slot = self._slot(incoming, step, MessageKind.DELTA)
        recipe = self._wire.receive_bytes(nbytes, slot.numel())  # no recipe is larger than its segment
        try:
            incoming.decoder = DeltaDecoder(recipe, self._base(incoming), slot)
        except Corrupt as error:
            log.info("a segment of rank %d cannot be rebuilt, it comes whole: %s", self.owner, error)
            self._answer_refused(str(error))
            return
        incoming.step, incoming.out = step, incoming.decoder.segment
        self._wire.send(Message(MessageKind.READY))

    def _slot(self, incoming: _Incoming, step: int, kind: MessageKind) -> torch.Tensor:
        """Return memory for the next announced segment; the previous one must be complete."""
        begun = incoming.step not in {-1, step, *incoming.segments}
        if begun or step in incoming.segments or len(incoming.segments) >= incoming.num_segments:
            raise self._unexpected(kind)
        incoming.step = step
        return self._store.slot(step)

    def _base(self, incoming: _Incoming) -> torch.Tensor:
        """Return the segment that the current one is rebuilt from. Raises `Corrupt`."""
        base = incoming.base
        known = self._newest is not None and self._newest[0] == base
        found = self._store.whole(base, base.step) if base is not None and known else None
        if found is None:
            raise Corrupt(f"there is no copy of {base} here, from which {incoming.generation} was to be rebuilt.")
        return found

    def _take_chunk(self, offset: int, nbytes: int) -> None:
        incoming = self._expect(MessageKind.CHUNK)
        place = incoming.place(offset, nbytes)
        if place is None:
            raise self._unexpected(MessageKind.CHUNK)
        self._wire.receive_into(place)
        if incoming.arrived(offset + nbytes, nbytes):
            assert incoming.out is not None
            # Digest now, while the owner waits for its next step.
            incoming.segments[incoming.step] = (incoming.out, digest_of(incoming.out.numpy().data))

    def _finish(self, message: Message) -> None:
        nbytes, by_difference = message.numbers
        incoming = self._expect(MessageKind.MARKER)
        told = self._wire.receive_bytes(nbytes, MAX_MARKER_NBYTES)
        try:
            if by_difference and self._newest is not None:
                told = decompress(told, self._newest[1], MAX_MARKER_NBYTES)
            marker = incoming.as_kept(RankMarker.from_bytes(told, f"marker of rank {self.owner}"))
            self._check(incoming, marker)
            self._store.publish(marker)
        except (CheckpointError, OSError) as error:
            self._drop()
            self._refuse(str(error))
            return
        self._incoming, self._newest = None, (incoming.generation, told)
        self._wire.send(Message(MessageKind.WHOLE, numbers_of_copy(marker.segments[-1].digest, incoming.drift)))

    def _check(self, incoming: _Incoming, marker: RankMarker) -> None:
        found = (marker.run_id, marker.rank, marker.generation)
        if found != (self._run_id, self.owner, incoming.generation):
            raise Corrupt(f"the marker is of run {found[0]}, rank {found[1]}, {found[2]}; {incoming.generation} came.")
        here = tuple(incoming.segments) == marker.steps
        if not here or not all(_is_as_told(*incoming.segments[step], marker, step) for step in marker.steps):
            raise Corrupt(f"{incoming.generation}: segments did not arrive as their marker says. The next one may.")

    def _refuse(self, reason: str) -> None:
        log.error("a copy of the segments of rank %d was not kept; training goes on: %s", self.owner, reason)
        self._answer_refused(reason)

    def _answer_refused(self, reason: str) -> None:
        payload = as_payload(reason.encode()[:MAX_REASON_NBYTES])
        self._wire.send(Message(MessageKind.REFUSED, (payload.numel(),)), payload)

    def _drop(self) -> None:
        incoming, self._incoming = self._incoming, None
        if incoming is not None:
            self._store.abandon()

    def _expect(self, kind: MessageKind) -> _Incoming:
        if self._incoming is None:
            raise self._unexpected(kind)
        return self._incoming

    def _unexpected(self, kind: MessageKind) -> PeerLost:
        return PeerLost(f"rank {self.owner} sent {kind.name} out of turn.")


def _is_as_told(out_U8: torch.Tensor, digest: str, marker: RankMarker, step: int) -> bool:
    """Return whether the bytes of a step have the digests in the marker."""
    files = [entry for entry in marker.segments if entry.step == step]
    if out_U8.numel() != sum(entry.nbytes for entry in files):
        return False
    if len(files) == 1:
        return digest == files[0].digest
    parts = torch.split(out_U8, [entry.nbytes for entry in files])
    return all(digest_of(part.numpy().data) == entry.digest for part, entry in zip(parts, files, strict=True))
