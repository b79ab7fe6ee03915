"""Skip sending state that the other node holds anyway: data-parallel replicas copy it from their own memory.

Every part of a record is written by one of the ranks that hold the part. A holder of copies may have the owner's
parameters and optimizer state itself: all ranks hold unsharded state, the ranks of a data-parallel group hold the
same experts, and replicas (HSDP) the same shards. Then the holder captures the owner's parts beside its own, at the same boundary. Such a *mirror* equals
the owner's segment there, so only the rest is sent: header, buffers, journal, and experts that the holder does not
have.

A copy put together like this is byte for byte the owner's: it is published only if its digest is in the owner's marker.
So restores, and survival of a node's loss, are as with copies sent whole. If replicas turn out to differ, or a holder
has no mirror, the owner sends everything.

Captures take `replicas` times the mirrored bytes more on every rank, and none of these bytes passes the network.
MOETION lets every node keep all replicated state; here `replicas + 1` nodes keep it, however many there are.

Source: MOETION (arXiv 2412.15411v1), Sec. 5.1; PEC (2024), Sec. 3.2, for the parts cut among ranks.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt._units import rate_text
from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.errors import CheckpointError
from lightning_moe_ckpt.native import measure_bandwidth
from lightning_moe_ckpt.parallel import begin
from lightning_moe_ckpt.storage import GenerationId
from lightning_moe_ckpt.tiers._delta_plan import Run
from lightning_moe_ckpt.tiers._holders import ReplicaPlacement
from lightning_moe_ckpt.tiers._sealed import SealedSegment

log = rank_logger(__name__)

_PROBE_NBYTES = 2 * 2**20
_PROBE_TAG = 70
_PAYS = 2.0
"""Least ratio of local copy speed to network speed: training may wait for local copies, and never for the network."""

_STRIKES = 2
"""Refused generations without an accepted one in between, after which holders take nothing from their own state."""

_CLOSE_TIMEOUT = 5.0
"""Seconds for a copy under way to end."""


@dataclass(frozen=True, kw_only=True)
class Mirroring:
    """State that one rank captures for other ranks, and that other ranks capture for it."""

    owners: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """Owners, each with its holders and itself: records that all these ranks hold are captured."""
    among: frozenset[int] = frozenset()
    """This rank and its copies' holders, who capture the records that all these ranks hold."""
    everything: bool = False
    """Whether, on all ranks, the captured records are all parameters and optimizer state."""

    def __bool__(self) -> bool:
        return bool(self.owners or self.among)


@dataclass(frozen=True, kw_only=True)
class RedundancyFigures:
    """Bytes of this rank's copies on other nodes, per copy."""

    nbytes_sent: int = 0
    nbytes_mirrored: int = 0
    """Bytes not sent, because holders copied them from their own state."""

    @property
    def share(self) -> float:
        """Share of the bytes that was not sent; 0 without copies."""
        return self.nbytes_mirrored / max(1, self.nbytes_sent + self.nbytes_mirrored)


def mirroring_of(placement: ReplicaPlacement, rank: int, peers: Sequence[Sequence[int]]) -> Mirroring:
    """Return the mirroring of `rank` under a placement; pure, so that owners and holders agree. `peers` are the ranks
    that hold the same experts, or shards, for every such group of the world.
    """

    def among(owner: int) -> frozenset[int]:
        holders = placement.holders[owner]
        return frozenset((owner, *holders) if holders else ())

    groups = {each: number for number, group in enumerate(peers) for each in group}
    return Mirroring(
        owners={owner: among(owner) for owner in placement.owners(rank)},
        among=among(rank),
        everything=all(len({groups[each] for each in among(owner)}) <= 1 for owner in groups),
    )


def mirrors_pay(
    group: dist.ProcessGroup, placement: ReplicaPlacement, exchange: Exchange, device: torch.device, replicas: int
) -> bool:
    """Measure whether ranks copy own state so much faster than the network that mirrors pay. Collective."""
    wire = _wire_rate(group, placement, exchange.rank)
    # A rank without holders or owners has no wire to measure; it leaves the decision to the others.
    own = [int(wire) or 2**62, int(measure_bandwidth(_PROBE_NBYTES, device))]
    slowest_wire, slowest_copies = (min(column) for column in zip(*exchange.gather(own), strict=True))
    pays: bool = slowest_copies > _PAYS * replicas * slowest_wire
    if exchange.is_coordinator:
        log.info(
            "copies from own state run at %s, to other nodes at %s: what is replicated there is %s",
            *(rate_text(slowest_copies), rate_text(slowest_wire), "not sent" if pays else "sent"),
        )
    return pays


def _wire_rate(group: dist.ProcessGroup, placement: ReplicaPlacement, rank: int) -> float:
    """Return bytes per second of this rank's transfers to all holders and from all owners at once; 0 without any."""
    seconds, holders, owners = 0.0, placement.holders[rank], placement.owners(rank)
    for nbytes in (1, _PROBE_NBYTES):  # the first round also pays for connections
        payload = torch.zeros(nbytes, dtype=torch.uint8)
        received = [torch.empty_like(payload) for _ in owners]
        began = time.perf_counter()
        works = [begin(partial(group.send, [payload], peer, _PROBE_TAG), peer, group) for peer in holders]
        works += [
            begin(partial(group.recv, [each], peer, _PROBE_TAG), peer, group)
            for each, peer in zip(received, owners, strict=True)
        ]
        for work in works:
            work.wait()
        seconds = time.perf_counter() - began
    return payload.numel() / seconds if holders or owners else 0.0


class MirrorStore:
    """This rank's captures of other ranks' equal state, until the copies of these ranks' segments are filled from them.

    The training thread adds segments, and receiving threads copy from them. `end` comes before a generation's memory is
    released.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._segments: dict[GenerationId, dict[int, SealedSegment]] = {}
        """Segments of generations under way or kept, by boundary."""
        self._newest: GenerationId | None = None
        self._readers: Counter[GenerationId] = Counter()
        self._closed = False

    def begin(self, generation: GenerationId) -> None:
        """Expect a generation's segments."""
        with self._changed:
            self._segments[generation], self._newest = {}, generation
            self._changed.notify_all()

    def add(self, segment: SealedSegment) -> None:
        """Add a segment, and wake threads that wait for it; ignored unless its generation has begun and not ended."""
        with self._changed:
            if segment.generation in self._segments:
                self._segments[segment.generation][segment.step] = segment
                self._changed.notify_all()

    def end(self, generation: GenerationId) -> None:
        """Forget a generation, and wait for threads that copy from it: nothing reads its memory once this returns. May be called again."""
        with self._changed:
            self._segments.pop(generation, None)
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._readers[generation])
            del self._readers[generation]

    def close(self) -> None:
        """Wake all waiting threads, and forget everything."""
        with self._changed:
            self._closed = True
            self._segments.clear()
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._readers.total(), _CLOSE_TIMEOUT)

    def copy(self, owner: int, generation: GenerationId, step: int, out_U8: Tensor) -> str | None:
        """Fill memory with the mirror of another rank's segment; wait if the mirror is still to be captured.

        All ranks begin the same generations in the same order. So a rank asked early will reach the generation, give it
        up, or go on to a later one.

        Returns the reason why there is no mirror; `None` if the memory is filled.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_decided(generation, step))
            segment = self._segments.get(generation, {}).get(step)
            view = None if segment is None else segment.mirrors.get(owner)
            if segment is None or view is None or view.nbytes != out_U8.numel():
                found = "none" if view is None else f"one of {view.nbytes} bytes"
                return f"of the {out_U8.numel()} bytes that it should hold of boundary {step} of {generation} there is {found}."
            self._readers[generation] += 1
        try:
            segment.files[0].wait()
            out_U8.copy_(torch.frombuffer(view, dtype=torch.uint8))
        except CheckpointError as error:
            return str(error)
        finally:
            with self._changed:
                self._readers[generation] -= 1
                self._changed.notify_all()
        return None

    def _is_decided(self, generation: GenerationId, step: int) -> bool:
        """Return whether a mirror is here, or will never be; the caller holds the lock."""
        if self._closed:
            return True
        if (under_way := self._segments.get(generation)) is not None:
            return step in under_way
        return self._newest is not None and generation <= self._newest


class MirrorUse:
    """Count what holders of this rank's copies take from their own state, until that is refused too often.

    The sending thread changes it; the training thread reads.
    """

    def __init__(self) -> None:
        self.figures = RedundancyFigures()
        self._nbytes = self._strikes = 0
        """Bytes not sent of the generation under way, and generations refused in a row."""

    def run(self, segment: SealedSegment) -> Run | None:
        """Return a segment's run for holders to fill themselves; `None` if all is sent."""
        return segment.mirrored if self._strikes < _STRIKES else None

    def begin(self) -> None:
        """Begin the next generation."""
        self._nbytes = 0

    def filled(self, run: Run | None) -> None:
        """Note a run that all holders have filled, and this rank does not send."""
        self._nbytes += nbytes_of(run)

    def whole(self, nbytes: int) -> int:
        """Count the generation under way, of which `nbytes` were sent per holder; return the bytes not sent."""
        mirrored, figures = self._nbytes, self.figures
        self._strikes = 0 if mirrored else self._strikes
        self.figures = RedundancyFigures(
            nbytes_sent=figures.nbytes_sent + nbytes, nbytes_mirrored=figures.nbytes_mirrored + mirrored
        )
        return mirrored

    def refused(self, holders: Sequence[int], reason: str) -> None:
        """Count a refused copy with bytes from the holder's own state; at `_STRIKES` in a row warn, and send all."""
        if not self._nbytes:
            return
        self._strikes += 1
        if self._strikes == _STRIKES:
            log.warning(
                "state that ranks %s should have in common with this one differs there, or is captured at another moment: "
                "everything is sent from here on. Training that keeps replicas apart cannot be resumed exactly. %s",
                *(holders, reason),
            )


def nbytes_of(run: Run | None) -> int:
    """Return a run's bytes; 0 for `None`."""
    return 0 if run is None else run[1] - run[0]
