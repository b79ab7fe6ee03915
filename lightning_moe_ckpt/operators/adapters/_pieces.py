"""Slices of an expert's part of a parameter, for adapters of single libraries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

from torch import nn

from lightning_moe_ckpt.errors import UnknownLayout
from lightning_moe_ckpt.operators._layers import whole_slice
from lightning_moe_ckpt.operators._types import ParamSlice


def piece(fqn: str, param: nn.Parameter, place: int, global_place: int, places: int, *, among: int = 1) -> ParamSlice:
    """The part at `place` of `among` equal ones in a parameter, which is at `global_place` of `places` over all ranks."""
    numel, shape = param.numel() // among, param.shape or (1,)
    return ParamSlice(
        fqn=fqn,
        start=place * numel,
        stop=(place + 1) * numel,
        global_shape=(shape[0] // among * places, *shape[1:]),
        global_start=global_place * numel,
    )


def intervals(params: Mapping[str, nn.Parameter], num_experts: int) -> dict[int, tuple[ParamSlice, ...]]:
    """Equal flat intervals, one per expert, of parameters that are viewed as `[E, ...]` whatever their own shape is."""
    for fqn, param in params.items():
        if param.numel() % num_experts:
            raise UnknownLayout(f"`{fqn}` {tuple(param.shape)} cannot be shared by {num_experts} experts evenly.")
    return {
        expert: tuple(_interval(n, p, expert, num_experts) for n, p in params.items()) for expert in range(num_experts)
    }


def wholes(params: Sequence[Mapping[str, nn.Parameter]]) -> dict[int, tuple[ParamSlice, ...]]:
    """Parameters of each expert's own."""
    return {expert: tuple(whole_slice(n, p) for n, p in own.items()) for expert, own in enumerate(params)}


def refuse_spread(fqn: str, library: str, *, found: str, wanted: str) -> NoReturn:
    """Expert parallelism of a library's own engine: nothing here knows its groups.

    Raises:
        UnknownLayout: always.
    """
    raise UnknownLayout(
        f"`{fqn}` is a layer of {library} with {found}; only its own trainer can reduce the gradients of experts that are "
        f"spread over ranks. Build it with {wanted}, so that every rank has all experts, or take a `MoELayer`, which "
        "`MoEStrategy` spreads over ranks."
    )


def under(prefix: str, name: str) -> str:
    """Name of something in the module `prefix`."""
    return f"{prefix}.{name}" if prefix else name


def first_present(module: nn.Module, names: Iterable[str]) -> str | None:
    """The first of these attributes that the module has, and that is not `None`."""
    return next((name for name in names if getattr(module, name, None) is not None), None)


def _interval(fqn: str, param: nn.Parameter, expert: int, num_experts: int) -> ParamSlice:
    numel = param.numel() // num_experts
    start = expert * numel
    return ParamSlice(fqn=fqn, start=start, stop=start + numel, global_shape=(num_experts, numel), global_start=start)
