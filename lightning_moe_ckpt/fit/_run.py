"""Connect one `fit`'s hooks, called by `Replay` (first) and `CheckpointCallback` (last), to a process's checkpoints."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import timedelta
from enum import Enum, auto
from functools import partial
from typing import Any, NoReturn

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.errors import CheckpointError
from lightning_moe_ckpt.fit import _limits
from lightning_moe_ckpt.fit._callbacks import Findings, ProgressNote, finish_with_averages, resting
from lightning_moe_ckpt.fit._data import Batches, BatchLog, Logged, OnMismatch, WatchedData
from lightning_moe_ckpt.fit._files import CheckpointFiles, Writing
from lightning_moe_ckpt.fit._limits import refuse_unsupported, warn_if_short
from lightning_moe_ckpt.fit._other_ranks import OTHER_RANKS
from lightning_moe_ckpt.fit._recorder import BoundaryRecorder
from lightning_moe_ckpt.fit._rerun import Rerun
from lightning_moe_ckpt.fit._sessions import Sessions, Standing
from lightning_moe_ckpt.fit._settings import OnChange, Settings, announce
from lightning_moe_ckpt.fit._state import JournalPart, LayerState, Trained, copied
from lightning_moe_ckpt.fit._stops import Stops
from lightning_moe_ckpt.fit.loaders._loaders import loads_again
from lightning_moe_ckpt.fit.loggers._once import LogFolders
from lightning_moe_ckpt.fit.loops import _taps, _trainer
from lightning_moe_ckpt.fit.objects._memento import Memento, is_small
from lightning_moe_ckpt.journal import HeldGenerator, capture_rng, restore_rng
from lightning_moe_ckpt.operators import show_shards
from lightning_moe_ckpt.policies import Policy
from lightning_moe_ckpt.process import clocked
from lightning_moe_ckpt.session import CheckpointSession
from lightning_moe_ckpt.snapshot import IMPORTED
from lightning_moe_ckpt.tiers import SessionConfig

log = rank_logger(__name__)

_LACKING = ("not have been used in the graph", "FrozenView", "__torch_dispatch__")
"""Texts of errors: `torch.autograd.grad`'s for a parameter without a gradient, and a compiler's for a shadow."""


class _Phase(Enum):
    """How far training is, as its last batch has left it."""

    UNTRAINED = auto()
    """No batch has begun in this fit."""
    AT_A_STEP = auto()
    """The optimizer has stepped behind the last batch, or the first batch is under way."""
    BETWEEN_STEPS = auto()
    """Batches behind the last step are accumulated: they are in gradients only."""


class FitSession:
    """Own one trainer's hooks: what users' objects say goes to `BoundaryRecorder`, tensors to `CheckpointSession`.

    `Sessions` owns the `CheckpointSession` in force, which owns plans and tiers; below, `CaptureSession` owns windows.
    Trainer and module are as in `on_fit_start`: parameters are on their device and the optimizer exists. For
    `stop_grace`, `batches`, `on_change` and `on_mismatch` see `CheckpointArguments`, for `watched` `BoundaryRecorder`.
    """

    resumed = False
    """Whether this fit continues training of an earlier process, or of this process."""

    def __init__(
        self,
        config: SessionConfig,
        policy: Policy,
        trainer: Trainer,
        module: LightningModule,
        *,
        own_callbacks: tuple[type[Callback], ...],
        watched: WatchedData,
        stop_grace: timedelta,
        batches: Batches = "reposition",
        on_change: OnChange = "stored",
        on_mismatch: OnMismatch = "stop",
        rerun: Rerun | None = None,
    ) -> None:
        refuse_unsupported(trainer, policy)
        self._trainer, self._module = trainer, module
        staged = getattr(trainer.strategy, "pipeline_parallel", 1) > 1
        self.trained = trained = Trained(trainer, module, staged=staged)
        """The user's choice of trained parameters, and gradients that stay between steps."""
        self.sessions = Sessions(trainer, trained, config=config, policy=policy, own_callbacks=own_callbacks)
        """The checkpoint session in force, and how this rank takes part in checkpoints of all."""
        self.clock = self.session.clock
        warn_if_short(trainer, self.session.job.least_steps)
        self._logs = LogFolders(trainer, follows=rerun is None)
        self._files = CheckpointFiles(trainer, changes=rerun is None)
        self.sessions.rerun = rerun
        compared, original = lambda: self._recorder.compares_batch, self._original_batches
        self._batches = BatchLog(trainer, batches, keep=policy.replays, original=original, compared=compared)
        self._layers, findings = LayerState(module, self.session.job.operators.layers), Findings(trainer, module)
        parts: dict[str, JournalPart] = {"files": self._files, "logs": self._logs, "batches": self._batches}
        parts |= {"layers": self._layers, "findings": findings}
        replay, logged = lambda: self.session.repeats.replay, batches == "log"
        self._settings = Settings(trainer, own_callbacks, on_change=on_change, logged=logged, replay=replay)
        self._recorder: BoundaryRecorder = BoundaryRecorder(
            *(trainer, module, own_callbacks, parts, trained),
            schema=self.sessions.schema,
            settings=self._settings,
            layers=self._layers.attributes,
            on_mismatch=on_mismatch,
            among=self.sessions.among,
            watched=watched,
        )
        self._phase, self._disturbed, self._told_to_stop = _Phase.UNTRAINED, False, False
        self._step, self._validation_began = trainer.global_step, time.perf_counter()
        norm, hooks = getattr(trainer.strategy, "grad_norm", None), self.session.job.omits == "unseen"
        self._outcome = _taps.StepOutcome(trainer, norm, module if policy.replays else None, hooks=hooks)
        self._undo = ExitStack()
        """Changes to the trainer that nothing else asks for, to be undone at the fit's end."""
        taps = _taps.FitLoopTaps(trainer, self, self._recorder, resting(trainer))
        note = ProgressNote(trainer, "no_checkpoint", self._missed)
        for undo in (note.remove, taps.remove, _taps.tap_step(trainer, self._training_step), findings.remove):
            self._undo.callback(undo)
        self._stops = Stops(
            trainer,
            stop_grace,
            any_rank=lambda flag: self.session.any_rank(flag),  # noqa: PLW0108
            before_exit=lambda: self.session.leave_nothing_behind(),  # noqa: PLW0108  # a recovery opens another session
        )

    @property
    def session(self) -> CheckpointSession:
        """The session in force."""
        return self.sessions.now

    def begin(self) -> bool:
        """Open the run and return whether it was resumed from an earlier process."""
        session = self.session
        start = session.begin()
        self.sessions.take_up()
        if start is not None and IMPORTED in start:
            _trainer.restore_imported(self._trainer, start[IMPORTED])
            self.trained.restore_order({})
            self._step = self._trainer.global_step
            session.repeats.waive_reconciling()
        if start is None or IMPORTED in start:
            self.trained.begin()
            self._recorder.begin()
        else:
            self._settings.resume(start, session.report().resumed_from or 0)
            self._recorder.resume(start)
            self._step = self._trainer.global_step
            self.trained.regrouped()
            self.trained.awaited = start
            if not self._recorder.next_batch_begun(start):
                session.repeats.waive_reconciling()  # hooks before the next batch run once, later
        if self.sessions.rerun is not None:
            why = "" if self.sessions.policy.exact else "restarts under this policy are not exact, and this is one"
            if start is not None and OTHER_RANKS in start:
                why = "other ranks than the run's sum in another order: losses are not compared"
            self.sessions.rerun.begins(self.sessions.config, self._trainer, self._step, why)
        if session.replaying:
            self._files.hold()
        self.resumed = start is not None
        announce(self._trainer, session.report(), self.sessions.config.url, replaying=session.replaying)
        return self.resumed

    # -- beside a pipeline stage that recovers alone, see `_stage_alone`

    def may_wait(self, waits: Callable[[Exception], bool]) -> None:
        """Let this process wait inside a step for a stage that has failed, after errors for which `waits` is true."""
        self.sessions.let_wait(waits)
        self._files.asks_as_resumed()

    def part(self) -> None:
        """Take nothing, write no files and ask no other stage from here on, until all stages are `together`."""
        self.sessions.move(Standing.ALONE)
        self._files.hold()

    def together(self) -> None:
        """Go on as ever, all stages in one step: write files if dense, and look for torn ones, on all ranks or none."""
        if self.sessions.standing is Standing.ALONE:
            self.sessions.move(Standing.TOGETHER)
            self._files.go_on(held=self.session.replaying)

    def renew(self) -> int | None:
        """Open another session in the place of a suspended one, see `Sessions.renew`. Collective."""
        horizon = self.sessions.renew()
        self.clock = self.session.clock
        return horizon

    def together_at(self, step: int) -> bool:
        """Whether step `step` has just been taken, by all ranks, and its boundary is not captured yet."""
        return self.sessions.standing is Standing.TOGETHER and step != self._step

    def change_policy(self, config: SessionConfig, policy: Policy) -> None:
        """Go on under another policy, from the step under way on, as another incarnation; the first has to be one that replays.

        Call after an optimizer step, before its boundary. The state of training stays, and so do memory and storage. Collective.
        """
        assert self.sessions.standing is Standing.TOGETHER
        random = capture_rng()
        self.sessions.suspend()
        self.sessions.config, self.sessions.policy = config, policy
        self.renew()
        self.together()
        restore_rng(random)

    def generators(self) -> list[HeldGenerator]:
        """Return the random generators held by the user's objects."""
        return self._recorder.generators()

    def hold_attempt(self) -> Callable[[], None]:
        """Return a function to restore the present state of layers, attributes and logs."""
        layers, attributes, logged = self._layers.take(), self._recorder.hold_attributes(), self._logs.hold()

        def put_back() -> None:
            self._layers.restore(copied(layers))
            attributes()
            for undo in logged:
                undo()

        return put_back

    def part_of_step(self) -> dict[str, Any]:
        """Return the state of layers and attributes that a step may read, for another rank."""
        return {"layers": self._layers.take(), "attributes": self._recorder.attributes()}

    def take_part_of_step(self, part: Mapping[str, Any]) -> None:
        """Set layers and attributes to another rank's."""
        self._layers.restore(part["layers"])
        self._recorder.take_attributes(part["attributes"])

    def start_of_run(self) -> dict[str, Any]:
        """Return files and folders of this fit's first begin, for a fit that begins anew in place."""
        return {"files": self._files.start(), "logs": self._logs.start()}

    def begin_anew(self, start: Mapping[str, Any]) -> None:
        """Write files, rows and folders of this fit's first begin again: nothing else of that begin is left."""
        self._files.write_again(start["files"])
        self._logs.restore(start["logs"])

    def leave(self) -> None:
        """Close after a step aborted by another rank's failure, without waiting for any rank; memory stays."""
        self._files.remove()
        self.close(keep_memory=True)

    def close(self, *, keep_memory: bool = False) -> None:
        """Undo all changes to the trainer and close the run, after a normal end or an exception; see `CheckpointSession.close`."""
        if not self.session.replaying:  # in replay the weights are incomplete: no callback may save them
            self._files.remove()
        self._logs.remove()
        self._batches.remove()
        self._settings.close()
        self._recorder.close()
        self._outcome.remove()
        self._undo.close()
        try:
            self.sessions.close(keep_memory=keep_memory)
        finally:
            self._stops.close()  # last: the time limit also covers a close that hangs

    # -- between batches

    @clocked
    def before_epoch(self) -> None:
        show_shards(self._module)
        self._recorder.before_epoch()
        self._disturbed = True  # hooks at the end and start of an epoch may change weights, through `.data` too
        self.session.repeats.freeze()
        self._release_files()
        if not loads_again(self._trainer) and self._stops.agreed():  # else the next fetch stops
            self._stop()

    @clocked
    def before_iter(self) -> None:
        awaited = self.trained.awaited
        if awaited is not None and not self._recorder.next_batch_begun(awaited):
            self.trained.restore_gradients()  # not before Lightning has zeroed them, as it does when training begins
        self._recorder.before_iter()

    @clocked
    def before_fetch(self) -> None:
        if self._disturbed:
            show_shards(self._module)
        self._recorder.before_fetch()
        if self._files.writing is Writing.HELD:
            self._release_files()
        if self._stops.agreed():
            self._stop()
        if (own := self.clock.own) is not None:
            own.begin()

    @clocked
    def after_fetch(self) -> None:
        self._recorder.after_fetch()

    @clocked
    def before_epoch_end(self) -> None:
        """Take the last state before the epoch's end hooks, if training ends in mid-epoch: a longer run resumes here."""
        if _trainer.ends_in_mid_epoch(self._trainer) and self._recorder.between_steps:
            self.session.hold(self._step, self._recorder.take_last())

    @clocked
    def after_batch(self) -> None:
        """Take the boundary after all hooks on the batch, the module's own included, since they may edit the state.

        Replay loads the snapshot of its next step only here. The snapshot contains the edits of those hooks: loaded
        earlier, the state would be edited twice.
        """
        trainer, session, trained = self._trainer, self.sessions.now, self.trained
        self._told_to_stop = trainer.should_stop
        if trainer.global_step == self._step:
            return
        self._step = step = trainer.global_step
        self._layers.drop_graphs()
        original = None
        if session.replaying:
            known = self._settings.explains("losses") or self._settings.explains("batches")
            original = session.repeats.stepped(step, self._outcome.losses, known)
        trained.awaited = original
        alone = self.sessions.standing is not Standing.TOGETHER
        if original is None and not alone:
            self._files.dense()
        outcome = self._outcome.take(step, trainer.current_epoch, self._batches.step_ended())
        if trained.regrouped():
            session.regrouped()
        if alone:
            session.stepped_alone(step)
        else:
            try:
                session.boundary(step, outcome)
            except Exception as error:  # noqa: BLE001  # raised again unless another rank has failed
                self.sessions.put_off(error)
        takes, within = not alone and session.takes(step), session.within_window(step)
        self._recorder.want_start(original, needed=takes, replayed_only=within)
        if (rerun := self.sessions.rerun) is not None:
            if rerun.stores(step):
                session.stop(step, {}, timeout=self.sessions.config.commit_timeout.total_seconds())
            known = self._settings.explains("losses") or self._settings.explains("batches")
            rerun.stepped(step, outcome["losses"], self.sessions.among(), known=known)

    def after_hooks(self) -> None:
        """Undo requests to stop in replay: hooks have judged weights that are frozen or loaded too early."""
        if (self.session.replaying or self._recorder.following) and not self._told_to_stop:
            self._trainer.should_stop = False

    def _missed(self) -> str | None:
        return f"{missed} windows" if (missed := self.session.windows_missed) else None

    def _original_batches(self) -> Logged | None:
        outcome = self.session.repeats.outcome(self._step + 1)
        return None if outcome is None else outcome["batches"] or None  # a run of other ranks may have logged none

    def _end_dense(self, start: dict[str, Any] | None) -> NoReturn:
        """Store the boundary at which the state is dense, for `moe-ckpt densify`, and end this process with status 0.

        `start` is its start half; `None` for a boundary of storage at which an earlier process had stopped.
        """
        seconds = self.sessions.config.commit_timeout.total_seconds()
        if start is not None and not self.session.stop(self._step, start, timeout=seconds):
            raise CheckpointError(
                f"Step {self._step} is dense, and was not stored, as the log says. Run `moe-ckpt densify` again when that is mended."
            )
        raise SystemExit(0)

    def _stop(self) -> None:
        if not self.session.dense_possible:
            self._stops.leave(self._step, "nothing to save beyond what is committed")
        if not self._recorder.between_steps:
            return  # gradients of a step are half accumulated
        saved = self.session.stop(self._step, self._recorder.take_stopped(), timeout=self._stops.grace())
        self._stops.leave(
            self._step, "the next start goes on here" if saved else "this step could not be saved in time"
        )

    # -- first callback

    @clocked
    def batch_start(self) -> None:
        sessions, session = self.sessions, self.sessions.now
        if self._phase is _Phase.UNTRAINED:
            self._phase = _Phase.AT_A_STEP
            reasons = _limits.inexact_reasons(self._trainer, self._module, replays=sessions.policy.replays)
            for reason in reasons:
                log.warning("this run cannot be reproduced bit for bit: %s", reason, alike=True)
            sessions.last_step = _trainer.last_step(self._trainer)
        self._stops.batch_begins()
        start = self._recorder.complete_start(self._batches.take_digest())
        disturbed, self._disturbed = self._disturbed or self.trained.edits_unseen, False
        # Reconciling changes the state with which the step begins, so its failure cannot be put off.
        session.reconcile(sessions.among, disturbed=disturbed)
        if (awaited := self.trained.awaited) is not None:
            self.trained.restore_gradients()
        if sessions.config.densify and not session.replaying:
            self._end_dense(awaited if start is None else start)
        if start is not None and sessions.standing is not Standing.BROKEN:
            self.trained.may_begin = True
            if sessions.standing is Standing.TOGETHER:
                try:
                    session.seal(start, step=self._step, disturbed=disturbed, room=lambda: self._recorder.room)
                except Exception as error:  # noqa: BLE001  # raised again unless another rank has failed
                    sessions.put_off(error)
        frozen = session.repeats.frozen
        self._outcome.follow(session.repeats.outcome(self._step + 1), None if frozen is None else frozen.drop_gradients)
        session.forward_begins(sessions.last_step)

    @clocked
    def replay_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._outcome.follow_overflow(optimizer, self._module.device)

    @clocked
    def batch_end(self, outputs: Any) -> None:
        stepped = self._trainer.global_step != self._step
        self._phase = _Phase.AT_A_STEP if stepped else _Phase.BETWEEN_STEPS
        if (frozen := self.sessions.now.repeats.frozen) is not None:
            frozen.give_back_gradients()
        if isinstance(outputs, dict) and isinstance(outputs.get("loss"), torch.Tensor):
            self._outcome.losses.append(outputs["loss"].detach().clone())

    def validation_begins(self) -> None:
        # Validation may swap weights through `.data` and back (averages), unseen by version counters.
        self._disturbed, self._validation_began = True, time.perf_counter()
        if self._trainer.sanity_checking:
            self._recorder.sanity_check(begins=True)

    # -- last callback

    def validation_ends(self) -> None:
        self.clock.validated += time.perf_counter() - self._validation_began
        if self._trainer.sanity_checking:
            self._recorder.sanity_check(begins=False)

    @clocked
    def before_zero_grad(self) -> None:
        """Wait until captures have read the gradients that are about to be zeroed."""
        if not self.trained.looks:
            self.trained.may_begin = False
        session = self.sessions.now
        session.fence_gradients()
        if not self.trained.may_begin:
            session.begin_seal()

    @clocked
    def before_backward(self) -> None:
        """Give up this boundary if the coming step begins with gradients that it lacks; later boundaries store them."""
        self.trained.may_begin, session = False, self.sessions.now
        session.fence_gradients()
        if not self.trained.looks:
            self.trained.not_zeroed()
        if found := self.trained.left_over():
            told = len(found), found[0]
            log.info("%d parameters, first `%s`, keep gradients from step to step: they are stored", *told)
            session.give_up(f"the gradient of `{found[0]}` was not known to be kept from step to step")
        session.begin_seal()

    @_taps.unwatched
    @clocked
    def before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.trained.may_begin and self._module.automatic_optimization:
            self.before_backward()  # there was no loss
        self._outcome.read(optimizer)
        self.sessions.now.fence()

    @clocked
    def end(self) -> None:
        """Take the last state of training before other hooks, which may replace the weights by averages."""
        self._release_files()
        if self._phase is _Phase.BETWEEN_STEPS:
            self._say_half_a_step()
        self.session.end(self._step, self._recorder.take_end())

    def _say_half_a_step(self) -> None:
        """Warn if batches after the last step are lost: they are in gradients only, and no snapshot has these."""
        stored = self.session.report().generations.get("storage") == self._step
        if self.session.dense_possible and not stored:
            log.warning(
                "training ends in the middle of an accumulation, some batches behind step %d: a run that goes on from here does "
                "not train on those again, and is not exact. End it where a step ends, or take a generation in every step",
                self._step,
            )

    def fit_end(self) -> None:
        if self.session.replaying:
            dense = self.session.report().resumed_from
            log.error(
                "the fit ends at step %d, before step %d, at which the resumed state would have been whole: some parts of the module "
                "have weights of earlier steps and no optimizer state. Do not use it; train to step %d at least. Storage and "
                "memory stay as they are",
                *(self._trainer.global_step, dense, dense),
            )
        if self._phase is _Phase.UNTRAINED:
            self._settings.say()
            finish_with_averages(self._trainer, self._module)
            self._recorder.restore_end()

    def after_run(self) -> None:
        """Leave the process after training has ended, if a signal asked for it meanwhile."""
        if self._stops.agreed_at_end():
            self._stops.leave(self._step, "training had ended")

    # -- private

    def _training_step(self, step: Callable[[], Any], batch: Any) -> Any:
        """Run the user's step; in replay, run it once more with all gradients if it asks for an omitted gradient."""
        frozen = self.sessions.now.repeats.frozen
        if self.sessions.audits is not None:  # here: behind all hooks that may change what the step reads
            self.sessions.audits.step_begins(batch)
        if frozen is None or not frozen.leaves_out:
            return self._outcome.ask(step)
        roots, weights = [batch, *self.generators(), *self._module.buffers()], self._module.parameters()
        held = Memento(
            roots, restored=weights, apart=(torch.nn.Module,), copies=partial(is_small, most_nbytes=sys.maxsize)
        )
        put_back, hooked = self.hold_attempt(), frozen.hooked()
        try:
            loss = self._outcome.ask(step, frozen.shown)
            if hooked == frozen.hooked():
                return loss
            log.info("the step puts hooks on frozen parameters: all gradients are computed from here on")
        except Exception as error:
            if not isinstance(error, _taps.LacksGradient) and not any(text in str(error) for text in _LACKING):
                raise
            log.info("the step asks for gradients of frozen parts (%s): they are computed from here on", error)
        frozen.leave_nothing_out()
        put_back()
        held.restore()
        return self._outcome.ask(step)

    def _release_files(self) -> None:
        """Release held files once the next batch begins, not at replay's end: validation in between differs."""
        held, alone = self._files.writing is Writing.HELD, self.sessions.standing is not Standing.TOGETHER
        if held and not self.session.replaying and not alone:
            self._files.dense()
