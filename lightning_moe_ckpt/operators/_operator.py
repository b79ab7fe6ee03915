"""A model's operators, the MoE layers from which they are cut, and the set of them all.

An operator is a group of parameter slices that are captured and restored together. It is not a module. A stacked expert
tensor `[E, ...]` gives `E` operators, each a flat interval of that tensor; a dense transformer block is one operator made of
whole parameters. All coordinates are global, so that another number of ranks can read a record later.

An adapter describes a library's layer as a `MoELayerSpec`: its experts, its router, and how to count tokens. Operators,
counts and plans see only the spec. It holds names, never modules or tensors, so that it survives moves between devices and
can be compared. Every process that builds the same model has the same `OperatorSet`, in the same order.

Shape suffixes: E all experts, e experts on this rank.

Source: MoEvement (2026), Sec. 3.1 (operators); we differ in slicing parameters instead of naming modules.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Literal

import torch
from torch import nn
from xxhash import xxh3_128_hexdigest

from lightning_moe_ckpt.operators._count_taps import CountTap
from lightning_moe_ckpt.operators._coupling import Coupling
from lightning_moe_ckpt.operators._views import BiasView, CapacityView, ExtraState

OperatorKind = Literal["expert", "router", "dense"]
Holders = Literal["stage", "expert_data"]


class RecordKind(str, Enum):
    """Content of an operator's record."""

    FULL = "full"
    """Master weights and optimizer state, or the fact that there is no state yet."""
    COMPUTE = "compute"
    """The weights that forward and backward read, in the precision in which they read them."""
    DELTA = "delta"
    """Difference from the state at the boundary before: the gradient as the optimizer consumed it, or the whole state of a
    parameter whose step cannot be repeated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamSlice:
    """A flat interval `[start, stop)` of one contiguous parameter, with its place in the global tensor.

    Where a parameter is in shards, operators have global intervals, and files have intervals in their writers' memory.
    """

    fqn: str
    """Name in `named_parameters()` of the live model; the first one for tied parameters."""
    start: int
    """First element in the flattened local parameter."""
    stop: int
    """Index behind the last element."""
    global_shape: tuple[int, ...]
    """Shape of the parameter over all expert-parallel ranks."""
    global_start: int
    """Index of the first element in the flattened global parameter, or in the flattened `box`."""
    box: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """The writer's box, as global offset and size, where that is no flat interval; else `None`."""

    @property
    def numel(self) -> int:
        """Elements in the slice."""
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    """Smallest unit of capture: a part of the model with all of its optimizer state."""

    name: str
    """Unique and stable, e.g. `blocks.0.moe/expert.3`, `blocks.0.moe/router`, `blocks.0`."""
    kind: OperatorKind
    slices: tuple[ParamSlice, ...]
    layer: str | None = None
    """FQN of the MoE layer an expert or router belongs to."""
    expert_idx: int | None = None
    """Global expert index; `None` for routers and dense operators."""
    holders: Holders = "stage"
    """Ranks with the same bits: all ranks of the pipeline stage (of the world, without stages), or those with the same experts."""
    buffers: tuple[str, ...] = ()
    """Names of a router's buffers. Buffers are not sliced: every segment has all of them whole."""

    @property
    def numel(self) -> int:
        """Elements in all slices."""
        return sum(s.numel for s in self.slices)


def unit_of(piece: ParamSlice, coupling: Coupling) -> int:
    """Return the number of elements of a slice that stay together, since an optimizer updates them together."""
    if coupling == "matrix" and len(piece.global_shape) > 1:
        return min(math.prod(piece.global_shape[-2:]), piece.numel)
    return piece.numel if coupling == "parameter" else 1


def _is_apart(piece: ParamSlice, coupling: Coupling) -> bool:
    """Return whether an optimizer updates a slice of a parameter without the rest."""
    matrix = math.prod(piece.global_shape[-2:])
    return coupling == "matrix" and len(piece.global_shape) > 2 and not (piece.start % matrix or piece.numel % matrix)


def split(
    operator: Operator,
    max_nbytes: int,
    bytes_per_element: int | Callable[[ParamSlice], int],
    coupling: Coupling = "element",
) -> list[Operator]:
    """Cut `operator` into pieces of at most `max_nbytes`, between rows of the last dimension if a row fits. Return
    `[operator]` if it fits, else operators `name#0`, `name#1`, ... that cover it once, in order. Whole matrices or
    parameters stay in one piece, if the optimizer's coupling asks for it.

    The limit is for one piece's FULL record, without state of fixed size (a step count), of so many bytes per element,
    for all slices or by slice. Raises `ValueError` if not even one element fits, or one matrix or parameter that stays
    together.
    """
    pieces: list[list[ParamSlice]] = [[]]
    room = max_nbytes
    for piece in operator.slices:
        width = bytes_per_element(piece) if callable(bytes_per_element) else bytes_per_element
        unit = unit_of(piece, coupling)
        if width * unit > max_nbytes:
            what = "one element" if unit == 1 else f"{unit} elements"
            raise ValueError(
                f"`split(max_nbytes={max_nbytes})` cannot hold {what} of `{piece.fqn}` ({width * unit} bytes)."
            )
        start = piece.start
        while start < piece.stop or piece.numel == 0:
            take = _take(piece, start, room // width, max_nbytes // width, unit)
            if take or piece.numel == 0:
                moved = piece.global_start + start - piece.start
                pieces[-1].append(replace(piece, start=start, stop=start + take, global_start=moved))
                start, room = start + take, room - take * width
            if start >= piece.stop:
                break
            pieces.append([])
            room = max_nbytes
    if len(pieces) == 1:
        return [operator]
    return [
        replace(operator, name=f"{operator.name}#{i}", slices=tuple(s), buffers=operator.buffers if i == 0 else ())
        for i, s in enumerate(pieces)
    ]


def _take(piece: ParamSlice, start: int, room: int, most: int, unit: int) -> int:
    """Return the slice's elements to take now: the rest if it fits, else whole rows, else what fits."""
    if (left := piece.stop - start) <= room:
        return left
    row = max(piece.global_shape[-1] if piece.global_shape else 1, unit)
    # If a piece can hold a row at all, never cut inside one: start a new piece instead.
    return room // row * row if row <= most else room


@dataclass(frozen=True, kw_only=True)
class MoELayerSpec:
    """Names of the parts of one MoE layer."""

    fqn: str
    """Name of the MoE block in the live model; unique among its layers."""
    num_experts: int
    """Number of experts over all expert-parallel ranks."""
    local_expert_ids: tuple[int, ...]
    """Global indices of the experts on this rank, ascending."""
    experts: Mapping[int, tuple[ParamSlice, ...]]
    """Slices by global expert index; together they cover each of the named parameters completely."""
    router: tuple[str, ...]
    """Names of the router's parameters."""
    router_buffers: tuple[str, ...] = ()
    """Names of the router's buffers: correction bias, load counters."""
    top_k: int | None = None
    """Experts per token, where the model says so."""
    holders: Holders = "stage"
    """Ranks with the same experts: `expert_data` if other ranks hold other experts of this layer."""
    owners: tuple[int, ...] = ()
    """Position of each expert, if experts are in shards: those with one owner have one. Known when ranks have told each other."""
    count: CountTap | None = None
    """Counts tokens per expert. `None` if that is not possible; experts then keep a fixed order."""
    probabilities: CountTap | None = None
    """Sums the router's probabilities over tokens, for soft counts; `None` if probabilities are not visible."""
    capacity: CountTap | None = None
    """Sums the tokens that experts could take, for popularity per capacity; `None` if that is not visible."""
    dropped: CountTap | None = None
    """Counts tokens dropped over capacity, for monitors only; `None` if drops are not visible."""
    live_capacity: CapacityView | None = None
    """Reads and sets the capacity itself; `None` if the layer has none (dropless) or hides it. The journal stores the
    value at every step boundary, and a restart restores it."""
    bias: BiasView | None = None
    """The router's selection-only bias, if any. As a buffer or parameter it is captured in any case."""
    extra: ExtraState | None = None
    """State in plain attributes, captured with the journal and restored; `None` if there is none."""
    graphs: tuple[tuple[str, str], ...] = ()
    """(module, attribute) pairs that hold a tensor with its graph after a forward, such as an auxiliary loss. They are
    detached after each optimizer step, because averaging callbacks cannot copy a module with such a tensor."""

    @property
    def prefix(self) -> str:
        """First part of the names of this layer's operators."""
        return self.fqn or "root"

    def __post_init__(self) -> None:
        ids = self.local_expert_ids
        if tuple(sorted(self.experts)) != ids or len(set(ids)) != len(ids):
            raise ValueError(
                f"MoE layer `{self.fqn}`: `local_expert_ids` must be ascending and name `experts` exactly."
            )
        if ids and not (ids[0] >= 0 and ids[-1] < self.num_experts):
            raise ValueError(f"MoE layer `{self.fqn}`: expert ids {ids} are outside `[0, {self.num_experts})`.")


def whole_slice(fqn: str, param: nn.Parameter) -> ParamSlice:
    """Return the slice of a whole parameter, held in full by every holder."""
    return ParamSlice(fqn=fqn, start=0, stop=param.numel(), global_shape=tuple(param.shape), global_start=0)


def whole_slices(params: Mapping[int, Mapping[str, nn.Parameter]]) -> dict[int, tuple[ParamSlice, ...]]:
    """Return the slices of parameters with one expert each, given by global expert index and live name."""
    return {expert: tuple(whole_slice(fqn, p) for fqn, p in own.items()) for expert, own in params.items()}


def stacked_slices(
    params: Mapping[str, nn.Parameter], local_expert_ids: Sequence[int], num_experts: int
) -> dict[int, tuple[ParamSlice, ...]]:
    """Cut stacked tensors `[e, ...]` into their experts.

    Args:
        params: stacked parameters by live name; dimension 0 of each is this rank's experts.
        local_expert_ids: global expert index of each row.
        num_experts: number of experts over all ranks; the global shape is `[num_experts, ...]`.

    Returns:
        Slices by global expert index, one per parameter.
    """
    for fqn, param in params.items():
        if param.shape[0] != len(local_expert_ids):
            raise ValueError(f"`{fqn}` has {param.shape[0]} rows for {len(local_expert_ids)} local experts.")
    return merged_slices(params, local_expert_ids, num_experts)


def merged_slices(
    params: Mapping[str, nn.Parameter], local_expert_ids: Sequence[int], num_experts: int
) -> dict[int, tuple[ParamSlice, ...]]:
    """Cut tensors `[e * F, ...]`, of which each expert has F consecutive rows; otherwise as `stacked_slices`."""
    slices: dict[int, list[ParamSlice]] = {expert: [] for expert in local_expert_ids}
    num_local = len(local_expert_ids)
    for fqn, param in params.items():
        if param.shape[0] % num_local:
            raise ValueError(f"`{fqn}` has {param.shape[0]} rows, which {num_local} local experts cannot share evenly.")
        row = param.numel() // num_local
        shape = (param.shape[0] // num_local * num_experts, *param.shape[1:])
        for local, expert in enumerate(local_expert_ids):
            start = local * row
            piece = ParamSlice(fqn=fqn, start=start, stop=start + row, global_shape=shape, global_start=expert * row)
            slices[expert].append(piece)
    return {expert: tuple(pieces) for expert, pieces in slices.items()}


@dataclass(frozen=True)
class OperatorSet:
    """A rank's operators; together their slices cover every parameter exactly once, but for constants."""

    operators: tuple[Operator, ...]
    """Operators in the order of `named_parameters()`, experts of a layer ascending."""
    layers: tuple[MoELayerSpec, ...]
    """MoE layers, in the order of the model."""
    dtypes: Mapping[str, torch.dtype]
    """Dtype of each parameter, by first name."""
    ep_size: int = 1
    """Consecutive ranks over which experts are sharded, in layers with `holders="expert_data"`."""
    constants: tuple[str, ...] = ()
    """Parameters that no operator has, since training does not change them: they are stored once."""
    thawed: tuple[str, ...] = ()
    """Parameters that were constants until they changed: each is a dense operator by itself."""
    whole: OperatorSet | None = field(default=None, repr=False)
    """The set without constants, if this has some or had."""
    fingerprint: str = field(default="", repr=False)
    """Digest of names, global shapes and dtypes. Equal on all ranks, at any expert parallelism, and however operators are split.

    Two models with the same fingerprint can exchange records. Expert parameters enter by layer, without the expert's index in
    their names.
    """

    def __post_init__(self) -> None:
        if len(self._by_name) < len(self.operators):
            raise ValueError("Operator names must be unique.")

    @cached_property
    def _by_name(self) -> dict[str, Operator]:
        return {op.name: op for op in self.operators}

    def __iter__(self) -> Iterator[Operator]:
        return iter(self.operators)

    def __len__(self) -> int:
        return len(self.operators)

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __getitem__(self, name: str) -> Operator:
        """Return the operator called `name`. Raises `KeyError`."""
        return self._by_name[name]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the operators, in order."""
        return tuple(op.name for op in self.operators)

    @cached_property
    def count_offsets(self) -> dict[str, int]:
        """Return the index of each layer's first expert in a vector of counts."""
        offsets, total = {}, 0
        for layer in self.layers:
            offsets[layer.fqn] = total
            total += layer.num_experts
        return offsets

    @property
    def num_experts(self) -> int:
        """Number of experts of all layers over all ranks: the length of a vector of counts."""
        return sum(layer.num_experts for layer in self.layers)

    def with_operators(self, operators: Sequence[Operator]) -> OperatorSet:
        """Return the set with other operators, e.g. after `split`; the fingerprint stays."""
        return replace(self, operators=tuple(operators))

    def joined(self, coupling: Coupling) -> OperatorSet:
        """Return the set with a layer's experts as one dense operator if an optimizer updates elements of several experts together.

        Such layers have no experts to take apart.
        """
        if coupling == "element":
            return self
        sharing = Counter(fqn for op in self for fqn in {piece.fqn for piece in op.slices})
        whole = {op.layer for op in self if any(sharing[s.fqn] > 1 and not _is_apart(s, coupling) for s in op.slices)}
        operators: dict[str, Operator] = {}
        for op in self:
            if op.expert_idx is None or op.layer not in whole:
                operators[op.name] = op
                continue
            name = f"{op.name.rpartition('/')[0]}/experts"
            before = operators.get(name, replace(op, name=name, kind="dense", slices=(), expert_idx=None))
            pieces = {piece.fqn: piece for piece in before.slices}
            for piece in op.slices:
                pieces[piece.fqn] = replace(pieces.get(piece.fqn, piece), stop=piece.stop)
            operators[name] = replace(before, slices=tuple(pieces.values()))
        layers = tuple(layer for layer in self.layers if layer.fqn not in whole)
        return replace(self, operators=tuple(operators.values()), layers=layers)

    def without(self, constants: Collection[str], thawed: Sequence[str] = ()) -> OperatorSet:
        """Return the set with these parameters as constants, and `thawed` ones as operators of their own; the fingerprint stays.

        Operators without slices are left out, and so are layers without training experts, which lose no tokens.
        """
        whole = self.whole or self
        if not constants and not thawed:
            return whole
        apart = {*constants, *thawed}
        cut = [replace(op, slices=tuple(s for s in op.slices if s.fqn not in apart)) for op in whole]
        kept = [op for op in cut if op.slices]
        for fqn in thawed:
            piece = max((s for op in whole for s in op.slices if s.fqn == fqn), key=lambda s: s.stop)
            kept.append(Operator(name=f"{fqn}/thawed", kind="dense", slices=(replace(piece, start=0, global_start=0),)))
        training = {op.layer for op in kept if op.expert_idx is not None}
        layers = tuple(layer for layer in whole.layers if layer.fqn in training)
        fixed = tuple(fqn for fqn in whole.dtypes if fqn in constants)
        return replace(whole, operators=tuple(kept), layers=layers, constants=fixed, thawed=tuple(thawed), whole=whole)


def identify(operators: Sequence[Operator], layers: Sequence[MoELayerSpec], dtypes: Mapping[str, torch.dtype]) -> str:
    """Compute the digest for `OperatorSet.fingerprint`."""
    dense = [op for op in operators if op.kind != "expert"]
    lines = [f"{op.name}|{s.fqn}|{s.global_shape}|{dtypes[s.fqn]}" for op in dense for s in op.slices]
    for layer in layers:
        experts = {tuple((s.global_shape, str(dtypes[s.fqn])) for s in slices) for slices in layer.experts.values()}
        lines.append(f"{layer.fqn}|{layer.num_experts}|{sorted(experts)}")
    return xxh3_128_hexdigest("\n".join(lines).encode())
