"""Compiled copies give the bytes that torch gives, whatever the types, shapes, strides and addresses."""

from __future__ import annotations

import gc
import os
import select
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from door import Arrangement, PlannedCopies, Space
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_moe_ckpt.errors import CheckpointError
from lightning_moe_ckpt.native import PipelinePhase, _library, _plan
from lightning_moe_ckpt.native._cpu import CompiledCpuEngine, CpuCopyEngine
from lightning_moe_ckpt.native._library import Library, NativeError
from lightning_moe_ckpt.native._plan import CopyPlan, slices_of

BYTES_AND_MORE = [
    *(torch.uint8, torch.bool, torch.int16, torch.int32, torch.int64, torch.complex64, torch.complex128),
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2),
]
CONVERSIONS = [
    *((torch.float32, torch.bfloat16), (torch.float32, torch.float16)),
    *((torch.bfloat16, torch.float32), (torch.float16, torch.float32)),
]
ONLY_TORCH = [(torch.float64, torch.float32), (torch.float32, torch.float8_e4m3fn), (torch.bfloat16, torch.float16)]


@pytest.fixture(scope="module")
def library() -> Library:
    library = _library.cpu()
    if library is None:
        pytest.skip(_library.status("cpu").reason)
    return library


@pytest.fixture
def engine(library: Library) -> Iterator[CompiledCpuEngine]:
    engine = CompiledCpuEngine(library)
    yield engine
    engine.close()


def _num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def _random_bytes(nbytes: int, seed: int) -> Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@dataclass
class Pair:
    """How to make one source and destination, so that compiled code and twin get equal but separate memory."""

    src_dtype: torch.dtype
    dst_dtype: torch.dtype
    shape: tuple[int, ...]
    src_form: str
    dst_form: str
    seed: int

    def make(self) -> tuple[Tensor, Tensor, Tensor]:
        """Source, destination, and all memory around the destination."""
        src, _ = _shaped(self.src_dtype, self.shape, self.src_form, self.seed)
        dst, around = _shaped(self.dst_dtype, self.shape, self.dst_form, self.seed + 1)
        return src, dst, around


def _shaped(dtype: torch.dtype, shape: tuple[int, ...], form: str, seed: int) -> tuple[Tensor, Tensor]:
    """A tensor of arbitrary bytes in one of a few forms, and the flat memory it is a view of."""
    rows, columns = shape
    padded = {"whole": (rows, columns), "rows": (rows, columns + 3), "column": (rows, columns * 2 + 1)}
    size = padded.get(form, (columns, rows))
    memory = _random_bytes(16 + size[0] * size[1] * dtype.itemsize, seed)
    if dtype is torch.bool:
        memory &= 1
    flat = memory[16:].view(dtype)
    view = flat.view(size)
    if form == "transposed":
        return view.t(), memory
    return (view[:, : columns * 2 : 2] if form == "column" else view[:, :columns]), memory


FORMS = st.sampled_from(["whole", "whole", "rows", "column", "transposed"])
SAME = st.sampled_from([(dtype, dtype) for dtype in BYTES_AND_MORE])
TYPES = st.one_of(SAME, st.sampled_from(CONVERSIONS), st.sampled_from(ONLY_TORCH))
PAIRS = st.builds(
    lambda types, rows, columns, src, dst, seed: Pair(types[0], types[1], (rows, columns), src, dst, seed),
    *(TYPES, st.integers(0, 5), st.integers(0, 130), FORMS, FORMS, st.integers(0, 2**30)),
)


def _same_as_torch(made: list[tuple[Tensor, Tensor, Tensor]], pairs: list[Pair]) -> None:
    """Every byte, those beside the destination included; see `_forget_payloads`."""
    for (_, found, around), pair in zip(made, pairs, strict=True):
        src, dst, expected = pair.make()
        dst.copy_(src)
        if pair.src_dtype is not pair.dst_dtype:
            _forget_payloads(found, dst)
        assert torch.equal(around, expected), pair


def _forget_payloads(*converted: Tensor) -> None:
    """Which bits of a converted NaN torch keeps depends on strides and on the place in the tensor."""
    for tensor in converted:
        tensor.copy_(torch.where(tensor.isnan(), 1.5, tensor))


@given(pairs=st.lists(PAIRS, max_size=12))
def test_engine_gives_the_bits_of_torch(library: Library, pairs: list[Pair]) -> None:
    """Arbitrary bits, NaN and subnormal numbers among them; what is beside the destinations stays."""
    engine = CompiledCpuEngine(library, Arrangement(chunk_nbytes=256))
    try:
        made = [pair.make() for pair in pairs]
        engine.wait(engine.submit(engine.prepare([(src, dst) for src, dst, _ in made])))
        _same_as_torch(made, pairs)
    finally:
        engine.close()


@given(pairs=st.lists(PAIRS, max_size=12), threads=st.integers(1, 3))
def test_copying_at_once_gives_the_bits_of_torch(library: Library, pairs: list[Pair], threads: int) -> None:
    """The same without an engine, where the library has a form for it; rows and columns always have one."""
    made = [pair.make() for pair in pairs]
    planned = PlannedCopies([(src, dst) for src, dst, _ in made])
    slices = slices_of(planned)
    simple = all("transposed" not in (p.src_form, p.dst_form) for p in pairs)
    known = all(p.src_dtype is p.dst_dtype or (p.src_dtype, p.dst_dtype) in CONVERSIONS for p in pairs)
    columns = all("column" not in (p.src_form, p.dst_form) for p in pairs)
    assert slices is not None or not (simple and known and columns)
    if slices is not None:
        CopyPlan(library, slices, Arrangement(chunk_nbytes=512)).run(threads)
        _same_as_torch(made, pairs)


@pytest.mark.parametrize(("src_dtype", "dst_dtype"), CONVERSIONS)
@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "unaligned"])
def test_every_kind_of_number_converts_as_in_torch(
    library: Library, src_dtype: torch.dtype, dst_dtype: torch.dtype, offset: int
) -> None:
    """All 16-bit patterns widen; float32 rounds at and beside every value where the result changes. NaN bits included."""
    if src_dtype.itemsize == 2:
        src = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(src_dtype)
    else:
        # Each 16-bit number as float32, its neighbours, and the midpoint to the next number with its neighbours.
        halves = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dst_dtype).float().view(torch.int32)
        middle = (halves & ~0x1FFF) | 0x1000, (halves & ~0xFFFF) | 0x8000
        bits = torch.cat([base + delta for base in (halves, *middle) for delta in (-1, 0, 1)])
        src = torch.cat([bits, torch.arange(-(2**31), 2**31, 4097).to(torch.int32)]).view(torch.float32)
    expected = torch.empty(src.numel(), dtype=dst_dtype).copy_(src)
    raw_src = torch.zeros(src.nbytes + 16, dtype=torch.uint8)
    raw_src[offset : offset + src.nbytes] = _bits(src)
    raw_dst = torch.zeros(expected.nbytes + 16, dtype=torch.uint8)
    row = (raw_dst.data_ptr() + offset, raw_src.data_ptr() + offset, src.numel(), 1, 0, 0)
    slices = slices_of(PlannedCopies([(src, expected)]))
    assert slices is not None
    slices[0] = (*row, slices[0]["cast"], 0, 0, 0)
    CopyPlan(library, slices, Arrangement()).run(1)
    assert torch.equal(raw_dst[offset : offset + expected.nbytes], _bits(expected))
    assert not raw_dst[offset + expected.nbytes :].any()


class TestPlansWithADevice:
    """Packing, staging and pieces, with host memory in the device's place: kernels are the only part that differs."""

    @given(data=st.data())
    def test_every_byte_arrives(self, library: Library, data: st.DataObject) -> None:
        """Whatever the direction, the size, the conversion and the limits."""
        sizes = data.draw(st.lists(st.tuples(st.integers(0, 700), st.integers(1, 3), st.booleans()), max_size=10))
        to_device = data.draw(st.booleans())
        piece = data.draw(st.sampled_from([64, 256, 4096]))
        chunk, pack_below = data.draw(st.sampled_from([64, 1000, 10**6])), data.draw(st.sampled_from([0, 128, 10**6]))
        made = [_device_pair(index, *size, to_device=to_device) for index, size in enumerate(sizes)]
        slices = slices_of(PlannedCopies([(src, dst) for src, dst, _ in made]))
        assert slices is not None
        slices["dst_space"], slices["src_space"] = (
            (Space.DEVICE, Space.PINNED) if to_device else (Space.PINNED, Space.DEVICE)
        )
        hosts = [src if to_device else dst for src, dst, _ in made]
        pieces = [_pieces(host, piece) for host in hosts if host.numel()]
        arrangement = Arrangement(
            has_device=True, chunk_nbytes=chunk, pack_below=pack_below, chunk_copies=3, pieces=pieces
        )
        plan = CopyPlan(library, slices, arrangement)
        room = (plan.staging_nbytes + 1, plan.bounce_nbytes + 1)
        staging, bounce = (torch.zeros(nbytes, dtype=torch.uint8) for nbytes in room)
        plan.attach(staging.data_ptr(), bounce.data_ptr())
        copies = plan.copies()
        _run_on_engine(library, plan)
        for src, dst, untouched in made:
            expected = torch.empty_like(dst).copy_(src)
            if dst.is_floating_point():
                _forget_payloads(dst, expected)
            assert torch.equal(_bits(dst), _bits(expected))
            assert not untouched.any()
        assert all(copy.count <= chunk and copy.rows == 1 and copy.cast == 0 for copy in copies)
        for copy in copies:
            for base, end, nbytes in pieces:
                for start in (copy.dst, copy.src):
                    if base <= start < end:
                        assert (start - base) // nbytes == (start + copy.count - 1 - base) // nbytes

    def test_small_slices_travel_together(self, library: Library) -> None:
        """Thousands of copies of a few microseconds each become one."""
        pairs = [(torch.full((16,), float(i)), torch.zeros(16)) for i in range(1000)]
        slices = slices_of(PlannedCopies(pairs))
        assert slices is not None
        slices["dst_space"], slices["src_space"] = Space.PINNED, Space.DEVICE
        plan = CopyPlan(library, slices, Arrangement(has_device=True))
        assert plan.bounce_nbytes == 64_000
        assert len(plan.copies()) == 1

    @pytest.mark.parametrize("to_device", [False, True], ids=["to-host", "to-device"])
    @pytest.mark.parametrize("kind", ["converted", "strided"])
    def test_what_is_large_on_the_host_is_copied_by_no_thread(
        self, library: Library, kind: str, to_device: bool
    ) -> None:
        """A kernel converts and gathers on the device; from there and to there copy engines know the way."""
        dtype = torch.bfloat16 if kind == "converted" else torch.float32
        there = torch.randn(300, 100, dtype=dtype if to_device else torch.float32)
        there = there[:, :90] if kind == "strided" else there
        here = torch.zeros(there.shape, dtype=torch.float32 if to_device else dtype)
        src, dst = (here.normal_(), there) if to_device else (there, here)
        slices = slices_of(PlannedCopies([(src, dst)]))
        assert slices is not None
        spaces = (Space.DEVICE, Space.PINNED)
        slices["dst_space"], slices["src_space"] = spaces if to_device else reversed(spaces)
        plan = CopyPlan(library, slices, Arrangement(has_device=True, pack_below=4096, chunk_nbytes=50_000))
        assert plan.bounce_nbytes == 0
        staging = torch.zeros(plan.staging_nbytes, dtype=torch.uint8)
        assert here.nbytes <= staging.nbytes < here.nbytes + 64
        plan.attach(staging.data_ptr(), 0)
        _run_on_engine(library, plan)
        assert torch.equal(dst, src.to(dst.dtype))

    def test_memory_has_to_be_attached(self, library: Library) -> None:
        """A plan that packs cannot run before it has staging memory, and takes it once."""
        src, dst = torch.ones(4), torch.zeros(4)
        slices = slices_of(PlannedCopies([(src, dst)]))
        assert slices is not None
        slices["dst_space"], slices["src_space"] = Space.PINNED, Space.DEVICE
        plan = CopyPlan(library, slices, Arrangement(has_device=True))
        with pytest.raises(NativeError, match="the plan needs 64 bytes to be attached first"):
            _run_on_engine(library, plan)
        staging = torch.zeros(128, dtype=torch.uint8)
        plan.attach(staging.data_ptr(), staging.data_ptr() + 64)
        with pytest.raises(NativeError, match="attached before"):
            plan.attach(staging.data_ptr(), staging.data_ptr() + 64)

    def test_host_memory_is_read_with_the_gathering(self, library: Library) -> None:
        """A fence waits for what is queued; what the worker read later, the optimizer might have changed on the host."""
        on_device, count, counted = torch.ones(4), torch.full((4,), 7.0), torch.zeros(4)
        slices = slices_of(PlannedCopies([(on_device, count), (count, counted)]))
        assert slices is not None
        slices["dst_space"], slices["src_space"] = Space.PINNED, [Space.DEVICE, Space.PAGEABLE]
        plan = CopyPlan(library, slices, Arrangement(has_device=True))
        staging, bounce = (torch.zeros(plan.bounce_nbytes, dtype=torch.uint8) for _ in range(2))
        plan.attach(staging.data_ptr(), bounce.data_ptr())
        _run_on_engine(library, plan)
        assert torch.equal(count, on_device)
        assert counted.tolist() == [7.0] * 4, "read before anything arrived"

    def test_neighbours_become_one_copy(self, library: Library) -> None:
        """Slices that follow each other on both sides are merged, up to the size of a chunk, and cut at pieces."""
        src, dst = _random_bytes(4096, 0), torch.zeros(4096, dtype=torch.uint8)
        pairs = [(src[i : i + 64], dst[i : i + 64]) for i in range(0, 4096, 64)]
        slices = slices_of(PlannedCopies(pairs))
        assert slices is not None
        slices["dst_space"], slices["src_space"] = Space.PINNED, Space.DEVICE
        start = dst.data_ptr()
        arrangement = Arrangement(
            has_device=True, pack_below=0, chunk_nbytes=1024, pieces=[(start, start + 4096, 1536)]
        )
        plan = CopyPlan(library, slices, arrangement)
        assert [copy.count for copy in plan.copies()] == [1024, 512, 512, 1024, 1024]
        _run_on_engine(library, plan)
        assert torch.equal(src, dst)


def _device_pair(index: int, numel: int, rows: int, convert: bool, *, to_device: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Source, destination, and the bytes between the rows of whichever of both is on the host."""
    dtypes = (torch.float32, torch.bfloat16) if convert else (torch.uint8, torch.uint8)
    src_memory = _random_bytes(rows * (numel + 5) * dtypes[0].itemsize, index).view(dtypes[0]).view(rows, numel + 5)
    dst_memory = torch.zeros(rows, numel + 5, dtype=dtypes[1])
    src = src_memory[:, :numel] if to_device else src_memory[:, 2 : numel + 2]
    return src, dst_memory[:, :numel], dst_memory[:, numel:]


def _pieces(host: Tensor, nbytes: int) -> tuple[int, int, int]:
    memory = host.untyped_storage()
    return memory.data_ptr(), memory.data_ptr() + memory.nbytes(), nbytes


def _run_on_engine(library: Library, plan: CopyPlan) -> None:
    engine = CompiledCpuEngine(library)
    try:
        planned = PlannedCopies([])
        planned.plan = plan
        worker = engine._running_worker()
        worker.submit(planned).wait(timedelta(seconds=30))
    finally:
        engine.close()


def test_completion_wakes_who_selects(engine: CompiledCpuEngine) -> None:
    """An event loop need not spend a thread on waiting."""
    assert not select.select([engine.fileno()], [], [], 0)[0]
    dst = torch.zeros(100)
    ticket = engine.submit(engine.prepare([(torch.ones(100), dst)]))
    assert select.select([engine.fileno()], [], [], 30)[0] == [engine.fileno()]
    assert int.from_bytes(os.read(engine.fileno(), 8), "little") == 1
    assert ticket.done
    assert dst.sum() == 100


def test_sources_live_until_they_were_read_and_no_longer(engine: CompiledCpuEngine) -> None:
    """The library has addresses only: the ticket keeps the memory, until the copy is known to be over."""
    src, dst = torch.ones(4), torch.zeros(4)
    alive = weakref.ref(src)
    ticket = engine.submit(engine.prepare([(src, dst)]))
    del src
    gc.collect()
    assert alive() is not None
    engine.wait(ticket)
    assert alive() is None
    assert dst.tolist() == [1.0] * 4


def test_memory_in_a_plan_outlives_the_tensor_that_had_it(engine: CompiledCpuEngine) -> None:
    """`param.data = ...` after preparing: the plan still reads the old memory, which must not be given back."""
    param, dst = torch.nn.Parameter(torch.ones(1000)), torch.zeros(1000)
    prepared = engine.prepare([(param, dst)])
    param.data = torch.full((1000,), 2.0)
    others = [torch.full((1000,), 3.0) for _ in range(50)]
    engine.wait(engine.submit(prepared))
    assert torch.equal(dst, torch.ones(1000))
    assert others


def test_preparing_makes_no_objects_per_pair(engine: CompiledCpuEngine) -> None:
    """Ten thousand pairs do not call for the garbage collector, whose pass would take longer than the preparation."""
    memory = torch.zeros(2, 10_000, 16)
    pairs = list(zip(memory[0], memory[1], strict=True))
    collections: list[object] = []
    before = gc.get_threshold()

    def note(phase: str, info: object) -> None:
        collections.append((phase, info))

    gc.collect()
    gc.set_threshold(700, 10, 10)
    gc.callbacks.append(note)
    try:
        prepared = engine.prepare(pairs)
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*before)
    assert len(collections) <= 2, "one pass, its start and its end"
    assert isinstance(prepared, PlannedCopies)
    assert prepared.plan is not None
    assert prepared.plan.nbytes == memory[0].nbytes


CHUNK = 2**20


@pytest.fixture
def held(library: Library) -> Iterator[tuple[CompiledCpuEngine, PlannedCopies, Tensor, Tensor]]:
    """An engine in the midst of an operation, and a list of eight chunks."""
    engine = CompiledCpuEngine(library, Arrangement(chunk_nbytes=CHUNK))
    src_U8, dst_U8 = _random_bytes(8 * CHUNK, seed=1), torch.zeros(8 * CHUNK, dtype=torch.uint8)
    engine.enter(PipelinePhase.OPERATION)
    yield engine, engine.prepare([(src_U8, dst_U8)]), src_U8, dst_U8
    engine.close()


def test_what_does_not_fit_into_gaps_is_copied_beside_operations(
    held: tuple[CompiledCpuEngine, PlannedCopies, Tensor, Tensor],
) -> None:
    """Of eight chunks three fit: five are copied at once, and the others when a gap comes."""
    engine, planned, src_U8, dst_U8 = held
    engine.fit_gaps(3 * CHUNK)
    ticket = engine.submit(planned)
    with pytest.raises(TimeoutError):
        ticket.wait(timedelta(seconds=0.3))
    assert engine.gate_counts().beside == 5
    engine.enter(PipelinePhase.GAP)
    ticket.wait(timedelta(seconds=30))
    counts = engine.gate_counts()
    assert (counts.outside, counts.beside, counts.in_gaps) == (0, 5, 3)
    assert torch.equal(dst_U8, src_U8)


def test_nothing_waits_for_a_gap_once_the_optimizer_does(
    held: tuple[CompiledCpuEngine, PlannedCopies, Tensor, Tensor],
) -> None:
    """A fence ends it, with all that was submitted before; so does the end of the engine, and the end of the schedule."""
    engine, planned, src_U8, dst_U8 = held
    engine.fit_gaps(2**62)
    first, second = engine.submit(planned), engine.submit(planned)
    with pytest.raises(TimeoutError):
        first.wait(timedelta(seconds=0.2))
    second.fence()
    assert first.done
    assert torch.equal(dst_U8, src_U8)
    third = engine.submit(planned)
    engine.enter(PipelinePhase.OUTSIDE)
    third.wait(timedelta(seconds=30))
    engine.enter(PipelinePhase.OPERATION)
    fourth = engine.submit(planned)
    engine.close()
    assert fourth.done


def test_gaps_of_a_pass_are_measured(engine: CompiledCpuEngine) -> None:
    """Operations and what is between passes are none."""
    for phase, seconds in [
        *(
            (PipelinePhase.GAP, 0.05),
            (PipelinePhase.OPERATION, 0.6),
            (PipelinePhase.GAP, 0.02),
            (PipelinePhase.OUTSIDE, 0.6),
        ),
        *((PipelinePhase.GAP, 0.01), (PipelinePhase.OPERATION, 0.0)),
    ]:
        engine.enter(phase)
        time.sleep(seconds)
    counts = engine.gate_counts()
    assert counts.passes == 1
    assert 0.07e9 <= counts.gap_ns < 0.6e9


def test_what_only_torch_can_do_keeps_its_place(engine: CompiledCpuEngine) -> None:
    """A list with an unusual conversion runs elsewhere, yet after what came before it and before what follows."""
    dst = torch.zeros(100_000)
    for round_ in range(20):
        first = engine.submit(engine.prepare([(torch.full((100_000,), 1.0 + round_), dst)]))
        second = engine.submit([(torch.full((100_000,), 2.0 + round_, dtype=torch.float64), dst)])
        third = engine.submit(engine.prepare([(torch.full((100_000,), 3.0 + round_), dst)]))
        engine.wait(third)
        assert first.done
        assert second.done
        assert torch.equal(dst, torch.full((100_000,), 3.0 + round_))


def test_close_ends_the_thread_and_the_engine_can_be_used_again(engine: CompiledCpuEngine) -> None:
    """Threads of the library are no Python threads: the kernel knows them."""
    before = _num_threads()
    dst = torch.zeros(4)
    ticket = engine.submit(engine.prepare([(torch.ones(4), dst)]))
    engine.close()
    engine.close()
    assert ticket.done
    ticket.wait()
    assert dst.tolist() == [1.0] * 4
    assert _num_threads() == before
    engine.wait(engine.submit(engine.prepare([(torch.full((4,), 2.0), dst)])))
    assert dst.tolist() == [2.0] * 4


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_gets_a_worker_of_its_own(engine: CompiledCpuEngine) -> None:
    """Threads do not survive a fork; a ticket of the parent is refused, not waited for without end."""
    engine.wait(engine.submit(engine.prepare([(torch.ones(2), torch.zeros(2))])))
    pending = engine.submit(engine.prepare([(torch.ones(2), torch.zeros(2))]))
    child = os.fork()
    if child == 0:
        try:
            dst = torch.zeros(2)
            engine.submit(engine.prepare([(torch.ones(2), dst)])).wait(timedelta(seconds=30))
            with pytest.raises(CheckpointError, match="before a fork"):
                engine.fence(pending)
            engine.close()
            os._exit(0 if dst.tolist() == [1.0, 1.0] else 2)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    engine.wait(pending)


def test_ten_thousand_slices_are_one_call(library: Library) -> None:
    """The plan holds them all; sizes are those of expert biases."""
    memory, slot = _random_bytes(10_000 * 64, 1), torch.zeros(10_000 * 64, dtype=torch.uint8)
    copies = list(zip(memory.view(10_000, 64), slot.view(10_000, 64).flip(0), strict=True))
    compiled, twin = CompiledCpuEngine(library), CpuCopyEngine()
    try:
        ticket = compiled.submit(compiled.prepare(copies))
        compiled.wait(ticket)
        found = slot.clone()
        twin.wait(twin.submit(copies))
        assert torch.equal(found, slot)
    finally:
        compiled.close()
        twin.close()


def test_tensors_of_a_device_are_torchs(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """An address on a device is none that the processor could read."""
    engine = CompiledCpuEngine(library)
    pairs = [(torch.ones(4), torch.zeros(4))]
    assert engine.prepare(pairs).plan is not None
    monkeypatch.setattr(_plan, "_DEVICE", lambda _: torch.device("cuda", 0))
    assert engine.prepare(pairs).plan is None
    engine.wait(engine.submit(pairs))
    assert torch.equal(*pairs[0])
    engine.close()
