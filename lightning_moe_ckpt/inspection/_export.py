"""Export a generation for other programs: as safetensors, a Lightning checkpoint, or a folder of torch DCP or Hugging Face.

An export does not have all that an exact restart needs: random state and data position stay with the run. Everything in a
Lightning checkpoint passes `torch.load(weights_only=True)`; values that do not are left out and named.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lightning_moe_ckpt.errors import ConfigurationError, Corrupt, NoUsableGeneration
from lightning_moe_ckpt.inspection._answers import kind_of, select
from lightning_moe_ckpt.inspection._assemble import Assembler, LazyTensor
from lightning_moe_ckpt.inspection._dcp import META, write_dcp
from lightning_moe_ckpt.inspection._transformers import (
    CONFIG,
    Adapter,
    choose_model,
    model_names,
    save_safetensors,
    write_adapter,
    write_folder,
    write_whole,
)
from lightning_moe_ckpt.journal import decode_journal
from lightning_moe_ckpt.operators import by_parameter
from lightning_moe_ckpt.snapshot import IMPORTED, read_extra
from lightning_moe_ckpt.storage import Backend, Commit, ModuleEntry, RankMarker, RunView

ExportFormat = Literal["safetensors", "ckpt", "dcp", "huggingface"]
MAX_SHARD_NBYTES = 5 * 10**9

VERSIONS = "lightning_moe_ckpt_versions"
"""Key of an export's operators with an older step, by name."""


@dataclass(kw_only=True, slots=True)
class Export:
    """Result of `export`."""

    step: int
    incarnation: int
    format: ExportFormat
    files: dict[str, int] = field(default_factory=dict)
    """Bytes by path."""
    num_tensors: int = 0
    notes: list[str] = field(default_factory=list)
    """Remarks on the result for the user."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    """Options of `export`."""

    format: ExportFormat | None = None
    """Format; `None` decides by the ending of `out`, a folder if it has none."""
    optimizer: bool = False
    """Beside a `.safetensors` file, also write the optimizer's state to `*.optimizer.safetensors`."""
    weights_only: bool = False
    """Leave optimizer, schedulers and callbacks, for training only, out of a `.ckpt` or a folder of torch DCP."""
    module: str | None = None
    """Name of the Hugging Face model in the trained module, if that holds several."""
    leave_out: Sequence[str] = ()
    """Patterns of names to leave out."""
    ties: Mapping[str, str] = field(default_factory=dict)
    """Further names of stored tensors, beyond those that the module's `state_dict` has."""
    merge: bool = False
    """Whether a folder gets the base's weights with the PEFT adapter added, in place of the adapter alone."""
    max_shard_nbytes: int = MAX_SHARD_NBYTES
    """Bytes per file of weights in a folder."""
    force: bool = False
    """Replace files that exist."""


def export(backend: Backend, out: Path, options: ExportOptions | None = None, *, step: int | None = None) -> Export:
    """Write a generation to `out`, with the last stored copies of the operators that it references.

    If the newest copy of an operator is bad, its previous stored copy is used, if there is one, and a warning names it.

    Args:
        backend: result of `open_backend`.
        out: `*.safetensors`, `*.ckpt`, or a folder.
        options: contents and format; `None` for the defaults of `ExportOptions`.
        step: step of the generation; `None` for the newest that a restart would try.

    Raises:
        ConfigurationError: `out` cannot be written, or shards of ranks do not add up to whole tensors.
        NoUsableGeneration: there is no such generation, or it is sparse.
        Corrupt: stored bytes are damaged.
    """
    options = options or ExportOptions()
    chosen = _format(out, options)
    _check_target(out, chosen, options)
    view = RunView.open(backend)
    commit = _dense_commit(view, step)
    markers = [view.read_marker(commit, rank) for rank in range(commit.world_size)]
    tensors = Assembler(backend, markers)
    while True:
        try:
            return _Job(out, options, commit, tensors, _module_of(markers)).write(chosen)
        except Corrupt as error:  # noqa: PERF203  # each try is a whole export
            if not tensors.take_older(error):
                raise


@dataclass(frozen=True, slots=True)
class _Job:
    """An export. Each method writes one format and returns the files."""

    out: Path
    options: ExportOptions
    commit: Commit
    tensors: Assembler
    module: ModuleEntry

    @property
    def names(self) -> dict[str, str]:
        """Return the names of the module's `state_dict`, each with its stored name."""
        options = self.options
        return state_dict_names(self.tensors.stored, self.module, leave_out=options.leave_out, ties=options.ties)

    def write(self, chosen: ExportFormat) -> Export:
        """Write the chosen format. Raises `Corrupt` if bytes needed for it are damaged."""
        done = Export(step=self.commit.generation.step, incarnation=self.commit.generation.incarnation, format=chosen)
        of = {"safetensors": self.safetensors, "ckpt": self.checkpoint, "dcp": self.dcp, "huggingface": self.folder}
        done.files = {str(path): path.stat().st_size for path in of[chosen](done)}
        done.notes += [*_age_note(self.commit, self.tensors), *self.tensors.notes]
        return done

    def safetensors(self, done: Export) -> list[Path]:
        tensors = {name: self.tensors.read(stored) for name, stored in self.names.items()}
        states = self.tensors.optimizer() if self.options.optimizer else {}
        state = {name: each.read() for name, each in states.items()}  # if that fails, nothing is written
        self._count(done, len(tensors))
        save_safetensors(self.out, tensors, _metadata(self.commit, self.tensors))
        if not self.options.optimizer:
            return [self.out]
        beside = _optimizer_file(self.out)
        save_safetensors(beside, state, _metadata(self.commit, self.tensors))
        return [self.out, beside]

    def checkpoint(self, done: Export) -> list[Path]:
        content = self._content(done, lambda each: each.read())
        write_whole(self.out, lambda path: torch.save(content, path))
        return [self.out]

    def dcp(self, done: Export) -> list[Path]:
        read: dict[int, Callable[[], Tensor]] = {}

        def promised(each: LazyTensor) -> Tensor:
            tensor = torch.empty(each.shape, dtype=each.dtype, device="meta")
            read[id(tensor)] = each.read
            return tensor

        content = self._content(done, promised, by_name=True)
        if self.options.weights_only:
            done.notes.append("without the optimizer's state: Lightning can validate and test with it, not train")
        return write_dcp(self.out, content, read)

    def _content(self, done: Export, take: Callable[[LazyTensor], Tensor], *, by_name: bool = False) -> dict[str, Any]:
        """Return a Lightning checkpoint's content with the tensors that `take` makes of stored ones."""
        names, whole = self.names, dict[str, Tensor]()
        for stored in names.values():
            if stored not in whole:
                whole[stored] = take(self.tensors.lazy(stored))
        checkpoint = LightningCheckpoint(self.commit, self.tensors, self.module, take, by_name)
        tensors = {name: whole[stored] for name, stored in names.items()}
        content = checkpoint.content(tensors, weights_only=self.options.weights_only)
        self._count(done, len(tensors))
        done.notes += checkpoint.notes
        return content

    def folder(self, done: Export) -> list[Path]:
        model = choose_model(self.module, self.options.module)
        names: Mapping[str, str] = model_names(self.names, model)
        adapter = Adapter.of(self.module, model, self.tensors)
        of = f"{model.class_name}, `{model.prefix or 'the module itself'}`"
        if adapter is None and self.options.merge:
            raise ConfigurationError(f"`--merge`: {of} has no adapter of PEFT. Leave it out.")
        if adapter is not None:
            names = adapter.base_names(names) if self.options.merge else adapter.keys
        done.num_tensors = len(names)
        done.notes.append(f"{of}; no tokenizer is stored")
        if adapter is not None:
            how = "added to its base" if self.options.merge else "without its base, which --merge adds it to"
            done.notes.append(f"adapter {adapter.name!r}, {how}")
        try:
            self.out.mkdir(exist_ok=True)
            if adapter is not None and not self.options.merge:
                return write_adapter(self.out, adapter, self.tensors)
            return write_folder(
                self.out, model, names, adapter or self.tensors, max_shard_nbytes=self.options.max_shard_nbytes
            )
        except OSError as error:
            raise ConfigurationError(f"{self.out} cannot be written: {error.strerror or error}.") from error

    def _count(self, done: Export, num_tensors: int) -> None:
        done.num_tensors = num_tensors
        if self.module.foreign:
            named = ", ".join(self.module.foreign[:4])
            done.notes.append(
                f"the module's state_dict has {named}, neither parameter nor buffer, which is not stored: load with "
                "strict=False"
            )


def state_dict_names(
    stored: Iterable[str], module: ModuleEntry, *, leave_out: Sequence[str], ties: Mapping[str, str]
) -> dict[str, str]:
    """Return the names in the file, each with its stored name: without those that match `leave_out`, with those in `ties`.

    Raises `ConfigurationError` if a name in `ties` is taken, or its stored name does not exist.
    """
    known, unsaved = set(stored), set(module.unsaved)
    names = {name: name for name in stored if name not in unsaved} | dict(module.aliases)
    for new, name in ties.items():
        if name not in known or new in names:
            raise ConfigurationError(f"`--tie {new}={name}`: {name} must be stored, and {new} must not.")
        names[new] = name
    return {name: names[name] for name in names if not any(fnmatchcase(name, each) for each in leave_out)}


def _format(out: Path, options: ExportOptions) -> ExportFormat:
    """Return the format: the given one, or by the ending of `out`. Raises `ConfigurationError` for an unknown ending."""
    if options.format is not None:
        return options.format
    endings: dict[str, ExportFormat] = {".safetensors": "safetensors", ".ckpt": "ckpt", "": "huggingface"}
    if out.is_dir():
        return "dcp" if (out / META).is_file() else "huggingface"
    if out.suffix not in endings:
        raise ConfigurationError(
            f"`OUT={out}` must end in .safetensors or .ckpt, or be a folder for a Hugging Face model. Give it such a "
            f"name, or --format, one of {', '.join(get_args(ExportFormat))}."
        )
    return endings[out.suffix]


def _check_target(out: Path, chosen: ExportFormat, options: ExportOptions) -> None:
    """Raise `ConfigurationError`, before anything is read, if `out` cannot be written or does not suit the options."""
    if options.optimizer and chosen != "safetensors":
        raise ConfigurationError(
            "`--optimizer` writes a file beside a .safetensors file. A .ckpt holds the optimizer's state in any case, a "
            "Hugging Face folder never does: leave it out."
        )
    if options.merge and chosen != "huggingface":
        raise ConfigurationError("`--merge` writes a Hugging Face model: give a folder as OUT, or leave it out.")
    if not out.parent.is_dir():
        raise ConfigurationError(f"{out.parent} is not a folder. Make it, or give another name.")
    if chosen in {"dcp", "huggingface"}:
        if out.exists() and not out.is_dir():
            raise ConfigurationError(f"{out} is a file, and --format {chosen} needs a folder. Give another name.")
        if out.is_dir() and any(out.iterdir()) and not options.force:
            replaced = META if chosen == "dcp" else CONFIG
            raise ConfigurationError(
                f"{out} exists and is not empty. Give another name, or --force to replace {replaced} and weights in it."
            )
        return
    targets = [out, _optimizer_file(out)] if options.optimizer and chosen == "safetensors" else [out]
    for path in targets:
        if path.is_dir() or (path.exists() and not options.force):
            raise ConfigurationError(f"{path} exists. Give another name, or --force to replace it.")


def _optimizer_file(out: Path) -> Path:
    return out.with_suffix(".optimizer.safetensors")


def _module_of(markers: Sequence[RankMarker]) -> ModuleEntry:
    """Return the module's description from rank 0's marker. Raises `ConfigurationError` if the marker has none."""
    if (module := markers[0].module) is not None:
        return module.read()
    raise ConfigurationError(
        f"{markers[0].generation} does not say what was trained, so names cannot be told. Resume the run with this "
        "release and export what it writes."
    )


def _dense_commit(view: RunView, step: int | None) -> Commit:
    """Return the commit of the chosen generation, or raise if it is sparse."""
    commit = select(view, step).commit
    assert commit is not None, "`select` chooses among those with a manifest"
    if kind_of(commit) != "sparse":
        return commit
    wanted, usable = commit.generation.step, [each for each in view.generations() if each.usable]
    dense = [each.generation.step for each in usable if each.commit is not None and kind_of(each.commit) != "sparse"]
    nearest = min(dense, key=lambda other: abs(other - wanted), default=None)
    found = "There is no dense one."
    if nearest is not None:
        found = f"The nearest dense one is step {nearest}: give --step {nearest}."
    remedy = (
        f"{found} `moe-ckpt densify {view.url} -- SCRIPT ARGS` replays the newest in the run's own script, and stores it dense. A run "
        "that ends leaves a dense one last, and `SparseCheckpoint(dense_every_n_steps=...)` leaves one now and then."
    )
    raise NoUsableGeneration(
        f"{commit.generation} is sparse: its operators are of {len(commit.steps)} different steps "
        f"({commit.steps[0]} to {commit.steps[-1]}), and only replay in training makes them one state. {remedy}"
    )


def _metadata(commit: Commit, tensors: Assembler) -> dict[str, str]:
    place = {"step": str(commit.generation.step), "incarnation": str(commit.generation.incarnation)}
    told = {"format": "pt", "run_id": commit.run_id, **place}
    return {**told, VERSIONS: json.dumps(tensors.older, sort_keys=True)} if tensors.older else told


def _age_note(commit: Commit, tensors: Assembler) -> list[str]:
    """Return a note for the user on the older operators in a generation."""
    numbers = Counter(tensors.older.values())
    told = ", ".join(f"{number} of step {step}" for step, number in sorted(numbers.items(), reverse=True))
    return [f"operators older than step {commit.generation.step}: {told}"] if told else []


@dataclass(frozen=True, slots=True)
class LightningCheckpoint:
    """Content for a Lightning checkpoint from a generation's stored tensors, each as `take` makes it of the stored one.

    The optimizer's state has parameters by number, as in a `.ckpt`, or `by_name`, as torch DCP has them.
    """

    commit: Commit
    stored: Assembler
    module: ModuleEntry
    take: Callable[[LazyTensor], Tensor]
    by_name: bool
    notes: list[str] = field(default_factory=list)
    """Remarks on the result for the user."""

    def content(self, tensors: Mapping[str, Tensor], *, weights_only: bool) -> dict[str, Any]:
        """Return the content of Lightning's own checkpoint with this `state_dict`.

        With `weights_only`, without optimizer, schedulers and callbacks, which only training needs.
        """
        extra, start = self._extra(), decode_journal(self.stored.journal()).get("start", {})
        if IMPORTED in start:
            return self._imported(start[IMPORTED], tensors, weights_only=weights_only)
        content = {
            **self._plain("on_save_checkpoint", start.get("module") or {}),
            **self._hyper_parameters(extra),
            **self._datamodule(extra, start),
            **({VERSIONS: self.stored.older} if self.stored.older else {}),
            "epoch": start["loops"]["epoch_progress"]["current"]["processed"] if start else 0,
            "global_step": self.commit.generation.step,
            "pytorch-lightning_version": importlib.metadata.version("lightning"),
            "state_dict": OrderedDict(tensors),
        }
        if start:
            progress = {key: value for key, value in start["loops"].items() if key != "settings"}
            content["loops"] = {"fit_loop": progress, **extra.get("loops", {})}
            if not weights_only:
                content |= self._training(extra, start)
        elif not weights_only:
            self.notes.append("without the journal there is no training state: as with --weights-only")
        return content

    # -- what training needs

    def _imported(
        self, entries: Mapping[str, Any], tensors: Mapping[str, Tensor], *, weights_only: bool
    ) -> dict[str, Any]:
        """Return the content that was imported; without a loop's progress it is for weights only."""
        first = {"epoch": 0, "pytorch-lightning_version": importlib.metadata.version("lightning")}
        last = {"global_step": self.commit.generation.step, "state_dict": OrderedDict(tensors)}
        whole = {**first, **entries, **last}
        for optimizer in entries.get("optimizer_states", ()):
            settings = [{key: group[key] for key in group if key != "params"} for group in optimizer["param_groups"]]
            whole["optimizer_states"] = [self._optimizer({"param_groups": settings, "trained": {"added": []}})]
        training = {"optimizer_states", "lr_schedulers", "callbacks"} if weights_only else set[str]()
        return {key: each for key, each in whole.items() if key not in training}

    def _training(self, extra: Mapping[str, Any], start: Mapping[str, Any]) -> dict[str, Any]:
        precision = {extra["precision"]: start["precision"]} if extra.get("precision") and start["precision"] else {}
        return {
            **precision,
            "callbacks": self._plain("callbacks", start["callbacks"]),
            "optimizer_states": [self._optimizer(start)],
            "lr_schedulers": [self._plain("a scheduler", scheduler) for scheduler in start["schedulers"]],
        }

    def _optimizer(self, start: Mapping[str, Any]) -> dict[str, Any]:
        """Return the optimizer's `state_dict`: parameters in its groups' order. Raises `Corrupt` if these do not fit."""
        groups: list[dict[str, Any]] = start["param_groups"]
        ordered = [*self.module.param_groups, *start["trained"]["added"]]
        flat = [name for names in ordered for name in names]
        numbers: dict[str, Any] = dict(zip(flat, flat if self.by_name else itertools.count(), strict=False))
        state: dict[Any, dict[str, Any]] = {}
        for name, tensor in self.stored.optimizer().items():
            parameter, _, key = name.rpartition("/")
            if parameter not in numbers:
                raise Corrupt(
                    f"`{parameter}` has optimizer state and is in no group of parameters. Verify the generation."
                )
            state.setdefault(numbers[parameter], {})[key] = self.take(tensor)
        self._add_rest(state, numbers, start.get("optimizer") or {})
        if len(groups) != len(ordered):
            raise Corrupt(
                f"{len(groups)} groups of parameters have settings, {len(ordered)} are described. Verify the generation."
            )
        described = [
            {**self._plain("a parameter group", fields), "params": [numbers[name] for name in names]}
            for fields, names in zip(groups, ordered, strict=True)
        ]
        in_order = {each: state[each] for each in numbers.values() if each in state}
        return {"state": in_order, "param_groups": described}

    def _add_rest(self, state: dict[Any, dict[str, Any]], numbers: Mapping[str, Any], rest: Mapping[str, Any]) -> None:
        """Add state that no records have, from rank 0's journal, in the optimizer's order of keys."""
        for name, (values, *_) in by_parameter(rest.get("state") or []).items():
            found = state.get(numbers[name], {})
            whole = {key: found.get(key) if value is ... else value for key, value in values.items()}
            state[numbers[name]] = self._plain(f"the optimizer's state of `{name}`", whole)
        if rest and self.commit.policy.get("expert_parallel") != 1:
            self.notes.append(
                "of the optimizer's state beyond records, rank 0's is there; other ranks' experts have theirs in the run"
            )
        if lost := [*(rest.get("inner") or ()), *(rest.get("attributes") or ())]:
            self.notes.append(f"{', '.join(lost)} of the optimizer left out: its `state_dict` has no place for it")

    # -- what the module and the data module add

    def _hyper_parameters(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for owner in ("", "datamodule_"):
            if (name := f"{owner}hyper_parameters") in extra:
                found[name] = self._plain(name, extra[name])
            if (name := f"{owner}hparams_name") in extra:
                found[name] = extra[name]
        return found

    def _datamodule(self, extra: Mapping[str, Any], start: Mapping[str, Any]) -> dict[str, Any]:
        state = start.get("datamodule")
        return {extra["datamodule"]: self._plain("the data module", state)} if state and "datamodule" in extra else {}

    def _extra(self) -> dict[str, Any]:
        extra = read_extra(self.module)
        if extra["left_out"]:
            self.notes.append(f"left out, because it was no plain value: {', '.join(extra['left_out'])}")
        return extra

    def _plain(self, owner: str, values: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return the values that `torch.load(weights_only=True)` accepts."""
        if unsafe := [key for key, value in values.items() if not _is_plain(value)]:
            named = ", ".join(map(str, unsafe))
            self.notes.append(f"{named} of {owner} left out: torch.load(weights_only=True) refuses its type")
        return {key: value for key, value in values.items() if key not in unsafe}


def _is_plain(value: object) -> bool:
    """Return whether `torch.load(weights_only=True)` accepts a value, by exact type: a subclass could be anything."""
    if type(value) in {list, tuple, set}:
        return all(_is_plain(item) for item in value)  # type: ignore[attr-defined]  # checked by type
    if type(value) in {dict, OrderedDict}:
        return all(_is_plain(key) and _is_plain(item) for key, item in value.items())  # type: ignore[attr-defined]
    return type(value) in {type(None), bool, int, float, str, bytes, Tensor, torch.dtype, torch.Size}
