"""Small cases of compression and replay, compared bit for bit with what the twins or the CPU make of them.

They take the functions that they check as arguments and run on any device, so that the checks can be checked too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_moe_ckpt.native import _adam, _adam_twin, _library
from lightning_moe_ckpt.native._adam_steps import AdamState, AdamStep
from lightning_moe_ckpt.native._check_copies import PATIENCE, CheckFailed
from lightning_moe_ckpt.native._compress import compress_with
from lightning_moe_ckpt.native._gradient import (
    CompressedGradient,
    GradientCompression,
    QuantizedGradient,
    SparseGradient,
)

Compress: TypeAlias = Callable[[Sequence[Tensor], GradientCompression], list[CompressedGradient]]
Replay: TypeAlias = Callable[[AdamState, Sequence[AdamStep]], None]
Settle: TypeAlias = Callable[[timedelta], None]
"""Waits for what was queued on a device, so long at most."""

_COMPRESSION = GradientCompression(small_numel=2000, num_samples=1024)
_MOMENTS = ("param", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_STATE_NUMEL = 4196
"""Two tiles and a part of one."""


def check_compression(compress: Compress, device: torch.device, settle: Settle = lambda _: None) -> None:
    """INT8 and sparse gradients of every dtype, with NaN, infinity and ties, have the bytes that the twins write.

    Args:
        compress: to be checked; takes gradients on `device`.
        device: where it works.
        settle: see `Settle`.

    Raises:
        CheckFailed: they have others.
        TimeoutError: the device did not come to an end.
    """
    gradients = list(_gradients())
    wanted = compress_with(None, gradients, _COMPRESSION)
    found = compress([gradient.to(device) for gradient in gradients], _COMPRESSION)
    settle(PATIENCE)
    for gradient, one, other in zip(gradients, found, wanted, strict=True):
        if type(one) is not type(other) or not _same(one, other):
            what = f"{gradient.numel()} elements of {gradient.dtype}"
            raise CheckFailed(f"{what} were not compressed to the bytes of {type(other).__name__} that torch writes")


def _gradients() -> Iterator[Tensor]:
    for index, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16)):
        for numel in (1, 1000, 5003):
            yield _noise(index, numel).to(dtype)
        odd = _noise(index, 3001)
        odd[100:200], odd[300], odd[1500], odd[3000] = 0.25, torch.nan, -torch.inf, 1e6
        yield odd.to(dtype)
    yield _noise(3, 70_001)  # more tiles than a warp has lanes


def _noise(seed: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def _tensors(compressed: CompressedGradient) -> list[Tensor]:
    if isinstance(compressed, QuantizedGradient):
        return [compressed.values, compressed.scale, compressed.not_finite]
    parts = compressed.trimmed().parts
    return [tensor for part in parts for tensor in (part.values, part.indices, part.tiles, part.counts)]


def _same(one: CompressedGradient, other: CompressedGradient) -> bool:
    pairs = zip(_tensors(one), _tensors(other), strict=True)
    return all(torch.equal(left.cpu().view(torch.uint8), right.cpu().view(torch.uint8)) for left, right in pairs)


def check_replay(replay: Replay, device: torch.device, settle: Settle = lambda _: None) -> None:
    """Steps of Adam and AdamW from gradients of every form leave parameter and moments with the bits of the CPU.

    Args:
        replay: to be checked; takes state and gradients on `device`.
        device: where it works.
        settle: see `Settle`.

    Raises:
        CheckFailed: they leave others.
        TimeoutError: the device did not come to an end.
    """
    steps = _steps()
    for amsgrad in (False, True):
        wanted = AdamState(*(_noise(index, _STATE_NUMEL).abs() for index in range(4 if amsgrad else 3)))
        state = AdamState(*(tensor.to(device, copy=True) for tensor in wanted.tensors()))
        replay(state, [replace(step, gradient=_moved(step.gradient, device)) for step in steps])
        settle(PATIENCE)
        same = _replay_on_cpu(wanted, steps)
        for name, found, want in zip(_MOMENTS, state.tensors(), wanted.tensors(), strict=False):
            if not same(found.cpu(), want):
                raise CheckFailed(f"`{name}` after {len(steps)} steps, amsgrad={amsgrad}, is not that of the CPU")


def _steps() -> list[AdamStep]:
    draw = partial(_noise, numel=_STATE_NUMEL)
    sparse, small = (
        compress_with(None, [draw(seed)], GradientCompression(small_numel=limit, num_samples=256))[0]
        for seed, limit in ((1, 0), (2, 10**6))
    )
    gradients: list[Any] = [draw(3), draw(4).bfloat16(), draw(5).half(), sparse, small]
    return [
        AdamStep(
            gradient=gradient, step=3 + index, lr=1e-2, weight_decay=0.1, decoupled=index % 2 == 0, maximize=index == 1
        )
        for index, gradient in enumerate(gradients)
    ]


def _moved(gradient: Tensor | CompressedGradient, device: torch.device) -> Any:
    if isinstance(gradient, Tensor):
        return gradient.to(device)
    if isinstance(gradient, QuantizedGradient):
        values, scale, not_finite = (tensor.to(device) for tensor in _tensors(gradient))
        return QuantizedGradient(values, scale, not_finite, gradient.shape)
    parts = (
        replace(part, **{name: getattr(part, name).to(device) for name in ("values", "indices", "tiles", "counts")})
        for part in gradient.parts
    )
    return SparseGradient(tuple(parts), gradient.shape)


def _replay_on_cpu(state: AdamState, steps: Sequence[AdamStep]) -> Callable[[Tensor, Tensor], bool]:
    """Take `state` through the steps; returns what to compare with: the library rounds where the kernel does, torch elsewhere."""
    if _library.cpu() is not None:
        _adam.replay_cpu(state, steps, _adam.Arithmetic(fused=True, mkl_root=0))
        return torch.equal
    _adam_twin.replay_adam(state, steps)
    return partial(torch.allclose, rtol=1e-4, atol=1e-6)
