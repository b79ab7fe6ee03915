"""A selection-only bias: routers that add a value per expert to the scores by which they choose, not to the weights.

DeepSeek-V3, torchtitan, Megatron, LitGPT's grouped router and nanochat balance load by such a bias, and train it by
rules of their own outside of forward. A view adds a second term for as long as somebody wants it, and leaves the trained
one alone.

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
    """Where the selection-only bias of one layer lies, and how to add to it for a while."""

    layer: str
    """Name of the module within whose forward the bias is read: the MoE block."""
    owner: str
    """Name of the module that has it."""
    attribute: str
    """A buffer or parameter of E elements."""

    def trained(self, module: nn.Module) -> Tensor:
        """The live bias that the model trains, of its own shape: the balance state. Not a copy; only look at it."""
        bias: Tensor = getattr(module.get_submodule(self.owner), self.attribute)
        return bias

    def add(self, module: nn.Module, term_E: Tensor) -> Callable[[], None]:
        """Add `term_E` to the bias in every forward of the layer until the function returned is called.

        The trained bias is the same tensor with the same bits and version before and after each forward: what updates,
        broadcasts or captures it never sees the term, and nothing of the term stays once it is removed.

        Args:
            module: the model.
            term_E: shape `[E]`, on the device of the bias. It is read at every forward: to change it, write to it
                in place, at step boundaries only and alike on all ranks of the model, since a forward that activation
                checkpointing repeats must choose the same experts again.

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
        # In the way of nobody: other hooks before the forward see the trained bias, those after it see it again.
        ending = layer.register_forward_hook(after, always_call=True, prepend=True)
        beginning = layer.register_forward_pre_hook(before)

        def remove() -> None:
            beginning.remove()
            ending.remove()

        return remove


def _replace(owner: nn.Module, attribute: str, term_E: Tensor) -> Callable[[], None]:
    """Put a sum in the place of the bias; the result puts the bias itself back."""
    # Not through `setattr`: a parameter may not be replaced by a tensor, nor a buffer be lost from its registry.
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
