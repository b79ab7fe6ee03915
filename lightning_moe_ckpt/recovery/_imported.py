"""Fit the records of an imported generation to the model that resumes.

Another tool's checkpoint has names, shapes and types only. The model knows its buffers by name, and each
tensor's precision. Running averages that the file lacks begin with the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import nn

from lightning_moe_ckpt.coordination import Exchange
from lightning_moe_ckpt.errors import IdentityMismatch
from lightning_moe_ckpt.recovery._brought import BroughtRecords
from lightning_moe_ckpt.recovery._cut import BUFFER, FULL, HeldByTensor, HeldRecord
from lightning_moe_ckpt.recovery._index import Replicas
from lightning_moe_ckpt.snapshot import PARAM, PRESENT, SEGMENT_METADATA, is_average
from lightning_moe_ckpt.storage import KindColumns, NameColumns, RecordEntry, SegmentLayout, dtype_of

_NAMED = 6

_Field = tuple[str, str]
"""A tensor's name, and its state's key."""


def fit_imported(brought: BroughtRecords, tensors: Sequence[HeldRecord], module: nn.Module, exchange: Exchange) -> None:
    """Convert records to the model's precision; `tensors` are wanted by all ranks. Collective. Raises `IdentityMismatch` if names, shapes,
    or the keys of the optimizer's state are not those of the model.
    """
    wanted = {_stored_as(each.record.kind, each.record.fqn, each.record.state_key): each.record for each in tensors}
    records = [each.record for each in brought.records if each.record.fqn]
    stored = {(record.fqn, record.state_key): record for record in records}
    wrong = [*_differences(stored, wanted)]
    unknown = {fqn for fqn, _ in stored} - {fqn for fqn, _ in wanted} - module.state_dict(keep_vars=True).keys()
    said = cast("list[list[str]]", exchange.gather_values(sorted(unknown)))  # of a stage's module only
    wrong += [f"`{name}` is not in the model" for name in said[0] if all(name in each for each in said)]
    if wrong:
        raise IdentityMismatch(
            f"The imported checkpoint is not of this model: {'; '.join(wrong[:_NAMED])}{' ...' if len(wrong) > _NAMED else ''}. Import it "
            "again for this model, with --prefix if names lack their begin, or with --weights-only if the optimizer is another."
        )
    dtypes = {field: each.dtype for field, each in wanted.items() if field in stored}
    names = {record.name: dtype for record in records if (dtype := dtypes.get((record.fqn, record.state_key)))}
    for number, each in enumerate(brought.records):
        record, dtype = each.record, names.get(each.record.name, each.record.dtype)
        fitted = replace(record, dtype=dtype, nbytes=record.numel * dtype_of(dtype).itemsize)
        brought.records[number] = replace(each, replicas=Replicas(fitted))
    for place, (number, layout) in brought.places.items():
        rows = zip(layout.names, layout.kinds, strict=True)
        kinds = [(dtype_of(names[name]) if name in names else dtype, shape) for name, (dtype, shape) in rows]
        if kinds != [*layout.kinds]:
            other = SegmentLayout.of_columns(
                [NameColumns.of(layout.names)], KindColumns.of(kinds), metadata=SEGMENT_METADATA, header_nbytes=0
            )
            buffer_U8 = torch.empty(other.nbytes, dtype=torch.uint8)
            for name in layout.names:
                other.view(buffer_U8, name).copy_(layout.view(brought.buffers[number], name))
            brought.places[place], brought.buffers[number] = (number, other), buffer_U8


def _stored_as(kind: str, fqn: str, key: str) -> _Field:
    """Return name and key, in an imported generation, for a tensor in a model's record."""
    own = fqn.partition("/")[2] if is_average(fqn) else fqn
    return own, PARAM if kind == BUFFER or is_average(key) else key


def _differences(stored: Mapping[_Field, RecordEntry], wanted: Mapping[_Field, RecordEntry]) -> Iterator[str]:
    with_state = {fqn for fqn, key in stored if key not in {PARAM, PRESENT}}
    for (fqn, key), record in wanted.items():
        found = stored.get((fqn, key))
        if found is None and (key == PARAM or fqn in with_state):
            yield f"`{fqn}` has no {'values' if key == PARAM else key}"
        elif found is not None and (found.global_shape or (1,)) != (record.global_shape or (1,)):
            yield f"`{fqn}` has {list(found.global_shape)} {key}, the model {list(record.global_shape)}"


def by_imported_names(sources: HeldByTensor, targets: HeldByTensor) -> HeldByTensor:
    """Return the sources with buffers, and averages, under the names that the model has for them."""
    own = {key: sources.get((key[0], FULL, *_stored_as(*key[1:])), ()) for key in targets if key not in sources}
    return {**sources, **{key: pieces for key, pieces in own.items() if pieces}}
