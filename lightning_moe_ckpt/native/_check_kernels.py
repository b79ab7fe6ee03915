"""Check compression and replay with small cases, compared bit for bit with the twins or the CPU.

The checked functions are arguments and run on any device, so that the checks can be tested themselves.
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
KernelReplay: TypeAlias = Callable[[AdamState, Sequence[AdamStep]], None]
Settle: TypeAlias = Callable[[timedelta], None]
"""Waits for the work queued on a device, up to a limit."""

_COMPRESSION = GradientCompression(small_numel=2000, num_samples=1024)
_MOMENTS = ("param", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_STATE_NUMEL = 4196
"""Two tiles and part of a third."""


def check_compression(compress: Compress, device: torch.device, settle: Settle = lambda _: None) -> None:
    """Check that compressed gradients of every dtype, with NaN, infinity and ties, equal the twins' bytes.

    Args:
        compress: the function to check; takes gradients on `device`.
        device: device of the gradients.
        settle: waits for the device.

    Raises:
        CheckFailed: the bytes differ.
        TimeoutError: the device did not finish.
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


def check_replay(replay: KernelReplay, device: torch.device, settle: Settle = lambda _: None) -> None:
    """Check that steps of Adam and AdamW from gradients of every form give the same bits as on the CPU.

    Args:
        replay: the function to check; takes state and gradients on `device`.
        device: device of state and gradients.
        settle: waits for the device.

    Raises:
        CheckFailed: the bits differ.
        TimeoutError: the device did not finish.
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
    """Replay the steps on the CPU; return how to compare: the library rounds like the kernel, torch does not."""
    if _library.cpu() is not None:
        _adam.replay_cpu(state, steps, _adam.Arithmetic(fused=True, mkl_root=0))
        return torch.equal
    _adam_twin.replay_adam(state, steps)
    return partial(torch.allclose, rtol=1e-4, atol=1e-6)
