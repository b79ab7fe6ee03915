"""What one process has of the peer tier: the stream of its own segments, and who receives those of other ranks."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import torch.distributed as dist

from lightning_moe_ckpt.storage import GenerationId, SlotClass
from lightning_moe_ckpt.tiers._contract import DEFAULT_MAX_CHUNK
from lightning_moe_ckpt.tiers._mirrors import MirrorStore
from lightning_moe_ckpt.tiers._peer_receiver import ReplicaReceiver, ReplicaStore
from lightning_moe_ckpt.tiers._peer_stream import Pacer, ReplicaStream
from lightning_moe_ckpt.tiers._peer_wire import cut
from lightning_moe_ckpt.tiers._rank_memory import RankMemory

log = logging.getLogger(__name__)


class Replication:
    """Own the sending stream of this rank and the receivers of other ranks' segments.

    Args:
        group: gloo group of all ranks that is used for nothing else; see `Wire`.
        run_id: name of the run.
        tag: tag of its memory at its place.
        url: URL of the run; memory of replaced runs is found by it.
        holders: ranks that keep replicas of this rank's segments; may be empty.
        owners: ranks whose replicas this rank keeps; may be empty.
        max_chunk: bytes of one message, the same on all ranks.
        resumed: see `ReplicaStore`, as for `keep`, `chained` and `offered`.
        ahead: whether a generation is sent before all ranks know of the previous one, so that it may be delta-encoded.
        directory: directory of the replicas; default `shared_directory()`.
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
        self,
        slot_nbytes: Sequence[int],
        num_segments: int,
        *,
        keep: int | None = None,
        links: Sequence[SlotClass] | None = None,
    ) -> None:
        """Reserve memory for every replica that this rank will keep.

        Args:
            slot_nbytes: bytes of the largest segment of each rank, by rank.
            num_segments: segments of a generation, on all ranks.
            keep: generations that holders keep, the same on all ranks; `None` leaves the number.
            links: differences that are kept besides, of each rank.

        Raises:
            ConfigurationError: not enough room; the message says how many bytes are missing.
        """
        nbytes = sum(
            store.allocate(slot_nbytes[owner], num_segments, keep=keep, links=links[owner] if links else None)
            for owner, store in self.stores.items()
        )
        log.info("%.1f MiB are reserved for copies of the segments of ranks %s", nbytes / 2**20, sorted(self.stores))

    def start(self) -> None:
        """Begin to receive. Call it on every rank after all have allocated."""
        self.started = True
        for receiver in self.receivers:
            receiver.start()

    def end(self, timeout: float) -> None:
        """End the receivers, `timeout` s after the owners' last messages were due. Ours was sent, or will never be."""
        deadline = time.monotonic() + timeout
        for receiver in self.receivers if self.started else []:
            if not receiver.join(max(0.0, deadline - time.monotonic())):
                log.info("rank %d did not say goodbye; its connections are closed from here", receiver.owner)
                cut(self._group, receiver.owner)
                receiver.join(1.0)

    def close(self, timeout: float, *, unlink: bool) -> None:
        """End the receivers, then release the memory; with `unlink` no later process finds it. Closing twice is allowed."""
        self.end(timeout)
        for memory in self.memories:
            memory.close(unlink=unlink)
