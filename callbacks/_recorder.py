"""What a boundary needs besides parameters, taken at the exact moments at which it must be restored.

A boundary is the state between two batches, or between two epochs. Its *start* half (DESIGN, step journal) is taken
when everything that follows the optimizer step has run: validation, schedulers, epoch end. Random state is taken at
six moments, because iterators, samplers, workers and user hooks draw from it in between, and a fresh process draws
at other moments than a warm one:

    before the epoch's hooks -> before the iterator is made -> before the first fetch -> before the fetch before this one
    -> before this fetch -> after it

In a resumed process the same moments come by again, and each is given the state recorded for it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any, Protocol

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Timer

from lightning_moe_ckpt import (
    _lightning,
    _lightning_data,
    _lightning_files,
    _lightning_held,
    _lightning_metrics,
    _lightning_moved,
    _lightning_workers,
)
from lightning_moe_ckpt.callbacks._extras import Extras, copied, require_storable
from lightning_moe_ckpt.callbacks._fetches import NO_FETCHES, FetchLog
from lightning_moe_ckpt.callbacks._trained import Trained
from lightning_moe_ckpt.operators import groups_state, load_groups_state
from lightning_moe_ckpt.session import RngState, capture_rng, differs, restore_rng

log = logging.getLogger(__name__)

Start = dict[str, Any]


class Part(Protocol):
    """More state that belongs to a boundary."""

    def take(self) -> dict[str, Any]:
        """The state, of types that the journal stores."""

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from it; every callback has its own state already."""

    def follow(self, state: dict[str, Any]) -> None:
        """In replay, at the moment at which the original run took it: be as it was; callbacks are already."""


class BoundaryRecorder:
    """Listens to the fit loop; builds start halves and, in a resumed run, restores one.

    Args:
        trainer: the trainer whose loops are tapped.
        module: the module it trains.
        skip_callbacks: callbacks whose state is not part of the journal (our own).
        parts: what else belongs to a boundary, by a name of its own.
        trained: what the user lets train.
        deterministic_dataset: whether fetching an item draws nothing.
        layers: names of modules whose attributes are in one of the parts.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        skip_callbacks: tuple[type[Callback], ...],
        parts: Mapping[str, Part],
        trained: Trained,
        *,
        deterministic_dataset: bool = False,
        layers: Collection[str] = (),
    ) -> None:
        self._deterministic = deterministic_dataset
        self._parts, self._trained = parts, trained
        self._trainer, self._module = trainer, module
        self._skip = skip_callbacks
        self._epoch: RngState | None = None
        self._iter: RngState | None = None
        self._first_fetch: RngState | None = None
        self._awaiting_first_fetch = True
        self._fetch: RngState | None = None
        self._last_fetch: RngState | None = None
        self._fetches = FetchLog()
        self._held = _lightning_held.HeldGenerators(trainer, module, skip_callbacks)
        self._not_held: list[str] = []
        self._moved = _lightning_moved.MovedAttributes(trainer, module, skip_callbacks, layers)
        self._workers = _lightning_workers.PersistentWorkers(trainer, deterministic=deterministic_dataset)
        self._start: Start | None = None
        self._wanted = True
        self._before_epoch_only = False
        """Whether an epoch is about to begin, and nothing of it has happened."""
        self._resume: Start | None = None
        self._batch: str | None = None
        """Digest of the batch with which the original run went on from here."""
        self._original: Start | None = None
        self._mid_epoch = False
        self._metrics_due = False
        self._extras = Extras()
        require_storable(
            {f"scheduler {i}": c.scheduler.state_dict() for i, c in enumerate(trainer.lr_scheduler_configs)}
        )

    def want_start(self, original: Start | None = None) -> None:
        """An optimizer step just happened: take the start half of this boundary when its time comes.

        Args:
            original: the one that the original run took, if the step was replayed. What validation and other hooks
                decide by weights that are frozen, or edited already, gives way to it.
        """
        self._wanted, self._start, self._original = True, None, original

    @property
    def compares_batch(self) -> bool:
        """Whether the next batch is one by which a life can tell that it goes on with the data of the original run."""
        return self._start is not None or self._batch is not None

    def complete_start(self, batch: str | None) -> Start | None:
        """At the top of `on_train_batch_start`: the finished start half, if one was wanted.

        Args:
            batch: digest of the batch, if it is compared and has one.
        """
        start, self._start = self._start, None
        self._compare(batch)
        if self._resume is not None:
            self._restore_random(self._resume["random"]["after_fetch"])
            self._resume = None
            self._say_what_is_gone()
        if start is None:
            return None
        start["batch"] = batch
        start["random"] = {
            "epoch": self._epoch,
            "iter": self._iter,
            "first_fetch": self._first_fetch,
            "last_fetch": self._last_fetch,
            "fetch": self._fetch,
            "after_fetch": self._take_random(),
            "workers": self._workers.take(),
        }
        return start

    @staticmethod
    def next_batch_begun(start: Start) -> bool:
        """Whether hooks at the start of the next epoch had run when the state of this boundary was taken."""
        return start["random"]["fetch"] is not None

    def take_end(self) -> Start:
        """The start half of a boundary after which nothing is trained any more."""
        start = self._take(between_epochs=True)
        here = self._take_random()
        # The moments after it have not come: a life that trains on from here draws in the same order by itself.
        unknown = dict.fromkeys(("iter", "first_fetch", "last_fetch", "fetch", "after_fetch"))
        start["random"] = {"epoch": here, **unknown}
        return start

    @property
    def following(self) -> bool:
        """Whether the newest step was replayed and is not followed by the next batch yet."""
        return self._original is not None

    @property
    def between_steps(self) -> bool:
        """Whether the newest optimizer step has no start half yet that was completed: nothing followed it."""
        return self._wanted or self._start is not None

    def take_stopped(self) -> Start:
        """The start half of a boundary after which this process trains no more, in the middle of an epoch or of a run.

        Call where `between_steps`, before an epoch or before a fetch. The moments after this one have not come: a life
        that goes on from here draws in the same order by itself.
        """
        assert self._start is not None
        come: dict[str, Any] = {"epoch": self._epoch, "after_fetch": None}
        if self._before_epoch_only:
            come |= dict.fromkeys(("iter", "first_fetch", "last_fetch", "fetch"))
        else:
            come |= {"iter": self._iter, "first_fetch": self._first_fetch}
            come |= {"last_fetch": self._last_fetch, "fetch": self._fetch, "workers": self._workers.take()}
        return {**self._start, "random": come}

    # -- moments, called by the fit

    def before_epoch(self) -> None:
        """Between two epochs: `on_train_epoch_start` has not run."""
        self._held.look()
        self._moved.look()
        if self._resume is not None and not self._mid_epoch:
            self._restore_random(self._resume["random"]["epoch"])
        if self._resume is not None:
            # Hooks at the start of a fit have run, which the original run called at its own start only.
            self._trained.restore(self._resume["trained"])
            self._moved.restore(self._resume.get("attributes", {}))
            self._restore_rates(self._resume)
        self._epoch, self._before_epoch_only = self._take_random(), True
        if self._wanted:
            self._begin_start(between_epochs=True)

    def before_iter(self) -> None:
        """Samplers and workers are about to draw their seeds."""
        _lightning_data.begin_epoch(self._trainer)
        if not self._mid_epoch:
            self._workers.before_iter(self._resume["random"].get("workers") if self._resume is not None else None)
        self._held.look()
        self._restore_metrics()
        if self._mid_epoch:
            return  # `_position` makes the iterator that counts
        if self._resume is not None:
            self._restore_random(self._resume["random"]["iter"])
        self._iter = self._take_random()
        self._awaiting_first_fetch = True
        self._fetches.begin()

    def close(self) -> None:
        """Give loaders their own functions back."""
        self._workers.remove()

    def before_fetch(self) -> None:
        """Between two batches: everything that follows the last optimizer step has run."""
        if self._resume is not None:
            self._restore_random(self._resume["random"]["fetch"])
        self._last_fetch, self._fetch, self._before_epoch_only = self._fetch, self._take_random(), False
        if self._awaiting_first_fetch:
            self._first_fetch, self._awaiting_first_fetch = self._fetch, False
        if self._wanted:
            self._begin_start(between_epochs=False)

    def after_fetch(self) -> None:
        """A batch was fetched; nothing has seen it."""
        assert self._fetch is not None
        self._fetches.fetched(
            self._fetch,
            self._take_random,
            restarted=_lightning_data.restarted_loaders(self._trainer),
            carries=self._carries,
        )

    @property
    def room(self) -> int:
        """Bytes by which a journal may grow within an epoch."""
        workers = self._workers.num_workers * _lightning_workers.STATE_NBYTES
        return workers + self._fetches.room(
            num_loaders=len(_lightning_data.loaders_of(self._trainer)),
            num_batches=self._trainer.num_training_batches,
            carries=self._carries,
        )

    @property
    def _carries(self) -> bool:
        return any(map(_lightning_data.draws_as_it_goes, _lightning_data.loaders_of(self._trainer)))

    # -- start half

    def _begin_start(self, *, between_epochs: bool) -> None:
        original, self._original = self._original, None
        if original is not None:
            self._follow(original, self._take(between_epochs=between_epochs))
            self._batch = original.get("batch")
        self._start, self._wanted = self._take(between_epochs=between_epochs), False
        if original is not None:
            self._start["trained"] = copied(original["trained"])  # not what is frozen here

    def _take_random(self) -> RngState:
        return capture_rng(_lightning_data.loader_generators(self._trainer), self._held.now())

    def _restore_random(self, state: RngState | None) -> None:
        if state is not None:
            self._not_held = restore_rng(state, _lightning_data.loader_generators(self._trainer), self._held.now())

    def _compare(self, batch: str | None) -> None:
        original, self._batch = self._batch, None
        if None not in (original, batch) and original != batch:
            log.error(
                "the batch that follows step %d is not the one of the original run: this restart is not bit-exact. Look for "
                "data that changed or cannot be repositioned, or is said to be deterministic and is not.",
                self._trainer.global_step,
            )

    def _say_what_is_gone(self) -> None:
        if self._not_held:
            log.warning(
                "this restart is not exact: the run before had generators %s, which this one does not have",
                self._not_held,
            )

    def _take(self, *, between_epochs: bool) -> Start:
        trainer = self._trainer
        return {
            "between_epochs": between_epochs,
            "loops": _lightning.take_loop_state(trainer),
            "batches_done": _lightning.batches_done(trainer),
            "fetches": self._fetches.take(),
            "schedulers": [copied(c.scheduler.state_dict()) for c in trainer.lr_scheduler_configs],
            "param_groups": groups_state(trainer.optimizers[0]),
            "trained": self._trained.take(),
            "attributes": self._moved.take(),
            "precision": copied(_lightning.take_precision(trainer)),
            "callbacks": self._extras.take_callbacks(self._callbacks()),
            "module": self._extras.take_module(self._module),
            "datamodule": self._extras.take_datamodule(_lightning.datamodule_of(trainer)),
            "metrics": copied(_lightning_metrics.take_metrics(trainer, self._module)),
            "parts": {name: part.take() for name, part in self._parts.items()},
            "should_stop": _lightning.should_stop(trainer),
            "seed": _lightning.take_seed(),
            "buffer_sync": _lightning.take_buffer_sync(trainer),
        }

    def _callbacks(self) -> list[Callback]:
        # trainer.callbacks is untyped in Lightning
        return [c for c in self._trainer.callbacks if not isinstance(c, self._skip)]  # type: ignore[attr-defined]

    # -- resume

    def resume(self, start: Start) -> None:
        """Continue from a start half; call in `on_fit_start`, before any other callback's."""
        trainer = self._trainer
        self._resume, self._wanted, self._batch = start, False, start.get("batch")
        _lightning.restore_seed(start["seed"])
        self._restore_rates(start)
        if start["precision"]:
            trainer.precision_plugin.load_state_dict(start["precision"])
        self._resume_callbacks(start["callbacks"])
        for name, part in self._parts.items():
            part.restore(copied(start["parts"][name]))
        self._restore_users(start)
        self._metrics_due = True
        # Ranks may have looked at their clocks at different moments.
        trainer.should_stop = trainer.strategy.reduce_boolean_decision(start["should_stop"], all=True)
        self._resume_loops(start)

    def _restore_metrics(self) -> None:
        """Once, and not when the fit starts: the sanity check comes after that, and forgets what was logged."""
        if self._resume is None or not self._metrics_due:
            return
        self._metrics_due, metrics = False, copied(self._resume["metrics"])
        _lightning_metrics.restore_metrics(
            self._trainer, self._module, metrics, mid_epoch=not self._resume["between_epochs"]
        )
        _lightning.restore_buffer_sync(self._trainer, self._resume.get("buffer_sync"))

    def _restore_rates(self, start: Start) -> None:
        trainer = self._trainer
        load_groups_state(trainer.optimizers[0], start["param_groups"])
        for config, state in zip(trainer.lr_scheduler_configs, start["schedulers"], strict=True):
            config.scheduler.load_state_dict(copied(state))
        load_groups_state(trainer.optimizers[0], start["param_groups"])  # schedulers may write an initial rate on load

    def _restore_users(self, start: Mapping[str, Any]) -> None:
        if start["module"]:
            self._module.on_load_checkpoint(copied(start["module"]))
        datamodule = _lightning.datamodule_of(self._trainer)
        if start["datamodule"] and datamodule is not None:
            datamodule.load_state_dict(copied(start["datamodule"]))

    def _follow(self, original: Start, here: Start) -> None:
        """Be as the original run was at this boundary, wherever this one is not.

        What is the same is left alone: loading is the user's code, and means more than assignment to some callbacks.
        """
        if any(differs(original[name], here[name]) for name in ("param_groups", "schedulers")):
            self._restore_rates(original)
        callbacks = original["callbacks"].items()
        clocks = {each.state_key for each in self._callbacks() if isinstance(each, Timer)}
        self._resume_callbacks(
            {key: state for key, state in callbacks if key not in clocks and differs(state, here["callbacks"].get(key))}
        )
        users = ("module", "datamodule")
        self._restore_users({name: original[name] if differs(original[name], here[name]) else {} for name in users})
        self._moved.restore(original.get("attributes", {}))
        for name, part in self._parts.items():
            part.follow(copied(original["parts"][name]))
        _lightning_metrics.follow_metrics(self._trainer, self._module, copied(original["metrics"]))
        _lightning.restore_buffer_sync(self._trainer, original.get("buffer_sync"))
        self._trainer.should_stop |= original["should_stop"]

    def _resume_callbacks(self, states: Mapping[str, Any]) -> None:
        for callback in self._callbacks():
            if callback.state_key in states:
                state = copied(states[callback.state_key])
                _lightning_files.keep_folder(callback, state, self._trainer)
                callback.load_state_dict(state)

    def _resume_loops(self, start: Start) -> None:
        loops = copied(start["loops"])
        if start["between_epochs"]:
            _lightning.resume_between_epochs(self._trainer, loops)
            return
        self._mid_epoch = True
        _lightning.resume_mid_epoch(self._trainer, loops, self._position)

    def _position(self) -> None:
        assert self._resume is not None
        random = self._resume["random"]
        self._epoch, self._iter, self._first_fetch = random["epoch"], random["iter"], random["first_fetch"]
        self._fetch, self._awaiting_first_fetch = random["last_fetch"], False
        # What is logged is replayed from the log; what follows cannot be reached by fetching either.
        num_batches = 0 if self._resume["parts"]["batches"]["mode"] == "log" else self._resume["batches_done"]
        fetches = self._resume.get("fetches", NO_FETCHES)
        states = {0: random["first_fetch"], **fetches["states"], num_batches - 1: random["last_fetch"]}
        self._workers.before_iter(random.get("workers"))
        self._held.look()
        _lightning_data.skip_batches(
            self._trainer,
            num_batches,
            before_iter=lambda: self._restore_random(random["iter"]),
            before_fetch=lambda index: self._restore_random(states.get(index)),
            restarts=fetches["restarts"] if self._can_advance() else None,
        )
        self._fetches.restore(fetches, num_fetched=num_batches)
        self._mid_epoch = False

    def _can_advance(self) -> bool:
        """Whether nothing has to be fetched that was consumed."""
        draws = any(name.startswith("loader") for name in self._held.now())
        return _lightning_data.can_advance(self._trainer, draw_nothing=self._deterministic) and (
            self._deterministic or not draws
        )
