"""Recover in place: when another rank has failed, this process resumes without being replaced.

The aborted collective's exception leaves training. Unfinished work is dropped, objects return to their state at the
fit's begin (`objects._memento`), groups are formed anew, and the fit begins again exactly as in a new process, from
`on_fit_start` on: the same agreement, restore, repositioning and replay. Expensive things stay: the process with its
imports and device contexts, compiled code, and strategy, module and optimizer as set up by Lightning.

Nothing here is used unless a supervisor has started the process.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from operator import methodcaller
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer import call
from torch import Tensor

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.errors import CheckpointError, Fenced
from lightning_moe_ckpt.fit._callbacks import averaging_callbacks
from lightning_moe_ckpt.fit._run import FitSession
from lightning_moe_ckpt.fit.in_place._stage_alone import Rewind, StageAlone
from lightning_moe_ckpt.fit.loops._trainer import callbacks_of, datamodule_of
from lightning_moe_ckpt.fit.objects._memento import Memento
from lightning_moe_ckpt.fit.objects._users import restore_values
from lightning_moe_ckpt.launch import Supervised
from lightning_moe_ckpt.parallel._groups import is_of_collective

log = rank_logger(__name__)

_CONFIRM_SECONDS = {True: 15.0, False: 1.0}
"""Seconds for word of another rank's failure, by whether a collective raised; supervisors find a lost node within 12 s."""
_REJOIN_SECONDS = 120.0


class Ended(Enum):
    """How a part of a fit has ended."""

    WELL = auto()
    BY_ANOTHER_RANK = auto()
    """Another rank has failed: this process has to join the other ranks again."""
    JOINED = auto()
    """This process has to begin again, and has joined the other ranks already."""


def supervisor(trainer: Trainer) -> Supervised | None:
    """Return this process's supervisor, and tell it if ranks cannot join again; `None` under other launchers."""
    if (found := Supervised.from_environment()) is not None and not can_rejoin(trainer):
        where = ", in the meshes of parameters" if hasattr(trainer.strategy, "device_mesh") else ""
        found.cannot_rejoin(f"{type(trainer.strategy).__name__} keeps the process groups with which it began{where}")
    if found is None and getattr(trainer.strategy, "localized_recovery", None):
        log.info(
            "if a rank fails, all stages recover: only `moe-ckpt run` lets the others stay in their processes",
            alike=True,
        )
    return found


def can_rejoin(trainer: Trainer) -> bool:
    """Return whether ranks may stay in their processes when another one fails."""
    return hasattr(trainer.strategy, "reconnect")


class OnlyBeats:
    """A fit whose ranks start together or not at all: its supervisor is only told how far training is."""

    def __init__(self, trainer: Trainer, supervisor: Supervised) -> None:
        self._trainer, self._supervisor = trainer, supervisor

    def begin(self, make: Callable[[], FitSession]) -> FitSession:
        """Return the session that `make` returns."""
        return make()

    def batch_begins(self, _run: FitSession, _batch: object) -> None:
        """See `InPlace.batch_begins`."""
        self._supervisor.beat(self._trainer.global_step)

    def batch_ends(self) -> None:
        """See `InPlace.batch_ends`."""
        self._supervisor.pause()

    def close(self) -> None:
        """Tell the supervisor that no more steps come."""
        self._supervisor.pause()


class InPlace:
    """The recoveries of one fit. `leave` closes the aborted run's `FitSession`, if any; for `exact` see `StageAlone`."""

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        supervisor: Supervised,
        *,
        own_callbacks: tuple[type[Callback], ...],
        exact: bool,
        leave: Callable[[], None],
    ) -> None:
        self._trainer, self._module, self._supervisor = trainer, module, supervisor
        self._own, self._leave = own_callbacks, leave
        self._start: Memento | None = None
        self._weights: list[tuple[Tensor, Tensor]] = []
        """Weights and buffers at the start, as (tensor, copy on the host), until there is a generation."""
        self._start_of_run: dict[str, Any] | None = None
        """Files, folders and rows at the run's start; `None` in a process that was not there."""
        self._joined = False
        """Whether this process has joined the other ranks in the midst of a fit, of its own or of theirs."""
        self._meeting = Ended.WELL
        """How the meeting of all ranks behind `on_fit_start` has ended."""
        self._alone: StageAlone | None = None
        if _asks_for_alone(trainer):
            self._alone = StageAlone(
                *(trainer, module),
                own_callbacks=own_callbacks,
                exact=exact,
                join=self._join,
                confirm=self._require_failure,
                supervisor=supervisor,
            )
        self._remove = tap_run(trainer, self._meet, self._run)

    def begin(self, make: Callable[[], FitSession]) -> FitSession:
        """Return the session that `make` returns, once begun; call in `on_fit_start`, before any other callback runs."""
        if self._start is None:
            self._start = Memento(
                objects_of(self._trainer, self._module, self._own),
                shallow=[self._trainer],
                restored=weights_of(self._trainer, self._module),
                apart=(*APART, *self._own),
            )
            self._keep_weights()
            if getattr(self._trainer.strategy, "apart", False):
                self._join()
        made: list[FitSession] = []
        while (ended := self._survive(partial(self._begin, made, make))) is not Ended.WELL:
            self._recover(ended)
        return made[-1]

    def batch_begins(self, run: FitSession, batch: object) -> None:
        """Tell the supervisor that training goes on, and drop the weights at the start once there is a generation."""
        if self._alone is not None:
            self._alone.batch = batch
        if self._weights and run.sessions.now.has_generation:
            self._weights = []
        self._supervisor.beat(self._trainer.global_step)

    def batch_ends(self) -> None:
        """Tell the supervisor that callbacks, validation and files may now take any time."""
        self._supervisor.pause()

    def close(self) -> None:
        """Undo the change to the trainer."""
        self._remove()
        if self._alone is not None:
            self._alone.remove()
        self._start, self._weights = None, []

    # -- private

    def _begin(self, made: list[FitSession], make: Callable[[], FitSession]) -> None:
        run = make()
        made.append(run)
        if self._alone is not None:
            self._alone.begun(run)
        if run.resumed:
            missing = run.session.report().missing_experts
            if self._joined and missing:
                raise CheckpointError(
                    f"No whole copy is left of {len(missing)} experts, which begin anew: processes that stayed have trained "
                    "them, others have not. When this process ends, the supervisor starts all ranks anew."
                )
            self._weights = []
        elif not self._joined:
            self._start_of_run = run.start_of_run()
        elif not self._weights or self._trainer.ckpt_path:
            # Lightning gives such a file to model, optimizer and loops at several times before and after this hook.
            why = f": the fit began from {self._trainer.ckpt_path}" if self._trainer.ckpt_path else ""
            raise CheckpointError(
                f"Nothing is left to resume from in place{why}. When this process ends, the supervisor starts all ranks anew."
            )
        else:
            strategy, survived = self._trainer.strategy, self._start_of_run is not None
            first = strategy.share_start(survived=survived) if hasattr(strategy, "share_start") else 0
            if (begun := strategy.broadcast(self._start_of_run, first)) is None:  # all processes are new
                begun = run.start_of_run()
            self._start_of_run = begun
            run.begin_anew(begun)
            if not survived:
                self._keep_weights()

    def _keep_weights(self) -> None:
        weights = weights_of(self._trainer, self._module)
        self._weights = [(weight, weight.detach().to("cpu", copy=True)) for weight in weights]

    def _join(self) -> None:
        """Join the other ranks; again, if another rank fails meanwhile."""
        self._joined = True
        if (reconnect := getattr(self._trainer.strategy, "reconnect", None)) is None:
            reconnect = methodcaller("rejoin", _REJOIN_SECONDS)
        while self._survive(partial(self._join_once, reconnect)) is not Ended.WELL:
            pass

    def _join_once(self, reconnect: Callable[[Supervised], object]) -> None:
        reconnect(self._supervisor)
        if self._alone is not None:
            self._alone.decide()

    def _meet(self, original: Callable[[], object]) -> None:
        self._meeting = self._survive(original)

    def _run(self, original: Callable[[], object]) -> None:
        if (ended := self._meeting) is Ended.WELL:
            ended = self._survive(partial(self._run_stage, original))
        while ended is not Ended.WELL:
            self._recover(ended)
            ended = self._survive(partial(self._run_again, original))

    def _run_again(self, original: Callable[[], object]) -> None:
        start_again(self._trainer)
        self._run_stage(original)

    def _run_stage(self, original: Callable[[], object]) -> None:
        original()
        self._supervisor.pause()
        # No recovery in place behind this barrier: all ranks have come to the end of training.
        self._trainer.strategy.barrier("moe-ckpt: training has ended")

    def _survive(self, call: Callable[[], object]) -> Ended:
        """Call, and raise the exception of `call` unless another rank has failed meanwhile."""
        try:
            call()
        except Exception as error:  # noqa: BLE001  # raised again unless another rank has failed
            return self._require_failure(error)
        return Ended.WELL

    def _require_failure(self, error: Exception) -> Ended:
        """Raise `error` unless another rank has failed; otherwise clear its frames, and return how the part ended."""
        self._supervisor.pause(aborted=True)
        if self._alone is not None:
            error = self._alone.ended(error)
        if isinstance(error, Rewind):
            log.warning("this process begins again in place: %s", error)
            _forget(error)
            return Ended.JOINED
        patience = _CONFIRM_SECONDS[is_of_collective(error)]
        failure = None if isinstance(error, Fenced) else self._supervisor.confirm(patience)
        if failure is None:
            raise error
        log.warning("%s; this process stays (%s: %s)", failure, type(error).__name__, error)
        _forget(error)
        return Ended.BY_ANOTHER_RANK

    def _recover(self, ended: Ended) -> None:
        started = time.perf_counter()
        self._leave()
        end_iterators(self._trainer)
        assert self._start is not None
        self._start.restore()
        for tensor, kept in self._weights:
            restore_values(tensor, kept)
        if ended is not Ended.JOINED:
            self._join()
        log.info("goes on in place, %.2f s after the failure was confirmed", time.perf_counter() - started)


def _asks_for_alone(trainer: Trainer) -> bool:
    strategy: Any = trainer.strategy
    return getattr(strategy, "pipeline_parallel", 1) > 1 and strategy.localized_recovery is not False


def _forget(error: BaseException | None) -> None:
    """Clear the frames of an error and of its causes: they hold tensors, loaders and groups."""
    while error is not None:
        error.__traceback__ = None
        behind, error.__context__, error.__cause__ = error.__cause__ or error.__context__, None, None
        error = behind


APART: tuple[type, ...] = (Trainer, Strategy, Logger, Profiler)
"""Types that are not reset: a logger's rows are dropped when they come again, and a strategy gets other groups."""


def tap_run(
    trainer: Trainer, meet: Callable[[Callable[[], Any]], Any], stage: Callable[[Callable[[], Any]], Any]
) -> Callable[[], None]:
    """Let `meet` run the meeting of all ranks behind `on_fit_start`, once, and `stage` the rest, sanity check included.
    Returns a function to undo this.
    """
    connector = trainer._checkpoint_connector
    original, resume_end = trainer._run_stage, connector.resume_end
    trainer._run_stage = lambda: stage(original)  # type: ignore[method-assign]

    def meet_once() -> None:
        del connector.resume_end
        meet(resume_end)

    connector.resume_end = meet_once  # type: ignore[method-assign]

    def remove() -> None:
        vars(trainer).pop("_run_stage", None)
        vars(connector).pop("resume_end", None)

    return remove


def objects_of(trainer: Trainer, module: LightningModule, skip: tuple[type[Callback], ...]) -> list[object]:
    """Return the objects that lead to all state changed by training; call in `on_fit_start`."""
    strategy = trainer.strategy
    return [
        *(module, datamodule_of(trainer), [each for each in callbacks_of(trainer) if not isinstance(each, skip)]),
        *(strategy.optimizers, strategy._lightning_optimizers, strategy.lr_scheduler_configs),
        *(trainer.precision_plugin, trainer.fit_loop, trainer._logger_connector, trainer.state),
    ]


def weights_of(trainer: Trainer, module: LightningModule) -> list[Tensor]:
    """Return the parameters and buffers of the module and of its averages, each once."""
    models = [module, *(callback._average_model for callback in averaging_callbacks(trainer))]
    found = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
    return list({id(tensor): tensor for tensor in found}.values())


def end_iterators(trainer: Trainer) -> None:
    """End iterators of the aborted run: workers of loaders, bars on the screen."""
    trainer.fit_loop.teardown()
    for callback in callbacks_of(trainer):
        if isinstance(callback, RichProgressBar):
            callback._stop_progress()
        elif isinstance(callback, TQDMProgressBar):
            for bar in (callback._train_progress_bar, callback._val_progress_bar):
                if bar is not None:
                    bar.close()


def start_again(trainer: Trainer) -> None:
    """Repeat the work of `Trainer._run` from `on_fit_start` to the run's own stage."""
    connector = trainer._signal_connector
    before = connector._original_handlers.get(signal.SIGTERM)
    if before is not None:  # the handler of the aborted run leads to a listener that is gone
        connector._register_signal(signal.SIGTERM, before)
    call._call_callback_hooks(trainer, "on_fit_start")
    call._call_lightning_module_hook(trainer, "on_fit_start")
    trainer._checkpoint_connector.resume_end()  # all ranks meet there
    connector.register_signal_handlers()
