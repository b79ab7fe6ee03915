"""Selection-only bias: some routers add a value per expert to the scores used for choosing, not to the weights.

DeepSeek-V3, torchtitan, Megatron, LitGPT's grouped router and nanochat balance load by such a bias, and train it
outside of forward. A view adds a second, temporary term and leaves the trained bias unchanged.

Source: Wang et al. (2024), auxiliary-loss-free load balancing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_moe_ckpt.operators._children import own_parameters


@dataclass(frozen=True)
class BiasView:
    """Place of one layer's selection-only bias; `add` adds a temporary term to it."""

    layer: str
    """Name of the module within whose forward the bias is read: the MoE block."""
    owner: str
    """Name of the module that owns the bias."""
    attribute: str
    """A buffer or parameter of E elements."""

    def trained(self, module: nn.Module) -> Tensor:
        """Return the live trained bias in its own shape. It is no copy: read it, do not change it."""
        bias: Tensor = getattr(module.get_submodule(self.owner), self.attribute)
        return bias

    def add(self, module: nn.Module, term_E: Tensor) -> Callable[[], None]:
        """Add `term_E` to the bias in every forward of the layer until the function returned is called.

        Before and after each forward the trained bias is the same tensor with the same bits and version. So updates,
        broadcasts and snapshots never see the term, and nothing of it stays after removal.

        Args:
            module: the model.
            term_E: shape `[E]`, on the device of the bias, read at every forward. To change it, write to it in place,
                at step boundaries only and equally on all ranks: a forward that activation checkpointing repeats must
                choose the same experts again.

        Returns:
            A function that removes the term.
        """
        restore: list[Callable[[], None]] = []
        owner = module.get_submodule(self.owner)

        def before(_called: nn.Module, _args: tuple[Any, ...]) -> None:
            restore.append(_replace(owner, self.attribute, term_E))

        def after(_called: nn.Module, _args: tuple[Any, ...], _out: object) -> None:
            if restore:
                restore.pop()()

        layer = module.get_submodule(self.layer)
        # Other hooks, before and after the forward, see the trained bias.
        ending = layer.register_forward_hook(after, always_call=True, prepend=True)
        beginning = layer.register_forward_pre_hook(before)

        def remove() -> None:
            beginning.remove()
            ending.remove()

        return remove


def _replace(owner: nn.Module, attribute: str, term_E: Tensor) -> Callable[[], None]:
    """Replace the bias by its sum with `term_E`; return a function that puts the bias back."""
    # Not by `setattr`, which refuses a tensor in place of a parameter and would unregister a buffer.
    slots: dict[str, Any] = (
        owner._parameters if attribute in own_parameters(owner) else owner._buffers  # noqa: SLF001
    )
    trained = slots[attribute]
    with torch.no_grad():
        total = trained + term_E.to(trained.dtype).view_as(trained)
    slots[attribute] = nn.Parameter(total, requires_grad=False) if isinstance(trained, nn.Parameter) else total

    def back() -> None:
        slots[attribute] = trained

    return back
