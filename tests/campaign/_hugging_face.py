"""Families of Hugging Face with stacked experts, as the campaigns call a model."""

from __future__ import annotations

import warnings
from typing import Any

from operators._families import balanced
from torch import Tensor, nn
from typing_extensions import override


class FamilyModel(nn.Module):
    """A tiny random model of a family in `SPREAD`, with dropout; spread over ranks where the strategy does so.

    Args:
        name: of the family.
        num_experts: over all ranks.
        tied: whether the embedding is the head too.
        frozen: whether the first layer does not train.
        recompute: whether activations are checkpointed, by the library's own switch.
    """

    def __init__(self, name: str, num_experts: int, *, tied: bool, frozen: bool, recompute: bool) -> None:
        super().__init__()
        self.model: Any = balanced(name, num_experts, attention_dropout=0.1, tie_word_embeddings=tied)
        if frozen:
            self.model.model.layers[0].requires_grad_(False)
        if recompute:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # the name that users know is about to go
                self.model.gradient_checkpointing_enable()

    @override
    def forward(self, tokens_BS: Tensor) -> tuple[Tensor, Tensor]:
        out = self.model(input_ids=tokens_BS)
        aux = out.get("aux_loss")
        return out.logits, out.logits.new_zeros(()) if aux is None else aux
