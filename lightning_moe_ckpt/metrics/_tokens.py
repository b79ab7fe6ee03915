"""Tokens per expert, how unevenly they are spread, and those whose updates are lost or at risk, as metrics of torchmetrics.

The state of load and skew is the integer sum of all counts. So the result has the same bits however the tokens were
split over updates and ranks.

The other metrics take totals of the run that are already summed over ranks (`policies.TokenLedger` has them, and the
journal of every generation has an accounting), and show the newest. So nothing is counted twice over ranks, and a
resumed run continues the run's values before it. Keyword arguments are those of `torchmetrics.Metric`.

Sources: PEC (2024), Sec. 3.1, eq. 4; MOETION (2024), Sec. 4.1, eq. 6. Both divide by tokens as they were routed, before
drops, and PEC by those of the whole training: drops count where layers show them, and what is to come where it is planned.

Shape suffix: E experts of all layers, over all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        float64 scalar on the input's device; NaN without any token.

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

    A period's index is not the mean of the indices of its parts, so the metric sums counts and takes the index of
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


def portion_of_lost_tokens(
    lost_E: Tensor, processed_E: Tensor, *, dropped: Tensor | int = 0, progress: float = 1.0
) -> float:
    """Return the PLT: the share of all tokens of a training whose updates were lost; 0 before the first token.

    Args:
        lost_E: lost tokens per expert.
        processed_E: processed tokens per expert.
        dropped: tokens that were routed and dropped over capacity; of a tensor the sum counts.
        progress: part of the planned training that these are of, above 0; 1 where its length is not known.

    Source: PEC (2024), eq. 4.
    """
    routed = int(processed_E.sum()) + int(torch.as_tensor(dropped).sum())
    return int(lost_E.sum()) * progress / routed if routed else 0.0


def moementary_lost_tokens(
    lost_E: Tensor, processed_E: Tensor, num_experts: Sequence[int], *, dropped_L: Tensor | None = None
) -> float:
    """Return the MLT: the sum over layers of the share of lost tokens, between 0 and the number of layers.

    Args:
        lost_E: lost tokens per expert.
        processed_E: processed tokens per expert.
        num_experts: number of experts of each layer.
        dropped_L: tokens of each layer that were routed and dropped over capacity.

    Source: MOETION (2024), eq. 6.
    """
    dropped = [0] * len(num_experts) if dropped_L is None else dropped_L.tolist()
    parts = (torch.split(each, list(num_experts)) for each in (lost_E, processed_E))
    return sum(portion_of_lost_tokens(lost, done, dropped=n) for lost, done, n in zip(*parts, dropped, strict=True))


class _Newest(Metric):
    """Metric that shows the vectors of the last update."""

    is_differentiable = False
    higher_is_better: bool | None = False
    full_state_update = True
    vectors: ClassVar[tuple[str, ...]] = ("lost", "processed")
    lost: Tensor
    processed: Tensor
    dropped: Tensor
    """int64: by layer, or in all; only of metrics that count drops."""

    def __init__(self, num_experts: int, num_dropped: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if num_experts < 1:
            raise ConfigurationError(f"`{type(self).__name__}(num_experts={num_experts})` must be 1 or more.")
        sizes = dict.fromkeys(self.vectors, num_experts) | ({"dropped": num_dropped} if num_dropped else {})
        for name, size in sizes.items():
            # Equal on all ranks, so the maximum is the value.
            self.add_state(name, torch.zeros(size, dtype=torch.int64), dist_reduce_fx="max", persistent=True)

    def _replace(self, **vectors: Tensor) -> None:
        for name, vector in vectors.items():
            state: Tensor = getattr(self, name)
            if vector.shape != state.shape or vector.dtype != torch.int64:
                raise ValueError(
                    f"`{type(self).__name__}.update` takes `{name}` as int64 of shape {list(state.shape)}, "
                    f"got {vector.dtype} of shape {list(vector.shape)}."
                )
            state.copy_(vector)


class ExpertTokens(_Newest):
    """Tokens of every expert: processed, not saved yet, and lost.

    Args:
        num_experts: of all layers.

    Raises:
        ConfigurationError: there is no expert.
    """

    higher_is_better = None
    vectors = ("processed", "unsaved", "lost")

    @override
    def update(self, processed_E: Tensor, unsaved_E: Tensor, lost_E: Tensor) -> None:
        """Replace what was seen before.

        Raises:
            ValueError: not int64 with one entry per expert.
        """
        self._replace(processed=processed_E, unsaved=unsaved_E, lost=lost_E)

    @override
    def compute(self) -> dict[str, Tensor]:
        """Return `processed`, `unsaved` and `lost`, int64 `[E]`."""
        return {name: getattr(self, name).clone() for name in self.vectors}


class PortionOfLostTokens(_Newest):
    """PLT, see `portion_of_lost_tokens`.

    Args:
        num_experts: of all layers.

    Raises:
        ConfigurationError: there is no expert.
    """

    progress: Tensor

    def __init__(self, num_experts: int, **kwargs: Any) -> None:
        super().__init__(num_experts, 1, **kwargs)
        self.add_state("progress", torch.ones((), dtype=torch.float64), dist_reduce_fx="max", persistent=True)

    @override
    def update(self, lost_E: Tensor, processed_E: Tensor, dropped: Tensor | int = 0, progress: float = 1.0) -> None:
        """Replace what was seen before; see `portion_of_lost_tokens`.

        Raises:
            ValueError: not int64 with one entry per expert.
        """
        self._replace(lost=lost_E, processed=processed_E, dropped=torch.as_tensor(dropped).sum().view(1))
        self.progress.fill_(progress)

    @override
    def compute(self) -> Tensor:
        """Return a float64 scalar, 0 before the first token."""
        value = portion_of_lost_tokens(self.lost, self.processed, dropped=self.dropped, progress=float(self.progress))
        return torch.tensor(value, dtype=torch.float64)


class MoementaryLostTokens(_Newest):
    """MLT, see `moementary_lost_tokens`.

    Args:
        num_experts: by layer.

    Raises:
        ConfigurationError: there is no layer, or one without experts.
    """

    def __init__(self, num_experts: Sequence[int], **kwargs: Any) -> None:
        if not num_experts or min(num_experts) < 1:
            raise ConfigurationError(
                f"`MoementaryLostTokens(num_experts={list(num_experts)})` must have 1 or more for each layer."
            )
        super().__init__(sum(num_experts), len(num_experts), **kwargs)
        self.num_experts = tuple(num_experts)

    @override
    def update(self, lost_E: Tensor, processed_E: Tensor, dropped_L: Tensor | None = None) -> None:
        """Replace what was seen before; see `moementary_lost_tokens`.

        Raises:
            ValueError: not int64 with one entry per expert, or per layer.
        """
        dropped = torch.zeros_like(self.dropped) if dropped_L is None else dropped_L
        self._replace(lost=lost_E, processed=processed_E, dropped=dropped)

    @override
    def compute(self) -> Tensor:
        """Return a float64 scalar, 0 before the first token."""
        value = moementary_lost_tokens(self.lost, self.processed, self.num_experts, dropped_L=self.dropped)
        return torch.tensor(value, dtype=torch.float64)


class _ByLevel(_Newest):
    """Metric of one number per level."""

    vectors = ("number",)
    number: Tensor

    def __init__(self, levels: Sequence[str] = ("memory", "storage"), **kwargs: Any) -> None:
        if not levels or len(set(levels)) != len(levels):
            raise ConfigurationError(
                f"`{type(self).__name__}(levels={list(levels)})` must name each level once, and at least one."
            )
        super().__init__(len(levels), **kwargs)
        self.levels = tuple(levels)

    @override
    def update(self, numbers: Mapping[str, int]) -> None:
        """Replace what was seen before.

        Raises:
            ValueError: not exactly the levels that were named.
        """
        if set(numbers) != set(self.levels):
            name = type(self).__name__
            raise ValueError(f"`{name}.update` got {sorted(numbers)}, the levels are {list(self.levels)}.")
        self._replace(number=torch.tensor([numbers[level] for level in self.levels], dtype=torch.int64))

    @override
    def compute(self) -> dict[str, Tensor]:
        """Return int64 scalars by level."""
        return {level: self.number[i].clone() for i, level in enumerate(self.levels)}


class ExpertsTaken(_ByLevel):
    """Number of experts in the newest generation, by level: K of a partial policy, S of a selective one.

    Args:
        levels: names of what generations go to.

    Raises:
        ConfigurationError: no level, or one named twice.
    """

    higher_is_better = None


class TokensAtRisk(_ByLevel):
    """Tokens whose updates only live weights have, by level: what losing everything but that level would cost now.

    Args:
        levels: names of what generations go to.

    Raises:
        ConfigurationError: no level, or one named twice.
    """
