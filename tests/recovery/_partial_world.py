"""Partial generations by hand: each has all of the dense part and some experts, more of them in memory than in storage.

Every record says in its bytes which generation, rank and record it is of, so a test can tell where bytes are from.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
from door import Reader, memory_of

from lightning_moe_ckpt.recovery import Transport, Version
from lightning_moe_ckpt.recovery._attempt import RestoreAttempt, Restored, RestorePlan
from lightning_moe_ckpt.recovery._transfer import agreed_inventory
from lightning_moe_ckpt.storage import (
    Commit,
    GenerationId,
    RankMarker,
    RecordEntry,
    RunStore,
    SegmentEntry,
    SegmentLayout,
    TensorSpec,
    carry_forward,
    carry_spares,
    digest_of,
    segment_key,
)
from lightning_moe_ckpt.tiers import ObjectTier, SegmentRing, shared_name
from recovery._world import ThreadTransport, World, in_threads

Level = Literal["memory", "storage", "dense"]
EXPERTS = ("e0", "e1", "e2", "e3")
NUMEL = 600
"""Elements of each expert, over all ranks."""
BASE = {"dense": 90, "journal": 50}
"""Elements of what every generation has of every rank."""


@dataclass(frozen=True)
class Taken:
    """What a generation takes; everything in storage only, if it is dense."""

    memory: frozenset[str] = frozenset()
    storage: frozenset[str] = frozenset()
    dense: bool = False

    def experts(self, level: Level) -> Sequence[str]:
        if level == "dense":
            return EXPERTS
        return sorted(self.memory if level == "memory" else self.storage)

    @property
    def plan(self) -> str:
        """The same in memory and in storage."""
        experts = {"memory": sorted(self.memory), "storage": sorted(self.storage)}
        return json.dumps({"plan": {"partial": not self.dense, **experts}})


# Memory takes two experts, storage one of them, in turn; the run began with everything.
TAKEN = {
    0: Taken(dense=True),
    1: Taken(frozenset({"e0", "e1"}), frozenset({"e0"})),
    2: Taken(frozenset({"e2", "e3"}), frozenset({"e2"})),
    3: Taken(frozenset({"e0", "e1"}), frozenset({"e1"})),
    4: Taken(frozenset({"e2", "e3"}), frozenset({"e3"})),
}


def tile(expert: str, rank: int, world_size: int, *, dense: bool) -> tuple[int, int]:
    """Start and length of a rank's piece; dense generations cut experts unlike partial ones."""
    cuts = [NUMEL * r // world_size for r in range(world_size + 1)]
    if dense:
        cuts = [0, *(cut - 100 * (0 < cut < NUMEL) for cut in cuts[1:])]
    return cuts[rank], cuts[rank + 1] - cuts[rank]


def record_name(expert: str, start: int, numel: int) -> str:
    return f"full/{expert}.w/{start}+{numel}/param"


def content(step: int, rank: int, name: str, numel: int) -> torch.Tensor:
    """Equal in memory and in storage."""
    return torch.full((numel,), float(hash((step, rank, name)) % 2**20))


def specs(names: Mapping[str, int]) -> list[TensorSpec]:
    return [TensorSpec(name, torch.float32, (numel,)) for name, numel in names.items()]


def _records(experts: Sequence[str], rank: int, world_size: int, *, dense: bool) -> dict[str, int]:
    tiles = [(expert, *tile(expert, rank, world_size, dense=dense)) for expert in experts]
    return {**BASE, **{record_name(expert, start, numel): numel for expert, start, numel in tiles}}


def _entry(name: str, layout: SegmentLayout, data: bytes) -> RecordEntry:
    span = layout.spans[name]
    kind, _, rest = name.partition("/")
    fqn, start = (rest.split("/")[0], int(rest.split("/")[1].split("+")[0])) if rest else (name, 0)
    return RecordEntry(
        name=name, operator=fqn.removesuffix(".w") if rest else "", kind=kind, fqn=fqn, state_key="param", dtype="F32",
        global_shape=(NUMEL,), global_start=start, numel=span.nbytes // 4, offset=span.offset, nbytes=span.nbytes,
        digest=digest_of(data[span.offset : span.offset + span.nbytes]),
    )  # fmt: skip


Found = tuple[GenerationId, Restored]


class PartialWorld(World):
    """A world whose generations are partial.

    Args:
        storage: where the run goes.
        nodes: the directory of each rank's node, by rank.
        taken: what the generation of each step takes.
        uses_references: whether what storage has of one names the files that hold the experts that it lacks.
    """

    def __init__(
        self, storage: Path, nodes: Sequence[Path], taken: Mapping[int, Taken], *, uses_references: bool
    ) -> None:
        super().__init__(storage, nodes)
        self.taken, self._uses_references = dict(taken), uses_references
        self.spares = self.allow_missing = False
        """Whether generations name older copies, and whether experts may be lost."""
        self._committed: list[dict[int, RankMarker]] = []

    def partial_part(self, step: int, rank: int, level: Level) -> tuple[RankMarker, bytes]:
        """One rank's part of a generation, as a level has it: what storage has, and behind it a file of other experts."""
        taken = self.taken[step]
        durable: Level = "dense" if level == "dense" else "storage"
        names = _records(taken.experts(durable), rank, self.world_size, dense=level == "dense")
        files = [self._file(step, rank, names, "durable")]
        if others := sorted(set(taken.experts(level)).difference(taken.experts(durable))):
            more = _records(others, rank, self.world_size, dense=False)
            files.append(self._file(step, rank, {n: numel for n, numel in more.items() if n not in BASE}, "node"))
        marker = RankMarker(
            run_id=self.store.run_id, rank=rank, world_size=self.world_size, generation=self.store.name(step),
            plan_hash=digest_of(taken.plan.encode()), segments=tuple(entry for entry, _ in files),
            policy={"plan": taken.plan},
        )  # fmt: skip
        return marker, b"".join(data for _, data in files)

    def _file(self, step: int, rank: int, names: Mapping[str, int], audience: str) -> tuple[SegmentEntry, bytes]:
        layout = SegmentLayout(specs(names), metadata={"audience": audience})
        buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
        layout.write_header(buffer)
        for name, numel in names.items():
            layout.view(buffer, name).copy_(content(step, rank, name, numel))
        data = buffer.numpy().tobytes()
        entry = SegmentEntry(
            step=step,
            key=segment_key(self.store.name(step), rank, step, audience),
            nbytes=len(data),
            digest=digest_of(data),
            records=tuple(_entry(name, layout, data) for name in names),
        )
        return entry, data

    def remember(self, steps: Sequence[int], rank: int, node: Path, *, level: Level = "memory") -> None:
        """Memory of `node` has these generations of a rank; as storage would have them, in a replica."""
        parts = [self.partial_part(step, rank, level) for step in steps]
        is_own = node == self.nodes[rank] and level == "memory"
        name = shared_name(self.store.run_id, rank, "ring" if is_own else "replica")
        ring = SegmentRing.create(name, max(len(data) for _, data in parts), len(parts), node)
        for marker, data in parts:
            ring.begin_window(marker.generation)
            slot = ring.acquire(marker.generation, marker.segments[0].step)
            slot.view[: len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            ring.seal(slot)
            ring.finish_window(marker.generation)
            ring.publish(marker.generation, marker)
        ring.close(unlink=False)

    def commit(self, step: int) -> None:
        """Storage has this generation."""
        level: Level = "dense" if self.taken[step].dense else "storage"
        markers = {}
        for rank in range(self.world_size):
            marker, data = self.partial_part(step, rank, level)
            if level == "storage" and self._uses_references and self._committed:
                lacking = set(EXPERTS).difference(self.taken[step].storage)
                previous, stored = self._committed[-1][rank], self.taken[step].storage
                marker = replace(
                    marker,
                    referenced=carry_forward(previous, lacking),
                    spares=carry_spares(previous, lacking, stored) if self.spares else (),
                )
            self.store.put_segment(marker.generation, rank, step, memoryview(data))
            self.store.put_marker(marker)
            markers[rank] = marker
        self._committed.append(markers)
        self.store.commit(markers[0], timeout=timedelta())

    def stored(self, step: int, rank: int) -> Path:
        """The file in storage."""
        level: Level = "dense" if self.taken[step].dense else "storage"
        return self.file_in_storage(self.partial_part(step, rank, level)[0].segments[0])

    def marker_in_storage(self, step: int, rank: int) -> Path:
        """The marker of a rank in storage."""
        return self.stored(step, rank).with_name(f"rank{rank:05}.done")

    def forget(self, step: int) -> None:
        """Storage loses the manifest of a generation."""
        self.stored(step, 0).with_name("_COMMITTED").unlink()

    def span(self, step: int, rank: int, level: Level, what: str) -> int:
        """Where a record lies in what a level has: `dense`, `journal`, or an expert's name."""
        marker, _ = self.partial_part(step, rank, level)
        places = [
            (marker.slot_offset(entry) + record.offset, record) for entry in marker.segments for record in entry.records
        ]
        return next(offset for offset, each in places if what in (each.name, each.operator))

    def restore_partial(self, dead: Collection[int] = ()) -> list[Found | None]:
        """What a restart gives every rank; the log forbids the steps in `dead`."""
        run_id, commits = self.offered()
        self.reasons = [[] for _ in self.nodes]

        def live(rank: int) -> Found | None:
            found, self.reasons[rank] = self.partial_life(ThreadTransport(self.wire, rank), run_id, commits, dead)
            return found

        found = in_threads(self.world_size, live)
        for tier in self.tiers.values():
            tier.close()
        return found

    def journal(self, step: int, rank: int) -> bytes:
        """What storage has of a rank's journal."""
        return content(step, rank, "journal", BASE["journal"]).numpy().tobytes()

    def told(self, newest: int, steps: Sequence[int]) -> list[dict[GenerationId, bytes]]:
        """What every rank of a restart from `newest` is told of the journals of other generations."""
        run_id, commits = self.offered()
        generations = [self.store.name(step) for step in steps]

        def ask(rank: int) -> dict[GenerationId, bytes]:
            transport = ThreadTransport(self.wire, rank)
            for attempt in self._attempts(transport, run_id, commits, ()):
                assert attempt.version.generation.step == newest
                assert _attempt(attempt, rank) is not None
                return attempt.read_common(generations, "journal", bytes)
            raise AssertionError("there is nothing to restore")

        told = in_threads(self.world_size, ask)
        for tier in self.tiers.values():
            tier.close()
        return told

    def sources(self) -> list[Commit]:
        """Commits that are only there for others."""
        store = RunStore.open(self.backend, resume="must")
        store.candidates()
        return store.sources

    def partial_life(
        self, transport: Transport, run_id: str, commits: Sequence[Commit], dead: Collection[int] = ()
    ) -> tuple[Found | None, list[str]]:
        """What one rank of a restart gets, and why newer generations were given up."""
        reasons: list[str] = []
        for attempt in self._attempts(transport, run_id, commits, dead):
            part = _attempt(attempt, transport.rank)
            reasons += attempt.reasons
            if part is not None:
                return (attempt.version.generation, part), reasons
        return None, reasons

    def _attempts(
        self, transport: Transport, run_id: str, commits: Sequence[Commit], dead: Collection[int]
    ) -> Iterator[RestoreAttempt]:
        node = self.nodes[transport.rank]
        joined = RunStore.join(self.backend, run_id=run_id)
        reader = Reader(run_id, self.tiers[node], ObjectTier(joined, [*commits, *self.sources()]))
        sources = self.sources()
        by_version = {Version(c.generation, c.plan_hash): c for c in (*commits, *sources)}
        offered = [version for version, c in by_version.items() if c not in sources]
        stock = reader.stock(memory_of(node))
        inventory = agreed_inventory(transport, stock, offered, set(by_version).difference(offered))
        alive = [each for each in inventory.all_versions if each.generation.step not in dead]
        digests = {version: commit.markers[transport.rank] for version, commit in by_version.items()}
        for version in inventory.usable(alive):
            yield RestoreAttempt(
                transport,
                reader,
                inventory,
                version,
                alive,
                digests=digests,
                allow_missing=self.allow_missing,
                message_nbytes=300,
            )


def _attempt(attempt: RestoreAttempt, rank: int) -> Restored | None:
    marker = attempt.marker()

    def lay_out(chosen: RestorePlan) -> list[SegmentLayout]:
        assert marker is not None
        if not chosen.is_partial:
            names = {record.name: record.numel for record in marker.segments[0].records}
            return [SegmentLayout(specs(names), metadata={})]
        tiles = [(expert, t) for expert, row in chosen.shards.items() for t in row if t.writer == rank]
        names = {record_name(expert, t.global_start, t.numel): t.numel for expert, t in tiles}
        return [SegmentLayout(specs({**BASE, **names}), metadata={})]

    return None if marker is None else attempt.bring(marker, dict.fromkeys(EXPERTS, NUMEL), lay_out)


def experts_found(world: PartialWorld, found: Sequence[Found | None]) -> tuple[int, dict[str, int]]:
    """The step, and from which step every expert came; every byte on every rank is checked to be of these."""
    assert all(each is not None for each in found), world.reasons
    first = next(each for each in found if each is not None)
    step = first[0].step
    if not first[1].chosen.is_partial:
        _require_all(world, step, found)
        return step, dict.fromkeys(EXPERTS, step)
    sources = {expert: generation.step for expert, generation in first[1].chosen.generations.items()}
    assert sources.keys() | first[1].chosen.missing.keys() == set(EXPERTS)
    state = {expert: torch.full((NUMEL,), torch.nan) for expert in sources}
    for rank, each in enumerate(found):
        assert each is not None
        generation, part = each
        assert (generation, part.chosen) == (first[0], first[1].chosen)
        for name, numel in BASE.items():
            assert torch.equal(part.layouts[0].view(part.segments[0], name), content(step, rank, name, numel))
        for expert, tiles in part.chosen.shards.items():
            for t in (t for t in tiles if t.writer == rank):
                name = record_name(expert, t.global_start, t.numel)
                values = part.layouts[0].view(part.segments[0], name)
                assert torch.equal(values, content(sources[expert], rank, name, t.numel))
                state[expert][t.global_start : t.global_start + t.numel] = values
    assert not any(values.isnan().any() for values in state.values()), "pieces do not add up to the expert"
    return step, sources


def _require_all(world: PartialWorld, step: int, found: Sequence[Found | None]) -> None:
    """Every record of a generation that has everything itself."""
    for rank, each in enumerate(found):
        assert each is not None
        layout, segment = each[1].layouts[0], each[1].segments[0]
        names = _records(EXPERTS, rank, world.world_size, dense=True)
        assert layout.spans.keys() == names.keys()
        for name, numel in names.items():
            assert torch.equal(layout.view(segment, name), content(step, rank, name, numel))
