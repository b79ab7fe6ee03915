"""Adaptive compression of gradients: the small, lossy form of one optimizer step.

A small tensor becomes INT8 with one scale. A big tensor keeps its elements of largest magnitude, in FP16, with their
indices. The threshold for about `keep_ratio` of the elements is estimated from a sample, so the tensor is read once.
Every byte of both forms is the same on CPU and CUDA and from run to run.

Non-finite values stay non-finite: a sparse gradient keeps every NaN and infinity, an INT8 gradient gets a NaN scale.
Both forms count such values, so that a caller can skip the step. Finite values beyond FP16 saturate at 65504.

Source: TierCheck, section 3.2. We differ in: ties at the threshold are cut by index at `capacity_ratio`; zeros are
never kept, however many there are.
"""

from __future__ import annotations

import ctypes as c
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from lightning_moe_ckpt.native._cuda import TorchDevice
from lightning_moe_ckpt.native._library import Library

TILE_NUMEL = 2048
MAX_PART_NUMEL = 2**31 - TILE_NUMEL
MAX_SAMPLES = 32_768
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ABS_MASK = 0x7FFFFFFF
INF_BITS = 0x7F800000
HALF_NAN = 0x7E00
HALF_MAX = 65504.0
_WORD_NBYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientCompression:
    """Settings of the compression; the defaults are TierCheck's, section 5.1."""

    small_numel: int = 100_000
    """Elements below which a tensor becomes INT8: there the indices would cost more than they save."""
    keep_ratio: float = 0.01
    """Share of a big tensor's elements for which the threshold aims."""
    capacity_ratio: float = 0.015
    """Share of a big tensor's elements that fit; only ties can exceed it."""
    num_samples: int = 32_768
    """Elements in the threshold's sample; at 1 % the share kept is then within 0.06 points (1 sigma)."""

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
    """Small gradient: value = `values * scale`."""

    values: Tensor
    """int8, shape `[numel]`."""
    scale: Tensor
    """float32, shape `[1]`; NaN if any element was not finite."""
    not_finite: Tensor
    """int64, shape `[1]`: number of elements that were not finite."""
    shape: torch.Size
    """Shape of the gradient."""

    @property
    def nbytes(self) -> int:
        """Bytes of the gradient in a record."""
        return self.values.nbytes + self.scale.nbytes


@dataclass(frozen=True, slots=True)
class SparsePart:
    """Kept elements of up to 2^31 - 1 elements of a big gradient, in index order."""

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
        """Return the part without its unused room; waits for the device."""
        kept = int(self.tiles[-1])
        return SparsePart(self.values[:kept].clone(), self.indices[:kept].clone(), self.tiles, self.counts, self.numel)


@dataclass(frozen=True, slots=True)
class SparseGradient:
    """Big gradient, in parts of fewer than 2^31 elements."""

    parts: tuple[SparsePart, ...]
    shape: torch.Size
    """Shape of the gradient."""

    def trimmed(self) -> SparseGradient:
        """Return the gradient without unused room; waits for the device."""
        return SparseGradient(tuple(part.trimmed() for part in self.parts), self.shape)

    @property
    def not_finite(self) -> Tensor:
        """int64, shape `[1]`: number of elements that were not finite."""
        return torch.stack([part.counts[1:] for part in self.parts]).sum(0)

    @property
    def nbytes(self) -> int:
        """Bytes of the gradient in a record, including unused room: trim it first."""
        return sum(part.values.nbytes + part.indices.nbytes + part.tiles.nbytes for part in self.parts)


CompressedGradient: TypeAlias = QuantizedGradient | SparseGradient


def check_gradient(gradient: Tensor, position: int) -> None:
    """Raise `ValueError` unless a gradient can be compressed: contiguous, of float32, bfloat16 or float16."""
    if gradient.dtype not in DTYPE_CODES:
        raise ValueError(
            f"Gradient {position} is {gradient.dtype}; float32, bfloat16 and float16 can be compressed. "
            "Keep this one uncompressed."
        )
    if not gradient.is_contiguous():
        raise ValueError(
            f"Gradient {position} of shape {tuple(gradient.shape)} has strides {gradient.stride()}; "
            "compression reads contiguous memory. Call `.contiguous()` first."
        )


def sample_rank(numel: int, how: GradientCompression) -> tuple[int, int]:
    """Return the number of samples, and the rank of the threshold among their magnitudes."""
    samples = min(how.num_samples, numel)
    return samples, min(samples - 1, int(samples * (1 - how.keep_ratio)))


def capacity_of(numel: int, how: GradientCompression) -> int:
    """Return the elements that fit into a sparse part of `numel` elements."""
    return min(numel, max(math.ceil(numel * how.capacity_ratio), 1))


def empty_quantized(gradient: Tensor) -> QuantizedGradient:
    device = gradient.device
    return QuantizedGradient(
        torch.empty(gradient.numel(), dtype=torch.int8, device=device),
        torch.empty(1, dtype=torch.float32, device=device),
        torch.empty(1, dtype=torch.int64, device=device),
        gradient.shape,
    )


def empty_part(numel: int, device: torch.device, how: GradientCompression) -> SparsePart:
    capacity, tiles = capacity_of(numel, how), _num_tiles(numel)
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
    """Return the gradient as float32 in its shape, with zeros for elements not kept."""
    if isinstance(compressed, QuantizedGradient):
        return (compressed.values.float() * compressed.scale).view(compressed.shape)
    parts = []
    for part in compressed.parts:
        dense = torch.zeros(part.numel, dtype=torch.float32, device=part.values.device)
        kept = int(part.tiles[-1])
        dense[part.indices[:kept].long()] = part.values[:kept].float()
        parts.append(dense)
    return torch.cat(parts).view(compressed.shape)


# -- in the bytes of a record


def packed_nbytes(numel: int) -> int:
    """Return the most bytes of a packed gradient: a word and INT8, or a word, counts by tile, and a full sparse part."""
    how = GradientCompression()
    sparse = 2 * _num_tiles(numel) + 4 * capacity_of(numel, how)
    return _WORD_NBYTES + (numel if numel < max(how.small_numel, 1) else sparse)


def pack_gradient(compressed: CompressedGradient) -> Tensor:
    """Return a compressed gradient of one part as uint8, at most `packed_nbytes` of them, on its device.

    The word is the scale in float32 or, in a sparse gradient, the complement of the number of kept elements in int32.
    Then come int8 values, or in int16 each tile's number of elements and each element's place in its tile, and all
    values in float16. A gradient of zeros is only the word. On a device, which would have to be waited for, unused room
    stays, and is zero.
    """
    if isinstance(compressed, QuantizedGradient):
        word, values = compressed.scale.view(torch.uint8), compressed.values.view(torch.uint8)
        return word if not word.is_cuda and compressed.scale == 0 else torch.cat([word, values])
    (part,) = compressed.parts
    kept, places, values = part.tiles[-1:], part.indices % TILE_NUMEL, part.values
    if kept.is_cuda:
        used = torch.arange(values.numel(), device=kept.device) < kept
        places, values = torch.where(used, places, 0), torch.where(used, values, 0)
    elif not int(kept):
        return (~kept).view(torch.uint8)
    else:
        places, values = places[: int(kept)], values[: int(kept)]
    columns = [~kept, part.tiles.diff().short(), places.short(), values]
    return torch.cat([column.view(torch.uint8) for column in columns])


def unpack_gradient(packed_U8: Tensor, numel: int) -> CompressedGradient:
    """Return the argument of `pack_gradient`, flat. Raises `ValueError` if the bytes are no packed gradient of so many elements."""
    how, shape = GradientCompression(), torch.Size([numel])
    word, rest = packed_U8[:_WORD_NBYTES], packed_U8[_WORD_NBYTES:]
    if numel < max(how.small_numel, 1):
        _expect(len(rest) in (0, numel), len(packed_U8), numel)
        values = rest if len(rest) else torch.zeros(numel, dtype=torch.uint8)
        unknown = torch.zeros(1, dtype=torch.int64)
        return QuantizedGradient(values.view(torch.int8), word.view(torch.float32), unknown, shape)
    kept, tiles = int(word.view(torch.int32)), _num_tiles(numel)
    if kept >= 0:  # of an earlier build: places of the whole part, and room for as many elements as could be kept
        capacity = capacity_of(numel, how)
        _expect(len(rest) == 6 * capacity and kept <= capacity, len(packed_U8), numel)
        used, values = rest[: 4 * kept].view(torch.int32), rest[4 * capacity :].view(torch.float16)
    else:
        kept = ~kept
        rest = rest if len(rest) or kept else torch.zeros(2 * tiles, dtype=torch.uint8)
        room = (len(rest) - 2 * tiles) // 4
        _expect(kept <= room and len(rest) == 2 * tiles + 4 * room, len(packed_U8), numel)
        counts, places = rest[: 2 * tiles].view(torch.int16), rest[2 * tiles : 2 * (tiles + kept)].view(torch.int16)
        _expect(bool((counts >= 0).all()) and int(counts.sum()) == kept, len(packed_U8), numel)
        first = torch.arange(tiles, dtype=torch.int32) * TILE_NUMEL
        used = places + first.repeat_interleave(counts.int())
        values = rest[2 * (tiles + room) :].view(torch.float16)
    bounds = [0, *used[:1].tolist(), *used[-1:].tolist(), numel - 1]
    _expect(bounds == sorted(bounds) and bool((used.diff() > 0).all()), len(packed_U8), numel)
    borders = torch.arange(tiles + 1, dtype=torch.int32) * TILE_NUMEL
    part = SparsePart(values, used, torch.searchsorted(used, borders, out_int32=True), torch.tensor([kept, 0]), numel)
    return SparseGradient((part,), shape)


def _expect(holds: bool, nbytes: int, numel: int) -> None:
    if not holds:
        raise ValueError(f"{nbytes} bytes are no compressed gradient of {numel} elements.")


def _num_tiles(numel: int) -> int:
    return -(-numel // TILE_NUMEL)


class QuantizeJob(c.Structure):
    """Mirrors `QuantizeJob` of gradient.hpp."""

    _fields_ = (
        *((name, c.c_void_p) for name in ("source", "to", "scale", "not_finite")),
        *(("count", c.c_uint64), ("dtype", c.c_int32)),
    )


def compress_with(
    library: Library | None,
    gradients: Sequence[Tensor],
    how: GradientCompression,
    threads: int = 1,
    part_numel: int = MAX_PART_NUMEL,
) -> list[CompressedGradient]:
    """Compress gradients that `compress_gradients` has checked, with `library`, or with the twins if it is `None`."""
    small = {i: empty_quantized(g) for i, g in enumerate(gradients) if g.numel() < max(how.small_numel, 1)}
    _quantize(library, [gradients[i] for i in small], list(small.values()), threads)
    return [small[i] if i in small else _sparse(library, g, how, threads, part_numel) for i, g in enumerate(gradients)]


def _quantize(
    library: Library | None, gradients: Sequence[Tensor], outs: Sequence[QuantizedGradient], threads: int
) -> None:
    if not gradients:
        return
    if library is None:
        for gradient, out in zip(gradients, outs, strict=True):
            quantize(gradient, out)
        return
    jobs = (QuantizeJob * len(outs))(*map(_job, gradients, outs))
    if library.part == "cuda":
        device = TorchDevice(gradients[0].device)
        on_device_U8 = device.upload(jobs)
        library.moe_cuda_quantize(on_device_U8.data_ptr(), len(outs), device.index, device.stream())
    else:
        library.moe_quantize(jobs, len(outs), threads)


def _job(gradient: Tensor, out: QuantizedGradient) -> QuantizeJob:
    return QuantizeJob(
        gradient.data_ptr(),
        out.values.data_ptr(),
        out.scale.data_ptr(),
        out.not_finite.data_ptr(),
        gradient.numel(),
        DTYPE_CODES[gradient.dtype],
    )


def _sparse(
    library: Library | None, gradient: Tensor, how: GradientCompression, threads: int, part_numel: int
) -> SparseGradient:
    parts = []
    for piece in split_parts(gradient, part_numel):
        out = empty_part(piece.numel(), piece.device, how)
        if library is None:
            select(piece, sample_threshold(piece, how), out)
        elif library.part == "cuda":
            _select_cuda(library, piece, how, out)
        else:
            threshold, (samples, rank) = c.c_uint32(), sample_rank(piece.numel(), how)
            source = (piece.data_ptr(), DTYPE_CODES[piece.dtype], piece.numel())
            library.moe_sample_threshold(*source, samples, rank, threshold)
            library.moe_select(*source, threshold, *_room(out), threads)
        parts.append(out)
    return SparseGradient(tuple(parts), gradient.shape)


def _select_cuda(library: Library, piece: Tensor, how: GradientCompression, out: SparsePart) -> None:
    samples, rank = sample_rank(piece.numel(), how)
    # one word for the threshold, one for the tile counter, then two words of look-back state for each tile
    scratch = torch.zeros(2 + 2 * out.tiles.numel(), dtype=torch.int32, device=piece.device)
    source = (piece.data_ptr(), DTYPE_CODES[piece.dtype], piece.numel())
    device = TorchDevice(piece.device)
    library.moe_cuda_select(*source, samples, rank, *_room(out), scratch.data_ptr(), device.index, device.stream())


def _room(out: SparsePart) -> tuple[int, int, int, int, int]:
    capacity = out.values.numel()
    return out.values.data_ptr(), out.indices.data_ptr(), capacity, out.tiles.data_ptr(), out.counts.data_ptr()


# -- the twins: the same bytes from torch, on any device


def quantize(gradient: Tensor, out: QuantizedGradient) -> None:
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
    """Return one position per stride; int64 with masks stands in for the compiled code's uint32 arithmetic."""
    index = torch.arange(samples, dtype=torch.int64)
    mixed = index * 2654435761 & 0xFFFFFFFF
    mixed ^= mixed >> 15
    mixed = (mixed & 0xFFFF) * 2246822519 + ((mixed >> 16) * 2246822519 << 16) & 0xFFFFFFFF
    mixed ^= mixed >> 13
    return index * stride + mixed % stride
