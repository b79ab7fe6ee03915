"""Tokens per expert, and how unevenly they are spread.

The state of both metrics is the integer sum of all counts. So the result has the same bits however the tokens were
split over updates and ranks. Keyword arguments are those of `torchmetrics.Metric`.

Shape suffix: E all experts, over all ranks.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lightning_moe_ckpt.errors import ConfigurationError


def load_skew(counts_E: Tensor) -> Tensor:
    """Return the normalised Herfindahl-Hirschman index: 0 if all experts have equally many tokens, 1 if one has all.

    With `p = counts / sum(counts)` it is `(sum(p**2) - 1/E) / (1 - 1/E)`, computed here in the equal form
    `sum((E*counts - sum(counts))**2) / (sum(counts)**2 * E * (E - 1))`, which reaches 0 and 1 exactly.

    Args:
        counts_E: tokens per expert, integers, two experts or more.

    Returns:
        float64 scalar on the device of the input; NaN without any token.

    Source: MoEvement (2026), Appendix D.
    """
    num_experts, total = counts_E.numel(), counts_E.sum()
    # Integer arithmetic up to the division: one rounding per expert, and none if the quotient is an integer.
    deviation_E = (num_experts * counts_E.to(torch.int64) - total).double() / total.double()
    return deviation_E.square().sum() / (num_experts * (num_experts - 1))


class _Counts(Metric):
    """Sums tokens per expert over updates and ranks."""

    is_differentiable = False
    higher_is_better = None
    full_state_update = False

    least: ClassVar[int]
    """Fewest experts for which the metric has a value."""
    tokens: Tensor

    def __init__(self, num_experts: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if num_experts < self.least:
            raise ConfigurationError(
                f"`{type(self).__name__}(num_experts={num_experts})` must be {self.least} or more."
            )
        self.num_experts = num_experts
        self.add_state("tokens", torch.zeros(num_experts, dtype=torch.int64), dist_reduce_fx="sum")

    @override
    def update(self, counts_E: Tensor) -> None:
        """Add the tokens of one or more steps.

        Args:
            counts_E: tokens per expert on this rank, integers `[num_experts]`, such as the increase of
                `MoELayer.tokens_per_expert`; not yet summed over ranks.

        Raises:
            ValueError: the shape differs, or the values are not integers.
        """
        if counts_E.shape != (self.num_experts,) or counts_E.is_floating_point() or counts_E.is_complex():
            raise ValueError(
                f"`{type(self).__name__}.update` takes integer counts of shape [{self.num_experts}], "
                f"got {counts_E.dtype} of shape {list(counts_E.shape)}."
            )
        self.tokens += counts_E.to(self.tokens.device)


class ExpertLoad(_Counts):
    """Tokens per expert: int64 `[num_experts]`, summed over updates and ranks.

    Args:
        num_experts: E, over all ranks.

    Raises:
        ConfigurationError: there is no expert.
    """

    least = 1

    @override
    def compute(self) -> Tensor:
        """Return the sums."""
        return self.tokens.clone()


class LoadSkew(_Counts):
    """Normalised Herfindahl-Hirschman index of all tokens seen, see `load_skew`; NaN before the first token.

    The index of a period is not the mean of the indices of its parts, so the metric sums counts and takes the index of
    the sum.

    Args:
        num_experts: E, over all ranks, two or more.

    Raises:
        ConfigurationError: fewer than two experts.

    Source: MoEvement (2026), Appendix D.
    """

    least = 2

    @override
    def compute(self) -> Tensor:
        """Return `load_skew` of the summed counts."""
        return load_skew(self.tokens)
