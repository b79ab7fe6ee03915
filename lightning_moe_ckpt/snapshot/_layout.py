"""Place tensors in a segment; writers and readers compute the same layout.

A segment has a region for each group of ranks that hold the same bytes (all of the stage, those with this rank's experts, those
with the same shards of parameters), the largest group first, and last what this rank alone has (buffers, journal). A record is cut
into shards with exactly one writer each. The layout is a pure function of plan, operators and places. So each holder knows the
layout of every writer of its regions, and can take a whole region from a broadcast without a description.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import groupby
from json.encoder import encode_basestring_ascii as _quoted

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_moe_ckpt.native import Spelled, spell_rows
from lightning_moe_ckpt.operators import (
    Operator,
    OperatorSet,
    ParamSlice,
    RecordKind,
    Region,
    StateSchema,
    boxes_of,
    memory_of,
    stepped_parameters,
)
from lightning_moe_ckpt.parallel import ParallelGroups
from lightning_moe_ckpt.policies import Audience, PlanRecord, Shard, all_names
from lightning_moe_ckpt.snapshot._averages import Averages
from lightning_moe_ckpt.snapshot._shards import PACKED, Field, FieldForm, ShardTable, numel_of, sized
from lightning_moe_ckpt.storage import KindColumns, NameColumns, SegmentLayout, SpelledRows, TensorKind, dtype_code
from lightning_moe_ckpt.tiers import Mirroring, aligned_gradient, gradient_nbytes

JOURNAL = "journal"
PRESENT = "present"
PARAM = "param"
GRADIENT = "gradient"

SEGMENT_METADATA = {"format": "lightning-moe-ckpt"}


OperatorSlice = tuple[Operator, ParamSlice]
"""A slice in this rank's memory, with its operator."""


@dataclass(frozen=True, slots=True)
class GradientPlace:
    """Place of the gradient for an expert's shard."""

    shard: Shard
    offset: int
    """Bytes from `StepLayout.gradients_at`."""


class StateView:
    """Live parameters, buffers and optimizer state of a module by name, and their fields in records. `compute_dtypes`
    has the precision of COMPUTE by parameter, which is its own if not named. A parameter's running average belongs to
    its operator.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        operators: OperatorSet,
        schema: StateSchema,
        compute_dtypes: Mapping[str, torch.dtype],
        averages: Averages | None = None,
    ) -> None:
        self.module, self.operators, self.schema = module, operators, schema
        self.params = stepped_parameters(module)
        self.boxes = boxes_of(self.params)
        """Boxes for sharded parameters, by name."""
        self._parts: dict[int, tuple[ParamSlice, ParamSlice | None]] = {}
        """Operators' slices, kept alive, with their parts on this rank, by the slice's identity."""
        self.averages = averages if averages is not None else Averages([], consumed=False)
        self.averages.cut(self.params)
        # By owner: a module may replace a buffer (`self.count = self.count + 1`) rather than change it in place.
        self._buffer_owners = {
            name: (module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
            for name, _ in module.named_buffers()
        } | self.averages.buffer_owners()
        self.buffer_names = tuple(self._buffer_owners)
        """Names of all buffers, persistent or not, in module order."""
        self.compute_dtypes = dict(compute_dtypes)
        self.gradient_dtype: torch.dtype | None = None
        """Dtype of experts' gradients behind segments; `None` if no gradients are kept there."""
        self.dense_plan: PlanRecord | None = None
        """Plan that takes everything of all pipeline stages; `None` with one stage, whose plan follows from the view."""
        self.repeatable = frozenset[str]()
        """Parameters whose steps can be repeated: their DELTA records have the gradient."""
        self.difference_dtype = torch.float32
        """Dtype of gradients in DELTA records; `uint8` stands for compressed."""
        self.consumed: dict[str, Tensor] = {}
        """Gradients consumed by the newest step, by repeatable parameter; if compressed, the shards that this rank
        writes, one behind the other."""
        self.repeated: dict[tuple[int, int | None] | str | None, list[Shard]] = {}
        """Shards shared by a window's steps, by operator if on one rank, else by identity of its slice, and writer."""

    def buffer(self, name: str) -> Tensor | None:
        """Return a live buffer; `None` if the module has dropped it."""
        owner, key = self._buffer_owners[name]
        value = getattr(owner, key, None)
        if type(value) is DTensor:
            return memory_of(value)
        return value if isinstance(value, Tensor) else None

    def fit_buffers(self, kinds: Mapping[str, TensorKind]) -> None:
        """Give buffers that grow or shrink in training the shapes of their records, before records are loaded."""
        for name in self.buffer_names:
            buffer, kind = self.buffer(name), kinds.get(f"buffer/{name}")
            if buffer is not None and kind is not None and buffer.dtype == kind[0] and buffer.shape != kind[1]:
                buffer.data = buffer.data.new_zeros(kind[1])

    def replanned(self, operators: OperatorSet, compute_dtypes: Mapping[str, torch.dtype]) -> StateView:
        """Return a view of the same live state, cut into other operators and stored at other precisions.

        Parameters and buffers stay the same, although the module may have replaced some: a new process has no others, and would
        refuse records of them.
        """
        view: StateView = copy(self)
        view.operators, view.compute_dtypes = operators, dict(compute_dtypes)
        view._parts, view.repeated = {}, {}
        return view

    def assuming(self, *, averages_consumed: bool) -> StateView:
        """Return a view of the same live state under a plan whose maker did, or did not, run forward on averages."""
        view = self.replanned(self.operators, self.compute_dtypes)
        view.averages = self.averages.assuming(consumed=averages_consumed)
        view.averages.cut(view.params)
        return view

    def by_region(self, operators: Sequence[Operator], groups: ParallelGroups) -> dict[Region, list[OperatorSlice]]:
        """Return the operators' slices in this rank's memory, by the ranks that hold the same bytes."""
        found: dict[Region, list[OperatorSlice]] = {}
        for holders in dict.fromkeys([operator.holders for operator in operators]):
            region = tuple(groups.ranks(holders))
            slices = [(op, each) for op in operators if op.holders == holders for each in op.slices]
            if not self.boxes:
                found[region] = slices
                continue
            for operator, whole in slices:
                box, here = self.boxes.get(whole.fqn), self._here(whole)
                if here is not None:
                    found.setdefault(region if box is None else box.holders, []).append((operator, here))
        return found

    def own_experts(self) -> dict[str, list[int]]:
        """Return the experts whose first elements are here, by layer."""
        return {
            layer.fqn: [
                expert
                for expert, (first, *_) in layer.experts.items()
                if first.fqn not in self.boxes or self.boxes[first.fqn].part(first.start, first.start + 1)
            ]
            for layer in self.operators.layers
        }

    def share(self, regions: Mapping[str, Region], owners: Mapping[str, tuple[int, ...]]) -> None:
        """Note the holders of boxes, by placement, and each expert's position."""
        self.boxes = {fqn: replace(box, holders=regions[box.placement]) for fqn, box in self.boxes.items()}
        layers = [replace(layer, owners=owners[layer.fqn]) for layer in self.operators.layers]
        self.operators = replace(self.operators, layers=tuple(layers))

    def _here(self, whole: ParamSlice) -> ParamSlice | None:
        """Return a slice's part in this rank's memory; `None` if there is none."""
        if (box := self.boxes.get(whole.fqn)) is None:
            return whole
        if (known := self._parts.get(id(whole))) is None:
            part, found = box.part(whole.start, whole.stop), None
            if part is not None:
                start, stop, first = part
                at = first if box.bounds is not None else first + whole.global_start - whole.start
                found = replace(whole, start=start, stop=stop, global_start=at, box=box.bounds)
            known = self._parts[id(whole)] = whole, found
        return known[1]

    def keeps_gradient(self, fqn: str) -> bool:
        """Return whether a parameter's steps can be repeated from its gradient: by Adam, in float32."""
        param = self.params[fqn]
        return param.dtype is torch.float32 and self.schema.adam_group(param) is not None

    def forms(self, fqn: str, kind: RecordKind, first: bool = True) -> list[FieldForm]:
        """Return the tensors in a shard of a parameter's record, in stored order. `first` says whether the shard begins
        with the parameter's first element, so that it has state of the whole.
        """
        param = self.params[fqn]
        if kind is RecordKind.COMPUTE:
            consumed = {PARAM: param, **self.averages.consumed_of(fqn)}
            return [(key, self.compute_dtypes.get(fqn, each.dtype), None) for key, each in consumed.items()]
        averages: list[FieldForm] = [(key, average.dtype, None) for key, average in self.averages.of(fqn).items()]
        if kind is RecordKind.DELTA and fqn in self.repeatable:
            packed = self.difference_dtype is torch.uint8
            narrowest = min(self.difference_dtype, param.dtype, key=lambda dtype: dtype.itemsize)
            return [(PACKED, torch.uint8, ()) if packed else (GRADIENT, narrowest, None), *averages]
        state: list[FieldForm] = [
            (entry.key, entry.dtype, None if entry.per_element else entry.shape)
            for entry in self.schema.entries(param)
            if first or not entry.shape
        ]
        return [(PRESENT, torch.uint8, ()), (PARAM, param.dtype, None), *state, *averages]

    def table(self, shards: Iterable[Shard], packed: Mapping[str, int] | None = None) -> ShardTable:
        """Return the shards' tensors as a table; `packed` has the bytes of compressed gradients by shard, if known."""
        forms, alike = cache(self.forms), not self.schema.keeps_whole
        found = [(shard, forms(shard.slice.fqn, shard.kind, alike or not shard.slice.start)) for shard in shards]
        return ShardTable(found if packed is None else sized(found, packed))

    def is_state(self, key: str) -> bool:
        """Return whether a field is optimizer state, perhaps missing yet."""
        return key not in (PARAM, PRESENT, GRADIENT, PACKED) and key not in self.averages.names

    def states(self, fqns: Iterable[str]) -> list[Tensor]:
        """Return the existing optimizer state and averages of these parameters; in shards, like these."""
        params = {fqn: self.params[fqn] for fqn in fqns}
        averages = (average for fqn in params for average in self.averages.of(fqn).values())
        return [*self.schema.watch(params.values()).tensors, *averages]

    def tensor(self, fqn: str, key: str) -> Tensor | None:
        """Return a parameter's memory, or its average, gradient or state; `None` if there is no such gradient or state."""
        if key in (GRADIENT, PACKED):
            return self.consumed.get(fqn)
        if key in self.averages.names:
            return self.averages.of(fqn)[key]
        found = self.params[fqn] if key == PARAM else self.schema.get_state(self.params[fqn], key)
        return memory_of(found) if self.boxes and found is not None else found

    def live(self, field: Field) -> Tensor | None:
        """Return the live tensor that a field is copied from and to, flat; `None` if there is no such state yet."""
        piece = field.shard.slice
        base = self.tensor(piece.fqn, field.key)
        flat = None if base is None else base.detach().view(-1)
        return flat if flat is None or field.shape is not None else flat[piece.start : piece.stop]

    def record_nbytes(self, operator: Operator, kind: RecordKind) -> int:
        """Return the bytes of one record, over all its writers, without alignment."""
        width = self.widths(kind)
        return sum(piece.numel * width(piece.fqn) for piece in operator.slices)

    def widths(self, kind: RecordKind) -> Callable[[str], int]:
        """Return a function from a parameter to its record's bytes per element, with results remembered."""
        return cache(partial(self.bytes_per_element, kind=kind))

    def whole_nbytes(self, fqn: str) -> int:
        """Return the bytes of a parameter's state that has no element per element of the parameter."""
        entries = self.schema.entries(self.params[fqn])
        return sum(each.dtype.itemsize * math.prod(each.shape) for each in entries if not each.per_element)

    def bytes_per_element(self, fqn: str, kind: RecordKind) -> int:
        """Return a record's bytes per parameter element, with an even share of state of the whole, for records of `kind`."""
        param = self.params[fqn]
        if kind is RecordKind.COMPUTE:
            tensors = [param, *self.averages.consumed_of(fqn).values()]
            return sum(self.compute_dtypes.get(fqn, tensor.dtype).itemsize for tensor in tensors)
        state = sum(e.dtype.itemsize for e in self.schema.entries(param) if e.per_element)
        whole = self.whole_nbytes(fqn) if self.schema.keeps_whole else 0
        averages = sum(average.element_size() for average in self.averages.of(fqn).values())
        return param.element_size() + state + averages + -(-whole // max(1, param.numel()))


class FileLayout:
    """A file of one boundary: every writer's shards by region, in stored order, and the places of this rank's tensors.

    `journal_nbytes` is the capacity of the journal record; `None` for a file without buffers and journal. The file
    begins at the byte `start` of its step's memory, with a header unless `is_mirror`: only its records are sent. `packed` has
    bytes of compressed gradients by shard; there is room for the most where they are not known.
    """

    def __init__(
        self,
        shards: Mapping[Region, Sequence[Shard]],
        view: StateView,
        groups: ParallelGroups,
        journal_nbytes: int | None,
        *,
        audience: Audience = "durable",
        start: int = 0,
        packed: Mapping[str, int] | None = None,
        is_mirror: bool = False,
    ) -> None:
        self.view, self.groups, self.audience, self.start = view, groups, audience, start
        self._packed, self.is_mirror = packed, is_mirror
        self.shards = {region: list(shards[region]) for region in sorted(shards, key=lambda each: (-len(each), each))}
        self._written: dict[tuple[Region, int], ShardTable] = {}
        own = [self.written(region, groups.rank) for region in self.shards]
        self.table = own[0] if len(own) == 1 else ShardTable([shard for each in own for shard in each.shards])
        """Tensors of records that this rank writes, the first ones of the segment."""
        local = {} if journal_nbytes is None else self._local_kinds(journal_nbytes)
        self._local = list(local)
        kinds, others = self.table.kinds, KindColumns.of([*local.values()])
        number = np.concatenate([kinds.number, others.number + len(kinds.distinct)])
        kinds = KindColumns([*kinds.distinct, *others.distinct], number)
        names = [self.table.names, NameColumns.of(self._local)]
        header_nbytes = 0 if is_mirror else None
        self.segment = SegmentLayout.of_columns(names, kinds, metadata=SEGMENT_METADATA, header_nbytes=header_nbytes)
        self.stop = start + self.segment.nbytes
        """End of the file in its step's memory."""

    def bytes_in(self, slot_U8: Tensor) -> Tensor:
        """Return the file's bytes in its step's memory, without a copy."""
        return slot_U8[self.start : self.stop]

    def common(self, ranks: Collection[int]) -> list[Region]:
        """Return the first regions with all these ranks; of equally large ones all or none, which is so on each of them."""
        found: list[Region] = []
        for _, group in groupby(self.shards, key=len):
            regions = list(group)
            if not ranks or not all(set(region).issuperset(ranks) for region in regions):
                break
            found += regions
        return found

    def mirror(self, writer: int, ranks: Collection[int], *, start: int) -> FileLayout | None:
        """Return the layout of `writer`'s shards in regions with all these ranks, with equal gaps; `None` if there are none."""
        shards = {each: [shard for shard in self.shards[each] if shard.writer == writer] for each in self.common(ranks)}
        if not any(shards.values()):
            return None
        return FileLayout(shards, self.view, replace(self.groups, rank=writer), None, start=start, is_mirror=True)

    def run(self, ranks: Collection[int] | None = None) -> tuple[int, int] | None:
        """Return first byte, and the byte after the last, of this rank's shards in regions with all these ranks, or in all."""
        regions = self.shards if ranks is None else self.common(ranks)
        if (count := sum(len(self.written(region, self.groups.rank).row) for region in regions)) == 0:
            return None
        return int(self.segment.offsets[0]), int(self.segment.offsets[count - 1] + self.segment.sizes[count - 1])

    def first_byte(self, region: Region) -> int:
        """Return the first byte of this rank's shards in a region that is not empty."""
        before = list(self.shards)[: list(self.shards).index(region)]
        return int(self.segment.offsets[sum(len(self.written(each, self.groups.rank).row) for each in before)])

    def written(self, region: Region, writer: int) -> ShardTable:
        """Return the tensors that `writer` stores in `region`."""
        if (found := self._written.get((region, writer))) is None:
            shards = [shard for shard in self.shards[region] if shard.writer == writer]
            found = self._written[region, writer] = self.view.table(shards, self._packed)
        return found

    def records(self, has_state: Mapping[str, bool]) -> SpelledRows:
        """Return the marker's entries of the records, by `has_state` of parameters; digests are added when the bytes are final."""
        table, is_state = self.table, cache(self.view.is_state)
        heads, lengths, ends, factors = list[str](), list[str](), list[str](), list[tuple[int, int, int]]()
        for shard, numel, form in table.rows:
            (key, dtype, _), fqn = form, shard.slice.fqn
            shape, length, factor = self._interval(shard.slice, form, numel)
            kind = f'"{shard.kind.value}",{_quoted(fqn)},{_quoted(key)},"{dtype_code(dtype)}"'
            heads.append(f",{kind},[{','.join(map(str, shape))}],")
            lengths.append(f",{length},")
            there = shard.kind is RecordKind.COMPUTE or has_state[fqn] or not is_state(key)
            ends.append(",true" if there else ",false")
            factors.append(factor)
        by, per, each = np.array(factors, np.int64).reshape(-1, 3)[table.row].T
        boxes = ["" if box is None else f",{json.dumps(box, separators=(',', ':'))}" for box in table.boxes]
        boxed = np.array([shape is None for *_, (_, _, shape) in table.rows], bool)[table.row]
        box: list[Spelled] = [(boxes, np.where(boxed, table.shard, -1))] * bool(boxes)
        count, offsets, sizes = len(table.row), self.segment.offsets, self.segment.sizes
        parts: list[Spelled] = [
            *(
                "[",
                *(table.names.parts or ()),
                ",",
                ([_quoted(shard.operator) for shard, _ in table.shards], table.shard),
            ),
            *((heads, table.row), table.starts * by // per * each, (lengths, table.row), offsets[:count], ","),
            *(sizes[:count], (ends, table.row), *box, "]"),
        ]
        rows = [spell_rows(parts, count)] * bool(count) + [row.encode("ascii") for row in self._local_rows()]
        return b"[" + b",".join(rows) + b"]", np.stack([offsets, offsets + sizes])

    def _interval(
        self, piece: ParamSlice, form: FieldForm, numel: int
    ) -> tuple[tuple[int, ...], int, tuple[int, int, int]]:
        """Return a record's shape and length; its start is the piece's by the first number, per the second, times the third.

        A stack's statistics are of rows of all ranks.
        """
        (key, _, shape), size, param = form, numel_of(form, numel), self.view.params[piece.fqn]
        if shape is None:
            return piece.global_shape, numel, (1, 1, 1)
        if key == PACKED:
            return (size,), size, (0, 1, 1)
        if param.shape == piece.global_shape or not any(
            e.key == key and e.by_row for e in self.view.schema.entries(param)
        ):
            return shape, size, (0, 1, 1)
        rows = (len(param), max(1, param.numel()), size // max(1, len(param)))
        return (piece.global_shape[0], *shape[1:]), size, rows

    def _local_kinds(self, journal_nbytes: int) -> dict[str, TensorKind]:
        """Return the tensors that only this rank has: buffers, then the journal."""
        buffers = {name: buffer for name in self.view.buffer_names if (buffer := self.view.buffer(name)) is not None}
        local: dict[str, TensorKind] = {f"buffer/{name}": (b.dtype, tuple(b.shape)) for name, b in buffers.items()}
        return {**local, JOURNAL: (torch.uint8, (journal_nbytes,))}

    def _local_rows(self) -> list[str]:
        rows = []
        for name in self._local:
            offset, nbytes, dtype, shape = self.segment.span(name)
            kind, _, fqn = name.partition("/")
            columns = [name, "", kind, fqn, "", dtype_code(dtype), shape, 0, math.prod(shape), offset, nbytes, True]
            rows.append(json.dumps(columns, separators=(",", ":")))
        return rows


class StepLayout:
    """Layout of one boundary on this rank: its files, the durable one first, one behind the other, then mirrors
    (`mirroring`: state captured for other ranks, and by them for this rank), then gradients.
    """

    def __init__(self, *files: FileLayout, mirroring: Mirroring | None = None) -> None:
        self.files = list(files)
        self.durable, self.view, self.groups = files[0], files[0].view, files[0].groups
        self.files_nbytes = self._stop = files[-1].stop
        """Bytes of all files."""
        self.mirroring = Mirroring() if mirroring is None else mirroring
        self.mirrors: dict[int, FileLayout] = {}
        """Mirrors of other ranks' durable files, by rank."""
        for owner, ranks in self.mirroring.owners.items():
            if (mirror := self.durable.mirror(owner, ranks, start=self._stop)) is not None:
                self.mirrors[owner], self._stop = mirror, mirror.stop
        self.mirrored = self.durable.run(self.mirroring.among)
        """Run of the durable file that holders of copies take from their own state."""
        self.gradients = self._places_of_gradients(self.mirroring.among)
        """Places for gradients of what is sent to holders of copies."""

    @property
    def gradients_at(self) -> int:
        """Offset of the gradients behind files and mirrors."""
        return aligned_gradient(self._stop)

    @property
    def mirrors_nbytes(self) -> int:
        """Bytes captured for other ranks, behind this rank's own files."""
        return self._stop - self.files_nbytes

    def mirrors_in(self, slot: memoryview) -> dict[int, memoryview]:
        """Return the mirrors' bytes in their step's memory by rank, without a copy."""
        runs = {owner: (mirror.start, mirror.run()) for owner, mirror in self.mirrors.items()}
        return {owner: slot[start + run[0] : start + run[1]] for owner, (start, run) in runs.items() if run is not None}

    @property
    def nbytes(self) -> int:
        """Bytes in files, mirrors and the gradients behind them."""
        if not self.gradients:
            return self._stop
        last = self.gradients[-1]
        assert self.view.gradient_dtype is not None
        return self.gradients_at + last.offset + gradient_nbytes(last.shard.slice.numel, self.view.gradient_dtype)

    def _places_of_gradients(self, among: Collection[int]) -> list[GradientPlace]:
        dtype, view, places, offset = self.view.gradient_dtype, self.view, list[GradientPlace](), 0
        if dtype is None:
            return places
        rank, mirrored = self.groups.rank, self.durable.common(among)  # the first of the file
        shards = self.durable.table.shards[sum(len(self.durable.written(each, rank).shards) for each in mirrored) :]
        for shard in (shard for shard, _ in shards):
            # The dense part of a copy stays exact: all tokens pass it.
            may_round = dtype is torch.float32 or view.operators[shard.operator].kind == "expert"
            if may_round and shard.kind is RecordKind.FULL and view.keeps_gradient(shard.slice.fqn):
                places.append(GradientPlace(shard, offset))
                offset += gradient_nbytes(shard.slice.numel, dtype)
        return places


@dataclass(kw_only=True)
class WindowLayout:
    """Concrete plan: every byte's place in every step."""

    record: PlanRecord
    steps: list[StepLayout]
    reserve_nbytes: int = 0
    """Bytes of the largest step in later, different plans."""

    def mirrored(self, mirroring: Mirroring) -> WindowLayout:
        """Return the same plan with state that ranks capture for each other."""
        if not mirroring or self.record.plan.is_differential:
            return self
        return replace(self, steps=[StepLayout(*step.files, mirroring=mirroring) for step in self.steps])

    @cached_property
    def copied(self) -> list[int]:
        """Bytes of each step in a copy on another node, which has no mirrors."""
        return [step.nbytes - step.mirrors_nbytes for step in self.steps]

    @cached_property
    def missing(self) -> frozenset[str]:
        """Names of this rank's operators not in the durable files; storage takes them from older files."""
        return frozenset(self.steps[0].view.operators.names) - self._durable

    @cached_property
    def is_incomplete(self) -> bool:
        """Whether the durable files lack an operator of some rank, see `missing`; equal on all ranks."""
        if self.record.stages:
            return any(facts["incomplete"] for facts in self.record.stages)
        return not self._durable.issuperset(all_names(self.steps[0].view.operators))

    @cached_property
    def _durable(self) -> frozenset[str]:
        return frozenset(name for step in self.record.plan.steps for name in step.files["durable"])

    @cached_property
    def sizes(self) -> list[int]:
        """Bytes of each step, with all behind its files."""
        return [step.nbytes for step in self.steps]

    @property
    def nbytes(self) -> int:
        """Bytes of a generation."""
        return sum(self.sizes)

    @property
    def slot_nbytes(self) -> int:
        """Bytes of the largest step, in this plan or a later one."""
        return max(self.reserve_nbytes, *self.sizes)

    @property
    def room(self) -> list[int]:
        """Bytes of the segments of a window, in this plan or a later one."""
        return [self.reserve_nbytes] if self.reserve_nbytes else self.sizes
