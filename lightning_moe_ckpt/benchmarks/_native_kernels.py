"""Compression of gradients and replay of Adam, beside what torch would be asked to do in their place.

On a CPU equal bits are checked, not assumed. An optimizer on a GPU rounds otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from lightning_moe_ckpt.benchmarks._native_goals import Action, Cost, Measurement, NativeFigure, attempt, in_turns
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
_QUEUED = 4
"""Calls that a device is given at a time, so that what the host does in between is hidden as in training."""
_OURS, _SAMPLED, _PLAIN, _FUSED = "compiled", "torch, sampled threshold", "torch, foreach=False", "torch, fused=True"


class Kernels:
    """What kernels take on one device.

    Args:
        device: where gradients are.
        numel: elements of the largest gradient that is compressed; on a device a fifth of it is replayed.
        repeats: runs of each measurement.
    """

    def __init__(self, device: torch.device, numel: int, repeats: int) -> None:
        self._device, self._repeats, self._on_cpu = device, repeats, device.type == "cpu"
        self._numel = numel if self._on_cpu else min(numel, torch.cuda.mem_get_info(device)[0] // 32)
        self._replayed = numel if self._on_cpu else self._numel // 5

    def goals(self) -> dict[str, Measurement]:
        """By name of the goal."""
        return {
            "G9": lambda: self._gain(self._compressions(self._numel, torch.float32), _SAMPLED),
            "G10": lambda: self._gain(self._replays("compressed", NUM_STEPS[-1]), _FUSED),
        }

    def rates(self) -> Iterator[NativeFigure]:
        """Milliseconds, with the processor's time or, of a device, the memory that must be read and written."""
        for numel in [self._numel] if self._on_cpu else sorted({10**6, 10**7, self._numel}):
            for dtype in (torch.float32, torch.bfloat16):
                ways = self._compressions(numel, dtype)
                same = self._on_cpu and selects_like_torch(self._randn(numel).to(dtype))
                yield from self._rows(f"1% of {numel} {str(dtype)[6:]}", ways, numel * dtype.itemsize, same=same)
        gradient = self._randn(SMALL_NUMEL)
        ways = {_OURS: lambda: compress_gradients([gradient]), "torch": lambda: _int8(gradient)}
        same = self._on_cpu and quantizes_like_torch(gradient)
        yield from self._rows(f"INT8 of {SMALL_NUMEL} float32", ways, 4 * SMALL_NUMEL, same=same)
        for kind in ("plain", "compressed"):
            for num_steps in NUM_STEPS:
                same = self._on_cpu and replays_like_torch(min(self._replayed, 2**18), kind, num_steps)
                what = f"AdamW, {num_steps} steps, {kind}, {self._replayed}"
                yield from self._rows(what, self._replays(kind, num_steps), 24 * self._replayed, same=same)

    def _rows(self, what: str, ways: Mapping[str, Action], nbytes: int, *, same: bool) -> Iterator[NativeFigure]:
        costs = dict[str, Cost]()
        first = attempt(what, _OURS, lambda: costs.update(self._costs(ways)) or 0.0, unit="ms")
        if not costs:
            yield first
        for how, cost in costs.items():
            note = f"CPU {cost.cpu * 1e3:,.4g} ms" if self._on_cpu else f"{nbytes / cost.wall / 1e12:.3g} TB/s"
            if self._on_cpu and how == _OURS:
                note += "; same bits as torch" if same else "; OTHER BITS than torch"
            yield NativeFigure(what=what, how=how, value=cost.wall * 1e3, unit="ms", note=note)

    def _gain(self, ways: Mapping[str, Action], baseline: str) -> float:
        costs = self._costs({how: ways[how] for how in (_OURS, baseline)})
        return costs[baseline].wall / costs[_OURS].wall

    def _costs(self, ways: Mapping[str, Action]) -> dict[str, Cost]:
        if self._on_cpu:
            return in_turns(ways, self._repeats)
        queued = {how: lambda action=action: self._queue(action) for how, action in ways.items()}
        costs = in_turns(queued, self._repeats)
        return {how: Cost(cost.wall / _QUEUED, cost.cpu / _QUEUED) for how, cost in costs.items()}

    def _queue(self, action: Action) -> None:
        for _ in range(_QUEUED):
            action()
        torch.cuda.synchronize(self._device)

    def _compressions(self, numel: int, dtype: torch.dtype) -> dict[str, Action]:
        gradient = self._randn(numel).to(dtype)
        ways: dict[str, Action] = {_OURS: lambda: compress_gradients([gradient]), _SAMPLED: lambda: _sampled(gradient)}
        return ways | ({"torch, exact topk": lambda: _topk(gradient)} if self._on_cpu else {})

    def _replays(self, kind: str, num_steps: int) -> dict[str, Action]:
        gradient: Tensor | CompressedGradient = self._randn(self._replayed)
        if kind == "compressed" and isinstance(gradient, Tensor):
            (gradient,) = compress_gradients([gradient])
        weights = self._randn(self._replayed)
        return {
            _OURS: Replayed(weights, gradient, num_steps),
            _PLAIN: TorchSteps(weights, gradient, num_steps, fused=False),
            _FUSED: TorchSteps(weights, gradient, num_steps, fused=True),
        }

    def _randn(self, numel: int) -> Tensor:
        return torch.randn(numel, device=self._device, generator=torch.Generator(self._device).manual_seed(1))


class Replayed:
    """Calling it takes a state through the steps with `replay_adam`."""

    def __init__(self, weights: Tensor, gradient: Tensor | CompressedGradient, num_steps: int) -> None:
        self.state = AdamState(weights.clone(), torch.zeros_like(weights), torch.zeros_like(weights))
        self._steps = [
            AdamStep(gradient=gradient, step=1 + index, lr=_LR, weight_decay=_WEIGHT_DECAY)
            for index in range(num_steps)
        ]

    def __call__(self) -> None:
        replay_adam(self.state, self._steps)


class TorchSteps:
    """Calling it takes torch's optimizer through the steps, each from a gradient made whole first."""

    def __init__(self, weights: Tensor, gradient: Tensor | CompressedGradient, num_steps: int, *, fused: bool) -> None:
        self.param = torch.nn.Parameter(weights.clone())
        self.optimizer = torch.optim.AdamW([self.param], lr=_LR, weight_decay=_WEIGHT_DECAY, foreach=False, fused=fused)
        self._gradient, self._num_steps = gradient, num_steps

    def __call__(self) -> None:
        for _ in range(self._num_steps):
            whole = self._gradient if isinstance(self._gradient, Tensor) else decompress_gradient(self._gradient)
            self.param.grad = whole.to(torch.float32).view_as(self.param)
            self.optimizer.step()


def replays_like_torch(numel: int, kind: str, num_steps: int) -> bool:
    """Whether parameter and moments have torch's bits after the steps."""
    ways = Kernels(torch.device("cpu"), numel, 1)._replays(kind, num_steps)  # noqa: SLF001  # this module's own
    ours, theirs = ways[_OURS], ways[_PLAIN]
    assert isinstance(ours, Replayed)
    assert isinstance(theirs, TorchSteps)
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


def quantizes_like_torch(gradient: Tensor) -> bool:
    """Whether INT8 values and scale have torch's bits."""
    (ours,), (values, scale) = compress_gradients([gradient]), _int8(gradient)
    return isinstance(ours, QuantizedGradient) and torch.equal(ours.values, values) and torch.equal(ours.scale, scale)


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
