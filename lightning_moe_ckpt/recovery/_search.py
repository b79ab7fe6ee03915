"""Finding what all ranks can resume from: memory of their nodes, of other nodes, and what is committed, taken together.

The coordinator lists commits, every rank what it finds in memory. They agree on the newest version that each can be
given its part of, bring it, and go on with the next older one if a part is bad in every copy. A version that another
model, optimizer or world wrote stops the search: it is the user's to say what should become of it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.errors import Corrupt, IdentityMismatch
from lightning_moe_ckpt.operators import OperatorSet
from lightning_moe_ckpt.parallel import ParallelGroups
from lightning_moe_ckpt.recovery._assembly import described
from lightning_moe_ckpt.recovery._attempt import RestoreAttempt, RestorePlan
from lightning_moe_ckpt.recovery._found import RestoreSource, journal_capacity, stored_layouts, understood
from lightning_moe_ckpt.recovery._inventory import Inventory, Replica, Version, memory_of, plain_versions, version_of
from lightning_moe_ckpt.recovery._loading import restored_window
from lightning_moe_ckpt.recovery._reader import Reader
from lightning_moe_ckpt.recovery._token_loss import tokens_behind
from lightning_moe_ckpt.snapshot import (
    JOURNAL,
    Facts,
    Identity,
    PlanRecord,
    StateView,
    live_facts,
    live_optimizer,
    model_differences,
    stored_facts,
)
from lightning_moe_ckpt.storage import Commit, GenerationId, RankMarker, RunStore, SegmentLayout, lacking_memory
from lightning_moe_ckpt.tiers import ObjectTier, Tier, shared_directory

log = logging.getLogger(__name__)

_MOST_PER_ELEMENT = 64
"""Bytes per parameter in a segment, of state and averages, at most: several times what optimizers have."""
_ROOM_NBYTES = 64 * 2**20
"""For a header and alignment."""

StoredFacts = tuple[Facts, list[str]]


@dataclass(frozen=True, kw_only=True)
class ResumeRequest:
    """What is to be resumed, as far as a run must have been written by the same."""

    identity: Identity
    view: StateView
    groups: ParallelGroups
    may_lack_experts: bool = False
    """Whether experts of which there is no good copy may begin anew, where nothing whole is left."""

    @property
    def operators(self) -> OperatorSet:
        """Of this rank."""
        return self.view.operators

    def misfit(self, marker: RankMarker) -> str | None:
        """Why segments are none, or larger than any that this rank would write, found out before they are read."""
        try:
            stored_layouts(marker)
            return self._oversize(marker)
        except Corrupt as error:
            return str(error)

    def _oversize(self, marker: RankMarker) -> str | None:
        numel = sum(tensor.numel() for tensor in self.view.params.values())
        buffers = sum(b.nbytes for name in self.view.buffer_names if (b := self.view.buffer(name)) is not None)
        most = _ROOM_NBYTES + _MOST_PER_ELEMENT * numel + 2 * buffers
        for segment in {each.step: each for each in reversed(marker.segments)}.values():  # the durable files
            journals = [record.nbytes for record in segment.records if record.name == JOURNAL]
            if len(journals) != 1:
                return f"{segment.key}: has {len(journals)} journals, 1 was expected"
            if segment.nbytes - journals[0] > most:
                return (
                    f"{segment.key}: has {segment.nbytes} bytes, a segment of this model at most {most} and its journal"
                )
        lack = lacking_memory(sum(segment.nbytes for segment in marker.segments))
        return None if lack is None else f"{', '.join(segment.key for segment in marker.segments)}: {lack}"

    @property
    def experts(self) -> dict[str, int]:
        """Elements of each expert operator of this rank."""
        return {op.name: op.numel for op in self.operators if op.kind == "expert"}


class Search:
    """One look at all that is there; every method is collective.

    Args:
        store: of the run; on rank 0 the coordinator's.
        exchange: control exchange between ranks.
        memory: tiers in memory of this rank's node.
        job: what is to be resumed.
        any_memory: whether what is in memory may be taken whatever the log says of it.
    """

    def __init__(
        self,
        store: RunStore,
        exchange: Exchange,
        memory: Sequence[Tier],
        job: ResumeRequest,
        *,
        any_memory: bool = False,
    ) -> None:
        self._store, self._exchange, self._memory, self._job = store, exchange, memory, job
        self._any_memory = any_memory
        self.reasons: list[str] = []
        """What was there and could not be restored, and why; the same on all ranks after `run`."""
        self.volatile: frozenset[GenerationId] = frozenset()
        """Generations of which some rank has something in memory."""
        self.committed: frozenset[Version] = frozenset()
        """What storage has."""
        self.missing: Mapping[str, str] = {}
        """Experts without which the newest generation could be restored, and why it has no good copy of them."""
        self._sources: dict[Version, Commit] = {}
        self._partial: list[Version] = []
        """Versions with some experts only, which were given up."""
        self.foreign: frozenset[GenerationId] = frozenset()
        """Generations in memory that are of another past than storage as it stands, and are not taken."""

    def run(self) -> RestoreSource | None:
        """The newest generation that all ranks have now, with this rank's part of it.

        Raises:
            IdentityMismatch: the run was written by another model, optimizer or world.
        """
        commits = self._commits()
        in_storage = {**commits, **self._sources}
        reader = Reader(self._store.run_id, self._memory, ObjectTier(self._store, list(in_storage.values())))
        stocks = self._exchange.gather_values(reader.stock(memory_of(shared_directory())).plain())
        inventory = Inventory.of(stocks, commits, self._sources)
        self.committed = inventory.committed
        self.volatile = frozenset(version.generation for version in inventory.in_memory)
        alive = self._alive(inventory)
        usable = inventory.usable(alive)

        def first_of(versions: Sequence[Version], *, may_lack: bool) -> RestoreSource | None:
            for version in versions:
                if version in commits:
                    self._check_identity(commits[version])
                found = self._bring(version, alive, inventory, reader, commits, may_lack=may_lack)
                if found is not None:
                    return found
            return None

        found = first_of(usable, may_lack=False)
        if found is None and self.missing and self._job.may_lack_experts:
            found = first_of(self._partial, may_lack=True)
        if found is not None and found.generation < usable[0].generation and self._exchange.is_coordinator:
            self._warn_of_older(usable[0].generation, found.generation)
        return found

    # -- private

    def _commits(self) -> dict[Version, Commit]:
        """What may be restored from storage, newest first."""
        listed = self._exchange.run_on_coordinator(self._list)
        assert isinstance(listed, list)
        *stored, self.reasons = listed
        commits, sources = ([Commit.from_bytes(each, "commit of the coordinator") for each in row] for row in stored)
        self._sources = {_version(commit): commit for commit in sources}
        return {_version(commit): commit for commit in commits}

    def _list(self) -> object:
        self._store.promote()
        commits = [commit.to_bytes() for commit in self._store.candidates()]
        sources = [commit.to_bytes() for commit in self._store.sources]
        return [commits, sources, [f"{where}: {why}" for where, why in self._store.unreadable]]

    def _alive(self, inventory: Inventory) -> list[Version]:
        """Versions that may be restored from; the coordinator knows what the log allows."""
        told = self._exchange.run_on_coordinator(lambda: self._judged(inventory))
        assert isinstance(told, list)
        rows, foreign, reasons = told
        self.foreign = frozenset(version_of(row).generation for row in foreign)
        self.reasons = [*self.reasons, *reasons]
        return [version_of(row) for row in rows]

    def _judged(self, inventory: Inventory) -> object:
        """What may be restored from, what of memory is of another past, and what that means if nothing else is there."""
        seen, store = inventory.seen, self._store
        whys = {v: store.why_foreign(v.generation, seen.get(v)) for v in inventory.in_memory if not self._any_memory}
        foreign = {version: why for version, why in whys.items() if why is not None}
        may = inventory.in_memory if self._any_memory else frozenset[Version]()
        alive = [
            v for v in inventory.all_versions if v in may or (v not in foreign and store.why_dead(v.generation) is None)
        ]
        newest = max(alive, default=None)
        if not foreign or (newest is not None and newest > max(foreign)):
            return [plain_versions(alive), [], []]
        offer = max(foreign)
        said = (
            f"memory has {offer.generation}, but it is of another past than {store.url} as it stands: {foreign[offer]}. "
            f"The newest there is {newest.generation if newest else 'nothing'}, and that is followed. To go on from memory "
            "instead, stop this job and start it with resume='memory'; until its next start or its end what memory has "
            "stays, as long as there is room"
        )
        if newest is not None:
            log.warning("%s", said)
        return [plain_versions(alive), plain_versions(foreign), [] if newest is not None else [said]]

    def _bring(
        self,
        version: Version,
        alive: Sequence[Version],
        inventory: Inventory,
        reader: Reader,
        commits: Mapping[Version, Commit],
        *,
        may_lack: bool,
    ) -> RestoreSource | None:
        in_storage = {**commits, **self._sources}
        digests = {version: commit.markers[self._exchange.rank] for version, commit in in_storage.items()}
        attempt = RestoreAttempt(
            self._exchange, reader, inventory, version, alive, digests=digests, allow_missing=may_lack
        )
        marker = attempt.marker()
        if marker is not None and version not in commits:
            self._check_identity(marker)
        misfits = [] if marker is None else self._misfits(marker)
        part = None
        if marker is not None and not misfits:
            part = attempt.bring(marker, self._job.experts, partial(self._lay_out, marker))
        if part is None:
            self.missing = self.missing or attempt.missing
            self._partial += [version] if attempt.is_partial and not may_lack else []
            self._give_up(version.generation, [*attempt.reasons, *misfits])
            return None
        self._log_sources(str(version), part.nbytes)
        return RestoreSource.of(part, tokens_behind(attempt, part.chosen), committed=version in commits)

    def _lay_out(self, marker: RankMarker, chosen: RestorePlan) -> list[SegmentLayout]:
        """Where this rank wants its records: as they lie in files, unless experts are of other generations."""
        if not chosen.is_partial:
            return stored_layouts(marker)  # see `misfit`
        journal_nbytes = journal_capacity(marker)
        with self._exchange.raise_together(IdentityMismatch), understood(f"{marker.generation}: its plan"):
            plan = PlanRecord.from_json(str(marker.policy["plan"]))
            window = restored_window(plan, chosen, self._job.view, self._job.groups, journal_nbytes)
        return [step.durable.segment for step in window.steps]

    def _misfits(self, marker: RankMarker) -> list[str]:
        """What some rank would have to make room for and cannot be of this job; equal on all ranks. Collective."""
        said = self._exchange.gather_values(self._job.misfit(marker))
        return [f"rank {rank}: {reason}" for rank, reason in enumerate(said) if reason is not None]

    def _give_up(self, generation: GenerationId, reasons: Sequence[str]) -> None:
        for reason in reasons:
            log.error("cannot resume from %s, %s; trying an older generation", generation, reason)
        self.reasons += [f"{generation}, {reason}" for reason in reasons]

    def _warn_of_older(self, newest: GenerationId, taken: GenerationId) -> None:
        log.warning(
            "%s is resumed from, an older generation, since newer ones cannot be restored; the newest, %s, is %d steps "
            "ahead, which are trained again. Why: %s",
            *(taken, newest, newest.step - taken.step, "; ".join(self.reasons)),
        )

    def _log_sources(self, what: str, read: Mapping[Replica, int]) -> None:
        """Each rank says where its bytes came from; the coordinator says it of all."""
        places = Counter[str]()
        for copy, nbytes in read.items():
            places[described(copy)] += nbytes
        own = ", ".join(f"{nbytes / 2**20:.1f} MiB from {place}" for place, nbytes in places.items())
        said = self._exchange.gather_values(own)
        by_source = Counter(said)
        ranks = {text: [rank for rank, each in enumerate(said) if each == text] for text in by_source}
        shown = ranks if self._exchange.is_coordinator else {own: [self._exchange.rank]}
        for text, of in shown.items():
            log.info("%s: rank%s %s: %s", what, "s" if len(of) > 1 else "", ", ".join(map(str, of)), text)

    # -- whether the run is this job's

    def _check_identity(self, stored: Commit | RankMarker) -> None:
        if self._exchange.all_agree(self._job.identity == Identity.of_stored(stored)):
            return
        live: Facts = {}
        for each in self._exchange.gather_values(live_facts(self._job.operators)):
            assert isinstance(each, dict)
            live |= each  # ranks may hold different experts
        was = self._stored_facts(stored)
        differences = self._exchange.run_on_coordinator(lambda: self._differences(stored, was, live))
        raise IdentityMismatch(
            f"{self._store.url} was written by a run that differs from this one: {differences}. Resume with what "
            "wrote it, give another URL, or start anew with resume='never'. Weights alone are carried over by "
            "`moe-ckpt export`. Nothing stored was lost."
        )

    def _stored_facts(self, stored: Commit | RankMarker) -> Callable[[], StoredFacts]:
        """What the run's ranks wrote: read by the coordinator from storage, or said by each rank of its own marker."""
        if isinstance(stored, Commit):
            return lambda: stored_facts([self._store.read_marker(stored, rank) for rank in range(stored.world_size)])
        facts: Facts = {}
        said = self._exchange.gather_values(list(stored_facts([stored])))
        for each in said:
            assert isinstance(each, list)
            facts |= each[0]
        assert isinstance(said[0], list)
        optimizer = said[0][1]  # rank 0 knows it for all
        return lambda: (facts, optimizer)

    def _differences(self, stored: Commit | RankMarker, was: Callable[[], StoredFacts], live: Facts) -> str:
        identity = Identity.of_stored(stored)
        lines = list(self._job.identity.job_differences(identity))
        if self._job.identity.fingerprint != identity.fingerprint:
            optimizer = live_optimizer(self._job.operators, self._job.view.schema, self._job.view.params)
            lines += model_differences(was(), (live, optimizer))
        return "; ".join(lines) or "the order of parameters, or settings of the optimizer's state"


def _version(commit: Commit) -> Version:
    return Version(commit.generation, commit.plan_hash)
