"""Segment files: zero-copy views, readable by safetensors' own loader, and no header but the right one is accepted."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load, load_file

from lightning_moe_ckpt.errors import Corrupt
from lightning_moe_ckpt.storage import SegmentLayout, TensorSpec, dtype_code, dtype_of
from lightning_moe_ckpt.storage._segment import _CODES

SPECS = [
    TensorSpec("blocks.0/w:param", torch.float32, (3, 5)),
    TensorSpec("blocks.0/w:exp_avg", torch.bfloat16, (7,)),
    TensorSpec("step", torch.float32, ()),
    TensorSpec("empty", torch.int64, (0, 4)),
    TensorSpec("journal", torch.uint8, (1000,)),
    TensorSpec("seen", torch.bool, (64,)),
]


def _filled(layout: SegmentLayout, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    buffer = torch.randint(0, 2, (layout.nbytes,), dtype=torch.uint8, generator=generator)
    layout.write_header(buffer)
    return buffer


def _bytes(buffer: torch.Tensor) -> bytes:
    return buffer.numpy().tobytes()


def test_safetensors_own_loader_reads_the_file(tmp_path: Path) -> None:
    """Anyone's tools see the same tensors and the metadata."""
    layout = SegmentLayout(SPECS, metadata={"plan_hash": "abc"})
    buffer = _filled(layout)
    (tmp_path / "a.safetensors").write_bytes(_bytes(buffer))

    loaded = load_file(tmp_path / "a.safetensors")
    for spec in SPECS:
        view = layout.view(buffer, spec.name)
        assert (view.dtype, tuple(view.shape)) == (spec.dtype, spec.shape)
        assert torch.equal(loaded[spec.name].reshape(-1).view(torch.uint8), view.reshape(-1).view(torch.uint8))
    assert {name for name in loaded if not name.startswith("__pad__.")} == {spec.name for spec in SPECS}
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata()["plan_hash"] == "abc"


@pytest.mark.parametrize("align", [8, 64, 4096])
def test_everything_is_aligned(align: int) -> None:
    """Tensors start on `align`, the first on a page, and the file ends on `align`."""
    layout = SegmentLayout(SPECS, metadata={}, align=align)
    assert layout.spans[SPECS[0].name].offset == len(layout.header)
    assert len(layout.header) % 4096 == 0
    assert all(span.offset % align == 0 for span in layout.spans.values())
    assert layout.nbytes % align == 0
    assert list(layout.spans) == [spec.name for spec in SPECS]


def test_views_share_the_buffer() -> None:
    """What is copied into a view is in the file, and headers are written without touching it."""
    layout = SegmentLayout(SPECS, metadata={})
    buffer = torch.full((layout.nbytes + 100,), 255, dtype=torch.uint8)
    layout.view(buffer, "blocks.0/w:param").copy_(torch.arange(15.0).view(3, 5))
    layout.write_header(buffer)
    loaded = load(_bytes(buffer[: layout.nbytes]))
    assert torch.equal(loaded["blocks.0/w:param"], torch.arange(15.0).view(3, 5))
    assert all(not tensor.any() for name, tensor in loaded.items() if name.startswith("__pad__."))
    assert buffer[layout.nbytes :].eq(255).all()


@pytest.mark.parametrize("dtype", list(_CODES), ids=str)
def test_every_dtype_survives(dtype: torch.dtype) -> None:
    layout = SegmentLayout([TensorSpec("t", dtype, (5, 3))], metadata={})
    buffer = _filled(layout)
    assert dtype_of(dtype_code(dtype)) == dtype
    assert SegmentLayout.parse(memoryview(_bytes(buffer))).spans == layout.spans
    loaded = load(_bytes(buffer))["t"]
    assert loaded.dtype == dtype
    assert torch.equal(loaded.view(torch.uint8), layout.view(buffer, "t").view(torch.uint8))


names = st.text(min_size=1).filter(lambda name: not name.startswith("__"))
specs = st.lists(
    st.builds(TensorSpec, names, st.sampled_from(list(_CODES)), st.lists(st.integers(0, 9), max_size=3).map(tuple)),
    unique_by=lambda spec: spec.name,
    max_size=8,
)


@settings(deadline=None)
@given(specs, st.dictionaries(st.text().map(lambda key: f"user.{key}"), st.text(), max_size=3))
def test_a_layout_is_read_back_from_its_file(specs: list[TensorSpec], metadata: dict[str, str]) -> None:
    """Any names, shapes and metadata; safetensors agrees that the file is good."""
    layout = SegmentLayout(specs, metadata=metadata)
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    layout.write_header(buffer)
    parsed = SegmentLayout.parse(memoryview(_bytes(buffer)))
    assert (parsed.spans, parsed.metadata, parsed.nbytes) == (layout.spans, metadata, layout.nbytes)
    assert {name for name in load(_bytes(buffer)) if not name.startswith("__pad__.")} == set(layout.spans)


def test_no_flipped_bit_of_the_header_goes_unseen() -> None:
    """A flip is refused, or, inside a name or a dtype, gives another layout (the file's digest then refuses it)."""
    layout = SegmentLayout(SPECS, metadata={"plan_hash": "abc"})
    data, refused = bytearray(_bytes(_filled(layout))), 0
    for position, bit in _flips(layout.header):
        data[position] ^= 1 << bit
        try:
            parsed = SegmentLayout.parse(memoryview(data))
        except Corrupt:
            refused += 1
        else:
            assert (parsed.spans, parsed.metadata) != (layout.spans, layout.metadata)
        data[position] ^= 1 << bit
    assert refused > 1000, "most flips leave no header at all"
    assert SegmentLayout.parse(memoryview(data)).spans == layout.spans


def _flips(header: bytes) -> list[tuple[int, int]]:
    """Every bit of the text, one bit of each padding byte."""
    text = len(header.rstrip())
    return [(position, bit) for position in range(text) for bit in range(8)] + [
        (position, position % 8) for position in range(text, len(header))
    ]


def test_every_truncation_is_seen() -> None:
    """All lengths but the right one, and a byte too many."""
    data = _bytes(_filled(SegmentLayout(SPECS, metadata={})))
    for length in (*range(len(data)), len(data) + 1):
        with pytest.raises(Corrupt):
            SegmentLayout.parse(memoryview(data + b"\0")[:length])


def _file(table: object, *, pad: bool = True) -> memoryview:
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 4096 if pad else 0)
    return memoryview(struct.pack("<Q", len(text)) + text + bytes(64))


_META = {"segment_align": "64", "segment_format": "1"}
_TENSOR = {"dtype": "U8", "shape": [64], "data_offsets": [0, 64]}


def test_the_hand_made_file_is_good() -> None:
    """So that the next test fails for the reasons it names."""
    assert SegmentLayout.parse(_file({"__metadata__": _META, "a": _TENSOR})).spans["a"].nbytes == 64


@pytest.mark.parametrize(
    "table",
    [
        None,
        [],
        {},
        {"a": _TENSOR},
        {"__metadata__": None, "a": _TENSOR},
        {"__metadata__": _META | {"n": 1}, "a": _TENSOR},
        {"__metadata__": _META | {"segment_format": "2"}, "a": _TENSOR},
        {"__metadata__": _META | {"segment_align": "0"}, "a": _TENSOR},
        {"__metadata__": _META | {"segment_align": "63"}, "a": _TENSOR},
        {"__metadata__": _META | {"segment_align": "064"}, "a": _TENSOR},
        {"__metadata__": _META | {"segment_align": "x"}, "a": _TENSOR},
        {"__metadata__": _META},
        {"__metadata__": _META, "a": None},
        {"__metadata__": _META, "a": _TENSOR | {"dtype": "F7"}},
        {"__metadata__": _META, "a": _TENSOR | {"dtype": ["U8"]}},
        {"__metadata__": _META, "a": _TENSOR | {"shape": [65]}},
        {"__metadata__": _META, "a": _TENSOR | {"shape": [-8, -8]}},
        {"__metadata__": _META, "a": _TENSOR | {"shape": [True, 64]}},
        {"__metadata__": _META, "a": _TENSOR | {"shape": [64.0]}},
        {"__metadata__": _META, "a": _TENSOR | {"shape": 64}},
        {"__metadata__": _META, "a": _TENSOR | {"data_offsets": [0, 63]}},
        {"__metadata__": _META, "a": _TENSOR | {"data_offsets": [1, 65]}},
        {"__metadata__": _META, "a": _TENSOR, "b": _TENSOR},
        {"__metadata__": _META, "a": _TENSOR, "__pad__.0": _TENSOR},
        {"a": _TENSOR, "__metadata__": _META},
    ],
)
def test_a_wrong_header_is_corrupt_and_nothing_else(table: object) -> None:
    with pytest.raises(Corrupt):
        SegmentLayout.parse(_file(table))


def test_an_unpadded_header_is_refused() -> None:
    with pytest.raises(Corrupt):
        SegmentLayout.parse(_file({"__metadata__": _META, "a": _TENSOR}, pad=False))


def test_misuse_is_a_value_error() -> None:
    spec = TensorSpec("a", torch.uint8, (1,))
    with pytest.raises(ValueError, match="repeated"):
        SegmentLayout([spec, spec], metadata={})
    with pytest.raises(ValueError, match="reserved names"):
        SegmentLayout([TensorSpec("__pad__.7", torch.uint8, (1,))], metadata={})
    with pytest.raises(ValueError, match="reserved metadata"):
        SegmentLayout([spec], metadata={"segment_align": "1"})
    with pytest.raises(ValueError, match=r"align=3\b"):
        SegmentLayout([spec], metadata={}, align=3)
    with pytest.raises(ValueError, match=r"'a': `torch\.complex128` cannot be stored"):
        SegmentLayout([TensorSpec("a", torch.complex128, (1,))], metadata={})
