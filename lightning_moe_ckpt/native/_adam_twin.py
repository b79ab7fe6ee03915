"""Several Adam or AdamW steps in torch: the operations of `torch.optim` with `foreach=False`, in their order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_moe_ckpt.native._adam_steps import AdamState, AdamStep
from lightning_moe_ckpt.native._gradient import decompress_gradient


def replay_adam(state: AdamState, steps: Sequence[AdamStep]) -> None:
    """Take `state` through `steps`, in place."""
    for step in steps:
        dense = step.gradient if isinstance(step.gradient, Tensor) else decompress_gradient(step.gradient)
        _one_step(state, step, dense.to(torch.float32).view_as(state.param))


def _one_step(state: AdamState, step: AdamStep, gradient: Tensor) -> None:
    if step.maximize:
        gradient = -gradient
    if step.weight_decay and step.decoupled:
        state.param.mul_(1 - step.lr * step.weight_decay)
    elif step.weight_decay:
        gradient = gradient.add(state.param, alpha=step.weight_decay)
    state.exp_avg.lerp_(gradient, 1 - step.beta1)
    state.exp_avg_sq.mul_(step.beta2).addcmul_(gradient, gradient, value=1 - step.beta2)
    second = state.exp_avg_sq
    if state.max_exp_avg_sq is not None:
        second = torch.maximum(state.max_exp_avg_sq, second, out=state.max_exp_avg_sq)
    under = (second.sqrt() / step.bias2_sqrt).add_(step.eps)
    state.param.addcdiv_(state.exp_avg, under, value=-step.step_size)
