"""Nested segments: the buffer is one safetensors file, and the part of it that goes to storage is another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, load_file

from lightning_moe_ckpt.storage import PERSISTED_HEADER, NestedLayout, SegmentLayout, TensorSpec

INNER = [
    TensorSpec("dense", torch.float32, (3, 5)),
    TensorSpec("step", torch.float32, ()),
    TensorSpec("empty", torch.int64, (0, 4)),
    TensorSpec("journal", torch.uint8, (1000,)),
]
REST = [TensorSpec("expert.1", torch.bfloat16, (7,)), TensorSpec("expert.2", torch.uint8, (1,))]

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
dtypes = st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float64])
sizes = st.lists(st.tuples(dtypes, shapes), max_size=8)


def filled(layout: NestedLayout) -> torch.Tensor:
    """A buffer whose every byte is random where no header or filler is."""
    generator = torch.Generator().manual_seed(layout.nbytes)
    buffer = torch.randint(0, 2, (layout.nbytes,), dtype=torch.uint8, generator=generator)
    layout.write_header(buffer)
    return buffer


def bytes_of(buffer: torch.Tensor) -> bytes:
    return buffer.numpy().tobytes()


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def named(tensors: dict[str, torch.Tensor]) -> set[str]:
    return {name for name in tensors if not name.startswith("__pad__.")}


def test_safetensors_own_loader_reads_both_files(tmp_path: Path) -> None:
    """The buffer, and the part of it that is stored; what they share is the same in both."""
    layout = NestedLayout(INNER, REST, metadata={"format": "pt"})
    buffer = filled(layout)
    (tmp_path / "outer.safetensors").write_bytes(bytes_of(buffer))
    (tmp_path / "inner.safetensors").write_bytes(bytes_of(layout.persisted(buffer)))
    outer, inner = load_file(tmp_path / "outer.safetensors"), load_file(tmp_path / "inner.safetensors")
    assert named(inner) == {spec.name for spec in INNER}
    assert named(outer) == {PERSISTED_HEADER, *named(inner), *(spec.name for spec in REST)}
    assert all(same_bytes(outer[name], tensor) for name, tensor in inner.items())
    assert bytes_of(outer[PERSISTED_HEADER]) == layout.inner.header


@settings(max_examples=100)
@given(inner=sizes, rest=sizes, align=st.sampled_from([8, 64, 4096]))
def test_both_files_are_whole_whatever_the_sizes(
    inner: list[tuple[torch.dtype, tuple[int, ...]]], rest: list[tuple[torch.dtype, tuple[int, ...]]], align: int
) -> None:
    """Odd, empty and missing tensors: each file is laid out by the format's rules, `shift` bytes apart, and loads."""
    first = [TensorSpec(f"a{i}", *each) for i, each in enumerate(inner)]
    second = [TensorSpec(f"b{i}", *each) for i, each in enumerate(rest)]
    layout = NestedLayout(first, second, metadata={}, align=align)
    buffer = filled(layout)
    stored = layout.persisted(buffer)
    assert SegmentLayout.parse(memoryview(bytes_of(buffer))).spans == layout.outer.spans
    assert SegmentLayout.parse(memoryview(bytes_of(stored))).spans == layout.inner.spans
    loaded, kept = load(bytes_of(stored)), load(bytes_of(buffer))
    for spec in first:
        assert layout.outer.spans[spec.name].offset == layout.inner.spans[spec.name].offset + layout.shift
        assert same_bytes(loaded[spec.name], layout.view(buffer, spec.name))
        assert layout.view(buffer, spec.name).data_ptr() % 4 == buffer.data_ptr() % 4
    assert all(same_bytes(kept[spec.name], layout.view(buffer, spec.name)) for spec in second)
    assert layout.shift % 4096 == 0
    assert all(
        span.offset >= layout.shift + layout.inner.nbytes for name, span in layout.outer.spans.items() if name[0] == "b"
    )


def test_headers_touch_no_tensor() -> None:
    """They are written once per plan, into buffers that may hold state already."""
    layout = NestedLayout(INNER, REST, metadata={})
    buffer = torch.full((layout.nbytes + 64,), 255, dtype=torch.uint8)
    layout.write_header(buffer)
    assert all(
        same_bytes(layout.view(buffer, spec.name), torch.full((spec.nbytes,), 255, dtype=torch.uint8))
        for spec in [*INNER, *REST]
    )
    assert buffer[layout.nbytes :].eq(255).all()


def test_a_tensor_may_not_be_called_like_the_header() -> None:
    with pytest.raises(ValueError, match=PERSISTED_HEADER):
        NestedLayout([TensorSpec(PERSISTED_HEADER, torch.uint8, (1,))], [], metadata={})
    with pytest.raises(ValueError, match="repeated names"):
        NestedLayout(INNER, INNER[:1], metadata={})
