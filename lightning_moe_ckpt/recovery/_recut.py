"""Bring a generation that other ranks wrote, or ranks in another layout, cut for this job's ranks.

See "On other ranks" in ARCHITECTURE.md for the steps. What belongs to a rank rather than to the model is retold: each rank
makes its journal from those of all writers.

Source: ByteCheckpoint (2024), Sec. 3, for resharding by reading each record once. We differ in verifying records whole, and
in reading from memory of any node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.errors import Corrupt, IdentityMismatch, StorageError
from lightning_moe_ckpt.journal import Journal, encode, encode_journal
from lightning_moe_ckpt.native import host_buffer
from lightning_moe_ckpt.parallel import ParallelGroups
from lightning_moe_ckpt.recovery._assembly import Assembly, Place, Wanted
from lightning_moe_ckpt.recovery._attempt import COMMITS, RestorePlan
from lightning_moe_ckpt.recovery._brought import (
    BroughtRecords,
    WrittenRecord,
    buffer_owners,
    by_imported_names,
    decoded,
    differing_buffers,
    filtered,
    fit_imported,
)
from lightning_moe_ckpt.recovery._cut import (
    BUFFER,
    HeldRecord,
    ShardScalars,
    by_tensor,
    deliver,
    expect_all,
    fill_scalars,
    is_scalar,
    moves,
)
from lightning_moe_ckpt.recovery._fold import ChainRestore, base_step
from lightning_moe_ckpt.recovery._index import LinkSource, RecordIndex, Replicas, add_links, newest_whole
from lightning_moe_ckpt.recovery._inventory import Inventory, Reader, Replica, Version, stored
from lightning_moe_ckpt.recovery._loading import (
    RestoreSource,
    ResumeRequest,
    journal_capacity,
    note_recovery,
    read_journals,
    understood,
)
from lightning_moe_ckpt.recovery._outcomes import own_outcome
from lightning_moe_ckpt.recovery._transfer import MESSAGE_NBYTES, MarkerSearch, Rounds, Transfer, Which
from lightning_moe_ckpt.snapshot import (
    IMPORTED,
    JOURNAL,
    SEGMENT_METADATA,
    PlanRecord,
    StateView,
    Topology,
    WindowLayout,
    dense_layout,
    lay_out,
)
from lightning_moe_ckpt.storage import (
    CONSTANTS,
    KindColumns,
    NameColumns,
    RankMarker,
    RecordRows,
    RunStore,
    SegmentEntry,
    SegmentLayout,
    dtype_of,
    lacking_memory,
)
from lightning_moe_ckpt.tiers import is_differential, is_partial

log = rank_logger(__name__)

T = TypeVar("T")
_NAMED = 6
_Pick = Callable[[Version, int], list[Replica]]
"""Function from a version and a writer to copies of the writer's part, as this rank reaches them."""
_OF_NONE = -1
"""Writer of constants: these have files apart."""


class Recut:
    """An attempt to bring a version for other ranks, from versions `alive` by the run's log; every method is collective.

    A writer's marker digests in manifests, by version in storage, come from `digests`.
    """

    def __init__(
        self,
        exchange: Exchange,
        reader: Reader,
        inventory: Inventory,
        version: Version,
        alive: Collection[Version],
        *,
        digests: Callable[[int], Mapping[Version, str]],
    ) -> None:
        self._exchange, self._reader, self._inventory, self.version = exchange, reader, inventory, version
        self._digests, self._rounds = digests, Rounds(exchange)
        self._transfer = Transfer(self._rounds, reader, str(version), MESSAGE_NBYTES)
        self._num_writers = inventory.writers(version)
        ours = [each for each in alive if each <= version and inventory.writers(each) == self._num_writers]
        self._reachable = sorted(ours, reverse=True)
        self._noted: list[str] = []
        self.nbytes: Mapping[Replica, int] = {}
        """Bytes that this rank has read, by copy."""

    @property
    def reasons(self) -> list[str]:
        """Reasons why the version was given up, or ends earlier; the same on all ranks."""
        return [*self._noted, *self._rounds.reasons]

    def markers(self) -> list[RankMarker] | None:
        """Return the markers of all writers; `None`, on all ranks, if one of them is nowhere."""
        found = self._read_markers(self.version, self._whole)
        if lost := [f"rank {owner}" for owner, marker in enumerate(found) if marker is None]:
            self._noted.append(f"no good copy is left of what {', '.join(lost[:_NAMED])} wrote")
            return None
        return [marker for marker in found if marker is not None]

    def bring(self, markers: Sequence[RankMarker], job: ResumeRequest, store: RunStore) -> RestoreSource | None:
        """Return the generation with the markers of all writers as if this job's ranks had taken it; `None`, on all
        ranks, if some record has no good copy. Raises `IdentityMismatch` if the records lack something that the model
        has. Constants are in the run's store.
        """
        policy, view, generation = markers[0].policy, job.view, self.version.generation
        with understood(f"{generation}: its plan"):
            record = PlanRecord.from_json(str(policy["plan"]))
        kept = _kept_constants(record, view, job.groups, self._exchange)
        view.operators = view.operators.without(kept, record.thawed if _is_sparse(record) else ())
        chained = is_differential(policy)
        brought = self._bring_chains(markers) if chained else self._bring_records(markers, view, record.constants)
        if brought is None:
            return None
        chosen, reached = brought.chosen, brought.reached
        files = self._together(lambda: store.read_constants(policy) if record.constants and not kept else ())
        if files is None or not self._bring_constants(files, brought):
            return None
        was = Topology.of_stored(markers[0])
        if (told := self._retold(brought, was, job)) is None:
            return None
        if chosen:
            sources = RestorePlan(generations={n: v.generation for n, v in chosen.items()})
            note_recovery(generation, sources, {}, told[0]["outcome"], view.operators)
        job.journals.as_user(told[0]["start"])  # first: the optimizer's groups decide which records there are
        room = max(journal_capacity(markers[0]), *(2 * len(encode(each)) for each in told))
        layout = self._lay_out(record, kept, job, brought, room)
        if layout is None or not self._has_room(sum(step.durable.segment.nbytes for step in layout.steps)):
            return None
        segments = self._cut(brought, layout, imported=IMPORTED in policy)
        for journal, segment, step in zip(told, segments, layout.steps, strict=True):
            written = step.durable.segment.view(segment, JOURNAL)
            payload = encode_journal(journal, written.numel())
            written[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        self.nbytes = dict(brought.supplied)
        by_tier = Counter[str]()
        for copy, nbytes in brought.supplied.items():
            by_tier[copy.source] += nbytes
        without = {} if kept else {CONSTANTS}
        return RestoreSource(
            generation=replace(generation, step=reached),
            policy={**{k: v for k, v in policy.items() if k not in without}, "plan": layout.record.to_json()},
            steps=sorted(set(markers[0].steps)) if len(layout.steps) > 1 else [reached],
            segments=segments,
            layouts=[step.durable.segment for step in layout.steps],
            restored_from=dict(by_tier),
            committed=self.version in self._inventory.committed and reached == generation.step,
            chosen=RestorePlan(),
            tokens={},
            journals=read_journals([step.durable.segment for step in layout.steps], segments),
            recut=True,
        )

    # -- markers

    def _read_markers(self, version: Version, pick: _Pick) -> list[RankMarker | None]:
        """Return one version's markers by writer, `None` where there is no good copy; the same on all ranks."""
        which: Which = (version, None)
        found: list[RankMarker | None] = []
        for first in range(0, self._num_writers, self._exchange.world_size):
            owner = first + self._exchange.rank
            copies = {which: pick(version, owner)} if owner < self._num_writers else {}
            # with reasons of its own: a marker that is nowhere is no reason yet
            own = MarkerSearch(Rounds(self._exchange), self._reader, copies, self._digests(owner)).run(None) or {}
            said = self._exchange.gather_values(own[which].to_bytes() if which in own else b"")
            parsed = [RankMarker.from_bytes(cast("bytes", e), f"marker of {version}") if e else None for e in said]
            found += parsed[: self._num_writers - first]
        return found

    def _whole(self, version: Version, owner: int) -> list[Replica]:
        return [each for each in self._inventory.copies(version, owner, self._exchange.rank) if each.whole]

    def _in_storage(self, version: Version, owner: int) -> list[Replica]:
        return [stored(version, owner, self._exchange.rank)]

    def _in_memory(self, versions: Iterable[Version]) -> Iterator[tuple[Version, _Pick]]:
        """Yield versions, each with one copy in memory of each writer's part at a time: copies may have different files.

        All ranks take the same copies, wherever these are.
        """
        for version in versions:
            files = [self._inventory.files(version, owner) for owner in range(self._num_writers)]
            for number in range(max(map(len, files))):

                def pick(
                    version: Version, owner: int, number: int = number, files: list[list[tuple[str, str]]] = files
                ) -> list[Replica]:
                    copies = self._inventory.copies(version, owner, self._exchange.rank)
                    return [each for each in copies if (each.memory, each.file) in files[owner][number : number + 1]]

                yield version, pick

    def _together(self, look: Callable[[], T]) -> T | None:
        """Return a result that all ranks can have; else note why some cannot, and return `None` on all. Collective."""
        found, why = None, ""
        try:
            with understood("what is stored there"):
                found = look()
        except (Corrupt, StorageError, OSError) as error:
            why = str(error)
        said = self._exchange.gather_values(why)
        self._noted += [f"rank {rank}: {each}" for rank, each in enumerate(said) if each]
        return None if any(said) else found

    def _has_room(self, nbytes: int) -> bool:
        """Return whether every rank has memory for this. Collective."""

        def look() -> bool:
            if (lack := lacking_memory(nbytes)) is not None:
                raise Corrupt(f"cut for these ranks, its part here {lack}")
            return True

        return bool(self._together(look))

    # -- exact and partial generations

    def _bring_records(
        self, markers: Sequence[RankMarker], view: StateView, constants: Collection[str]
    ) -> BroughtRecords | None:
        """Read all records of an exact or partial generation, of experts the newest."""
        steps, partial = sorted(set(markers[0].steps)), is_partial(markers[0].policy)
        sizes = self._expert_sizes(view, constants) if partial else {}
        indexes = [RecordIndex() for _ in markers]
        in_storage = [each for each in self._reachable if each in self._inventory.in_storage]
        if partial:
            in_memory = [each for each in self._reachable if each in self._inventory.in_memory]
            for version, pick in [*((each, self._in_storage) for each in in_storage[:1]), *self._in_memory(in_memory)]:
                self._add(indexes, version, pick, self._read_markers(version, pick))
        else:
            self._add(indexes, self.version, self._whole, markers)
        deeper = in_storage[1:]
        while True:
            offered = {name: Counter[Version]() for name in sizes}
            for index in indexes:
                for name, rows in index.offered(sizes).items():
                    offered[name].update(dict(rows))
            chosen, missing = newest_whole(offered, sizes)
            if missing and not deeper:
                self._noted.append(f"no whole copy is left of {len(missing)} experts: {', '.join(missing[:_NAMED])}")
                return None
            if missing:
                older = deeper.pop(0)
                self._add(indexes, older, self._in_storage, self._read_markers(older, self._in_storage))
                continue
            brought = BroughtRecords(reached=self.version.generation.step, chosen=chosen)
            brought.share_out([*self._chosen(indexes, steps, chosen)], self._exchange.world_size)
            if not (lost := self._read(brought)):
                return None if lost is None else brought
            for index in indexes:
                for name in lost:
                    index.exclude(name, chosen[name])

    def _add(
        self, indexes: Sequence[RecordIndex], version: Version, pick: _Pick, markers: Sequence[RankMarker | None]
    ) -> None:
        rank = self._exchange.rank
        known = {each.generation: each for each in self._inventory.in_storage}
        for owner, (index, marker) in enumerate(zip(indexes, markers, strict=True)):
            if marker is None:
                continue
            # A window of several steps has no states of one step, which other generations could use.
            if len(marker.steps) == 1 or version == self.version:
                for entry in marker.segments:
                    index.add(version, entry, pick(version, owner))
            for each in (*marker.referenced, *marker.spares):
                source = known.get(each.generation, Version(each.generation, ""))
                index.add(source, each.segment, [stored(source, owner, rank)])

    def _expert_sizes(self, view: StateView, constants: Collection[str]) -> dict[str, int]:
        """Return the elements of all ranks' experts that the writers trained, by name. Collective."""
        trained = (op for op in view.operators if op.slices[0].fqn not in constants)
        said = self._exchange.gather_values({op.name: op.numel for op in trained if op.kind == "expert"})
        rows = cast("list[dict[str, int]]", said)
        return {name: size for row in rows for name, size in row.items()}

    def _chosen(
        self, indexes: Sequence[RecordIndex], steps: Sequence[int], chosen: Mapping[str, Version]
    ) -> Iterator[WrittenRecord]:
        """Yield the records that make up the generation, experts from their chosen versions."""
        for owner, index in enumerate(indexes):
            for at, step in enumerate(steps):
                for each in index.step(self.version, step).values():
                    if each.record.operator not in chosen:
                        yield WrittenRecord(owner, at, each)
            for name, source in chosen.items():
                for each in index.operator(name, source).values():
                    yield WrittenRecord(owner, len(steps) - 1, each)

    def _read(self, brought: BroughtRecords) -> list[str] | None:
        """Read this rank's records; return the experts with a bad copy on any rank, `None` if something else is bad."""
        groups: dict[tuple[int, int], list[WrittenRecord]] = {}
        for each in brought.read_by(self._exchange.rank):
            groups.setdefault((each.owner, each.at), []).append(each)
        if not self._has_room(sum(each.record.nbytes for records in groups.values() for each in records)):
            return None
        assemblies: list[tuple[str, Assembly]] = []
        for (owner, at), records in groups.items():
            names = NameColumns.of([each.record.name for each in records])
            kinds = KindColumns.of([(dtype_of(each.record.dtype), (each.record.numel,)) for each in records])
            layout = SegmentLayout.of_columns([names], kinds, metadata=SEGMENT_METADATA, header_nbytes=0)
            buffer = host_buffer(layout.nbytes)
            brought.add(owner, at, buffer, layout)
            wanted: dict[str, list[Wanted]] = {}
            for each, (start, nbytes) in zip(records, layout.places, strict=True):
                expert = each.record.operator if each.record.operator in brought.chosen else ""
                record = Wanted(each.record.name, start, nbytes, each.record.digest, each.replicas.places)
                wanted.setdefault(expert, []).append(record)
            for expert, of in wanted.items():
                what = f"{expert or 'records'} of rank {owner}"
                assemblies.append((expert, Assembly(what, buffer, of, may_be_lost=bool(expert))))
        if not self._transfer.fill([assembly for _, assembly in assemblies], ""):
            return None
        for _, assembly in assemblies:
            brought.supplied += assembly.supplied
        said = self._exchange.gather_values([expert for expert, assembly in assemblies if assembly.lost])
        return [str(expert) for row in cast("list[list[str]]", said) for expert in row]

    def _bring_constants(self, files: Sequence[SegmentEntry], brought: BroughtRecords) -> bool:
        """Read constants that are ordinary parameters here; return whether all are good."""
        copy, last = stored(self.version, 0, self._exchange.rank), max(each.at for each in brought.records)
        places = [(record, Place(copy, file, record.offset)) for file in files for record in file.records]
        constants = BroughtRecords(buffers=brought.buffers, places=brought.places, supplied=brought.supplied)
        shared = [WrittenRecord(_OF_NONE, last, Replicas(record, [place])) for record, place in places]
        constants.share_out(shared, self._exchange.world_size)
        if self._read(constants) is None:
            return False
        brought.records += constants.records
        brought.reader_of |= constants.reader_of
        return True

    # -- chains of differences

    def _bring_chains(self, markers: Sequence[RankMarker]) -> BroughtRecords | None:
        """Read each writer's base and differences, and fold them."""
        last, rank = self.version.generation, self._exchange.rank
        own = (last.incarnation, last.nonce)
        line = [each for each in self._reachable if (each.generation.incarnation, each.generation.nonce) == own]
        in_memory = [each for each in line if each in self._inventory.in_memory]
        in_storage = [each for each in line if each in self._inventory.committed][:COMMITS]
        chains: list[dict[int, list[LinkSource]]] = [{} for _ in markers]
        for version, pick in [*self._in_memory(in_memory), *((each, self._in_storage) for each in in_storage)]:
            for owner, marker in enumerate(self._read_markers(version, pick)):
                if marker is not None:
                    add_links(chains[owner], marker, pick(version, owner), rank)
        bases = {base_step(links, last.step) for links in chains}
        base = next(iter(bases))
        if len(bases) > 1 or base is None:
            self._noted.append("what it follows on is not all there")
            return None
        brought = BroughtRecords()
        found = [(owner, each) for owner, links in enumerate(chains) for each in links[base][0].entry.records]
        records = [WrittenRecord(owner, 0, Replicas(each)) for owner, each in found]
        brought.share_out(records, self._exchange.world_size)
        units: dict[int, set[str]] = {}
        for each in brought.read_by(rank):
            units.setdefault(each.owner, {JOURNAL}).add(each.unit[1])
        own_chains = [{s: filtered(row, units[owner]) for s, row in chains[owner].items()} for owner in units]
        restore = ChainRestore(self._exchange, self._transfer, own_chains, last.step)
        states = restore.run()
        self._noted += restore.reasons
        if states is None:
            return None
        for owner, state in zip(units, states, strict=True):
            brought.add(owner, 0, state.segment, state.layout)
        brought.supplied += restore.supplied
        brought.reached = restore.reached
        return brought

    # -- journals

    def _retold(self, brought: BroughtRecords, was: Topology, job: ResumeRequest) -> list[Journal] | None:
        """Return this rank's journal at each boundary; name all differences."""
        own = [each for each in brought.read_by(self._exchange.rank) if each.record.kind == JOURNAL]
        said = self._exchange.gather_values([[each.owner, each.at, decoded(brought.bytes_of(each))] for each in own])
        rows = [row for part in cast("list[list[list[Any]]]", said) for row in part]
        if unread := [f"rank {owner}: {found}" for owner, _, found in rows if isinstance(found, str)]:
            self._noted += unread
            return None
        told: list[Journal] = []
        notes: dict[str, None] = {}
        for at in range(1 + max(each.at for each in brought.records)):
            found = {owner: journal for owner, of, journal in rows if of == at}
            written = [found[owner] for owner in sorted(found)]
            if (retold := self._together(lambda written=written: job.journals.retell(written, was))) is None:  # type: ignore[misc]
                return None
            outcome = own_outcome(retold.journal["outcome"], job.view, job.groups, self._exchange)
            told.append({**retold.journal, "outcome": outcome})
            notes |= dict.fromkeys(retold.notes)
        notes |= dict.fromkeys(differing_buffers(brought))
        if len(told) > 1:
            notes[
                f"{len(told) - 1} steps are trained again on other ranks, with gradients summed in another order: right to rounding. For "
                "the bits of the run, `moe-ckpt densify` repeats them on the ranks that wrote them"
            ] = None
        log.info("resumes on %s what %s wrote", job.identity.topology, was, alike=True)
        if notes:
            log.warning("not as on the ranks that wrote %s: %s", self.version.generation, "; ".join(notes), alike=True)
        return told

    # -- cutting

    def _lay_out(
        self, record: PlanRecord, kept: Sequence[str], job: ResumeRequest, brought: BroughtRecords, journal_nbytes: int
    ) -> WindowLayout | None:
        """Return the generation's layout as if this job's ranks had taken it; `None` if its window cannot be laid out."""
        view, groups = job.view, job.groups
        owners = buffer_owners(brought, self._exchange.world_size)
        buffers = [each for each in brought.records if each.record.kind == BUFFER]
        own = [each.record for each in buffers if owners[each.record.fqn, self._exchange.rank] == each.owner]
        view.fit_buffers({each.name: (dtype_of(each.dtype), each.global_shape) for each in own})
        if not _is_sparse(record):
            return dense_layout(view, groups, journal_nbytes)
        facts = {"popularity": [], "budget_nbytes": 0, "split_nbytes": record.split_nbytes, "incomplete": False}
        stages = (facts,) * groups.num_stages if groups.num_stages > 1 else ()
        mine = replace(
            record, config={"recut": True}, popularity=(), budget_nbytes=0, constants=tuple(kept), stages=stages
        )

        def look() -> WindowLayout:
            try:
                return lay_out(mine, view, groups, journal_nbytes)
            except IdentityMismatch as error:
                why = f"its window was planned for the ranks that wrote it ({error}); `moe-ckpt densify` makes a dense one of it"
                raise Corrupt(why) from error

        return self._together(look)

    def _cut(self, brought: BroughtRecords, layout: WindowLayout, *, imported: bool) -> list[Tensor]:
        """Return this rank's segments, with every record but the journal. Raises `IdentityMismatch` if one is nowhere."""
        rank, view = self._exchange.rank, layout.steps[0].view
        has_state = dict.fromkeys(view.params, True)
        said = self._exchange.gather_values([step.durable.records(has_state)[0].decode() for step in layout.steps])
        segments = [host_buffer(step.durable.segment.nbytes).zero_() for step in layout.steps]
        owners = buffer_owners(brought, self._exchange.world_size)
        wanted = [
            HeldRecord.of(each, other, at, owners.get((each.fqn, other), 0))
            for other, steps in enumerate(cast("list[list[str]]", said))
            for at, rows in enumerate(steps)
            for each in RecordRows(lambda rows=rows: (rows.encode(), np.empty(0, np.int64))).columns.entries()  # type: ignore[misc]
            if each.kind != JOURNAL and (other == rank or not is_scalar(each))
        ]
        tensors = [each for each in wanted if not is_scalar(each.record)]
        if imported:
            fit_imported(brought, tensors, view.module, self._exchange)
        values = self._scalars(brought)
        sources, targets = by_tensor(self._sources(brought), tensors)
        if imported:
            sources = by_imported_names(sources, targets)
        with self._exchange.raise_together(IdentityMismatch):
            expect_all(rank, targets, sources)
        deliver(self._exchange, moves(sources, targets, values, rank), brought.buffers, segments)
        fill_scalars([each for each in wanted if is_scalar(each.record)], targets, sources, values, segments)
        return segments

    def _scalars(self, brought: BroughtRecords) -> ShardScalars:
        own = [each for each in brought.read_by(self._exchange.rank) if is_scalar(each.record)]
        said = self._exchange.gather_values([[e.owner, e.at, e.record.name, brought.bytes_of(e)] for e in own])
        rows = (row for part in cast("list[list[list[Any]]]", said) for row in part)
        return {(owner, at, name): value for owner, at, name, value in rows}

    def _sources(self, brought: BroughtRecords) -> Iterator[HeldRecord]:
        """Yield all records with elements."""
        for each in brought.records:
            record = each.record
            if record.kind == JOURNAL or is_scalar(record):
                continue
            reader, place = brought.reader_of[each.unit], -1
            if reader == self._exchange.rank:
                place, layout = brought.places[each.owner, each.at]
                record = replace(record, offset=layout.span(record.name).offset)
            yield HeldRecord.of(record, reader, each.at, each.owner, place=place)


def _is_sparse(record: PlanRecord) -> bool:
    return len(record.plan.steps) > 1 and not record.plan.is_differential


def _kept_constants(record: PlanRecord, view: StateView, groups: ParallelGroups, exchange: Exchange) -> tuple[str, ...]:
    """Return the constants of the plan if all ranks have them whole, so that they stay constants; else nothing. Collective."""
    whole = view.operators.whole or view.operators
    apart = {piece.fqn for op in whole if op.holders != "stage" for piece in op.slices} | view.boxes.keys()
    held = [fqn for fqn in record.constants if fqn in view.params and fqn not in apart]
    kept = len(held) == len(record.constants) and groups.num_stages == 1
    return record.constants if exchange.all_agree(kept) else ()
