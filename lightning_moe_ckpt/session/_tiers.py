"""Decide which generation goes to which tier, alike on all ranks.

A tier that takes every generation gets its segments as they are sealed. Any other tier, when idle on all ranks, gets
the newest complete generation that it has not had, else the beginning window; while the tier is busy, generations pass
by. So a slow tier never stretches the window or starves another.

A generation is complete in a tier when every rank holds it there. Ranks do not compare their newest generations: the
smallest may be one that another rank failed to keep. Each rank says which of the generations given to the tier it
holds, and which it has given up. Generations held by all are complete. For given-up generations nobody waits, and their
memory is free; else a fault over a few generations would fill memory with segments that no rank will ever ask for.

A partial generation is complete in a tier together with older ones. A tier without a base, or that lost its base, is
given a *whole* generation, which needs no place in the ring. While whole generations fail, every second window is
another attempt: each costs a full snapshot, and once the fault is over the tier is at most two windows behind.

Source: TierCheck (2026), Sec. 3.3 and Fig. 5.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.errors import CheckpointError, Fenced
from lightning_moe_ckpt.launch import Supervised
from lightning_moe_ckpt.planning import LedgerKeeper
from lightning_moe_ckpt.process import Stragglers
from lightning_moe_ckpt.recovery import RestoreSource
from lightning_moe_ckpt.session._pacing import Governor, StepKind
from lightning_moe_ckpt.session._window import TierLane, TiersVote, Window
from lightning_moe_ckpt.snapshot import WindowLayout
from lightning_moe_ckpt.storage import Commit, GenerationId, RankMarker, RunStore
from lightning_moe_ckpt.tiers import (
    STORAGE,
    Base,
    PersistWorker,
    SegmentRing,
    SessionConfig,
    SkipCounter,
    TierWorker,
    WriteRequest,
)

log = rank_logger(__name__)

_LINKS_IN_LINE = 12
"""Most generations under way in a tier as a difference comes; beyond, the tier gets none until the next base."""
_BASES_IN_LINE = 2
"""Most generations under way in a tier as a base comes; beyond, the base and its differences pass the tier by."""


class Tiers:
    """The workers of one incarnation, one per tier, in the same order on all ranks."""

    def __init__(
        self,
        workers: Sequence[TierWorker],
        *,
        watcher: LedgerKeeper | None = None,
        config: SessionConfig | None = None,
        bound: str = "",
        speaks: bool = False,
    ) -> None:
        self.workers, self._watcher = list(workers), watcher
        config = config or SessionConfig(url="")
        target, at_least = config.overhead_target, config.storage_at_least
        self.governor = Governor(workers, target=target, at_least=at_least, bound=bound, speaks=speaks)
        self._lanes = [TierLane(worker=worker, skips=SkipCounter(worker.name)) for worker in workers]
        self.bounded = bool(bound)
        """Whether the user has bounded the steps between generations, so that training waits for them."""
        self._period_steps, self._has_waited = 1, False
        """Steps between starts of windows without a limit, and whether a warning of a wait was logged."""
        self.everywhere: dict[str, GenerationId] = {}
        """Newest generation complete on all ranks, by tier."""
        self.stragglers: Stragglers | None = None
        """Compares ranks' own work with every vote; `None` if no two ranks have equal work."""

    # -- the exchange before a window

    def vote(self) -> TiersVote:
        """Return this rank's vote on tiers."""
        own = tuple(lane.vote(self.governor.idle_for(lane.worker)) for lane in self._lanes)
        pacing = self.governor.vote(self._period_steps)
        return TiersVote(own, pacing, 0 if self.stragglers is None else self.stragglers.vote())

    def agreed(self, votes: Sequence[TiersVote], *, filling: GenerationId | None = None) -> set[GenerationId]:
        """Take all ranks' votes: tells tiers which generations are complete everywhere, and which are given up.

        Args:
            votes: votes of all ranks.
            filling: generation of the window under way, which runs to its end even if a tier gives it up.

        Returns:
            Generations given up by a tier that takes every generation: their memory is free.
        """
        freed: set[GenerationId] = set()
        self.governor.agreed([vote.pacing for vote in votes])
        if self.stragglers is not None:
            self.stragglers.agreed([vote.own_work for vote in votes])
        for index, lane in enumerate(self._lanes):
            lanes = [vote.lanes[index] for vote in votes]
            lane.idle = self.governor.may_work(lane.worker.name, min(lanes).idle)
            complete, given_up = lane.agreed(lanes, filling)
            for generation in given_up:  # first: complete generations are counted without these
                self._give_up(lane.worker, generation)
            freed |= set(given_up) if lane.worker.takes_every else set()
            if complete:
                self.complete_everywhere(lane.worker.name, *complete)
                lane.supersedes = complete[-1]
        for lane in self._lanes:  # memory keeps older generations until the base is on other nodes
            if lane.supersedes is not None and not (lane.worker.takes_every and self.base_under_way):
                lane.worker.complete_everywhere(lane.supersedes)
                lane.supersedes = None
        return freed

    def complete_everywhere(self, tier: str, *generations: GenerationId) -> None:
        """Note that a tier has these generations, oldest first, on every rank. On all ranks."""
        self.build_on(tier, generations[-1])
        if self._watcher is not None:
            for generation in generations:
                self._watcher.complete_everywhere(tier, generation)

    def build_on(self, tier: str, generation: GenerationId) -> None:
        """Note that a tier has `generation`, on which later generations may be built. On all ranks."""
        self.everywhere[tier] = generation
        for lane in self._lanes:
            if lane.worker.name == tier:
                lane.complete(generation)
            if tier == STORAGE:
                for memory in lane.worker.memories:
                    memory.saw(generation)

    def memory_lost(self, *, here: bool) -> None:
        """Note that some rank has lost its memory of generations, this rank if `here`. On all ranks."""
        for lane in self._lanes:
            if lane.worker.takes_every:
                if here:
                    lane.worker.forget()
                if self._watcher is not None:
                    self._watcher.lost(lane.worker.name)

    @property
    def outstanding(self) -> bool:
        """Whether a tier that takes every generation may have completed an older generation than the newest meanwhile.

        Its completion makes room for the window under way. The same on all ranks.
        """
        return any(lane.worker.takes_every and len(lane.given) > 1 for lane in self._lanes)

    # -- plans and steps

    def planned(self, exchange: Exchange, ring: SegmentRing, layout: WindowLayout) -> None:
        """Tell tiers the layout of later generations, in slots of `ring`. Collective. Raises `ConfigurationError` on every rank if any of them
        has no room for the generations that a tier keeps.
        """
        self.governor.measured.window_nbytes = sum(step.nbytes for step in layout.steps)
        for worker in self.workers:
            worker.planned(exchange, ring, layout.copied)

    def stepped(self, period_steps: int, hooks: float | None, validated: float = 0.0) -> None:
        """Tell tiers that a step has ended, and the steps between generations; the rest as in `MeasuredSteps.stepped`."""
        self._period_steps = period_steps
        self.governor.measured.stepped(hooks, validated)
        period_steps = max(period_steps, self.governor.gap_steps)
        for worker in self.workers:
            worker.stepped(period_steps)

    # -- generations

    def offer(self, newest: Window | None) -> None:
        """Give a generation that is complete on all ranks to every idle tier that has not had it."""
        if newest is None or newest.is_link:
            return
        for lane in self._lanes:
            if lane.idle and lane.worker not in newest.workers and not lane.worker.takes_links:
                self._begin(lane, newest)
                for segment in newest.segments:
                    lane.worker.add(segment.generation, segment)

    def open(self, window: Window) -> None:
        """Begin a window: tiers that take it get its segments as they are sealed."""
        self.governor.measured.captures.opened()
        for lane in self._lanes:
            if window.is_chained and (lane.worker.uses_references or lane.worker.takes_links):
                self._open_in_chain(lane, window)
            elif lane.worker.takes_every or (lane.idle and not (window.is_link or lane.cannot_take(window.layout))):
                self._begin(lane, window)

    def begin_first(self, tier: str, generation: GenerationId) -> None:
        """Note that a tier gets a run's first generation, dense, from the caller. On all ranks.

        Until it is complete the tier is busy and has no base; after a failure the next generation is whole. The watcher
        hears of it only when complete: nothing trained could have been saved before.
        """
        self.governor.measured.note(StepKind.UNUSUAL)
        for lane in self._lanes:
            if lane.worker.name == tier:
                lane.take(generation)

    def wants_whole(self, generation: GenerationId, layout: WindowLayout) -> bool:
        """Return whether a tier without a base for `layout` gets this whole boundary.

        The same on all ranks; ask once before each window. The caller begins the generation with the worker.
        """
        if not layout.is_incomplete:
            return False
        lanes = [lane for lane in self._lanes if lane.idle and lane.cannot_take(layout) and lane.attempt()]
        for lane in lanes:
            log.warning(
                "%s has nothing that %s could be completed from: it gets all of it", lane.worker.name, generation
            )
            if self._watcher is not None:
                self._watcher.given_everything(lane.worker.name, generation)
            lane.take(generation)
        if lanes:
            self.governor.measured.note(StepKind.UNUSUAL)
        return bool(lanes)

    def want_gradients(self, window: Window) -> bool:
        """Return whether a tier that takes the window wants the gradients of its steps."""
        return any(worker.wants_gradients for worker in window.workers)

    def abandon(self, window: Window) -> None:
        """Tell every tier that took a window that its generation will not be complete."""
        for worker in window.workers:
            worker.abandon(window.generation)

    def abandon_whole(self, generation: GenerationId) -> None:
        """Tell all tiers that a whole generation is useless."""
        for lane in self._lanes:
            lane.worker.abandon(generation)

    def withdraw(self, window: Window) -> None:
        """Abort a window, on all ranks: tiers give it up without counting a failure."""
        for lane in self._lanes:
            lane.let_go(window.generation)
            if window.generation in lane.given:
                lane.given.remove(window.generation)
                self._give_up(lane.worker, window.generation)
        self.abandon(window)

    def not_taken(self, generation: GenerationId) -> None:
        """Note that some rank could not complete a generation. On all ranks."""
        for lane in self._lanes:
            lane.let_go(generation)

    def superseded(self, window: Window) -> None:
        """Count a skip for tiers that have not had this window's generation, since a newer one is complete."""
        for lane in self._lanes:
            if lane.worker not in window.workers and not window.is_chained:
                lane.skips.skipped(window.generation, meant=bool(self.governor.rest_seconds.get(lane.worker.name)))

    def flush(self, timeout: float) -> None:
        """Wait for paced tiers to release memory that the next generation needs, at most `timeout` seconds per tier."""
        for worker in self.workers:
            if worker.paced:
                worker.drain(timeout)

    def hand_over(self, newest: Window | None) -> None:
        """Give storage the newest complete generation, or gathered differences, since no later one comes. On all ranks, storage idle."""
        for lane in self._lanes:
            lane.idle = lane.worker.name == STORAGE
            if lane.gathered:
                self._hand_over(lane)
        self.offer(newest)

    def make_room(self, newest: Window | None) -> None:
        """Give tiers the newest complete generation, and let them hurry; a tier without any lets go of what it holds. On all ranks."""
        self.offer(newest)
        self.flush(0.0)
        for lane in self._lanes:
            if lane.idle and not lane.given:
                lane.worker.let_go()

    @property
    def base_under_way(self) -> bool:
        """Whether a tier that takes single differences still takes their base on some rank; the same on all ranks."""
        return any(lane.worker.takes_links and lane.chain and lane.chain[0] in lane.given for lane in self._lanes)

    @property
    def lost_chain(self) -> bool:
        """Whether a tier with gathered differences has no generation that more could follow on."""
        return any(lane.worker.uses_references and lane.chain is None for lane in self._lanes)

    def settle(self, timeout: float) -> None:
        """Wait for tiers that take every generation, at most `timeout` seconds per tier."""
        for worker in self.workers:
            if worker.takes_every and not worker.idle:
                worker.drain(timeout)

    def drain(self, timeout: float) -> None:
        """Wait for all tiers, which rest for it, at most `timeout` seconds per tier; warn of the first wait of over a second."""
        began, busy = time.perf_counter(), ", ".join(self.busy)
        for worker in self.workers:
            since = time.perf_counter()
            worker.drain(timeout)
            self.governor.waited(worker, time.perf_counter() - since)
        if (waited := time.perf_counter() - began) > 1.0 and not self._has_waited:
            self._has_waited = True
            what = "which reads memory that a generation was due in, and now rests. Give `memory_generations=3`, or more steps between two"
            log.warning("training waited %.1f s for %s, %s", waited, busy, what)

    # -- all workers

    @property
    def busy(self) -> list[str]:
        """Names of tiers with a generation under way on this rank."""
        return [worker.name for worker in self.workers if not worker.idle]

    def newest(self) -> dict[str, int]:
        """Return the step of this incarnation's newest generation on this rank, by tier."""
        held = {worker.name: worker.newest for worker in self.workers}
        return {name: generation.step for name, generation in held.items() if generation is not None}

    def skipped(self) -> dict[str, int]:
        """Return the number of complete generations that passed by each tier that does not take every generation."""
        return {lane.worker.name: lane.skips.total for lane in self._lanes if not lane.worker.takes_every}

    def failed(self) -> dict[str, int]:
        """Return the number of given generations that some rank lost for good, by tier."""
        return {lane.worker.name: lane.num_failed for lane in self._lanes}

    def reserved(self) -> dict[str, int]:
        """Return the bytes of tiers' memory on this rank; tiers without memory are left out."""
        sizes = {worker.name: sum(memory.nbytes for memory in worker.memories) for worker in self.workers}
        return {name: nbytes for name, nbytes in sizes.items() if nbytes}

    def unlink(self) -> None:
        """Remove all names of shared memory, right before the process is ended."""
        for worker in self.workers:
            for memory in worker.memories:
                # Without logging: the hanging thread that caused the end may hold the log's lock.
                memory.unlink()

    def release(self, *, unlink: bool) -> None:
        """Release memory, after `close`. With `unlink` also remove names; else a later incarnation finds its contents."""
        for worker in self.workers:
            for memory in worker.memories:
                memory.close(unlink=unlink)

    def close(self) -> None:
        """End all threads; generations under way are abandoned."""
        for lane in self._lanes:
            lane.worker.close()
            lane.skips.close()

    # -- private

    def _give_up(self, worker: TierWorker, generation: GenerationId) -> None:
        if self._watcher is not None:
            self._watcher.given_up(worker.name, generation)
        worker.give_up(generation)

    def _open_in_chain(self, lane: TierLane, window: Window) -> None:
        """Give gathered differences to a tier, then begin or gather the window.

        Drops the tier's chain if too many generations are under way.
        """
        if lane.gathered and (lane.gathered[-1].ends_batch or not window.is_link):
            self._hand_over(lane)
        if not window.is_link:
            # A base that storage has in line keeps a generation's memory: of two, none would be left for the next window.
            second = lane.last_base in lane.given and not lane.worker.takes_links
            passed_by = not lane.idle and (second or len(lane.given) >= _BASES_IN_LINE)
            lane.chain = None if passed_by else []
            lane.last_base = lane.last_base if passed_by else window.generation
        elif lane.chain is not None and len(lane.given) >= _LINKS_IN_LINE:
            lane.chain = None
            log.warning("%s does not keep up with differences, and gets none until the next base", lane.worker.name)
        if lane.chain is None:
            return
        if lane.worker.takes_links or not window.is_link:
            lane.chain.append(window.generation)
            self._begin(lane, window)
        else:
            window.ring.pin(window.generation)
            lane.gathered.append(window)

    def _hand_over(self, lane: TierLane) -> None:
        """Give the gathered differences to a tier, as a generation with the last one's name."""
        windows, lane.gathered = lane.gathered, []
        last = windows[-1]

        def release(_: GenerationId) -> None:
            for window in windows:
                window.ring.unpin(window.generation)

        if lane.chain is None:  # their base was given up meanwhile
            release(last.generation)
            return
        lane.take(last.generation)
        lane.worker.begin(
            WriteRequest(
                generation=last.generation,
                plan_hash=last.layout.record.plan_hash,
                plan_json=last.layout.record.to_json(),
                num_segments=len(windows),
                unix_time=last.unix_time,
                on_released=release,
                follows=tuple(lane.chain),
            )
        )
        lane.chain.append(last.generation)
        for window in windows:
            lane.worker.add(last.generation, window.segments[0])

    def _begin(self, lane: TierLane, window: Window) -> None:
        worker, layout = lane.worker, window.layout
        window.workers.append(worker)
        if self._watcher is not None:
            self._watcher.given(worker.name, window.generation, layout, worker.generations_kept)
        lane.take(window.generation)
        window.ring.pin(window.generation)
        uses_references = worker.uses_references and layout.is_incomplete
        bad, completes = (
            ({}, True) if self._watcher is None else (self._watcher.bad_copies, self._watcher.all_have_copies)
        )
        base = Base(generation=lane.base if completes else None, missing=layout.missing) if uses_references else None
        worker.begin(
            WriteRequest(
                generation=window.generation,
                plan_hash=layout.record.plan_hash,
                plan_json=layout.record.to_json(),
                num_segments=len(layout.steps),
                sizes=layout.copied,
                unix_time=window.unix_time,
                on_released=window.ring.unpin,
                base=base,
                follows=lane.chain[:1] if lane.chain is not None and window.is_link else (),
                bad=bad,
            )
        )


def report_failures(tiers: Tiers, not_taken: list[str], url: str) -> None:
    """Log failures since the last call.

    Args:
        tiers: tiers of this incarnation.
        not_taken: reasons why generations were not taken at all; emptied.
        url: URL of the run.

    Raises:
        Fenced: a later incarnation has begun.
    """
    fenced = False
    for worker in tiers.workers:
        for failure in worker.take_failures():
            log.error("%s: a checkpoint was not saved; training goes on: %s", worker.name, failure)
        fenced = fenced or worker.fenced
    while not_taken:
        log.error("a checkpoint was not taken; training goes on: %s", not_taken.pop(0))
    if fenced:
        if (supervised := Supervised.from_environment()) is not None:
            supervised.end_job("found that a later start of the run has taken over")  # else it would take it back
        raise Fenced(
            f"{url}: a later start of this run has taken over, nothing of this process is stored any more. Stop this "
            "process, or give one of the two jobs another URL."
        )


def build_on_stored(
    store: RunStore, exchange: Exchange, tiers: Tiers, worker: PersistWorker, found: RestoreSource | None
) -> None:
    """Build this incarnation's generations on the newest commit, if all ranks can read it. Collective.

    Args:
        store: of the run, its incarnation open.
        exchange: between ranks.
        tiers: told that storage has the commit's generation.
        worker: storage worker of this rank.
        found: the restored generation.
    """
    chosen = None if found is None else found.chosen
    # A copy that was bad twice, or is nowhere, has no older copy in the newest commit for the next to reference.
    completes = chosen is None or not (chosen.missing or any(sum(each.values()) > 1 for each in chosen.bad.values()))
    try:
        stored = exchange.run_on_coordinator(lambda: [commit.to_bytes() for commit in store.candidates()[:1]])
        assert isinstance(stored, list)
        for each in stored:
            commit, markers = Commit.from_bytes(each, "commit of the coordinator"), list[RankMarker]()
            with exchange.raise_together():
                markers.append(store.read_marker(commit, exchange.rank))
            if len(commit.steps) == 1:  # a window of several steps holds no states of one step
                worker.build_on(markers[0])
                if completes:
                    tiers.build_on(STORAGE, markers[0].generation)
    except CheckpointError as error:  # on every rank
        log.warning("nothing is built on what storage has, the next generation is stored whole: %s", error)
