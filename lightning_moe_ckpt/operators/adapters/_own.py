"""`MoELayer`, and any layer that offers the same attributes: stacked experts, perhaps sharded over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, cast

from torch import Tensor, nn

from lightning_moe_ckpt.moe import MoELayer
from lightning_moe_ckpt.operators._layers import MoELayerSpec, stacked_slices
from lightning_moe_ckpt.operators._parameters import ParameterIndex, join
from lightning_moe_ckpt.operators._taps import AttributeTap, CapacityTap, ProbabilityTap
from lightning_moe_ckpt.operators._views import AttributeCapacity, CapacityView, ExpertCapacity
from lightning_moe_ckpt.operators.adapters._routers import find_router_buffers, find_top_k

_COUNTER, _DROPS = "tokens_per_expert", "drops_per_expert"
_PROBS, _FACTOR = "probabilities", "capacity_factor"
_Params = Mapping[str, nn.Parameter] | Iterable[nn.Parameter | tuple[str, nn.Parameter]]


class _OwnLayer(Protocol):
    num_experts: int
    local_expert_ids: Sequence[int]

    def expert_parameters(self) -> _Params: ...

    def router_parameters(self) -> _Params: ...

    def expert_parallel_parameters(self) -> _Params: ...


_ATTRIBUTES = (
    "num_experts",
    "local_expert_ids",
    "expert_parameters",
    "router_parameters",
    "expert_parallel_parameters",
)


def describe_own(fqn: str, module: nn.Module, index: ParameterIndex) -> MoELayerSpec | None:
    """Return the layer's spec, or `None` if it lacks one of the attributes.

    * `num_experts` counts over all ranks.
    * `local_expert_ids` has the global index of each row of the stacked expert parameters.
    * `tokens_per_expert` and `drops_per_expert` (optional) count tokens over all experts.
    * `probabilities` (optional) is a submodule that emits the gate's probabilities `[T, E]`.
    * `capacity(num_tokens)` (optional) returns the tokens that an expert can take.
    * `capacity_factor` (optional) is a number read at every forward, zero for a layer that drops nothing.
    """
    if not all(hasattr(module, name) for name in _ATTRIBUTES):
        return None
    layer = cast("_OwnLayer", module)
    local = tuple(int(i) for i in layer.local_expert_ids)
    experts = _by_name(layer.expert_parameters(), index)
    return MoELayerSpec(
        fqn=fqn,
        num_experts=layer.num_experts,
        local_expert_ids=local,
        experts=stacked_slices(experts, local, layer.num_experts),
        router=tuple(_by_name(layer.router_parameters(), index)),
        router_buffers=find_router_buffers(module, fqn, layer.num_experts),
        top_k=find_top_k(module, *module.children()),
        holders="expert_data" if len(local) < layer.num_experts else "stage",
        count=_follow(fqn, module, _COUNTER),
        probabilities=ProbabilityTap(join(fqn, _PROBS), "none") if _PROBS in dict(module.named_children()) else None,
        capacity=CapacityTap(fqn),
        live_capacity=_find_capacity(fqn, module, layer.num_experts),
        dropped=_follow(fqn, module, _DROPS),
    )


def _find_capacity(fqn: str, module: nn.Module, num_experts: int) -> CapacityView | None:
    if isinstance(module, MoELayer):
        return ExpertCapacity(fqn, _FACTOR, num_experts)
    # Whether another class accepts a factor per expert is not known.
    return AttributeCapacity(fqn, (_FACTOR,)) if isinstance(getattr(module, _FACTOR, None), int | float) else None


def _follow(fqn: str, module: nn.Module, attribute: str) -> AttributeTap | None:
    return AttributeTap(fqn, attribute) if isinstance(getattr(module, attribute, None), Tensor) else None


def _by_name(params: _Params, index: ParameterIndex) -> dict[str, nn.Parameter]:
    """Return parameters by live name, whether the layer returns a mapping, pairs or the parameters alone."""
    values = params.values() if isinstance(params, Mapping) else params
    found = (value[1] if isinstance(value, tuple) else value for value in values)
    return {index.name(param): param for param in found}
