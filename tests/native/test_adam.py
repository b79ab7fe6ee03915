"""A fused replay of several steps ends where torch's optimizer ended: on the CPU in every bit."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_moe_ckpt.native import (
    AdamState,
    AdamStep,
    _adam,
    _library,
    compress_gradients,
    decompress_gradient,
    replay_adam,
)
from lightning_moe_ckpt.native._gradient import GradientCompression, SparseGradient, empty_part, empty_quantized


def compiled() -> None:
    if not _library.status("cpu").active:
        pytest.skip(f"the compiled CPU part is not in use: {_library.status('cpu').reason}")


def copy_of(state: AdamState, device: str = "cpu") -> AdamState:
    return AdamState(*(t.to(device, copy=True) for t in state.tensors()))


def equal(left: AdamState, right: AdamState) -> bool:
    pairs = zip(left.tensors(), right.tensors(), strict=True)
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in pairs)


def random_state(numel: int, seed: int = 0, *, amsgrad: bool = False) -> AdamState:
    draw = torch.Generator().manual_seed(seed)
    square = torch.rand(numel, generator=draw) * 1e-3
    top = [square * 1.5] if amsgrad else []
    first = torch.randn(numel, generator=draw)
    return AdamState(first, torch.randn(numel, generator=draw) * 0.1, square, *top)


@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
@pytest.mark.parametrize("amsgrad", [False, True], ids=["plain", "amsgrad"])
@pytest.mark.parametrize("maximize", [False, True], ids=["minimize", "maximize"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("beta1", [0.9, 0.4, 0.0])
def test_a_replay_ends_at_the_bits_of_the_optimizer(
    decoupled: bool, amsgrad: bool, maximize: bool, weight_decay: float, beta1: float
) -> None:
    """The optimizer took the steps one by one, with a schedule; the replay takes them all at once."""
    optimizer_class = torch.optim.AdamW if decoupled else torch.optim.Adam
    param = torch.nn.Parameter(torch.randn(5003))
    start = param.detach().clone()
    optimizer = optimizer_class(
        [param], lr=1.0, betas=(beta1, 0.98), eps=1e-7, weight_decay=weight_decay,
        amsgrad=amsgrad, maximize=maximize, foreach=False,
    )  # fmt: skip
    steps = []
    for number in range(1, 6):
        optimizer.param_groups[0]["lr"] = lr = 1e-2 / number
        param.grad = torch.randn(5003) * 10.0**-number
        steps.append(AdamStep(
            gradient=param.grad.clone(), step=number, lr=lr, beta1=beta1, beta2=0.98, eps=1e-7,
            weight_decay=weight_decay, decoupled=decoupled, maximize=maximize,
        ))  # fmt: skip
        optimizer.step()
    zeros = [torch.zeros(5003) for _ in range(3 if amsgrad else 2)]
    state = AdamState(start, *zeros)
    replay_adam(state, steps)
    kept = optimizer.state[param]
    names = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if amsgrad else [])]
    assert equal(state, AdamState(param.detach(), *(kept[name] for name in names)))


def test_the_compiled_replay_is_the_one_in_use() -> None:
    """The probe found torch's arithmetic, so the test above compared the compiled code and not torch with itself."""
    compiled()
    assert _adam.torch_arithmetic() is not None


def test_another_rounding_would_be_noticed() -> None:
    """What the probe decides by differs between the variants."""
    compiled()
    right = _adam.torch_arithmetic()
    assert right is not None
    wrong = _adam.Arithmetic(not right.fused, right.mkl_root)
    state, other = random_state(5000), random_state(5000)
    steps = [AdamStep(gradient=torch.randn(5000), step=2, lr=1e-2)]
    _adam.replay_cpu(state, steps, right)
    _adam.replay_cpu(other, steps, wrong)
    assert not equal(state, other)


def test_other_builds_of_torch_are_followed_and_no_threads_are_left() -> None:
    """torch without AVX2 fuses nothing, and the probe sees that; MKL opens no pool for each of our threads."""
    compiled()
    code = """
import os, sys, time, torch, types
sys.modules["lightning_moe_ckpt"] = package = types.ModuleType("lightning_moe_ckpt")
package.__path__ = [sys.argv[1]]  # without what it imports itself, which is Lightning and takes seconds
from lightning_moe_ckpt.native import AdamState, AdamStep, _adam, replay_adam
state = AdamState(*(torch.rand(1_000_000) for _ in range(3)))
step = AdamStep(gradient=torch.rand(1_000_000), step=1, lr=0.1)
def tasks():  # the kernel lists a thread for a moment after it was joined
    return min((time.sleep(0.01), len(os.listdir("/proc/self/task")))[1] for _ in range(50))
replay_adam(state, [step], threads=3)
before = tasks()
for _ in range(5):
    replay_adam(state, [step], threads=3)
print(_adam.torch_arithmetic().fused, tasks() - before)
"""
    environment = {"ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "4", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(Path(_adam.__file__).parents[1])],
        env=environment,
        capture_output=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.decode().split() == ["False", "0"]


@st.composite
def runs(draw: st.DrawFn) -> tuple[AdamState, list[AdamStep]]:
    """State and steps of odd sizes, with every form of gradient, and values that overflow."""
    numel, seed = draw(st.integers(1, 9000)), draw(st.integers(0, 2**32))
    state = random_state(numel, seed, amsgrad=draw(st.booleans()))
    generator = torch.Generator().manual_seed(seed + 1)
    steps = []
    for number in range(1, draw(st.integers(1, 4)) + 1):
        gradient = torch.randn(numel, generator=generator) * draw(st.sampled_from([1e-3, 1.0, 1e20]))
        if draw(st.booleans()):
            gradient[draw(st.integers(0, numel - 1))] = draw(st.sampled_from([math.nan, math.inf, -0.0]))
        form = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, "int8", "sparse"]))
        how = GradientCompression(small_numel=0 if form == "sparse" else 10**9, keep_ratio=0.2, capacity_ratio=0.3)
        compressed = compress_gradients([gradient], how, part_numel=4096)[0]
        steps.append(AdamStep(
            gradient=gradient.to(form) if isinstance(form, torch.dtype) else compressed, step=number, lr=1e-2,
            weight_decay=draw(st.sampled_from([0.0, 0.1])), decoupled=draw(st.booleans()), maximize=draw(st.booleans()),
        ))  # fmt: skip
    return state, steps


def bits_or_nan(left: Tensor, right: Tensor) -> bool:
    """Equal bits; a NaN equals any NaN, whose sign and payload no instruction set promises."""
    same = (left.view(torch.int32) == right.view(torch.int32)) | (left.isnan() & right.isnan())
    return bool(same.all())


@given(runs(), st.integers(1, 3))
def test_the_compiled_replay_equals_its_twin(run: tuple[AdamState, list[AdamStep]], threads: int) -> None:
    """Dense, INT8 and sparse gradients, mixed, any size, any number of threads."""
    state, steps = run
    want = copy_of(state)
    _adam.replay_torch(want, steps)
    replay_adam(state, steps, threads=threads)
    assert all(itertools.starmap(bits_or_nan, zip(state.tensors(), want.tensors(), strict=True)))


def test_steps_in_batches_end_where_steps_one_by_one_do() -> None:
    """How many steps are fused is no part of the result."""
    gradients = [torch.randn(300_001) for _ in range(6)]
    steps = [AdamStep(gradient=g, step=i, lr=1e-2) for i, g in enumerate(compress_gradients(gradients), 1)]
    whole, pieces = random_state(300_001), random_state(300_001)
    replay_adam(whole, steps)
    for step in steps:
        replay_adam(pieces, [step])
    assert equal(whole, pieces)


def test_a_lossless_replay_and_a_compressed_one_differ_by_what_was_dropped() -> None:
    """The dense form of a compressed gradient replays to the same bits as the compressed form."""
    compressed = compress_gradients([torch.randn(200_000)])[0]
    one, two = random_state(200_000), random_state(200_000)
    replay_adam(one, [AdamStep(gradient=compressed, step=1, lr=1e-2)])
    replay_adam(two, [AdamStep(gradient=decompress_gradient(compressed), step=1, lr=1e-2)])
    assert equal(one, two)


def test_other_threads_run_during_a_replay() -> None:
    """The lock of the interpreter is not held."""
    compiled()
    state = AdamState(*(torch.rand(4_000_000) for _ in range(3)))
    steps = [AdamStep(gradient=torch.rand(4_000_000), step=i, lr=0.1) for i in range(1, 9)]
    _adam.torch_arithmetic()
    seen, done = [0], threading.Event()

    def count() -> None:
        while not done.is_set():
            seen[0] += 1

    counter = threading.Thread(target=count)
    counter.start()
    before = seen[0]
    replay_adam(state, steps, threads=1)
    during = seen[0] - before
    done.set()
    counter.join()
    assert during > 1000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: AdamState(s.param.double(), s.exp_avg, s.exp_avg_sq), "`param` is torch.float64"),
        (lambda s: AdamState(s.param, s.exp_avg[:5], s.exp_avg_sq), r"`exp_avg` is torch.float32 \(5,\)"),
        (lambda s: AdamState(s.param, s.exp_avg, torch.rand(20)[::2]), r"`exp_avg_sq` .* strides \(2,\)"),
    ],
)
def test_a_state_that_does_not_fit_is_named(change: object, message: str) -> None:
    """Nothing is changed before everything was checked."""
    assert callable(change)
    state = change(random_state(10))
    before = copy_of(state)
    with pytest.raises(ValueError, match=message):
        replay_adam(state, [AdamStep(gradient=torch.rand(10), step=1, lr=0.1)])
    assert all(map(torch.equal, state.tensors(), before.tensors()))


def test_a_gradient_that_does_not_fit_is_named() -> None:
    """By the position of its step."""
    good = AdamStep(gradient=torch.rand(10), step=1, lr=0.1)
    for bad, message in ((torch.rand(9), r"step 1 has shape \(9,\)"), (torch.rand(20)[::2], "step 1 is torch.float32")):
        state = random_state(10)
        with pytest.raises(ValueError, match=message):
            replay_adam(state, [good, AdamStep(gradient=bad, step=2, lr=0.1)])
        assert equal(state, random_state(10))
    elsewhere = torch.rand(10, device="meta")
    how = GradientCompression(small_numel=0)
    for away in (
        elsewhere,
        empty_quantized(elsewhere),
        SparseGradient((empty_part(10, elsewhere.device, how),), elsewhere.shape),
    ):
        with pytest.raises(ValueError, match="step 1 is on meta, the parameter on cpu"):
            replay_adam(random_state(10), [good, AdamStep(gradient=away, step=2, lr=0.1)])
    with pytest.raises(ValueError, match=r"AdamStep\(step=0\)"):
        AdamStep(gradient=torch.rand(1), step=0, lr=0.1)


@pytest.mark.gpu
@given(runs())
def test_the_kernel_computes_what_the_cpu_computes(run: tuple[AdamState, list[AdamStep]]) -> None:
    """With the fused multiply-adds of AVX2 and correctly rounded roots."""
    state, steps = run
    device = copy_of(state, "cuda")
    moved = [_to_cuda(step) for step in steps]
    replay_adam(device, moved)
    _adam.replay_cpu(state, steps, _adam.Arithmetic(fused=True, mkl_root=0))
    got = [t.cpu() for t in device.tensors()]
    assert all(itertools.starmap(bits_or_nan, zip(got, state.tensors(), strict=True)))


def _to_cuda(step: AdamStep) -> AdamStep:
    """The same step with its gradient on the device, in the same form."""
    import dataclasses

    def move(value: object) -> object:
        if isinstance(value, Tensor):
            return value.cuda()
        if isinstance(value, tuple) and not isinstance(value, torch.Size):
            return tuple(map(move, value))
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {field.name: move(getattr(value, field.name)) for field in dataclasses.fields(value)}
            return type(value)(**fields)
        return value

    moved = move(step)
    assert isinstance(moved, AdamStep)
    return moved
