"""Bring data to its position in the original run, and check that the same batch follows.

Data may count: its passes in `__iter__`, its items, its epochs at their end. The attributes of loaders and their parts
before an epoch's iterator is made are part of the epoch's boundaries. A restart sets these, makes the iterator, fetches
the epoch's consumed batches, and sets the attributes at the boundary, so that nothing counts twice.

Loaders that are not torch's and know their position (`state_dict`, `load_state_dict`) are asked for it instead. The
next batch is compared before anything trains on it: if it differs, the consumed batches are fetched after all. If the
batch still differs, the run ends: it would go on as another run. Changed settings of the data are named, and nothing
compared.

The user's code that makes loaders may count or draw, too. A restart asks for loaders as a new process does: the state
of objects then is the reference for all changes. If the run has asked again meanwhile
(`reload_dataloaders_every_n_epochs`), the restart sets objects as then and asks once more. Before an epoch, while
optimizers are configured, `WatchedData` watches an iterator (`trainer.estimated_stepping_batches`).

Some pipelines cannot give the same batches again (a queue, a service, live data). Their batches can be logged instead,
see `BatchLog`. Replay then trains on the logged batches, each with the random state that followed its fetch, exact up
to the step at which the state is dense. Later batches come from the pipeline: the run is valid, but not the same. A
batch is logged as the loader gave it, before any hook of the module or the strategy. A step's batches are part of its
journal record. Every segment reserves twice the size that the first steps needed. A step that needs more makes its
window useless. This is reported, and the next plan reserves twice that step's size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from xxhash import xxh3_64

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.errors import ConfigurationError, OtherData
from lightning_moe_ckpt.fit._callbacks import resting
from lightning_moe_ckpt.fit._other_ranks import OTHER_RANKS
from lightning_moe_ckpt.fit._owners import OF_OTHERS, HeldGenerators, MovedAttributes
from lightning_moe_ckpt.fit._state import Extras, copied
from lightning_moe_ckpt.fit.loaders import _loaders, _positions
from lightning_moe_ckpt.fit.loaders._loaders import LoaderGenerators
from lightning_moe_ckpt.fit.loaders._random import PersistentWorkers
from lightning_moe_ckpt.fit.loops._taps import tap_batches
from lightning_moe_ckpt.journal import RngState, capture_rng, refusals, restore_rng

log = rank_logger(__name__)

OnMismatch = Literal["stop", "warn"]
Batches = Literal["reposition", "log"]
Logged = Sequence[dict[str, Any]]

_LOADERS = ("loader",)
_OTHER = (
    "the batch that follows step %d is not the one of the original run: %s. Look for data that changed, that is said to be "
    "deterministic and is not, or that counts where nobody can put the count back (a global, a closure): keep such counts in "
    "attributes of the data set or sampler, or give the loader `state_dict` and `load_state_dict`. For data that cannot be read "
    "twice, begin a run with batches='log'."
)


_BEGUN: dict[str, dict[str, Any]] = {
    "training": {"begun": 0, "again": None},  # without a record: loaded while optimizers were configured
    "validation": {"begun": None, "again": None},
}


class WatchedData:
    """Generators and workers of loaders, watched from `setup` on: Lightning may make iterators before `on_fit_start`.

    `deterministic` says whether items of the data set depend on their index alone; for other arguments see `MovedAttributes`.
    """

    random: RngState | None = None
    """Random state before an iterator made while optimizers were configured; `None` without such an iterator."""
    _moved: MovedAttributes | None = None

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        skip: tuple[type[Callback], ...],
        *,
        deterministic: bool,
        attributes: Mapping[str, Any],
    ) -> None:
        self.deterministic, self.attributes = deterministic, attributes
        self.workers = PersistentWorkers(trainer, deterministic=deterministic)
        self.held, self.generators = HeldGenerators(trainer, module, skip), LoaderGenerators(trainer)

        def begins() -> None:
            self._moved = MovedAttributes(trainer, module, skip, speaks=False, **attributes)
            self._moved.look_at_data()
            self.workers.look()
            self.workers.before_iter(None)
            self.held.look()
            self.random = capture_rng(self.generators.now(), self.held.now())

        self.close = _positions.before_iterator(trainer, begins)
        """Function to undo the change to the trainer, in `on_fit_start`."""

    def before(self, moved: MovedAttributes) -> dict[str, Any] | None:
        """Return data's attributes before that iterator was made, relative to `moved`; `None` without such an iterator."""
        if self._moved is None:
            return None
        moved.look_at_data()
        now = self._moved.take(_LOADERS)
        self._moved.restore({}, _LOADERS, forget_new=True)
        before = moved.take(_LOADERS)
        self._moved.restore(now, _LOADERS)
        self._moved.close()
        return before


class RandomSource:
    """Random state of one run: the process's own, and that of generators in loaders and in the user's objects."""

    def __init__(self, watched: WatchedData) -> None:
        self._generators, self.held = watched.generators, watched.held
        self._newest: RngState | None = None
        self.missing: list[str] = []
        """Names of generators that the state restored last has, and this process has not."""

    def take(self) -> RngState:
        """Return the present state."""
        self._newest = capture_rng(self._generators.now(), self.held.now(), last=self._newest)
        return self._newest

    def restore(self, state: RngState | None) -> None:
        """Restore a state; do nothing for `None`."""
        if state is not None:
            self.missing = restore_rng(state, self._generators.now(), self.held.now())


class DataRecord:
    """State of one run's data, and the digest of the next batch; `among` returns the exchange of ranks that go on together."""

    def __init__(
        self,
        trainer: Trainer,
        moved: MovedAttributes,
        owners: Extras,
        random: RandomSource,
        among: Callable[[], Exchange],
        *,
        on_mismatch: OnMismatch,
    ) -> None:
        self._owners, self._random = owners, random
        self._trainer, self._moved, self._on_mismatch, self._among = trainer, moved, on_mismatch, among
        self.taken: dict[str, Any] = {}
        """State of the epoch's data for a restart; replaced, not changed, by a new state."""
        self.knows = False
        """Whether loaders know their position."""
        self.spread: list[dict[str, Any]] = []
        """How loaders spread samples over ranks, see `spread_of`."""
        self._own: tuple[Any, Any] = (None, None)
        """Loaders' own states before the last fetch but one, and before the last."""
        self.loads: dict[str, Any] = {}
        """Entries by loop name, in order: `begun`, the epoch of its first loaders, if before the first epoch's start,
        and `again`, the state at its last request for loaders."""
        self._start: Mapping[str, Any] | None = None
        self._fresh: dict[str, Any] = {}
        """Owners' states before a restart changes them."""
        self._resumed: Mapping[str, Any] = {}
        self._named = ""
        """Known cause of different batches, as last logged."""
        self._compares = True
        self.expected: str | None = None
        """Digest of the original run's next batch; `None` if it is not compared."""

    def look(self) -> None:
        """Find the loaders before one of them makes an iterator."""
        self._moved.look_at_data()
        self.knows, self.spread = _positions.know_position(self._trainer), _positions.spread_of(self._trainer)

    def before_iter(self) -> None:
        """Record data's attributes before an epoch's iterator is made."""
        self._own = (None, None)
        self.taken = {"before": self._moved.take(_LOADERS), "settings": _positions.settings_of(self._trainer)}
        if any(epochs := _positions.epochs_of(self._trainer)):
            self.taken["epochs"] = epochs

    def before_fetch(self) -> None:
        """Record the positions of loaders that know their position."""
        if self.knows:
            self._own = (self._own[1], [each.state_dict() for each in _loaders.loaders_of(self._trainer)])
            own = self._own[0 if _positions.fetches_ahead(self._trainer) else 1]
            self.taken = {**self.taken, "own": None if refusals(own) else copied(own)}

    def begin(self, watched: WatchedData) -> None:
        """Record data's attributes before an iterator that was made while optimizers were configured."""
        before, self.spread = watched.before(self._moved), _positions.spread_of(self._trainer)
        if before is not None:
            self.taken = {"before": before, "settings": _positions.settings_of(self._trainer)}

    def load(self, name: str) -> None:
        """Let a loop ask for loaders, if it has to, and record the state from which it does.

        In a restart, before the first epoch, only training's loaders are made, as at the run's begin.
        """
        if self._start is not None and not self._moved.begun:
            if name == "training":
                self._load_as_begun()
            return
        if _positions.needs_loaders(self._trainer, name):
            epoch, entry = self._trainer.current_epoch, self.loads.get(name, _BEGUN[name])
            if self._moved.begun:
                held = {"attributes": self._moved.take(OF_OTHERS), "random": self._random.take()}
                entry = {**entry, "again": {"epoch": epoch, **held, **self._owners.take_owners()}}
            else:
                entry = {**entry, "begun": epoch}
            self.loads = {**self.loads, name: entry}
        _positions.ask(self._trainer, name)

    # -- resume

    def resume(self, start: Mapping[str, Any]) -> None:
        """Continue from a start half: the data's state and the digest of the next batch."""
        self._resumed, self.expected = start.get("data", {}), start.get("batch")
        self._start, self.loads, self._fresh = start, start["loads"], self._owners.take_owners()

    def _load_as_begun(self) -> None:
        assert self._start is not None
        self._owners.restore_owners(self._fresh)
        early = {} if "training" in self.loads else {"training": _BEGUN["training"]}
        for name, entry in (early | self.loads).items():
            if entry["begun"] is not None:
                _positions.ask_for_loaders(self._trainer, name, entry["begun"], iterate=self._start["between_epochs"])
        self._owners.restore_owners(self._start)

    def load_again(self) -> None:
        """Ask for loaders as in the original run's last load, with objects as then; call when the first epoch begins."""
        assert self._start is not None
        _positions.say_when_loaded(self._trainer, self._start["loops"]["settings"])
        for name, entry in self.loads.items():
            again = entry["again"]
            if again is not None and not _positions.needs_loaders(self._trainer, name):
                self._moved.restore(again["attributes"], OF_OTHERS, forget_new=True)
                self._owners.restore_owners(again)
                self._random.restore(again["random"])
                _positions.ask_for_loaders(self._trainer, name, again["epoch"], again=True)
        self._moved.look_at_data()
        self._owners.restore_owners(self._start)

    def restore_before(self) -> None:
        """Restore data's attributes from before the epoch's iterator was made."""
        if "before" in self._resumed:
            self._moved.restore(self._resumed["before"], _LOADERS, forget_new=True)
            _positions.set_epochs(self._trainer, self._resumed.get("epochs", []))
            self.taken = {**self._resumed}
        self._require_settings()

    def restore_after(self, attributes: Mapping[str, Any]) -> None:
        """Restore data's attributes at the boundary; its iterator is in position."""
        self._moved.restore(attributes, _LOADERS)
        self._own = (None, self._resumed.get("own"))

    def own(self) -> Any:
        """Return loaders' own states at the boundary; `None` if there are none, or no digest can check them."""
        if self.expected is None or not self._compares or not self.knows:
            return None
        return copied(self._resumed.get("own"))

    def goes_on(self) -> bool:
        """Return whether the original's batch comes next, on all ranks; does not consume the batch. Collective."""
        found = _positions.next_batch(self._trainer)
        return self._among().all_agree(len(found) > 0 and digest_of(found[0]) == self.expected)

    def _require_settings(self) -> None:
        """Log settings that the user has changed. Collective in a restart.

        Loaders that a restart makes as at the run's begin, or at its last request, are of another epoch than the stored
        settings. The loaders on which the epoch trains are looked at before its iterator is made.
        """
        if not _loaders.are_of_this_epoch(self._trainer):
            return
        stored, now = self._resumed.get("settings"), _positions.settings_of(self._trainer)
        changes = _changes(stored, now) if stored else []
        self.taken = {**self.taken, "settings": now}
        if self._compares and not self._among().all_agree(not changes):
            self._compares, self.expected = False, None
            if changes:
                log.warning(
                    "the data has other settings than the stored run's, which this run uses: %s. Its batches are not compared "
                    "with the original run's",
                    "; ".join(changes),
                    alike=True,
                )

    # -- batches

    def expect(self, digest: str | None) -> None:
        """Compare the next batch with this digest of the original run."""
        self.expected = digest if self._compares else None

    def compare(self, digest: str | None, *, known: str) -> None:
        """Compare the next batch's `digest`, if there is any, before anything trains on the batch. Collective if a digest was
        expected.

        `known` names the user's changes that make other batches, in words. Raises `OtherData` if the batch differs on some rank,
        and `on_mismatch` is 'stop'.
        """
        expected, self.expected = self.expected, None
        if expected is None or digest is None:
            return
        step, other = self._trainer.global_step, digest != expected
        if other and known:
            other = False
            if known != self._named:
                self._named = known
                log.warning("batches from step %d on are not those of the original run: %s", step, known)
        if self._on_mismatch == "warn":
            if other:
                log.error(_OTHER, step, "this restart is not bit-exact")
            return
        with self._among().raise_together(OtherData):
            if other:
                why = "this restart ends before it trains on other data, and what is stored stays as it is"
                raise OtherData(f"{_OTHER % (step, why)} To train on with what the data gives: on_mismatch='warn'.")


def _changes(stored: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[str]:
    if len(stored) != len(now):
        return [f"{len(now)} loaders instead of {len(stored)}"]
    several = len(now) > 1
    return [
        f"{f'loader {index}: ' if several else ''}{name} {now[index].get(name)!r} instead of {value!r}"
        for index, each in enumerate(stored)
        for name, value in each.items()
        if now[index].get(name) != value
    ]


class BatchLog:
    """Log or digest the batches of the current step; in replay, give the batches of the original step.

    With mode `log` every batch is logged, with `reposition` none. `keep` says whether replay needs batches: not where
    every snapshot is complete. `original` returns, in replay, the original batches of the current step; `compared`
    whether the fetched batch is compared, now or by a later process.
    """

    def __init__(
        self,
        trainer: Trainer,
        mode: Batches,
        *,
        keep: bool,
        original: Callable[[], Logged | None],
        compared: Callable[[], bool],
    ) -> None:
        self._mode, self._keep, self._original, self._compared = mode, keep, original, compared
        self._digest: str | None = None
        self._step: list[dict[str, Any]] = []
        self._accepted = False
        self.remove = tap_batches(trainer, self._logged if mode == "log" else self._digested, resting(trainer))
        """Undo the change to the trainer's method."""
        if mode == "log":
            log.info("batches='log': a restart replays logged batches; later batches are whatever the pipeline gives")

    def take(self) -> dict[str, Any]:
        """Return the mode."""
        return {"mode": self._mode}

    def follow(self, state: dict[str, Any]) -> None:
        """Do nothing: the mode does not change during a run."""

    def restore(self, state: dict[str, Any]) -> None:
        """Log how exact this resume is. Raises `ConfigurationError` if the checkpoint has the other mode."""
        if self._mode != state["mode"] and not (self._mode == "log" and OTHER_RANKS in state):
            raise ConfigurationError(
                f"`batches={self._mode!r}`, but the checkpoint was written with {state['mode']!r}. "
                "Resume with the same, or start anew with resume='never'."
            )
        if self._mode == "log":
            log.warning(
                "batches='log': this restart is exact up to the step at which the state is dense, not beyond: "
                "the data goes on with what the pipeline gives"
            )

    def step_ended(self) -> list[dict[str, Any]]:
        """Return the logged batches of the step that just ended, in order, for its journal."""
        batches, self._step = self._step, []
        return batches

    def take_digest(self) -> str | None:
        """Return the digest of the last fetched batch; `None` if the batch is not compared."""
        digest, self._digest = self._digest, None
        return digest

    # -- private

    def _digested(self, batch: Any) -> Any:
        self._digest = digest_of(batch) if self._compared() else None
        return batch

    def _logged(self, batch: Any) -> Any:
        if (logged := self._original()) is not None:
            entry = logged[len(self._step)]
            batch = copied(entry["batch"])
            restore_rng(entry["random"])
        if self._keep:
            self._require_storable(batch)
            self._step.append({"batch": copied(batch), "random": capture_rng()})
        return batch

    def _require_storable(self, batch: Any) -> None:
        if self._accepted:
            return  # a later batch of another type makes its window useless, which is reported then
        if reasons := refusals(batch):
            raise ConfigurationError(
                f"`batches='log'`: a batch cannot be stored exactly: {'; '.join(reasons[:3])}. Let the loader give tensors, "
                "numbers and strings in lists, tuples and dicts, or use batches='reposition'."
            )
        self._accepted = True


_WHOLE_NBYTES = 2**18
"""Largest tensor, in bytes, that is digested whole, in less than 0.1 ms."""
_OF_NUMPY = {torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool}
"""The commonest types known to numpy as well, with the same bytes."""
_BLOCKS, _BLOCK_NBYTES = 64, 2**12
"""Number and bytes of the blocks, evenly spread, by which a larger tensor is digested."""


def digest_of(batch: Any) -> str:
    """Return the xxh3-64 of a batch's structure and values, the same in every process. Large tensors count in part.

    Values on a device or of unknown type count by type only: reading them could wait for the device.
    """
    state = xxh3_64()
    _add(state, batch)
    return state.hexdigest()


def _add(state: Any, value: Any) -> None:
    state.update(type(value).__name__.encode())
    if isinstance(value, Tensor):
        state.update(f"{value.dtype}{tuple(value.shape)}".encode())
        if value.is_cpu and value.dtype in _OF_NUMPY and value.is_contiguous() and not value.is_neg():
            _add_bytes(state, value.detach().numpy())  # usually; the calls below take four times as long
        elif value.device.type == "cpu" and value.layout is torch.strided and not value.is_quantized:
            _add_bytes(
                state, value.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy()
            )
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        state.update(f"{value.dtype}{value.shape}".encode())
        _add_bytes(state, np.ascontiguousarray(value).reshape(-1).view(np.uint8))
    elif isinstance(value, Mapping):
        for key in value:
            _add(state, key)  # not its `repr`, which may hold an address
            _add(state, value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            _add(state, item)
    elif isinstance(value, str | bytes | int | float | complex | None):
        state.update(repr(value).encode())


def _add_bytes(state: Any, array: np.ndarray[Any, Any]) -> None:
    if array.nbytes <= _WHOLE_NBYTES:
        state.update(array)
        return
    array_U8 = array.reshape(-1).view(np.uint8)
    for block in range(_BLOCKS):
        start = block * (array_U8.nbytes - _BLOCK_NBYTES) // (_BLOCKS - 1)
        state.update(array_U8[start : start + _BLOCK_NBYTES])
