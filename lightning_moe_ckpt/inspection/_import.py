"""Import another tool's checkpoint as a run's first generation: dense, without a layout, so that any ranks resume from it.

It looks as if as many ranks had written it as there are parts, each small enough for memory. Every tensor is a parameter and
an operator: only the model knows more. `imported` in the policy tells readers so.
"""

from __future__ import annotations

import base64
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lightning_moe_ckpt.coordination import VERSIONS, own_versions
from lightning_moe_ckpt.errors import ConfigurationError, NoUsableGeneration
from lightning_moe_ckpt.inspection._answers import Row
from lightning_moe_ckpt.inspection._assemble import JOURNAL, PARAM, PRESENT
from lightning_moe_ckpt.inspection._sources import Foreign, read_foreign
from lightning_moe_ckpt.journal import encode, encode_journal
from lightning_moe_ckpt.policies import Plan
from lightning_moe_ckpt.snapshot import IMPORTED, LEFT_OUT, SEGMENT_METADATA, PlanRecord
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

    Args:
        backend: result of `open_backend`.
        src: see `read_foreign`, also for `weights_only` and `prefix`.
        weights_only: whether to import nothing else.
        prefix: begin of names.
        part_nbytes: bytes in a part, of which one is in memory at a time, and a tensor.

    Raises:
        ConfigurationError: `src` cannot be read, or the place has checkpoints.
        StorageError: the medium failed; what was written is no generation.
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
    start = {IMPORTED: {**foreign.entries, **optimizers}}
    journal = {"start": start, "outcome": {"step": foreign.step, "losses": []}}
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
