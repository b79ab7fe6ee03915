"""Open a run: find the generation to resume from, whole and verified, and begin an incarnation, which fences earlier
ones.

Ranks try versions from the newest on of which each can be given its part, or an older generation where storage is slow
(`_by_cost`). A version of another model, optimizer or world stops the search: the user decides what becomes of it.

If the log moved between the search and the opening of the incarnation, another process has started meanwhile or an
earlier one still commits, and the search begins again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import Any, cast

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.coordination import Exchange, warn_of_other_versions
from lightning_moe_ckpt.errors import ConfigurationError, Corrupt, IdentityMismatch, NoUsableGeneration
from lightning_moe_ckpt.journal import Journal
from lightning_moe_ckpt.parallel import ParallelGroups
from lightning_moe_ckpt.recovery._attempt import RestoreAttempt, Restored, RestorePlan
from lightning_moe_ckpt.recovery._fold import restore_chain
from lightning_moe_ckpt.recovery._inventory import Inventory, Reader, Version, memory_of, places_of
from lightning_moe_ckpt.recovery._loading import (
    RestoreSource,
    ResumeRequest,
    journal_capacity,
    misfit,
    read_journals,
    restored_window,
    stored_layouts,
    tokens_behind,
    understood,
    warn_of_a_restart,
)
from lightning_moe_ckpt.recovery._recut import Recut
from lightning_moe_ckpt.recovery._transfer import agreed_inventory
from lightning_moe_ckpt.snapshot import (
    IMPORTED,
    Facts,
    Identity,
    PlanRecord,
    Topology,
    constant_facts,
    expect_header_fits,
    live_facts,
    live_optimizer,
    model_differences,
    stored_facts,
)
from lightning_moe_ckpt.storage import (
    Backend,
    Commit,
    GenerationId,
    PosixBackend,
    RankMarker,
    Resume,
    RunStore,
    SegmentLayout,
    open_backend,
)
from lightning_moe_ckpt.tiers import HostTier, MemoryClaim, ObjectTier, Tier, shared_directory

log = rank_logger(__name__)

StoredFacts = tuple[Facts, list[str]]


class RunOpener:
    """This rank's access to the run under a URL; `bandwidth` limits the bytes per second that this rank may write."""

    def __init__(
        self,
        url: str,
        storage_options: Mapping[str, Any] | None,
        exchange: Exchange,
        groups: ParallelGroups,
        *,
        bandwidth: int | None = None,
    ) -> None:
        self._exchange, self._world_size = exchange, groups.world_size
        self._open_backend = partial(open_backend, url, storage_options=storage_options, bandwidth=bandwidth)
        self._backend: Backend | None = None
        self.store: RunStore
        self._apart: RunStore | None = None
        self._incarnation, self._nonce = 0, ""
        self._tag, self._changes_nothing = "", False
        self.claim: MemoryClaim
        """Claim on this rank's memory, once the run is open."""

    @property
    def run_id(self) -> str:
        """Identity of the run in storage."""
        return self.store.run_id

    def name(self, step: int) -> GenerationId:
        """Return a generation's name in this incarnation, once the run is open."""
        return GenerationId(step=step, incarnation=self._incarnation, nonce=self._nonce)

    def open(self, *, resume: Resume, job: ResumeRequest) -> RestoreSource | None:
        """Find the generation to resume from and open a new incarnation; return `None` for a fresh start. Collective.
        Raises `ConfigurationError` if this rank has more operators than a file can describe, or the tag is not
        `only_tag`; `NoUsableGeneration` if none of the generations could be read, or `resume='must'` found none;
        `IdentityMismatch` if the run was written by another model, optimizer or world.
        """
        with self._exchange.raise_together():  # a package may be missing on one machine only
            self._backend = self._open_backend()
            _refuse_process_memory(self._backend.url, self._world_size)
            expect_header_fits(job.view, job.groups)
        self._changes_nothing = job.rerun is not None
        listed = None
        with suppress(*([NoUsableGeneration] if job.only_tag else [])):  # none there: the tag is another one, too
            listed = self._open_store(self._backend, resume)
        if job.only_tag not in {"", self._tag}:
            raise ConfigurationError(
                f"`moe-ckpt {'replay' if job.rerun else 'densify'}` was given another URL than the callback of this script, "
                f"{self._backend.url}. Give it that one, or change the script's by arguments behind `--`."
            )
        if job.rerun is not None:
            if job.rerun.store:
                self._begin_apart(job.rerun.store)
            self._tag = job.rerun.name  # memory of the run, which may train meanwhile, is neither read nor taken
        any_memory, fresh = resume == "memory", job.view.operators
        with closing(HostTier(self._tag)) as memory:
            while True:
                search = Search(self.store, self._exchange, memory, job, any_memory=any_memory)
                found = search.run(listed)
                if found is None and (resume == "must" or (search.reasons and not search.nothing_stored)):
                    raise NoUsableGeneration(self._no_generation(resume, search))
                if found is None and search.reasons and self._exchange.is_coordinator:
                    log.warning(
                        "%s: nothing was stored yet, and what memory has does not do: training begins anew. %s",
                        *(self.store.url, "; ".join(search.reasons)),
                    )
                resumed = None if found is None else found.generation
                if found is None:
                    job.view.operators = fresh  # without the constants of generations that failed
                if job.rerun is not None or self._open_incarnation(resumed, search, foreign=any_memory):
                    stored = [version.generation for version in search.committed]
                    self.claim = MemoryClaim(
                        tag=self._tag,
                        run_id=self.run_id,
                        url=self.store.place,
                        offered=search.foreign,
                        world_size=self._exchange.world_size,
                        seen=max((each for each in stored if resumed is None or each <= resumed), default=None),
                    )
                    if found is None and self._exchange.is_coordinator:
                        warn_of_a_restart(self.store.url)
                    if found is not None and self._exchange.is_coordinator:
                        warn_of_other_versions(found.policy, found.generation, job.identity.versions)
                    return found
                listed = self._exchange.run_on_coordinator(self._list)

    def close(self) -> None:
        """Release the backend."""
        if self._backend is not None:
            self._backend.close()

    # -- private

    def _open_store(self, backend: Backend, resume: Resume) -> object:
        """Open the run, and return its `_list`. Collective."""

        def open_run() -> object:
            self.store = RunStore.open(backend, resume=resume)
            return [self.store.run_id, self.store.memory_tag, self._list()]

        run_id, self._tag, listed = cast("list[Any]", self._exchange.run_on_coordinator(open_run))
        if not self._exchange.is_coordinator:
            self.store = RunStore.join(backend, run_id=run_id)
        return listed

    @property
    def target(self) -> RunStore:
        """Run that gets generations from this process."""
        return self._apart or self.store

    def _begin_apart(self, folder: str) -> None:
        """Begin another run in a folder that all ranks see, as the target, and `name` its generations. Collective."""
        backend = PosixBackend(folder)

        def begin() -> object:
            self._apart = store = RunStore.open(backend, resume="auto")
            store.candidates()
            return [store.run_id, store.open_incarnation(None), store.nonce]

        run_id, self._incarnation, self._nonce = cast("list[Any]", self._exchange.run_on_coordinator(begin))
        self._apart = self._apart or RunStore.join(backend, run_id=run_id)

    def _list(self) -> object:
        """Return commits, generations kept for their files, and reasons why others cannot be read."""
        if not self._changes_nothing:
            self.store.promote()
        commits = [commit.to_bytes() for commit in self.store.candidates()]
        sources = [commit.to_bytes() for commit in self.store.sources]
        return [commits, sources, [f"{where}: {why}" for where, why in self.store.unreadable]]

    def _open_incarnation(self, resumed: GenerationId | None, search: Search, *, foreign: bool) -> bool:
        """Return whether the incarnation was opened; if not, the log has moved, and a new search is due. Collective."""

        def open_incarnation() -> object:
            incarnation = self.store.open_incarnation(resumed, volatile=search.volatile, foreign=foreign)
            return [incarnation, self.store.nonce, self.store.memory_tag]

        incarnation, self._nonce, self._tag = cast("list[Any]", self._exchange.run_on_coordinator(open_incarnation))
        self._incarnation = incarnation or 0
        return incarnation is not None

    def _no_generation(self, resume: Resume, search: Search) -> str:
        if not search.reasons:
            return (
                f"`resume={resume!r}`: {self.store.url} holds no committed generation. "
                "Use resume='auto' to start a new run there."
            )
        lines = "\n".join(f"  - {reason}" for reason in search.reasons)
        instead = ""
        if search.missing:
            instead = (
                f" With `allow_missing_experts=True` everything else is restored, and {', '.join(sorted(search.missing))} "
                "begin anew, with the weights that the model starts with."
            )
        return (
            f"{self.store.url} holds generations, but none can be restored:\n{lines}\n"
            "Put back what is missing (`moe-ckpt repair URL` rebuilds a lost log), begin anew beside what is there with "
            f"resume='never', or give another URL.{instead}"
        )


class Search:
    """A look at all generations for `job`; every method is collective. With `any_memory`, memory may be taken against the log."""

    def __init__(
        self, store: RunStore, exchange: Exchange, memory: Tier, job: ResumeRequest, *, any_memory: bool = False
    ) -> None:
        self._store, self._exchange, self._memory, self._job = store, exchange, memory, job
        self._any_memory = any_memory
        self.reasons: list[str] = []
        """Reasons why generations could not be restored; the same on all ranks after `run`."""
        self.volatile: frozenset[GenerationId] = frozenset()
        """Generations with some rank's part in memory."""
        self.committed: frozenset[Version] = frozenset()
        """Versions in storage."""
        self.missing: Mapping[str, str] = {}
        """Experts that the newest generation lacks, and why they have no good copy."""
        self.foreign: frozenset[GenerationId] = frozenset()
        """Generations in memory of another past than storage, which are not taken."""
        self._partial: list[Version] = []
        """Partial versions that were given up."""
        self._stored_layouts: list[SegmentLayout] = []
        """Layouts of the version under trial, as in its files."""
        self.nothing_stored = False
        """Whether the run has never committed and lost nothing: it ended before its first generation was durable, so
        memory may lack that generation's records."""

    def run(self, listed: object) -> RestoreSource | None:
        """Return the newest generation available to all ranks, with this rank's part; `None` without any. Commits in
        storage are `listed`. Raises `IdentityMismatch` if the run was written by another model, optimizer or world.
        """
        assert isinstance(listed, list)
        *stored, self.reasons = listed
        parsed = [[Commit.from_bytes(each, "commit of the coordinator") for each in row] for row in stored]
        self._commits, sources = ({Version(c.generation, c.plan_hash): c for c in row} for row in parsed)
        self._in_storage = {**self._commits, **sources}
        self._reader = Reader(
            self._store.run_id, self._memory, ObjectTier(self._store, list(self._in_storage.values()))
        )
        wrote = {version: commit.world_size for version, commit in self._in_storage.items()}
        self._stock = self._reader.stock(memory_of(shared_directory()))
        self._inventory = agreed_inventory(self._exchange, self._stock, self._commits, sources, wrote)
        self.committed = self._inventory.committed
        self.volatile = frozenset(version.generation for version in self._inventory.in_memory)
        judged = self._exchange.run_on_coordinator(self._judged)  # the coordinator knows the log
        assert isinstance(judged, list)
        rows, foreign, reasons = judged
        self._alive = [Version.from_plain(row) for row in rows]
        self.foreign = frozenset(Version.from_plain(row).generation for row in foreign)
        self.reasons = [*self.reasons, *reasons]
        self.nothing_stored = not self.reasons and not self._in_storage and not self._any_memory
        usable = self._by_cost(self._inventory.usable(self._alive))
        found = self._first_of(usable, may_lack=False)
        if found is None and self.missing and self._job.may_lack_experts:
            found = self._first_of(self._partial, may_lack=True)
        if found is not None and found.generation < usable[0].generation and self._exchange.is_coordinator:
            newest, taken = usable[0].generation, found.generation
            log.warning(
                "%s is resumed from, an older generation, since newer ones cannot be restored; the newest, %s, is %d steps "
                "ahead, which are trained again. Why: %s",
                *(taken, newest, newest.step - taken.step, "; ".join(self.reasons)),
            )
        return found

    # -- what there is

    def _judged(self) -> object:
        """Return the restorable versions, memory's versions of another past, and the reason if nothing else is there."""
        inventory, store = self._inventory, self._store
        seen = inventory.offers.seen
        whys = {v: store.why_foreign(v.generation, seen.get(v)) for v in inventory.in_memory if not self._any_memory}
        foreign = {version: why for version, why in whys.items() if why is not None}
        void = {version for version in inventory.in_memory if store.is_void(version.generation)}
        may = inventory.in_memory - void if self._any_memory else frozenset[Version]()
        alive = [
            v for v in inventory.all_versions if v in may or (v not in foreign and store.why_dead(v.generation) is None)
        ]
        if (rerun := self._job.rerun) is not None:
            alive = [version for version in alive if version.generation.step <= rerun.step]
        plain = [version.plain() for version in alive]
        newest = max(alive, default=None)
        if not foreign or (newest is not None and newest > max(foreign)):
            return [plain, [], []]
        offer = max(foreign)
        said = (
            f"memory has {offer.generation}, but it is of another past than {store.url} as it stands: {foreign[offer]}. "
            f"The newest there is {newest.generation if newest else 'nothing'}, and that is followed. To go on from memory "
            "instead, stop this job and start it with resume='memory'; until its next start or its end what memory has "
            "stays, as long as there is room"
        )
        if newest is not None:
            log.warning("%s", said)
        return [plain, [version.plain() for version in foreign], [] if newest is not None else [said]]

    # -- bringing it

    def _by_cost(self, usable: list[Version]) -> list[Version]:
        """Return versions newest first, but for an older generation in memory, within a period, if training is back sooner. Collective."""
        known, size = self._inventory, self._exchange.world_size
        held = next((each for each in usable if each in known.offers.whole), None)
        if held is None or held == usable[0] or known.writers(held) != size:
            return usable
        if max(self._alive).generation.step - held.generation.step > self._job.period_steps:
            return usable
        why = self._attempt(usable[0]).why_older(self._attempt(held))
        if why and self._exchange.is_coordinator:
            log.info("%s comes before %s, which memory does not have whole: %s", held, usable[0], why)
        return [held, *(each for each in usable if each != held)] if why else usable

    def _first_of(self, versions: Sequence[Version], *, may_lack: bool) -> RestoreSource | None:
        for version in versions:
            commit = self._commits.get(version)
            if self._inventory.writers(version) != self._exchange.world_size or (
                commit is not None and not self._is_alike(commit)
            ):
                found = self._bring_recut(version)
            else:
                found = self._bring(version, may_lack=may_lack)
            if found is not None:
                return found
        return None

    def _bring_recut(self, version: Version) -> RestoreSource | None:
        """Bring a version that other ranks wrote, or ranks in another layout. Raises `IdentityMismatch`. Collective."""
        exchange, known = self._exchange, self._inventory
        stocks = exchange.gather_values(self._stock.plain())
        attempt = Recut(
            *(exchange, self._reader, Inventory.of(stocks, known.committed, known.sources, known.wrote)),
            *(version, self._alive),
            digests=self._digests,
        )
        markers = attempt.markers()
        contradicts = markers is not None and self._is_alike(markers[0], markers)
        found = None if markers is None or contradicts else attempt.bring(markers, self._job, self._store)
        reasons = ["its commit and its markers speak of different ranks"] if contradicts else attempt.reasons
        self._note(version, reasons, given_up=found is None)
        if found is not None:
            said = cast("list[str]", exchange.gather_values(places_of(attempt.nbytes)))
            self._log_sources(str(version), said)
            self.volatile |= {found.generation}
        return found

    def _digests(self, owner: int) -> dict[Version, str]:
        """Return a rank's marker digests in manifests."""
        commits = self._in_storage.items()
        return {version: commit.markers[owner] for version, commit in commits if owner < commit.world_size}

    def _note(self, version: Version, reasons: Sequence[str], *, given_up: bool) -> None:
        """Keep reasons why a version was given up, or ended earlier."""
        for reason in reasons:
            if given_up:
                log.error("cannot resume from %s, %s; trying an older generation", version.generation, reason)
            self.reasons.append(f"{version.generation}, {reason}")

    def _attempt(self, version: Version, *, may_lack: bool = False) -> RestoreAttempt:
        writers = self._inventory.writers(version)
        own, commits = self._job.identity.topology, self._in_storage
        alive = [
            each
            for each in self._alive
            if self._inventory.writers(each) == writers
            and (each not in commits or Topology.of_stored(commits[each]) == own)
        ]
        return RestoreAttempt(
            *(self._exchange, self._reader, self._inventory, version, alive),
            digests=self._digests(self._exchange.rank),
            allow_missing=may_lack,
            num_stages=self._job.groups.num_stages,
        )

    def _bring(self, version: Version, *, may_lack: bool) -> RestoreSource | None:
        attempt = self._attempt(version, may_lack=may_lack)
        marker = attempt.marker()
        if marker is not None and version not in self._commits and not self._is_alike(marker):
            return self._bring_recut(version)
        misfits = [] if marker is None else self._misfits(marker)
        part, reasons = None, list(misfits)
        if marker is not None and not misfits:
            experts = {op.name: op.numel for op in self._job.view.operators if op.kind == "expert"}
            if attempt.is_differential:
                part, reasons = restore_chain(attempt, marker)
            else:
                part = attempt.bring(marker, experts, partial(self._lay_out, marker))
        self._stored_layouts, journals = [], list[Journal]()
        if part is not None and (unread := self._unread(version, part, journals)):
            part, reasons = None, [*reasons, *unread]
        if part is None:
            self.missing = self.missing or attempt.missing
            self._partial += [version] if attempt.is_partial and not may_lack else []
            self._note(version, (*attempt.reasons, *reasons), given_up=True)
            return None
        reached = part.marker.generation
        self._note(version, reasons, given_up=False)
        self.volatile |= {reached}  # in memory; storage need not have it under this name
        committed = version in self._commits and reached == version.generation
        return RestoreSource.of(part, journals, tokens_behind(attempt, part.chosen), committed=committed)

    def _lay_out(self, marker: RankMarker, chosen: RestorePlan) -> list[SegmentLayout]:
        """Return the layouts of this rank's records: as in files, unless experts are of other generations."""
        if not chosen.is_partial:
            return self._stored_layouts
        journal_nbytes = journal_capacity(marker)
        with self._exchange.raise_together(IdentityMismatch), understood(f"{marker.generation}: its plan"):
            plan = PlanRecord.from_json(str(marker.policy["plan"]))
            window = restored_window(plan, chosen, self._job.view, self._job.groups, journal_nbytes)
        return [step.durable.segment for step in window.steps]

    def _misfits(self, marker: RankMarker) -> list[str]:
        """Return the reasons why a part does not fit this job or some rank's memory; equal on all ranks. Collective.

        If it fits, give the view's operators the constants of the generation's plan; generations may differ.
        """
        view = self._job.view
        with self._exchange.raise_together(IdentityMismatch) as reasons:
            try:
                self._stored_layouts = stored_layouts(marker)
                reasons.append(misfit(marker, view))
            except Corrupt as error:
                reasons.append(str(error))
            if reasons == [None]:
                with understood(f"{marker.generation}: its plan"):
                    plan = PlanRecord.from_json(str(marker.policy["plan"]))
                    view.operators = view.operators.without(plan.constants, plan.thawed)
        return _by_rank(reasons)

    def _unread(self, version: Version, part: Restored, journals: list[Journal]) -> list[str]:
        """Fill `journals`, and return all ranks' reasons why journals cannot be read; log the sources of bytes without any. Collective."""
        reason = None
        try:
            journals += read_journals(part.layouts, part.segments)
        except Corrupt as error:
            reason = str(error)
        said = self._exchange.gather_values([reason, places_of(part.nbytes)])
        rows = cast("list[tuple[str | None, str]]", said)
        if not (unread := _by_rank([each for each, _ in rows])):
            self._log_sources(str(version), [each for _, each in rows])
        return unread

    def _log_sources(self, what: str, said: Sequence[str]) -> None:
        """Log the sources of this rank's bytes; on the coordinator, of all ranks' bytes."""
        ranks: dict[str, list[int]] = {}
        for rank, text in enumerate(said):
            ranks.setdefault(text, []).append(rank)
        own = self._exchange.rank
        shown = ranks if self._exchange.is_coordinator else {said[own]: [own]}
        for text, of in shown.items():
            log.info("%s: rank%s %s: %s", what, "s" if len(of) > 1 else "", ", ".join(map(str, of)), text)

    # -- whether the run is this job's

    def _is_alike(self, stored: Commit | RankMarker, markers: Sequence[RankMarker] = ()) -> bool:
        """Return whether a generation is of these ranks in this layout; false if other ranks may have written it.
        Collective. Raises `IdentityMismatch` if the model differs, or the layout does and must not.
        """
        if IMPORTED in stored.policy:
            return False  # of no ranks; the records say whether the model is the same
        own, identity = self._job.identity, Identity.of_stored(stored)
        if self._exchange.all_agree(own == identity):
            return True
        moved = self._exchange.all_agree(self._job.elastic and own.topology != identity.topology)
        if moved and (not markers or self._exchange.all_agree(own.is_same_model(identity))):
            return False  # without markers of all writers there is more to look at
        live: Facts = {}
        for each in self._exchange.gather_values(
            live_facts(self._job.view.operators.whole or self._job.view.operators)
        ):
            assert isinstance(each, dict)
            live |= each  # ranks may hold different experts
        was = self._stored_facts(stored, markers)
        differences = self._exchange.run_on_coordinator(lambda: self._differences(stored, was, live, moved=moved))
        if moved and not differences:
            return False
        refused = own.topology != identity.topology and not self._job.elastic
        also = ", allow other ranks with elastic='auto'" if refused else ""
        raise IdentityMismatch(
            f"{self._store.url} was written by a run that differs from this one: {differences}. Resume with what "
            f"wrote it{also}, give another URL, or start anew with "
            "resume='never'. Weights alone are carried over by `moe-ckpt export`. Nothing stored was lost."
        )

    def _stored_facts(self, stored: Commit | RankMarker, markers: Sequence[RankMarker]) -> Callable[[], StoredFacts]:
        """Return a reader of the stored run's facts, from storage on the coordinator or from all markers. Collective."""
        if markers:
            return lambda: stored_facts(markers)
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

    def _differences(
        self, stored: Commit | RankMarker, was: Callable[[], StoredFacts], live: Facts, *, moved: bool
    ) -> str:
        """Return all differences in words; if the layout may have moved, those besides, empty without any."""
        identity = Identity.of_stored(stored)
        lines = list(self._job.identity.job_differences(identity, moved=moved))
        if self._job.identity.fingerprint != identity.fingerprint:
            facts, optimizer_was = was()
            facts |= constant_facts(self._store.read_constants(stored.policy))
            # with stages the coordinator knows a part of the optimizer only; facts are complete
            one = self._job.groups.num_stages == 1
            view = self._job.view
            optimizer = live_optimizer(view.operators, view.schema, view.params) if one else optimizer_was
            lines += model_differences((facts, optimizer_was), (live, optimizer))
        return "; ".join(lines) or ("" if moved else "the order of parameters, or settings of the optimizer's state")


def _by_rank(reasons: Sequence[str | None]) -> list[str]:
    return [f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason is not None]


def _refuse_process_memory(url: str, world_size: int) -> None:
    if url.startswith("memory:") and world_size > 1:
        raise ConfigurationError(
            f"`{url}` is the memory of one process, and this run has {world_size}: none would see what the others store. "
            "Give a path or URL that all of them reach."
        )
