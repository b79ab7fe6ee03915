"""Give some experts more tokens in a layer whose router chooses by a bias, by a second term beside the bias.

The term is adjusted at each step until experts get their quota. The bias that the model trains is not changed, since
the rule that balances it would work against the change. The router is asked in the same forward what it would choose
without the term, so that additional tokens are counted, not estimated.

This is an extension: no source describes a boost for layers without capacity.

Shape suffixes: T tokens, K top-k, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_moe_ckpt.boosting._meters import Measured
from lightning_moe_ckpt.moe._layer import in_backward
from lightning_moe_ckpt.operators import BiasView, MoELayerSpec

_RATE = 0.05
"""Change of the term per step, for a shortfall of one mean load; scores are between 0 and 1."""


def find_bias(layer: MoELayerSpec, module: nn.Module) -> BiasView | None:
    """Return the layer's selection-only bias, if its router can be called a second time in a forward."""
    view = layer.bias
    return view if view is not None and view.owner != view.layer else None


class BiasRoute:
    """Adjust one layer's routing and count the tokens that it moves, from construction to `remove`."""

    exact = True

    def __init__(
        self, layer: MoELayerSpec, view: BiasView, module: nn.Module, boost: float, term: Sequence[float] | None
    ) -> None:
        self._boost, self._num_experts, self._name = boost, layer.num_experts, view.attribute
        self.term = list(term or [0.0] * layer.num_experts)
        """Term that is added to the bias, by expert."""
        self._sums = torch.zeros(3, layer.num_experts, dtype=torch.int64)
        self._asking = False
        router = module.get_submodule(view.owner)
        self._handle = router.register_forward_hook(self._routed, with_kwargs=True)

    def aim(self, debt_E: Sequence[int], extra_E: Sequence[int], kept_E: Sequence[int]) -> None:
        """Adjust the term so that experts in debt come nearer to their quota, by the counts of the last step."""
        mean = max(sum(kept_E) / self._num_experts, 1.0)
        short_E = [(1 + self._boost) * (kept - extra) - kept for kept, extra in zip(kept_E, extra_E, strict=True)]
        self.term = [
            term + _RATE * short / mean if debt else 0.0
            for term, short, debt in zip(self.term, short_E, debt_E, strict=True)
        ]

    def take(self, factor: float) -> Measured:
        """Return the counts since the last call."""
        taken, self._sums = self._sums, torch.zeros_like(self._sums)
        return Measured(*taken)

    def remove(self) -> None:
        """Stop changing the router's choices."""
        self._handle.remove()

    def _routed(self, router: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        if self._asking or not router.training:
            return None
        nudged = self._ask(router, args, kwargs) if any(self.term) else out
        if not in_backward():
            before_E, after_E = (_count(each, self._num_experts) for each in (out, nudged))
            self._sums = self._sums.to(before_E.device)
            self._sums += torch.stack([after_E - before_E, after_E, torch.zeros_like(after_E)])
        return nudged

    def _ask(self, router: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bias: Tensor = getattr(router, self._name)
        term = torch.tensor(self.term, dtype=bias.dtype, device=bias.device).view_as(bias)
        self._asking = True
        try:
            return functional_call(router, {self._name: bias.detach() + term}, args, kwargs)
        finally:
            self._asking = False


def _count(out: Any, num_experts: int) -> Tensor:
    """Count the choices in a router's output: its integer tensor."""
    found = [each for each in out if isinstance(each, Tensor) and not each.is_floating_point()]
    flat = found[0].reshape(-1).to(torch.int64)
    return torch.zeros(num_experts, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))
