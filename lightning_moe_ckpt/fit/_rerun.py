"""Run steps of a stored run again, look at them, and compare their losses with the run's journals: `moe-ckpt replay`.

Steps are numbered by `trainer.global_step`, as loggers show them. A step ends at the next boundary, whose
journal has its losses: so those are known that end inside a stored window, or where a generation was taken.
"""

from __future__ import annotations

import functools
import json
import os
import pkgutil
import re
import sys
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.seed import isolate_rng
from safetensors.torch import save_file
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.errors import ConfigurationError, Corrupt, StorageError, StorageRefused
from lightning_moe_ckpt.fit.loggers._once import silence
from lightning_moe_ckpt.fit.loops._trainer import compiled_modules
from lightning_moe_ckpt.launch import RerunRequest
from lightning_moe_ckpt.recovery import same_bits, stored_losses
from lightning_moe_ckpt.storage import RunView, open_backend
from lightning_moe_ckpt.storage._open import scheme_of
from lightning_moe_ckpt.tiers import SessionConfig

log = rank_logger(__name__)
_say_once = functools.cache(log.info)

OF_TRAINER = {"gradient_clip_val": ["a number", "None"], "gradient_clip_algorithm": ["norm", "value"]}
"""Attributes on the trainer that `--set` may set, with their values or kinds of them."""


class Rerun(Callback):
    """Hooks of the steps that are looked at, right behind those that restore state."""

    def __init__(self, request: RerunRequest, url: str) -> None:
        if scheme_of(url) == "file":
            path = re.sub(r"^\w+://", "", url)
            _refuse_writes({os.path.abspath(path), os.path.realpath(path)})  # noqa: PTH100  # by either name
        self.request, self._within = request, ExitStack()
        sys.path.insert(0, "")
        self._hook: Any = pkgutil.resolve_name(request.hook) if request.hook else None
        self._journalled: dict[int, list[Tensor]] = {}
        self._rows: list[list[Any]] = []
        self._files: list[str] = []
        self._dump: StepDump | None = None
        self.first = 0
        """The restored generation's first boundary."""
        self.notes: list[str] = []
        """Reasons for other losses than those of the run, in words."""

    def begins(self, config: SessionConfig, trainer: Trainer, first: int, known: str) -> None:
        """Read the journals of the steps to come, once a generation is restored, whose `first` boundary this is; none are
        compared if other losses are `known` to come, for a reason.
        """
        request, self.first = self.request, first
        _expect_fits(request.given, trainer)
        boundaries = range(first + 1, request.until + 2)
        if known:
            self.notes.append(known)
        else:
            self._journalled = _journalled_losses(config, trainer.global_rank, trainer.world_size, boundaries)
        if request.dump:
            self._dump = StepDump(request.dump, Path(request.out), trainer.global_rank)
        if request.given:
            values = ", ".join(f"{name}={value}" for name, value in request.given.items())
            self.notes.append(f"from step {request.step} on with {values}")

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step < self.request.step:
            return
        self._set(trainer)
        if self._dump is not None:
            self._dump.batch_begins(pl_module, batch)
        if self._hook is not None:
            modes = [(part, part.training) for part in pl_module.modules()]
            with isolate_rng(include_cuda=torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
                within = self._hook(trainer, pl_module, batch, batch_idx)
                for part, training in modes:
                    part.training = training
                if hasattr(within, "__enter__"):
                    self._within.enter_context(within)

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if self._dump is not None and trainer.global_step >= self.request.step:
            self._dump.before_optimizer_step(pl_module)

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        with isolate_rng(include_cuda=torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
            self._within.close()

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:  # or else the process has ended in `stepped`
            Path(self.request.results).write_text(json.dumps({"ended": trainer.global_step - 1}), "utf-8")

    def stores(self, boundary: int) -> bool:
        """Return whether the state at `boundary` is to be stored, for an audit."""
        return bool(self.request.store) and boundary >= self.request.store_from

    def stepped(self, boundary: int, losses: list[Tensor], among: Exchange, *, known: str) -> None:
        """Compare the step that ended at `boundary`, all hooks included; end the process with status 0 behind the last,
        where this is collective. `known` are reasons for other losses.
        """
        step, original = boundary - 1, self._journalled.get(boundary)
        if known and known not in self.notes:
            self.notes.append(known)
        same = None if original is None else same_bits(losses, original)
        if same is False and not self.notes:
            log.error("step %d gave another loss than in the run: %s, was %s", step, _plain(losses), _plain(original))
        self._rows.append([step, _plain(losses), _plain(original), same])
        if step >= self.request.step and self._dump is not None:
            self._files += self._dump.ends(step)
        if step < self.request.until:
            return
        ranks = among.gather_values([self._rows, self._files, self.notes])
        if among.is_coordinator:
            Path(self.request.results).write_text(json.dumps({"first": self.first, "ranks": ranks}), "utf-8")
        raise SystemExit(0)

    def _set(self, trainer: Trainer) -> None:
        for name, value in self.request.given.items():
            if name in OF_TRAINER:
                setattr(trainer, name, value)
            for group in (each for each in trainer.optimizers[0].param_groups if name in each):
                new = tuple(value) if isinstance(value, list) else value
                group[name].fill_(value) if isinstance(group[name], Tensor) else group.update({name: new})


def _expect_fits(given: Mapping[str, Any], trainer: Trainer) -> None:
    """Raise `ConfigurationError` unless there is a value of each name that is given, and of the same kind."""
    groups = trainer.optimizers[0].param_groups
    for name, value in given.items():
        wanted = OF_TRAINER.get(name) or [_kind(group[name]) for group in groups if name in group]
        if not wanted:
            known = ", ".join([*sorted({key for group in groups for key in group} - {"params"}), *OF_TRAINER])
            raise ConfigurationError(f"`--set {name}=...`: there is no such value. Known are {known}.")
        if str(value) not in wanted and (found := _kind(value)) not in wanted:
            raise ConfigurationError(f"`--set {name}={value}`: found {found}, wanted {' or '.join(sorted({*wanted}))}.")


def _kind(value: object) -> str:
    if isinstance(value, tuple | list):
        return f"{len(value)} numbers"
    return {bool: "true or false", type(None): "true or false", str: "text"}.get(type(value), "a number")


def _journalled_losses(config: SessionConfig, rank: int, world_size: int, boundaries: range) -> dict[int, list[Tensor]]:
    """Return a rank's losses by the boundary that ends their step, where a generation with as many ranks has them."""
    found: dict[int, list[Tensor]] = {}
    with closing(open_backend(config.url, storage_options=config.storage_options)) as backend:
        view = RunView.open(backend)
        commits = [stored.commit for stored in view.generations() if stored.usable and stored.commit]
        for commit in commits:
            if commit.world_size != world_size or not {*boundaries} & {*commit.steps}:
                continue
            with suppress(Corrupt, StorageError):  # the run goes on, and may delete what it does not keep
                for file in view.read_marker(commit, rank).segments:
                    if file.step in boundaries and (losses := stored_losses(backend, file)):
                        found[file.step] = losses
    return found


def _plain(losses: list[Tensor] | None) -> list[float] | None:
    return None if losses is None else [loss.item() for loss in losses]


_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_CHANGES = {"os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.link", "os.symlink", "os.truncate", "shutil.rmtree"}


def _refuse_writes(folders: Collection[str]) -> None:
    """Raise `StorageRefused` before Python code of this process writes or moves a file in the folders, until the process ends."""

    def look(event: str, args: tuple[Any, ...]) -> None:
        if event in _CHANGES or (event == "open" and isinstance(args[2], int) and args[2] & _WRITE_FLAGS):
            for path in args[:2]:
                place = f"{os.path.abspath(path)}/" if isinstance(path, str | os.PathLike) else ""  # noqa: PTH100
                if any(place.startswith(f"{folder}/") for folder in folders):
                    raise StorageRefused(
                        f"{path} is the run's, and `moe-ckpt replay` changes nothing there. Write to another place."
                    )

    sys.addaudithook(look)


PARTS = ("gradients", "activations", "batch")
"""Parts of a step that can be stored."""


class StepDump:
    """Store `parts` of each step on `rank` in the folder `out`; call its methods in the hooks' order.

    A file per rank and part has tensors by name: `0/images` in the step's first batch; `layers.1.mlp#2` is this module's third
    output in the step, since micro-batches, recomputation and shared modules call one several times, and its parts are
    `layers.1.mlp#2/0`. Gradients have their parameters' names, and are those before clipping; of a shard, this rank's part.
    """

    def __init__(self, parts: Collection[str], out: Path, rank: int) -> None:
        self._parts, self._out, self._rank = parts, out, rank
        self._found: dict[str, dict[str, Tensor]] = {}
        self._handles: list[RemovableHandle] = []

    def batch_begins(self, module: LightningModule, batch: Any) -> None:
        """Note one of the step's batches; with the first, begin to note outputs of modules, but for compiled ones."""
        if not self._found:
            self._found = {part: {} for part in self._parts}
            if "activations" in self._parts:
                compiled, self._calls = compiled_modules(module), Counter[str]()
                for name, part in module.named_modules():
                    if part is not module and part not in compiled:
                        self._handles.append(part.register_forward_hook(partial(self._output, name)))
            self._batches = 0
        self._note("batch", str(self._batches), batch)
        self._batches += 1

    def before_optimizer_step(self, module: LightningModule) -> None:
        """Note all gradients."""
        for name, param in module.named_parameters():
            if param.grad is not None:
                self._note("gradients", name, param.grad)

    def ends(self, step: int) -> list[str]:
        """Store the parts of the step, and return the files' paths."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        found, self._found, written = self._found, {}, list[str]()
        self._out.mkdir(parents=True, exist_ok=True)
        for part, tensors in found.items():
            path = self._out / f"step-{step}.rank-{self._rank}.{part}.safetensors"
            save_file(tensors, path)
            written.append(str(path))
        return written

    def _output(self, name: str, _module: torch.nn.Module, _args: Any, output: Any) -> None:
        self._note("activations", f"{name}#{self._calls[name]}", output)
        self._calls[name] += 1

    def _note(self, part: str, name: str, value: Any) -> None:
        for path, leaf in pytree.tree_leaves_with_path(value) if part in self._parts else ():
            place = "/".join([name, *(str(_key(each)) for each in path)])
            if isinstance(leaf, Tensor):
                own = leaf.detach().to_dense() if leaf.layout != torch.strided else leaf.detach()
                own = own.to_local() if hasattr(own, "to_local") else own
                self._found[part][place] = own.to("cpu", copy=True).contiguous()
            elif is_dataclass(leaf):
                self._note(part, place, {each.name: getattr(leaf, each.name) for each in fields(leaf)})
            elif isinstance(leaf, Mapping):  # of a class that torch does not know
                self._note(part, place, {**leaf})


def _key(entry: Any) -> Any:
    return next(getattr(entry, name) for name in ("key", "idx", "name") if hasattr(entry, name))


@functools.cache
def silence_trainers(folder: Path) -> None:
    """Let loggers and checkpoints of every trainer of this process write nothing; user code finds `folder` as the loggers' folder. Call once."""
    for name in ("__init__", "fit"):
        setattr(Trainer, name, _silencing(getattr(Trainer, name), folder))
    Trainer.log_dir = property(lambda _: str(folder))  # type: ignore[assignment, method-assign]  # else the user's own, without loggers
    ModelCheckpoint._link_checkpoint = staticmethod(lambda *_: None)  # type: ignore[assignment, method-assign]


def _silencing(method: Any, folder: Path) -> Any:
    @functools.wraps(method)
    def wrapped(self: Trainer, *args: Any, **options: Any) -> Any:
        for logger in self.loggers if method.__name__ == "fit" else ():
            silence(logger, folder)
        result = method(self, *args, **options)
        for logger in self.loggers:  # a script may log before it trains
            silence(logger, folder)
        for cls in (type(self.strategy), type(self.strategy.checkpoint_io)):
            _leave_files(cls, "save_checkpoint")
            _leave_files(cls, "remove_checkpoint")
        return result

    return wrapped


@functools.cache
def _leave_files(cls: type, name: str) -> None:
    """Let a method of a strategy, or of its checkpoint I/O, touch no file but those that a `Tuner` reads again and removes."""
    method = getattr(cls, name)

    @functools.wraps(method)
    def wrapped(*args: Any, **options: Any) -> Any:
        path = next(each for each in (*args, *options.values()) if isinstance(each, str | os.PathLike))
        if Path(path).name.startswith((".lr_find_", ".scale_batch_size_")):
            return method(*args, **options)
        return _say_once("Lightning's checkpoints are neither written nor removed where steps are run again")

    setattr(cls, name, wrapped)
