"""Take and restore a boundary's state besides parameters, progress and random state, in the order of `_TURNS`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Timer

from lightning_moe_ckpt.fit import _files
from lightning_moe_ckpt.fit._owners import MovedAttributes
from lightning_moe_ckpt.fit._settings import Settings
from lightning_moe_ckpt.fit._state import Extras, JournalPart, Trained, copied
from lightning_moe_ckpt.fit.loggers import _metrics
from lightning_moe_ckpt.fit.loops import _trainer
from lightning_moe_ckpt.journal import differs
from lightning_moe_ckpt.operators import groups_state, load_groups_state

Start = dict[str, Any]
Moment = Literal["begin", "epoch", "metrics", "replay", "end"]
"""A run resumes; its first epoch begins; its first iterator is made; a boundary is replayed; training had ended."""

USERS = ("callbacks", "module", "datamodule")
"""Entries with the users' own states."""
ENDS = ("loops", "schedulers", "param_groups", "trained", "attributes", *USERS, "metrics", "should_stop")
"""Entries changed by hooks at the epoch's end but not seen by a later epoch, if training ends in mid-epoch."""
_NOTHING: Mapping[str, Any] = {}


class BoundaryState:
    """One fit's state at its boundaries. Arguments as of `BoundaryRecorder`; callbacks to `skip` are not the user's."""

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        *,
        skip: tuple[type[Callback], ...],
        parts: Mapping[str, JournalPart],
        trained: Trained,
        settings: Settings,
        moved: MovedAttributes,
    ) -> None:
        self.trainer, self.module, self._skip, self._parts = trainer, module, skip, parts
        self.trained, self.settings, self.moved = trained, settings, moved
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
        """Load the states of callbacks, module and data module."""
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
        """Load the optimizer's groups, and schedulers."""
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
        """Restore logged values, after Lightning's reset at the start of a fit."""
        metrics, mid_epoch = copied(start["metrics"]), not start["between_epochs"]
        _metrics.restore_metrics(self.trainer, self.module, metrics, mid_epoch=mid_epoch)

    def follow_metrics(self, start: Start, _: Mapping[str, Any]) -> None:
        """Set logged values to the original run's."""
        _metrics.follow_metrics(self.trainer, self.module, copied(start["metrics"]))

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
    ({"begin", "replay", "end"}, BoundaryState.restore_users),
    # Hooks at the start of the fit have run by then. The original run called them at its own start, not here.
    ({"epoch", "replay", "end"}, lambda state, start, _: state.moved.restore(start.get("attributes", {}))),
    # Behind all entries that run the user's code, which may set rates.
    ({"begin", "epoch", "replay", "end"}, BoundaryState.restore_rates),
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
