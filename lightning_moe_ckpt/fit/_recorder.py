"""Record a boundary's state besides parameters, at the moments at which a resumed run has to restore it.

A boundary is the state between two batches, or between two epochs. Its *start half* is taken when everything behind the
optimizer step has run: validation, schedulers, epoch end. Random state is taken at six moments. Iterators, samplers,
workers and user hooks draw in between, and a new process draws at other moments than a running process:

    before the epoch's hooks -> before the iterator is made -> before the first fetch -> before the previous fetch
    -> before this fetch -> after this fetch

A resumed process passes the same moments and restores the recorded state at each.

Boundaries without a snapshot are passed over: their start half is taken only if the process stops there. If no fetch
can influence a later fetch, only the random state before the epoch's first fetch is taken of such boundaries.
Boundaries inside a window are only ever replayed. Replay follows the stored decisions of hooks and draws by itself, so
there, too, progress and random state are taken only if the process stops.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.fit import _owners
from lightning_moe_ckpt.fit._boundary import ENDS, USERS, BoundaryState, Start
from lightning_moe_ckpt.fit._callbacks import show_epoch
from lightning_moe_ckpt.fit._data import DataRecord, OnMismatch, WatchedData
from lightning_moe_ckpt.fit._settings import Settings
from lightning_moe_ckpt.fit._state import JournalPart, Trained, copied, require_storable
from lightning_moe_ckpt.fit.loaders import _loaders, _positions, _random
from lightning_moe_ckpt.fit.loaders._random import NO_FETCHES, FetchLog
from lightning_moe_ckpt.fit.loops import _trainer
from lightning_moe_ckpt.fit.loops._trainer import LoopProgress
from lightning_moe_ckpt.journal import UNFIT, HeldGenerator, RngState, capture_rng, differs, restore_rng

log = rank_logger(__name__)

_MOMENTS = ("epoch", "iter", "first_fetch", "last_fetch", "fetch")
"""Moments at which random state is taken, except after a batch's fetch."""


class BoundaryRecorder:
    """Build boundaries' start halves at moments of the fit loop and, in a resumed run, restore one of them.

    Args:
        trainer, module: the fit's trainer and its module; the trainer's loops report the moments.
        skip_callbacks: callbacks without state in the journal (our own).
        parts: further state of a boundary, by name.
        trained: state of `requires_grad` and optimizer groups.
        settings: settings of this start and of the stored run.
        layers: attributes recorded by one of the parts, as (name of a module, attribute).
        on_mismatch, among: see `DataRecord`.
        watched: generators and workers of loaders, watched since `setup`.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        skip_callbacks: tuple[type[Callback], ...],
        parts: Mapping[str, JournalPart],
        trained: Trained,
        *,
        settings: Settings,
        layers: Collection[tuple[str, str]] = (),
        on_mismatch: OnMismatch = "stop",
        among: Callable[[], Exchange],
        watched: WatchedData,
    ) -> None:
        self._watched = watched
        self._trained, self._settings = trained, settings
        self._trainer, self._module = trainer, module
        self._skip = skip_callbacks
        self._random: RngState | None = None
        """Newest random state."""
        self._moments: dict[str, RngState | None] = dict.fromkeys(_MOMENTS)
        self._awaiting_first_fetch = True
        self._fetches = FetchLog()
        self._generators, self._held, self._workers = watched.generators, watched.held, watched.workers
        self._not_held: list[str] = []
        self._moved = _owners.MovedAttributes(trainer, module, skip_callbacks, layers, **watched.attributes)
        self._progress = LoopProgress(trainer)
        self._start: Start | None = None
        self._last: Start | None = None
        """Start half of the boundary at which training ends in mid-epoch, once taken."""
        self._wanted = self._needed = True
        self._passed = False
        """Whether this boundary has no start half and nothing has followed it yet."""
        self._replayed_only = False  # no run resumes from this boundary
        self._independent: bool | None = None  # no fetch of this epoch can influence a later one
        self._before_epoch_only = False  # the process is between two epochs
        self._not_fetched = 0
        """Batches counted by the epoch but never fetched: Lightning resumes in mid-epoch with the first batch."""
        self._resume: Start | None = None
        self._seen: RngState | None = None  # random state after fetching a batch only to compare it
        self._original: Start | None = None
        self._mid_epoch = False
        self._metrics_due = False
        self._state = BoundaryState(
            *(trainer, module), skip=skip_callbacks, parts=parts, trained=trained, settings=settings, moved=self._moved
        )
        facts = trainer, self._moved, self._state.extras, self._take_random, among
        self._data = DataRecord(*facts, on_mismatch=on_mismatch)
        self.load = self._data.load
        schedulers = enumerate(config.scheduler for config in trainer.lr_scheduler_configs)
        require_storable({f"scheduler {index}": each.state_dict() for index, each in schedulers})

    def want_start(self, original: Start | None = None, *, needed: bool = True, replayed_only: bool = False) -> None:
        """Ask for the start half of the boundary after the optimizer step that just happened.

        Args:
            original: the original run's start half, if the step was replayed. It overrides decisions of validation and
                other hooks, because they see weights that are frozen or loaded too early.
            needed: whether a snapshot is taken of this boundary; otherwise only a stop asks for its start half.
            replayed_only: whether only a stop asks for the fields from which a run resumes.
        """
        self._wanted, self._start, self._original = True, None, original
        self._needed, self._passed = needed or original is not None, False
        self._replayed_only = replayed_only and original is None

    @property
    def compares_batch(self) -> bool:
        """Whether the next batch's digest is needed, to compare a resumed run's data with the original's."""
        return self._start is not None or self._data.expected is not None

    def complete_start(self, batch: str | None) -> Start | None:
        """Return the finished start half, or `None` if none was asked for; call first in `on_train_batch_start`.

        Args:
            batch: the batch's digest; `None` if the batch is not compared.
        """
        start, self._start, self._original, self._passed = self._start, None, None, False
        if self._data.expected is not None:
            gone = (f"generator `{name}` is not there" for name in self._not_held if name.startswith("loader"))
            self._data.compare(batch, known=self._settings.explains_batches or ", ".join(gone))
        if self._resume is not None:
            self._restore_random(self._resume["random"]["after_fetch"])
            self._resume = None
            if self._not_held:
                log.warning(
                    "this restart is not exact: the run before had generators %s, which this one does not have",
                    self._not_held,
                )
        if start is None:
            return None
        start["batch"] = batch
        if "loops" not in start:
            return start
        taken = {"after_fetch": self._take_random(), "workers": self._workers.take()}
        start["random"] = {**self._moments, **taken}
        start["data"] = self._data.taken
        return start

    @staticmethod
    def next_batch_begun(start: Start) -> bool:
        """Whether hooks at the next epoch's start had run before this boundary's state was taken."""
        return start["random"]["fetch"] is not None

    def take_last(self) -> Start:
        """Return the start half of the last boundary of training that ends in mid-epoch, before the epoch's end hooks."""
        self.before_fetch()
        self._last = self.take_stopped()
        return self._last

    def take_end(self) -> Start:
        """Return the start half of the boundary at which training ends; in mid-epoch with what hooks have changed since."""
        if self._last is not None:
            self._last["end"] = self._take_after(self._last)
            return self._last
        start = self._take(between_epochs=True)
        # Later moments have not come. A process that trains on from here draws in the same order by itself.
        start["random"] = {**self._between_epochs(self._take_random()), "after_fetch": None}
        return start

    def _take_after(self, start: Start) -> Start:
        """Return state changed by hooks since `start`, on the host."""
        end = self._take(between_epochs=True)
        found = {name: end[name] for name in ENDS if differs(start[name], end[name])} | {
            "random": {"fetch": self._take_random()}
        }
        return pytree.tree_map(lambda each: each.cpu() if isinstance(each, Tensor) else each, found)  # type: ignore[no-any-return]

    def restore_end(self) -> None:
        """Restore the state at training's end, if the resumed run had ended: no later moment comes."""
        if self._resume is not None:
            loaded = {name: self._resume[name] for name in USERS}
            self._resume = {**self._resume, **self._resume.get("end", {})}
            random = self._resume["random"]
            self._moved.look()
            self._state.restore("end", self._resume, loaded)
            self._restore_random(random["fetch"] or random["epoch"])

    @property
    def following(self) -> bool:
        """Whether the newest step was replayed and the next batch has not begun."""
        return self._original is not None

    @property
    def between_steps(self) -> bool:
        """Whether nothing has followed the newest optimizer step: its start half is not complete."""
        return self._wanted or self._passed or self._start is not None

    def take_stopped(self) -> Start:
        """Return the start half of the boundary at which this process is stopped before training ends.

        Call before an epoch or a fetch, if `between_steps`. Later moments have not come: a process that goes on draws
        likewise.
        """
        if self._passed or (self._start is not None and "loops" not in self._start):
            if self._independent:
                self._take_fetch()  # nothing has been drawn since it was due
            self._passed, self._start = False, self._take(between_epochs=False)
        assert self._start is not None
        self._trained.take_left_over(self._start["trained"])  # no next step will look for them
        come, data = {**self._moments, "workers": self._workers.take()}, self._data.taken
        if self._before_epoch_only:
            come, data = self._between_epochs(self._moments["epoch"]), {}
        # The order of entries is part of a segment's bytes.
        return {**self._start, "random": {"epoch": come["epoch"], "after_fetch": None, **come}, "data": data}

    def _between_epochs(self, random: RngState | None) -> dict[str, Any]:
        return {**dict.fromkeys(_MOMENTS), "epoch": random, "workers": self._workers.end()}

    def attributes(self) -> dict[str, Any]:
        """Return changed plain attributes of the user's objects."""
        return self._moved.take()

    def restore_attributes(self, moved: Mapping[str, Any]) -> None:
        """Set the attributes returned by `attributes`, and delete attributes that are new since."""
        self._moved.restore(moved, forget_new=True)

    def generators(self) -> list[HeldGenerator]:
        """Return the generators held by the user's objects."""
        return [*self._held.now().values()]

    # -- moments, called by the fit

    def begin(self) -> None:
        """Begin without a stored boundary."""
        self._moments["iter"] = self._watched.random
        self._data.begin(self._watched)

    def sanity_check(self, *, begins: bool) -> None:
        """Note changes by the validation before training in the user's objects."""
        (self._moved.sanity_check_begins if begins else self._moved.sanity_check_ends)()

    def before_epoch(self) -> None:
        """Record the moment between two epochs, before `on_train_epoch_start`."""
        self._moved.look()
        if self._resume is not None and not self._mid_epoch and not self._resume["between_epochs"]:
            self._resume = None  # the data, and with them the epoch, ended at the resumed boundary, before the limit
        if self._resume is not None:
            self._data.load_again(self._restore_random)
        self._held.look()
        if self._resume is not None and not self._mid_epoch:
            self._restore_random(self._resume["random"]["epoch"])
        if self._resume is not None:
            self._state.restore("epoch", self._resume)
            if not self._mid_epoch:
                self._settings.begin(mid_epoch=False)
        inside = self._resume is None and _trainer.resumes_inside(self._trainer)  # from a file: no epoch begins
        self._moments["epoch"], self._before_epoch_only = self._take_random(), not inside
        # Even if not needed: this state cannot be taken later. It is taken again if a fetch has found the data's end.
        if (self._wanted or self._passed or self._start is not None) and not inside:
            self._wanted = self._passed = False
            self._begin_start(between_epochs=True)

    def before_iter(self) -> None:
        """Record the moment before samplers and workers draw their seeds."""
        self._data.look()
        self._workers.look()
        _loaders.begin_epoch(self._trainer)
        if not self._mid_epoch:
            self._workers.before_iter(self._resume["random"].get("workers") if self._resume is not None else None)
        self._held.look()
        if self._resume is not None and self._metrics_due:
            self._metrics_due = False
            self._state.restore("metrics", self._resume)
        if self._mid_epoch:
            return  # `_position` makes the iterator
        if self._resume is not None:
            self._data.restore_before()
            if (own := self._data.own()) is not None:
                _positions.load_positions(self._trainer, own)
            self._restore_random(self._resume["random"]["iter"])
        self._moments["iter"] = self._take_random()
        self._awaiting_first_fetch, self._independent = True, None
        self._fetches.begin()
        self._data.before_iter()

    def after_iter(self) -> None:
        """Make the iterator again if the original's batch does not come next, after loaders were told their position."""
        if self._resume is not None and self._data.own() is not None and not self._goes_on():
            self._before_skipping()
            _positions.make_iterator(self._trainer)

    def before_fetch_ahead(self) -> None:
        """Record positions of loaders before a fetch while their iterator is made."""
        self._data.before_fetch()

    def before_validation(self) -> None:
        """Record the moment before validation's loaders make iterators."""
        self._data.look()
        self._workers.before_validation()

    def close(self) -> None:
        """Undo the changes to loaders."""
        self._workers.remove()
        self._moved.close()

    def before_fetch(self) -> None:
        """Record the moment between two batches, when everything behind the last optimizer step has run."""
        if self._resume is not None:
            self._restore_random(self._resume["random"]["fetch"])
        if self._independent is None:
            self._independent = _loaders.fetches_are_independent(self._trainer)
        if self._awaiting_first_fetch:
            self._not_fetched = _loaders.counted_before(self._trainer)
        needed = self._wanted and self._needed
        self._passed |= self._wanted and not needed
        resumed = needed and not self._replayed_only
        if resumed or self._start is not None or self._awaiting_first_fetch or not self._independent:
            self._take_fetch()
        if self._data.knows:
            self._data.before_fetch()
        self._awaiting_first_fetch = self._before_epoch_only = self._wanted = False
        if needed:
            self._begin_start(between_epochs=False, resumed=resumed)

    def after_fetch(self) -> None:
        """Record the moment after a fetch, before anything has seen the batch."""
        if self._seen is not None:
            self._restore_random(self._seen)
            self._seen = None
        if self._independent:
            return
        before = self._moments["fetch"]
        assert before is not None
        self._fetches.fetched(
            before,
            self._take_random,
            restarted=_loaders.restarted_loaders(self._trainer),
            carries=self._carries,
        )

    @property
    def room(self) -> int:
        """Largest number of bytes by which a journal may grow within an epoch."""
        workers = self._workers.num_workers * _random.STATE_NBYTES
        return workers + self._fetches.room(
            num_loaders=len(_loaders.loaders_of(self._trainer)),
            num_batches=self._trainer.num_training_batches,
            carries=self._carries,
        )

    @property
    def _carries(self) -> bool:
        return any(map(_loaders.draws_as_it_goes, _loaders.loaders_of(self._trainer)))

    # -- start half

    def _take_fetch(self) -> None:
        fetch, last = self._take_random(), self._moments["fetch"]
        if self._awaiting_first_fetch:
            self._moments["first_fetch"] = fetch
        # Independent fetches accept any state: the first is in every journal, and exact if there is one fetch.
        self._moments |= {"last_fetch": self._moments["first_fetch"] if self._independent else last, "fetch": fetch}

    def _begin_start(self, *, between_epochs: bool, resumed: bool = True) -> None:
        original = self._original
        if original is not None:
            then = {**original, "attributes": self._state.attributes_of(original)}
            self._state.restore("replay", then, self._take(between_epochs=between_epochs))
            self._data.expect(original.get("batch"))
        if self._settings.pending:
            self._settings.settle(mid_epoch=not between_epochs)
        self._start = self._take(between_epochs=between_epochs, resumed=resumed)
        if original is not None:
            self._start["trained"] = copied(original["trained"])  # replay has frozen parameters here

    def _take_random(self) -> RngState:
        self._random = capture_rng(self._generators.now(), self._held.now(), last=self._random)
        return self._random

    def _restore_random(self, state: RngState | None) -> None:
        if state is not None:
            self._not_held = restore_rng(state, self._generators.now(), self._held.now())

    def _take(self, *, between_epochs: bool, resumed: bool = True) -> Start:
        place: Start = {}
        if resumed:
            place["between_epochs"] = between_epochs
            place["loops"] = self._progress.take()
            place["not_fetched"] = self._not_fetched
            place["fetches"] = self._fetches.take()
            place["loads"] = self._data.loads
            place["settings"] = self._settings.take()
        if why := self._trained.unfit():
            place[UNFIT] = why
        return {**place, **self._state.take(whole=resumed)}

    # -- resume

    def resume(self, start: Start) -> None:
        """Continue from a start half; call in `on_fit_start`, before any other callback runs."""
        self._resume, self._wanted = start, False
        self._data.resume(start)
        self._workers.resume(start["random"].get("workers") or {})
        self._state.attributes_of(start)
        self._moved.others = tuple(f"{name}." for name in self._settings.added_callbacks)
        self._metrics_due = True
        self._state.restore("begin", start)
        self._resume_loops(start)

    def _resume_loops(self, start: Start) -> None:
        loops = copied(start["loops"])
        if start["between_epochs"]:
            _trainer.resume_between_epochs(self._trainer, loops)
            return
        self._mid_epoch = True
        _trainer.resume_mid_epoch(self._trainer, loops, self._position)

    def _position(self) -> None:
        assert self._resume is not None
        self._settings.begin(mid_epoch=True)
        random = self._resume["random"]
        self._moments |= {name: random[name] for name in ("epoch", "iter", "first_fetch")}
        self._moments["fetch"], self._awaiting_first_fetch = random["last_fetch"], False
        # Logged batches are replayed from the log: fetching again cannot reach the batches behind them.
        num_batches = 0 if self._resume["parts"]["batches"]["mode"] == "log" else self._resume["batches_done"]
        self._not_fetched = self._resume.get("not_fetched", 0)
        num_batches = max(0, num_batches - self._not_fetched)
        fetches = self._resume.get("fetches", NO_FETCHES)
        states = {0: random["first_fetch"], **fetches["states"], num_batches - 1: random["last_fetch"]}
        self._independent = None
        own = self._data.own() if num_batches else None
        for way in [own, None] if own is not None else [None]:
            self._workers.before_iter(random.get("workers"))
            self._held.look()
            _loaders.skip_batches(
                self._trainer,
                num_batches,
                before_iter=self._before_skipping,
                before_fetch=lambda index: self._restore_random(states.get(index)),
                restarts=fetches["restarts"] if self._can_advance() else None,
                own=way,
            )
            self._data.restore_after(self._resume.get("attributes", {}))
            if way is None or self._goes_on():
                break
        self._fetches.restore(fetches, num_fetched=num_batches)
        self._mid_epoch = False
        show_epoch(self._trainer, self._resume["batches_done"])

    def _before_skipping(self) -> None:
        assert self._resume is not None
        self._data.restore_before()
        self._restore_random(self._resume["random"]["iter"])

    def _goes_on(self) -> bool:
        """Return whether the original's batch comes next. Collective."""
        assert self._resume is not None
        self._restore_random(self._resume["random"]["fetch"])
        goes_on = self._data.goes_on()
        self._seen = None if _positions.fetches_ahead(self._trainer) else self._take_random()
        return goes_on

    def _can_advance(self) -> bool:
        """Whether loaders can move to their place without fetching consumed batches again."""
        draws = any(name.startswith("loader") for name in self._held.now())
        return _loaders.can_advance(self._trainer, draw_nothing=self._watched.deterministic) and (
            self._watched.deterministic or not draws
        )
