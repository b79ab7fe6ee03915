"""Ranks as threads of one process, for recovery over real files: shared memory in two directories, storage in a third."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, TypeVar, cast

import torch
from door import Reader, marker_paths, memory_files, memory_of
from stored._segments import LAYOUT, entry_of, segment_bytes

from lightning_moe_ckpt.recovery import Transport, Version
from lightning_moe_ckpt.recovery._attempt import RestoreAttempt, Restored
from lightning_moe_ckpt.recovery._transfer import RankBytes, agreed_inventory
from lightning_moe_ckpt.storage import (
    Commit,
    GenerationId,
    PosixBackend,
    RankMarker,
    RunStore,
    SegmentEntry,
    segment_key,
)
from lightning_moe_ckpt.tiers import Holding, HostTier, ObjectTier, SegmentRing, shared_name

T = TypeVar("T")

_PATIENCE_SECONDS = 30.0


class Wire:
    """What the threads share."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.barrier = threading.Barrier(world_size, timeout=_PATIENCE_SECONDS)
        self.values: list[object] = [None] * world_size
        self.queues: dict[tuple[int, int], SimpleQueue[bytes]] = defaultdict(SimpleQueue)
        self.nbytes: dict[tuple[int, int], int] = defaultdict(int)
        """Sent, by pair of ranks."""


class ThreadTransport:
    """A rank that is a thread."""

    def __init__(self, wire: Wire, rank: int) -> None:
        self._wire, self.rank, self.world_size = wire, rank, wire.world_size

    def gather_values(self, value: object) -> list[object]:
        self._wire.values[self.rank] = value
        self._wire.barrier.wait()
        values = list(self._wire.values)
        self._wire.barrier.wait()
        return values

    def gather_distinct(self, value: object) -> list[Any]:
        return self.gather_values(value)

    def sum(self, own: torch.Tensor) -> torch.Tensor:
        return torch.stack(cast("list[torch.Tensor]", self.gather_values(own))).sum(0)

    def route(self, messages: Sequence[tuple[int, object]]) -> list[tuple[int, Any]]:
        rows = cast("list[list[tuple[int, Any]]]", self.gather_values(list(messages)))
        return [(sender, value) for sender, row in enumerate(rows) for to, value in row if to == self.rank]

    def transfer(self, sends: Sequence[RankBytes], receives: Sequence[RankBytes]) -> Callable[[], None]:
        for to, view in sends:
            self._wire.queues[self.rank, to].put(bytes(view))
            self._wire.nbytes[self.rank, to] += view.nbytes

        def wait() -> None:
            for source, view in receives:
                view[:] = self._wire.queues[source, self.rank].get(timeout=_PATIENCE_SECONDS)

        return wait


class Node(HostTier):
    """The host tier of one node; counts reads, and knows where bytes lie.

    Ranks that are threads share it. Listing lets go of what others may be reading, so it is done once per restart.
    """

    def __init__(self, run_id: str, directory: Path) -> None:
        super().__init__(run_id, directory)
        self.run_id, self.directory = run_id, directory
        self.reads: list[str] = []
        self._listing = threading.Lock()
        self._listed: list[Holding] | None = None

    def holdings(self) -> list[Holding]:
        with self._listing:
            if self._listed is None:
                self._listed = super().holdings()
            return self._listed

    def close(self) -> None:
        super().close()
        self._listed = None

    def keep(self, marker: RankMarker, segments: Sequence[bytes], kind: Literal["ring", "replica"]) -> None:
        """What a process on this node captured, or received, published and left behind."""
        ring = SegmentRing.create(
            shared_name(self.run_id, marker.rank, kind), max(map(len, segments)), len(segments), self.directory
        )
        ring.begin_window(marker.generation)
        for entry, data in zip(marker.segments, segments, strict=True):
            slot = ring.acquire(marker.generation, entry.step)
            slot.view[: len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            ring.seal(slot)
        ring.finish_window(marker.generation)
        ring.publish(marker.generation, marker)
        ring.close(unlink=False)

    def read_into(self, holding: Holding, entry: SegmentEntry, offset: int, out: memoryview) -> None:
        self.reads.append(entry.key)
        super().read_into(holding, entry, offset, out)

    def file_of(self, rank: int) -> Path:
        """The one ring or replica of a rank."""
        (path,) = (path for path, name in memory_files(self.directory) if name.owner == rank)
        return path

    def lose(self, rank: int) -> None:
        """Everything of a rank, as if it had never come."""
        path = self.file_of(rank)
        for each in (*marker_paths(path), path):
            each.unlink()


def rank_part(
    run_id: str, generation: GenerationId, rank: int, world_size: int, *, window: int = 2, plan_hash: str = "plan"
) -> tuple[RankMarker, list[bytes]]:
    """One rank's segments and the marker over them; bytes depend on all that names them."""
    entries, segments = [], []
    for step in range(generation.step - window + 1, generation.step + 1):
        data = segment_bytes(hash((generation.step, generation.incarnation, rank, step)) % 2**31)
        segments.append(data)
        entries.append(entry_of(segment_key(generation, rank, step), step, data))
    marker = RankMarker(
        run_id=run_id, rank=rank, world_size=world_size, generation=generation, plan_hash=plan_hash,
        segments=tuple(entries), policy={"window": window},
    )  # fmt: skip
    return marker, segments


Found = tuple[Version, Restored]


class World:
    """Ranks over nodes, each node a directory, and a run in storage.

    Args:
        storage: where the run goes.
        nodes: the directory of each rank's node, by rank.
    """

    def __init__(self, storage: Path, nodes: Sequence[Path]) -> None:
        self.nodes = list(nodes)
        self.world_size = len(nodes)
        self.backend = PosixBackend(storage)
        self.store = RunStore.open(self.backend, resume="auto")
        self.store.candidates()
        self.store.open_incarnation(None)
        self.wire = Wire(self.world_size)
        self.reasons: list[list[str]] = []
        self.tiers = {node: Node(self.store.run_id, node) for node in self.nodes}

    def part(self, step: int, rank: int, *, window: int = 2) -> tuple[RankMarker, list[bytes]]:
        generation = self.store.name(step)
        return rank_part(self.store.run_id, generation, rank, self.world_size, window=window)

    def keep(self, step: int, rank: int, node: Path, *, window: int = 2) -> None:
        self.tiers[node].keep(*self.part(step, rank, window=window), "ring" if node == self.nodes[rank] else "replica")

    def keep_other_bytes(self, tier: Node, marker: RankMarker, segments: Sequence[bytes]) -> None:
        """A copy that is whole and agrees with itself, but not with what others have under its name."""
        entries = [entry_of(entry.key, entry.step, data) for entry, data in zip(marker.segments, segments, strict=True)]
        tier.keep(replace(marker, segments=tuple(entries)), segments, "ring")

    def commit(self, step: int) -> None:
        markers = []
        for rank in range(self.world_size):
            marker, segments = self.part(step, rank)
            for entry, data in zip(marker.segments, segments, strict=True):
                self.store.put_segment(marker.generation, rank, entry.step, memoryview(data))
            self.store.put_marker(marker)
            markers.append(marker)
        self.store.commit(markers[0], timeout=timedelta())

    def file_in_storage(self, entry: SegmentEntry) -> Path:
        return Path(self.backend.url.removeprefix("file://")) / entry.key

    def restore(self, message_nbytes: int = 5000) -> list[Found | None]:
        """What a restart gives every rank: the newest version that turns out good, with nothing in between restarted."""
        run_id, commits = self.offered()
        self.reasons = [[] for _ in self.nodes]

        def live(rank: int) -> Found | None:
            found, self.reasons[rank] = self.life(ThreadTransport(self.wire, rank), run_id, commits, message_nbytes)
            return found

        found = in_threads(self.world_size, live)
        for tier in self.tiers.values():
            tier.close()
        return found

    def offered(self) -> tuple[str, list[Commit]]:
        """What the coordinator of a restart finds in storage."""
        store = RunStore.open(self.backend, resume="must")
        return store.run_id, store.candidates()

    def life(
        self, transport: Transport, run_id: str, commits: Sequence[Commit], message_nbytes: int = 5000
    ) -> tuple[Found | None, list[str]]:
        """What one rank of a restart gets, and why newer versions were given up."""
        node, reasons = self.nodes[transport.rank], []
        reader = Reader(run_id, self.tiers[node], ObjectTier(RunStore.join(self.backend, run_id=run_id), commits))
        committed = [Version(c.generation, c.plan_hash) for c in commits]
        inventory = agreed_inventory(transport, reader.stock(memory_of(node)), committed)
        digests = {Version(c.generation, c.plan_hash): c.markers[transport.rank] for c in commits}
        for version in inventory.usable(inventory.all_versions):
            attempt = RestoreAttempt(
                *(transport, reader, inventory, version, inventory.all_versions),
                digests=digests,
                message_nbytes=message_nbytes,
            )
            marker = attempt.marker()
            # What is cut among ranks and could be taken from another generation is not asked for: the generation is exact.
            part = attempt.bring(marker, {"blocks.0": 1}, lambda _: [LAYOUT] * len(marker.steps)) if marker else None  # noqa: B023
            reasons += attempt.reasons
            if part is not None:
                return (version, part), reasons
        return None, reasons


def in_threads(world_size: int, life: Callable[[int], T]) -> list[T]:
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(life, range(world_size), timeout=2 * _PATIENCE_SECONDS))


def sources(part: Restored) -> set[str]:
    """Kinds of copies that supplied bytes."""
    return {copy.source for copy in part.nbytes}


def require(world: World, step: int, expected: Sequence[set[str]], **options: int) -> None:
    """All ranks get exactly the bytes of that step, from these kinds of copies."""
    for rank, found in enumerate(world.restore(**options)):
        assert found is not None, world.reasons
        require_part(world, step, rank, found)
        assert sources(found[1]) == expected[rank]


def require_part(world: World, step: int, rank: int, found: Found) -> None:
    """Exactly the bytes that the rank had at that step."""
    version, part = found
    marker, segments = world.part(step, rank)
    assert (version.generation, part.marker) == (marker.generation, marker)
    assert len(part.segments) == len(part.layouts) == len(segments)
    for segment, layout, data in zip(part.segments, part.layouts, segments, strict=True):
        written = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        assert all(layout.view(segment, name).equal(LAYOUT.view(written, name)) for name in LAYOUT.spans)
