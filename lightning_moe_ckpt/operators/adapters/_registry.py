"""Adapters by class: what a user adds for a layout that is not found by itself, or to overrule what would be.

Example:
    def describe(fqn: str, module: nn.Module, index: ParameterIndex) -> MoELayerSpec:
        experts = {f"{fqn}.{n}": p for n, p in module.named_parameters() if n.startswith("w")}
        ids = tuple(range(module.num_experts))
        return MoELayerSpec(
            fqn=fqn, num_experts=len(ids), local_expert_ids=ids,
            experts=stacked_slices(experts, ids, len(ids)), router=(f"{fqn}.gate.weight",),
            count=IndexTap(f"{fqn}.experts"),
        )

    register_adapter(MyMoE, describe)
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from lightning_moe_ckpt.operators._layers import MoELayerSpec
from lightning_moe_ckpt.operators._parameters import ParameterIndex

AdapterFactory = Callable[[str, nn.Module, ParameterIndex], MoELayerSpec | None]
"""`(name of the module, the module, all parameters) -> its spec`, or `None` for "there is no routing in here"."""

_factories: dict[type[nn.Module], AdapterFactory] = {}


def register_adapter(cls: type[nn.Module], factory: AdapterFactory) -> None:
    """Describe modules of `cls` and its subclasses by `factory`; the most derived class wins.

    Args:
        cls: class of the MoE block, the module that holds router and experts.
        factory: describes one instance. A factory that returns `None` makes the block part of the dense rest.
    """
    _factories[cls] = factory


def unregister_adapter(cls: type[nn.Module]) -> None:
    """Forget the adapter of exactly this class, if there is one."""
    _factories.pop(cls, None)


def find_adapter(module: nn.Module) -> AdapterFactory | None:
    """The factory that a user registered for the module's class or its nearest base."""
    return next((_factories[base] for base in type(module).__mro__ if base in _factories), None)
