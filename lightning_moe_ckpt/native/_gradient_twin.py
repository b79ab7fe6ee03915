"""Compression of gradients in torch, on any device; writes the same bytes as the compiled functions."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_moe_ckpt.native._gradient import (
    TILE_NUMEL,
    GradientCompression,
    QuantizedGradient,
    SparsePart,
    sample_rank,
)

ABS_MASK = 0x7FFFFFFF
INF_BITS = 0x7F800000
HALF_NAN = 0x7E00
HALF_MAX = 65504.0


def quantize(gradient: Tensor, out: QuantizedGradient) -> None:
    """Compress a gradient to INT8 with one scale."""
    values = gradient.reshape(-1).float()
    bits = _magnitude_bits(values)
    out.not_finite.fill_(int((bits >= INF_BITS).sum()))
    largest = values.abs().max() if values.numel() else values.new_zeros(())
    # Divide by a tensor: on CUDA, division by a number multiplies by its reciprocal, which rounds differently.
    scale = largest / torch.full_like(largest, 127)
    if values.numel():
        scale = torch.where(bits.max() >= INF_BITS, torch.nan, scale)
    out.scale.copy_(scale.reshape(1))
    if bool(scale > 0):
        out.values.copy_((values / scale).round().clamp(-127, 127))
    else:
        out.values.zero_()


def sample_threshold(gradient: Tensor, how: GradientCompression) -> int:
    """Estimate the magnitude that about `keep_ratio` of the elements reach; return its float bits."""
    samples, rank = sample_rank(gradient.numel(), how)
    position = _sample_positions(samples, gradient.numel() // samples).to(gradient.device)
    magnitudes = _magnitude_bits(gradient.view(-1)[position].float())
    return min(max(int(magnitudes.kthvalue(rank + 1).values), 1), INF_BITS)


def select(gradient: Tensor, threshold: int, out: SparsePart) -> None:
    """Write the elements that reach the threshold, in index order, until `out` is full."""
    values = gradient.view(-1).float()
    bits = _magnitude_bits(values)
    reached = (bits >= threshold).nonzero().view(-1)
    kept = reached[: out.values.numel()]
    out.values[: kept.numel()] = saturated_half(values[kept])
    out.indices[: kept.numel()] = kept.int()
    borders = torch.arange(out.tiles.numel(), device=kept.device) * TILE_NUMEL
    out.tiles.copy_(torch.searchsorted(kept, borders))
    out.counts[0], out.counts[1] = reached.numel(), int((bits >= INF_BITS).sum())


def saturated_half(values: Tensor) -> Tensor:
    """Convert float32 to float16: finite values stay finite, every NaN becomes the same quiet NaN."""
    half = torch.where(values.isinf(), values, values.clamp(-HALF_MAX, HALF_MAX)).half()
    nan = torch.tensor(HALF_NAN, dtype=torch.int16, device=values.device).view(torch.float16)
    return torch.where(values.isnan(), nan, half)


def _magnitude_bits(values: Tensor) -> Tensor:
    """Return integers in the order of the magnitudes, with NaN above all."""
    return values.view(torch.int32) & ABS_MASK


def _sample_positions(samples: int, stride: int) -> Tensor:
    """One element out of each stride; int64 with masks stands in for the uint32 arithmetic of the compiled code."""
    index = torch.arange(samples, dtype=torch.int64)
    mixed = index * 2654435761 & 0xFFFFFFFF
    mixed ^= mixed >> 15
    mixed = (mixed & 0xFFFF) * 2246822519 + ((mixed >> 16) * 2246822519 << 16) & 0xFFFFFFFF
    mixed ^= mixed >> 13
    return index * stride + mixed % stride
