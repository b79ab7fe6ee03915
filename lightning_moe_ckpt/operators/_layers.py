"""Description of one Mixture-of-Experts layer: its experts, its router, and how to count tokens.

An adapter turns a library's layer into a `MoELayerSpec`. Operators, counts and plans see only the spec. It holds names,
never modules or tensors, so that it survives moves between devices and can be compared.

Shape suffixes: E all experts, e experts on this rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from lightning_moe_ckpt.operators._operator import Holders, ParamSlice
from lightning_moe_ckpt.operators._taps import CountTap
from lightning_moe_ckpt.operators._views import BiasView, CapacityView, ExtraState


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
    count: CountTap | None = None
    """Counts tokens per expert. `None` if that is not possible; experts then keep a fixed order."""
    probabilities: CountTap | None = None
    """Sums the router's probabilities over tokens, for soft counts; `None` if they are not visible."""
    capacity: CountTap | None = None
    """Sums the tokens that experts could take, for popularity per capacity; `None` if that is not visible."""
    dropped: CountTap | None = None
    """Counts tokens dropped over capacity, for monitors only; `None` if they are not visible."""
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
    """Return the slice of a whole parameter, which every holder has in full."""
    return ParamSlice(fqn=fqn, start=0, stop=param.numel(), global_shape=tuple(param.shape), global_start=0)


def whole_slices(params: Mapping[int, Mapping[str, nn.Parameter]]) -> dict[int, tuple[ParamSlice, ...]]:
    """Return the slices of parameters that belong to one expert each, given by global expert index and live name."""
    return {expert: tuple(whole_slice(fqn, p) for fqn, p in own.items()) for expert, own in params.items()}


def stacked_slices(
    params: Mapping[str, nn.Parameter], local_expert_ids: Sequence[int], num_experts: int
) -> dict[int, tuple[ParamSlice, ...]]:
    """Cut stacked tensors `[e, ...]` into their experts.

    Args:
        params: stacked parameters by live name; dimension 0 of each is the experts of this rank.
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
    """Cut tensors `[e * F, ...]` into their experts; each expert has F consecutive rows.

    Args:
        params: parameters by live name.
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
