"""Compression of gradients and replay of Adam on the CPU, beside torch; equal bits are checked, not assumed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_moe_ckpt.benchmarks._native_figure import NativeFigure, cost_figures, in_turns
from lightning_moe_ckpt.native import (
    AdamState,
    AdamStep,
    CompressedGradient,
    QuantizedGradient,
    SparseGradient,
    compress_gradients,
    decompress_gradient,
    replay_adam,
)

SMALL_NUMEL = 99_999
"""The largest tensor that becomes INT8."""
NUM_STEPS = (1, 4, 8)
_KEPT, _NUM_SAMPLES = 0.01, 32_768
_LR, _WEIGHT_DECAY = 1e-3, 0.01
_OURS = "compiled"


def compression(numel: int, repeats: int) -> list[NativeFigure]:
    """Rows of sparse selection from float32 and bfloat16 gradients, and of INT8."""
    figures = []
    for dtype in (torch.float32, torch.bfloat16):
        gradient = _randn(numel).to(dtype)
        ways: dict[str, Callable[[], object]] = {
            _OURS: lambda gradient=gradient: compress_gradients([gradient]),  # type: ignore[misc]
            "torch, sampled threshold": lambda gradient=gradient: _sampled(gradient),  # type: ignore[misc]
            "torch, exact topk": lambda gradient=gradient: _topk(gradient),  # type: ignore[misc]
        }
        notes = {_OURS: _said(selects_like_torch(gradient), "torch at the same threshold")}
        figures += cost_figures(f"1% of {numel} {str(dtype)[6:]}", in_turns(ways, repeats), notes)
    return figures + _quantization(repeats)


def replay(numel: int, repeats: int) -> list[NativeFigure]:
    """Rows of AdamW over 1, 4 and 8 steps from plain and sparse gradients."""
    plain = _randn(numel)
    (sparse,) = compress_gradients([plain])
    figures = []
    for kind, gradient in (("plain", plain), ("compressed", sparse)):
        for num_steps in NUM_STEPS:
            ways: dict[str, Callable[[], object]] = {
                _OURS: Replayed(numel, gradient, num_steps),
                "torch, foreach=False": TorchSteps(numel, gradient, num_steps, fused=False),
                "torch, fused=True": TorchSteps(numel, gradient, num_steps, fused=True),
            }
            notes = {_OURS: _said(replays_like_torch(min(numel, 2**18), kind, num_steps), "torch, foreach=False")}
            figures += cost_figures(f"AdamW, {num_steps} steps, {kind}, {numel}", in_turns(ways, repeats), notes)
    return figures


class Replayed:
    """Calling it takes a state through the steps with `replay_adam`."""

    def __init__(self, numel: int, gradient: Tensor | CompressedGradient, num_steps: int) -> None:
        self.state = AdamState(_randn(numel), torch.zeros(numel), torch.zeros(numel))
        self._steps = [
            AdamStep(gradient=gradient, step=1 + index, lr=_LR, weight_decay=_WEIGHT_DECAY)
            for index in range(num_steps)
        ]

    def __call__(self) -> None:
        replay_adam(self.state, self._steps)


class TorchSteps:
    """Calling it takes torch's optimizer through the steps, each from a gradient made whole first."""

    def __init__(self, numel: int, gradient: Tensor | CompressedGradient, num_steps: int, *, fused: bool) -> None:
        self.param = torch.nn.Parameter(_randn(numel))
        self.optimizer = torch.optim.AdamW([self.param], lr=_LR, weight_decay=_WEIGHT_DECAY, foreach=False, fused=fused)
        self._gradient, self._num_steps = gradient, num_steps

    def __call__(self) -> None:
        for _ in range(self._num_steps):
            whole = self._gradient if isinstance(self._gradient, Tensor) else decompress_gradient(self._gradient)
            self.param.grad = whole.to(torch.float32).view_as(self.param)
            self.optimizer.step()


def replays_like_torch(numel: int, kind: str, num_steps: int) -> bool:
    """Whether parameter and moments have torch's bits after the steps."""
    gradient: Tensor | CompressedGradient = _randn(numel)
    if kind == "compressed" and isinstance(gradient, Tensor):
        (gradient,) = compress_gradients([gradient])
    ours, theirs = Replayed(numel, gradient, num_steps), TorchSteps(numel, gradient, num_steps, fused=False)
    ours()
    theirs()
    state = theirs.optimizer.state[theirs.param]
    wanted = (theirs.param.detach(), state["exp_avg"], state["exp_avg_sq"])
    return all(map(torch.equal, ours.state.tensors(), wanted))


def selects_like_torch(gradient: Tensor) -> bool:
    """Whether exactly the elements from the smallest one kept upwards were kept, with torch's FP16 values."""
    (compressed,) = compress_gradients([gradient])
    if not isinstance(compressed, SparseGradient):
        return False
    (part,) = compressed.trimmed().parts
    indices = part.indices.long()
    threshold = gradient[indices].abs().min()
    wanted = (gradient.abs() >= threshold).nonzero().flatten()
    return torch.equal(indices, wanted) and torch.equal(part.values, gradient[wanted].half())


def _quantization(repeats: int) -> list[NativeFigure]:
    gradient = _randn(SMALL_NUMEL)
    ways: dict[str, Callable[[], object]] = {
        _OURS: lambda: compress_gradients([gradient]),
        "torch": lambda: _int8(gradient),
    }
    (ours,), (values, scale) = compress_gradients([gradient]), _int8(gradient)
    same = isinstance(ours, QuantizedGradient) and torch.equal(ours.values, values) and torch.equal(ours.scale, scale)
    return cost_figures(f"INT8 of {SMALL_NUMEL} float32", in_turns(ways, repeats), {_OURS: _said(same, "torch")})


def _int8(gradient: Tensor) -> tuple[Tensor, Tensor]:
    scale = gradient.abs().max() / 127
    return (gradient / scale).round_().clamp_(-127, 127).to(torch.int8), scale.view(1)


def _sampled(gradient: Tensor) -> tuple[Tensor, Tensor]:
    magnitudes = gradient.abs()
    sample = magnitudes[:: max(gradient.numel() // _NUM_SAMPLES, 1)].float()
    threshold = sample.kthvalue(max(int(sample.numel() * (1 - _KEPT)), 1)).values
    indices = (magnitudes >= threshold).nonzero().flatten()
    return gradient[indices].half(), indices.int()


def _topk(gradient: Tensor) -> tuple[Tensor, Tensor]:
    indices = gradient.abs().topk(max(int(gradient.numel() * _KEPT), 1)).indices
    return gradient[indices].half(), indices.int()


def _randn(numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1))


def _said(same: bool, what: str) -> str:
    return f"{'same bits as' if same else 'OTHER BITS than'} {what}"
