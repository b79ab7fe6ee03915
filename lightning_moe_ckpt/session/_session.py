"""Run one incarnation: from finding a generation to resume, over replay and capture, to the last durable byte.

Nothing here depends on Lightning; the callbacks call one method per hook. Every rank calls all methods from the
training thread, in the same order.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import torch
from xxhash import xxh3_128_hexdigest

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.coordination import Exchange, Neighbours
from lightning_moe_ckpt.journal import UNFIT, Journal, encode
from lightning_moe_ckpt.native import Bubbles, create_engine
from lightning_moe_ckpt.operators import StateSchema, discover
from lightning_moe_ckpt.parallel import ParallelGroups
from lightning_moe_ckpt.planning import Planner
from lightning_moe_ckpt.policies import Policy
from lightning_moe_ckpt.process import FrozenHeap, HookClock, StallMeter, collections_paused
from lightning_moe_ckpt.recovery import RestoreSource, ResumeRequest, RunOpener, follow_found, is_superseded, load_found
from lightning_moe_ckpt.session._chain import Capture, capture_session
from lightning_moe_ckpt.session._dense import DenseCapture, DenseTurns
from lightning_moe_ckpt.session._repeats import Repeats
from lightning_moe_ckpt.session._report import (
    Durations,
    Report,
    capture_figures,
    expect,
    found_figures,
    log_figures,
    tier_figures,
)
from lightning_moe_ckpt.session._tiers import Tiers, build_on_stored, make_ring, report_failures
from lightning_moe_ckpt.snapshot import Averages, Copies, Identity, StateView, WindowLayout, describe_stages, log_plan
from lightning_moe_ckpt.tiers import (
    STORAGE,
    HostWorker,
    Markers,
    PersistWorker,
    RankMemory,
    Rings,
    SessionConfig,
    claim_memory,
    join_peers,
)

log = rank_logger(__name__)

_MEASURED_JOURNALS = 2
"""Steps whose journals are measured, captured or not, to reserve room in the first plan."""


class CheckpointSession:
    """Checkpointing of one `fit`.

    With `may_skip`, `requires_grad` may be toggled in replay, unless a compiler (`compiled`) makes other programs, with
    other rounding, for watched or frozen modules. `extra` holds the trainer's entries for exports; entries that cannot
    be stored are left out. `averages` are the module's averages kept by callbacks. `repeats` belongs to an earlier
    session, in the midst of whose replay this session is opened.
    """

    @collections_paused()
    def __init__(
        self,
        config: SessionConfig,
        *,
        policy: Policy,
        module: torch.nn.Module,
        schema: StateSchema,
        groups: ParallelGroups,
        autocast_dtype: torch.dtype | None,
        may_skip: bool,
        compiled: bool = False,
        extra: Mapping[str, object] | None = None,
        averages: Averages | None = None,
        as_user: Callable[[Journal], None] = lambda _: None,
        repeats: Repeats | None = None,
    ) -> None:
        self._as_user = as_user
        self._extra, self._autocast_dtype, self._may_skip = dict(extra or {}), autocast_dtype, may_skip and not compiled
        self._config, self._policy, self._groups = config, policy, groups
        unknown: Literal["dense", "refuse"] = "dense" if policy.exact else "refuse"  # exact: everything, whatever it is
        self._operators = discover(module, ep_size=groups.ep_size, unknown=unknown)
        self._view = StateView(module, self._operators, schema, {}, averages)
        self._exchange = Exchange(groups)
        self._copies = Copies(self._view, groups, self._exchange)
        self._planner = Planner(
            policy,
            *(self._view, groups, self._exchange, module),
            autocast_dtype=autocast_dtype,
            may_probe=not compiled,
        )
        self.layers, self.least_steps = self._operators.layers, policy.least_steps(len(self._view.operators))
        device = next(iter(self._view.params.values())).device
        self._stalls, self.clock, self._heap = StallMeter(device), HookClock(), FrozenHeap(wanted=config.freeze_heap)
        self._runs: RunOpener | None = None
        self._storage: PersistWorker | None = None
        self._memory: RankMemory | None = None
        self._rings: Rings | None = None
        self._dense: DenseCapture | None = None
        self._turns = DenseTurns(config.dense_every_n_steps)
        self._tiers = Tiers([])
        self._capture: Capture | None = None
        self._engine = create_engine(device)
        self.bubbles = Bubbles(self._engine, device)
        self._found: RestoreSource | None = None
        self.repeats = Repeats() if repeats is None else repeats
        self._steps = 0
        self._outcome: Journal = {}
        self._durations = Durations(self.clock)
        self._last_window: int | None = None
        self._at: int | None = None
        self._last_step: int | None = None

    # -- start

    def begin(self, *, stay: bool = False) -> Journal | None:
        """Open the run, load the generation to resume, and return its boundary's start half; `None` for a fresh start.

        With `stay` the live state, of a later step, is kept, and nothing is loaded.
        """
        started = time.perf_counter()
        with self._heap.keeping():
            start = self._begin(stay=stay)
        if start is None:
            self._heap.sweep()
        self._durations.start = time.perf_counter() - started
        return start

    def _begin(self, *, stay: bool) -> Journal | None:
        started = time.perf_counter()
        view, ops, groups = self._view, self._operators, self._groups
        identity = Identity.of_job(ops, view.schema, groups, self._autocast_dtype, self._exchange)
        self._runs = RunOpener(
            self._config.url, self._config.storage_options, self._exchange, groups, bandwidth=self._config.bandwidth
        )
        job = ResumeRequest(
            identity=identity, view=view, groups=groups, may_lack_experts=self._policy.allow_missing_experts
        )
        self._found = found = self._runs.open(resume=self._config.resume, job=job)
        resumed = None if found is None else found.policy
        self._planner = self._planner.settle(self._runs.store, self._runs.name(0), resumed, load=not stay)
        self._join_tiers(identity)
        self._capture = capture_session(
            *(self._policy.chains, view),
            name=self._runs.name,
            exchange=self._exchange,
            engine=self._engine,
            tiers=self._tiers,
            stalls=self._stalls,
            make_ring=partial(make_ring, expect(self._rings), self._tiers, self._planner, self.least_steps),
            renew_ring=expect(self._rings).renew,
            plans=self._planner,
        )
        self._planner.begin()
        if found is None:
            return None
        if stay:
            layout = self._take_up(found, *follow_found(found, view, groups, self._exchange))
            self.repeats.go_on(layout, groups, self._engine)
            return found.start
        start = self._load(found)
        self._durations.restore = time.perf_counter() - started
        log.info(
            "resumes from %s, plan %s, at step %d in %.2f s; dense after %d replayed steps",
            *(found.generation, xxh3_128_hexdigest(found.policy["plan"].encode())[:8], found.first_step),
            *(self._durations.restore, len(found.segments) - 1),
        )
        return start

    def _join_tiers(self, identity: Identity) -> None:
        """Make one worker per tier, in the same order on all ranks."""
        is_first, runs, view = self._exchange.is_coordinator, expect(self._runs), self._view
        markers = Markers(
            run_id=runs.run_id,
            rank=self._groups.rank,
            world_size=self._groups.world_size,
            policy={"policy": self._policy.kind, **identity.policy(), **self._planner.constants.policy},
            module=describe_stages(view.module, view.schema, self._extra, self._exchange, self._groups),
            lineage=runs.store.lineage,
        )
        resumed = self._found.generation if self._found is not None else None
        with self._exchange.raise_together():
            older = not self._policy.exact or self._policy.chains is not None
            self._memory = claim_memory(
                runs.claim, markers.rank, resumed, dense_nbytes=self._planner.sizes.dense_nbytes, older=older
            )
        self._rings = Rings(self._memory, self._engine)
        if is_first:
            runs.store.tell(self._figures)
        in_turns = () if self._policy.exact else self._operators
        self._storage = PersistWorker(
            runs.store,
            markers,
            retention=self._config.retention,
            commit_timeout=self._config.commit_timeout,
            duplicated=[operator.name for operator in in_turns if operator.kind == "expert"],
            on_complete=self._memory.saw if is_first else None,
        )
        self._dense = DenseCapture(
            name=runs.name,
            view=self._view,
            groups=self._groups,
            exchange=self._exchange,
            engine=self._engine,
            worker=self._storage,
            stalls=self._stalls,
            journal=self._planner,
        )
        peers = join_peers(
            *(self._config, runs.claim, markers, self._exchange, self._groups),
            dense_nbytes=self._planner.sizes.dense_nbytes,
            resumed=resumed,
            plan=self._planner,
            device=next(iter(self._view.params.values())).device,
        )
        workers = [HostWorker(self._memory, markers), self._storage, *peers]
        paced = None if self._policy.chains else self._config  # differences are taken at every step
        self._tiers = Tiers(workers, watcher=self._planner.tokens, config=paced, speaks=is_first)
        self._planner.joined(workers)
        if not self._policy.exact and resumed is not None:
            build_on_stored(runs.store, self._exchange, self._tiers, self._storage, self._found)

    def _load(self, found: RestoreSource) -> Journal:
        layout, replay = load_found(
            *(found, self._view, self._groups, self._exchange, self._engine),
            may_skip=self._may_skip,
            as_user=self._as_user,
        )
        self.repeats.begin(replay, self._take_up(found, layout, replay.journals[0]["outcome"]))
        start: Journal = replay.journals[0]["start"]
        return start

    def _take_up(self, found: RestoreSource, layout: WindowLayout, outcome: Journal) -> WindowLayout:
        """Go on planning from the restored generation."""
        self._planner.journal_had(found.journal_nbytes)
        layout = layout.mirrored(self._planner.mirroring)
        if self._planner.accepts(layout):
            # Windows follow the restored plan, so that capture can go on during replay.
            self._planner.adopt(layout)
            expect(self._capture).use_layout(layout)
        self._planner.restore(outcome)
        return layout

    @property
    def run_id(self) -> str | None:
        """Name of the run, once it is open."""
        return self._runs.run_id if self._runs is not None else None

    @property
    def memory_tag(self) -> str | None:
        """Tag of the run's shared memory, once the run is open."""
        return self._runs.claim.tag if self._runs else None

    # -- replay

    @property
    def replaying(self) -> bool:
        """Whether some operators are still frozen."""
        return self.repeats.replay is not None

    def reconcile(self, among: Callable[[], Exchange], *, disturbed: bool) -> None:
        """Undo changes by hooks since the newest slot was loaded, see `Repeats`.

        Args:
            among: returns the exchange of the ranks that replay together, all of which call this.
            disturbed: see `Repeats.reconcile`.
        """
        if self.repeats.unsettled is not None:
            self.repeats.reconcile(among().all_agree, disturbed=disturbed)

    # -- capture

    def forward_begins(self, last_step: int | None = None) -> None:
        """Note that a batch runs forward and backward; `last_step` is the planned last step, if any."""
        self._last_step = last_step
        self._planner.forward_begins(replaying=self.replaying, last_step=last_step)

    def fence_gradients(self, *, seal: bool = True, why_not: str = "") -> None:
        """Wait for copies of gradients before zeroing; with `seal` complete the boundary, or spoil it (`why_not`)."""
        capture = expect(self._capture)
        capture.fence_gradients()
        if seal:
            capture.begin_seal(why_not)

    def fence(self) -> None:
        """Wait for copies of parameters; call before the optimizer overwrites them."""
        self._planner.forward_ends()
        expect(self._capture).fence()

    def regrouped(self) -> None:
        """Abort the window under way and plan anew, as parameters were added to the optimizer. Collective."""
        expect(self._capture).forget_layout()
        self._planner.forget_layout()

    def _thaw(self, *, thoroughly: bool = False) -> bool:
        """Abort the window under way and plan anew if constants have changed; return whether any has. Collective."""
        if thawed := self._planner.thaw(thoroughly=thoroughly):
            expect(self._capture).forget_layout()
        return thawed

    def boundary(self, step: int, outcome: Journal) -> None:
        """Capture the policy's part of boundary `step`; call right after an optimizer step."""
        capture = expect(self._capture)
        capture.complete_seal()  # if no optimizer step has completed it
        self._report_failures()
        # The first generation after a replay is complete where it ends: training catches up first.
        if capture.generations_complete == (2 if self.repeats.steps else 1):
            with self._stalls.measure("heap"):
                self._heap.freeze()
        self._steps, self._at, self._outcome = self._steps + 1, step, outcome
        self._planner.stepped(step)
        hooks = None if self.replaying else self.clock.seconds
        self._tiers.stepped(max(self.least_steps, self._planner.interval_steps), hooks, self.clock.validated)
        if capture.window is None:
            self._plan()
            use = self._use if self.repeats.replay is None else None
            if capture.layout is None or not self._due(step) or self._thaw():
                return
            if not capture.open_window(step, use, dense=self._turns.due(step, replaying=self.replaying)):
                return
            self._last_window = step
            outcome = {**outcome, **self._planner.state()}
        capture.capture(step, outcome)

    def _plan(self) -> None:
        with self._heap.keeping(when=expect(self._capture).layout is None):
            if self.repeats.replay is None and (layout := self._planner.first_layout()) is not None:
                self._use(layout)

    def _use(self, layout: WindowLayout) -> None:
        in_force = expect(self._capture).layout
        if expect(self._capture).use_layout(layout):
            self._planner.adopt(layout)
            again = layout is in_force or (layout.record.plan.partial and not layout.reserve_nbytes)
            log_plan(layout, self._planner.sizes.dense_nbytes, again=again)

    def _due(self, step: int) -> bool:
        if self.repeats.replay is not None and expect(self._capture).layout is not self.repeats.layout:
            return False  # another plan could ask for the full state of an operator that is still frozen
        soon = self._last_window is not None and step - self._last_window < self._tiers.governor.gap_steps
        return not soon and self._policy.due(step, self._last_window, self._planner.interval_steps)

    def takes(self, step: int) -> bool:
        """Return whether the newest boundary, `step`, needs a call of `seal`."""
        capture = expect(self._capture)
        return self._steps < _MEASURED_JOURNALS or capture.window is not None or capture.whole_at == step

    def within_window(self, step: int) -> bool:
        """Return whether the newest boundary, `step`, is in the middle of a window: no run will resume from it."""
        return self._steps >= _MEASURED_JOURNALS and expect(self._capture).is_within(step)

    def seal(self, start: Journal, *, step: int, disturbed: bool = False, room: Callable[[], int] = lambda: 0) -> None:
        """Complete the capture of boundary `step` as the next batch begins; a fresh run captures its boundary 0 here.

        Args:
            start: the journal's start half.
            step: the boundary.
            disturbed: whether parameters may have changed without a trace, or been moved, since the capture.
            room: returns the bytes by which later journals may be larger.

        Raises:
            ConfigurationError: a run begins with parameters that differ among ranks that should hold the same.
        """
        capture = expect(self._capture)
        first = self._durations.began is None
        fresh = self._found is None and first
        if first:
            self._durations.first_batch()
        if self._steps < _MEASURED_JOURNALS:
            outcome = {**self._outcome, **self._planner.state()}
            self._planner.journal_needs(2 * len(encode({"outcome": outcome, "start": start})) + room())
        if fresh or capture.whole_at == step or (self._found is None and self._steps == 1):
            self._copies.compare(first=fresh)
        if fresh or capture.whole_at == step:
            self._thaw()
        elif capture.window is not None and self._planner.constants.edited():
            start = {**start, UNFIT: "a parameter that did not train has changed"}
        if fresh:  # training goes on: a crash before any generation exists is a fresh start
            self._tiers.begin_first(STORAGE, expect(self._runs).name(step))
        if fresh or capture.whole_at == step:
            with self._heap.keeping():
                expect(self._dense).begin(step, start)
        capture.seal(start, step=step, disturbed=disturbed)

    def hold(self, step: int, start: Journal) -> None:
        """Capture the last boundary for `end`, before hooks of the epoch's end; see `DenseCapture.hold`."""
        expect(self._capture).abort_window()
        if not self.replaying and (self._steps > 0 or self._found is None):
            self._planner.collect()
            self._thaw(thoroughly=True)
            expect(self._dense).hold(step, start)

    def end(self, step: int, start: Journal) -> None:
        """Store a dense generation of the last boundary, after training ended normally."""
        expect(self._capture).abort_window()
        if not self.replaying and (self._steps > 0 or self._found is None):
            self._copies.compare(first=False)
            self.stop(step, start, timeout=self._config.commit_timeout.total_seconds())
        self._report_failures()

    @property
    def dense_possible(self) -> bool:
        """Whether this incarnation has taken steps and is dense; never in replay."""
        return not self.replaying and self._steps > 0

    def stop(self, step: int, start: Journal, *, timeout: float) -> bool:
        """Store a dense generation of boundary `step`, where training stops; return if durable on all ranks. Collective.

        `start` is the boundary's start half; `timeout` seconds cover earlier generations under way, and then this.
        """
        capture, storage, began = expect(self._capture), expect(self._storage), time.perf_counter()
        capture.abort_window()
        drained = self._exchange.all_agree(storage.drain(timeout))
        capture.hear()  # the generation at hand names copies of the newest that storage has
        # In the middle of the next step, storage may have this generation already: never replace its files.
        committed = self.any_rank(self._exchange.is_coordinator and storage.holds(expect(self._runs).name(step)))
        saved = committed or (drained and self._write_dense(step, start, timeout=timeout + began - time.perf_counter()))
        self._durations.end = time.perf_counter() - began
        level, how = (logging.INFO, "is durable") if saved else (logging.ERROR, "was not stored")
        told = step, how, self._durations.end, timeout
        log.log(level, "the last step, %d, %s after %.2f s (limit: %.0f s)", *told, alike=saved)
        self._report_failures()
        log.info("%s; %s", (report := self.report()).costs, report.overhead, alike=True)
        return saved

    def _write_dense(self, step: int, start: Journal, *, timeout: float) -> bool:
        self._planner.collect()
        self._thaw(thoroughly=True)
        if (durable := expect(self._dense).write(step, start, timeout=timeout)) is not None:
            self._tiers.complete_everywhere(STORAGE, durable)
        return durable is not None

    # -- end

    def any_rank(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank. Collective."""
        return [1] in self._exchange.gather([int(flag)])

    def leave_nothing_behind(self) -> None:
        """Cut writes to storage short, and remove memory no restart needs; any thread, right before the process ends."""
        if self._storage is not None:
            self._storage.cut_short()
        if self._memory_is_superseded():
            self._tiers.unlink()

    def drain(self, timeout: float) -> bool:
        """Wait `timeout` seconds for generations taken so far; return whether all are durable, or whole in memory."""
        if self._capture is not None:
            self._capture.complete_seal(wait=False)
        return all(worker.drain(timeout) for worker in self._tiers.workers if not worker.paced)

    def close(self, *, keep_memory: bool = False, keep_frozen: bool = False) -> None:
        """Release threads, hooks (`keep_frozen`: not of `repeats`), and memory superseded by storage (`keep_memory`: none)."""
        self._heap.thaw()
        self._planner.close()
        if not keep_frozen:
            self.repeats.close()
        if self._capture is not None:
            self._capture.close()
        self._tiers.close()
        self._tiers.release(unlink=not keep_memory and self._memory_is_superseded(ask=True))
        if self._memory is not None and not self._tiers.workers:  # another rank failed while tiers were joined
            self._memory.close(unlink=False)
        self._engine.close()
        if self._runs is not None:
            self._runs.close()

    @property
    def has_generation(self) -> bool:
        """Whether some tier has a generation of this incarnation on every rank."""
        return bool(self._tiers.everywhere)

    def _figures(self) -> dict[str, object]:
        """Return this incarnation's figures for the run's log; called on the storage thread."""
        found = None if self._found is None else self._found.generation.step
        told: dict[str, object] = {"step": self._at, "last_step": self._last_step, "resumed_from": found}
        told |= {"steps": self._steps, "replayed": self.repeats.steps, "world_size": self._groups.world_size}
        told["restore_seconds"] = round(self._durations.restore, 3)
        return told | log_figures(self._tiers, self._capture, self._durations)

    def neighbours(self) -> Neighbours:
        """Return the processes of all ranks. Collective."""
        return Neighbours(self._exchange)

    @property
    def newest_step(self) -> int | None:
        """Boundary from which, or from a newer one, restarts go on; `None` without a generation on all ranks."""
        held = [each.step for each in self._tiers.everywhere.values()]
        return max([*held, *([self._found.generation.step] if self._found is not None else [])], default=None)

    @property
    def horizon(self) -> int:
        """Step before which no restart begins; right after `begin`, the first step of this incarnation."""
        newest, found, capture = self.newest_step, self._found, expect(self._capture)
        if found is not None and newest == found.generation.step:
            return found.first_step
        return 0 if newest is None or capture.layout is None else max(0, newest + 1 - len(capture.layout.steps))

    @property
    def most_steps_back(self) -> int | None:
        """Most steps since the horizon, which moves once a window is known complete; `None` before the first plan."""
        layout = expect(self._capture).layout
        apart = max(self.least_steps, self._planner.interval_steps, self._tiers.governor.gap_steps)
        return None if layout is None else 2 * max(apart, len(layout.steps))

    @property
    def windows_missed(self) -> int:
        """Consecutive windows without a generation, once worth a warning; else 0."""
        return 0 if self._capture is None else self._capture.missed_windows.worth_a_word

    def report(self) -> Report:
        """Return the figures so far."""
        storage, durations = self._storage, self._durations
        seconds, in_hooks = durations.training()
        return Report(
            steps=self._steps,
            **capture_figures(self._capture),
            nbytes_persisted=storage.nbytes_complete if storage is not None else 0,
            dense_nbytes=self._planner.sizes.dense_nbytes,
            stall_seconds=self._stalls.totals(),
            device_stall_seconds=self._stalls.device_totals(),
            overhead_seconds=in_hooks,
            seconds=seconds,
            generations_committed=storage.num_complete if storage is not None else 0,
            **tier_figures(self._tiers, self._found),
            **found_figures(self._found),
            replayed_steps=self.repeats.steps,
            replay_mismatches=self.repeats.mismatches,
            restore_seconds=durations.restore,
            overhead=self._tiers.governor.overhead(start_seconds=durations.start, end_seconds=durations.end),
            lost=self._planner.loss_figures(),
            bubbles=self.bubbles.figures(),
        )

    # -- private

    def _memory_is_superseded(self, *, ask: bool = False) -> bool:
        """Return whether no restart needs this rank's memory; `ask` storage, or go by generations known here."""
        storage, found = self._storage, self._found
        if self._memory is None or storage is None or self._runs is None:
            return True
        known = [self._tiers.everywhere.get(STORAGE), found.generation if found and found.committed else None]
        if self._exchange.is_coordinator:
            known.append(storage.newest)  # the coordinator committed it
        stored = None if self._policy.exact else storage.marker_of
        return is_superseded(self._memory, known, self._runs.store if ask else None, stored=stored)

    def _report_failures(self) -> None:
        report_failures(self._tiers, expect(self._capture).failures, self._config.url)
