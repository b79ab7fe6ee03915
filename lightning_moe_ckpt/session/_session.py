"""Run one incarnation: from finding a generation to resume, over replay and capture, to the last durable byte.

Nothing here depends on Lightning. Callbacks call one method per hook, on the training thread, in one order on all ranks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from xxhash import xxh3_128_hexdigest

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.coordination import Exchange, Neighbours
from lightning_moe_ckpt.errors import CodecError, NoUsableGeneration
from lightning_moe_ckpt.goodput import Goodput
from lightning_moe_ckpt.journal import UNFIT, Journal, encode
from lightning_moe_ckpt.native import Bubbles, PipelinePhase
from lightning_moe_ckpt.planning import Planner
from lightning_moe_ckpt.process import AuditFigures, FrozenHeap, HookClock, OwnWork, Stragglers, collections_paused
from lightning_moe_ckpt.recovery import Repeats, Replay, RestoreSource, load_found
from lightning_moe_ckpt.session._dense import DenseTurns
from lightning_moe_ckpt.session._job import SessionJob
from lightning_moe_ckpt.session._opening import OpenRun, open_run
from lightning_moe_ckpt.session._report import Durations, Report, measured_figures, run_figures
from lightning_moe_ckpt.session._tiers import build_on_stored, report_failures
from lightning_moe_ckpt.snapshot import Copies, WindowLayout, log_plan
from lightning_moe_ckpt.tiers import STORAGE, PeerWorker

log = rank_logger(__name__)

_LAST_SECONDS = 10.0
"""Seconds for a generation under way to become durable, before newer ones are made void."""
_MEASURED_JOURNALS = 2
"""Steps whose journals are measured, captured or not, to reserve room in the first plan."""


@dataclass(kw_only=True)
class _Progress:
    """Training's progress in this incarnation."""

    steps: int = 0
    """Optimizer steps taken here, replayed ones included."""
    at: int | None = None
    """Newest boundary."""
    outcome: Journal = field(default_factory=dict)
    """Outcome half of the newest boundary's journal."""
    last_window: int | None = None
    """First boundary of the newest window."""
    last_step: int | None = None
    """Planned last step, if any."""


class Suspects(NamedTuple):
    """Facts about the audit that ended an incarnation, for the next one."""

    ranks: tuple[int, ...] = ()
    """Ranks named by the audit; empty without a finding."""
    trusted: tuple[int, ...] = ()
    """Distances between ranks at which audits had agreed before."""


class CheckpointSession:
    """Own everything that checkpoints one `fit` between two formations of groups: run, tiers, plans, replay and capture.

    Above, `FitSession` turns hooks of a trainer into one call each; below, `CaptureSession` takes windows while this
    session decides when, and `Sealing` carries each boundary from its copies to the tiers. `repeats` belongs to an earlier
    session, in the midst of whose replay this session is opened.
    """

    _run: OpenRun
    """Parts that exist from `begin` on."""
    audit = AuditFigures()
    """Audits of steps, for the run's log."""
    is_open = False
    """Whether `begin` has opened the run."""

    @collections_paused()
    def __init__(self, job: SessionJob, repeats: Repeats | None = None) -> None:
        self.job, self._copies = job, Copies(job.view, job.groups, job.exchange)
        self._planner = Planner(
            *(job.policy, job.view, job.groups, job.exchange, job.module),
            autocast_dtype=job.autocast_dtype,
            may_probe=not job.compiled,
        )
        self.clock, self._heap = HookClock(), FrozenHeap(wanted=job.config.freeze_heap)
        self._turns, self.bubbles = DenseTurns(job.config.dense_every_n_steps), Bubbles(job.engine, job.device)
        self.repeats = Repeats() if repeats is None else repeats
        self._progress, self._durations, self.suspects = _Progress(), Durations(self.clock), Suspects()
        self._takes = job.config.rerun is None
        """Whether generations are taken; not where steps are run again."""

    # -- start

    def begin(self, *, stay: bool = False) -> Journal | None:
        """Open the run, load the generation to resume, and return its boundary's start half; `None` for a fresh start.

        With `stay` the live state, of a later step, is kept, and nothing is loaded.
        """
        started, job = time.perf_counter(), self.job
        with self._heap.keeping():
            self._run, layout, replay = open_run(job, self._planner, self.clock, load=not stay)
            run = self._run
            self.is_open, self._planner, found = True, run.planner, run.found
            if job.groups.stage_size > 1 and not job.view.boxes:  # forward of parameters in shards waits for others
                self.clock.own = OwnWork(self.clock.outside, job.device)
                run.tiers.stragglers = Stragglers(self.clock.own, job.groups.stage_size)
            if job.exchange.is_coordinator:
                run.opener.store.tell(self._figures)
            if not job.policy.exact and found is not None and not found.recut:
                build_on_stored(run.opener.store, job.exchange, run.tiers, run.storage, found)
            self._planner.begin()
            if job.config.audit_every_n_steps is not None:
                self._trust(found)
            start = None if found is None else found.start
            if found is not None and layout is not None:
                if replay is None:
                    self.repeats.go_on(self._take_up(found, layout), job.groups, job.engine)
                    run.account.waits()
                else:
                    start = self._load(found, layout, replay, started)
                found.segments.clear()  # the replay has them, and lets go of each once it is settled
                found.journals.clear()
        if start is None:
            self._heap.sweep()
        self._durations.start = time.perf_counter() - started
        return start

    def _trust(self, found: RestoreSource | None) -> None:
        """Trust the generation to go on from as far as earlier audits reach, or wholly if there was none. Collective."""
        told: Any = self.job.exchange.run_on_coordinator(lambda: dict(self._run.opener.store.told()))
        reached, audited = 0 if found is None else found.generation.step, told.get("audited")
        self._run.storage.audited = min(reached, audited) if isinstance(audited, int) else reached
        if told.get("world_size") == self.job.groups.world_size:
            self.suspects = Suspects(*map(tuple, told.get("suspects", ((), ()))))

    def _load(self, found: RestoreSource, layout: WindowLayout, replay: Replay, started: float) -> Journal:
        load_found(found, replay, self.job.view.operators)
        self.repeats.begin(replay, self._take_up(found, layout))
        self._durations.restore = time.perf_counter() - started
        log.info(
            "resumes from %s, plan %s, at step %d in %.2f s; dense after %d replayed steps",
            *(found.generation, xxh3_128_hexdigest(found.policy["plan"].encode())[:8], found.first_step),
            *(self._durations.restore, len(found.steps) - 1),
        )
        start: Journal = replay.journals[0]["start"]
        return start

    def _take_up(self, found: RestoreSource, layout: WindowLayout) -> WindowLayout:
        """Go on planning from the restored generation."""
        self._planner.journal_had(found.journal_nbytes)
        layout = layout.mirrored(self._planner.mirroring)
        if self._takes and self._planner.accepts(layout):
            # Windows follow the restored plan, so that capture can go on during replay.
            self._planner.adopt(layout)
            self._run.capture.memory.use(layout)
        self._planner.restore(found.journals[0]["outcome"])
        return layout

    @property
    def run_id(self) -> str | None:
        """Name of the run, once it is open."""
        return self._run.opener.run_id if self.is_open else None

    @property
    def memory_tag(self) -> str | None:
        """Tag of the run's shared memory, once the run is open."""
        return self._run.opener.claim.tag if self.is_open else None

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
        account, self._progress.last_step = self._run.account, last_step
        if account.until < 0:
            account.passed(account.first)
        account.note(account.step, time.monotonic() + account.offset, self.clock.ended, account.beside.slowed)
        self._planner.forward_begins(replaying=self.replaying, last_step=last_step)

    def fence_gradients(self) -> None:
        """Wait for copies of gradients; call before gradients are overwritten or freed."""
        self._run.capture.fence_gradients()

    def begin_seal(self) -> None:
        """Begin to complete the newest boundary on a thread; call where training is about to run without Python."""
        self._run.capture.sealing.begin()

    def give_up(self, why_not: str) -> None:
        """Give up the newest boundary, which does not count as a failure."""
        self._run.capture.give_up(why_not)

    def fence(self) -> None:
        """Wait for copies of parameters; call before the optimizer overwrites them."""
        self._planner.forward_ends()
        self._run.capture.fence()

    def regrouped(self) -> None:
        """Abort the window under way and plan anew, as parameters were added to the optimizer. Collective."""
        self._run.capture.forget_layout()
        self._planner.forget_layout()

    def _thaw(self, *, thoroughly: bool = False) -> bool:
        """Abort the window under way and plan anew if constants have changed; return whether any has. Collective."""
        if thawed := self._planner.thaw(thoroughly=thoroughly):
            self._run.capture.forget_layout()
        return thawed

    def boundary(self, step: int, outcome: Journal) -> None:
        """Capture the policy's part of boundary `step`; call right after an optimizer step."""
        job, progress, tiers, capture = self.job, self._progress, self._run.tiers, self._run.capture
        if not self._takes:
            progress.steps, progress.at = progress.steps + 1, step
            return
        capture.complete_seal()  # if no optimizer step has completed it
        report_failures(tiers, capture.failures, job.config.url)
        # The first generation after a replay is complete where it ends: training catches up first.
        if capture.generations_complete == (2 if self.repeats.steps else 1):
            with job.stalls.measure("heap"):
                self._heap.freeze()
        progress.steps, progress.at, progress.outcome = progress.steps + 1, step, outcome
        self._run.dense.losses = outcome.get("losses") or []
        self._planner.stepped(step)
        hooks = None if self.replaying else self.clock.seconds
        if self.clock.own is not None:
            self.clock.own.stepped(counts=hooks is not None)
        tiers.stepped(max(job.least_steps, self._planner.interval_steps), hooks, self.clock.validated)
        if step >= (account := self._run.account).until:
            account.passed(step)
        account.step = step
        account.note(step, time.monotonic() + account.offset, self.clock.ended, account.beside.slowed)
        if capture.window is None:
            use = self._use if self.repeats.replay is None else None
            with self._heap.keeping(when=capture.memory.layout is None):
                if use is not None and (layout := self._planner.first_layout()) is not None:
                    use(layout)
            if capture.memory.layout is None or not self._due(step) or self._thaw():
                return
            if not capture.open_window(step, use, dense=self._turns.due(step, replaying=self.replaying)):
                return
            progress.last_window = step
            outcome = {**outcome, **self._planner.state()}
        capture.capture(step, outcome)

    def _use(self, layout: WindowLayout) -> None:
        capture = self._run.capture
        in_force = capture.memory.layout
        if capture.memory.use(layout):
            self._planner.adopt(layout)
            again = layout is in_force or (layout.record.plan.partial and not layout.reserve_nbytes)
            log_plan(layout, self._planner.sizes.dense_nbytes, again=again)

    def _due(self, step: int) -> bool:
        if self.repeats.replay is not None and self._run.capture.memory.layout is not self.repeats.layout:
            return False  # another plan could ask for the full state of an operator that is still frozen
        last = self._progress.last_window
        soon = last is not None and step - last < self._run.tiers.governor.gap_steps
        return not soon and self.job.policy.due(step, last, self._planner.interval_steps)

    def takes(self, step: int) -> bool:
        """Return whether the newest boundary, `step`, needs a call of `seal`."""
        capture = self._run.capture
        wanted = self._progress.steps < _MEASURED_JOURNALS or capture.window is not None or capture.whole_at == step
        return self._takes and wanted

    def within_window(self, step: int) -> bool:
        """Return whether the newest boundary, `step`, is in the middle of a window: no run will resume from it."""
        window = self._run.capture.window
        inside = window is not None and window.first < step < window.generation.step
        return inside and self._progress.steps >= _MEASURED_JOURNALS

    def seal(self, start: Journal, *, step: int, disturbed: bool = False, room: Callable[[], int] = lambda: 0) -> None:
        """Complete the capture of boundary `step` as the next batch begins; a fresh run captures its boundary 0 here.

        Raises `ConfigurationError` if a run begins with parameters that differ among ranks that should hold the same.

        Args:
            start: the journal's start half.
            step: the boundary.
            disturbed: whether parameters may have changed without a trace, or been moved, since the capture.
            room: returns the bytes by which later journals may be larger.
        """
        run, capture, steps = self._run, self._run.capture, self._progress.steps
        first = self._durations.began is None
        fresh = run.found is None and first
        if first:
            self._durations.first_batch()
        if not self._takes:
            return
        if steps < _MEASURED_JOURNALS:
            outcome = {**self._progress.outcome, **self._planner.state()}
            with suppress(CodecError):  # a boundary with this journal spoils its window, and says why
                self._planner.journal_needs(2 * len(encode({"outcome": outcome, "start": start})) + room())
        if fresh or capture.whole_at == step or (run.found is None and steps == 1):
            self._copies.compare(first=fresh)
        if fresh or capture.whole_at == step:
            self._thaw()
        elif capture.window is not None and self._planner.constants.edited():
            start = {**start, UNFIT: "a parameter that did not train has changed"}
        if fresh:  # training goes on: a crash before any generation exists is a fresh start
            run.tiers.begin_first(STORAGE, run.opener.name(step))
        if fresh or capture.whole_at == step:
            with self._heap.keeping():
                run.dense.begin(step, start)
        capture.seal(start, step=step, disturbed=disturbed)

    def odd_copies(self) -> dict[str, tuple[int, ...]]:
        """Return the ranks with other bits than the ranks that should hold the same, by operator, see `Copies.odd`. Collective."""
        return self._copies.odd()

    def hold(self, step: int, start: Journal) -> None:
        """Capture the last boundary for `end`, before hooks of the epoch's end; see `DenseCapture.hold`."""
        self._run.capture.abort_window()
        if self._may_end:
            self._planner.collect()
            self._thaw(thoroughly=True)
            self._run.dense.hold(step, start)

    def end(self, step: int, start: Journal) -> None:
        """Store a dense generation of the last boundary, after training ended normally."""
        self._run.capture.abort_window()
        if self._may_end:
            self._copies.compare(first=False)
            self.stop(step, start, timeout=self.job.config.commit_timeout.total_seconds())
        report_failures(self._run.tiers, self._run.capture.failures, self.job.config.url)

    @property
    def dense_possible(self) -> bool:
        """Whether this incarnation has taken steps and is dense; never in replay, or where steps are run again."""
        return self._takes and not self.replaying and self._progress.steps > 0

    @property
    def _may_end(self) -> bool:
        """Whether the last boundary is worth a dense generation: a resumed one is stored already."""
        return self._takes and not self.replaying and (self._progress.steps > 0 or self._run.found is None)

    def stop(self, step: int, start: Journal, *, timeout: float) -> bool:
        """Store a dense generation of boundary `step`, where training stops; return if durable on all ranks. Collective.

        `start` is the boundary's start half; `timeout` seconds cover earlier generations under way, and then this.
        """
        run, exchange, began = self._run, self.job.exchange, time.perf_counter()
        run.capture.abort_window()
        run.capture.agree_on_last()
        drained = exchange.all_agree(run.storage.drain(timeout))
        run.capture.hear()  # the generation at hand names copies of the newest that storage has
        # In the middle of the next step, storage may have this generation already: never replace its files.
        committed = self.any_rank(exchange.is_coordinator and run.storage.holds(run.opener.name(step)))
        saved = committed or (drained and self._write_dense(step, start, timeout=timeout + began - time.perf_counter()))
        if drained and not saved:  # storage may have been busy as the newest generation in memory was complete
            run.capture.hand_over()
            run.storage.drain(timeout + began - time.perf_counter())
        self._durations.end = time.perf_counter() - began
        run.account.sign()
        level, how = (logging.INFO, "is durable") if saved else (logging.ERROR, "was not stored")
        told = step, how, self._durations.end, timeout
        log.log(level, "the last step, %d, %s after %.2f s (limit: %.0f s)", *told, alike=saved)
        report_failures(self._run.tiers, self._run.capture.failures, self.job.config.url)
        log.info("%s; %s", (report := self.report()).costs, report.overhead, alike=True)
        return saved

    def _write_dense(self, step: int, start: Journal, *, timeout: float) -> bool:
        self._planner.collect()
        self._thaw(thoroughly=True)
        if (durable := self._run.dense.write(step, start, timeout=timeout)) is not None:
            self._run.tiers.complete_everywhere(STORAGE, durable)
        return durable is not None

    # -- audits

    @property
    def audited(self) -> int | None:
        """Step of the last clean audit, of an earlier process too, or from which audits began; `None` without audits."""
        return self._run.storage.audited if self.is_open else None

    def passed_audit(self, step: int, trusted: Collection[int] = ()) -> None:
        """Note that an audit of step `step` was clean: generations up to there are good, and the newest of them stays. For `trusted` see
        `Suspects`.
        """
        self._run.storage.audited, self.suspects = step, Suspects((), tuple(sorted(trusted)))

    def condemn(self, ranks: Collection[int], why: str) -> int:
        """Make all generations since the last clean audit void, in every tier and for every later start, because of `ranks`. Return that
        audit's step. Collective; afterwards only `close` may be called.

        Raises `NoUsableGeneration` if storage has none up to there: nothing is void then.
        """
        run, step = self._run, self._run.storage.audited
        assert step is not None, "audits are off"
        self.suspects = Suspects(tuple(sorted(ranks)), self.suspects.trusted)
        for patience in (_LAST_SECONDS, 0.0):
            if self.job.exchange.run_on_coordinator(lambda: run.opener.store.condemn(step, why)):
                log.error("generations behind step %d are void, the last clean audit: %s", step, why, alike=True)
                return step
            run.storage.drain(patience)  # the first generation may be under way
        raise NoUsableGeneration(
            f"{why}. Storage has no generation up to step {step}, the last clean audit, to go back to, so nothing was made void. What is "
            "stored may be wrong: look at it before this job is started again."
        )

    # -- end

    def any_rank(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank. Collective."""
        return [1] in self.job.exchange.gather([int(flag)])

    def leave_nothing_behind(self) -> None:
        """Cut writes to storage short, and remove memory no restart needs; any thread, right before the process ends."""
        if self.is_open:
            self._run.storage.cut_short()
            if self._run.memory_is_superseded():
                self._run.tiers.unlink()

    def drain(self, timeout: float) -> bool:
        """Wait `timeout` seconds for generations taken so far; return whether all are durable, or whole in memory."""
        if not self.is_open:
            return True
        self._run.capture.complete_seal(wait=False)
        return all(worker.drain(timeout) for worker in self._run.tiers.workers if not worker.paced)

    def close(self, *, keep_memory: bool = False, keep_frozen: bool = False) -> None:
        """Release threads, hooks (`keep_frozen`: not of `repeats`), and memory superseded by storage (`keep_memory`: none)."""
        self._heap.thaw()
        self._planner.close()
        if not keep_frozen:
            self.repeats.close()
        if self.is_open:
            self._run.close(keep_memory=keep_memory)
        self.job.engine.close()

    @property
    def has_generation(self) -> bool:
        """Whether some tier has a generation of this incarnation on every rank."""
        return self.is_open and bool(self._run.tiers.everywhere)

    def _figures(self) -> dict[str, object]:
        """Return this incarnation's figures for the run's log; called on the storage thread."""
        run, progress, (seconds, hooks) = self._run, self._progress, self._durations.training()
        return {
            "step": progress.at,
            "last_step": progress.last_step,
            "resumed_from": None if run.found is None else run.found.generation.step,
            "steps": progress.steps,
            "replayed": self.repeats.steps,
            "world_size": self.job.groups.world_size,
            "restore_seconds": round(self._durations.restore, 3),
            "seconds": round(seconds, 3),
            "overhead_seconds": round(hooks, 4),
            "newest": run.tiers.newest(),
            "skipped": run.tiers.skipped(),
            "failed": run.tiers.failed(),
            "nbytes_captured": run.capture.nbytes_captured,
            "goodput": run.account.document(),
            "measured": measured_figures(run),
            "audited": run.storage.audited,
            "mirrors_pay": next((each.mirrors_pay for each in run.tiers.workers if isinstance(each, PeerWorker)), None),
            **({"suspects": list(self.suspects)} if self.suspects.ranks else {}),
            "audits": self.audit.document(),
            "slow_ranks": "" if run.tiers.stragglers is None else str(run.tiers.stragglers.figures),
        }

    def stepped_alone(self, step: int) -> None:
        """Note that this stage has repeated a step beside the others, which has no boundary."""
        self._run.account.stepped(step)

    def rates(self) -> dict[str, float]:
        """Return the bytes per second of this rank's tiers at work, as far as known."""
        return {worker.name: worker.rate for worker in self._run.tiers.workers if worker.rate}

    @property
    def goodput(self) -> Goodput | None:
        """Parts of the run's wall time so far; `None` before the run is open."""
        return self._run.account.balance().goodput if self.is_open else None

    def neighbours(self) -> Neighbours:
        """Return the processes of all ranks. Collective."""
        found = Neighbours(self.job.exchange)
        if (stragglers := self._run.tiers.stragglers) is not None:
            stragglers.hosts = found.hosts
        return found

    def enter(self, phase: PipelinePhase) -> None:
        """Set the training thread's place in a pipeline's schedule from here on."""
        self.bubbles.enter(phase)
        if (own := self.clock.own) is not None:
            (own.begin if phase is PipelinePhase.OPERATION else own.end)()

    @property
    def newest_step(self) -> int | None:
        """Boundary from which, or from a newer one, restarts go on; `None` without a generation on all ranks."""
        if not self.is_open:
            return None
        found, held = self._run.found, [each.step for each in self._run.tiers.everywhere.values()]
        return max([*held, *([found.generation.step] if found is not None else [])], default=None)

    @property
    def horizon(self) -> int:
        """Step before which no restart begins; right after `begin`, the first step of this incarnation."""
        newest, found, layout = self.newest_step, self._run.found, self._run.capture.memory.layout
        if found is not None and newest == found.generation.step:
            return found.first_step
        return 0 if newest is None or layout is None else max(0, newest + 1 - len(layout.steps))

    @property
    def most_steps_back(self) -> int | None:
        """Most steps since the horizon, which moves once a window is known complete; `None` before the first plan."""
        layout = self._run.capture.memory.layout
        apart = max(self.job.least_steps, self._planner.interval_steps, self._run.tiers.governor.gap_steps)
        return None if layout is None else 2 * max(apart, len(layout.steps))

    @property
    def windows_missed(self) -> int:
        """Consecutive windows without a generation, once worth a warning; else 0."""
        return self._run.capture.missed_windows.worth_a_word if self.is_open else 0

    def report(self) -> Report:
        """Return the figures so far."""
        if not self.is_open:
            return Report.empty()
        durations, stalls = self._durations, self.job.stalls
        seconds, in_hooks = durations.training()
        overhead = self._run.tiers.governor.overhead(start_seconds=durations.start, end_seconds=durations.end)
        return Report(
            steps=self._progress.steps,
            dense_nbytes=self._planner.sizes.dense_nbytes,
            stall_seconds=stalls.totals(),
            device_stall_seconds=stalls.device_totals(),
            overhead_seconds=in_hooks,
            seconds=seconds,
            **run_figures(self._run),
            replayed_steps=self.repeats.steps,
            replay_mismatches=self.repeats.mismatches,
            restore_seconds=durations.restore,
            overhead=overhead,
            goodput=self._run.account.balance().goodput,
            lost=self._planner.loss_figures(),
            bubbles=self.bubbles.figures(),
        )
