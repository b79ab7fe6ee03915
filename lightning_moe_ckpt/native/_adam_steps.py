"""Input of a replay of Adam: the state at its start, and the steps to take."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from lightning_moe_ckpt.native._gradient import CompressedGradient


@dataclass(frozen=True, slots=True)
class AdamState:
    """Parameter and moments, float32, contiguous, of one shape, on one device; changed in place."""

    param: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor | None = None
    """Maximum of the second moment; only with `amsgrad`."""

    def tensors(self) -> list[Tensor]:
        """Return all tensors of the state."""
        return [t for t in (self.param, self.exp_avg, self.exp_avg_sq, self.max_exp_avg_sq) if t is not None]


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamStep:
    """One step that the optimizer took, with the settings it had."""

    gradient: Tensor | CompressedGradient
    """Gradient that the optimizer used; a plain one is float32, bfloat16 or float16 and has the parameter's shape."""
    step: int
    """The optimizer's count after the step: 1 for the first."""
    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = True
    """Weight decay as in AdamW; otherwise as in Adam, added to the gradient."""
    maximize: bool = False

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ValueError(f"`AdamStep(step={self.step})` must be one or more: it is the count after the step.")

    @property
    def step_size(self) -> float:
        """Learning rate over the bias correction of the first moment."""
        return self.lr / (1 - self.beta1**self.step)

    @property
    def bias2_sqrt(self) -> float:
        """Root of the bias correction of the second moment."""
        return math.sqrt(1 - self.beta2**self.step)
