"""Take the progress of Lightning's loops for the journal, and let a resumed run continue there.

Lightning's own resume is not exact: mid-epoch it restarts plain loaders at batch 0, it runs no plateau scheduler at the
end of a resumed epoch, and it calls no `on_train_epoch_start` after an epoch boundary. So progress is taken *between*
batches (after validation, schedulers and epoch end), and a resumed epoch re-enters its loop with every "restarting"
flag cleared: from then on the run is ordinary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from operator import is_
from typing import Any

from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch import Trainer
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.progress import _BaseProgress

from lightning_moe_ckpt.journal import Written, written

_SETTINGS = ("accumulate_grad_batches", "train_loader_epoch", "validation_loader_epoch")


class LoopProgress:
    """Take the progress of all loops of one fit between two batches or epochs.

    Same entries as `_Loop.state_dict`. Among a hundred entries only numbers ever change, so the text around them is
    made once.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._parts: list[object] = []
        """All loops and their progress."""
        self._links: list[tuple[dict[str, Any], str]] = []
        """Places of loops and progress, in attributes."""
        self._numbers: list[tuple[dict[str, Any], str]] = []
        """Places of changing values, in written order."""
        self._loops: list[tuple[str, _Loop]] = []
        self._rest: dict[str, Written] = {}
        """Entries besides progress: states of the loops themselves, and settings."""
        self._settings: tuple[object, ...] = (self,) * len(_SETTINGS)
        self._text = ""

    def take(self) -> Written:
        """Return the progress."""
        if not self._parts or not all(map(is_, [values[name] for values, name in self._links], self._parts)):
            self._outline()
        for name, loop in self._loops:
            own = loop.on_save_checkpoint()
            # Loaders are repositioned by fetching, see `skip_batches`; their own state is exact only in special cases.
            own.pop("combined_loader", None)
            self._rest[name] = written(own) if own else _NOTHING
        fit_loop = self._trainer.fit_loop
        settings = (
            self._trainer.accumulate_grad_batches,
            fit_loop._last_train_dl_reload_epoch,
            fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch,
        )
        if not all(map(is_, settings, self._settings)):  # they seldom change
            self._settings = settings
            self._rest["settings"] = written(dict(zip(_SETTINGS, settings, strict=True)))
        found = [values[name] for values, name in self._numbers]
        texts = [
            each if type(each) is int else each.text if type(each) is Written else written(each).text for each in found
        ]
        return Written(self._text % tuple(texts))

    def _outline(self) -> None:
        self._parts, self._links, self._numbers, self._loops = [], [], [], []
        entries = [*self._of_loop(self._trainer.fit_loop, ""), self._entry(self._rest, "settings", "settings")]
        self._text = f'["d",{",".join(entries)}]'

    def _link(self, values: dict[str, Any], name: str) -> None:
        self._parts.append(values[name])
        self._links.append((values, name))

    def _entry(self, values: dict[str, Any], name: str, key: str) -> str:
        self._numbers.append((values, name))
        return f'["{key}",%s]'

    def _of_loop(self, loop: _Loop, prefix: str) -> Iterator[str]:
        self._loops.append((f"{prefix}state_dict", loop))
        yield self._entry(self._rest, *[f"{prefix}state_dict"] * 2)
        for name, value in vars(loop).items():
            if isinstance(value, _BaseProgress | _Loop):
                self._link(vars(loop), name)
            if isinstance(value, _BaseProgress):
                yield f'["{prefix}{name}",{self._of_progress(value)}]'
            elif isinstance(value, _Loop):
                yield from self._of_loop(value, f"{prefix}{name}.")

    def _of_progress(self, progress: Any) -> str:
        values, entries = vars(progress), list[str]()
        for name in (field.name for field in fields(progress)):
            if isinstance(values[name], _BaseProgress):
                self._link(values, name)
                entries.append(f'["{name}",{self._of_progress(values[name])}]')
            else:
                entries.append(self._entry(values, name, name))
        return f'["d",{",".join(entries)}]'


_NOTHING = written({})


def last_step(trainer: Trainer) -> int | None:
    """Return the step at which training is planned to end; `None` if only time, or nothing, ends it.

    Call in training: before, Lightning would build the loader for the answer.
    """
    planned = trainer.estimated_stepping_batches
    return int(planned) if 0 < planned < float("inf") else None


LoopState = dict[str, Any]


_OTHER_LOOPS = ("validate_loop", "test_loop", "predict_loop")


def _load_loops(trainer: Trainer, state: LoopState) -> None:
    _skip_sanity_check(trainer)
    trainer.fit_loop.load_state_dict({name: each for name, each in state.items() if name != "settings"})


def ends_in_mid_epoch(trainer: Trainer) -> bool:
    """Return whether training ends in mid-epoch; call after its last batch, before the epoch-end hooks."""
    out_of_steps = 0 <= trainer.max_steps <= trainer.global_step
    return (out_of_steps or trainer.should_stop) and not trainer.fit_loop.epoch_loop._num_ready_batches_reached()


def finished_because(trainer: Trainer) -> tuple[str, str] | None:
    """Return why a restored run trains no further, and the remedy; `None` if it trains. Call before the fit loop runs."""
    max_steps, max_epochs = trainer.max_steps, trainer.max_epochs
    epochs: Any = trainer.fit_loop.epoch_progress.current
    if 0 <= max_steps <= trainer.global_step:
        return f"`max_steps={max_steps}` is reached", "a larger `max_steps`"
    if max_epochs is not None and 0 <= max_epochs <= epochs.processed:
        return f"`max_epochs={max_epochs}` is reached", "a larger `max_epochs`"
    if trainer.should_stop and trainer.fit_loop._can_stop_early:
        return "it was stopped for good, as by EarlyStopping", "`min_steps` or `min_epochs` beyond this step"
    return None


def _skip_sanity_check(trainer: Trainer) -> None:
    """Skip the next validation before training: the resumed run has had it, and its changes were restored."""

    def skipped() -> None:
        del trainer._run_sanity_check

    trainer._run_sanity_check = skipped  # type: ignore[method-assign]


def resumes_inside(trainer: Trainer) -> bool:
    """Return whether Lightning is about to go on inside an epoch, from a `.ckpt` of its own."""
    epoch_loop = trainer.fit_loop.epoch_loop
    return epoch_loop.restarting and 0 < epoch_loop.batch_progress.current.ready < trainer.num_training_batches


def resume_between_epochs(trainer: Trainer, state: LoopState) -> None:
    """Continue as if the last epoch had just ended in this process; call before the fit loop runs."""
    _load_loops(trainer, state)
    _clear_restart_flags(trainer)


def restore_ended(trainer: Trainer, state: LoopState) -> None:
    """Give loops their progress at training's end, if nothing is left to train."""
    del state["settings"]
    trainer.fit_loop.load_state_dict(state)
    _clear_restart_flags(trainer)
    for loader in trainer.fit_loop._combined_loader.flattened if trainer.fit_loop._combined_loader is not None else ():
        _set_sampler_epoch(loader, trainer.fit_loop.epoch_progress.current.ready - 1)


def resume_mid_epoch(trainer: Trainer, state: LoopState, position: Callable[[], None]) -> None:
    """Continue inside an epoch; call before the fit loop runs.

    Args:
        trainer: the trainer whose loops get `state`.
        state: the result of `LoopProgress.take`.
        position: moves the data fetcher past the consumed batches; called once its iterator exists.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    _load_loops(trainer, state)  # "restarting" makes the fit loop skip this epoch's start hooks, which have run
    start = epoch_loop.on_run_start

    def no_reset() -> None:
        del epoch_loop.reset  # Lightning's reset would count this epoch's batches again

    def run_start(data_fetcher: Any) -> None:
        epoch_loop.on_run_start = start  # type: ignore[method-assign]
        # Set by a callback when this epoch started; not before, since that callback checks it when training starts.
        trainer.accumulate_grad_batches = state["settings"]["accumulate_grad_batches"]
        position()
        start(data_fetcher)  # adds the consumed batches to `fetched`; makes no iterator while the flags are set
        _clear_restart_flags(trainer)

    epoch_loop.reset = no_reset  # type: ignore[method-assign]
    epoch_loop.on_run_start = run_start  # type: ignore[method-assign]


def _clear_restart_flags(trainer: Trainer) -> None:
    for loop in _with_children(trainer.fit_loop):
        # Not through `restarting`: with `max_steps` its setter leaves the fit loop restarting whatever it is given, which
        # then counts the ended epoch once more and makes no iterator for the next epoch.
        loop._restarting = False
        loop._loaded_from_state_dict = False
        loop._resuming_from_checkpoint = False
        loop.reset_restart_stage()


def _with_children(loop: _Loop) -> Iterator[_Loop]:
    yield loop
    for value in vars(loop).values():
        if isinstance(value, _Loop):
            yield from _with_children(value)
