"""Taps for soft and capacity-normalised popularity: router probabilities, and the tokens that experts could take.

Like the taps for tokens, they are hooks that add to an accumulator on the device, in training forwards only, once per
forward even if activation checkpointing recomputes it. They draw no random numbers and keep nothing of the graph.

Shape suffixes: T tokens on this rank, K top-k, E all experts.

Source: MoEvement (2024), Appendix B.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_moe_ckpt.operators._taps import TokenCounts, find_indices, in_backward, tensors_of

Score = Literal["auto", "none", "softmax", "sigmoid"]
"""Function from a router's output to probabilities; `none` if the output is probabilities already."""

_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "softmax": lambda x: x.softmax(-1),
    "sigmoid": lambda x: x.sigmoid(),
}


@dataclass(frozen=True)
class ProbabilityTap:
    """Sums the router's probabilities of every expert, chosen or not."""

    router: str
    """Name of a module that emits `[..., E]`, alone or among other outputs."""
    score: Score = "auto"
    """`auto` decides at the first training forward: by the values, then by the weights of the chosen experts if the
    router returns them, else softmax."""
    output: int | None = None
    """Index of the output with the values; `None` for the first that has a value per expert."""

    def install(self, module: nn.Module, counts: TokenCounts) -> list[RemovableHandle]:
        """Hook the router's forward."""
        scores = [] if self.score == "auto" else [_SCORES[self.score]]

        def after(router: nn.Module, _args: tuple[Any, ...], _kwargs: Mapping[str, Any], out: object) -> None:
            if not router.training or in_backward():
                return
            outputs = out if isinstance(out, tuple | list) else [out]
            emitted = list(tensors_of(outputs))
            candidates = emitted if self.output is None else tensors_of([outputs[self.output]])
            values_TE = next(
                (t for t in candidates if t.is_floating_point() and t.shape[-1:] == (counts.num_experts,)), None
            )
            if values_TE is None:
                counts.missed(self.router, "emits no value per expert")
                return
            with torch.no_grad(), torch.autocast(values_TE.device.type, enabled=False):
                values_TE = values_TE.detach().reshape(-1, counts.num_experts).float()
                if not scores:
                    scores.append(_SCORES[find_score(values_TE, emitted)])
                # In float64, because in bf16 a sum over thousands of tokens stops growing.
                counts.add_sums(scores[0](values_TE).sum(dim=0, dtype=torch.float64))

        return [module.get_submodule(self.router).register_forward_hook(after, with_kwargs=True)]

    def drain(self, module: nn.Module, counts: TokenCounts) -> None:
        """Nothing: the hook has counted."""


@dataclass(frozen=True)
class CapacityTap:
    """Sums the tokens that each expert could take: the layer's `capacity`, or all tokens if none is dropped."""

    module: str
    """Name of a module whose input has one row per token, `[..., D]`. Its method `capacity(num_tokens)`, if any,
    returns a number, a tensor `[E]`, or `None` for all tokens."""

    def install(self, module: nn.Module, counts: TokenCounts) -> list[RemovableHandle]:
        """Hook the module's forward."""

        def before(called: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            if not called.training or in_backward():
                return
            x = next(tensors_of([*args, *kwargs.values()]), None)
            if x is not None:
                counts.add_sums(_capacity(called, x.shape[:-1].numel(), counts.num_experts))

        return [module.get_submodule(self.module).register_forward_pre_hook(before, with_kwargs=True)]

    def drain(self, module: nn.Module, counts: TokenCounts) -> None:
        """Nothing: the hook has counted."""


def find_score(values_TE: Tensor, emitted: Sequence[Tensor]) -> str:
    """Return which function turns a router's output into probabilities. Waits for the device.

    Args:
        values_TE: one value per expert; logits or probabilities.
        emitted: all outputs of the router. If they include weights and indices of the chosen experts `[T, K]`, the
            function that explains the weights is returned.
    """
    if bool((values_TE >= 0).all()) and torch.allclose(values_TE.sum(-1), values_TE.new_ones(()), atol=1e-2):
        return "none"
    chosen, num_experts = find_indices(emitted), values_TE.shape[-1]
    if chosen is None or chosen.shape[-1] == num_experts or int(chosen.max()) >= num_experts:
        return "softmax"  # a mask over all experts, if anything
    weight_TK = next((t for t in emitted if t.is_floating_point() and t.shape == chosen.shape), None)
    if weight_TK is None:
        return "softmax"
    weight_TK, idx_TK = weight_TK.detach().float(), chosen.to(torch.int64)
    errors = {name: _unlike(_SCORES[name](values_TE).gather(-1, idx_TK), weight_TK) for name in ("softmax", "sigmoid")}
    return min(errors, key=errors.__getitem__)


def _unlike(score_TK: Tensor, weight_TK: Tensor) -> float:
    """Return the distance of the weights from the scores times one factor, or times one factor per token."""
    factor_TK = weight_TK / score_TK.clamp(min=torch.finfo(torch.float32).tiny)
    scaled = float((factor_TK / factor_TK.mean() - 1).abs().mean())
    if score_TK.shape[-1] == 1:
        return scaled  # a factor per token would explain anything
    return min(scaled, float((factor_TK / factor_TK.mean(-1, keepdim=True) - 1).abs().mean()))


def _capacity(module: nn.Module, num_tokens: int, num_experts: int) -> Tensor:
    ask = getattr(module, "capacity", None)
    answer = ask(num_tokens) if callable(ask) else None
    if isinstance(answer, Tensor):
        return answer.detach()
    return torch.full((num_experts,), num_tokens if answer is None else int(answer), dtype=torch.int64)
