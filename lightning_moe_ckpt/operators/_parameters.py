"""A module's parameters: their index by first name, and those of which forward and backward only need a low-precision copy.

A slice is a flat interval of a contiguous tensor. A parameter without such intervals is refused before training starts,
with its name and the reason. Parameters that share bytes are found by storage, not by module type. One level of a module is
read here too: its children and own parameters, including what `named_children` leaves out.

Under autocast an fp32 master is often only read through a cast; then storing the cast is exact and half the size. Which
parameters these are depends on their use (a gate inside or outside autocast, an embedding that is added to something),
not on the module's type. So a probe watches every operation that reads a parameter: views are neutral, a cast to
the autocast precision is evidence for, anything else is evidence against. Without any cast a parameter keeps its
precision. A parameter is judged as a whole: one expert's use of a stacked tensor counts for all. Operations outside torch's
dispatcher (a Triton kernel given a raw pointer) are not seen; a parameter read only there keeps its precision.

Source: MoEvement (2026), Sec. 3.3, assumes fp16 weights throughout; we differ in watching.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import Self, override

from lightning_moe_ckpt.errors import UnknownLayout
from lightning_moe_ckpt.operators._boxes import box_of, memory_of

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
STORED_DTYPES = (*_DTYPES, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool)
"""Types of parameters that do not train, such as quantised weights."""
_MAX_NAMED = 8


class ParameterIndex:
    """The parameters of `module`, the model as it will train, validated. Raises `UnknownLayout` for one that is no flat interval of memory,
    with its name and the reason.
    """

    def __init__(self, module: nn.Module) -> None:
        self.params: dict[str, nn.Parameter] = {}
        """Parameters by first name, in the order of `named_parameters()`."""
        self._names: dict[int, str] = {}
        for fqn, param in module.named_parameters(remove_duplicate=False):
            if id(param) not in self._names:
                self._names[id(param)] = fqn
                self.params[fqn] = param
        reasons = {fqn: reason for fqn, param in self.params.items() if (reason := _refusal(param))}
        if reasons:
            named = [f"`{fqn}` {reason}" for fqn, reason in list(reasons.items())[:_MAX_NAMED]]
            more = f" (and {len(reasons) - _MAX_NAMED} more)" if len(reasons) > _MAX_NAMED else ""
            raise UnknownLayout(
                f"These parameters cannot be captured exactly, slice by slice: {'; '.join(named)}{more}. Convert them before "
                "fit, or keep what is not trained in buffers."
            )

    def name(self, param: Tensor) -> str:
        """Return the first name of a parameter. Raises `KeyError` if it is not the module's."""
        return self._names[id(param)]

    def under(self, prefix: str) -> dict[str, nn.Parameter]:
        """Return the parameters whose first name lies in the module `prefix`."""
        head = join(prefix, "")
        return {fqn: param for fqn, param in self.params.items() if fqn.startswith(head)}

    def sharing(self) -> Iterator[tuple[str, ...]]:
        """Yield groups of two or more parameters whose bytes overlap, e.g. two `nn.Parameter` over one tensor.

        Disjoint pieces of one storage (a flattened RNN) do not share. A parameter with two names appears once in
        `params` and forms no group.
        """
        for intervals in _by_storage(self.params).values():
            yield from _overlapping(sorted(intervals))


def _by_storage(params: Mapping[str, Tensor]) -> dict[tuple[str, int], list[tuple[int, int, str]]]:
    """Return the bytes on this rank of each parameter, from first to one past the last, with its name, by storage."""
    found: dict[tuple[str, int], list[tuple[int, int, str]]] = defaultdict(list)
    for fqn, memory in ((fqn, memory_of(param)) for fqn, param in params.items()):
        if memory.numel():
            found[storage_key(memory)].append((*byte_interval(memory), fqn))
    return found


def storage_key(tensor: Tensor) -> tuple[str, int]:
    """Return a key of the memory under a tensor. Tensors without memory (meta) never share."""
    storage = tensor.untyped_storage()
    if tensor.device.type == "meta":
        return "meta", int(storage._cdata)  # noqa: SLF001  # the storage object itself: it has no address
    return str(tensor.device), storage.data_ptr()


def byte_interval(tensor: Tensor) -> tuple[int, int]:
    """Return first and one past the last byte of a tensor in its storage; the tensor must have elements."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset())
    return start * tensor.element_size(), (start + int(last) + 1) * tensor.element_size()


def child_slots(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return direct children by name: a module may appear under two names, and an empty place is `None`."""
    return dict(module._modules)  # noqa: SLF001  # named_children drops empty places and second names


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that the module owns itself, by attribute name."""
    return {name: param for name, param in module._parameters.items() if param is not None}  # noqa: SLF001  # as above


def join(prefix: str, name: str) -> str:
    """Return the name in the model of `name` in the module `prefix`, empty for the model itself."""
    return f"{prefix}.{name}" if prefix else name


def _refusal(param: nn.Parameter) -> str | None:
    if type(param).__name__ == "UninitializedParameter":
        return "has no shape yet; run one forward before fit"
    if getattr(param, "_is_flat_param", False) or getattr(param, "_fsdp_flattened", False):
        return "belongs to a flat parameter of FSDP1, whose shards cut through operators; `fully_shard` in place of it is supported"
    if type(param) is nn.Parameter:
        return _layout_refusal(param, trains=param.requires_grad)
    memory, box = memory_of(param), box_of(param)
    if box is not None and memory.shape != box.size:
        return f"is a DTensor of which this rank has {list(memory.shape)} in place of {list(box.size)}; not supported"
    if type(memory) is not Tensor:
        return f"is a tensor subclass ({type(memory).__name__}), whose bytes are not one flat interval; not supported"
    return _layout_refusal(memory, trains=param.requires_grad)


def _layout_refusal(param: Tensor, *, trains: bool) -> str | None:
    if param.layout is not torch.strided:
        return f"has layout {param.layout}; only strided tensors are supported"
    if param.dtype not in (_DTYPES if trains else STORED_DTYPES):
        return f"has dtype {param.dtype} (quantised or complex); supported are float32, float64, bfloat16, float16, float8_e4m3fn, float8_e5m2"
    if not param.is_contiguous():
        return "is not contiguous (channels_last?); make it so with `.contiguous()` before fit"
    return None


def _overlapping(intervals: list[tuple[int, int, str]]) -> Iterator[tuple[str, ...]]:
    group, reach = [intervals[0][2]], intervals[0][1]
    for start, stop, fqn in intervals[1:]:
        if start >= reach:
            if len(group) > 1:
                yield tuple(group)
            group = []
        group.append(fqn)
        reach = max(reach, stop)
    if len(group) > 1:
        yield tuple(group)


_TO_COPY = torch.ops.aten._to_copy.default  # noqa: SLF001  # what `.to(dtype)` and autocast become
_EMPTY = ("empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_empty_strided")
_METADATA_ONLY = frozenset(f"aten::{name}" for name in (*_EMPTY, "new_zeros", "new_ones", "new_full"))
"""Operations that read shape and dtype of their argument, never its values."""


class ComputeDtypeProbe(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves these untyped
    """Context manager that watches operations under mixed precision; evidence of several iterations adds up. Without an
    `autocast_dtype` (`torch.bfloat16` or `torch.float16`) nothing is watched.

    Every operation is called unchanged: results, RNG and counters stay the same. Pause the probe around code that reads
    parameters outside of forward and backward: the optimizer step, snapshots, logging of weights. Parameters are looked
    up again whenever recording starts.
    """

    def __init__(self, module: nn.Module, autocast_dtype: torch.dtype | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._params = dict(module.named_parameters())
        self._low = autocast_dtype
        self._cast = set[str]()
        self._reasons: dict[str, set[str]] = defaultdict(set)
        self._memory: dict[tuple[str, int], list[tuple[int, int, str]]] = {}
        self._recording = False

    @override
    def __enter__(self) -> Self:
        self.resume()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    @override
    def __exit__(self, *exc: object) -> None:
        self.pause()
        super().__exit__(*exc)  # type: ignore[no-untyped-call]

    def pause(self) -> None:
        """Stop recording; operations still pass through."""
        self._recording = False

    def resume(self) -> None:
        """Start recording."""
        # Those that could be stored in less. Of a DTensor forward reads a whole copy, in other memory.
        wide = {fqn: param for fqn, param in self._params.items() if param.dtype in (torch.float32, torch.float64)}
        plain = {fqn: param for fqn, param in wide.items() if not isinstance(param, DTensor)}
        self._memory = {} if self._low is None else _by_storage(plain)
        self._recording = bool(self._memory)

    def verdict(self) -> dict[str, torch.dtype]:
        """Return the dtype in which a COMPUTE record of each parameter is exact, by first name."""
        low = {fqn: self._low for fqn in self._cast if fqn not in self._reasons and self._low is not None}
        return {fqn: low.get(fqn, param.dtype) for fqn, param in self._params.items()}

    def reasons(self) -> Mapping[str, frozenset[str]]:
        """Return the operations that needed the full precision, by parameter."""
        return {fqn: frozenset(ops) for fqn, ops in self._reasons.items()}

    @override
    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self._recording:
            for fqn in set(self._read([*args, *kwargs.values()])):
                self._record(func, fqn, out)
        return out

    def _read(self, values: Sequence[Any]) -> Iterator[str]:
        """Yield the parameters whose bytes lie under any tensor among the arguments."""
        for value in values:
            if isinstance(value, list | tuple):
                yield from self._read(value)
            elif type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided and value.numel():
                start, stop = byte_interval(value)
                intervals = self._memory.get(storage_key(value), ())
                yield from (fqn for first, last, fqn in intervals if first < stop and start < last)

    def _record(self, func: Any, fqn: str, out: Any) -> None:
        if func is _TO_COPY and isinstance(out, Tensor) and out.dtype == self._low:
            self._cast.add(fqn)
        elif not _is_neutral(func):
            self._reasons[fqn].add(str(func))


@cache
def _is_neutral(func: Callable[..., Any]) -> bool:
    """Return whether an operation does not read values: a view, or an operation that reads only the shape."""
    if (schema := getattr(func, "_schema", None)) is None:
        return False
    aliased = [argument.alias_info for argument in schema.arguments if argument.alias_info is not None]
    return schema.name in _METADATA_ONLY or (bool(aliased) and not any(alias.is_write for alias in aliased))
