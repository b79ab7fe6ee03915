"""Copies arrive bit for bit, in the background, and their failures are met at the fence."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_moe_ckpt.errors import CheckpointError
from lightning_moe_ckpt.native import CopyEngine, copy_through, create_engine, explain, measure_bandwidth
from lightning_moe_ckpt.native._cpu import CpuCopyEngine
from lightning_moe_ckpt.native._cuda import CudaCopyEngine
from lightning_moe_ckpt.native._engine import CopyList, split_at_pieces

ENGINES = [
    pytest.param("cpu python", id="cpu-python"),
    pytest.param("cpu compiled", id="cpu-compiled"),
    pytest.param("cuda python", id="cuda-python", marks=pytest.mark.gpu),
    pytest.param("cuda compiled", id="cuda-compiled", marks=pytest.mark.gpu),
]


@pytest.fixture(params=ENGINES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def device(kind: str) -> torch.device:
    return torch.device(kind.split(maxsplit=1)[0])


@pytest.fixture
def engine(kind: str, device: torch.device) -> Iterator[CopyEngine]:
    engine = compiled_engine(device) if kind.endswith("compiled") else python_engine(device)
    yield engine
    engine.close()


def python_engine(device: torch.device) -> CopyEngine:
    return CpuCopyEngine() if device.type == "cpu" else CudaCopyEngine(device)


def compiled_engine(device: torch.device) -> CopyEngine:
    status = next(status for status in explain() if status.part == device.type)
    if not status.active:
        pytest.skip(status.reason)
    engine = create_engine(device)
    assert "Compiled" in type(engine).__name__, "the compiled engine is the default where it was built"
    return engine


@pytest.fixture
def cpu() -> Iterator[CpuCopyEngine]:
    engine = CpuCopyEngine()
    yield engine
    engine.close()


class Gate:
    """Holds every copy back until it is opened, so that tests need no clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        run = CopyList.run

        def held_back(copies: CopyList, *, non_blocking: bool = False) -> None:
            self.reached.set()
            assert self.opened.wait(30)
            run(copies, non_blocking=non_blocking)

        monkeypatch.setattr(CopyList, "run", held_back)


def host(numel: int, dtype: torch.dtype = torch.float32, *, like: torch.device) -> Tensor:
    return torch.zeros(numel, dtype=dtype, pin_memory=like.type == "cuda")


def test_many_slices_arrive_bit_for_bit(engine: CopyEngine, device: torch.device) -> None:
    """Slices of several types and sizes, in one list, prepared or not."""
    for prepared in (False, True):
        sources = [torch.randn(n, device=device).to(t) for n in (1, 7, 4096) for t in (torch.float32, torch.bfloat16)]
        sources.append(torch.arange(100, device=device))
        copies = [(src, host(src.numel(), src.dtype, like=device)) for src in sources]
        ticket = engine.submit(engine.prepare(copies) if prepared else copies)
        engine.wait(ticket)
        assert ticket.done
        assert all(torch.equal(src.cpu(), dst) for src, dst in copies)


def test_lower_precision_rounds_as_torch_does(engine: CopyEngine, device: torch.device) -> None:
    """COMPUTE records are stored at the precision in which they are consumed."""
    bits = torch.randint(-(2**31), 2**31 - 1, (5000,), dtype=torch.int32)
    src = bits.view(torch.float32).to(device)
    src = src[~src.isnan()]
    for dtype in (torch.bfloat16, torch.float16):
        dst = host(src.numel(), dtype, like=device)
        engine.wait(engine.submit([(src, dst)]))
        assert torch.equal(dst, src.cpu().to(dtype))


def test_shapes_may_differ_sizes_may_not(engine: CopyEngine, device: torch.device) -> None:
    """A matrix goes into a flat slice; one element is never spread over a whole destination."""
    src = torch.randn(3, 4, device=device)
    for view in (src, src.t()):
        dst = host(12, like=device)
        engine.wait(engine.submit([(view, dst)]))
        assert torch.equal(dst.view(view.shape), view.cpu())
    with pytest.raises(CheckpointError, match="the source has 1 elements, the destination 12"):
        engine.wait(engine.submit([(src[0, :1], host(12, like=device))]))


def test_a_prepared_list_copies_what_the_sources_hold_at_submit(engine: CopyEngine, device: torch.device) -> None:
    """Also where source and destination differ in shape and strides: preparing reads nothing."""
    src, dst = torch.zeros(3, 4, device=device), host(12, like=device)
    prepared = engine.prepare([(src.t(), dst)])
    for step in range(3):
        src.copy_(torch.arange(12, device=device).view(3, 4) + step)
        ticket = engine.submit(prepared)
        engine.fence(ticket)
        engine.wait(ticket)
        assert torch.equal(dst.view(4, 3), src.t().cpu())


def test_an_empty_list_is_done_at_once(engine: CopyEngine) -> None:
    """A slot may have nothing of this rank."""
    ticket = engine.submit([])
    engine.wait(ticket)
    assert engine.fence(ticket) >= 0.0


def test_a_failed_copy_is_met_at_the_fence_and_spoils_no_other(engine: CopyEngine, device: torch.device) -> None:
    """`submit` never raises; both `fence` and `wait` do; the next ticket is good."""
    src = torch.ones(4, device=device)
    bad = engine.submit([(src, host(4, torch.int32, like=device))])
    dst = host(4, like=device)
    good = engine.submit([(src, dst)])
    for meet in (engine.fence, engine.wait):
        with pytest.raises(CheckpointError, match=r"snapshot of 1 slices failed: copy 0: torch\.float32 cannot"):
            meet(bad)
    engine.wait(good)
    assert dst.tolist() == [1.0] * 4


def test_prepare_meets_mistakes_at_once(engine: CopyEngine, device: torch.device) -> None:
    """A list that is made once and used often is checked when it is made."""
    with pytest.raises(ValueError, match="copy 1"):
        engine.prepare([(torch.ones(1), torch.ones(1)), (torch.ones(2), torch.ones(3))])


def test_submit_returns_before_the_copy_and_fence_waits_for_it(
    cpu: CpuCopyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training goes on while bytes move; the fence holds until the sources have been read."""
    gate = Gate(monkeypatch)
    src, dst = torch.ones(4), torch.zeros(4)
    ticket = cpu.submit([(src, dst)])
    assert gate.reached.wait(30)
    assert not ticket.done
    with pytest.raises(TimeoutError):
        ticket.wait(timedelta(milliseconds=1))
    threading.Timer(0.02, gate.opened.set).start()
    assert cpu.fence(ticket) > 0.0
    assert dst.tolist() == [1.0] * 4
    assert cpu.fence(ticket) == 0.0


def test_sources_live_until_they_were_read_and_no_longer(cpu: CpuCopyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller may drop a source after `submit`; the engine drops it when it is done."""
    gate = Gate(monkeypatch)
    src, dst = torch.ones(4), torch.zeros(4)
    alive = weakref.ref(src)
    ticket = cpu.submit([(src, dst)])
    del src
    gc.collect()
    assert alive() is not None
    gate.opened.set()
    cpu.wait(ticket)
    gc.collect()
    assert dst.tolist() == [1.0] * 4
    assert alive() is None


def test_copies_run_in_the_order_of_submission(cpu: CpuCopyEngine) -> None:
    """The last writer of a destination wins, so a slice captured again replaces the earlier capture."""
    dst = torch.zeros(1000)
    tickets = [cpu.submit([(torch.full((1000,), float(i)), dst)]) for i in range(20)]
    cpu.wait(tickets[-1])
    assert all(ticket.done for ticket in tickets)
    assert torch.equal(dst, torch.full((1000,), 19.0))


def test_close_finishes_what_was_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread is left, and nothing that was promised is missing."""
    engine, before = CpuCopyEngine(), threading.active_count()
    dst = torch.zeros(4)
    ticket = engine.submit([(torch.ones(4), dst)])
    engine.close()
    engine.close()
    assert ticket.done
    assert dst.tolist() == [1.0] * 4
    assert threading.active_count() == before


def test_parameters_can_be_copied_without_a_graph(engine: CopyEngine, device: torch.device) -> None:
    """A leaf that requires grad is read as data."""
    param = torch.nn.Parameter(torch.ones(3, device=device))
    dst = host(3, like=device)
    engine.wait(engine.submit([(param, dst)]))
    assert not dst.requires_grad
    assert dst.tolist() == [1.0] * 3


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_the_engine_works_again_in_a_forked_child(cpu: CpuCopyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child gets a thread of its own and cannot hang on a ticket of its parent."""
    gate = Gate(monkeypatch)
    pending = cpu.submit([(torch.ones(2), torch.zeros(2))])
    assert gate.reached.wait(30)
    child = os.fork()
    if child == 0:
        try:
            gate.opened.set()
            dst = torch.zeros(2)
            cpu.submit([(torch.ones(2), dst)]).wait(timedelta(seconds=30))
            with pytest.raises(CheckpointError, match="before a fork"):
                cpu.fence(pending)
            os._exit(0 if dst.tolist() == [1.0, 1.0] else 2)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    gate.opened.set()
    cpu.wait(pending)


@given(st.data())
def test_no_cut_copy_crosses_a_piece_of_registered_memory(data: st.DataObject) -> None:
    """Cut copies cover the same bytes, and each lies inside one piece."""
    buffer = torch.zeros(4096, dtype=torch.uint8)
    base, piece = buffer.data_ptr(), data.draw(st.sampled_from([64, 256, 1024]))
    start = data.draw(st.integers(0, 500)) * 4
    numel = data.draw(st.integers(1, (4096 - start) // 4))
    src = torch.arange(numel, dtype=torch.float32)
    dst = buffer[start : start + 4 * numel].view(torch.float32)
    outside = torch.zeros(numel)
    cut = list(split_at_pieces([(src, dst), (src, outside)], base=base, end=base + 4096, piece_nbytes=piece))
    assert cut[-1] == (src, outside)
    for _, part in cut[:-1]:
        first, last = part.data_ptr() - base, part.data_ptr() - base + part.nbytes - 1
        assert first // piece == last // piece
    CopyList(cut).run()
    assert torch.equal(dst, src)


def test_bandwidth_is_measured() -> None:
    """A rate in bytes per second; the size must be positive."""
    assert measure_bandwidth(2**20) > 1e6
    with pytest.raises(ValueError, match="nbytes=0"):
        measure_bandwidth(0)


def test_devices_without_an_engine_are_refused() -> None:
    """Only what has been thought through is offered."""
    with pytest.raises(ValueError, match="meta"):
        create_engine(torch.device("meta"))


def test_copies_into_live_tensors_are_seen_by_autograd(engine: CopyEngine, device: torch.device) -> None:
    """A restore writes by address: without this, backward would use changed values without noticing."""
    param = torch.nn.Parameter(torch.zeros(4, device=device))
    before = param._version
    copy_through(engine, [(torch.ones(4, dtype=torch.bfloat16), param.detach().view(-1))])
    assert param.tolist() == [1.0] * 4
    assert param._version > before
