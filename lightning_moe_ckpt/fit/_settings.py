"""Log a start's decision, and which settings come from the script and which from the stored run.

One table has all settings, each with its rule. *Yours is used*: length, frequency, data and parallelism of the script's
training (`_YOURS`). *Stored is used*: the optimizer's and schedulers' values, unless `on_change="mine"`
(`_of_optimizer`). *Refused*: settings without meaning for stored state, here another list of schedulers; models,
optimizers, precisions and ranks are compared before, by `Identity`.

Invariant: replayed steps are trained as the stored run trained them, so that the state resumed from is that run's. Your
settings come into force behind the last replayed step, before the boundary is taken: its journal includes them.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, ModelSummary, ProgressBar
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.errors import ConfigurationError, IdentityMismatch
from lightning_moe_ckpt.fit._other_ranks import OTHER_RANKS
from lightning_moe_ckpt.fit._state import copied
from lightning_moe_ckpt.fit.loaders import _loaders
from lightning_moe_ckpt.fit.loops import _trainer
from lightning_moe_ckpt.journal import Written, written
from lightning_moe_ckpt.operators import groups_state, load_groups_state
from lightning_moe_ckpt.recovery import Replay
from lightning_moe_ckpt.session import Report

log = rank_logger(__name__)

OnChange = Literal["stored", "mine"]

_POSITION = {
    *("last_epoch", "_step_count", "_last_lr", "_get_lr_called_within_step", "_is_initial", "T_cur", "base_lrs"),
    *("best", "num_bad_epochs", "cooldown_counter", "mode_worse"),
}
"""Entries of a scheduler's state that are not its arguments."""


@dataclass(frozen=True)
class _Yours:
    """A setting with the script's value in force."""

    read: Callable[[Trainer], object]
    explains: Literal["nothing", "losses", "batches"] = "nothing"
    """Results that may differ because of this setting when a step is trained again."""
    note: str = ""


def _of_loaders(name: str, note: str = "") -> _Yours:
    def read(trainer: Trainer) -> object:
        return [_loaders.described(loader)[name] for loader in _loaders.loaders_of(trainer)]

    return _Yours(read, "batches", note)


_CLIPPING, _ACCUMULATE = ("gradient_clip_val", "gradient_clip_algorithm"), "accumulate_grad_batches"
_REPLAYED = (*_CLIPPING, _ACCUMULATE, "batch_size")
"""Settings that a replay takes from the stored run."""
_ARGUMENTS = (
    *_REPLAYED[:3],
    *("max_epochs", "min_epochs", "max_steps", "min_steps", "val_check_interval", "check_val_every_n_epoch"),
    *("limit_val_batches", "reload_dataloaders_every_n_epochs", "log_every_n_steps"),
)
_YOURS: dict[str, _Yours] = {
    **{name: _Yours(attrgetter(name)) for name in _ARGUMENTS},
    **{name: _Yours(attrgetter(name), "batches") for name in ("limit_train_batches", "overfit_batches")},
    "max_time": _Yours(_trainer.max_time),
    "detect_anomaly": _Yours(_trainer.detects_anomaly),
    "deterministic": _Yours(lambda _: torch.are_deterministic_algorithms_enabled(), "losses"),
    "benchmark": _Yours(lambda _: torch.backends.cudnn.benchmark, "losses"),
    "compiled": _Yours(lambda trainer: bool(_trainer.compiled_modules(trainer.lightning_module)), "losses"),
    "strategy": _Yours(lambda trainer: type(trainer.strategy).__qualname__, "losses"),
    "threads": _Yours(
        lambda trainer: torch.get_num_threads() if trainer.strategy.root_device.type == "cpu" else None,
        "losses",
        "a CPU adds in another order with them, so the run is not exact; OMP_NUM_THREADS sets them",
    ),
    "callbacks": _Yours(lambda trainer: [type(callback).__qualname__ for callback in _trainer.callbacks_of(trainer)]),
    "loggers": _Yours(lambda trainer: [type(logger).__qualname__ for logger in trainer.loggers]),
}
_OF_LOADERS: dict[str, _Yours] = {
    "batch_size": _of_loaders("batch_size"),
    "num_workers": _of_loaders(
        "num_workers",
        "items that draw random numbers, combined loaders, and from or to 0 the order of the epoch at hand, may come out different",
    ),
    "sampler": _of_loaders("sampler"),
    "items": _of_loaders("items"),
}
_RULES = {**_YOURS, **_OF_LOADERS}
"""All settings for which the script's value is used; for any other, the stored value is."""


_OF_CONFIGS = ("interval", "frequency")
"""Fields of Lightning's scheduler configurations, which no state of a scheduler has."""


def _of_optimizer(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    """Yield fields of the optimizer's groups and arguments of schedulers, for which the stored value is used."""
    groups: Sequence[Mapping[str, Any]] = trainer.optimizers[0].param_groups
    for field in dict.fromkeys(field for group in groups for field in group):
        if field not in ("params", "param_names", "initial_lr"):
            first = "initial_lr" if field == "lr" else field  # schedulers set the rate as they are made
            yield f"optimizer.{field}", [_plain(group.get(first, group.get(field))) for group in groups]
    for index, config in enumerate(trainer.lr_scheduler_configs):
        yield from _arguments(f"scheduler{index}", config.scheduler.state_dict())
        yield from ((f"scheduler{index}.{name}", getattr(config, name)) for name in _OF_CONFIGS)


def _arguments(prefix: str, state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in state.items():
        if name == "_schedulers":
            for index, item in enumerate(value):
                yield from _arguments(f"{prefix}.{index}", item)
        elif name not in _POSITION:
            yield f"{prefix}.{name}", _plain(value)


def _plain(value: Any) -> Any:
    """Return a value that a journal can store and that shows the setting."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor):
        return value.tolist() if value.numel() <= 16 else f"tensor of {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return [[_plain(key), _plain(item)] for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Enum):
        return _plain(value.value)
    return str(value) if isinstance(value, str | int | float) else type(value).__qualname__


class Settings:
    """A fit's own settings, the stored run's, and the settings in force; made in `on_fit_start`, before any restore.

    `on_change` says whose optimizer fields and scheduler arguments are used where they differ, `logged` whether a
    replay trains on batches from the journal; `replay` returns the replay under way, or `None`.
    """

    def __init__(
        self,
        trainer: Trainer,
        own: tuple[type[Callback], ...],
        *,
        on_change: OnChange,
        logged: bool,
        replay: Callable[[], Replay | None],
    ) -> None:
        self._trainer, self._on_change, self.logged, self._replay = trainer, on_change, logged, replay
        users = [
            each for each in _trainer.callbacks_of(trainer) if not isinstance(each, (*own, ProgressBar, ModelSummary))
        ]
        self._mine = {name: _plain(setting.read(trainer)) for name, setting in _YOURS.items()}
        self._mine |= {"callbacks": [type(user).__qualname__ for user in users], "seed": _trainer.take_seed()}
        self._mine |= dict(_of_optimizer(trainer))
        # Tuners search for a value, whatever the script says.
        self._tuned = any(isinstance(user, BatchSizeFinder | LearningRateFinder) for user in users)
        self._schedulers = [type(config.scheduler).__qualname__ for config in trainer.lr_scheduler_configs]
        self._fresh = groups_state(trainer.optimizers[0]), self._states()
        self._used = dict(self._mine)
        self._written: Written | None = None
        self._stored: dict[str, Any] = {}
        self._start: dict[str, Any] | None = None
        self._step = 0
        self._differ: dict[str, tuple[Any, Any]] = {}
        """Stored and own value of each setting that differs."""
        self._resized: _loaders.Resized | None = None
        self.pending = False
        """Whether some of your settings are not in force yet."""
        self._settled = False
        self._regrouped = False
        """Whether other ranks go on: your settings cut a step's samples into batches, in replay too."""

    def take(self) -> Written:
        """Return the settings in force, for a boundary's journal from which a run may resume."""
        if self._written is None:
            self._written = written({**self._used, "schedulers": self._schedulers})
        return self._written

    # -- a run is resumed

    def resume(self, start: dict[str, Any], step: int) -> None:
        """Compare with the stored run's settings, in its start half, before these are restored for `step`. Raises
        `IdentityMismatch` if the stored run had other schedulers than this start.
        """
        self._stored, self._start, self._step = dict(start.get("settings", {})), start, step
        self._regrouped = OTHER_RANKS in start and not self.logged
        was = self._stored.pop("schedulers", [f"{len(start['schedulers'])} of them"])
        if len(start["schedulers"]) != len(self._schedulers) or (self._stored and was != self._schedulers):
            raise IdentityMismatch(
                f"The stored run has the schedulers [{', '.join(was)}], and this start [{', '.join(self._schedulers)}]: the place in "
                "one has no meaning for another. Return those of the stored run from `configure_optimizers`, give another URL, or "
                "start anew with resume='never'. Weights alone are carried over by `moe-ckpt export`."
            )
        self.pending = bool(self._stored)
        self._compare(self._mine)
        kept = [name for name in self._mine if name in self._stored and (name not in _RULES or name in _REPLAYED)]
        self._used |= {name: self._stored[name] for name in kept}
        self._use_configs(self._stored)

    def _compare(self, mine: Mapping[str, Any]) -> None:
        for name in sorted(self._stored.keys() & mine.keys()):
            was, now = self._stored[name], mine[name]
            tuned = self._tuned and name in ("optimizer.lr", "batch_size")
            if repr(was) != repr(now) and not tuned and (name != "seed" or now is not None):  # `repr` tells 1 from 1.0
                self._differ[name] = was, now

    def begin(self, *, mid_epoch: bool) -> None:
        """Put the chosen settings into force when a resumed run's first epoch begins and hooks at its start have run."""
        if self.pending and self._replay() is not None:
            self._use_clipping(self._stored)
            self._use_accumulation(self._mine if self._regrouped else self._stored)
        elif self.pending:
            self.settle(mid_epoch=mid_epoch)

    def settle(self, *, mid_epoch: bool) -> None:
        """Put your settings into force, unless steps are replayed; call if `pending`, before the boundary of a step.

        Lightning accumulates batches by their number in the epoch, so accumulation waits for a multiple of your value.
        """
        if self._replay() is not None:
            return
        own, self._written = self._mine["accumulate_grad_batches"], None
        if not self._settled:
            self._settled = True
            self._use_clipping(self._mine)
            if self._resized is not None:
                self._resized.go_on(mid_epoch=mid_epoch, accumulate=own)
            if self._on_change == "mine" and any(name.startswith(("optimizer.", "scheduler")) for name in self._differ):
                self._use_configs(self._mine)
                self._use_own_rates()
        inside = mid_epoch and not self._regrouped and bool(_trainer.batches_done(self._trainer) % own)
        self.pending = inside and _ACCUMULATE in self._differ
        if not self.pending:
            self._use_accumulation(self._mine)
        mine = [name for name in self._mine if name in _REPLAYED or (self._on_change == "mine" and name != "seed")]
        waits = {_ACCUMULATE: self._used[_ACCUMULATE]} if self.pending else {}
        self._used |= {name: self._mine[name] for name in mine} | waits

    def loaders_made(self) -> None:
        """Look at a new epoch's loaders; in a resumed run, log differences once, and give a replay the stored size. Raises
        `ConfigurationError` if a replay needs batches of the stored size, and the loader cannot give them.
        """
        found = {name: setting.read(self._trainer) for name, setting in _OF_LOADERS.items()}
        again = None if self._start is None else self._start["loads"].get("training", {}).get("again")
        later = 0 if again is None else self._trainer.current_epoch - again["epoch"]
        if later < 0:
            return  # the run's first loaders: the run has asked for new loaders since, and so does this start if it trains
        if self._resized is not None:
            self._resized.remove()
            self._resized = None
        if self._start is not None and "batch_size" not in self._mine:
            # A later epoch's data sets may have other lengths.
            self._compare(found if later == 0 else {name: each for name, each in found.items() if name != "items"})
        self._mine |= found
        kept = {}
        if self.pending and not self._settled and "batch_size" in self._differ and not self._regrouped:
            kept = {"batch_size": self._stored["batch_size"]}
        if any(self._used.get(name) != value for name, value in {**found, **kept}.items()):
            self._used, self._written = {**self._used, **found, **kept}, None
        if kept:
            self._resize()
        self.say()

    def say(self) -> None:
        """Log the differences, unless already logged."""
        if self._start is not None and self._differ:
            log.warning("%s", self._table(), alike=True)
        self._start = None

    def close(self) -> None:
        """Give the trainer and its loader your settings, if the fit ends before they came into force."""
        if self.pending:
            self._use_clipping(self._mine)
            self._use_accumulation(self._mine)
        if self._resized is not None:
            self._resized.remove()

    # -- what is known to differ

    def explains(self, what: Literal["batches", "losses"]) -> str:
        """Return known causes of other batches from here on, or of other losses in replay, in words; empty if there are none."""
        given = {"batch_size"} if self._resized is not None and not self._settled else set[str]()
        known = {name for name, rule in _RULES.items() if rule.explains == what} - given
        differ = [(name, *both) for name, both in self._differ.items() if name in known]
        return ", ".join(f"`{name}` was {_text(was)} and is {_text(now)}" for name, was, now in differ)

    @property
    def added_callbacks(self) -> tuple[str, ...]:
        """Names, as in attributes, of callbacks that the stored run did not have."""
        was, now = self._differ.get("callbacks", ((), ()))
        counts = [(name, now[: at + 1].count(name)) for at, name in enumerate(now)]
        return tuple(f"callback.{name}{f'#{n}' * (n > 1)}" for name, n in counts if n > was.count(name))

    def restore_accumulation(self, stored: int) -> None:
        """Set a callback's accumulation again, unless the user asks for another value."""
        if _ACCUMULATE not in self._differ:
            self._trainer.accumulate_grad_batches = stored

    # -- private

    def _states(self) -> list[dict[str, Any]]:
        return [copied(config.scheduler.state_dict()) for config in self._trainer.lr_scheduler_configs]

    def _use_clipping(self, values: Mapping[str, Any]) -> None:
        if not self._differ.keys().isdisjoint(_CLIPPING):
            _trainer.use_clipping(self._trainer, *(values[name] for name in _CLIPPING))

    def _use_accumulation(self, values: Mapping[str, Any]) -> None:
        # Any other value was set by a callback, as it does in every epoch: the value is state.
        if self._trainer.accumulate_grad_batches in self._differ.get(_ACCUMULATE, ()):
            self._trainer.accumulate_grad_batches = values[_ACCUMULATE]

    def _resize(self) -> None:
        """Give batches the stored size up to the place where yours begins, to replay or only to pass over them."""
        (was, now), replay, trainer = self._differ["batch_size"], self._replay(), self._trainer
        if self.logged:
            return
        can = len(was) == len(now) == 1 and None not in (*was, *now) and _loaders.can_resize(trainer)
        if replay is not None and not can:
            raise ConfigurationError(
                f"The stored run had batches of {_text(was)}, and this start has {_text(now)}. Up to step {self._step} the stored run's "
                "steps are trained again, and this loader cannot give their batches: that takes one `DataLoader` over a map-style data "
                f"set, without a batch sampler of your own, `limit_train_batches` or `overfit_batches`. Start with {_text(was)} and "
                f"`max_steps={self._step}` once, then with {_text(now)}."
            )
        until: tuple[int | None, int] | None = None
        if replay is not None:
            last = replay.journals[-1]
            until = last["outcome"]["epoch"], last["start"]["batches_done"]
        elif can and self._start is not None and not self._start["between_epochs"]:
            until = None, self._start["batches_done"]
        if until is not None:
            self._resized = _loaders.Resized(trainer, was[0], until, replayed=replay is not None)

    def _use_configs(self, values: Mapping[str, Any]) -> None:
        for index, config in enumerate(self._trainer.lr_scheduler_configs):
            for name in _OF_CONFIGS:
                setattr(config, name, values.get(f"scheduler{index}.{name}", getattr(config, name)))

    def _use_own_rates(self) -> None:
        """Use the script's fields of groups and arguments of schedulers where they differ.

        If rates are among these, the script's schedulers begin anew and take as many steps as the stored ones: rates
        are those that the script would have here. A scheduler that follows a metric keeps its history, and rates their
        ratio to the first.
        """
        optimizer, schedulers = self._trainer.optimizers[0], [c.scheduler for c in self._trainer.lr_scheduler_configs]
        stored, states, (fresh, fresh_states) = groups_state(optimizer), self._states(), self._fresh
        rates = any(name == "optimizer.lr" or name.startswith("scheduler") for name in self._differ)
        stepped = stored
        if rates:
            load_groups_state(optimizer, [*fresh, *stored[len(fresh) :]])
            for scheduler, own, state in zip(schedulers, fresh_states, states, strict=True):
                _step_again(scheduler, own, state)
            stepped = groups_state(optimizer)
        if any(isinstance(each, ReduceLROnPlateau) for each in schedulers):
            for group, was, first, now in zip(
                stepped, stored, self._stored["optimizer.lr"], self._mine["optimizer.lr"], strict=False
            ):
                group["lr"] = was["lr"] * (now / first if first else 1.0)  # type: ignore[operator]
        changed = [name.removeprefix("optimizer.") for name in self._differ if name.startswith("optimizer.")]
        for was, own, now in zip(stored, fresh, stepped, strict=False):
            moved = [key for key in now if rates and (key in ("lr", "initial_lr") or repr(now[key]) != repr(own[key]))]
            fresh_fields = {field: own[field] for field in changed if field in own and field != "lr"}
            was.update(fresh_fields | {field: now[field] for field in moved})
        load_groups_state(optimizer, stored)

    def _table(self) -> str:
        rows = [("setting", "stored", "yours", "used")]
        for name, (was, now) in sorted(self._differ.items()):
            if name in ("callbacks", "loggers"):
                was, now = [each for each in was if each not in now], [each for each in now if each not in was]
            rows.append((name, _text(was), _text(now), self._which(name)))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, (*widths, 0), strict=True)) for row in rows]
        stored = any(row[3] == "stored" for row in rows)
        way = "\n'stored' goes on as it was: a new run (another URL, resume='never') takes yours, and on_change='mine' all but the seed"
        return "these settings differ from those of the stored run:\n  " + "\n  ".join(lines) + way * stored

    def _which(self, name: str) -> str:
        rule, later = _RULES.get(name), f"yours, from step {self._step} on"
        if rule is None:
            return later if self._on_change == "mine" and name != "seed" else "stored"
        notes = [rule.note] if rule.note else []
        if name == "batch_size" and self._start is not None and not self._start["between_epochs"] and not self.logged:
            passed = "as many batches as it has had"
            if self._resized or self._regrouped:
                passed = "the samples that it has consumed"
            notes.append(f"this epoch goes on behind {passed}")
        return ": ".join([later if name in (_CLIPPING if self._regrouped else _REPLAYED) else "yours", *notes])


def _step_again(scheduler: Any, own: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
    """Bring a scheduler with the arguments of `own`, its state when made, to the position of `stored`."""
    if isinstance(scheduler, ReduceLROnPlateau):
        scheduler.load_state_dict({**copied(dict(own)), **{name: stored[name] for name in _POSITION if name in stored}})
        return
    scheduler.load_state_dict(copied(dict(own)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns without optimizer steps in between
        for _ in range(_position(stored) - _position(own)):
            scheduler.step()


def _position(state: Mapping[str, Any]) -> int:
    return int(state["last_epoch"]) if "last_epoch" in state else _position(state["_schedulers"][0])


def _text(value: Any) -> str:
    if not isinstance(value, list):
        return "none" if value is None else str(value)
    texts = list(map(_text, value))
    return texts[0] if texts and len(set(texts)) == 1 else ", ".join(texts) or "none"


def announce(trainer: Trainer, report: Report, url: str, *, replaying: bool) -> None:
    """Log once, on rank 0, whether a run begins, goes on, or has nothing left to do; call when it is restored."""
    step = report.resumed_from
    why = _trainer.finished_because(trainer) if step is not None and not replaying else None
    if why is not None:
        log.warning(
            "finished at step %d: nothing to train, since %s. The module is that of this step. A new training takes another URL than "
            "%s, or resume='never'; this one goes on with %s",
            *(trainer.global_step, why[0], url, why[1]),
            alike=True,
        )
        return
    if step is None:
        said = f"began a new run at {url}"
    else:
        again = f", by training again from step {trainer.global_step}" if replaying else ""
        said = f"resumed from step {step} ({' and '.join(report.restored_from) or 'memory'}){again}: {url}"
    if log.isEnabledFor(logging.INFO) and log.logger.hasHandlers():
        log.info("%s", said, alike=True)
    else:
        rank_zero_info(said)  # without logging set up, users see Lightning's messages
