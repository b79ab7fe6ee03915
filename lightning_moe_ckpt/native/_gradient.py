"""Adaptive compression of gradients, the content of lossy DELTA records.

A small tensor becomes INT8 with one scale. A big tensor keeps its elements of largest magnitude, in FP16, with their
indices. The threshold for about `keep_ratio` of the elements is estimated from a sample, so the tensor is read once.
Every byte of both forms is the same on CPU and CUDA and from run to run.

Non-finite values stay non-finite: a sparse gradient keeps every NaN and infinity, an INT8 gradient gets a NaN scale.
Both count them, so that a caller can skip such a step. Finite values beyond FP16 saturate at 65504.

Source: TierCheck, section 3.2. We differ in: ties at the threshold are cut by index at `capacity_ratio`; zeros are never
kept, however many there are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

TILE_NUMEL = 2048
MAX_PART_NUMEL = 2**31 - TILE_NUMEL
MAX_SAMPLES = 32_768
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientCompression:
    """How gradients are compressed; the defaults are those of TierCheck, section 5.1."""

    small_numel: int = 100_000
    """Tensors with fewer elements become INT8: there the indices would cost more than they save."""
    keep_ratio: float = 0.01
    """Share of a big tensor's elements that the threshold aims to keep."""
    capacity_ratio: float = 0.015
    """Share of a big tensor's elements that there is room for; only ties can exceed it."""
    num_samples: int = 32_768
    """Elements that the threshold is estimated from; at 1 % the share kept is then within 0.06 points (1 sigma)."""

    def __post_init__(self) -> None:
        if self.small_numel < 0:
            raise ValueError(f"`GradientCompression(small_numel={self.small_numel})` must be zero or more.")
        if not 0 < self.keep_ratio <= self.capacity_ratio <= 1:
            raise ValueError(
                f"`GradientCompression(keep_ratio={self.keep_ratio}, capacity_ratio={self.capacity_ratio})` must satisfy "
                "0 < keep_ratio <= capacity_ratio <= 1."
            )
        if not 1 <= self.num_samples <= MAX_SAMPLES:
            raise ValueError(
                f"`GradientCompression(num_samples={self.num_samples})` must be from 1 to {MAX_SAMPLES}: their magnitudes "
                "have to fit the shared memory of a CUDA block."
            )


@dataclass(frozen=True, slots=True)
class QuantizedGradient:
    """A small gradient: value = `values * scale`."""

    values: Tensor
    """int8, shape `[numel]`."""
    scale: Tensor
    """float32, shape `[1]`; NaN if any element was not finite."""
    not_finite: Tensor
    """int64, shape `[1]`: how many elements were not finite."""
    shape: torch.Size
    """Of the gradient."""

    @property
    def nbytes(self) -> int:
        """Bytes that a record of it takes."""
        return self.values.nbytes + self.scale.nbytes


@dataclass(frozen=True, slots=True)
class SparsePart:
    """The kept elements of up to 2^31 - 1 elements of a big gradient, in index order."""

    values: Tensor
    """float16, shape `[capacity]`; only the first `tiles[-1]` are valid."""
    indices: Tensor
    """int32, shape `[capacity]`, relative to the part."""
    tiles: Tensor
    """int32, shape `[ceil(numel / 2048) + 1]`: where each tile of 2048 elements starts in `values`."""
    counts: Tensor
    """int64, shape `[2]`: elements that reached the threshold (more than `capacity` were cut), elements not finite."""
    numel: int
    """Elements of the gradient in this part's range, kept or not."""

    def trimmed(self) -> SparsePart:
        """Without the unused room; waits for the device."""
        kept = int(self.tiles[-1])
        return SparsePart(self.values[:kept].clone(), self.indices[:kept].clone(), self.tiles, self.counts, self.numel)


@dataclass(frozen=True, slots=True)
class SparseGradient:
    """A big gradient, in parts of fewer than 2^31 elements."""

    parts: tuple[SparsePart, ...]
    shape: torch.Size
    """Of the gradient."""

    def trimmed(self) -> SparseGradient:
        """Without the unused room; waits for the device."""
        return SparseGradient(tuple(part.trimmed() for part in self.parts), self.shape)

    @property
    def not_finite(self) -> Tensor:
        """int64, shape `[1]`: how many elements were not finite."""
        return torch.stack([part.counts[1:] for part in self.parts]).sum(0)

    @property
    def nbytes(self) -> int:
        """Bytes of its record, including unused room: trim it first."""
        return sum(part.values.nbytes + part.indices.nbytes + part.tiles.nbytes for part in self.parts)


CompressedGradient: TypeAlias = QuantizedGradient | SparseGradient


def is_small(gradient: Tensor, how: GradientCompression) -> bool:
    """Whether a gradient becomes INT8 instead of sparse."""
    return gradient.numel() < max(how.small_numel, 1)


def check_gradient(gradient: Tensor, position: int) -> None:
    """Raise unless a gradient can be compressed.

    Raises:
        ValueError: the dtype is none of float32, bfloat16 and float16, or the tensor is not contiguous.
    """
    if gradient.dtype not in DTYPE_CODES:
        raise ValueError(
            f"Gradient {position} is {gradient.dtype}; float32, bfloat16 and float16 can be compressed. "
            "Keep this one as a plain (lossless) DELTA."
        )
    if not gradient.is_contiguous():
        raise ValueError(
            f"Gradient {position} of shape {tuple(gradient.shape)} has strides {gradient.stride()}; "
            "compression reads contiguous memory. Call `.contiguous()` first."
        )


def capacity_of(numel: int, how: GradientCompression) -> int:
    """Return the number of elements that a part of `numel` elements has room for."""
    return min(numel, max(math.ceil(numel * how.capacity_ratio), 1))


def sample_rank(numel: int, how: GradientCompression) -> tuple[int, int]:
    """Return the number of samples, and the rank of the threshold among their magnitudes."""
    samples = min(how.num_samples, numel)
    return samples, min(samples - 1, int(samples * (1 - how.keep_ratio)))


def empty_quantized(gradient: Tensor) -> QuantizedGradient:
    """Allocate the result for a small gradient, on its device."""
    device = gradient.device
    return QuantizedGradient(
        torch.empty(gradient.numel(), dtype=torch.int8, device=device),
        torch.empty(1, dtype=torch.float32, device=device),
        torch.empty(1, dtype=torch.int64, device=device),
        gradient.shape,
    )


def empty_part(numel: int, device: torch.device, how: GradientCompression) -> SparsePart:
    """Allocate the result for one part of a big gradient."""
    capacity, tiles = capacity_of(numel, how), -(-numel // TILE_NUMEL)
    return SparsePart(
        torch.empty(capacity, dtype=torch.float16, device=device),
        torch.empty(capacity, dtype=torch.int32, device=device),
        torch.empty(tiles + 1, dtype=torch.int32, device=device),
        torch.empty(2, dtype=torch.int64, device=device),
        numel,
    )


def split_parts(gradient: Tensor, part_numel: int = MAX_PART_NUMEL) -> Sequence[Tensor]:
    """Split a gradient into flat pieces; all but the last are whole tiles."""
    return torch.split(gradient.view(-1), part_numel)


def decompress_gradient(compressed: CompressedGradient) -> Tensor:
    """Return the gradient as float32 in its shape, with zeros for elements that were not kept."""
    if isinstance(compressed, QuantizedGradient):
        return (compressed.values.float() * compressed.scale).view(compressed.shape)
    parts = []
    for part in compressed.parts:
        dense = torch.zeros(part.numel, dtype=torch.float32, device=part.values.device)
        kept = int(part.tiles[-1])
        dense[part.indices[:kept].long()] = part.values[:kept].float()
        parts.append(dense)
    return torch.cat(parts).view(compressed.shape)
