"""The compiled CUDA engine, executed on the emulated device: bytes, order, failures, memory, contexts and captures."""

from __future__ import annotations

import gc
import logging
import mmap
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from door import Arrangement, TorchDevice
from torch import Tensor

from lightning_moe_ckpt.errors import CheckpointError
from lightning_moe_ckpt.native import CopyEngine, PipelinePhase, _choice, _cuda, _worker, create_engine
from lightning_moe_ckpt.native._choice import USES, cuda_for, verdict
from lightning_moe_ckpt.native._cuda import CompiledCudaEngine, CudaCopyEngine
from lightning_moe_ckpt.native._library import NativeError
from lightning_moe_ckpt.tiers import RankMemory, RingRoom, Rings
from native.emulator.device import HANGS, Emulator, registered_memory

CUDA = torch.device("cuda", 0)
OTHER = torch.device("cuda", 1)
NBYTES = 2**18
PATIENCE = timedelta(seconds=30)
SMALL = Arrangement(chunk_nbytes=2**14, pack_below=2**10)
"""Limits by which small tensors are cut, packed and paced."""
CALLS = (
    "cudaStreamCreateWithPriority",
    "cudaEventCreateWithFlags",
    "cudaStreamIsCapturing",
    "cudaEventRecord",
    "cudaStreamWaitEvent",
    "launch",
    "cudaMemcpyAsync",
    "cudaMemcpyBatchAsync",
    "cudaEventSynchronize",
    "cudaHostRegister",
    "cudaHostUnregister",
)
OUT_OF_MEMORY, NOT_SUPPORTED, REFUSED, ILLEGAL_ADDRESS = 2, 801, 1, 700


@pytest.fixture
def engine(emulator: Emulator) -> Iterator[CompiledCudaEngine]:
    engine = CompiledCudaEngine(emulator.library, CUDA, SMALL)
    yield engine
    engine.close()


# -- bytes


def _carved(draw: random.Random, memory_U8: Tensor, forms: list[tuple[torch.dtype, int, int, int]]) -> list[Tensor]:
    """Views apart from each other, aligned to their elements and to nothing more; rows with gaps."""
    views, at = [], draw.randrange(9)
    for dtype, rows, count, gap in forms:
        at += draw.choice((0, 0, dtype.itemsize, 16))
        at += -at % dtype.itemsize
        nbytes = rows * (count + gap) * dtype.itemsize
        views.append(memory_U8[at : at + nbytes].view(dtype).view(rows, count + gap)[:, :count])
        at += nbytes
    return views


def _forms(draw: random.Random, *, converts: bool) -> Iterator[tuple[torch.dtype, torch.dtype, int, int, int, int]]:
    floats = (torch.float32, torch.bfloat16, torch.float16)
    for _ in range(draw.randrange(30)):
        src = draw.choice((*floats, torch.uint8, torch.int64))
        dst = src
        if converts and src in floats and draw.random() < 0.5:
            dst = draw.choice(floats if src == torch.float32 else (src, torch.float32))
        rows, count = draw.choice((1, 1, 2, 7, 40)), draw.choice((0, 1, 3, 16, 100, 1000))
        rows = rows if rows * count * 8 < 40_000 else 1
        yield src, dst, rows, count, draw.choice((0, 0, 1, 5)), draw.choice((0, 0, 1, 5))


@pytest.mark.parametrize("seed", range(8))
def test_any_list_arrives_as_it_was_at_submit(emulator: Emulator, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Packed, converted, strided and large, in any direction; nothing beside it changes; what comes late is waited for."""
    draw = random.Random(seed)
    monkeypatch.setattr(_cuda, "PIECE_NBYTES", draw.choice((4 * mmap.PAGESIZE, 2**30)))
    nbytes = 2**20
    ring_U8 = registered_memory(nbytes)
    memory = {"device": emulator.memory(nbytes), "too": emulator.memory(nbytes), "ring": ring_U8}
    memory |= {"locked": emulator.page_locked(nbytes), "pageable": torch.empty(nbytes, dtype=torch.uint8)}
    ways = [("device", host) for host in ("ring", "locked", "pageable")]
    ways += [(host, device) for device, host in ways] + [("device", "too"), ("pageable", "ring"), ("ring", "pageable")]
    with emulator.settings(jitter_us=draw.choice((0, 200))):
        for source, target in ways:
            _check_list(draw, emulator, memory[source], memory[target], ring_U8, made_late=source == "device")


def _check_list(
    draw: random.Random, emulator: Emulator, source_U8: Tensor, target_U8: Tensor, ring_U8: Tensor, *, made_late: bool
) -> None:
    engine = CompiledCudaEngine(
        emulator.library,
        CUDA,
        Arrangement(
            chunk_nbytes=draw.choice((1000, 4096, 65536, 2**24)),
            chunk_copies=draw.choice((1, 3, 1024)),
            pack_below=draw.choice((0, 100, 4096, 65536)),
        ),
    )
    engine.register(ring_U8)
    if draw.random() < 0.7:
        engine.finish_registering()
    hosts_only = emulator.device_of(source_U8.data_ptr()) < 0 and emulator.device_of(target_U8.data_ptr()) < 0
    forms = list(_forms(draw, converts=not hosts_only))
    start = draw.getstate()
    sources = _carved(draw, source_U8, [(src, rows, count, gap) for src, _, rows, count, gap, _ in forms])
    draw.setstate(start)
    targets = _carved(draw, target_U8, [(dst, rows, count, gap) for _, dst, rows, count, _, gap in forms])
    draw.setstate(start)
    expected_U8 = torch.full_like(target_U8, 0xA5)
    expected = _carved(draw, expected_U8, [(dst, rows, count, gap) for _, dst, rows, count, _, gap in forms])
    source_U8.copy_(torch.randint(0, 256, source_U8.shape, dtype=torch.uint8))
    for view in sources:
        view.copy_(torch.randn(view.shape) * 100 if view.is_floating_point() else view)
    target_U8.fill_(0xA5)
    prepared = engine.prepare(list(zip(sources, targets, strict=True)))
    assert prepared.plan is not None
    if made_late and draw.random() < 0.5:
        training = emulator.training()
        emulator.sleep(training, 2000)
        emulator.fill(training, source_U8.data_ptr(), 0x22, source_U8.nbytes)
        emulator.sleep(training, 0)
        late_U8 = torch.full_like(source_U8, 0x22)
        draw.setstate(start)
        late = _carved(draw, late_U8, [(src, rows, count, gap) for src, _, rows, count, gap, _ in forms])
        for view, want in zip(late, expected, strict=True):
            want.copy_(view)
    else:
        for view, want in zip(sources, expected, strict=True):
            want.copy_(view)
    ticket = engine.submit(prepared)
    if draw.random() < 0.8:
        engine.fence(ticket)
        source_U8.fill_(0xEE)
    ticket.wait(PATIENCE)
    assert torch.equal(target_U8, expected_U8)
    engine.close()


@pytest.mark.parametrize(
    ("source", "target", "reads_host"),
    [
        ("device", "locked", False),
        ("locked", "device", True),
        ("pageable", "device", True),
        ("pageable", "locked", False),
    ],
)
def test_a_plan_tells_whether_the_device_reads_from_the_host(
    engine: CompiledCudaEngine, emulator: Emulator, source: str, target: str, reads_host: bool
) -> None:
    """What the worker itself reads there, it has read when a fence returns."""
    memory = {"device": emulator.memory(NBYTES), "locked": emulator.page_locked(NBYTES)}
    memory["pageable"] = torch.empty(NBYTES, dtype=torch.uint8)
    assert engine.prepare([(memory[source], memory[target])]).reads_host is reads_host


def test_conversions_on_the_host_are_torchs(engine: CompiledCudaEngine) -> None:
    """The kernels convert on the device; a list with others goes to the twin as a whole."""
    assert engine.prepare([(torch.ones(4), torch.zeros(4, dtype=torch.bfloat16))]).plan is None
    assert engine.prepare([(torch.ones(4), torch.zeros(4))]).plan is not None


def test_what_training_does_next_runs_after_the_copies(engine: CompiledCudaEngine, emulator: Emulator) -> None:
    """Order is by streams and events alone: the calling thread goes on at once."""
    src_U8, ring_U8, training = emulator.memory(NBYTES), registered_memory(NBYTES), emulator.training()
    engine.register(ring_U8)
    engine.finish_registering()
    prepared = engine.prepare([(src_U8, ring_U8)])
    with emulator.settings(jitter_us=500):
        for step in range(40):
            emulator.sleep(training, 500 if step % 3 == 0 else 0)
            emulator.fill(training, src_U8.data_ptr(), step, NBYTES)
            ticket: Any = engine.submit(prepared)
            worker = ticket._ticket.worker
            worker.call("fence", worker.handle, ticket._ticket.number, training)
            emulator.fill(training, src_U8.data_ptr(), 0x80 | step, NBYTES)
            ticket.wait(PATIENCE)
            assert torch.equal(ring_U8, torch.full_like(ring_U8, step))
    emulator.settle()


def test_what_waits_for_a_gap_follows_the_device(engine: CompiledCudaEngine, emulator: Emulator) -> None:
    """Phases are those of the training stream: the calling thread is ahead of it."""
    src_U8, ring_U8, training = emulator.memory(NBYTES), registered_memory(NBYTES), emulator.training()
    engine.register(ring_U8)
    engine.finish_registering()
    prepared = engine.prepare([(src_U8, ring_U8)])
    engine.fit_gaps(2**62)
    emulator.fill(training, src_U8.data_ptr(), 7, NBYTES)
    ticket = engine.submit(prepared)
    worker: Any = engine._running_worker()
    for phase, busy_us in [
        (PipelinePhase.OPERATION, 300_000),
        (PipelinePhase.GAP, 100_000),
        (PipelinePhase.OPERATION, 0),
        (PipelinePhase.OUTSIDE, 0),
    ]:
        worker.call("enter", worker.handle, int(phase), training)
        emulator.sleep(training, busy_us)
    assert engine.gate_counts().passes == 0
    ticket.wait(PATIENCE)
    emulator.settle()
    counts = engine.gate_counts()
    assert torch.equal(ring_U8, torch.full_like(ring_U8, 7))
    assert (counts.passes, counts.beside) == (1, 0)
    assert counts.gap_ns >= 0.1e9


# -- the check before the first use, and planted failures


@pytest.mark.parametrize("use", USES)
def test_the_device_passes_its_check(emulator: Emulator, use: Any) -> None:
    """Both checks, of kernels and of copies, run whole."""
    found = verdict(use, emulator.library, CUDA)
    assert found.failure is None


FAILURES = ((1, OUT_OF_MEMORY), (1, ILLEGAL_ADDRESS), (2, ILLEGAL_ADDRESS), (5, OUT_OF_MEMORY))


@pytest.mark.parametrize(
    ("call", "failures"),
    [
        *(pytest.param(call, FAILURES[index % 2 :: 2], id=call) for index, call in enumerate(CALLS)),
        *(pytest.param(call, FAILURES, id=f"{call}, all", marks=pytest.mark.soak) for call in CALLS),
    ],
)
def test_a_call_that_fails_in_the_check_leaves_the_work_to_torch(
    emulator: Emulator, call: str, failures: Sequence[tuple[int, int]], caplog: pytest.LogCaptureFixture
) -> None:
    """`fit` goes on, whatever the driver says; what was registered is given back, or kept from being freed.

    Each call fails in two of the four ways, those of its neighbour in the others.
    """
    for nth, code in failures:
        emulator.plant(call.encode(), nth, code)
        with caplog.at_level(logging.CRITICAL):
            engine = create_engine(CUDA)
        engine.close()
        emulator.heal()
        gc.collect()
        _choice._verdicts.clear()
        if call == "cudaHostUnregister":
            emulator.forget_registered()
        assert emulator.num_registered() == 0
    healthy = create_engine(CUDA)
    assert type(healthy) is CompiledCudaEngine
    healthy.close()


def test_a_failure_of_the_copies_is_told_and_the_twin_taken(
    emulator: Emulator, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine reports a failed copy as an error of the package, which is none of Python's own."""
    emulator.plant(b"launch", 1, OUT_OF_MEMORY)
    with caplog.at_level(logging.WARNING):
        engine = create_engine(CUDA)
    assert type(engine) is CudaCopyEngine
    (line,) = [message for message in caplog.messages if "fails its check" in message]
    assert line.startswith("torch does the copies on cuda:0, the compiled CUDA part fails its check: ")
    assert "error 2" in line
    engine.close()


@pytest.mark.parametrize("nth", [1, 2])
def test_a_check_that_hangs_ends_and_keeps_what_the_device_may_write(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    """Some drivers never come back from a batch, to the host or to the device; there a fence waits for it."""
    monkeypatch.setattr(_choice, "PATIENCE", timedelta(milliseconds=200))
    monkeypatch.setattr(_choice, "LONGEST", timedelta(milliseconds=600))
    monkeypatch.setattr(_worker, "_LONGEST_US", 200_000)
    monkeypatch.setattr(_choice, "_stuck", [])
    monkeypatch.setattr(emulator, "patience_ms", 200)
    emulator.plant(b"cudaMemcpyBatchAsync", nth, HANGS)
    assert cuda_for("copies", CUDA) is None
    assert emulator.num_registered() == 1, "the device may still write there"
    emulator.release()
    for thread in threading.enumerate():
        if thread.name == "moe-ckpt-check":
            thread.join(30)
    for stuck in _choice._stuck:
        stuck.close()


def _outcome(engine: CompiledCudaEngine, prepared: Any) -> str | None:
    """What was told of a list, `None` if nothing was."""
    try:
        ticket = engine.submit(prepared)
        engine.fence(ticket)
        ticket.wait(PATIENCE)
    except CheckpointError as error:
        return str(error)
    return None


@pytest.mark.parametrize("call", CALLS[2:-2])
def test_a_failed_list_is_told_and_the_next_one_is_good(emulator: Emulator, call: str) -> None:
    """No call that fails makes anybody wait for ever, gives wrong bytes in silence, or spoils what follows."""
    engine = CompiledCudaEngine(emulator.library, CUDA, SMALL)
    ring_U8, source_U8 = registered_memory(NBYTES), emulator.memory(NBYTES)
    engine.register(ring_U8)
    engine.finish_registering()
    small = [(source_U8[at : at + 200], ring_U8[at : at + 200]) for at in range(0, 4000, 300)]
    large = [(source_U8[at : at + 9000], ring_U8[at : at + 9000]) for at in range(4000, NBYTES - 9000, 9100)]
    prepared = engine.prepare([*small, *large])
    for nth in (1, 2, 3):
        ring_U8.zero_()
        source_U8.fill_(nth)
        emulator.plant(call.encode(), nth, OUT_OF_MEMORY)
        said = _outcome(engine, prepared)
        emulator.heal()
        assert said is None or "error 2" in said
        if said is None:
            assert ring_U8[0] == nth
            assert ring_U8[NBYTES - 20_000] == nth
        source_U8.fill_(0x40 | nth)
        engine.submit(prepared).wait(PATIENCE)
        assert ring_U8[0] == 0x40 | nth
    engine.close()


# -- batches


def _one_list(engine: CopyEngine, emulator: Emulator) -> None:
    ring_U8, source_U8 = registered_memory(NBYTES), emulator.memory(NBYTES)
    engine.register(ring_U8)
    if isinstance(engine, CompiledCudaEngine):
        engine.finish_registering()
    source_U8.fill_(7)
    pairs = [(source_U8[at : at + 5000], ring_U8[at : at + 5000]) for at in range(0, NBYTES - 5000, 5100)]
    engine.submit(engine.prepare(pairs)).wait(PATIENCE)
    assert all(torch.equal(src, dst) for src, dst in pairs)
    engine.unregister(ring_U8)


def test_batches_are_not_tried_where_registered_memory_has_another_address(emulator: Emulator) -> None:
    """There a batch is an error that nothing recovers from (attribute 91 is 0, as on WSL2)."""
    before = emulator.calls(b"cudaMemcpyBatchAsync")
    with emulator.settings(host_pointer_for_registered=0):
        assert cuda_for("copies", CUDA) is emulator.library
        engine = CompiledCudaEngine(emulator.library, CUDA, SMALL)
        _one_list(engine, emulator)
        engine.close()
    assert emulator.calls(b"cudaMemcpyBatchAsync") == before


def test_the_environment_turns_batches_off(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """For drivers that hang in them."""
    before = emulator.calls(b"cudaMemcpyBatchAsync")
    monkeypatch.setenv("MOE_CKPT_CUDA_BATCHES", "0")
    engine = CompiledCudaEngine(emulator.library, CUDA, SMALL)
    _one_list(engine, emulator)
    engine.close()
    assert emulator.calls(b"cudaMemcpyBatchAsync") == before


@pytest.mark.parametrize("code", [REFUSED, OUT_OF_MEMORY, NOT_SUPPORTED])
def test_a_batch_that_is_refused_is_copied_one_by_one(
    engine: CompiledCudaEngine, emulator: Emulator, code: int
) -> None:
    """Whatever the driver calls it, as long as the device is not lost; and no second batch is tried."""
    emulator.plant(b"cudaMemcpyBatchAsync", 1, code)
    before = emulator.calls(b"cudaMemcpyBatchAsync")
    _one_list(engine, emulator)
    assert emulator.calls(b"cudaMemcpyBatchAsync") == before + 1


def test_a_lost_device_is_told(engine: CompiledCudaEngine, emulator: Emulator) -> None:
    """Nothing is copied one by one on it, and nobody waits for ever."""
    ring_U8, source_U8 = registered_memory(NBYTES), emulator.memory(NBYTES)
    engine.register(ring_U8)
    engine.finish_registering()
    pairs = [(source_U8[at : at + 5000], ring_U8[at : at + 5000]) for at in range(0, NBYTES - 5000, 5100)]
    emulator.plant(b"cudaMemcpyBatchAsync", 1, ILLEGAL_ADDRESS)
    ticket = engine.submit(engine.prepare(pairs))
    with pytest.raises(CheckpointError, match=r"cudaMemcpyBatchAsync.*error 700"):
        ticket.wait(PATIENCE)
    emulator.heal()


# -- memory


ENGINES = pytest.mark.parametrize("make", [CompiledCudaEngine, CudaCopyEngine], ids=["compiled", "torch"])


def _made(make: Any, emulator: Emulator) -> Any:
    return make(emulator.library, CUDA) if make is CompiledCudaEngine else make(CUDA)


def _registered(engine: Any, memory_U8: Tensor) -> None:
    engine.register(memory_U8)
    if isinstance(engine, CompiledCudaEngine):
        engine.finish_registering()


@ENGINES
def test_memory_is_given_back_before_it_goes(emulator: Emulator, make: Any) -> None:
    """At `close`, or with an engine that nobody closed: the next memory at that address could not be registered."""
    for closes in (True, False):
        engine = _made(make, emulator)
        _registered(engine, registered_memory(NBYTES))
        assert emulator.num_registered() == 1
        if closes:
            engine.close()
        del engine
        gc.collect()
        assert emulator.num_registered() == 0


@ENGINES
def test_memory_stays_while_it_is_registered(emulator: Emulator, make: Any) -> None:
    """Whoever made it may forget it."""
    engine = _made(make, emulator)
    for _ in range(3):
        _registered(engine, registered_memory(NBYTES))
    gc.collect()
    assert emulator.num_registered() == 3
    engine.close()


@ENGINES
def test_memory_is_given_back_behind_the_copies(emulator: Emulator, make: Any) -> None:
    """Training fences them and goes on ahead of the device; a larger ring may then take the place of this one."""
    engine, ring_U8, source_U8 = _made(make, emulator), registered_memory(NBYTES), emulator.memory(NBYTES)
    _registered(engine, ring_U8)
    emulator.sleep(emulator.training(), 50_000)
    ticket = engine.submit(engine.prepare([(source_U8, ring_U8)]))
    engine.unregister(ring_U8)
    assert ticket.done
    engine.close()


def test_lists_share_what_they_are_packed_in(
    engine: CompiledCudaEngine, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every place in the ring has a list of its own, and what is converted takes as much of the device as it has bytes."""
    made, memory = list[int](), TorchDevice.memory

    def noted(self: TorchDevice, nbytes: int) -> Tensor:
        made.append(nbytes)
        return memory(self, nbytes)

    monkeypatch.setattr(TorchDevice, "memory", noted)
    host_U8, source_U8 = emulator.page_locked(NBYTES), emulator.memory(NBYTES)
    source_F = source_U8.view(torch.float32)
    halves_2F = host_U8.view(torch.bfloat16).view(2, -1)
    lists = [engine.prepare([(source_F, half_F)]) for half_F in halves_2F]
    assert made == [halves_2F[0].nbytes]
    with emulator.settings(jitter_us=200):
        for step in range(6):
            source_F.fill_(step)
            tickets = [engine.submit(each) for each in lists]
            for ticket in tickets:
                ticket.wait(PATIENCE)
            assert torch.equal(halves_2F, torch.full_like(halves_2F, step))


def test_a_list_that_is_used_once_has_nothing_to_wait_for(
    engine: CompiledCudaEngine, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small buffers are such lists in every capture: a list for kernels would have to reach the device first."""
    monkeypatch.setattr(TorchDevice, "upload_now", None)
    sources = [emulator.memory(64).fill_(number) for number in range(9)]
    found = [emulator.page_locked(64) for _ in sources]
    engine.submit(list(zip(sources, found, strict=True))).wait(PATIENCE)
    assert [int(each_U8[0]) for each_U8 in found] == list(range(9))


def test_without_memory_to_pack_them_in_torch_copies(
    engine: CompiledCudaEngine, emulator: Emulator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A device that training has filled costs speed, and not the run."""

    def none_left(self: TorchDevice, nbytes: int) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(TorchDevice, "memory", none_left)
    source_F = emulator.memory(NBYTES).view(torch.float32).fill_(3)
    host_F = emulator.page_locked(NBYTES // 2).view(torch.bfloat16)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            engine.submit(engine.prepare([(source_F, host_F)])).wait(PATIENCE)
    assert torch.equal(host_F, torch.full_like(host_F, 3))
    (line,) = caplog.messages
    assert "slower" in line


@ENGINES
def test_a_fence_lets_go_of_the_sources(emulator: Emulator, make: Any) -> None:
    """What is computed next may have their memory: gradients of one step must not stay beside those of the next."""
    engine, host_U8 = _made(make, emulator), emulator.page_locked(NBYTES)
    source_U8 = emulator.memory(NBYTES)
    address = source_U8.data_ptr()
    emulator.sleep(emulator.training(), 2000)
    ticket = engine.submit([(source_U8[:1000], host_U8[:1000]), (source_U8[1000:], host_U8[1000:])])
    engine.fence(ticket)
    del source_U8
    assert emulator.device_of(address) < 0
    ticket.wait(PATIENCE)
    engine.close()


@ENGINES
def test_copies_go_on_into_memory_that_could_not_be_registered(
    emulator: Emulator, make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Slower, and said; torch's runtime has no error left that it would blame on the next kernel."""
    engine = _made(make, emulator)
    emulator.plant(b"cudaHostRegister", 1, OUT_OF_MEMORY)
    with caplog.at_level(logging.WARNING):
        _one_list(engine, emulator)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "slower" in line
    assert emulator.num_registered() == 0
    assert emulator.last_error() == 0
    engine.close()


@ENGINES
def test_pieces_before_a_failure_are_given_back(emulator: Emulator, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the latest when the engine is closed."""
    monkeypatch.setattr(_cuda, "PIECE_NBYTES", 2**16)
    engine = _made(make, emulator)
    emulator.plant(b"cudaHostRegister", 3, OUT_OF_MEMORY)
    with pytest.MonkeyPatch.context() as quiet:
        quiet.setattr(logging.getLogger("lightning_moe_ckpt"), "disabled", True)
        _registered(engine, registered_memory(NBYTES))
    engine.close()
    assert emulator.num_registered() == 0


# -- contexts, captures, other devices


def _on_a_new_thread(action: Callable[[], Any]) -> None:
    failures: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:  # noqa: BLE001  # raised again below
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    for failure in failures:
        raise failure


def test_a_rank_makes_no_context_on_the_first_device(emulator: Emulator) -> None:
    """Its own threads are new to CUDA, which gives a new thread device 0."""
    engine: Any = None

    def use() -> None:
        nonlocal engine
        engine = CompiledCudaEngine(emulator.library, OTHER)
        engine.start()
        ring_U8 = registered_memory(NBYTES)
        engine.register(ring_U8)
        engine.finish_registering()
        engine.unregister(ring_U8)
        engine.close()

    emulator.heal()
    _on_a_new_thread(use)
    del engine
    _on_a_new_thread(gc.collect)
    assert emulator.contexts() == 0b10


def test_registering_breaks_no_capture(emulator: Emulator) -> None:
    """It happens in the background, at a moment that nobody chose: a user's graph may be in the making."""
    training = emulator.training()
    engine = CompiledCudaEngine(emulator.library, CUDA)
    emulator.capture(training, 1)
    try:
        ring_U8 = registered_memory(NBYTES)
        engine.register(ring_U8)
        engine.finish_registering()
        assert emulator.num_registered() == 1
        engine.unregister(ring_U8)
        assert emulator.capture_status(training) == 1
        assert cuda_for("copies", CUDA) is None, "a check must not become part of a graph"
    finally:
        emulator.capture(training, 0)
    engine.close()


def test_a_capture_is_refused(engine: CompiledCudaEngine, emulator: Emulator) -> None:
    """The event of a snapshot must not become part of a user's graph."""
    source_U8, target_U8 = emulator.memory(NBYTES), emulator.page_locked(NBYTES)
    prepared = engine.prepare([(source_U8, target_U8)])
    emulator.capture(emulator.training(), 1)
    ticket = engine.submit(prepared)
    emulator.capture(emulator.training(), 0)
    with pytest.raises(CheckpointError, match="CUDA graph is being captured"):
        ticket.fence()
    engine.submit(prepared).wait(PATIENCE)


def test_a_fence_in_a_capture_waits_on_the_host(engine: CompiledCudaEngine, emulator: Emulator) -> None:
    """A stream that captures cannot wait for an event from outside: the user's graph would be lost."""
    training = emulator.training()
    emulator.sleep(training, 20_000)
    ticket = engine.submit([(emulator.memory(NBYTES), emulator.page_locked(NBYTES))])
    emulator.capture(training, 1)
    try:
        engine.fence(ticket)
        assert emulator.capture_status(training) == 1
    finally:
        emulator.capture(training, 0)
    assert ticket.done


def test_memory_of_another_device_is_torchs(engine: CompiledCudaEngine, emulator: Emulator) -> None:
    """Addresses of two devices mean nothing to each other's streams."""
    here, there = emulator.memory(NBYTES), emulator.memory(NBYTES, index=1)
    host = emulator.page_locked(NBYTES)
    assert engine.prepare([(here, host)]).plan is not None
    prepared = engine.prepare([(here, host), (there, host)])
    assert prepared.plan is None
    there.fill_(3)
    ticket = engine.submit([(there, host)])
    engine.fence(ticket)
    ticket.wait()
    assert torch.equal(host, there)


def test_work_of_another_device_is_refused(emulator: Emulator) -> None:
    """The emulation itself: an event of one device is not recorded on a stream of another."""
    engine = CompiledCudaEngine(emulator.library, OTHER)
    prepared = engine.prepare([(emulator.memory(NBYTES, index=1), emulator.page_locked(NBYTES))])
    worker = engine._running_worker()
    with pytest.raises(NativeError, match=r"cudaEventRecord.*error 400"):
        worker.submit(prepared, emulator.training(0))
    engine.close()


# -- the end


def test_the_end_does_not_wait_for_a_device_that_hangs(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The process goes on, and what the device may still read and write stays allocated."""
    monkeypatch.setattr(_worker, "_LONGEST_US", 200_000)
    engine = CompiledCudaEngine(emulator.library, CUDA, SMALL)
    ring_U8, source_U8 = registered_memory(NBYTES), emulator.memory(NBYTES)
    _registered(engine, ring_U8)
    emulator.plant(b"cudaMemcpyBatchAsync", 1, HANGS)
    pairs = [(source_U8[at : at + 5000], ring_U8[at : at + 5000]) for at in range(0, NBYTES - 5000, 5100)]
    ticket = engine.submit(engine.prepare(pairs))
    with caplog.at_level(logging.WARNING):
        engine.close()
    assert "copies have not ended after" in caplog.text
    assert emulator.num_registered() == 1
    emulator.release()
    ticket.wait(PATIENCE)
    while _cuda._left:
        for locks, _ in _cuda._left.pop().values():
            locks.release()


@ENGINES
def test_a_ring_that_is_made_anew_is_registered_in_the_place_of_the_one_before(
    emulator: Emulator, make: Any, tmp_path: Path
) -> None:
    """Memory that grew, or lost its name, is given back with what the driver knows of it."""
    memory = RankMemory("run", 0, url="memory://run", directory=tmp_path)
    memory.claim(None)
    engine = _made(make, emulator)
    rings = Rings(memory, engine)
    for nbytes in (2**16, 2**18):
        rings.make(RingRoom(steps=[nbytes] * 2, generations=3))
    rings.renew()
    if isinstance(engine, CompiledCudaEngine):
        engine.finish_registering()
    gc.collect()
    assert emulator.num_registered() == 1
    engine.close()
    memory.close(unlink=True)
