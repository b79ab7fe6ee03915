"""Import another tool's checkpoint as a run's first generation: dense, without a layout, so that any ranks resume from it.

Read are Lightning's `.ckpt`, a folder by torch DCP, and a Hugging Face folder. The model is not there, only names and shapes. A
resuming model tells parameters from buffers by name. Optimizers number parameters by group, in order: numbers become names
if shapes leave a single choice.

The generation looks as if as many ranks had written it as there are parts, each small enough for memory. Every tensor is a
parameter and an operator: only the model knows more. `imported` in the policy tells readers so.
"""

from __future__ import annotations

import base64
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch._weights_only_unpickler import UnpicklingError  # type: ignore[attr-defined]  # what `torch.load` raises

from lightning_moe_ckpt.coordination import VERSIONS, own_versions
from lightning_moe_ckpt.errors import ConfigurationError, NoUsableGeneration
from lightning_moe_ckpt.inspection._answers import Row
from lightning_moe_ckpt.inspection._assemble import LazyTensor
from lightning_moe_ckpt.inspection._dcp import INDEX, META, read_dcp
from lightning_moe_ckpt.journal import encode, encode_journal
from lightning_moe_ckpt.policies import Plan
from lightning_moe_ckpt.snapshot import (
    IMPORTED,
    JOURNAL,
    LEFT_OUT,
    PARAM,
    PRESENT,
    SEGMENT_METADATA,
    PlanRecord,
    storable,
)
from lightning_moe_ckpt.storage import (
    Backend,
    GenerationId,
    ModuleEntry,
    ModuleLine,
    RankMarker,
    RecordEntry,
    RecordRows,
    RunStore,
    RunView,
    SegmentEntry,
    SegmentLayout,
    TensorKind,
    TensorSpec,
    dtype_code,
    dtype_of,
)

_PATIENCE = timedelta(minutes=1)


def import_run(backend: Backend, src: Path, *, weights_only: bool, prefix: str, part_nbytes: int) -> Row:
    """Write another tool's checkpoint to an empty place, as a generation at its step; return the facts for the user.

    For `weights_only` and `prefix` see `read_foreign`; a part and a tensor are in memory at a time. Raises `ConfigurationError` if `src` cannot be
    read, or the place has checkpoints, `StorageError` if the medium failed; what was written is no generation then.
    """
    try:
        stored = [each for each in RunView.open(backend).generations() if each.committed]
    except NoUsableGeneration:
        stored = []
    if stored:
        newest = stored[0].generation
        raise ConfigurationError(f"{backend.url} has a run, whose newest checkpoint is of {newest}. Give another URL.")
    foreign = read_foreign(src, weights_only=weights_only, prefix=prefix)
    store = RunStore.open(backend, resume="auto")
    if store.candidates() or store.open_incarnation(None) is None:
        raise ConfigurationError(f"{backend.url}: another process has begun to write there. Give another URL.")
    plan = PlanRecord(plan=Plan.of_everything([*foreign.tensors]), config={"policy": IMPORTED})
    policy = {"name": "dense", IMPORTED: foreign.words, "fingerprint": IMPORTED, "autocast": None, "expert_parallel": 1}
    parts = _cut(foreign, part_nbytes)
    marker = RankMarker(
        run_id=store.run_id, rank=0, world_size=len(parts), generation=store.name(foreign.step), plan_hash=plan.plan_hash,
        segments=(), policy={**policy, "plan": plan.to_json(), VERSIONS: own_versions()}, unix_time=round(time.time()),
    )  # fmt: skip
    nbytes = 0
    for rank in reversed(range(len(parts))):
        fields = [field for piece in parts[rank] for field in _fields(foreign, *piece)]
        segment = _write(store, marker.generation, rank, fields if rank else [*fields, _journal(foreign)])
        nbytes += segment.nbytes
        marker = replace(marker, rank=rank, segments=(segment,))
        if rank == 0:
            marker = replace(marker, module=ModuleLine.of(_module(foreign)), lineage=store.lineage)
        store.put_marker(marker)
    store.commit(marker, timeout=_PATIENCE)
    facts = {"source": foreign.words, "step": foreign.step, "incarnation": marker.generation.incarnation}
    return {**facts, "parts": len(parts), "nbytes": nbytes, "tensors": len(foreign.tensors), "notes": foreign.notes}


def _module(foreign: Foreign) -> ModuleEntry:
    extra = {key: each for key, each in foreign.entries.items() if key.endswith(("hyper_parameters", "hparams_name"))}
    return ModuleEntry(
        class_name=IMPORTED, unsaved=(), aliases=foreign.aliases, foreign=(), optimizer="unknown", hugging_face=(),
        param_groups=tuple(tuple(group["params"]) for group in foreign.groups),
        extra=base64.b64encode(encode({**extra, LEFT_OUT: []})).decode("ascii"),
    )  # fmt: skip


def _cut(foreign: Foreign, part_nbytes: int) -> list[list[tuple[str, int, int]]]:
    """Return intervals of tensors' elements, each with their optimizer state, by part."""
    parts: list[list[tuple[str, int, int]]] = [[]]
    used = 0
    for fqn, tensor in foreign.tensors.items():
        states = [each for each in foreign.states.get(fqn, {}).values() if each.shape == tensor.shape]
        width = sum(each.dtype.itemsize for each in (tensor, *states))
        start, numel = 0, math.prod(tensor.shape)
        while start < max(1, numel):  # an empty tensor is an interval too
            if used + width > part_nbytes and parts[-1]:
                parts.append([])
                used = 0
            stop = min(numel, start + max(1, (part_nbytes - used) // width))
            parts[-1].append((fqn, start, stop))
            used += (stop - start) * width
            start = max(stop, 1)
    return parts


_Field = tuple[RecordEntry, Callable[[], Tensor]]
"""Record without a place yet, and a function that returns its elements, flat."""


def _fields(foreign: Foreign, fqn: str, first: int, last: int) -> Iterator[_Field]:
    """Yield records for an interval in a tensor, with its optimizer state."""
    tensor, states = foreign.tensors[fqn], foreign.states.get(fqn, {})
    record = partial(_record, "full", fqn, f"full/{fqn}/{first}+{last - first}/")
    yield record(PRESENT, (torch.uint8, ()), 0, 1), partial(torch.full, (1,), bool(states))
    for key, each in {PARAM: tensor, **states}.items():
        start, stop = (first, last) if each.shape == tensor.shape else (0, math.prod(each.shape))
        if stop > 1 and each.shape != tensor.shape and first:
            continue  # state of the whole is beside the first elements; scalars are beside all
        read = partial(lambda each, start, stop: each.read().reshape(-1)[start:stop], each, start, stop)
        yield record(key, (each.dtype, each.shape), start, stop), read


def _journal(foreign: Foreign) -> _Field:
    optimizers = {"optimizer_states": [{"param_groups": foreign.groups}]} if foreign.groups else {}
    journal = {"start": {IMPORTED: {**foreign.entries, **optimizers}}, "outcome": {"step": foreign.step, "losses": []}}
    payload = torch.frombuffer(bytearray(encode_journal(journal, 2**62)), dtype=torch.uint8)
    return _record(JOURNAL, "", JOURNAL, "", (torch.uint8, (len(payload),)), 0, len(payload)), payload.detach


def _record(kind: str, fqn: str, name: str, key: str, tensor: TensorKind, *interval: int) -> RecordEntry:
    start, stop = interval
    return RecordEntry(
        name=name + key, operator=fqn, kind=kind, fqn=fqn, state_key=key, dtype=dtype_code(tensor[0]),
        global_shape=tensor[1], global_start=start, numel=stop - start, offset=0, nbytes=0, digest="",
    )  # fmt: skip


def _write(store: RunStore, generation: GenerationId, rank: int, fields: list[_Field]) -> SegmentEntry:
    """Write one part's segment."""
    specs = [TensorSpec(record.name, dtype_of(record.dtype), (record.numel,)) for record, _ in fields]
    layout = SegmentLayout(specs, metadata=SEGMENT_METADATA)
    segment_U8 = torch.empty(layout.nbytes, dtype=torch.uint8)
    layout.write_header(segment_U8)
    records: list[RecordEntry] = []
    for (record, read), (offset, nbytes) in zip(fields, layout.places, strict=True):
        layout.view(segment_U8, record.name).copy_(read())
        records.append(replace(record, offset=offset, nbytes=nbytes))
    view = memoryview(segment_U8.numpy())  # type: ignore[arg-type]  # arrays are buffers
    table, digest = RecordRows(records).digested_with_file(view)
    key = store.put_segment(generation, rank, generation.step, view)
    return SegmentEntry(step=generation.step, key=key, nbytes=layout.nbytes, digest=digest, records=table)


# -- reading other tools' checkpoints


_KNOWN_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
"""Last parts of the names of floating buffers in `torch.nn`, in shape like the parameters beside them."""
_WITHOUT = "Give --weights-only to go without the optimizer's state"

Shape = tuple[int, ...]


@dataclass(kw_only=True, slots=True)
class Foreign:
    """Checkpoint of another tool. Tensors are read when they are needed."""

    words: str
    """The source, for messages."""
    tensors: dict[str, LazyTensor]
    """Parameters and buffers, in the order of the `state_dict`."""
    step: int = 0
    aliases: dict[str, str] = field(default_factory=dict)
    """Further names (tied weights), each with the name in `tensors`."""
    states: dict[str, dict[str, LazyTensor]] = field(default_factory=dict)
    """Optimizer state by parameter and key."""
    groups: list[dict[str, Any]] = field(default_factory=list)
    """The optimizer's groups, with names as `params`; none without its state."""
    entries: dict[str, Any] = field(default_factory=dict)
    """Other entries of a Lightning checkpoint that the journal can hold."""
    notes: list[str] = field(default_factory=list)
    """Remarks for the user."""


def read_foreign(src: Path, *, weights_only: bool, prefix: str) -> Foreign:
    """Read a checkpoint; no tensors yet. Raises `ConfigurationError` if `src` cannot be read or understood; or the optimizer's numbers do
    not tell its parameters.

    Args:
        src: a `.ckpt`, or a folder of torch DCP or Hugging Face.
        weights_only: whether to leave the optimizer's state and all else that only training needs.
        prefix: begin of all names in the module that the names in `src` lack, such as `model.`.
    """
    content: dict[str, Any] = {}
    if not src.exists():
        raise ConfigurationError(f"{src} does not exist. Give a `.ckpt`, or a folder of torch DCP or Hugging Face.")
    if (src / INDEX).is_file():
        words = f"folder {src.name} of torch DCP"
        content = _load(src / META) if (src / META).is_file() else {}
        state, optimizers, notes = _roles(src, read_dcp(src))
    elif src.is_dir() or src.suffix == ".safetensors":
        words = f"{src.name} of Hugging Face"
        state, optimizers, notes = _safetensors(src), [], ["weights only: there is nothing else in it"]
    else:
        words, content = f"{src.name} of Lightning", _load(src)
        state, optimizers, notes = content.get("state_dict", content), content.get("optimizer_states") or [], []
        if not state or not all(isinstance(each, Tensor) for each in state.values()):
            named = ", ".join(map(repr, list(content)[:6]))
            raise ConfigurationError(
                f"{src} has no `state_dict` of tensors, but {named}. Give a checkpoint of Lightning."
            )
        content = content if "state_dict" in content else {}
    found = Foreign(words=words, tensors={}, notes=notes)
    first: dict[str, str] = {}
    for short, each in state.items():
        name, place = prefix + short, short
        if isinstance(each, Tensor) and each.numel():
            place = str((each.data_ptr(), each.shape, each.stride()))
        if (known := first.setdefault(place, name)) != name:
            found.aliases[name] = known
        else:
            found.tensors[name] = _lazy(each)
    if not weights_only:
        rest = {key: each for key, each in content.items() if key not in {"state_dict", "optimizer_states"}}
        found.entries, left_out = storable(rest)
        found.step = int(content["global_step"]) if "loops" in found.entries else 0
        found.notes += [f"left out, because it is no plain value: {', '.join(left_out)}"] if left_out else []
        _add_optimizer(found, optimizers, prefix)
    return found


def _load(path: Path) -> dict[str, Any]:
    """Read a file of `torch.save`, without copying its tensors. Raises `ConfigurationError`."""
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (OSError, RuntimeError, ValueError, UnpicklingError) as error:
        reason = " ".join(str(error).split())
        raise ConfigurationError(
            f"{path}: torch.load(weights_only=True) does not read it: {reason:.300} Write the file anew without what it names, "
            "such as hyper-parameters or state of callbacks that are no plain values."
        ) from error
    if not isinstance(content, dict):
        raise ConfigurationError(
            f"{path} holds a {type(content).__name__}, no checkpoint of Lightning. Give another file."
        )
    return content


def _lazy(tensor: Any) -> LazyTensor:
    if isinstance(tensor, LazyTensor):
        return tensor
    return LazyTensor(tensor.dtype, tuple(tensor.shape), tensor.detach)


def _roles(path: Path, nested: dict[str, Any]) -> tuple[dict[str, Any], list[Any], list[str]]:
    """Return the model's tensors and the optimizers of a DCP folder, and remarks. Raises `ConfigurationError`."""
    only = next(iter(nested.values())) if len(nested) == 1 else None
    if isinstance(only, dict) and all(isinstance(each, dict) for each in only.values()):
        nested = only  # of one object for model and optimizer
    optimizers = {key: each for key, each in nested.items() if isinstance(each, dict) and "param_groups" in each}
    flat = {key: each for key, each in nested.items() if isinstance(each, LazyTensor)}
    model = next((nested[key] for key in ("state_dict", "model") if key in nested), flat)
    if not model or not all(isinstance(each, LazyTensor) for each in model.values()):
        raise ConfigurationError(
            f"{path} has {', '.join(map(repr, nested))}, and which of them is the model is not known. Save it as 'model' or "
            "'state_dict'."
        )
    rest = [key for key, each in nested.items() if each is not model and key not in {*optimizers, *model}]
    return model, [*optimizers.values()], [f"left out: {', '.join(rest)}"] if rest else []


def _safetensors(src: Path) -> dict[str, LazyTensor]:
    """Return the tensors of a folder of Hugging Face, or of one file. Raises `ConfigurationError`."""
    files = [src] if src.is_file() else sorted(src.glob("model*.safetensors"))
    if not files:
        raise ConfigurationError(
            f"{src} is no folder of torch DCP, which has {INDEX}, nor of Hugging Face, which has model*.safetensors. Give a "
            "`.ckpt` or one of these."
        )
    tensors: dict[str, LazyTensor] = {}
    try:
        for path in files:
            file: Any = safe_open(path, "pt")  # open as long as its tensors may be read
            for name in file.keys():  # noqa: SIM118  # it is no mapping
                part = file.get_slice(name)
                kind = dtype_of(part.get_dtype()), tuple(part.get_shape())
                tensors[name] = LazyTensor(*kind, partial(file.get_tensor, name))
    except (OSError, SafetensorError) as error:
        raise ConfigurationError(f"{src} cannot be read: {error}. Give a folder that is whole.") from error
    return tensors


# -- the optimizer


def _add_optimizer(found: Foreign, optimizers: Sequence[Any], prefix: str) -> None:
    """Add the state of an optimizer, by name. Raises `ConfigurationError` if it cannot be told or stored."""
    if len(optimizers) > 1:
        raise ConfigurationError(f"{found.words} has {len(optimizers)} optimizers, and runs here have one. {_WITHOUT}.")
    for groups, states in ((each["param_groups"], each["state"]) for each in optimizers):
        names = _names(found, groups, states, prefix)
        found.groups = [{**group, "params": [names[each] for each in group["params"]]} for group in groups]
        found.states = {names[each]: dict(_tensors(names[each], state)) for each, state in states.items() if state}
    if not found.states:
        found.notes.append("without state of an optimizer")


def _tensors(name: str, state: Mapping[str, Any]) -> Iterator[tuple[str, LazyTensor]]:
    """Yield a parameter's optimizer state. Raises `ConfigurationError` if a value is no tensor."""
    for key, each in state.items():
        if key == "step" and isinstance(each, int | float):  # as torch once had it
            yield key, _lazy(torch.tensor(float(each)))
        elif isinstance(each, Tensor | LazyTensor):
            yield key, _lazy(each)
        elif each is not None:
            raise ConfigurationError(f"`{name}`: {key} of its optimizer state is a {type(each).__name__}. {_WITHOUT}.")


def _names(
    found: Foreign, groups: Sequence[Mapping[str, Any]], states: Mapping[Any, Any], prefix: str
) -> dict[Any, str]:
    """Return the names of the parameters in an optimizer's groups, by its own name or number. Raises `ConfigurationError` if several
    assignments are possible, or none is.
    """
    numbers = [each for group in groups for each in group["params"]]
    said = [prefix + str(each) for group in groups for each in group.get("param_names") or group["params"]]
    if len(said) == len(numbers) and set(said) <= found.tensors.keys():
        return dict(zip(numbers, said, strict=True))
    floating = [(name, each.shape) for name, each in found.tensors.items() if each.dtype.is_floating_point]
    known = [each for each in floating if each[0].rpartition(".")[2] not in _KNOWN_BUFFERS]
    shapes = [[_shapes(states.get(each, {})) for each in group["params"]] for group in groups]
    sets = [set(chain.from_iterable(of)) for of in shapes]
    names: dict[Any, str] = {}
    reason = ""
    if len(groups) > 1 and sum(map(len, sets)) != len(set(chain.from_iterable(sets))):
        reason = "are in several groups that have parameters of one shape"
    for group, of, wanted in zip(groups, sets, shapes, strict=True):
        allowed = known if len(groups) == 1 else [each for each in known if each[1] in of]
        first, last = _embedding(wanted, allowed), _embedding(wanted[::-1], allowed[::-1])
        if len(first) < len(wanted) or first != last[::-1]:
            reason = reason or f"fit {'several orders' if len(first) == len(wanted) else 'no order'} of parameters"
        names |= dict(zip(group["params"], first, strict=False))
    if reason:
        raise ConfigurationError(
            f"{found.words}: names of the optimizer's {len(numbers)} parameters are not known: by their shapes they {reason}. "
            f"{_WITHOUT}, or a folder of torch DCP, which has names."
        )
    return names


def _shapes(state: Mapping[str, Any]) -> set[Shape]:
    """Return the shapes of a parameter's state that may be its own; none if there is no such state."""
    return {tuple(each.shape) for each in state.values() if isinstance(each, Tensor | LazyTensor) and len(each.shape)}


def _embedding(wanted: Sequence[set[Shape]], known: Iterable[tuple[str, Shape]]) -> list[str]:
    """Return the first names, in order, whose shapes fit. From both ends they are the same if there are no others."""
    names: list[str] = []
    for name, shape in known:
        if len(names) < len(wanted) and (not wanted[len(names)] or shape in wanted[len(names)]):
            names.append(name)
    return names
