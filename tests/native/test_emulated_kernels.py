"""Every kernel, executed on the emulated device: the bits of the compiled CPU code and of the twins."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from door import compress_with
from torch import Tensor

from lightning_moe_ckpt.native import MAX_PART_NUMEL, AdamState, AdamStep, _adam, _library
from lightning_moe_ckpt.native._choice import _same
from lightning_moe_ckpt.native._gradient import GradientCompression
from native.emulator.device import Emulator

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (1, 31, 255, 2047, 2048, 2049, 9001, 70_001)
"""Below, at and above a tile; more tiles than a warp has lanes."""
SHARED = {"big chips": 232448, "the others": 101376}


def _values(draw: random.Random, numel: int, dtype: torch.dtype) -> Tensor:
    """Of one kind: every magnitude, ties, zeros, one value, subnormal; with NaN and infinity or without; at any offset."""
    generator = torch.Generator().manual_seed(draw.getrandbits(32))
    values = torch.randn(numel, generator=generator)
    kind = draw.randrange(7)
    if kind == 0:
        values *= torch.logspace(-44, 38, numel) if numel > 1 else 1
    elif kind == 1:
        values = torch.round(values * 2) / 2
    elif kind in (2, 3):
        values.fill_(0.0 if kind == 2 else 0.25)
    elif kind == 4:
        values *= 1e-42
    for _ in range(draw.randrange(4)):
        odd = (float("nan"), float("inf"), -float("inf"), 65504.0, 65519.9, 65520.0, 1e30, -0.0)
        values[draw.randrange(numel)] = draw.choice(odd)
    offset = draw.choice((0, 0, 1, 3, 5, 8))
    moved = torch.empty(numel + offset, dtype=dtype)[offset:]
    return moved.copy_(values.to(dtype))


def _finite(draw: random.Random, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return _values(draw, numel, torch.float32).nan_to_num(0, 0, 0).clamp(-1e4, 1e4).to(dtype)


@pytest.mark.parametrize("chip", SHARED)
@pytest.mark.parametrize("seed", range(4))
def test_gradients_are_compressed_to_the_bytes_of_the_twins(emulator: Emulator, seed: int, chip: str) -> None:
    """INT8 and sparse, whole and in parts, whatever order blocks and warps take."""
    draw, cpu = random.Random(f"{chip}{seed}"), _library.cpu()
    with emulator.settings(shared_nbytes=SHARED[chip]):
        for _ in range(6):
            how = GradientCompression(
                small_numel=draw.choice((0, 500, 5000)),
                keep_ratio=draw.choice((0.001, 0.01, 0.2)),
                capacity_ratio=draw.choice((0.2, 0.25, 1.0)),
                num_samples=draw.choice((1, 7, 256, 4096, 32768)),
            )
            part_numel = draw.choice((MAX_PART_NUMEL, 2048, 6144))
            gradients = [_values(draw, draw.choice(SIZES), draw.choice(DTYPES)) for _ in range(2)]
            found = compress_with(emulator.library, gradients, how, 1, part_numel)
            for library in (cpu, None):
                for one, other in zip(found, compress_with(library, gradients, how, 1, part_numel), strict=True):
                    assert _same(one, other), how


def test_look_back_waits_for_a_block_that_is_held_up(emulator: Emulator) -> None:
    """Later tiles know where to write only when the first has counted."""
    gradient, how = _finite(random.Random(1), 20_000), GradientCompression(small_numel=0)
    with emulator.settings(held_block=0):
        (found,) = compress_with(emulator.library, [gradient], how)
    assert _same(found, compress_with(None, [gradient], how)[0])


def _steps(draw: random.Random, numel: int) -> Iterator[AdamStep]:
    for number in range(draw.randrange(1, 6)):
        gradient = _finite(draw, numel, draw.choice(DTYPES))
        how = draw.choice((None, None, GradientCompression(small_numel=0, num_samples=256), GradientCompression()))
        yield AdamStep(
            gradient=gradient if how is None else compress_with(None, [gradient], how)[0],
            step=1 + number,
            lr=draw.choice((1e-3, 0.1)),
            beta1=draw.choice((0.9, 0.3, 0.0)),
            beta2=draw.choice((0.999, 0.5)),
            weight_decay=draw.choice((0, 0.1)),
            decoupled=draw.random() < 0.5,
            maximize=draw.random() < 0.3,
        )


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_steps_are_replayed_to_the_bits_of_the_cpu(emulator: Emulator, seed: int, amsgrad: bool) -> None:
    """Dense gradients of every type and compressed ones, in one call."""
    if _library.cpu() is None:
        pytest.skip(_library.status("cpu").reason)
    draw = random.Random(f"{amsgrad}{seed}")
    for _ in range(5):
        numel = draw.choice((1, 2047, 2048, 2049, 9001))
        state = [_finite(draw, numel).clone() for _ in range(4 if amsgrad else 3)]
        for moment in state[2:]:
            moment.abs_()
        wanted, found = AdamState(*(each.clone() for each in state)), AdamState(*state)
        steps = list(_steps(draw, numel))
        _adam.replay_cpu(wanted, steps, _adam.Arithmetic(fused=True, mkl_root=0))
        _adam.replay_cuda(emulator.library, found, steps)
        for one, other in zip(found.tensors(), wanted.tensors(), strict=True):
            assert torch.equal(one.view(torch.int32), other.view(torch.int32))
