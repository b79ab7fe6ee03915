"""Compress gradients with the compiled functions of their device, or with the twins where those are missing."""

from __future__ import annotations

import ctypes as c
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_moe_ckpt.native import _gradient_twin, _library
from lightning_moe_ckpt.native._gradient import (
    DTYPE_CODES,
    MAX_PART_NUMEL,
    CompressedGradient,
    GradientCompression,
    QuantizedGradient,
    SparseGradient,
    SparsePart,
    empty_part,
    empty_quantized,
    is_small,
    sample_rank,
    split_parts,
)
from lightning_moe_ckpt.native._torch_device import TorchDevice


class QuantizeJob(c.Structure):
    """Mirrors `QuantizeJob` of gradient.hpp."""

    _fields_ = (
        ("source", c.c_void_p),
        ("to", c.c_void_p),
        ("scale", c.c_void_p),
        ("not_finite", c.c_void_p),
        ("count", c.c_uint64),
        ("dtype", c.c_int32),
    )


def compress_with(
    library: _library.Library | None,
    gradients: Sequence[Tensor],
    how: GradientCompression,
    threads: int = 1,
    part_numel: int = MAX_PART_NUMEL,
) -> list[CompressedGradient]:
    """Compress gradients that `compress_gradients` has checked, with `library`, or with the twins if it is `None`."""
    small = {i: empty_quantized(g) for i, g in enumerate(gradients) if is_small(g, how)}
    _quantize(library, [gradients[i] for i in small], list(small.values()), threads)
    return [small[i] if i in small else _sparse(library, g, how, threads, part_numel) for i, g in enumerate(gradients)]


def _quantize(
    library: _library.Library | None, gradients: Sequence[Tensor], outs: Sequence[QuantizedGradient], threads: int
) -> None:
    if not gradients:
        return
    if library is None:
        for gradient, out in zip(gradients, outs, strict=True):
            _gradient_twin.quantize(gradient, out)
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
    library: _library.Library | None, gradient: Tensor, how: GradientCompression, threads: int, part_numel: int
) -> SparseGradient:
    parts = []
    for piece in split_parts(gradient, part_numel):
        out = empty_part(piece.numel(), piece.device, how)
        if library is None:
            _gradient_twin.select(piece, _gradient_twin.sample_threshold(piece, how), out)
        elif library.part == "cuda":
            _select_cuda(library, piece, how, out)
        else:
            _select_cpu(library, piece, how, out, threads)
        parts.append(out)
    return SparseGradient(tuple(parts), gradient.shape)


def _select_cpu(
    library: _library.Library, piece: Tensor, how: GradientCompression, out: SparsePart, threads: int
) -> None:
    threshold, (samples, rank) = c.c_uint32(), sample_rank(piece.numel(), how)
    source = (piece.data_ptr(), DTYPE_CODES[piece.dtype], piece.numel())
    library.moe_sample_threshold(*source, samples, rank, threshold)
    library.moe_select(*source, threshold, *_room(out), threads)


def _select_cuda(library: _library.Library, piece: Tensor, how: GradientCompression, out: SparsePart) -> None:
    samples, rank = sample_rank(piece.numel(), how)
    # one word for the threshold, one for the tile counter, then two words of look-back state for each tile
    scratch = torch.zeros(2 + 2 * out.tiles.numel(), dtype=torch.int32, device=piece.device)
    source = (piece.data_ptr(), DTYPE_CODES[piece.dtype], piece.numel())
    device = TorchDevice(piece.device)
    library.moe_cuda_select(*source, samples, rank, *_room(out), scratch.data_ptr(), device.index, device.stream())


def _room(out: SparsePart) -> tuple[int, int, int, int, int]:
    capacity = out.values.numel()
    return out.values.data_ptr(), out.indices.data_ptr(), capacity, out.tiles.data_ptr(), out.counts.data_ptr()
