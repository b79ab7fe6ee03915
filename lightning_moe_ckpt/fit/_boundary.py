"""Take a boundary's state besides parameters, progress and random state, and restore a stored boundary moment by moment.

`BoundaryState` restores entries in the order of `_TURNS`. `Resumption` says at which moments, and restores progress, data
and random state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Timer

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.fit import _files
from lightning_moe_ckpt.fit._callbacks import show_epoch
from lightning_moe_ckpt.fit._data import DataRecord, RandomSource, WatchedData
from lightning_moe_ckpt.fit._other_ranks import OTHER_RANKS, placed
from lightning_moe_ckpt.fit._owners import MovedAttributes
from lightning_moe_ckpt.fit._settings import Settings
from lightning_moe_ckpt.fit._state import Extras, JournalPart, Trained, copied
from lightning_moe_ckpt.fit.loaders import _loaders, _positions
from lightning_moe_ckpt.fit.loaders._random import NO_FETCHES, EpochMoments
from lightning_moe_ckpt.fit.loggers import _metrics
from lightning_moe_ckpt.fit.loops import _trainer
from lightning_moe_ckpt.journal import RngState, differs
from lightning_moe_ckpt.operators import StateSchema, groups_state, load_groups_state, stepped_parameters

log = rank_logger(__name__)

Start = dict[str, Any]
Moment = Literal["begin", "epoch", "metrics", "replay", "end"]
"""A run resumes; its first epoch begins; its first iterator is made; a boundary is replayed; training had ended."""

USERS = ("callbacks", "module", "datamodule")
"""Entries with the users' own states."""
ENDS = ("loops", "schedulers", "param_groups", "trained", "attributes", *USERS, "metrics", "should_stop")
"""Entries changed by hooks at the epoch's end but not seen by a later epoch, if training ends in mid-epoch."""
_NOTHING: Mapping[str, Any] = {}


class BoundaryState:
    """A fit's state at its boundaries. Arguments as of `BoundaryRecorder`; callbacks to `skip` are not the user's."""

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        *,
        skip: tuple[type[Callback], ...],
        parts: Mapping[str, JournalPart],
        trained: Trained,
        schema: StateSchema,
        settings: Settings,
        moved: MovedAttributes,
    ) -> None:
        self.trainer, self.module, self._skip, self._parts = trainer, module, skip, parts
        self.trained, self.settings, self.moved = trained, settings, moved
        self._rest = partial(schema.rest, stepped_parameters(module)) if schema.has_rest else None
        self.extras = Extras(trainer, module)
        self._attributes: dict[str, Any] | None = None  # of the newest taken boundary
        self._followed: Mapping[str, Any] = {}  # of the last followed boundary of the original run

    def take(self, *, whole: bool) -> Start:
        """Return the state; attributes only as changes since the previous boundary, unless `whole`."""
        trainer = self.trainer
        return {
            "batches_done": trainer.fit_loop.epoch_loop.batch_progress.current.completed,
            "schedulers": [copied(c.scheduler.state_dict()) for c in trainer.lr_scheduler_configs],
            "param_groups": groups_state(trainer.optimizers[0]),
            **({} if self._rest is None else {"optimizer": self._rest()}),
            "trained": self.trained.take(),
            **self._take_attributes(whole=whole),
            "precision": copied(_trainer.take_precision(trainer)),
            "callbacks": self.extras.take_callbacks(self._callbacks()),
            **self.extras.take_owners(),
            "metrics": _metrics.take_metrics(trainer, self.module),
            "parts": {name: part.take() for name, part in self._parts.items()},
            "should_stop": _trainer.should_stop(trainer),
            "seed": _trainer.take_seed(),
            "buffer_sync": _trainer.take_buffer_sync(trainer),
        }

    def restore(self, moment: Moment, start: Start, here: Mapping[str, Any] = _NOTHING) -> None:
        """Restore entries due at a moment. Users' states equal `here` are not loaded: loading may have side effects."""
        for moments, restore in _TURNS:
            if moment in moments:
                restore(self, start, here)

    def attributes_of(self, original: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return all attributes of a boundary of the original run; call in the order of boundaries."""
        last = self._followed
        gone = {*original.get("attributes_gone", ()), *original.get("attributes_since", ())}
        since = {name: text for name, text in last.items() if name not in gone} | original.get("attributes_since", {})
        self._followed = original.get("attributes", since)
        return self._followed

    def _callbacks(self) -> list[Callback]:
        return [callback for callback in _trainer.callbacks_of(self.trainer) if not isinstance(callback, self._skip)]

    def _take_attributes(self, *, whole: bool) -> dict[str, Any]:
        now, last = self.moved.take(), self._attributes
        self._attributes = now
        if whole or last is None:
            return {"attributes": now}
        changed = {name: text for name, text in now.items() if name not in last or last[name] is not text}
        return {"attributes_since": changed, "attributes_gone": [name for name in last if name not in now]}

    def restore_users(self, start: Start, here: Mapping[str, Any]) -> None:
        """Load the states of callbacks, module and data module that differ from those in `here`, the states of now."""
        states, known = start["callbacks"], here.get("callbacks", {})
        for callback in self._callbacks():
            key = callback.state_key
            goes_on = bool(here) and isinstance(callback, Timer)
            if key in states and not goes_on and (key not in known or differs(states[key], known[key])):
                state = copied(states[key])
                _files.keep_folder(callback, state, self.trainer)
                callback.load_state_dict(state)
        self.extras.restore_owners(start, here)

    def restore_rates(self, start: Start, here: Mapping[str, Any]) -> None:
        """Load the optimizer's groups and the schedulers, unless both equal those in `here`."""
        if _differs("param_groups", start, here) or _differs("schedulers", start, here):
            optimizer, configs = self.trainer.optimizers[0], self.trainer.lr_scheduler_configs
            load_groups_state(optimizer, start["param_groups"])
            for config, state in zip(configs, start["schedulers"], strict=True):
                config.scheduler.load_state_dict(copied(state))
            load_groups_state(optimizer, start["param_groups"])  # schedulers may write an initial rate on load

    def restore_precision(self, start: Start, _: Mapping[str, Any]) -> None:
        """Load a gradient scaler's state."""
        if start["precision"]:
            self.trainer.precision_plugin.load_state_dict(start["precision"])

    def restore_parts(self, start: Start, here: Mapping[str, Any]) -> None:
        """Restore the journal parts (files, logs, batches and others); in replay, with `here`, let them follow the original run."""
        for name, part in self._parts.items():
            (part.follow if here else part.restore)(copied(start["parts"][name]))

    def restore_metrics(self, start: Start, _: Mapping[str, Any]) -> None:
        """Restore logged values, after Lightning's reset at a fit's start."""
        mid_epoch = not start["between_epochs"]
        _metrics.restore_metrics(
            self.trainer, self.module, self._settled_metrics(start, says=True), mid_epoch=mid_epoch
        )

    def follow_metrics(self, start: Start, _: Mapping[str, Any]) -> None:
        """Set logged values to the original run's."""
        _metrics.follow_metrics(self.trainer, self.module, self._settled_metrics(start, says=False))

    def _settled_metrics(self, start: Start, *, says: bool) -> _metrics.MetricState:
        rank = self.trainer.global_rank % _trainer.stage_size(self.trainer)
        return _metrics.settled(copied(start["metrics"]), self.module, rank, says=says)

    def restore_stop(self, start: Start, here: Mapping[str, Any]) -> None:
        """Request a stop if the original run did. Collective where a run begins to go on."""
        trainer, stops = self.trainer, start["should_stop"]
        # Time limits may have passed on some ranks only.
        trainer.should_stop = (
            trainer.should_stop or stops if here else trainer.strategy.reduce_boolean_decision(stops, all=True)
        )

    def restore_ended(self, start: Start, _: Mapping[str, Any]) -> None:
        """Give loops their progress at training's end."""
        self.settings.restore_accumulation(start["loops"]["settings"]["accumulate_grad_batches"])
        _trainer.restore_ended(self.trainer, copied(start["loops"]))


def _differs(name: str, start: Mapping[str, Any], here: Mapping[str, Any]) -> bool:
    return name not in here or differs(start[name], here[name])


_TURNS: tuple[tuple[Collection[Moment], Callable[[BoundaryState, Start, Mapping[str, Any]], object]], ...] = (
    ({"begin"}, lambda _, start, __: _trainer.restore_seed(start["seed"])),
    ({"epoch", "end"}, lambda state, start, _: state.trained.restore(start["trained"])),
    ({"replay"}, lambda state, start, _: state.trained.restore_order(start["trained"])),
    ({"begin"}, BoundaryState.restore_precision),
    ({"begin", "replay", "end"}, lambda state, start, here: state.restore_users(start, here)),
    # Hooks at the start of the fit have run by then. The original run called them at its own start, not here.
    ({"epoch", "replay", "end"}, lambda state, start, _: state.moved.restore(start.get("attributes", {}))),
    # Behind all entries that run the user's code, which may set rates.
    ({"begin", "epoch", "replay", "end"}, lambda state, start, here: state.restore_rates(start, here)),
    ({"begin", "replay"}, BoundaryState.restore_parts),
    ({"metrics", "end"}, BoundaryState.restore_metrics),
    ({"replay"}, BoundaryState.follow_metrics),
    (
        {"metrics", "replay", "end"},
        lambda state, start, _: _trainer.restore_buffer_sync(state.trainer, start.get("buffer_sync")),
    ),
    ({"begin", "replay", "end"}, BoundaryState.restore_stop),
    ({"end"}, BoundaryState.restore_ended),
)
"""Moments and functions in restoring order; random state has its own moments (`BoundaryRecorder`), loops come first."""


class Resumption:
    """Restoration of one stored boundary, moment by moment, from `on_fit_start` until the first batch begins, from its start half
    with parts of `BoundaryRecorder`.
    """

    def __init__(
        self,
        start: Start,
        *,
        state: BoundaryState,
        data: DataRecord,
        moments: EpochMoments,
        random: RandomSource,
        watched: WatchedData,
    ) -> None:
        self.start, self._trainer = start, state.trainer
        self._state, self._data, self._moments, self._random, self._watched = state, data, moments, random, watched
        self._metrics_due = True
        self._seen: RngState | None = None
        """Random state after the fetch of a batch only to compare it, until the batch is fetched to train on it."""
        data.resume(start)
        watched.workers.resume(start["random"].get("workers") or {})
        state.attributes_of(start)
        state.moved.others = tuple(f"{name}." for name in state.settings.added_callbacks)
        state.restore("begin", start)
        self._unplaced = not start["between_epochs"]
        """Whether the resumed epoch goes on behind batches that are still to be passed over."""
        loops = copied(start["loops"])
        if self._unplaced:
            _trainer.resume_mid_epoch(self._trainer, loops, self._position)
        else:
            _trainer.resume_between_epochs(self._trainer, loops)

    @property
    def is_over(self) -> bool:
        """Whether another epoch begins: the data ended at the resumed boundary, before the limit."""
        return not self._unplaced and not self.start["between_epochs"]

    def before_epoch(self) -> None:
        """Restore what hooks at the fit's start may have changed."""
        self._data.load_again()
        self._watched.held.look()
        if not self._unplaced:
            self._random.restore(self.start["random"]["epoch"])
        self._state.restore("epoch", self.start)
        if not self._unplaced:
            # Set by a callback in an epoch before; not earlier, see `resume_mid_epoch`.
            self._trainer.accumulate_grad_batches = self.start["loops"]["settings"]["accumulate_grad_batches"]
            self._state.settings.begin(mid_epoch=False)

    def before_iter(self) -> bool:
        """Restore data and random state; return whether the iterator is for training, and not made by `_position`."""
        if not self._unplaced:
            self._watched.workers.before_iter(self.start["random"].get("workers"))
        self._watched.held.look()
        if self._metrics_due:
            self._metrics_due = False
            self._state.restore("metrics", self.start)
        if self._unplaced:
            return False
        self._data.restore_before()
        if OTHER_RANKS in self.start:
            placed(self._trainer, self.start, logged=self._state.settings.logged)
        if (own := self._data.own()) is not None:
            for loader, state in zip(_loaders.loaders_of(self._trainer), own, strict=True):
                loader.load_state_dict(state)
        self._random.restore(self.start["random"]["iter"])
        return True

    def after_iter(self) -> None:
        """Make the iterator again if the original's batch does not come next, after loaders were told their position."""
        if self._data.own() is not None and not self._goes_on():
            self._before_skipping()
            _positions.make_iterator(self._trainer)

    def before_fetch(self) -> None:
        """Restore the random state with which the next batch was fetched."""
        self._random.restore(self.start["random"]["fetch"])

    def after_fetch(self) -> None:
        """Restore the random state behind a batch that was compared before."""
        self._random.restore(self._seen)
        self._seen = None

    def batch_begins(self) -> None:
        """Restore the random state of the first batch."""
        self._random.restore(self.start["random"]["after_fetch"])
        if self._random.missing:
            log.warning(
                "this restart is not exact: the run before had generators %s, which this one does not have",
                self._random.missing,
            )

    def restore_end(self) -> None:
        """Restore the state at training's end, if the resumed run had ended: no later moment comes."""
        loaded = {name: self.start[name] for name in USERS}
        end = {**self.start, **self.start.get("end", {})}
        self._state.moved.look()
        self._state.restore("end", end, loaded)
        self._random.restore(end["random"]["fetch"] or end["random"]["epoch"])

    def _position(self) -> None:
        start, random = self.start, self.start["random"]
        self._state.settings.begin(mid_epoch=True)
        if OTHER_RANKS in start:
            self.start = start = placed(self._trainer, start, logged=self._state.settings.logged)
        # Logged batches are replayed from the log: fetching again cannot reach the batches behind them.
        num_batches = 0 if self._state.settings.logged else start["batches_done"]
        num_batches = max(0, num_batches - start.get("not_fetched", 0))
        fetches = start.get("fetches", NO_FETCHES)
        states = {0: random["first_fetch"], **fetches["states"], num_batches - 1: random["last_fetch"]}
        self._moments.resume(start, num_batches)
        own = self._data.own() if num_batches else None
        for way in [own, None] if own is not None else [None]:
            self._watched.workers.before_iter(random.get("workers"))
            self._watched.held.look()
            _loaders.skip_batches(
                self._trainer,
                num_batches,
                before_iter=self._before_skipping,
                before_fetch=lambda index: self._random.restore(states.get(index)),
                restarts=fetches["restarts"] if self._can_advance() else None,
                own=way,
            )
            self._data.restore_after(start.get("attributes", {}))
            if way is None or self._goes_on():
                break
        self._unplaced = False
        show_epoch(self._trainer, start["batches_done"])

    def _before_skipping(self) -> None:
        self._data.restore_before()
        self._random.restore(self.start["random"]["iter"])

    def _goes_on(self) -> bool:
        """Return whether the original's batch comes next. Collective."""
        self._random.restore(self.start["random"]["fetch"])
        goes_on = self._data.goes_on()
        self._seen = None if _positions.fetches_ahead(self._trainer) else self._random.take()
        return goes_on

    def _can_advance(self) -> bool:
        """Whether loaders can move to their place without fetching consumed batches again."""
        draws = any(name.startswith("loader") for name in self._watched.held.now())
        deterministic = self._watched.deterministic
        return _loaders.can_advance(self._trainer, draw_nothing=deterministic) and (deterministic or not draws)
