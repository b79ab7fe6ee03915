"""Cost and progress of checkpoints, as metrics of torchmetrics.

`update` takes what happened since the last update, such as the difference of two `CheckpointCallback.report`, or the
newest value. Over ranks, bytes are summed, and shares of time averaged. A generation is as new as on the rank that is furthest behind. Keyword arguments are those of `torchmetrics.Metric`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.goodput import PARTS, Goodput

TIERS = ("host", "peer", "storage")
"""Places that hold generations, from the fastest to the safest."""

_NONE = -1
"""Step that stands for "no generation"."""


class _Checkpoint(Metric):
    """Base of these metrics; `forward` updates the state directly, because maxima of partial sums cannot be merged."""

    is_differentiable = False
    higher_is_better: bool | None = False
    full_state_update = True


class _Ratio(_Checkpoint):
    """Bytes of all ranks divided by a base that all have alike; NaN while the base is zero."""

    higher_is_better: bool | None = None
    amount: Tensor
    base: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("amount", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("base", torch.zeros((), dtype=torch.float64), dist_reduce_fx="max")

    def _add(self, amount: float, base: float, names: str) -> None:
        if amount < 0 or base < 0:
            raise ValueError(f"`{type(self).__name__}.update({names})` takes no negative number: {amount}, {base}.")
        self.amount += amount
        self.base += base

    @override
    def compute(self) -> Tensor:
        """Return a float64 scalar; NaN before the first update."""
        return self.amount.double() / self.base


class CapturedPerStep(_Ratio):
    """Bytes copied to host memory per step, by all ranks together."""

    @override
    def update(self, nbytes: int, steps: int = 1) -> None:
        """Add the bytes that this rank has copied in `steps` steps. Raises `ValueError` if a number is negative."""
        self._add(nbytes, steps, "nbytes, steps")


class PersistedPerSecond(_Ratio):
    """Bytes that became durable per second of wall time, of all ranks together."""

    higher_is_better = True

    @override
    def update(self, nbytes: int, seconds: float) -> None:
        """Add this rank's bytes that became durable within `seconds` of wall time. Raises `ValueError` if a number is negative."""
        self._add(nbytes, seconds, "nbytes, seconds")


class GoodputShare(_Checkpoint):
    """Shares of a run's wall time (0 to 1) by what it went to, the mean of all ranks: `goodput` is the productive one."""

    higher_is_better = True
    seconds: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("seconds", torch.zeros(len(PARTS), dtype=torch.float64), dist_reduce_fx="mean")

    @override
    def update(self, goodput: Goodput) -> None:
        """Replace what was seen before, such as by `CheckpointCallback.report.goodput`."""
        self.seconds.copy_(torch.tensor(astuple(goodput), dtype=torch.float64))

    @override
    def compute(self) -> dict[str, Tensor]:
        """Return `goodput` and `goodput/<part>`, float64 scalars whose parts add up to 1; NaN before the first update."""
        shares = dict(zip(PARTS, self.seconds / self.seconds.sum(), strict=True))
        return {"goodput": shares["productive"].clone(), **{f"goodput/{name}": share for name, share in shares.items()}}


class WindowPosition(_Checkpoint):
    """Length W of the window and the number of its captured boundaries: `{"window": W, "position": p}`."""

    higher_is_better = None
    length: Tensor
    position: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name in ("length", "position"):
            self.add_state(name, torch.zeros((), dtype=torch.int64), dist_reduce_fx="max")

    @override
    def update(self, window: int, position: int) -> None:
        """Replace what was seen before.

        Args:
            window: W, in steps; 0 before the first plan.
            position: 0 to W.

        Raises:
            ValueError: `position` is outside of the window.
        """
        if not 0 <= position <= window:
            raise ValueError(f"`WindowPosition.update(window={window}, position={position})`: outside of the window.")
        self.length.fill_(window)
        self.position.fill_(position)

    @override
    def compute(self) -> dict[str, Tensor]:
        """Return int64 scalars; they are equal on all ranks."""
        return {"window": self.length.clone(), "position": self.position.clone()}


class Generations(_Checkpoint):
    """Step of the newest generation in each tier, and how many steps training is ahead of it.

    Args:
        tiers: names of the tiers that may hold generations.

    Raises:
        ConfigurationError: no tier, or one named twice.
    """

    step: Tensor

    def __init__(self, tiers: Sequence[str] = TIERS, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not tiers or len(set(tiers)) != len(tiers):
            raise ConfigurationError(f"`Generations(tiers={list(tiers)})` must name each tier once, and at least one.")
        self.tiers = tuple(tiers)
        self.add_state("step", torch.zeros((), dtype=torch.int64), dist_reduce_fx="max")
        for tier in self.tiers:
            self.add_state(f"newest_{tier}", torch.tensor(_NONE), dist_reduce_fx="min")

    @override
    def update(self, step: int, generations: Mapping[str, int]) -> None:
        """Replace what was seen before.

        Args:
            step: boundary that training has reached.
            generations: newest generation by tier, as in `Report.generations`; tiers without one are left out.

        Raises:
            ValueError: a tier that was not named.
        """
        if unknown := sorted(set(generations) - set(self.tiers)):
            raise ValueError(f"`Generations.update` got {unknown}, the tiers are {list(self.tiers)}.")
        self.step.fill_(step)
        for tier in self.tiers:
            getattr(self, f"newest_{tier}").fill_(generations.get(tier, _NONE))

    @override
    def compute(self) -> dict[str, Tensor]:
        """Return `generation/<tier>` and `lag_steps/<tier>`, int64 scalars, for tiers in which every rank has one."""
        newest = {tier: getattr(self, f"newest_{tier}") for tier in self.tiers}
        held = {tier: step for tier, step in newest.items() if step != _NONE}
        lags = {f"lag_steps/{tier}": self.step - step for tier, step in held.items()}
        return {**{f"generation/{tier}": step.clone() for tier, step in held.items()}, **lags}
