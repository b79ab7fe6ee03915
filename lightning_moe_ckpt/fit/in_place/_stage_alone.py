"""Let one pipeline stage recover alone: its ranks repeat steps while all others wait inside the step that failed.

When a rank has failed, each other rank is in one of these places:

    in the attempt at a step     nothing of the step is taken yet: its changes are undone, and the step is repeated
    at the step's commit         if a surviving rank knows that all came there, the step is taken; else it is repeated
    anywhere else                all ranks go on in place from a generation, see `_survivor`

Stages with ranks that are new, or do not know their place yet, go on in place too, but alone: in the ordinary loop,
from the newest generation on, fed from their neighbours' records (`UpstreamLog`). When they come to the failed step,
all ranks take the step together. Until then no rank takes snapshots, and a repeating rank asks no other stage anything.
Failed stages next to each other are one segment: a small pipeline, fed at its two ends, with commits of its own.

Another failure meanwhile is handled alike: a segment with only living ranks is in an attempt at one of its steps, or at
a commit, and goes on from there. Between two steps its collectives outlast the failure (`outlasts`), since some of its
ranks may have ended one that others are still in: all come to the next attempt. A segment begins again if one of its
ranks is new or elsewhere, or if a stage next to it has failed, because the records that it would need from there are
gone. Both stages are one segment then.

Any other case (no stage is left, a record is missing, a bit differs) is answered with recovery in place by all ranks.

Source: MoEvement (2026), Sec. 3.4 (localized recovery), Appendix A; we differ in the commit, behind which every rank
has everything needed for the step, so that no stage is ever more than one step ahead of another.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt._units import size_text
from lightning_moe_ckpt.coordination import Exchange, Segment
from lightning_moe_ckpt.errors import CheckpointError, SilentFault
from lightning_moe_ckpt.fit._run import FitSession
from lightning_moe_ckpt.fit.in_place import _undo
from lightning_moe_ckpt.fit.in_place._decision import LOST, TOO_OFTEN, Decision, StepPosition, Where
from lightning_moe_ckpt.fit.in_place._undo import StepUndo, Watch
from lightning_moe_ckpt.fit.objects._users import MOST_ITEMS_IN_A_STEP
from lightning_moe_ckpt.journal import capture_rng, restore_rng
from lightning_moe_ckpt.launch import Supervised
from lightning_moe_ckpt.parallel._groups import is_of_collective
from lightning_moe_ckpt.parallel._upstream import UpstreamLog

log = rank_logger(__name__)

T = TypeVar("T")

_MOST_TRIES = 5
"""Tries of stages to come to a step. A stage that asks all ranks directly hangs in each, since waiting ranks do not answer."""


class RecoveryState(Enum):
    """How far this rank's stage, and the others, are in a recovery of single stages."""

    TRAINING = auto()
    """No stage recovers alone."""
    JOINED = auto()
    """All ranks have joined again and decided; repeating stages have not received their records yet."""
    REPEATING = auto()
    """This stage repeats steps, and other stages wait for it."""
    WAITING = auto()
    """This rank waits inside a step for stages that repeat theirs."""


_MOVES = {
    RecoveryState.TRAINING: {RecoveryState.JOINED},
    RecoveryState.JOINED: {*RecoveryState},
    RecoveryState.REPEATING: {RecoveryState.JOINED, RecoveryState.TRAINING},
    RecoveryState.WAITING: {RecoveryState.JOINED, RecoveryState.TRAINING},
}
"""`decide` moves to JOINED, `_feed` from there, `_meet` to TRAINING; `_give_up`, `ended` too, to recover in place."""


class StageRecovery:
    """State of a recovery of single stages, and what all ranks have decided for it. `StageAlone` moves it."""

    def __init__(self) -> None:
        self.state = RecoveryState.TRAINING
        self.plan: Decision | None = None
        """Decision about the newest failure; `None` if all ranks go on in place."""
        self.joined_at = 0.0
        """Time of `perf_counter` at which all ranks had joined."""

    def move(self, state: RecoveryState) -> None:
        """Move to another state."""
        assert state in _MOVES[self.state], f"{self.state} to {state}"
        self.state = state


class Permission:
    """Whether a stage of this run may recover alone: found when first asked for, and never given again once refused."""

    def __init__(
        self, trainer: Trainer, module: LightningModule, own_callbacks: tuple[type[Callback], ...], *, exact: bool
    ) -> None:
        self._find = partial(_undo.never_alone, trainer, module, own_callbacks)
        self._exact = exact
        self._given: bool | None = None

    @property
    def given(self) -> bool:
        """Whether the stage may; the reasons why not are logged once."""
        if self._given is None:
            reasons: list[str] = [] if self._exact else ["what is stored does not lead back to the same steps"]
            reasons += self._find()
            self._given = not reasons
            if reasons:
                log.info("if a rank fails, all stages recover: %s", "; ".join(reasons), alike=True)
            else:
                log.info(
                    "if a rank fails, its pipeline stage recovers alone, where others are inside a step", alike=True
                )
        return self._given

    def refuse(self) -> None:
        """Let all stages recover from here on."""
        self._given = False

    def waits(self, error: Exception) -> bool:
        """Return whether a rank waits inside the next step for the stage whose failure this error may be."""
        return self.given and is_of_collective(error)


class Rewind(CheckpointError):
    """This process begins its fit again from a generation; it has joined the others already."""


class _Again(Exception):
    """The step is repeated: no rank knows that all came to its commit."""


class StageAlone:
    """This rank's part in recoveries of single stages.

    `exact` says whether stored state leads back to the same bits, and batches can be fetched again. `join` joins the
    other ranks again, and calls `decide`; `confirm` raises an error again unless another rank has failed.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        *,
        own_callbacks: tuple[type[Callback], ...],
        exact: bool,
        join: Callable[[], None],
        confirm: Callable[[Exception], object],
        supervisor: Supervised,
    ) -> None:
        self._trainer, self._module = trainer, module
        self._join, self._confirm, self._supervisor = join, confirm, supervisor
        strategy: Any = trainer.strategy
        self._strategy, self._log = strategy, strategy.upstream
        assert isinstance(self._log, UpstreamLog)
        self.run: FitSession | None = None
        """This process's session, once begun."""
        self.batch: Any = None
        """Batch of the coming step, or of the step under way."""
        self._permission = Permission(trainer, module, own_callbacks, exact=exact)
        self._recovery = StageRecovery()
        self._here = Where(0, StepPosition.ELSEWHERE, -1, 0)
        """This rank's position; of a stage that does not repeat steps, target and segment have no meaning."""
        self._live: Segment | None = None
        """Exchange between the ranks of this stage's segment."""
        self._flags: dict[str, int] = {}
        """Flags on which all ranks agreed at the newest commit."""
        self._attempt: StepUndo | None = None
        """State held for undoing the step under way."""
        self._watch: Watch | None = None
        self._has_said_size = False
        self._tried, self._tries = -1, 0
        """Newest step to which stages began to recover, and how often."""
        strategy.step_guard = self

    def remove(self) -> None:
        """Let the strategy take steps by itself."""
        self._log.keep(keeps=False)
        if self._watch is not None:
            self._watch.accesses.close()
        self._strategy.step_guard = None

    # -- after all ranks have joined

    def decide(self) -> None:
        """Agree on stages to repeat steps after a failure, once groups were made anew; see `Decision`. Collective."""
        exchange, upstream, here = Exchange(self._strategy.groups), self._log, self._here
        may = TOO_OFTEN if self._tries >= _MOST_TRIES else 1
        if self._attempt is not None and (lost := self._attempt.lost()):
            log.warning("all stages go back once: %s, of which there is no copy", lost)
            may = LOST
        here = here._replace(possible=may if self._permission.given else 0)
        between = upstream.silent or (upstream.apart and here.place == StepPosition.ELSEWHERE)
        is_new = self.run is None or between
        if is_new or not upstream.apart:
            place = StepPosition.NEW if is_new else here.place
            here = Where(here.possible, place, here.taken, here.has_generation)
        rows = [Where(*row) for row in exchange.gather(here)]
        plan = Decision.of(rows, self._strategy.groups)
        if not all(row.possible for row in rows):
            self._permission.refuse()  # for good: a later process does not know the reason
        self._recovery.move(RecoveryState.JOINED)
        self._recovery.plan, self._recovery.joined_at = None if isinstance(plan, str) else plan, time.perf_counter()
        step = -1 if isinstance(plan, str) else plan.step
        self._tries, self._tried = (self._tries + 1 if step == self._tried else 1) * (step >= 0), step
        if isinstance(plan, str):
            log.info("everybody goes on in place: %s", plan, alike=True)
            self._give_up()
            return
        knows = not is_new and here.target < 0 and here.taken == plan.step
        flags = exchange.gather_values(self._flags if knows else None)
        if not upstream.apart:
            self._flags = next((flag for flag in flags if isinstance(flag, dict)), {})
        log.info(
            "stages %s recover alone%s, others wait where they are, at step %d",
            *(list(plan.failed), f", {sorted(plan.going)} go on to do so" if plan.going else "", plan.step),
            alike=True,
        )
        if self._begins:
            upstream.silence()

    @property
    def _begins(self) -> bool:
        """Whether this rank's stage begins to repeat steps."""
        plan = self._recovery.plan
        return plan is not None and self._strategy.groups.stage in plan.failed

    def begun(self, run: FitSession) -> None:
        """Receive the records for repeated steps, once a generation is loaded. Collective, with `_recover` elsewhere."""
        self.run, self._here = run, self._here._replace(place=StepPosition.ELSEWHERE)
        self._log.keeps = self._permission.given
        if self._log.keeps:
            run.may_wait(self._permission.waits)
        plan, here, step = self._recovery.plan, self._strategy.groups.stage, self._trainer.global_step
        if plan is None:
            self._here = self._here._replace(taken=step, has_generation=0)
            return
        self._feed(run.session.horizon if run.resumed else None)
        run.part()
        self._supervisor.beat(step)  # a hang is noticed from here on: waiting ranks have no time limit for this
        self._here = self._here._replace(taken=plan.step)
        others = [stage for stage in plan.segment(here) if stage != here]
        log.info(
            "stage %d goes from step %d to step %d alone%s, fed by what its neighbours have kept",
            *(here, step, plan.step, f" with stages {others}" if others else ""),
        )

    def ended(self, error: Exception) -> Exception:
        """Return the error to handle: if it ends repeating, the other ranks are told, and all go on in place.

        Other ranks wait for this rank, some of them in collectives of its stage, so no collective can tell them.
        """
        if self._recovery.state is not RecoveryState.REPEATING or not self._is_own(error) or isinstance(error, Rewind):
            return error
        log.error("this stage does not come to the step that failed as it did before: %s", error)
        self._permission.refuse()  # the next attempt would fail alike
        self._recovery.move(RecoveryState.TRAINING)
        self._supervisor.call_off(f"does not repeat its steps exactly: {error}")
        return dist.DistError(str(error))

    # -- private

    def _give_up(self) -> None:
        self._recovery.plan = None
        self._recovery.move(RecoveryState.TRAINING)
        self._log.forget()

    def _feed(self, first: int | None) -> None:
        """Give repeating stages this rank's records for them. Collective."""
        plan, groups, here = self._recovery.plan, self._strategy.groups, self._strategy.groups.stage
        assert plan is not None
        serves = here not in plan.repeating and (here + 1 in plan.failed or here - 1 in plan.failed)
        there = first is not None and first <= plan.step and (not serves or self._log.has(first, plan.step))
        if not Exchange(groups).all_agree(there):
            log.info("everybody goes on in place: steps since the newest generation are not kept any more", alike=True)
            self._give_up()
            raise Rewind("other stages have not kept all steps")
        assert first is not None
        pipeline, steps = Exchange(groups, "pipeline_control"), range(first, plan.step)
        rows: list[Any] = [pipeline.gather_values(self._log.given_for(step) if serves else None) for step in steps]
        if self._begins:
            segment = plan.segment(here)
            self._here = self._here._replace(target=plan.step, first=segment.start, stop=segment.stop)
            before, behind = segment.start - 1, segment.stop
            above = [row[before] for row in rows] if here - 1 == before >= 0 else None
            below = [row[behind] for row in rows] if here + 1 == behind < groups.num_stages else None
            answers = [next(row[each] for each in (before, behind) if 0 <= each < groups.num_stages)[0] for row in rows]
            self._log.repeat(first, answers, above, below)
        if self._log.apart:
            self._live = live = Segment(groups, range(self._here.first, self._here.stop))
            self._log.join(live.before, live.behind)
        self._recovery.move(RecoveryState.REPEATING if self._log.apart else RecoveryState.WAITING)

    def _meet(self) -> None:
        """Wait until all stages are at the same step. Collective, of all ranks."""
        self._recovery.move(RecoveryState.TRAINING)
        Exchange(self._strategy.groups).all_agree(True)

    def take_step(self, take: Callable[[], Any]) -> Any:
        """Take an optimizer step, in as many attempts as necessary."""
        step, run = self._trainer.global_step, self.run
        if run is None:
            return take()
        if not self._log.keeps:
            run.together()
            return take()
        if self._watch is None:
            self._watch = Watch(self._module)
        attempt = StepUndo(self._trainer, self._module, run, self.batch, self._watch)
        if self._log.apart:
            self._log.settle()  # before entering the next step: neighbours have received this step's values
        self._attempt = attempt
        self._here = self._here._replace(taken=step)
        try:
            while True:
                self._here = self._here._replace(place=StepPosition.WITHIN_STEP)
                try:
                    self._begin_attempt(run, step)
                    return take()
                except _Again:
                    attempt.undo()
                except Exception as error:
                    if self._here.taken > step or self._is_own(error):  # or raised by the commit
                        raise
                    self._recover(error)
                    attempt.undo()
                run.session.forward_begins(run.sessions.last_step)  # the batch under way is run again
                self._supervisor.beat(step)
        finally:
            self._here, self._attempt = self._here._replace(place=StepPosition.ELSEWHERE), None

    def _begin_attempt(self, run: FitSession, step: int) -> None:
        if run.sessions.error is not None:
            raise run.sessions.error
        if self._log.apart and self._supervisor.confirm(0.0) is not None:
            raise dist.DistError("another rank has failed")  # this rank may wait for nothing that would tell it
        if self._log.apart and step == self._here.target:
            self._log.go_on()
            self._meet()
            log.info(
                "stage %d is at step %d again, with all others, %.2f s after they had joined",
                *(self._strategy.groups.stage, step, time.perf_counter() - self._recovery.joined_at),
            )
        if not self._log.apart:
            run.together()
            self._keep_within_limit(run)
            if self._attempt is not None and self._attempt.incomplete and self._permission.given:
                log.warning(
                    "if a rank fails, all stages recover: the module has a container of more than %d objects, which are not looked "
                    "into in every step. Keep them outside of it, or in several containers",
                    MOST_ITEMS_IN_A_STEP,
                )
                self._keep_nothing()
        self._log.begin_step(step)

    def commit(self, agree: Callable[[], dict[str, int]]) -> None:
        """Agree that the step is taken; a step to whose commit not all ranks have come is repeated."""
        if self._here.place != StepPosition.WITHIN_STEP:
            self._flags = agree()
            return
        self._here = self._here._replace(place=StepPosition.AT_COMMIT)
        if not self._log.apart and self._attempt is not None and (edits := self._attempt.edits()):
            log.warning(
                "if a rank fails, all stages recover: %s, which could not be undone. Do it in hooks between steps",
                edits,
            )
            self._keep_nothing()
        if self._attempt is not None:
            self._attempt.learn()
        try:
            self._flags = agree()
            if self._log.apart:
                self._log.require_exact()
                assert self._live is not None
                self._live.meet()
        except Exception as error:
            if self._is_own(error):
                raise
            self._recover(error)
            if self._taken_by_all() == self._here.taken:
                raise _Again from None
            self._strategy.reducer.agreed |= self._flags
            log.info("step %d is taken: all ranks had come to its commit", self._here.taken)
        self._here = self._here._replace(taken=self._here.taken + 1, place=StepPosition.ELSEWHERE)

    def outlasts(self, rank: int) -> bool:
        """Return whether this stage is between two steps that it repeats, and goes on with the next one although `rank` has failed."""
        here, stage = self._here, rank // self._strategy.groups.stage_size
        between = self._log.apart and not self._log.silent and here.place == StepPosition.ELSEWHERE
        return between and stage not in range(here.first - 1, here.stop + 1)

    def between(self, ask: Callable[[], T]) -> T | None:
        """Return the result of `ask`, with collectives between two steps; `None` after a failure, which is put off to the next step."""
        try:
            return ask()
        except Exception as error:  # raised again unless another rank has failed
            if self.run is None:
                raise
            self.run.sessions.put_off(error)
            log.warning("figures of step %d are left out: a rank failed as they were collected", self._here.taken)
            return None

    def _taken_by_all(self) -> int:
        """Return the steps that this stage has taken, as all ranks have decided."""
        assert self._recovery.plan is not None
        return self._recovery.plan.taken(self._strategy.groups.stage)

    def _is_own(self, error: Exception) -> bool:
        """Whether an error does not come from another rank's failure: there is nothing to wait for."""
        return isinstance(error, Rewind | SilentFault) or (self._log.apart and not is_of_collective(error))

    def _recover(self, error: Exception) -> None:
        """Wait inside a step until the failed stage has come there. Raises `Rewind` if this rank has to go on in place."""
        random, run, began = capture_rng(), self.run, time.perf_counter()
        assert run is not None
        while True:
            self._confirm(error)
            run.sessions.suspend()
            try:
                self._join()
                repeating = self._require_waiting()
                if self._taken_by_all() > self._here.taken:
                    self._log.complete("commit", self._flags)
                self._feed(run.renew())
                where = self._strategy.groups.stage, self._trainer.global_step
                if self._log.apart:
                    log.info("stage %d goes on with step %d of those that it repeats", *where)
                else:
                    log.info("stage %d waits in step %d while stages %s repeat theirs", *where, repeating)
                    self._supervisor.pause(aborted=True)  # the duration of steps says nothing about the recovery
                    self._meet()
            except Rewind:
                raise
            except Exception as again:  # noqa: BLE001  # raised again unless another rank has failed
                error = again
                continue
            restore_rng(random)
            log.info("stage %d goes on in step %d, %.2f s after the failure", *where, time.perf_counter() - began)
            return

    def _require_waiting(self) -> list[int]:
        """Return the stages to wait for, or among which to go on. Raises `Rewind` if this rank goes on in place."""
        if (plan := self._recovery.plan) is None or self._begins:
            raise Rewind("all ranks of the stage, or of all stages, begin again from a generation")
        return plan.repeating

    def _keep_within_limit(self, run: FitSession) -> None:
        """Drop records that no stage will repeat; log the rest's size once, and stop recording beyond the limit."""
        upstream, steps = self._log, run.session.most_steps_back
        upstream.collect(run.session.horizon)
        if run.session.newest_step is not None:
            self._here = self._here._replace(has_generation=1)
        if not upstream.step_nbytes or steps is None:
            return
        upstream.expected_nbytes = expected = upstream.step_nbytes * steps
        limit = upstream.limit_nbytes
        if max(expected, upstream.nbytes) > limit:
            log.warning(
                "if a rank fails, all stages recover: the upstream log of this rank takes %s for each of %d steps, more than "
                "`MoEStrategy(upstream_log_nbytes=%d)`. Allow more, or let windows follow each other sooner",
                *(size_text(upstream.step_nbytes), steps, limit),
            )
            self._keep_nothing()
        elif not self._has_said_size:
            log.info(
                "memory: upstream log %s, %s for each of %d steps",
                *(size_text(expected), size_text(upstream.step_nbytes), steps),
            )
        self._has_said_size = True

    def _keep_nothing(self) -> None:
        self._permission.refuse()
        self._log.keep(keeps=False)
