"""Own the checkpoint session of one fit, and the state in which this rank takes part in checkpoints of all.

Where pipeline stages recover alone (`fit/in_place/_stage_alone.py`), groups are made anew in the midst of a fit. The
session of the old groups is closed then, and another one takes its place, with the state of training in between.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from enum import Enum, auto
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
from lightning.pytorch import Callback, Trainer

from lightning_moe_ckpt.coordination import Exchange, Neighbours
from lightning_moe_ckpt.errors import SilentFault
from lightning_moe_ckpt.fit import _limits
from lightning_moe_ckpt.fit._callbacks import averages_of
from lightning_moe_ckpt.fit._other_ranks import retold
from lightning_moe_ckpt.fit._rerun import Rerun
from lightning_moe_ckpt.fit._state import Trained
from lightning_moe_ckpt.fit._stops import say_who_is_gone
from lightning_moe_ckpt.fit.loops import _trainer
from lightning_moe_ckpt.launch import Supervised
from lightning_moe_ckpt.operators import StateSchema, agreed_schema
from lightning_moe_ckpt.policies import Policy
from lightning_moe_ckpt.process import AuditFigures
from lightning_moe_ckpt.recovery import JournalReader, Repeats
from lightning_moe_ckpt.session import CheckpointSession, Report, SessionJob
from lightning_moe_ckpt.snapshot import IMPORTED
from lightning_moe_ckpt.tiers import SessionConfig

_CONFIRM_SECONDS = 15.0
"""Seconds for a supervisor to end the ranks that an audit has named."""
_AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""Low precisions to which forward casts; with any other, parameters are used as they are."""


class Standing(Enum):
    """How this rank takes part in checkpoints of all ranks."""

    TOGETHER = auto()
    """Every rank takes its part of the same boundaries."""
    BROKEN = auto()
    """A collective has failed between two steps. The next step raises its error, where it can wait for the failed stage."""
    SUSPENDED = auto()
    """The session is closed, because its groups are gone. The state of training and the memory stay."""
    ALONE = auto()
    """This stage repeats steps, or waits for a stage that does: it takes nothing, and asks no other stage."""


_MOVES = {
    Standing.TOGETHER: {Standing.BROKEN, Standing.SUSPENDED, Standing.ALONE},
    Standing.BROKEN: {Standing.SUSPENDED},
    Standing.SUSPENDED: {Standing.ALONE},
    Standing.ALONE: {Standing.TOGETHER, Standing.BROKEN, Standing.SUSPENDED},
}
"""`put_off` moves to BROKEN, `suspend` to SUSPENDED, `renew` and `FitSession.part` to ALONE, and `together` to TOGETHER."""


class StepAudits(Protocol):
    """Audits of the steps of a fit, called by its first callback."""

    figures: AuditFigures

    def step_begins(self, arguments: tuple[Any, ...]) -> None:
        """Called with the arguments of each training step, before it."""

    def backward_ends(self) -> None:
        """Called in the first callback's `on_after_backward`."""

    def close(self) -> None:
        """Called when the fit ends, however."""


class Sessions:
    """The session in force, replaced by `renew`; `trained` is the user's choice of parameters, restored while a generation is loaded."""

    last_step: int | None = None
    """Step at which training is planned to end; `None` until known, or if only time ends it."""
    rerun: Rerun | None = None
    """Steps that are run again; `None` where training goes on as ever."""
    error: Exception | None = None
    """Error that the next step raises; `None` unless `BROKEN`."""
    audits: StepAudits | None = None
    """Audits of steps; `None` for none."""
    _neighbours: Neighbours | None = None
    _reported: Report

    def __init__(
        self,
        trainer: Trainer,
        trained: Trained,
        *,
        config: SessionConfig,
        policy: Policy,
        own_callbacks: tuple[type[Callback], ...],
    ) -> None:
        self._trainer, self._trained, self._own = trainer, trained, own_callbacks
        self.config, self.policy = config, policy
        self.standing = Standing.TOGETHER
        self._waits: Callable[[Exception], bool] = lambda _: False
        """Whether a step waits for the failed stage after this error."""
        self.now = self._open(None)

    def take_up(self) -> None:
        """Note the processes of all ranks, and measure the phases of a pipeline; call once the run is open. Collective."""
        self._neighbours = self.now.neighbours()
        if hasattr(self._trainer.strategy, "on_phase"):
            self._trainer.strategy.on_phase = self.now.enter

    @property
    def hosts(self) -> tuple[str, ...]:
        """Host name of each rank."""
        return () if self._neighbours is None else self._neighbours.hosts

    def among(self) -> Exchange:
        """Return the exchange of the ranks that go on together: this stage's if it is `ALONE`, or all."""
        return Exchange(self._groups, "stage_control" if (self.standing is Standing.ALONE) else "control")

    # -- where stages recover alone

    def let_wait(self, waits: Callable[[Exception], bool]) -> None:
        """Put errors off to the next step if `waits` says that it can wait there for a failed stage."""
        self._waits = waits

    def put_off(self, error: Exception) -> None:
        """Keep an error that was raised between two steps for the next step, where it can wait; raise any other error."""
        if not self._waits(error):
            raise error
        self.move(Standing.BROKEN)
        self.error = error

    def move(self, standing: Standing) -> None:
        """Move to another state, see `_MOVES`."""
        assert standing in _MOVES[self.standing], f"{self.standing} to {standing}"
        self.standing = standing

    def suspend(self) -> None:
        """Close the session, if open, because its groups are gone; the state of training and the memory stay."""
        if self.standing is not Standing.SUSPENDED:
            self._reported = self.report()  # a closed engine has no figures
            self.move(Standing.SUSPENDED)
            self.error = None
            self._let_go()
            self.now.close(keep_memory=True, keep_frozen=True)

    def renew(self) -> int | None:
        """Open another session, and return the step from which ranks go on; `None` without a generation. Collective."""
        audit, self.now = self.now.audit, self._open(self.now.repeats)
        self.now.audit = audit
        self.move(Standing.ALONE)
        start = self.now.begin(stay=True)
        self.take_up()
        return None if start is None else self.now.horizon

    # -- figures and end

    def report(self) -> Report:
        """Return the figures so far."""
        if self.standing is Standing.SUSPENDED:
            return self._reported
        upstream = getattr(self._trainer.strategy, "upstream", None)
        audit = AuditFigures() if self.audits is None else self.audits.figures
        return replace(self.now.report(), audit=audit, upstream_log_nbytes=0 if upstream is None else upstream.nbytes)

    def failed(self, error: BaseException) -> None:
        """Log which other rank has died, if its death ends the fit."""
        say_who_is_gone(self._neighbours, self.now.newest_step, error)

    def condemn(self, ranks: Collection[int], text: str, *, ends: bool) -> NoReturn:
        """Make the generations since the last clean audit void, and leave the fit with `SilentFault`. Unless the job `ends` others take the
        places of `ranks` under a supervisor, and all go on in place from an older generation. Collective.
        """
        step, own, supervised = self.now.condemn(ranks, text), self._trainer.global_rank, Supervised.from_environment()
        with suppress(RuntimeError):  # a named rank may have left already, but not before all ranks know
            self.among().all_agree(True)
        if supervised is not None and ends:
            supervised.end_job(f"has found a fault: {text}")
        elif supervised is not None and own in ranks:
            supervised.give_way(f"is at fault: {text}", step)
        elif supervised is not None and not ranks and own == 0:
            supervised.call_off(f"goes back to step {step}: {text}")
        if supervised is not None and not ends:
            supervised.confirm(_CONFIRM_SECONDS)  # not to leave before the rank that is named
        named = f" First look at the devices of ranks {', '.join(map(str, sorted(ranks)))}." if ranks else ""
        raise SilentFault(
            f"{text}. Generations behind step {step}, the last clean audit, are void. Start this job again: it goes on from there or "
            f"before.{named}"
        )

    def close(self, *, keep_memory: bool) -> None:
        """Close the session in force, or its replay alone if it is closed already."""
        if self.audits is not None:
            self.audits.close()
        if self.standing is Standing.SUSPENDED:
            self.now.repeats.close()
        else:
            self._let_go()
            self.now.close(keep_memory=keep_memory)

    # -- private

    def _let_go(self) -> None:
        vars(self._trainer.strategy).pop("on_phase", None)

    def _open(self, repeats: Repeats | None) -> CheckpointSession:
        trainer, module, policy = self._trainer, self._trainer.lightning_module, self.policy
        dtype = _trainer.dtype_of_steps(trainer, module)
        self._groups = _trainer.groups_of(trainer.strategy)
        make = partial(StateSchema.of, trainer.optimizers[0], in_parts=policy.cuts, mixed=not policy.exact)
        self.schema = agreed_schema(partial(make, default_dtype=dtype), module, Exchange(self._groups))
        job = SessionJob(
            config=self.config,
            policy=policy,
            module=module,
            schema=self.schema,
            groups=self._groups,
            autocast_dtype=_AUTOCAST.get(str(trainer.precision)),
            compiled=_trainer.compiled_modules(module),
            omits=_limits.may_leave_out(trainer, module, self._own),
            may_edit_unseen=_limits.may_edit_unseen(trainer, module, self._own),
            may_edit_steps=_limits.may_edit_steps(trainer, module, self._own),
            extra=_trainer.checkpoint_extra(trainer, module),
            averages=averages_of(trainer),
            journals=JournalReader(
                lambda start: None if IMPORTED in start else self._trained.restore(start["trained"]),
                lambda journals, was: retold(journals, was, self._groups.rank, self._groups.world_size),
            ),
        )
        return CheckpointSession(job, repeats)
