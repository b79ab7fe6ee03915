"""ModelCheckpoint and EarlyStopping beside our callbacks: the same decisions, files and contents after any kill."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from door import CheckpointCallback
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor
from typing_extensions import override

from campaign._campaign import Campaigns
from campaign._stops import require_same_training
from campaign._training import Checkpointing, Module, train
from campaign._variants import Variant, VariantModule
from lightning_moe_ckpt.fit._boundary import BoundaryState, Moment
from lightning_moe_ckpt.testing import Attempt, Kill, Seam

SPARSE = Checkpointing(policy="sparse", window=3)
DENSE = Checkpointing(policy="dense", every_n_steps=2)


@dataclass(frozen=True, kw_only=True)
class Watched(Variant):
    """A run that is watched by Lightning's own callbacks."""

    watchers: tuple[tuple[type[Callback], tuple[tuple[str, Any], ...]], ...] = ()
    fails_at: int | None = None
    """Step in which the first life of a protected run meets an exception."""

    @override
    def callbacks(self, life: Attempt) -> Sequence[Callback]:
        made = [each(**dict(options)) for each, options in self.watchers]
        for callback in made:
            if isinstance(callback, (ModelCheckpoint, OnExceptionCheckpoint)) and callback.dirpath is None:
                callback.dirpath = str(self._folder(life))
        fails = life.index == 0 and self.checkpointing is not None and self.fails_at is not None
        return [*made, Whole(self._folder(life)), *([Failing(self.fails_at or 0)] if fails else [])]

    def _folder(self, life: Attempt) -> Path:
        """Where the watchers write; fault-free runs share a work folder."""
        folder = life.workdir / ("files" if self.checkpointing is not None else f"files{life.index}")
        folder.mkdir(exist_ok=True)
        return folder

    @override
    def returned(self, life: Attempt, trainer: Trainer) -> dict[str, Any]:
        folder = self._folder(life)
        watchers = [c for c in trainer.callbacks if isinstance(c, (ModelCheckpoint, EarlyStopping))]  # type: ignore[attr-defined]
        states = {f"watcher/{c.state_key}": _told(c.state_dict(), folder) for c in watchers}
        files = [_contents(path, folder) for path in sorted(folder.glob("*.ckpt"))] if life.rank == 0 else []
        return {**states, **{f"file/{name}": digest for file in files for name, digest in file.items()}}


class Whole(Callback):
    """Asserts, after every step of a dense state, that no file is half written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        own = [c for c in trainer.callbacks if isinstance(c, CheckpointCallback)]  # type: ignore[attr-defined]
        if not any(callback.replaying for callback in own):
            assert all(zipfile.is_zipfile(path) for path in self._folder.glob("*.ckpt"))


class Failing(Callback):
    """Raises in one step, after that step has begun."""

    def __init__(self, step: int) -> None:
        self._step = step

    @override
    def on_before_zero_grad(self, trainer: Trainer, *args: object) -> None:
        if trainer.global_step == self._step:
            raise ArithmeticError("on purpose")


def _contents(path: Path, folder: Path) -> dict[str, str]:
    """A digest of each part of a file, by file and name."""
    checkpoint = torch.load(path, weights_only=False)
    return {f"{path.name}/{name}": _told(part, folder) for name, part in checkpoint.items()}


def _told(value: Any, folder: Path) -> str:
    """A digest of a nested value by its bits, without the folder's name."""
    return xxhash.xxh3_128_hexdigest("\n".join(_lines(value, str(folder))).encode())


def _lines(value: Any, folder: str) -> list[str]:
    if isinstance(value, Tensor):
        return [f"{value.dtype}{tuple(value.shape)} {value.flatten().contiguous().view(torch.uint8).tolist()}"]
    if isinstance(value, Mapping):
        return [
            f"{key}: {line}".replace(folder, "")
            for key in sorted(value, key=str)
            for line in _lines(value[key], folder)
        ]
    if isinstance(value, (list, tuple)):
        return [line for item in value for line in _lines(item, folder)]
    return [repr(value).replace(folder, "")]


def checkpoint(**options: Any) -> tuple[type[Callback], tuple[tuple[str, Any], ...]]:
    return ModelCheckpoint, tuple(options.items())


def stopping(**options: Any) -> tuple[type[Callback], tuple[tuple[str, Any], ...]]:
    return EarlyStopping, tuple(options.items())


EVERY_STEP = checkpoint(every_n_train_steps=1, save_top_k=2, monitor="both_mean", save_last=True)
AFTER_VALIDATION = checkpoint(save_top_k=2, monitor="validation_loss", filename="best", save_last=True)
EVERY_EPOCH = checkpoint(save_top_k=-1, every_n_epochs=1, filename="all-{epoch}", save_on_train_epoch_end=True)
ONE_NAME = checkpoint(every_n_train_steps=2, filename="newest", save_top_k=1)
STOP_BY_STEP = stopping(monitor="validation_loss", patience=6, min_delta=1.0, check_on_train_epoch_end=False)
STOP_BY_EPOCH = stopping(monitor="both_mean_epoch", patience=2, min_delta=1.0, check_on_train_epoch_end=True)

RUNS = {
    "every_step": Watched(logged=True, watchers=(EVERY_STEP,)),
    "after_validation": Watched(watchers=(AFTER_VALIDATION,), validate_every=1),
    "several": Watched(logged=True, watchers=(EVERY_EPOCH, ONE_NAME, AFTER_VALIDATION)),
    "accumulating": Watched(
        logged=True, watchers=(EVERY_STEP, AFTER_VALIDATION), accumulate=2, epochs=3, validate_every=1
    ),
    "stop_by_step": Watched(watchers=(STOP_BY_STEP, AFTER_VALIDATION), validate_every=1, epochs=4),
    "stop_by_epoch": Watched(logged=True, watchers=(STOP_BY_EPOCH,), epochs=6, batches=3),
}
KILLS = [
    [Kill(phase="after_batch_end", step=5, settle=10.0)],
    [Kill(phase="forward", step=5, settle=10.0), Kill(phase="batch_end", batches=2), Kill(phase="batch_end", step=6)],
]


@pytest.mark.parametrize(
    ("name", "kills"),
    [
        pytest.param("every_step", KILLS[0], marks=pytest.mark.soak),
        ("accumulating", KILLS[1]),
        ("stop_by_epoch", KILLS[0]),
    ],
)
def test_files_and_decisions_are_those_of_the_undisturbed_run(
    campaigns: Campaigns, name: str, kills: list[Kill]
) -> None:
    """Names, contents, best scores and the step at which training stops; nothing is written in replay."""
    lives = campaigns.check(replace(RUNS[name], checkpointing=SPARSE), *kills)
    held = [life for life in lives if "neither written nor removed" in life.log()]
    assert held or name != "every_step", "nothing was held"


@pytest.mark.soak
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("checkpointing", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_killed_at_every_step_files_are_those_of_the_undisturbed_run(
    campaigns: Campaigns, name: str, checkpointing: Checkpointing
) -> None:
    """Under either callback."""
    setup = replace(RUNS[name], checkpointing=checkpointing)
    campaigns.check_all(setup, [[Kill(phase="after_batch_end", step=s, settle=10.0)] for s in (2, 4, 6)])


def test_a_file_torn_by_the_kill_is_written_anew(campaigns: Campaigns) -> None:
    """As soon as the state is dense, not when the file is due again."""
    setup = Watched(watchers=(RARE,), world_size=3, checkpointing=SPARSE)
    kill = Kill(phase="ckpt_file", step=8, operation=0, settle=10.0)
    lives = campaigns.check_all(setup, [[kill]], may_complain=True)
    assert "half written" in lives[0][1].log()


RARE = checkpoint(every_n_train_steps=4, save_top_k=0, save_last=True)
ON_EXCEPTION = (OnExceptionCheckpoint, (("dirpath", None),))


def _train_or_fail(setup: Watched, life: Attempt) -> Mapping[str, Any]:
    try:
        return train(setup, life)
    except ArithmeticError:
        return {}


def test_after_an_exception_our_newest_step_is_resumed_not_lightnings_file(campaigns: Campaigns) -> None:
    """`OnExceptionCheckpoint` makes Lightning load the newest `.ckpt` by itself."""
    setup = Watched(watchers=(RARE, ON_EXCEPTION), fails_at=6, checkpointing=SPARSE)
    lives = campaigns.check(setup, None, fit=partial(_train_or_fail, setup))
    assert "on_exception.ckpt is not loaded" in lives[1].log()


def test_a_torn_file_that_lightning_would_load_does_not_stop_the_run(campaigns: Campaigns) -> None:
    """It is read before anybody knows that something else is resumed from."""
    setup = Watched(watchers=(RARE, ON_EXCEPTION), checkpointing=SPARSE)
    kill = Kill(phase="ckpt_file", step=8, settle=10.0)
    lives = campaigns.check_all(setup, [[kill]], may_complain=True)
    assert "last.ckpt is not loaded" in lives[0][1].log()


@pytest.mark.soak
def test_without_the_list_of_files_names_are_avoided(campaigns: Campaigns) -> None:
    """Of files that the killed run left."""
    seam = Seam(module="lightning_moe_ckpt.fit._files", attribute="CheckpointFiles._exists", replacement=_as_it_was)
    kill = Kill(phase="batch_start", step=5, settle=10.0)
    with pytest.raises(AssertionError, match=r"-v1.ckpt/state_dict: surplus"):
        campaigns.check_all(replace(RUNS["several"], checkpointing=DENSE), [[kill]], seams=[seam])


def _as_it_was(files: Any, original: Any) -> Any:
    return original


# -- decisions by validation losses that replay cannot compute again


class Blown(VariantModule):
    """Weights are blown up after the validation at the end of an epoch, before the next batch."""

    @override
    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(3.0)

    @override
    def configure_optimizers(self) -> Any:
        configured = super().configure_optimizers()
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(configured["optimizer"], factor=0.5, patience=0)
        configured["lr_scheduler"]["scheduler"] = plateau
        return configured


class BlownUp(Watched):
    """A run that is slowed, stopped and saved by validation losses of weights that a replay does not have."""

    @override
    def make_module(self, life: Attempt) -> Module:
        return Blown(self, life)


DECIDED = BlownUp(
    watchers=(stopping(monitor="validation_loss", patience=4, check_on_train_epoch_end=False), AFTER_VALIDATION),
    plateau=("step", 1),
    validate_every=1,
    epochs=4,
    checkpointing=SPARSE,
)
IN_AND_AFTER_REPLAY = {5: 7, 3: 5}
"""By batches of an epoch, the step of the kill: the newest window then goes from 4 to 6 or from 1 to 3, so the epoch ends
inside it or where the state is dense."""


def _decided(batches: int) -> tuple[BlownUp, Kill]:
    kill = Kill(phase="after_batch_end", step=IN_AND_AFTER_REPLAY[batches], settle=10.0)
    return replace(DECIDED, batches=batches), kill


def _check_decisions(campaigns: Campaigns, setup: Watched, kill: Kill, *seams: Seam) -> None:
    """The losses of validations in replay are others; nothing else is, and training stops at the same step."""
    lives, reference = campaigns.run(setup, kill, seams=seams), campaigns.reference(setup)
    assert lives[-1].steps()[0] > 1, "it did not start over"
    assert len(reference[-1].steps()) < setup.steps, "it stops early"
    require_same_training(reference, lives, ignored=("validation", "epoch"))
    assert lives[-1].returned(0) == reference[-1].returned(0)


@pytest.mark.parametrize("batches", IN_AND_AFTER_REPLAY)
def test_validation_in_replay_decides_nothing(campaigns: Campaigns, batches: int) -> None:
    """Plateau, early stopping and best files are those of the run in peace, though replay validates edited weights."""
    setup, kill = _decided(batches)
    _check_decisions(campaigns, setup, kill)


_restore = BoundaryState.restore


def _as_decided_here(state: BoundaryState, moment: Moment, *args: Any) -> None:
    """Lets what this life has computed in replay stand."""
    if moment != "replay":
        _restore(state, moment, *args)


@pytest.mark.soak
@pytest.mark.parametrize("batches", IN_AND_AFTER_REPLAY)
def test_without_the_journal_validation_in_replay_would_decide(campaigns: Campaigns, batches: int) -> None:
    """The ablation."""
    setup, kill = _decided(batches)
    seam = Seam(module=BoundaryState.__module__, attribute="BoundaryState.restore", replacement=_as_decided_here)
    with pytest.raises(AssertionError, match="instead of"):
        _check_decisions(campaigns, setup, kill, seam)
