"""Tutel's `moe_layer`: this rank's experts, stacked or not, behind one or several gates.

Rank r of the layer's group has experts `[r * e, (r + 1) * e)`. Tutel is never imported: its layers are recognised by
class name. Settings that would silently train wrongly are refused before training; those that a finished layer does not
show (a call with `megablocks_size`, environment variables that skip parts of it) are not.

`load_state_dict` of such a layer fills experts that are missing with zeros and reports that all keys matched; nothing
here goes through it: records are copied into parameters, slice by slice, and `MoEStrategy` refuses such checkpoints.

Source: Tutel 0.4 (commit ac0e51b), `impls/moe_layer.py`, `experts/*.py`, `impls/fast_dispatch.py`.
"""

# Shape suffixes: T tokens on this rank, K top-k, E all experts, e experts of this rank.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_moe_ckpt.errors import UnknownLayout
from lightning_moe_ckpt.moe._layer import in_backward
from lightning_moe_ckpt.operators._count_taps import HookTap, ProbabilityTap, Share, TokenCounts, add_share
from lightning_moe_ckpt.operators._operator import MoELayerSpec, ParamSlice
from lightning_moe_ckpt.operators._parameters import ParameterIndex, join
from lightning_moe_ckpt.operators._views import AttributeCapacity, AttributeState, Capacity
from lightning_moe_ckpt.parallel._expert_parallel import tutel_refusal


def describe_tutel(fqn: str, block: nn.Module, index: ParameterIndex) -> MoELayerSpec:
    """Describe a `tutel.moe.moe_layer`. Raises `UnknownLayout` if it would train wrongly as built, or its experts cannot be told apart."""
    layer: Any = block
    if (reason := tutel_refusal(layer)) is not None:
        raise UnknownLayout(f"Tutel layer `{fqn}` {reason}")
    rank = dist.get_rank(layer.group) if layer.world_size > 1 else 0
    num_local, num_experts = int(layer.num_local_experts), int(layer._num_global_experts)  # noqa: SLF001
    ids = tuple(range(rank * num_local, (rank + 1) * num_local))
    gates = [join(fqn, f"gates.{i}") for i in range(len(layer.gates))]
    return MoELayerSpec(
        fqn=fqn,
        num_experts=num_experts,
        local_expert_ids=ids,
        experts=_cut(fqn, layer, index, ids, num_experts),
        router=tuple(index.under(join(fqn, "gates"))),
        top_k=int(layer.gates[0].top_k) if len(gates) == 1 else None,
        holders="expert_data" if num_local < num_experts else "stage",
        count=TutelTap(fqn),
        probabilities=ProbabilityTap(gates[0], "softmax") if len(gates) == 1 else None,
        capacity=TutelTap(fqn, "capacity"),
        dropped=TutelTap(fqn, "dropped"),
        live_capacity=AttributeCapacity(
            fqn, tuple(f"gates.{i}.capacity_factor" for i in range(len(gates))), positive="batch_prioritized_routing"
        ),
        extra=AttributeState(tuple((gate, "gate_noise") for gate in gates)),
        graphs=((fqn, "l_aux"),),
    )


@dataclass(frozen=True)
class TutelTap(HookTap):
    """Sum of one share of a layer's dispatched tokens.

    `dispatch_count` is the demand of this rank's tokens, before dropping. With prioritised routing it is wrong, so the choices are
    counted, which newer versions keep beside it. The rows given to experts show the capacity.
    """

    layer: str
    """Name of the layer."""
    share: Share = "processed"

    def install(self, module: nn.Module, counts: TokenCounts) -> list[RemovableHandle]:
        """Hook the layer's forward, and its experts'."""
        layer = module.get_submodule(self.layer)
        rows: list[int] = []

        def before(_layer: nn.Module, _args: tuple[Any, ...]) -> None:
            rows.clear()

        def experts_called(_experts: nn.Module, args: tuple[Any, ...]) -> None:
            rows.append(args[0].shape[0] * args[0].shape[1])

        def after(called: nn.Module, _args: tuple[Any, ...], _out: Any) -> None:
            if not called.training or in_backward() or not rows:
                return
            if (demand_E := _demand(called)) is None:
                counts.missed(self.layer, "has prioritised routing, with which this version of Tutel miscounts")
                return
            # Each source rank has C places at each expert: `[e, ranks * C]`, in one call or cut into several.
            add_share(counts, self.share, (demand_E, sum(rows) // counts.num_experts))

        return [
            layer.register_forward_pre_hook(before),
            layer.get_submodule("experts").register_forward_pre_hook(experts_called),
            layer.register_forward_hook(after),
        ]


def tutel_slots(block: Any, factors: Capacity) -> Callable[[int], int] | None:
    """Return a function from this rank's tokens to an expert's slots, for a layer like Tutel's; `None` for another
    layer. A forward's gate is not known; of the gates' several factors the largest counts.

    Source: Tutel (commit 82af7aa), `impls/fast_dispatch.py`, lines 182-199.
    """
    if not hasattr(block, "dispatch_count") and not hasattr(block, "_num_global_experts"):
        return None
    assert isinstance(factors, tuple)
    factor = max(abs(float(each)) for each in factors if isinstance(each, int | float))
    top_k = int(block.gates[0].top_k)
    num_experts = int(block._num_global_experts)  # noqa: SLF001
    shares = int(getattr(block, "sharded_count", 1)) * int(getattr(block, "a2a_ffn_overlap_degree", 1) or 1)

    def slots(num_tokens: int) -> int:
        number = top_k * int(factor * -(-num_tokens // num_experts))
        return -(-number // shares) * shares

    return slots


def _demand(layer: Any) -> Tensor | None:
    dispatched_E: Tensor = layer.dispatch_count
    if (topk_idx_TK := getattr(dispatched_E, "topk_ids", None)) is None:
        return None if layer.batch_prioritized_routing else dispatched_E
    idx = topk_idx_TK.reshape(-1).to(torch.int64)
    return torch.zeros_like(dispatched_E, dtype=torch.int64).scatter_add_(0, idx, torch.ones_like(idx))


def _cut(
    fqn: str, layer: Any, index: ParameterIndex, ids: Sequence[int], num_experts: int
) -> dict[int, tuple[ParamSlice, ...]]:
    """Return each expert's slices: rows of stacks, intervals of flat tensors, or listed modules. Raises `UnknownLayout`."""
    prefix = join(fqn, "experts")
    modules = _numbered(layer.experts, len(ids))
    slices: dict[int, list[ParamSlice]] = {expert: [] for expert in ids}
    for name, param in index.under(prefix).items():
        local = next((i for i, path in enumerate(modules) if name.startswith(f"{prefix}.{path}.")), None)
        if local is not None:
            slices[ids[local]].append(_piece(name, param, 0, ids[local] // len(ids), num_experts // len(ids)))
        elif len(ids) == 1 or param.shape[0] == len(ids) or _is_flat(layer, name, param):
            for i, expert in enumerate(ids):
                slices[expert].append(_piece(name, param, i, expert, num_experts, among=len(ids)))
        else:
            raise UnknownLayout(
                f"`{name}` {tuple(param.shape)} of Tutel layer `{fqn}` does not show which of its elements belong to "
                f"which of {len(ids)} experts. Stack experts in dimension 0, or hold them in a ModuleList."
            )
    return {expert: tuple(pieces) for expert, pieces in slices.items()}


def _numbered(experts: nn.Module, num_local: int) -> list[str]:
    """Return the names within `experts` of modules with one expert each; none without a list of experts."""
    for name, child in experts.named_modules():
        if isinstance(child, nn.ModuleList) and len(child) == num_local:
            return [f"{name}.{i}" if name else str(i) for i in range(num_local)]
    return []


def _is_flat(layer: Any, name: str, param: nn.Parameter) -> bool:
    """Whether a parameter is one of `llama_ffn`, which keeps `[e, D, F]` in one dimension and its shape beside it."""
    shape = getattr(layer.experts, f"{name.rpartition('.')[2]}_full_shape", None)
    return (
        shape is not None and param.ndim == 1 and shape[0] == layer.num_local_experts and shape.numel() == param.numel()
    )


def _piece(fqn: str, param: nn.Parameter, place: int, global_place: int, places: int, *, among: int = 1) -> ParamSlice:
    """Return part `place` of `among` equal parts; over all ranks it is part `global_place` of `places`."""
    numel, shape = param.numel() // among, param.shape or (1,)
    return ParamSlice(
        fqn=fqn,
        start=place * numel,
        stop=(place + 1) * numel,
        global_shape=(shape[0] // among * places, *shape[1:]),
        global_start=global_place * numel,
    )
