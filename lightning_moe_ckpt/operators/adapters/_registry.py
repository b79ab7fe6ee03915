"""Adapters by class: those that a user adds, and those for layers of known libraries.

A user adds one for a layout that is not detected, or to overrule what would be. An adapter answers for its class and
for subclasses of it, wherever those are defined.

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

from collections.abc import Callable, Mapping

from torch import nn

from lightning_moe_ckpt.operators._layers import MoELayerSpec
from lightning_moe_ckpt.operators._parameters import ParameterIndex
from lightning_moe_ckpt.operators.adapters import _libraries
from lightning_moe_ckpt.operators.adapters._tutel import describe_tutel

AdapterFactory = Callable[[str, nn.Module, ParameterIndex], MoELayerSpec | None]
"""`(name of the module, the module, all parameters) -> its spec`, or `None` for "there is no routing in here"."""

_factories: dict[type[nn.Module], AdapterFactory] = {}

_LIBRARIES: Mapping[tuple[str, str], AdapterFactory] = {
    ("deepspeed", "MoE"): _libraries.describe_deepspeed,
    ("fmoe", "FMoE"): _libraries.describe_fastmoe,
    ("megablocks", "MoE"): _libraries.describe_megablocks,
    ("megablocks", "dMoE"): _libraries.describe_megablocks,
    ("megatron", "MoELayer"): _libraries.describe_megatron,
    ("scattermoe", "GLUMLP"): _libraries.describe_scattermoe,
    ("scattermoe", "MLP"): _libraries.describe_scattermoe,
    ("torchtitan", "MoE"): _libraries.describe_torchtitan,
    ("transformers", "DbrxFFN"): _libraries.describe_dbrx,
    ("transformers", "Llama4TextMoe"): _libraries.describe_llama4,
    ("transformers", "NllbMoeSparseMLP"): _libraries.refuse_nllb,
    ("tutel", "MOELayer"): describe_tutel,
}
"""By the library's top package and the name of the MoE block's class, so that no library is imported for it."""


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
    """Return the factory registered for the module's class or its nearest base, else the one of its library."""
    bases = type(module).__mro__
    registered = (_factories[base] for base in bases if base in _factories)
    names = ((base.__module__.partition(".")[0], base.__name__) for base in bases)
    known = (_LIBRARIES[name] for name in names if name in _LIBRARIES)
    return next(registered, None) or next(known, None)
