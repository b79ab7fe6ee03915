"""Measure compiled compression of gradients and replay of optimizer steps, beside torch, for `native_goals`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product

import torch
from torch import Tensor

from benchmarks.costs import Cost
from benchmarks.native import Action, NativeFigure, figure_of, in_turns
from lightning_moe_ckpt.native import (
    AdamState,
    AdamStep,
    CompressedGradient,
    compress_gradients,
    decompress_gradient,
    replay_adam,
)

GoalMeasurement = Callable[[], float]
_SMALL_NUMEL = 99_999
"""The largest tensor that becomes INT8."""
_NUM_STEPS = (1, 4, 8)
_KEPT, _NUM_SAMPLES = 0.01, 32_768
_LR, _WEIGHT_DECAY = 1e-3, 0.01
_QUEUED = 4
"""Calls queued on a device at a time: they hide the host's work in between, as in training."""
_OURS, _SAMPLED, _FUSED = "compiled", "torch, sampled threshold", "torch, fused=True"


class Kernels:
    """Time of kernels on one device.

    Args:
        device: where gradients are.
        numel: elements of the largest gradient that is compressed; on a device a fifth of it is replayed.
        repeats: runs of each measurement.
    """

    def __init__(self, device: torch.device, numel: int, repeats: int) -> None:
        self._device, self._repeats, self._on_cpu = device, repeats, device.type == "cpu"
        self._numel = numel if self._on_cpu else min(numel, torch.cuda.mem_get_info(device)[0] // 32)
        self._replayed = numel if self._on_cpu else self._numel // 5

    def goals(self) -> dict[str, GoalMeasurement]:
        """Return measurements by name of the goal."""
        return {
            "G9": lambda: self._gain(self._compressions(self._numel, torch.float32), _SAMPLED),
            "G10": lambda: self._gain(self._replays("compressed", _NUM_STEPS[-1]), _FUSED),
        }

    def _gain(self, ways: Mapping[str, Action], baseline: str) -> float:
        costs = self._costs({how: ways[how] for how in (_OURS, baseline)})
        return costs[baseline].wall / costs[_OURS].wall

    def rates(self) -> Iterator[NativeFigure]:
        """Yield milliseconds, with the processor's time or, of a device, the rate at which memory must be read and written."""
        for numel in [self._numel] if self._on_cpu else sorted({10**6, 10**7, self._numel}):
            for dtype in (torch.float32, torch.bfloat16):
                ways = self._compressions(numel, dtype)
                yield from self._rows(f"1% of {numel} {str(dtype)[6:]}", ways, numel * dtype.itemsize)
        gradient = self._randn(_SMALL_NUMEL)
        ways = {_OURS: lambda: compress_gradients([gradient]), "torch": lambda: _int8(gradient)}
        yield from self._rows(f"INT8 of {_SMALL_NUMEL} float32", ways, 4 * _SMALL_NUMEL)
        for kind, num_steps in product(("plain", "compressed"), _NUM_STEPS):
            what = f"AdamW, {num_steps} steps, {kind}, {self._replayed}"
            yield from self._rows(what, self._replays(kind, num_steps), 24 * self._replayed)

    def _rows(self, what: str, ways: Mapping[str, Action], nbytes: int) -> Iterator[NativeFigure]:
        costs = dict[str, Cost]()
        first = figure_of(what, _OURS, lambda: costs.update(self._costs(ways)) or 0.0, unit="ms")
        if not costs:
            yield first
        for how, cost in costs.items():
            note = f"CPU {cost.cpu * 1e3:,.4g} ms" if self._on_cpu else f"{nbytes / cost.wall / 1e12:.3g} TB/s"
            yield NativeFigure(what=what, how=how, value=cost.wall * 1e3, unit="ms", note=note)

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
        chosen = (self._randn(self._replayed), gradient, num_steps)
        return {
            _OURS: _replay(*chosen),
            "torch, foreach=False": _torch_steps(*chosen),
            _FUSED: _torch_steps(*chosen, fused=True),
        }

    def _randn(self, numel: int) -> Tensor:
        return torch.randn(numel, device=self._device, generator=torch.Generator(self._device).manual_seed(1))


def _replay(weights: Tensor, gradient: Tensor | CompressedGradient, num_steps: int) -> Action:
    """Return a function that takes a state through the steps with `replay_adam`."""
    state = AdamState(weights.clone(), torch.zeros_like(weights), torch.zeros_like(weights))
    steps = [AdamStep(gradient=gradient, step=1 + n, lr=_LR, weight_decay=_WEIGHT_DECAY) for n in range(num_steps)]
    return lambda: replay_adam(state, steps)


def _torch_steps(
    weights: Tensor, gradient: Tensor | CompressedGradient, num_steps: int, *, fused: bool = False
) -> Action:
    """Return a function that takes torch's optimizer through the steps, each from a decompressed gradient."""
    param = torch.nn.Parameter(weights.clone())
    optimizer = torch.optim.AdamW([param], lr=_LR, weight_decay=_WEIGHT_DECAY, foreach=False, fused=fused)

    def take() -> None:
        for _ in range(num_steps):
            whole = gradient if isinstance(gradient, Tensor) else decompress_gradient(gradient)
            param.grad = whole.to(torch.float32).view_as(param)
            optimizer.step()

    return take


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
