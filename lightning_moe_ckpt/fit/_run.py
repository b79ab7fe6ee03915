"""Connect one `fit`'s hooks, called by `Replay` (first) and `CheckpointCallback` (last), to a process's checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.coordination import Neighbours
from lightning_moe_ckpt.fit import _files, _limits
from lightning_moe_ckpt.fit._callbacks import Findings, ProgressNote, averages_of, finish_with_averages, resting
from lightning_moe_ckpt.fit._data import Batches, BatchLog, Logged, OnMismatch, WatchedData
from lightning_moe_ckpt.fit._limits import refuse_unsupported, warn_if_short
from lightning_moe_ckpt.fit._recorder import BoundaryRecorder
from lightning_moe_ckpt.fit._settings import OnChange, Settings, announce
from lightning_moe_ckpt.fit._state import JournalPart, LayerState, Trained, copied
from lightning_moe_ckpt.fit._stops import Stops, say_who_is_gone
from lightning_moe_ckpt.fit.loaders._loaders import loads_again
from lightning_moe_ckpt.fit.loggers import _once
from lightning_moe_ckpt.fit.loops import _taps, _trainer
from lightning_moe_ckpt.journal import HeldGenerator, Unread, capture_rng, restore_rng
from lightning_moe_ckpt.operators import StateSchema
from lightning_moe_ckpt.parallel._elastic import is_of_collective
from lightning_moe_ckpt.policies import Policy
from lightning_moe_ckpt.process import clocked
from lightning_moe_ckpt.session import CheckpointSession, Repeats, Report
from lightning_moe_ckpt.tiers import SessionConfig

log = rank_logger(__name__)

_AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""Low precisions to which forward casts; with any other, parameters are used as they are."""

_UNUSED = "not have been used in the graph"
"""Text of `torch.autograd.grad`'s error for a parameter without a gradient that a module saw."""


class FitSession:
    """Forward one trainer's hooks to the recorder of boundaries and to the process's `CheckpointSession`.

    Args:
        config: where checkpoints live and how to resume.
        policy: the snapshot of each step.
        trainer, module: as in `on_fit_start`: parameters are on their device and the optimizer exists.
        own_callbacks: callback classes without state in the journal.
        watched: see `BoundaryRecorder`.
        stop_grace, batches, on_change, on_mismatch: see `CheckpointArguments`.
    """

    resumed = False
    """Whether this fit continues training of an earlier process, or of this process."""
    _neighbours: Neighbours | None = None
    _last_step: int | None = None
    """Step at which training is planned to end; `None` until known."""
    _gradients_of: dict[str, Any] | None = None
    """Start half of the loaded boundary, until the next batch begins."""
    may_begin_with_gradients = False
    """Whether the coming step may begin with gradients that the boundary at hand lacks."""
    _last: dict[str, Any] | None = None
    """Start half of the boundary at which training ends, once taken."""
    _waits = _suspended = False
    _reported: Report
    _broken: Exception | None = None
    """Exception by which the session failed between two steps; the next step raises it."""

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
    ) -> None:
        refuse_unsupported(trainer, policy)
        self._trainer, self._module = trainer, module
        self._optimizer: torch.optim.Optimizer = trainer.optimizers[0]
        self._trains = Trained(module, self._optimizer, staged=getattr(trainer.strategy, "pipeline_parallel", 1) > 1)
        self._num_groups = self._trains.num_groups
        self._open = partial(self._opened, config, policy, own_callbacks)
        self.session = self._open()
        self.clock = self.session.clock
        warn_if_short(trainer, self.session.least_steps)
        self._logs = _once.LogFolders(trainer)
        compared, original = lambda: self._recorder.compares_batch, self._original_batches
        self._batches = BatchLog(trainer, batches, keep=policy.replays, original=original, compared=compared)
        self._layers = LayerState(module, self.session.layers)
        self._findings = Findings(trainer, module)
        self._files, self._url = _files.CheckpointFiles(trainer), config.url
        parts: dict[str, JournalPart] = {"files": self._files, "logs": self._logs, "batches": self._batches}
        parts |= {"layers": self._layers, "findings": self._findings}
        replay, logged = lambda: self.session.repeats.replay, batches == "log"
        self._settings = Settings(trainer, own_callbacks, on_change=on_change, logged=logged, replay=replay)
        self._recorder: BoundaryRecorder = BoundaryRecorder(
            *(trainer, module, own_callbacks, parts, self._trains),
            settings=self._settings,
            layers=self._layers.attributes,
            on_mismatch=on_mismatch,
            among=lambda: self.session.among,
            watched=watched,
        )
        self._half_a_step = self._disturbed = self._trained = self._told_to_stop = False
        self._clip = _taps.ClipTap(trainer, getattr(trainer.strategy, "grad_norm", None))
        self._found_inf = _taps.FoundInf(trainer)
        self._step_tap = _taps.StepTap(trainer, self._training_step)
        self._step = trainer.global_step
        self._losses: list[torch.Tensor] = []
        self._found: float | Unread | None = None
        self._taps = _taps.FitLoopTaps(trainer, self, self._recorder, resting(trainer))
        self._stops = Stops(
            trainer,
            stop_grace,
            any_rank=lambda flag: self.session.any_rank(flag),  # noqa: PLW0108
            before_exit=lambda: self.session.leave_nothing_behind(),  # noqa: PLW0108  # `session` is replaced by a recovery
        )
        self._note = ProgressNote(trainer, "no_checkpoint", self._missed)
        self._validation_began = time.perf_counter()
        self._replays = policy.replays

    def begin(self) -> bool:
        """Open the run and return whether it was resumed from an earlier process."""
        start = self.session.begin()
        if start is None:
            self._trains.begin()
            self._recorder.begin()
        else:
            self._settings.resume(start, self.session.report().resumed_from or 0)
            self._recorder.resume(start)
            self._step, self._num_groups = self._trainer.global_step, self._trains.num_groups
            self._gradients_of = start
            if not self._recorder.next_batch_begun(start):
                self.session.repeats.waive_reconciling()  # hooks before the next batch run once, later
        self._files.held |= self.session.replaying
        self.resumed = start is not None
        announce(self._trainer, self.session.report(), self._url, replaying=self.session.replaying)
        self._take_up_session()
        return self.resumed

    # -- beside a pipeline stage that recovers alone, see `_stage_alone`

    def alone(self) -> None:
        """Take nothing, write no files and ask no other stage from here on, until all are `together`."""
        self.session.alone = self._files.held = True

    def together(self) -> None:
        """Go on as ever, all stages in one step: write files if dense, and look for torn ones, on all ranks or none."""
        if self.session.alone:
            self.session.alone, self._files.held = False, self.session.replaying
            self._files.suspect()

    def suspend(self) -> None:
        """Close the session, because its groups are gone; the state of training and the memory stay."""
        if not self._suspended:
            self._reported = self.report()  # a closed engine has no figures
            self._suspended, self._broken = True, None
            vars(self._trainer.strategy).pop("on_phase", None)
            self.session.close(keep_memory=True, keep_frozen=True)

    def renew(self) -> int | None:
        """Open another session, and return the step from which ranks go on; `None` without a generation. Collective."""
        self.session, self._suspended = self._open(self.session.repeats), False
        self.clock = self.session.clock
        start = self.session.begin(stay=True)
        self.session.alone = True
        self._take_up_session()
        return None if start is None else self.session.horizon

    def attempt_again(self) -> None:
        """Note that the batch under way is run again."""
        self.session.forward_begins(self._last_step)

    def generators(self) -> list[HeldGenerator]:
        """Return the random generators held by the user's objects."""
        return self._recorder.generators()

    def hold_attempt(self) -> Callable[[], None]:
        """Return a function that restores the present state of layers, attributes and logs."""
        layers, moved, logged = self._layers.take(), self._recorder.attributes(), self._logs.hold()

        def put_back() -> None:
            self._layers.restore(copied(layers))
            self._recorder.restore_attributes(moved)
            for undo in logged:
                undo()

        return put_back

    def raise_broken(self) -> None:
        """Raise the exception that was put off between two steps, if there is one; see `_put_off`."""
        if self._broken is not None:
            raise self._broken

    def may_wait(self, *, within_steps: bool) -> None:
        """Note whether this process may wait inside a step for a stage that has failed."""
        self._waits = within_steps
        if within_steps:
            self._files.asks_as_resumed()

    def _put_off(self, error: Exception) -> None:
        """Keep a collective's error for the next step, where healthy stages can wait; raise any other error."""
        if not (self._waits and is_of_collective(error)):
            raise error
        self._broken = error

    def report(self) -> Report:
        """Return the figures so far."""
        if self._suspended:
            return self._reported
        upstream = getattr(self._trainer.strategy, "upstream", None)
        return replace(self.session.report(), upstream_log_nbytes=0 if upstream is None else upstream.nbytes)

    def failed(self, error: BaseException) -> None:
        """Log which other rank has died, if its death ends the fit."""
        say_who_is_gone(self._neighbours, self.session.newest_step, error)

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
        """Undo all changes to the trainer and close the run, after a normal end or an exception.

        Args:
            keep_memory: see `CheckpointSession.close`.
        """
        if not self.session.replaying:  # in replay the weights are incomplete: no callback may save them
            self._files.remove()
        self._logs.remove()
        self._batches.remove()
        self._settings.close()
        self._recorder.close()
        self._findings.remove()
        self._clip.remove()
        self._step_tap.remove()
        self._taps.remove()
        self._note.remove()
        vars(self._trainer.strategy).pop("on_phase", None)
        try:
            if self._suspended:
                self.session.repeats.close()
            else:
                self.session.close(keep_memory=keep_memory)
        finally:
            self._stops.close()  # last: the time limit also covers a close that hangs

    # -- between batches

    @clocked
    def before_epoch(self) -> None:
        self._recorder.before_epoch()
        self._disturbed = True  # hooks at the end and start of an epoch may change weights, through `.data` too
        self.session.repeats.freeze()
        self._release_files()
        if not loads_again(self._trainer):  # else the next fetch stops
            self._stop_if_agreed()

    @clocked
    def before_iter(self) -> None:
        if self._gradients_of is not None and not self._recorder.next_batch_begun(self._gradients_of):
            self._restore_gradients()  # not before Lightning has zeroed them, as it does when training begins
        self._settings.loaders_made()
        self._recorder.before_iter()

    @clocked
    def before_fetch(self) -> None:
        self._recorder.before_fetch()
        self._release_files()
        self._stop_if_agreed()

    @clocked
    def after_fetch(self) -> None:
        self._recorder.after_fetch()

    @clocked
    def before_epoch_end(self) -> None:
        """Take the last state before the epoch's end hooks, if training ends in mid-epoch: a longer run resumes here."""
        if _trainer.ends_in_mid_epoch(self._trainer) and self._recorder.between_steps:
            self._recorder.before_fetch()
            self._last = self._recorder.take_stopped()
            self.session.hold(self._step, self._last)

    @clocked
    def after_batch(self) -> None:
        """Take the boundary after all hooks on the batch, the module's own included, since they may edit the state.

        Replay loads the snapshot of its next step only here. The snapshot contains the edits of those hooks: loaded
        earlier, the state would be edited twice.
        """
        self._told_to_stop = self._trainer.should_stop
        if not self._stepped:
            return
        self._step = self._trainer.global_step
        self._layers.drop_graphs()
        original = None
        if self.session.replaying:
            original = self.session.repeats.stepped(self._step, self._losses, self._settings.explains_losses)
        self._gradients_of = original
        if original is None and not self.session.alone:
            self._files.dense()
        losses, self._losses = self._losses, []
        outcome = {
            "step": self._step,
            "epoch": self._trainer.current_epoch,
            "grad_norm": self._clip.last,
            "found_inf": self._found,
            "losses": losses,
            "batches": self._batches.step_ended(),
        }
        if self._num_groups != self._trains.num_groups:
            self._num_groups = self._trains.num_groups
            self.session.regrouped()
        try:
            self.session.boundary(self._step, outcome)
        except Exception as error:  # noqa: BLE001  # raised again unless another rank has failed
            self._put_off(error)
        takes, within = self.session.takes(self._step), self.session.within_window(self._step)
        self._recorder.want_start(original, needed=takes, replayed_only=within)

    def after_hooks(self) -> None:
        """Undo requests to stop in replay: hooks have judged weights that are frozen or loaded too early."""
        if (self.session.replaying or self._recorder.following) and not self._told_to_stop:
            self._trainer.should_stop = False

    def _missed(self) -> str | None:
        return f"{missed} windows" if (missed := self.session.windows_missed) else None

    def _original_batches(self) -> Logged | None:
        outcome = self.session.repeats.outcome(self._step + 1)
        return None if outcome is None else outcome["batches"]

    def _stop_if_agreed(self) -> None:
        if not self._stops.agreed():
            return
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
        if not self._trained:
            reasons = _limits.inexact_reasons(self._trainer, self._module, replays=self._replays)
            for reason in reasons:
                log.warning("this run cannot be reproduced bit for bit: %s", reason, alike=True)
            self._last_step = _trainer.last_step(self._trainer)
        self._trained = True
        self._stops.batch_begins()
        start = self._recorder.complete_start(self._batches.take_digest())
        disturbed, self._disturbed = self._disturbed, False
        # Reconciling changes the state with which the step begins, so its failure cannot be put off.
        self.session.reconcile(disturbed=disturbed)
        if self._gradients_of is not None:
            self._restore_gradients()
        if start is not None and self._broken is None:
            self.may_begin_with_gradients = self._trains.looks
            try:
                self.session.seal(start, step=self._step, disturbed=disturbed, room=lambda: self._recorder.room)
            except Exception as error:  # noqa: BLE001  # raised again unless another rank has failed
                self._put_off(error)
        outcome = self.session.repeats.outcome(self._step + 1)
        frozen = self.session.repeats.frozen
        self._clip.override = None if outcome is None else outcome["grad_norm"]
        self._clip.clipped = None if frozen is None else frozen.drop_gradients
        self.session.forward_begins(self._last_step)

    @clocked
    def replay_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        outcome = self.session.repeats.outcome(self._step + 1)
        if outcome is None:
            return
        if outcome["found_inf"] is not None:
            self._found_inf.write(optimizer, outcome["found_inf"], self._module.device)

    @clocked
    def batch_end(self, outputs: Any) -> None:
        self._half_a_step = not self._stepped
        if (frozen := self.session.repeats.frozen) is not None:
            frozen.give_back_gradients()
        if isinstance(outputs, dict) and isinstance(outputs.get("loss"), torch.Tensor):
            self._losses.append(outputs["loss"].detach().clone())

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
        self.session.fence_gradients(seal=not self.may_begin_with_gradients)

    @clocked
    def before_backward(self) -> None:
        """Give up this boundary if the coming step begins with gradients that it lacks; later boundaries store them."""
        self.may_begin_with_gradients, why_not = False, ""
        if found := self._trains.left_over():
            told = len(found), found[0]
            log.info("%d parameters, first `%s`, keep gradients from step to step: they are stored", *told)
            why_not = f"the gradient of `{found[0]}` was not known to be kept from step to step"
        self.session.fence_gradients(why_not=why_not)

    @clocked
    def before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.may_begin_with_gradients and self._module.automatic_optimization:
            self.before_backward()  # there was no loss
        self._found = self._found_inf.read(optimizer)
        self.session.fence()

    @clocked
    def end(self) -> None:
        """Take the last state of training before other hooks, which may replace the weights by averages."""
        self._release_files()
        if self._last is None:
            self._say_half_a_step()
            self._last = self._recorder.take_end()
        else:
            self._last["end"] = self._recorder.take_after(self._last)
        self.session.end(self._step, self._last)

    def _say_half_a_step(self) -> None:
        """Warn if batches after the last step are lost: they are in gradients only, and no snapshot has these."""
        stored = self.session.report().generations.get("storage") == self._step
        if self.session.dense_possible and self._half_a_step and not stored:
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
        if not self._trained:
            self._settings.say()
            finish_with_averages(self._trainer, self._module)
            self._recorder.restore_end()

    def after_run(self) -> None:
        """Leave the process after training has ended, if a signal asked for it meanwhile."""
        if self._stops.agreed_at_end():
            self._stops.leave(self._step, "training had ended")

    # -- private

    def _restore_gradients(self) -> None:
        start, self._gradients_of = self._gradients_of, None
        assert start is not None
        self._trains.restore_gradients(start["trained"])

    def _take_up_session(self) -> None:
        self._neighbours = self.session.neighbours()
        if hasattr(self._trainer.strategy, "on_phase"):
            self._trainer.strategy.on_phase = self.session.bubbles.enter

    def _opened(
        self,
        config: SessionConfig,
        policy: Policy,
        own_callbacks: tuple[type[Callback], ...],
        repeats: Repeats | None = None,
    ) -> CheckpointSession:
        trainer, module = self._trainer, self._module
        return CheckpointSession(
            config,
            policy=policy,
            module=module,
            schema=StateSchema.of(
                self._optimizer, in_parts=policy.cuts, default_dtype=_trainer.dtype_of_steps(trainer, module)
            ),
            groups=_trainer.groups_of(trainer.strategy),
            autocast_dtype=_AUTOCAST.get(str(trainer.precision)),
            may_skip=_limits.may_leave_out(trainer, module, own_callbacks),
            compiled=_trainer.is_compiled(module),
            extra=_trainer.checkpoint_extra(trainer, module),
            averages=averages_of(trainer),
            as_user=lambda start: self._trains.restore(start["trained"]),
            repeats=repeats,
        )

    def _training_step(self, step: Callable[[], Any]) -> Any:
        """Run the user's step; in replay, run it once more with all gradients if it asks for an omitted gradient."""
        frozen = self.session.repeats.frozen
        if frozen is None or not frozen.leaves_out:
            return step()
        buffers = {name: buffer.clone() for name, buffer in self._module.named_buffers()}
        random = capture_rng()
        try:
            return step()
        except RuntimeError as error:
            if _UNUSED not in str(error):
                raise
            log.info("the step asks for gradients of frozen parts (%s): they are computed from here on", error)
        frozen.leave_nothing_out()
        restore_rng(random)
        with torch.no_grad():
            for name, buffer in self._module.named_buffers():
                if not torch.equal(buffer, buffers[name]):
                    buffer.copy_(buffers[name])
        return step()

    def _release_files(self) -> None:
        """Release held files once the next batch begins, not at replay's end: validation in between differs."""
        if self._files.held and not self.session.replaying and not self.session.alone:
            self._files.dense()

    @property
    def _stepped(self) -> bool:
        """Whether the batch that ends now ended with an optimizer step."""
        return self._trainer.global_step != self._step
