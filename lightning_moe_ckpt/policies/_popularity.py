"""The order in which a window captures operators, and when that order is out of date.

Operators captured late stay frozen long in replay and save work there; so popular experts come last, after them the
operators that every token uses. In a dense model the back comes first: gradients of a frozen front need not be
computed.

Popularity is measured from the tokens of every step (`Popularity`): hard counts of an expert's processed tokens, or
soft counts of the router's probabilities; summed, or averaged with a half-life; absolute, or relative to capacity. A
token dropped over capacity is no hard count: it does not activate the expert, so freezing the expert saves nothing.
Soft counts include it, since its probability does not depend on capacity.

Shape suffixes: T tokens, E experts.

Source: MoEvement (2026), Sec. 3.5, Appendix B and E.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_moe_ckpt.errors import ConfigurationError

Order = Literal["popularity", "fixed", "back_to_front"]


@dataclass(frozen=True, kw_only=True)
class Popularity:
    """Measure of experts' popularity, and thresholds for a new capture order.

    Source: MoEvement (2026), Sec. 3.5 and Appendix B; the names are the paper's.
    """

    counts: Literal["hard", "soft"] = "hard"
    """`hard`: the expert's processed tokens; `soft`: the router's probabilities for the expert, summed over all tokens."""
    half_life_steps: float | None = None
    """Optimizer steps after which a step weighs half (the paper's time decay, an exponential moving average); `None`
    weighs all steps since the last look alike."""
    per_capacity: bool = False
    """Whether each step's counts are divided by the expert's capacity in that step: all tokens, if nothing is dropped."""
    reorder_every_n_steps: int = 100
    """Steps between two looks at the order, at multiples of this number. A new order holds from the window after the
    next, so with fewer steps than a window it is out of date before it holds."""
    reorder_threshold: float = 0.10
    """Relative change of an expert's share that counts as a change."""
    reorder_fraction: float = 0.25
    """Share of the experts that must have changed for a new plan."""

    def __post_init__(self) -> None:
        if self.counts not in ("hard", "soft"):
            raise ConfigurationError(f"`Popularity(counts={self.counts!r})` must be 'hard' or 'soft'.")
        if self.half_life_steps is not None and not self.half_life_steps > 0:
            raise ConfigurationError(
                f"`Popularity(half_life_steps={self.half_life_steps})` must be above zero, or None for no decay."
            )
        if self.reorder_every_n_steps < 1:
            raise ConfigurationError(
                f"`Popularity(reorder_every_n_steps={self.reorder_every_n_steps})` must be 1 or more steps."
            )
        if not self.reorder_threshold >= 0:
            raise ConfigurationError(
                f"`Popularity(reorder_threshold={self.reorder_threshold})` must be zero or more, e.g. 0.1 for 10 %."
            )
        if not 0 <= self.reorder_fraction <= 1:
            raise ConfigurationError(
                f"`Popularity(reorder_fraction={self.reorder_fraction})` must be between 0 and 1, e.g. 0.25 for 25 %."
            )


def should_reorder(
    old_counts: Tensor | Sequence[float],
    new_counts: Tensor | Sequence[float],
    *,
    reorder_threshold: float = 0.10,
    reorder_fraction: float = 0.25,
) -> bool:
    """Return whether the experts' shares of the tokens have changed enough to plan anew since the plan was made: by a
    part of `reorder_threshold` for a part of `reorder_fraction` of the experts. Counts are in any unit; totals may
    differ.

    Source: MoEvement (2026), Sec. 3.5: "over 10% for at least 25% of experts".
    """
    old, new = torch.as_tensor(old_counts, dtype=torch.float64), torch.as_tensor(new_counts, dtype=torch.float64)
    if old.shape != new.shape:
        raise ValueError(f"`should_reorder` got counts of {old.numel()} and {new.numel()} experts.")
    if not old.numel() or not float(new.sum()):
        return False
    before, now = old / old.sum() if float(old.sum()) else old, new / new.sum()
    return float(((now - before).abs() > reorder_threshold * before).double().mean()) >= reorder_fraction


def decayed_popularity(previous_E: Tensor, counts_E: Tensor, *, half_life_steps: float) -> Tensor:
    """Return an exponential moving average of popularity over optimizer steps: float64 `[E]`. Equal inputs give equal
    bits, so a resumed run that counts the same steps has the same result.

    `a * previous + (1 - a) * counts` with `a = 2 ** (-1 / half_life_steps)`; counts, hard or soft, are of all
    micro-batches of a step. The average starts at zero, which scales the first averages alike for all experts, without
    effect on order or shares. It is linear, so ranks' averages of their own tokens add up to the average of all tokens.

    Source: MoEvement (2026), Appendix B, "Time-Decayed Popularity".
    """
    if not half_life_steps > 0:
        raise ValueError(f"`decayed_popularity(half_life_steps={half_life_steps})` must be above zero.")
    if previous_E.shape != counts_E.shape:
        raise ValueError(f"`decayed_popularity` got {previous_E.numel()} and {counts_E.numel()} experts.")
    keep = 2.0 ** (-1.0 / half_life_steps)
    popularity_E: Tensor = keep * previous_E.double() + (1.0 - keep) * counts_E.double()
    return popularity_E


def popularity_per_capacity(counts_E: Tensor, capacity_E: Tensor) -> Tensor:
    """Return the experts' use: tokens relative to capacity, float64 `[E]`, on the counts' device. Capacity, on any
    device, is in tokens that each expert could take in the same steps; an expert with none has no popularity.

    Source: MoEvement (2026), Appendix B, "Capacity-Aware Ordering".
    """
    if counts_E.shape != capacity_E.shape:
        raise ValueError(f"`popularity_per_capacity` got {counts_E.numel()} and {capacity_E.numel()} experts.")
    capacity_E = capacity_E.to(counts_E.device, torch.float64)
    return torch.where(capacity_E > 0, counts_E.double() / torch.where(capacity_E > 0, capacity_E, 1.0), 0.0)
