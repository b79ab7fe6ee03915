"""Say which bytes of which tensor lie where in a segment; writers and readers compute the same.

A segment has three regions: records held by all ranks of the stage, records held by the ranks that share this rank's
experts, and what belongs to this rank alone (buffers, journal). A record is cut into parts with exactly one writer
each. Since the layout is a pure function of plan, operators and groups, a reader knows every writer's layout and can
take a whole region from a broadcast without a description of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from json.encoder import encode_basestring_ascii as _quoted

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lightning_moe_ckpt.operators import Operator, OperatorSet, RecordKind, StateSchema
from lightning_moe_ckpt.parallel import ParallelGroups
from lightning_moe_ckpt.policies import Audience, all_names
from lightning_moe_ckpt.snapshot._parts import PACKED, Field, Form, PartTable, PartText, Shard
from lightning_moe_ckpt.snapshot._plan_record import PlanRecord
from lightning_moe_ckpt.storage import SegmentLayout, SpelledRows, TensorKind, dtype_code
from lightning_moe_ckpt.tiers import Mirroring, aligned_gradient, gradient_nbytes

REGIONS = ("stage", "expert_data")
JOURNAL = "journal"
PRESENT = "present"
PARAM = "param"
GRADIENT = "gradient"

AVERAGE_PREFIX = "average."
"""Prefix of the names of averages; no key of an optimizer's state has it."""

SEGMENT_METADATA = {"format": "lightning-moe-ckpt"}


def is_average(key: str) -> bool:
    """Return whether a record's `state_key`, or a buffer's name, belongs to an average."""
    return key.startswith(AVERAGE_PREFIX)


class Averages:
    """Running averages of the weights (EMA, SWA), as state of the operators whose parameters they follow.

    An average is updated from the parameter it follows and from nothing else. It is captured in the window step in
    which its operator is. Until that step's snapshot is loaded in replay it may have any value: an average of frozen,
    outdated weights is overwritten when the operator becomes active. If validation runs on averages, forward reads them
    too, so they are taken with the weights of operators whose full state is not taken yet.

    Args:
        models: copies of the trained module, in an order that is the same in every process.
        consumed: whether forward runs on them between optimizer steps (validation with averaged weights).
    """

    def __init__(self, models: Sequence[AveragedModel], *, consumed: bool) -> None:
        self._models = {f"{AVERAGE_PREFIX}{index}": model for index, model in enumerate(models)}
        self.consumed = consumed
        """Whether weights that are captured for forward are captured with their averages."""
        self.names = frozenset(self._models)
        """Names of the averages, which are keys of fields in records."""
        self._tensors = {name: dict(model.module.named_parameters()) for name, model in self._models.items()}

    def assuming(self, *, consumed: bool) -> Averages:
        """Return these averages for the plan of another process, which may have validated on averages."""
        return Averages(list(self._models.values()), consumed=consumed)

    def of(self, fqn: str) -> dict[str, Tensor]:
        """Return the averages of one parameter."""
        return {name: tensors[fqn] for name, tensors in self._tensors.items()}

    def consumed_of(self, fqn: str) -> dict[str, Tensor]:
        """Return the averages of one parameter that forward reads."""
        return self.of(fqn) if self.consumed else {}

    def buffer_owners(self) -> dict[str, tuple[nn.Module, str]]:
        """Return the buffers of the averages (number of updates, averaged statistics), by owner and attribute."""
        return {
            f"{name}/{fqn}": (model.get_submodule(fqn.rpartition(".")[0]), fqn.rpartition(".")[2])
            for name, model in self._models.items()
            for fqn, _ in model.named_buffers()
        }


@dataclass(frozen=True, slots=True)
class GradientPlace:
    """Where the gradient of a part of an expert is kept."""

    part: Shard
    offset: int
    """From the end of the segment."""


class StateView:
    """Live parameters, buffers and optimizer state by name, and the fields that records of them have.

    Args:
        module: holds the parameters and buffers.
        operators: what was found in it.
        schema: the optimizer's state.
        compute_dtypes: precision of COMPUTE by parameter; a parameter not named keeps its own.
        averages: running averages of the module; that of a parameter belongs to its operator.
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
        self.params = dict(module.named_parameters())
        self.averages = averages if averages is not None else Averages([], consumed=False)
        # By owner, since a module may replace a buffer (`self.count = self.count + 1`) rather than change it in place.
        self._buffer_owners = {
            name: (module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
            for name, _ in module.named_buffers()
        } | self.averages.buffer_owners()
        self.buffer_names = tuple(self._buffer_owners)
        """Persistent or not, in the order of the modules."""
        self.compute_dtypes = dict(compute_dtypes)
        self.gradient_dtype: torch.dtype | None = None
        """Type in which gradients of experts are kept behind segments; `None` if they are not."""
        self.dense_plan: PlanRecord | None = None
        """Plan that takes everything of all pipeline stages; `None` where there is one, which knows it by itself."""
        self.repeatable = frozenset[str]()
        """Parameters whose steps can be repeated: DELTA records of them have the gradient."""
        self.difference_dtype = torch.float32
        """Type in which they have it; `uint8` stands for compressed."""
        self.consumed: dict[str, Tensor] = {}
        """Gradients as the newest step of the optimizer consumed them, of repeatable parameters that had one; if they are
        compressed, those of the parts that this rank writes, one behind the other."""
        self.repeated: dict[tuple[int, int | None] | None, list[Shard]] = {}
        """Parts that steps of a window share, by identity of the slice, which is of an operator, and writer."""
        self._texts: dict[int, PartText] = {}

    def buffer(self, name: str) -> Tensor | None:
        """Return the live tensor; `None` if the module has dropped it."""
        owner, key = self._buffer_owners[name]
        value = getattr(owner, key, None)
        return value if isinstance(value, Tensor) else None

    def fit_buffers(self, kinds: Mapping[str, TensorKind]) -> None:
        """Give buffers that grow or shrink in training the shapes that records of them have, before they are loaded."""
        for name in self.buffer_names:
            buffer, kind = self.buffer(name), kinds.get(f"buffer/{name}")
            if buffer is not None and kind is not None and buffer.dtype == kind[0] and buffer.shape != kind[1]:
                buffer.data = buffer.data.new_zeros(kind[1])

    def replanned(self, operators: OperatorSet, compute_dtypes: Mapping[str, torch.dtype]) -> StateView:
        """Return a view of the same live state, cut into other operators and stored at other precisions."""
        return self._like(operators, compute_dtypes, self.averages)

    def assuming(self, *, averages_consumed: bool) -> StateView:
        """Return a view of the same live state under a plan whose maker did, or did not, run forward on averages."""
        averages = self.averages.assuming(consumed=averages_consumed)
        return self._like(self.operators, self.compute_dtypes, averages)

    def _like(self, operators: OperatorSet, compute_dtypes: Mapping[str, torch.dtype], averages: Averages) -> StateView:
        view = StateView(self.module, operators, self.schema, compute_dtypes, averages)
        view.params = self.params  # also those that the module has replaced: what is laid out for them is not taken
        view.gradient_dtype, view.dense_plan = self.gradient_dtype, self.dense_plan
        view.repeatable, view.consumed = self.repeatable, self.consumed
        view.difference_dtype = self.difference_dtype
        return view

    def keeps_gradient(self, fqn: str) -> bool:
        """Return whether a parameter's steps can be repeated from its gradient: Adam takes them, in float32."""
        param = self.params[fqn]
        return param.dtype is torch.float32 and self.schema.adam_group(param) is not None

    def forms(self, fqn: str, kind: RecordKind) -> list[Form]:
        """Return what every part of a parameter's record consists of, in the order in which it is stored."""
        param = self.params[fqn]
        if kind is RecordKind.COMPUTE:
            consumed = {PARAM: param, **self.averages.consumed_of(fqn)}
            return [(key, self.compute_dtypes.get(fqn, each.dtype), True) for key, each in consumed.items()]
        state = [(entry.key, entry.dtype, entry.per_element) for entry in self.schema.entries(param)]
        averages = [(key, average.dtype, True) for key, average in self.averages.of(fqn).items()]
        if kind is RecordKind.DELTA and fqn in self.repeatable:
            packed = self.difference_dtype is torch.uint8
            gradient = (PACKED, torch.uint8, False) if packed else (GRADIENT, self.difference_dtype, True)
            return [gradient, *averages]
        return [(PRESENT, torch.uint8, False), (PARAM, param.dtype, True), *state, *averages]

    def table(self, parts: Iterable[Shard]) -> PartTable:
        """Return the tensors of parts."""
        forms = cache(self.forms)
        return PartTable([(part, forms(part.piece.fqn, part.kind)) for part in parts], self._texts)

    def is_state(self, key: str) -> bool:
        """Return whether a field is part of the optimizer's state, of which there may be none yet."""
        return key not in (PARAM, PRESENT, GRADIENT, PACKED) and key not in self.averages.names

    def states(self, fqns: Iterable[str]) -> list[Tensor]:
        """Return optimizer state and averages of these parameters, as far as there are any."""
        params = {fqn: self.params[fqn] for fqn in fqns}
        averages = (average for fqn in params for average in self.averages.of(fqn).values())
        return [*self.schema.watch(params.values()).tensors, *averages]

    def base(self, field: Field) -> Tensor | None:
        """Return the parameter, average or state tensor of which a field is a slice."""
        return self.tensor(field.part.piece.fqn, field.key)

    def tensor(self, fqn: str, key: str) -> Tensor | None:
        """Return a parameter, an average, gradient or state of it; `None` if there is no such gradient or state."""
        if key in (GRADIENT, PACKED):
            return self.consumed.get(fqn)
        if key in self.averages.names:
            return self.averages.of(fqn)[key]
        return self.params[fqn] if key == PARAM else self.schema.get_state(self.params[fqn], key)

    def live(self, field: Field) -> Tensor | None:
        """Return the live tensor a field is copied from and to, flat; `None` if the optimizer has no such state yet."""
        base = self.base(field)
        return None if base is None else self.part_of(base, field)

    @staticmethod
    def part_of(base: Tensor, field: Field) -> Tensor:
        """Return the slice of `base` that a field is, flat."""
        flat = base.detach().view(-1)
        return flat[field.part.piece.start : field.part.piece.stop] if field.per_element else flat

    def record_nbytes(self, operator: Operator, kind: RecordKind) -> int:
        """Return the bytes of one record, over all its writers, without alignment."""
        width = self.widths(kind)
        return sum(piece.numel * width(piece.fqn) for piece in operator.slices)

    def widths(self, kind: RecordKind) -> Callable[[str], int]:
        """Return a function that gives the bytes of a record per element of a parameter, and asks once for each."""
        return cache(partial(self.bytes_per_element, kind=kind))

    def bytes_per_element(self, fqn: str, kind: RecordKind) -> int:
        """Return the bytes that a record of `kind` takes per element of the parameter."""
        param = self.params[fqn]
        if kind is RecordKind.COMPUTE:
            tensors = [param, *self.averages.consumed_of(fqn).values()]
            return sum(self.compute_dtypes.get(fqn, each.dtype).itemsize for each in tensors)
        state = sum(e.dtype.itemsize for e in self.schema.entries(param) if e.per_element)
        return param.element_size() + state + sum(each.element_size() for each in self.averages.of(fqn).values())


class FileLayout:
    """One file of one boundary: every writer's regions, and where this rank's tensors lie.

    Args:
        parts: of every region over all its writers, in the order in which they are stored.
        view: live state.
        groups: who holds what.
        journal_nbytes: capacity of the journal record; `None` for a file without what is this rank's alone.
        audience: who takes it.
        start: first byte of the file in the memory of its step.
    """

    def __init__(
        self,
        parts: Mapping[str, Sequence[Shard]],
        view: StateView,
        groups: ParallelGroups,
        journal_nbytes: int | None,
        *,
        audience: Audience = "durable",
        start: int = 0,
    ) -> None:
        self.view, self.groups, self.audience, self.start = view, groups, audience, start
        self.parts = {region: list(parts[region]) for region in REGIONS}
        self._written: dict[tuple[str, int], PartTable] = {}
        own = [self.written(region, groups.rank) for region in REGIONS]
        self.table = PartTable.joined([each for each in own if each.parts] or own[:1])
        """Tensors of records that this rank writes, the first ones of the segment."""
        local = {} if journal_nbytes is None else self._local_kinds(journal_nbytes)
        self._local = list(local)
        names, kinds = [*self.table.names, *local], [*self.table.kinds, *local.values()]
        self.segment = SegmentLayout.of_columns(names, kinds, metadata=SEGMENT_METADATA)
        self.stop = start + self.segment.nbytes
        """Behind its last byte, in the memory of its step."""

    def bytes_in(self, slot_U8: Tensor) -> Tensor:
        """Return the file in the memory of its step, without a copy."""
        return slot_U8[self.start : self.stop]

    @property
    def own(self) -> list[Field]:
        """What this rank writes, an object for each tensor."""
        return self.table.fields

    def mirror(self, writer: int, regions: Collection[str], *, start: int) -> FileLayout | None:
        """Return the layout of what `writer` has of these regions in its file, with equal gaps; `None` if that is nothing."""
        parts = {
            region: [part for part in self.parts[region] if part.writer == writer] if region in regions else []
            for region in REGIONS
        }
        groups = replace(self.groups, rank=writer)
        return FileLayout(parts, self.view, groups, None, start=start) if any(parts.values()) else None

    def run(self, regions: Collection[str]) -> tuple[int, int] | None:
        """Return first byte, and the byte after the last, of what this rank writes of regions; of one it must be the first."""
        count = sum(len(self.written(region, self.groups.rank).names) for region in REGIONS if region in regions)
        if count == 0:
            return None
        return int(self.segment.offsets[0]), int(self.segment.offsets[count - 1] + self.segment.sizes[count - 1])

    def written(self, region: str, writer: int) -> PartTable:
        """Return what `writer` stores in `region`."""
        found = self._written.get((region, writer))
        if found is None:
            parts = [part for part in self.parts[region] if part.writer == writer]
            found = self._written[region, writer] = self.view.table(parts)
        return found

    def records(self, has_state: Mapping[str, bool]) -> SpelledRows:
        """Return the marker's entries of the records; digests are added when the bytes are final.

        Args:
            has_state: whether the optimizer has state of a parameter yet, by name.
        """
        rows: list[str] = []
        is_state, places = cache(self.view.is_state), self.segment.places
        places_by_name = zip(map(_quoted, self.table.names), places, strict=False)  # what is this rank's alone follows
        for part, forms in self.table.parts:
            piece = part.piece
            head = f'{_quoted(part.operator)},"{part.kind.value}",{_quoted(piece.fqn)}'
            whole = f"[{','.join(map(str, piece.global_shape))}],{piece.global_start},{piece.stop - piece.start}"
            there = "true" if part.kind is RecordKind.COMPUTE or has_state[piece.fqn] else "false"
            rows += [
                f'[{name},{head},{_quoted(key)},"{dtype_code(dtype)}",{_place(key, whole if per_element else "[],0,1", nbytes)},{offset},{nbytes},'
                f"{there if is_state(key) else 'true'}]"
                for (key, dtype, per_element), (name, (offset, nbytes)) in zip(forms, places_by_name, strict=False)
            ]
        return rows + self._local_rows(), places

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
    """Layout of one boundary on this rank: its files, one behind the other, then mirrors, then gradients of experts.

    Args:
        files: the durable one first.
        mirroring: what it takes of durable files of other ranks, and they of its own.
    """

    def __init__(self, *files: FileLayout, mirroring: Mirroring | None = None) -> None:
        self.files = list(files)
        self.durable, self.view, self.groups = files[0], files[0].view, files[0].groups
        self.files_nbytes = self._stop = files[-1].stop
        """Bytes of all files."""
        self.mirrors: dict[int, FileLayout] = {}
        """Of other ranks."""
        for owner, regions in (Mirroring() if mirroring is None else mirroring).owners.items():
            if (mirror := self.durable.mirror(owner, regions, start=self._stop)) is not None:
                self.mirrors[owner], self._stop = mirror, mirror.stop
        self.mirrored = None if mirroring is None else self.durable.run(mirroring.groups)
        """Run of the durable file that holders of copies take from their own state."""
        self.gradients = self._places_of_gradients()
        """Places of the experts that leave the node."""

    @property
    def gradients_at(self) -> int:
        """Offset of what lies behind the files."""
        return aligned_gradient(self._stop)

    @property
    def mirrors_nbytes(self) -> int:
        """Bytes of what is taken for other ranks."""
        return self._stop - self.files_nbytes

    def mirrors_in(self, slot: memoryview) -> dict[int, memoryview]:
        """Return what was taken for other ranks in the memory of its step, without a copy."""
        runs = {owner: (each.start, each.run(REGIONS)) for owner, each in self.mirrors.items()}
        return {owner: slot[start + run[0] : start + run[1]] for owner, (start, run) in runs.items() if run is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of the files, of the mirrors and of the gradients behind them."""
        if not self.gradients:
            return self._stop
        last = self.gradients[-1]
        assert self.view.gradient_dtype is not None
        return self.gradients_at + last.offset + gradient_nbytes(last.part.piece.numel, self.view.gradient_dtype)

    def _places_of_gradients(self) -> list[GradientPlace]:
        dtype, view = self.view.gradient_dtype, self.view
        places: list[GradientPlace] = []
        if dtype is None:
            return places
        offset = 0
        for part in (part for part, _ in self.durable.table.parts):
            full = part.kind is RecordKind.FULL and view.operators[part.operator].kind == "expert"
            if full and view.keeps_gradient(part.piece.fqn):
                places.append(GradientPlace(part, offset))
                offset += gradient_nbytes(part.piece.numel, dtype)
        return places


@dataclass(kw_only=True)
class WindowLayout:
    """A plan made concrete: where every byte of every step lies."""

    record: PlanRecord
    steps: list[StepLayout]
    reserve_nbytes: int = 0
    """Bytes of the largest step that plans after this one may have, where they differ."""

    def mirrored(self, mirroring: Mirroring) -> WindowLayout:
        """Return the same plan with what ranks take for each other."""
        if not mirroring or self.record.plan.is_differential:
            return self
        return replace(self, steps=[StepLayout(*step.files, mirroring=mirroring) for step in self.steps])

    @property
    def mirrors_nbytes(self) -> tuple[int, int]:
        """Bytes of what is taken for other ranks, in the steps with least and with most of it."""
        sizes = [step.mirrors_nbytes for step in self.steps]
        return min(sizes), max(sizes)

    @cached_property
    def missing(self) -> frozenset[str]:
        """Names of operators on this rank of which the durable files have nothing.

        Storage takes them from older ones.
        """
        return frozenset(self.steps[0].view.operators.names) - self._durable

    @cached_property
    def is_incomplete(self) -> bool:
        """Whether there are such operators on any rank; equal on all ranks."""
        if self.record.stages:
            return self.record.is_incomplete
        return not self._durable.issuperset(all_names(self.steps[0].view.operators))

    @cached_property
    def _durable(self) -> frozenset[str]:
        return frozenset(name for step in self.record.plan.steps for name in step.files["durable"])

    @property
    def slot_nbytes(self) -> int:
        """Bytes of the largest step and what lies behind it, of those still to come too."""
        return max(self.reserve_nbytes, *(step.nbytes for step in self.steps))


def _place(key: str, place: str, nbytes: int) -> str:
    """Return shape, start and length of a record; what is compressed has no element for each of the parameter's."""
    return f"[{nbytes}],0,{nbytes}" if key == PACKED else place


def as_memoryview(buffer_U8: Tensor) -> memoryview:
    """Return the bytes of a CPU tensor, without a copy."""
    return memoryview(buffer_U8.numpy())  # type: ignore[arg-type]  # numpy's stubs do not say that arrays are buffers
