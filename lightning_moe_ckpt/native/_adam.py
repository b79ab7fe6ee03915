"""Replay several steps of Adam or AdamW at once, from plain or compressed gradients.

The state is read and written once for all steps; a gradient is expanded one tile at a time. The arithmetic is that of
`torch.optim.Adam` and `AdamW` with `foreach=False`, operation for operation, and on the CPU so are the bits. Two things
depend on torch's build and on the processor: which multiplications and additions are fused, and whether square roots
are MKL's, which are not always correctly rounded. A small probe compares the variants with torch once and takes the
matching variant; without a match torch itself replays. On CUDA the kernel fuses like a CPU with AVX2 and rounds roots
correctly; torch's CUDA optimizers round in other places (relative difference about 1e-6).

Source: TierCheck, section 3.2, "fused multi-step replay". We differ in: the last step is replayed here as well.
"""

from __future__ import annotations

import ctypes as c
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.optim.adam import adam

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.native import _library
from lightning_moe_ckpt.native._cuda import TorchDevice
from lightning_moe_ckpt.native._gradient import (
    DTYPE_CODES,
    CompressedGradient,
    QuantizedGradient,
    SparseGradient,
    decompress_gradient,
)

log = rank_logger(__name__)

_SPARSE, _INT8 = 3, 4


@dataclass(frozen=True, slots=True)
class AdamState:
    """Parameter and moments, float32, contiguous, of one shape, on one device; changed in place."""

    param: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor | None = None
    """Maximum of the second moment; only with `amsgrad`."""

    def tensors(self) -> list[Tensor]:
        return [t for t in (self.param, self.exp_avg, self.exp_avg_sq, self.max_exp_avg_sq) if t is not None]


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamStep:
    """Step of the optimizer, with its settings."""

    gradient: Tensor | CompressedGradient
    """Gradient used by the optimizer; a plain one is float32, bfloat16 or float16 and has the parameter's shape."""
    step: int
    """The optimizer's count after the step: 1 for the first step."""
    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = True
    """Weight decay as in AdamW; otherwise as in Adam, added to the gradient."""
    maximize: bool = False
    kernel: str = ""
    """Kernel of torch that repeats the step, as a type of device and `plain`, `foreach` or `fused`; empty for the plain
    arithmetic in float32, which is repeated by compiled code."""

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ValueError(f"`AdamStep(step={self.step})` must be one or more: it is the count after the step.")

    @property
    def step_size(self) -> float:
        """Learning rate over the bias correction of the first moment."""
        return self.lr / (1 - self.beta1**self.step)

    @property
    def bias2_sqrt(self) -> float:
        """Root of the second moment's bias correction."""
        return float((1 - self.beta2**self.step) ** 0.5)  # as torch has it, whose `**` and `math.sqrt` may differ


class _Step(c.Structure):
    """Mirrors `AdamStep` of gradient.hpp: formed in double, rounded to float once."""

    _fields_ = (
        ("values", c.c_void_p),
        ("indices", c.c_void_p),
        ("tiles", c.c_void_p),
        ("scale", c.c_void_p),
        ("kind", c.c_int32),
        ("maximize", c.c_int32),
        *((name, c.c_float) for name in ("decay", "l2", "lerp", "beta2", "one_minus_beta2")),
        *((name, c.c_float) for name in ("minus_step_size", "bias2_sqrt", "eps")),
    )


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Variant of rounding, which differs between builds of torch."""

    fused: bool
    """Multiplications and additions are fused where torch's vector code fuses them."""
    mkl_root: int
    """Address of MKL's `vmsSqrt`; 0 for correctly rounded square roots."""


@functools.cache
def torch_arithmetic() -> Arithmetic | None:
    """Return the rounding of this torch's Adam; `None` without a library, or if no variant agrees, which is logged."""
    if _library.cpu() is None:
        return None
    for variant in (Arithmetic(fused, root) for root in (_mkl_root(), 0) for fused in (True, False)):
        if all(_agrees(variant, decoupled, beta1) for decoupled in (True, False) for beta1 in (0.9, 0.3)):
            return variant
    log.warning("the compiled Adam replay does not reproduce this build of torch bit for bit; torch replays instead")
    return None


def _mkl_root() -> int:
    """Return the address of torch's own copy of `vmsSqrt`: the same version with the same code path."""
    try:
        function = c.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).vmsSqrt
    except (OSError, AttributeError):  # another file name, or a build without MKL
        return 0
    return c.cast(function, c.c_void_p).value or 0


def _sample(decoupled: bool, beta1: float, numel: int = 4099) -> tuple[AdamState, list[AdamStep]]:
    generator = torch.Generator().manual_seed(1)  # leaves the global generator alone
    draw = functools.partial(torch.randn, numel, generator=generator)
    state = AdamState(draw(), draw() * 0.1, draw().square() * 0.01, draw().square() * 0.01)
    settings = AdamStep(gradient=draw(), step=3, lr=1e-2, beta1=beta1, weight_decay=0.1, decoupled=decoupled)
    return state, [settings, replace(settings, gradient=draw(), step=4)]


def _agrees(variant: Arithmetic, decoupled: bool, beta1: float) -> bool:
    state, steps = _sample(decoupled, beta1)
    want = AdamState(*(t.clone() for t in state.tensors()))
    replay_torch(want, steps)
    replay_cpu(state, steps, variant)
    return all(map(torch.equal, state.tensors(), want.tensors()))


@functools.cache
def repeats(kernel: str, took: str, dtype: torch.dtype) -> bool:
    """Return whether a kernel of torch, on parts of a parameter, gives the bits that kernel `took` gives on the whole."""
    for decoupled in (True, False):
        (whole, steps), (parted, _) = (_sample(decoupled, 0.9, LANES * 64) for _ in range(2))
        whole, parted = (AdamState(*(each.to(dtype) for each in state.tensors())) for state in (whole, parted))
        steps = [replace(step, gradient=step.gradient.to(dtype), kernel=took) for step in steps]  # type: ignore[union-attr]
        replay_kernel(whole, steps)
        for part in (slice(1001), slice(1001, None)):
            own = [replace(step, gradient=step.gradient[part], kernel=kernel) for step in steps]  # type: ignore[index]
            replay_kernel(AdamState(*(each[part] for each in parted.tensors())), own)
        if not all(map(torch.equal, whole.tensors(), parted.tensors())):
            return False
    return True


def replay_kernel(state: AdamState, steps: Sequence[AdamStep]) -> None:
    """Repeat steps in place by the kernel of torch that took them, on its device, whatever the dtype.

    Vector and scalar code may round differently. Kernels leave to scalar code what is too little for a vector at the end
    of a parameter. So parts are filled up, and only parameters that fill vectors may be repeated.
    """
    numel = state.param.numel()
    if steps[0].kernel.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError("These steps were taken on a GPU; repeat them where there is one.")
    device, form = steps[0].kernel.split()
    param, exp_avg, exp_avg_sq, *top = (_filled(tensor).to(device) for tensor in state.tensors())
    for step in steps:
        assert isinstance(step.gradient, Tensor)
        count = torch.tensor(float(step.step - 1), device=device if form == "fused" else "cpu")
        adam(
            *([param], [_filled(step.gradient).to(device)], [exp_avg], [exp_avg_sq], top, [count]),
            foreach=form == "foreach",
            fused=form == "fused",
            amsgrad=bool(top),
            beta1=step.beta1,
            beta2=step.beta2,
            lr=step.lr,
            weight_decay=step.weight_decay,
            eps=step.eps,
            maximize=step.maximize,
            decoupled_weight_decay=step.decoupled,
        )
    for tensor, found in zip(state.tensors(), (param, exp_avg, exp_avg_sq, *top), strict=True):
        tensor.view(-1).copy_(found[:numel])


LANES = 64
"""Elements that fill the vectors of any kernel."""


def _filled(tensor: Tensor) -> Tensor:
    return torch.nn.functional.pad(tensor.detach().reshape(-1), (0, -tensor.numel() % LANES))


def replay_cpu(state: AdamState, steps: Sequence[AdamStep], how: Arithmetic, threads: int = 1) -> None:
    """Replay with the compiled function; `replay_adam` checks the arguments and chooses `how`."""
    library = _library.cpu()
    assert library is not None
    for begin, numel in _parts(state, steps):
        packed = (_Step * len(steps))(*(_pack(step, begin) for step in steps))
        library.moe_adam_replay(*_pointers(state, begin), numel, packed, len(steps), how.fused, how.mkl_root, threads)


def replay_cuda(library: _library.Library, state: AdamState, steps: Sequence[AdamStep]) -> None:
    """Replay with the kernel, on the current stream; `replay_adam` checks the arguments."""
    device = TorchDevice(state.param.device)
    where = (device.index, device.stream())
    for begin, numel in _parts(state, steps):
        packed_U8 = device.upload((_Step * len(steps))(*(_pack(step, begin) for step in steps)))
        library.moe_cuda_adam_replay(*_pointers(state, begin), numel, packed_U8.data_ptr(), len(steps), *where)


def _parts(state: AdamState, steps: Sequence[AdamStep]) -> Iterator[tuple[int, int]]:
    """Yield (begin, size) of intervals that lie within one part of every sparse gradient."""
    sparse = [step.gradient for step in steps if isinstance(step.gradient, SparseGradient)]
    sizes = [part.numel for part in sparse[0].parts] if sparse else [state.param.numel()]
    begin = 0
    for numel in sizes:
        yield begin, numel
        begin += numel


def _pointers(state: AdamState, begin: int) -> tuple[int, int, int, int]:
    top = state.max_exp_avg_sq
    needed = (state.param, state.exp_avg, state.exp_avg_sq)
    first, second, third = (t.data_ptr() + 4 * begin for t in needed)
    return first, second, third, 0 if top is None else top.data_ptr() + 4 * begin


def _pack(step: AdamStep, begin: int) -> _Step:
    packed = _Step(
        maximize=step.maximize,
        decay=1 - step.lr * step.weight_decay if step.decoupled else 1.0,
        l2=0.0 if step.decoupled else step.weight_decay,
        lerp=1 - step.beta1,
        beta2=step.beta2,
        one_minus_beta2=1 - step.beta2,
        minus_step_size=-step.step_size,
        bias2_sqrt=step.bias2_sqrt,
        eps=step.eps,
    )
    gradient = step.gradient
    if isinstance(gradient, QuantizedGradient):
        packed.kind, packed.values, packed.scale = _INT8, gradient.values.data_ptr() + begin, gradient.scale.data_ptr()
    elif isinstance(gradient, SparseGradient):
        part = gradient.parts[begin // gradient.parts[0].numel]
        packed.kind, packed.tiles = _SPARSE, part.tiles.data_ptr()
        packed.values = part.values.data_ptr() or packed.tiles  # where nothing is kept, any address that is not null
        packed.indices = part.indices.data_ptr() or packed.tiles
    else:
        packed.kind = DTYPE_CODES[gradient.dtype]
        packed.values = gradient.data_ptr() + begin * gradient.element_size()
    return packed


def _device_of(gradient: Tensor | CompressedGradient) -> torch.device:
    if isinstance(gradient, Tensor):
        return gradient.device
    return (gradient.parts[0] if isinstance(gradient, SparseGradient) else gradient).values.device


def replay_torch(state: AdamState, steps: Sequence[AdamStep]) -> None:
    """Repeat steps on `state`, in place, by the operations of `torch.optim` with `foreach=False`, in their order."""
    for step in steps:
        dense = step.gradient if isinstance(step.gradient, Tensor) else decompress_gradient(step.gradient)
        gradient = dense.to(torch.float32).view_as(state.param)
        if step.maximize:
            gradient = -gradient
        if step.weight_decay and step.decoupled:
            state.param.mul_(1 - step.lr * step.weight_decay)
        elif step.weight_decay:
            gradient = gradient.add(state.param, alpha=step.weight_decay)
        state.exp_avg.lerp_(gradient, 1 - step.beta1)
        state.exp_avg_sq.mul_(step.beta2).addcmul_(gradient, gradient, value=1 - step.beta2)
        second = state.exp_avg_sq
        if state.max_exp_avg_sq is not None:
            second = torch.maximum(state.max_exp_avg_sq, second, out=state.max_exp_avg_sq)
        under = (second.sqrt() / step.bias2_sqrt).add_(step.eps)
        state.param.addcdiv_(state.exp_avg, under, value=-step.step_size)


def check_replay_arguments(state: AdamState, steps: Sequence[AdamStep]) -> None:
    for name, tensor in zip(("param", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"), state.tensors(), strict=False):
        fits = tensor.shape == state.param.shape and tensor.device == state.param.device
        if tensor.dtype != torch.float32 or not tensor.is_contiguous() or not fits:
            raise ValueError(
                f"`{name}` is {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}; wanted "
                f"contiguous float32 {tuple(state.param.shape)} on {state.param.device}. Replay it with torch.optim instead."
            )
    layouts = set()
    for position, step in enumerate(steps):
        shape = step.gradient.shape
        if shape.numel() != state.param.numel():
            raise ValueError(
                f"The gradient of step {position} has shape {tuple(shape)}, the parameter {tuple(state.param.shape)}."
            )
        if (device := _device_of(step.gradient)) != state.param.device:  # compiled code only sees addresses
            raise ValueError(
                f"The gradient of step {position} is on {device}, the parameter on {state.param.device}; move it there first."
            )
        if isinstance(step.gradient, SparseGradient):
            layouts.add(tuple(part.numel for part in step.gradient.parts))
        elif isinstance(step.gradient, Tensor) and (
            step.gradient.dtype not in DTYPE_CODES or not step.gradient.is_contiguous()
        ):
            raise ValueError(
                f"The gradient of step {position} is {step.gradient.dtype} with strides {step.gradient.stride()}; wanted "
                "contiguous float32, bfloat16 or float16."
            )
    if len(layouts) > 1:
        raise ValueError(f"The sparse gradients are split in different ways, {sorted(layouts)}; compress them alike.")
