"""Bring every rank its part of one generation, from the cheapest good copies.

All ranks take rounds together, see `_transfer`. Every record has one writer, so each byte is read once: shared records
are read by their writer and broadcast when loaded. All ranks give a generation up as soon as one rank has to.

An exact generation has every record itself, of its own steps. A partial one holds some experts only. Every other expert
comes from the newest older generation that ranks can put it together from, out of any tiers and nodes. Ranks agree
expert by expert; an expert that is bad everywhere comes from the next older generation. If an expert has no copy left
at all, the generation is given up, unless missing experts are allowed.

For that, markers are read as far back as needed: of every generation in memory; of the newest commit, which names the
older files for its other experts, and a second copy of each; then of older commits, and last of generations kept only
for their references.

Sources: Gemini (2023) for several peers at once; PEC/MoC (2024), Sec. 3.2 (two-level recovery). We differ from the
latter in agreeing per expert, on verified records of every rank.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from operator import attrgetter
from typing import Literal, TypeVar

import numpy as np
import torch

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.native import host_buffer
from lightning_moe_ckpt.recovery._assembly import Assembly, Exhausted, Place, Wanted
from lightning_moe_ckpt.recovery._index import (
    PARAM,
    Links,
    LinkSource,
    RecordIndex,
    Replicas,
    add_links,
    neighbours,
    newest_whole,
)
from lightning_moe_ckpt.recovery._inventory import UNREADABLE, Inventory, Reader, Replica, Version, stored
from lightning_moe_ckpt.recovery._transfer import MESSAGE_NBYTES, MarkerSearch, Rounds, Transfer, Transport, Which
from lightning_moe_ckpt.storage import GenerationId, RankMarker, RecordColumns, SegmentLayout, Span, dtype_of
from lightning_moe_ckpt.tiers import HOST, PEER, STORAGE, TierName, is_differential, is_partial

log = rank_logger(__name__)

T = TypeVar("T")

LedgerLevel = Literal["host", "peer", "memory", "storage"]

LEVELS: Mapping[LedgerLevel, Collection[TierName]] = {
    "host": [HOST],
    "peer": [PEER],
    "memory": [HOST, PEER],
    "storage": [STORAGE],
}
"""Tiers that together hold all of a copy; memory is the own node's and other nodes' together."""

COMMITS = 3
"""Newest commits searched for a version's differences: each names its whole chain."""

_SAMPLE, _PAYS, _PAYS_SECONDS = 8, 0.8, 1.0
"""Share of a file that is read to estimate its time, as 1 / n; share of the newest generation's time, and seconds below it,
within which an older generation comes first."""

_NAMED = 16
"""Most experts without a good copy that a message names."""


@dataclass(frozen=True, slots=True)
class ShardSource:
    """A shard of an expert's parameter, and its reading rank."""

    fqn: str
    global_start: int
    numel: int
    writer: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RestorePlan:
    """The ranks' agreement, equal on all ranks; experts by name."""

    generations: Mapping[str, GenerationId] = field(default_factory=dict)
    """Source generation of each expert."""
    shards: Mapping[str, Sequence[ShardSource]] = field(default_factory=dict)
    """Shards of each expert over all ranks, in the order of ranks."""
    levels: Mapping[str, frozenset[LedgerLevel]] = field(default_factory=dict)
    """Levels that hold all of each expert's copy."""
    bad: Mapping[str, Mapping[GenerationId, bool]] = field(default_factory=dict)
    """Generations whose copy of an expert is bad, newest first, and whether storage had that copy."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """Experts without a good copy, and the places of their bad copies."""

    @property
    def is_partial(self) -> bool:
        """Whether experts may come from other generations; false for an exact generation."""
        return bool(self.generations or self.missing)


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """A rank's part of a generation, put together and verified record by record."""

    marker: RankMarker
    """This rank's marker of the restored generation, even where single experts come from older ones (see `chosen`)."""
    segments: list[torch.Tensor]
    """A uint8 tensor per step, laid out as requested; an exact generation's header and gaps are not filled."""
    layouts: list[SegmentLayout]
    nbytes: dict[Replica, int]
    """Bytes read, by copy; repeated reads count again."""
    chosen: RestorePlan


class RestoreAttempt:
    """An attempt to bring a version; all ranks make it together, and every method is collective.

    Sources for the experts of a partial generation are versions `alive`, allowed by the run's log. With `allow_missing`, it goes on
    without experts with no good copy. Pipeline stages, `num_stages`, are consecutive ranks, each stage with its own token ledger.
    """

    def __init__(
        self,
        transport: Transport,
        reader: Reader,
        inventory: Inventory,
        version: Version,
        alive: Collection[Version],
        *,
        digests: Mapping[Version, str],
        allow_missing: bool = False,
        message_nbytes: int = MESSAGE_NBYTES,
        num_stages: int = 1,
    ) -> None:
        self._transport, self._reader, self._inventory, self.version = transport, reader, inventory, version
        self._digests, self._allow_missing, self._num_stages = digests, allow_missing, num_stages
        self.missing: dict[str, str] = {}
        """Experts without a good copy, and the places of their bad copies; the same on all ranks."""
        self._bad: dict[str, dict[GenerationId, bool]] = {}
        self._reasons: dict[str, list[str]] = {}
        self._rounds = Rounds(transport)
        self._transfer = Transfer(self._rounds, reader, str(version), message_nbytes)
        self.is_partial = self.is_differential = False
        """Whether the version holds some experts only, or differences to the step before; known after `marker`."""
        self._reachable = sorted((each for each in alive if each.generation <= version.generation), reverse=True)
        in_storage = [each for each in self._reachable if each in inventory.committed]
        sources = [each for each in self._reachable if each in inventory.sources]
        self._newest_commit = [each for each in in_storage if each == version] or in_storage[:1]
        self._deeper = [each for each in (*in_storage, *sources) if each not in self._newest_commit]
        """Commits whose markers are not read yet, newest first; after them generations kept only for references."""
        self._markers: dict[Which, RankMarker] = {}
        self._index = RecordIndex()

    @property
    def reasons(self) -> list[str]:
        """Reasons why the generation was given up, the same on all ranks."""
        return self._rounds.reasons

    def marker(self) -> RankMarker | None:
        """Return this rank's marker of the generation; `None`, on all ranks, if any rank has none."""
        which = (self.version, None)
        if not self._read_markers([which], required=which):
            return None
        marker = self._markers[which]
        self.is_partial, self.is_differential = is_partial(marker.policy), is_differential(marker.policy)
        if self.is_differential:
            self._read_chain()
        if self.is_partial:  # memory and storage may hold different files
            del self._markers[which]
            in_memory = [each for each in self._reachable if each in self._inventory.in_memory]
            self._read_markers([*product(self._newest_commit, [STORAGE]), *product(in_memory, [HOST, PEER])])
            for each in sorted(self._markers, key=_doubt):
                self._add_to_index(each)
        return marker

    def chain(self) -> tuple[Transport, Transfer, Links]:
        """Return this rank's links up to the version, from all readable copies, with the means to fetch them."""
        found: dict[int, list[LinkSource]] = {}
        for which, marker in sorted(self._markers.items(), key=lambda each: _doubt(each[0]) == 0):  # storage last
            add_links(found, marker, self._copies(which), self._transport.rank)
        return self._transport, self._transfer, found

    def _read_chain(self) -> None:
        """Read the markers in memory that may lead to the version, and those of the newest commits."""
        own = (self.version.generation.incarnation, self.version.generation.nonce)
        line = [each for each in self._reachable if (each.generation.incarnation, each.generation.nonce) == own]
        in_memory = [each for each in line if each in self._inventory.in_memory]
        in_storage = [each for each in line if each in self._inventory.committed][:COMMITS]
        self._markers.pop((self.version, None), None)
        self._read_markers([*product(in_storage, [STORAGE]), *product(in_memory, [HOST, PEER])])

    def bring(
        self, marker: RankMarker, experts: Mapping[str, int], lay_out: Callable[[RestorePlan], Sequence[SegmentLayout]]
    ) -> Restored | None:
        """Bring the part of this rank that has `marker`; return `None`, on all ranks, if some record has no good copy
        left.

        `experts` are this rank's elements per expert operator; a partial generation's may be older. `lay_out` returns
        this rank's layout of each step: records by their names in markers, for its shards of experts.
        """
        sizes = experts if self.is_partial else {}
        while (sources := self._agree(sizes) if self.is_partial else {}) is not None:
            chosen = self._describe(sources, sizes) if self.is_partial else RestorePlan()
            layouts = list(lay_out(chosen))
            buffers = [host_buffer(layout.nbytes) for layout in layouts]
            own = {expert: sources[expert] for expert in sizes if expert in sources}
            if self.is_partial:
                assemblies, broken = self._assemblies(marker.steps, layouts, buffers, own)
            else:
                assemblies, broken = self._whole_steps(marker, layouts, buffers)
            if not self._transfer.fill([*assemblies.values()], broken):
                return None
            if not self.is_partial or not self._exclude_lost(assemblies, sources):
                nbytes = dict(sum((assembly.supplied for assembly in assemblies.values()), Counter[Replica]()))
                return Restored(marker=marker, segments=buffers, layouts=layouts, nbytes=nbytes, chosen=chosen)
        return None

    def read_common(
        self, generations: Collection[GenerationId], name: str, extract: Callable[[memoryview], T]
    ) -> dict[GenerationId, T]:
        """Read one record that every rank has of its own in each generation, with equal contents within a stage; the
        same generations on all ranks. `extract` turns the bytes into a plain value, or raises `Corrupt`. Return values
        from the stage's first rank that can read the record; generations that nobody can read are left out.
        """
        if not generations:
            return {}
        wanted, found, rank = sorted(generations), dict[int, T](), self._transport.rank
        self._add_markers([each for each in self._reachable if each.generation in generations])
        local = {i: replicas for i, each in enumerate(wanted) if (replicas := self._index.local(each, name))}
        size = self._transport.world_size // self._num_stages
        here = rank // size * size
        while True:
            rows = self._transport.gather_values([i for i in local if i not in found])
            if not any(rows):
                return {wanted[i]: value for i, value in found.items()}
            first = {i: here + reader for reader, row in reversed([*enumerate(rows[here : here + size])]) for i in row}
            own = [i for i, reader in first.items() if reader == rank]
            values = [[i, self._extracted(wanted[i], local.pop(i), extract)] for i in own]
            for row in self._transport.gather_values(values)[here : here + size]:
                found |= {i: value for i, value in row if value is not None}

    def why_older(self, older: RestoreAttempt) -> str:
        """Return the reason why an older exact generation brings training back sooner, steps repeated, or empty. Collective."""
        if not {self.version, older.version}.issubset(self._reachable):
            return ""
        if (own := self._cost()) is None or (other := older._cost()) is None:
            return ""
        repeats = own[1] - other[1] + 1  # whole seconds
        if other[0] + repeats > min(_PAYS * own[0], own[0] - _PAYS_SECONDS):
            return ""
        return f"to bring it takes about {other[0]:.1f} s, to repeat steps {repeats} s; to bring the newest, {own[0]:.1f} s"

    def _cost(self) -> tuple[float, int] | None:
        """Return the seconds to bring an exact generation, by a record that the slowest rank brings, and its begin as Unix time."""
        if (marker := self.marker()) is None or self.is_partial or self.is_differential:
            return None
        copies, file = self._copies((self.version, None)), max(marker.segments, key=attrgetter("nbytes"))
        sizes = np.asarray(RecordColumns.of(file.records).nbytes, np.int64)
        record = file.records[int(np.abs(sizes - file.nbytes // _SAMPLE).argmin())]
        places = [Place(copy, file, record.offset) for copy in copies]
        wanted = Wanted(record.name, 0, record.nbytes, record.digest, places)
        sample = Assembly(str(self.version), torch.empty(record.nbytes, dtype=torch.uint8), [wanted], may_be_lost=True)
        is_far, began = copies[0].source != HOST, time.perf_counter()
        self._transfer.fill([sample] * is_far, "")
        seconds, whole = time.perf_counter() - began, sum(each.nbytes for each in marker.segments)
        row = [float("inf") if sample.lost else seconds, whole * is_far, record.nbytes * is_far, marker.unix_time]
        seconds, whole, sampled, begin = map(max, zip(*self._transport.gather_values(row), strict=True))
        return (seconds * whole / sampled if sampled else 0.0), begin

    def _extracted(self, generation: GenerationId, replicas: Replicas, extract: Callable[[memoryview], T]) -> T | None:
        record = replicas.record
        what, buffer = f"{record.name} of {generation}", torch.empty(record.nbytes, dtype=torch.uint8)
        wanted = Wanted(record.name, 0, record.nbytes, record.digest, replicas.places)
        assembly = Assembly(what, buffer, [wanted], may_be_lost=False)
        try:
            assembly.fill(self._reader.read)
            return extract(assembly.view)
        except (*UNREADABLE, Exhausted) as error:
            log.error("%s: %s; another rank's is read", what, error)
            return None

    # -- markers

    def _read_markers(self, wanted: Iterable[Which], *, required: Which | None = None) -> bool:
        copies = {which: self._copies(which) for which in wanted if which not in self._markers}
        found = MarkerSearch(self._rounds, self._reader, copies, self._digests).run(required)
        self._markers |= found or {}
        return found is not None

    def _copies(self, which: Which) -> list[Replica]:
        version, source = which
        copies = self._inventory.copies(version, self._transport.rank)
        return [copy for copy in copies if (copy.whole if source is None else source == copy.source)]

    def _add_markers(self, versions: Iterable[Version]) -> None:
        """Read markers of further commits, and index the files that they name."""
        new: list[Which] = [(version, STORAGE) for version in versions if (version, STORAGE) not in self._markers]
        self._read_markers(new)
        for which in new:
            if which in self._markers:
                self._add_to_index(which)

    def _add_to_index(self, which: Which) -> None:
        marker, version = self._markers[which], which[0]
        # A window of several steps has no states of one step, which other generations could use.
        if len(marker.steps) == 1 or version == self.version:
            for entry in marker.segments:
                self._index.add(version, entry, self._copies(which))
        in_storage = {each.generation: each for each in self._inventory.in_storage}
        for referenced in (*marker.referenced, *marker.spares):
            owner = in_storage.get(referenced.generation, Version(referenced.generation, ""))
            self._index.add(owner, referenced.segment, [stored(owner, self._transport.rank)])

    # -- agreement

    def _agree(self, experts: Mapping[str, int]) -> dict[str, Version] | None:
        """Return the version of each expert's newest whole copy; `None` if a required one is missing. Collective."""
        while True:
            chosen, missing = self._newest_whole(experts)
            if not missing:
                return chosen
            if self._deeper:
                self._add_markers([self._deeper.pop(0)])
                continue
            self.missing = {name: ", ".join(self._reasons.get(name, ["nothing has one"])) for name in missing}
            if self._allow_missing:
                return chosen
            named = "; ".join(f"{name} ({why})" for name, why in list(self.missing.items())[:_NAMED])
            more = f"; and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
            self._rounds.reasons.append(f"no whole copy is left of {len(missing)} experts: {named}{more}")
            return None

    def _newest_whole(self, experts: Mapping[str, int]) -> tuple[dict[str, Version], list[str]]:
        """Return each expert's newest version that all ranks have whole together, and the experts without any. Collective."""
        own = self._index.offered(experts)
        versions = sorted({source for rows in own.values() for source, _ in rows})
        said = self._transport.gather_distinct([[*experts.items()], [each.plain() for each in versions]])
        sizes = dict(sorted({name: size for rows, _ in said for name, size in rows}.items()))
        columns = {v: i for i, v in enumerate(sorted({Version.from_plain(each) for _, rows in said for each in rows}))}
        held, places = np.zeros((len(sizes), len(columns)), np.int64), {name: place for place, name in enumerate(sizes)}
        for name, rows in own.items():
            for source, numel in rows:
                held[places[name], columns[source]] += numel
        rows_held = self._transport.sum(torch.from_numpy(held)).tolist() if held.size else [()] * len(sizes)
        offered = {
            name: {version: numel for version, numel in zip(columns, row, strict=False) if numel}
            for name, row in zip(sizes, rows_held, strict=True)
        }
        return newest_whole(offered, sizes)

    def _describe(self, sources: Mapping[str, Version], experts: Collection[str]) -> RestorePlan:
        """Return the plan for the chosen copies, from all ranks' records. Collective."""
        own: list[object] = []
        for name in (expert for expert in experts if expert in sources):
            records = self._index.operator(name, sources[name])
            params = [held.record for held in records.values() if held.record.state_key == PARAM]
            rows = [[param.fqn, param.global_start, param.numel] for param in params]
            own.append([name, rows, [int(self._all_at(records.values(), level)) for level in LEVELS]])
        shards: dict[str, list[ShardSource]] = {name: [] for name in sources}
        levels = {name: set(LEVELS) for name in sources}
        for writer, said in enumerate(self._transport.gather_values(own)):
            for name, rows, there in said:
                shards[name] += [ShardSource(fqn, start, numel, writer) for fqn, start, numel in rows]
                levels[name] -= {level for level, held in zip(LEVELS, there, strict=True) if not held}
        generations = {name: source.generation for name, source in sources.items()}
        held = {name: frozenset(each) for name, each in levels.items()}
        bad = {name: dict(each) for name, each in self._bad.items()}
        return RestorePlan(generations=generations, shards=shards, levels=held, bad=bad, missing=dict(self.missing))

    def _all_at(self, records: Collection[Replicas], level: LedgerLevel) -> bool:
        sources = LEVELS[level]
        return all(any(place.copy.source in sources for place in record.places) for record in records)

    # -- bytes

    def _whole_steps(
        self, marker: RankMarker, layouts: Sequence[SegmentLayout], buffers: Sequence[torch.Tensor]
    ) -> tuple[dict[str, Assembly], str]:
        """Return an exact generation's assemblies by step, and the reason if they cannot fit. Every copy has all files."""
        copies, assemblies = self._copies((self.version, None)), dict[str, Assembly]()
        for step, layout, buffer in zip(marker.steps, layouts, buffers, strict=True):
            wanted = neighbours([segment for segment in marker.segments if segment.step == step], layout, copies)
            if wanted is None:
                return {}, f"its records of step {step} are not those of this model, optimizer and world"
            assemblies[f"step {step}"] = Assembly(f"records of step {step}", buffer, wanted, may_be_lost=False)
        return assemblies, "" if assemblies else "it has no segments"

    def _assemblies(
        self,
        steps: Sequence[int],
        layouts: Sequence[SegmentLayout],
        buffers: Sequence[torch.Tensor],
        sources: Mapping[str, Version],
    ) -> tuple[dict[str, Assembly], str]:
        """Return assemblies, one per expert and one per step for the rest; and the reason if they cannot fit."""
        base, generation = self.version, self.version.generation
        experts = {expert: self._index.operator(expert, source) for expert, source in sources.items()}
        expert_of = {name: expert for expert, records in experts.items() for name in records}
        assemblies: dict[str, Assembly] = {}
        for step, layout, buffer in zip(steps, layouts, buffers, strict=True):
            layout.write_header(buffer)
            held = {**self._index.step(base, step), **{n: r for each in experts.values() for n, r in each.items()}}
            wanted: dict[str, list[Wanted]] = {"": [], **{expert: [] for expert in experts}}
            for name, span in layout.spans.items():
                if (replicas := held.get(name)) is None or not _fits(replicas, span):
                    return {}, f"its records are not those of this model, optimizer and world, first {name}"
                record = Wanted(name, span.offset, span.nbytes, replicas.record.digest, replicas.places)
                wanted[expert_of.get(name, "")].append(record)
            what = f"the dense part of {generation}" if experts else f"records of step {step}"
            assemblies[f"step {step}"] = Assembly(what, buffer, wanted.pop(""), may_be_lost=False)
            for expert, records in wanted.items():
                said = f"{expert} of {sources[expert].generation}"
                assemblies[expert] = Assembly(said, buffer, records, may_be_lost=True)
        return assemblies, "" if assemblies else "it has no segments"

    def _exclude_lost(self, assemblies: Mapping[str, Assembly], sources: Mapping[str, Version]) -> bool:
        """Exclude bad copies of experts on all ranks; return whether there are any. Collective."""
        lost = {expert: assembly.lost for expert, assembly in assemblies.items() if assembly.lost}
        for expert, reason in lost.items():
            self._index.exclude(expert, sources[expert])
            log.error("%s; an older copy of the expert is used", reason)
        own = [[e, why, self._all_at(self._index.operator(e, sources[e]).values(), STORAGE)] for e, why in lost.items()]
        said = self._transport.gather_values(own)
        for rank, rows in enumerate(said):
            for expert, reason, is_stored in rows:
                self._reasons.setdefault(expert, []).append(f"rank {rank}: {reason}")
                bad, generation = self._bad.setdefault(expert, {}), sources[expert].generation
                bad[generation] = is_stored or bad.get(generation, False)  # ranks know of different copies
        return any(said)


def _doubt(which: Which) -> int:
    """Return a sort key, most trusted first: manifests vouch for commits, and copies on other nodes may be less exact."""
    return (STORAGE, HOST, PEER, None).index(which[1])


def _fits(replicas: Replicas, span: Span) -> bool:
    record = replicas.record
    return (dtype_of(record.dtype), record.nbytes) == (span.dtype, span.nbytes)
