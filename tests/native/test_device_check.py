"""A compiled part that gives other bytes than its twins is found out before it is used, and said to be."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from door import compress_with
from torch import Tensor
from typing_extensions import override

from lightning_moe_ckpt.native import (
    AdamState,
    AdamStep,
    CompressedGradient,
    Copy,
    CopyEngine,
    Ticket,
    _adam,
    _choice,
    _doctor,
    _library,
    create_engine,
)
from lightning_moe_ckpt.native._choice import (
    USES,
    CheckFailed,
    DeviceVerdict,
    Use,
    check_compression,
    check_copies,
    check_replay,
    cuda_for,
)
from lightning_moe_ckpt.native._cpu import CompiledCpuEngine, CpuCopyEngine
from lightning_moe_ckpt.native._cuda import CudaCopyEngine
from lightning_moe_ckpt.native._engine import CopyList
from lightning_moe_ckpt.native._gradient import GradientCompression, QuantizedGradient, SparseGradient
from lightning_moe_ckpt.native._library import Library

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
DONE = partial(torch.empty, dtype=torch.uint8)


@pytest.fixture
def library() -> Library:
    library = _library.cpu()
    if library is None:
        pytest.skip(_library.status("cpu").reason)
    return library


# -- the checks themselves, on the CPU in the device's place


class Late(Ticket):
    """Copies when it is waited for, and lets sources be overwritten before that."""

    def __init__(self, copies: Sequence[Copy]) -> None:
        self._copies = copies

    @property
    @override
    def done(self) -> bool:
        return False

    @override
    def fence(self) -> float:
        return 0.0

    @override
    def wait(self, timeout: timedelta | None = None) -> None:
        for src, dst in self._copies:
            dst.copy_(src)


class Never(Late):
    """Does not end."""

    @override
    def wait(self, timeout: timedelta | None = None) -> None:
        assert timeout is not None, "the check waits for ever"
        raise TimeoutError("not done")


class Wrong(CpuCopyEngine):
    """Copies otherwise than it should.

    Args:
        mistake: gets the copies of a list and makes them.
    """

    def __init__(self, mistake: Callable[[list[Copy]], Ticket | None]) -> None:
        super().__init__()
        self._mistake = mistake

    @override
    def submit(self, copies: Sequence[Copy] | CopyList) -> Ticket:
        assert isinstance(copies, CopyList), "what is submitted again and again is what has to be right"
        return self._mistake(list(copies.pairs())) or super().submit([])


def _plain(copies: list[Copy]) -> None:
    for src, dst in copies:
        dst.copy_(src)


def _one_bit(copies: list[Copy]) -> None:
    _plain(copies)
    last = copies[-2][1]
    last[0, -1] ^= 1


def _one_byte_more(copies: list[Copy]) -> None:
    _plain(copies)
    for _, dst in copies:
        if dst.dtype == torch.uint8:
            dst.as_strided((dst.numel() + 1,), (1,))[-1] = 0


def _rows_without_gaps(copies: list[Copy]) -> None:
    for src, dst in copies:
        rows = dst.as_strided((src.numel(),), (1,)) if src.ndim > 1 else dst
        rows.copy_(src.reshape(-1))


def _rounds_to_zero(copies: list[Copy]) -> None:
    for src, dst in copies:
        cut = src.view(torch.int32) & -65536 if dst.dtype == torch.bfloat16 else None
        dst.copy_(src if cut is None else cut.view(torch.float32))


def _large_ones_swapped(copies: list[Copy]) -> None:
    _plain(copies)
    first, second = copies[-4][1], copies[-3][1]
    first[:, :100], second[:, :100] = second[:, :100].clone(), first[:, :100].clone()


def _host_numbers_late(copies: list[Copy]) -> Ticket:
    _plain(copies[:-1])
    return Late(copies[-1:])


@pytest.mark.parametrize("compiled", [False, True], ids=["python", "compiled"])
def test_good_engines_pass(library: Library, compiled: bool) -> None:
    """The bytes are those of torch, whatever the form of a slice."""
    engine: CopyEngine = CompiledCpuEngine(library) if compiled else CpuCopyEngine()
    check_copies(engine, DONE, DONE)
    engine.close()


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (_one_bit, "1 of .* bytes copied to the host differ, the first in .*count=131072"),
        (_one_byte_more, "differ, the first in .*count=1,"),
        (_rows_without_gaps, "differ"),
        (_rounds_to_zero, "differ, the first in .*bfloat16"),
        (_large_ones_swapped, "differ, the first in .*count=100003"),
        (Late, "differ"),
        (_host_numbers_late, "a number on the host arrived as 0.0; it was 7 until after the fence"),
    ],
)
def test_engines_that_copy_otherwise_are_found_out(mistake: Any, said: str) -> None:
    """One bit, one byte too many, strides, rounding, a mix-up, and what is read after the fence."""
    with pytest.raises(CheckFailed, match=said):
        check_copies(Wrong(mistake), DONE, DONE)


def test_an_engine_that_hangs_is_found_out() -> None:
    """The wait has a limit."""
    with pytest.raises(TimeoutError):
        check_copies(Wrong(Never), DONE, DONE)


def test_good_compression_passes(library: Library) -> None:
    """The compiled functions of the CPU, and the twins."""
    check_compression(partial(compress_with, library), CPU)
    check_compression(partial(compress_with, None), CPU)


def _changed(compressed: CompressedGradient, name: str, change: Callable[[Tensor], object]) -> None:
    where = compressed if isinstance(compressed, QuantizedGradient) else compressed.parts[-1]
    tensor = getattr(where, name, None)
    if tensor is not None and len(tensor) > 1:
        change(tensor[: int(where.tiles[-1])] if name in ("values", "indices") and where is not compressed else tensor)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("form", "name", "change"),
    [
        (QuantizedGradient, "values", lambda values: values[-1:].add_(1)),
        (SparseGradient, "values", lambda values: values.view(torch.int16)[-1:].bitwise_xor_(1)),
        (SparseGradient, "indices", lambda indices: indices.copy_(indices.flip(0))),
        (SparseGradient, "tiles", lambda tiles: tiles[1:2].sub_(1)),
        (SparseGradient, "counts", lambda counts: counts[1:].zero_()),
    ],
    ids=["quantum", "half", "order", "tiles", "not-finite"],
)
def test_compression_to_other_bytes_is_found_out(form: type, name: str, change: Callable[[Tensor], object]) -> None:
    """Every field of a record is looked at."""

    def compress(gradients: Sequence[Tensor], how: GradientCompression) -> list[CompressedGradient]:
        found = compress_with(None, gradients, how)
        for compressed in found:
            if isinstance(compressed, form):
                _changed(compressed, name, change)
        return found

    with pytest.raises(CheckFailed, match=f"{form.__name__} that torch writes"):
        check_compression(compress, CPU)


def _replay(state: AdamState, steps: Sequence[AdamStep], *, fused: bool = True) -> None:
    _adam.replay_cpu(state, steps, _adam.Arithmetic(fused=fused, mkl_root=0))


@pytest.mark.usefixtures("library")
def test_a_good_replay_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the library of the CPU bit for bit, without it to rounding."""
    check_replay(_replay, CPU)
    monkeypatch.setattr(_library, "cpu", lambda: None)
    check_replay(_adam.replay_torch, CPU)


def _last_bit_of_moment(state: AdamState, steps: Sequence[AdamStep]) -> None:
    _replay(state, steps)
    state.exp_avg_sq.view(torch.int32)[-1] ^= 1


def _without_last_step(state: AdamState, steps: Sequence[AdamStep]) -> None:
    _replay(state, steps[:-1])


def _without_amsgrad(state: AdamState, steps: Sequence[AdamStep]) -> None:
    _replay(AdamState(state.param, state.exp_avg, state.exp_avg_sq), steps)


def _other_epsilon(state: AdamState, steps: Sequence[AdamStep]) -> None:
    _replay(state, [replace(step, eps=1e-6) for step in steps])


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    "replay",
    [_last_bit_of_moment, _without_last_step, _without_amsgrad, _other_epsilon, partial(_replay, fused=False)],
    ids=["bit", "steps", "amsgrad", "epsilon", "rounding"],
)
def test_a_replay_with_other_bits_is_found_out(replay: Any) -> None:
    """Also where only the rounding of one operation differs."""
    with pytest.raises(CheckFailed, match="is not that of the CPU"):
        check_replay(replay, CPU)


# -- what follows from a verdict


def _fail() -> None:
    raise CheckFailed("other bytes")


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch, library: Library) -> list[Use]:
    """A machine whose CUDA part compresses to other bytes; gets the checks that are made."""
    made: list[Use] = []

    def check(use: Use, part: Library, device: torch.device) -> None:
        made.append(use)
        if use == "compression":
            _fail()

    monkeypatch.setattr(_choice, "_check", check)
    monkeypatch.setattr(_choice, "_verdicts", {})
    monkeypatch.setattr(_library, "cuda", lambda: library)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return made


def test_only_what_fails_is_left_to_the_twins_and_is_said_once(
    checked: list[Use], library: Library, caplog: pytest.LogCaptureFixture
) -> None:
    """Each use is checked when it is first wanted, once per process."""
    with caplog.at_level(logging.WARNING):
        found = {use: [cuda_for(use, CUDA) for _ in range(3)] for use in USES}
    assert found == {"copies": [library] * 3, "compression": [None] * 3, "replay": [library] * 3}
    assert checked == list(USES)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "torch does the compression on cuda:0, the compiled CUDA part fails its check: other bytes"


def test_an_engine_that_fails_its_check_is_not_made(checked: list[Use], monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots go through torch then."""
    monkeypatch.setattr(_choice, "_check", lambda *_: _fail())
    engine = create_engine(CUDA)
    assert type(engine) is CudaCopyEngine
    engine.close()


def test_nothing_is_checked_inside_a_capture(checked: list[Use], monkeypatch: pytest.MonkeyPatch) -> None:
    """The check waits for the device, which a capture does not allow; it is made up for later."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert cuda_for("copies", CUDA) is None
    assert checked == []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert cuda_for("copies", CUDA) is not None


def test_doctor_tells_what_fails(checked: list[Use], monkeypatch: pytest.MonkeyPatch, library: Library) -> None:
    """One line for each device."""
    verdicts = {use: DeviceVerdict(failure=None, seconds=0.002) for use in USES}
    monkeypatch.setattr(_doctor, "verdict", lambda use, *_: verdicts[use])
    monkeypatch.setattr(_doctor, "cuda", lambda: library)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    good = _doctor._devices()
    assert [finding.name for finding in good] == ["CUDA part on cuda:0", "CUDA part on cuda:1"]
    assert {finding.state for finding in good} == {"good"}
    assert good[0].found == "copies, compression, replay give the bits of their twins, checked in 6 ms"
    verdicts["replay"] = DeviceVerdict(failure="`exp_avg` differs", seconds=0.002)
    bad = _doctor._devices()[0]
    assert (bad.state, bad.advice != "") == ("slower", True)
    assert bad.found == "fails its check, torch does this work: replay: `exp_avg` differs"
