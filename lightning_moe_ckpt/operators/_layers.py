"""One Mixture-of-Experts layer as an adapter describes it: where its experts lie, its router, how to count tokens.

An adapter turns a library's layer into a `MoELayerSpec`; everything behind it (operators, counts, plans) sees only
that. A spec holds names, never modules or tensors, so that it survives moves between devices and can be compared.

Shape suffixes: E all experts, e experts on this rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from lightning_moe_ckpt.operators._bias import BiasView
from lightning_moe_ckpt.operators._capacity import CapacityView
from lightning_moe_ckpt.operators._extra_state import ExtraState
from lightning_moe_ckpt.operators._taps import CountTap
from lightning_moe_ckpt.operators._types import Holders, ParamSlice


@dataclass(frozen=True, kw_only=True)
class MoELayerSpec:
    """Where the parts of one MoE layer lie."""

    fqn: str
    """Live name of the MoE block; unique among the layers of a model."""
    num_experts: int
    """Over all expert-parallel ranks."""
    local_expert_ids: tuple[int, ...]
    """Global indices of the experts on this rank, ascending."""
    experts: Mapping[int, tuple[ParamSlice, ...]]
    """Slices by global expert index; together they cover each of the named parameters completely."""
    router: tuple[str, ...]
    """Names of the router's parameters."""
    router_buffers: tuple[str, ...] = ()
    """Names of buffers that steer or follow the router: correction bias, counters of load."""
    top_k: int | None = None
    """Experts per token, where the model says so."""
    holders: Holders = "world"
    """`expert_data` if other ranks hold other experts of this layer."""
    count: CountTap | None = None
    """How tokens per expert are counted; `None` if they cannot be, then experts keep their order."""
    probabilities: CountTap | None = None
    """How the router's probabilities are summed over tokens; `None` if they cannot be seen. Needed by soft counts."""
    capacity: CountTap | None = None
    """How the tokens that experts could take are added up; `None` if that cannot be seen. Needed by popularity per
    capacity."""
    dropped: CountTap | None = None
    """How tokens dropped over capacity are counted; `None` if they are not. Only looked at by monitors."""
    live_capacity: CapacityView | None = None
    """Reads and sets the capacity itself; `None` if the layer has none (dropless) or hides it. Its value at every
    step boundary is part of the journal, and comes back with a restart."""
    bias: BiasView | None = None
    """The router's selection-only bias, where it has one. As a buffer or parameter it is captured in any case."""
    extra: ExtraState | None = None
    """State in plain attributes, captured with the journal and restored; `None` if there is none."""
    graphs: tuple[tuple[str, str], ...] = ()
    """(module, attribute) that hold a tensor with its graph after a forward, such as an auxiliary loss. They are
    detached after each optimizer step: a module with such a tensor cannot be copied, as averaging callbacks do."""

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
    """All of a parameter that every holder has in full."""
    return ParamSlice(fqn=fqn, start=0, stop=param.numel(), global_shape=tuple(param.shape), global_start=0)


def stacked_slices(
    params: Mapping[str, nn.Parameter], local_expert_ids: Sequence[int], num_experts: int
) -> dict[int, tuple[ParamSlice, ...]]:
    """Cut stacked tensors `[e, ...]` into their experts.

    Args:
        params: by live name; dimension 0 of each counts the experts of this rank.
        local_expert_ids: global expert index of each row.
        num_experts: over all ranks; the global shape is `[num_experts, ...]`.

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
    """Cut tensors `[e * F, ...]`, in which the rows of one expert come after those of another, into their experts.

    Args:
        params: by live name; each has equally many rows for each expert of this rank.
        local_expert_ids: global expert index of each block of rows.
        num_experts: over all ranks.

    Returns:
        Slices by global expert index, one per parameter.
    """
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
