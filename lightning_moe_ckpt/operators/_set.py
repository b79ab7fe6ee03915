"""The operators of a model, in the same order in every process that builds the same model."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor
from xxhash import xxh3_128_hexdigest

from lightning_moe_ckpt.operators._layers import MoELayerSpec
from lightning_moe_ckpt.operators._operator import Operator


@dataclass(frozen=True)
class OperatorSet:
    """The operators of one rank; together their slices cover every parameter exactly once, but for constants."""

    operators: tuple[Operator, ...]
    """In the order of `named_parameters()`, experts of a layer ascending."""
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
    identity: str = field(default="", repr=False)
    """The fingerprint; it does not change when operators are split."""

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

    def loads(self, counts: Tensor | Sequence[int]) -> dict[str, int]:
        """Return the tokens of each expert operator on this rank.

        Args:
            counts: tokens over all layers and experts, from `LoadCounter.read_and_reset`.
        """
        values = counts.tolist() if isinstance(counts, Tensor) else list(counts)
        if len(values) != self.num_experts:
            raise ValueError(f"`counts` has {len(values)} entries for {self.num_experts} experts.")
        return {
            op.name: int(values[self.count_offsets[op.layer] + op.expert_idx])
            for op in self.operators
            if op.layer is not None and op.expert_idx is not None
        }

    def with_operators(self, operators: Sequence[Operator]) -> OperatorSet:
        """Return the set with other operators, e.g. after `split`; the fingerprint stays."""
        return replace(self, operators=tuple(operators))

    def without(self, constants: Collection[str], thawed: Sequence[str] = ()) -> OperatorSet:
        """Return the set in which some parameters are constants, and some were; the fingerprint stays.

        Operators of which nothing is left are left out, and so are layers without experts that train: they lose no tokens.
        """
        whole = self.whole or self
        if not constants and not thawed:
            return whole
        apart = {*constants, *thawed}
        cut = [replace(op, slices=tuple(s for s in op.slices if s.fqn not in apart)) for op in whole]
        kept = [op for op in cut if op.slices]
        for fqn in thawed:
            piece = max((s for op in whole for s in op.slices if s.fqn == fqn), key=lambda s: s.stop)
            alone = replace(piece, start=0, global_start=0)
            kept.append(Operator(name=f"{fqn}/thawed", kind="dense", slices=(alone,)))
        training = {op.layer for op in kept if op.expert_idx is not None}
        return replace(
            whole,
            operators=tuple(kept),
            layers=tuple(layer for layer in whole.layers if layer.fqn in training),
            constants=tuple(fqn for fqn in whole.dtypes if fqn in constants),
            thawed=tuple(thawed),
            whole=whole,
        )

    def fingerprint(self) -> str:
        """Return a digest of names, global shapes and dtypes. Equal on all ranks, at any expert parallelism.

        Two models with the same fingerprint can exchange records. Expert parameters enter by layer, without names that
        contain the expert's index.
        """
        return self.identity


def identify(operators: Sequence[Operator], layers: Sequence[MoELayerSpec], dtypes: Mapping[str, torch.dtype]) -> str:
    """Compute the digest for `OperatorSet.fingerprint`."""
    lines = [
        f"{op.name}|{s.fqn}|{s.global_shape}|{dtypes[s.fqn]}"
        for op in operators
        if op.kind != "expert"
        for s in op.slices
    ]
    for layer in layers:
        experts = {tuple((s.global_shape, str(dtypes[s.fqn])) for s in slices) for slices in layer.experts.values()}
        lines.append(f"{layer.fqn}|{layer.num_experts}|{sorted(experts)}")
    return xxh3_128_hexdigest("\n".join(lines).encode())
