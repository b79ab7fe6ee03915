"""A dense generation as files that others read: safetensors, or a Lightning checkpoint with weights only.

Neither has what an exact restart needs (random state, loops, data position): that stays with the run. What the
module's `on_save_checkpoint` added is in a Lightning checkpoint too, since its `on_load_checkpoint` will ask for it.
"""

from __future__ import annotations

import importlib.metadata
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch
from torch import Tensor

from lightning_moe_ckpt.errors import CodecError, ConfigurationError, NoUsableGeneration
from lightning_moe_ckpt.inspection._assemble import Assembler, tie
from lightning_moe_ckpt.inspection._select import kind_of, select
from lightning_moe_ckpt.session._journal import decode_journal
from lightning_moe_ckpt.storage import Commit, RangedBackend, RunView

ExportFormat = Literal["safetensors", "ckpt"]


@dataclass(kw_only=True, slots=True)
class Export:
    """What `export` wrote."""

    step: int
    epoch: int
    files: dict[str, int] = field(default_factory=dict)
    """Bytes by path."""
    num_tensors: int = 0
    notes: list[str] = field(default_factory=list)
    """What a user should know about the result."""


def export(
    backend: RangedBackend,
    out: Path,
    *,
    step: int | None = None,
    optimizer: bool = False,
    leave_out: Sequence[str] = (),
    ties: Mapping[str, str] | None = None,
    force: bool = False,
) -> Export:
    """Write parameters and buffers of a dense generation to `out`.

    Args:
        backend: from `open_ranged`.
        out: `*.safetensors` or `*.ckpt`.
        step: which generation; by default the newest that a restart would try.
        optimizer: also write optimizer state to `*.optimizer.safetensors` beside `out`.
        leave_out: patterns of names to leave out, such as buffers that are not persistent.
        ties: further names of stored tensors: tied parameters are stored under their first name only.
        force: replace files that exist.

    Raises:
        ConfigurationError: `out` cannot be written, or parts of ranks do not add up to whole tensors.
        NoUsableGeneration: there is no such generation, or it is sparse.
        Corrupt: bytes are not what was written.
    """
    targets = _targets(out, optimizer=optimizer, force=force)
    view = RunView.open(backend)
    commit = _dense_commit(view, step)
    parts = Assembler(backend, [view.read_marker(commit, rank) for rank in range(commit.world_size)])
    tensors = {**parts.parameters(), **parts.buffers()}
    tie(tensors, dict(ties or {}))
    tensors = {name: tensors[name] for name in tensors if not any(fnmatchcase(name, each) for each in leave_out)}
    done = Export(step=commit.generation.step, epoch=commit.generation.epoch, num_tensors=len(tensors))
    if out.suffix == ".ckpt":
        content = _lightning_checkpoint(tensors, commit, parts, done.notes)
        _write(out, lambda path: torch.save(content, path))
    else:
        _write(out, lambda path: safetensors.torch.save_file(_untied(tensors), path, _metadata(commit)))
    if optimizer:
        state = parts.optimizer()
        _write(targets[1], lambda path: safetensors.torch.save_file(state, path, _metadata(commit)))
    done.files = {str(path): path.stat().st_size for path in targets}
    done.notes += parts.notes
    return done


def _targets(out: Path, *, optimizer: bool, force: bool) -> list[Path]:
    """Files to write, checked before anything is read."""
    if out.suffix not in {".safetensors", ".ckpt"}:
        raise ConfigurationError(f"`OUT={out}` must end in .safetensors or .ckpt, which decides what is written.")
    targets = [out, out.with_suffix(".optimizer.safetensors")] if optimizer else [out]
    for path in targets:
        if path.exists() and not force:
            raise ConfigurationError(f"{path} exists. Give another name, or --force to replace it.")
        if not path.parent.is_dir():
            raise ConfigurationError(f"{path.parent} is not a folder. Make it, or give another name.")
    return targets


def _dense_commit(view: RunView, step: int | None) -> Commit:
    """The manifest of the generation that is meant, if one segment of each rank holds all of it."""
    commit = select(view, step).commit
    assert commit is not None, "`select` chooses among those with a manifest"
    if kind_of(commit) == "dense":
        return commit
    wanted = commit.generation.step
    dense = [c.generation.step for each in view.generations() if each.usable and (c := each.commit) and _is_dense(c)]
    nearest = min(dense, key=lambda other: abs(other - wanted), default=None)
    remedy = (
        "There is no dense one. Resume the run and let it end: what a run that ends leaves last is dense."
        if nearest is None
        else f"The nearest dense one is step {nearest}: give --step {nearest}, or resume the run and let it end, "
        "which leaves a dense one."
    )
    raise NoUsableGeneration(
        f"{commit.generation} is sparse: its operators are of {len(commit.steps)} different steps "
        f"({commit.steps[0]} to {commit.steps[-1]}), and only replay in training makes them one state. {remedy}"
    )


def _is_dense(commit: Commit) -> bool:
    return kind_of(commit) == "dense"


def _metadata(commit: Commit) -> dict[str, str]:
    generation = commit.generation
    return {"format": "pt", "run_id": commit.run_id, "step": str(generation.step), "epoch": str(generation.epoch)}


def _untied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies of tensors that share memory, which safetensors refuses."""
    seen: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        found[name] = tensor.clone() if tensor.numel() and tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    return found


def _lightning_checkpoint(
    tensors: dict[str, Tensor], commit: Commit, parts: Assembler, notes: list[str]
) -> dict[str, Any]:
    """What `LightningModule.load_from_checkpoint` needs."""
    outcome, extra = _journaled(parts, notes)
    return {
        **extra,
        "epoch": outcome.get("epoch", 0),
        "global_step": commit.generation.step,
        "pytorch-lightning_version": importlib.metadata.version("lightning"),
        "state_dict": tensors,
    }


def _journaled(parts: Assembler, notes: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """From the journal: how the last step came out, and what the module's `on_save_checkpoint` added."""
    try:
        journal = decode_journal(parts.journal())
    except CodecError as error:  # it holds an enum of the user's, which only the user's program knows
        notes.append(f"what on_save_checkpoint added is left out: {error}")
        return {}, {}
    extra = journal["start"].get("module") or {}
    unsafe = sorted(key for key in extra if not _is_plain(extra[key]))
    if unsafe:
        notes.append(f"{', '.join(unsafe)} of on_save_checkpoint left out: torch.load(weights_only=True) refuses that")
    return journal["outcome"], {key: value for key, value in extra.items() if key not in unsafe}


def _is_plain(value: object) -> bool:
    """Whether `torch.load(weights_only=True)` accepts a value; by exact type, as a subclass could be anything."""
    if type(value) in {list, tuple, set}:
        return all(_is_plain(each) for each in value)  # type: ignore[attr-defined]  # checked by type
    if type(value) in {dict, OrderedDict}:
        return all(_is_plain(key) and _is_plain(each) for key, each in value.items())  # type: ignore[attr-defined]
    return type(value) in {type(None), bool, int, float, str, bytes, Tensor, torch.dtype, torch.Size}


def _write(path: Path, save: Callable[[Path], None]) -> None:
    """Write beside the place and rename, so that a file under its name is whole."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        save(temporary)
        temporary.replace(path)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror or error}.") from error
    finally:
        temporary.unlink(missing_ok=True)
