"""Keep Lightning's own `.ckpt` files right in a run that is killed and resumed.

A killed run leaves files of steps that will be trained again, and perhaps a half-written file. In the resumed run such
a file must not count as existing, or `ModelCheckpoint` would avoid its name; while operators are frozen no file may be
written, since it would hold half-frozen weights; and a torn file must not stay until it is due again by chance. So
every rank lists the files written by the run up to this boundary, as part of the step journal.

With `ModelParallelStrategy`, a `.ckpt` is a folder with files of every rank, and the files `_LAST` are written when all others
are complete. They are removed before the folder is written again.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from enum import Enum, auto
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.fit.loops._trainer import callbacks_of

log = rank_logger(__name__)

FilesState = dict[str, Any]

_LAST = (".metadata", "meta.pt")
"""Files written last into a folder: torch's list of shards, then Lightning's other state."""
_UNSAVED = ("current_score", "_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation")
"""Attributes of `ModelCheckpoint` that its `state_dict` does not restore; some versions of Lightning lack the last."""


class Writing(Enum):
    """What happens to the files that callbacks write and remove. `CheckpointFiles` alone moves it."""

    FREE = auto()
    """Files are written and removed as callbacks ask."""
    HELD = auto()
    """Files are neither written nor removed: operators are frozen, or a pipeline stage recovers alone."""
    UNCHECKED = auto()
    """As `FREE`, but the files' writer may have died, and nobody has looked for damaged files since."""


class CheckpointFiles:
    """Replace one trainer's methods that save, remove and look for checkpoint files, until `remove`; only with `changes`, repair files."""

    def __init__(self, trainer: Trainer, *, changes: bool = True) -> None:
        self._trainer, self._strategy, self._changes = trainer, trainer.strategy, changes
        before = getattr(trainer.__dict__.get("save_checkpoint"), "__self__", None)
        if isinstance(before, CheckpointFiles):
            before.remove()  # an earlier fit ended in replay
        self.writing = Writing.FREE
        self._lists_decide = False
        """Whether a file exists if ranks have listed its path; else Lightning looks into the folder."""
        self._has_said_held = False
        self._saved: dict[str, bool] = {}
        """Files of this run by path; the value says whether a file has weights only."""
        self._foreign = {path for checkpoint in self._model_checkpoints() for path in _listed(checkpoint)}
        self._save, self._delete = trainer.save_checkpoint, trainer.strategy.remove_checkpoint
        trainer.save_checkpoint = self._on_save  # type: ignore[method-assign]
        trainer.strategy.remove_checkpoint = self._on_delete  # type: ignore[method-assign]
        for checkpoint in self._model_checkpoints():
            checkpoint.file_exists = self._exists(checkpoint.file_exists)  # type: ignore[assignment, method-assign]

    def hold(self) -> None:
        """Neither write nor remove files until `dense` or `go_on`."""
        self.writing = Writing.HELD

    def go_on(self, *, held: bool) -> None:
        """Write and remove files again, unless still `held`, and look for damaged files at the next call of `dense`.

        Their writer may have died while a stage recovered alone. Call on all ranks.
        """
        self.writing = Writing.HELD if held else Writing.UNCHECKED

    def dense(self) -> None:
        """Stop holding files, and repair damaged ones: a step has ended and every operator is active. Call on all ranks."""
        if self.writing is not Writing.FREE:
            self.writing = Writing.FREE
            self._repair()

    def remove(self) -> None:
        """Restore the trainer's own methods."""
        self._trainer.__dict__.pop("save_checkpoint", None)
        self._strategy.__dict__.pop("remove_checkpoint", None)
        for checkpoint in self._model_checkpoints():
            checkpoint.__dict__.pop("file_exists", None)

    def asks_as_resumed(self) -> None:
        """Decide on all ranks together which files exist, as after a resume, also in processes that never resumed."""
        self._lists_decide = True

    def take(self) -> FilesState:
        """Return the files written so far, and attributes that `ModelCheckpoint` leaves out of its state."""
        callbacks = {
            each.state_key: {name: getattr(each, name) for name in _UNSAVED if hasattr(each, name)}
            for each in self._model_checkpoints()
        }
        return {"saved": dict(self._saved), "foreign": sorted(self._foreign), "callbacks": callbacks}

    def restore(self, state: FilesState) -> None:
        """Continue from a taken state; call after the callbacks have loaded their states."""
        self._lists_decide = True
        if self.writing is Writing.FREE:
            self.writing = Writing.UNCHECKED
        self.follow(state)

    def follow(self, state: FilesState) -> None:
        """Set the original run's state in replay; call after the callbacks."""
        self._saved, self._foreign = dict(state["saved"]), set(state["foreign"])
        for checkpoint in self._model_checkpoints():
            for name, value in state["callbacks"].get(checkpoint.state_key, {}).items():
                setattr(checkpoint, name, value)

    def start(self) -> FilesState:
        """Return files not written by any step of this run, and the folders of callbacks."""
        folders = {checkpoint.state_key: {"dirpath": checkpoint.dirpath} for checkpoint in self._model_checkpoints()}
        return {"foreign": sorted(self._foreign), "folders": folders}

    def write_again(self, start: FilesState) -> None:
        """Begin anew in the folders of the first begin: only foreign files count as existing."""
        self._lists_decide, self._foreign = True, set(start["foreign"])
        for checkpoint in self._model_checkpoints():
            if checkpoint.state_key in start["folders"]:
                keep_folder(checkpoint, start["folders"][checkpoint.state_key], self._trainer)

    # -- private

    def _repair(self) -> None:
        """Write files again that the run was killed in replacing: the old content is lost, and the file gets the current state."""
        looks = self._changes and self._trainer.is_global_zero
        torn = [path for path in self._saved if _torn(path)] if looks else []
        upstream: Any = getattr(self._strategy, "upstream", None)
        with nullcontext() if upstream is None else upstream.paused():
            paths = self._strategy.broadcast(torn)
        for path in paths:
            log.warning("%s was left half written by the run that was killed; it is written anew", path)
            self._save(path, self._saved[path])

    def _model_checkpoints(self) -> list[ModelCheckpoint]:
        return [callback for callback in callbacks_of(self._trainer) if isinstance(callback, ModelCheckpoint)]

    def _on_save(self, filepath: Any, weights_only: bool | None = None, *args: Any, **options: Any) -> None:
        self._saved[os.fspath(filepath)] = bool(weights_only)
        if not self._holds():
            if self._changes and self._trainer.is_global_zero:  # others get the path from there
                for name in _LAST if Path(filepath).is_dir() else ():
                    Path(filepath, name).unlink(missing_ok=True)
            self._save(filepath, weights_only, *args, **options)

    def _on_delete(self, filepath: Any) -> None:
        self._saved.pop(os.fspath(filepath), None)
        if not self._holds():
            self._delete(filepath)

    def _holds(self) -> bool:
        held = self.writing is Writing.HELD
        if held and not self._has_said_held:
            self._has_said_held = True
            log.info("Lightning's checkpoints are neither written nor removed while operators are frozen in replay")
        return held

    def _exists(self, original: Callable[[Any, Trainer], bool]) -> Callable[[Any, Trainer], bool]:
        def exists(filepath: Any, trainer: Trainer) -> bool:
            if not self._lists_decide:
                return original(filepath, trainer)
            path = os.fspath(filepath)
            return bool(self._strategy.reduce_boolean_decision(path in self._saved or path in self._foreign, all=False))

        return exists


def let_best_come_first(trainer: Trainer, callback: Callback) -> None:
    """Move `ModelCheckpoint` before our callback: `ckpt_path="best"` asks the first callback that is a `Checkpoint`."""
    callbacks = callbacks_of(trainer)
    last = max((i for i, each in enumerate(callbacks) if isinstance(each, ModelCheckpoint)), default=-1)
    if (here := callbacks.index(callback)) < last:
        # A new list: Lightning is iterating over the old one.
        moved = [*callbacks[:here], *callbacks[here + 1 : last + 1], callback, *callbacks[last + 1 :]]
        trainer.callbacks = moved  # type: ignore[attr-defined]


def keep_folder(callback: Callback, state: dict[str, Any], trainer: Trainer) -> None:
    """Let a `ModelCheckpoint` without a given folder go on writing to the resumed run's folder.

    Its default is the logger's folder, new in every process.
    """
    if not isinstance(callback, ModelCheckpoint) or "dirpath" not in state:
        return
    here, callback.dirpath = callback.dirpath, None
    implied = callback._ModelCheckpoint__resolve_ckpt_dir(trainer)  # type: ignore[attr-defined]
    callback.dirpath = state["dirpath"] if os.fspath(implied) == here else here


class LightningResume:
    """Skip Lightning's own resume if our checkpoints have a step to resume from.

    `ckpt_path`, or the file that `OnExceptionCheckpoint` makes Lightning look for, is older than our newest step and
    may be damaged. Lightning reads the file before our checkpoints are known, so this is made in `setup`. Strategies that load
    a file into shards read it after `on_fit_start`.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._connector = trainer, trainer._checkpoint_connector
        self._read = self._connector.resume_start
        self._error: Exception | None = None
        self._resumed: bool | None = None
        """Whether our checkpoints had a step; `None` until that is known."""
        self._connector.resume_start = self._start  # type: ignore[method-assign]

    def _start(self, checkpoint_path: Any = None, *args: Any, **options: Any) -> None:
        del self._connector.resume_start
        if self._resumed is not None:
            self._connector._ckpt_path = checkpoint_path
            if self._resumed:
                self._skip()
            else:
                self._read(checkpoint_path, *args, **options)
            return
        try:
            self._read(checkpoint_path, *args, **options)
        except Exception as error:  # noqa: BLE001  # a damaged file may raise anything; raised again unless we resume
            self._error = error

    def decide(self, *, resumed: bool) -> None:
        """Raise the error of Lightning's read, or drop it if there is another step to resume from; call before Lightning restores
        loops.
        """
        self._resumed = resumed
        if resumed:
            self._skip()
        elif self._error is not None:
            raise self._error

    def _skip(self) -> None:
        if self._connector._ckpt_path:
            log.info(
                "%s is not loaded: this run goes on at its own step %d, whatever `ckpt_path` says; with resume='never' it "
                "begins from the file",
                self._connector._ckpt_path,
                self._trainer.global_step,
            )
            self._connector._ckpt_path = None
            self._connector._loaded_checkpoint = {}


def _listed(callback: ModelCheckpoint) -> list[str]:
    """Return paths of checkpoint files in the callback's folder, as seen by this rank; empty without a folder."""
    if (folder := callback.dirpath) is None or not callback._fs.exists(folder):
        return []
    names = [os.fspath(path).rpartition("/")[2] for path in callback._fs.ls(folder, detail=False)]
    return [f"{folder}/{name}" for name in names if name.endswith(callback.FILE_EXTENSION)]


def _torn(path: str) -> bool:
    """Return whether a local file or folder exists but lacks its end: of a file, where the zip format keeps its directory."""
    if Path(path).is_dir():
        return not Path(path, _LAST[0]).is_file() or not zipfile.is_zipfile(Path(path, _LAST[1]))
    return Path(path).is_file() and not zipfile.is_zipfile(path)
