"""Send replicas: one generation after the other from its owner to every holder.

All holders get the same chunks at the same time, directly from the segments' memory. A holder that is lost or refuses a
generation is left out, and the other holders get theirs: half the replicas are better than none, but the generation
does not count as replicated. One thread uses a stream. It blocks while a holder is slow; training does not.

A transfer at full network speed takes bandwidth and memory traffic from the training that it protects. Each training
step therefore sends an equal part of the rest: `ceil(bytes left / steps left)`. Slow steps leave more for later steps.
Once the steps are used up, or something waits for the transfer, the rest goes at once. A transfer begun before the
previous one has ended waits for it; its steps pass meanwhile.

Source: TierCheck (arXiv 2605.17821), Sec. 3.2, asymmetric transmission scheduling.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt._units import size_text
from lightning_moe_ckpt.errors import StorageError
from lightning_moe_ckpt.storage import GenerationId, SlotClass
from lightning_moe_ckpt.tiers._delta import EncodedDelta
from lightning_moe_ckpt.tiers._delta_plan import Run
from lightning_moe_ckpt.tiers._mirrors import MirrorStore
from lightning_moe_ckpt.tiers._peer_receiver import ReplicaReceiver, ReplicaStore
from lightning_moe_ckpt.tiers._peer_wire import (
    MAX_REASON_NBYTES,
    Message,
    MessageKind,
    PeerLost,
    Wire,
    as_payload,
    compress,
    copy_of,
    cut,
    numbers_of,
)
from lightning_moe_ckpt.tiers._rank_memory import RankMemory
from lightning_moe_ckpt.tiers._readers import DEFAULT_MAX_CHUNK

log = rank_logger(__name__)


@dataclass(kw_only=True, slots=True)
class _Transfer:
    name: Hashable
    deadline: int
    announced: int
    known: int = 0
    """Bytes that are available and not sent."""
    seen: int = 0
    seen_nbytes: int = 0
    hurried: bool = False

    def left(self) -> int:
        return self.known + (self.announced - self.seen) * self.seen_nbytes // max(1, self.seen)


class Pacer:
    """Grant bytes to one sending thread, which ends transfers; the training thread begins them and counts steps."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._now = 0
        self._transfers: deque[_Transfer] = deque()
        """Transfers in order; the first one is under way."""
        self._dealt_at, self._allowance, self._spent = -1, 0, 0
        """Step of the newest allowance, bytes granted per replica, and bytes taken since."""
        self.waited_seconds = 0.0
        """Seconds for which the sending thread was not allowed to send."""

    # -- from the training thread

    def step(self) -> None:
        """Count a finished training step, in constant time."""
        with self._changed:
            self._now += 1
            self._changed.notify_all()

    def hurry(self) -> None:
        """Send the rest of all transfers at once, because something waits for them."""
        with self._changed:
            for transfer in self._transfers:
                transfer.hurried = True
            self._changed.notify_all()

    def wake(self) -> None:
        """Make `take` call its `wanted` again."""
        with self._changed:
            self._changed.notify_all()

    def begin(self, *, num_segments: int, num_steps: int, name: Hashable = None) -> None:
        """Begin a transfer of `num_segments` segments of about equal size, to be spread over the next `num_steps`
        steps.

        The transfer waits behind unfinished transfers, and replaces any of the same name.
        """
        self.end(name)
        with self._changed:
            self._transfers.append(_Transfer(name=name, deadline=self._now + num_steps, announced=num_segments))

    def expect(self, nbytes: int, name: Hashable = None) -> None:
        """Add an available segment to an unfinished transfer; segments still to come count with the mean size."""
        with self._changed:
            for transfer in self._transfers:
                if transfer.name == name:
                    transfer.known += nbytes
                    transfer.seen += 1
                    transfer.seen_nbytes += nbytes

    # -- from the sending thread

    def end(self, name: Hashable = None) -> None:
        """End a transfer that is complete or not wanted any more. Repeating this is allowed."""
        with self._changed:
            if self._transfers and self._transfers[0].name == name:
                self._dealt_at = -1
            self._transfers = deque(transfer for transfer in self._transfers if transfer.name != name)

    def more(self, nbytes: int) -> None:
        """Add `nbytes` to the current transfer, which takes more than expected."""
        with self._changed:
            self._transfers[0].known += nbytes
            self._dealt_at = -1

    def resize(self, nbytes: int) -> None:
        """Set the bytes that the current transfer's available segments take."""
        with self._changed:
            self._transfers[0].known = nbytes
            self._dealt_at = -1

    def take(self, most: int, wanted: Callable[[], bool]) -> int:
        """Wait until bytes may be sent, and return how many of `most`; 0 once `wanted` returns false."""
        assert most > 0, "nothing to send"
        with self._changed:
            transfer = self._transfers[0]
            while wanted():
                nbytes = most if transfer.hurried else min(most, self._left())
                if nbytes > 0:
                    self._spent += nbytes
                    transfer.known -= nbytes
                    return nbytes
                since = time.perf_counter()
                self._changed.wait()
                self.waited_seconds += time.perf_counter() - since
            return 0

    def _left(self) -> int:
        """Return the bytes that this step may still send; the caller holds the lock."""
        transfer = self._transfers[0]
        if self._dealt_at != self._now:
            steps_left = max(1, transfer.deadline - self._now)
            self._allowance, self._spent = -(-transfer.left() // steps_left), 0
            self._dealt_at = self._now
        return self._allowance - self._spent


class NotReplicated(StorageError):
    """A holder does not have the generation; the message names the holder and the reason."""

    def __init__(self, message: str, *, refused: bool) -> None:
        super().__init__(message)
        self.refused = refused
        """Whether a living holder has refused the generation."""


class ReplicaStream:
    """Send this rank's segments to its holders, in messages of at most `max_chunk` bytes granted by `pacer`."""

    def __init__(self, group: dist.ProcessGroup, holders: Sequence[int], *, max_chunk: int, pacer: Pacer) -> None:
        self._wires = [Wire(group, holder, to_holder=True, max_chunk=max_chunk) for holder in holders]
        self._max_chunk, self._pacer = max_chunk, pacer
        self._lost: dict[int, str] = {}
        self._missing: dict[int, str] = {}
        self.nbytes_sent = 0
        """Bytes of segments or deltas sent, over all holders."""

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
        sizes: Sequence[int],
        is_link: bool = False,
    ) -> None:
        """Announce a generation with so many bytes per segment, and wait until every holder has made room or has
        refused. Raises `NotReplicated` if no holder does.

        `keep` is complete on all ranks: holders may give up all others of this owner except `base`, from which deltas
        may start; other ranks may not know yet whether that is complete. `is_link`: the generation is a difference to
        the generation before.
        """
        self._missing = dict(self._lost)
        names = (*numbers_of(generation), *numbers_of(keep), *numbers_of(base))
        payload = as_payload(array("q", sizes).tobytes())
        self._tell(Message(MessageKind.BEGIN, (*names, len(sizes), int(is_link))), payload)
        self._missing |= self._hear(MessageKind.READY)[0]
        self._expect_active()

    def send(self, step: int, view_U8: Tensor, wanted: Callable[[], bool], *, mirrored: Run | None = None) -> bool:
        """Send the segment of boundary `step` at the pacer's speed; return `False` if the segment stopped being wanted.
        Every holder has filled the run `mirrored`, see `fill`, which does not begin the segment. Raises `NotReplicated`
        if no holder is left.
        """
        start, stop = mirrored or (0, 0)
        self._tell(Message(MessageKind.SEGMENT, (step, view_U8.numel(), start, stop)))
        parts = [(0, view_U8[:start]), (stop, view_U8[stop:])]
        return self._send_chunks([part for part in parts if part[1].numel()], wanted)

    def fill(self, step: int, run: Run) -> str | None:
        """Ask every holder to fill a run of boundary `step`'s segment from the holder's own captures. Returns a
        refusal's reason, after which the run must be sent; `None` if all have filled it. Raises like `send`.
        """
        self._tell(Message(MessageKind.MIRROR, (step, *run)))
        return self._refusal()

    def offer(self, step: int, delta: EncodedDelta, *, mirrored: Run | None = None) -> str | None:
        """Ask whether every holder can rebuild the segment of boundary `step` from the generation `base`. Returns a
        refusal's reason, after which the segment must be sent whole; `None` if the payload may be sent. Raises like
        `send`.
        """
        numbers = (step, len(delta.recipe), *(mirrored or (0, 0)))
        self._tell(Message(MessageKind.DELTA, numbers), as_payload(delta.recipe))
        self.nbytes_sent += len(delta.recipe) * len(self._active)
        return self._refusal()

    def send_delta(self, delta: EncodedDelta, wanted: Callable[[], bool]) -> bool:
        """Send the payload of an accepted offer; returns and raises like `send`."""
        begins = [0, *accumulate(view.numel() for view in delta.payload)]
        return self._send_chunks(list(zip(begins, delta.payload, strict=False)), wanted)

    def finish(self, marker: bytes, *, like: bytes | None = None) -> tuple[float, ...]:
        """Send the marker of the segments that were sent and wait until every holder has checked its copy. `like`, the
        marker of `base`, is given if and only if a delta was sent. Return, after an audit, the largest differences in
        parameters and in moments, over all holders; else nothing. Raises `NotReplicated` if a holder has no complete
        replica, or has other bytes than another.
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
        """Send a message to all holders at once, then wait for the slowest."""
        under_way = []
        for wire in self._active:
            with self._losing(wire):
                under_way.append((wire, wire.start(message, payload)))
        for wire, wait in under_way:
            with self._losing(wire):
                wait()

    def _refusal(self) -> str | None:
        refused, _ = self._hear(MessageKind.READY)
        self._expect_active()
        return "; ".join(refused.values()) or None

    def _send_chunks(self, views: Sequence[tuple[int, Tensor]], wanted: Callable[[], bool]) -> bool:
        """Send views, each with its place, in chunks; no chunk has bytes of two views."""
        for position, view_U8 in views:
            sent = 0
            while sent < view_U8.numel():
                nbytes = self._pacer.take(min(self._max_chunk, view_U8.numel() - sent), wanted)
                if nbytes == 0:
                    return False
                self._tell(Message(MessageKind.CHUNK, (position + sent, nbytes)), view_U8[sent : sent + nbytes])
                sent += nbytes
                self.nbytes_sent += nbytes * len(self._active)
                self._expect_active()
        return True

    def _hear(self, wanted: MessageKind) -> tuple[dict[int, str], list[tuple[int, ...]]]:
        """Receive one answer per holder. Return the reasons of refusals by rank, and the numbers in the other answers."""
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
        """Leave a holder out for good if it is lost in this context; the other holders go on."""
        try:
            yield
        except PeerLost as error:
            log.warning("copies of this rank's segments are not sent any more to rank %d: %s", wire.peer, error)
            self._lost[wire.peer] = self._missing[wire.peer] = str(error)

    def _not_replicated(self) -> NotReplicated:
        reasons = "; ".join(self._missing.values())
        refused = bool(self._missing.keys() - self._lost.keys())
        return NotReplicated(f"not every node that should keep a copy has one: {reasons}", refused=refused)


class Replication:
    """Own the sending stream of this rank and the receivers of other ranks' segments.

    The gloo group of all ranks is used for nothing else, see `Wire`; a message has `max_chunk` bytes, the same on all
    ranks. `holders` keep replicas of this rank's segments, and this rank those of `owners`; both may be empty. The
    run's URL identifies memory of replaced runs, `tag` the run's memory at its place. With `ahead` a generation is sent
    before all ranks know of the previous one, so that it may be delta-encoded. Replicas are in `directory`, by default
    `shared_directory()`. For the rest see `ReplicaStore`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        run_id: str,
        tag: str,
        url: str,
        holders: Sequence[int],
        owners: Sequence[int],
        max_chunk: int = DEFAULT_MAX_CHUNK,
        resumed: GenerationId | None = None,
        keep: int = 1,
        ahead: bool = False,
        chained: bool = False,
        offered: Collection[GenerationId] = (),
        directory: Path | None = None,
    ) -> None:
        self._group, self.started, self.ahead = group, False, ahead
        self.pacer, self.mirrors = Pacer(), MirrorStore()
        self.stream = ReplicaStream(group, holders, max_chunk=max_chunk, pacer=self.pacer)
        self.stores: dict[int, ReplicaStore] = {}
        self.receivers: list[ReplicaReceiver] = []
        for owner in owners:
            memory = RankMemory(tag, owner, url=url, directory=directory, kind="replica")
            store = ReplicaStore(memory, resumed, keep=keep, ahead=ahead, chained=chained, offered=offered)
            self.stores[owner] = store
            self.receivers.append(
                ReplicaReceiver(group, owner, run_id=run_id, store=store, max_chunk=max_chunk, mirrors=self.mirrors)
            )

    @property
    def memories(self) -> list[RankMemory]:
        """Memory of the replicas that this rank keeps."""
        return [store.memory for store in self.stores.values()]

    def allocate(
        self, sizes: Sequence[Sequence[int]], links: Sequence[SlotClass] = (), *, keep: int | None = None
    ) -> None:
        """Reserve memory for every replica that this rank will keep, of segments in bytes, by rank, with further slots
        for differences, if any. `keep` is the number of generations that holders keep, the same on all ranks; `None`
        leaves it. Raises like `expect_room`.
        """
        nbytes = sum(each.allocate(sizes[of], keep=keep, links=links[of : of + 1]) for of, each in self.stores.items())
        log.info("%s are reserved for copies of the segments of ranks %s", size_text(nbytes), sorted(self.stores))

    def start(self) -> None:
        """Begin to receive. Call it on every rank after all have allocated."""
        self.started = True
        for receiver in self.receivers:
            receiver.start()

    def end(self, timeout: float) -> None:
        """Wait `timeout` s for the owners' last messages, then end the receivers. Send our own last message before."""
        deadline = time.monotonic() + timeout
        for receiver in self.receivers if self.started else []:
            if not receiver.join(max(0.0, deadline - time.monotonic())):
                log.info("rank %d did not say goodbye; its connections are closed from here", receiver.owner)
                cut(self._group, receiver.owner)
                receiver.join(1.0)

    def close(self, timeout: float, *, unlink: bool) -> None:
        """End the receivers, then release the memory, and its names if `unlink`. Closing twice is allowed."""
        self.end(timeout)
        for memory in self.memories:
            memory.close(unlink=unlink)
