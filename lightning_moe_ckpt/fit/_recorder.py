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
from enum import Enum, auto
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.fit import _owners
from lightning_moe_ckpt.fit._boundary import ENDS, BoundaryState, Resumption, Start
from lightning_moe_ckpt.fit._data import DataRecord, OnMismatch, RandomSource, WatchedData
from lightning_moe_ckpt.fit._settings import Settings
from lightning_moe_ckpt.fit._state import JournalPart, Trained, copied, require_storable
from lightning_moe_ckpt.fit.loaders import _loaders, _random
from lightning_moe_ckpt.fit.loaders._random import MOMENTS, EpochMoments
from lightning_moe_ckpt.fit.loops import _trainer
from lightning_moe_ckpt.fit.loops._trainer import LoopProgress
from lightning_moe_ckpt.journal import UNFIT, HeldGenerator, RngState, differs
from lightning_moe_ckpt.operators import StateSchema

log = rank_logger(__name__)

_MODULE = ("module",)


class _Half(Enum):
    """How far the start half of the newest boundary is."""

    DUE = auto()
    """Asked for: it is taken before the next epoch or fetch."""
    PASSED = auto()
    """Left out, because no snapshot needs it. A stop before the next batch begins takes it."""
    TAKEN = auto()
    """Taken, except what is known when the next batch begins."""
    NONE = auto()
    """The next batch has begun."""


class _Use(Enum):
    """Who asks for the start half of a boundary."""

    RESUME = auto()
    """A run may resume from it."""
    REPLAY = auto()
    """It is only ever replayed: only a stop asks for the fields from which a run resumes."""
    STOP = auto()
    """Only a stop does: no snapshot is taken of this boundary."""


class BoundaryRecorder:
    """Build boundaries' start halves at moments of the fit loop and, in a resumed run, restore one of them.

    Callbacks in `skip_callbacks` (our own) have no state in the journal; `parts` are further state of a boundary, by
    name; `layers` are attributes recorded by one of the parts, as (name of a module, attribute). `watched` are
    generators and workers of loaders, watched since `setup`. For `on_mismatch` and `among` see `DataRecord`.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        skip_callbacks: tuple[type[Callback], ...],
        parts: Mapping[str, JournalPart],
        trained: Trained,
        *,
        schema: StateSchema,
        settings: Settings,
        layers: Collection[tuple[str, str]] = (),
        on_mismatch: OnMismatch = "stop",
        among: Callable[[], Exchange],
        watched: WatchedData,
    ) -> None:
        self._trainer, self._trained, self._settings, self._watched = trainer, trained, settings, watched
        self._random = RandomSource(watched)
        self._moments = EpochMoments(trainer, self._random.take)
        self._moved = _owners.MovedAttributes(trainer, module, skip_callbacks, layers, **watched.attributes)
        self._progress = LoopProgress(trainer)
        self._half, self._use = _Half.DUE, _Use.RESUME
        self._start: Start | None = None
        """Start half of the newest boundary while it is `TAKEN`."""
        self._last: Start | None = None
        """Start half of the boundary at which training ends in mid-epoch, once taken."""
        self._original: Start | None = None
        """Original run's start half of the newest boundary if its step was replayed, until the next batch begins."""
        self._resumption: Resumption | None = None
        self._state = BoundaryState(
            *(trainer, module),
            skip=skip_callbacks,
            parts=parts,
            trained=trained,
            schema=schema,
            settings=settings,
            moved=self._moved,
        )
        facts = trainer, self._moved, self._state.extras, self._random, among
        self._data = DataRecord(*facts, on_mismatch=on_mismatch)
        self.load = self._data.load
        schedulers = enumerate(config.scheduler for config in trainer.lr_scheduler_configs)
        require_storable({f"scheduler {index}": each.state_dict() for index, each in schedulers})

    def want_start(self, original: Start | None = None, *, needed: bool = True, replayed_only: bool = False) -> None:
        """Ask for the start half of the boundary after the optimizer step that just happened.

        If the step was replayed, `original` is the original run's start half: it overrides decisions of validation and
        other hooks, because they see weights that are frozen or loaded too early. A boundary without a snapshot is not
        `needed`: only a stop asks for its start half. With `replayed_only` only a stop asks for the fields from which a
        run resumes.
        """
        self._half, self._start, self._original = _Half.DUE, None, original
        if original is not None:
            self._use = _Use.RESUME
        elif needed:
            self._use = _Use.REPLAY if replayed_only else _Use.RESUME
        else:
            self._use = _Use.STOP

    @property
    def compares_batch(self) -> bool:
        """Whether the next batch's digest is needed, to compare a resumed run's data with the original's."""
        return self._start is not None or self._data.expected is not None

    def complete_start(self, batch: str | None) -> Start | None:
        """Return the finished start half with the batch's digest, or `None` if none was asked for; call first in
        `on_train_batch_start`.
        """
        start, self._half, self._start, self._original = self._start, _Half.NONE, None, None
        if self._data.expected is not None:
            missing = self._random.missing
            gone = (f"generator `{name}` is not there" for name in missing if name.startswith("loader"))
            self._data.compare(batch, known=self._settings.explains("batches") or ", ".join(gone))
        if self._resumption is not None:
            self._resumption.batch_begins()
            self._resumption = None
        if start is None:
            return None
        start["batch"] = batch
        if "loops" not in start:
            return start
        taken = {"after_fetch": self._random.take(), "workers": self._watched.workers.take()}
        start["random"] = {**self._moments.states, **taken}
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
        start["random"] = {**self._between_epochs(self._random.take()), "after_fetch": None}
        return start

    def _take_after(self, start: Start) -> Start:
        """Return state changed by hooks since `start`, on the host."""
        end = self._take(between_epochs=True)
        found = {name: end[name] for name in ENDS if differs(start[name], end[name])} | {
            "random": {"fetch": self._random.take()}
        }
        return pytree.tree_map(lambda each: each.cpu() if isinstance(each, Tensor) else each, found)  # type: ignore[no-any-return]

    def restore_end(self) -> None:
        """Restore the state at training's end, if the resumed run had ended: no later moment comes."""
        if self._resumption is not None:
            self._resumption.restore_end()

    @property
    def following(self) -> bool:
        """Whether the newest step was replayed and the next batch has not begun."""
        return self._original is not None

    @property
    def between_steps(self) -> bool:
        """Whether nothing has followed the newest optimizer step: its start half is not complete."""
        return self._half is not _Half.NONE

    def take_stopped(self) -> Start:
        """Return the start half of the boundary at which this process is stopped before training ends.

        Call before an epoch or a fetch, if `between_steps`. Later moments have not come: a process that goes on draws
        likewise.
        """
        moments = self._moments
        if self._half is _Half.PASSED or (self._start is not None and "loops" not in self._start):
            if moments.independent:
                moments.take_fetch()  # nothing has been drawn since it was due
            self._half, self._start = _Half.TAKEN, self._take(between_epochs=False)
        assert self._start is not None
        self._trained.take_left_over(self._start["trained"])  # no next step will look for them
        come, data = {**moments.states, "workers": self._watched.workers.take()}, self._data.taken
        if moments.between_epochs:
            come, data = self._between_epochs(moments.states["epoch"]), {}
        # The order of entries is part of a segment's bytes.
        return {**self._start, "random": {"epoch": come["epoch"], "after_fetch": None, **come}, "data": data}

    def _between_epochs(self, random: RngState | None) -> dict[str, Any]:
        return {**dict.fromkeys(MOMENTS), "epoch": random, "workers": self._watched.workers.end()}

    def hold_attributes(self) -> Callable[[], None]:
        """Return a function to restore the present attributes of the user's objects, and deletes new ones."""
        return partial(self._moved.restore, self._moved.take(), forget_new=True)

    def attributes(self) -> dict[str, Any]:
        """Return the module's attributes that training has changed."""
        return self._moved.take(_MODULE)

    def take_attributes(self, moved: Mapping[str, Any]) -> None:
        """Set the module's attributes to the result of `attributes`."""
        self._moved.restore(moved, _MODULE, forget_new=True)

    def generators(self) -> list[HeldGenerator]:
        """Return the generators held by the user's objects."""
        return [*self._watched.held.now().values()]

    @property
    def room(self) -> int:
        """Most bytes that a journal may grow by within an epoch."""
        return self._watched.workers.num_workers * _random.STATE_NBYTES + self._moments.room

    # -- moments, called by the fit

    def begin(self) -> None:
        """Begin without a stored boundary."""
        self._moments.states["iter"] = self._watched.random
        self._data.begin(self._watched)

    def resume(self, start: Start) -> None:
        """Continue from a start half; call in `on_fit_start`, before any other callback runs."""
        self._half, watched, random = _Half.NONE, self._watched, self._random
        self._resumption = Resumption(
            start, state=self._state, data=self._data, moments=self._moments, random=random, watched=watched
        )

    def sanity_check(self, *, begins: bool) -> None:
        """Note changes by the validation before training in the user's objects."""
        (self._moved.sanity_check_begins if begins else self._moved.sanity_check_ends)()

    def before_epoch(self) -> None:
        """Record the moment between two epochs, before `on_train_epoch_start`."""
        self._moved.look()
        if self._resumption is not None and self._resumption.is_over:
            self._resumption = None
        if self._resumption is None:
            self._watched.held.look()
        else:
            self._resumption.before_epoch()
        inside = self._resumption is None and _trainer.resumes_inside(self._trainer)  # from a file: no epoch begins
        self._moments.states["epoch"], self._moments.between_epochs = self._random.take(), not inside
        # Even if not needed: this state cannot be taken later. It is taken again if a fetch has found the data's end.
        if self._half is not _Half.NONE and not inside:
            self._begin_start(between_epochs=True)

    def before_iter(self) -> None:
        """Record the moment before samplers and workers draw their seeds."""
        self._settings.loaders_made()
        self._data.look()
        self._watched.workers.look()
        _loaders.begin_epoch(self._trainer)
        if self._resumption is None:
            self._watched.workers.before_iter(None)
            self._watched.held.look()
        elif not self._resumption.before_iter():
            return
        self._moments.before_iter()
        self._data.before_iter()

    def after_iter(self) -> None:
        """Check that the resumed run's next batch comes from an iterator made for an epoch after the first."""
        if self._resumption is not None:
            self._resumption.after_iter()

    def before_fetch_ahead(self) -> None:
        """Record positions of loaders before a fetch while their iterator is made."""
        self._data.before_fetch()

    def before_validation(self) -> None:
        """Record the moment before validation's loaders make iterators."""
        self._data.look()
        self._watched.workers.before_validation()

    def close(self) -> None:
        """Undo the changes to loaders."""
        self._watched.workers.remove()
        self._moved.close()

    def before_fetch(self) -> None:
        """Record the moment between two batches, when everything behind the last optimizer step has run."""
        moments, due = self._moments, self._half is _Half.DUE
        if self._resumption is not None:
            self._resumption.before_fetch()
        if moments.is_first or moments.independent is None:
            moments.look()
        needed, resumed = due and self._use is not _Use.STOP, due and self._use is _Use.RESUME
        if resumed or self._start is not None or moments.is_first or not moments.independent:
            moments.take_fetch()
        if self._data.knows:
            self._data.before_fetch()
        moments.is_first = moments.between_epochs = False
        if needed:
            self._begin_start(between_epochs=False, resumed=resumed)
        elif due:
            self._half = _Half.PASSED

    def after_fetch(self) -> None:
        """Record the moment after a fetch, before anything has seen the batch."""
        if self._resumption is not None:
            self._resumption.after_fetch()
        if not self._moments.independent:
            self._moments.fetched()

    # -- start half

    def _begin_start(self, *, between_epochs: bool, resumed: bool = True) -> None:
        original, self._half = self._original, _Half.TAKEN
        if original is not None:
            then = {**original, "attributes": self._state.attributes_of(original)}
            self._state.restore("replay", then, self._take(between_epochs=between_epochs))
            self._data.expect(original.get("batch"))
        if self._settings.pending:
            self._settings.settle(mid_epoch=not between_epochs)
        self._start = self._take(between_epochs=between_epochs, resumed=resumed)
        if original is not None:
            self._start["trained"] = copied(
                dict(self._trained.own(original["trained"]))
            )  # replay has frozen parameters here

    def _take(self, *, between_epochs: bool, resumed: bool = True) -> Start:
        place: Start = {}
        if resumed:
            place["between_epochs"] = between_epochs
            place["loops"] = self._progress.take()
            place["not_fetched"] = self._moments.not_fetched
            place["fetches"] = self._moments.fetches()
            place["loads"], place["spread"] = self._data.loads, self._data.spread
            place["settings"] = self._settings.take()
        if why := self._trained.unfit():
            place[UNFIT] = why
        return {**place, **self._state.take(whole=resumed)}
