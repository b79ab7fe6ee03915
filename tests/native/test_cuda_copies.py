"""The compiled CUDA engine on a device: kernels and batches give the bits of torch, in order, and refuse a capture."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from door import Arrangement
from torch import Tensor

from lightning_moe_ckpt.errors import CheckpointError
from lightning_moe_ckpt.native import _library
from lightning_moe_ckpt.native._cuda import CompiledCudaEngine

_cuda: Any = torch.cuda
"""Events and `_sleep` are untyped in torch."""
pytestmark = pytest.mark.gpu
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SMALL_CASE = """
import torch
from lightning_moe_ckpt.native import create_engine
engine = create_engine(torch.device("cuda"))
src = [torch.randn(n, device="cuda") for n in (1, 7, 300, 100_000)]
dst = [torch.zeros(t.numel(), dtype=d, pin_memory=True) for t, d in zip(src, (torch.float32, torch.bfloat16) * 2)]
ticket = engine.submit(list(zip(src, dst)))
engine.fence(ticket)
engine.wait(ticket)
assert all(torch.equal(d, s.to(d.dtype).cpu()) for s, d in zip(src, dst))
engine.close()
"""


@pytest.fixture
def engine() -> Iterator[CompiledCudaEngine]:
    library = _library.cuda()
    if library is None:
        pytest.skip(_library.status("cuda").reason)
    # Small limits, so that small tensors are cut, packed and paced.
    engine = CompiledCudaEngine(library, torch.device("cuda", 0), Arrangement(chunk_nbytes=2**16, pack_below=2**12))
    yield engine
    engine.close()


def _random(numel: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(numel) * torch.logspace(-12, 12, numel)).to(dtype)


@pytest.mark.parametrize("to_device", [False, True], ids=["to-host", "to-device"])
@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
def test_every_size_and_type_arrives(engine: CompiledCudaEngine, to_device: bool, pinned: bool) -> None:
    """Packed, converted, strided and large slices in one list, in both directions."""
    copies, expected = [], []
    for src_dtype in DTYPES:
        for dst_dtype in DTYPES:
            for numel in (0, 1, 7, 1000, 40_001):
                host = _random(3 * numel, src_dtype).view(3, numel)
                src = host.cuda() if to_device is False else (host.pin_memory() if pinned else host)
                dst = torch.zeros(3, numel + 2, dtype=dst_dtype)
                dst = dst.cuda() if to_device else (dst.pin_memory() if pinned else dst)
                copies.append((src, dst[:, 1 : numel + 1]))
                expected.append((dst, host.to(dst_dtype)))
    ticket = engine.submit(copies)
    engine.fence(ticket)
    engine.wait(ticket)
    for found, values in expected:
        assert torch.equal(found.cpu()[:, 1:-1], values)
        assert not found[:, 0].any()
        assert not found[:, -1].any()


def test_the_snapshot_is_that_of_the_moment_of_submit(engine: CompiledCudaEngine) -> None:
    """Work queued before is seen, work queued after the fence is not, without the host waiting for the device."""
    src, dst = torch.zeros(2**22, device="cuda"), torch.zeros(2**22, pin_memory=True)
    prepared = engine.prepare([(src, dst)])
    for step in range(1, 6):
        _cuda._sleep(10_000_000)
        src.fill_(step)
        ticket = engine.submit(prepared)
        engine.fence(ticket)
        src.fill_(-1.0)
        engine.wait(ticket)
        assert torch.equal(dst, torch.full_like(dst, step))


def test_registered_memory_takes_batches_across_pieces(
    engine: CompiledCudaEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory of our own, registered in the background in small pieces, and unregistered at the end."""
    monkeypatch.setattr("lightning_moe_ckpt.native._cuda.PIECE_NBYTES", 2**20)
    ring = torch.zeros(2**23, dtype=torch.uint8)
    start = -ring.data_ptr() % 4096
    ring = ring[start : start + 2**22]
    engine.register(ring)
    engine.finish_registering()
    assert engine._buffers[ring.data_ptr()][1].failure is None
    src = torch.randint(0, 256, (2**22,), dtype=torch.uint8, device="cuda")
    engine.wait(engine.submit([(src, ring)]))
    assert torch.equal(ring, src.cpu())
    engine.unregister(ring)


def test_a_capture_is_refused(engine: CompiledCudaEngine) -> None:
    """The event of a snapshot must not become part of a user's graph."""
    src, dst = torch.zeros(4, device="cuda"), torch.zeros(4, pin_memory=True)
    prepared = engine.prepare([(src, dst)])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        src.add_(1)
        ticket = engine.submit(prepared)
    with pytest.raises(CheckpointError, match="CUDA graph is being captured"):
        ticket.fence()
    engine.wait(engine.submit(prepared))


def test_copies_overlap_with_computation(engine: CompiledCudaEngine) -> None:
    """While the device is busy for a long time with work queued after `submit`, the bytes arrive."""
    src, dst = torch.ones(2**22, device="cuda"), torch.zeros(2**22, pin_memory=True)
    prepared = engine.prepare([(src, dst)])
    engine.wait(engine.submit(prepared))
    ticket = engine.submit(prepared)
    _cuda._sleep(2_000_000_000)
    busy = _cuda.Event()
    busy.record()
    engine.wait(ticket)
    assert not busy.query()
    busy.synchronize()


def test_compute_sanitizer_finds_nothing(engine: CompiledCudaEngine) -> None:
    """No access outside a tensor, no race between threads of a block."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        pytest.skip("compute-sanitizer is part of the CUDA toolkit, which is not here")
    for tool in ("memcheck", "racecheck"):
        command = [program, "--tool", tool, "--error-exitcode", "9", sys.executable, "-c", SMALL_CASE]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
