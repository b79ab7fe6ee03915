"""What layers keep beside their weights, found by the attribute names of the libraries that have it.

Sources: Hugging Face transformers 5 (Switch's `expert_capacity`, `e_score_correction_bias`), LitGPT, torchtitan,
Megatron and nanochat (`expert_bias`), NeMo Automodel (a running load and a master copy of the bias in plain attributes).
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from lightning_moe_ckpt.operators._bias import BiasView
from lightning_moe_ckpt.operators._capacity import CapacityView, ExpertCapacity
from lightning_moe_ckpt.operators._children import child_slots
from lightning_moe_ckpt.operators._extra_state import AttributeState

_BIASES = ("e_score_correction_bias", "expert_bias", "expert_bias_E", "moe_bias")
_EXTRA = ("_cumulative_expert_load", "e_score_correction_bias_master")


def find_bias(root: nn.Module, block_fqn: str, num_experts: int) -> BiasView | None:
    """The selection-only bias of a block or its router, known by name: a bias called otherwise may be part of the logits."""
    for fqn, module in _near(root, block_fqn):
        for name in _BIASES:
            bias = getattr(module, name, None)
            if isinstance(bias, Tensor) and bias.numel() == num_experts:
                return BiasView(layer=block_fqn, owner=fqn, attribute=name)
    return None


def find_extra(root: nn.Module, block_fqn: str) -> AttributeState | None:
    """Plain attributes of a block and its router that training depends on."""
    places = [(fqn, name) for fqn, module in _near(root, block_fqn) for name in _EXTRA if _is_plain(module, name)]
    return AttributeState(tuple(places)) if places else None


def find_expert_capacity(root: nn.Module, block_fqn: str, num_experts: int) -> CapacityView | None:
    """Tokens per expert of a Switch router, which compares places in line with it: a tensor `[E]` does as well."""
    for fqn, module in _near(root, block_fqn):
        if any(base.__name__ == "SwitchTransformersTop1Router" for base in type(module).__mro__):
            return ExpertCapacity(fqn, "expert_capacity", num_experts, "tensor")
    return None


def _near(root: nn.Module, block_fqn: str) -> Iterator[tuple[str, nn.Module]]:
    """The block and its children, but not the experts themselves."""
    block = root.get_submodule(block_fqn)
    yield block_fqn, block
    for name, child in child_slots(block).items():
        if child is not None and not isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield (f"{block_fqn}.{name}" if block_fqn else name), child


def _is_plain(module: nn.Module, name: str) -> bool:
    registered = name in module._parameters or name in module._buffers  # noqa: SLF001  # those are captured anyway
    return hasattr(module, name) and not registered
