"""A compressed gradient has the bytes that its twin writes, keeps what it should, and hides nothing that is not finite."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from lightning_moe_ckpt.native import CompressedGradient, _library, compress_gradients, decompress_gradient
from lightning_moe_ckpt.native._gradient import GradientCompression, QuantizedGradient, SparseGradient, split_parts

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ODD = (math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, 65504.0, 65520.0, 1e30, 1e-45, 6e-8, 2.9e-8, 1e-38)

gpu = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    if not _library.status("cpu").active:
        pytest.skip(f"the compiled CPU part is not in use: {_library.status('cpu').reason}")


def on_cuda() -> torch.device:
    assert _library.status("cuda").active, _library.status("cuda").reason
    return torch.device("cuda", 0)


def same_bytes(left: CompressedGradient, right: CompressedGradient) -> bool:
    """Every byte that a record would hold."""
    if isinstance(left, QuantizedGradient):
        assert isinstance(right, QuantizedGradient)
        pairs = [(left.values, right.values), (left.scale, right.scale), (left.not_finite, right.not_finite)]
    else:
        assert isinstance(right, SparseGradient)
        parts = zip(left.trimmed().parts, right.trimmed().parts, strict=True)
        names = ("values", "indices", "tiles", "counts")
        pairs = [(getattr(a, name), getattr(b, name)) for a, b in parts for name in names]
    return all(torch.equal(a.cpu().view(torch.uint8), b.cpu().view(torch.uint8)) for a, b in pairs)


def twin(gradients: list[Tensor], how: GradientCompression, part_numel: int) -> list[CompressedGradient]:
    """As `compress_gradients` on a machine without the libraries."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_library, "cpu", lambda: None)
        patch.setattr(_library, "cuda", lambda: None)
        return compress_gradients(gradients, how, part_numel=part_numel)


@st.composite
def gradients(draw: st.DrawFn) -> list[Tensor]:
    """Tensors of odd sizes and alignments with odd values at odd places."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        numel, offset = draw(st.integers(0, 9000)), draw(st.integers(0, 3))
        generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
        scale = draw(st.sampled_from([1.0, 1e-3, 1e-20, 1e4, 0.0]))
        values = torch.randn(numel + offset, generator=generator) * scale
        for _ in range(draw(st.integers(0, 5)) if numel else 0):
            values[draw(st.integers(0, numel - 1)) + offset] = draw(st.sampled_from(ODD))
        found.append(values.to(draw(st.sampled_from(DTYPES)))[offset:])
    return found


settings_of = st.builds(
    lambda small, keep, room, samples: GradientCompression(
        small_numel=small, keep_ratio=keep, capacity_ratio=min(1.0, keep * room), num_samples=samples
    ),
    st.sampled_from([0, 1, 3000, 10**9]),
    st.sampled_from([0.001, 0.01, 0.3, 1.0]),
    st.sampled_from([1.0, 1.5]),
    st.integers(1, 5000),
)


@given(gradients(), settings_of, st.sampled_from([2048, 4096, 2**20]), st.integers(1, 3))
@example([torch.ones(5000)], GradientCompression(small_numel=0), 2048, 2)
@example([torch.zeros(5000)], GradientCompression(small_numel=0), 2048, 2)
@example([torch.full((5000,), math.nan)], GradientCompression(small_numel=0), 2048, 2)
def test_the_compiled_functions_write_the_bytes_of_their_twins(
    found: list[Tensor], how: GradientCompression, part_numel: int, threads: int
) -> None:
    """Any size, alignment, dtype and value, any number of threads."""
    got = compress_gradients(found, how, threads=threads, part_numel=part_numel)
    for one, want in zip(got, twin(found, how, part_numel), strict=True):
        assert same_bytes(one, want)


@gpu
@given(gradients(), settings_of, st.sampled_from([2048, 4096, 2**20]))
def test_the_kernels_write_the_bytes_of_the_cpu(found: list[Tensor], how: GradientCompression, part_numel: int) -> None:
    """A record does not tell where it was made."""
    device = on_cuda()
    moved = [gradient.to(device) for gradient in found]
    got = compress_gradients(moved, how, part_numel=part_numel)
    for one, want in zip(got, compress_gradients(found, how, part_numel=part_numel), strict=True):
        assert same_bytes(one, want)


@gpu
def test_a_big_tensor_has_the_same_bytes_run_after_run() -> None:
    """Blocks run in any order; entries leave in the order of their index."""
    gradient = torch.randn(50_000_003, device=on_cuda())
    first, *others = (compress_gradients([gradient])[0] for _ in range(5))
    assert all(same_bytes(first, other) for other in others)
    assert same_bytes(first, compress_gradients([gradient.cpu()])[0])


def test_a_small_tensor_is_within_half_a_quantum() -> None:
    """INT8 with scale max / 127: the error is at most half of it, at every size."""
    for magnitude in (1.0, 1e-30, 1e30):
        gradient = torch.randn(1001, generator=torch.Generator().manual_seed(3)) * magnitude
        (small,) = compress_gradients([gradient])
        assert isinstance(small, QuantizedGradient)
        assert float(small.scale) == pytest.approx(float(gradient.abs().max()) / 127, rel=1e-6)
        error = (decompress_gradient(small).double() - gradient.double()).abs().max()
        assert error <= 0.5001 * small.scale.double()


def test_of_a_big_tensor_the_largest_elements_are_kept() -> None:
    """About one percent, none smaller than any that is left out, each to the precision of FP16."""
    gradient = torch.randn(1_000_000, generator=torch.Generator().manual_seed(5)).view(1000, 1000)
    (big,) = compress_gradients([gradient])
    assert isinstance(big, SparseGradient)
    dense = decompress_gradient(big)
    kept = dense != 0
    assert dense.shape == gradient.shape
    assert 0.009 < float(kept.float().mean()) < 0.011
    assert gradient[kept].abs().min() >= gradient[~kept].abs().max()
    assert torch.equal(dense[kept], gradient[kept].half().float())
    assert big.trimmed().nbytes < 0.0185 * gradient.nbytes


def test_zeros_are_never_kept_and_ties_are_cut_by_index() -> None:
    """An embedding's gradient is mostly zero: what is kept is what is there."""
    gradient = torch.zeros(200_000)
    gradient[7::1000] = 1e-9
    (sparse,) = compress_gradients([gradient])
    assert isinstance(sparse, SparseGradient)
    (part,) = sparse.trimmed().parts
    assert part.indices.tolist() == list(range(7, 200_000, 1000))
    (tied,) = compress_gradients([torch.ones(200_000)])
    assert isinstance(tied, SparseGradient)
    assert tied.trimmed().parts[0].indices.tolist() == list(range(3000))
    assert tied.parts[0].counts.tolist() == [200_000, 0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("numel", [1000, 200_000])
def test_what_is_not_finite_stays_so_and_is_counted(bad: float, numel: int) -> None:
    """A replay of such a step must not look healthier than the training was."""
    gradient = torch.randn(numel)
    gradient[[5, numel - 1]] = bad
    (compressed,) = compress_gradients([gradient])
    assert compressed.not_finite.tolist() == [2]
    back = decompress_gradient(compressed)
    assert not back[5].isfinite()
    assert not back[-1].isfinite()


def test_parts_of_a_long_tensor_stand_for_all_of_it() -> None:
    """A tensor beyond 2^31 elements is split; here the border is lower."""
    gradient = torch.randn(300_000)
    (split,) = compress_gradients([gradient], part_numel=65_536)
    assert isinstance(split, SparseGradient)
    assert [part.numel for part in split.parts] == [65_536] * 4 + [37_856]
    alone = compress_gradients(split_parts(gradient, 65_536), GradientCompression(small_numel=0))
    assert torch.equal(decompress_gradient(split), torch.cat([decompress_gradient(piece) for piece in alone]))


def test_what_cannot_be_compressed_is_refused_by_position() -> None:
    """Nothing is guessed: a double, and a transposed view."""
    with pytest.raises(ValueError, match=r"Gradient 1 is torch.float64; .* Keep this one uncompressed"):
        compress_gradients([torch.ones(3), torch.ones(3, dtype=torch.float64)])
    with pytest.raises(ValueError, match=r"Gradient 0 of shape \(4, 3\) has strides \(1, 4\)"):
        compress_gradients([torch.ones(3, 4).t()])


@pytest.mark.parametrize(
    "arguments",
    [{"small_numel": -1}, {"keep_ratio": 0.0}, {"keep_ratio": 0.5}, {"num_samples": 0}, {"num_samples": 2**16}],
)
def test_settings_out_of_range_are_quoted(arguments: dict[str, float]) -> None:
    """The message shows the call as the user wrote it."""
    name, value = next(iter(arguments.items()))
    with pytest.raises(ValueError, match=f"GradientCompression\\({name}={value}"):
        GradientCompression(**arguments)  # type: ignore[arg-type]
