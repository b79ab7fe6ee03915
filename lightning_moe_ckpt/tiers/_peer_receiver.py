"""Receive replicas: one thread per owner takes the owner's segments into memory of this node, in segment rings.

Bytes arrive at their final place, in slots of the owner's replica ring. A generation is published, for a later process
to find, only when every segment has the digest in the owner's marker; then the owner hears of it. So a replica left
incomplete by its owner's death is never taken for a complete one. Neither is a replica rebuilt to other bytes than the
owner's, except from rounded gradients, which the owner asks for.

There is room for one generation more than is kept. Usually one is kept, complete on all ranks, while another is being
received. The owner names the kept generation when it begins the next, because only then does every rank know of it. If
a holder gave up the older replica as soon as it had a newer one, and a node died while other holders had only the
older, no generation would be left. If an owner begins a generation before all ranks know of the previous one, there is
room for both: the newer may be rebuilt from the previous. Differences stay with their base, in slots of their own; if
room is needed earlier, the oldest go: their owner has given them up, since storage has them. A plan that needs more
memory gets a new ring; the old ring stays until the new one has the generations to keep.

Source: TierCheck (arXiv 2605.17821), Sec. 3.4, Fig. 5.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

import torch.distributed as dist
from torch import Tensor, split

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.errors import CheckpointError, ConfigurationError, Corrupt
from lightning_moe_ckpt.storage import MAX_MARKER_NBYTES, GenerationId, RankMarker, SlotClass, digest_of
from lightning_moe_ckpt.tiers._delta import DeltaDecoder
from lightning_moe_ckpt.tiers._delta_plan import Run
from lightning_moe_ckpt.tiers._host_writer import RingRoom
from lightning_moe_ckpt.tiers._mirrors import MirrorStore
from lightning_moe_ckpt.tiers._peer_wire import (
    MAX_REASON_NBYTES,
    MAX_SIZES_NBYTES,
    NUMBERS,
    Message,
    MessageKind,
    PeerLost,
    Wire,
    as_payload,
    cut,
    decompress,
    generation_of,
    numbers_of_copy,
)
from lightning_moe_ckpt.tiers._rank_memory import RankMemory
from lightning_moe_ckpt.tiers._ring import SegmentRing
from lightning_moe_ckpt.tiers._ring_state import PAGE_NBYTES, Slot

log = rank_logger(__name__)

COPIES = 2
"""Generations that fit if one is kept."""


class ReplicaStore:
    """Keep the replicas of one owner on this node. One thread uses the store after `allocate`.

    An earlier process's replica of `resumed` stays. Generations to `keep` come besides the one being received. `ahead`:
    a generation may begin before all ranks know of the previous one; `chained`: a generation may be a difference to
    that. For `offered` see `RankMemory.claim`.
    """

    def __init__(
        self,
        memory: RankMemory,
        resumed: GenerationId | None = None,
        *,
        keep: int = 1,
        ahead: bool = False,
        chained: bool = False,
        offered: Collection[GenerationId] = (),
    ) -> None:
        self.memory, self._keep, self._room = memory, keep, 1 + keep + ahead
        self._chained, self._base = chained, resumed
        memory.claim(resumed, older=keep > 1 or chained, offered=offered)
        self._links: Sequence[SlotClass] = ()
        self._sizes: list[int] = []
        """Bytes for the segments still to come."""
        self._slot: Slot | None = None
        self._generation: GenerationId | None = None

    def allocate(self, sizes: Sequence[int], *, keep: int | None = None, links: Sequence[SlotClass] = ()) -> int:
        """Reserve memory for differences and for generations with segments of up to these bytes; return the bytes
        reserved. Raises like `expect_room`.
        """
        self._keep, self._links = keep or self._keep, links
        return self._make(sizes).memory.numel()

    def begin(
        self,
        generation: GenerationId,
        *,
        keep: GenerationId | None,
        base: GenerationId | None = None,
        sizes: Sequence[int],
        is_link: bool = False,
    ) -> None:
        """Make room for segments of these bytes: give up all but `base`, `keep` and the generations kept with `keep`.
        Differences that follow `keep` stay, except the oldest if there is no room. Raises `ConfigurationError` if the
        generation needs more memory than there is.
        """
        if not self._ring.is_named:
            self.memory.renew()
        self.reclaim(keep=keep, base=base)
        if self._chained and not is_link:
            if self._base not in {keep, None}:  # some rank lacks the base
                self._ring.discard(self._base)
            self._base = generation
        ring = self._ring
        if is_link:
            if not self._links:
                raise ConfigurationError("there is no room here for differences. All ranks need the same callbacks.")
            if self._links[0].nbytes < (nbytes := max(sizes)):
                self._links = [self._links[0]._replace(nbytes=nbytes)]
                pages, block = ring.num_slots, ring.block
                ring = self.memory.make(PAGE_NBYTES, pages, block=block, keep=self._keep, small=self._links)
            ring.make_room(nbytes, generation)
        elif not ring.can_begin(sizes):
            ring = self._make(sizes)
        ring.begin_window(generation, is_link=is_link)
        self._generation, self._sizes = generation, [*sizes]

    def reclaim(self, *, keep: GenerationId | None, base: GenerationId | None = None) -> None:
        """Give up every complete replica but `base`, `keep` and the generations kept with `keep`."""
        if keep is not None:
            self.memory.complete_everywhere(keep)
        for each in [] if self._chained else self._ring.published:
            if each != base and (keep is None or each > keep or (each < keep and self._keep == 1)):
                self._ring.discard(each)

    def slot(self, step: int) -> Tensor:
        """Return uint8 memory for boundary `step`'s segment and gradients; the previous segment is complete."""
        assert self._generation is not None
        if self._slot is None or self._slot.step != step:
            self._seal()
            self._slot = self._ring.acquire(self._generation, step, self._sizes.pop(0))
        return self._slot.view

    def publish(self, marker: RankMarker) -> None:
        """Publish the replica for restores: every segment is complete and has the marker's digest. Raises
        `CheckpointError` if something has removed the memory's name; `OSError` if there is no room for the marker.
        """
        generation = self._generation
        assert generation is not None
        self._seal()
        self._ring.finish_window(generation)
        self._generation = None
        try:
            self._ring.publish(generation, marker)
        except (CheckpointError, OSError):
            self._ring.discard(generation)
            raise

    def abandon(self) -> None:
        """Give up the generation being received, if any."""
        generation, self._generation, self._slot = self._generation, None, None
        if generation is not None:
            self._ring.abort_window(generation)

    # -- private

    def _make(self, sizes: Sequence[int]) -> SegmentRing:
        block = RingRoom(steps=sizes).block
        return self.memory.make(PAGE_NBYTES, self._room * block, block=block, keep=self._keep, small=self._links)

    def _seal(self) -> None:
        slot, self._slot = self._slot, None
        if slot is not None:
            self._ring.seal(slot)

    @property
    def _ring(self) -> SegmentRing:
        ring = self.memory.ring
        assert ring is not None, "memory for copies was not allocated"
        return ring


@dataclass(kw_only=True, eq=False, slots=True)
class _Incoming:
    generation: GenerationId
    num_segments: int
    base: GenerationId | None
    """Generation that deltas start from."""
    segments: dict[int, tuple[Tensor, str]] = field(default_factory=dict)
    """Bytes and digest of the segments received so far, by step."""
    step: int = -1
    out: Tensor | None = None
    """Memory of the current segment."""
    left: int = 0
    """Bytes of `out` still to come, if the segment is not delta-encoded."""
    filled: tuple[int, Run] | None = None
    """Boundary, and run of the boundary's segment filled from this rank's own state."""
    decoder: DeltaDecoder | None = None
    """Decoder of the current segment if it is delta-encoded."""

    def place(self, offset: int, nbytes: int) -> Tensor | None:
        """Return the memory for the next bytes; `None` if none are due."""
        if self.decoder is not None:
            return self.decoder.place(offset, nbytes)
        fits = self.out is not None and offset + nbytes <= self.out.numel()
        return self.out[offset : offset + nbytes] if self.out is not None and fits else None

    def mirrored(self, step: int, run: Run) -> Run | None:
        """Return a segment's run that is not sent; `None` if all is sent. Raises `Corrupt` if the run is not filled."""
        if run == (0, 0):
            return None
        if self.filled != (step, run):
            raise Corrupt(f"bytes {run[0]} to {run[1]} of a segment of {self.generation} were to be here, and are not.")
        return run

    def arrived(self, nbytes: int) -> bool:
        """Note that the next bytes have arrived; return whether the segment is complete."""
        if self.decoder is not None:
            self.decoder.arrived(nbytes)
            return self.decoder.whole
        self.left -= nbytes
        return self.left == 0

    @property
    def drift(self) -> tuple[float, ...]:
        """Return the differences found by an audit; see `DeltaDecoder.drift`."""
        return () if self.decoder is None else self.decoder.drift

    def as_kept(self, marker: RankMarker) -> RankMarker:
        """Return the marker for the replica. Raises `Corrupt` if the received bytes are not the sent ones."""
        if self.decoder is None:
            return marker
        self.decoder.expect_gradients()
        if self.decoder.exact:
            return marker
        return _rounded_marker(marker, self.decoder.segment, self.decoder.plan.literal_names)


class ReplicaReceiver:
    """Receive and keep the replicas of one owner, on a thread of its own; `max_chunk` is the owner's.

    `mirrors` has this rank's captures of the owner's state.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        owner: int,
        *,
        run_id: str,
        store: ReplicaStore,
        max_chunk: int,
        mirrors: MirrorStore,
    ) -> None:
        self.owner, self._mirrors = owner, mirrors
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
        handlers: dict[MessageKind, Callable[..., None]] = {
            MessageKind.BEGIN: self._begin,
            MessageKind.MIRROR: self._fill,
            MessageKind.SEGMENT: self._begin_segment,
            MessageKind.DELTA: self._begin_delta,
            MessageKind.CHUNK: self._take_chunk,
            MessageKind.MARKER: self._finish,
            MessageKind.ABANDON: self._drop,
        }
        while (message := self._wire.receive()).kind is not MessageKind.CLOSE:
            if message.kind not in handlers:
                raise self._unexpected(message.kind)
            handlers[message.kind](*message.numbers)

    def _begin(self, *numbers: int) -> None:
        *names, num_segments, is_link = numbers
        self._drop()
        generation, keep, base = (generation_of(names[at : at + NUMBERS]) for at in range(0, 3 * NUMBERS, NUMBERS))
        if generation is None or num_segments < 1 or is_link not in {0, 1}:
            raise self._unexpected(MessageKind.BEGIN)
        sizes = memoryview(self._wire.receive_bytes(8 * num_segments, MAX_SIZES_NBYTES)).cast("q").tolist()
        if min(sizes) < 1:
            raise self._unexpected(MessageKind.BEGIN)
        try:
            self._store.begin(generation, keep=keep, base=base, is_link=bool(is_link), sizes=sizes)
        except (ConfigurationError, OSError) as error:
            self._refuse(str(error))
            return
        self._incoming = _Incoming(generation=generation, num_segments=num_segments, base=base)
        self._wire.send(Message(MessageKind.READY))

    def _fill(self, step: int, start: int, stop: int) -> None:
        incoming = self._expect(MessageKind.MIRROR)
        slot = self._slot(incoming, step, MessageKind.MIRROR)
        if not 0 < start < stop <= slot.numel():
            raise self._unexpected(MessageKind.MIRROR)
        reason = self._mirrors.copy(self.owner, incoming.generation, step, slot[start:stop])
        incoming.filled = None if reason is not None else (step, (start, stop))
        if reason is not None:
            log.info("rank %d sends all of a segment: %s", self.owner, reason)
            self._answer_refused(reason)
            return
        self._wire.send(Message(MessageKind.READY))

    def _begin_segment(self, step: int, nbytes: int, *run: int) -> None:
        incoming = self._expect(MessageKind.SEGMENT)
        slot, (start, stop) = self._slot(incoming, step, MessageKind.SEGMENT), run
        known = run == (0, 0) or incoming.filled == (step, run)
        if not (known and stop <= nbytes <= slot.numel() and nbytes > stop - start):
            raise self._unexpected(MessageKind.SEGMENT)
        incoming.step, incoming.out, incoming.decoder = step, slot[:nbytes], None
        incoming.left = nbytes - (stop - start)

    def _begin_delta(self, step: int, nbytes: int, start: int, stop: int) -> None:
        incoming = self._expect(MessageKind.DELTA)
        slot = self._slot(incoming, step, MessageKind.DELTA)
        recipe = self._wire.receive_bytes(nbytes, slot.numel())  # no recipe is larger than its segment
        try:
            mirrored = incoming.mirrored(step, (start, stop))
            incoming.decoder = DeltaDecoder(recipe, self._base(incoming), slot, mirrored)
        except Corrupt as error:
            log.info("a segment of rank %d cannot be rebuilt, it comes whole: %s", self.owner, error)
            self._answer_refused(str(error))
            return
        incoming.step, incoming.out = step, incoming.decoder.segment
        self._wire.send(Message(MessageKind.READY))

    def _slot(self, incoming: _Incoming, step: int, kind: MessageKind) -> Tensor:
        """Return memory for the next announced segment; the previous segment must be complete."""
        begun = incoming.step not in {-1, step, *incoming.segments}
        if begun or step in incoming.segments or len(incoming.segments) >= incoming.num_segments:
            raise self._unexpected(kind)
        incoming.step = step
        return self._store.slot(step)

    def _base(self, incoming: _Incoming) -> Tensor:
        """Return the segment from which the current one is rebuilt. Raises `Corrupt`."""
        base = incoming.base
        known = self._newest is not None and self._newest[0] == base
        found = self._store.memory.view(base, base.step) if base is not None and known else None
        if found is None:
            raise Corrupt(f"there is no copy of {base} here, from which {incoming.generation} was to be rebuilt.")
        return found

    def _take_chunk(self, offset: int, nbytes: int) -> None:
        incoming = self._expect(MessageKind.CHUNK)
        if (place := incoming.place(offset, nbytes)) is None:
            raise self._unexpected(MessageKind.CHUNK)
        self._wire.receive_into(place)
        if incoming.arrived(nbytes):
            assert incoming.out is not None
            # Digest now, while the owner waits for its next step.
            incoming.segments[incoming.step] = (incoming.out, digest_of(incoming.out.numpy().data))

    def _finish(self, nbytes: int, by_difference: int) -> None:
        incoming = self._expect(MessageKind.MARKER)
        data = self._wire.receive_bytes(nbytes, MAX_MARKER_NBYTES)
        try:
            if by_difference and self._newest is not None:
                data = decompress(data, self._newest[1], MAX_MARKER_NBYTES)
            marker = incoming.as_kept(RankMarker.from_bytes(data, f"marker of rank {self.owner}"))
            self._check(incoming, marker)
            self._store.publish(marker)
        except (CheckpointError, OSError) as error:
            self._drop()
            self._refuse(str(error))
            return
        self._incoming, self._newest = None, (incoming.generation, data)
        self._wire.send(Message(MessageKind.WHOLE, numbers_of_copy(marker.segments[-1].digest, incoming.drift)))

    def _check(self, incoming: _Incoming, marker: RankMarker) -> None:
        found = (marker.run_id, marker.rank, marker.generation)
        if found != (self._run_id, self.owner, incoming.generation):
            raise Corrupt(f"the marker is of run {found[0]}, rank {found[1]}, {found[2]}; {incoming.generation} came.")
        here = tuple(incoming.segments) == marker.steps
        if not here or not all(_is_as_marked(*incoming.segments[step], marker, step) for step in marker.steps):
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


def _is_as_marked(out_U8: Tensor, digest: str, marker: RankMarker, step: int) -> bool:
    files = [entry for entry in marker.segments if entry.step == step]
    if out_U8.numel() != sum(entry.nbytes for entry in files):
        return False
    if len(files) == 1:
        return digest == files[0].digest
    parts = split(out_U8, [entry.nbytes for entry in files])
    return all(digest_of(part.numpy().data) == entry.digest for part, entry in zip(parts, files, strict=True))


def _rounded_marker(marker: RankMarker, segment_U8: Tensor, literal: frozenset[str]) -> RankMarker:
    """Return the marker for a replica rebuilt from rounded gradients, except for the `literal` tensors. Raises
    `Corrupt` if a tensor sent whole differs from the owner's.
    """
    (entry,) = marker.segments
    view, records = segment_U8.numpy().data, []
    for record in entry.records:
        digest = digest_of(view[record.offset : record.offset + record.nbytes])
        if record.name in literal and digest != record.digest:
            raise Corrupt(f"{entry.key}: `{record.name}` did not arrive as its marker says. The next one may.")
        records.append(replace(record, digest=digest))
    if view.nbytes != entry.nbytes:
        raise Corrupt(f"{entry.key}: {view.nbytes} bytes, its marker says {entry.nbytes}. The next one may arrive.")
    return replace(marker, segments=(replace(entry, digest=digest_of(view), records=records),), rounded=True)
