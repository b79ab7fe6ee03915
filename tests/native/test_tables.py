"""One table of copies fills any block: the bytes of torch wherever the block lies, and nothing beside them."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from door import Arrangement, PlannedTable
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_moe_ckpt.native import CopyEngine, CopyTable, _cuda, _library
from lightning_moe_ckpt.native._cpu import CompiledCpuEngine, CpuCopyEngine
from lightning_moe_ckpt.native._cuda import CompiledCudaEngine
from native.emulator.device import Emulator, registered_memory

NUMEL = 3000
BLOCK_NBYTES = 3 * 2**16
CUDA = torch.device("cuda", 0)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64]
SMALL = Arrangement(chunk_nbytes=2**12, chunk_copies=5, pack_below=2**10)
"""Limits by which small tensors are cut, packed and paced."""


@pytest.fixture(params=["twin", "compiled"])
def engine(request: pytest.FixtureRequest) -> Iterator[CopyEngine]:
    library = _library.cpu()
    if request.param == "compiled" and library is None:
        pytest.skip(_library.status("cpu").reason)
    engine = CpuCopyEngine() if library is None or request.param == "twin" else CompiledCpuEngine(library, SMALL)
    yield engine
    engine.close()


@st.composite
def rows(draw: st.DrawFn, *, converts: bool = True) -> list[tuple[int, int, int, int, int]]:
    """Source, first element, elements, index of the stored type, and bytes between it and the next."""
    found = []
    for _ in range(draw(st.integers(0, 25))):
        source = draw(st.integers(0, len(DTYPES) - 1))
        start = draw(st.integers(0, NUMEL))
        numel = draw(st.integers(0, NUMEL - start))
        floating = DTYPES[source].is_floating_point
        dtype = draw(st.integers(0, 2)) if converts and floating else source
        found.append((source, start, numel, dtype, draw(st.sampled_from([0, 0, 8, 100]))))
    return found


def table_of(sources: list[Tensor], found: list[tuple[int, int, int, int, int]]) -> CopyTable:
    """Rows one behind the other, as far as a block reaches."""
    offset, kept = 0, []
    for source, start, numel, dtype, gap in found:
        offset += -offset % 8
        if offset + 8 * numel > BLOCK_NBYTES:
            break
        kept.append((source, start, numel, dtype, offset))
        offset += numel * DTYPES[dtype].itemsize + gap
    columns = np.array(kept, np.int64).reshape(-1, 5).T
    names = ("source", "start", "numel", "dtype", "offset")
    return CopyTable(sources=sources, dtypes=DTYPES, **dict(zip(names, columns, strict=True)))


def values(dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    if dtype.is_floating_point:
        return torch.randn(NUMEL, generator=generator).to(dtype)
    return torch.randint(0, 200, (NUMEL,), generator=generator).to(dtype)


def expected(table: CopyTable, block_U8: Tensor) -> Tensor:
    """What torch makes of a block."""
    filled_U8 = block_U8.clone()
    for source, place in table.pairs(filled_U8):
        place.copy_(source)
    return filled_U8


def expect_filled(engine: CopyEngine, table: CopyTable, memory_U8: Tensor) -> None:
    """Every block of the memory gets the same, whichever it was arranged for."""
    blocks = [memory_U8[start : start + BLOCK_NBYTES] for start in range(0, len(memory_U8), BLOCK_NBYTES)]
    prepared = engine.prepare_table(table, blocks[0])
    for value in (3, 250):
        for block_U8 in reversed(blocks):
            block_U8.fill_(value)
            wanted_U8 = expected(table, block_U8)
            ticket = engine.submit_table(prepared, block_U8)
            engine.fence(ticket)
            engine.wait(ticket)
            assert torch.equal(block_U8, wanted_U8)


@given(found=rows())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_blocks_get_the_bytes_of_torch(engine: CopyEngine, found: list[tuple[int, int, int, int, int]]) -> None:
    """Parts of tensors, converted or not; twice in each of three blocks."""
    table = table_of([values(dtype) for dtype in DTYPES], found)
    expect_filled(engine, table, torch.zeros(3 * BLOCK_NBYTES, dtype=torch.uint8))


@given(found=rows(converts=False), piece=st.sampled_from([mmap.PAGESIZE, 3 * mmap.PAGESIZE, 2**30]), data=st.data())
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_blocks_of_registered_memory_are_cut_where_its_pieces_are(
    emulator: Emulator, found: list[tuple[int, int, int, int, int]], piece: int, data: st.DataObject
) -> None:
    """The emulated driver refuses copies across pieces; where they begin is another place in each block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_cuda, "PIECE_NBYTES", piece)
        on_device = [data.draw(st.booleans()) for _ in DTYPES]
        sources = [values(dtype) for dtype in DTYPES]
        sources = [
            emulator.adopt(source) if there else source for source, there in zip(sources, on_device, strict=True)
        ]
        memory_U8 = registered_memory(3 * BLOCK_NBYTES)
        engine = CompiledCudaEngine(emulator.library, CUDA, SMALL)
        try:
            engine.register(memory_U8)
            engine.finish_registering()
            expect_filled(engine, table_of(sources, found), memory_U8)
        finally:
            engine.close()


def test_a_device_converts(emulator: Emulator) -> None:
    """Small ones are packed, large ones go by a place of their own."""
    source_F = emulator.adopt(values(torch.float32))
    found = [(0, 0, NUMEL, 1, 0), (0, 5, 20, 2, 3), (0, 100, 64, 0, 0)]
    engine = CompiledCudaEngine(emulator.library, CUDA, SMALL)
    try:
        memory_U8 = registered_memory(2 * BLOCK_NBYTES)
        engine.register(memory_U8)
        table = table_of([source_F], found)
        prepared = engine.prepare_table(table, memory_U8)
        assert prepared.plan is not None
        expect_filled(engine, table, memory_U8)
    finally:
        engine.close()


def test_blocks_on_the_device_are_filled_by_lists_of_addresses(emulator: Emulator) -> None:
    """Kernels write there, and no job tells them where a block begins."""
    engine = CompiledCudaEngine(emulator.library, CUDA, SMALL)
    try:
        table = table_of([emulator.adopt(values(torch.float32))], [(0, 5, 20, 0, 3), (0, 0, NUMEL, 0, 0)])
        blocks = [emulator.memory(BLOCK_NBYTES).fill_(3) for _ in range(2)]
        prepared = engine.prepare_table(table, blocks[0])
        assert prepared.plan is None
        for block_U8 in blocks:
            engine.submit_table(prepared, block_U8).wait()
            assert torch.equal(block_U8, expected(table, torch.full_like(block_U8, 3)))
    finally:
        engine.close()


def test_what_has_no_plan_is_copied_by_torch() -> None:
    """Such as a conversion that the library does not know; in the order of submits all the same."""
    library = _library.cpu()
    if library is None:
        pytest.skip(_library.status("cpu").reason)
    engine = CompiledCpuEngine(library)
    try:
        source_D, column = values(torch.float32).double(), np.zeros(1, np.int64)
        names = ("source", "start", "dtype", "offset")
        table = CopyTable(
            sources=[source_D], numel=column + NUMEL, dtypes=[torch.float32], **dict.fromkeys(names, column)
        )
        prepared = engine.prepare_table(table, torch.empty(0, dtype=torch.uint8))
        assert isinstance(prepared, PlannedTable)
        assert prepared.plan is None
        block_U8 = torch.zeros(4 * NUMEL, dtype=torch.uint8)
        for _ in range(2):
            engine.submit_table(prepared, block_U8).wait()
            assert torch.equal(block_U8.view(torch.float32), source_D.float())
    finally:
        engine.close()


def test_rows_beyond_their_source_are_refused() -> None:
    """Such as those of a parameter that was replaced by a smaller one."""
    table = table_of([values(dtype) for dtype in DTYPES], [(1, 10, NUMEL - 10, 1, 0)])
    with pytest.raises(ValueError, match="copy 0: elements 10 to 3000 of a tensor that has 2999"):
        CopyTable(
            sources=[source[:-1] for source in table.sources],
            source=table.source,
            start=table.start,
            numel=table.numel,
            dtypes=DTYPES,
            dtype=table.dtype,
            offset=table.offset,
        )
